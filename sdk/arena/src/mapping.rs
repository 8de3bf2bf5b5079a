//! A mapping of a slot: where a trainer's bytes go, with one copy. The one from which a daemon reads a slot is made here too.

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::slot::{Slot, SlotError, check_within};

/// Page tables of so many bytes are dropped at once: some milliseconds.
const UNMAPPED_AT_ONCE_BYTES: usize = 32 << 20;

/// A shared mapping of a whole slot.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory owned by this value; it is only reached through raw copies that check their
// range, and the pointer stays valid until drop on whichever thread that happens.
unsafe impl Send for Mapping {}
// SAFETY: as above; two threads that copy into the same range race on bytes, never on Rust values: no reference to the mapped bytes
// is ever made.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a slot, and none of its pages.
    ///
    /// # Errors
    /// [`SlotError::Os`] if the kernel refuses.
    pub fn unfilled(slot: &Slot) -> Result<Self, SlotError> {
        let length = usize::try_from(slot.capacity()).unwrap_or(usize::MAX);
        Self::map(slot.as_fd(), length, ProtFlags::READ | ProtFlags::WRITE)
    }

    /// Maps the first `length` bytes of a file, whose size is sealed and no smaller than that, for a daemon to read. Its core dumps do not
    /// have them.
    pub(crate) fn to_read(file: BorrowedFd<'_>, length: usize) -> Result<Self, SlotError> {
        let mapping = Self::map(file, length, ProtFlags::READ)?;
        // SAFETY: it is a mapping of this value's own, and what is dumped of it changes no byte.
        let kept_out = unsafe {
            let start = mapping.start().cast();
            rustix::mm::madvise(start, length, Advice::LinuxDontDump)
        };
        debug_assert!(kept_out.is_ok(), "one's own mapping can be kept out");
        Ok(mapping)
    }

    /// Fills page tables from `offset` (a multiple of the page size) on, up to the end of the mapping, and clears pages that have no bytes
    /// yet. Before Linux 5.14 this does nothing, and the first copy meets the page faults instead.
    pub(crate) fn fill(&self, offset: usize, bytes: usize) {
        self.populate(offset, bytes, Advice::LinuxPopulateWrite);
    }

    /// The same for pages that have bytes: of shared memory they are mapped writable by what only reads, several at a fault.
    pub(crate) fn fill_what_is_there(&self, offset: usize, bytes: usize) {
        self.populate(offset, bytes, Advice::LinuxPopulateRead);
    }

    fn populate(&self, offset: usize, bytes: usize, how: Advice) {
        let Some(left) = self.length.checked_sub(offset) else {
            return;
        };
        // SAFETY: the range lies in the mapping, as was just checked; filling page tables changes no byte.
        let filled = unsafe {
            let start = self.start().add(offset);
            rustix::mm::madvise(start.cast(), bytes.min(left), how)
        };
        // What is not filled now is filled when it is first written.
        let _ = filled;
    }

    fn map(file: BorrowedFd<'_>, length: usize, access: ProtFlags) -> Result<Self, SlotError> {
        // SAFETY: a null hint lets the kernel choose fresh addresses, so no existing memory is affected; the file's
        // size is sealed, so the pages behind the mapping never go away.
        let start = unsafe {
            let (anywhere, flags) = (std::ptr::null_mut(), MapFlags::SHARED);
            rustix::mm::mmap(anywhere, length, access, flags, file, 0)
        };
        let start = start.map_err(|errno| SlotError::Os {
            what: "mmap",
            source: errno.into(),
        })?;
        let start = NonNull::new(start.cast()).ok_or(SlotError::Os {
            what: "mmap",
            source: std::io::ErrorKind::OutOfMemory.into(),
        })?;
        Ok(Self { start, length })
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Where it begins, for a GPU driver or a copy in another language; valid as long as the mapping lives.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies bytes from `offset` to private memory. Others may write them meanwhile: then what arrives is a mixture.
    ///
    /// # Errors
    /// [`SlotError::Outside`] if there are not so many.
    pub(crate) fn copy_to(&self, offset: usize, out: &mut [u8]) -> Result<(), SlotError> {
        self.check(offset, out.len())?;
        // SAFETY: the range was checked to lie in the mapping, and private memory does not overlap it; what other processes write there are
        // bytes, not Rust values.
        unsafe {
            let source = self.start().add(offset);
            std::ptr::copy_nonoverlapping(source, out.as_mut_ptr(), out.len());
        }
        Ok(())
    }

    fn check(&self, offset: usize, length: usize) -> Result<(), SlotError> {
        check_within(self.length as u64, offset as u64, length as u64)
    }

    /// Copies `length` bytes of this process's memory to `offset`.
    ///
    /// # Safety
    /// They are readable until this returns, and do not lie in this mapping.
    ///
    /// # Errors
    /// [`SlotError::Outside`] if they do not fit.
    pub(crate) unsafe fn copy_from(
        &self,
        offset: usize,
        source: *const u8,
        length: usize,
    ) -> Result<(), SlotError> {
        self.check(offset, length)?;
        // SAFETY: the range was checked to lie in the mapping, the caller vouches for the source, and other processes that
        // read meanwhile see bytes, not Rust values.
        unsafe {
            std::ptr::copy_nonoverlapping(source, self.start().add(offset), length);
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Piece by piece: at once, nobody in this process could map or unmap anything for hundreds of milliseconds of a slot of gigabytes.
        for offset in (0..self.length).step_by(UNMAPPED_AT_ONCE_BYTES) {
            let bytes = UNMAPPED_AT_ONCE_BYTES.min(self.length - offset);
            // SAFETY: the range lies in the mapping; of a shared one this drops page tables alone, and its bytes stay where they are.
            let dropped = unsafe {
                let start = self.start().add(offset).cast();
                rustix::mm::madvise(start, bytes, Advice::LinuxDontNeed)
            };
            debug_assert!(dropped.is_ok(), "page tables of one's own can be dropped");
        }
        // SAFETY: the range is the one that `map` mapped, and nobody can hold a pointer into it that is still valid:
        // `start` documents that it ends with the mapping.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok(), "unmapping one's own mapping cannot fail");
    }
}
