//! One suite for every engine, against `naive` as the definition. An engine that this processor cannot run is
//! skipped with a line that says so.

#[path = "../../tests/support/blocks.rs"]
mod blocks;
#[path = "../../tests/support/noise.rs"]
mod noise;

use blocks::{blocks_of, views, views_mut};
use noise::noise;
use proptest::prelude::*;
use reed_solomon_erasure::galois_8::ReedSolomon;

use super::*;
use crate::{Digest, Geometry, digest};

fn geometry(k: usize, m: usize) -> Geometry {
    Geometry::new(k, m).expect("the test asks for a valid geometry")
}

/// Both matrices that there are.
fn matrices(k: usize, m: usize) -> [CodingMatrix; 2] {
    let vandermonde = CodingMatrix::vandermonde_rse(geometry(k, m));
    [
        CodingMatrix::cauchy(geometry(k, m)),
        vandermonde.expect("it always exists"),
    ]
}

fn parity(engine: &dyn Engine, matrix: &CodingMatrix, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let length = data[0].len();
    let mut parity = vec![vec![0xA5; length]; matrix.geometry().m()];
    engine.encode(matrix, &views(data), &mut views_mut(&mut parity));
    parity
}

/// All subsets of `0..n` of this size, as sorted lists.
fn subsets(n: usize, size: usize) -> Vec<Vec<usize>> {
    (0u32..1 << n)
        .filter(|bits| bits.count_ones() as usize == size)
        .map(|bits| (0..n).filter(|i| bits >> i & 1 == 1).collect())
        .collect()
}

fn folds_like_naive(engine: &dyn Engine) {
    for length in 0..300 {
        let offset = length % 67;
        let data = noise(7, offset + length);
        for count in [1, 2, 3, 4, 5, 6, 7, 8, 9, 17] {
            let coefficients = noise(length as u64 + 3, count);
            let mut got = blocks_of(length as u64, count, length + 5);
            let mut want = got.clone();
            let cut = |blocks: &mut Vec<Vec<u8>>, engine: &dyn Engine| {
                let mut out: Vec<&mut [u8]> =
                    blocks.iter_mut().map(|block| &mut block[5..]).collect();
                engine.fold(&mut out, &coefficients, &data[offset..]);
            };
            cut(&mut got, engine);
            cut(&mut want, &Naive);
            assert!(got == want, "fold of {length} bytes into {count}");
        }
    }
}

fn folds_from_like_naive(engine: &dyn Engine) {
    for length in (0..300).chain([70_001]) {
        let offset = length % 67;
        let data = noise(7, offset + length);
        for count in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 17] {
            let coefficients = noise(length as u64 + 3, count);
            let sums = blocks_of(length as u64 + 500, count, length + 3);
            let input: Vec<&[u8]> = sums.iter().map(|block| &block[3..]).collect();
            let run = |engine: &dyn Engine| {
                let mut blocks = blocks_of(length as u64, count, length + 5);
                let cut = blocks.iter_mut().map(|block| &mut block[5..]);
                let mut out: Vec<&mut [u8]> = cut.collect();
                engine.fold_from(&mut out, &input, &coefficients, &data[offset..]);
                blocks
            };
            assert!(run(engine) == run(&Naive), "{length} bytes into {count}");
        }
    }
}

fn xors_like_naive(engine: &dyn Engine) {
    for length in 0..300 {
        for offset in [0, 1, 31, 63] {
            let data = noise(11, offset + length);
            let mut got = noise(12, length + 3);
            let mut want = got.clone();
            engine.xor(&mut got[3..], &data[offset..]);
            Naive.xor(&mut want[3..], &data[offset..]);
            assert!(got == want, "xor of {length} bytes at {offset}");
        }
    }
}

fn encodes_like_naive(engine: &dyn Engine) {
    for length in (0..300).chain([4096, 65_537]) {
        for (k, m) in [
            (1, 1),
            (3, 2),
            (4, 3),
            (5, 4),
            (2, 5),
            (3, 6),
            (2, 7),
            (4, 8),
            (3, 11),
        ] {
            let matrix = CodingMatrix::cauchy(geometry(k, m));
            let whole = blocks_of(length as u64, k, length + length % 5);
            let data: Vec<&[u8]> = whole.iter().map(|block| &block[length % 5..]).collect();
            let mut got = vec![vec![1; length + 1]; m];
            let mut want = got.clone();
            for (engine, out) in [(engine, &mut got), (&Naive as &dyn Engine, &mut want)] {
                let mut out: Vec<&mut [u8]> = out.iter_mut().map(|block| &mut block[1..]).collect();
                engine.encode(&matrix, &data, &mut out);
            }
            assert!(got == want, "encode of {length} bytes, {k}+{m}");
        }
    }
}

/// Data and outputs at every place within a cache line, each at another one, with bytes on both sides that must stay.
fn every_offset_is_like_naive(engine: &dyn Engine) {
    const ROOM: usize = 512;
    let coefficients = [0, 1, 0x8E];
    for offset in 0..64 {
        for length in [0, 1, 63, 64, 65, 128, 191, 299] {
            let data = noise(3, ROOM);
            let data = &data[offset..offset + length];
            let sums = blocks_of(4, 3, length);
            let run = |engine: &dyn Engine| {
                let (mut folded, mut passed) = (blocks_of(5, 3, ROOM), blocks_of(6, 3, ROOM));
                let (mut xored, mut made) = (noise(7, ROOM), blocks_of(8, 3, ROOM));
                let cut = |blocks: &mut [Vec<u8>], run: &mut dyn FnMut(&mut [&mut [u8]])| {
                    let places = blocks.iter_mut().enumerate();
                    let at = |j: usize| (offset * 5 + j * 21) % 64;
                    let mut out: Vec<&mut [u8]> = places
                        .map(|(j, block)| &mut block[at(j)..at(j) + length])
                        .collect();
                    run(&mut out);
                };
                cut(&mut folded, &mut |out| {
                    engine.fold(out, &coefficients, data)
                });
                cut(&mut passed, &mut |out| {
                    engine.fold_from(out, &views(&sums), &coefficients, data);
                });
                cut(&mut made, &mut |out| {
                    let rows: [&[u8]; 3] = [&[1, 2], &[0, 3], &[0xFF, 0]];
                    engine.combine(&rows, &[data, &sums[0]], out);
                });
                engine.xor(&mut xored[63 - offset..][..length], data);
                (folded, passed, xored, made)
            };
            assert!(run(engine) == run(&Naive), "{length} bytes at {offset}");
        }
    }
}

/// All operations at a few lengths and offsets around the widths of vectors: little enough for an interpreter that looks
/// at every access to memory (`make miri`).
fn a_few_lengths_are_like_naive(engine: &dyn Engine) {
    for length in [0, 1, 15, 17, 31, 33, 63, 64, 65, 129, 257] {
        for (count, offset) in [(1, 0), (2, 1), (3, 31), (4, 0), (8, 7), (9, 3)] {
            let data = noise(7, offset + length);
            let coefficients = noise(length as u64 + 3, count);
            let sums = blocks_of(2, count, length);
            let rows: Vec<Vec<u8>> = (0..count as u64).map(|j| noise(j + 9, 3)).collect();
            let run = |engine: &dyn Engine| {
                let mut blocks = blocks_of(1, count, length + offset);
                let cut = blocks.iter_mut().map(|block| &mut block[offset..]);
                let mut out: Vec<&mut [u8]> = cut.collect();
                engine.fold(&mut out, &coefficients, &data[offset..]);
                let folded: Vec<Vec<u8>> = out.iter().map(|block| block.to_vec()).collect();
                engine.fold_from(&mut out, &views(&sums), &coefficients, &data[offset..]);
                engine.xor(out[0], &data[..length]);
                let mut made = vec![vec![1; length]; count];
                let inputs = [&data[offset..], &sums[0], &folded[0]];
                engine.combine(&views(&rows), &inputs, &mut views_mut(&mut made));
                (blocks, folded, made)
            };
            assert!(run(engine) == run(&Naive), "{length} bytes into {count}");
        }
    }
}

fn uneven_lengths_do_as_naive_does(engine: &dyn Engine) {
    let matrix = CodingMatrix::cauchy(geometry(2, 2));
    let data = [noise(1, 200), noise(2, 130)];
    let run = |engine: &dyn Engine| {
        let mut out = [vec![9; 90], vec![9; 300]];
        engine.encode(&matrix, &views(&data), &mut views_mut(&mut out));
        engine.fold(&mut views_mut(&mut out), &[3, 5, 7], &data[0]);
        let (first, second) = out.split_at_mut(1);
        engine.xor(&mut first[0], &second[0]);
        engine.xor(&mut second[0], &first[0]);
        engine.combine(&[&[1]], &views(&data), &mut views_mut(&mut out));
        engine.combine(&[], &[], &mut views_mut(&mut out));
        engine.fold_from(&mut views_mut(&mut out), &views(&data), &[3, 5], &data[1]);
        engine.fold_from(&mut views_mut(&mut out), &views(&data), &[3], &data[0]);
        engine.fold_from(&mut views_mut(&mut out), &[&data[1]], &[3, 7], &data[0]);
        out
    };
    assert_eq!(run(engine), run(&Naive));
}

/// Large and aligned enough for stores past the cache, next to an output that is not.
fn large_blocks_like_portable(engine: &dyn Engine) {
    let length = (256 << 10) + 77;
    for (k, m) in [(4, 2), (3, 5), (2, 9)] {
        let matrix = CodingMatrix::cauchy(geometry(k, m));
        let data = blocks_of(5, k, length);
        let want = parity(&Portable, &matrix, &data);
        for shift in [0, 1] {
            let mut room = vec![vec![0x5A; length + 128]; m];
            let mut out: Vec<&mut [u8]> = room
                .iter_mut()
                .map(|block| {
                    let start = block.as_ptr().align_offset(64) + shift;
                    &mut block[start..start + length]
                })
                .collect();
            engine.encode(&matrix, &views(&data), &mut out);
            let same = out.iter().zip(&want).all(|(got, want)| **got == want[..]);
            assert!(same, "{k}+{m}, shifted by {shift}");
        }
    }
}

fn repairs(engine: &dyn Engine, matrix: &CodingMatrix, stripe: &[Vec<u8>], lost: &[usize]) {
    let (k, n) = (matrix.geometry().k(), matrix.geometry().n());
    let left = (0..n).filter(|block| !lost.contains(block));
    let survivors: Vec<usize> = left.take(k).collect();
    let rows = matrix
        .repair_coefficients(&survivors, lost)
        .expect("any k blocks determine the rest");
    let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
    let inputs: Vec<&[u8]> = survivors.iter().map(|block| &stripe[*block][..]).collect();
    let mut got = vec![vec![0xEE; stripe[0].len()]; lost.len()];
    engine.combine(&rows, &inputs, &mut views_mut(&mut got));
    let same = got
        .iter()
        .zip(lost)
        .all(|(got, block)| *got == stripe[*block]);
    assert!(same, "repair of {lost:?} from {survivors:?}");
}

fn every_small_loss_is_repaired(engine: &dyn Engine) {
    for n in 2..=10 {
        for k in 1..n {
            for matrix in matrices(k, n - k) {
                let mut stripe = blocks_of(n as u64, k, 133);
                stripe.extend(parity(engine, &matrix, &stripe));
                for count in 1..=n - k {
                    for lost in subsets(n, count) {
                        repairs(engine, &matrix, &stripe, &lost);
                    }
                }
            }
        }
    }
}

/// Random geometries and losses, and those at the field's limit.
fn large_geometries_are_repaired(engine: &dyn Engine) {
    let pick = noise(77, 64);
    let random = (0..6).map(|case| {
        let k = 1 + usize::from(pick[case]) % 240;
        (k, 1 + usize::from(pick[case + 10]) % (255 - k))
    });
    let limits = [(254, 1), (1, 254), (127, 128), (200, 55)];
    for (case, (k, m)) in limits.into_iter().chain(random).enumerate() {
        for matrix in matrices(k, m) {
            let mut stripe = blocks_of(case as u64, k, 70);
            stripe.extend(parity(engine, &matrix, &stripe));
            for count in [1, m.min(20)] {
                let keys = noise(case as u64 + 40, 255);
                let mut lost: Vec<usize> = (0..k + m).collect();
                lost.sort_by_key(|block| keys[*block]);
                lost.truncate(count);
                lost.sort_unstable();
                repairs(engine, &matrix, &stripe, &lost);
            }
        }
    }
}

fn the_vandermonde_matrix_is_that_of_the_peer(engine: &dyn Engine) {
    for (k, m) in [
        (1, 1),
        (2, 1),
        (4, 2),
        (5, 3),
        (8, 2),
        (8, 4),
        (16, 4),
        (32, 2),
        (100, 30),
        (200, 55),
    ] {
        let matrix = CodingMatrix::vandermonde_rse(geometry(k, m)).expect("it always exists");
        let data = blocks_of(k as u64, k, 97);
        let peer = ReedSolomon::new(k, m).expect("the peer takes this geometry");
        let mut want = data.clone();
        want.resize(k + m, vec![0; 97]);
        peer.encode(&mut want).expect("the peer encodes");
        assert!(parity(engine, &matrix, &data) == want[k..], "{k}+{m}");
    }
}

fn parity_is_as_committed(engine: &dyn Engine) {
    for (k, m, golden) in [
        (4, 2, include_str!("../../golden/parity-cauchy-4-2.digest")),
        (8, 2, include_str!("../../golden/parity-cauchy-8-2.digest")),
        (8, 4, include_str!("../../golden/parity-cauchy-8-4.digest")),
    ] {
        // The byte at `at` of block i is (i * 31 + at * 7 + at / 256) mod 256.
        let byte = |i: usize, at: usize| (i * 31 + at * 7 + at / 256) as u8;
        let block = |i| (0..10_000).map(|at| byte(i, at)).collect();
        let data: Vec<Vec<u8>> = (0..k).map(block).collect();
        let got = digest(&parity(engine, &CodingMatrix::cauchy(geometry(k, m)), &data).concat());
        let golden: Digest = golden.trim().parse().expect("the golden file is a digest");
        assert_eq!(got, golden, "{k}+{m}");
    }
}

fn is_linear(engine: &dyn Engine, k: usize, m: usize, length: usize, seed: u64) {
    let matrix = CodingMatrix::cauchy(geometry(k, m));
    let (old, new) = (blocks_of(seed, k, length), blocks_of(seed + 1, k, length));
    let xored = |a: &[Vec<u8>], b: &[Vec<u8>]| -> Vec<Vec<u8>> {
        let mut sums = a.to_vec();
        sums.iter_mut().zip(b).for_each(|(x, y)| engine.xor(x, y));
        sums
    };
    // Delta parity: parity(new) == parity(old) ^ parity(old ^ new).
    let change = parity(engine, &matrix, &xored(&old, &new));
    let (of_old, of_new) = (parity(engine, &matrix, &old), parity(engine, &matrix, &new));
    assert_eq!(xored(&of_old, &change), of_new);
    // The order of folds does not count.
    let mut folded = vec![vec![0; length]; m];
    for i in (0..k).rev() {
        let column: Vec<u8> = (0..m).map(|j| matrix.coefficient(j, i)).collect();
        engine.fold(&mut views_mut(&mut folded), &column, &new[i]);
    }
    assert_eq!(folded, of_new);
}

macro_rules! suite {
    ($($engine:ident),+) => { $(mod $engine {
        use super::*;

        fn with_engine(check: impl Fn(&dyn Engine)) {
            match engine_named(stringify!($engine)) {
                Ok(engine) => check(engine),
                Err(error) => eprintln!("skipped: {error}"),
            }
        }

        suite!(@tests folds_like_naive, folds_from_like_naive, xors_like_naive, encodes_like_naive, every_offset_is_like_naive, a_few_lengths_are_like_naive,
            uneven_lengths_do_as_naive_does,
            large_blocks_like_portable, every_small_loss_is_repaired, large_geometries_are_repaired,
            the_vandermonde_matrix_is_that_of_the_peer, parity_is_as_committed);

        proptest! {
            #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
            #[test]
            fn is_linear_in_any_geometry(k in 1usize..24, m in 1usize..12, length in 1usize..700, seed in 0u64..1 << 40) {
                with_engine(|engine| is_linear(engine, k, m, length, seed));
            }
        }
    })+ };
    (@tests $($test:ident),+) => { $(#[test]
        fn $test() {
            with_engine(super::$test);
        })+ };
}

suite!(naive, portable, avx2, gfni256, gfni512, neon);

#[test]
fn every_name_is_an_engine_or_says_why_not() {
    for name in NAMES {
        match engine_named(name) {
            Ok(engine) => assert_eq!(engine.name(), name),
            Err(error) => assert!(matches!(error, EngineError::Unsupported { .. }), "{error}"),
        }
    }
    let unknown = engine_named("abacus").err();
    assert_eq!(unknown, Some(EngineError::Unknown("abacus".into())));
}

#[test]
fn the_fastest_comes_first_and_is_the_default() {
    let names: Vec<&str> = engines().iter().map(|engine| engine.name()).collect();
    let in_order: Vec<&str> = NAMES
        .into_iter()
        .filter(|name| names.contains(name))
        .collect();
    assert_eq!(names, in_order);
    assert_eq!(fastest().name(), names[0]);
}
