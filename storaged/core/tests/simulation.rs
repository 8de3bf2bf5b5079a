//! The decisions under many seeds: nodes that die, hops that are slow or silent, and hops that lie.
//! `STORAGED_SIM_SEEDS=N` sets how many seeds are tried, from `STORAGED_SIM_FIRST` on; each that fails is named.
//! `STORAGED_SIM_SEED=N cargo test -p storaged-core --test simulation one_seed` replays one, and with
//! `STORAGED_SIM_LIAR=N` instead one of those that have a liar; `STORAGED_SIM_TELL=1` prints all that happens, and
//! `STORAGED_SIM_TRACES=1` a digest of it for each seed.

mod ordinary;
mod sim;
mod testkit;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use sim::byzantine::{KINDS, Kind};
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
    slow: None,
    link_rate: None,
    slow_link: None,
    fibber: None,
    byzantine: None,
    shard_scale: 1,
};

fn limits_of(seed: u64) -> Limits {
    let link_rate = (!seed.is_multiple_of(5)).then_some(1_250_000);
    let loss_one_in = if seed.is_multiple_of(3) { 200 } else { 0 };
    let durable_form = match seed / 4 % 2 {
        0 => DurableForm::Increments,
        _ => DurableForm::Full,
    };
    let limits = shape_of(seed, loss_one_in);
    // Half of the seeds have a slow hop: the last node, which all know to be slow if they know rates, or any other.
    let slow = match seed / 8 % 4 {
        0 => Some(limits.nodes - 1),
        1 => Some(seed as usize / 32 % limits.nodes),
        _ => None,
    };
    Limits {
        durable_form,
        link_rate,
        slow,
        ..limits
    }
}

/// Of seeds with a liar: any node lies, in groups that can do with one node less.
fn liar_limits(seed: u64) -> Limits {
    let shape = [0, 2, 3][(seed / 6 % 3) as usize];
    let limits = shape_of(shape, 0);
    Limits {
        liar: Some(seed as usize % limits.nodes),
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

static FAILED: AtomicBool = AtomicBool::new(false);

fn note_failure() {
    FAILED.store(true, Ordering::Relaxed);
}

/// With `STORAGED_SIM_STOP` one failure is enough: nothing more is run.
fn is_over() -> bool {
    FAILED.load(Ordering::Relaxed) && std::env::var_os("STORAGED_SIM_STOP").is_some()
}

/// What a number of runs did.
#[derive(Debug, Default)]
struct Tally {
    crashes: u64,
    restores: u64,
    increments: u64,
    resumed: u64,
    carried: u64,
    incremental: u64,
    shapes: u64,
    cut: u64,
    stalls: u64,
    lies: u64,
    lies_in_encodes: u64,
    named: u64,
}

impl Tally {
    fn add(&mut self, world: &World) {
        self.merge(&Self {
            crashes: world.scene.crashes,
            restores: world.scene.restores,
            increments: world.tier.increments,
            resumed: world.sessions.counts.resumed,
            carried: world.sessions.counts.carried,
            incremental: world.sessions.counts.incremental,
            shapes: world.scene.shapes,
            cut: world.sessions.counts.cut,
            stalls: world.scene.stalls,
            lies: world.scene.lies,
            lies_in_encodes: world.scene.lies_in_encodes,
            named: world.scene.liar_named,
        });
    }

    fn merge(&mut self, other: &Self) {
        self.crashes += other.crashes;
        self.restores += other.restores;
        self.increments += other.increments;
        self.resumed += other.resumed;
        self.carried += other.carried;
        self.incremental += other.incremental;
        self.shapes += other.shapes;
        self.cut += other.cut;
        self.stalls += other.stalls;
        self.lies += other.lies;
        self.lies_in_encodes += other.lies_in_encodes;
        self.named += other.named;
    }
}

/// Runs seeds on all cores; the numbers of those that fail come with the tally.
fn run_seeds(seeds: u64, limits: fn(u64) -> Limits) -> (Tally, Vec<u64>) {
    let first = number("STORAGED_SIM_FIRST").unwrap_or(0);
    let next = AtomicU64::new(first);
    let work = || {
        let (mut tally, mut failed) = (Tally::default(), Vec::new());
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + seeds || is_over() {
                return (tally, failed);
            }
            let mut world = World::new(seed, limits(seed));
            let name = world.scene.limits.liar.map_or("seed", |_| "liar");
            let run = || world.run_as(&format!("{name} {seed}"));
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                eprintln!("seed {seed} failed");
                note_failure();
                failed.push(seed);
            }
            tally.add(&world);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let (mut tally, mut failed) = (Tally::default(), Vec::new());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            let (some, of_it) = thread.join().expect("failures were caught");
            tally.merge(&some);
            failed.extend(of_it);
        }
    });
    failed.sort_unstable();
    (tally, failed)
}

#[test]
fn many_seeds() {
    if is_over() {
        return;
    }
    let seeds = number("STORAGED_SIM_SEEDS").unwrap_or(48);
    let (tally, failed) = run_seeds(seeds, limits_of);
    println!("{seeds} seeds: {tally:?}");
    assert!(failed.is_empty(), "seeds that failed: {failed:?}");
    assert!(
        tally.crashes > 20 && tally.restores > 20 && tally.increments > 8,
        "the scenarios do something: {tally:?}"
    );
    let parts = [tally.resumed, tally.carried, tally.cut, tally.stalls];
    assert!(
        parts.iter().all(|count| *count > 3) && tally.incremental > 20 && tally.shapes > 20,
        "sessions have less than all to do: {tally:?}"
    );
}

#[test]
fn one_seed() {
    let (seed, limits): (u64, fn(u64) -> Limits) = match number("STORAGED_SIM_LIAR") {
        Some(seed) => (seed, liar_limits),
        None => (number("STORAGED_SIM_SEED").unwrap_or(3), limits_of),
    };
    let mut world = World::new(seed, limits(seed));
    world.told = std::env::var_os("STORAGED_SIM_TELL").is_some();
    world.run();
}

#[test]
fn a_seed_replays_identically() {
    let trace = |seed| {
        let mut world = World::new(seed, limits_of(seed));
        world.run_traced(world.scene.limits.duration_ms)
    };
    assert_eq!(trace(6), trace(6));
    assert_ne!(trace(6), trace(7));
}

/// A node that sends wrong bytes in encodes and repairs: no wrong byte is ever returned (the job compares all it reads), nobody
/// else is accused, and it is found out.
#[test]
fn a_lying_hop_is_named_and_routed_around() {
    let seeds = number("STORAGED_SIM_LIARS").unwrap_or(18);
    let (tally, failed) = run_seeds(seeds, liar_limits);
    println!("{seeds} seeds with a liar: {tally:?}");
    assert!(
        failed.is_empty(),
        "seeds with a liar that failed: {failed:?}"
    );
    assert!(
        tally.lies > 20 && tally.lies_in_encodes > 20 && tally.named > 5 && tally.restores > 20,
        "the liar lies and is named: {tally:?}"
    );
}

/// Of seeds with a node that says anything: any but the first, where the job asks for its plans.
fn byzantine_limits(seed: u64) -> Limits {
    let limits = shape_of(seed / 2, 0);
    let ranks = limits.ranks.min(limits.nodes as u32 - 1);
    Limits {
        byzantine: Some(1 + seed as usize % (limits.nodes - 1)),
        link_rate: Some(1_250_000),
        ranks,
        ..limits
    }
}

/// Seeds of these that have failed once: a loss that was waited out for ever because of a coding node that is not believed, steps that
/// were protected while a plan was made, a step that a node which had just started took for protected, and a made-up commit that a home
/// node without a rank went on having coded.
const BYZANTINE_FOUND: [u64; 5] = [40, 96, 100, 140, 176];

/// One node says anything to anybody, forged, replayed and up to the limits of numbers, and m-1 others at most fail beside it.
#[test]
fn a_node_that_says_anything_costs_nobody_a_checkpoint() {
    if is_over() {
        return;
    }
    let first = number("STORAGED_SIM_FIRST").unwrap_or(0);
    let seeds = number("STORAGED_SIM_BYZANTINE").unwrap_or(12);
    let found = (first == 0 && seeds < 100).then_some(BYZANTINE_FOUND);
    let (mut failed, mut said, mut named, mut restores) = (Vec::new(), 0, 0, 0);
    let (mut said_of, mut answered) = (BTreeMap::<Kind, u64>::new(), 0);
    for seed in (first..first + seeds).chain(found.into_iter().flatten()) {
        let mut world = World::new(4000 + seed, byzantine_limits(seed));
        world.told = std::env::var_os("STORAGED_SIM_TELL").is_some();
        let run = || {
            world.run_as(&format!("byzantine {seed}"));
            world.byzantine_ends();
        };
        if catch_unwind(AssertUnwindSafe(run)).is_err() {
            eprintln!("byzantine {seed} failed");
            note_failure();
            failed.push(seed);
        }
        for (kind, count) in &world.scene.byzantine.said_of {
            *said_of.entry(*kind).or_default() += count;
        }
        answered += world.scene.byzantine.answered;
        said += world.scene.byzantine.said;
        named += world.scene.byzantine.named;
        restores += world.scene.restores;
    }
    println!(
        "{seeds} seeds: {said} messages, {answered} to the point, named {named} times, {restores} restores"
    );
    assert!(failed.is_empty(), "seeds that failed: {failed:?}");
    let unsaid: Vec<&Kind> = KINDS
        .iter()
        .filter(|it| !said_of.contains_key(it))
        .collect();
    assert!(unsaid.is_empty(), "kinds that it never says: {unsaid:?}");
    assert!(
        answered > 100 * seeds,
        "it answers and takes part: {answered}"
    );
    assert!(
        said > 1_000 * seeds && named > 20 * seeds && restores > seeds,
        "it speaks and is named: {said}, {named}, {restores}"
    );
}

/// Shards long enough for sessions of many seconds.
const LONG: Limits = Limits {
    slow_link: Some(1),
    shard_scale: 40,
    ..SMALL
};

/// A node whose link is a tenth of the others' and of which nobody is told: sessions that it holds up are ended, what
/// they had finished stays, and the next ones go around it.
#[test]
fn a_slow_hop_is_found_and_routed_around() {
    if is_over() {
        return;
    }
    let (mut replans, mut carried, mut restores) = (0, 0, 0);
    let first = number("STORAGED_SIM_FIRST").unwrap_or(0);
    for seed in first..first + number("STORAGED_SIM_SLOW").unwrap_or(4) {
        eprintln!("seed {seed}");
        let mut world = World::new(2000 + seed, LONG);
        world.told = std::env::var_os("STORAGED_SIM_TELL").is_some();
        world.run_as(&format!("slow {seed}"));
        assert!(
            world.scene.replans.keys().all(|node| *node == 1),
            "only the slow node is gone around: {:?}",
            world.scene.replans
        );
        replans += world.scene.replans.values().sum::<u64>();
        carried += world.sessions.counts.carried;
        restores += world.scene.restores;
    }
    assert!(
        replans > 8 && carried > 8 && restores > 20,
        "{replans} times gone around, {carried} sets made in part, {restores} restores"
    );
}

/// A node that tells nonsense of how sessions go, beside a slow one or as the slow one itself: what cannot be is refused
/// and named, what could be makes plans slower at most, and every byte comes back.
#[test]
fn nonsense_of_how_sessions_go_breaks_nothing() {
    if is_over() {
        return;
    }
    let (mut refused, mut replans, mut restores) = (0, 0, 0);
    for seed in 0..number("STORAGED_SIM_FIBBERS").unwrap_or(3) {
        eprintln!("seed {seed}");
        let fibber = Some(seed as usize % SMALL.nodes);
        let mut world = World::new(3000 + seed, Limits { fibber, ..LONG });
        world.run_as(&format!("fibber {seed}"));
        refused += world.scene.refused_reports;
        replans += world.scene.replans.values().sum::<u64>();
        restores += world.scene.restores;
    }
    assert!(
        refused > 20 && restores > 15,
        "{refused} reports refused, {replans} times gone around, {restores} restores"
    );
}
