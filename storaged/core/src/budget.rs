//! The memory budget: every byte of slots and parity is reserved here before it is taken, and given back here. What is kept
//! about them (`records`) is its tenant's too: descriptions are let in before they are kept, tables and manifests are counted after the
//! fact, and leave their tenant that much less. Of several tenants each may have a part that is kept free for it, and one that it
//! cannot go beyond.

use std::collections::BTreeMap;

use storaged_wire::{Namespace, SlotId, TenantName};
use thiserror::Error;

use crate::api::{ConnId, ParityId, TenantShare};
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
    /// Records that are no tenant's: what peers have this node hand on.
    records_of_nobody: u64,
    reserved: BTreeMap<Reservation, Reserved>,
    /// Long requests that are on their way here.
    requests: BTreeMap<ConnId, Reserved>,
    /// By the tenant's name; empty is the one without.
    tenants: BTreeMap<Box<str>, TenantBytes>,
}

#[derive(Debug)]
struct Reserved {
    bytes: u64,
    of: Namespace,
}

/// A tenant's part.
#[derive(Debug, Default)]
struct TenantBytes {
    share: TenantShare,
    reserved: u64,
    kept: TenantRecords,
    requests: u64,
}

/// What a tenant has of records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TenantRecords {
    /// Schemas and torch metadata of its steps, and requests that bring such.
    pub descriptions: u64,
    /// Manifests and tables.
    pub others: u64,
}

/// What each tenant may have beside the budget.
#[derive(Debug, Clone, Copy)]
struct Allowance {
    all: u64,
    others: u64,
}

impl TenantRecords {
    fn all(self) -> u64 {
        self.descriptions.saturating_add(self.others)
    }

    /// What of them lies beside the budget.
    fn beside(self, allowed: Allowance) -> u64 {
        let others = self.others.min(allowed.others);
        others.saturating_add(self.descriptions).min(allowed.all)
    }

    /// And what counts in it.
    fn counted(self, allowed: Allowance) -> u64 {
        self.all().saturating_sub(self.beside(allowed))
    }
}

impl TenantBytes {
    fn records(&self) -> TenantRecords {
        TenantRecords {
            descriptions: self.kept.descriptions.saturating_add(self.requests),
            ..self.kept
        }
    }

    fn most(&self) -> u64 {
        self.share.most.unwrap_or(u64::MAX)
    }

    /// What it has of the budget, where records may have so much beside it.
    fn taken(&self, allowed: Allowance) -> u64 {
        self.reserved
            .saturating_add(self.records().counted(allowed))
    }

    fn kept_free(&self, allowed: Allowance) -> u64 {
        self.share.guaranteed.saturating_sub(self.taken(allowed))
    }
}

pub(crate) fn tenant_of(namespace: &Namespace) -> &str {
    namespace.tenant().unwrap_or_default()
}

/// Bytes of records, and whose they are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RecordBytes {
    pub of_tenants: BTreeMap<Box<str>, TenantRecords>,
    pub of_nobody: u64,
}

impl RecordBytes {
    /// Some more of a tenant.
    pub fn add(&mut self, tenant: &str, more: TenantRecords) {
        let records = self.of_tenants.entry(tenant.into()).or_default();
        records.descriptions += more.descriptions;
        records.others += more.others;
    }
}

/// What RAM is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ledger {
    /// Bytes reserved, and what records take above their allowance.
    pub used: u64,
    /// Bytes that may be.
    pub total: u64,
    /// Bytes of manifests, descriptions and tables, and of long requests on their way.
    pub records: u64,
    /// Those of them that are in `used`.
    pub records_charged: u64,
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
    pub fn new(total: u64, shares: &BTreeMap<Option<TenantName>, TenantShare>) -> Self {
        let tenants = shares.iter().map(|(tenant, share)| {
            let name = tenant.as_ref().map_or("", TenantName::as_str);
            let part = TenantBytes {
                share: *share,
                ..TenantBytes::default()
            };
            (name.into(), part)
        });
        Self {
            total,
            records_of_nobody: 0,
            reserved: BTreeMap::new(),
            requests: BTreeMap::new(),
            tenants: tenants.collect(),
        }
    }

    /// Bytes of records that each tenant may have beside the budget: one that has many does not use up the others' part.
    fn allowance(&self) -> Allowance {
        let tenants = self.tenants.len().max(1) as u64;
        Allowance {
            all: limits::RECORDS_FREE_BYTES / tenants,
            others: limits::TABLES_FREE_BYTES / tenants,
        }
    }

    fn tenant(&self, of: &Namespace) -> Option<&TenantBytes> {
        self.tenants.get(tenant_of(of))
    }

    /// What the operator lets the tenant of a job have.
    pub fn share_of(&self, of: &Namespace) -> TenantShare {
        self.tenant(of).map(|it| it.share).unwrap_or_default()
    }

    fn taken_by(&self, of: &Namespace) -> u64 {
        let allowed = self.allowance();
        self.tenant(of).map_or(0, |it| it.taken(allowed))
    }

    fn reserved_by_all(&self) -> u64 {
        self.tenants.values().map(|it| it.reserved).sum()
    }

    pub fn used(&self) -> u64 {
        self.reserved_by_all()
            .saturating_add(self.records_counted())
    }

    /// What records take of the budget.
    pub fn records_counted(&self) -> u64 {
        let allowed = self.allowance();
        let all = || self.tenants.values().map(TenantBytes::records);
        let above: u64 = all().map(|records| records.counted(allowed)).sum();
        let beside: u64 = all().map(|records| records.beside(allowed)).sum();
        let left = limits::RECORDS_FREE_BYTES.saturating_sub(beside);
        above + self.records_of_nobody.saturating_sub(left)
    }

    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.used())
    }

    /// Bytes that a job may still reserve: not what is kept free for other tenants, nor more than its own may have.
    pub fn room_of(&self, namespace: &Namespace) -> u64 {
        self.room_beside_shares(namespace)
            .min(self.share_left(namespace))
    }

    fn room_beside_shares(&self, of: &Namespace) -> u64 {
        let free = self.free().saturating_sub(self.kept_from(of));
        free.max(self.sure_of(of))
    }

    /// What is left of that which a tenant is sure of. Records of others that were counted after the fact are not taken from it.
    fn sure_of(&self, namespace: &Namespace) -> u64 {
        let own = tenant_of(namespace);
        let others = self.tenants.iter().filter(|(name, _)| ***name != *own);
        let reserved: u64 = others.map(|(_, tenant)| tenant.reserved).sum();
        let in_use = reserved
            .saturating_add(self.kept_from(namespace))
            .saturating_add(self.taken_by(namespace));
        let allowed = self.allowance();
        let left = self.tenant(namespace);
        let left = left.map_or(0, |it| it.kept_free(allowed));
        left.min(self.total.saturating_sub(in_use))
    }

    /// How much must go before so many bytes can be reserved.
    pub fn missing(&self, bytes: u64, of: &Namespace) -> u64 {
        if bytes <= self.room_of(of) {
            return 0;
        }
        let beyond_share = bytes.saturating_sub(self.share_left(of));
        let needed = self.used().saturating_add(self.kept_from(of));
        let needed = needed.saturating_add(bytes);
        beyond_share.max(needed.saturating_sub(self.total))
    }

    /// Bytes that are kept free for others.
    fn kept_from(&self, namespace: &Namespace) -> u64 {
        if planted!("guarantees_ignored") {
            return 0;
        }
        let (own, allowed) = (tenant_of(namespace), self.allowance());
        let others = self.tenants.iter().filter(|(name, _)| ***name != *own);
        let kept = others.map(|(_, tenant)| tenant.kept_free(allowed));
        kept.fold(0, u64::saturating_add)
    }

    /// What the tenant of a job may still reserve were the budget without end.
    pub fn share_left(&self, namespace: &Namespace) -> u64 {
        let most = self.tenant(namespace).map_or(u64::MAX, TenantBytes::most);
        most.saturating_sub(self.taken_by(namespace))
    }

    /// Whether the tenant of a job has so much that others may ask for some of it.
    pub fn is_above_guarantee(&self, namespace: &Namespace) -> bool {
        let guaranteed = self.tenant(namespace).map(|it| it.share.guaranteed);
        guaranteed.is_none_or(|guaranteed| self.taken_by(namespace) > guaranteed)
    }

    /// Bytes of all records.
    pub fn records(&self) -> u64 {
        let of_tenants: u64 = self.tenants.values().map(|it| it.records().all()).sum();
        of_tenants + self.records_of_nobody
    }

    /// So many bytes are taken by what is kept about blocks.
    pub fn set_records(&mut self, counted: RecordBytes) {
        self.records_of_nobody = counted.of_nobody;
        for tenant in self.tenants.values_mut() {
            tenant.kept = TenantRecords::default();
        }
        for (tenant, records) in counted.of_tenants {
            self.tenants.entry(tenant).or_default().kept = records;
        }
    }

    /// Lets in a description of a job before it is kept, or says why not. What is counted next replaces this.
    pub fn add_description(&mut self, bytes: u64, of: &Namespace) -> Result<(), NoRoom> {
        let more = self.counted_with(bytes, of);
        if more > self.room_of(of) {
            return Err(self.no_room(more, of));
        }
        let kept = &mut self.tenants.entry(tenant_of(of).into()).or_default().kept;
        kept.descriptions = kept.descriptions.saturating_add(bytes);
        Ok(())
    }

    /// What so many bytes more of a tenant's descriptions take of the budget.
    fn counted_with(&mut self, bytes: u64, of: &Namespace) -> u64 {
        self.tenants.entry(tenant_of(of).into()).or_default();
        let allowed = self.allowance();
        let before = self.tenant(of).map(TenantBytes::records);
        let before = before.unwrap_or_default();
        let after = TenantRecords {
            descriptions: before.descriptions.saturating_add(bytes),
            ..before
        };
        after.counted(allowed) - before.counted(allowed)
    }

    /// Charges a tenant for a request that is on its way here, if there is room for that: nobody else is given it meanwhile.
    pub fn charge_request(&mut self, conn: ConnId, bytes: u64, of: &Namespace) {
        if bytes == 0 || self.counted_with(bytes, of) > self.room_of(of) {
            return;
        }
        let tenant = self.tenants.entry(tenant_of(of).into()).or_default();
        tenant.requests = tenant.requests.saturating_add(bytes);
        let of = of.clone();
        self.requests.insert(conn, Reserved { bytes, of });
    }

    /// It is here and worked on, or comes no more.
    pub fn release_request(&mut self, conn: ConnId) {
        let Some(Reserved { bytes, of }) = self.requests.remove(&conn) else {
            return;
        };
        if let Some(tenant) = self.tenants.get_mut(tenant_of(&of)) {
            tenant.requests = tenant.requests.saturating_sub(bytes);
        }
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
        let beyond_share = bytes > self.share_left(of) && !planted!("share_exceeded");
        let beyond_room = bytes > self.room_beside_shares(of) && !planted!("budget_exceeded");
        if beyond_share || beyond_room {
            return Err(self.no_room(bytes, of));
        }
        let tenant = self.tenants.entry(tenant_of(of).into()).or_default();
        tenant.reserved += bytes;
        let of = of.clone();
        let before = self.reserved.insert(purpose, Reserved { bytes, of });
        assert!(before.is_none(), "{purpose:?} is reserved once");
        Ok(())
    }

    /// What does not fit.
    pub fn no_room(&self, needed: u64, of: &Namespace) -> NoRoom {
        let used = self.taken_by(of);
        if let Some(tenant) = self.tenant(of)
            && needed > tenant.most().saturating_sub(used)
        {
            let most = tenant.most();
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

    /// Bytes of a job's parity.
    pub fn parity_of(&self, job: &Namespace) -> u64 {
        let all = self.reserved.iter();
        let parity =
            all.filter(|(purpose, it)| matches!(purpose, Reservation::Parity(_)) && it.of == *job);
        parity.map(|(_, it)| it.bytes).sum()
    }

    /// Bytes that each tenant has, and its share.
    pub fn by_tenant(&self) -> impl Iterator<Item = (&str, u64, TenantShare)> {
        let (all, allowed) = (self.tenants.iter(), self.allowance());
        all.map(move |(name, tenant)| (&**name, tenant.taken(allowed), tenant.share))
    }

    /// Gives bytes back.
    pub fn release(&mut self, purpose: Reservation) {
        let Some(Reserved { bytes, of }) = self.reserved.remove(&purpose) else {
            return;
        };
        if let Some(tenant) = self.tenants.get_mut(tenant_of(&of)) {
            tenant.reserved = tenant.reserved.saturating_sub(bytes);
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
        let share = TenantShare {
            guaranteed: 4,
            most: Some(6),
            new_jobs: None,
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

    fn descriptions(bytes: u64) -> TenantRecords {
        TenantRecords {
            descriptions: bytes,
            others: 0,
        }
    }

    /// Red and blue have half of the free records each.
    fn records_of_red(bytes: u64) -> RecordBytes {
        let mut records = RecordBytes::default();
        records.add("red", descriptions(limits::RECORDS_FREE_BYTES / 2 + bytes));
        records
    }

    #[test]
    fn a_request_on_its_way_is_its_tenants_as_far_as_there_is_room() {
        let (mut budget, blue, red) = (shared(), job("blue~a"), job("red~a"));
        let half = limits::RECORDS_FREE_BYTES / 2;
        // Red is no tenant that the budget knows before it has something.
        budget.reserve(set(1), 1, &red).unwrap();
        budget.charge_request(ConnId(1), half + 3, &red);
        assert_eq!((budget.used(), budget.room_of(&red)), (4, 2));
        budget.charge_request(ConnId(2), 3, &red);
        assert_eq!(budget.used(), 4, "it is let in, and charged to nobody");
        budget.charge_request(ConnId(3), half + 4, &blue);
        assert_eq!((budget.used(), budget.records_counted()), (8, 7));
        (1..=3).for_each(|conn| budget.release_request(ConnId(conn)));
        assert_eq!((budget.used(), budget.records()), (1, 0));
    }

    /// As where the slots of large shards fill the budget, and their tables all that is beside it.
    #[test]
    fn a_description_has_room_beside_a_full_budget_and_any_number_of_tables() {
        let (mut budget, job) = (Budget::new(10, &BTreeMap::new()), job("job"));
        budget.reserve(set(1), 10, &job).unwrap();
        let others = 3 * limits::RECORDS_FREE_BYTES;
        let mut records = RecordBytes::default();
        records.add(
            "",
            TenantRecords {
                descriptions: 0,
                others,
            },
        );
        budget.set_records(records);
        let used = budget.used();
        assert_eq!(used, 10 + others - limits::TABLES_FREE_BYTES);
        let most = limits::DESCRIPTIONS_FREE_BYTES;
        budget.add_description(most, &job).unwrap();
        assert_eq!((budget.used(), budget.free()), (used, 0));
        assert!(budget.add_description(1, &job).is_err());
    }

    #[test]
    fn records_are_their_tenants_and_not_taken_from_what_another_is_sure_of() {
        let (mut budget, blue, red) = (shared(), job("blue~a"), job("red~a"));
        budget.reserve(set(1), 3, &red).unwrap();
        budget.set_records(records_of_red(9));
        assert_eq!(budget.records_counted(), 9);
        assert!(budget.reserve(set(2), 1, &red).is_err());
        budget.reserve(set(2), 4, &blue).unwrap();
        assert!(budget.reserve(set(3), 1, &blue).is_err());
        budget.set_records(RecordBytes::default());
        budget.reserve(set(3), 1, &blue).unwrap();
    }

    #[test]
    fn a_tenants_records_count_in_what_it_may_have() {
        let (mut budget, blue) = (shared(), job("blue~a"));
        let mut records = RecordBytes::default();
        records.add("blue", descriptions(limits::RECORDS_FREE_BYTES + 5));
        budget.set_records(records);
        assert!(budget.is_above_guarantee(&blue));
        let refusal = budget.reserve(set(1), 2, &blue).unwrap_err();
        assert!(matches!(refusal, NoRoom::Share { used: 5, .. }));
        budget.reserve(set(1), 1, &blue).unwrap();
    }

    #[test]
    fn records_are_let_in_as_far_as_there_is_room_and_never_counted_twice() {
        let (mut budget, blue, red) = (shared(), job("blue~a"), job("red~a"));
        let half = limits::RECORDS_FREE_BYTES / 2;
        budget.add_description(half + 5, &red).unwrap();
        assert_eq!((budget.room_of(&red), budget.room_of(&blue)), (1, 5));
        assert!(budget.add_description(2, &red).is_err());
        budget.add_description(1, &red).unwrap();
        budget.set_records(records_of_red(6));
        assert_eq!((budget.used(), budget.room_of(&blue)), (6, 4));
        // Blue has its own part of what is free.
        budget.add_description(half + 4, &blue).unwrap();
        assert!(budget.add_description(1, &blue).is_err());
    }
}
