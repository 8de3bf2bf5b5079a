//! Plans on links of a bounded rate, in simulated time: what the executor makes of a plan, without transport, crypto
//! and processors. Every node has an uplink and a downlink; a block takes its time on the one and then on the other.

use std::sync::Arc;
use std::time::Duration;

use storaged_codec::{ChunkSize, CodingMatrix, Geometry};
use storaged_core::{ParityId, SessionWork, Sink, SlotShard, Source};
use storaged_plan::chooser::{Dirty, EncodeCase, GroupFacts, choose_encode};
use storaged_plan::{
    Coefficients, Group, Order, ParityHolders, RepairShape, RepairTask, Shape, StripedPlan,
    encode_plan, repair_plans,
};
use storaged_wire::SlotId;
use tokio::time::Instant;

use super::world::{CHUNK, World, locked, node, noise, session_of};
use crate::encode::{ExecutorLimits, Pool};

/// Bytes per second of every link: a block takes a tenth of a second.
pub const RATE: u64 = CHUNK as u64 * 10;

/// So many nodes on such links.
pub fn world(nodes: usize) -> World {
    let limits = ExecutorLimits {
        stall: Duration::from_secs(1000),
        ..ExecutorLimits::default()
    };
    let world = World::new(nodes - 2, 2, &Pool::inline(), limits);
    *locked(&world.wires.rate) = Some(RATE);
    world
}

fn coefficients(k: usize, m: usize) -> Coefficients {
    let matrix = CodingMatrix::cauchy(Geometry::new(k, m).unwrap());
    let rows = (0..m).map(|row| matrix.parity_row(row).to_vec()).collect();
    Coefficients::new(rows).unwrap()
}

/// Nodes of a group, data first, of which so many code.
#[derive(Debug, Clone, Copy)]
pub struct GroupOf<'a> {
    pub nodes: &'a [usize],
    pub m: usize,
}

/// An encode of shards of so many stripes on these nodes.
pub fn encode(
    world: &World,
    session: u64,
    group: &GroupOf<'_>,
    stripes: usize,
    shape: &Shape,
) -> Vec<SessionWork> {
    let GroupOf { nodes, m } = *group;
    let k = nodes.len() - m;
    let plan = encode_plan(&coefficients(k, m), ParityHolders::Fixed, shape).unwrap();
    let length = stripes * CHUNK as usize;
    let source = |at: &usize| {
        let shard = world.store(*at, session, &noise(*at as u64 + 1, length));
        Some(Source::Shard { shard, basis: None })
    };
    let sources: Vec<_> = nodes[..k].iter().map(source).collect();
    let keep = Sink::Parity {
        set: ParityId(session),
        basis: None,
        prints: Arc::default(),
    };
    let keeps = vec![Some(keep); m];
    session_of(
        session,
        Arc::new(plan),
        nodes,
        length as u64,
        &sources,
        &keeps,
    )
}

/// Seconds that these sessions take side by side.
async fn seconds(world: &World, works: Vec<Vec<SessionWork>>) -> f64 {
    let began = Instant::now();
    let running = works.into_iter().map(|works| world.run(works));
    for outcome in futures::future::join_all(running)
        .await
        .into_iter()
        .flatten()
    {
        outcome.unwrap();
    }
    world.assert_all_came_back();
    began.elapsed().as_secs_f64()
}

/// Seconds of `blocks` on one link.
fn ideal(blocks: usize) -> f64 {
    blocks as f64 * f64::from(CHUNK) / RATE as f64
}

pub fn plain_chain(k: usize) -> Shape {
    Shape::Chain {
        order: Order::Fixed((0..k).collect()),
    }
}

#[tokio::test(start_paused = true)]
async fn a_chain_takes_as_long_however_many_nodes_it_has() {
    let stripes = 500;
    let mut took = Vec::new();
    for k in [8, 32] {
        let world = world(k + 2);
        let nodes: Vec<usize> = (0..k + 2).collect();
        let works = encode(
            &world,
            1,
            &GroupOf {
                nodes: &nodes,
                m: 2,
            },
            stripes,
            &plain_chain(k),
        );
        took.push(seconds(&world, vec![works]).await);
        // Every hop but the first sends two sums per stripe.
        let efficiency = ideal(2 * stripes) / took[took.len() - 1];
        eprintln!("chain, k {k}: efficiency {efficiency:.3}");
        assert!(efficiency >= 0.90, "k {k}: {efficiency}");
    }
    assert!(took[1] <= 1.10 * took[0], "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_increment_takes_the_share_of_the_stripes_that_changed() {
    let (k, stripes) = (8, 600);
    let world = world(k + 2);
    let nodes: Vec<usize> = (0..k + 2).collect();
    let mut took = Vec::new();
    for (session, moved) in [(1, stripes), (2, stripes * 6 / 10), (3, 1)] {
        let mut works = encode(
            &world,
            session,
            &GroupOf {
                nodes: &nodes,
                m: 2,
            },
            stripes,
            &plain_chain(k),
        );
        let range = 0..moved as u64;
        works
            .iter_mut()
            .for_each(|work| work.stripes = std::iter::once(range.clone()).collect());
        took.push(seconds(&world, vec![works]).await);
    }
    eprintln!(
        "increments: {:.3} {:.4}",
        took[1] / took[0],
        took[2] / took[0]
    );
    assert!(
        took[1] <= 0.62 * took[0] && took[2] <= 0.022 * took[0],
        "{took:?}"
    );
}

/// Two groups of 8 that code for each other, as `place` makes them.
fn partners() -> [Vec<usize>; 2] {
    let first: Vec<usize> = (0..8).chain([8, 9]).collect();
    let second: Vec<usize> = (8..16).chain([0, 1]).collect();
    [first, second]
}

/// What the chooser takes for one of them.
fn chosen(at: usize, stripes: usize) -> Shape {
    let groups = partners().map(|nodes| Group {
        data: nodes[..8].iter().map(|at| node(*at)).collect(),
        coding: nodes[8..].iter().map(|at| node(*at)).collect(),
    });
    let facts = GroupFacts {
        shard_bytes: (stripes * CHUNK as usize) as u64,
        chunk: ChunkSize::new(CHUNK).unwrap(),
        dirty: Dirty::FULL,
        link_bytes_per_s: RATE,
    };
    let sources: Vec<usize> = (0..8).collect();
    let case = EncodeCase::of_group(&groups, at, &sources, &facts).unwrap();
    choose_encode(&case).unwrap().best().plan.shape.clone()
}

#[tokio::test(start_paused = true)]
async fn of_two_groups_that_code_for_each_other_the_gather_beats_the_chain() {
    let stripes = 480;
    let mut took = Vec::new();
    for is_chosen in [false, true] {
        let world = world(16);
        let sessions = partners().into_iter().enumerate().map(|(at, nodes)| {
            let shape = if is_chosen {
                chosen(at, stripes)
            } else {
                plain_chain(8)
            };
            encode(
                &world,
                at as u64 + 1,
                &GroupOf {
                    nodes: &nodes,
                    m: 2,
                },
                stripes,
                &shape,
            )
        });
        let sessions = sessions.collect();
        took.push(seconds(&world, sessions).await);
        let shard = (stripes * CHUNK as usize) as f64;
        let per_node = world.sent() as f64 / 16.0 / shard;
        eprintln!(
            "two groups, chosen {is_chosen}: {:.1} s, {per_node:.3} shards per node",
            took[took.len() - 1]
        );
        if is_chosen {
            assert!(per_node <= 1.15, "{per_node}");
        }
    }
    eprintln!("gather / chain: {:.3}", took[1] / took[0]);
    assert!(took[1] <= 0.62 * took[0], "{took:?}");
    // The busiest link carries 7/6 of a shard.
    assert!(ideal(stripes * 7 / 6) / took[1] >= 0.85, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn with_dedicated_coding_nodes_the_gather_takes_little_more_than_a_shard() {
    let stripes = 480;
    for (k, m) in [(8, 2), (8, 4), (32, 2)] {
        let world = world(k + m);
        let nodes: Vec<usize> = (0..k + m).collect();
        let shape = Shape::gather_at_all_sources(k);
        let works = encode(&world, 1, &GroupOf { nodes: &nodes, m }, stripes, &shape);
        let took = seconds(&world, vec![works]).await;
        let efficiency = ideal(stripes * (k + m - 1) / k) / took;
        eprintln!("gather, ({k}, {m}): efficiency {efficiency:.3}");
        assert!(efficiency >= 0.85, "({k}, {m}): {efficiency}");
    }
}

/// The repair of these lost blocks of (8, m), each at its own node. All survivors gather in turn; a chain takes eight.
pub fn repair(
    world: &World,
    m: usize,
    stripes: usize,
    lost: &[usize],
    shape: RepairShape,
) -> Vec<SessionWork> {
    let matrix = CodingMatrix::cauchy(Geometry::new(8, m).unwrap());
    let read = match shape {
        RepairShape::Chain => 8,
        _ => 8 + m - lost.len(),
    };
    let survivors = (0..8 + m).filter(|at| !lost.contains(at)).take(read);
    let survivors: Vec<usize> = survivors.collect();
    let rows = |survivors: &[usize], lost: &[usize]| {
        Ok(Coefficients::new(matrix.repair_coefficients(survivors, lost)?).ok())
    };
    let task = RepairTask {
        survivors: &survivors,
        lost,
        needed: 8,
    };
    let mut plan: StripedPlan = repair_plans(&task, shape, rows).unwrap().remove(0);
    if shape == RepairShape::Chain {
        // As sessions do it: in a fixed order.
        plan = StripedPlan::uniform(plan.classes()[0].clone(), 8);
    }
    let length = stripes * CHUNK as usize;
    // Whatever the blocks are, the result is as fast: nobody compares it here.
    let unproven = |at: usize| SlotShard {
        leaves: Arc::from([]),
        ..world.store(at, 1, &noise(at as u64 + 1, length))
    };
    let source = |at: &usize| {
        let shard = unproven(*at);
        Some(Source::Shard { shard, basis: None })
    };
    let sources: Vec<_> = survivors.iter().map(source).collect();
    let keeps: Vec<_> = lost
        .iter()
        .map(|at| Some(Sink::Shard(unproven(*at))))
        .collect();
    let nodes: Vec<usize> = survivors.iter().chain(lost).copied().collect();
    session_of(1, Arc::new(plan), &nodes, length as u64, &sources, &keeps)
}

#[tokio::test(start_paused = true)]
async fn lost_shards_come_back_in_the_time_of_a_copy() {
    let stripes = 400;
    let copy = ideal(stripes);
    for (m, lost, shape, bound) in [
        (2, vec![3], RepairShape::Chain, 1.15),
        (2, vec![3, 6], RepairShape::Gather, 1.25),
        // Ten survivors for eight blocks: the newcomers' links are the busiest.
        (4, vec![3, 6], RepairShape::Gather, 1.10),
    ] {
        let world = world(8 + m);
        let works = repair(&world, m, stripes, &lost, shape);
        let took = seconds(&world, vec![works]).await;
        eprintln!(
            "(8, {m}), {} lost: {:.3} of a copy",
            lost.len(),
            took / copy
        );
        assert!(took <= bound * copy, "{lost:?}: {}", took / copy);
        assert!(locked(&world.rams[3].slots)[&SlotId::new(1)].len() == stripes * CHUNK as usize);
    }
}
