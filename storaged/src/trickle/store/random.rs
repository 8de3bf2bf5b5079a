//! Randomness behind a seam, so that a simulated run replays exactly.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

use rand::RngCore;

/// A source of random numbers: jitter of retries, names of temporary files.
pub trait Randomness: Send + Sync + Debug {
    fn next_u64(&self) -> u64;

    /// A number below `limit`, or 0 if `limit` is 0. Its bias is far below what jitter notices.
    fn below(&self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }
}

/// The operating system's randomness.
#[derive(Debug, Default)]
pub struct SystemRandomness;

impl Randomness for SystemRandomness {
    fn next_u64(&self) -> u64 {
        rand::rng().next_u64()
    }
}

/// A sequence that depends on its seed alone (SplitMix64; Steele, Lea, Flood 2014).
#[derive(Debug)]
pub struct SeededRandomness(AtomicU64);

impl SeededRandomness {
    pub fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }
}

impl Randomness for SeededRandomness {
    fn next_u64(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let state = self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
