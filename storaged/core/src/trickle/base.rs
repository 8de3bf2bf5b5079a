//! Bases: with increments, the newest durable checkpoint stays in RAM beside newer ones, because the next upload is
//! written as what changed since then. It keeps its slots but no parity, is not healed, and goes as soon as a trainer
//! or a reader needs its room: the upload that would have used it then stands alone.

use storaged_wire::peer::CheckpointKey;
use storaged_wire::{CheckpointState, Namespace, Rank, SlotId};

use crate::api::{DurableForm, UploadBase};
use crate::catalog::{Checkpoint, SlotUse};
use crate::context::Context;
use crate::event::Event;

impl Context {
    /// Of the checkpoints older than `newest`, the one to keep for the next increment.
    pub(crate) fn base_to_keep(&self, newest: &CheckpointKey) -> Option<CheckpointKey> {
        if self.setup.durable_form == DurableForm::Full {
            return None;
        }
        let durable = self.checkpoints.range(..=newest).rev().find(|(key, c)| {
            key.namespace == newest.namespace && c.state == CheckpointState::Durable
        });
        durable
            .filter(|(key, c)| *key < newest && !c.shards.is_empty() && !self.is_awaited(c))
            .filter(|(key, _)| !self.is_passed_as_base(key))
            .map(|(key, _)| key.clone())
    }

    /// Whether a newer step is known to be durable, which the next copy is the difference from. It may have had no shard here, on a node that
    /// has no rank of the job any more, and gone at once: the older one would stay for good.
    fn is_passed_as_base(&self, key: &CheckpointKey) -> bool {
        let newest = self.keys.durable(&key.namespace);
        newest.is_some_and(|newest| (newest.run, newest.step) > (key.run, key.step))
    }

    /// Whether a trainer waits for one of the slots that the checkpoint has here.
    fn is_awaited(&self, checkpoint: &Checkpoint) -> bool {
        self.waiters.for_slots().any(|waiter| {
            let attached = self.conns.get(&waiter.id.conn);
            let trainer = attached.and_then(|a| Some((&a.namespace, a.trainer?.1)));
            trainer.is_some_and(|(namespace, rank)| {
                *namespace == checkpoint.key.namespace && checkpoint.shards.contains_key(&rank)
            })
        })
    }

    /// Frees the parity of a checkpoint that is only a base from now on.
    pub(crate) fn make_base(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let sets = std::mem::take(&mut checkpoint.parity);
        if sets.is_empty() {
            return;
        }
        self.keeping.touch(key);
        self.emit(Event::BlocksGone(key.clone()));
        for set in sets.into_values() {
            self.drop_parity(set);
        }
    }

    /// Whether a checkpoint is kept for increments alone.
    pub(crate) fn is_only_base(&self, checkpoint: &Checkpoint) -> bool {
        let newer_is_safe = || {
            let newer = self.checkpoints.range(&checkpoint.key..).skip(1);
            newer
                .take_while(|(key, _)| key.namespace == checkpoint.key.namespace)
                .any(|(_, c)| c.state >= self.safe_state())
        };
        let is_kept = || {
            let kept = self.kept_steps(&checkpoint.key.namespace);
            kept.contains(&checkpoint.key) && !planted!("kept_bases_uncoded")
        };
        self.setup.durable_form == DurableForm::Increments
            && checkpoint.state == CheckpointState::Durable
            && newer_is_safe()
            && !is_kept()
    }

    /// The same of the base that is kept now.
    pub(crate) fn is_base_alone(&self, key: &CheckpointKey) -> bool {
        let checkpoint = self.checkpoints.get(key);
        checkpoint.is_some_and(|checkpoint| self.is_only_base(checkpoint))
    }

    fn spare_bases(&self) -> Vec<CheckpointKey> {
        let unread = |c: &Checkpoint| c.shards.values().all(|shard| shard.readers.is_empty());
        self.checkpoints
            .values()
            .filter(|c| unread(c) && self.is_only_base(c))
            .map(|c| c.key.clone())
            .collect()
    }

    /// Gives up the bases that hold a slot of the rank, for a trainer that needs one; false if there is none.
    pub(crate) fn give_up_base_of(&mut self, namespace: &Namespace, rank: Rank) -> bool {
        let mut bases = self.spare_bases();
        bases.retain(|key| {
            key.namespace == *namespace && self.checkpoints[key].shards.contains_key(&rank)
        });
        for key in &bases {
            self.retire(key);
        }
        !bases.is_empty()
    }

    /// Gives up every base, and the memory of its slots, for something that the budget has no room for; false if there
    /// is none.
    pub(crate) fn give_up_bases(&mut self) -> bool {
        let bases = self.spare_bases();
        for key in &bases {
            let shards = self.checkpoints[key].shards.values();
            let slots: Vec<SlotId> = shards.map(|shard| shard.slot).collect();
            self.retire(key);
            for slot in slots {
                let free = self.slots.get(&slot).map(|slot| &slot.used_for) == Some(&SlotUse::Free);
                if free {
                    self.drop_slot(slot);
                }
            }
        }
        !bases.is_empty()
    }

    /// What the upload of a rank's shard may be written against.
    pub(super) fn upload_base(&self, key: &CheckpointKey, rank: Rank) -> Option<UploadBase> {
        if self.setup.durable_form == DurableForm::Full {
            return None;
        }
        let older = self.checkpoints.range(..key).rev();
        let mut durable = older
            .map(|(_, c)| c)
            .filter(|c| c.key.namespace == key.namespace && c.state == CheckpointState::Durable);
        durable.find_map(|c| {
            Some(UploadBase {
                manifest: c.manifest.clone()?,
                shard: c.shards.get(&rank)?.sealed()?,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::{DurableStep, RunId, Step};

    use super::*;
    use crate::testkit::{job, last_of};

    fn key(run: u64, step: u64) -> CheckpointKey {
        CheckpointKey {
            namespace: job(),
            run: RunId::new(run),
            step: Step::new(step),
        }
    }

    /// Runs count before steps: one that goes back to an older step saves that again.
    #[test]
    fn a_base_is_passed_by_a_newer_durable_step_of_its_job_alone() {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        let cx = node.context_mut();
        let durable = |run, step| DurableStep {
            run: RunId::new(run),
            step: Step::new(step),
            manifest: digest(b"its name"),
        };
        let other = Namespace::new("other").expect("a name");
        cx.keys.note_durable(&other, durable(9, 9));
        assert!(!cx.is_passed_as_base(&key(2, 20)), "nothing is known of it");
        for (durable, is_passed) in [
            (durable(1, 30), false),
            (durable(2, 10), false),
            (durable(2, 20), false),
            (durable(2, 21), true),
            (durable(3, 5), true),
        ] {
            cx.keys.note_durable(&job(), durable);
            assert_eq!(cx.is_passed_as_base(&key(2, 20)), is_passed, "{durable:?}");
        }
    }
}
