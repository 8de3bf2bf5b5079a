//! The memory budget: every byte of slots and parity is reserved here before it is taken, and given back here. What is kept
//! about them is counted after the fact (`records`): it is never refused, but leaves that much less to reserve.

use std::collections::BTreeMap;

use storaged_wire::SlotId;
use thiserror::Error;

use crate::api::ParityId;
use crate::limits;

/// Whose bytes they are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Reservation {
    Slot(SlotId),
    Parity(ParityId),
}

/// No room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("needs {needed} bytes, but {used} of the budget of {total} are in use")]
pub struct NoRoom {
    /// Bytes asked for.
    pub needed: u64,
    /// Bytes reserved.
    pub used: u64,
    /// Bytes that the operator set.
    pub total: u64,
}

/// Reservations by purpose.
#[derive(Debug)]
pub(crate) struct Budget {
    total: u64,
    taken: u64,
    records: u64,
    reserved: BTreeMap<Reservation, u64>,
}

/// What RAM is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ledger {
    /// Bytes reserved, and what records take above their allowance.
    pub used: u64,
    /// Bytes that may be.
    pub total: u64,
    /// Bytes of manifests, descriptions and tables.
    pub records: u64,
    /// Slots.
    pub slots: usize,
    /// Those of an earlier daemon whose bytes have not been compared with their digests yet.
    pub unchecked_slots: usize,
    /// Parity sets that belong to a checkpoint.
    pub parity_sets: usize,
    /// Sessions led or joined.
    pub sessions: usize,
    /// Requests that wait.
    pub waiters: usize,
    /// Jobs that are remembered.
    pub jobs: usize,
}

impl Budget {
    pub fn new(total: u64) -> Self {
        Self {
            total,
            taken: 0,
            records: 0,
            reserved: BTreeMap::new(),
        }
    }

    pub fn used(&self) -> u64 {
        self.taken + self.records_counted()
    }

    /// What records take of the budget.
    pub fn records_counted(&self) -> u64 {
        self.records.saturating_sub(limits::RECORDS_FREE_BYTES)
    }

    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.used())
    }

    pub fn records(&self) -> u64 {
        self.records
    }

    /// So many bytes are taken by what is kept about blocks.
    pub fn set_records(&mut self, bytes: u64) {
        self.records = bytes;
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// Reserves bytes, or says why not. Nothing is dropped to make room.
    pub fn reserve(&mut self, purpose: Reservation, bytes: u64) -> Result<(), NoRoom> {
        let used = self.used().checked_add(bytes);
        if used.is_none_or(|used| used > self.total) && !planted!("budget_exceeded") {
            return Err(self.no_room(bytes));
        }
        let before = self.reserved.insert(purpose, bytes);
        assert!(before.is_none(), "{purpose:?} is reserved once");
        self.taken += bytes;
        Ok(())
    }

    /// What does not fit.
    pub fn no_room(&self, needed: u64) -> NoRoom {
        NoRoom {
            needed,
            used: self.used(),
            total: self.total,
        }
    }

    /// All of them.
    pub fn reservations(&self) -> impl Iterator<Item = (Reservation, u64)> + '_ {
        self.reserved
            .iter()
            .map(|(purpose, bytes)| (*purpose, *bytes))
    }

    /// Bytes that a purpose has.
    pub fn reserved(&self, purpose: Reservation) -> u64 {
        self.reserved.get(&purpose).copied().unwrap_or(0)
    }

    /// Gives bytes back.
    pub fn release(&mut self, purpose: Reservation) {
        if let Some(bytes) = self.reserved.remove(&purpose) {
            self.taken -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_budget_refuses_and_drops_nothing() {
        let mut budget = Budget::new(10);
        budget.reserve(Reservation::Parity(ParityId(1)), 7).unwrap();
        let refusal = budget
            .reserve(Reservation::Parity(ParityId(2)), 4)
            .unwrap_err();
        assert_eq!((refusal.needed, refusal.used, refusal.total), (4, 7, 10));
        assert!(
            budget
                .reserve(Reservation::Parity(ParityId(3)), u64::MAX)
                .is_err()
        );
        budget.release(Reservation::Parity(ParityId(1)));
        assert_eq!(budget.used(), 0);
    }
}
