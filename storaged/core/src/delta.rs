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
        blocks: &LaneBlocks,
    ) -> Option<Digest> {
        let older = self.checkpoints.range(..key).rev();
        older
            .map(|(_, checkpoint)| checkpoint)
            .filter(|c| c.key.namespace == key.namespace && c.state >= CheckpointState::Protected)
            .filter(|c| c.state < CheckpointState::Retired)
            .find(|basis| {
                let lane = same_lane(basis, manifest, blocks);
                lane.is_some_and(|lane| basis.parity.keys().any(|(of, _)| *of == lane))
            })
            .and_then(crate::catalog::Checkpoint::name)
    }
}

/// The lane of a basis that has the blocks of a new one. Its group may have had another number, where others have come or gone.
pub(crate) fn lane_in_basis(basis: &ManifestBytes, blocks: &LaneBlocks) -> Option<Lane> {
    let shard = blocks.data.iter().flatten().next()?;
    LaneBlocks::find(basis, shard.rank).map(|(lane, _)| lane)
}

fn same_lane(
    basis: &crate::catalog::Checkpoint,
    manifest: &ManifestBytes,
    blocks: &LaneBlocks,
) -> Option<Lane> {
    let old = basis.manifest.as_ref()?;
    let lane = lane_in_basis(old, blocks)?;
    let old_blocks = LaneBlocks::of(old, lane)?;
    let who = |blocks: &LaneBlocks| {
        let entries = blocks.data.iter();
        entries
            .map(|entry| entry.as_ref().map(|shard| (shard.rank, shard.node.clone())))
            .collect::<Vec<_>>()
    };
    let (old, manifest) = (old.manifest(), manifest.manifest());
    let is_same = old.geometry == manifest.geometry
        && old.chunk == manifest.chunk
        && old_blocks.coding == blocks.coding
        && who(&old_blocks) == who(blocks);
    is_same.then_some(lane)
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::manifest::GroupEntry;

    use super::*;
    use crate::testkit::{manifest, name};

    /// Two groups have come before that of the ranks, and its lane has another number.
    #[test]
    fn a_lane_is_found_in_its_basis_by_its_ranks() {
        let old = manifest(1, &["a", "b"], &["c"], 5, digest(b"one"));
        let mut new = manifest(2, &["a", "b"], &["c"], 5, digest(b"two"));
        let other = |data: &str, coding: &str| GroupEntry {
            data: vec![name(data)],
            coding: vec![name(coding)],
        };
        new.groups.insert(0, other("c", "a"));
        new.groups.insert(0, other("d", "b"));
        let (old, new) = (old.seal().unwrap(), new.seal().unwrap());
        let lane = |group| Lane { group, index: 0 };
        let blocks = LaneBlocks::of(&new, lane(2)).unwrap();
        assert_eq!(lane_in_basis(&old, &blocks), Some(lane(0)));
        assert_eq!(lane_in_basis(&new, &blocks), Some(lane(2)));
    }
}
