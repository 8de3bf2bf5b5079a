//! Fingerprints of shards' chunks: where they come from, and what parity chunks must have by them. The code is linear and
//! so is a fingerprint, so a parity chunk's is the same combination of the data chunks' as the chunk is of the chunks.

use std::sync::Arc;

use storaged_codec::{CodingMatrix, Fingerprint, engine};
use storaged_wire::peer::{CheckpointKey, SessionFault};
use storaged_wire::{Manifest, NodeName, Rank};

use super::session::JoinedSession;
use crate::context::Context;

/// Nothing can be verified without the fingerprints of this node's shard.
pub(super) fn missing(node: &NodeName) -> SessionFault {
    SessionFault::Neighbour {
        node: node.clone(),
        reason: "has not said the fingerprints of its shard's chunks, one per chunk, beside a table of digests that \
                 the manifest proves"
            .into(),
    }
}

impl Context {
    /// The fingerprints of a shard's chunks, if they are known here, all of them.
    pub(crate) fn prints_known(
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

    /// Those that were fetched for a session, or else those that are known here.
    pub(super) fn prints_here(
        &self,
        joined: &JoinedSession,
        rank: Rank,
    ) -> Option<Arc<[Fingerprint]>> {
        let fetched = joined.fetch.tables().prints(rank).cloned();
        fetched.or_else(|| self.prints_known(&joined.key, rank))
    }

    /// What every chunk of parity `index` must have.
    pub(super) fn parity_prints(
        &self,
        joined: &JoinedSession,
        manifest: &Manifest,
        index: u32,
    ) -> Result<Arc<[Fingerprint]>, SessionFault> {
        let matrix = CodingMatrix::cauchy(manifest.geometry);
        let stripes = usize::try_from(joined.stripe_count).unwrap_or(usize::MAX);
        // All fingerprints side by side are a block like any other.
        let mut sum = vec![0; stripes.saturating_mul(Fingerprint::BYTES)];
        for (block, entry) in joined.derived.blocks.data.iter().enumerate() {
            let Some(shard) = entry else { continue };
            let known = self.prints_here(joined, shard.rank);
            let known = known.ok_or_else(|| missing(&shard.node))?;
            let bytes: Vec<u8> = known.iter().flat_map(|print| *print.as_bytes()).collect();
            let both = sum.len().min(bytes.len());
            let coefficient = matrix.coefficient(index as usize, block);
            engine().fold(&mut [&mut sum[..both]], &[coefficient], &bytes[..both]);
        }
        let expected = sum.as_chunks().0.iter().copied();
        Ok(expected.map(Fingerprint::from_bytes).collect())
    }
}
