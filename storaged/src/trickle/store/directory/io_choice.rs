//! Which kind of file I/O writes the parts: io_uring where it may be used, plain calls elsewhere.

use std::io;

use super::uring::Uring;
use crate::trickle::store::{FileIoConfig, StoreError};

/// How parts are written.
#[derive(Debug)]
pub enum FileIo {
    /// By io_uring, on a thread of its own.
    Uring(Uring),
    /// By `pwrite` and `fdatasync` on blocking threads.
    Plain,
}

impl FileIo {
    /// Probes io_uring, which most containers forbid. An explicit wish that cannot hold is an
    /// error; the automatic choice falls back.
    pub(super) fn open(choice: FileIoConfig) -> Result<Self, StoreError> {
        match choice {
            FileIoConfig::Plain => Ok(Self::Plain),
            FileIoConfig::Uring => Uring::start().map(Self::Uring).map_err(uring_refused),
            FileIoConfig::Auto => Ok(Uring::start().map_or_else(fall_back, Self::Uring)),
        }
    }
}

fn uring_refused(error: io::Error) -> StoreError {
    StoreError::Invalid {
        what: "file I/O \"uring\"".into(),
        expected: "a kernel and container that allow io_uring (else set io = \"plain\")".into(),
        got: error.to_string(),
    }
}

fn fall_back(error: io::Error) -> FileIo {
    tracing::info!(%error, "io_uring is not available, files are written by plain calls");
    FileIo::Plain
}
