//! A slot's memory at its trainer's: mapped, and written through its file as long as its pages are not.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};

use crate::mapping::Mapping;
use crate::slot::{Slot, SlotError};

/// Shorter copies into pages that are not mapped cost less by page faults than by calls.
const CALL_BYTES: usize = 4 << 10;
/// Page tables of so many bytes are filled at once: some 50 ms.
const PAGES_AT_ONCE_BYTES: usize = 32 << 20;

/// None are known to be mapped, and nobody sees to it.
const UNMAPPED: u8 = 0;
/// Somebody sees to it.
const BEING_MAPPED: u8 = 1;
const MAPPED: u8 = 2;

/// A slot that is mapped, and how far.
///
/// The pages of a new slot have no bytes yet. A copy through the mapping has each of them cleared and mapped by a fault of its own first,
/// which takes several times as long as the copy. Through the file they get their bytes at once, and are mapped afterwards, sixteen at a
/// fault. The kernel lets one thread at a time write to a file: of several the others clear and map theirs ahead.
#[derive(Debug)]
pub struct SlotMemory {
    mapping: Mapping,
    pages: AtomicU8,
    /// Held by the thread that writes through the file; none where that is not to be, or no more.
    file: Mutex<Option<Slot>>,
}

impl SlotMemory {
    /// Maps a slot, and none of its pages.
    ///
    /// # Errors
    /// [`SlotError::Os`] if the kernel refuses.
    pub fn new(slot: Slot) -> Result<Self, SlotError> {
        let mapping = Mapping::unfilled(&slot)?;
        // Whoever writes beyond what his process may (`ulimit -f`) is ended by a signal; through a mapping nobody is.
        let longest = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
        let file = Some(slot).filter(|slot| slot.capacity() <= longest);
        Ok(Self {
            mapping,
            pages: AtomicU8::new(UNMAPPED),
            file: Mutex::new(file),
        })
    }

    /// The mapping.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`SlotError::Outside`] if they do not fit.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> Result<(), SlotError> {
        // SAFETY: a reference is readable for its length.
        unsafe { self.copy_from(offset, bytes.as_ptr(), bytes.len()) }
    }

    /// Copies `length` bytes of this process's memory to `offset`.
    ///
    /// # Safety
    /// They are readable until this returns, and do not lie in this slot. Others may write them meanwhile: then what arrives is a mixture.
    ///
    /// # Errors
    /// As [`SlotMemory::copy_in`].
    pub unsafe fn copy_from(
        &self,
        offset: usize,
        source: *const u8,
        length: usize,
    ) -> Result<(), SlotError> {
        if !self.is_mapped() && length >= CALL_BYTES {
            // SAFETY: as the caller vouches.
            if unsafe { self.is_written(offset, source, length) } {
                return Ok(());
            }
            let begin = offset - offset % page_size();
            self.mapping
                .fill(begin, length.saturating_add(offset - begin));
        }
        // SAFETY: as the caller vouches.
        unsafe { self.mapping.copy_from(offset, source, length) }
    }

    /// Writes through the file, unless another thread does or that cannot be; then the mapping says what is wrong.
    ///
    /// # Safety
    /// As [`SlotMemory::copy_from`].
    unsafe fn is_written(&self, offset: usize, source: *const u8, length: usize) -> bool {
        let Ok(file) = self.file.try_lock() else {
            return false;
        };
        let Some(file) = file.as_ref() else {
            return false;
        };
        // SAFETY: the caller vouches that the bytes are readable. Nothing looks at them by this reference but the kernel, which copies them
        // whatever else happens to them.
        let bytes = unsafe { std::slice::from_raw_parts(source, length) };
        file.write_at(offset as u64, bytes).is_ok()
    }

    /// Whether all pages are mapped.
    pub fn is_mapped(&self) -> bool {
        self.pages.load(Ordering::Acquire) == MAPPED
    }

    /// Maps all pages, unless `is_called_away` says to end early; false if it did.
    pub fn map_pages(&self, is_called_away: impl FnMut() -> bool) -> bool {
        !self.is_mine_to_map() || self.map_all(Mapping::fill, is_called_away)
    }

    /// Has a thread map the pages, once they have their bytes: later copies go through the mapping, on as many threads as one likes.
    pub fn map_pages_behind(self: &Arc<Self>) {
        if !self.is_mine_to_map() {
            return;
        }
        let memory = Arc::clone(self);
        let map = move || memory.map_for_others(Mapping::fill_what_is_there);
        let begun = thread::Builder::new()
            .name("storaged-pages".into())
            .spawn(map);
        if begun.is_err() {
            self.pages.store(UNMAPPED, Ordering::Release);
        }
    }

    /// Maps what others have, as long as somebody does.
    fn map_for_others(self: Arc<Self>, map: impl Fn(&Mapping, usize, usize)) {
        self.map_all(map, || Arc::strong_count(&self) == 1);
    }

    fn map_all(
        &self,
        map: impl Fn(&Mapping, usize, usize),
        mut is_called_away: impl FnMut() -> bool,
    ) -> bool {
        for start in (0..self.mapping.length()).step_by(PAGES_AT_ONCE_BYTES) {
            if is_called_away() {
                self.pages.store(UNMAPPED, Ordering::Release);
                return false;
            }
            map(&self.mapping, start, PAGES_AT_ONCE_BYTES);
        }
        // Its descriptor is of no more use. Where a thread writes just now it stays open; waiting for that one could last for ever in the
        // child of a fork.
        if let Ok(mut file) = self.file.try_lock() {
            *file = None;
        }
        self.pages.store(MAPPED, Ordering::Release);
        true
    }

    fn is_mine_to_map(&self) -> bool {
        let (before, after) = (Ordering::AcqRel, Ordering::Acquire);
        let taken = self
            .pages
            .compare_exchange(UNMAPPED, BEING_MAPPED, before, after);
        taken.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::{Duration, Instant};

    use super::*;

    const PIECE: usize = 1 << 20;
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Memory of so many bytes, and the slot as the daemon has it.
    fn made(bytes: u64) -> (Slot, SlotMemory) {
        let slot = Slot::create(bytes).unwrap();
        let memory = SlotMemory::new(slot.try_clone().unwrap()).unwrap();
        (slot, memory)
    }

    fn read(slot: &Slot, offset: usize, length: usize) -> Vec<u8> {
        let mut out = vec![0; length];
        slot.read_at(offset as u64, &mut out).unwrap();
        out
    }

    fn until_mapped(memory: &SlotMemory) {
        let began = Instant::now();
        while !memory.is_mapped() {
            assert!(began.elapsed() < PATIENCE, "the pages are not mapped");
            thread::yield_now();
        }
    }

    /// A byte for every place that is none of its neighbours'.
    fn pattern(length: usize) -> Vec<u8> {
        (0..length).map(|at| (at % 251) as u8).collect()
    }

    #[test]
    fn what_is_copied_in_is_in_the_slot_mapped_or_not() {
        let bytes = pattern(PIECE + 3);
        for map_first in [false, true] {
            let (slot, memory) = made(4 << 20);
            if map_first {
                assert!(memory.map_pages(|| false));
            }
            assert_eq!(memory.is_mapped(), map_first);
            memory.copy_in(4095, &bytes).unwrap();
            memory.copy_in(2 << 20, b"short").unwrap();
            assert_eq!(read(&slot, 4095, bytes.len()), bytes);
            assert_eq!(read(&slot, 2 << 20, 5), b"short");
            assert_eq!(read(&slot, 3 << 20, PIECE), vec![0; PIECE]);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_mapped_or_not() {
        let (slot, memory) = made(1 << 20);
        let long = vec![1; PIECE];
        for _ in 0..2 {
            for (offset, bytes) in [(1, &long[..]), (PIECE - 1, b"xy"), (usize::MAX, b"x")] {
                let refused = memory.copy_in(offset, bytes);
                assert!(matches!(refused, Err(SlotError::Outside { .. })));
            }
            assert_eq!(read(&slot, 0, PIECE), vec![0; PIECE]);
            assert!(memory.map_pages(|| false));
        }
    }

    #[test]
    fn threads_copy_into_new_memory_at_once_and_every_byte_arrives() {
        let bytes = pattern(16 * PIECE);
        let (slot, memory) = made(bytes.len() as u64);
        let memory = Arc::new(memory);
        thread::scope(|scope| {
            for at in 0..4 {
                let (memory, bytes) = (&memory, &bytes);
                scope.spawn(move || {
                    for (number, piece) in bytes.chunks(PIECE).enumerate().skip(at).step_by(4) {
                        memory.copy_in(number * PIECE, piece).unwrap();
                        memory.map_pages_behind();
                    }
                });
            }
        });
        assert_eq!(read(&slot, 0, bytes.len()), bytes);
        until_mapped(&memory);
    }

    #[test]
    fn behind_a_save_pages_are_mapped_and_the_descriptor_is_closed() {
        let (_, memory) = made(64 << 20);
        let memory = Arc::new(memory);
        memory.copy_in(0, &pattern(PIECE)).unwrap();
        memory.map_pages_behind();
        until_mapped(&memory);
        assert!(memory.file.lock().unwrap().is_none());
    }

    #[test]
    fn pages_that_nobody_has_any_more_are_not_mapped() {
        let (_, memory) = made(3 * PAGES_AT_ONCE_BYTES as u64);
        let memory = Arc::new(memory);
        let others = Mutex::new(Some(Arc::clone(&memory)));
        let pieces = AtomicUsize::new(0);
        memory.map_for_others(|_, _, _| {
            pieces.fetch_add(1, Ordering::Relaxed);
            drop(others.lock().unwrap().take());
        });
        assert_eq!(pieces.into_inner(), 1);
    }

    #[test]
    fn where_the_file_cannot_be_written_the_mapping_takes_the_bytes() {
        let (slot, memory) = made(2 << 20);
        *memory.file.lock().unwrap() = None;
        memory.copy_in(5, &pattern(PIECE)).unwrap();
        assert_eq!(read(&slot, 5, PIECE), pattern(PIECE));
    }

    #[test]
    fn whoever_is_called_away_leaves_the_pages_for_the_next() {
        let (_, memory) = made(64 << 20);
        let mut asked = 0;
        let is_called_away = || {
            asked += 1;
            asked == 2
        };
        assert!(!memory.map_pages(is_called_away));
        assert!(memory.map_pages(|| false));
        assert!(memory.is_mapped() && memory.file.lock().unwrap().is_none());
    }
}
