//! Commits that a home node knows by word alone and that those disown who should hold its shards. A home node that has no rank of the
//! job has nothing to compare a commit with: one that a peer has made up it would pass on, code and propose for ever, and the true one
//! of the same step would find its place taken.
//!
//! Of a true commit every owner that is up has heard within seconds, and none of those denies it: what its owners deny so that it cannot
//! be decoded is nobody's. A peer that denies what is true counts for the blocks that it could lose as well.

use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{CheckpointState, Digest, NodeName};

use super::Blocks;
use super::lost::Denials;
use crate::catalog::{Checkpoint, GivenUpCause};
use crate::context::Context;
use crate::limits;

impl Context {
    /// Asks those that have to do with such a commit, and have not said that they know it, whether they do. Told first, they know one that
    /// is true.
    pub(crate) fn ask_owners(&mut self) {
        let all = self.checkpoints.values();
        let waiting = all.filter(|c| self.waits_bare_as_home(c));
        let asked = waiting.filter_map(|c| {
            let manifest = c.manifest.as_ref()?;
            let mut nodes = self.stakeholders(manifest);
            nodes.retain(|node| node != self.me() && !c.told.contains_key(node));
            Some((manifest.name(), nodes))
        });
        for (manifest, nodes) in asked.collect::<Vec<_>>() {
            for node in nodes {
                let done = Vec::new();
                self.send(&node, PeerMessage::Owed { manifest, done });
            }
        }
    }

    /// Forgets what is disowned for some time, and tells no others to give it up: that would end the true commit of the same step where
    /// that is known.
    pub(crate) fn forget_disowned(&mut self) {
        let now = self.now;
        let all = self.checkpoints.values();
        let judged = all.filter_map(|c| Some((c.key.clone(), c.name()?, self.is_disowned(c))));
        for (key, name, is_disowned) in judged.collect::<Vec<_>>() {
            let Some(checkpoint) = self.checkpoints.get_mut(&key) else {
                continue;
            };
            let since = &mut checkpoint.standing.disowned_since;
            *since = is_disowned.then(|| since.unwrap_or(now));
            let is_due = since.is_some_and(|since| now.since(since) >= limits::LOST_AFTER_MS);
            if is_due && !planted!("disowned_commits_kept") {
                self.forget_as_disowned(&key, name);
            }
        }
    }

    fn forget_as_disowned(&mut self, key: &CheckpointKey, name: Digest) {
        let cause = GivenUpCause::Disowned;
        self.ends.note_given_up(name, key.clone(), self.now, cause);
        self.forget_commit(key);
        // Others hold it on this node's word.
        self.say_let_go(name, key);
    }

    /// Whether this is a home node that has nothing of a commit but word of it, for long.
    fn waits_bare_as_home(&self, checkpoint: &Checkpoint) -> bool {
        let is_old = |at| self.now.since(at) >= limits::UNCONFIRMED_MS;
        checkpoint.state == CheckpointState::Committed
            && checkpoint.is_bare()
            && checkpoint.committed_at.is_some_and(is_old)
            && checkpoint.homes.contains(self.me())
            && !checkpoint.standing.is_called_protected()
            && !self.is_pinned(&checkpoint.key)
    }

    /// Whether so many of those deny a commit that should hold its shards that the others could not decode it, and hardly anybody has any.
    fn is_disowned(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.owing.is_retired_somewhere()
            && self.settled()
            && self.waits_bare_as_home(checkpoint)
            && self.holders_of_shards(checkpoint) < limits::WORDS_NEEDED
            && self.loss_of(checkpoint, Denials::Heard).is_some()
    }

    /// Whether a node that is up has said that it does not know a checkpoint, and has had the time to hear of it since its link is up. It may
    /// have heard of it after it said so.
    pub(super) fn denies(&self, checkpoint: &Checkpoint, node: &NodeName) -> bool {
        let has_listened = self
            .peers
            .get(node)
            .is_some_and(|peer| self.now.since(peer.since) >= limits::COMMIT_SETTLE_MS);
        has_listened
            && self.is_believed(node)
            && checkpoint.owing.retired_at.contains(node)
            && !checkpoint.told.contains_key(node)
    }

    /// Nodes that are up and say that they hold shards of a checkpoint. They can have sealed none of a step that was made up.
    fn holders_of_shards(&self, checkpoint: &Checkpoint) -> usize {
        let own = Blocks::default();
        let there = self.blocks_there(checkpoint, &own);
        there
            .values()
            .filter(|blocks| !blocks.shards.is_empty())
            .count()
    }
}

#[cfg(test)]
mod tests;
