//! A segment: a memfd of equal cells, the private memory of one daemon. Its descriptor is kept by another process, which
//! never maps it, so that the next daemon can go on with the bytes.
//!
//! The file is sparse. A cell has pages from when it is populated until it is dropped. Unlike a slot, a segment is memory
//! that one process alone has mapped, once; that is why a cell may give references to its bytes. Three things see to it:
//! a list of the files that are open here refuses a second mapping in this process, a record lock on the file refuses one
//! by another daemon, and a bit per cell refuses a second owner of a cell. A process that has the descriptor and neither
//! takes the lock nor is a daemon (the keeper) must leave the bytes alone.
//!
//! A page behind the cells says what they are (see `HEAD`), so a descriptor suffices to open a segment again.

mod left;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, SealFlags};
use rustix::io::Errno;
use thiserror::Error;

use crate::faults::Watched;
use crate::mapping::Mapping;
use crate::slot::SlotError;
use left::LeftCells;

/// The smallest cell: a page.
pub const CELL_BYTES_MIN: usize = 4096;

/// What the last page of a segment begins with, before the cells' size as four bytes, little-endian.
const HEAD: &[u8; 16] = b"storaged cells 1";
const HEAD_BYTES: usize = HEAD.len() + 4;
/// The room for it.
const TAIL_BYTES: u64 = 4096;

/// How often a file that another process has is tried again.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Files of this process's segments, by device and number.
static OPEN: Mutex<Vec<FileId>> = Mutex::new(Vec::new());

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileId {
    device: u64,
    number: u64,
}

/// Memory that cannot be had, or a descriptor or a cell that is not what it should be.
#[derive(Debug, Error)]
pub enum SegmentError {
    /// The kernel refused; without memory this says so.
    #[error("{what} failed")]
    System {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// It could not be mapped.
    #[error(transparent)]
    Mapping(#[from] SlotError),
    /// Cells must be of a size that a power of two of pages has, and there must be some.
    #[error("expected cells of a power of two of at least 4096 bytes, got {cells} of {cell_bytes}")]
    CellSize { cell_bytes: usize, cells: u32 },
    /// No segment, or one that this version does not know.
    #[error("expected the sealed memory of a segment, got something else")]
    NoSegment,
    /// Another process, or this one, has it open.
    #[error("the segment is in use")]
    InUse,
    /// There is no such cell.
    #[error("expected a cell below {cells}, got {cell}")]
    Outside { cell: u32, cells: u32 },
    /// The cell has an owner.
    #[error("cell {0} is taken")]
    Taken(u32),
}

fn system(what: &'static str) -> impl FnOnce(Errno) -> SegmentError {
    move |errno| SegmentError::System {
        what,
        source: errno.into(),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is open as a segment in this process, and in no other.
#[derive(Debug)]
struct OpenFile {
    fd: OwnedFd,
    id: FileId,
}

impl OpenFile {
    fn claim(fd: OwnedFd, until: Instant) -> Result<Self, SegmentError> {
        let stat = rustix::fs::fstat(&fd).map_err(system("fstat"))?;
        let id = FileId {
            device: stat.st_dev,
            number: stat.st_ino,
        };
        let mut open = locked(&OPEN);
        if open.contains(&id) {
            return Err(SegmentError::InUse);
        }
        open.push(id);
        drop(open);
        let claimed = Self { fd, id };
        claimed.lock(until)?;
        Ok(claimed)
    }

    /// The lock is this process's, whoever else has the descriptor, and goes with it, however it ends.
    fn lock(&self, until: Instant) -> Result<(), SegmentError> {
        loop {
            match rustix::fs::fcntl_lock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN | Errno::ACCESS) if Instant::now() < until => {
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(Errno::AGAIN | Errno::ACCESS) => return Err(SegmentError::InUse),
                Err(errno) => return Err(system("locking")(errno)),
            }
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let mut open = locked(&OPEN);
        if let Some(at) = open.iter().position(|id| *id == self.id) {
            open.swap_remove(at);
        }
    }
}

/// Which cells have an owner.
#[derive(Debug)]
struct Owned {
    bits: Vec<u64>,
    left: LeftCells,
    count: u32,
    /// No cell below this one is free.
    free_from: u32,
}

impl Owned {
    fn has(&self, cell: u32) -> bool {
        self.bits[cell as usize / 64] & (1 << (cell % 64)) != 0
    }

    fn add(&mut self, cell: u32) {
        self.bits[cell as usize / 64] |= 1 << (cell % 64);
        self.count += 1;
    }

    fn remove(&mut self, cell: u32) {
        self.bits[cell as usize / 64] &= !(1 << (cell % 64));
        self.count -= 1;
        self.free_from = self.free_from.min(cell);
    }

    /// The lowest that is free; bits beyond the last cell are set from the beginning.
    fn lowest_free(&mut self) -> Option<u32> {
        let from = self.free_from as usize / 64;
        let word = (from..self.bits.len()).find(|word| self.bits[*word] != u64::MAX);
        let free = word.map(|word| word as u32 * 64 + self.bits[word].trailing_ones());
        self.free_from = free.unwrap_or(self.bits.len() as u32 * 64);
        free
    }
}

/// A memfd of equal cells.
#[derive(Debug)]
pub struct Segment {
    // A cell with a page that failed has zeros there, which who knows its bytes' fingerprint sees.
    watched: Option<Watched>,
    // Unmapped before the file is let go of: another mapping may be made from then on.
    mapping: Mapping,
    file: OpenFile,
    cell_bytes: usize,
    cells: u32,
    owned: Mutex<Owned>,
}

impl Segment {
    /// Makes a segment without any memory yet.
    ///
    /// # Errors
    /// [`SegmentError::CellSize`] if there cannot be such cells, [`SegmentError::System`] if there is no descriptor or no
    /// address space.
    pub fn create(cell_bytes: usize, cells: u32) -> Result<Arc<Self>, SegmentError> {
        check_cells(cell_bytes, cells)?;
        let cells_end = cell_bytes as u64 * u64::from(cells);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("storaged-cells", flags);
        let fd = fd.map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, cells_end + TAIL_BYTES).map_err(system("ftruncate"))?;
        let head = [&HEAD[..], &(cell_bytes as u32).to_le_bytes()].concat();
        let written = rustix::io::pwrite(&fd, &head, cells_end).map_err(system("pwrite"))?;
        if written != head.len() {
            return Err(system("pwrite")(Errno::NOSPC));
        }
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(system("sealing"))?;
        Self::open(fd, cell_bytes, cells, Instant::now())
    }

    /// Opens a segment that an earlier process made. No cell of it is owned yet. A process that was killed closes its files
    /// after it is seen to be gone, one after the other: until then this waits, but not beyond `until`.
    ///
    /// # Errors
    /// [`SegmentError::NoSegment`] if the descriptor is of something else, [`SegmentError::InUse`] if the segment is open
    /// in this process or another one, [`SegmentError::System`] if the kernel refuses.
    pub fn reopen(fd: OwnedFd, until: Instant) -> Result<Arc<Self>, SegmentError> {
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| SegmentError::NoSegment)?;
        let stat = rustix::fs::fstat(&fd).map_err(system("fstat"))?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let cells_end = size.checked_sub(TAIL_BYTES);
        let is_fixed = seals.contains(SealFlags::SHRINK | SealFlags::GROW);
        let (true, Some(cells_end)) = (is_fixed, cells_end) else {
            return Err(SegmentError::NoSegment);
        };
        let mut head = [0; HEAD_BYTES];
        let got = rustix::io::pread(&fd, &mut head, cells_end).map_err(system("pread"))?;
        let (magic, bytes) = head.split_at(HEAD.len());
        let cell_bytes: [u8; 4] = bytes.try_into().map_err(|_| SegmentError::NoSegment)?;
        let cell_bytes = u32::from_le_bytes(cell_bytes);
        if got != HEAD_BYTES || magic != HEAD || cell_bytes == 0 {
            return Err(SegmentError::NoSegment);
        }
        if cells_end % u64::from(cell_bytes) != 0 {
            return Err(SegmentError::NoSegment);
        }
        let cells = u32::try_from(cells_end / u64::from(cell_bytes));
        let cells = cells.map_err(|_| SegmentError::NoSegment)?;
        check_cells(cell_bytes as usize, cells)?;
        let segment = Self::open(fd, cell_bytes as usize, cells, until)?;
        // Nobody else changes it any more.
        let left = LeftCells::of(&segment.file.fd, segment.cell_bytes, cells)?;
        locked(&segment.owned).left = left;
        Ok(segment)
    }

    fn open(
        fd: OwnedFd,
        cell_bytes: usize,
        cells: u32,
        until: Instant,
    ) -> Result<Arc<Self>, SegmentError> {
        let file = OpenFile::claim(fd, until)?;
        let mapping = Mapping::of(file.fd.as_fd(), cell_bytes * cells as usize)?;
        let watched = Watched::new(mapping.start(), mapping.length());
        let mut bits = vec![0; cells.div_ceil(64) as usize];
        if let (Some(last), 1..) = (bits.last_mut(), cells % 64) {
            *last = u64::MAX << (cells % 64);
        }
        let owned = Mutex::new(Owned {
            bits,
            left: LeftCells::default(),
            count: 0,
            free_from: 0,
        });
        Ok(Arc::new(Self {
            watched,
            mapping,
            file,
            cell_bytes,
            cells,
            owned,
        }))
    }

    /// Bytes of each cell.
    pub fn cell_bytes(&self) -> usize {
        self.cell_bytes
    }

    /// How many there are.
    pub fn cells(&self) -> u32 {
        self.cells
    }

    /// Whether pages of it have failed. Their cells must not be used again before they have been given back.
    pub fn has_lost_pages(&self) -> bool {
        let watched = self.watched.as_ref();
        watched.is_some_and(|watched| watched.pages_lost() > 0)
    }

    /// How many have an owner.
    pub fn owned(&self) -> u32 {
        locked(&self.owned).count
    }

    /// Takes the lowest free cell, without memory yet. None if all have owners.
    pub fn reserve(self: &Arc<Self>) -> Option<ReservedCell> {
        let mut owned = locked(&self.owned);
        let cell = owned.lowest_free()?;
        owned.add(cell);
        owned.left.take(cell);
        drop(owned);
        Some(ReservedCell(Place {
            segment: self.clone(),
            cell,
            at_end: AtEnd::Free,
        }))
    }

    /// Takes this cell with the bytes that an earlier process left in it.
    ///
    /// # Errors
    /// [`SegmentError::Outside`] and [`SegmentError::Taken`] if it cannot be had, [`SegmentError::System`] if it lacks
    /// memory and there is none.
    pub fn adopt(self: &Arc<Self>, cell: u32) -> Result<Cell, SegmentError> {
        let cells = self.cells;
        if cell >= cells {
            return Err(SegmentError::Outside { cell, cells });
        }
        let mut owned = locked(&self.owned);
        if owned.has(cell) {
            return Err(SegmentError::Taken(cell));
        }
        owned.add(cell);
        let has_memory = owned.left.take(cell);
        drop(owned);
        let mut place = Place {
            segment: self.clone(),
            cell,
            at_end: AtEnd::Leave,
        };
        // Bytes that are there stay. A cell that lacks some would else be the end of whoever reads it without memory left.
        if !has_memory {
            place.allocate()?;
        }
        place.at_end = AtEnd::Free;
        Ok(Cell(place))
    }

    /// Gives the memory of all cells without an owner back to the system, after those that have one were adopted.
    pub fn free_rest(&self) {
        // Under the lock, so that none of them gets an owner meanwhile.
        let owned = locked(&self.owned);
        let mut start = 0;
        while start < self.cells {
            let free = (start..self.cells).take_while(|cell| !owned.has(*cell));
            let end = start + free.count() as u32;
            self.punch(start..end);
            start = end + 1;
        }
    }

    fn offset(&self, cell: u32) -> u64 {
        u64::from(cell) * self.cell_bytes as u64
    }

    fn punch(&self, cells: Range<u32>) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, end) = (self.offset(cells.start), self.offset(cells.end));
        if start < end {
            let freed = rustix::fs::fallocate(&self.file.fd, flags, start, end - start);
            debug_assert!(freed.is_ok(), "one's own memory can be given back");
            if self.has_lost_pages() {
                // Where the zeros are, the next owner's bytes would be this process's alone, and lost with it.
                let (at, bytes) = (start as usize, (end - start) as usize);
                self.mapping.map_again(self.file.fd.as_fd(), at, bytes);
            }
        }
    }
}

impl AsFd for Segment {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.fd.as_fd()
    }
}

fn check_cells(cell_bytes: usize, cells: u32) -> Result<(), SegmentError> {
    let is_size = cell_bytes.is_power_of_two() && u32::try_from(cell_bytes).is_ok();
    if is_size && cell_bytes >= CELL_BYTES_MIN && cells > 0 {
        Ok(())
    } else {
        Err(SegmentError::CellSize { cell_bytes, cells })
    }
}

/// A cell that has this value for its owner: there is one per cell and segment. Dropped, it gives the memory back.
#[derive(Debug)]
struct Place {
    segment: Arc<Segment>,
    cell: u32,
    at_end: AtEnd,
}

/// What becomes of the bytes of a cell that loses its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AtEnd {
    Free,
    Leave,
}

impl Place {
    fn start(&self) -> usize {
        self.segment.offset(self.cell) as usize
    }

    fn allocate(&self) -> Result<(), SegmentError> {
        let segment = &self.segment;
        let (fd, bytes) = (&segment.file.fd, segment.cell_bytes as u64);
        let flags = FallocateFlags::empty();
        let done = rustix::fs::fallocate(fd, flags, segment.offset(self.cell), bytes);
        done.map_err(system("fallocate"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.at_end == AtEnd::Free {
            // The memory first: once the bit is clear, the cell may have another owner.
            self.segment.punch(self.cell..self.cell + 1);
        }
        locked(&self.segment.owned).remove(self.cell);
    }
}

/// A cell without memory.
#[derive(Debug)]
pub struct ReservedCell(Place);

impl ReservedCell {
    /// Gives it memory and fills its page tables, so that no write meets a page fault.
    ///
    /// # Errors
    /// [`SegmentError::System`] if there is no memory.
    pub fn populate(self) -> Result<Cell, SegmentError> {
        self.0.allocate()?;
        let bytes = self.0.segment.cell_bytes;
        self.0.segment.mapping.fill(self.0.start(), bytes);
        Ok(Cell(self.0))
    }
}

/// Memory of its owner alone. Dropped, it goes back to the system, and the cell to its segment.
#[derive(Debug)]
pub struct Cell(Place);

impl Cell {
    /// Its segment.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.0.segment
    }

    /// Its number there.
    pub fn number(&self) -> u32 {
        self.0.cell
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        let bytes = self.0.segment.cell_bytes;
        // SAFETY: the range lies in the mapping, since cells below `cells` do, and the mapping lives as long as the
        // segment, which this value keeps. The file's size is sealed and the cell's pages are allocated, so reading is
        // no SIGBUS but where memory fails: zeros take the place of its bytes then, also below a reference that is there,
        // which is why whoever puts bytes to use compares their fingerprint after he has them. The bytes are initialized:
        // those of a file always are. Nobody writes them while the reference lives: the only `Cell` with this number is
        // this one (the bit in `owned`; `Place` is neither Clone nor made for a bit that is set), it is borrowed, and
        // `bytes_mut` borrows it mutably; holes are punched only for cells without an owner; this process has no other
        // mapping of the file (`OPEN`) and uses no other descriptor of it, other daemons are kept off by the lock, and
        // the keeper leaves it alone, as this module demands.
        unsafe {
            let start = self.0.segment.mapping.start().add(self.0.start());
            std::slice::from_raw_parts(start, bytes)
        }
    }

    /// Its bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.0.segment.cell_bytes;
        // SAFETY: as in `bytes`; and since this value is borrowed mutably, no other reference to these bytes exists. Those
        // of other cells are disjoint.
        unsafe {
            let start = self.0.segment.mapping.start().add(self.0.start());
            std::slice::from_raw_parts_mut(start, bytes)
        }
    }

    /// Ends the ownership and leaves the bytes where they are, for the next daemon, or for another try to adopt them.
    pub fn leave(mut self) {
        self.0.at_end = AtEnd::Leave;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(segment: &Arc<Segment>) -> Cell {
        segment.reserve().unwrap().populate().unwrap()
    }

    fn duplicate(segment: &Segment) -> OwnedFd {
        segment.as_fd().try_clone_to_owned().unwrap()
    }

    /// Blocks of 512 bytes that the file has memory for.
    fn blocks(fd: &impl AsFd) -> i64 {
        rustix::fs::fstat(fd).unwrap().st_blocks
    }

    #[test]
    fn cells_are_apart_and_have_memory_while_they_are_owned() {
        let segment = Segment::create(8192, 70).unwrap();
        let head = blocks(&segment);
        let mut cells: Vec<Cell> = (0..70).map(|_| take(&segment)).collect();
        assert!(segment.reserve().is_none(), "all have owners");
        for (byte, cell) in (0..).zip(&mut cells) {
            cell.bytes_mut().fill(byte);
        }
        for (byte, cell) in (0..).zip(&cells) {
            assert!(cell.bytes().iter().all(|it| *it == byte));
        }
        assert_eq!(blocks(&segment) - head, 70 * 16);
        let numbers: Vec<u32> = cells.drain(66..68).map(|cell| cell.number()).collect();
        assert_eq!(numbers, [66, 67]);
        assert_eq!((blocks(&segment) - head, segment.owned()), (68 * 16, 68));
        let again = take(&segment);
        assert_eq!(again.number(), 66);
        assert!(again.bytes().iter().all(|it| *it == 0), "nothing of before");
        drop(segment);
        assert_eq!(again.bytes().len(), 8192, "a cell keeps its segment");
    }

    #[test]
    fn a_segment_opens_again_with_its_bytes() {
        let segment = Segment::create(4096, 100).unwrap();
        let mut cells: Vec<Cell> = (0..3).map(|_| take(&segment)).collect();
        (1..)
            .zip(&mut cells)
            .for_each(|(byte, cell)| cell.bytes_mut().fill(byte));
        let kept = duplicate(&segment);
        assert!(matches!(
            Segment::reopen(duplicate(&segment), Instant::now()),
            Err(SegmentError::InUse)
        ));
        cells.into_iter().for_each(Cell::leave);
        drop(segment);
        let segment = Segment::reopen(kept, Instant::now()).unwrap();
        assert_eq!((segment.cell_bytes(), segment.cells()), (4096, 100));
        let second = segment.adopt(1).unwrap();
        assert_eq!(second.bytes(), [2; 4096]);
        assert!(matches!(segment.adopt(1), Err(SegmentError::Taken(1))));
        assert!(matches!(
            segment.adopt(100),
            Err(SegmentError::Outside { .. })
        ));
        segment.free_rest();
        assert_eq!(blocks(&segment), 8 + 8, "one cell and the last page");
        assert_eq!(second.bytes(), [2; 4096]);
        drop(second);
        assert_eq!((segment.owned(), blocks(&segment)), (0, 8));
    }

    /// Were one of them adopted without memory, its reader would be killed where there is none left.
    #[test]
    fn adopted_cells_have_all_their_memory_whatever_was_left() {
        let segment = Segment::create(16384, 70).unwrap();
        let cells: Vec<Cell> = (0..70).map(|_| take(&segment)).collect();
        let whole = blocks(&segment);
        let kept = duplicate(&segment);
        cells.into_iter().for_each(Cell::leave);
        drop(segment);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // The end of one, the middle of one, two whole ones, and the last.
        for (start, length) in [
            (12288, 4096),
            (36864, 4096),
            (16384 * 64, 32768),
            (16384 * 69, 16384),
        ] {
            rustix::fs::fallocate(&kept, punch, start, length).unwrap();
        }
        let segment = Segment::reopen(kept, Instant::now()).unwrap();
        assert!(blocks(&segment) < whole);
        let cells: Vec<Cell> = (0..70).map(|cell| segment.adopt(cell).unwrap()).collect();
        assert_eq!(blocks(&segment), whole);
        drop(cells);
        let again = segment.adopt(5).unwrap();
        assert_eq!(blocks(&segment), 32 + 8, "one cell and the last page");
        assert!(again.bytes().iter().all(|it| *it == 0));
    }

    #[test]
    fn a_cell_whose_memory_fails_has_zeros_there() {
        crate::survive_memory_faults().unwrap();
        let fd = rustix::fs::memfd_create("cells", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 16384).unwrap();
        let segment = Segment::open(fd, 8192, 2, Instant::now()).unwrap();
        let mut cells: Vec<Cell> = (0..2).map(|_| take(&segment)).collect();
        cells.iter_mut().for_each(|cell| cell.bytes_mut().fill(7));
        // What is behind the end of a file fails as bad memory does.
        rustix::fs::ftruncate(segment.as_fd(), 12288).unwrap();
        assert_eq!(cells[0].bytes(), [7; 8192]);
        assert_eq!(cells[1].bytes()[..4096], [7; 4096]);
        assert_eq!(cells[1].bytes()[4096..], [0; 4096]);
        assert!(segment.has_lost_pages());
        rustix::fs::ftruncate(segment.as_fd(), 16384).unwrap();
        drop(cells);
        let mut again = segment.adopt(1).unwrap();
        again.bytes_mut().fill(8);
        let mut kept = [0; 8192];
        let read = rustix::io::pread(segment.as_fd(), &mut kept, 8192);
        assert_eq!((read, kept), (Ok(8192), [8; 8192]), "the next daemon's too");
    }

    #[test]
    fn what_is_no_segment_is_refused() {
        let sized = |size: u64, seals: SealFlags| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create("other", flags).unwrap();
            rustix::fs::ftruncate(&fd, size).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            fd
        };
        let fixed = SealFlags::SHRINK | SealFlags::GROW;
        let with_head = |size: u64, cell_bytes: u32, seals: SealFlags| {
            let fd = sized(size, SealFlags::empty());
            let head = [&HEAD[..], &cell_bytes.to_le_bytes()].concat();
            rustix::io::pwrite(&fd, &head, size - TAIL_BYTES).unwrap();
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
            fd
        };
        for fd in [
            sized(0, fixed),
            sized(100, fixed),
            sized(12288, fixed),
            with_head(12288, 4096, SealFlags::SHRINK),
            with_head(16384, 8192, fixed),
            with_head(12288, 0, fixed),
            with_head(12288, 2048, fixed),
            with_head(4096, 4096, fixed),
        ] {
            assert!(Segment::reopen(fd, Instant::now()).is_err());
        }
        assert!(Segment::reopen(with_head(12288, 4096, fixed), Instant::now()).is_ok());
        for (cell_bytes, cells) in [(0, 1), (2048, 1), (5000, 1), (4096, 0)] {
            assert!(Segment::create(cell_bytes, cells).is_err());
        }
    }
}
