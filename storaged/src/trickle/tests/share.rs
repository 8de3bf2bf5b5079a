//! Tenants upload in turn, and none faster than it may.

use std::time::Duration;

use storaged_wire::TenantName;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::*;
use crate::pool::Pool;
use crate::trickle::room::{CopyRoom, PIECES_MAX};
use crate::trickle::share::{Payment, Turn, UploadShares};
use crate::trickle::{TenantRates, TrickleThreads};

const PART: usize = 1 << 20;
const MIB: u64 = 1 << 20;

fn job(name: &str) -> Namespace {
    Namespace::new(name).unwrap()
}

async fn turn(shares: &UploadShares, name: &str, bytes: u64, payment: Payment) -> Turn {
    shares.turn(&job(name), bytes, payment).await.unwrap()
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
    let shares = Arc::new(UploadShares::new(64 * MIB, &slow));
    let began = Instant::now();
    let red = shares.clone();
    let red = tokio::spawn(async move {
        for _ in 0..10 {
            drop(turn(&red, "red~llama", MIB, Payment::First).await);
        }
    });
    for name in ["blue~llama", "llama"] {
        for _ in 0..100 {
            drop(turn(&shares, name, MIB, Payment::First).await);
        }
    }
    assert_eq!(began.elapsed(), Duration::ZERO);
    red.await.unwrap();
    assert_eq!(began.elapsed(), Duration::from_secs(10));
}

#[tokio::test(start_paused = true)]
async fn what_was_there_already_costs_no_rate() {
    let slow = TenantRates::from([(Some(TenantName::new("red").unwrap()), MIB)]);
    let shares = UploadShares::new(64 * MIB, &slow);
    let began = Instant::now();
    for payment in [Payment::IfSent, Payment::First] {
        let turn = turn(&shares, "red~llama", 4 * MIB, payment).await;
        turn.not_needed().await.unwrap();
    }
    // Whoever pays first has waited already, and has it back afterwards.
    assert_eq!(began.elapsed(), Duration::from_secs(4));
    let mut turn = turn(&shares, "red~llama", 4 * MIB, Payment::IfSent).await;
    turn.settle(2 * MIB).await.unwrap();
    drop(turn);
    assert_eq!(began.elapsed(), Duration::from_secs(6));
    assert_eq!(shares.taken(), (0, 0));
}

#[tokio::test]
async fn whoever_stops_waiting_leaves_no_gap() {
    let room = CopyRoom::new(64 * MIB);
    let (first, mut held) = (job("red~a"), Vec::new());
    for _ in 0..PIECES_MAX {
        held.push(room.take(&first, 1).await);
    }
    for _ in 0..3 {
        let next = job("red~c");
        let wait = room.take(&next, 1);
        let wait = tokio::time::timeout(Duration::from_millis(5), wait).await;
        assert!(wait.is_err(), "one part too many");
    }
    drop(held);
    drop(room.take(&job("red~c"), 1).await);
    drop(room.take(&job("blue~c"), 1).await);
    assert_eq!(room.taken(), (0, 0));
}

/// Where one part fills the room all tenants hold nothing when it has gone: who came first with many would have all of them sent.
#[tokio::test(start_paused = true)]
async fn tenants_are_served_in_turn_where_one_part_fills_the_room() {
    let room = CopyRoom::new(MIB);
    let mut wanted = vec![("red~a", 16 * MIB); 20];
    wanted.extend([("blue~a", 16 * MIB); 2]);
    let order = given(&room, &wanted).await;
    let last = order.iter().rposition(|one| one.0 == "blue~a");
    assert!(last <= Some(4), "{order:?}");
    assert_eq!((order.len(), room.taken()), (22, (0, 0)));
}

/// Who has what of a room, in the order in which it was given.
async fn given(room: &Arc<CopyRoom>, wanted: &[(&'static str, u64)]) -> Vec<(&'static str, u64)> {
    let (given, mut order) = tokio::sync::mpsc::unbounded_channel();
    for (name, bytes) in wanted.iter().copied() {
        let (room, given) = (room.clone(), given.clone());
        tokio::spawn(async move {
            let place = room.take(&job(name), bytes).await;
            given.send((name, bytes)).unwrap();
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(place);
        });
        // They come one after the other.
        tokio::task::yield_now().await;
    }
    drop(given);
    let mut all = Vec::new();
    while let Some(one) = order.recv().await {
        all.push(one);
    }
    all
}

#[tokio::test(start_paused = true)]
async fn a_part_larger_than_the_room_goes_alone_and_is_passed_by_nobody() {
    let room = CopyRoom::new(64 * MIB);
    let (large, small) = (("red~a", 100 * MIB), ("blue~a", 16 * MIB));
    let mut wanted = vec![small; 4];
    wanted.push(large);
    wanted.extend([small; 8]);
    let began = Instant::now();
    let order = given(&room, &wanted).await;
    assert_eq!(order.len(), 13);
    // Four have the room when it comes, and those that come later wait until it has gone.
    assert_eq!(order[4], large, "{order:?}");
    assert_eq!(began.elapsed(), Duration::from_secs(1 + 1 + 2));
    assert_eq!(room.taken(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn tenants_have_equal_bytes_whatever_their_parts_are() {
    let room = CopyRoom::new(64 * MIB);
    let mut wanted = vec![("red~a", 32 * MIB); 12];
    wanted.extend([("blue~a", 8 * MIB); 20]);
    let order = given(&room, &wanted).await;
    // Red has the room at first. From then on each has half of it, until blue has had its 160 MiB.
    let last = order.iter().rposition(|one| one.0 == "blue~a").unwrap();
    let reds = order[..last].iter().filter(|one| one.0 == "red~a").count();
    assert!((5..=8).contains(&reds), "{reds} of red's before: {order:?}");
    assert_eq!((order.len(), room.taken()), (32, (0, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_part_that_waits_is_not_in_memory() {
    let mut world = World::over_a_link(0, Packing::None, u64::MAX);
    world.limits.in_flight_bytes = 4 * MIB;
    let saved = world.seal(1, noise(1, 2 * PART));
    world.trickle = distant(&world);
    let shares = &world.trickle.shares;
    let all = turn(shares, "red~a", 4 * MIB, Payment::First).await;
    let change = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let slot = world.memory.slot(saved.shard.slot).unwrap();
        slot.write_at(0, b"others").unwrap();
        drop(all);
    };
    let (uploaded, ()) = futures::future::join(world.upload(&saved, None), change).await;
    assert!(uploaded.is_err(), "it was read before there was room");
    assert_eq!(world.trickle.shares.taken(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn tenants_with_more_than_there_is_room_for_all_come_to_an_end() {
    let room = 16;
    let began = Instant::now();
    let mut world = World::over_a_link(0, Packing::None, u64::MAX);
    world.limits.in_flight_bytes = room * MIB;
    let mut shards = Vec::new();
    for name in ["red~llama", "blue~llama", "green~llama", "llama"] {
        world.job = job(name);
        for step in 1..=2 {
            shards.push(world.seal(step, noise(step, 40 * PART)));
        }
    }
    world.trickle = distant(&world);
    let trickle = &world.trickle;
    let uploads = shards.iter().map(|saved| {
        trickle.upload(
            &saved.manifest,
            RANK,
            &saved.shard,
            None,
            Leftovers::Perhaps,
        )
    });
    let uploads = futures::future::try_join_all(uploads);
    let watch = async {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(trickle.shares.taken().0 <= room * MIB);
        }
    };
    tokio::select! {
        // 20 times the room; each shard's table takes a second besides.
        all = uploads => assert_eq!(all.unwrap().len(), 8),
        () = watch => unreachable!(),
    }
    let took = began.elapsed();
    assert!((20..30).contains(&took.as_secs()), "{took:?}");
    assert_eq!(trickle.shares.taken(), (0, 0));
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
async fn five_parts_of_a_shard_are_under_way_and_more_where_there_is_memory() {
    for (in_flight, at_once) in [(10 * MIB, 5), (40 * MIB, 10), (400 * MIB, 20)] {
        let mut world = World::over_a_link(0, Packing::None, u64::MAX);
        world.limits.in_flight_bytes = in_flight;
        let saved = world.seal(1, noise(1, 20 * PART));
        world.trickle = distant(&world);
        let began = Instant::now();
        world.upload(&saved, None).await.unwrap();
        assert_eq!(began.elapsed(), Duration::from_secs(20 / at_once));
        world.publish(&saved, &by_job()).await.unwrap();
        world.comes_back(&saved).await;
    }
}

#[tokio::test(start_paused = true)]
async fn packed_parts_go_beside_one_another_too() {
    let mut world = World::over_a_link(0, Packing::Zstd, u64::MAX);
    world.limits.in_flight_bytes = 40 * MIB;
    // Noise: frames are as long as their chunks, and a little more.
    let saved = world.seal(1, noise(1, 20 * PART));
    world.trickle = distant(&world);
    let began = Instant::now();
    world.upload(&saved, None).await.unwrap();
    let took = began.elapsed();
    assert!((2..5).contains(&took.as_secs()), "{took:?}");
    assert_eq!(world.trickle.shares.taken(), (0, 0));
    world.publish(&saved, &by_job()).await.unwrap();
    world.comes_back(&saved).await;
}

/// Whoever makes a part has the room for it, and no more: with room for one alone all of them go.
#[tokio::test]
async fn with_room_for_one_part_packed_shards_and_increments_go_too() {
    for (packing, increments) in [(Packing::Zstd, 0), (Packing::None, 4)] {
        let mut world = World::over_a_link(increments, packing, 1 << 30);
        world.limits.in_flight_bytes = MIB;
        world.trickle = Trickle::new(world.store.clone(), world.memory.clone(), world.limits);
        let (full, _) = world.save(1, noise(1, 5 * PART), None).await;
        let other = world.seal(2, noise(2, 5 * PART));
        let copied = world.copy(&other, Some(&full)).await;
        assert_eq!(copied.increment.is_some(), increments > 0);
        assert!(copied.stored > 4 * MIB, "several parts");
        for saved in [&full, &other] {
            world.comes_back(saved).await;
        }
        let trickle = &world.trickle;
        assert_eq!(
            (trickle.shares.taken(), trickle.windows.taken()),
            ((0, 0), (0, 0))
        );
    }
}

#[tokio::test(start_paused = true)]
async fn windows_of_a_shard_are_fetched_at_once() {
    let mut world = World::over_a_link(0, Packing::None, u64::MAX);
    let (small, large) = (noise(1, 8 * PART), noise(2, 80 * PART));
    let (small, _) = world.save(1, small, None).await;
    let (large, _) = world.save(2, large, None).await;
    // Two fifths of it are for reads.
    world.limits.in_flight_bytes = 200 * MIB;
    world.trickle = distant(&world);
    let began = Instant::now();
    world.comes_back(&small).await;
    let one = began.elapsed();
    world.comes_back(&large).await;
    assert_eq!(began.elapsed(), 2 * one, "five windows take as long as one");
}
