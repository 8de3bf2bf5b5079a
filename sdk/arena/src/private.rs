//! Private memory for bytes that come once and go: what is read from a file, or copied out of slots for one. It begins where direct I/O
//! takes it, and is not cleared first: of megabytes that costs as much as a copy of them.
//!
//! An allocator gives back at once what is so large, and each of the next one's pages costs a fault, which is more than the copy again. So
//! memory that has served stays for what comes within a moment.

use std::io;
use std::mem::{self, MaybeUninit};
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A multiple of the blocks of every disk that is sold, and the size of a page.
pub const DIRECT_ALIGNMENT: usize = 4096;

/// Less is as well kept by the allocator, and more is rarely followed by as much.
const KEPT_BYTES: RangeInclusive<usize> = 1 << 20..=33 << 20;
/// More is given back at once, the longest unused first.
const SPARE_BYTES_MAX: usize = 64 << 20;
/// What nobody took for so long is given back.
const KEPT_FOR: Duration = Duration::from_secs(1);

static SPARE: Spare = Spare(Mutex::new(Vec::new()));

/// Memory that has served, in the order in which it was given back.
struct Spare(Mutex<Vec<SpareMemory>>);

#[derive(Debug)]
struct SpareMemory {
    memory: Vec<u8>,
    since: Instant,
}

impl SpareMemory {
    fn is_idle(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= KEPT_FOR
    }
}

impl Spare {
    fn locked(&self) -> MutexGuard<'_, Vec<SpareMemory>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of so many bytes and hardly more, or what is waited for would count as less than it takes. The last that was given back: its
    /// pages are most likely in a cache.
    fn take(&self, bytes: usize) -> Vec<u8> {
        let mut spare = self.locked();
        let most = bytes + bytes / 8;
        let fits = |it: &SpareMemory| (bytes..=most).contains(&it.memory.capacity());
        let taken = spare.iter().rposition(fits).map(|at| spare.remove(at));
        drop(spare);
        taken.map_or_else(|| Vec::with_capacity(bytes), |it| it.memory)
    }

    fn give(&self, mut memory: Vec<u8>, now: Instant) {
        if !KEPT_BYTES.contains(&memory.capacity()) {
            return;
        }
        memory.clear();
        self.locked().push(SpareMemory { memory, since: now });
        drop(self.idle(now));
    }

    /// What is too much, or idle. The system takes megabytes back page by page, when this is dropped: not under the lock.
    fn idle(&self, now: Instant) -> Vec<SpareMemory> {
        let mut spare = self.locked();
        let mut left: usize = spare.iter().map(|it| it.memory.capacity()).sum();
        let goes = |it: &&SpareMemory| {
            let goes = left > SPARE_BYTES_MAX || it.is_idle(now);
            left -= it.memory.capacity();
            goes
        };
        let gone = spare.iter().take_while(goes).count();
        spare.drain(..gone).collect()
    }
}

/// Memory that has served and that nobody took for a second. Dropped, it goes back to the system, which takes milliseconds.
#[derive(Debug)]
pub struct IdleMemory {
    _memory: Vec<SpareMemory>,
}

/// Takes what is idle now, if anything. To be called from time to time: what comes next does it too, and nothing may come.
pub fn take_idle_memory() -> Option<IdleMemory> {
    let memory = SPARE.idle(Instant::now());
    (!memory.is_empty()).then_some(IdleMemory { _memory: memory })
}

/// Bytes from an address that is a multiple of [`DIRECT_ALIGNMENT`] where that is wanted, up to a number that is fixed when they are made.
#[derive(Debug)]
pub struct AlignedBytes {
    /// Never grows beyond the capacity that it is made with, or the bytes would lie elsewhere.
    memory: Vec<u8>,
    start: usize,
    room: usize,
}

impl AlignedBytes {
    /// None yet, and room for so many.
    pub fn with_room(room: usize) -> Self {
        let mut memory = SPARE.take(room + DIRECT_ALIGNMENT);
        let start = memory.as_ptr().align_offset(DIRECT_ALIGNMENT);
        // What cannot be aligned is what direct I/O refuses.
        let start = start.min(DIRECT_ALIGNMENT);
        memory.resize(start, 0);
        Self {
            memory,
            start,
            room,
        }
    }

    /// The same from any address: a page more would be most of what a short object takes.
    pub fn unaligned_with_room(room: usize) -> Self {
        Self {
            memory: SPARE.take(room),
            start: 0,
            room,
        }
    }

    /// How many more there is room for.
    pub fn room(&self) -> usize {
        self.room - self.as_ref().len()
    }

    /// Appends bytes, as many as there is room for.
    pub fn append(&mut self, bytes: &[u8]) {
        let taken = bytes.len().min(self.room());
        self.memory.extend_from_slice(&bytes[..taken]);
    }

    /// Appends what one read of at most `length` bytes at `offset` of a file gives, and says how many these are; none at its end.
    ///
    /// # Errors
    /// What the system says.
    pub fn read_from(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> io::Result<usize> {
        let length = length.min(self.room());
        let free: &mut [MaybeUninit<u8>] = &mut self.memory.spare_capacity_mut()[..length];
        let (read, _) = rustix::io::pread(file, free, offset)?;
        let read = read.len();
        let filled = self.memory.len() + read;
        // SAFETY: the kernel has filled these bytes, which follow those that were there, within the capacity.
        unsafe {
            self.memory.set_len(filled);
        }
        Ok(read)
    }

    /// Keeps the first `length` bytes, if there are more.
    pub fn truncate(&mut self, length: usize) {
        self.memory.truncate(self.start.saturating_add(length));
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        SPARE.give(mem::take(&mut self.memory), Instant::now());
    }
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.memory[self.start..]
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn bytes_begin_where_direct_io_takes_them_and_stay_there() {
        for room in [0, 1, DIRECT_ALIGNMENT, 3 * DIRECT_ALIGNMENT + 5, 1 << 20] {
            let mut bytes = AlignedBytes::with_room(room);
            let place = bytes.as_ref().as_ptr();
            assert_eq!(place.align_offset(DIRECT_ALIGNMENT), 0);
            for _ in 0..=room.div_ceil(1000) {
                bytes.append(&[7; 1000]);
            }
            assert_eq!((bytes.room(), bytes.as_ref()), (0, &vec![7; room][..]));
            assert_eq!(bytes.as_ref().as_ptr(), place);
            bytes.truncate(room / 2);
            assert_eq!(
                (bytes.as_ref().len(), bytes.room()),
                (room / 2, room - room / 2)
            );
        }
    }

    #[test]
    fn memory_serves_again_within_a_moment_and_then_goes() {
        const BYTES: usize = 20 << 20;
        let (spare, now) = (Spare(Mutex::default()), Instant::now());
        let kept = || {
            spare
                .locked()
                .iter()
                .map(|it| it.memory.capacity())
                .collect::<Vec<_>>()
        };
        let mut memory = spare.take(BYTES);
        memory.extend_from_slice(b"before");
        let place = memory.as_ptr().addr();
        spare.give(memory, now);
        for other in [BYTES + 1, BYTES / 2] {
            let taken = spare.take(other);
            assert!(taken.as_ptr().addr() != place);
        }
        let again = spare.take(BYTES - 5);
        assert_eq!(
            (again.as_ptr().addr(), again.len(), kept().len()),
            (place, 0, 0)
        );
        spare.give(again, now);
        spare.give(vec![0; KEPT_BYTES.start() - 1], now);
        spare.give(Vec::with_capacity(KEPT_BYTES.end() + 1), now);
        drop(spare.idle(now + KEPT_FOR / 2));
        assert_eq!(kept(), [BYTES]);
        let more = *KEPT_BYTES.end();
        for _ in 0..2 {
            spare.give(Vec::with_capacity(more), now + KEPT_FOR / 2);
        }
        assert_eq!(
            kept(),
            [more],
            "the longest unused goes where it is too much"
        );
        drop(spare.idle(now + KEPT_FOR * 2));
        assert!(kept().is_empty());
    }

    #[test]
    fn a_file_is_read_up_to_its_end_or_as_far_as_is_wanted() {
        let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let content: Vec<u8> = (0..10_000).map(|at| (at % 251) as u8).collect();
        assert_eq!(rustix::io::pwrite(&file, &content, 0), Ok(content.len()));
        let mut bytes = AlignedBytes::with_room(9_000);
        assert_eq!(bytes.read_from(file.as_fd(), 100, 4_000).unwrap(), 4_000);
        assert_eq!(
            bytes.read_from(file.as_fd(), 4_100, usize::MAX).unwrap(),
            5_000
        );
        assert_eq!(
            bytes.read_from(file.as_fd(), 9_100, 1).unwrap(),
            0,
            "no room"
        );
        assert_eq!(bytes.as_ref(), &content[100..9_100]);
        let mut tail = AlignedBytes::with_room(9_000);
        assert_eq!(tail.read_from(file.as_fd(), 9_000, 9_000).unwrap(), 1_000);
        assert_eq!(tail.read_from(file.as_fd(), 10_000, 9_000).unwrap(), 0);
        assert!(tail.read_from(file.as_fd(), u64::MAX, 1).is_err());
        assert_eq!(tail.as_ref(), &content[9_000..]);
    }
}
