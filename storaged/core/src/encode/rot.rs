//! Blocks here in which chunks have rotted. Such a block is an erasure: it counts no longer, is decoded around, and is healed like
//! any other loss (`repair`). What of it is whole stays where it is, as after a repair that broke off (`resume`), so that the heal
//! moves the rotten chunks alone and puts them where they were.
//!
//! Whoever has the shard open reads on: of what it reads it compares every chunk with its digest, and what it has mapped is nobody
//! else's before the shard is whole again or dropped.

use std::collections::BTreeSet;

use storaged_plan::{DirtyMap, LaneBlocks};
use storaged_wire::peer::{CheckpointKey, Lane, PeerMessage, SessionFault};
use storaged_wire::{Digest, ManifestBytes, Namespace, NodeName};

use super::Sessions;
use super::resume::{ParityPlace, PartialParity, PartialShard};
use super::session::{Closing, SessionPlace};
use crate::api::{HeldBlock, Output, Source};
use crate::catalog::{SlotUse, Upload};
use crate::context::Context;
use crate::event::Event;
use crate::limits;

/// A block that this node has lost and that its lane's leader may not know of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LostBlock {
    manifest: Digest,
    lane: Lane,
    block: usize,
}

impl LostBlock {
    fn of(manifest: &ManifestBytes, block: HeldBlock) -> Option<Self> {
        let (lane, block) = match block {
            HeldBlock::Shard(rank, _) => LaneBlocks::find(manifest, rank)?,
            HeldBlock::Parity(lane, index, _) => {
                (lane, manifest.manifest().geometry.k() + index as usize)
            }
        };
        let manifest = manifest.name();
        Some(Self {
            manifest,
            lane,
            block,
        })
    }
}

impl Sessions {
    /// These chunks of a block here are not what they were.
    pub(crate) fn block_rotted(
        &mut self,
        key: &CheckpointKey,
        block: HeldBlock,
        rotten: &[u64],
        cx: &mut Context,
    ) {
        let manifest = cx.checkpoints.get(key).and_then(|c| c.manifest.clone());
        let Some(manifest) = manifest else {
            return cx.lose_unsaved(key, block);
        };
        if !cx.holds(key, block) || planted!("rot_still_counts") {
            return;
        }
        match LostBlock::of(&manifest, block) {
            Some(lost) => {
                let sound = sound_chunks(&manifest, lost, rotten);
                self.set_aside(key, block, lost, sound, cx);
                self.lost.insert(lost);
            }
            // Where nothing is coded nobody can put the chunks back.
            None => cx.take_away(key, block),
        }
        let rotten = SessionFault::Corrupt(format!("chunks of the {block} have rotted"));
        self.end_sessions_reading(block, &rotten, cx);
        cx.announce(key);
        cx.report_held(key);
        self.tell_losses(cx);
        self.lead_lanes(cx);
    }

    /// Keeps what of a block is whole for the session that puts the rest back.
    fn set_aside(
        &mut self,
        key: &CheckpointKey,
        block: HeldBlock,
        lost: LostBlock,
        sound: DirtyMap,
        cx: &mut Context,
    ) {
        let until = cx.now.plus(limits::ROTTEN_KEPT_MS);
        let manifest = lost.manifest;
        match block {
            HeldBlock::Shard(rank, slot) => {
                cx.set_shard_aside(key, block);
                let part = PartialShard::set_aside(manifest, rank, sound, until);
                self.partial_shards.insert(slot, part);
            }
            HeldBlock::Parity(lane, index, set) => {
                if let Some(checkpoint) = cx.checkpoints.get_mut(key) {
                    checkpoint.parity.remove(&(lane, index));
                }
                let place = ParityPlace {
                    manifest,
                    lane,
                    index,
                };
                let part = PartialParity::set_aside(set, sound, until);
                // A repair that broke off may have left a part of the same block before this one was made.
                let before = self.partial_parity.insert(place, part);
                if let Some(before) = before.filter(|_| !planted!("part_before_leaks")) {
                    cx.drop_parity(before.set());
                }
            }
        }
    }

    /// A block here has gone as a whole.
    pub(super) fn block_lost(&mut self, key: &CheckpointKey, block: HeldBlock, cx: &mut Context) {
        let manifest = cx.checkpoints.get(key).and_then(|c| c.manifest.clone());
        let lost = manifest.and_then(|manifest| LostBlock::of(&manifest, block));
        self.lost.extend(lost);
    }

    /// Sessions that read from a block, or that code what has changed since it, would find out themselves that it is gone, at whichever
    /// chunk they come to.
    pub(crate) fn end_sessions_reading(
        &mut self,
        block: HeldBlock,
        fault: &SessionFault,
        cx: &mut Context,
    ) {
        let reads = |source: &Source| match (source, block) {
            (Source::Shard { shard, basis }, HeldBlock::Shard(_, slot)) => {
                let basis = basis.as_ref().map(|basis| basis.slot);
                shard.slot == slot || basis == Some(slot)
            }
            (Source::Parity { set }, HeldBlock::Parity(_, _, rotten)) => *set == rotten,
            _ => false,
        };
        let joined = self.joined.iter();
        let reading = joined.filter(|(_, joined)| joined.source.as_ref().is_some_and(reads));
        let places: Vec<SessionPlace> = reading.map(|(place, _)| place.clone()).collect();
        for place in places {
            self.leave(&place, Closing::BrokenOff, cx);
            let SessionPlace { leader, session } = place;
            let fault = fault.clone();
            cx.send(&leader, PeerMessage::Failed { session, fault });
        }
    }

    /// Tells whoever may lead the lanes of lost blocks what is held here, until they are back: a leader asks only when a node
    /// comes up, and a node that has not been restarted would be taken to hold what it said then.
    pub(crate) fn tell_losses(&mut self, cx: &mut Context) {
        self.lost.retain(|lost| cx.still_lacks(*lost));
        let mut leaders: BTreeSet<(NodeName, Namespace)> = BTreeSet::new();
        for lost in self.lost.iter().filter(|_| !planted!("rot_not_told")) {
            let Some(manifest) = cx.manifest_named(lost.manifest) else {
                continue;
            };
            let blocks = LaneBlocks::of(&manifest, lost.lane);
            let coding = blocks.into_iter().flat_map(|blocks| blocks.coding);
            let others = coding.filter(|node| node != cx.me());
            let namespace = &manifest.manifest().namespace;
            leaders.extend(others.map(|node| (node, namespace.clone())));
        }
        for (node, namespace) in leaders {
            cx.holdings_asked(&node, limits::REPAIR_QUERY, &namespace);
        }
    }

    /// What is here in part of checkpoints that have left RAM goes with them.
    pub(crate) fn drop_parts_of_the_gone(&mut self, cx: &mut Context) {
        let shards = self.partial_shards.iter();
        let gone = shards.filter(|(_, part)| part.is_of_the_gone(cx));
        for slot in gone.map(|(slot, _)| *slot).collect::<Vec<_>>() {
            self.partial_shards.remove(&slot);
            cx.drop_slot(slot);
            cx.emit(Event::RoomMade);
        }
        let parity = std::mem::take(&mut self.partial_parity);
        for (place, part) in parity {
            if cx.by_name.contains_key(&place.manifest) {
                self.partial_parity.insert(place, part);
            } else {
                cx.drop_parity(part.set());
            }
        }
    }
}

impl Context {
    /// Whether this very block counts here.
    pub(crate) fn holds(&self, key: &CheckpointKey, block: HeldBlock) -> bool {
        let checkpoint = self.checkpoints.get(key);
        checkpoint.is_some_and(|c| match block {
            HeldBlock::Shard(rank, slot) => {
                let shard = c.shards.get(&rank);
                shard.is_some_and(|shard| shard.slot == slot && shard.digests.is_some())
            }
            HeldBlock::Parity(lane, index, set) => c.parity.get(&(lane, index)) == Some(&set),
        })
    }

    fn still_lacks(&self, lost: LostBlock) -> bool {
        let key = self.by_name.get(&lost.manifest);
        let checkpoint = key.and_then(|key| self.checkpoints.get(key));
        let manifest = checkpoint.and_then(|c| c.manifest.as_ref());
        let blocks = manifest.and_then(|manifest| LaneBlocks::of(manifest, lost.lane));
        let (Some(checkpoint), Some(blocks)) = (checkpoint, blocks) else {
            return false;
        };
        match blocks.data.get(lost.block) {
            Some(entry) => {
                let rank = entry.as_ref().map(|shard| shard.rank);
                rank.is_some_and(|rank| !checkpoint.shards.contains_key(&rank))
            }
            None => {
                let index = (lost.block - blocks.data.len()) as u32;
                !checkpoint.parity.contains_key(&(lost.lane, index))
            }
        }
    }

    /// The shard is none of the checkpoint's, and its slot waits for a repair.
    fn set_shard_aside(&mut self, key: &CheckpointKey, block: HeldBlock) {
        let HeldBlock::Shard(rank, slot) = block else {
            return;
        };
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let name = checkpoint.name();
        let Some(shard) = checkpoint.shards.remove(&rank) else {
            return;
        };
        // It would only come to the rotten chunk.
        if let (Upload::Running, Some(manifest)) = (shard.upload, name) {
            self.out.push(Output::StopUpload { manifest, rank });
        }
        let entry = self.slot_mut(slot);
        entry.used_for = SlotUse::Repairing;
        entry.readers_before = shard.readers;
    }

    /// A block goes, and its memory with it.
    pub(super) fn take_away(&mut self, key: &CheckpointKey, block: HeldBlock) {
        match block {
            HeldBlock::Shard(_, slot) => {
                self.set_shard_aside(key, block);
                self.drop_slot(slot);
                self.emit(Event::RoomMade);
            }
            HeldBlock::Parity(lane, index, set) => {
                if let Some(checkpoint) = self.checkpoints.get_mut(key) {
                    checkpoint.parity.remove(&(lane, index));
                }
                self.drop_parity(set);
            }
        }
    }

    /// A shard of a step that has not been committed is nowhere else: the step cannot be saved any more.
    fn lose_unsaved(&mut self, key: &CheckpointKey, block: HeldBlock) {
        if self.holds(key, block) {
            self.take_away(key, block);
            self.keeping.touch(key);
            self.announce(key);
        }
    }
}

/// The stripes of a lost block's lane that are whole here.
fn sound_chunks(manifest: &ManifestBytes, lost: LostBlock, rotten: &[u64]) -> DirtyMap {
    let length = LaneBlocks::of(manifest, lost.lane).map_or(0, |blocks| blocks.length);
    let stripes = manifest.manifest().chunk.count(length);
    let mut sound = DirtyMap::all(stripes);
    let mut gone = DirtyMap::clean(stripes);
    let in_lane = rotten.iter().filter(|chunk| **chunk < stripes);
    in_lane.for_each(|chunk| gone.mark(*chunk));
    if !planted!("rotten_taken_for_sound") {
        sound.remove(&gone);
    }
    sound
}
