//! What sessions compute: full and incremental encode, repair, part of the stripes, plans that are no chains.

use std::sync::Arc;

use storaged_core::{ParityId, Sink, SlotShard, Source};
use storaged_plan::{CodingPlan, Coefficients, Edge, Hop, HopOutput, StripedPlan, Target};
use storaged_wire::SlotId;

use super::world::{CHUNK, World, locked, noise, session_of};

const STRIPES: usize = 21;

/// Shards of different lengths, none a whole number of chunks, and one of them very short.
fn unequal_shards(k: usize) -> Vec<Vec<u8>> {
    let longest = STRIPES * CHUNK as usize - 100;
    (0..k)
        .map(|index| match index {
            0 => noise(1, longest),
            1 => noise(2, 5),
            _ => noise(index as u64 + 1, longest - index * 3001),
        })
        .collect()
}

fn store_all(world: &World, slot: u64, shards: &[Vec<u8>]) -> Vec<SlotShard> {
    shards
        .iter()
        .enumerate()
        .map(|(at, bytes)| world.store(at, slot, bytes))
        .collect()
}

fn longest(shards: &[Vec<u8>]) -> usize {
    shards.iter().map(Vec::len).max().unwrap_or(0)
}

async fn encoded(k: usize, m: usize) -> (World, Vec<Vec<u8>>, Vec<SlotShard>) {
    let world = World::threaded(k, m);
    let shards = unequal_shards(k);
    let slots = store_all(&world, 1, &shards);
    for outcome in world.run(world.encode(1, &slots, 1)).await {
        outcome.unwrap();
    }
    (world, shards, slots)
}

#[tokio::test]
async fn a_chain_encode_is_the_codecs_encode() {
    for (k, m) in [(1, 1), (1, 3), (4, 2), (8, 3)] {
        let (world, shards, _) = encoded(k, m).await;
        for (row, expected) in world.oracle(&shards).iter().enumerate() {
            assert!(
                world.parity(row, 1, longest(&shards)) == *expected,
                "parity {row} of ({k}, {m})"
            );
        }
        world.assert_all_came_back();
    }
}

#[tokio::test]
async fn an_increment_sends_what_changed_and_makes_the_same_parity() {
    let (world, mut shards, old) = encoded(4, 2).await;
    let before = world.sent();
    // Two stripes change: one at one node, one at two nodes.
    shards[0][3 * CHUNK as usize + 7] ^= 0x55;
    shards[2][3 * CHUNK as usize] ^= 1;
    shards[3][10 * CHUNK as usize..11 * CHUNK as usize].fill(9);
    let new = store_all(&world, 2, &shards);
    for outcome in world.run(world.increment(2, &new, &old, 1, 2)).await {
        outcome.unwrap();
    }
    for (row, expected) in world.oracle(&shards).iter().enumerate() {
        assert!(
            world.parity(row, 2, longest(&shards)) == *expected,
            "parity {row}"
        );
    }
    // Edges 0-1, 1-2, 2-3, 3-4 of two sums and 4-5 of one. Stripe 3 is dirty on all of them, stripe 10 from node 3 on.
    let headers = 16 * 5 * STRIPES as u64;
    let payload = u64::from(CHUNK) * ((4 * 2 + 1) + (2 + 1));
    assert_eq!(world.sent() - before, headers + payload);
    world.assert_all_came_back();
}

#[tokio::test]
async fn an_unchanged_checkpoint_sends_headers_only() {
    let (world, shards, old) = encoded(4, 2).await;
    let before = world.sent();
    let outcomes = world.run(world.increment(2, &old, &old, 1, 2)).await;
    assert!(
        outcomes
            .iter()
            .all(|outcome| outcome.as_ref().is_ok_and(|tally| tally.bytes == 0))
    );
    assert_eq!(world.sent() - before, 16 * 5 * STRIPES as u64);
    assert!(world.parity(0, 2, longest(&shards)) == world.parity(0, 1, longest(&shards)));
}

/// Repairs the `lost` shards, each at its own node, from the first k blocks that are left.
async fn repair(world: &World, shards: &[Vec<u8>], slots: &[SlotShard], lost: &[usize]) {
    let (k, n) = (world.geometry.k(), world.geometry.n());
    let survivors: Vec<usize> = (0..n)
        .filter(|block| !lost.contains(block))
        .take(k)
        .collect();
    let rows = world.matrix.repair_coefficients(&survivors, lost).unwrap();
    let plan = CodingPlan::chain(&Coefficients::new(rows).unwrap());
    let plan = Arc::new(StripedPlan::uniform(plan, k));
    let source = |block: &usize| match slots.get(*block) {
        Some(shard) => Source::Shard {
            shard: shard.clone(),
            basis: None,
        },
        None => Source::Parity { set: ParityId(1) },
    };
    let sources: Vec<Option<Source>> = survivors.iter().map(|block| Some(source(block))).collect();
    let into = SlotId::new(77);
    let mut keeps = Vec::new();
    for at in lost {
        locked(&world.rams[*at].slots).clear();
        locked(&world.rams[*at].slots).insert(into, vec![0xee; shards[*at].len()]);
        keeps.push(Some(Sink::Shard(SlotShard {
            slot: into,
            ..slots[*at].clone()
        })));
    }
    let nodes: Vec<usize> = survivors.iter().chain(lost).copied().collect();
    let works = session_of(9, plan, &nodes, longest(shards) as u64, &sources, &keeps);
    for outcome in world.run(works).await {
        outcome.unwrap();
    }
    for at in lost {
        assert!(
            locked(&world.rams[*at].slots)[&into] == shards[*at],
            "shard {at} of lost {lost:?}"
        );
    }
    world.assert_all_came_back();
}

#[tokio::test]
async fn one_lost_shard_comes_back() {
    for lost in 0..4 {
        let (world, shards, slots) = encoded(4, 2).await;
        repair(&world, &shards, &slots, &[lost]).await;
    }
}

#[tokio::test]
async fn two_lost_shards_come_back() {
    for lost in [[0, 1], [0, 3], [2, 3]] {
        let (world, shards, slots) = encoded(4, 2).await;
        repair(&world, &shards, &slots, &lost).await;
    }
}

#[tokio::test]
async fn only_the_stripes_asked_for_move() {
    let world = World::threaded(4, 2);
    let shards = unequal_shards(4);
    let slots = store_all(&world, 1, &shards);
    let last = STRIPES as u64 - 1;
    let mut works = world.encode(1, &slots, 1);
    works
        .iter_mut()
        .for_each(|work| work.stripes = vec![2..4, 7..7, last..last + 1]);
    for outcome in world.run(works).await {
        outcome.unwrap();
    }
    let expected = world.oracle(&shards);
    let got = world.parity(1, 1, longest(&shards));
    for (stripe, (got, expected)) in got
        .chunks(CHUNK as usize)
        .zip(expected[1].chunks(CHUNK as usize))
        .enumerate()
    {
        match stripe {
            2 | 3 | 20 => assert!(got == expected, "stripe {stripe}"),
            _ => assert!(got.iter().all(|byte| *byte == 0), "stripe {stripe}"),
        }
    }
    // Nine sums cross the five edges; the last stripe is a hundred bytes shorter than a chunk.
    assert_eq!(world.sent(), 16 * 5 * 3 + 9 * (3 * u64::from(CHUNK) - 100));
}

/// Two sources send one block each to a third node, which adds its own and splits the result over two sinks, one of
/// which gets a sum from a source directly too: several inputs, several outputs, coefficients other than one.
fn diamond() -> CodingPlan {
    let edge = |from, to| Edge { from, to, width: 1 };
    let to_edge = |edge, row: &[u8]| HopOutput {
        target: Target::Edge(edge),
        rows: vec![row.to_vec()],
    };
    let keep = |sink, row: &[u8]| HopOutput {
        target: Target::Keep(sink),
        rows: vec![row.to_vec()],
    };
    let hop = |member, inputs: &[usize], local, outputs| Hop {
        member,
        inputs: inputs.to_vec(),
        local,
        outputs,
    };
    CodingPlan {
        edges: vec![edge(0, 2), edge(1, 2), edge(2, 3), edge(2, 4), edge(0, 4)],
        hops: vec![
            hop(0, &[], Some(0), vec![to_edge(0, &[1]), to_edge(4, &[3])]),
            hop(1, &[], Some(1), vec![to_edge(1, &[7])]),
            hop(
                2,
                &[0, 1],
                Some(2),
                vec![to_edge(2, &[1, 2, 5]), to_edge(3, &[0, 1, 9])],
            ),
            hop(3, &[2], None, vec![keep(0, &[1])]),
            hop(4, &[3, 4], None, vec![keep(1, &[1, 4])]),
        ],
    }
}

#[tokio::test]
async fn plans_that_are_no_chains_compute_their_sums_too() {
    let world = World::threaded(3, 2);
    let shards: Vec<Vec<u8>> = (0..3)
        .map(|index| noise(index, STRIPES * CHUNK as usize))
        .collect();
    let slots = store_all(&world, 1, &shards);
    let sources: Vec<Option<Source>> = slots
        .iter()
        .map(|shard| {
            Some(Source::Shard {
                shard: shard.clone(),
                basis: None,
            })
        })
        .collect();
    let keep = Some(Sink::Parity {
        set: ParityId(1),
        basis: None,
        prints: Arc::default(),
    });
    let works = session_of(
        1,
        Arc::new(StripedPlan::uniform(diamond(), 3)),
        &[0, 1, 2, 3, 4],
        longest(&shards) as u64,
        &sources,
        &[keep.clone(), keep],
    );
    for outcome in world.run(works).await {
        outcome.unwrap();
    }
    let sum = |terms: &[(usize, &[u8])]| {
        let mut sum = vec![0; longest(&shards)];
        for (shard, factors) in terms {
            let mut term = shards[*shard].clone();
            for factor in *factors {
                let mut product = vec![0; term.len()];
                storaged_codec::engine().fold(&mut [&mut product], &[*factor], &term);
                term = product;
            }
            storaged_codec::engine().xor(&mut sum, &term);
        }
        sum
    };
    assert!(world.parity(0, 1, longest(&shards)) == sum(&[(0, &[]), (1, &[7, 2]), (2, &[5])]));
    assert!(world.parity(1, 1, longest(&shards)) == sum(&[(1, &[7]), (2, &[9]), (0, &[3, 4])]));
    world.assert_all_came_back();
}
