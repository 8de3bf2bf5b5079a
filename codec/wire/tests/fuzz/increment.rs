//! Indices of increments, from the durable tier: with a digest that fits, as somebody who can write there could make.

use bolero::check;
use storaged_codec::digest;
use storaged_wire::{IncrementBase, IncrementIndex, Rank, RunId, Step};

use crate::ITERATIONS;
use crate::damage::{Damage, damaged};
use crate::index::holds_together;

#[test]
fn any_bytes_are_an_index_or_an_error() {
    check!()
        .with_iterations(ITERATIONS)
        .for_each(holds_together);
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
    holds_together(sound);
    check!()
        .with_iterations(4 * ITERATIONS)
        .with_type::<Vec<Damage>>()
        .for_each(|damages| holds_together(&damaged(sound, damages)));
}
