//! The memory budget: every byte of slots and parity is reserved here before it is taken, and given back here. What is kept
//! about them is counted after the fact (`records`): it is never refused, but leaves that much less to reserve. Of several tenants
//! each may have a part that is kept free for it, and one that it cannot go beyond.

use std::collections::BTreeMap;

use storaged_wire::{Namespace, SlotId, TenantName};
use thiserror::Error;

use crate::api::{MemoryShare, ParityId};
use crate::limits;

/// Whose bytes they are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Reservation {
    Slot(SlotId),
    Parity(ParityId),
}

/// No room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NoRoom {
    /// In the whole budget.
    #[error("needs {needed} bytes, but {used} of the budget of {total} are in use{}", kept_for(*.guaranteed))]
    Budget {
        /// Bytes asked for.
        needed: u64,
        /// Bytes reserved.
        used: u64,
        /// Bytes that the operator set.
        total: u64,
        /// Bytes that are free, and kept so for other tenants.
        guaranteed: u64,
    },
    /// In what the tenant may have of it.
    #[error(
        "needs {needed} bytes, but its tenant uses {used} of the {most} that it may have (tenants.memory_max)"
    )]
    Share {
        /// Bytes asked for.
        needed: u64,
        /// Bytes that the tenant's jobs have reserved.
        used: u64,
        /// Bytes that the operator lets them have.
        most: u64,
    },
}

fn kept_for(others: u64) -> String {
    match others {
        0 => String::new(),
        bytes => format!(", and {bytes} are kept for other tenants"),
    }
}

impl NoRoom {
    /// Bytes asked for.
    pub fn needed(&self) -> u64 {
        match self {
            Self::Budget { needed, .. } | Self::Share { needed, .. } => *needed,
        }
    }
}

/// Reservations by purpose.
#[derive(Debug)]
pub(crate) struct Budget {
    total: u64,
    taken: u64,
    records: u64,
    reserved: BTreeMap<Reservation, Reserved>,
    /// By the tenant's name; empty is the one without.
    tenants: BTreeMap<Box<str>, TenantBytes>,
}

#[derive(Debug)]
struct Reserved {
    bytes: u64,
    tenant: Box<str>,
}

/// A tenant's part.
#[derive(Debug, Default)]
struct TenantBytes {
    share: MemoryShare,
    taken: u64,
}

impl TenantBytes {
    fn most(&self) -> u64 {
        self.share.most.unwrap_or(u64::MAX)
    }

    fn kept_free(&self) -> u64 {
        self.share.guaranteed.saturating_sub(self.taken)
    }
}

fn tenant_of(namespace: &Namespace) -> &str {
    namespace.tenant().unwrap_or_default()
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
    pub fn new(total: u64, shares: &BTreeMap<Option<TenantName>, MemoryShare>) -> Self {
        let tenants = shares.iter().map(|(tenant, share)| {
            let name = tenant.as_ref().map_or("", TenantName::as_str);
            let share = *share;
            (name.into(), TenantBytes { share, taken: 0 })
        });
        Self {
            total,
            taken: 0,
            records: 0,
            reserved: BTreeMap::new(),
            tenants: tenants.collect(),
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

    /// Bytes that a job may still reserve: not what is kept free for other tenants, nor more than its own may have.
    pub fn room_of(&self, namespace: &Namespace) -> u64 {
        let free = self.free().saturating_sub(self.kept_from(namespace));
        free.min(self.share_left(namespace))
    }

    /// How much must go before so many bytes can be reserved.
    pub fn missing(&self, bytes: u64, of: &Namespace) -> u64 {
        let beyond_share = bytes.saturating_sub(self.share_left(of));
        let needed = self.used().saturating_add(self.kept_from(of));
        let needed = needed.saturating_add(bytes);
        beyond_share.max(needed.saturating_sub(self.total))
    }

    /// Bytes that are kept free for others.
    fn kept_from(&self, namespace: &Namespace) -> u64 {
        let own = tenant_of(namespace);
        let others = self.tenants.iter().filter(|(name, _)| ***name != *own);
        let kept = others.map(|(_, tenant)| tenant.kept_free());
        kept.fold(0, u64::saturating_add)
    }

    /// What the tenant of a job may still reserve were the budget without end.
    pub fn share_left(&self, namespace: &Namespace) -> u64 {
        let tenant = self.tenants.get(tenant_of(namespace));
        tenant.map_or(u64::MAX, |it| it.most().saturating_sub(it.taken))
    }

    /// Whether the tenant of a job has so much that others may ask for some of it.
    pub fn is_above_guarantee(&self, namespace: &Namespace) -> bool {
        let tenant = self.tenants.get(tenant_of(namespace));
        tenant.is_none_or(|it| it.taken > it.share.guaranteed)
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

    /// Reserves bytes for a job, or says why not. Nothing is dropped to make room.
    pub fn reserve(
        &mut self,
        purpose: Reservation,
        bytes: u64,
        of: &Namespace,
    ) -> Result<(), NoRoom> {
        if bytes > self.share_left(of) && !planted!("share_exceeded") {
            return Err(self.no_room(bytes, of));
        }
        let others = match self.kept_from(of) {
            _ if planted!("guarantees_ignored") => 0,
            bytes => bytes,
        };
        let used = self.used().checked_add(others);
        let used = used.and_then(|used| used.checked_add(bytes));
        if used.is_none_or(|used| used > self.total) && !planted!("budget_exceeded") {
            return Err(self.no_room(bytes, of));
        }
        let tenant: Box<str> = tenant_of(of).into();
        self.tenants.entry(tenant.clone()).or_default().taken += bytes;
        let before = self.reserved.insert(purpose, Reserved { bytes, tenant });
        assert!(before.is_none(), "{purpose:?} is reserved once");
        self.taken += bytes;
        Ok(())
    }

    /// What does not fit.
    pub fn no_room(&self, needed: u64, of: &Namespace) -> NoRoom {
        if let Some(tenant) = self.tenants.get(tenant_of(of))
            && needed > tenant.most().saturating_sub(tenant.taken)
        {
            let (used, most) = (tenant.taken, tenant.most());
            return NoRoom::Share { needed, used, most };
        }
        NoRoom::Budget {
            needed,
            used: self.used(),
            total: self.total,
            guaranteed: self.kept_from(of).min(self.free()),
        }
    }

    /// All of them.
    pub fn reservations(&self) -> impl Iterator<Item = (Reservation, u64)> + '_ {
        let all = self.reserved.iter();
        all.map(|(purpose, reserved)| (*purpose, reserved.bytes))
    }

    /// Bytes that a purpose has.
    pub fn reserved(&self, purpose: Reservation) -> u64 {
        self.reserved.get(&purpose).map_or(0, |it| it.bytes)
    }

    /// Bytes that each tenant has, and its share.
    pub fn by_tenant(&self) -> impl Iterator<Item = (&str, u64, MemoryShare)> {
        let all = self.tenants.iter();
        all.map(|(name, tenant)| (&**name, tenant.taken, tenant.share))
    }

    /// Gives bytes back.
    pub fn release(&mut self, purpose: Reservation) {
        let Some(Reserved { bytes, tenant }) = self.reserved.remove(&purpose) else {
            return;
        };
        self.taken -= bytes;
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.taken = tenant.taken.saturating_sub(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str) -> Namespace {
        Namespace::new(name).expect("a namespace")
    }

    fn set(number: u64) -> Reservation {
        Reservation::Parity(ParityId(number))
    }

    #[test]
    fn a_full_budget_refuses_and_drops_nothing() {
        let mut budget = Budget::new(10, &BTreeMap::new());
        let job = job("job");
        budget.reserve(set(1), 7, &job).unwrap();
        let refusal = budget.reserve(set(2), 4, &job).unwrap_err();
        let expected = NoRoom::Budget {
            needed: 4,
            used: 7,
            total: 10,
            guaranteed: 0,
        };
        assert_eq!(refusal, expected);
        assert!(budget.reserve(set(3), u64::MAX, &job).is_err());
        budget.release(set(1));
        assert_eq!(budget.used(), 0);
    }

    /// Blue is sure of 4 of 10 and may have 6; red may have all that is not kept for blue.
    fn shared() -> Budget {
        let blue = TenantName::new("blue").expect("a tenant");
        let share = MemoryShare {
            guaranteed: 4,
            most: Some(6),
        };
        Budget::new(10, &BTreeMap::from([(Some(blue), share)]))
    }

    #[test]
    fn what_a_tenant_is_sure_of_stays_free_for_it() {
        let (mut budget, blue, red) = (shared(), job("blue~a"), job("red~a"));
        assert_eq!(budget.room_of(&red), 6);
        let refusal = budget.reserve(set(1), 7, &red).unwrap_err();
        assert!(refusal.to_string().contains("4 are kept for other tenants"));
        budget.reserve(set(1), 6, &red).unwrap();
        budget.reserve(set(2), 4, &blue).unwrap();
        assert_eq!((budget.free(), budget.room_of(&blue)), (0, 0));
        budget.release(set(2));
        assert_eq!((budget.room_of(&blue), budget.room_of(&red)), (4, 0));
    }

    #[test]
    fn a_tenant_has_no_more_than_it_may() {
        let (mut budget, blue) = (shared(), job("blue~a"));
        budget.reserve(set(1), 5, &blue).unwrap();
        assert_eq!(budget.room_of(&blue), 1);
        let refusal = budget.reserve(set(2), 2, &blue).unwrap_err();
        assert!(matches!(
            refusal,
            NoRoom::Share {
                used: 5,
                most: 6,
                ..
            }
        ));
        budget.reserve(set(2), 1, &blue).unwrap();
        assert!(budget.is_above_guarantee(&blue));
    }
}
