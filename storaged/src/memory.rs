//! This node's RAM: slots (shared with trainers) and parity sets (private), by id. The decisions say what exists;
//! this file holds it, and is the only place where chunks are read and verified or parity is kept. `memory/adopt.rs` takes
//! over what an earlier daemon held.

mod adopt;
mod put_back;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use storaged_arena::{Slot, SlotError};
use storaged_codec::{
    Checked, ChunkSize, Digest, Fingerprint, Unchecked, engine, fingerprint, leaf_digest,
};
use storaged_core::{ParityId, ScrubTally, SessionWork, Sink, SlotEnd, SlotShard, Source, Unread};
use storaged_plan::stripe_bytes;
use storaged_wire::SlotId;
use storaged_wire::peer::SessionFault;
use thiserror::Error;
use tokio::sync::Semaphore;

use crate::driver::chain;
use crate::encode::{BlockSink, BlockState, Blocks, Proof};
use crate::keep::{DescriptorStore, Handover, KeptBy, KeptName, ParityRow, ParityTable};
use crate::parity_memory::{ParityBlock, ParityMemory};
use crate::verify::ParityCheck;

pub use adopt::AdoptError;
use put_back::SlotNotes;
pub(crate) use put_back::{ShardSize, Stay};

/// Why a slot could not be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// It was dropped meanwhile.
    #[error("the slot is gone")]
    Gone,
    /// The system.
    #[error(transparent)]
    Slot(#[from] SlotError),
}

/// A sealed shard as it was digested.
#[derive(Debug, Clone)]
pub struct Digested {
    /// One digest per chunk.
    pub leaves: Arc<[Digest]>,
    /// One fingerprint per chunk.
    pub prints: Arc<[Fingerprint]>,
    /// The shard's digest.
    pub root: Digest,
    /// Bytes that were read for it.
    pub read: u64,
    /// How long threads were at it, all of them together.
    pub busy: Duration,
}

/// One parity set: per stripe a chunk, or none where parity is all zeros. Unchanged chunks are shared with the set
/// it came from, so that a new step costs memory only for what changed, and the old step stays whole.
#[derive(Debug, Clone, Default)]
struct ParitySet {
    blocks: Vec<Option<Arc<ParityBlock>>>,
}

/// Whose readers may have a slot mapped, and the decisions know nothing of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MadeBy {
    ThisDaemon,
    /// Whoever read while it ended goes on copying, without a connection.
    EarlierOne,
}

/// A slot, and what was put into it.
#[derive(Debug, Clone)]
struct HeldSlot {
    slot: Arc<Slot>,
    made_by: MadeBy,
    notes: Arc<SlotNotes>,
}

impl HeldSlot {
    /// Takes memory again that a trainer gave back, and says how much.
    fn fill_holes(&self, id: SlotId) -> Result<u64, SlotError> {
        let punched = self.slot.fill_holes()?;
        if punched > 0 {
            tracing::warn!(slot = %id, bytes = punched, "a trainer gave memory of its slot back; it was taken again");
        }
        Ok(punched)
    }
}

/// All of it. The size of a chunk is each shard's own: it comes from the manifest, so that a daemon that is configured
/// anew goes on with what it had.
#[derive(Debug)]
pub struct Memory {
    slots: Mutex<BTreeMap<SlotId, HeldSlot>>,
    note_room: Arc<Semaphore>,
    parity: Arc<Mutex<BTreeMap<ParityId, ParitySet>>>,
    parity_memory: Arc<ParityMemory>,
    handover: Arc<Handover>,
    inherited: Mutex<adopt::UnclaimedMemory>,
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Nothing yet. Slots and the memory of parity are handed to `store` as they are made, and stay there when this ends.
    pub fn new(store: Arc<dyn DescriptorStore>) -> Self {
        let handover = Arc::new(Handover::new(store));
        Self {
            slots: Mutex::default(),
            note_room: Arc::new(Semaphore::new(put_back::NOTED_CHUNKS_MAX)),
            parity: Arc::default(),
            parity_memory: Arc::new(ParityMemory::new(handover.clone())),
            handover,
            inherited: Mutex::default(),
        }
    }

    /// How many descriptors of slots and parity the store did not take: what a restart would lose.
    pub fn missing_in_store(&self) -> usize {
        self.handover.missing()
    }

    /// Has whoever keeps it let go of all of it, for good: it ends with this daemon. How many descriptors that were.
    pub fn end_with_daemon(&self) -> usize {
        self.handover.let_go_of_all()
    }

    /// Who has all of it once this daemon has ended.
    pub fn kept_by(&self) -> KeptBy {
        self.handover.kept_by()
    }

    /// Makes and preallocates a slot, and hands it over.
    ///
    /// # Errors
    /// [`SlotError`] if there is no memory.
    pub fn create_slot(&self, id: SlotId, bytes: u64) -> Result<(), SlotError> {
        let slot = Slot::create(bytes)?.viewed();
        if locked(&self.inherited).slots.remove(&id).is_some() {
            // Of one name the store holds one.
            self.handover.let_go(KeptName::Slot(id));
        }
        self.handover.hand(KeptName::Slot(id), slot.as_fd());
        self.hold(id, slot, MadeBy::ThisDaemon);
        Ok(())
    }

    fn hold(&self, id: SlotId, slot: Slot, made_by: MadeBy) {
        let held = HeldSlot {
            slot: Arc::new(slot),
            made_by,
            notes: Arc::new(SlotNotes::new(&self.note_room)),
        };
        locked(&self.slots).insert(id, held);
    }

    fn held(&self, id: SlotId) -> Option<HeldSlot> {
        locked(&self.slots).get(&id).cloned()
    }

    /// Lets go of a slot; its memory is free once this is dropped. A trainer that keeps its descriptor would have memory that is in no budget, as
    /// often as it likes. What readers may be copying stays until the last process lets go, and so does a slot of an earlier daemon, of which nobody
    /// here knows the readers.
    pub fn take_slot(&self, id: SlotId, end: SlotEnd) -> Option<Arc<Slot>> {
        let held = locked(&self.slots).remove(&id)?;
        self.handover.let_go(KeptName::Slot(id));
        held.notes.forget();
        if held.made_by == MadeBy::ThisDaemon && end == SlotEnd::GivenBack {
            held.slot.give_back_when_dropped();
        }
        Some(held.slot)
    }

    /// Lets go of it at once.
    pub fn drop_slot(&self, id: SlotId) {
        drop(self.take_slot(id, SlotEnd::LeftToReaders));
    }

    /// A slot.
    pub fn slot(&self, id: SlotId) -> Option<Arc<Slot>> {
        self.held(id).map(|held| held.slot)
    }

    /// Frees a parity set.
    pub fn drop_parity(&self, id: ParityId) {
        let set = locked(&self.parity).remove(&id);
        // Its blocks go one by one: not under the lock.
        drop(set);
    }

    /// Where the chunks of a parity set lie, for the daemon after this one. It holds until the set is dropped: whoever keeps it
    /// elsewhere must forget it first.
    pub fn parity_table(&self, id: ParityId) -> Option<ParityTable> {
        let set = locked(&self.parity).get(&id).cloned()?;
        let row = |block: &Arc<ParityBlock>| ParityRow {
            place: block.memory.name(),
            length: u32::try_from(block.length).unwrap_or(u32::MAX),
            print: block.print,
        };
        let rows = set.blocks.iter().map(|block| block.as_ref().map(row));
        let rows = rows.collect();
        Some(ParityTable { rows })
    }

    /// Memory that no set uses and the next one will: at most so many bytes from now on.
    pub fn spare_at_most(&self, bytes: u64) {
        self.parity_memory.at_most(bytes);
    }

    /// Gives memory back that was spare for long.
    pub fn rest(&self) {
        self.parity_memory.rest(Instant::now());
    }

    /// Bytes of memory that no set uses and the next one will.
    pub fn spare_bytes(&self) -> u64 {
        self.parity_memory.bytes()
    }

    /// Pages of slots and chunks of parity that the system could not give when they were read here.
    pub fn lost(&self) -> u64 {
        storaged_arena::memory_pages_lost() + self.parity_memory.lost()
    }

    /// Bytes of parity held, each shared chunk counted once.
    pub fn parity_bytes(&self) -> u64 {
        let sets = locked(&self.parity);
        let blocks = sets.values().flat_map(|set| set.blocks.iter().flatten());
        let unique: BTreeMap<*const ParityBlock, usize> = blocks
            .map(|block| (Arc::as_ptr(block), block.length))
            .collect();
        unique.values().map(|bytes| *bytes as u64).sum()
    }

    /// Digests these chunks of the first `length` bytes of a slot, each read once into a private block, of which the
    /// fingerprint is taken too.
    ///
    /// # Errors
    /// [`ReadError`] if the slot cannot be read.
    pub fn digest(
        &self,
        id: SlotId,
        length: u64,
        chunk: ChunkSize,
        chunks: Range<u64>,
    ) -> Result<(Vec<Digest>, Vec<Fingerprint>), ReadError> {
        let held = self.held(id).ok_or(ReadError::Gone)?;
        held.notes.forget();
        held.fill_holes(id)?;
        let slot = held.slot;
        let mut block = vec![0; chunk.bytes()];
        let (mut leaves, mut prints) = (Vec::new(), Vec::new());
        for index in chunks {
            let range = chunk.range(index, length);
            let part = &mut block[..(range.end - range.start) as usize];
            slot.read_at(range.start, part)?;
            leaves.push(leaf_digest(part, index));
            prints.push(fingerprint(part));
        }
        Ok((leaves, prints))
    }

    /// Reads these chunks of a shard and checks every one. Gives the bytes read and what is wrong, if anything.
    pub fn check_shard(&self, shard: &SlotShard, chunks: Range<u64>) -> (u64, Option<String>) {
        let mut block = vec![0; shard.chunk.bytes()];
        let mut read = 0;
        for index in chunks {
            match self.read_chunk(shard, index, &mut block) {
                Ok(chunk) => read += filled(chunk.as_ref()) as u64,
                Err(fault) => return (read, Some(format!("{fault:?}"))),
            }
        }
        (read, None)
    }

    /// Blocks of a parity set and the size of the longest.
    pub fn parity_blocks(&self, id: ParityId) -> Option<(u64, ChunkSize)> {
        let sets = locked(&self.parity);
        let blocks = &sets.get(&id)?.blocks;
        let lengths = blocks.iter().flatten().map(|block| block.length);
        let longest = u32::try_from(lengths.max().unwrap_or(0)).ok()?;
        let chunk = ChunkSize::new(longest.next_power_of_two().max(1 << 12)).ok()?;
        Some((blocks.len() as u64, chunk))
    }

    /// Reads these blocks of a parity set and checks every one.
    pub fn check_parity(&self, id: ParityId, stripes: Range<u64>) -> (u64, Option<String>) {
        let Some(set) = locked(&self.parity).get(&id).cloned() else {
            return (0, Some("the parity set is gone".into()));
        };
        let (mut read, mut chunk) = (0, Vec::new());
        for stripe in stripes {
            let block = set.blocks.get(stripe as usize).and_then(Option::as_ref);
            let Some(block) = block else { continue };
            chunk.resize(block.length, 0);
            if !block.is_read(&mut chunk) {
                let fault = format!("parity chunk {stripe} does not have its fingerprint");
                return (read, Some(fault));
            }
            read += block.length as u64;
        }
        (read, None)
    }

    /// Reads these chunks of a shard again. What cannot be read at all is rotten too: that is how the system tells of bad memory.
    ///
    /// # Errors
    /// [`Unread`] if the slot is gone.
    pub fn scrub_shard(&self, shard: &SlotShard, chunks: Range<u64>) -> Result<ScrubTally, Unread> {
        let mut block = vec![0; shard.chunk.bytes()];
        let mut tally = ScrubTally::default();
        for index in chunks {
            let range = shard.chunk.range(index, shard.length);
            tally.bytes += range.end - range.start;
            match self.read_chunk(shard, index, &mut block) {
                Ok(_) => {}
                Err(SessionFault::Corrupt(_)) => tally.rotten.push(index),
                Err(_) => return Err(Unread::Gone),
            }
        }
        Ok(tally)
    }

    /// Reads these chunks of a parity set again; `prints` are what they must have by the data that they protect.
    ///
    /// # Errors
    /// [`Unread`] if the set is gone.
    pub fn scrub_parity(
        &self,
        id: ParityId,
        stripes: Range<u64>,
        prints: Option<&[Fingerprint]>,
    ) -> Result<ScrubTally, Unread> {
        let set = locked(&self.parity).get(&id).cloned();
        let set = set.ok_or(Unread::Gone)?;
        let (mut tally, mut chunk) = (ScrubTally::default(), Vec::new());
        for (at, stripe) in stripes.enumerate() {
            let block = set.blocks.get(stripe as usize).and_then(Option::as_ref);
            let expected = prints.and_then(|prints| prints.get(at));
            chunk.resize(block.map_or(0, |block| block.length), 0);
            tally.bytes += chunk.len() as u64;
            let is_kept = block.is_none_or(|block| block.is_read(&mut chunk));
            let print = block.map_or(Fingerprint::ZERO, |block| block.print);
            if is_kept && expected.is_none_or(|expected| *expected == print) {
                continue;
            }
            tally.rotten.push(stripe);
            let known = block.is_some_and(|block| block.is_rotten.swap(true, Ordering::Relaxed));
            tally.known += u64::from(known);
        }
        Ok(tally)
    }

    /// One chunk into private memory, checked there by its digest; it fills the beginning of `out`. None beyond the shard's end.
    pub fn read_chunk<'o>(
        &self,
        shard: &SlotShard,
        index: u64,
        out: &'o mut [u8],
    ) -> Result<Option<Checked<&'o [u8]>>, SessionFault> {
        let Some(part) = self.copy_chunk(shard, index, out)? else {
            return Ok(None);
        };
        let checked = Unchecked::new(part).verify_in(&shard.leaves, index);
        checked
            .map(Some)
            .map_err(|wrong| SessionFault::Corrupt(wrong.to_string()))
    }

    /// The same, compared with the fingerprint that this node has taken of it, where it has: at a third of what a digest takes, and whoever
    /// puts to use what is made of these bytes compares that.
    pub fn read_own_chunk<'o>(
        &self,
        shard: &SlotShard,
        index: u64,
        out: &'o mut [u8],
    ) -> Result<Option<&'o [u8]>, SessionFault> {
        if shard.prints.len() != shard.leaves.len() {
            let checked = self.read_chunk(shard, index, out)?;
            return Ok(checked.map(Checked::into_inner));
        }
        let Some(part) = self.copy_chunk(shard, index, out)? else {
            return Ok(None);
        };
        let (expected, got) = (shard.prints[index as usize], fingerprint(part));
        if got == expected {
            return Ok(Some(part));
        }
        Err(SessionFault::Corrupt(format!(
            "expected chunk {index} to have the fingerprint {expected:?}, got {got:?}"
        )))
    }

    /// Nobody has looked at these bytes yet.
    fn copy_chunk<'o>(
        &self,
        shard: &SlotShard,
        index: u64,
        out: &'o mut [u8],
    ) -> Result<Option<&'o [u8]>, SessionFault> {
        let range = shard.chunk.range(index, shard.length);
        let length = (range.end - range.start) as usize;
        if index >= shard.leaves.len() as u64 {
            return Ok(None);
        }
        let slot = self.slot(shard.slot).ok_or(SessionFault::NoBlocks)?;
        let part = out.get_mut(..length).ok_or(SessionFault::NoBlocks)?;
        let read = slot.read_at(range.start, part);
        read.map_err(|error| SessionFault::Corrupt(error.to_string()))?;
        Ok(Some(part))
    }

    fn read_shard(
        &self,
        shard: &SlotShard,
        basis: Option<&SlotShard>,
        stripe: u64,
        proof: Proof,
        out: &mut [u8],
    ) -> Result<BlockState, SessionFault> {
        let leaf = |shard: &SlotShard| shard.leaves.get(stripe as usize).copied();
        let bytes = |shard: &SlotShard| {
            let range = shard.chunk.range(stripe, shard.length);
            (range.end - range.start) as usize
        };
        let unchanged =
            basis.is_some_and(|basis| leaf(basis) == leaf(shard) && bytes(basis) == bytes(shard));
        if basis.is_some_and(|basis| basis.chunk != shard.chunk) {
            return Err(SessionFault::NoBasis);
        }
        if unchanged || (basis.is_none() && leaf(shard).is_none()) {
            return Ok(BlockState::Clean);
        }
        let read = match proof {
            Proof::Reader => self.read_own_chunk(shard, stripe, out)?,
            Proof::Keeper => self.copy_chunk(shard, stripe, out)?,
        };
        let read = read.map_or(0, <[u8]>::len);
        out[read..].fill(0);
        if let Some(basis) = basis {
            let mut old = vec![0; bytes(basis)];
            // The basis may have been retired meanwhile, and its slot be in use for another step.
            let old = self
                .read_chunk(basis, stripe, &mut old)
                .map_err(|_| SessionFault::NoBasis)?;
            let old = old.as_ref().map_or(&[][..], Checked::bytes);
            let both = old.len().min(out.len());
            engine().xor(&mut out[..both], &old[..both]);
        }
        Ok(BlockState::Dirty)
    }

    fn read_parity(
        &self,
        set: ParityId,
        stripe: u64,
        out: &mut [u8],
    ) -> Result<BlockState, SessionFault> {
        let block = {
            let sets = locked(&self.parity);
            let set = sets.get(&set).ok_or(SessionFault::NoBlocks)?;
            set.blocks.get(stripe as usize).cloned().flatten()
        };
        let Some(block) = block else {
            return Ok(BlockState::Clean);
        };
        let mut whole = Vec::new();
        let is_right = match out.split_at_mut_checked(block.length) {
            Some((chunk, beyond)) => {
                beyond.fill(0);
                block.is_read(chunk)
            }
            None => {
                whole.resize(block.length, 0);
                let is_right = block.is_read(&mut whole);
                out.copy_from_slice(&whole[..out.len()]);
                is_right
            }
        };
        if !is_right {
            return Err(SessionFault::Corrupt(format!(
                "parity chunk {stripe} does not have its fingerprint"
            )));
        }
        Ok(BlockState::Dirty)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // The next daemon has the descriptors, and the bytes with them.
        self.parity_memory.leave();
    }
}

impl Blocks for Memory {
    fn read(
        &self,
        source: &Source,
        stripe: u64,
        proof: Proof,
        out: &mut [u8],
    ) -> Result<BlockState, SessionFault> {
        match source {
            Source::Shard { shard, basis } => {
                self.read_shard(shard, basis.as_ref(), stripe, proof, out)
            }
            Source::Parity { set } => self.read_parity(*set, stripe, out),
        }
    }

    fn begin_keep(
        &self,
        keep: &Sink,
        work: &SessionWork,
    ) -> Result<Box<dyn BlockSink>, SessionFault> {
        match keep {
            Sink::Shard(shard) => Ok(Box::new(self.keep_shard(shard)?)),
            Sink::Parity { set, basis, prints } => {
                let mut sets = locked(&self.parity);
                let mut fresh = match basis {
                    Some(basis) => sets.get(basis).cloned().ok_or(SessionFault::NoBasis)?,
                    None => ParitySet::default(),
                };
                let count = work.chunk.count(work.lane_length) as usize;
                let check = ParityCheck::new(prints.clone(), count)?;
                // What lies beyond is another step's: a longer shard later would be put onto it.
                fresh.blocks.resize_with(count, || None);
                // What a session that broke off has made of this set stays.
                let before = sets.get(set);
                for stripe in work.carried.iter().cloned().flatten() {
                    let at = usize::try_from(stripe).unwrap_or(usize::MAX);
                    let made = before.and_then(|set| set.blocks.get(at)).cloned();
                    let place = fresh.blocks.get_mut(at).ok_or(SessionFault::NoBlocks)?;
                    *place = made.ok_or(SessionFault::NoBlocks)?;
                }
                match basis {
                    Some(_) => verify_kept(&fresh, &check, work)?,
                    None => verify_carried(&fresh, &check, work)?,
                }
                sets.insert(*set, fresh);
                Ok(Box::new(ParitySink {
                    set: *set,
                    sets: self.parity.clone(),
                    memory: self.parity_memory.clone(),
                    check,
                    chunk: work.chunk,
                    lane_length: work.lane_length,
                }))
            }
        }
    }
}

/// Without a basis only what an earlier session has made is there. The rest need not move now: of a heal that several
/// newcomers share the stripes move first that all of them lack.
fn verify_carried(
    set: &ParitySet,
    check: &ParityCheck,
    work: &SessionWork,
) -> Result<(), SessionFault> {
    for stripe in work.carried.iter().cloned().flatten() {
        let block = usize::try_from(stripe)
            .ok()
            .and_then(|at| set.blocks.get(at));
        let print = block.and_then(|block| block.as_ref().map(|block| block.print));
        check.print(stripe, print)?;
    }
    Ok(())
}

/// Stripes that do not move are the basis' own, or an earlier session's: they must be right too.
fn verify_kept(
    set: &ParitySet,
    check: &ParityCheck,
    work: &SessionWork,
) -> Result<(), SessionFault> {
    let mut moving = work.stripes.iter().cloned().flatten().peekable();
    for (stripe, block) in (0..).zip(&set.blocks) {
        if moving.next_if_eq(&stripe).is_none() {
            check.print(stripe, block.as_ref().map(|block| block.print))?;
        }
    }
    Ok(())
}

/// How many bytes a chunk has.
fn filled<T: AsRef<[u8]>>(chunk: Option<&Checked<T>>) -> usize {
    chunk.map_or(0, |chunk| chunk.bytes().len())
}

/// A parity set being made.
struct ParitySink {
    set: ParityId,
    sets: Arc<Mutex<BTreeMap<ParityId, ParitySet>>>,
    memory: Arc<ParityMemory>,
    check: ParityCheck,
    chunk: ChunkSize,
    lane_length: u64,
}

impl BlockSink for ParitySink {
    fn put(&self, stripe: u64, block: Option<&[u8]>) -> Result<(), SessionFault> {
        let old = {
            let sets = locked(&self.sets);
            let set = sets.get(&self.set).ok_or(SessionFault::Aborted)?;
            set.blocks.get(stripe as usize).cloned().flatten()
        };
        let Some(difference) = block else {
            return self.check.print(stripe, old.map(|old| old.print));
        };
        let longest = old.as_ref().map_or(0, |old| old.length);
        let longest = difference.len().max(longest);
        // Of a longer step before nothing may stay.
        let length = stripe_bytes(self.chunk, self.lane_length, stripe).min(longest);
        let both = length.min(difference.len());
        let merged = old.map(|old| {
            let mut merged = vec![0; length];
            let kept = length.min(old.length);
            // What cannot be read is counted, which is told (`lost`), and the check below finds it.
            let _ = old.memory.read(&mut merged[..kept]);
            engine().xor(&mut merged[..both], &difference[..both]);
            merged
        });
        let bytes = merged.as_deref().unwrap_or(&difference[..both]);
        let print = self.check.bytes(stripe, bytes)?;
        let memory = self.memory.put(bytes);
        let memory = memory.map_err(|error| SessionFault::NoRoom(chain(&error)))?;
        let block = Arc::new(ParityBlock {
            memory,
            length,
            print,
            is_rotten: false.into(),
        });
        let mut sets = locked(&self.sets);
        let set = sets.get_mut(&self.set).ok_or(SessionFault::Aborted)?;
        let place = set
            .blocks
            .get_mut(stripe as usize)
            .ok_or(SessionFault::NoBlocks)?;
        let before = place.replace(block);
        drop(sets);
        drop(before);
        Ok(())
    }

    fn finish(&self) -> Result<(), SessionFault> {
        Ok(())
    }
}
