//! What a checkpoint bears: how many more node losses it survives, at this instant. Every node tells the home nodes
//! which blocks it holds whole; these count, per lane, the blocks on nodes that are up, and tell everyone in the
//! manifest. A block counts only for the incarnation of its node that said so: one that was restarted has lost it.

use std::collections::{BTreeMap, BTreeSet};

use storaged_plan::{LaneBlocks, blocks_on, uncoded_node};
use storaged_wire::local::Bears;
use storaged_wire::peer::{CheckpointKey, Lane, PeerMessage};
use storaged_wire::{
    CheckpointState, Digest, EnclosuresHeld, Generation, Manifest, ManifestBytes, NodeName, OnNode,
    Rank,
};

use super::missing::{BlockSet, Missing};
use crate::api::{Note, Now};
use crate::catalog::{Checkpoint, Peer};
use crate::context::Context;
use crate::limits;

/// Blocks that a node holds whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub shards: BTreeSet<Rank>,
    pub parity: BTreeSet<(Lane, u32)>,
    pub enclosures: EnclosuresHeld,
}

/// Blocks of another node, as it said.
#[derive(Debug, Clone)]
struct HeldBy {
    generation: Generation,
    blocks: Blocks,
}

/// One checkpoint's blocks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Standing {
    /// As a home node: of the other nodes.
    held: BTreeMap<NodeName, HeldBy>,
    /// As a home node: those of the other nodes that said that they hold what the manifest names.
    pub(super) enclosing: BTreeMap<NodeName, Generation>,
    /// Since when this node counts.
    pub(super) counts_since: Now,
    /// As a home node: what of it is not there.
    pub(super) missing: Option<Missing>,
    /// As a home node: it has a shard that no group codes, so that it bears no loss.
    has_uncoded: bool,
    /// This node's own, as last said, and how often they have changed.
    own: Blocks,
    version: u32,
    /// Home nodes that know this version.
    noted: BTreeMap<NodeName, (Generation, u32)>,
    /// Nodes that have let it go, and have not taken it up again since.
    let_go_by: BTreeSet<NodeName>,
    /// As a home node: what it bore when that was last told.
    bears: u32,
    /// What home nodes have told.
    told: BTreeMap<NodeName, u32>,
    /// Home nodes that called it protected and are gone, and since when they are.
    called_before: BTreeMap<NodeName, Now>,
    /// Home nodes that call it durable, and when the first did.
    pub(super) durable: BTreeMap<NodeName, Now>,
    /// Since when home nodes differ.
    pub doubted_since: Option<Now>,
    /// What was noted last, so that every change is and nothing twice.
    bears_noted: Option<Bears>,
    /// As a home node: since when a shard is lost, of a checkpoint that was never protected.
    pub lost_since: Option<Now>,
    /// As a home node: since when its owners disown it.
    pub disowned_since: Option<Now>,
}

impl Standing {
    /// What a home node has told that the checkpoint bears.
    pub fn told_by(&self, home: &NodeName) -> u32 {
        self.word_of(home).unwrap_or(0)
    }

    /// Whether some home node does.
    pub fn is_called_protected(&self) -> bool {
        !self.told.is_empty()
    }

    /// Whether some home node does, or did before it was gone: no other one may have counted all blocks at once since.
    pub fn was_called_protected(&self) -> bool {
        self.is_called_protected() || !self.called_before.is_empty()
    }

    /// When the last of those went that called it so.
    pub fn words_ended_at(&self) -> Option<Now> {
        self.called_before.values().max().copied()
    }

    /// What a home node says that it bears; none if it does not call it protected.
    pub fn word_of(&self, home: &NodeName) -> Option<u32> {
        self.told.get(home).copied()
    }

    pub fn has_let_go(&self, node: &NodeName) -> bool {
        self.let_go_by.contains(node)
    }

    /// A node that had let it go has it again, and has forgotten what it was told of it.
    pub fn takes_up_again(&mut self, node: &NodeName) {
        if self.let_go_by.remove(node) && !planted!("homes_that_return_know_all") {
            self.noted.remove(node);
        }
    }

    /// Whether this node counts its blocks.
    pub fn counts(&self) -> bool {
        self.missing.is_some()
    }

    /// As a home node that has the manifest now, or because home nodes differ.
    pub fn begin_to_count(&mut self, me: &NodeName, manifest: &ManifestBytes, now: Now) {
        self.counts_since = now;
        self.missing = Some(Missing::all_but_of(me, manifest));
        self.has_uncoded = uncoded_node(manifest).is_some();
    }

    /// Home nodes agree again, and this one is none.
    pub fn count_no_more(&mut self) {
        self.missing = None;
    }

    /// Other nodes that said what they hold.
    pub fn heard_of(&self) -> Vec<NodeName> {
        self.held.keys().cloned().collect()
    }

    /// A node has let the checkpoint go: what it said that it holds, it does not any more, and as a home node it counts no more what
    /// others hold.
    pub fn let_go(&mut self, node: &NodeName) {
        self.holds_nothing(node);
        self.let_go_by.insert(node.clone());
        if !planted!("words_outlive_steps") {
            self.told.remove(node);
            self.called_before.remove(node);
        }
    }

    /// What a node said that it holds, it does not any more.
    pub fn holds_nothing(&mut self, node: &NodeName) {
        self.held.remove(node);
        self.enclosing.remove(node);
    }

    /// Home nodes that call it protected.
    pub fn called_protected_by(&self) -> impl Iterator<Item = &NodeName> {
        self.told.keys()
    }

    /// Other nodes that said that they hold what the manifest names.
    pub fn enclosing(&self) -> impl Iterator<Item = &NodeName> {
        self.enclosing.keys()
    }

    fn hears_of_enclosures(&mut self, node: &NodeName, held: EnclosuresHeld, of: Generation) {
        match held {
            EnclosuresHeld::All => drop(self.enclosing.insert(node.clone(), of)),
            EnclosuresHeld::NotAll => drop(self.enclosing.remove(node)),
        }
    }

    /// A home node is gone, and what it was told and has told with it.
    pub fn forget(&mut self, node: &NodeName, now: Now) {
        self.noted.remove(node);
        self.let_go_by.remove(node);
        let told = self.told.remove_entry(node);
        self.called_before.extend(told.map(|(home, _)| (home, now)));
        self.durable.remove(node);
    }
}

impl Blocks {
    pub(super) fn of(checkpoint: &Checkpoint) -> Self {
        let whole = checkpoint.shards.iter();
        let sets = checkpoint.parity.keys().copied();
        Self {
            shards: whole
                .filter(|(_, shard)| shard.digests.is_some())
                .map(|(rank, _)| *rank)
                .collect(),
            parity: sets
                .filter(|(lane, index)| !checkpoint.yielding.is_withdrawn(*lane, *index))
                .collect(),
            enclosures: EnclosuresHeld::NotAll,
        }
    }

    fn is_empty(&self) -> bool {
        self.shards.is_empty() && self.parity.is_empty()
    }

    pub(super) fn has(&self, lane: Lane, blocks: &LaneBlocks, block: usize) -> bool {
        match blocks.data.get(block) {
            Some(entry) => entry
                .as_ref()
                .is_some_and(|shard| self.shards.contains(&shard.rank)),
            None => {
                let index = (block - blocks.data.len()) as u32;
                self.parity.contains(&(lane, index))
            }
        }
    }
}

impl Context {
    /// Tells the home nodes which blocks of a checkpoint are here, as far as they have not acknowledged it.
    pub(crate) fn report_held(&mut self, key: &CheckpointKey) {
        self.keeping.touch(key);
        let homes = self.homes_of(key);
        let manifest = self.checkpoints.get(key).and_then(|c| c.manifest.clone());
        let Some(manifest) = manifest else {
            return;
        };
        let name = manifest.name();
        let enclosures = self.enclosures_held(manifest.manifest());
        let peers = &self.peers;
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let blocks = match checkpoint.giving_way {
            Some(_) => Blocks::default(),
            None => Blocks::of(checkpoint),
        };
        let own = Blocks {
            enclosures,
            ..blocks
        };
        let standing = &mut checkpoint.standing;
        if standing.own != own {
            standing.version = standing.version.wrapping_add(1);
            standing.own = own;
        }
        let version = standing.version;
        let message = PeerMessage::Held {
            manifest: name,
            version,
            shards: standing.own.shards.iter().copied().collect(),
            parity: standing.own.parity.iter().copied().collect(),
            enclosures,
        };
        let knows = |home: &NodeName| {
            let current = peers.get(home).map(|peer| (peer.generation, version));
            current.is_some() && standing.noted.get(home).copied() == current
        };
        let is_unaware = |home: &&NodeName| !knows(home) && !standing.has_let_go(home);
        let unaware: Vec<&NodeName> = homes.iter().filter(is_unaware).collect();
        let me = self.me().clone();
        for home in unaware.into_iter().filter(|home| **home != me) {
            self.send(home, message.clone());
        }
        if homes.contains(&me) {
            self.weigh(key);
        }
    }

    /// Whether all home nodes are up and know it, and nobody else counts it.
    pub(crate) fn homes_know_what_is_held(&self, checkpoint: &Checkpoint) -> bool {
        let standing = &checkpoint.standing;
        let homes = self.homes_of(&checkpoint.key);
        let mut others = homes.iter().filter(|home| *home != self.me());
        others.all(|home| standing.has_let_go(home) || self.knows_what_is_held(checkpoint, home))
            && standing.noted.keys().all(|node| homes.contains(node))
    }

    /// Whether a home node has noted what was said last.
    pub(crate) fn knows_what_is_held(&self, checkpoint: &Checkpoint, home: &NodeName) -> bool {
        let current = self.peers.get(home);
        let current = current.map(|peer| (peer.generation, checkpoint.standing.version));
        current.is_some() && checkpoint.standing.noted.get(home).copied() == current
    }

    /// A node says which blocks of a checkpoint it holds.
    pub(crate) fn held(&mut self, from: &NodeName, name: Digest, version: u32, blocks: Blocks) {
        let Some(key) = self.by_name.get(&name).cloned() else {
            return self.says_that_it_has_ended(from, name);
        };
        if !self.peers.contains_key(from) {
            return;
        }
        if blocks.is_empty() && self.has_not_heard_that_it_is_protected(from, &key) {
            return;
        }
        self.note_held(from, &key, blocks);
        let manifest = name;
        self.send(from, PeerMessage::HeldNoted { manifest, version });
        self.weigh(&key);
    }

    /// Answers who tells a home node what it holds of a checkpoint that has ended here: it would wait for an answer that never comes
    /// before it lets the checkpoint go for another one.
    fn says_that_it_has_ended(&mut self, to: &NodeName, manifest: Digest) {
        let has_ended =
            self.ends.given_up(manifest).is_some() || self.ends.named(manifest).is_some();
        if has_ended && !planted!("ended_in_silence") {
            self.answer_owed(to, manifest);
        }
    }

    /// Counts what a node says that it holds.
    pub(super) fn note_held(&mut self, from: &NodeName, key: &CheckpointKey, mut blocks: Blocks) {
        let Some(generation) = self.peers.get(from).map(|peer| peer.generation) else {
            return;
        };
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let standing = &mut checkpoint.standing;
        standing.hears_of_enclosures(from, blocks.enclosures, generation);
        let old = (standing.held.get(from)).filter(|_| planted!("old_parity_of_the_returned"));
        blocks
            .parity
            .extend(old.into_iter().flat_map(|it| &it.blocks.parity));
        let held = HeldBy { generation, blocks };
        standing.held.insert(from.clone(), held);
        self.recount(key, from);
    }

    /// Whether this node counts what a checkpoint bears: as a home node, or because home nodes differ.
    pub(super) fn counts_itself(&self, checkpoint: &Checkpoint) -> bool {
        let doubts = checkpoint.standing.doubted_since.is_some();
        checkpoint.homes.contains(self.me()) || (doubts && checkpoint.standing.counts())
    }

    pub(crate) fn held_noted(&mut self, from: &NodeName, name: Digest, version: u32) {
        let Some(generation) = self.peers.get(from).map(|peer| peer.generation) else {
            return;
        };
        if let Some(checkpoint) = self.checkpoint_named(name) {
            let noted = (generation, version);
            checkpoint.standing.takes_up_again(from);
            checkpoint.standing.noted.insert(from.clone(), noted);
            // It has taken up again what it had let go, and counts what is here. That one with parts of it has them again it says itself.
            let manifest = checkpoint.manifest.as_ref();
            if manifest.is_some_and(|it| it.nodes().get(from).is_none_or(OnNode::is_bare)) {
                checkpoint.owing.retired_at.remove(from);
            }
            let key = checkpoint.key.clone();
            self.go_on_giving_way(&key);
        }
    }

    /// As a home node: a node has said what it holds or has let go, or its link has changed.
    pub(crate) fn recount(&mut self, key: &CheckpointKey, node: &NodeName) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let (Some(manifest), Some(_)) = (&checkpoint.manifest, &checkpoint.standing.missing) else {
            return;
        };
        if node == self.me() {
            return;
        }
        let held = checkpoint.standing.held.get(node);
        let held = held.filter(|held| self.is_same_node(node, held));
        let missing = lacking(manifest, node, held.map(|held| &held.blocks));
        let standing = self.checkpoints.get_mut(key).map(|c| &mut c.standing);
        if let Some(counted) = standing.and_then(|standing| standing.missing.as_mut()) {
            counted.set(node, missing);
        }
    }

    /// The link to a node came up or went down.
    pub(crate) fn recount_blocks_on(&mut self, node: &NodeName) {
        let counted = self
            .checkpoints
            .values()
            .filter(|c| c.standing.missing.is_some());
        for key in counted.map(|c| c.key.clone()).collect::<Vec<_>>() {
            self.recount(&key, node);
        }
    }

    /// As a home node: counts what a checkpoint bears, says so if it changed, and protects it once it can.
    pub(crate) fn weigh(&mut self, key: &CheckpointKey) {
        let checkpoint = self.checkpoints.get(key);
        // A node in another epoch may take this one for a home, and tells it what it holds.
        let counts = |c: &&Checkpoint| self.counts_itself(c) || planted!("strangers_weigh");
        let Some(checkpoint) = checkpoint.filter(counts) else {
            return;
        };
        // A home node counts from when it has the manifest, and whatever it hears it goes on.
        let counts = checkpoint.manifest.is_none() || checkpoint.standing.counts();
        debug_assert!(counts || planted!("strangers_weigh"));
        let Some(counted) = self.count_losses(checkpoint) else {
            return;
        };
        let (state, was) = (checkpoint.state, checkpoint.standing.bears);
        let settled = self.has_all_it_can(checkpoint, counted);
        // By what was said before this node was stopped it may have everything, of a step that the others have given up since; what it would
        // let go for that one is all that is left of the step before.
        let protects = state == CheckpointState::Committed
            && counted.losses > 0
            && settled
            && !self.has_yet_to_listen();
        // Less is said at once. More only when nothing else is on its way, or every block would be told of one by one. After a stop more is
        // said as ever: an older step that is called less safe than it is would go for a newer one that is less safe.
        let changed = counted.losses < was || (settled && counted.losses > was);
        if !protects && (!changed || state < CheckpointState::Protected) {
            return;
        }
        if let Some(checkpoint) = self.checkpoints.get_mut(key) {
            checkpoint.standing.bears = counted.losses;
        }
        if protects {
            self.reach(key, CheckpointState::Protected);
        } else {
            self.bears_changed(key);
        }
        if self.homes_of(key).contains(self.me()) {
            self.tell_everyone(key);
        }
    }

    /// Links came up or went down, or time has passed.
    pub(crate) fn weigh_all(&mut self) {
        for (key, _) in self.committed() {
            if self.homes_of(&key).contains(self.me()) {
                self.weigh(&key);
            }
        }
    }

    /// A home node tells what a checkpoint bears now.
    pub(crate) fn bears_told(&mut self, from: &NodeName, name: Digest, bears: u32) {
        let Some(key) = self.by_name.get(&name).cloned() else {
            return;
        };
        // Whoever knows a checkpoint brings a peer up to date that comes up; what it bears only home nodes can tell.
        let homes = self.homes_of(&key);
        let Some(checkpoint) = self
            .checkpoints
            .get_mut(&key)
            .filter(|_| homes.contains(from))
        else {
            return;
        };
        let before = checkpoint.standing.told.insert(from.clone(), bears);
        let is_home = homes.contains(self.me());
        if before != Some(bears) && !is_home {
            self.bears_changed(&key);
        }
    }

    /// A checkpoint bears more or less than before: say so, and retire what it has made needless.
    fn bears_changed(&mut self, key: &CheckpointKey) {
        let bears = self.checkpoints.get(key).and_then(|c| self.bears(c));
        let noted = self
            .checkpoints
            .get_mut(key)
            .map(|c| &mut c.standing.bears_noted);
        if let (Some(noted), Some(bears)) = (noted, bears)
            && noted.replace(bears) != Some(bears)
        {
            let key = key.clone();
            self.note(Note::Bears { key, bears });
        }
        self.retire_older(&key.namespace);
    }

    /// What a checkpoint bears now, as far as this node knows: a home node counts, the others take the lowest of what
    /// home nodes tell that are up. None before it is committed, and where nothing is coded.
    pub(crate) fn bears(&self, checkpoint: &Checkpoint) -> Option<Bears> {
        if self.counts_itself(checkpoint) {
            let mut counted = self.count_losses(checkpoint)?;
            counted.losses = counted.losses.min(checkpoint.standing.bears);
            return Some(counted);
        }
        let of = coded(checkpoint.manifest.as_ref()?.manifest())?;
        let losses = self.told_by_homes(checkpoint).min().unwrap_or(0).min(of);
        Some(Bears { losses, of })
    }

    /// Losses that other home nodes tell of, which are up.
    fn told_by_homes(&self, checkpoint: &Checkpoint) -> impl Iterator<Item = u32> {
        let told = checkpoint.standing.told.iter();
        told.filter(|(node, _)| self.is_up(node))
            .map(|(_, bears)| *bears)
    }

    /// What it bears, for whoever waited until it was protected. That it is comes by another message than the blocks that make it
    /// so, from whichever home node counted them first: till this node has heard of them too, it knows of no number.
    pub(crate) fn bears_if_known(&self, checkpoint: &Checkpoint) -> Option<Bears> {
        let bears = self.bears(checkpoint)?;
        if checkpoint.state < CheckpointState::Protected {
            return Some(bears);
        }
        let mut told = self.told_by_homes(checkpoint);
        let lags = if self.counts_itself(checkpoint) && checkpoint.homes.contains(self.me()) {
            told.any(|losses| losses > bears.losses)
        } else {
            told.next().is_none()
        };
        (!lags).then_some(bears)
    }

    /// Losses that this home node counts.
    pub(super) fn count_losses(&self, checkpoint: &Checkpoint) -> Option<Bears> {
        let manifest = checkpoint.manifest.as_ref()?;
        let of = coded(manifest.manifest())?;
        // Nodes hear of an epoch one after the other: a rank may have sealed on one that has no place in the epoch of the description.
        if checkpoint.standing.has_uncoded && !planted!("uncoded_shards_protected") {
            return Some(Bears { losses: 0, of });
        }
        let lacks = match &checkpoint.standing.missing {
            Some(missing) if !counts_wrongly() => missing.most(&self.own_missing(checkpoint)),
            _ => self.most_missing(checkpoint, manifest),
        };
        debug_assert!(counts_wrongly() || lacks == self.most_missing(checkpoint, manifest));
        let spare = (of as usize).saturating_sub(lacks);
        let copies = self.manifest_copies(checkpoint, spare);
        let copies = copies.min(self.enclosures_bear(checkpoint, manifest, spare));
        let losses = u32::try_from(spare.min(copies)).unwrap_or(of);
        Some(Bears { losses, of })
    }

    /// The most blocks that a lane lacks, counted anew: the simulation compares.
    fn most_missing(&self, checkpoint: &Checkpoint, manifest: &ManifestBytes) -> usize {
        let own = Blocks::of(checkpoint);
        let there = self.blocks_there(checkpoint, &own);
        let lacks = |(lane, blocks): &(Lane, LaneBlocks)| {
            let has = |block: &usize| is_held(&there, *lane, blocks, *block);
            let parity = blocks.data.len()..blocks.blocks();
            let is_coded = planted!("partial_encode_is_full") && parity.clone().any(|it| has(&it));
            let counts = |block: &usize| has(block) || (is_coded && parity.contains(block));
            let held = (0..blocks.blocks()).filter(counts).count();
            (blocks.needed() + blocks.coding.len()).saturating_sub(held)
        };
        let lanes = LaneBlocks::all(manifest);
        lanes.iter().map(lacks).max().unwrap_or(0)
    }

    /// Blocks that belong here and are not.
    pub(crate) fn own_missing(&self, checkpoint: &Checkpoint) -> BlockSet {
        let own = Blocks::of(checkpoint);
        let manifest = checkpoint.manifest.as_ref();
        manifest.map_or_else(BlockSet::new, |manifest| {
            lacking(manifest, self.me(), Some(&own))
        })
    }

    /// The blocks on nodes that are up, of the incarnations that are.
    pub(super) fn blocks_there<'a>(
        &'a self,
        checkpoint: &'a Checkpoint,
        own: &'a Blocks,
    ) -> BTreeMap<&'a NodeName, &'a Blocks> {
        let held = checkpoint.standing.held.iter();
        held.filter(|(node, held)| self.is_same_node(node, held))
            .map(|(node, held)| (node, &held.blocks))
            .chain([(self.me(), own)])
            .collect()
    }

    /// Whether a node is up, and still the incarnation that said what it holds.
    fn is_same_node(&self, node: &NodeName, held: &HeldBy) -> bool {
        let is_same = |peer: &Peer| peer.generation == held.generation;
        let peer = self.peers.get(node);
        peer.map_or(planted!("nodes_down_bear"), is_same)
    }

    /// Whether blocks of another node count here.
    pub(crate) fn counts_blocks_of(&self, checkpoint: &Checkpoint, node: &NodeName) -> bool {
        let held = checkpoint.standing.held.get(node);
        held.is_some_and(|held| self.is_same_node(node, held) && !held.blocks.is_empty())
    }

    /// Other nodes that are up and have the manifest: so many at most, since more make no difference.
    fn manifest_copies(&self, checkpoint: &Checkpoint, enough: usize) -> usize {
        let told = checkpoint.told.keys().filter(|node| *node != self.me());
        if told.filter(|node| self.is_up(node)).take(enough).count() == enough {
            return enough;
        }
        let own = Blocks::default();
        let there = self.blocks_there(checkpoint, &own);
        let told = checkpoint.told.keys().filter(|node| self.is_up(node));
        let copies: BTreeSet<&NodeName> = told.chain(there.into_keys()).collect();
        copies.into_iter().filter(|node| *node != self.me()).count()
    }

    /// Whether nothing is missing but what nodes hold that are gone for some time: those are not waited for.
    fn has_all_it_can(&self, checkpoint: &Checkpoint, counted: Bears) -> bool {
        let Some(manifest) = checkpoint.manifest.as_ref() else {
            return false;
        };
        if counted.is_full() {
            return true;
        }
        if !self.enclosures_settled(checkpoint, manifest) {
            return false;
        }
        let has_all = match &checkpoint.standing.missing {
            Some(missing) if !counts_wrongly() => {
                self.own_missing(checkpoint).is_empty()
                    && missing.nodes().all(|it| self.is_gone(it))
            }
            _ => self.lacks_only_of_the_gone(checkpoint, manifest),
        };
        debug_assert!(
            counts_wrongly() || has_all == self.lacks_only_of_the_gone(checkpoint, manifest)
        );
        has_all
    }

    /// Whether this node has its own blocks, and nothing is missing but what belongs on such nodes.
    pub(super) fn lacks_only_of(
        &self,
        checkpoint: &Checkpoint,
        such: impl Fn(&NodeName) -> bool,
    ) -> bool {
        let missing = checkpoint.standing.missing.as_ref();
        missing.is_some_and(|missing| {
            self.own_missing(checkpoint).is_empty() && missing.nodes().all(such)
        })
    }

    /// The same, looked at block by block.
    fn lacks_only_of_the_gone(&self, checkpoint: &Checkpoint, manifest: &ManifestBytes) -> bool {
        let own = Blocks::of(checkpoint);
        let there = self.blocks_there(checkpoint, &own);
        let is_settled = |lane: Lane, blocks: &LaneBlocks, block: usize| {
            let Some(node) = blocks.node(block) else {
                return true;
            };
            is_held(&there, lane, blocks, block) || self.is_gone(node)
        };
        LaneBlocks::all(manifest).iter().all(|(lane, blocks)| {
            (0..blocks.blocks()).all(|block| is_settled(*lane, blocks, block))
        })
    }

    /// Whether a node is down, and has been for longer than links take to recover.
    pub(crate) fn is_gone(&self, node: &NodeName) -> bool {
        if !self.is_believed(node) {
            return true;
        }
        if self.is_up(node) {
            return false;
        }
        match self.down.get(node) {
            Some(down) => self.now.since(down.since) >= limits::DEGRADE_AFTER_MS,
            None => self.settled(),
        }
    }

    /// Nodes of a checkpoint that are gone.
    pub(crate) fn gone_nodes(&self, manifest: &ManifestBytes) -> Vec<NodeName> {
        let concerned = self.stakeholders(manifest).into_iter();
        concerned.filter(|node| self.is_gone(node)).collect()
    }
}

/// Whether the node that a block belongs on holds it.
pub(super) fn is_held(
    there: &BTreeMap<&NodeName, &Blocks>,
    lane: Lane,
    blocks: &LaneBlocks,
    block: usize,
) -> bool {
    let found = blocks.node(block).and_then(|node| there.get(node));
    found.is_some_and(|found| found.has(lane, blocks, block))
}

/// Of the blocks that belong on a node, those that are not among what it holds.
fn lacking(manifest: &ManifestBytes, node: &NodeName, held: Option<&Blocks>) -> BlockSet {
    let ranks = manifest.ranks_on(node);
    let k = manifest.manifest().geometry.k();
    let has = |(lane, block): &(Lane, usize)| {
        held.is_some_and(|held| match block.checked_sub(k) {
            None => ranks
                .get(lane.index as usize)
                .is_some_and(|rank| held.shards.contains(rank)),
            Some(index) => held.parity.contains(&(*lane, index as u32)),
        })
    };
    let mut blocks = blocks_on(manifest, node);
    blocks.retain(|block| !has(block));
    blocks.into_iter().collect()
}

/// Whether a planted bug counts otherwise.
fn counts_wrongly() -> bool {
    planted!("partial_encode_is_full") || planted!("nodes_down_bear")
}

/// m, if the checkpoint is coded.
fn coded(manifest: &Manifest) -> Option<u32> {
    let is_coded = !manifest.groups.is_empty();
    let m = u32::try_from(manifest.geometry.m()).ok();
    m.filter(|_| is_coded)
}

#[cfg(test)]
mod tests;
