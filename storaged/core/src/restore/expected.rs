//! How long a restore is expected to take: part by part, each with the word whether its rate was measured.

use std::collections::BTreeMap;

use storaged_wire::plan::{ShardSource, Source};
use storaged_wire::verdict::{ExpectedTime, Stretch};
use storaged_wire::{Manifest, NodeName};

use crate::context::Context;

/// What goes over a node's links while all ranks restore at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Traffic {
    /// To its ranks from other nodes.
    received: u64,
    /// To other nodes' ranks: each of those that decode a shard sends one sum of its length on.
    sent: u64,
    /// To its ranks from the durable tier.
    durable: u64,
}

impl Context {
    /// The parts of the slowest rank's restore. Every rank reads its own shard on the node that sealed it, all at once.
    pub(super) fn slowest(&self, manifest: &Manifest, shards: &[ShardSource]) -> Vec<ExpectedTime> {
        let traffic = traffic_by_node(manifest, shards);
        let all = shards.iter().map(|shard| {
            let node = manifest.shard(shard.rank).map(|entry| &entry.node);
            self.expected(shard, node, &traffic)
        });
        let slowest = all.max_by_key(|parts| parts.iter().map(|part| part.ms).sum::<u64>());
        slowest.unwrap_or_default()
    }

    fn expected(
        &self,
        shard: &ShardSource,
        node: Option<&NodeName>,
        traffic: &BTreeMap<&NodeName, Traffic>,
    ) -> Vec<ExpectedTime> {
        let of = |node: &NodeName| traffic.get(node).copied().unwrap_or_default();
        let here = node.map(of).unwrap_or_default();
        let mut parts = vec![self.rates.ram.expected(Stretch::Ram, shard.length)];
        // The busiest link that it comes over.
        let over_links = |from: &[NodeName]| {
            let sent = from.iter().map(|node| of(node).sent).max();
            let bytes = here.received.max(sent.unwrap_or_default());
            self.rates.session.expected(Stretch::Network, bytes)
        };
        match &shard.source {
            Source::Ram(at) if node == Some(at) => {}
            Source::Ram(at) => parts.push(over_links(std::slice::from_ref(at))),
            Source::Decode(survivors) => parts.push(over_links(survivors)),
            Source::Durable => {
                let durable = self.rates.of_tier();
                parts.push(durable.expected(Stretch::Durable, here.durable));
            }
        }
        parts
    }
}

fn traffic_by_node<'a>(
    manifest: &'a Manifest,
    shards: &'a [ShardSource],
) -> BTreeMap<&'a NodeName, Traffic> {
    let mut by_node: BTreeMap<&NodeName, Traffic> = BTreeMap::new();
    for shard in shards {
        let Some(entry) = manifest.shard(shard.rank) else {
            continue;
        };
        let (bytes, node) = (shard.length, &entry.node);
        let from = match &shard.source {
            Source::Ram(at) if at == node => continue,
            Source::Durable => {
                let durable = &mut by_node.entry(node).or_default().durable;
                *durable = durable.saturating_add(bytes);
                continue;
            }
            Source::Ram(at) => std::slice::from_ref(at),
            Source::Decode(survivors) => survivors,
        };
        let received = &mut by_node.entry(node).or_default().received;
        *received = received.saturating_add(bytes);
        for other in from.iter().filter(|other| *other != node) {
            let sent = &mut by_node.entry(other).or_default().sent;
            *sent = sent.saturating_add(bytes);
        }
    }
    by_node
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
        // `a` receives 40 GB, and `c` sends 60.
        assert_eq!(two, [ram, (Stretch::Network, 120_000)]);
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

    /// Of a group that has lost two nodes, the survivors send a sum for each of them.
    #[test]
    fn survivors_send_a_sum_for_each_shard_that_is_decoded() {
        let node = last_of(&["a", "b", "c"], 2, 1);
        let shards = |lost: u32| -> Vec<ShardSource> {
            let source = |rank| match rank {
                rank if rank < lost => Source::Decode(vec![name("c"), name("d")]),
                rank => Source::Ram(name(["a", "x", "b"][rank as usize])),
            };
            (0..3).map(|rank| of(rank, source(rank))).collect()
        };
        let manifest = manifest(1, &["a", "x", "b"], &["c", "d"], 20 * GB, digest(b"shard"));
        for (lost, ms) in [(1, 40_000), (2, 80_000), (3, 120_000)] {
            let parts = node.context().slowest(&manifest, &shards(lost));
            assert_eq!(parts[1].ms, ms, "{lost} lost: {parts:?}");
        }
    }
}
