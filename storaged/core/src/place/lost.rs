//! Committed checkpoints that have lost a shard before they were protected. Until then each shard is on one node only; if
//! that node is restarted nobody can bring the shard back, and the checkpoint will never be whole again. It is given up, so
//! that it holds no slot of the other ranks: after as many of them as a rank has slots, nothing would be saved any more.

use storaged_plan::LaneBlocks;
use storaged_wire::peer::{CheckpointKey, Lane};
use storaged_wire::{CheckpointState, NodeName, ShardEntry};

use super::Blocks;
use super::standing::is_held;
use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::limits;

/// Whether nodes count that say of a checkpoint that they have never heard of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Denials {
    Ignored,
    Heard,
}

impl Context {
    /// As a home node: gives up what has been lost for as long as a session might still end that has had the shard.
    pub(crate) fn give_up_lost(&mut self) {
        let now = self.now;
        let committed = self.checkpoints.values().filter(|c| {
            let is_called_safe = c.standing.is_called_protected();
            c.state == CheckpointState::Committed
                && !is_called_safe
                && self.homes_of(&c.key).contains(self.me())
        });
        let losses: Vec<(CheckpointKey, Option<String>)> = committed
            .map(|c| (c.key.clone(), self.loss_of(c, Denials::Ignored)))
            .collect();
        for (key, loss) in losses {
            let Some(checkpoint) = self.checkpoints.get_mut(&key) else {
                continue;
            };
            let Some(reason) = loss else {
                checkpoint.standing.lost_since = None;
                continue;
            };
            let since = *checkpoint.standing.lost_since.get_or_insert(now);
            if now.since(since) >= limits::LOST_AFTER_MS {
                self.abandon_everywhere(&key, &reason);
            }
        }
    }

    /// What has become of a shard that can neither be read nor decoded.
    pub(super) fn loss_of(&self, checkpoint: &Checkpoint, denials: Denials) -> Option<String> {
        let shard = self.lost_shard(checkpoint, denials)?;
        Some(self.why_lost(checkpoint, &shard))
    }

    /// Which shard can neither be read nor decoded, not even with all that nodes may hold that have not said so.
    pub(super) fn lost_shard(
        &self,
        checkpoint: &Checkpoint,
        denials: Denials,
    ) -> Option<ShardEntry> {
        let manifest = checkpoint.manifest.as_ref()?;
        let own = Blocks::of(checkpoint);
        let there = self.blocks_there(checkpoint, &own);
        let may_hold = |lane: Lane, blocks: &LaneBlocks, block: usize| {
            let Some(node) = blocks.node(block) else {
                return false;
            };
            let shard = blocks.data.get(block).and_then(Option::as_ref);
            let copied = shard.is_some_and(|s| checkpoint.shards_durable.contains(&s.rank));
            let said = there.get(node);
            // Who is down may be back with it; who has left the cluster is not.
            let may_return = || {
                let is_gone = self.has_left(node) && !planted!("shards_of_the_removed_awaited");
                let is_parity = block >= blocks.data.len();
                let is_denied = denials == Denials::Heard && self.denies(checkpoint, node);
                !(is_gone
                    || is_denied
                    || is_parity && self.says_nothing_of_parity(checkpoint, node))
            };
            copied || said.map_or_else(may_return, |said| said.has(lane, blocks, block))
        };
        LaneBlocks::all(manifest).iter().find_map(|(lane, blocks)| {
            let held = (0..blocks.blocks()).filter(|block| may_hold(*lane, blocks, *block));
            if held.count() >= blocks.needed() {
                return None;
            }
            let mut data = 0..blocks.data.len();
            let lost =
                data.find(|block| !blocks.is_zeros(*block) && !may_hold(*lane, blocks, *block))?;
            blocks.data[lost].clone()
        })
    }

    /// A step that nodes have let go for a newer one is told again by a home node that has not heard of that, and lacks its shards then:
    /// nothing was lost with a node that has been up since.
    fn why_lost(&self, checkpoint: &Checkpoint, shard: &ShardEntry) -> String {
        let key = &checkpoint.key;
        let table = self.namespaces.get(&key.namespace);
        let given_up = table.and_then(|table| table.abandoned.get(&(key.run, key.step)));
        if let Some(reason) = given_up {
            return reason.clone();
        }
        let (rank, node) = (shard.rank, &shard.node);
        let peer = self.peers.get(node);
        let has_stayed = peer.is_some_and(|it| Some(it.known_since) <= checkpoint.committed_at);
        if !has_stayed {
            return format!(
                "the shard of rank {rank} was lost with {node} before it was protected"
            );
        }
        let mut of_job = self.checkpoints.values();
        let is_newer = |c: &Checkpoint| c.key.namespace == key.namespace && c.key > *key;
        let for_newer = if of_job.any(|c| c.manifest.is_some() && is_newer(c)) {
            " for a newer step"
        } else {
            ""
        };
        format!("{node} has let the shard of rank {rank} go{for_newer} before it was protected")
    }

    /// As a home node: whether a shard's node is gone or has let the checkpoint go, or has lost it and nobody can give it
    /// back.
    pub(crate) fn cannot_come(&self, checkpoint: &Checkpoint, shard: &ShardEntry) -> bool {
        self.is_gone(&shard.node)
            || checkpoint.owing.retired_at.contains(&shard.node)
            || checkpoint.owing.will_not_be_copied_by(&shard.node)
            || (self.has_lost(checkpoint, shard) && !self.is_restored(checkpoint, shard))
    }

    /// Whether a shard's node says that it does not hold it.
    fn has_lost(&self, checkpoint: &Checkpoint, shard: &ShardEntry) -> bool {
        let own = Blocks::of(checkpoint);
        let there = self.blocks_there(checkpoint, &own);
        let found = there.get(&shard.node);
        found.is_some_and(|found| !found.shards.contains(&shard.rank))
    }

    /// Whether a lost shard is going to be put back: it can be decoded, and no node has let the checkpoint go, which would
    /// refuse to take part.
    fn is_restored(&self, checkpoint: &Checkpoint, shard: &ShardEntry) -> bool {
        let own = Blocks::of(checkpoint);
        let there = self.blocks_there(checkpoint, &own);
        let manifest = checkpoint.manifest.as_ref();
        let lane = manifest.and_then(|manifest| LaneBlocks::find(manifest, shard.rank));
        let blocks = lane.and_then(|(lane, _)| {
            let blocks = LaneBlocks::of(manifest?, lane)?;
            Some((lane, blocks))
        });
        let can_decode = blocks.is_some_and(|(lane, blocks)| {
            let all = 0..blocks.blocks();
            let held = all.filter(|block| is_held(&there, lane, &blocks, *block));
            held.count() >= blocks.needed()
        });
        can_decode && !checkpoint.owing.is_retired_somewhere()
    }

    /// Whether a coding node is up and what it may have made does not count: it has let it go, or is not believed. It may do so again
    /// and again, and what is lost would be waited for as long.
    fn says_nothing_of_parity(&self, checkpoint: &Checkpoint, node: &NodeName) -> bool {
        let has_let_go = checkpoint.owing.retired_at.contains(node);
        let counts = self.is_believed(node) && !has_let_go;
        self.is_up(node) && !counts && !planted!("parity_of_liars_awaited")
    }
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::local::DurableWish;
    use storaged_wire::peer::{PeerMessage, UnowedCause};
    use storaged_wire::{EnclosuresHeld, Generation, Rank};

    use crate::api::{Input, Now};
    use crate::node::Node;
    use crate::testkit::{committed, hear, hear_from_all, last_of, manifest, name, sent};

    /// `e` is a home node of it. One of two coding nodes takes a step up and lets it go again and again; `b` has lost the shard of its rank.
    #[test]
    fn what_is_lost_is_given_up_whatever_one_coding_node_does() {
        let mut node = last_of(&["a", "b", "c", "d", "e"], 2, 2);
        let manifest = manifest(2, &["a", "b"], &["c", "d"], 5, digest(b"any"));
        let manifest = manifest.seal().expect("a sound manifest");
        let name = manifest.name();
        let committed = PeerMessage::Committed {
            manifest: manifest.shared(),
            durable: DurableWish::Never,
        };
        hear_from_all(&mut node, 1, &committed);
        let held = |shards: Vec<Rank>| PeerMessage::Held {
            manifest: name,
            version: 1,
            shards,
            parity: Vec::new(),
            enclosures: EnclosuresHeld::All,
        };
        hear(&mut node, 2, "a", held(vec![Rank::new(0)]));
        hear(&mut node, 2, "b", held(Vec::new()));
        hear(&mut node, 2, "c", held(Vec::new()));
        let mut said = Vec::new();
        for half_second in 1..40 {
            let at = 500 * half_second;
            let message = match half_second / 4 % 2 {
                0 => {
                    let cause = UnowedCause::Retired;
                    PeerMessage::Unowed {
                        manifest: name,
                        cause,
                    }
                }
                _ => held(Vec::new()),
            };
            said.extend(hear(&mut node, at, "d", message));
            said.extend(node.handle(Now(at), Input::Tick));
        }
        let is_end = |message: &PeerMessage| matches!(message, PeerMessage::Abandoned { .. });
        assert!(sent(said).iter().any(is_end));
    }

    /// Another daemon runs on a node.
    fn restarts(node: &mut Node, at: u64, peer: &str) {
        let gone = name(peer);
        node.handle(Now(at), Input::PeerDown { node: gone });
        let back = Input::PeerUp {
            node: name(peer),
            generation: Generation::new(2),
        };
        node.handle(Now(at + 1), back);
    }

    /// What `e`, a home node of step 2, says of it when it gives it up: `b` does not have its shard any more, and nobody has parity. These
    /// steps are committed, and something happens to `b` before that.
    fn given_up(steps: &[u64], happens: impl FnOnce(&mut Node)) -> String {
        let mut node = last_of(&["a", "b", "c", "d", "e"], 2, 2);
        let sealed = |step| {
            let manifest = manifest(step, &["a", "b"], &["c", "d"], 5, digest(b"any"));
            manifest.seal().expect("a sound manifest")
        };
        for step in steps {
            hear_from_all(&mut node, 1, &committed(&sealed(*step)));
        }
        happens(&mut node);
        let manifest = sealed(2).name();
        for (from, shards) in [
            ("a", vec![Rank::new(0)]),
            ("b", vec![]),
            ("c", vec![]),
            ("d", vec![]),
        ] {
            let held = PeerMessage::Held {
                manifest,
                version: 1,
                shards,
                parity: Vec::new(),
                enclosures: EnclosuresHeld::All,
            };
            hear(&mut node, 100, from, held);
        }
        let ticks = (1..40).flat_map(|at| node.handle(Now(500 * at), Input::Tick));
        let reason = sent(ticks.collect())
            .into_iter()
            .find_map(|message| match message {
                PeerMessage::Abandoned { reason, .. } => Some(reason),
                _ => None,
            });
        reason.expect("it is given up")
    }

    #[test]
    fn a_node_that_has_been_up_since_a_step_has_let_its_shard_go_and_did_not_lose_it() {
        let for_newer = given_up(&[2, 3], |_| {});
        assert_eq!(
            for_newer,
            "b has let the shard of rank 1 go for a newer step before it was protected"
        );
        let alone = given_up(&[2], |_| {});
        assert_eq!(
            alone,
            "b has let the shard of rank 1 go before it was protected"
        );
        let restarted = given_up(&[2, 3], |node| restarts(node, 50, "b"));
        assert_eq!(
            restarted,
            "the shard of rank 1 was lost with b before it was protected"
        );
    }
}
