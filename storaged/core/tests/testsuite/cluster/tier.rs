//! How the small cluster's durable tier behaves, as a test says.

use storaged_core::DurableFault;

use crate::testkit::{Course, Task};

/// What an upload takes.
const UPLOAD_MS: u64 = 20;

/// How a listing goes, and a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    /// It is there after so many milliseconds.
    After(u64),
    /// It fails after so many milliseconds.
    FailsAfter(u64),
    /// It never ends.
    Hangs,
}

/// Whether what is uploaded is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uploads {
    Taken,
    Refused,
    /// They never end.
    Hang,
}

/// What comes of a manifest that one node writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manifests {
    Taken,
    RefusedOf(usize),
    /// It never ends.
    HangOf(usize),
}

pub struct Conduct {
    pub listing: Listing,
    pub uploads: Uploads,
    pub manifests: Manifests,
}

impl Default for Conduct {
    fn default() -> Self {
        Self {
            listing: Listing::After(20),
            uploads: Uploads::Taken,
            manifests: Manifests::Taken,
        }
    }
}

impl Conduct {
    pub fn course(&self, node: usize, task: &Task) -> Course {
        match task {
            Task::Upload(_) => match self.uploads {
                Uploads::Taken => Course::well(UPLOAD_MS),
                Uploads::Hang => Course::Hangs,
                Uploads::Refused => Course::fails(
                    UPLOAD_MS,
                    DurableFault::Denied("read-only file system".into()),
                ),
            },
            Task::List(..) | Task::Claim(..) | Task::Successions(..) => match self.listing {
                Listing::After(ms) => Course::well(ms),
                Listing::FailsAfter(ms) => Course::fails(ms, slow_down()),
                Listing::Hangs => Course::Hangs,
            },
            // The simulation has tiers that give shards back; here it only matters that one was asked.
            Task::Fetch(..) => Course::fails(UPLOAD_MS, slow_down()),
            Task::Publish(_) => match self.manifests {
                Manifests::RefusedOf(of) if of == node => Course::fails(UPLOAD_MS, slow_down()),
                Manifests::HangOf(of) if of == node => Course::Hangs,
                _ => Course::well(UPLOAD_MS),
            },
            Task::Record(..) | Task::Find(..) | Task::Succeed(..) => Course::well(UPLOAD_MS),
        }
    }
}

fn slow_down() -> DurableFault {
    DurableFault::Unavailable("503 slow down".into())
}
