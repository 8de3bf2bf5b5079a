//! A keeper's daemon, as the keeper and its holder know it: by a descriptor, which no later process can have in its place.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The process of a daemon.
#[derive(Debug)]
pub struct KeptDaemon {
    /// Its number, as its keeper sees it.
    pub number: u32,
    /// Its pidfd.
    pub process: OwnedFd,
}

impl KeptDaemon {
    /// Whether it has not ended, as far as is known.
    pub fn is_running(&self) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut ended = [PollFd::new(&self.process, PollFlags::IN)];
        // A poll that fails says nothing of an end.
        !matches!(poll(&mut ended, Some(&now)), Ok(1..))
    }
}
