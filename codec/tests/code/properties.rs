//! What must hold whatever the geometry, the lengths, the bytes and the engine.

use proptest::prelude::*;
use reed_solomon_erasure::galois_8::ReedSolomon;
use storaged_codec::{CodingMatrix, Engine, engines};

use crate::{blocks_of, cauchy, noise, parity, stripe_of, vandermonde, views, views_mut};

/// k and m within what the field allows, small ones more often.
fn geometry() -> impl Strategy<Value = (usize, usize)> {
    let small = (1usize..=10, 1usize..=6);
    let large = (1usize..=254).prop_flat_map(|k| (Just(k), 1..=255 - k));
    prop_oneof![3 => small, 1 => large]
}

/// One of the two matrices, by the seed.
fn either(k: usize, m: usize, seed: u64) -> CodingMatrix {
    if seed.is_multiple_of(2) {
        cauchy(k, m)
    } else {
        vandermonde(k, m)
    }
}

fn xored(engine: &dyn Engine, a: &[Vec<u8>], b: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut sums = a.to_vec();
    sums.iter_mut().zip(b).for_each(|(x, y)| engine.xor(x, y));
    sums
}

fn column(matrix: &CodingMatrix, data: usize) -> Vec<u8> {
    let rows = 0..matrix.geometry().m();
    rows.map(|j| matrix.coefficient(j, data)).collect()
}

/// As many different numbers below `n` as asked for, in increasing order, chosen by `seed`.
fn choose(n: usize, count: usize, seed: u64) -> Vec<usize> {
    let keys = noise(seed, 2 * n);
    let mut all: Vec<usize> = (0..n).collect();
    all.sort_by_key(|i| (keys[2 * i], keys[2 * i + 1]));
    all.truncate(count);
    all.sort_unstable();
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parity_is_linear((k, m) in geometry(), length in 1usize..200, factor: u8, seed in 1u64..1 << 30) {
        let matrix = either(k, m, seed);
        let (a, b) = (blocks_of(seed, k, length), blocks_of(seed + 1, k, length));
        for engine in engines() {
            let sum = parity(engine, &matrix, &xored(engine, &a, &b));
            let of_a = parity(engine, &matrix, &a);
            prop_assert_eq!(sum, xored(engine, &of_a, &parity(engine, &matrix, &b)));
            let scaled = |blocks: &[Vec<u8>]| -> Vec<Vec<u8>> {
                let mut out = vec![vec![0; length]; blocks.len()];
                for (x, y) in out.iter_mut().zip(blocks) {
                    engine.fold(&mut [x], &[factor], y);
                }
                out
            };
            prop_assert_eq!(parity(engine, &matrix, &scaled(&a)), scaled(&of_a));
        }
    }

    #[test]
    fn parity_follows_a_changed_block((k, m) in geometry(), length in 1usize..400, at in any::<prop::sample::Index>(), seed in 1u64..1 << 30) {
        let (matrix, changed) = (either(k, m, seed), at.index(k));
        let old = blocks_of(seed, k, length);
        let mut new = old.clone();
        new[changed] = noise(seed + 7, length);
        for engine in engines() {
            let mut followed = parity(engine, &matrix, &old);
            let mut difference = new[changed].clone();
            engine.xor(&mut difference, &old[changed]);
            engine.fold(&mut views_mut(&mut followed), &column(&matrix, changed), &difference);
            prop_assert_eq!(followed, parity(engine, &matrix, &new));
        }
    }

    #[test]
    fn the_order_of_hops_does_not_count((k, m) in geometry(), length in 1usize..200, seed in 1u64..1 << 30) {
        let matrix = either(k, m, seed);
        let data = blocks_of(seed, k, length);
        let keys = noise(seed + 3, k);
        let mut order: Vec<usize> = (0..k).collect();
        order.sort_by_key(|i| keys[*i]);
        for engine in engines() {
            let mut sums = vec![vec![0; length]; m];
            for i in &order {
                // What a hop does: its neighbour's sums come in, its own go out.
                let mut sent = vec![vec![0xEE; length]; m];
                engine.fold_from(&mut views_mut(&mut sent), &views(&sums), &column(&matrix, *i), &data[*i]);
                sums = sent;
            }
            prop_assert_eq!(sums, parity(engine, &matrix, &data));
        }
    }

    #[test]
    fn any_k_blocks_give_back_all((k, m) in geometry(), length in 1usize..100, seed in 1u64..1 << 30) {
        let n = k + m;
        let survivors = choose(n, k, seed);
        let wanted = choose(n, n.min(12), seed + 1);
        for matrix in [cauchy(k, m), vandermonde(k, m)] {
            let rows = matrix.repair_coefficients(&survivors, &wanted).expect("k survivors");
            for engine in engines() {
                let stripe = stripe_of(engine, &matrix, seed, length);
                let inputs: Vec<&[u8]> = survivors.iter().map(|block| &stripe[*block][..]).collect();
                let mut got = vec![vec![0xEE; length]; wanted.len()];
                engine.combine(&views(&rows), &inputs, &mut views_mut(&mut got));
                for (got, block) in got.iter().zip(&wanted) {
                    prop_assert_eq!(got, &stripe[*block]);
                }
            }
        }
    }

    #[test]
    fn the_peer_makes_and_repairs_the_same((k, m) in geometry(), length in 1usize..100, seed in 1u64..1 << 30) {
        let matrix = vandermonde(k, m);
        let peer = ReedSolomon::new(k, m).expect("the peer takes this geometry");
        for engine in engines() {
            let stripe = stripe_of(engine, &matrix, seed, length);
            prop_assert_eq!(peer.verify(&stripe), Ok(true));
            let lost = choose(k + m, m, seed);
            let left = |(i, block): (usize, &Vec<u8>)| (!lost.contains(&i)).then(|| block.clone());
            let mut holes: Vec<Option<Vec<u8>>> = stripe.iter().enumerate().map(left).collect();
            peer.reconstruct(&mut holes).expect("m blocks are lost");
            let mended: Vec<Vec<u8>> = holes.into_iter().flatten().collect();
            prop_assert_eq!(mended, stripe);
        }
    }
}
