//! How many data and parity blocks a stripe has.

use std::fmt;

use thiserror::Error;

/// k data and m parity blocks, validated together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Geometry {
    k: u8,
    m: u8,
}

/// A k and an m that make no code over GF(2^8).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("expected k >= 1, m >= 1 and k + m <= 255, got k = {k}, m = {m}")]
pub struct GeometryError {
    k: usize,
    m: usize,
}

impl Geometry {
    /// Validates k and m.
    ///
    /// # Errors
    /// [`GeometryError`] unless `k >= 1`, `m >= 1` and `k + m <= 255`.
    pub fn new(k: usize, m: usize) -> Result<Self, GeometryError> {
        let fits = k >= 1 && m >= 1 && k.checked_add(m).is_some_and(|n| n <= 255);
        match (u8::try_from(k), u8::try_from(m)) {
            (Ok(k), Ok(m)) if fits => Ok(Self { k, m }),
            _ => Err(GeometryError { k, m }),
        }
    }

    /// Data blocks.
    pub fn k(&self) -> usize {
        usize::from(self.k)
    }

    /// Parity blocks.
    pub fn m(&self) -> usize {
        usize::from(self.m)
    }

    /// All blocks.
    pub fn n(&self) -> usize {
        self.k() + self.m()
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}+{}", self.k, self.m)
    }
}
