//! What outlives the daemon: descriptors of its memory, in the hands of a process that does not end with it. A daemon that starts
//! again, the same binary or another one, gets them back and goes on with the bytes that they name.
//!
//! Such a process is systemd, or our keeper (`keeper`, its table in `table`): the daemon hands descriptors to both over one protocol
//! (`store`, `message`), and finds at its start what the one before it left (`inherited`). A keeper that ends with its pod hands on what it
//! has to a holder (`holder_link`, `holdings`), a process of its own (`holder`, over `packets`), and tells the daemon whether that one has all of
//! it (`holder_reports`).

mod handover;
pub mod holder;
mod holder_link;
mod holder_reports;
mod holdings;
mod inherited;
mod journal;
pub mod keeper;
mod kept_daemon;
pub mod message;
mod packets;
mod parity_table;
mod store;
mod table;

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::str::FromStr;

use storaged_wire::SlotId;
use thiserror::Error;

pub(crate) use handover::Handover;
#[cfg(test)]
pub(crate) use handover::tests::RecordingStore;
pub use inherited::{Holding, Inherited};
pub use journal::{
    JournalContents, JournalError, MemoryJournal, Records, empty_journal, read_journal,
};
pub use message::HolderReport;
pub use parity_table::{CellName, ParityRow, ParityTable, ParityTableError};
pub use store::SocketStore;

/// What a keeper's process is called, by which `storaged hand-over` knows it.
pub(crate) const KEEPER_NAME: &CStr = c"storaged-keeper";
/// The environment variable that says who holds descriptors, as `--keep` does.
pub const KEEP_VARIABLE: &str = "STORAGED_KEEP";
/// The one that says where the keeper's holder is, as `--holder` does.
pub const HOLDER_VARIABLE: &str = "STORAGED_HOLDER";
/// Where a holder is, unless it is told otherwise.
pub const HOLDER_SOCKET: &str = "/run/storaged-memory/hold.sock";
/// The one that makes a process the daemon of a keeper: the number of the keeper's process.
const KEPT_BY_VARIABLE: &str = "STORAGED_KEPT_BY";
/// By this one a keeper says what it tells a daemon that asks for it: one of an earlier release does not say so, and is not asked.
const TELLS_VARIABLE: &str = "STORAGED_KEEPER_TELLS";
const TELLS_OF_HOLDER: &str = "holder";
/// A holder has no more descriptors of one daemon.
const DESCRIPTORS_MAX: usize = 65_536;

/// Why nobody can hold descriptors.
#[derive(Debug, Error)]
pub enum KeepError {
    /// Not below systemd.
    #[error(
        "--keep systemd: expected NOTIFY_SOCKET in the environment, as a unit with FileDescriptorStoreMax= and NotifyAccess=main has it"
    )]
    NoAddress,
    /// What is in NOTIFY_SOCKET.
    #[error("expected the path of a socket or @name in NOTIFY_SOCKET, got {address}")]
    Address {
        address: String,
        #[source]
        source: io::Error,
    },
    /// The process that started this one.
    #[error("expected the keeper that {KEPT_BY_VARIABLE} names to be the parent of this process")]
    KeeperGone,
    /// What it says.
    #[error("expected descriptors with names from the keeper, got something else")]
    Answer,
    /// The holder's socket.
    #[error("expected to listen at {}, where no other holder does", .path.display())]
    Holder {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Whose memory the holder has.
    #[error(
        "expected a holder that has nobody's memory, got one that holds for process {process}, which is there: end that daemon and its keeper first"
    )]
    HolderTaken { process: u32 },
    /// Who asks it.
    #[error("expected root or the holder's own user, got user id {user}")]
    HolderStranger { user: u32 },
    /// The system.
    #[error("{what} failed")]
    Io {
        what: &'static str,
        #[source]
        source: io::Error,
    },
}

impl KeepError {
    fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// A descriptor that is kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum KeptName {
    /// A slot: memory that trainers map too.
    Slot(SlotId),
    /// A segment of the memory for parity.
    Parity(u64),
    /// The records that say what the others hold.
    Journal(u64),
}

/// A name that no daemon of this kind gave.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("expected the name of a kept descriptor (slot-N, parity-N, journal-N), got {0:?}")]
pub struct UnknownName(String);

impl fmt::Display for KeptName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slot(slot) => write!(f, "slot-{}", slot.get()),
            Self::Parity(segment) => write!(f, "parity-{segment}"),
            Self::Journal(number) => write!(f, "journal-{number}"),
        }
    }
}

impl FromStr for KeptName {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let unknown = || UnknownName(text.to_owned());
        let (kind, number) = text.split_once('-').ok_or_else(unknown)?;
        let number: u64 = number.parse().map_err(|_| unknown())?;
        match kind {
            "slot" => Ok(Self::Slot(SlotId::new(number))),
            "parity" => Ok(Self::Parity(number)),
            "journal" => Ok(Self::Journal(number)),
            _ => Err(unknown()),
        }
    }
}

/// Who has the memory once this daemon has ended, as far as it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeptBy {
    /// Nobody: it ends with the daemon.
    #[default]
    Nobody,
    /// systemd.
    Systemd,
    /// The keeper, with what that has said of its holder.
    Keeper(Option<HolderReport>),
}

impl KeptBy {
    /// What is known of a holder.
    pub fn holder(self) -> Option<HolderReport> {
        match self {
            Self::Keeper(report) => report,
            Self::Nobody | Self::Systemd => None,
        }
    }
}

/// Who holds descriptors for the daemon's next life.
pub trait DescriptorStore: Send + Sync + fmt::Debug {
    /// Hands a descriptor over. Once this returns, it outlives this process, however that ends.
    ///
    /// # Errors
    /// What the system says, if nobody holds it.
    fn store(&self, name: KeptName, descriptor: BorrowedFd<'_>) -> io::Result<()>;

    /// Lets go of it: the memory is free once this process closes it too. Told to nobody, if there is nobody any more.
    fn remove(&self, name: KeptName);

    /// Lets go of what it holds under names that this release does not know: told only once the journal was read, since a release that
    /// knows them may have written it.
    fn remove_unknown(&self) {}

    /// Lets go of everything and takes nothing more: no daemon goes on with it. How many descriptors that were.
    fn remove_all(&self) -> usize;

    /// Who has what was stored once this process has ended.
    fn kept_by(&self) -> KeptBy {
        KeptBy::Nobody
    }

    /// Whether there is anybody: else records of the memory would be made for nothing.
    fn is_there(&self) -> bool {
        true
    }
}

/// Nobody: the memory ends with the daemon.
#[derive(Debug, Clone, Copy)]
pub struct NoStore;

impl DescriptorStore for NoStore {
    fn store(&self, _: KeptName, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn remove(&self, _: KeptName) {}

    fn remove_all(&self) -> usize {
        0
    }

    fn is_there(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_make_the_round_trip_and_others_are_refused() {
        let names = [
            KeptName::Slot(SlotId::new(7)),
            KeptName::Parity(0),
            KeptName::Journal(u64::MAX),
        ];
        for name in names {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        for odd in [
            "", "slot", "slot-", "slot--1", "stored", "slot-1-2", "other-1",
        ] {
            assert!(odd.parse::<KeptName>().is_err(), "{odd}");
        }
    }
}
