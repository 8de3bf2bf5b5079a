//! What a node has at this instant, for whoever checks from outside that nothing is kept without an owner: the
//! simulation counts blocks and slots by it. Nothing here decides anything.

use std::collections::BTreeSet;

use storaged_wire::peer::{CheckpointKey, Lane};
use storaged_wire::{CheckpointState, Digest, EnclosuresHeld, NodeName, Rank, SlotId};

use crate::api::{ConnId, ParityId};
use crate::budget::{Ledger, Reservation};
use crate::catalog::SlotUse;
use crate::context::Context;

/// How many of everything that should end by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Audit {
    /// Slots that a trainer fills.
    pub held: usize,
    /// Slots that are being made for a trainer.
    pub creating: usize,
    /// Slots that a restore or a heal fills.
    pub restoring: usize,
    /// Slots that readers of another node's shard have.
    pub guests: usize,
    /// Slots that nobody uses.
    pub free: usize,
    /// Boards, which stay until their job goes.
    pub boards: usize,
    /// Slots that hold a shard of a checkpoint.
    pub sealed: usize,
    /// Slots that say they hold a shard of a checkpoint which does not know them.
    pub astray: usize,
    /// Bytes of the budget reserved for no slot and for no parity set that anything knows.
    pub unowned_bytes: u64,
    /// Sessions led, joined, ending or waiting for their manifest.
    pub sessions: usize,
    /// Schemas and metadata that no checkpoint names.
    pub enclosures: usize,
    /// Shards and parity sets made in part, kept for the next attempt.
    pub parts: usize,
    /// Requests that have not been answered.
    pub requests: usize,
    /// Connections.
    pub connections: usize,
}

/// A checkpoint as a node shows it, and what of it lies in this node's RAM.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shown {
    /// Which.
    pub key: CheckpointKey,
    /// How safe it is said to be.
    pub state: CheckpointState,
    /// How many more losses it is said to bear, where that is known.
    pub bears: Option<u32>,
    /// Its manifest, once committed.
    pub manifest: Option<Digest>,
    /// Shards whose digests are known, and their slots.
    pub shards: Vec<(Rank, SlotId)>,
    /// Parity sets.
    pub parity: Vec<(Lane, u32, ParityId)>,
    /// Whether what the manifest names is here.
    pub enclosures: EnclosuresHeld,
    /// How many have one of the shards open.
    pub readers: usize,
    /// Somebody has pinned it.
    pub pinned: bool,
    /// Its home nodes.
    pub homes: Vec<NodeName>,
}

impl Context {
    /// Connections that fill slots.
    pub fn filling(&self) -> Vec<ConnId> {
        let slots = self.slots.values();
        let held = slots.filter_map(|slot| match slot.used_for {
            SlotUse::Held(conn) => Some(conn),
            _ => None,
        });
        held.collect()
    }

    /// Every checkpoint that this node knows.
    pub fn shown(&self) -> Vec<Shown> {
        let shown = self.checkpoints.values().map(|c| {
            let shards = c.shards.iter().filter(|(_, shard)| shard.digests.is_some());
            let parity = c.parity.iter();
            let manifest = c.manifest.as_ref();
            let enclosures = manifest.map(|it| self.enclosures_held(it.manifest()));
            Shown {
                enclosures: enclosures.unwrap_or_default(),
                key: c.key.clone(),
                state: c.state,
                bears: self.bears(c).map(|bears| bears.losses),
                manifest: c.name(),
                shards: shards.map(|(rank, shard)| (*rank, shard.slot)).collect(),
                parity: parity.map(|((lane, i), set)| (*lane, *i, *set)).collect(),
                readers: c.shards.values().map(|shard| shard.readers.len()).sum(),
                pinned: self.is_pinned(&c.key),
                homes: c.homes.clone(),
            }
        });
        shown.collect()
    }

    /// Slots, memory and clients; `of_sessions` are the parity sets that sessions own.
    pub fn audit(&self, of_sessions: &BTreeSet<ParityId>) -> Audit {
        let all = || self.slots.values().map(|slot| &slot.used_for);
        let slots = |is: fn(&&SlotUse) -> bool| all().filter(is).count();
        Audit {
            held: slots(|it| matches!(it, SlotUse::Held(_))),
            creating: slots(|it| matches!(it, SlotUse::Creating(_))),
            restoring: slots(|it| matches!(it, SlotUse::Opening | SlotUse::Repairing)),
            guests: slots(|it| matches!(it, SlotUse::Guest)),
            free: slots(|it| matches!(it, SlotUse::Free)),
            boards: slots(|it| matches!(it, SlotUse::Board(_))),
            sealed: slots(|it| matches!(it, SlotUse::Sealed(_))),
            astray: self.astray(),
            unowned_bytes: self.unowned_bytes(of_sessions),
            enclosures: self.enclosures.count_beside(&self.enclosures_named()),
            requests: self.waiters.len() + self.describing.len(),
            connections: self.conns.len(),
            ..Audit::default()
        }
    }

    /// What its memory is used for.
    pub fn ledger(&self) -> Ledger {
        let sets = self.checkpoints.values().flat_map(|c| c.parity.values());
        let sets: BTreeSet<ParityId> = sets.copied().collect();
        Ledger {
            used: self.budget.used(),
            total: self.budget.total(),
            records: self.budget.records(),
            records_charged: self.budget.records_counted(),
            slots: self.slots.len(),
            unchecked_slots: self.keeping.unchecked(),
            parity_sets: sets.len(),
            sessions: 0,
            waiters: self.waiters.len(),
            jobs: self.namespaces.len(),
        }
    }

    fn astray(&self) -> usize {
        let claimed = self.slots.iter().filter(|(id, slot)| {
            let SlotUse::Sealed(key) = &slot.used_for else {
                return false;
            };
            let checkpoint = self.checkpoints.get(key);
            !checkpoint.is_some_and(|c| c.shards.values().any(|shard| shard.slot == **id))
        });
        claimed.count()
    }

    fn unowned_bytes(&self, of_sessions: &BTreeSet<ParityId>) -> u64 {
        let sets = self.checkpoints.values().flat_map(|c| c.parity.values());
        let of_checkpoints: BTreeSet<ParityId> = sets.copied().collect();
        let is_owned = |purpose: &Reservation| match purpose {
            Reservation::Slot(slot) => self.slots.contains_key(slot),
            Reservation::Parity(set) => of_checkpoints.contains(set) || of_sessions.contains(set),
        };
        let all = self.budget.reservations();
        let unowned = all.filter(|(purpose, _)| !is_owned(purpose));
        unowned.map(|(_, bytes)| bytes).sum()
    }
}
