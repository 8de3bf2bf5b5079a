//! Every shape of a plan, executed: the parity is the codec's whatever is dirty, slow or late, memory stays in its
//! bound, and what goes wrong ends all.

use std::time::Duration;

use storaged_core::SessionWork;
use storaged_plan::{Order, Shape};
use storaged_wire::SlotId;
use storaged_wire::peer::SessionFault;

use super::world::{CHUNK, World, locked, node, noise};
use crate::encode::{ExecutorLimits, Pool};
use crate::net::RailHint;

const STRIPES: usize = 23;

fn shapes(k: usize) -> Vec<Shape> {
    let chain = |order| Shape::Chain { order };
    let tree = |fan_in, order| Shape::Tree { fan_in, order };
    vec![
        chain(Order::Rotating),
        chain(Order::Fixed((0..k).rev().collect())),
        tree(2, Order::Rotating),
        tree(3, Order::Fixed((0..k).collect())),
        Shape::gather_at_all_sources(k),
        Shape::GatherAtSources {
            roots: vec![k - 1, 0, k - 1],
        },
        Shape::GatherAtKeepers,
    ]
}

fn lengths(k: usize) -> impl Iterator<Item = usize> {
    let longest = STRIPES * CHUNK as usize - 100;
    (0..k).map(move |index| match index {
        1 if k > 2 => 5,
        _ => longest - index * 3001,
    })
}

fn longest(shards: &[Vec<u8>]) -> usize {
    shards.iter().map(Vec::len).max().unwrap_or(0)
}

fn world(pool: &Pool, k: usize, m: usize, shape: &Shape) -> World {
    let limits = ExecutorLimits {
        stripes_in_flight: 3,
        ..ExecutorLimits::default()
    };
    let mut world = World::new(k, m, pool, limits);
    world.shape = Some(shape.clone());
    world
}

/// Shards of different lengths, stored in slot `slot` of their nodes, and the session that encodes them.
fn session(world: &World, slot: u64, seed: u64) -> (Vec<Vec<u8>>, Vec<SessionWork>) {
    let lengths = lengths(world.geometry.k()).enumerate();
    let shards: Vec<Vec<u8>> = lengths
        .map(|(at, length)| noise(seed + at as u64, length))
        .collect();
    let slots: Vec<_> = shards
        .iter()
        .enumerate()
        .map(|(at, bytes)| world.store(at, slot, bytes))
        .collect();
    let works = world.encode(slot, &slots, slot);
    (shards, works)
}

fn assert_parity(world: &World, set: u64, shards: &[Vec<u8>], what: &str) {
    for (row, expected) in world.oracle(shards).iter().enumerate() {
        let got = world.parity(row, set, longest(shards));
        assert!(got == *expected, "parity {row} of {what}");
    }
    world.assert_all_came_back();
}

#[tokio::test]
async fn every_shape_makes_the_codecs_parity_in_full_and_by_increments() {
    let pool = Pool::start(2).unwrap();
    for (k, m) in [(2, 1), (3, 3), (4, 2), (8, 2), (9, 4)] {
        for shape in shapes(k) {
            let world = world(&pool, k, m, &shape);
            let what = format!("({k}, {m}) {shape:?}");
            let (mut shards, works) = session(&world, 1, 1);
            let old: Vec<_> = (0..k).map(|at| world.store(at, 1, &shards[at])).collect();
            assert!(world.run(works).await.iter().all(Result::is_ok), "{what}");
            assert_parity(&world, 1, &shards, &what);
            // Stripe 3 changes at two nodes, 10 at one, the last stripe at the longest.
            shards[0][3 * CHUNK as usize + 7] ^= 0x55;
            shards[k - 1][3 * CHUNK as usize] ^= 1;
            shards[k - 1][10 * CHUNK as usize..11 * CHUNK as usize].fill(9);
            let end = shards[0].len() - 1;
            shards[0][end] ^= 0x80;
            let new: Vec<_> = (0..k).map(|at| world.store(at, 2, &shards[at])).collect();
            let works = world.increment(2, &new, &old, 1, 2);
            assert!(world.run(works).await.iter().all(Result::is_ok), "{what}");
            assert_parity(&world, 2, &shards, &what);
        }
    }
}

#[tokio::test]
async fn an_increment_over_the_dirty_stripes_alone_sends_nothing_for_the_others() {
    let pool = Pool::start(2).unwrap();
    let shape = Shape::gather_at_all_sources(4);
    let world = world(&pool, 4, 2, &shape);
    let (mut shards, works) = session(&world, 1, 1);
    let old: Vec<_> = (0..4).map(|at| world.store(at, 1, &shards[at])).collect();
    assert!(world.run(works).await.iter().all(Result::is_ok));
    assert_eq!(*locked(&world.wires.opened), 4 * 3 + 4 * 2);
    let before = world.sent();
    shards[2][5 * CHUNK as usize] ^= 1;
    shards[3][9 * CHUNK as usize] ^= 1;
    let new: Vec<_> = (0..4).map(|at| world.store(at, 2, &shards[at])).collect();
    let mut works = world.increment(2, &new, &old, 1, 2);
    works
        .iter_mut()
        .for_each(|work| work.stripes = vec![5..6, 9..10]);
    assert!(world.run(works).await.iter().all(Result::is_ok));
    assert_parity(&world, 2, &shards, "the increment");
    // Per stripe three blocks to the one that gathers and two sums from it. Of each stripe one block is dirty.
    // Stripe 5 has turn 0, gathered by node 0: node 2 sends its block. Stripe 9 has turn 1, gathered by node 1.
    let payload = 2 * (1 + 2) * u64::from(CHUNK);
    assert_eq!(world.sent() - before, 2 * 5 * 16 + payload);
    // Streams are opened to and from these two nodes alone.
    assert_eq!(*locked(&world.wires.opened), 4 * 3 + 4 * 2 + 2 * (3 + 2));
}

#[tokio::test]
async fn a_stream_is_opened_with_a_hint_of_both_its_ends() {
    let pool = Pool::start(2).unwrap();
    let world = world(&pool, 4, 2, &Shape::gather_at_all_sources(4));
    let (_, works) = session(&world, 1, 1);
    assert!(world.run(works).await.iter().all(Result::is_ok));
    let hints = locked(&world.wires.hints);
    assert_eq!(hints.len(), 4 * 3 + 4 * 2);
    for from in 0..4 {
        for to in (0..6).filter(|to| *to != from) {
            let expected = RailHint::new(from + to);
            assert_eq!(hints.get(&(node(from), node(to))), Some(&expected));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn no_shape_holds_more_blocks_than_it_may() {
    for (k, m) in [(4, 2), (8, 3)] {
        for shape in shapes(k) {
            let world = world(&Pool::inline(), k, m, &shape);
            let (shards, works) = session(&world, 1, 1);
            // One node after the other is late, so that all queues before it fill up.
            let late = works.iter().cloned().enumerate().map(|(at, work)| {
                let world = &world;
                async move {
                    tokio::time::sleep(Duration::from_millis(700 * at as u64)).await;
                    world.run(vec![work]).await.remove(0)
                }
            });
            let outcomes = futures::future::join_all(late).await;
            assert!(
                outcomes.iter().all(Result::is_ok),
                "{shape:?}: {outcomes:?}"
            );
            for (executor, work) in world.executors.iter().zip(&works) {
                let (most, bound) = (
                    executor.blocks_in_flight_most(),
                    world.limits.blocks_max(work),
                );
                assert!(
                    most > 0 && most <= bound,
                    "{most} blocks at member {}, bound {bound}, {shape:?}",
                    work.member
                );
            }
            assert_parity(&world, 1, &shards, &format!("({k}, {m}) {shape:?}"));
        }
    }
}

#[tokio::test]
async fn slow_nodes_change_nothing_but_the_time() {
    let pool = Pool::start(4).unwrap();
    for shape in shapes(4) {
        let world = world(&pool, 4, 2, &shape);
        let (shards, works) = session(&world, 1, 1);
        *locked(&world.rams[2].slow) = Duration::from_millis(3);
        assert!(world.run(works).await.iter().all(Result::is_ok));
        assert_parity(&world, 1, &shards, &format!("{shape:?}"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_node_ends_every_shape_by_the_limit_and_is_blamed_by_those_next_to_it() {
    for shape in shapes(4) {
        let world = world(&Pool::inline(), 4, 2, &shape);
        let (_, works) = session(&world, 1, 1);
        locked(&world.wires.silent).insert(node(1));
        let began = tokio::time::Instant::now();
        let outcomes = world.run(works).await;
        assert!(began.elapsed() < world.limits.stall + Duration::from_secs(1));
        let blamed = |outcome: &Result<_, SessionFault>| matches!(outcome, Err(SessionFault::Neighbour { node: blamed, .. }) if *blamed == node(1));
        assert!(outcomes.iter().any(blamed), "{shape:?}: {outcomes:?}");
        world.assert_all_came_back();
    }
}

#[tokio::test]
async fn a_block_without_its_digest_ends_every_shape() {
    let pool = Pool::start(2).unwrap();
    for shape in shapes(4) {
        let world = world(&pool, 4, 2, &shape);
        let (_, works) = session(&world, 1, 1);
        locked(&world.rams[3].slots)
            .get_mut(&SlotId::new(1))
            .unwrap()[8 * CHUNK as usize] ^= 1;
        let outcomes = world.run(works).await;
        assert_eq!(outcomes[3], Err(SessionFault::Corrupt("chunk 8".into())));
        world.assert_all_came_back();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_of_all_shapes_run_side_by_side_and_may_be_stopped_at_any_moment() {
    let pool = Pool::start(2).unwrap();
    let mut world = World::new(4, 2, &pool, ExecutorLimits::default());
    let mut all = Vec::new();
    for (number, shape) in (1..).zip(shapes(4).into_iter().cycle().take(28)) {
        world.shape = Some(shape);
        all.push(session(&world, number, 100 * number));
    }
    let world = &world;
    let running = all
        .iter()
        .zip(1u64..)
        .map(|((_, works), number)| async move {
            let stop = async move {
                // Every third session is stopped at one of its nodes.
                if number.is_multiple_of(3) {
                    tokio::time::sleep(Duration::from_micros(number * 200)).await;
                    let work = &works[number as usize % works.len()];
                    world.executors[work.member].stop(&work.leader, work.session);
                }
            };
            tokio::join!(world.run(works.clone()), stop).0
        });
    let ended = futures::future::join_all(running).await;
    for (((shards, _), outcomes), number) in all.iter().zip(&ended).zip(1u64..) {
        if outcomes.iter().all(Result::is_ok) {
            assert_parity(world, number, shards, &format!("session {number}"));
        } else {
            assert!(number.is_multiple_of(3), "session {number}: {outcomes:?}");
        }
    }
    world.assert_all_came_back();
}
