//! Hops that send wrong bytes in an encode, and parity that is put onto a rotten basis: nothing wrong is ever kept, what
//! is right stays, and a second run in which every sum is checked names the sender.

use std::ops::Range;

use storaged_core::{ParityId, SessionWork, SlotShard};
use storaged_plan::{Order, Shape};
use storaged_wire::SlotId;
use storaged_wire::peer::SessionFault;

use super::broken::run;
use super::world::{CHUNK, World, locked, node, noise};
use crate::encode::SessionEnd;

const STRIPES: usize = 24;
const LIES_FROM: u64 = 9;

fn shapes(k: usize) -> Vec<Shape> {
    vec![
        Shape::Chain {
            order: Order::Fixed((0..k).collect()),
        },
        Shape::Chain {
            order: Order::Rotating,
        },
        Shape::Tree {
            fan_in: 2,
            order: Order::Fixed((0..k).rev().collect()),
        },
        Shape::gather_at_all_sources(k),
        Shape::GatherAtKeepers,
    ]
}

/// Shards of different lengths, one of which ends long before the others.
fn stored(world: &World, seed: u64) -> (Vec<Vec<u8>>, Vec<SlotShard>) {
    let longest = STRIPES * CHUNK as usize - 11;
    let half = longest / 2;
    let length = |at: usize| if at == 1 { half } else { longest - at * 2003 };
    let shards: Vec<Vec<u8>> = (0..world.geometry.k())
        .map(|at| noise(seed + at as u64, length(at)))
        .collect();
    let slots = shards.iter().enumerate();
    let slots = slots.map(|(at, bytes)| world.store(at, seed, bytes));
    let slots = slots.collect();
    (shards, slots)
}

/// Members that send anything in some stripe.
fn senders(works: &[SessionWork]) -> Vec<usize> {
    let sends = |work: &&SessionWork| {
        let mut hops = work.plan.classes().iter();
        hops.any(|class| class.blocks_sent(work.member) > 0)
    };
    works.iter().filter(sends).map(|work| work.member).collect()
}

/// Whom the members name.
fn named(ends: &[SessionEnd]) -> Vec<storaged_wire::NodeName> {
    let named = ends.iter().filter_map(|end| match &end.outcome {
        Err(SessionFault::WrongBytes { node, .. }) => Some(node.clone()),
        _ => None,
    });
    named.collect()
}

fn is_caught(end: &SessionEnd) -> bool {
    matches!(
        end.outcome,
        Err(SessionFault::WrongResult(_) | SessionFault::Unproven { .. })
    )
}

/// Every stripe that a keeper has kept is the codec's parity.
fn assert_kept_is_right(world: &World, shards: &[Vec<u8>], ends: &[SessionEnd], set: u64) {
    let k = world.geometry.k();
    for (row, expected) in world.oracle(shards).iter().enumerate() {
        let sets = locked(&world.rams[k + row].parity);
        let Some(set) = sets.get(&ParityId(set)) else {
            continue;
        };
        for stripe in ends[k + row].kept.iter().cloned().flatten() {
            let start = stripe as usize * CHUNK as usize;
            let end = expected.len().min(start + CHUNK as usize);
            assert!(set[&stripe] == expected[start..end], "stripe {stripe}");
        }
    }
}

/// Stripes that all keepers have kept: the next session carries them, and moves the others.
fn done(k: usize, ends: &[SessionEnd]) -> (Vec<u64>, Vec<u64>) {
    let kept_by = |end: &SessionEnd, stripe: u64| end.kept.iter().any(|run| run.contains(&stripe));
    let all = |stripe: &u64| ends[k..].iter().all(|end| kept_by(end, *stripe));
    (0..STRIPES as u64).partition(all)
}

fn runs(stripes: &[u64]) -> Vec<Range<u64>> {
    stripes.iter().map(|stripe| *stripe..stripe + 1).collect()
}

fn carry_on(mut works: Vec<SessionWork>, k: usize, ends: &[SessionEnd]) -> Vec<SessionWork> {
    let (done, left) = done(k, ends);
    for work in &mut works {
        work.stripes = runs(&left);
        if work.keep.is_some() {
            work.carried = runs(&done);
        }
    }
    works
}

#[tokio::test]
async fn a_hop_that_lies_is_caught_at_once_and_named_by_the_wary_run() {
    for (k, m) in [(4, 2), (5, 3)] {
        for shape in shapes(k) {
            for liar in 0..k + m {
                a_hop_lies(k, m, &shape, liar).await;
            }
        }
    }
}

async fn a_hop_lies(k: usize, m: usize, shape: &Shape, liar: usize) {
    let mut world = World::threaded(k, m);
    world.shape = Some(shape.clone());
    let what = format!("({k}, {m}) {shape:?}, liar {liar}");
    let (shards, slots) = stored(&world, 1);
    let works = world.encode(1, &slots, 1);
    if !senders(&works).contains(&liar) {
        return;
    }
    locked(&world.wires.liars).insert(node(liar));
    *locked(&world.wires.lies_from) = LIES_FROM;

    let ends = run(&world, works).await;
    assert!(ends[k..].iter().any(is_caught), "{what}: {ends:?}");
    assert!(named(&ends).is_empty(), "{what}: {ends:?}");
    assert_kept_is_right(&world, &shards, &ends, 1);

    let again = carry_on(world.encode(2, &slots, 1), k, &ends);
    let wary = run(&world, world.wary(again, &slots)).await;
    let blamed = named(&wary);
    let all_the_liar = blamed.iter().all(|name| *name == node(liar));
    assert!(!blamed.is_empty() && all_the_liar, "{what}: {wary:?}");
    assert!(!wary.iter().any(is_caught), "{what}: {wary:?}");
    let kept = merged(k, &ends, &wary);
    assert_kept_is_right(&world, &shards, &kept, 1);

    locked(&world.wires.liars).clear();
    let sent = world.sent();
    let last = carry_on(world.encode(3, &slots, 1), k, &kept);
    let stripes: u64 = last[0].stripes.iter().map(|run| run.end - run.start).sum();
    let ends = run(&world, world.wary(last, &slots)).await;
    assert!(
        ends.iter().all(|end| end.outcome.is_ok()),
        "{what}: {ends:?}"
    );
    assert!(stripes <= STRIPES as u64);
    assert!(world.sent() > sent, "{what}");
    let longest = shards.iter().map(Vec::len).max().unwrap();
    for (row, expected) in world.oracle(&shards).iter().enumerate() {
        assert!(
            world.parity(row, 1, longest) == *expected,
            "{what}, parity {row}"
        );
    }
    world.assert_all_came_back();
}

/// What is kept after a session that carried on with another one's.
fn merged(k: usize, first: &[SessionEnd], second: &[SessionEnd]) -> Vec<SessionEnd> {
    let mut ends = second.to_vec();
    let (carried, _) = done(k, first);
    ends[k..]
        .iter_mut()
        .for_each(|end| end.kept.extend(runs(&carried)));
    ends
}

#[tokio::test]
async fn good_stripes_stay_when_a_hop_begins_to_lie() {
    let mut world = World::threaded(4, 2);
    world.shape = Some(shapes(4).remove(0));
    let (_, slots) = stored(&world, 1);
    locked(&world.wires.liars).insert(node(2));
    *locked(&world.wires.lies_from) = LIES_FROM;
    let ends = run(&world, world.encode(1, &slots, 1)).await;
    let kept: u64 = ends[4].kept.iter().map(|run| run.end - run.start).sum();
    assert!(kept > 0 && kept <= LIES_FROM, "{ends:?}");
}

/// A parity chunk of set 1 of a node loses a bit.
fn rot(world: &World, at: usize, stripe: u64) {
    let mut sets = locked(&world.rams[at].parity);
    let set = sets.get_mut(&ParityId(1)).unwrap();
    set.get_mut(&stripe).unwrap()[100] ^= 8;
}

#[tokio::test]
async fn a_rotten_basis_is_caught_and_nobody_is_accused() {
    for shape in shapes(4) {
        let mut world = World::threaded(4, 2);
        world.shape = Some(shape);
        let (mut shards, old) = stored(&world, 1);
        let ends = run(&world, world.encode(1, &old, 1)).await;
        assert!(ends.iter().all(|end| end.outcome.is_ok()));
        shards[2][3 * CHUNK as usize] ^= 1;
        let new: Vec<_> = (0..4).map(|at| world.store(at, 2, &shards[at])).collect();
        rot(&world, 5, 3);
        let ends = run(&world, world.increment(2, &new, &old, 1, 2)).await;
        let wrong = SessionFault::WrongResult("stripe 3".into());
        assert_eq!(ends[5].outcome, Err(wrong), "{ends:?}");
        assert!(named(&ends).is_empty());
        let full = world.wary(world.encode(3, &new, 3), &new);
        let ends = run(&world, full).await;
        assert!(ends.iter().all(|end| end.outcome.is_ok()), "{ends:?}");
        for (row, expected) in world.oracle(&shards).iter().enumerate() {
            assert!(world.parity(row, 3, shards[0].len()) == *expected);
        }
    }
}

/// A shard's node that says other fingerprints than its chunks have is named too, by whoever gets its chunks first.
#[tokio::test]
async fn a_table_that_lies_is_caught_and_its_node_named() {
    for shape in shapes(4) {
        let mut world = World::threaded(4, 2);
        world.shape = Some(shape.clone());
        let (_, slots) = stored(&world, 1);
        let other: Vec<u8> = noise(99, slots[2].length as usize);
        // What node 2 says is of other bytes than those that it has.
        let mut said = world.wary(world.encode(1, &slots, 1), &slots);
        let kept = world.store(2, 50, &other);
        let prints = world.prints(2, &kept);
        for work in &mut said {
            work.proofs.get_mut(&2).unwrap().prints = prints.clone();
        }
        let ends = run(&world, said).await;
        let blamed = named(&ends);
        assert!(
            !blamed.is_empty() && blamed.iter().all(|name| *name == node(2)),
            "{shape:?}: {ends:?}"
        );
        assert!(ends[4..].iter().all(|end| end.kept.is_empty()), "{ends:?}");
    }
}

/// A trainer that changes its shard after the seal is no liar.
#[tokio::test]
async fn a_changed_shard_is_told_by_its_own_node() {
    let mut world = World::threaded(4, 2);
    world.shape = Some(Shape::gather_at_all_sources(4));
    let (_, slots) = stored(&world, 1);
    locked(&world.rams[2].slots)
        .get_mut(&SlotId::new(1))
        .unwrap()[7] ^= 1;
    let ends = run(&world, world.wary(world.encode(1, &slots, 1), &slots)).await;
    assert_eq!(
        ends[2].outcome,
        Err(SessionFault::Corrupt("chunk 0".into()))
    );
    assert!(named(&ends).is_empty(), "{ends:?}");
}
