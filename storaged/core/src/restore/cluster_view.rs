//! What a survey has found: who holds what, told by nodes and by the durable tier.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_plan::LaneBlocks;
use storaged_wire::peer::{CheckpointKey, Holding, Lane};
use storaged_wire::plan::{Source, Unrestorable};
use storaged_wire::{CheckpointState, Digest, ManifestBytes, NodeName, Rank, RunId, Step};

use crate::api::{DurableFault, SetAside};

/// Who holds what.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClusterView {
    pub manifests: BTreeMap<Digest, Arc<ManifestBytes>>,
    pub keys: BTreeMap<Digest, CheckpointKey>,
    pub states: BTreeMap<Digest, CheckpointState>,
    pub shards: BTreeMap<Digest, BTreeMap<Rank, BTreeSet<NodeName>>>,
    pub parity: BTreeMap<Digest, BTreeMap<(Lane, u32), BTreeSet<NodeName>>>,
    pub durable: BTreeSet<Digest>,
    /// The durable tier was asked and did not say what it holds, or did not give a shard.
    pub durable_fault: Option<DurableFault>,
    /// Checkpoints in the durable tier that are not offered.
    pub set_aside: Vec<SetAside>,
}

impl ClusterView {
    pub fn add(&mut self, node: &NodeName, holdings: &[Holding]) {
        for holding in holdings {
            let name = holding.manifest;
            self.keys.insert(name, holding.key.clone());
            let state = self.states.entry(name).or_insert(holding.state);
            *state = (*state).max(holding.state);
            let shards = self.shards.entry(name).or_default();
            for rank in &holding.shards {
                shards.entry(*rank).or_default().insert(node.clone());
            }
            let parity = self.parity.entry(name).or_default();
            for place in &holding.parity {
                parity.entry(*place).or_default().insert(node.clone());
            }
        }
    }

    pub fn add_durable(&mut self, manifest: Arc<ManifestBytes>) {
        let name = manifest.name();
        let record = manifest.manifest();
        self.keys.insert(name, CheckpointKey::of(record));
        self.states.insert(name, CheckpointState::Durable);
        self.durable.insert(name);
        self.manifests.insert(name, manifest);
    }

    /// Adds what the durable tier holds above the offer and does not offer.
    pub fn pass_over(&self, offered: Option<(RunId, Step)>, passed_over: &mut Vec<Unrestorable>) {
        for one in &self.set_aside {
            let at = (one.run, one.step);
            let said = passed_over.iter_mut();
            let mut said = said.filter(|said| (said.run, said.step) == at);
            match said.next() {
                // What the tier says of its copy is what can be mended; that RAM has none is no news then.
                Some(said) => said.reason = one.passed_over().reason,
                None if offered.is_none_or(|offered| at > offered) => {
                    passed_over.push(one.passed_over());
                }
                None => {}
            }
        }
        passed_over.sort_by_key(|one| std::cmp::Reverse((one.run, one.step)));
    }

    /// For the last rung of an opening, which did not wait for the listing: what nodes know to be durable is there.
    pub fn note_durable(&mut self, name: Digest) {
        if self.states.get(&name) == Some(&CheckpointState::Durable) {
            self.durable.insert(name);
        }
    }

    /// A node's link is down: it holds nothing that can be had now.
    pub fn forget(&mut self, node: &NodeName) {
        let shards = self.shards.values_mut().flat_map(BTreeMap::values_mut);
        let parity = self.parity.values_mut().flat_map(BTreeMap::values_mut);
        for nodes in shards {
            nodes.remove(node);
        }
        for nodes in parity {
            nodes.remove(node);
        }
    }

    /// Checkpoints that were told of and whose manifests have not been found.
    pub fn without_manifest(&self) -> impl Iterator<Item = Digest> {
        let names = self.keys.keys().copied();
        names.filter(|name| !self.manifests.contains_key(name))
    }

    /// Blocks of a lane that are where they belong.
    pub fn available(&self, name: Digest, lane: Lane, blocks: &LaneBlocks) -> Vec<usize> {
        let holds = |nodes: Option<&BTreeSet<NodeName>>, node: &NodeName| {
            nodes.is_some_and(|nodes| nodes.contains(node))
        };
        (0..blocks.blocks())
            .filter(|block| {
                let Some(node) = blocks.node(*block) else {
                    return false;
                };
                match blocks.data.get(*block) {
                    Some(entry) => entry.as_ref().is_some_and(|shard| {
                        holds(
                            self.shards.get(&name).and_then(|s| s.get(&shard.rank)),
                            node,
                        )
                    }),
                    None => {
                        let index = (*block - blocks.data.len()) as u32;
                        holds(
                            self.parity.get(&name).and_then(|p| p.get(&(lane, index))),
                            node,
                        )
                    }
                }
            })
            .collect()
    }

    /// The best source of one shard, seen from `me`.
    pub fn source(&self, manifest: &ManifestBytes, rank: Rank, me: &NodeName) -> Option<Source> {
        let name = manifest.name();
        let holders = self.shards.get(&name).and_then(|shards| shards.get(&rank));
        if let Some(holders) = holders {
            let near = holders.get(me).or_else(|| holders.first());
            if let Some(node) = near {
                return Some(Source::Ram(node.clone()));
            }
        }
        if let Some((lane, _)) = LaneBlocks::find(manifest, rank) {
            let blocks = LaneBlocks::of(manifest, lane)?;
            if let Some(chosen) = blocks.enough(&self.available(name, lane, &blocks)) {
                let nodes = chosen
                    .into_iter()
                    .filter_map(|block| blocks.node(block).cloned());
                return Some(Source::Decode(nodes.collect()));
            }
        }
        self.durable.contains(&name).then_some(Source::Durable)
    }
}
