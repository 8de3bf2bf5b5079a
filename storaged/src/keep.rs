//! What outlives the daemon: descriptors of its memory, in the hands of a process that does not end with it. A daemon that starts
//! again, the same binary or another one, gets them back and goes on with the bytes that they name.

mod handover;
mod journal;
mod parity_table;

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

use storaged_wire::SlotId;
use thiserror::Error;

pub(crate) use handover::Handover;
#[cfg(test)]
pub(crate) use handover::tests::RecordingStore;
pub use journal::{Journal, JournalContents, JournalError, Records, read_journal};
pub use parity_table::{CellName, ParityRow, ParityTable, ParityTableError};

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

/// Who holds descriptors for the daemon's next life.
pub trait DescriptorStore: Send + Sync + fmt::Debug {
    /// Hands a descriptor over. Once this returns, it outlives this process, however that ends.
    ///
    /// # Errors
    /// What the system says, if nobody holds it.
    fn store(&self, name: KeptName, descriptor: BorrowedFd<'_>) -> io::Result<()>;

    /// Lets go of it: the memory is free once this process closes it too. Told to nobody, if there is nobody any more.
    fn remove(&self, name: KeptName);
}

/// Nobody: the memory ends with the daemon.
#[derive(Debug, Clone, Copy)]
pub struct NoStore;

impl DescriptorStore for NoStore {
    fn store(&self, _: KeptName, _: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    fn remove(&self, _: KeptName) {}
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
