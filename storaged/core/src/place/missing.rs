//! Which blocks of a checkpoint are not on nodes that are up, as a home node counts them. The count is kept node by node: what
//! one node says touches the blocks that belong on it, not those of ten thousand ranks.

use std::collections::{BTreeMap, BTreeSet};

use storaged_plan::blocks_on;
use storaged_wire::peer::Lane;
use storaged_wire::{ManifestBytes, NodeName};

/// Blocks by their lane and their place in it.
pub(super) type BlockSet = BTreeSet<(Lane, usize)>;

/// The missing blocks of all nodes but this one, whose own change with everything that it does.
#[derive(Debug, Clone, Default)]
pub(crate) struct Missing {
    /// By the node that they belong on; no node without any.
    on: BTreeMap<NodeName, BlockSet>,
    /// How many each lane lacks, if any.
    of_lane: BTreeMap<Lane, u32>,
    /// How many lanes lack so many.
    lanes: BTreeMap<u32, u32>,
}

impl Missing {
    /// Nobody has said anything yet.
    pub fn all_but_of(me: &NodeName, manifest: &ManifestBytes) -> Self {
        let mut missing = Self::default();
        for node in manifest.nodes().keys().filter(|node| *node != me) {
            missing.set(node, blocks_on(manifest, node).into_iter().collect());
        }
        missing
    }

    /// Of the blocks that belong on a node, these are missing now.
    pub fn set(&mut self, node: &NodeName, blocks: BlockSet) {
        let before = self.on.remove(node).unwrap_or_default();
        for (lane, _) in before.difference(&blocks) {
            self.change(*lane, |lacks| lacks.saturating_sub(1));
        }
        for (lane, _) in blocks.difference(&before) {
            self.change(*lane, |lacks| lacks.saturating_add(1));
        }
        if !blocks.is_empty() {
            self.on.insert(node.clone(), blocks);
        }
    }

    fn change(&mut self, lane: Lane, by: impl Fn(u32) -> u32) {
        let before = self.of_lane.remove(&lane).unwrap_or(0);
        let after = by(before);
        if let Some(lanes) = self.lanes.get_mut(&before) {
            *lanes -= 1;
            if *lanes == 0 {
                self.lanes.remove(&before);
            }
        }
        if after > 0 {
            self.of_lane.insert(lane, after);
            *self.lanes.entry(after).or_default() += 1;
        }
    }

    /// The most blocks that a lane lacks, with those that this node itself lacks.
    pub fn most(&self, own: &BlockSet) -> usize {
        let elsewhere = self.lanes.last_key_value().map_or(0, |(lacks, _)| *lacks);
        let mut lacks_here: BTreeMap<Lane, u32> = BTreeMap::new();
        for (lane, _) in own {
            let elsewhere = || self.of_lane.get(lane).copied().unwrap_or(0);
            *lacks_here.entry(*lane).or_insert_with(elsewhere) += 1;
        }
        let here = lacks_here.into_values().max().unwrap_or(0);
        elsewhere.max(here) as usize
    }

    /// Nodes that lack some, and what.
    pub fn by_node(&self) -> impl Iterator<Item = (&NodeName, &BlockSet)> {
        self.on.iter()
    }

    /// Nodes that lack some.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.on.keys()
    }
}
