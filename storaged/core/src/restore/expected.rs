//! How long a restore is expected to take: part by part, each with the word whether its rate was measured.

use storaged_wire::plan::{ShardSource, Source};
use storaged_wire::verdict::{ExpectedTime, Stretch};
use storaged_wire::{Manifest, NodeName};

use super::rates::TransferRate;
use crate::context::Context;
use crate::limits;

impl Context {
    /// The parts of the slowest rank's restore. Every rank reads its own shard on the node that sealed it, all at once.
    pub(super) fn slowest(&self, manifest: &Manifest, shards: &[ShardSource]) -> Vec<ExpectedTime> {
        let all = shards.iter().map(|shard| self.expected(manifest, shard));
        let slowest = all.max_by_key(|parts| parts.iter().map(|part| part.ms).sum::<u64>());
        slowest.unwrap_or_default()
    }

    fn expected(&self, manifest: &Manifest, shard: &ShardSource) -> Vec<ExpectedTime> {
        let bytes = shard.length;
        let mut parts =
            vec![TransferRate::guessed(limits::RAM_BYTES_PER_MS).expected(Stretch::Ram, bytes)];
        match &shard.source {
            Source::Ram(node) if is_in_place(manifest, shard, node) => {}
            Source::Ram(_) | Source::Decode(_) => {
                parts.push(self.rates.session.expected(Stretch::Network, bytes));
            }
            Source::Durable => parts.push(self.rates.durable.expected(Stretch::Durable, bytes)),
        }
        parts
    }
}

/// Whether a shard is at the node that sealed it.
pub(super) fn is_in_place(manifest: &Manifest, shard: &ShardSource, at: &NodeName) -> bool {
    let entry = manifest.shard(shard.rank);
    entry.is_some_and(|entry| entry.node == *at)
}
