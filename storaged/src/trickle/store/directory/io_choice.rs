//! Which kind of file I/O writes the parts: io_uring where it may be used, plain calls elsewhere; and whether it goes past the page cache.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::uring::Uring;
use crate::trickle::store::{FileIoConfig, PageCacheConfig, StoreError};

/// Whether something goes past the page cache: until the file system refuses it once.
#[derive(Debug)]
pub(super) struct DirectIo {
    is_tried: AtomicBool,
    /// What goes through it from then on.
    what: &'static str,
}

impl DirectIo {
    pub(super) fn new(choice: PageCacheConfig, what: &'static str) -> Self {
        let is_tried = AtomicBool::new(choice == PageCacheConfig::Bypass);
        Self { is_tried, what }
    }

    pub(super) fn is_tried(&self) -> bool {
        self.is_tried.load(Ordering::Relaxed)
    }

    pub(super) fn give_up(&self, root: &Path) {
        if self.is_tried.swap(false, Ordering::Relaxed) {
            let (root, what) = (root.display(), self.what);
            tracing::info!(%root, "the file system takes no direct I/O: {what} through the page cache");
        }
    }
}

/// Whether the file system says by this that it takes no direct I/O. Most do so by EINVAL, some that are served elsewhere (FUSE, 9p)
/// by "not supported".
pub(super) fn refuses_direct(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported
    )
}

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

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_refusal_of_direct_io_is_none_of_what_goes_wrong_with_any_write() {
        let refuses = |errno: Errno| refuses_direct(io::Error::from(errno).kind());
        for refusal in [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOTSUP, Errno::NOSYS] {
            assert!(refuses(refusal), "{refusal:?}");
        }
        let faults = [Errno::IO, Errno::NOSPC, Errno::DQUOT, Errno::ACCESS];
        for fault in faults.into_iter().chain([Errno::ROFS, Errno::STALE]) {
            assert!(!refuses(fault), "{fault:?}");
        }
    }
}
