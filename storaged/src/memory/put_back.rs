//! Shards that are put back into slots, by sessions and from the durable tier, and what their chunks were then: digest and fingerprint of the private
//! bytes that were verified, never of the slot. A shard of which every chunk is noted is not read again to be known
//! (docs/decisions/2026-11-28-what-was-put-back-is-not-digested-again.md). Notes go once they are used, with their slot, and when something else is
//! digested in it.

use std::sync::{Arc, Mutex};

use storaged_arena::{Slot, SlotError};
use storaged_codec::{Checked, ChunkSize, Digest, Fingerprint, Unchecked, fingerprint};
use storaged_core::SlotShard;
use storaged_wire::SlotId;
use storaged_wire::peer::SessionFault;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{HeldSlot, Memory, ReadError, locked};
use crate::encode::BlockSink;

/// Chunks of all slots together that there may be notes of, at 32 bytes of a digest and 17 of a fingerprint that may be missing: 49 MiB, for 256 GiB of
/// shards in chunks of 256 KiB. A shard that finds no room is read again.
pub(super) const NOTED_CHUNKS_MAX: usize = 1 << 20;

const NOTE_BYTES: usize = size_of::<Option<ChunkNote>>();
const _: () = assert!(NOTE_BYTES == 32 + 17 && NOTE_BYTES * NOTED_CHUNKS_MAX == 49 << 20);

/// Whether what is put into a slot may stay there as a shard of this node's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stay {
    Perhaps,
    No,
}

/// How long a shard is, and its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShardSize {
    pub length: u64,
    pub chunk: ChunkSize,
}

/// What a chunk was when it was put into a slot.
#[derive(Debug, Clone, Copy)]
struct ChunkNote {
    leaf: Digest,
    print: Fingerprint,
}

/// A shard of which every chunk is noted.
#[derive(Debug)]
pub(crate) struct NotedShard {
    pub leaves: Arc<[Digest]>,
    pub prints: Arc<[Fingerprint]>,
}

#[derive(Debug)]
struct NoteTable {
    size: ShardSize,
    chunks: Vec<Option<ChunkNote>>,
    _room: OwnedSemaphorePermit,
}

/// What is noted of a slot.
#[derive(Debug)]
pub(super) struct SlotNotes {
    room: Arc<Semaphore>,
    table: Mutex<Option<NoteTable>>,
}

impl SlotNotes {
    /// Nothing yet.
    pub fn new(room: &Arc<Semaphore>) -> Self {
        Self {
            room: room.clone(),
            table: Mutex::default(),
        }
    }

    /// Something else is in the slot, or may be.
    pub fn forget(&self) {
        *locked(&self.table) = None;
    }

    /// All chunks of a shard in their order, if every one is noted. There are no notes afterwards.
    fn take(&self, size: ShardSize) -> Option<Vec<ChunkNote>> {
        let table = locked(&self.table).take()?;
        let is_this = table.size == size;
        is_this.then(|| table.chunks.into_iter().collect())?
    }

    /// A chunk is about to be written: nobody knows what is there until it is.
    fn forget_chunk(&self, size: ShardSize, index: u64) {
        let mut table = locked(&self.table);
        match table.as_mut() {
            Some(known) if known.size == size => {
                let place = usize::try_from(index).ok();
                let place = place.and_then(|at| known.chunks.get_mut(at));
                place.into_iter().for_each(|note| *note = None);
            }
            _ => *table = None,
        }
    }

    fn note(&self, size: ShardSize, index: u64, note: ChunkNote) {
        let mut table = locked(&self.table);
        let known = table.take().filter(|known| known.size == size);
        *table = known.or_else(|| self.new_table(size));
        let places = table.as_mut().map(|known| &mut known.chunks);
        let place = usize::try_from(index).ok().zip(places);
        let place = place.and_then(|(at, chunks)| chunks.get_mut(at));
        place.into_iter().for_each(|place| *place = Some(note));
    }

    fn new_table(&self, size: ShardSize) -> Option<NoteTable> {
        let count = u32::try_from(size.chunk.count(size.length)).ok()?;
        let room = self.room.clone().try_acquire_many_owned(count).ok()?;
        Some(NoteTable {
            size,
            chunks: vec![None; count as usize],
            _room: room,
        })
    }
}

/// A slot that a shard's chunks are put into.
#[derive(Debug)]
pub(crate) struct PutTarget {
    held: HeldSlot,
    size: ShardSize,
    stay: Stay,
}

impl PutTarget {
    /// Puts a chunk where it belongs: nothing that was not checked gets there from outside.
    pub fn put<T: AsRef<[u8]>>(&self, chunk: &Checked<T>) -> Result<(), SlotError> {
        let note = (self.stay == Stay::Perhaps).then(|| ChunkNote {
            leaf: chunk.leaf(),
            print: fingerprint(chunk.bytes()),
        });
        let HeldSlot { slot, notes, .. } = &self.held;
        notes.forget_chunk(self.size, chunk.index());
        put_chunk(slot, self.size.chunk, chunk)?;
        if let Some(note) = note {
            notes.note(self.size, chunk.index(), note);
        }
        Ok(())
    }
}

fn put_chunk<T: AsRef<[u8]>>(
    slot: &Slot,
    size: ChunkSize,
    chunk: &Checked<T>,
) -> Result<(), SlotError> {
    slot.write_at(chunk.index() * size.bytes() as u64, chunk.bytes())
}

/// A shard being put back: every chunk must have its digest.
pub(super) struct KeepShard {
    pub target: PutTarget,
    pub leaves: Arc<[Digest]>,
}

impl BlockSink for KeepShard {
    fn put(&self, stripe: u64, block: Option<&[u8]>) -> Result<(), SessionFault> {
        let ShardSize { length, chunk } = self.target.size;
        let range = chunk.range(stripe, length);
        let length = (range.end - range.start) as usize;
        let Some(expected) = self.leaves.get(stripe as usize) else {
            return Ok(());
        };
        let zeros;
        let bytes = match block {
            Some(block) => block.get(..length).ok_or(SessionFault::NoBlocks)?,
            None => {
                zeros = vec![0; length];
                &zeros
            }
        };
        let checked = Unchecked::new(bytes).verify(expected, stripe);
        let checked = checked.map_err(|wrong| SessionFault::WrongResult(wrong.to_string()))?;
        let written = self.target.put(&checked);
        written.map_err(|error| SessionFault::NoRoom(error.to_string()))
    }

    fn finish(&self) -> Result<(), SessionFault> {
        Ok(())
    }
}

impl Memory {
    /// A slot to put a shard into; none if it is gone.
    pub(crate) fn put_target(&self, id: SlotId, size: ShardSize, stay: Stay) -> Option<PutTarget> {
        let held = self.held(id)?;
        Some(PutTarget { held, size, stay })
    }

    pub(super) fn keep_shard(&self, shard: &SlotShard) -> Result<KeepShard, SessionFault> {
        let size = ShardSize {
            length: shard.length,
            chunk: shard.chunk,
        };
        let target = self.put_target(shard.slot, size, Stay::Perhaps);
        Ok(KeepShard {
            target: target.ok_or(SessionFault::NoBlocks)?,
            leaves: shard.leaves.clone(),
        })
    }

    /// Digests and fingerprints of a shard whose chunks were all put into a slot and verified on their way. None if one was not, or if memory
    /// of the slot was given back since.
    ///
    /// # Errors
    /// [`ReadError`] if the slot is gone or has no memory.
    pub(crate) fn take_put_back(
        &self,
        id: SlotId,
        size: ShardSize,
    ) -> Result<Option<NotedShard>, ReadError> {
        let held = self.held(id).ok_or(ReadError::Gone)?;
        let Some(notes) = held.notes.take(size) else {
            return Ok(None);
        };
        let is_whole = held.fill_holes(id)? == 0;
        Ok(is_whole.then(|| NotedShard {
            leaves: notes.iter().map(|note| note.leaf).collect(),
            prints: notes.iter().map(|note| note.print).collect(),
        }))
    }
}

#[cfg(test)]
mod tests;
