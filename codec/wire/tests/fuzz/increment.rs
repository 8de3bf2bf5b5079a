//! Indices of increments, from the durable tier: with a digest that fits, as somebody who can write there could make.

use bolero::check;
use storaged_codec::digest;
use storaged_wire::{IncrementBase, IncrementIndex, Rank, RunId, Step};

use crate::ITERATIONS;
use crate::damage::{Damage, damaged};

/// Reads bytes; an index that comes out holds together and is written as the same.
fn parsed(bytes: &[u8]) {
    let object = [bytes, digest(bytes).as_bytes()].concat();
    let Ok(index) = IncrementIndex::from_object(&object) else {
        return;
    };
    assert_eq!(index.ends.len(), index.digests.len());
    assert!(index.ends.windows(2).all(|pair| pair[0] < pair[1]));
    assert!((1..=IncrementIndex::DEPTH_MAX).contains(&index.depth));
    let count = index.ends.len() as u64;
    let whole = index.place(&(0..count)).map(|place| place.end);
    assert_eq!(whole, index.ends.last().copied());
    assert_eq!(index.place(&(count..count + 1)), None);
    let again = IncrementIndex::from_object(&index.to_object());
    assert_eq!(again.expect("what was just written"), index);
}

#[test]
fn any_bytes_are_an_index_or_an_error() {
    check!().with_iterations(ITERATIONS).for_each(parsed);
}

#[test]
fn damaged_indices_hold_together_or_are_errors() {
    let index = IncrementIndex {
        manifest: digest(b"manifest"),
        rank: Rank::new(3),
        base: IncrementBase {
            run: RunId::new(2),
            step: Step::new(40),
            manifest: digest(b"base"),
        },
        depth: 2,
        ends: vec![24, 100, 4096],
        digests: vec![digest(b"a"), digest(b"b"), digest(b"c")],
    };
    let object = index.to_object();
    let sound = &object[..object.len() - 32];
    parsed(sound);
    check!()
        .with_iterations(4 * ITERATIONS)
        .with_type::<Vec<Damage>>()
        .for_each(|damages| parsed(&damaged(sound, damages)));
}
