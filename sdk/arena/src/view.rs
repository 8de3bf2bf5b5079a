//! A daemon's view of a slot: a mapping from which it reads, and from which pages may go missing.
//!
//! A slot is used for step after step, so its page tables are filled once, and a copy out of a mapping then costs a quarter of the kernel's
//! (`make bench-floors`). A slot's size is sealed, and a hole that its trainer punches has memory again where it is read: what is left to fail is memory itself.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use crate::faults::Watched;
use crate::mapping::Mapping;

/// Slots of so many bytes are read from mappings. A daemon that is killed closes nothing before its mappings are gone, 10 to 190 ms for each
/// GiB, and the next one waits for that.
const VIEWED_BYTES_MAX: u64 = 8 << 30;

static VIEWED_BYTES: AtomicU64 = AtomicU64::new(0);

/// A part of these bytes, until this is dropped.
#[derive(Debug)]
struct ViewRoom(u64);

impl ViewRoom {
    fn take(bytes: u64) -> Option<Self> {
        let (set, fetch) = (Ordering::AcqRel, Ordering::Acquire);
        let more = |viewed: u64| {
            viewed
                .checked_add(bytes)
                .filter(|all| *all <= VIEWED_BYTES_MAX)
        };
        VIEWED_BYTES.fetch_update(set, fetch, more).ok()?;
        Some(Self(bytes))
    }
}

impl Drop for ViewRoom {
    fn drop(&mut self) {
        VIEWED_BYTES.fetch_sub(self.0, Ordering::AcqRel);
    }
}

#[derive(Debug)]
pub(crate) struct ReadView {
    // Not watched any more before it is unmapped: the addresses may be somebody else's from then on.
    watched: Watched,
    mapping: Mapping,
    _room: ViewRoom,
}

impl ReadView {
    /// None where a failing page would end this process ([`crate::survive_memory_faults`]), or there is no room for it.
    pub(crate) fn new(file: BorrowedFd<'_>, bytes: u64) -> Option<Self> {
        let room = ViewRoom::take(bytes)?;
        let mapping = Mapping::to_read(file, usize::try_from(bytes).ok()?).ok()?;
        let watched = Watched::new(mapping.start(), mapping.length())?;
        Some(Self {
            watched,
            mapping,
            _room: room,
        })
    }

    /// Copies bytes out, if all that were ever read here were the slot's own. Once a page has failed nothing is read here any more: the
    /// kernel says by an error which bytes it has not.
    pub(crate) fn is_copied(&self, offset: u64, out: &mut [u8]) -> bool {
        if self.watched.pages_lost() > 0 {
            return false;
        }
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let copied = self.mapping.copy_to(offset, out);
        // The handler counts on this thread, in the midst of the copy.
        compiler_fence(Ordering::SeqCst);
        copied.is_ok() && self.watched.pages_lost() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Views of other tests are there at the same time, some MiB of them.
    #[test]
    fn no_more_is_viewed_than_goes_in_a_moment() {
        let half = ViewRoom::take(VIEWED_BYTES_MAX / 2).unwrap();
        assert!(ViewRoom::take(VIEWED_BYTES_MAX / 2 + 1).is_none());
        assert!(ViewRoom::take(u64::MAX).is_none());
        drop(half);
        assert!(ViewRoom::take(VIEWED_BYTES_MAX / 2 + 1).is_some());
    }
}
