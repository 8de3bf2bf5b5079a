//! The decisions under many seeds. `STORAGED_SIM_SEED=N cargo test -p storaged-core --test simulation one_seed`
//! replays one; `STORAGED_SIM_SEEDS=N` sets how many `many_seeds` tries.

mod sim;

use sim::{Limits, World};
use storaged_core::DurableForm;

const SMALL: Limits = Limits {
    nodes: 6,
    k: 4,
    m: 2,
    ranks: 4,
    loss_one_in: 0,
    durable_every: 7,
    durable_form: DurableForm::Full,
    duration_ms: 240_000,
    liar: None,
    link_rate: None,
};

fn limits_of(seed: u64) -> Limits {
    let link_rate = (!seed.is_multiple_of(5)).then_some(1_250_000);
    let loss_one_in = if seed.is_multiple_of(3) { 200 } else { 0 };
    let durable_form = match seed / 4 % 2 {
        0 => DurableForm::Increments,
        _ => DurableForm::Full,
    };
    let limits = shape_of(seed, loss_one_in);
    Limits {
        durable_form,
        link_rate,
        ..limits
    }
}

fn shape_of(seed: u64, loss_one_in: u64) -> Limits {
    match seed % 4 {
        0 => Limits {
            nodes: 4,
            k: 2,
            m: 2,
            ranks: 2,
            loss_one_in,
            ..SMALL
        },
        1 => Limits {
            nodes: 5,
            k: 3,
            m: 1,
            ranks: 5,
            loss_one_in,
            ..SMALL
        },
        2 => Limits {
            nodes: 8,
            k: 4,
            m: 2,
            ranks: 8,
            loss_one_in,
            ..SMALL
        },
        _ => Limits {
            loss_one_in,
            ..SMALL
        },
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

fn run(seed: u64) -> (World, String) {
    eprintln!("seed {seed}");
    let mut world = World::new(seed, limits_of(seed));
    let trace = world.run();
    (world, trace)
}

#[test]
fn many_seeds() {
    let (mut crashes, mut restores, mut increments) = (0, 0, 0);
    let (mut resumed, mut carried, mut incremental, mut shapes) = (0, 0, 0, 0);
    for seed in 0..number("STORAGED_SIM_SEEDS").unwrap_or(12) {
        let (world, _) = run(seed);
        crashes += world.crashes;
        restores += world.restores;
        increments += world.increments;
        resumed += world.resumed;
        carried += world.carried;
        incremental += world.incremental;
        shapes += world.shapes;
    }
    assert!(
        resumed > 3 && carried > 3 && incremental > 20 && shapes > 20,
        "sessions have less than all to do: {resumed} resumed, {carried} sets made in part, {incremental} increments, {shapes} shapes chosen"
    );
    assert!(
        crashes > 20 && restores > 20 && increments > 8,
        "the scenarios do something: {crashes} crashes, {restores} restores, {increments} increments"
    );
}

#[test]
fn one_seed() {
    run(number("STORAGED_SIM_SEED").unwrap_or(3));
}

#[test]
fn a_seed_replays_identically() {
    assert_eq!(run(6).1, run(6).1);
    assert_ne!(run(6).1, run(7).1);
}

/// A node that sends wrong bytes in encodes and repairs: no wrong byte is ever returned (the job compares all it reads), nobody
/// else is accused, and it is found out.
#[test]
fn a_lying_hop_is_named_and_routed_around() {
    let (mut lies, mut encodes, mut named, mut restores) = (0, 0, 0, 0);
    for seed in 0..number("STORAGED_SIM_LIARS").unwrap_or(6) {
        eprintln!("seed {seed}");
        let limits = Limits {
            liar: Some(seed as usize % 6),
            ..SMALL
        };
        let mut world = World::new(1000 + seed, limits);
        world.run();
        lies += world.lies;
        encodes += world.lies_in_encodes;
        named += world.liar_named;
        restores += world.restores;
    }
    assert!(
        lies > 20 && encodes > 20 && named > 5 && restores > 20,
        "{lies} lies, {encodes} in encodes, named {named} times, {restores} restores"
    );
}
