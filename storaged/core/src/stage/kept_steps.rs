//! Older steps that stay in RAM beside the newest safe one, as many as [`Setup::keep_steps`](crate::Setup) says: whoever goes back to
//! before a loss spike need not read the durable tier. They are a comfort. No save waits for them, and nothing is refused or left unprotected
//! because of them: the oldest gives way on all nodes at once, since a step whose blocks one node alone gave away would be
//! healed by the others, for ever.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{Namespace, Rank, RunId, SlotId, Step};

use crate::budget::Reservation;
use crate::catalog::{Checkpoint, SlotUse};
use crate::context::Context;

/// Finds the steps that lie before the newest one. A job that went back has left those that it saved in an earlier run from there on:
/// kept, they would take the place of the step that it went back to.
#[derive(Debug, Default)]
struct OnTheWay {
    /// The run that is looked at, and its lowest step.
    run: Option<(RunId, Step)>,
    /// The lowest step of later runs.
    later: Option<Step>,
}

impl OnTheWay {
    /// Of one step after the other, the newest first.
    fn is_one(&mut self, key: &CheckpointKey) -> bool {
        if let Some((run, lowest)) = self.run
            && run != key.run
        {
            self.later = Some(self.later.map_or(lowest, |later| later.min(lowest)));
        }
        self.run = Some((key.run, key.step));
        self.later.is_none_or(|later| key.step < later)
    }
}

impl Context {
    /// The steps that stay: the newest safe one, and as many before it as are configured.
    pub(super) fn kept_steps(&self, namespace: &Namespace) -> BTreeSet<CheckpointKey> {
        let safe = self.safe_state();
        // By default one is kept, and nothing is looked for.
        let most = match self.setup.keep_steps {
            1 => 1,
            _ if self.lacks_room(namespace) => 1,
            most => most,
        };
        let newest_first = self.checkpoints.values().rev();
        let mut on_the_way = OnTheWay::default();
        newest_first
            .filter(|c| c.key.namespace == *namespace && c.state >= safe)
            .filter(|c| on_the_way.is_one(&c.key) || planted!("left_steps_are_kept"))
            .take(most)
            .map(|c| c.key.clone())
            .collect()
    }

    /// Whether it is here only because older steps are kept: a newer one is as safe, and nothing else needs it.
    pub(super) fn is_kept_step(&self, checkpoint: &Checkpoint) -> bool {
        let key = &checkpoint.key;
        let newest = self.newest_safe(&key.namespace);
        newest.is_some_and(|newest| *key < newest && self.is_as_safe(&newest, checkpoint))
            && self.kept_steps(&key.namespace).contains(key)
            && !self.is_due(checkpoint)
            && !Self::is_read(checkpoint)
    }

    /// Whether a step that would be the newest safe one is not, because a node has no room for its part of it.
    fn lacks_room(&self, namespace: &Namespace) -> bool {
        if planted!("kept_steps_take_the_room") {
            return false;
        }
        let newest = self.newest_safe(namespace);
        let mut newer = self.checkpoints.values().rev();
        newer.any(|c| {
            let is_newer = newest.as_ref().is_none_or(|newest| c.key > *newest);
            c.key.namespace == *namespace && is_newer && self.no_room_of(c).is_some()
        })
    }

    /// Another job needs bytes of the budget: its save is worth more than what is kept of others. First go slots that stand free only because
    /// steps were kept, then kept steps, unless all of that would not be enough.
    pub(super) fn give_up_kept_for(&mut self, bytes: u64, of: &Namespace) {
        if self.setup.keep_steps == 1 || planted!("kept_steps_of_others_stay") {
            return;
        }
        let kept = self.checkpoints.values();
        let kept = kept.filter(|c| c.key.namespace != *of && self.is_kept_step(c));
        let kept: Vec<CheckpointKey> = kept.map(|c| c.key.clone()).collect();
        let could_go = self.bytes_kept(&kept, of);
        if self.budget_free().saturating_add(could_go) < bytes {
            return;
        }
        self.drop_surplus_slots(bytes, of);
        for key in kept {
            if self.budget_free() >= bytes {
                return;
            }
            self.give_up_kept_step(&key);
            self.drop_surplus_slots(bytes, of);
        }
    }

    /// Slots that a rank has with one kept step: those above are there for more.
    fn slots_without_kept(&self) -> usize {
        self.setup.slots_per_rank + 1 - self.setup.keep_steps
    }

    /// What would be free without these steps of other jobs, and without their surplus slots.
    fn bytes_kept(&self, kept: &[CheckpointKey], of: &Namespace) -> u64 {
        let kept: Vec<&Checkpoint> = kept.iter().map(|key| &self.checkpoints[key]).collect();
        let sets = kept.iter().flat_map(|c| c.parity.values());
        let parity: u64 = sets
            .map(|set| self.budget.reserved(Reservation::Parity(*set)))
            .sum();
        let of_kept = kept.iter().flat_map(|c| c.shards.values());
        let of_kept: BTreeSet<SlotId> = of_kept.map(|shard| shard.slot).collect();
        let mut surplus: BTreeMap<(&Namespace, Rank), usize> = BTreeMap::new();
        let mut bytes = parity;
        for (id, slot) in &self.slots {
            let may_go = slot.used_for == SlotUse::Free || of_kept.contains(id);
            if slot.namespace == *of || !may_go {
                continue;
            }
            let (namespace, rank) = (&slot.namespace, slot.rank);
            let in_use = || self.slots_in_use(namespace, rank);
            let left = surplus.entry((namespace, rank));
            let left = left.or_insert_with(|| in_use().saturating_sub(self.slots_without_kept()));
            if *left > 0 {
                *left -= 1;
                bytes = bytes.saturating_add(slot.capacity);
            }
        }
        bytes
    }

    fn drop_surplus_slots(&mut self, bytes: u64, of: &Namespace) {
        let least = self.slots_without_kept();
        let free = self.slots.iter();
        let free = free.filter(|(_, slot)| slot.used_for == SlotUse::Free && slot.namespace != *of);
        let free: Vec<(SlotId, Namespace, Rank)> = free
            .map(|(id, slot)| (*id, slot.namespace.clone(), slot.rank))
            .collect();
        for (slot, namespace, rank) in free {
            if self.budget_free() < bytes && self.slots_in_use(&namespace, rank) > least {
                self.drop_slot(slot);
            }
        }
    }

    /// Gives up a kept step here and on all peers.
    pub(super) fn give_up_kept_step(&mut self, key: &CheckpointKey) {
        let reason = "a newer step needs the room of this one, which was kept";
        if !planted!("kept_steps_given_up_alone") {
            self.send_all(&PeerMessage::Superseded {
                key: key.clone(),
                reason: reason.into(),
            });
        }
        self.retire(key);
    }
}
