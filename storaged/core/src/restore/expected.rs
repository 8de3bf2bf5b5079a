//! How long a restore is expected to take: part by part, each with the word whether its rate was measured.

use std::collections::BTreeMap;

use storaged_wire::plan::{ShardSource, Source};
use storaged_wire::verdict::{ExpectedTime, Stretch};
use storaged_wire::{Manifest, NodeName};

use crate::context::Context;

/// What the ranks of one node get from elsewhere, all at once and over the same links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Fetched {
    network_bytes: u64,
    durable_bytes: u64,
}

impl Context {
    /// The parts of the slowest rank's restore. Every rank reads its own shard on the node that sealed it, all at once.
    pub(super) fn slowest(&self, manifest: &Manifest, shards: &[ShardSource]) -> Vec<ExpectedTime> {
        let fetched = fetched_by_node(manifest, shards);
        let all = shards.iter().map(|shard| {
            let node = manifest.shard(shard.rank).map(|entry| &entry.node);
            let of_node = node.and_then(|node| fetched.get(node)).copied();
            self.expected(manifest, shard, of_node.unwrap_or_default())
        });
        let slowest = all.max_by_key(|parts| parts.iter().map(|part| part.ms).sum::<u64>());
        slowest.unwrap_or_default()
    }

    fn expected(
        &self,
        manifest: &Manifest,
        shard: &ShardSource,
        of_node: Fetched,
    ) -> Vec<ExpectedTime> {
        let mut parts = vec![self.rates.ram.expected(Stretch::Ram, shard.length)];
        let (session, durable) = (self.rates.session, self.rates.of_tier());
        match &shard.source {
            Source::Ram(node) if is_in_place(manifest, shard, node) => {}
            Source::Ram(_) | Source::Decode(_) => {
                parts.push(session.expected(Stretch::Network, of_node.network_bytes));
            }
            Source::Durable => {
                parts.push(durable.expected(Stretch::Durable, of_node.durable_bytes));
            }
        }
        parts
    }
}

fn fetched_by_node<'a>(
    manifest: &'a Manifest,
    shards: &[ShardSource],
) -> BTreeMap<&'a NodeName, Fetched> {
    let mut by_node: BTreeMap<&NodeName, Fetched> = BTreeMap::new();
    for shard in shards {
        let Some(entry) = manifest.shard(shard.rank) else {
            continue;
        };
        let fetched = by_node.entry(&entry.node).or_default();
        let bytes = match &shard.source {
            Source::Ram(node) if *node == entry.node => continue,
            Source::Ram(_) | Source::Decode(_) => &mut fetched.network_bytes,
            Source::Durable => &mut fetched.durable_bytes,
        };
        *bytes = bytes.saturating_add(shard.length);
    }
    by_node
}

/// Whether a shard is at the node that sealed it.
pub(super) fn is_in_place(manifest: &Manifest, shard: &ShardSource, at: &NodeName) -> bool {
    let entry = manifest.shard(shard.rank);
    entry.is_some_and(|entry| entry.node == *at)
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::Rank;

    use super::*;
    use crate::node::Node;
    use crate::testkit::{last_of, manifest, name};

    const GB: u64 = 1_000_000_000;

    fn of(rank: u32, source: Source) -> ShardSource {
        ShardSource {
            rank: Rank::new(rank),
            length: 20 * GB,
            source,
        }
    }

    /// What the slowest rank of `a`, `a`, `b` waits for, part by part.
    fn expected(node: &Node, sources: [Source; 3]) -> Vec<(Stretch, u64)> {
        let mut manifest = manifest(1, &["a", "x", "b"], &["c"], 20 * GB, digest(b"shard"));
        manifest.shards[1].node = name("a");
        let shards: Vec<ShardSource> = (0..).zip(sources).map(|(rank, it)| of(rank, it)).collect();
        let parts = node.context().slowest(&manifest, &shards);
        parts.iter().map(|part| (part.stretch, part.ms)).collect()
    }

    #[test]
    fn ranks_of_one_node_share_what_comes_to_it() {
        let node = last_of(&["a", "b", "c"], 2, 1);
        let decoded = || Source::Decode(vec![name("c")]);
        let in_place = || Source::Ram(name("a"));
        let ram = (Stretch::Ram, 10_000);
        let alone = expected(&node, [in_place(), in_place(), decoded()]);
        assert_eq!(alone, [ram, (Stretch::Network, 40_000)]);
        let two = expected(&node, [decoded(), decoded(), decoded()]);
        assert_eq!(two, [ram, (Stretch::Network, 80_000)]);
        let durable = expected(&node, [Source::Durable, Source::Durable, Source::Durable]);
        assert_eq!(durable, [ram, (Stretch::Durable, 400_000)]);
        // What lies in another node's RAM comes over the same links.
        let mixed = expected(
            &node,
            [decoded(), Source::Ram(name("b")), Source::Ram(name("b"))],
        );
        assert_eq!(mixed, [ram, (Stretch::Network, 80_000)]);
        let whole = expected(&node, [in_place(), in_place(), Source::Ram(name("b"))]);
        assert_eq!(whole, [ram], "nobody fetches anything");
    }
}
