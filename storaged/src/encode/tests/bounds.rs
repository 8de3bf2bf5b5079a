//! Memory: bounded while sessions run, all back afterwards, with many sessions at once.

use std::time::Duration;

use super::world::{CHUNK, World, locked, noise};
use crate::encode::{ExecutorLimits, Pool};

const LIMITS: ExecutorLimits = ExecutorLimits {
    stripes_in_flight: 3,
    stall: Duration::from_secs(10),
};

#[tokio::test]
async fn a_session_holds_no_more_blocks_than_it_may() {
    let world = World::new(4, 2, &Pool::start(2).unwrap(), LIMITS);
    let shards: Vec<_> = (0..4)
        .map(|at| world.store(at, 1, &noise(at as u64, 100 * CHUNK as usize)))
        .collect();
    // A slow reader in the middle makes the queues before it fill up.
    *locked(&world.rams[3].slow) = Duration::from_micros(300);
    let works = world.encode(1, &shards, 1);
    for outcome in world.run(works.clone()).await {
        outcome.unwrap();
    }
    for (executor, work) in world.executors.iter().zip(&works) {
        let (most, bound) = (executor.blocks_in_flight_most(), LIMITS.blocks_max(work));
        assert!(
            most > 0 && most <= bound,
            "{most} blocks at member {}, bound {bound}",
            work.member
        );
    }
    world.assert_all_came_back();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_sessions_at_once() {
    let world = World::new(4, 2, &Pool::start(2).unwrap(), LIMITS);
    let length = 15 * CHUNK as usize - 9;
    let data: Vec<Vec<Vec<u8>>> = (0..40)
        .map(|s| (0..4).map(|at| noise(s * 10 + at, length)).collect())
        .collect();
    let sessions = data.iter().zip(1u64..).map(|(shards, number)| {
        let stored: Vec<_> = shards
            .iter()
            .enumerate()
            .map(|(at, bytes)| world.store(at, number, bytes))
            .collect();
        world.run(world.encode(number, &stored, number))
    });
    let outcomes = futures::future::join_all(sessions).await;
    assert!(outcomes.iter().flatten().all(Result::is_ok));
    for (shards, number) in data.iter().zip(1u64..) {
        for (row, expected) in world.oracle(shards).iter().enumerate() {
            assert!(
                world.parity(row, number, length) == *expected,
                "session {number} parity {row}"
            );
        }
    }
    world.assert_all_came_back();
    assert!(
        world
            .executors
            .iter()
            .all(|executor| executor.streams_parked() == 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_stopped_at_any_moment_give_everything_back() {
    let world = World::new(4, 2, &Pool::start(2).unwrap(), LIMITS);
    let shards: Vec<_> = (0..4)
        .map(|at| world.store(at, 1, &noise(at as u64, 50 * CHUNK as usize)))
        .collect();
    for number in 1..40 {
        let works = world.encode(number, &shards, number);
        let (executor, work) = (
            world.executors[number as usize % 6].clone(),
            works[0].clone(),
        );
        let stop = async move {
            tokio::time::sleep(Duration::from_micros(number * 150)).await;
            executor.stop(&work.leader, work.session);
        };
        let _ = tokio::join!(world.run(works), stop);
        world.assert_all_came_back();
    }
}
