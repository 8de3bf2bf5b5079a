//! Runs a plan on real blocks and counts what it moves.

use storaged_codec::engine;

use crate::{CodingPlan, Target};
use crate::{NodeLoad, StripeSet, StripedPlan};

/// Bytes of every source's shard, as long as the lane.
pub type Shards = Vec<Vec<u8>>;

/// What came out of a plan.
pub struct Outcome {
    /// `kept[sink]`: as long as the lane; stripes that did not move are zeros.
    pub kept: Shards,
    /// What every member really did.
    pub loads: Vec<NodeLoad>,
    /// `keepers[sink][stripe]`: which member kept it.
    pub keepers: Vec<Vec<Option<usize>>>,
}

/// Runs all stripes of a set.
pub fn run(plan: &StripedPlan, shards: &Shards, set: &StripeSet, sinks: usize) -> Outcome {
    let length = shards.iter().map(Vec::len).max().unwrap_or(0);
    let stripes = set.chunk().count(length as u64) as usize;
    let mut outcome = Outcome {
        kept: vec![vec![0; length]; sinks],
        loads: vec![NodeLoad::default(); plan.members()],
        keepers: vec![vec![None; stripes]; sinks],
    };
    for (turn, stripe) in (0..).zip(set.iter()) {
        let class = &plan.classes()[plan.class_of(stripe, turn)];
        let range = set.chunk().range(stripe, length as u64);
        let range = range.start as usize..range.end as usize;
        let blocks: Shards = shards.iter().map(|s| s[range.clone()].to_vec()).collect();
        for (sink, member, sum) in run_stripe(class, &blocks, &mut outcome.loads) {
            outcome.kept[sink][range.clone()].copy_from_slice(&sum);
            let keeper = &mut outcome.keepers[sink][stripe as usize];
            assert_eq!(*keeper, None, "sink {sink} of stripe {stripe} kept twice");
            *keeper = Some(member);
        }
    }
    outcome
}

fn run_stripe(
    plan: &CodingPlan,
    blocks: &Shards,
    loads: &mut [NodeLoad],
) -> Vec<(usize, usize, Vec<u8>)> {
    let mut edges: Vec<Option<Shards>> = vec![None; plan.edges.len()];
    let mut kept = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for hop in &plan.hops {
        assert!(seen.insert(hop.member), "one hop per member");
        let mut operands = Shards::new();
        for edge in &hop.inputs {
            assert_eq!(plan.edges[*edge].to, hop.member);
            let sums = edges[*edge].take().expect("written before it is read");
            loads[hop.member].received += bytes(&sums);
            operands.extend(sums);
        }
        if let Some(source) = hop.local {
            assert_eq!(source, hop.member, "a source reads its own block");
            loads[hop.member].read += blocks[source].len() as u64;
            operands.push(blocks[source].clone());
        }
        for output in &hop.outputs {
            let sums: Shards = output.rows.iter().map(|row| dot(row, &operands)).collect();
            let terms = output.rows.iter().flatten().filter(|c| **c > 1);
            loads[hop.member].folded += terms.count() as u64 * operands[0].len() as u64;
            match output.target {
                Target::Edge(edge) => {
                    assert_eq!(plan.edges[edge].from, hop.member);
                    assert_eq!(plan.edges[edge].width, sums.len());
                    loads[hop.member].sent += bytes(&sums);
                    assert!(edges[edge].replace(sums).is_none(), "an edge written twice");
                }
                Target::Keep(sink) => {
                    assert_eq!(sums.len(), 1);
                    loads[hop.member].kept += bytes(&sums);
                    kept.push((sink, hop.member, sums.into_iter().next().expect("one")));
                }
            }
        }
    }
    assert!(
        edges.iter().all(Option::is_none),
        "all that is sent is read"
    );
    kept
}

fn bytes(blocks: &Shards) -> u64 {
    blocks.iter().map(|block| block.len() as u64).sum()
}

/// The linear combination of blocks, by the engine.
pub fn dot(row: &[u8], operands: &Shards) -> Vec<u8> {
    assert_eq!(row.len(), operands.len());
    let mut sum = vec![0; operands[0].len()];
    for (c, operand) in row.iter().zip(operands) {
        engine().fold(&mut [&mut sum[..]], &[*c], operand);
    }
    sum
}

/// Shards of a fixed pseudo-random pattern.
pub fn shards(count: usize, length: usize, seed: u64) -> Shards {
    let shard = |i: usize| {
        let mut state = seed
            .wrapping_add(i as u64 + 1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 24) as u8
        };
        (0..length).map(|_| next()).collect()
    };
    (0..count).map(shard).collect()
}
