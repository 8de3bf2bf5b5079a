//! Committed steps that a job has gone on without: nobody can make them safer, and were they kept for what may come back, they would hold
//! all slots. The one that it has gone on from is none of them, though a run before has saved it: not until saves have lacked room for long.

use storaged_wire::peer::{CheckpointKey, HighMark};
use storaged_wire::{CheckpointState, NodeName};

use super::room::Waited;
use crate::api::Now;
use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::limits;

impl Context {
    /// Somebody has opened a shard of a checkpoint here, as ranks do that restart.
    pub(crate) fn note_opened(&mut self, key: &CheckpointKey) {
        if let Some(table) = self.namespaces.get_mut(&key.namespace) {
            table.opened.opens(key.mark());
        }
    }

    /// Whether the run may have gone on from a step: a rank here has opened it, or none that is still here was opened, as where a job restarts
    /// within its processes or from another node's shards, and no older run has committed a newer one.
    fn is_restarted_from(&self, key: &CheckpointKey) -> bool {
        let Some(table) = self.namespaces.get(&key.namespace) else {
            return false;
        };
        let is_known = |mark: HighMark| {
            self.checkpoints.contains_key(&CheckpointKey {
                namespace: key.namespace.clone(),
                run: mark.run,
                step: mark.step,
            })
        };
        let is_it = if !table.opened.any(is_known) && !planted!("bases_are_opened_here") {
            let mut newest = self.checkpoints.values().rev();
            let newest = newest.find(|c| {
                let is_of_job = c.key.namespace == key.namespace;
                is_of_job && c.manifest.is_some() && self.is_of_older_run(c)
            });
            newest.is_some_and(|newest| newest.key == *key)
        } else {
            table.opened.has(key.mark())
        };
        is_it && !planted!("bases_of_runs_left_behind")
    }

    /// Whether a job has gone on without a step that can be made no safer, and a trainer has waited long enough for its slot.
    pub(super) fn is_left_for_good(&self, checkpoint: &Checkpoint, waited: Waited) -> bool {
        // Whoever sees few others is more likely to be away itself, and does not know what was protected since.
        let has_waited = self
            .sees_few_since()
            .is_none_or(|since| self.lacked_since(waited, since) >= limits::GONE_WORDS_MS);
        let is_base = || {
            // What a trainer has lacked room for before its node went says nothing of whether that comes back.
            let lacked_ms = self.lacked_since(waited, self.last_one_went(checkpoint));
            let lacks_for_long = lacked_ms >= limits::GONE_WORDS_MAX_MS;
            (!lacks_for_long || planted!("bases_hold_slots_for_ever"))
                && self.is_restarted_from(&checkpoint.key)
        };
        (has_waited || planted!("cut_off_nodes_hurry"))
            && self.was_left_behind(checkpoint)
            && !is_base()
    }

    /// How long a trainer has lacked a slot since then.
    fn lacked_since(&self, waited: Waited, since: Now) -> u64 {
        waited.lacking_ms.min(self.now.since(since))
    }

    /// When the last node with a shard of it went that is gone.
    fn last_one_went(&self, checkpoint: &Checkpoint) -> Now {
        let shards = checkpoint.manifest.as_ref().map(|it| &it.manifest().shards);
        let went = shards.into_iter().flatten();
        let went = went.filter_map(|shard| Some(self.down.get(&shard.node)?.since));
        went.max().unwrap_or_default()
    }

    /// Since when fewer than a majority of the members can be heard here, this node among them; none if more can.
    fn sees_few_since(&self) -> Option<Now> {
        let members = self.setup.members.iter().map(|member| &member.name);
        let absent = members.filter(|name| *name != self.me() && !self.is_up(name));
        let since = |name: &NodeName| self.down.get(name).map_or(Now(0), |down| down.since);
        let mut absent: Vec<Now> = absent.map(since).collect();
        absent.sort_unstable();
        absent
            .get(self.setup.members.len() - self.majority())
            .copied()
    }

    /// Whether the run that waits for the slot has restarted without this step: an older run committed it, and a node with a shard
    /// that is nowhere else is gone. Were that node lost for good, such steps would hold all slots, and no newer step would be
    /// saved that could take their place.
    fn was_left_behind(&self, checkpoint: &Checkpoint) -> bool {
        let Some(manifest) = &checkpoint.manifest else {
            return false;
        };
        let mut shards = manifest.manifest().shards.iter();
        checkpoint.state < CheckpointState::Protected
            && self.is_of_older_run(checkpoint)
            && self.settled()
            && shards.any(|shard| self.is_gone(&shard.node))
            && self.bears(checkpoint).is_none_or(|bears| bears.losses == 0)
    }

    pub(super) fn is_of_older_run(&self, checkpoint: &Checkpoint) -> bool {
        let table = self.namespaces.get(&checkpoint.key.namespace);
        table.is_some_and(|table| checkpoint.key.run < table.fence)
    }
}
