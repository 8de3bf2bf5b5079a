//! The memory of parity chunks: cells of segments, whose descriptors are handed to whoever keeps them for the next
//! daemon before a cell is used. There is a class of cells for each power of two; a segment has cells of one class.
//!
//! Cells of chunks that are dropped stay for those that come next. Every step drops a set as large as the one it makes, and
//! to give memory back and take it again costs the codec's threads what the copy does. A set has chunks of two
//! sizes, whole ones and the last; each class is kept for itself, or a small one on top would hide the large ones, and
//! each step would add to what is kept until the budget is full of it.
//!
//! Spare memory is what the budget has free, never more: what is reserved takes it away.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use storaged_arena::{CELL_BYTES_MIN, Cell, Segment, SegmentError};
use storaged_codec::{Fingerprint, fingerprint};
use thiserror::Error;

use crate::keep::{CellName, Handover, KeptName};

/// Spare memory that nobody took for so long goes back to the system: the job has ended, or saves hardly ever, or its
/// shards have another size now.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// The first segment of a class has so many bytes, or so many cells if that is more.
const SEGMENT_BYTES_MIN: usize = 64 << 20;
const SEGMENT_CELLS_MIN: usize = 64;
/// The next ones have twice as many each, up to 1 GiB: at hundreds of GiB a descriptor for each. What has no owner costs
/// nothing.
const DOUBLINGS_MAX: usize = 4;

/// Why there is no memory for a chunk.
#[derive(Debug, Error)]
pub(crate) enum ParityMemoryError {
    /// The system has none.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// Every number of a segment was used once.
    #[error("no number is left for a segment of parity")]
    Numbers,
}

/// The parity memory of one daemon.
#[derive(Debug)]
pub(crate) struct ParityMemory {
    handover: Arc<Handover>,
    cells: Mutex<Cells>,
    /// Held by whoever makes a segment, so that two do not make one each for a cell each.
    growing: Mutex<()>,
    /// Cells whose bytes the system could not give.
    lost: AtomicU64,
    /// The daemon ends: what is dropped from now on is left to the next one.
    is_leaving: AtomicBool,
}

#[derive(Debug)]
struct Cells {
    segments: BTreeMap<u32, Arc<Segment>>,
    /// Numbers are never used twice, or a table that was made before would name another segment.
    next: u32,
    /// Cells with memory by class; of each, the last one given is taken first.
    spare: BTreeMap<usize, Vec<SpareCell>>,
    bytes: u64,
    bytes_max: u64,
}

/// A cell, and the number of its segment.
#[derive(Debug)]
struct PlacedCell {
    segment: u32,
    cell: Cell,
}

impl PlacedCell {
    fn bytes(&self) -> usize {
        self.cell.segment().cell_bytes()
    }
}

#[derive(Debug)]
struct SpareCell {
    placed: PlacedCell,
    given_at: Instant,
}

/// A cell in use, with bytes that do not change any more. Dropped, it is spare.
#[derive(Debug)]
pub(crate) struct HeldCell {
    /// None only while it is dropped.
    placed: Option<PlacedCell>,
    home: Arc<ParityMemory>,
    /// The system could not give its bytes: its memory must not be used again.
    has_failed: AtomicBool,
}

impl HeldCell {
    /// A cell of an earlier daemon.
    pub fn adopted(home: &Arc<ParityMemory>, segment: u32, cell: Cell) -> Self {
        home.hold(PlacedCell { segment, cell })
    }

    /// Copies its first bytes out. It may have more than were put there, and in them whatever was there before.
    ///
    /// # Errors
    /// [`SegmentError`] if it has not so many, or its memory has failed.
    pub fn read(&self, out: &mut [u8]) -> Result<(), SegmentError> {
        let Some(placed) = &self.placed else {
            return Ok(());
        };
        let read = placed.cell.read(out);
        if read.is_err() && !self.has_failed.swap(true, Relaxed) {
            self.home.lost.fetch_add(1, Relaxed);
        }
        read
    }

    /// Where the next daemon finds it.
    pub fn name(&self) -> CellName {
        let placed = self.placed.as_ref();
        CellName {
            segment: placed.map_or(u32::MAX, |it| it.segment),
            cell: placed.map_or(u32::MAX, |it| it.cell.number()),
        }
    }
}

impl Drop for HeldCell {
    fn drop(&mut self) {
        match self.placed.take() {
            Some(placed) if *self.has_failed.get_mut() => self.home.free(vec![placed]),
            Some(placed) => self.home.give(placed),
            None => {}
        }
    }
}

/// One parity chunk, and the fingerprint by which it was verified. It has no other digest: nobody else knows this chunk,
/// what is decoded from it has digests of its own, and a fingerprint takes a third of the time of BLAKE3.
#[derive(Debug)]
pub(crate) struct ParityBlock {
    pub memory: HeldCell,
    pub length: usize,
    pub print: Fingerprint,
    /// It was found to have another one: several sets may share it.
    pub is_rotten: AtomicBool,
}

impl ParityBlock {
    /// Copies the chunk out, into memory of its length; false if it does not have its fingerprint any more. The copy is what is compared.
    pub fn is_read(&self, out: &mut [u8]) -> bool {
        self.memory.read(out).is_ok() && fingerprint(out) == self.print
    }
}

impl ParityMemory {
    /// None, and room for none that is spare.
    pub fn new(handover: Arc<Handover>) -> Self {
        Self {
            handover,
            cells: Mutex::new(Cells {
                segments: BTreeMap::new(),
                next: 0,
                spare: BTreeMap::new(),
                bytes: 0,
                bytes_max: 0,
            }),
            growing: Mutex::new(()),
            lost: AtomicU64::new(0),
            is_leaving: AtomicBool::new(false),
        }
    }

    /// Keeps these bytes.
    ///
    /// # Errors
    /// [`ParityMemoryError`] if there is no memory for them.
    pub fn put(self: &Arc<Self>, bytes: &[u8]) -> Result<HeldCell, ParityMemoryError> {
        let had_spare = self.bytes() > 0;
        match self.put_once(bytes) {
            // Spare cells of other classes have memory; and the one that was taken may have some that has failed.
            Err(ParityMemoryError::Segment(_)) if had_spare => {
                let spare = self.locked().shrink_to(0);
                self.free(spare);
                self.put_once(bytes)
            }
            put => put,
        }
    }

    fn put_once(self: &Arc<Self>, bytes: &[u8]) -> Result<HeldCell, ParityMemoryError> {
        let class = class_of(bytes.len());
        let spare = self.locked().take(class);
        let mut placed = match spare {
            Some(placed) => placed,
            None => self.take_fresh(class)?,
        };
        if let Err(error) = placed.cell.write(bytes) {
            self.free(vec![placed]);
            return Err(error.into());
        }
        Ok(self.hold(placed))
    }

    fn take_fresh(&self, class: usize) -> Result<PlacedCell, ParityMemoryError> {
        if let Some(taken) = self.locked().take_fresh(class) {
            return Ok(taken);
        }
        let _growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let (number, of_class) = {
            let mut cells = self.locked();
            if let Some(taken) = cells.take_fresh(class) {
                return Ok(taken);
            }
            let number = cells.next;
            cells.next = number.checked_add(1).ok_or(ParityMemoryError::Numbers)?;
            (number, cells.of_class(class).count())
        };
        let segment = Segment::create(class, segment_cells(class, of_class))?;
        self.handover.hand(kept(number), segment.as_fd());
        let mut cells = self.locked();
        cells.segments.insert(number, segment);
        cells.take_fresh(class).ok_or(ParityMemoryError::Numbers)
    }

    fn hold(self: &Arc<Self>, placed: PlacedCell) -> HeldCell {
        HeldCell {
            placed: Some(placed),
            home: self.clone(),
            has_failed: AtomicBool::new(false),
        }
    }

    /// Keeps memory as spare, if there is room for it.
    fn give(&self, placed: PlacedCell) {
        if self.is_leaving.load(Relaxed) {
            placed.cell.leave();
            return;
        }
        let class = placed.bytes();
        let mut cells = self.locked();
        let bytes = cells.bytes + class as u64;
        if bytes <= cells.bytes_max {
            let given_at = Instant::now();
            let spare = SpareCell { placed, given_at };
            cells.spare.entry(class).or_default().push(spare);
            cells.bytes = bytes;
        } else {
            drop(cells);
            self.free(vec![placed]);
        }
    }

    /// Holds so many bytes of spare memory at most from now on.
    pub fn at_most(&self, bytes: u64) {
        let mut cells = self.locked();
        cells.bytes_max = bytes;
        let over = cells.shrink_to(bytes);
        drop(cells);
        self.free(over);
    }

    /// Gives back what nobody took for a long time.
    pub fn rest(&self, now: Instant) {
        let over = self.locked().idle(now);
        self.free(over);
    }

    /// Bytes of spare memory held now.
    pub fn bytes(&self) -> u64 {
        self.locked().bytes
    }

    /// Chunks whose memory has failed.
    pub fn lost(&self) -> u64 {
        self.lost.load(Relaxed)
    }

    /// What is dropped from now on keeps its bytes: the next daemon has the descriptors, and goes on with them.
    pub fn leave(&self) {
        self.is_leaving.store(true, Relaxed);
    }

    /// Gives new segments numbers above this one.
    pub fn count_from(&self, above: u32) {
        let mut cells = self.locked();
        cells.next = cells.next.max(above.saturating_add(1));
    }

    /// Uses the free cells of an earlier daemon's segment from now on, or lets go of the segment if all are.
    pub fn admit(&self, number: u32, segment: Arc<Segment>) {
        segment.free_rest();
        self.locked().segments.insert(number, segment);
        self.forget_empty([number].into());
    }

    /// Giving memory back to the system takes its time: not under the lock.
    fn free(&self, cells: Vec<PlacedCell>) {
        let segments: BTreeSet<u32> = cells.iter().map(|placed| placed.segment).collect();
        drop(cells);
        self.forget_empty(segments);
    }

    /// Lets go of those of these segments that nobody has a cell of.
    fn forget_empty(&self, segments: BTreeSet<u32>) {
        for number in segments {
            let mut cells = self.locked();
            let segment = cells.segments.get(&number);
            // Cells get owners under this lock, so none gets one now.
            if segment.is_none_or(|segment| segment.owned() > 0) {
                continue;
            }
            let empty = cells.segments.remove(&number);
            drop(cells);
            drop(empty);
            self.handover.let_go(kept(number));
        }
    }

    fn locked(&self) -> MutexGuard<'_, Cells> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn kept(segment: u32) -> KeptName {
    KeptName::Parity(segment.into())
}

/// The bytes of the smallest cell that suffices.
fn class_of(bytes: usize) -> usize {
    bytes.max(CELL_BYTES_MIN).next_power_of_two()
}

/// Cells of a new segment, if there are so many segments of this class.
fn segment_cells(class: usize, of_class: usize) -> u32 {
    let bytes = SEGMENT_BYTES_MIN << of_class.min(DOUBLINGS_MAX);
    let cells = (bytes / class).max(SEGMENT_CELLS_MIN);
    u32::try_from(cells).unwrap_or(u32::MAX)
}

impl Cells {
    fn of_class(&self, class: usize) -> impl Iterator<Item = (&u32, &Arc<Segment>)> {
        let is_of = move |segment: &Arc<Segment>| segment.cell_bytes() == class;
        self.segments
            .iter()
            .rev()
            .filter(move |(_, segment)| is_of(segment))
    }

    /// A free cell without memory, of the newest segment that has one: older ones are more often full.
    fn take_fresh(&self, class: usize) -> Option<PlacedCell> {
        let mut free = self.of_class(class).filter_map(|(number, segment)| {
            Some(PlacedCell {
                segment: *number,
                cell: segment.take()?,
            })
        });
        free.next()
    }

    fn take(&mut self, class: usize) -> Option<PlacedCell> {
        let cells = self.spare.get_mut(&class)?;
        let cell = cells.pop()?;
        if cells.is_empty() {
            self.spare.remove(&class);
        }
        self.bytes -= class as u64;
        Some(cell.placed)
    }

    fn shrink_to(&mut self, bytes: u64) -> Vec<PlacedCell> {
        let mut over = Vec::new();
        while self.bytes > bytes
            && let Some(largest) = self.spare.keys().next_back().copied()
        {
            over.extend(self.take(largest));
        }
        over
    }

    fn idle(&mut self, now: Instant) -> Vec<PlacedCell> {
        let is_idle =
            |cell: &mut SpareCell| now.saturating_duration_since(cell.given_at) > KEPT_FOR;
        let mut idle = Vec::new();
        for cells in self.spare.values_mut() {
            idle.extend(cells.extract_if(.., is_idle).map(|cell| cell.placed));
        }
        self.spare.retain(|_, cells| !cells.is_empty());
        let bytes = idle.iter().map(|placed| placed.bytes() as u64);
        self.bytes -= bytes.sum::<u64>();
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keep::{NoStore, RecordingStore};

    fn memory() -> Arc<ParityMemory> {
        Arc::new(ParityMemory::new(Arc::new(Handover::new(Arc::new(
            NoStore,
        )))))
    }

    fn put(memory: &Arc<ParityMemory>, bytes: usize) -> HeldCell {
        memory.put(&vec![7; bytes]).unwrap()
    }

    #[test]
    fn memory_comes_back_and_is_used_again() {
        let spare = memory();
        spare.at_most(1 << 20);
        let cell = spare.put(&[7; 1000]).unwrap();
        let at = cell.name();
        drop(cell);
        assert_eq!(spare.bytes(), 4096);
        let again = spare.put(&[8; 900]).unwrap();
        assert_eq!((again.name(), spare.bytes()), (at, 0));
        let mut bytes = [0; 1000];
        again.read(&mut bytes).unwrap();
        assert_eq!((bytes[..900].iter().max(), bytes[900]), (Some(&8), 7));
        drop(again);
        assert_ne!(spare.put(&[9; 5000]).unwrap().name().segment, at.segment);
    }

    #[test]
    fn of_sets_with_a_short_last_chunk_no_more_is_kept_than_one() {
        let spare = memory();
        spare.at_most(1 << 30);
        for _ in 0..100 {
            let set = [262_144, 262_144, 12_297].map(|bytes| put(&spare, bytes));
            set.into_iter().for_each(drop);
        }
        let set = 2 * 262_144 + 12_297;
        assert!(spare.bytes() <= set + 4096, "{}", spare.bytes());
    }

    #[test]
    fn sizes_that_nobody_wants_any_more_go() {
        let spare = memory();
        spare.at_most(1 << 30);
        drop(put(&spare, 100_000));
        let kept = spare.bytes();
        drop(put(&spare, 10_000));
        assert!(spare.bytes() > kept, "not for so little");
        spare.rest(Instant::now() + 2 * KEPT_FOR);
        assert_eq!(spare.bytes(), 0);
    }

    #[test]
    fn no_more_is_held_than_there_is_room_for() {
        let spare = memory();
        drop(put(&spare, 4096));
        assert_eq!(spare.bytes(), 0);
        spare.at_most(4 * 4096 + 50);
        let cells: Vec<HeldCell> = (0..6).map(|_| put(&spare, 4096)).collect();
        drop(cells);
        assert_eq!(spare.bytes(), 4 * 4096);
        spare.at_most(2 * 4096 + 50);
        assert_eq!(spare.bytes(), 2 * 4096);
        spare.rest(Instant::now());
        assert_eq!(spare.bytes(), 2 * 4096);
        spare.rest(Instant::now() + 2 * KEPT_FOR);
        assert_eq!(spare.bytes(), 0);
    }

    #[test]
    fn a_segment_is_kept_by_another_as_long_as_a_cell_has_an_owner() {
        let store = Arc::new(RecordingStore::default());
        let memory = Arc::new(ParityMemory::new(Arc::new(Handover::new(store.clone()))));
        let (first, second) = (put(&memory, 4096), put(&memory, 5000));
        assert_eq!(store.names(), [kept(0), kept(1)]);
        drop(first);
        assert_eq!(store.names(), [kept(1)]);
        let third = put(&memory, 4096);
        assert_eq!(
            store.names(),
            [kept(1), kept(2)],
            "numbers are not used again"
        );
        memory.count_from(9);
        memory.at_most(1 << 20);
        drop((second, third));
        assert_eq!(store.names(), [kept(1), kept(2)], "spare cells are owned");
        memory.at_most(0);
        assert_eq!(store.names(), []);
        assert_eq!(put(&memory, 1).name().segment, 10);
    }

    #[test]
    fn segments_stay_few() {
        let bytes = |class: usize| {
            let sizes = (0..).map(move |of_class| class * segment_cells(class, of_class) as usize);
            sizes.take(400).sum::<usize>()
        };
        for class in [4096, 262_144, 4 << 20] {
            assert!(bytes(class) > 390 << 30, "{class}");
        }
        assert_eq!(segment_cells(4096, 0), 16_384);
        assert_eq!(segment_cells(4 << 20, 0), 64);
        assert_eq!(segment_cells(262_144, 3), 2048);
        assert_eq!(segment_cells(4096, usize::MAX), 262_144);
    }
}
