//! Older steps that stay in RAM beside the newest safe one, as many as [`Setup::keep_steps`](crate::Setup) says: whoever goes back to
//! before a loss spike need not read the durable tier. They are a comfort. No save waits for them, and nothing is refused or left unprotected
//! because of them: the oldest gives way on all nodes at once, since a step whose blocks one node alone gave away would be
//! healed by the others, for ever.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{Namespace, Rank, RunId, SlotId, Step};

use crate::catalog::{Checkpoint, SlotUse};
use crate::context::Context;
use crate::limits;

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

/// Where the newest run of a job begins. Whoever goes back reads a step and opens a run, and says to nobody which one that was: what stands
/// behind the run is known when a step of it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunStart {
    /// A step of it is safe: the steps say it themselves.
    Past,
    /// Nothing of it has committed.
    Unsaid,
    /// Behind its first step, which has committed and is not safe yet.
    Below(Step),
}

/// Which safe steps of a job stay.
#[derive(Debug, Clone, Copy)]
struct Quota {
    most: usize,
    /// While the newest run begins as many stay as leave each rank a slot for it.
    most_beside_save: usize,
    beginning: RunStart,
}

impl Quota {
    /// The newest one alone, and nothing is looked for.
    const NEWEST: Self = Self {
        most: 1,
        most_beside_save: 1,
        beginning: RunStart::Past,
    };

    /// Whether a step stays behind these newer ones. Steps of the run before may be coded, and become safe, after the job has gone back
    /// behind them: were the step that it went back to let go for them, nothing would stay behind the first one of the new run, which
    /// leaves them all.
    fn has_place(&self, key: &CheckpointKey, newer: &[CheckpointKey]) -> bool {
        if newer.len() < self.most {
            return true;
        }
        let has_slot = newer.len() < self.most_beside_save;
        match self.beginning {
            RunStart::Past => false,
            RunStart::Unsaid => has_slot,
            RunStart::Below(first) => {
                let stay = newer.iter().filter(|newer| newer.step < first).count();
                has_slot && key.step < first && stay + 1 < self.most
            }
        }
    }
}

impl Context {
    /// The steps that stay: those that are pinned, the newest safe one, and as many before it as are configured; while a newer run begins, also those
    /// that may be what it went back to. With them those that would be among them and of which this node has not heard yet that they are protected.
    pub(crate) fn kept_steps(&self, namespace: &Namespace) -> BTreeSet<CheckpointKey> {
        let (safe, quota) = (self.safe_state(), self.steps_to_keep(namespace));
        let newest_first = self.checkpoints.values().rev();
        let of_it = newest_first.filter(|c| c.key.namespace == *namespace);
        let mut on_the_way = OnTheWay::default();
        let mut newer = Vec::new();
        let mut kept = BTreeSet::new();
        for checkpoint in of_it {
            let key = &checkpoint.key;
            let has_place = quota.has_place(key, &newer);
            if checkpoint.state >= safe {
                if on_the_way.is_one(key) || planted!("left_steps_are_kept") {
                    newer.push(key.clone());
                    kept.extend(has_place.then(|| key.clone()));
                }
            } else if has_place && quota.most > 1 && self.may_yet_be_kept(checkpoint) {
                kept.insert(key.clone());
            }
            if newer.len() >= quota.most.max(quota.most_beside_save) {
                break;
            }
        }
        if !planted!("pins_are_ignored") {
            kept.extend(self.pinned_here(namespace));
        }
        kept
    }

    /// Which safe steps stay. By default one.
    fn steps_to_keep(&self, namespace: &Namespace) -> Quota {
        let most = self.setup.keep_steps;
        if most == 1 || planted!("one_step_kept") || self.lacks_room(namespace) {
            return Quota::NEWEST;
        }
        Quota {
            most,
            most_beside_save: self.setup.slots_per_rank.saturating_sub(1),
            beginning: self.beginning(namespace),
        }
    }

    /// Where the newest run that was opened begins.
    fn beginning(&self, namespace: &Namespace) -> RunStart {
        let run = self.fence_of(namespace);
        let newest = self.newest_safe(namespace);
        if newest.is_none_or(|newest| newest.run >= run) || planted!("left_steps_take_places") {
            return RunStart::Past;
        }
        let of_run = self.checkpoints.values();
        let of_run = of_run.filter(|c| c.key.namespace == *namespace && c.key.run == run);
        let committed =
            of_run.filter(|c| c.manifest.is_some() && !planted!("first_steps_not_heeded"));
        match committed.map(|c| c.key.step).min() {
            Some(first) => RunStart::Below(first),
            None => RunStart::Unsaid,
        }
    }

    /// A node that was restarted, or was cut off, may hear of a newer step first. Were an older one not taken up or given away for that,
    /// nobody could put its blocks back here.
    fn may_yet_be_kept(&self, checkpoint: &Checkpoint) -> bool {
        let heard_at = checkpoint.committed_at;
        let is_recent = |at| self.now.since(at) < limits::KEPT_UNPROTECTED_MS;
        // One home node calls it protected, and a second one has yet to say so.
        let is_called = self.is_called_safe(checkpoint);
        (is_called || heard_at.is_some_and(is_recent)) && !planted!("kept_steps_not_awaited")
    }

    /// Whether so many newer checkpoints of the namespace are as safe as can be that this one is of no use any more.
    pub(super) fn is_outranked(&self, key: &CheckpointKey) -> bool {
        if self.is_pinned(key) && !planted!("pins_not_taken_up") {
            return false;
        }
        let safe = self.safe_state();
        let mut on_the_way = OnTheWay::default();
        let newest_first = self.checkpoints.values().rev();
        let newer = newest_first
            .filter(|c| c.key.namespace == key.namespace && c.key > *key && c.state >= safe)
            .filter(|c| on_the_way.is_one(&c.key) || planted!("left_steps_are_kept"));
        let newer: Vec<CheckpointKey> = newer.map(|c| c.key.clone()).collect();
        let mut quota = self.steps_to_keep(&key.namespace);
        if planted!("older_steps_not_taken_up") {
            quota = Quota::NEWEST;
        }
        !quota.has_place(key, &newer)
    }

    /// Gives up what was not protected in time to be kept.
    pub(crate) fn retire_unkept(&mut self) {
        if self.setup.keep_steps == 1 {
            return;
        }
        for namespace in self.namespaces.keys().cloned().collect::<Vec<_>>() {
            self.retire_older(&namespace);
        }
    }

    /// Whether it is here only because older steps are kept: a newer one is as safe, and nothing else needs it.
    pub(super) fn is_kept_step(&self, checkpoint: &Checkpoint) -> bool {
        let key = &checkpoint.key;
        let newest = self.newest_safe(&key.namespace);
        newest.is_some_and(|newest| *key < newest && self.is_as_safe(&newest, checkpoint))
            && self.kept_steps(&key.namespace).contains(key)
            && (!self.is_pinned(key) || planted!("pins_give_way"))
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
        let kept = kept.filter(|c| self.may_take_from(&c.key.namespace, bytes, of));
        let kept: Vec<CheckpointKey> = kept.map(|c| c.key.clone()).collect();
        let could_go = self.bytes_kept(&kept, of);
        if self.budget.missing(bytes, of) > could_go {
            return;
        }
        self.drop_surplus_slots(bytes, of);
        for key in kept {
            if self.budget.room_of(of) >= bytes {
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
        let parity: u64 = kept.iter().map(|c| self.parity_kept(c)).sum();
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
        let free = free.filter(|(_, slot)| self.may_take_from(&slot.namespace, bytes, of));
        let free: Vec<(SlotId, Namespace, Rank)> = free
            .map(|(id, slot)| (*id, slot.namespace.clone(), slot.rank))
            .collect();
        for (slot, namespace, rank) in free {
            if self.budget.room_of(of) < bytes && self.slots_in_use(&namespace, rank) > least {
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

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::CheckpointState;
    use storaged_wire::local::DurableWish;
    use storaged_wire::peer::PeerMessage;

    use crate::api::{Input, Now};
    use crate::limits::KEPT_UNPROTECTED_MS;
    use crate::node::Node;
    use crate::testkit::{hear_from_all, last_that_keeps, manifest};

    /// A peer tells of the commit of a step.
    fn told_of(node: &mut Node, at: u64, step: u64) {
        let manifest = manifest(step, &["a", "b"], &["d", "c"], 5, digest(b"any"));
        let committed = PeerMessage::Committed {
            manifest: manifest.seal().expect("a sound manifest").shared(),
            durable: DurableWish::Never,
        };
        hear_from_all(node, at, &committed);
    }

    /// And that it is protected.
    fn protected(node: &mut Node, at: u64, step: u64) {
        let manifest = manifest(step, &["a", "b"], &["d", "c"], 5, digest(b"any"));
        let manifest = manifest.seal().expect("a sound manifest").name();
        hear_from_all(node, at, &PeerMessage::Protected { manifest, bears: 2 });
    }

    fn known(node: &Node) -> Vec<(u64, CheckpointState)> {
        let all = node.context().checkpoints.values();
        all.map(|c| (c.key.step.get(), c.state)).collect()
    }

    /// A node that was restarted: were the older step not taken up, nobody could put its blocks back there.
    #[test]
    fn a_node_that_hears_of_the_newer_step_first_keeps_the_older_one_too() {
        use CheckpointState::Protected;
        let mut node = last_that_keeps(2, &["a", "b", "d", "c"], 2, 2);
        told_of(&mut node, 1, 3);
        protected(&mut node, 2, 3);
        told_of(&mut node, 3, 2);
        node.handle(Now(1_500), Input::Tick);
        protected(&mut node, 1_600, 2);
        let late = 2 * KEPT_UNPROTECTED_MS;
        node.handle(Now(late), Input::Tick);
        assert_eq!(known(&node), [(2, Protected), (3, Protected)]);
        // Two are as many as stay.
        told_of(&mut node, late + 1, 1);
        assert_eq!(known(&node).len(), 2);
    }

    #[test]
    fn what_is_not_protected_in_time_goes() {
        let mut node = last_that_keeps(2, &["a", "b", "d", "c"], 2, 2);
        told_of(&mut node, 1, 3);
        protected(&mut node, 2, 3);
        told_of(&mut node, 3, 2);
        node.handle(Now(KEPT_UNPROTECTED_MS), Input::Tick);
        assert_eq!(known(&node).len(), 2);
        node.handle(Now(KEPT_UNPROTECTED_MS + 1_003), Input::Tick);
        assert_eq!(known(&node), [(3, CheckpointState::Protected)]);
    }
}
