//! Tests of this module.

use proptest::prelude::*;
use storaged_codec::{CodingMatrix, Geometry, RepairError};

use super::encoding::{chunk, encoded};
use super::execute::{Shards, run, shards};
use crate::Coefficients;
use crate::{NodeLoad, PlanError, RepairShape, RepairTask, StripeSet, StripedPlan, repair_plans};

const SHAPES: [RepairShape; 3] = [
    RepairShape::Chain,
    RepairShape::Gather,
    RepairShape::GatherAtNewcomers,
];

fn rows(
    geometry: Geometry,
) -> impl Fn(&[usize], &[usize]) -> Result<Option<Coefficients>, RepairError> {
    let matrix = CodingMatrix::cauchy(geometry);
    move |survivors, lost| Ok(Coefficients::new(matrix.repair_coefficients(survivors, lost)?).ok())
}

fn loads(plans: &[StripedPlan], set: &StripeSet) -> Vec<NodeLoad> {
    let each = plans.iter().map(|plan| plan.loads(set));
    each.reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| a.plus(b)).collect())
        .expect("some")
}

#[derive(Debug, Clone)]
struct Case {
    k: usize,
    m: usize,
    survivors: Vec<usize>,
    lost: Vec<usize>,
    length: usize,
    bytes: std::ops::Range<u64>,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    (1usize..=16, 1usize..=4).prop_flat_map(|(k, m)| {
        let order = Just((0..k + m).collect::<Vec<_>>()).prop_shuffle();
        let cuts = (order, 1..=m, 0..m);
        let rest = (1usize..100_000, 0u64..110_000, 0u64..40_000, any::<u64>());
        (cuts, rest).prop_map(
            move |((order, lost, dropped), (length, from, span, seed))| {
                let (lost, survivors) = order.split_at(lost);
                let used = survivors.len().saturating_sub(dropped).max(k);
                Case {
                    k,
                    m,
                    survivors: survivors[..used].to_vec(),
                    lost: lost.to_vec(),
                    length,
                    bytes: from..from + span,
                    seed,
                }
            },
        )
    })
}

fn codeword(case: &Case) -> Shards {
    let mut blocks = shards(case.k, case.length, case.seed);
    let parity = encoded(&blocks, case.m);
    blocks.extend(parity);
    blocks
}

fn task(case: &Case) -> RepairTask<'_> {
    RepairTask {
        survivors: &case.survivors,
        lost: &case.lost,
        needed: case.k,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn every_repair_gives_back_the_lost_blocks_and_moves_what_it_says(case in case()) {
        let geometry = Geometry::new(case.k, case.m).expect("valid");
        let blocks = codeword(&case);
        let held: Shards = case.survivors.iter().map(|b| blocks[*b].clone()).collect();
        let all = StripeSet::all(chunk(), case.length as u64);
        for shape in SHAPES {
            let plans = repair_plans(&task(&case), shape, rows(geometry)).expect("repairable");
            let mut repaired = vec![vec![0; case.length]; case.lost.len()];
            for (index, plan) in plans.iter().enumerate() {
                let sinks = if plans.len() > 1 { 1 } else { case.lost.len() };
                let outcome = run(plan, &held, &all, sinks);
                prop_assert_eq!(&outcome.loads, &plan.loads(&all));
                outcome.kept.into_iter().enumerate().for_each(|(sink, kept)| repaired[index + sink] = kept);
            }
            let expected: Shards = case.lost.iter().map(|b| blocks[*b].clone()).collect();
            prop_assert_eq!(&repaired, &expected);
            let total = loads(&plans, &all);
            for newcomer in &total[case.survivors.len()..] {
                prop_assert_eq!(newcomer.kept, case.length as u64);
                let gathers = shape == RepairShape::GatherAtNewcomers;
                let blocks = if gathers { case.k as u64 } else { 1 };
                prop_assert_eq!((newcomer.received, newcomer.sent), (blocks * case.length as u64, 0));
            }
        }
    }

    #[test]
    fn survivors_share_a_repair_evenly(case in case()) {
        let geometry = Geometry::new(case.k, case.m).expect("valid");
        let set = StripeSet::all(chunk(), case.length as u64);
        let survivors = case.survivors.len();
        for shape in SHAPES {
            let plans = repair_plans(&task(&case), shape, rows(geometry)).expect("repairable");
            let total = loads(&plans, &set);
            let sent = total[..survivors].iter().map(|load| load.sent);
            let spread = sent.clone().max().unwrap_or(0) - sent.min().unwrap_or(0);
            // A turn in which a survivor sends all it ever sends in one, and one in which it sends nothing.
            let turn = (case.lost.len() * chunk().bytes()) as u64;
            prop_assert!(spread <= turn * (1 + case.m as u64), "{:?}: {} of turns of {}", shape, spread, turn);
        }
    }

    #[test]
    fn a_degraded_read_moves_only_its_ranges_chunks(case in case()) {
        let geometry = Geometry::new(case.k, case.m).expect("valid");
        let set = StripeSet::of_bytes(chunk(), case.length as u64, case.bytes.clone());
        let one = RepairTask { lost: &case.lost[..1], ..task(&case) };
        let blocks = codeword(&case);
        let held: Shards = case.survivors.iter().map(|b| blocks[*b].clone()).collect();
        for shape in SHAPES {
            let plans = repair_plans(&one, shape, rows(geometry)).expect("repairable");
            let outcome = run(&plans[0], &held, &set, 1);
            let sent: u64 = outcome.loads.iter().map(|load| load.sent).sum();
            prop_assert_eq!(sent, case.k as u64 * set.bytes());
            let end = case.bytes.end.min(case.length as u64) as usize;
            let start = (case.bytes.start as usize).min(end);
            prop_assert_eq!(&outcome.kept[0][start..end], &blocks[case.lost[0]][start..end]);
            prop_assert!(set.bytes() <= (end - start + 2 * chunk().bytes()) as u64);
        }
    }
}

#[test]
fn two_lost_shards_cost_a_survivor_twice_the_shard_by_chains_and_nine_eighths_by_gathers() {
    let geometry = Geometry::new(8, 2).expect("valid");
    let task = RepairTask {
        survivors: &[1, 2, 3, 5, 6, 7, 8, 9],
        lost: &[0, 4],
        needed: 8,
    };
    let shard = 64 * 4096;
    let set = StripeSet::all(chunk(), shard);
    let most = |shape| {
        let plans = repair_plans(&task, shape, rows(geometry)).expect("repairable");
        loads(&plans, &set).iter().map(|load| load.sent).max()
    };
    assert_eq!(most(RepairShape::Chain), Some(2 * shard - shard / 8));
    assert_eq!(most(RepairShape::Gather), Some(shard + shard / 8));
}

/// Why nothing else is chosen for several lost blocks: whatever k, l and the number of survivors.
#[test]
fn a_gather_never_sends_more_than_a_chain_and_its_survivors_share_it() {
    for k in 1..=10 {
        for lost in 1..=4 {
            let geometry = Geometry::new(k, 5).expect("valid");
            let gone: Vec<usize> = (0..lost).collect();
            for count in k..=k + 5 - lost {
                let survivors: Vec<usize> = (lost..lost + count).collect();
                let task = RepairTask {
                    survivors: &survivors,
                    lost: &gone,
                    needed: k,
                };
                // Every survivor has every turn equally often.
                let set = StripeSet::all(chunk(), 2 * (count * chunk().bytes()) as u64);
                let sent = |shape| {
                    let plans = repair_plans(&task, shape, rows(geometry)).expect("repairable");
                    let loads = loads(&plans, &set);
                    let sent = loads[..count].iter().map(|load| load.sent);
                    (sent.clone().max(), sent.sum::<u64>())
                };
                let (chain, gather) = (sent(RepairShape::Chain), sent(RepairShape::Gather));
                let stripes = set.bytes();
                let turns = (k - 1 + lost) as u64 * stripes;
                assert_eq!(
                    gather,
                    (Some(turns / count as u64), turns),
                    "{k} {lost} {count}"
                );
                assert!(gather.1 <= chain.1, "{k} {lost}: {gather:?} {chain:?}");
            }
        }
    }
}

#[test]
fn one_lost_shard_costs_no_node_more_than_a_plain_copy() {
    let geometry = Geometry::new(8, 2).expect("valid");
    let task = RepairTask {
        survivors: &[0, 1, 2, 4, 5, 6, 7, 8, 9],
        lost: &[3],
        needed: 8,
    };
    let shard = 63 * 4096;
    let set = StripeSet::all(chunk(), shard);
    for shape in [RepairShape::Chain, RepairShape::Gather] {
        let plans = repair_plans(&task, shape, rows(geometry)).expect("repairable");
        let loads = loads(&plans, &set);
        assert_eq!(loads[9].received, shard);
        assert!(loads[..9].iter().all(|load| load.sent == shard * 8 / 9));
        assert!(loads.iter().all(|load| load.received <= shard));
    }
}

#[test]
fn too_few_survivors_are_refused() {
    let geometry = Geometry::new(4, 2).expect("valid");
    let task = RepairTask {
        survivors: &[0, 1, 2],
        lost: &[3, 4, 5],
        needed: 4,
    };
    let refused = repair_plans(&task, RepairShape::Chain, rows(geometry));
    assert_eq!(refused, Err(PlanError::Survivors { needed: 4, got: 3 }));
    let twice = RepairTask {
        survivors: &[0, 1, 2, 2],
        ..task
    };
    let refused = repair_plans(&twice, RepairShape::Chain, rows(geometry));
    assert!(matches!(refused, Err(PlanError::Coefficients(_))));
}

/// Rows for other blocks than were asked for would make a plan that computes something else.
#[test]
fn rows_of_another_size_make_no_plan() {
    let task = RepairTask {
        survivors: &[0, 1, 2],
        lost: &[3],
        needed: 3,
    };
    for (sinks, sources) in [(2, 3), (1, 2)] {
        let rows = |_: &[usize], _: &[usize]| {
            let rows = vec![vec![1; sources]; sinks];
            Ok(Coefficients::new(rows).ok())
        };
        let made = repair_plans(&task, RepairShape::Chain, rows);
        assert!(matches!(made, Err(PlanError::Blocks { .. })), "{made:?}");
    }
}

/// At 32 survivors each inverse takes a tenth of a millisecond, and every member of a session makes its plan.
#[test]
fn a_matrix_is_inverted_once_for_each_set_of_survivors() {
    let geometry = Geometry::new(32, 2).expect("a geometry");
    let of_matrix = rows(geometry);
    for (survivors, lost, sets) in [(0..32, vec![32, 33], 1), (1..34, vec![0], 33)] {
        let survivors: Vec<usize> = survivors.collect();
        let task = RepairTask {
            survivors: &survivors,
            lost: &lost,
            needed: 32,
        };
        let asked = std::cell::Cell::new(0);
        let counted = |survivors: &[usize], lost: &[usize]| {
            asked.set(asked.get() + 1);
            of_matrix(survivors, lost)
        };
        let plans = repair_plans(&task, RepairShape::Gather, counted).expect("repairable");
        assert_eq!(plans[0].classes().len(), survivors.len());
        assert_eq!(asked.get(), sets);
    }
}
