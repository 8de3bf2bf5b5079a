//! Blocks of memory for partial sums, used again and again: a fresh block costs page faults and zeroing, which at a
//! megabyte a block is dearer than the arithmetic on it.
//!
//! Every lent block is counted and comes back by being dropped, wherever that happens: in a queue of a session that
//! ended, on a thread of the pool, or in the transport once the peer has acknowledged the bytes.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam::queue::ArrayQueue;

/// Blocks kept for later, at most.
const IDLE_BLOCKS_MAX: usize = 64;
/// And their bytes together, at most: what the daemon holds beyond its budget when no session runs.
const IDLE_BYTES_MAX: usize = 32 << 20;

/// The blocks of one daemon.
#[derive(Debug)]
pub(super) struct BufferPool {
    idle: ArrayQueue<Vec<u8>>,
    idle_bytes: AtomicUsize,
    lent: AtomicUsize,
    lent_most: AtomicUsize,
}

/// A lent block. What is in it at first means nothing.
#[derive(Debug)]
pub(super) struct Block {
    memory: Vec<u8>,
    bytes: usize,
    home: Arc<BufferPool>,
}

impl BufferPool {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            idle: ArrayQueue::new(IDLE_BLOCKS_MAX),
            idle_bytes: AtomicUsize::new(0),
            lent: AtomicUsize::new(0),
            lent_most: AtomicUsize::new(0),
        })
    }

    /// A block of this size with anything in it.
    pub fn lend(self: &Arc<Self>, bytes: usize) -> Block {
        let mut memory = self.idle.pop().unwrap_or_default();
        self.idle_bytes.fetch_sub(memory.len(), Ordering::Relaxed);
        if memory.len() < bytes {
            // Not `resize`, which would copy what is in it.
            memory = vec![0; bytes];
        }
        let lent = self.lent.fetch_add(1, Ordering::Relaxed) + 1;
        self.lent_most.fetch_max(lent, Ordering::Relaxed);
        Block {
            memory,
            bytes,
            home: self.clone(),
        }
    }

    /// A block of zeros.
    pub fn lend_zeros(self: &Arc<Self>, bytes: usize) -> Block {
        let mut block = self.lend(bytes);
        block.fill(0);
        block
    }

    /// Blocks lent now.
    pub fn lent(&self) -> usize {
        self.lent.load(Ordering::Relaxed)
    }

    /// Most blocks that were lent at once.
    pub fn lent_most(&self) -> usize {
        self.lent_most.load(Ordering::Relaxed)
    }

    fn take_back(&self, memory: Vec<u8>) {
        self.lent.fetch_sub(1, Ordering::Relaxed);
        let bytes = memory.len();
        let idle = self.idle_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if idle > IDLE_BYTES_MAX || self.idle.push(memory).is_err() {
            self.idle_bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.home.take_back(std::mem::take(&mut self.memory));
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.bytes]
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.bytes]
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_comes_back_and_is_used_again() {
        let buffers = BufferPool::new();
        let mut block = buffers.lend(100);
        block.fill(7);
        let at = block.as_ptr();
        assert_eq!((block.len(), buffers.lent()), (100, 1));
        drop(block);
        let again = buffers.lend_zeros(60);
        assert_eq!((again.as_ptr(), again.len(), buffers.lent()), (at, 60, 1));
        assert!(again.iter().all(|byte| *byte == 0));
        drop(again);
        assert_eq!((buffers.lent(), buffers.lent_most()), (0, 1));
    }

    #[test]
    fn idle_memory_is_bounded() {
        let buffers = BufferPool::new();
        let many: Vec<Block> = (0..20).map(|_| buffers.lend(4 << 20)).collect();
        drop(many);
        assert!(buffers.idle_bytes.load(Ordering::Relaxed) <= IDLE_BYTES_MAX);
        assert_eq!(buffers.idle.len(), IDLE_BYTES_MAX / (4 << 20));
    }
}
