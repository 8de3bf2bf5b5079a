//! Sessions that broke off: the stripes that are in place stay for the next session of the same block, for a bounded
//! time, so that another plan goes on where the last one ended.
//!
//! Each chunk of a shard has a digest, so what is there is right whoever sent it. A finished stripe of parity is the new
//! step's whole parity, whatever basis it was made from, so it stays too and is not made again.

use std::ops::Range;

use storaged_plan::DirtyMap;
use storaged_wire::peer::{CheckpointKey, Lane};
use storaged_wire::{Digest, Rank, SlotId};

use super::session::{Closing, JoinedSession, SessionPlace, SinkState, SlotOwner};
use super::tables::Tables;
use crate::api::{Now, Output, ParityId};
use crate::budget::Reservation;
use crate::context::Context;
use crate::encode::Sessions;
use crate::event::Event;
use crate::limits;

/// A slot that is filled in part.
#[derive(Debug, Clone)]
pub(crate) struct PartialShard {
    manifest: Digest,
    rank: Rank,
    /// Stripes that are there.
    filled: DirtyMap,
    /// An opening's slot is the opening's to drop; another one is dropped at this time if no session took it up.
    until: Option<Now>,
}

impl PartialShard {
    /// Of a shard in which all but these stripes have rotted.
    pub(super) fn set_aside(manifest: Digest, rank: Rank, filled: DirtyMap, until: Now) -> Self {
        Self {
            manifest,
            rank,
            filled,
            until: Some(until),
        }
    }

    /// Whether its checkpoint has left RAM, and no session or opening is at it.
    pub(super) fn is_of_the_gone(&self, cx: &Context) -> bool {
        self.until.is_some() && !cx.by_name.contains_key(&self.manifest)
    }

    /// Whether it is of this shard, and no opening's.
    pub(super) fn is_of(&self, manifest: Digest, rank: Rank) -> bool {
        self.manifest == manifest && self.rank == rank && self.until.is_some()
    }
}

/// A parity set that is made in part.
#[derive(Debug, Clone)]
pub(crate) struct PartialParity {
    set: ParityId,
    made: DirtyMap,
    /// All of it is made: only the leader's word is missing.
    whole: bool,
    /// The digests and fingerprints of what it covers: without them nothing that is computed from it can be proved.
    tables: Tables,
    until: Now,
}

impl PartialParity {
    /// Of a set in which all but these stripes have rotted.
    pub(super) fn set_aside(set: ParityId, made: DirtyMap, until: Now) -> Self {
        Self {
            set,
            made,
            whole: false,
            tables: Tables::default(),
            until,
        }
    }

    /// The set's id.
    pub fn set(&self) -> ParityId {
        self.set
    }
}

/// Which parity block of which checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ParityPlace {
    pub manifest: Digest,
    pub lane: Lane,
    pub index: u32,
}

/// A session that was ended from outside while it ran here: until the executor says so, what it keeps is not used
/// again.
#[derive(Debug, Clone)]
pub(crate) enum Cancelling {
    Slot(SlotId, PartialShard),
    Parity(ParityPlace, PartialParity),
}

impl Cancelling {
    /// The parity set that it made.
    pub fn parity_set(&self) -> Option<ParityId> {
        match self {
            Self::Parity(_, part) => Some(part.set),
            Self::Slot(..) => None,
        }
    }
}

impl Sessions {
    /// The stripes of a slot that earlier sessions have filled.
    pub(crate) fn filled(&self, slot: SlotId) -> Option<&DirtyMap> {
        self.partial_shards.get(&slot).map(|part| &part.filled)
    }

    /// The slot that an earlier session began to fill with this shard.
    pub(crate) fn take_part_filled(&mut self, manifest: Digest, rank: Rank) -> Option<SlotId> {
        let mut all = self.partial_shards.iter_mut();
        let (slot, part) = all.find(|(_, part)| part.is_of(manifest, rank))?;
        part.until = None;
        Some(*slot)
    }

    /// A session of this node ended without success: what it kept of a shard stays, while its checkpoint does. As long as the
    /// executor is still at it, also of a checkpoint that is gone, nobody else is.
    pub(super) fn break_off(
        &mut self,
        place: &SessionPlace,
        joined: &JoinedSession,
        slot: SlotId,
        rank: Rank,
        belongs_to: SlotOwner,
        cx: &mut Context,
    ) {
        let manifest = joined.fetch.manifest();
        let known = self.partial_shards.remove(&slot).map(|part| part.filled);
        let mut filled = known.unwrap_or_else(|| DirtyMap::clean(joined.stripe_count));
        filled.mark_all(joined.kept_stripes.iter().cloned());
        let until = match belongs_to {
            SlotOwner::Opening => None,
            SlotOwner::Session => Some(cx.now.plus(limits::PART_FILLED_MAX_MS)),
        };
        let part = PartialShard {
            manifest,
            rank,
            filled,
            until,
        };
        if joined.is_running() {
            self.ending
                .insert(place.clone(), Cancelling::Slot(slot, part));
        } else {
            self.settle_part(slot, part, cx);
        }
    }

    /// The same of a parity set.
    pub(super) fn break_off_parity(
        &mut self,
        place: &SessionPlace,
        joined: &JoinedSession,
        index: u32,
        set: ParityId,
        cx: &mut Context,
    ) {
        let mut made = joined.made.clone();
        made.mark_all(joined.kept_stripes.iter().cloned());
        let until = cx.now.plus(limits::PART_FILLED_MAX_MS);
        let part = PartialParity {
            set,
            made,
            // Finished may have been less than all: it counts without its leader's word when the step is protected.
            whole: joined.is_finished()
                && (self.is_whole(joined) || planted!("finished_parts_are_whole")),
            tables: joined.fetch.tables().clone(),
            until,
        };
        let block = ParityPlace {
            manifest: joined.fetch.manifest(),
            lane: joined.derived.lane,
            index,
        };
        if joined.is_running() {
            self.ending
                .insert(place.clone(), Cancelling::Parity(block, part));
        } else {
            self.settle_part_made(block, part, cx);
        }
    }

    /// The parity set that an earlier session began to make of this block.
    pub(crate) fn part_made_of(&self, block: ParityPlace) -> Option<ParityId> {
        self.partial_parity.get(&block).map(|part| part.set)
    }

    /// A session takes that set up: what has been made of it.
    pub(crate) fn take_part_made(&mut self, block: ParityPlace) -> Option<DirtyMap> {
        self.partial_parity.remove(&block).map(|part| part.made)
    }

    /// The executor has ended a session that was over already.
    pub(super) fn ended_late(
        &mut self,
        place: &SessionPlace,
        kept: Vec<Range<u64>>,
        cx: &mut Context,
    ) {
        match self.ending.remove(place) {
            Some(Cancelling::Slot(slot, mut part)) => {
                part.filled.mark_all(kept);
                let is_opening = part.until.is_none();
                self.settle_part(slot, part, cx);
                if is_opening {
                    cx.emit(Event::OpeningIdle(slot));
                }
            }
            Some(Cancelling::Parity(block, mut part)) => {
                part.made.mark_all(kept);
                self.settle_part_made(block, part, cx);
            }
            None => {}
        }
        self.retry_deferred(cx);
    }

    /// Whether all stripes of what is kept are in place, now that its leader says that it counts: if another newcomer lacked less, only what
    /// both lacked has moved, and the rest is still to come. A leader that lies may have moved nothing.
    pub(super) fn is_whole(&self, joined: &JoinedSession) -> bool {
        let is_encode = joined.derived.shape.is_none();
        let there = match &joined.kept {
            SinkState::Nothing
            | SinkState::Shard {
                belongs_to: SlotOwner::Opening,
                ..
            } => return true,
            // A stripe that did not change is the basis's, and was compared when the session began.
            SinkState::Parity { basis: Some(_), .. } => return true,
            _ if is_encode && planted!("encodes_of_nothing_count") => return true,
            SinkState::Shard { slot, .. } => self.filled(*slot).cloned(),
            SinkState::Parity { .. } => Some(joined.made.clone()),
        };
        let mut there = there.unwrap_or_else(|| DirtyMap::clean(joined.stripe_count));
        there.mark_all(joined.kept_stripes.iter().cloned());
        there.count() == joined.stripe_count
    }

    /// Whether a session that filled this slot has still to end.
    pub(crate) fn slot_is_ending(&self, slot: SlotId) -> bool {
        let is_it = |ending: &Cancelling| matches!(ending, Cancelling::Slot(of, _) if *of == slot);
        self.ending.values().any(is_it)
    }

    /// A step is protected because all members of its sessions had finished. This one may not have heard that its
    /// session was closed so: the link broke, and others told it of the state. What it has made counts all the same.
    pub(crate) fn count_finished_parity(&mut self, key: &CheckpointKey, cx: &mut Context) {
        let is_it = |joined: &JoinedSession| {
            let makes_parity = matches!(joined.kept, SinkState::Parity { .. });
            joined.key == *key && joined.is_finished() && makes_parity
        };
        let places = self.joined.iter().filter(|(_, joined)| is_it(joined));
        for place in places.map(|(place, _)| place.clone()).collect::<Vec<_>>() {
            self.leave(&place, Closing::Done, cx);
        }
        let Some(name) = cx.checkpoints.get(key).and_then(|c| c.name()) else {
            return;
        };
        let parts = self.partial_parity.iter();
        let whole: Vec<ParityPlace> = parts
            .filter(|(block, part)| block.manifest == name && part.whole)
            .map(|(block, _)| *block)
            .collect();
        for block in whole {
            let ParityPlace { lane, index, .. } = block;
            let part = self.partial_parity.remove(&block);
            let checkpoint = cx.checkpoints.get_mut(key);
            if let (Some(part), Some(checkpoint)) = (part, checkpoint) {
                checkpoint.leaves.extend(part.tables.leaves);
                checkpoint.prints.extend(part.tables.prints);
                if let Some(old) = checkpoint.parity.insert((lane, index), part.set) {
                    cx.drop_parity(old);
                }
            }
        }
        cx.report_held(key);
    }

    fn settle_part_made(&mut self, block: ParityPlace, part: PartialParity, cx: &mut Context) {
        let gone = match part.made.count() {
            0 if !part.whole => Some(part),
            _ if !cx.by_name.contains_key(&block.manifest) => Some(part),
            _ => self.partial_parity.insert(block, part),
        };
        if let Some(gone) = gone {
            cx.drop_parity(gone.set);
        }
    }

    fn settle_part(&mut self, slot: SlotId, part: PartialShard, cx: &mut Context) {
        let is_opening = part.until.is_none();
        let is_known = cx.by_name.contains_key(&part.manifest);
        if part.filled.count() > 0 && (is_opening || is_known) {
            self.partial_shards.insert(slot, part);
        } else if !is_opening {
            cx.drop_slot(slot);
        }
    }

    /// Drops what no session took up in time, and forgets slots that are gone.
    pub(crate) fn expire_part_filled(&mut self, cx: &mut Context) {
        let now = cx.now;
        // The shard may have come back into another slot, by a reader's opening or by a session that went on with an older part.
        let needless = |slot: SlotId, part: &PartialShard| {
            let key = cx.by_name.get(&part.manifest);
            let shard = key.and_then(|key| cx.checkpoints.get(key)?.shards.get(&part.rank));
            shard.is_some_and(|shard| shard.slot != slot) && !planted!("parts_outlive_their_need")
        };
        let late = |slot: SlotId, part: &PartialShard| {
            part.until
                .is_some_and(|until| until <= now || needless(slot, part))
        };
        let over: Vec<SlotId> = self
            .partial_shards
            .iter()
            .filter(|(slot, part)| late(**slot, part) || !cx.slots.contains_key(slot))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in over {
            self.partial_shards.remove(&slot);
            cx.drop_slot(slot);
        }
        let parts = std::mem::take(&mut self.partial_parity);
        for (block, part) in parts {
            if part.until <= now {
                cx.drop_parity(part.set);
            } else {
                self.partial_parity.insert(block, part);
            }
        }
    }

    /// A slot holds its shard whole, or is gone: nothing of it is only in part any more.
    pub(crate) fn forget_part_filled(&mut self, slot: SlotId) {
        self.partial_shards.remove(&slot);
    }
}

impl Context {
    /// A parity set goes, with its bytes.
    pub(crate) fn drop_parity(&mut self, set: ParityId) {
        self.budget.release(Reservation::Parity(set));
        self.out.push(Output::DropParity { set });
    }
}
