//! A record: one chunk in one encoding. A header of 24 bytes, then the payload.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0 | version, 1 |
//! | 1 | kind: 0 clean, 1 difference, 2 moved, 3 packed, 4 raw |
//! | 2 | element size of a difference, else 0 |
//! | 3 | arithmetic of a difference: 0 XOR, 1 subtract; else 0 |
//! | 4..8 | bytes of the chunk, u32 |
//! | 8..16 | where the bytes of the basis begin that the record needs, u64; 0 if none |
//! | 16..20 | how many of them, u32; 0 if none |
//! | 20..24 | bytes of the payload, u32 |

use std::ops::Range;

use super::{Arithmetic, DeltaError, ElementSize, Encoding};

/// Bytes of a record's header.
pub const RECORD_HEADER_BYTES: usize = 24;

/// The longest chunk.
pub(super) const CHUNK_BYTES_MAX: u64 = 4 << 20;
/// The most bytes of a basis that one record may need: a chunk and one on either side.
pub(super) const BASIS_BYTES_MAX: u64 = 3 * CHUNK_BYTES_MAX;
/// The longest payload: raw, or what packing could not shrink with its own headers.
const PAYLOAD_BYTES_MAX: u64 = CHUNK_BYTES_MAX + (CHUNK_BYTES_MAX >> 4) + 1024;
const VERSION: u8 = 1;

/// What a record holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// Nothing: the chunk is as the basis has it.
    Clean,
    /// Planes of an element-wise difference.
    Difference,
    /// VCDIFF.
    Moved,
    /// zstd of the chunk.
    Packed,
    /// The chunk.
    Raw,
}

impl Kind {
    /// Every kind, in the order of their numbers.
    pub const ALL: [Self; 5] = [
        Self::Clean,
        Self::Difference,
        Self::Moved,
        Self::Packed,
        Self::Raw,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Difference => "difference",
            Self::Moved => "moved",
            Self::Packed => "packed",
            Self::Raw => "raw",
        }
    }

    fn number(self) -> u8 {
        self as u8
    }

    fn from_number(number: u8) -> Result<Self, DeltaError> {
        let found = Self::ALL.get(usize::from(number)).copied();
        found.ok_or(DeltaError::Unknown {
            what: "kind",
            got: number,
        })
    }
}

/// A record that is sound as far as its header tells: lengths are within bounds and fit one another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record<'a> {
    encoding: Encoding,
    length: u32,
    basis: (u64, u32),
    payload: &'a [u8],
}

impl<'a> Record<'a> {
    /// Reads bytes that must be exactly one record.
    ///
    /// # Errors
    /// [`DeltaError`] that says what is wrong.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, DeltaError> {
        let (header, payload) = bytes
            .split_first_chunk::<RECORD_HEADER_BYTES>()
            .ok_or_else(|| size("header", RECORD_HEADER_BYTES as u64, bytes.len()))?;
        let [version, kind, element, arithmetic, ..] = *header;
        if version != VERSION {
            return Err(DeltaError::Version {
                expected: VERSION,
                got: version,
            });
        }
        let encoding = encoding(Kind::from_number(kind)?, element, arithmetic)?;
        let length = u32_at(header, 4);
        let basis = (u64_at(header, 8), u32_at(header, 16));
        within("a chunk", u64::from(length), CHUNK_BYTES_MAX)?;
        within("a basis", u64::from(basis.1), BASIS_BYTES_MAX)?;
        within("payload", u64::from(u32_at(header, 20)), PAYLOAD_BYTES_MAX)?;
        if payload.len() as u64 != u64::from(u32_at(header, 20)) {
            return Err(size("payload", u32_at(header, 20).into(), payload.len()));
        }
        let record = Self {
            encoding,
            length,
            basis,
            payload,
        };
        record.check()
    }

    fn check(self) -> Result<Self, DeltaError> {
        let length = u64::from(self.length);
        let whole_basis = || {
            if u64::from(self.basis.1) == length {
                Ok(())
            } else {
                Err(size("basis", length, self.basis.1 as usize))
            }
        };
        let payload = self.payload.len();
        if self.basis.0.checked_add(self.basis.1.into()).is_none() {
            return Err(size("basis", 0, self.basis.1 as usize));
        }
        match self.encoding {
            Encoding::Clean if payload > 0 => Err(size("payload", 0, payload)),
            Encoding::Raw if payload as u64 != length => Err(size("payload", length, payload)),
            Encoding::Clean | Encoding::Difference(..) => whole_basis().map(|()| self),
            Encoding::Raw | Encoding::Packed if self.basis != (0, 0) => {
                Err(size("basis", 0, self.basis.1 as usize))
            }
            _ => Ok(self),
        }
    }

    /// How the chunk was written.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Bytes of the chunk.
    pub fn length(&self) -> usize {
        self.length as usize
    }

    /// The bytes of the basis that it takes to get the chunk back; none for a record that stands alone.
    pub fn needs(&self) -> Option<Range<u64>> {
        let (start, length) = self.basis;
        let needs = matches!(
            self.encoding,
            Encoding::Clean | Encoding::Difference(..) | Encoding::Moved
        );
        needs.then(|| start..start + u64::from(length))
    }

    pub(super) fn payload(&self) -> &'a [u8] {
        self.payload
    }
}

/// The header of a record.
pub(super) fn header(
    encoding: Encoding,
    length: usize,
    basis: Range<u64>,
    payload: usize,
) -> [u8; RECORD_HEADER_BYTES] {
    let mut bytes = [0; RECORD_HEADER_BYTES];
    let (element, arithmetic) = match encoding {
        Encoding::Difference(element, Arithmetic::Xor) => (element.0, 0),
        Encoding::Difference(element, Arithmetic::Subtract) => (element.0, 1),
        _ => (0, 0),
    };
    bytes[..4].copy_from_slice(&[VERSION, encoding.kind().number(), element, arithmetic]);
    bytes[4..8].copy_from_slice(&(length as u32).to_le_bytes());
    bytes[8..16].copy_from_slice(&basis.start.to_le_bytes());
    bytes[16..20].copy_from_slice(&((basis.end - basis.start) as u32).to_le_bytes());
    bytes[20..24].copy_from_slice(&(payload as u32).to_le_bytes());
    bytes
}

pub(super) fn within(what: &'static str, got: u64, most: u64) -> Result<(), DeltaError> {
    if got <= most {
        Ok(())
    } else {
        Err(DeltaError::TooLong { what, most, got })
    }
}

pub(super) fn size(what: &'static str, expected: u64, got: usize) -> DeltaError {
    DeltaError::Size {
        what,
        expected,
        got: got as u64,
    }
}

fn encoding(kind: Kind, element: u8, arithmetic: u8) -> Result<Encoding, DeltaError> {
    let plain = |encoding| match (element, arithmetic) {
        (0, 0) => Ok(encoding),
        (0, got) => Err(DeltaError::Unknown {
            what: "arithmetic",
            got,
        }),
        (got, _) => Err(DeltaError::Unknown {
            what: "element size",
            got,
        }),
    };
    match kind {
        Kind::Clean => plain(Encoding::Clean),
        Kind::Moved => plain(Encoding::Moved),
        Kind::Packed => plain(Encoding::Packed),
        Kind::Raw => plain(Encoding::Raw),
        Kind::Difference => {
            let element = ElementSize::new(element)?;
            match arithmetic {
                0 => Ok(Encoding::Difference(element, Arithmetic::Xor)),
                1 => Ok(Encoding::Difference(element, Arithmetic::Subtract)),
                got => Err(DeltaError::Unknown {
                    what: "arithmetic",
                    got,
                }),
            }
        }
    }
}

fn u32_at(header: &[u8; RECORD_HEADER_BYTES], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&header[at..at + 4]);
    u32::from_le_bytes(bytes)
}

fn u64_at(header: &[u8; RECORD_HEADER_BYTES], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&header[at..at + 8]);
    u64::from_le_bytes(bytes)
}
