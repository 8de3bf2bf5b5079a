//! Repairs beside a save, on links of a bounded rate and in simulated time: the save hardly notices, the repair goes on, and what a
//! reader waits for is not held back.

use std::num::NonZeroU64;
use std::time::Duration;

use storaged_core::{SessionPurpose, SessionWork, Urgency};
use storaged_plan::{RepairShape, Shape};
use storaged_wire::SessionId;
use storaged_wire::peer::SessionFault;
use tokio::time::Instant;

use super::links::{GroupOf, RATE, encode, plain_chain, repair};
use super::world::{World, locked, node};
use crate::encode::{ExecutorLimits, Pool, SaveGuard};

/// A tenth of a link, as the default is of one of 10 Gbit/s.
const REPAIR_RATE: u64 = RATE / 10;
/// Data nodes and coding nodes of the one group.
const K: usize = 8;
const M: usize = 2;
const SAVE_STRIPES: usize = 150;
const REPAIR_STRIPES: usize = 300;

/// The links of all nodes carry `RATE`, and each sends for repairs at most so much beside a save; 0 for no bound.
fn world(repair_rate: u64, stall: Duration) -> World {
    let limits = ExecutorLimits {
        stall,
        repair_rate: NonZeroU64::new(repair_rate),
        ..ExecutorLimits::default()
    };
    let world = World::new(K, M, &Pool::inline(), limits);
    *locked(&world.wires.rate) = Some(RATE);
    world
}

/// As `world`, with a stall limit that all waits are far below: a block takes a second at that rate, and sixteen may wait.
fn patient(repair_rate: u64) -> World {
    world(repair_rate, Duration::from_secs(10_000))
}

fn save(world: &World, shape: &Shape) -> Vec<SessionWork> {
    let nodes: Vec<usize> = (0..K + M).collect();
    let group = GroupOf {
        nodes: &nodes,
        m: M,
    };
    encode(world, 2, &group, SAVE_STRIPES, shape)
}

fn lost_to(
    world: &World,
    lost: &[usize],
    shape: RepairShape,
    urgency: Urgency,
) -> Vec<SessionWork> {
    let mut works = repair(world, M, REPAIR_STRIPES, lost, shape);
    for work in &mut works {
        work.purpose = SessionPurpose::Repair;
        work.urgency = urgency;
    }
    works
}

/// Seconds until a session has gone well.
async fn seconds(world: &World, works: Vec<SessionWork>) -> f64 {
    let began = Instant::now();
    for outcome in world.run(works).await {
        outcome.unwrap();
    }
    began.elapsed().as_secs_f64()
}

/// Seconds of a save and of a repair that begin at once.
async fn beside(world: &World, save: Vec<SessionWork>, repair: Vec<SessionWork>) -> (f64, f64) {
    let took = tokio::join!(seconds(world, save), seconds(world, repair));
    world.assert_all_came_back();
    took
}

/// Saves without a pause at every node.
fn saves(world: &World) -> Vec<SaveGuard> {
    let executors = world.executors.iter();
    executors.map(|executor| executor.beside_save()).collect()
}

const REPAIRS: [(&[usize], RepairShape); 2] =
    [(&[3], RepairShape::Chain), (&[3, 6], RepairShape::Gather)];

#[tokio::test(start_paused = true)]
async fn a_save_beside_a_repair_takes_hardly_longer_than_alone() {
    let mut worst: f64 = 1.0;
    for shape in [plain_chain(K), Shape::gather_at_all_sources(K)] {
        for (lost, how) in REPAIRS {
            let alone = patient(0);
            let alone_s = seconds(&alone, save(&alone, &shape)).await;
            let mut took = Vec::new();
            for rate in [0, REPAIR_RATE] {
                let world = patient(rate);
                let repair = lost_to(&world, lost, how, Urgency::Background);
                let (save_s, repair_s) = beside(&world, save(&world, &shape), repair).await;
                took.push((save_s / alone_s, repair_s));
            }
            let what = format!("{shape:?}, {how:?}: {alone_s} s alone, {took:?}");
            eprintln!("{what}");
            let [(unbounded, _), (bounded, repair_s)] = took[..] else {
                panic!("{what}");
            };
            assert!(bounded <= 1.3 && bounded <= unbounded, "{what}");
            worst = worst.max(unbounded);
            // When the save is over it goes on as if there had been none.
            let after = repair_s - bounded * alone_s;
            let copy_s = lone_repair_seconds(0, lost, how).await;
            assert!(after <= 1.05 * copy_s, "{what}, {copy_s} s alone");
        }
    }
    assert!(worst > 2.0, "without a bound: {worst}");
}

async fn lone_repair_seconds(repair_rate: u64, lost: &[usize], how: RepairShape) -> f64 {
    let world = patient(repair_rate);
    let works = lost_to(&world, lost, how, Urgency::Background);
    let took = seconds(&world, works).await;
    let held = world
        .executors
        .iter()
        .map(|executor| executor.repairs_held());
    assert_eq!(held.sum::<Duration>(), Duration::ZERO);
    took
}

#[tokio::test(start_paused = true)]
async fn a_repair_alone_is_not_held_back() {
    for (lost, how) in REPAIRS {
        let unbounded = lone_repair_seconds(0, lost, how).await;
        let bounded = lone_repair_seconds(REPAIR_RATE, lost, how).await;
        assert_eq!(unbounded, bounded, "{how:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_repair_that_a_reader_waits_for_is_not_held_back() {
    for (lost, how) in REPAIRS {
        let mut took = Vec::new();
        for (rate, urgency) in [
            (0, Urgency::Background),
            (REPAIR_RATE, Urgency::Awaited),
            (REPAIR_RATE, Urgency::Background),
        ] {
            let world = patient(rate);
            let _saves = saves(&world);
            took.push(seconds(&world, lost_to(&world, lost, how, urgency)).await);
        }
        assert_eq!(took[0], took[1], "{how:?}: {took:?}");
        assert!(took[2] > 6.0 * took[1], "{how:?}: {took:?}");
    }
}

/// It may come before the session has begun here, and while it runs.
#[tokio::test(start_paused = true)]
async fn a_repair_that_a_reader_begins_to_wait_for_is_held_back_no_longer() {
    let (lost, how) = REPAIRS[1];
    let alone_s = lone_repair_seconds(0, lost, how).await;
    for late_s in [0.0, 10.0] {
        let world = patient(REPAIR_RATE);
        let _saves = saves(&world);
        let hasten = async {
            tokio::time::sleep(Duration::from_secs_f64(late_s)).await;
            for executor in &world.executors {
                executor.hasten(&node(0), SessionId::new(1));
            }
        };
        let works = lost_to(&world, lost, how, Urgency::Background);
        let ((), took) = tokio::join!(hasten, seconds(&world, works));
        assert!(
            took <= late_s + alone_s + 1.0,
            "{late_s}: {took} of {alone_s}"
        );
    }
}

/// The job saves without a pause and the rate is as good as none, while neighbours give up after ten seconds in which nothing comes.
#[tokio::test(start_paused = true)]
async fn a_repair_goes_on_beside_saves_without_end_however_small_the_rate_is() {
    for (lost, how) in REPAIRS {
        let world = world(1, Duration::from_secs(10));
        *locked(&world.wires.rate) = Some(100 * RATE);
        let _saves = saves(&world);
        let works = lost_to(&world, lost, how, Urgency::Background);
        let took = seconds(&world, works).await;
        world.assert_all_came_back();
        // No frame waits for more than a tenth of a second.
        let bound = REPAIR_STRIPES as f64 * 0.1 * 1.1 + 2.0;
        assert!(took <= bound, "{how:?}: {took} of {bound}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_repair_that_is_held_back_can_be_stopped_at_once() {
    let world = patient(1);
    let _saves = saves(&world);
    let works = lost_to(&world, &[3], RepairShape::Chain, Urgency::Background);
    let stop = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        for executor in &world.executors {
            executor.stop(&node(0), SessionId::new(1));
        }
        Instant::now()
    };
    let (stopped, outcomes) = tokio::join!(stop, world.run(works));
    assert_eq!(stopped.elapsed(), Duration::ZERO);
    for outcome in outcomes {
        assert_eq!(outcome, Err(SessionFault::Aborted));
    }
    world.assert_all_came_back();
}
