//! Whether there is room for a step to stay: what pinned steps take of a node, and will take once they are back, beside what saves need.

use std::collections::BTreeMap;

use storaged_plan::LaneBlocks;
use storaged_wire::Namespace;
use storaged_wire::peer::CheckpointKey;

use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::pins::key_at;
use crate::stage::slots::slot_capacity;

impl Context {
    /// Why saves would find no room beside a step that stays for good: two more of its size must fit, without anything else that is pinned, and
    /// beside what other jobs need.
    pub(super) fn lack_of_room_beside(&self, key: &CheckpointKey) -> Option<String> {
        let held = self.bytes_by_job();
        let of_job = held.get(&key.namespace).copied().unwrap_or(0);
        let here = self.bytes_here(key);
        let of_step = here.saturating_add(self.bytes_to_come(key));
        let to_come = self
            .bytes_to_come(key)
            .saturating_add(self.pinned_to_come(&key.namespace, Some(key)));
        let pinned = self.bytes_pinned(&key.namespace, Some(key)) + here;
        let left = self.budget.room_of(&key.namespace);
        let left = left.saturating_add(of_job.saturating_sub(pinned));
        let others = self.lacked_by_other_jobs(&key.namespace, &held);
        let needed = of_step.saturating_mul(2).saturating_add(to_come);
        if left.saturating_sub(others) >= needed || planted!("pins_take_the_room") {
            return None;
        }
        let beside = match others {
            0 => String::new(),
            bytes => format!(
                ", of which other jobs need {bytes} bytes for their own saves and pinned steps"
            ),
        };
        Some(format!(
            "it and two more steps must fit, which takes {needed} bytes more than is here, and {left} are left{beside}: raise memory.budget there{}",
            self.pins_in_words(&key.namespace)
        ))
    }

    /// What a step takes of this node's budget.
    fn bytes_here(&self, key: &CheckpointKey) -> u64 {
        let checkpoint = self.checkpoints.get(key);
        checkpoint.map_or(0, |it| self.bytes_of(it))
    }

    /// What a step will take beside what is here of it, once it has been put back. Of one that this node has let go nobody tells how much it
    /// was: as much as the newest one of its job.
    fn bytes_to_come(&self, key: &CheckpointKey) -> u64 {
        if planted!("pins_come_back_without_room") {
            return 0;
        }
        if let Some(checkpoint) = self.checkpoints.get(key) {
            return self.bytes_lacked_here(checkpoint);
        }
        let newest = self.newest_safe(&key.namespace);
        let let_go = self.ends.of(key).and(newest);
        let_go.map_or(0, |newest| self.bytes_here(&newest))
    }

    /// The same of the pinned steps of a job, but for one of them. Each may be pinned while the others are not back yet: were those not counted,
    /// together they would leave no room for saves.
    fn pinned_to_come(&self, namespace: &Namespace, but: Option<&CheckpointKey>) -> u64 {
        let pinned = self.pinned_marks(namespace).into_iter();
        let keys = pinned.map(|at| key_at(namespace, at));
        let counted = keys.filter(|key| Some(key) != but);
        counted.map(|key| self.bytes_to_come(&key)).sum()
    }

    /// What the blocks take of this node's budget that belong here and are not.
    fn bytes_lacked_here(&self, checkpoint: &Checkpoint) -> u64 {
        let Some(manifest) = checkpoint.manifest.as_ref() else {
            return 0;
        };
        let missing = self.own_missing(checkpoint);
        let bytes = missing.iter().filter_map(|(lane, block)| {
            let lane = LaneBlocks::of(manifest, *lane)?;
            match lane.data.get(*block) {
                Some(shard) => shard.as_ref().map(|shard| slot_capacity(shard.length)),
                None => Some(lane.length),
            }
        });
        bytes.sum()
    }

    /// What the pinned steps of a job take, but for one of them.
    fn bytes_pinned(&self, namespace: &Namespace, but: Option<&CheckpointKey>) -> u64 {
        let pinned = self.pinned_here(namespace).into_iter();
        let counted = pinned.filter(|key| Some(key) != but);
        counted.map(|key| self.bytes_here(&key)).sum()
    }

    /// What the other jobs have yet to reserve: of those that save here until each has room for two steps, its newest one and the one that it
    /// saves; and of all what is pinned and to come back. Other tenants' are not counted: what they may have beside this one is theirs by
    /// their guarantees.
    fn lacked_by_other_jobs(&self, of: &Namespace, held: &BTreeMap<Namespace, u64>) -> u64 {
        let jobs = self.namespaces.keys();
        let others = jobs.filter(|job| *job != of && job.tenant() == of.tenant());
        let lacked = others.map(|job| {
            let held = held.get(job).copied().filter(|_| self.is_in_use(job));
            let for_saves = held.map_or(0, |bytes| self.lacked_for_saves(job, bytes));
            for_saves.saturating_add(self.pinned_to_come(job, None))
        });
        lacked.sum()
    }

    /// What a job that has so many bytes here lacks for two steps.
    fn lacked_for_saves(&self, job: &Namespace, bytes: u64) -> u64 {
        let newest = self.newest_safe(job);
        let of_step = newest.map_or(0, |key| self.bytes_here(&key));
        let unpinned = bytes.saturating_sub(self.bytes_pinned(job, None));
        of_step.saturating_mul(2).saturating_sub(unpinned)
    }

    /// What a checkpoint takes of this node's budget.
    fn bytes_of(&self, checkpoint: &Checkpoint) -> u64 {
        let slots = checkpoint.shards.values();
        let slots = slots.filter_map(|shard| self.slots.get(&shard.slot));
        let slots: u64 = slots.map(|slot| slot.capacity).sum();
        slots + self.parity_kept(checkpoint)
    }
}
