//! The erasure code by its public face: progressive decode, what must hold for every engine, geometry
//! and length, and what must never change.

#[path = "../support/blocks.rs"]
mod blocks;
mod fingerprint;
mod golden;
#[path = "../support/noise.rs"]
mod noise;
mod progressive;
mod properties;

use blocks::{blocks_of, views, views_mut};
use noise::noise;
use storaged_codec::{CodingMatrix, Engine, Geometry};

fn cauchy(k: usize, m: usize) -> CodingMatrix {
    CodingMatrix::cauchy(Geometry::new(k, m).expect("the test asks for a valid geometry"))
}

fn vandermonde(k: usize, m: usize) -> CodingMatrix {
    let geometry = Geometry::new(k, m).expect("the test asks for a valid geometry");
    CodingMatrix::vandermonde_rse(geometry).expect("it always exists")
}

fn parity(engine: &dyn Engine, matrix: &CodingMatrix, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut parity = vec![vec![0xA5; data[0].len()]; matrix.geometry().m()];
    engine.encode(matrix, &views(data), &mut views_mut(&mut parity));
    parity
}

/// Data blocks and their parity.
fn stripe_of(engine: &dyn Engine, matrix: &CodingMatrix, seed: u64, length: usize) -> Vec<Vec<u8>> {
    let mut stripe = blocks_of(seed, matrix.geometry().k(), length);
    stripe.extend(parity(engine, matrix, &stripe));
    stripe
}

/// All subsets of `0..n` of this size, as sorted lists.
fn subsets(n: usize, size: usize) -> Vec<Vec<usize>> {
    (0u32..1 << n)
        .filter(|bits| bits.count_ones() as usize == size)
        .map(|bits| (0..n).filter(|i| bits >> i & 1 == 1).collect())
        .collect()
}

/// Every geometry of at most ten blocks.
fn small_geometries() -> impl Iterator<Item = (usize, usize)> {
    (2..=10).flat_map(|n| (1..n).map(move |k| (k, n - k)))
}
