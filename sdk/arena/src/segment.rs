//! A segment: a memfd of equal cells, the private memory of one daemon. Its descriptor is kept by another process, so that the next
//! daemon can go on with the bytes.
//!
//! The file is sparse. A cell has pages for what was written to it, until it is dropped. Nobody maps it: cells are read and written
//! through the file. A process that is killed closes nothing before its mappings are gone, which for hundreds of GB takes many seconds, and
//! the next daemon would wait for that; and a page that fails is an error of a read here, no signal.
//!
//! A segment is one daemon's: a list of the files that are open here refuses to open one twice in this process, a record lock on the file
//! keeps off another daemon, and a bit per cell a second owner of a cell. Whoever else has the descriptor (the keeper) must leave the bytes alone.
//!
//! A page behind the cells says what they are (see `HEAD`), so a descriptor suffices to open a segment again.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, SealFlags};
use rustix::io::Errno;
use thiserror::Error;

use crate::positioned;

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
    /// More than a cell has.
    #[error("expected at most {cell_bytes} bytes in a cell, got {bytes}")]
    TooLong { cell_bytes: usize, bytes: usize },
    /// The file ends before the cell does.
    #[error("expected {expected} bytes of cell {cell}, got {got}")]
    Short {
        cell: u32,
        expected: usize,
        got: usize,
    },
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
    file: OpenFile,
    cell_bytes: usize,
    cells: u32,
    owned: Mutex<Owned>,
}

impl Segment {
    /// Makes a segment without any memory yet.
    ///
    /// # Errors
    /// [`SegmentError::CellSize`] if there cannot be such cells, [`SegmentError::System`] if there is no descriptor.
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
        Self::open(fd, cell_bytes as usize, cells, until)
    }

    fn open(
        fd: OwnedFd,
        cell_bytes: usize,
        cells: u32,
        until: Instant,
    ) -> Result<Arc<Self>, SegmentError> {
        let file = OpenFile::claim(fd, until)?;
        let mut bits = vec![0; cells.div_ceil(64) as usize];
        if let (Some(last), 1..) = (bits.last_mut(), cells % 64) {
            *last = u64::MAX << (cells % 64);
        }
        let owned = Mutex::new(Owned {
            bits,
            count: 0,
            free_from: 0,
        });
        Ok(Arc::new(Self {
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

    /// How many have an owner.
    pub fn owned(&self) -> u32 {
        locked(&self.owned).count
    }

    /// Takes the lowest free cell; it has no memory until it is written. None if all have owners.
    pub fn take(self: &Arc<Self>) -> Option<Cell> {
        let mut owned = locked(&self.owned);
        let cell = owned.lowest_free()?;
        owned.add(cell);
        Some(self.owned_cell(cell))
    }

    /// Takes this cell with the bytes that an earlier process left in it.
    ///
    /// # Errors
    /// [`SegmentError::Outside`] and [`SegmentError::Taken`] if it cannot be had.
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
        Ok(self.owned_cell(cell))
    }

    fn owned_cell(self: &Arc<Self>, number: u32) -> Cell {
        Cell {
            segment: self.clone(),
            number,
            at_end: AtEnd::Free,
        }
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

/// What becomes of the bytes of a cell that loses its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AtEnd {
    Free,
    Leave,
}

/// Memory of its owner alone: there is one value per cell and segment. Dropped, it gives its memory back to the system, and the cell to its segment.
#[derive(Debug)]
pub struct Cell {
    segment: Arc<Segment>,
    number: u32,
    at_end: AtEnd,
}

impl Cell {
    /// Its segment.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Its number there.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Copies its first bytes out. Those that nobody has written are zeros, or a former owner's.
    ///
    /// # Errors
    /// [`SegmentError::TooLong`] if it has not so many, [`SegmentError::System`] and [`SegmentError::Short`] if the system cannot give them
    /// any more: memory has failed.
    pub fn read(&self, out: &mut [u8]) -> Result<(), SegmentError> {
        let (cell, expected) = (self.number, out.len());
        let start = self.start_of(expected)?;
        let got = positioned::read_at(self.segment.as_fd(), start, out);
        let got = got.map_err(system("reading a cell"))?;
        if got < expected {
            return Err(SegmentError::Short {
                cell,
                expected,
                got,
            });
        }
        Ok(())
    }

    /// Makes these its first bytes.
    ///
    /// # Errors
    /// [`SegmentError::TooLong`] if it has not so many, [`SegmentError::System`] if there is no memory, or it has failed; what is in the cell
    /// then means nothing.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), SegmentError> {
        let start = self.start_of(bytes.len())?;
        positioned::write_at(self.segment.as_fd(), start, bytes).map_err(system("writing a cell"))
    }

    /// Ends the ownership and leaves the bytes where they are, for the next daemon, or for another try to adopt them.
    pub fn leave(mut self) {
        self.at_end = AtEnd::Leave;
    }

    fn start_of(&self, bytes: usize) -> Result<u64, SegmentError> {
        let cell_bytes = self.segment.cell_bytes;
        if bytes > cell_bytes {
            return Err(SegmentError::TooLong { cell_bytes, bytes });
        }
        Ok(self.segment.offset(self.number))
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        if self.at_end == AtEnd::Free {
            // The memory first: once the bit is clear, the cell may have another owner.
            self.segment.punch(self.number..self.number + 1);
        }
        locked(&self.segment.owned).remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(segment: &Arc<Segment>) -> Cell {
        segment.take().unwrap()
    }

    fn fill(cell: &mut Cell, byte: u8) {
        let bytes = vec![byte; cell.segment().cell_bytes()];
        cell.write(&bytes).unwrap();
    }

    fn bytes(cell: &Cell) -> Vec<u8> {
        let mut out = vec![1; cell.segment().cell_bytes()];
        cell.read(&mut out).unwrap();
        out
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
        assert!(segment.take().is_none(), "all have owners");
        for (byte, cell) in (0..).zip(&mut cells) {
            fill(cell, byte);
        }
        for (byte, cell) in (0..).zip(&cells) {
            assert!(bytes(cell).iter().all(|it| *it == byte));
        }
        assert_eq!(blocks(&segment) - head, 70 * 16);
        let numbers: Vec<u32> = cells.drain(66..68).map(|cell| cell.number()).collect();
        assert_eq!(numbers, [66, 67]);
        assert_eq!((blocks(&segment) - head, segment.owned()), (68 * 16, 68));
        let again = take(&segment);
        assert_eq!(again.number(), 66);
        assert!(bytes(&again).iter().all(|it| *it == 0), "nothing of before");
        drop(segment);
        assert_eq!(bytes(&again).len(), 8192, "a cell keeps its segment");
    }

    #[test]
    fn a_segment_opens_again_with_its_bytes() {
        let segment = Segment::create(4096, 100).unwrap();
        let mut cells: Vec<Cell> = (0..3).map(|_| take(&segment)).collect();
        (1..)
            .zip(&mut cells)
            .for_each(|(byte, cell)| fill(cell, byte));
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
        assert_eq!(bytes(&second), [2; 4096]);
        assert!(matches!(segment.adopt(1), Err(SegmentError::Taken(1))));
        assert!(matches!(
            segment.adopt(100),
            Err(SegmentError::Outside { .. })
        ));
        segment.free_rest();
        assert_eq!(blocks(&segment), 8 + 8, "one cell and the last page");
        assert_eq!(bytes(&second), [2; 4096]);
        drop(second);
        assert_eq!((segment.owned(), blocks(&segment)), (0, 8));
    }

    #[test]
    fn a_cell_has_memory_for_what_was_written_and_no_bytes_beyond_its_own() {
        let segment = Segment::create(16384, 2).unwrap();
        let head = blocks(&segment);
        let (mut first, mut second) = (take(&segment), take(&segment));
        fill(&mut second, 9);
        assert!(bytes(&first).iter().all(|it| *it == 0), "nothing written");
        first.write(b"abc").unwrap();
        assert_eq!(blocks(&segment) - head, 32 + 8, "one cell and a page");
        let long = vec![0; 16385];
        let refused = [first.write(&long), first.read(&mut long.clone())];
        for refused in refused {
            assert!(matches!(refused, Err(SegmentError::TooLong { .. })));
        }
        assert_eq!(bytes(&first)[..4], *b"abc\0");
        assert!(bytes(&second).iter().all(|it| *it == 9));
    }

    #[test]
    fn memory_that_cannot_be_given_any_more_is_an_error() {
        let fd = rustix::fs::memfd_create("cells", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 16384).unwrap();
        let segment = Segment::open(fd, 8192, 2, Instant::now()).unwrap();
        let mut cells: Vec<Cell> = (0..2).map(|_| take(&segment)).collect();
        cells.iter_mut().for_each(|cell| fill(cell, 7));
        rustix::fs::ftruncate(segment.as_fd(), 12288).unwrap();
        assert_eq!(bytes(&cells[0]), [7; 8192]);
        let mut out = [0; 8192];
        let read = cells[1].read(&mut out);
        assert!(
            matches!(read, Err(SegmentError::Short { got: 4096, .. })),
            "{read:?}"
        );
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("cells", flags).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        let segment = Segment::open(fd, 8192, 1, Instant::now()).unwrap();
        let mut cell = take(&segment);
        fill(&mut cell, 7);
        rustix::fs::fcntl_add_seals(segment.as_fd(), SealFlags::WRITE).unwrap();
        let refused = cell.write(&[8; 8192]);
        assert!(matches!(refused, Err(SegmentError::System { .. })));
        assert_eq!(bytes(&cell), [7; 8192]);
        cell.leave();
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
