//! Ordinary months (`sim/month`): one class of seeds per kind of fault. `STORAGED_SIM_MONTHS=N` sets how many seeds each
//! class has, from `STORAGED_SIM_FIRST` on; `STORAGED_SIM_MONTH=links STORAGED_SIM_SEED=7 cargo test -p storaged-core
//! --test simulation one_month` replays one.

mod scenarios;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use scenarios::SCENARIOS;

use crate::sim::World;
use crate::sim::month::Scenario;
use crate::{is_over, note_failure, number};

/// Classes whose fix has not landed; `STORAGED_SIM_PENDING=1` runs them all the same.
const PENDING: &[&str] = &[];

/// Seeds per class in `make test`.
const SEEDS: u64 = 8;

fn named(name: &str) -> Scenario {
    let found = SCENARIOS.iter().find(|scenario| scenario.name == name);
    *found.unwrap_or_else(|| panic!("expected a scenario, got {name}"))
}

fn is_pending(name: &str) -> bool {
    PENDING.contains(&name) && std::env::var_os("STORAGED_SIM_PENDING").is_none()
}

/// What the months of a class did together.
#[derive(Debug, Default)]
struct Tally {
    struck: BTreeMap<&'static str, u64>,
    refusals: BTreeMap<String, u64>,
    restores: u64,
    durable: u64,
    failed: Vec<u64>,
}

impl Tally {
    fn add(&mut self, world: &mut World) {
        self.restores += world.scene.restores;
        self.durable += world.tier.published.len() as u64;
        let month = world.month();
        for (what, count) in &month.struck {
            *self.struck.entry(what).or_default() += count;
        }
        for (code, count) in &month.promises.refusals {
            *self.refusals.entry(code.clone()).or_default() += count;
        }
    }

    fn merged(mut self, other: Self) -> Self {
        self.restores += other.restores;
        self.durable += other.durable;
        self.failed.extend(other.failed);
        self.failed.sort_unstable();
        for (what, count) in other.struck {
            *self.struck.entry(what).or_default() += count;
        }
        for (code, count) in other.refusals {
            *self.refusals.entry(code).or_default() += count;
        }
        self
    }
}

/// Runs the seeds of a class on all cores.
fn months(scenario: Scenario) -> Tally {
    let first = number("STORAGED_SIM_FIRST").unwrap_or(0);
    let end = first + number("STORAGED_SIM_MONTHS").unwrap_or(SEEDS);
    let next = AtomicU64::new(first);
    let work = || {
        let mut tally = Tally::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end || is_over() {
                return tally;
            }
            let mut world = World::of_month(seed, scenario);
            let run = || world.run_as(&format!("{} {seed}", scenario.name));
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                eprintln!("month of {}: seed {seed} failed", scenario.name);
                note_failure();
                tally.failed.push(seed);
            }
            tally.add(&mut world);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let tallies = threads
            .into_iter()
            .map(|it| it.join().expect("failures were caught"));
        tallies.reduce(Tally::merged).unwrap_or_default()
    })
}

fn check(name: &str) {
    if is_pending(name) {
        return eprintln!("{name} waits for its fix: STORAGED_SIM_PENDING=1 runs it");
    }
    let tally = months(named(name));
    println!("months of {name}: {tally:?}");
    assert!(
        tally.failed.is_empty(),
        "{name}: seeds that failed: {:?}",
        tally.failed
    );
}

macro_rules! months {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            check(stringify!($name));
        }
    )*};
}

mod seeds_of {
    use super::check;

    months! {
        calm links pauses clocks crashes one_node_down one_node_less restarts_in_turn restarts_that_wait memory_stays
        memory_stays_behind_links_that_fail slow_tier failing_tier
        lying_tier two_jobs two_incarnations incarnations_apart runs_from_a_registry runs_from_a_registry_and_a_tier power_cuts quiet_job quiet_and_one_less brief_jobs ill_trainers
        lying_trainers small_budget another_chunk another_m places_refilled places_refilled_and_quiet
        places_refilled_and_memory_stays places_refilled_and_runs_from_a_registry more_and_fewer_places places_change_in_all_weathers places_change_and_clocks_jump
        places_change_and_power_cuts places_change_in_little_room places_change_and_the_registry_is_gone_at_times
        memory_stays_and_the_registry_is_gone_at_times nodes_cordoned nodes_cordoned_and_quiet rot rot_and_quiet restarts_that_fail
        steps_kept steps_kept_in_little_room steps_kept_through_crashes steps_kept_and_quiet steps_kept_in_all_weathers
        keepers_die keepers_die_and_quiet memory_stays_in_part memory_stays_in_part_and_quiet
        memory_stays_in_part_and_steps_are_pinned holders_in_all_weathers places_refilled_and_holders
        pins pins_in_little_room pins_of_two_jobs_in_little_room pins_through_crashes pins_and_quiet pins_and_daemons_that_restart pins_in_all_weathers
        everything everything_and_places_change
    }
}

#[test]
fn one_month() {
    let name = std::env::var("STORAGED_SIM_MONTH").unwrap_or_else(|_| "calm".into());
    let seed = number("STORAGED_SIM_SEED").unwrap_or(1);
    let mut world = World::of_month(seed, named(&name));
    world.told = std::env::var_os("STORAGED_SIM_TELL").is_some();
    world.run();
}

#[test]
fn a_month_replays_identically() {
    let trace = |seed| {
        let mut world = World::of_month(seed, named("calm"));
        world.run_traced(world.scene.limits.duration_ms)
    };
    assert_eq!(trace(6), trace(6));
    assert_ne!(trace(6), trace(7));
}
