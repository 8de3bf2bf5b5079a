//! What an earlier daemon held, taken over: first the descriptors, as memory that nobody claims; then slots and parity sets
//! one by one, as whoever knows what they were claims them; at last the rest is freed.
//!
//! Nothing is read here. Shards are compared with their digests and parity with its fingerprints whenever they are used, so
//! a table that is out of date costs chunks, never wrong bytes.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storaged_arena::{Cell, Segment, SegmentError, Slot, SlotError};
use storaged_codec::Fingerprint;
use storaged_core::ParityId;
use storaged_wire::SlotId;
use thiserror::Error;

use super::{MadeBy, Memory, ParitySet, locked};
use crate::keep::{CellName, KeptName, ParityRow, ParityTable};
use crate::parity_memory::{HeldCell, ParityBlock};

/// How long all segments together wait for a daemon that was just killed to let go of them.
const WAIT_MAX: Duration = Duration::from_secs(2);

/// Why something of an earlier daemon cannot be had.
#[derive(Debug, Error)]
pub enum AdoptError {
    /// Its descriptor is of no slot.
    #[error("a kept slot cannot be used")]
    Slot(#[from] SlotError),
    /// Its descriptor is of no segment, or the cell is not to be had.
    #[error("a kept segment of parity cannot be used")]
    Segment(#[from] SegmentError),
    /// It is no block's name.
    #[error("expected the name of a slot or of parity")]
    NoBlock,
    /// No daemon counts so far.
    #[error("expected a segment of parity below 2^32, got {0}")]
    Number(u64),
    /// Nobody kept it, or it was claimed.
    #[error("slot {} was not kept", .0.get())]
    NoSlot(SlotId),
    /// Nobody kept it.
    #[error("segment {0} of parity was not kept")]
    NoSegment(u32),
    /// There is one.
    #[error("parity set {} is there", .0.0)]
    SetExists(ParityId),
    /// More than a cell has.
    #[error("expected at most {cell_bytes} bytes in a cell, got {length}")]
    Length { cell_bytes: usize, length: u32 },
    /// Two stripes or sets have the same cell and do not mean the same chunk.
    #[error("cell {} of segment {} is said to have two contents", .0.cell, .0.segment)]
    Differs(CellName),
}

/// What nobody has claimed yet.
#[derive(Debug, Default)]
pub(super) struct UnclaimedMemory {
    pub(super) slots: BTreeMap<SlotId, Slot>,
    segments: BTreeMap<u32, Arc<Segment>>,
    /// Chunks that were claimed: the next set may share them.
    claimed: BTreeMap<CellName, Arc<ParityBlock>>,
}

/// A cell that is being claimed, and what is said of it.
struct Claim {
    cell: Cell,
    length: u32,
    print: Fingerprint,
}

impl UnclaimedMemory {
    /// Claims those cells of a table that no set has. If one cannot be had, none is.
    fn claim(&self, table: &ParityTable) -> Result<BTreeMap<CellName, Claim>, AdoptError> {
        let mut claims = BTreeMap::new();
        for row in table.rows.iter().flatten() {
            if let Err(error) = self.claim_row(row, &mut claims) {
                let claims = claims.into_values();
                // Another table may be right about them.
                claims.for_each(|claim: Claim| claim.cell.leave());
                return Err(error);
            }
        }
        Ok(claims)
    }

    fn claim_row(
        &self,
        row: &ParityRow,
        claims: &mut BTreeMap<CellName, Claim>,
    ) -> Result<(), AdoptError> {
        let ParityRow {
            place,
            length,
            print,
        } = *row;
        let here = claims.get(&place).map(|it| (it.length as usize, it.print));
        let before = self.claimed.get(&place).map(|it| (it.length, it.print));
        if let Some(known) = here.or(before) {
            return if known == (length as usize, print) {
                Ok(())
            } else {
                Err(AdoptError::Differs(place))
            };
        }
        let segment = self.segments.get(&place.segment);
        let segment = segment.ok_or(AdoptError::NoSegment(place.segment))?;
        let cell_bytes = segment.cell_bytes();
        if length as usize > cell_bytes {
            return Err(AdoptError::Length { cell_bytes, length });
        }
        let cell = segment.adopt(place.cell)?;
        let claim = Claim {
            cell,
            length,
            print,
        };
        claims.insert(place, claim);
        Ok(())
    }
}

impl Memory {
    /// Takes over the descriptors of slots and parity that were kept, and gives those that cannot be used, which the store was told to let
    /// go of. Slots and sets are there once they are claimed; call [`Memory::drop_unclaimed`] when all are that will be.
    pub fn adopt(&self, kept: Vec<(KeptName, OwnedFd)>) -> Vec<(KeptName, AdoptError)> {
        let until = Instant::now() + WAIT_MAX;
        let refused_of = |(name, fd): (KeptName, OwnedFd)| {
            let taken = match name {
                KeptName::Slot(id) => self.adopt_slot_memory(id, fd),
                KeptName::Parity(number) => self.adopt_segment(number, fd, until),
                KeptName::Journal(_) => Err(AdoptError::NoBlock),
            };
            taken.err().map(|error| (name, error))
        };
        let refused: Vec<_> = kept.into_iter().filter_map(refused_of).collect();
        for (name, _) in &refused {
            self.handover.let_go(*name);
        }
        self.handover.let_go_unknown();
        refused
    }

    fn adopt_slot_memory(&self, id: SlotId, fd: OwnedFd) -> Result<(), AdoptError> {
        let slot = Slot::adopt(fd)?;
        locked(&self.inherited).slots.insert(id, slot);
        Ok(())
    }

    fn adopt_segment(&self, number: u64, fd: OwnedFd, until: Instant) -> Result<(), AdoptError> {
        let narrow = u32::try_from(number).map_err(|_| AdoptError::Number(number))?;
        self.parity_memory.count_from(narrow);
        let segment = Segment::reopen(fd, until)?;
        locked(&self.inherited).segments.insert(narrow, segment);
        Ok(())
    }

    /// Claims a slot of the earlier daemon. Gives its bytes.
    ///
    /// # Errors
    /// [`AdoptError::NoSlot`] if there is none of this name that nobody has claimed.
    pub fn adopt_slot(&self, id: SlotId) -> Result<u64, AdoptError> {
        let slot = locked(&self.inherited).slots.remove(&id);
        let slot = slot.ok_or(AdoptError::NoSlot(id))?;
        let capacity = slot.capacity();
        let slot = slot.viewed();
        self.hold(id, slot, MadeBy::EarlierOne);
        Ok(capacity)
    }

    /// Claims the chunks of a parity set of the earlier daemon, by the table that it made of it. Sets may share chunks.
    ///
    /// # Errors
    /// [`AdoptError`] if a chunk is not where the table says; then nothing is claimed.
    pub fn adopt_parity(&self, set: ParityId, table: &ParityTable) -> Result<(), AdoptError> {
        let mut inherited = locked(&self.inherited);
        let mut sets = locked(&self.parity);
        if sets.contains_key(&set) {
            return Err(AdoptError::SetExists(set));
        }
        for (place, claim) in inherited.claim(table)? {
            let block = ParityBlock {
                memory: HeldCell::adopted(&self.parity_memory, place.segment, claim.cell),
                length: claim.length as usize,
                print: claim.print,
                is_rotten: false.into(),
            };
            inherited.claimed.insert(place, Arc::new(block));
        }
        let block = |row: &ParityRow| inherited.claimed.get(&row.place).cloned();
        let blocks = table.rows.iter().map(|row| row.as_ref().and_then(block));
        let blocks = blocks.collect();
        sets.insert(set, ParitySet { blocks });
        Ok(())
    }

    /// Frees all that the earlier daemon held and nobody has claimed, and uses the free cells of its segments from now on.
    pub fn drop_unclaimed(&self) {
        let inherited = std::mem::take(&mut *locked(&self.inherited));
        for id in inherited.slots.into_keys() {
            self.handover.let_go(KeptName::Slot(id));
        }
        // Those that sets have stay: the sets have them.
        drop(inherited.claimed);
        for (number, segment) in inherited.segments {
            self.parity_memory.admit(number, segment);
        }
    }
}

#[cfg(test)]
mod tests;
