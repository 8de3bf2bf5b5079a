//! Chunks: the unit of delta, coding, transfer and digest.

use std::ops::Range;

use thiserror::Error;

/// Size of a chunk: a power of two from 4 KiB to 4 MiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ChunkSize(u32);

/// A size that chunks cannot have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("expected a chunk size that is a power of two from 4096 to 4194304, got {0}")]
pub struct ChunkSizeError(u64);

impl ChunkSize {
    /// Bytes of the smallest one.
    pub const BYTES_MIN: u64 = 4096;

    /// Validates a size in bytes.
    ///
    /// # Errors
    /// [`ChunkSizeError`] if it is not a power of two from 4 KiB to 4 MiB.
    pub fn new(bytes: u32) -> Result<Self, ChunkSizeError> {
        if bytes.is_power_of_two() && (4096..=4 << 20).contains(&bytes) {
            return Ok(Self(bytes));
        }
        Err(ChunkSizeError(u64::from(bytes)))
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.0 as usize
    }

    /// How many chunks `length` bytes have; the last may be short.
    pub fn count(&self, length: u64) -> u64 {
        length.div_ceil(u64::from(self.0))
    }

    /// The bytes of chunk `index` within `length` bytes; empty beyond the end.
    pub fn range(&self, index: u64, length: u64) -> Range<u64> {
        let start = index.saturating_mul(u64::from(self.0)).min(length);
        let end = start.saturating_add(u64::from(self.0)).min(length);
        start..end
    }
}
