//! Committed steps that a job has gone on without: nobody can make them safer, and were they kept for what may come back, they would hold
//! all slots. The one that it has gone on from is none of them, though a run before has saved it.

use storaged_wire::peer::CheckpointKey;
use storaged_wire::{CheckpointState, NodeName};

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

    fn is_restarted_from(&self, key: &CheckpointKey) -> bool {
        let table = self.namespaces.get(&key.namespace);
        let is_it = table.is_some_and(|table| table.opened.has(key.mark()));
        is_it && !planted!("bases_of_runs_left_behind")
    }

    /// Whether a job has gone on without a step that can be made no safer, and a trainer has waited long enough for its slot.
    pub(super) fn is_left_for_good(&self, checkpoint: &Checkpoint, waited_ms: u64) -> bool {
        // Whoever sees few others is more likely to be away itself, and does not know what was protected since.
        let has_waited = self
            .sees_few_since()
            .is_none_or(|since| waited_ms.min(self.now.since(since)) >= limits::GONE_WORDS_MS);
        (has_waited || planted!("cut_off_nodes_hurry")) && self.was_left_behind(checkpoint)
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
            && !self.is_restarted_from(&checkpoint.key)
            && self.settled()
            && shards.any(|shard| self.is_gone(&shard.node))
            && self.bears(checkpoint).is_none_or(|bears| bears.losses == 0)
    }

    pub(super) fn is_of_older_run(&self, checkpoint: &Checkpoint) -> bool {
        let table = self.namespaces.get(&checkpoint.key.namespace);
        table.is_some_and(|table| checkpoint.key.run < table.fence)
    }
}
