//! Memory of parity chunks that are dropped, for those that come next. Every step drops a set as large as the one it
//! makes; memory fresh from the system would cost the codec's threads a page fault for every 4 KiB of it.
//!
//! A set has chunks of two sizes, whole ones and the last; each size is kept for itself, or a small one on top would hide
//! the large ones, and each step would add to what is kept until the budget is full of it.
//!
//! Spare memory is what the budget has free, never more: what is reserved takes it away.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Spare memory that nobody took for so long goes back to the system: the job has ended, or saves hardly ever, or its
/// shards have another size now.
const KEPT_FOR: Duration = Duration::from_secs(600);

/// Memory larger than so many times what is wanted is left for whoever wants that much.
const WASTE_MAX: usize = 2;

/// The spare memory of one daemon.
#[derive(Debug)]
pub(crate) struct Recycler {
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    /// By capacity; of each, the last one given is taken first.
    blocks: BTreeMap<usize, Vec<SpareBlock>>,
    bytes: u64,
    bytes_max: u64,
}

#[derive(Debug)]
struct SpareBlock {
    memory: Vec<u8>,
    given_at: Instant,
}

impl Recycler {
    /// None, and room for none.
    pub fn new() -> Self {
        Self {
            kept: Mutex::new(Kept {
                blocks: BTreeMap::new(),
                bytes: 0,
                bytes_max: 0,
            }),
        }
    }

    /// Memory for so many bytes, with nothing in it.
    pub fn take(&self, bytes: usize) -> Vec<u8> {
        let kept = self.locked().take(bytes);
        kept.unwrap_or_else(|| Vec::with_capacity(bytes))
    }

    /// Takes memory back, if there is room for it.
    pub fn give(&self, mut memory: Vec<u8>) {
        let mut kept = self.locked();
        let capacity = memory.capacity();
        let bytes = kept.bytes + capacity as u64;
        if bytes <= kept.bytes_max && capacity > 0 {
            memory.clear();
            let given_at = Instant::now();
            let block = SpareBlock { memory, given_at };
            kept.blocks.entry(capacity).or_default().push(block);
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
        let over = self.locked().idle(now);
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
    /// The smallest that suffices.
    fn take(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let fits = bytes..=bytes.saturating_mul(WASTE_MAX);
        let capacity = *self.blocks.range(fits).next()?.0;
        self.take_of(capacity)
    }

    fn take_of(&mut self, capacity: usize) -> Option<Vec<u8>> {
        let blocks = self.blocks.get_mut(&capacity)?;
        let block = blocks.pop()?;
        if blocks.is_empty() {
            self.blocks.remove(&capacity);
        }
        self.bytes -= capacity as u64;
        Some(block.memory)
    }

    fn shrink_to(&mut self, bytes: u64) -> Vec<Vec<u8>> {
        let mut over = Vec::new();
        while self.bytes > bytes
            && let Some(largest) = self.blocks.keys().next_back().copied()
        {
            over.extend(self.take_of(largest));
        }
        over
    }

    fn idle(&mut self, now: Instant) -> Vec<SpareBlock> {
        let is_idle =
            |block: &mut SpareBlock| now.saturating_duration_since(block.given_at) > KEPT_FOR;
        let mut idle = Vec::new();
        for blocks in self.blocks.values_mut() {
            idle.extend(blocks.extract_if(.., is_idle));
        }
        self.blocks.retain(|_, blocks| !blocks.is_empty());
        let bytes = idle.iter().map(|block| block.memory.capacity() as u64);
        self.bytes -= bytes.sum::<u64>();
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_and_is_used_again() {
        let spare = Recycler::new();
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
    fn of_sets_with_a_short_last_chunk_no_more_is_kept_than_one() {
        let spare = Recycler::new();
        spare.at_most(1 << 30);
        for _ in 0..100 {
            let set = [262_144, 262_144, 12_297].map(|bytes| spare.take(bytes));
            set.into_iter().for_each(|memory| spare.give(memory));
        }
        let set = 2 * 262_144 + 12_297;
        assert!(spare.bytes() <= set + 4096, "{}", spare.bytes());
    }

    #[test]
    fn sizes_that_nobody_wants_any_more_go() {
        let spare = Recycler::new();
        spare.at_most(1 << 30);
        spare.give(Vec::with_capacity(1000));
        assert!(spare.take(100).capacity() < 1000, "not for so little");
        spare.rest(Instant::now() + 2 * KEPT_FOR);
        assert_eq!(spare.bytes(), 0);
    }

    #[test]
    fn no_more_is_held_than_there_is_room_for() {
        let spare = Recycler::new();
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
