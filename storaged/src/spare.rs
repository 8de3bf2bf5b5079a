//! Memory of parity chunks that are dropped, for those that come next. Every step drops a set as large as the one it
//! makes; memory fresh from the system would cost the codec's threads a page fault for every 4 KiB of it.
//!
//! Spare memory is what the budget has free, never more: what is reserved takes it away.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Spare memory that nobody took for so long goes back to the system: the job has ended, or saves hardly ever.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// The spare memory of one daemon.
#[derive(Debug)]
pub(crate) struct Spare {
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    blocks: Vec<Vec<u8>>,
    bytes: u64,
    bytes_max: u64,
    used_at: Instant,
}

impl Spare {
    /// None, and room for none.
    pub fn new() -> Self {
        Self {
            kept: Mutex::new(Kept {
                blocks: Vec::new(),
                bytes: 0,
                bytes_max: 0,
                used_at: Instant::now(),
            }),
        }
    }

    /// Memory for so many bytes, with nothing in it.
    pub fn take(&self, bytes: usize) -> Vec<u8> {
        let mut kept = self.locked();
        kept.used_at = Instant::now();
        match kept.blocks.pop_if(|block| block.capacity() >= bytes) {
            Some(block) => {
                kept.bytes -= block.capacity() as u64;
                block
            }
            None => Vec::with_capacity(bytes),
        }
    }

    /// Takes memory back, if there is room for it.
    pub fn give(&self, mut memory: Vec<u8>) {
        let mut kept = self.locked();
        let bytes = kept.bytes + memory.capacity() as u64;
        if bytes <= kept.bytes_max && memory.capacity() > 0 {
            memory.clear();
            kept.blocks.push(memory);
            kept.bytes = bytes;
        }
    }

    /// Holds so many bytes at most from now on.
    pub fn at_most(&self, bytes: u64) {
        let mut kept = self.locked();
        kept.bytes_max = bytes;
        let over = kept.shrink_to(bytes);
        drop(kept);
        // Giving memory back to the system takes its time: not under the lock.
        drop(over);
    }

    /// Gives back what nobody took for a long time.
    pub fn rest(&self, now: Instant) {
        let mut kept = self.locked();
        let idle = now.saturating_duration_since(kept.used_at) > KEPT_FOR;
        let over = if idle { kept.shrink_to(0) } else { Vec::new() };
        drop(kept);
        drop(over);
    }

    /// Bytes held now.
    pub fn bytes(&self) -> u64 {
        self.locked().bytes
    }

    fn locked(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn shrink_to(&mut self, bytes: u64) -> Vec<Vec<u8>> {
        let mut left = self.blocks.len();
        while self.bytes > bytes && left > 0 {
            left -= 1;
            self.bytes -= self.blocks[left].capacity() as u64;
        }
        self.blocks.split_off(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_and_is_used_again() {
        let spare = Spare::new();
        spare.at_most(1 << 20);
        let mut memory = spare.take(1000);
        memory.extend_from_slice(&[7; 1000]);
        let (at, bytes) = (memory.as_ptr(), memory.capacity() as u64);
        spare.give(memory);
        assert_eq!(spare.bytes(), bytes);
        let again = spare.take(900);
        assert_eq!((again.as_ptr(), again.len(), spare.bytes()), (at, 0, 0));
        spare.give(again);
        assert!(spare.take(5000).capacity() >= 5000);
    }

    #[test]
    fn no_more_is_held_than_there_is_room_for() {
        let spare = Spare::new();
        spare.give(Vec::with_capacity(100));
        assert_eq!(spare.bytes(), 0);
        spare.at_most(450);
        (0..6).for_each(|_| spare.give(Vec::with_capacity(100)));
        assert_eq!(spare.bytes(), 400);
        spare.at_most(250);
        assert_eq!(spare.bytes(), 200);
        spare.rest(Instant::now());
        assert_eq!(spare.bytes(), 200);
        spare.rest(Instant::now() + 2 * KEPT_FOR);
        assert_eq!(spare.bytes(), 0);
    }
}
