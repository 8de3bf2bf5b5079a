//! Tenants upload in turn, and none faster than it may.

use std::time::Duration;

use storaged_wire::TenantName;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::*;
use crate::pool::Pool;
use crate::trickle::share::{PUTS_AT_ONCE, UploadShares};
use crate::trickle::{TenantRates, TrickleThreads};

const PART: usize = 1 << 20;

fn job(name: &str) -> Namespace {
    Namespace::new(name).unwrap()
}

#[tokio::test]
async fn a_tenant_with_one_shard_does_not_wait_for_anothers_many() {
    let mut world = World::over_a_link(0, Packing::None, 64 << 20);
    let mut shards = Vec::new();
    for (name, steps) in [("red~llama", 6), ("blue~llama", 1)] {
        world.job = job(name);
        for step in 1..=steps {
            shards.push(world.seal(step, noise(step, 8 * PART)));
        }
    }
    let trickle = Arc::new(world.trickle);
    let mut uploads = JoinSet::new();
    for saved in shards {
        let trickle = trickle.clone();
        uploads.spawn(async move {
            let copied = trickle.upload(
                &saved.manifest,
                RANK,
                &saved.shard,
                None,
                Leftovers::Perhaps,
            );
            copied.await.unwrap();
            saved.manifest.manifest().namespace.clone()
        });
        // It waits for the tier now, or for its turn.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut ended = Vec::new();
    while let Some(name) = uploads.join_next().await {
        ended.push(name.unwrap());
    }
    let before = ended.iter().position(|it| *it == job("blue~llama"));
    assert!(before <= Some(2), "{before:?} of red's came first");
}

#[tokio::test(start_paused = true)]
async fn a_tenant_has_its_rate_and_holds_up_nobody_meanwhile() {
    let slow = TenantRates::from([(Some(TenantName::new("red").unwrap()), PART as u64)]);
    let shares = Arc::new(UploadShares::new(&slow));
    let began = Instant::now();
    let red = shares.clone();
    let red = tokio::spawn(async move {
        for _ in 0..10 {
            drop(red.turn(&job("red~llama"), PART).await.unwrap());
        }
    });
    for name in ["blue~llama", "llama"] {
        for _ in 0..100 {
            drop(shares.turn(&job(name), PART).await.unwrap());
        }
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
    red.await.unwrap();
    assert_eq!(began.elapsed(), Duration::from_secs(10));
}

#[tokio::test]
async fn whoever_stops_waiting_leaves_no_gap() {
    let shares = UploadShares::new(&TenantRates::new());
    let (first, mut held) = (job("red~a"), Vec::new());
    for _ in 0..PUTS_AT_ONCE {
        held.push(shares.turn(&first, 1).await.unwrap());
    }
    for _ in 0..3 {
        let next = job("red~c");
        let wait = shares.turn(&next, 1);
        let wait = tokio::time::timeout(Duration::from_millis(5), wait).await;
        assert!(wait.is_err(), "one part too many");
    }
    drop(held);
    drop(shares.turn(&job("red~c"), 1).await.unwrap());
    drop(shares.turn(&job("blue~c"), 1).await.unwrap());
}

/// A tier that takes a second for each part and each read, and threads that need no time.
fn distant(world: &World) -> Trickle {
    let plan = store::FaultPlan {
        latency: Duration::from_secs(1),
        ..store::FaultPlan::default()
    };
    world.through(plan).on(TrickleThreads {
        short: Pool::inline(),
        long: Pool::inline(),
    })
}

#[tokio::test(start_paused = true)]
async fn five_parts_of_a_shard_are_under_way_at_once() {
    let mut world = World::over_a_link(0, Packing::None, u64::MAX);
    let saved = world.seal(1, noise(1, 20 * PART));
    world.trickle = distant(&world);
    let began = Instant::now();
    world.upload(&saved, None).await.unwrap();
    let alone = began.elapsed();
    assert_eq!(alone, Duration::from_secs(20 / 5));
    world.publish(&saved, &by_job()).await.unwrap();
    world.comes_back(&saved).await;
}

#[tokio::test(start_paused = true)]
async fn windows_of_a_shard_are_fetched_at_once() {
    let mut world = World::over_a_link(0, Packing::None, u64::MAX);
    let (small, large) = (noise(1, 8 * PART), noise(2, 80 * PART));
    let (small, _) = world.save(1, small, None).await;
    let (large, _) = world.save(2, large, None).await;
    world.trickle = distant(&world);
    let began = Instant::now();
    world.comes_back(&small).await;
    let one = began.elapsed();
    world.comes_back(&large).await;
    assert_eq!(began.elapsed(), 2 * one, "five windows take as long as one");
}
