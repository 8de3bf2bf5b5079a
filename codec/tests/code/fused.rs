//! The fused pass gives what digest, difference and fold give one by one, on every engine.

use std::cell::Cell;

use proptest::prelude::*;
use storaged_codec::{
    Change, Engine, NewChunk, PrivateBlock, Sums, TakeError, Taken, engine, engines, from_memory,
    leaf_digest,
};

use crate::{noise, views_mut};

/// The pass over `new`, and the same by the operations one by one; both with the sums afterwards.
fn both_ways(
    engine: &dyn Engine,
    new: &[u8],
    previous: Option<&[u8]>,
    m: usize,
) -> [(Taken, Vec<Vec<u8>>); 2] {
    let index = 7 + new.len() as u64;
    let coefficients = noise(index, m);
    let before: Vec<Vec<u8>> = (0..m as u64).map(|j| noise(j + 90, new.len())).collect();
    let (mut fused, mut apart) = (before.clone(), before);
    let mut kept = vec![0; new.len()];
    let chunk = NewChunk {
        index,
        length: new.len(),
        previous,
        kept: Some(&mut kept),
    };
    let sums = Sums {
        blocks: &mut views_mut(&mut fused),
        coefficients: &coefficients,
    };
    let mut private = PrivateBlock::new();
    let taken = private.take(engine, from_memory(new), chunk, sums);
    assert!(kept == new, "the kept copy is the chunk");
    let mut difference = new.to_vec();
    if let Some(previous) = previous {
        engine.xor(&mut difference, previous);
    }
    engine.fold(&mut views_mut(&mut apart), &coefficients, &difference);
    let want = Taken {
        leaf: leaf_digest(new, index),
        change: if previous == Some(new) {
            Change::Clean
        } else {
            Change::Dirty
        },
    };
    [(taken.expect("the lengths fit"), fused), (want, apart)]
}

#[test]
fn it_is_the_operations_one_by_one() {
    let piece = 32 << 10;
    for engine in engines() {
        let lengths = [0, 1, 7, 8, 9, 1023, 4096, piece - 1, piece, piece + 1];
        for length in lengths
            .into_iter()
            .chain([piece + 8, 3 * piece, 5 * piece + 77])
        {
            let new = noise(1, length);
            let mut one_byte = new.clone();
            one_byte.last_mut().into_iter().for_each(|byte| *byte ^= 1);
            for m in [0, 1, 2, 9] {
                for previous in [
                    None,
                    Some(noise(2, length)),
                    Some(one_byte.clone()),
                    Some(new.clone()),
                ] {
                    let [got, want] = both_ways(engine, &new, previous.as_deref(), m);
                    assert!(got == want, "{} at {length} into {m}", engine.name());
                }
            }
        }
    }
}

#[test]
fn a_clean_chunk_leaves_the_sums() {
    let new = noise(3, 100_000);
    let [(taken, sums), _] = both_ways(engine(), &new, Some(&new), 2);
    assert_eq!(taken.change, Change::Clean);
    assert!(sums == [noise(90, 100_000), noise(91, 100_000)]);
}

#[test]
fn a_writer_beside_it_spoils_neither_digest_nor_sums() {
    // Every look at the chunk's memory sees other bytes; what was seen once is what counts everywhere.
    let length = 100_000;
    let looks = Cell::new(0u8);
    let read = |_: usize, out: &mut [u8]| {
        looks.set(looks.get() + 1);
        out.fill(looks.get());
        Ok::<_, TakeError<()>>(())
    };
    let (mut kept, mut sum) = (vec![0; length], vec![0; length]);
    let chunk = NewChunk {
        index: 4,
        length,
        previous: None,
        kept: Some(&mut kept),
    };
    let sums = Sums {
        blocks: &mut [&mut sum],
        coefficients: &[1],
    };
    let taken = PrivateBlock::new().take(engine(), read, chunk, sums);
    assert!(kept == sum, "folded and kept alike");
    let leaf = leaf_digest(&kept, 4);
    assert_eq!(taken.map(|taken| taken.leaf).ok(), Some(leaf));
}

#[test]
fn unlike_lengths_and_a_failing_source_are_errors() {
    let new = [5; 10];
    let run = |previous: Option<&[u8]>,
               kept: Option<&mut [u8]>,
               lengths: &[usize],
               coefficients: &[u8]| {
        let mut blocks: Vec<Vec<u8>> = lengths.iter().map(|length| vec![0; *length]).collect();
        let chunk = NewChunk {
            index: 0,
            length: 10,
            previous,
            kept,
        };
        let sums = Sums {
            blocks: &mut views_mut(&mut blocks),
            coefficients,
        };
        let result = PrivateBlock::new().take(engine(), from_memory(&new), chunk, sums);
        assert!(result.is_ok() || blocks.concat().iter().all(|byte| *byte == 0));
        result.err()
    };
    let (expected, got) = (10, 9);
    assert_eq!(run(None, None, &[10, 10], &[1, 2]), None);
    let error = run(Some(&new[1..]), None, &[10], &[1]);
    assert_eq!(error, Some(TakeError::Previous { expected, got }));
    let error = run(None, Some(&mut [0; 9]), &[10], &[1]);
    assert_eq!(error, Some(TakeError::Room { expected, got }));
    let error = run(None, None, &[10, 9], &[1, 2]);
    assert_eq!(
        error,
        Some(TakeError::Sum {
            sum: 1,
            expected,
            got
        })
    );
    let error = run(None, None, &[10, 10], &[1]);
    assert_eq!(
        error,
        Some(TakeError::Coefficients {
            sums: 2,
            coefficients: 1
        })
    );
    let chunk = NewChunk {
        index: 0,
        length: 10,
        previous: None,
        kept: None,
    };
    let sums = Sums {
        blocks: &mut [],
        coefficients: &[],
    };
    let gone = PrivateBlock::new().take(engine(), |_, _: &mut [u8]| Err("gone"), chunk, sums);
    assert_eq!(gone, Err(TakeError::Source("gone")));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn it_is_so_for_any_change(length in 1usize..150_000, m in 0usize..6, at in any::<prop::sample::Index>(), span in 0usize..5000, seed in 1u64..1 << 40) {
        let new = noise(seed, length);
        let mut previous = new.clone();
        let start = at.index(length);
        for byte in previous.iter_mut().skip(start).take(span) {
            *byte ^= (seed >> 8) as u8;
        }
        let [got, want] = both_ways(engine(), &new, Some(&previous), m);
        prop_assert!(got == want);
    }
}
