//! Fingerprints of shards' chunks: where they come from, and what parity chunks must have by them. The code is linear and
//! so is a fingerprint, so a parity chunk's is the same combination of the data chunks' as the chunk is of the chunks.

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_codec::{CodingMatrix, Fingerprint};
use storaged_wire::peer::{CheckpointKey, LeafTable, SessionFault, SessionKind};
use storaged_wire::{Manifest, NodeName, Rank, SessionId};

use super::member::Joined;
use crate::node::Node;

/// Fingerprints of chunks, by shard.
pub(super) type Prints = BTreeMap<Rank, Arc<[Fingerprint]>>;

/// The fingerprints in some tables.
pub(super) fn said(tables: &[LeafTable]) -> Prints {
    let prints = |table: &LeafTable| (table.rank, table.prints.as_slice().into());
    tables.iter().map(prints).collect()
}

/// Nothing can be verified without the fingerprints of this node's shard.
pub(super) fn missing(node: &NodeName) -> SessionFault {
    SessionFault::Neighbour {
        node: node.clone(),
        reason: "has not said the fingerprints of its shard's chunks, one per chunk, beside a table of digests that \
                 the manifest proves"
            .into(),
    }
}

impl Node {
    /// The fingerprints of a shard's chunks, if they are known here, all of them.
    pub(super) fn prints_known(
        &self,
        key: &CheckpointKey,
        rank: Rank,
    ) -> Option<Arc<[Fingerprint]>> {
        let checkpoint = self.checkpoints.get(key)?;
        if let Some(shard) = checkpoint.shards.get(&rank) {
            let chunks = shard.digests.as_ref().map(|(leaves, _)| leaves.len());
            if chunks == Some(shard.prints.len()) {
                return Some(shard.prints.clone());
            }
        }
        checkpoint.prints.get(&rank).cloned()
    }

    /// The tables that a member may speak of: in an encode that of its own shard, because fingerprints are believed.
    pub(super) fn tables_from(
        &self,
        from: &NodeName,
        session: SessionId,
        mut tables: Vec<LeafTable>,
    ) -> Vec<LeafTable> {
        let led = self.led.get(&session);
        if let Some(led) = led.filter(|led| matches!(led.record.kind, SessionKind::Encode { .. }))
            && let Some(manifest) = self.manifest_named(led.record.manifest)
        {
            let entry = |table: &LeafTable| manifest.manifest().shard(table.rank);
            tables.retain(|table| entry(table).is_some_and(|shard| shard.node == *from));
        }
        tables
    }

    /// What every chunk of parity `index` must have.
    pub(super) fn parity_prints(
        &self,
        joined: &Joined,
        manifest: &Manifest,
        prints: &Prints,
        index: u32,
    ) -> Result<Arc<[Fingerprint]>, SessionFault> {
        let matrix = CodingMatrix::cauchy(manifest.geometry);
        let stripes = usize::try_from(joined.stripe_count).unwrap_or(usize::MAX);
        let mut expected = vec![Fingerprint::ZERO; stripes];
        for (block, entry) in joined.derived.blocks.data.iter().enumerate() {
            let Some(shard) = entry else { continue };
            let known = prints.get(&shard.rank).cloned();
            let known = known.or_else(|| self.prints_known(&joined.key, shard.rank));
            let known = known.ok_or_else(|| missing(&shard.node))?;
            let coefficient = matrix.coefficient(index as usize, block);
            for (sum, print) in expected.iter_mut().zip(known.iter()) {
                sum.fold(coefficient, print);
            }
        }
        Ok(expected.into())
    }
}
