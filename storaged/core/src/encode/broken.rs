//! Repairs that broke off: the stripes that are verified and in place stay for the next session of the same block,
//! for a bounded time, so that another plan goes on where the last one ended.
//!
//! Only shards are kept so: each of their chunks has a digest, so what is there is right whoever sent it. Parity is
//! begun again.

use std::ops::Range;

use storaged_wire::{Digest, NodeName, Rank, SessionId, SlotId};

use super::member::Joined;
use super::plans::DirtyMap;
use crate::io::Now;
use crate::limits;
use crate::node::Node;

/// A slot that is filled in part.
#[derive(Debug, Clone)]
pub(crate) struct PartFilled {
    manifest: Digest,
    rank: Rank,
    /// Stripes that are there.
    filled: DirtyMap,
    /// An opening's slot is the opening's to drop; another one is dropped at this time if no session took it up.
    until: Option<Now>,
}

/// A session that was ended from outside while it ran here: until the executor says so, its slot is not used again.
#[derive(Debug, Clone)]
pub(crate) struct Ending {
    slot: SlotId,
    part: PartFilled,
}

impl Node {
    /// The stripes of a slot that earlier sessions have filled.
    pub(crate) fn filled(&self, slot: SlotId) -> Option<&DirtyMap> {
        self.part_filled.get(&slot).map(|part| &part.filled)
    }

    /// The slot that an earlier session began to fill with this shard.
    pub(crate) fn take_part_filled(&mut self, manifest: Digest, rank: Rank) -> Option<SlotId> {
        let mut all = self.part_filled.iter_mut();
        let (slot, part) = all.find(|(_, part)| {
            part.manifest == manifest && part.rank == rank && part.until.is_some()
        })?;
        part.until = None;
        Some(*slot)
    }

    /// A session of this node ended without success: what it kept of a shard stays. `runs` says that the executor is
    /// still at it, and will tell what it kept.
    pub(super) fn break_off(
        &mut self,
        place: &(NodeName, SessionId),
        joined: &Joined,
        slot: SlotId,
        rank: Rank,
        is_opening: bool,
    ) {
        let Some(manifest) = self.checkpoints.get(&joined.key).and_then(|c| c.name()) else {
            if !is_opening {
                self.drop_slot(slot);
            }
            return;
        };
        let known = self.part_filled.remove(&slot).map(|part| part.filled);
        let mut filled = known.unwrap_or_else(|| DirtyMap::clean(joined.stripe_count));
        filled.mark_all(joined.kept_stripes.iter().cloned());
        let until = (!is_opening).then(|| self.now.plus(limits::PART_FILLED_MAX_MS));
        let part = PartFilled {
            manifest,
            rank,
            filled,
            until,
        };
        if joined.running {
            self.ending.insert(place.clone(), Ending { slot, part });
        } else {
            self.settle_part(slot, part);
        }
    }

    /// The executor has ended a session that was over already.
    pub(super) fn ended_late(&mut self, place: &(NodeName, SessionId), kept: Vec<Range<u64>>) {
        let Some(Ending { slot, mut part }) = self.ending.remove(place) else {
            return;
        };
        part.filled.mark_all(kept);
        if part.until.is_some() {
            part.until = Some(self.now.plus(limits::PART_FILLED_MAX_MS));
        }
        let is_opening = part.until.is_none();
        self.settle_part(slot, part);
        if is_opening {
            self.climb_again(slot);
        }
    }

    /// Whether a session that filled this slot has still to end.
    pub(crate) fn slot_is_ending(&self, slot: SlotId) -> bool {
        self.ending.values().any(|ending| ending.slot == slot)
    }

    fn settle_part(&mut self, slot: SlotId, part: PartFilled) {
        if part.filled.count() > 0 {
            self.part_filled.insert(slot, part);
        } else if part.until.is_some() {
            self.drop_slot(slot);
        }
    }

    /// Drops what no session took up in time, and forgets slots that are gone.
    pub(crate) fn expire_part_filled(&mut self) {
        let now = self.now;
        let late = |part: &PartFilled| part.until.is_some_and(|until| until <= now);
        let over: Vec<SlotId> = self
            .part_filled
            .iter()
            .filter(|(slot, part)| late(part) || !self.slots.contains_key(slot))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in over {
            self.part_filled.remove(&slot);
            self.drop_slot(slot);
        }
    }

    /// A slot holds its shard whole, or is gone: nothing of it is only in part any more.
    pub(crate) fn forget_part_filled(&mut self, slot: SlotId) {
        self.part_filled.remove(&slot);
    }
}
