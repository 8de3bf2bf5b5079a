//! Deltas: what of a shard changed since an earlier step, as small as the link and the processor make worthwhile.
//!
//! [`DirtyMap`] says which chunks changed. A [`Record`] holds one chunk, alone or against a *basis*: the same shard at
//! an earlier step. [`Coder`] makes records and takes them apart; [`DeltaWriter`] chooses for each chunk the encoding
//! that is expected to finish first on a link ([`CostModel`]), and says what it expected and what it got. Records of
//! successive steps make a chain ([`rebuild`], [`compact`]). docs/FORMATS.md has the bytes.

mod chain;
mod coder;
mod cost;
mod dirty;
mod entropy;
mod error;
mod moved;
mod pack;
mod planes;
mod record;
mod sample;
mod writer;
#[cfg(feature = "moved")]
mod xdelta3;

use std::fmt;

pub use chain::{ChainError, Level, compact, rebuild};
pub use coder::{Basis, Coder};
pub use cost::{CostModel, Estimate, LinkRate, Processor, RateError};
pub use dirty::{DirtyMap, DirtyMapError};
pub use error::DeltaError;
pub use record::{Kind, RECORD_HEADER_BYTES, Record};
pub use writer::{Choice, Clock, DeltaWriter, Tally};

/// Bytes of a number in a tensor: what a difference is taken of, and how many planes it has.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ElementSize(u8);

impl ElementSize {
    /// Every size there is, the smallest first.
    pub const ALL: [Self; 4] = [Self(1), Self(2), Self(4), Self(8)];

    /// Validates a size in bytes.
    ///
    /// # Errors
    /// [`DeltaError::ElementSize`] if it is not 1, 2, 4 or 8.
    pub fn new(bytes: u8) -> Result<Self, DeltaError> {
        match bytes {
            1 | 2 | 4 | 8 => Ok(Self(bytes)),
            _ => Err(DeltaError::ElementSize(bytes)),
        }
    }

    /// Bytes.
    pub fn bytes(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for ElementSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How a difference is taken.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Arithmetic {
    /// Bit by bit.
    Xor,
    /// As little-endian integers, wrapping, the sign moved to the lowest bit (zigzag): numbers that change little
    /// have small differences whatever their bits are. 3 to 30 % smaller than XOR on training state.
    Subtract,
}

/// A way to write a chunk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Encoding {
    /// As the basis has it.
    Clean,
    /// Element-wise difference from the basis, in byte planes, each packed by itself.
    Difference(ElementSize, Arithmetic),
    /// VCDIFF against the basis and its surroundings: content that moved.
    Moved,
    /// zstd of the bytes alone.
    Packed,
    /// The bytes.
    Raw,
}

impl Encoding {
    /// Its kind of record.
    pub fn kind(self) -> Kind {
        match self {
            Self::Clean => Kind::Clean,
            Self::Difference(..) => Kind::Difference,
            Self::Moved => Kind::Moved,
            Self::Packed => Kind::Packed,
            Self::Raw => Kind::Raw,
        }
    }
}
