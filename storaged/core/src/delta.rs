//! Policy of the verb *delta*: which earlier checkpoint a new one is coded as a difference from.

use storaged_plan::LaneBlocks;
use storaged_wire::peer::{CheckpointKey, Lane};
use storaged_wire::{CheckpointState, Digest, ManifestBytes};

use crate::context::Context;

impl Context {
    /// The newest protected checkpoint whose lane has the same ranks on the same nodes, the same coding nodes and
    /// the same chunks, and whose parity this node holds.
    pub(crate) fn basis_for(
        &self,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
        lane: Lane,
        blocks: &LaneBlocks,
    ) -> Option<Digest> {
        let older = self.checkpoints.range(..key).rev();
        older
            .map(|(_, checkpoint)| checkpoint)
            .filter(|c| c.key.namespace == key.namespace && c.state >= CheckpointState::Protected)
            .filter(|c| c.state < CheckpointState::Retired)
            .find(|c| {
                c.parity.keys().any(|(of, _)| *of == lane) && same_lane(c, manifest, lane, blocks)
            })
            .and_then(crate::catalog::Checkpoint::name)
    }
}

fn same_lane(
    basis: &crate::catalog::Checkpoint,
    manifest: &ManifestBytes,
    lane: Lane,
    blocks: &LaneBlocks,
) -> bool {
    let Some(old) = &basis.manifest else {
        return false;
    };
    let Some(old_blocks) = LaneBlocks::of(old, lane) else {
        return false;
    };
    let who = |blocks: &LaneBlocks| {
        let entries = blocks.data.iter();
        entries
            .map(|entry| entry.as_ref().map(|shard| (shard.rank, shard.node.clone())))
            .collect::<Vec<_>>()
    };
    let (old, manifest) = (old.manifest(), manifest.manifest());
    old.geometry == manifest.geometry
        && old.chunk == manifest.chunk
        && old_blocks.coding == blocks.coding
        && who(&old_blocks) == who(blocks)
}
