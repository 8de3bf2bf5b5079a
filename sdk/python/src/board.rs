//! Boards: memory of the daemon that a trainer writes whenever it likes, and that outlives it.

use pyo3::prelude::*;
use storaged_sdk::Mapping;

/// A rank's board; its memory is mapped as long as this object lives.
#[pyclass(frozen, module = "storaged._native")]
pub(crate) struct Board(pub(crate) Mapping);

#[pymethods]
impl Board {
    /// Where the memory begins; valid as long as this object lives.
    #[getter]
    fn address(&self) -> usize {
        self.0.start() as usize
    }

    /// Bytes.
    #[getter]
    fn capacity(&self) -> usize {
        self.0.length()
    }
}
