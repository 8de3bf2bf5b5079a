//! The classes of months: which faults strike in each. `tests/sim/run.py` counts them by their names.

use storaged_core::RunAuthority;

use crate::sim::month::{
    CALM, Changes, Crashes, HeldMemory, RegistryKind, Scenario, TierKind, Trainers, Unequal,
};

/// Every class.
pub const SCENARIOS: &[Scenario] = &[
    CALM,
    Scenario {
        name: "links",
        links: true,
        ..CALM
    },
    Scenario {
        name: "pauses",
        pauses: true,
        ..CALM
    },
    Scenario {
        name: "clocks",
        clocks: true,
        crashes: Crashes::UpToM,
        ..CALM
    },
    Scenario {
        name: "crashes",
        crashes: Crashes::UpToM,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "one_node_down",
        crashes: Crashes::OneForLong,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "one_node_less",
        crashes: Crashes::OneForLong,
        ..CALM
    },
    Scenario {
        name: "restarts_in_turn",
        crashes: Crashes::AllInTurn,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "restarts_that_wait",
        crashes: Crashes::AllInTurnWaiting,
        ..CALM
    },
    Scenario {
        name: "memory_stays",
        crashes: Crashes::DaemonsAlone,
        ..CALM
    },
    Scenario {
        name: "memory_stays_behind_links_that_fail",
        links: true,
        crashes: Crashes::DaemonsAlone,
        tier: TierKind::Failing,
        jobs: 2,
        ..CALM
    },
    Scenario {
        name: "slow_tier",
        tier: TierKind::Slow,
        ..CALM
    },
    Scenario {
        name: "failing_tier",
        tier: TierKind::Failing,
        crashes: Crashes::UpToM,
        ..CALM
    },
    Scenario {
        name: "lying_tier",
        tier: TierKind::Lying,
        crashes: Crashes::UpToM,
        ..CALM
    },
    Scenario {
        name: "two_jobs",
        jobs: 2,
        links: true,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "two_incarnations",
        twins: true,
        tier: TierKind::Slow,
        ..CALM
    },
    Scenario {
        name: "incarnations_apart",
        links: true,
        twins: true,
        ..CALM
    },
    Scenario {
        name: "runs_from_a_registry",
        links: true,
        twins: true,
        runs: RunAuthority::Registry,
        ..CALM
    },
    Scenario {
        name: "runs_from_a_registry_and_a_tier",
        links: true,
        twins: true,
        crashes: Crashes::UpToM,
        tier: TierKind::Well,
        runs: RunAuthority::Registry,
        ..CALM
    },
    Scenario {
        name: "power_cuts",
        crashes: Crashes::AllAtOnce,
        tier: TierKind::Failing,
        ..CALM
    },
    Scenario {
        name: "quiet_job",
        crashes: Crashes::UpToM,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "quiet_and_one_less",
        crashes: Crashes::OneForLong,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "brief_jobs",
        trainers: Trainers::Brief,
        budget_slots: 9,
        ..CALM
    },
    Scenario {
        name: "ill_trainers",
        trainers: Trainers::Ill,
        ..CALM
    },
    Scenario {
        name: "lying_trainers",
        trainers: Trainers::Lying,
        ..CALM
    },
    Scenario {
        name: "small_budget",
        budget_slots: 6,
        jobs: 2,
        tier: TierKind::Slow,
        ..CALM
    },
    Scenario {
        name: "another_chunk",
        unequal: Unequal::Chunk,
        ..CALM
    },
    Scenario {
        name: "another_m",
        unequal: Unequal::Parity,
        ..CALM
    },
    Scenario {
        name: "places_refilled",
        places: Changes::Machines,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "places_refilled_and_quiet",
        places: Changes::Machines,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "places_refilled_and_memory_stays",
        places: Changes::Machines,
        crashes: Crashes::DaemonsAlone,
        ..CALM
    },
    Scenario {
        name: "places_refilled_and_runs_from_a_registry",
        places: Changes::Machines,
        links: true,
        twins: true,
        runs: RunAuthority::Registry,
        ..CALM
    },
    Scenario {
        name: "more_and_fewer_places",
        places: Changes::Sizes,
        ..CALM
    },
    Scenario {
        name: "places_change_in_all_weathers",
        places: Changes::Both,
        links: true,
        pauses: true,
        crashes: Crashes::UpToM,
        tier: TierKind::Failing,
        jobs: 2,
        ..CALM
    },
    Scenario {
        name: "places_change_and_clocks_jump",
        places: Changes::Both,
        clocks: true,
        crashes: Crashes::UpToM,
        tier: TierKind::Slow,
        ..CALM
    },
    Scenario {
        name: "places_change_and_power_cuts",
        places: Changes::Both,
        crashes: Crashes::AllAtOnce,
        tier: TierKind::Failing,
        ..CALM
    },
    Scenario {
        name: "places_change_in_little_room",
        places: Changes::Both,
        // A node may have three ranks where places were removed.
        budget_slots: 10,
        tier: TierKind::Slow,
        ..CALM
    },
    Scenario {
        name: "places_change_and_the_registry_is_gone_at_times",
        places: Changes::Both,
        registry: RegistryKind::GoneAtTimes,
        links: true,
        crashes: Crashes::UpToM,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "memory_stays_and_the_registry_is_gone_at_times",
        places: Changes::Machines,
        registry: RegistryKind::GoneAtTimes,
        crashes: Crashes::DaemonsAlone,
        links: true,
        twins: true,
        runs: RunAuthority::Registry,
        ..CALM
    },
    Scenario {
        name: "nodes_cordoned",
        places: Changes::Cordons,
        crashes: Crashes::UpToM,
        links: true,
        ..CALM
    },
    Scenario {
        name: "nodes_cordoned_and_quiet",
        places: Changes::Cordons,
        crashes: Crashes::UpToM,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "rot",
        rot: true,
        ..CALM
    },
    Scenario {
        name: "rot_and_quiet",
        rot: true,
        crashes: Crashes::UpToM,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "restarts_that_fail",
        failures: true,
        crashes: Crashes::UpToM,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "steps_kept",
        keep_steps: 2,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "steps_kept_in_little_room",
        keep_steps: 2,
        budget_slots: 4,
        ..CALM
    },
    Scenario {
        name: "steps_kept_through_crashes",
        keep_steps: 2,
        crashes: Crashes::UpToM,
        ..CALM
    },
    Scenario {
        name: "steps_kept_and_quiet",
        keep_steps: 2,
        crashes: Crashes::UpToM,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "steps_kept_in_all_weathers",
        keep_steps: 2,
        links: true,
        pauses: true,
        crashes: Crashes::UpToM,
        places: Changes::Machines,
        tier: TierKind::Well,
        jobs: 2,
        ..CALM
    },
    Scenario {
        name: "keepers_die",
        keepers: true,
        tier: TierKind::Well,
        ..CALM
    },
    Scenario {
        name: "keepers_die_and_quiet",
        keepers: true,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "memory_stays_in_part",
        held: HeldMemory::PartsOfUpToM,
        crashes: Crashes::DaemonsAlone,
        ..CALM
    },
    Scenario {
        name: "memory_stays_in_part_and_quiet",
        held: HeldMemory::PartsOfUpToM,
        crashes: Crashes::DaemonsAlone,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "memory_stays_in_part_and_steps_are_pinned",
        held: HeldMemory::PartsOfUpToM,
        pins: true,
        keep_steps: 2,
        ..CALM
    },
    Scenario {
        name: "holders_in_all_weathers",
        keepers: true,
        held: HeldMemory::PartsOfUpToM,
        links: true,
        pauses: true,
        crashes: Crashes::DaemonsAlone,
        tier: TierKind::Failing,
        jobs: 2,
        ..CALM
    },
    Scenario {
        name: "places_refilled_and_holders",
        keepers: true,
        held: HeldMemory::PartsOfUpToM,
        crashes: Crashes::DaemonsAlone,
        places: Changes::Machines,
        ..CALM
    },
    Scenario {
        name: "pins",
        pins: true,
        jobs: 2,
        ..CALM
    },
    Scenario {
        name: "pins_in_little_room",
        pins: true,
        budget_slots: 6,
        ..CALM
    },
    Scenario {
        name: "pins_of_two_jobs_in_little_room",
        pins: true,
        jobs: 2,
        budget_slots: 8,
        ..CALM
    },
    Scenario {
        name: "pins_through_crashes",
        pins: true,
        crashes: Crashes::UpToM,
        ..CALM
    },
    Scenario {
        name: "pins_and_quiet",
        pins: true,
        crashes: Crashes::UpToM,
        trainers: Trainers::Quiet,
        ..CALM
    },
    Scenario {
        name: "pins_and_daemons_that_restart",
        pins: true,
        crashes: Crashes::DaemonsAlone,
        ..CALM
    },
    Scenario {
        name: "pins_in_all_weathers",
        pins: true,
        links: true,
        pauses: true,
        crashes: Crashes::UpToM,
        places: Changes::Machines,
        jobs: 2,
        ..CALM
    },
    Scenario {
        name: "everything",
        links: true,
        pauses: true,
        clocks: true,
        crashes: Crashes::UpToM,
        tier: TierKind::Failing,
        jobs: 2,
        twins: true,
        trainers: Trainers::Ill,
        ..CALM
    },
    Scenario {
        name: "everything_and_places_change",
        links: true,
        pauses: true,
        clocks: true,
        crashes: Crashes::UpToM,
        places: Changes::Both,
        registry: RegistryKind::GoneAtTimes,
        tier: TierKind::Failing,
        jobs: 2,
        twins: true,
        trainers: Trainers::Ill,
        ..CALM
    },
];
