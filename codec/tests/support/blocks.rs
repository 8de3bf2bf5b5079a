//! Blocks for tests, and views of them as the engines take them.

use super::noise::noise;

pub fn blocks_of(seed: u64, count: usize, length: usize) -> Vec<Vec<u8>> {
    (0..count as u64)
        .map(|i| noise(seed * 1000 + i + 1, length))
        .collect()
}

pub fn views(blocks: &[Vec<u8>]) -> Vec<&[u8]> {
    blocks.iter().map(Vec::as_slice).collect()
}

pub fn views_mut(blocks: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    blocks.iter_mut().map(Vec::as_mut_slice).collect()
}
