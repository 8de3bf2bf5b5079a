//! Memory: bounded while sessions run, all back afterwards, with many sessions at once.

use std::time::Duration;

use super::world::{CHUNK, World, noise};
use crate::encode::{ExecutorLimits, Pool};

const LIMITS: ExecutorLimits = ExecutorLimits {
    stripes_in_flight: 3,
    stall: Duration::from_secs(10),
    repair_rate: None,
};

#[tokio::test(start_paused = true)]
async fn a_session_holds_no_more_blocks_than_it_may() {
    let world = World::new(4, 2, &Pool::inline(), LIMITS);
    let shards: Vec<_> = (0..4)
        .map(|at| world.store(at, 1, &noise(at as u64, 100 * CHUNK as usize)))
        .collect();
    let mut works = world.encode(1, &shards, 1);
    // The last node begins when all queues before it have long filled up.
    let last = works.remove(5);
    let late = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(
            world.executors[..5]
                .iter()
                .all(|executor| executor.blocks_in_flight() > 0)
        );
        world.run(vec![last.clone()]).await
    };
    let (first, late) = tokio::join!(world.run(works.clone()), late);
    assert!(first.iter().chain(&late).all(Result::is_ok));
    for (executor, work) in world.executors.iter().zip(works.iter().chain([&last])) {
        let (most, bound) = (executor.blocks_in_flight_most(), LIMITS.blocks_max(work));
        let at = work.member;
        assert!(
            most > 0 && most <= bound,
            "{most} blocks at member {at}, bound {bound}"
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
