//! Sessions that break off, and nodes that send wrong bytes: what is in place stays, the rest comes by another plan,
//! and whoever sent a block without its digest is named.

use std::ops::Range;
use std::sync::Arc;

use storaged_core::{ExpectedShard, ParityId, SessionWork, Sink, SlotShard, Source};
use storaged_plan::{Coefficients, RepairShape, RepairTask, Shape, StripedPlan, repair_plans};
use storaged_wire::SlotId;
use storaged_wire::peer::SessionFault;

use super::world::{CHUNK, World, locked, node, noise, session_of};
use crate::encode::SessionEnd;

const STRIPES: usize = 40;
const INTO: SlotId = SlotId::new(77);

/// Four shards of one length, their parity in set 1, and shard 1 lost.
async fn with_a_loss() -> (World, Vec<Vec<u8>>, Vec<SlotShard>) {
    let world = World::threaded(4, 2);
    let shards: Vec<Vec<u8>> = (0..4)
        .map(|at| noise(at + 1, STRIPES * CHUNK as usize - 11))
        .collect();
    let slots: Vec<_> = shards
        .iter()
        .enumerate()
        .map(|(at, bytes)| world.store(at, 1, bytes))
        .collect();
    let encoded = world.run(world.encode(1, &slots, 1)).await;
    assert!(encoded.iter().all(Result::is_ok));
    locked(&world.rams[1].slots).clear();
    locked(&world.rams[1].slots).insert(INTO, vec![0xee; shards[1].len()]);
    (world, shards, slots)
}

/// A session that reads these blocks.
struct Reading<'a> {
    session: u64,
    survivors: &'a [usize],
}

/// The repair of shard 1 from these blocks.
fn repair(
    world: &World,
    slots: &[SlotShard],
    reading: &Reading<'_>,
    shape: RepairShape,
    stripes: Vec<Range<u64>>,
) -> Vec<SessionWork> {
    let Reading { session, survivors } = *reading;
    let rows = |survivors: &[usize], lost: &[usize]| {
        let rows = world.matrix.repair_coefficients(survivors, lost)?;
        Ok(Coefficients::new(rows).ok())
    };
    let task = RepairTask {
        survivors,
        lost: &[1],
        needed: 4,
    };
    let mut plans = repair_plans(&task, shape, rows).unwrap();
    let plan: Arc<StripedPlan> = Arc::new(plans.remove(0));
    let source = |block: &usize| match slots.get(*block) {
        Some(shard) => Source::Shard {
            shard: shard.clone(),
            basis: None,
        },
        None => Source::Parity { set: ParityId(1) },
    };
    let sources: Vec<_> = survivors.iter().map(|block| Some(source(block))).collect();
    let nodes: Vec<usize> = survivors.iter().copied().chain([1]).collect();
    let keep = Some(Sink::Shard(SlotShard {
        slot: INTO,
        ..slots[1].clone()
    }));
    let mut works = session_of(session, plan, &nodes, slots[1].length, &sources, &[keep]);
    works
        .iter_mut()
        .for_each(|work| work.stripes = stripes.clone());
    works
}

pub(super) async fn run(world: &World, works: Vec<SessionWork>) -> Vec<SessionEnd> {
    let running = works.into_iter().map(|work| {
        let mut all = 0..world.executors.len();
        let at = all.find(|at| node(*at) == work.members[work.member]);
        let executor = world.executors[at.unwrap()].clone();
        tokio::spawn(async move { executor.run_to_end(work).await })
    });
    let ended = futures::future::join_all(running).await;
    ended.into_iter().map(|end| end.unwrap()).collect()
}

fn all() -> Vec<Range<u64>> {
    std::iter::once(0..STRIPES as u64).collect()
}

/// What is left of all stripes.
fn rest(kept: &[Range<u64>]) -> Vec<Range<u64>> {
    let done = |stripe: &u64| kept.iter().any(|run| run.contains(stripe));
    (0..STRIPES as u64)
        .filter(|stripe| !done(stripe))
        .map(|stripe| stripe..stripe + 1)
        .collect()
}

#[tokio::test]
async fn a_repair_that_breaks_off_goes_on_where_it_ended_with_another_survivor() {
    for shape in [RepairShape::Chain, RepairShape::Gather] {
        let (world, shards, slots) = with_a_loss().await;
        // A survivor's block has lost its digest half-way.
        locked(&world.rams[3].slots)
            .get_mut(&SlotId::new(1))
            .unwrap()[25 * CHUNK as usize] ^= 1;
        let works = repair(
            &world,
            &slots,
            &Reading {
                session: 2,
                survivors: &[0, 2, 3, 4],
            },
            shape,
            all(),
        );
        let ends = run(&world, works).await;
        assert!(
            matches!(&ends[2].outcome, Err(SessionFault::Corrupt(_))),
            "{ends:?}"
        );
        let newcomer = &ends[4];
        assert!(newcomer.outcome.is_err());
        let kept: u64 = newcomer.kept.iter().map(|run| run.end - run.start).sum();
        assert!(kept > 0 && kept < STRIPES as u64, "{newcomer:?}");
        assert!(ends[..4].iter().all(|end| end.kept.is_empty()));
        let got = locked(&world.rams[1].slots)[&INTO].clone();
        for stripe in newcomer.kept.iter().cloned().flatten() {
            let range = stripe as usize * CHUNK as usize;
            let range = range..(range + CHUNK as usize).min(got.len());
            assert!(got[range.clone()] == shards[1][range], "stripe {stripe}");
        }
        // The other parity stands in for that survivor, and only what is missing moves.
        let before = world.sent();
        let left = rest(&newcomer.kept);
        let blocks = left.len() as u64;
        let works = repair(
            &world,
            &slots,
            &Reading {
                session: 3,
                survivors: &[0, 2, 4, 5],
            },
            shape,
            left,
        );
        let ends = run(&world, works).await;
        assert!(ends.iter().all(|end| end.outcome.is_ok()), "{ends:?}");
        assert!(locked(&world.rams[1].slots)[&INTO] == shards[1]);
        assert!(world.sent() - before <= 4 * blocks * (u64::from(CHUNK) + 16));
        world.assert_all_came_back();
    }
}

#[tokio::test]
async fn an_encode_that_breaks_off_keeps_what_it_has_made() {
    for shape in [Shape::gather_at_all_sources(4), Shape::GatherAtKeepers] {
        let mut world = World::threaded(4, 2);
        world.shape = Some(shape);
        let shards: Vec<Vec<u8>> = (0..4)
            .map(|at| noise(at + 1, STRIPES * CHUNK as usize - 11))
            .collect();
        let mut slots: Vec<_> = (0..4).map(|at| world.store(at, 1, &shards[at])).collect();
        let spoilt = 25 * CHUNK as usize;
        locked(&world.rams[3].slots)
            .get_mut(&SlotId::new(1))
            .unwrap()[spoilt] ^= 1;
        let ends = run(&world, world.encode(1, &slots, 1)).await;
        let kept = [ends[4].kept.clone(), ends[5].kept.clone()];
        assert!(ends[4].outcome.is_err() && kept.iter().all(|kept| !kept.is_empty()));
        slots[3] = world.store(3, 1, &shards[3]);
        // What one of them lacks comes to both.
        let mut both = rest(&kept[0]);
        both.extend(rest(&kept[1]));
        both.sort_by_key(|run| run.start);
        both.dedup();
        assert!(both.len() < STRIPES);
        let is_left = |stripe: &u64| both.iter().any(|run| run.contains(stripe));
        let mut works = world.encode(2, &slots, 1);
        for (member, work) in works.iter_mut().enumerate() {
            work.stripes = both.clone();
            if let Some(kept) = member.checked_sub(4).map(|keeper| &kept[keeper]) {
                let made = kept.iter().cloned().flatten();
                let carried = made.filter(|stripe| !is_left(stripe));
                work.carried = carried.map(|stripe| stripe..stripe + 1).collect();
            }
        }
        let ends = run(&world, works).await;
        assert!(ends.iter().all(|end| end.outcome.is_ok()), "{ends:?}");
        for (row, expected) in world.oracle(&shards).iter().enumerate() {
            assert!(
                world.parity(row, 1, shards[0].len()) == *expected,
                "parity {row}"
            );
        }
        world.assert_all_came_back();
    }
}

fn with_proofs(
    mut works: Vec<SessionWork>,
    survivors: &[usize],
    slots: &[SlotShard],
) -> Vec<SessionWork> {
    let proof = |shard: &SlotShard| ExpectedShard {
        length: shard.length,
        leaves: shard.leaves.clone(),
        prints: Arc::default(),
    };
    let members = survivors.iter().enumerate();
    works[survivors.len()].proofs = members
        .filter_map(|(member, block)| Some((member, proof(slots.get(*block)?))))
        .collect();
    works
}

#[tokio::test]
async fn a_lying_hop_of_a_chain_spoils_the_result_which_is_noticed() {
    let (world, _, slots) = with_a_loss().await;
    locked(&world.wires.liars).insert(node(2));
    let works = repair(
        &world,
        &slots,
        &Reading {
            session: 2,
            survivors: &[0, 2, 3, 4],
        },
        RepairShape::Chain,
        all(),
    );
    let ends = run(&world, works).await;
    assert!(
        matches!(&ends[4].outcome, Err(SessionFault::WrongResult(_))),
        "{ends:?}"
    );
    world.assert_all_came_back();
}

#[tokio::test]
async fn whoever_sends_a_wrong_block_straight_is_named() {
    for (liar, survivors) in [(0, [0, 2, 3, 4]), (3, [0, 2, 3, 5])] {
        let (world, shards, slots) = with_a_loss().await;
        locked(&world.wires.liars).insert(node(liar));
        let direct = RepairShape::GatherAtNewcomers;
        let works = repair(
            &world,
            &slots,
            &Reading {
                session: 2,
                survivors: &survivors,
            },
            direct,
            all(),
        );
        let ends = run(&world, with_proofs(works, &survivors, &slots)).await;
        let named = match &ends[4].outcome {
            Err(SessionFault::WrongBytes { node, .. }) => node.clone(),
            other => panic!("expected n{liar} to be named, got {other:?}"),
        };
        assert_eq!(named, node(liar));
        // Without it the rest comes.
        let others: Vec<usize> = (0..6).filter(|at| *at != liar && *at != 1).collect();
        let works = repair(
            &world,
            &slots,
            &Reading {
                session: 3,
                survivors: &others,
            },
            direct,
            rest(&ends[4].kept),
        );
        let ends = run(&world, with_proofs(works, &others, &slots)).await;
        assert!(ends.iter().all(|end| end.outcome.is_ok()), "{ends:?}");
        assert!(locked(&world.rams[1].slots)[&INTO] == shards[1]);
        world.assert_all_came_back();
    }
}

#[tokio::test]
async fn the_one_sender_of_what_has_no_digest_is_blamed_for_a_wrong_result() {
    let (world, _, slots) = with_a_loss().await;
    let survivors = [0, 2, 3, 4];
    locked(&world.wires.liars).insert(node(4));
    let direct = RepairShape::GatherAtNewcomers;
    let works = repair(
        &world,
        &slots,
        &Reading {
            session: 2,
            survivors: &survivors,
        },
        direct,
        all(),
    );
    let ends = run(&world, with_proofs(works, &survivors, &slots)).await;
    assert!(
        matches!(&ends[4].outcome, Err(SessionFault::Unproven { node: blamed, .. }) if *blamed == node(4)),
        "{ends:?}"
    );
}
