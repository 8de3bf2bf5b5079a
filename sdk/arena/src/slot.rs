//! A slot: a memfd whose size is sealed.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use thiserror::Error;

use crate::positioned;
use crate::view::ReadView;

/// Unit of `st_blocks`, whatever the file system's own is.
const BLOCK_BYTES: u64 = 512;

/// A descriptor that is no slot, or bytes outside of it.
#[derive(Debug, Error)]
pub enum SlotError {
    /// The kernel refused.
    #[error("{what} failed")]
    Os {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    /// The size could still change, which would kill a reader with SIGBUS.
    #[error("expected a memfd sealed against growing and shrinking, got one without these seals")]
    Unsealed,
    /// Outside the slot.
    #[error("expected bytes within the slot's {capacity}, got {length} at {offset}")]
    Outside {
        capacity: u64,
        offset: u64,
        length: u64,
    },
    /// The file ended before its size.
    #[error("expected {expected} bytes at {offset}, got {got}")]
    Short {
        offset: u64,
        expected: usize,
        got: usize,
    },
}

fn os(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> SlotError {
    move |errno| SlotError::Os {
        what,
        source: errno.into(),
    }
}

/// A slot's descriptor, and what happens to the memory behind it at its end.
#[derive(Debug)]
struct SlotFile {
    fd: OwnedFd,
    capacity: u64,
    given_back: AtomicBool,
}

impl Drop for SlotFile {
    fn drop(&mut self) {
        if *self.given_back.get_mut() && self.capacity > 0 {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // No kernel refuses it to who may write; if one did, the memory would stay until the last descriptor is closed.
            let _ = rustix::fs::fallocate(&self.fd, punch, 0, self.capacity);
        }
    }
}

/// A memfd of fixed size.
#[derive(Debug)]
pub struct Slot {
    file: SlotFile,
    view: Option<ReadView>,
}

impl Slot {
    fn new(fd: OwnedFd, capacity: u64) -> Self {
        let file = SlotFile {
            fd,
            capacity,
            given_back: AtomicBool::new(false),
        };
        Self { file, view: None }
    }

    /// Its memory is free once this is dropped, whoever else has it mapped or keeps a descriptor: they find zeros, and what they write there is
    /// charged to them. Without this it stays until the last of them lets go.
    pub fn give_back_when_dropped(&self) {
        self.file.given_back.store(true, Ordering::Relaxed);
    }

    /// Has it read from a mapping from now on, where this process survives that a page fails ([`crate::survive_memory_faults`]), can map
    /// it, and does not have too much mapped. For whoever reads it again and again.
    #[must_use]
    pub fn viewed(self) -> Self {
        let view = ReadView::new(self.as_fd(), self.capacity());
        Self { view, ..self }
    }

    /// Makes a slot of `capacity` bytes, all of them allocated now, so that no write can fail later.
    ///
    /// # Errors
    /// [`SlotError::Os`] if there is no memory or no descriptor.
    pub fn create(capacity: u64) -> Result<Self, SlotError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("storaged-slot", flags).map_err(os("memfd_create"))?;
        // Whoever has a descriptor that only reads could open it for writing by /proc otherwise.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(os("fchmod"))?;
        rustix::fs::ftruncate(&fd, capacity).map_err(os("ftruncate"))?;
        if capacity > 0 {
            rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, capacity)
                .map_err(os("fallocate"))?;
        }
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(os("sealing"))?;
        Ok(Self::new(fd, capacity))
    }

    /// Takes a descriptor that came from elsewhere, if it is a slot.
    ///
    /// # Errors
    /// [`SlotError::Unsealed`] if its size could change, [`SlotError::Os`] if it cannot be asked.
    pub fn adopt(fd: OwnedFd) -> Result<Self, SlotError> {
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|_| SlotError::Unsealed)?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(SlotError::Unsealed);
        }
        let stat = rustix::fs::fstat(&fd).map_err(os("fstat"))?;
        let capacity = u64::try_from(stat.st_size).unwrap_or(0);
        Ok(Self::new(fd, capacity))
    }

    /// Another descriptor of the same memory.
    ///
    /// # Errors
    /// [`SlotError::Os`] if there is no descriptor left.
    pub fn try_clone(&self) -> Result<Self, SlotError> {
        let fd = rustix::io::fcntl_dupfd_cloexec(&self.file.fd, 0).map_err(os("dup"))?;
        Ok(Self::new(fd, self.capacity()))
    }

    /// A descriptor of the same memory that only reads.
    ///
    /// # Errors
    /// [`SlotError::Os`] if there is no descriptor left, or no /proc.
    pub fn read_only(&self) -> Result<OwnedFd, SlotError> {
        let path = format!("/proc/self/fd/{}", self.file.fd.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).map_err(os("opening a slot for reading"))
    }

    /// Takes memory again that somebody gave back by punching holes, and says how much that was. Memory of a slot is there from the start, so that no
    /// write into it can fail later; a seal against holes does not exist.
    ///
    /// # Errors
    /// [`SlotError::Os`] if there is no memory left.
    pub fn fill_holes(&self) -> Result<u64, SlotError> {
        let missing = self.missing()?;
        if missing > 0 {
            rustix::fs::fallocate(self, FallocateFlags::empty(), 0, self.capacity())
                .map_err(os("fallocate"))?;
        }
        Ok(missing)
    }

    /// Bytes that have no memory.
    fn missing(&self) -> Result<u64, SlotError> {
        let stat = rustix::fs::fstat(self).map_err(os("fstat"))?;
        let there = u64::try_from(stat.st_blocks).unwrap_or(0) * BLOCK_BYTES;
        Ok(self.capacity().saturating_sub(there))
    }

    /// Bytes.
    pub fn capacity(&self) -> u64 {
        self.file.capacity
    }

    /// Copies bytes out into private memory.
    ///
    /// # Errors
    /// [`SlotError`] if the range is outside or the kernel refuses.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), SlotError> {
        self.check(offset, out.len())?;
        let view = self.view.as_ref();
        if view.is_some_and(|view| view.is_copied(offset, out)) {
            return Ok(());
        }
        let expected = out.len();
        let got = positioned::read_at(self.as_fd(), offset, out).map_err(os("pread"))?;
        if got < expected {
            return Err(SlotError::Short {
                offset,
                expected,
                got,
            });
        }
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`SlotError`] if the range is outside or the kernel refuses.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), SlotError> {
        self.check(offset, bytes.len())?;
        positioned::write_at(self.as_fd(), offset, bytes).map_err(os("pwrite"))
    }

    fn check(&self, offset: u64, length: usize) -> Result<(), SlotError> {
        check_within(self.capacity(), offset, length as u64)
    }
}

/// Whether bytes lie in so many.
pub(crate) fn check_within(capacity: u64, offset: u64, length: u64) -> Result<(), SlotError> {
    match offset.checked_add(length) {
        Some(end) if end <= capacity => Ok(()),
        _ => Err(SlotError::Outside {
            capacity,
            offset,
            length,
        }),
    }
}

impl AsFd for Slot {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_and_the_edges_hold() {
        let slot = Slot::create(8192).unwrap();
        slot.write_at(8190, b"ab").unwrap();
        let mut out = [0; 2];
        slot.read_at(8190, &mut out).unwrap();
        assert_eq!(&out, b"ab");
        assert!(matches!(
            slot.write_at(8191, b"ab"),
            Err(SlotError::Outside { .. })
        ));
        assert!(matches!(
            slot.read_at(u64::MAX, &mut out),
            Err(SlotError::Outside { .. })
        ));
    }

    #[test]
    fn a_slot_cannot_shrink_and_a_plain_memfd_is_no_slot() {
        let slot = Slot::create(4096).unwrap();
        assert!(rustix::fs::ftruncate(&slot, 0).is_err());
        let plain = rustix::fs::memfd_create("plain", MemfdFlags::CLOEXEC).unwrap();
        assert!(matches!(Slot::adopt(plain), Err(SlotError::Unsealed)));
        let file = tempfile_fd();
        assert!(matches!(Slot::adopt(file), Err(SlotError::Unsealed)));
    }

    #[test]
    fn holes_are_seen_and_filled() {
        let slot = Slot::create(1 << 20).unwrap();
        slot.write_at(0, b"before").unwrap();
        assert_eq!(slot.fill_holes().unwrap(), 0);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&slot, punch, 4096, 128 << 10).unwrap();
        assert_eq!(slot.fill_holes().unwrap(), 128 << 10);
        assert_eq!(slot.fill_holes().unwrap(), 0);
        let mut out = [0; 6];
        slot.read_at(0, &mut out).unwrap();
        assert_eq!(&out, b"before");
    }

    #[test]
    fn memory_is_given_back_though_another_descriptor_is_kept_if_so_told() {
        let there = |slot: &Slot| slot.capacity() - slot.missing().unwrap();
        for told in [false, true] {
            let slot = Slot::create(1 << 20).unwrap().viewed();
            let kept = slot.try_clone().unwrap();
            slot.write_at(0, b"before").unwrap();
            if told {
                slot.give_back_when_dropped();
            }
            assert_eq!(there(&kept), 1 << 20);
            drop(slot);
            assert_eq!(there(&kept), if told { 0 } else { 1 << 20 });
        }
    }

    #[test]
    fn a_view_sees_what_is_written_and_its_edges_hold() {
        crate::survive_memory_faults().unwrap();
        let slot = Slot::create(8192).unwrap().viewed();
        assert!(slot.view.is_some() && Slot::create(0).unwrap().viewed().view.is_none());
        slot.write_at(8190, b"ab").unwrap();
        let mut out = [0; 2];
        slot.read_at(8190, &mut out).unwrap();
        assert_eq!(&out, b"ab");
        for outside in [8191, u64::MAX] {
            let read = slot.read_at(outside, &mut out);
            assert!(matches!(read, Err(SlotError::Outside { .. })));
        }
    }

    /// Memory that failed is like the end of a file here, which a sealed one cannot have.
    #[test]
    fn a_page_that_fails_under_a_view_is_an_error_and_the_others_are_read() {
        crate::survive_memory_faults().unwrap();
        let fd = rustix::fs::memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 1 << 20).unwrap();
        let slot = Slot::new(fd, 1 << 20).viewed();
        slot.write_at(0, &[1; 1 << 20]).unwrap();
        let read = |from: u64| {
            let mut out = [0; 8192];
            slot.read_at(from, &mut out).map(|()| out)
        };
        assert_eq!(read(4096).unwrap(), [1; 8192]);
        rustix::fs::ftruncate(&slot, 512 << 10).unwrap();
        for _ in 0..2 {
            assert!(matches!(read(520 << 10), Err(SlotError::Short { .. })));
            assert!(matches!(
                read(508 << 10),
                Err(SlotError::Short { got: 4096, .. })
            ));
            assert_eq!(read(4096).unwrap(), [1; 8192]);
        }
    }

    fn tempfile_fd() -> OwnedFd {
        let flags = rustix::fs::OFlags::TMPFILE | rustix::fs::OFlags::RDWR;
        rustix::fs::open("/tmp", flags, rustix::fs::Mode::RWXU).unwrap()
    }
}
