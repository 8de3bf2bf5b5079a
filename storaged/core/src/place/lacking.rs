//! What of protected checkpoints has still to be put back, and on which nodes, as their home nodes count it: for operators.

use storaged_plan::LaneBlocks;
use storaged_wire::{CheckpointState, ManifestBytes, NodeName};

use super::missing::BlockSet;
use crate::catalog::Checkpoint;
use crate::context::Context;

/// What a node has to get back of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lacking {
    pub node: NodeName,
    pub blocks: u64,
    /// No more than these move: of a block with rotten chunks these alone.
    pub bytes: u64,
}

impl Context {
    /// By node; none where others count it. Of a step that is not protected nothing is owed yet, and of one that stays only for a reader,
    /// or for the next increment, nothing is put back.
    pub(crate) fn lacking(&self, checkpoint: &Checkpoint) -> Option<Vec<Lacking>> {
        let manifest = checkpoint.manifest.as_ref()?;
        let elsewhere = checkpoint.standing.missing.as_ref();
        let elsewhere = elsewhere.filter(|_| self.counts_itself(checkpoint))?;
        let heals = checkpoint.state >= CheckpointState::Protected
            && self.kept_for(checkpoint).is_none()
            && !self.is_only_base(checkpoint);
        if !heals {
            return Some(Vec::new());
        }
        let own = self.own_missing(checkpoint);
        let own = Some((self.me(), &own)).filter(|(_, blocks)| !blocks.is_empty());
        let all = own.into_iter().chain(elsewhere.by_node());
        let counted = all.map(|(node, blocks)| Lacking {
            node: node.clone(),
            blocks: blocks.len() as u64,
            bytes: bytes_of(manifest, blocks),
        });
        Some(counted.collect())
    }
}

fn bytes_of(manifest: &ManifestBytes, blocks: &BlockSet) -> u64 {
    let bytes = blocks.iter().filter_map(|(lane, block)| {
        let lane = LaneBlocks::of(manifest, *lane)?;
        match lane.data.get(*block) {
            Some(shard) => shard.as_ref().map(|shard| shard.length),
            None => Some(lane.length),
        }
    });
    bytes.sum()
}
