//! Fingerprints against their definition, on every engine, at every length around the borders of rows and batches, and
//! what they must see.

use proptest::prelude::*;
use storaged_codec::{Fingerprint, engines, fingerprint, fingerprint_by, leaf_digest};

use crate::{blocks_of, cauchy, noise, stripe_of};

/// The product of two elements, by shift and reduce.
fn mul(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b > 0 {
        product ^= if b & 1 == 1 { a } else { 0 };
        a = (a << 1) ^ if a & 0x80 > 0 { 0x1D } else { 0 };
        b >>= 1;
    }
    product
}

fn sequence(number: u8, length: usize) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new_derive_key("storaged 2026-11 fingerprint");
    hasher.update(&[number]);
    let mut bytes = vec![0; length];
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// docs/FORMATS.md, word by word.
fn defined(block: &[u8]) -> [u8; 16] {
    let mut out = [0; 16];
    for t in 0..4u8 {
        let by_row = sequence(t, block.len().div_ceil(1024));
        let rest = sequence(4, 4 * 16 + 16 * 64);
        let mut sum = [0; 1024];
        for (at, byte) in block.iter().enumerate() {
            sum[at % 1024] ^= mul(by_row[at / 1024], *byte);
        }
        for u in 0..4 {
            let by_piece = &rest[u * 16..][..16];
            let by_byte = &rest[64 + (usize::from(t) * 4 + u) * 64..][..64];
            for (at, byte) in sum.iter().enumerate() {
                let c = mul(by_piece[at / 64], by_byte[at % 64]);
                out[usize::from(t) * 4 + u] ^= mul(c, *byte);
            }
        }
    }
    out
}

#[test]
fn every_engine_gives_what_is_defined_at_every_length() {
    let short = (0..130).chain([1023, 1024, 1025, 2047, 2048, 4096]);
    let long = [65_535, 65_536, 65_537, 66_559, 66_560, 200_003];
    for length in short.chain(long) {
        let block = noise(length as u64 + 1, length);
        let expected = defined(&block);
        for engine in engines() {
            let got = fingerprint_by(engine, &block);
            let name = engine.name();
            assert_eq!(*got.as_bytes(), expected, "{length} bytes by {name}");
        }
    }
}

#[test]
fn a_block_longer_than_any_chunk_has_one_too() {
    let block = noise(3, (4 << 20) + 70_001);
    assert_eq!(*fingerprint(&block).as_bytes(), defined(&block));
}

#[test]
fn fingerprints_are_as_committed() {
    let of = |length: usize| format!("{:?}", fingerprint(&noise(1, length)));
    let golden = include_str!("../../golden/fingerprints.txt");
    for line in golden.lines() {
        let (length, expected) = line.split_once(' ').expect("a length and a fingerprint");
        let length = length.parse().expect("a length");
        assert_eq!(of(length), expected, "{length} bytes");
    }
    assert_eq!(golden.lines().count(), 6);
}

#[test]
fn parity_has_the_combination_of_the_datas_fingerprints() {
    for engine in engines() {
        for (k, m) in [(1, 1), (4, 2), (8, 4), (32, 2), (200, 55)] {
            let matrix = cauchy(k, m);
            let stripe = stripe_of(engine, &matrix, 7, 3000);
            let prints: Vec<Fingerprint> = stripe.iter().map(|b| fingerprint(b)).collect();
            for (j, print) in prints[k..].iter().enumerate() {
                let mut expected = Fingerprint::ZERO;
                let terms = matrix.parity_row(j).iter().zip(&prints);
                terms.for_each(|(c, print)| expected.fold(*c, print));
                assert_eq!(*print, expected, "parity {j} of ({k}, {m})");
            }
        }
    }
}

#[test]
fn zeros_at_the_end_do_not_count() {
    for length in [0, 1, 63, 1024, 5000, 65_536] {
        let mut block = noise(9, length);
        let print = fingerprint(&block);
        block.resize(length + 3333, 0);
        assert_eq!(fingerprint(&block), print);
    }
    assert_eq!(fingerprint(&[]), Fingerprint::ZERO);
    assert_eq!(fingerprint(&[0; 4096]), Fingerprint::ZERO);
}

/// Fixed patterns: with coefficients that are fixed too, what is seen once is always seen.
#[test]
fn typical_damage_is_seen() {
    let block = noise(2, 65_536);
    let print = fingerprint(&block);
    let seen = |what: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut damaged = block.clone();
        change(&mut damaged);
        assert_ne!(damaged, block, "{what}");
        assert_ne!(fingerprint(&damaged), print, "{what}");
    };
    for bit in 0..8 {
        seen("a bit", &|block| block[40_000 + bit] ^= 1 << bit);
    }
    for size in [1, 8, 64, 512, 1024, 1500, 4096, 32_768] {
        seen("zeros", &|block| block[1024..1024 + size].fill(0));
        seen("the same bit all over", &|block| {
            block[2048..2048 + size]
                .iter_mut()
                .for_each(|byte| *byte ^= 1)
        });
        seen("swapped", &|block| {
            let (left, right) = block.split_at_mut(32_768);
            left[..size].swap_with_slice(&mut right[..size]);
        });
    }
    seen("moved by a byte", &|block| block.rotate_left(1));
    seen("moved by a row", &|block| block.rotate_left(1024));
    seen("moved by a piece", &|block| block.rotate_left(64));
    seen("cut", &|block| block.truncate(60_000));
    for column in 0..1024 {
        seen("a column", &|block| {
            (0..64).for_each(|row| block[row * 1024 + column] ^= 0x80);
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn it_is_linear(length in 0usize..9000, cut in 0usize..9000, a: u8, b: u8, seed in 0u64..1 << 40) {
        let blocks = blocks_of(seed, 2, length);
        let (x, y) = (&blocks[0], &blocks[1][..cut.min(length)]);
        for engine in engines() {
            let mut sum = vec![0; length];
            engine.fold(&mut [&mut sum], &[a], x);
            engine.fold(&mut [&mut sum[..y.len()]], &[b], y);
            let mut expected = Fingerprint::ZERO;
            expected.fold(a, &fingerprint_by(engine, x));
            expected.fold(b, &fingerprint_by(engine, y));
            prop_assert_eq!(fingerprint_by(engine, &sum), expected);
        }
    }

    #[test]
    fn random_damage_is_seen(length in 1usize..70_000, at in 0usize..70_000, many in 1usize..200, seed in 0u64..1 << 40) {
        let block = noise(seed, length);
        let mut damaged = block.clone();
        let start = at % length;
        let end = length.min(start + many);
        let junk = noise(seed + 1, end - start);
        damaged[start..end].iter_mut().zip(junk).for_each(|(byte, junk)| *byte ^= junk | 1);
        prop_assert_ne!(fingerprint(&damaged), fingerprint(&block));
    }
}

/// `cargo test -p storaged-codec --test code -- --ignored --nocapture fingerprint_rate`
#[test]
#[ignore = "a measurement"]
fn the_fingerprint_rate() {
    for size in [4096, 65_536, 1 << 20] {
        let block = noise(1, size);
        let rounds = (64 << 20) / size;
        let rate = |work: &dyn Fn(&[u8])| {
            let began = std::time::Instant::now();
            (0..rounds).for_each(|_| work(std::hint::black_box(&block)));
            (rounds * size) as f64 / began.elapsed().as_secs_f64() / 1e9
        };
        // In turns, so that both have the same quiet and busy times.
        let (mut prints, mut leaves) = (0f64, 0f64);
        for _ in 0..40 {
            prints = prints.max(rate(&|block| {
                std::hint::black_box(fingerprint(block));
            }));
            leaves = leaves.max(rate(&|block| {
                std::hint::black_box(leaf_digest(block, 0));
            }));
        }
        let share = (1.0 / prints) / (1.0 / prints + 1.0 / leaves);
        println!(
            "{size} bytes: {prints:.1} GB/s, digest {leaves:.1} GB/s, share of both {share:.3}"
        );
    }
}
