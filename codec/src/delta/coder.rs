//! Makes a record in a given encoding, and takes one apart.

use std::ops::Range;

use super::pack::Packer;
use super::record::{CHUNK_BYTES_MAX, Record, header, size, within};
use super::{Arithmetic, DeltaError, ElementSize, Encoding, moved, planes};

/// Bytes of an earlier step's shard, from an offset on.
#[derive(Clone, Copy, Debug)]
pub struct Basis<'a> {
    /// Offset of the first byte in the shard.
    pub start: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

impl<'a> Basis<'a> {
    /// Those of a range of the shard.
    ///
    /// # Errors
    /// [`DeltaError::Basis`] if they are not all here.
    pub fn cut(&self, range: &Range<u64>) -> Result<&'a [u8], DeltaError> {
        let found = self.get(range);
        found.ok_or(DeltaError::Basis {
            expected_start: range.start,
            expected_length: range.end.saturating_sub(range.start),
            got_start: self.start,
            got_length: self.bytes.len() as u64,
        })
    }

    pub(super) fn get(&self, range: &Range<u64>) -> Option<&'a [u8]> {
        let from = usize::try_from(range.start.checked_sub(self.start)?).ok()?;
        let to = usize::try_from(range.end.checked_sub(self.start)?).ok()?;
        self.bytes.get(from..to)
    }
}

/// Makes records and takes them apart; keeps its buffers and contexts from one to the next.
pub struct Coder {
    packer: Packer,
    planes: Vec<u8>,
}

impl Coder {
    /// With its contexts.
    ///
    /// # Errors
    /// [`DeltaError::Packed`] if there is no memory for them.
    pub fn new() -> Result<Self, DeltaError> {
        Ok(Self {
            packer: Packer::new()?,
            planes: Vec::new(),
        })
    }

    /// Appends the record of `chunk`, which begins at `start` in its shard, to `out`.
    ///
    /// # Errors
    /// [`DeltaError`] if the chunk is too long, the basis does not have what the encoding needs, a clean chunk is none,
    /// or VCDIFF cannot express it. `out` is as before then.
    pub fn encode(
        &mut self,
        encoding: Encoding,
        start: u64,
        chunk: &[u8],
        basis: Option<Basis<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<(), DeltaError> {
        within("a chunk", chunk.len() as u64, CHUNK_BYTES_MAX)?;
        let place = start..start + chunk.len() as u64;
        let before = out.len();
        out.extend_from_slice(&header(encoding, 0, 0..0, 0));
        let body = out.len();
        let outcome = self.payload(encoding, &place, chunk, basis, out);
        let needs = match outcome {
            Ok(needs) => needs,
            Err(error) => {
                out.truncate(before);
                return Err(error);
            }
        };
        let header = header(encoding, chunk.len(), needs, out.len() - body);
        out[before..body].copy_from_slice(&header);
        Ok(())
    }

    /// Appends the record of a chunk that the caller knows, by its digest, to be as the basis has it: no byte of either
    /// is read.
    ///
    /// # Errors
    /// [`DeltaError::TooLong`] if no chunk is that long.
    pub fn encode_clean(place: Range<u64>, out: &mut Vec<u8>) -> Result<(), DeltaError> {
        let length = place.end.saturating_sub(place.start);
        within("a chunk", length, CHUNK_BYTES_MAX)?;
        out.extend_from_slice(&header(Encoding::Clean, length as usize, place, 0));
        Ok(())
    }

    /// Appends the payload; says what it needs of the basis.
    fn payload(
        &mut self,
        encoding: Encoding,
        place: &Range<u64>,
        chunk: &[u8],
        basis: Option<Basis<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<Range<u64>, DeltaError> {
        let basis = basis.ok_or(DeltaError::NoBasis(encoding.kind().name()));
        match encoding {
            Encoding::Raw => out.extend_from_slice(chunk),
            Encoding::Packed => self.packer.pack(chunk, out)?,
            Encoding::Clean => {
                let same = basis?.cut(place)? == chunk;
                return same.then(|| place.clone()).ok_or(DeltaError::NotClean);
            }
            Encoding::Difference(element, arithmetic) => {
                let old = basis?.cut(place)?;
                planes::split(old, chunk, element, arithmetic, &mut self.planes);
                let (planes, tail) = self.planes.split_at(planes::whole(chunk.len(), element));
                for plane in planes.chunks((planes.len() / element.bytes()).max(1)) {
                    self.packer.pack_plane(plane, out)?;
                }
                out.extend_from_slice(tail);
                return Ok(place.clone());
            }
            Encoding::Moved => {
                let basis = basis?;
                out.extend_from_slice(&moved::encode(chunk, basis.bytes)?);
                return Ok(basis.start..basis.start + basis.bytes.len() as u64);
            }
        }
        Ok(0..0)
    }

    /// The chunk of a record into `out`, which has its length. The caller has checked where the record comes from (a
    /// digest over it), and checks the chunk that comes out.
    ///
    /// # Errors
    /// [`DeltaError`] if the record is damaged or the basis has not what it needs.
    pub fn decode(
        &mut self,
        record: &Record<'_>,
        basis: Option<Basis<'_>>,
        out: &mut [u8],
    ) -> Result<(), DeltaError> {
        if out.len() != record.length() {
            return Err(size("a chunk", record.length() as u64, out.len()));
        }
        let needed = match (record.needs(), basis) {
            (None, _) => &[][..],
            (Some(needs), Some(basis)) => basis.cut(&needs)?,
            (Some(_), None) => return Err(DeltaError::NoBasis(record.encoding().kind().name())),
        };
        match record.encoding() {
            Encoding::Raw => out.copy_from_slice(record.payload()),
            Encoding::Clean => out.copy_from_slice(needed),
            Encoding::Packed => self.packer.unpack("a chunk", record.payload(), out)?,
            Encoding::Moved => {
                out.copy_from_slice(&moved::decode(record.payload(), needed, out.len())?);
            }
            Encoding::Difference(element, arithmetic) => {
                self.join(record.payload(), needed, element, arithmetic, out)?;
            }
        }
        Ok(())
    }

    fn join(
        &mut self,
        payload: &[u8],
        old: &[u8],
        element: ElementSize,
        arithmetic: Arithmetic,
        out: &mut [u8],
    ) -> Result<(), DeltaError> {
        let whole = planes::whole(out.len(), element);
        self.planes.clear();
        self.planes.resize(out.len(), 0);
        let (planes, tail) = self.planes.split_at_mut(whole);
        let mut rest = payload;
        for plane in planes.chunks_mut((whole / element.bytes()).max(1)) {
            rest = self.packer.unpack_plane(rest, plane)?;
        }
        if rest.len() != tail.len() {
            return Err(size("a tail", tail.len() as u64, rest.len()));
        }
        tail.copy_from_slice(rest);
        planes::join(old, &self.planes, element, arithmetic, out);
        Ok(())
    }
}
