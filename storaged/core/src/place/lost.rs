//! Committed checkpoints that have lost a shard before they were protected. Until then each shard is on one node only; if
//! that node is restarted nobody can bring the shard back, and the checkpoint will never be whole again. It is given up, so
//! that it holds no slot of the other ranks: after as many of them as a rank has slots, nothing would be saved any more.

use storaged_plan::LaneBlocks;
use storaged_wire::CheckpointState;
use storaged_wire::peer::{CheckpointKey, Lane};

use super::Blocks;
use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::limits;

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
            .map(|c| (c.key.clone(), self.loss_of(c)))
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

    /// Which shard can neither be read nor decoded, not even with all that nodes may hold that have not said so.
    fn loss_of(&self, checkpoint: &Checkpoint) -> Option<String> {
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
            let may_return = || !self.has_left(node) || planted!("shards_of_the_removed_awaited");
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
            let shard = blocks.data[lost].as_ref()?;
            let (rank, node) = (shard.rank, &shard.node);
            Some(format!(
                "the shard of rank {rank} was lost with {node} before it was protected"
            ))
        })
    }
}
