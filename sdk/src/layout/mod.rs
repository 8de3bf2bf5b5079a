//! The one byte layout of a shard: a `.distcp` object that stock PyTorch reads, whose tensor bytes lie at fixed offsets.
//!
//! A record is `zip header | raw tensor bytes | trailer`, so `torch.load` of the record's range gives the tensor back.
//! Everything but the tensor bytes depends on (dtype, shape) alone: offsets are equal from step to step, frames are
//! written once per slot, and what lies between records is zero. Byte items (bytes of a `torch.save`) follow as they are.

mod dtype;
mod pickle;
mod zip;

pub use dtype::{DType, UnknownDType};

use thiserror::Error;

/// Data of a tensor of at least [`LARGE_BYTES`] begins at a multiple of this, the page size.
pub const LARGE_ALIGNMENT: u64 = 4096;
/// Data of a smaller tensor begins at a multiple of this, a cache line.
pub const SMALL_ALIGNMENT: u64 = 64;
/// From here on a page of padding costs less than a sixteenth.
pub const LARGE_BYTES: u64 = 64 << 10;

/// A tensor to place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: DType,
    /// Sizes of a contiguous tensor; empty for a scalar.
    pub shape: Vec<u64>,
}

/// Where a record lies in the shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// First byte of the record: what stock readers are told.
    pub offset: u64,
    /// Bytes of the record.
    pub length: u64,
    /// First byte of the tensor's own bytes.
    pub data_offset: u64,
    /// The tensor's own bytes.
    pub data_length: u64,
}

/// Bytes that are the same at every step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Where.
    pub offset: u64,
    /// What.
    pub bytes: Vec<u8>,
}

/// Tensors that cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// More bytes than an object can have.
    #[error("expected tensors of less than 2^62 bytes in all, got a shape {shape:?} beyond it")]
    TooLarge { shape: Vec<u64> },
}

/// A shard's records in the order given, and the frames around their data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// One per tensor.
    pub records: Vec<Record>,
    /// Headers, trailers and the zeros between records; with the data they cover `start..end` whole.
    pub frames: Vec<Piece>,
    /// First byte behind the last record.
    pub end: u64,
}

impl Layout {
    /// Places tensors one after the other from `start` on.
    ///
    /// # Errors
    /// [`LayoutError::TooLarge`] if a size is absurd.
    pub fn new(tensors: &[TensorSpec], start: u64) -> Result<Self, LayoutError> {
        let mut layout = Self {
            records: Vec::with_capacity(tensors.len()),
            frames: Vec::new(),
            end: start,
        };
        for tensor in tensors {
            layout.place(tensor)?;
        }
        Ok(layout)
    }

    fn place(&mut self, tensor: &TensorSpec) -> Result<(), LayoutError> {
        let data_length = tensor.bytes().ok_or_else(|| tensor.too_large())?;
        let frame = zip::Frame::new(tensor.dtype, &tensor.shape, data_length);
        let header_length = frame.header.len() as u64;
        let alignment = if data_length >= LARGE_BYTES {
            LARGE_ALIGNMENT
        } else {
            SMALL_ALIGNMENT
        };
        let data_offset = (self.end + header_length).next_multiple_of(alignment);
        let offset = data_offset - header_length;
        let mut head = vec![0; (offset - self.end) as usize];
        head.extend_from_slice(&frame.header);
        let trailer_offset = data_offset + data_length;
        let end = trailer_offset + frame.trailer.len() as u64;
        if end > 1 << 62 {
            return Err(tensor.too_large());
        }
        self.frames.push(Piece {
            offset: self.end,
            bytes: head,
        });
        self.frames.push(Piece {
            offset: trailer_offset,
            bytes: frame.trailer,
        });
        self.records.push(Record {
            offset,
            length: end - offset,
            data_offset,
            data_length,
        });
        self.end = end;
        Ok(())
    }
}

impl TensorSpec {
    /// Bytes of the elements, unless they are more than can be.
    pub fn bytes(&self) -> Option<u64> {
        let bytes = self
            .shape
            .iter()
            .try_fold(self.dtype.bytes(), |product, size| {
                product.checked_mul(*size)
            });
        bytes.filter(|bytes| *bytes < 1 << 62)
    }

    fn too_large(&self) -> LayoutError {
        LayoutError::TooLarge {
            shape: self.shape.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(dtype: &str, shape: &[u64]) -> TensorSpec {
        TensorSpec {
            dtype: dtype.parse().unwrap(),
            shape: shape.to_vec(),
        }
    }

    #[test]
    fn data_is_aligned_and_pieces_cover_the_shard_without_overlap() {
        let tensors = [
            spec("float32", &[1000, 100]),
            spec("bfloat16", &[]),
            spec("float8_e4m3fn", &[0, 3]),
            spec("uint16", &[17]),
            spec("bool", &[1 << 17]),
        ];
        let layout = Layout::new(&tensors, 0).unwrap();
        let mut spans: Vec<(u64, u64)> = layout
            .frames
            .iter()
            .map(|p| (p.offset, p.bytes.len() as u64))
            .collect();
        spans.extend(
            layout
                .records
                .iter()
                .map(|r| (r.data_offset, r.data_length)),
        );
        spans.sort_unstable();
        let mut at = 0;
        for (offset, length) in spans {
            assert_eq!(offset, at);
            at += length;
        }
        assert_eq!(at, layout.end);
        for record in &layout.records {
            let alignment = if record.data_length >= LARGE_BYTES {
                LARGE_ALIGNMENT
            } else {
                SMALL_ALIGNMENT
            };
            assert_eq!(record.data_offset % alignment, 0);
            assert_eq!(record.offset % SMALL_ALIGNMENT, 0);
        }
        assert_eq!(layout, Layout::new(&tensors, 0).unwrap());
    }

    #[test]
    fn absurd_shapes_are_refused() {
        for shape in [vec![u64::MAX, 2], vec![1 << 62], vec![1 << 40, 1 << 40]] {
            assert!(Layout::new(&[spec("float32", &shape)], 0).is_err());
        }
    }
}
