//! What a survey has found: who holds what, told by nodes and by the durable tier.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_plan::LaneBlocks;
use storaged_wire::peer::{CheckpointKey, Holding, Lane};
use storaged_wire::plan::{Source, Unrestorable};
use storaged_wire::{
    CheckpointState, Digest, EnclosuresHeld, ManifestBytes, NodeName, Rank, RunId, Step,
};

use crate::api::{DurableFault, SetAside};

/// Who holds what.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClusterView {
    pub manifests: BTreeMap<Digest, Arc<ManifestBytes>>,
    pub keys: BTreeMap<Digest, CheckpointKey>,
    pub states: BTreeMap<Digest, CheckpointState>,
    held: BTreeMap<Digest, HeldBlocks>,
    /// What each node said last: what it said is forgotten without a look at what all others did.
    said: BTreeMap<NodeName, Vec<Holding>>,
    pub durable: BTreeSet<Digest>,
    /// Of these nodes say that it is there, and it was not asked.
    said_durable: BTreeSet<Digest>,
    /// The durable tier was asked and did not say what it holds, or did not give a shard.
    pub durable_fault: Option<DurableFault>,
    /// Memory had what was looked for, so that the durable tier was not asked.
    pub is_tier_unasked: bool,
    /// Checkpoints in the durable tier that are not offered.
    pub set_aside: Vec<SetAside>,
    /// The newest run that the durable tier has of the job, whether or not a step was listed of it.
    pub durable_run: Option<RunId>,
}

/// Who holds the blocks of one checkpoint.
#[derive(Debug, Clone, Default)]
struct HeldBlocks {
    shards: BTreeMap<Rank, Vec<NodeName>>,
    parity: BTreeMap<(Lane, u32), Vec<NodeName>>,
    /// Who has what the manifest names.
    enclosing: Vec<NodeName>,
}

/// Where the shards of one checkpoint can be had.
pub(crate) struct ShardSources<'a> {
    manifest: &'a ManifestBytes,
    held: Option<&'a HeldBlocks>,
    is_durable: bool,
}

impl ClusterView {
    /// A node says what it holds, in place of what it said before.
    pub fn add(&mut self, node: &NodeName, holdings: &[Holding]) {
        self.forget(node);
        self.said.insert(node.clone(), holdings.to_vec());
        for holding in holdings {
            let name = holding.manifest;
            self.keys.insert(name, holding.key.clone());
            let state = self.states.entry(name).or_insert(holding.state);
            *state = (*state).max(holding.state);
            let held = self.held.entry(name).or_default();
            for rank in &holding.shards {
                add_holder(&mut held.shards, *rank, node);
            }
            for place in &holding.parity {
                add_holder(&mut held.parity, *place, node);
            }
            if holding.enclosures == EnclosuresHeld::All && !held.enclosing.contains(node) {
                held.enclosing.push(node.clone());
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
                Some(said) => *said = one.passed_over(),
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
            self.said_durable.insert(name);
        }
    }

    /// Whether the durable tier has a checkpoint: it counts so no more, because its copy is about to be read.
    pub fn take_durable(&mut self, name: Digest) -> bool {
        let is_listed = self.durable.remove(&name);
        self.said_durable.remove(&name) || is_listed
    }

    /// A drill is about RAM: the durable tier neither has the checkpoint nor is asked.
    pub fn leave_tier_out(&mut self, name: Digest) {
        self.take_durable(name);
        self.is_tier_unasked = false;
    }

    /// Whether enough blocks of a shard's lane are known to be on other nodes than these.
    pub fn can_do_without(
        &self,
        lost: &BTreeSet<NodeName>,
        manifest: &ManifestBytes,
        rank: Rank,
    ) -> bool {
        let place = LaneBlocks::find(manifest, rank);
        let found = place.and_then(|(lane, _)| Some((lane, LaneBlocks::of(manifest, lane)?)));
        found.is_some_and(|(lane, blocks)| {
            let mut there = self.sources(manifest).available(lane, &blocks);
            there.retain(|block| blocks.node(*block).is_some_and(|node| !lost.contains(node)));
            blocks.enough(&there).is_some()
        })
    }

    /// Of what everybody who could hold it has answered: whether none of them knows it now, nor the durable tier.
    pub fn is_unknown(&self, name: Digest) -> bool {
        let is_readable = self.durable_fault.is_none() && !self.is_tier_unasked;
        let is_readable = is_readable && self.set_aside.is_empty();
        let mut said = self.said.values().flatten();
        let is_told_of = self.durable.contains(&name) || said.any(|it| it.manifest == name);
        is_readable && !is_told_of
    }

    /// A node has given nothing of a checkpoint: it counts as one that holds none of it, whatever it said.
    pub fn has_none_of(&mut self, name: Digest, node: &NodeName) {
        let Some(mut said) = self.said.get(node).cloned() else {
            return;
        };
        said.retain(|it| it.manifest != name);
        self.add(node, &said);
    }

    /// Nodes that say that a newer checkpoint of the same job has come so far.
    pub fn told_of_newer(
        &self,
        key: &CheckpointKey,
        safe: CheckpointState,
    ) -> impl Iterator<Item = &NodeName> {
        let said = self.said.iter();
        said.filter(move |(_, all)| all.iter().any(|it| is_newer(it, key, safe)))
            .map(|(node, _)| node)
    }

    /// Whether a node has blocks of such a newer one: what it lacks of this one it has let go, and not lost. One that was restarted
    /// without its RAM cannot say so.
    pub fn has_moved_on(
        &self,
        node: &NodeName,
        key: &CheckpointKey,
        safe: CheckpointState,
    ) -> bool {
        let has_blocks = |it: &Holding| !it.shards.is_empty() || !it.parity.is_empty();
        let said = self.said.get(node);
        said.is_some_and(|all| {
            all.iter()
                .any(|it| is_newer(it, key, safe) && has_blocks(it))
        })
    }

    /// Whether a shard could be had if those that have moved on still held their blocks.
    pub fn was_enough(
        &self,
        manifest: &ManifestBytes,
        rank: Rank,
        has_moved_on: impl Fn(&NodeName) -> bool,
    ) -> bool {
        let place = LaneBlocks::find(manifest, rank);
        let found =
            place.and_then(|(lane, block)| Some((lane, block, LaneBlocks::of(manifest, lane)?)));
        let Some((lane, block, blocks)) = found else {
            let shard = manifest.manifest().shard(rank);
            return shard.is_some_and(|shard| has_moved_on(&shard.node));
        };
        let mut there = self.sources(manifest).available(lane, &blocks);
        let gone = (0..blocks.blocks()).filter(|it| blocks.node(*it).is_some_and(&has_moved_on));
        there.extend(gone);
        there.sort_unstable();
        there.dedup();
        there.contains(&block) || blocks.enough(&there).is_some()
    }

    /// A node's link is down: it holds nothing that can be had now.
    pub fn forget(&mut self, node: &NodeName) {
        for holding in self.said.remove(node).unwrap_or_default() {
            let Some(held) = self.held.get_mut(&holding.manifest) else {
                continue;
            };
            for rank in &holding.shards {
                remove_holder(&mut held.shards, rank, node);
            }
            for place in &holding.parity {
                remove_holder(&mut held.parity, place, node);
            }
            held.enclosing.retain(|it| it != node);
        }
    }

    /// Nodes that say of a checkpoint that it is protected, or more.
    pub fn called_protected_by(&self, name: Digest) -> impl Iterator<Item = &NodeName> {
        let says =
            move |one: &Holding| one.manifest == name && one.state >= CheckpointState::Protected;
        let said = self.said.iter();
        said.filter(move |(_, all)| all.iter().any(says))
            .map(|(node, _)| node)
    }

    /// Nodes that have what a manifest names.
    pub fn enclosing(&self, name: Digest) -> &[NodeName] {
        self.held.get(&name).map_or(&[], |held| &held.enclosing)
    }

    /// What the durable tier says against its copy of a checkpoint.
    pub fn reason_against(&self, key: &CheckpointKey) -> Option<String> {
        let mut set_aside = self.set_aside.iter();
        let one = set_aside.find(|one| (one.run, one.step) == (key.run, key.step));
        one.map(|one| one.reason.clone())
    }

    /// Checkpoints that were told of and whose manifests have not been found.
    pub fn without_manifest(&self) -> impl Iterator<Item = Digest> {
        let names = self.keys.keys().copied();
        names.filter(|name| !self.manifests.contains_key(name))
    }

    /// Where the shards of a checkpoint can be had.
    pub fn sources<'a>(&'a self, manifest: &'a ManifestBytes) -> ShardSources<'a> {
        let name = manifest.name();
        ShardSources {
            manifest,
            held: self.held.get(&name),
            is_durable: self.durable.contains(&name) || self.said_durable.contains(&name),
        }
    }
}

impl ShardSources<'_> {
    /// Blocks of a lane that are where they belong.
    pub fn available(&self, lane: Lane, blocks: &LaneBlocks) -> Vec<usize> {
        let Some(held) = self.held else {
            return Vec::new();
        };
        let is_there = |block: &usize| {
            let holders = match blocks.data.get(*block) {
                Some(entry) => entry.as_ref().and_then(|it| held.shards.get(&it.rank)),
                None => {
                    let index = (*block - blocks.data.len()) as u32;
                    held.parity.get(&(lane, index))
                }
            };
            let node = blocks.node(*block);
            node.is_some_and(|node| holders.is_some_and(|nodes| nodes.contains(node)))
        };
        (0..blocks.blocks()).filter(is_there).collect()
    }

    /// The best source of one shard, seen from `me`.
    pub fn of(&self, rank: Rank, me: &NodeName) -> Option<Source> {
        let holders = self.holders(rank);
        let near = holders.iter().find(|node| *node == me);
        if let Some(node) = near.or(holders.first()) {
            return Some(Source::Ram(node.clone()));
        }
        let nodes = self.decoded_from(rank).map(Source::Decode);
        nodes.or_else(|| self.is_durable.then_some(Source::Durable))
    }

    /// Whether every shard can be had somewhere: the same, without a word of where.
    pub fn is_whole(&self) -> bool {
        let shards = &self.manifest.manifest().shards;
        if !self.is_described() {
            return false;
        }
        let can_be_had = |rank| !self.holders(rank).is_empty() || self.decoded_from(rank).is_some();
        self.is_durable || shards.iter().all(|shard| can_be_had(shard.rank))
    }

    /// Whether what the manifest names can be had somewhere.
    pub fn is_described(&self) -> bool {
        let names_nothing = self.manifest.manifest().enclosures().next().is_none();
        let is_held = || self.held.is_some_and(|held| !held.enclosing.is_empty());
        names_nothing || self.is_durable || is_held()
    }

    pub(super) fn holders(&self, rank: Rank) -> &[NodeName] {
        let holders = self.held.and_then(|held| held.shards.get(&rank));
        holders.map_or(&[], |nodes| nodes)
    }

    /// The nodes whose blocks suffice to decode a shard, if they do.
    fn decoded_from(&self, rank: Rank) -> Option<Vec<NodeName>> {
        let (lane, _) = LaneBlocks::find(self.manifest, rank)?;
        let blocks = LaneBlocks::of(self.manifest, lane)?;
        let chosen = blocks.enough(&self.available(lane, &blocks))?;
        let nodes = chosen.into_iter().filter_map(|block| blocks.node(block));
        Some(nodes.cloned().collect())
    }
}

/// Whether this is a newer checkpoint than that, of the same job, which has come so far.
fn is_newer(holding: &Holding, than: &CheckpointKey, safe: CheckpointState) -> bool {
    let key = &holding.key;
    key.namespace == than.namespace && key > than && holding.state >= safe
}

/// A node holds a block. Few hold the same one; in the order of their names, so that every survey prefers the same.
fn add_holder<B: Ord>(holders: &mut BTreeMap<B, Vec<NodeName>>, block: B, node: &NodeName) {
    let nodes = holders.entry(block).or_default();
    if let Err(place) = nodes.binary_search(node) {
        nodes.insert(place, node.clone());
    }
}

/// A node does not hold a block any more.
fn remove_holder<B: Ord>(holders: &mut BTreeMap<B, Vec<NodeName>>, block: &B, node: &NodeName) {
    if let Some(nodes) = holders.get_mut(block) {
        nodes.retain(|it| it != node);
    }
}
