//! What digests cost: the leaf digest of every chunk, beside the copy and the code that a save does anyway.

use std::hint::black_box;
use std::time::Instant;

use storaged_codec::{CodingMatrix, Geometry, engine, leaf_digest};

const BYTES: usize = 512 << 20;
const CHUNKS: [usize; 4] = [64 << 10, 256 << 10, 512 << 10, 1 << 20];

/// Rates of one core, GB/s of payload from RAM.
#[derive(serde::Serialize)]
pub struct Integrity {
    pub memcpy_gbps: f64,
    pub encode_8_2_gbps: f64,
    /// Chunk size in KiB, rate.
    pub leaf_digest_gbps: Vec<(usize, f64)>,
    /// Time of the digest over the time of copy, digest and code together, at 256 KiB.
    pub digest_share_of_save_path: f64,
}

pub fn measure(rounds: u32) -> Integrity {
    let data: Vec<u8> = (0..BYTES).map(|at| (at * 31 % 251) as u8).collect();
    let mut copy = vec![1; BYTES];
    let mut best = [f64::MAX; 6];
    let matrix = Geometry::new(8, 2).map(CodingMatrix::cauchy);
    for _ in 0..rounds.max(1) {
        keep(&mut best[0], || copy.copy_from_slice(black_box(&data)));
        if let Ok(matrix) = &matrix {
            keep(&mut best[1], || encode(matrix, &data, &mut copy));
        }
        for (at, chunk) in CHUNKS.into_iter().enumerate() {
            keep(&mut best[2 + at], || {
                for (index, block) in (0..).zip(data.chunks(chunk)) {
                    black_box(leaf_digest(block, index));
                }
            });
        }
    }
    let gbps = |seconds: f64| BYTES as f64 / seconds / 1e9;
    let digest = best[3];
    Integrity {
        memcpy_gbps: gbps(best[0]),
        encode_8_2_gbps: gbps(best[1]),
        leaf_digest_gbps: CHUNKS
            .into_iter()
            .zip(&best[2..])
            .map(|(chunk, seconds)| (chunk >> 10, gbps(*seconds)))
            .collect(),
        digest_share_of_save_path: digest / (best[0] + best[1] + digest),
    }
}

fn encode(matrix: &CodingMatrix, data: &[u8], out: &mut [u8]) {
    let block = 1 << 20;
    for (stripe, parity) in data
        .chunks_exact(8 * block)
        .zip(out.chunks_exact_mut(2 * block))
    {
        let blocks: Vec<&[u8]> = stripe.chunks_exact(block).collect();
        let mut parity: Vec<&mut [u8]> = parity.chunks_exact_mut(block).collect();
        engine().encode(matrix, &blocks, &mut parity);
    }
}

fn keep(best: &mut f64, work: impl FnOnce()) {
    let start = Instant::now();
    work();
    *best = best.min(start.elapsed().as_secs_f64());
}
