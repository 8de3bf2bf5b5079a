//! Encoding plans: every shape computes the matrix product, within its bounds.

use proptest::prelude::*;
use storaged_codec::{ChunkSize, CodingMatrix, Geometry, engine};

use super::execute::{Shards, run, shards};
use crate::{CodingPlan, Coefficients};
use crate::{
    DirtyMap, NodeLoad, Order, ParityHolders, PlanError, Shape, StripeSet, StripedPlan, encode_plan,
};

pub fn chunk() -> ChunkSize {
    ChunkSize::new(4096).expect("valid")
}

pub fn coefficients(k: usize, m: usize) -> Coefficients {
    let matrix = CodingMatrix::cauchy(Geometry::new(k, m).expect("valid"));
    let rows = (0..m).map(|j| matrix.parity_row(j).to_vec()).collect();
    Coefficients::new(rows).expect("rectangular")
}

pub fn encoded(data: &Shards, m: usize) -> Shards {
    let matrix = CodingMatrix::cauchy(Geometry::new(data.len(), m).expect("valid"));
    let mut parity = vec![vec![0; data[0].len()]; m];
    let blocks: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
    let mut out: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
    engine().encode(&matrix, &blocks, &mut out);
    parity
}

fn keepers(m: usize) -> impl Strategy<Value = ParityHolders> {
    let rotating = (m..m + 14).prop_map(|partners| ParityHolders::Rotating { partners });
    prop_oneof![Just(ParityHolders::Fixed), rotating]
}

fn order(k: usize) -> impl Strategy<Value = Order> {
    let fixed = Just((0..k).collect::<Vec<_>>()).prop_shuffle();
    prop_oneof![Just(Order::Rotating), fixed.prop_map(Order::Fixed)]
}

fn shape(k: usize) -> impl Strategy<Value = Shape> {
    prop_oneof![
        order(k).prop_map(|order| Shape::Chain { order }),
        (2usize..6, order(k)).prop_map(|(fan_in, order)| Shape::Tree { fan_in, order }),
        prop::collection::vec(0..k, 1..20).prop_map(|roots| Shape::GatherAtSources { roots }),
        Just(Shape::gather_at_all_sources(k)),
        Just(Shape::GatherAtKeepers),
    ]
}

#[derive(Debug, Clone)]
struct Case {
    k: usize,
    m: usize,
    keepers: ParityHolders,
    shape: Shape,
    length: usize,
    dirty: Vec<u64>,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    (1usize..=16, 1usize..=4).prop_flat_map(|(k, m)| {
        let rest = (
            1usize..160_000,
            prop::collection::vec(0u64..40, 0..40),
            any::<u64>(),
        );
        (keepers(m), shape(k), rest).prop_map(move |(keepers, shape, (length, dirty, seed))| Case {
            k,
            m,
            keepers,
            shape,
            length,
            dirty,
            seed,
        })
    })
}

fn dirty_set(length: usize, dirty: &[u64]) -> StripeSet {
    let mut map = DirtyMap::clean(chunk().count(length as u64));
    dirty.iter().for_each(|chunk| map.mark(*chunk));
    StripeSet::dirty(chunk(), length as u64, &map)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn every_plan_yields_exactly_the_parity_and_moves_exactly_what_it_says(case in case()) {
        let coefficients = coefficients(case.k, case.m);
        let plan = encode_plan(&coefficients, case.keepers, &case.shape).expect("fits");
        prop_assert_eq!(plan.prove(&coefficients), Ok(()));
        let data = shards(case.k, case.length, case.seed);
        let all = StripeSet::all(chunk(), case.length as u64);
        let outcome = run(&plan, &data, &all, case.m);
        prop_assert_eq!(&outcome.kept, &encoded(&data, case.m));
        prop_assert_eq!(&outcome.loads, &plan.loads(&all));
        let kept: u64 = outcome.loads.iter().map(|load| load.kept).sum();
        prop_assert_eq!(kept, (case.m * case.length) as u64);
        let moved = |f: fn(&NodeLoad) -> u64| -> u64 { outcome.loads.iter().map(f).sum() };
        prop_assert_eq!(moved(|load| load.sent), moved(|load| load.received));
    }

    #[test]
    fn only_dirty_stripes_move_and_parity_is_updated_by_the_difference(case in case()) {
        let coefficients = coefficients(case.k, case.m);
        let plan = encode_plan(&coefficients, case.keepers, &case.shape).expect("fits");
        let (old, mut new) = (shards(case.k, case.length, case.seed), Shards::new());
        let set = dirty_set(case.length, &case.dirty);
        let change = shards(case.k, case.length, !case.seed);
        let mut difference = vec![vec![0; case.length]; case.k];
        for stripe in set.iter() {
            let range = chunk().range(stripe, case.length as u64);
            let range = range.start as usize..range.end as usize;
            difference.iter_mut().zip(&change).for_each(|(d, c)| d[range.clone()].copy_from_slice(&c[range.clone()]));
        }
        for (old, difference) in old.iter().zip(&difference) {
            new.push(old.iter().zip(difference).map(|(a, b)| a ^ b).collect());
        }
        let outcome = run(&plan, &difference, &set, case.m);
        prop_assert_eq!(&outcome.loads, &plan.loads(&set));
        let updated: Shards = encoded(&old, case.m).iter().zip(&outcome.kept)
            .map(|(old, change)| old.iter().zip(change).map(|(a, b)| a ^ b).collect()).collect();
        prop_assert_eq!(updated, encoded(&new, case.m));
        // Whatever the plan, a node that keeps parity keeps the same stripes of it.
        let again = encode_plan(&coefficients, case.keepers, &Shape::GatherAtKeepers).expect("fits");
        let again = run(&again, &difference, &set, case.m);
        prop_assert_eq!(outcome.keepers, again.keepers);
    }

    #[test]
    fn the_stripes_of_all_classes_are_the_set(case in case()) {
        let plan = encode_plan(&coefficients(case.k, case.m), case.keepers, &case.shape).expect("fits");
        let set = dirty_set(case.length, &case.dirty);
        let mut all: Vec<u64> = (0..plan.classes().len())
            .flat_map(|class| plan.stripes_of(class, &set).into_iter().flatten())
            .collect();
        all.sort_unstable();
        prop_assert!(all.into_iter().eq(set.iter()));
    }

    #[test]
    fn a_gather_moves_k_plus_m_minus_one_blocks_per_stripe(case in case()) {
        let set = dirty_set(case.length, &case.dirty);
        for shape in [Shape::gather_at_all_sources(case.k), Shape::GatherAtKeepers] {
            let plan = encode_plan(&coefficients(case.k, case.m), case.keepers, &shape).expect("fits");
            let sent: u64 = plan.loads(&set).iter().map(|load| load.sent).sum();
            prop_assert_eq!(sent, (case.k + case.m - 1) as u64 * set.bytes());
        }
    }

    #[test]
    fn a_chain_moves_m_sums_per_hop_but_blocks_while_they_are_fewer(case in case()) {
        let set = dirty_set(case.length, &case.dirty);
        let shape = Shape::Chain { order: Order::Rotating };
        let plan = encode_plan(&coefficients(case.k, case.m), case.keepers, &shape).expect("fits");
        let sent: u64 = plan.loads(&set).iter().map(|load| load.sent).sum();
        let per_stripe: usize = (1..case.k).map(|t| t.min(case.m)).sum::<usize>() + case.m;
        prop_assert_eq!(sent, per_stripe as u64 * set.bytes());
    }

    #[test]
    fn gathering_in_turn_is_even_whatever_is_dirty(case in case()) {
        let shape = Shape::gather_at_all_sources(case.k);
        let plan = encode_plan(&coefficients(case.k, case.m), ParityHolders::Fixed, &shape).expect("fits");
        let set = dirty_set(case.length, &case.dirty);
        let loads = plan.loads(&set);
        let bytes = chunk().bytes() as u64;
        let spread = |f: fn(&NodeLoad) -> u64, loads: &[NodeLoad]| {
            let all = loads.iter().map(f);
            all.clone().max().unwrap_or(0) - all.min().unwrap_or(0)
        };
        // One root more or less sends m blocks instead of one and receives k - 1 instead of none; the short last
        // stripe adds less than a turn.
        let (sources, sinks) = loads.split_at(case.k);
        prop_assert!(spread(|l| l.sent, sources) <= 2 * case.m as u64 * bytes);
        prop_assert!(spread(|l| l.received, sources) <= 2 * case.k as u64 * bytes);
        // Every node that keeps parity receives exactly what it keeps.
        prop_assert!(sinks.iter().all(|l| (l.sent, l.received, l.kept) == (0, set.bytes(), set.bytes())));
    }

    #[test]
    fn no_node_holds_more_blocks_than_stated(case in case(), window in 1usize..9) {
        let plan = encode_plan(&coefficients(case.k, case.m), case.keepers, &case.shape).expect("fits");
        let most = (0..plan.members()).map(|n| plan.blocks_in_flight_max(n, window)).max();
        let bound = match case.shape {
            Shape::Chain { .. } => 2 * case.m + 1,
            Shape::Tree { fan_in, .. } => (fan_in + 1) * case.m + 1,
            Shape::GatherAtSources { .. } | Shape::GatherAtKeepers => case.k + case.m,
        };
        prop_assert!(most.unwrap_or(0) <= window * bound.max(2));
    }
}

/// Two groups of k that code for each other: what a node of the first does for both.
fn for_each_other(k: usize, m: usize, shape: &Shape, set: &StripeSet) -> Vec<NodeLoad> {
    let keepers = ParityHolders::Rotating { partners: k };
    let loads = encode_plan(&coefficients(k, m), keepers, shape)
        .expect("fits")
        .loads(set);
    (0..k)
        .map(|node| loads[node].plus(loads[k + node]))
        .collect()
}

#[test]
fn a_rotating_gather_sends_one_and_an_eighth_of_a_shard_per_node_at_eight_plus_two() {
    let shard = 64 * 8 * 4096u64;
    let set = StripeSet::all(chunk(), shard);
    for (m, eighths) in [(2, 9), (4, 11)] {
        for load in for_each_other(8, m, &Shape::GatherAtKeepers, &set) {
            assert_eq!(load.sent, shard * eighths / 8);
            assert_eq!(load.received, shard * eighths / 8);
            assert_eq!(load.kept, shard * m as u64 / 8);
        }
    }
    let order = Order::Rotating;
    for load in for_each_other(8, 2, &Shape::Chain { order }, &set) {
        assert_eq!(load.sent, shard * 15 / 8);
    }
}

#[test]
fn a_gather_at_the_sources_needs_no_partners_to_send_as_little() {
    for (k, m) in [(8, 2), (8, 4), (32, 2)] {
        let shard = (k * 16 * 4096) as u64;
        let set = StripeSet::all(chunk(), shard);
        let shape = Shape::gather_at_all_sources(k);
        let plan = encode_plan(&coefficients(k, m), ParityHolders::Fixed, &shape).expect("fits");
        for load in &plan.loads(&set)[..k] {
            assert_eq!(load.sent, shard * (k + m - 1) as u64 / k as u64);
            assert_eq!(load.received, shard * (k - 1) as u64 / k as u64);
        }
    }
}

#[test]
fn the_chain_of_the_paper_is_expressed_too() {
    let (k, m, length) = (5, 3, 50_000);
    let plan = StripedPlan::uniform(CodingPlan::chain(&coefficients(k, m)), k);
    let data = shards(k, length, 7);
    let set = StripeSet::all(chunk(), length as u64);
    let outcome = run(&plan, &data, &set, m);
    assert_eq!(outcome.kept, encoded(&data, m));
    assert_eq!(outcome.loads, plan.loads(&set));
    assert!(
        outcome.loads[..k]
            .iter()
            .all(|load| load.sent == (m * length) as u64)
    );
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let coefficients = coefficients(4, 2);
    let refused =
        |keepers, shape| encode_plan(&coefficients, keepers, &shape).expect_err("refused");
    let order = Order::Fixed(vec![0, 1, 2, 2]);
    assert!(matches!(
        refused(ParityHolders::Fixed, Shape::Chain { order }),
        PlanError::Order { .. }
    ));
    let tree = |fan_in| Shape::Tree {
        fan_in,
        order: Order::Rotating,
    };
    assert_eq!(refused(ParityHolders::Fixed, tree(1)), PlanError::FanIn(1));
    let roots = Shape::GatherAtSources { roots: vec![4] };
    assert!(matches!(
        refused(ParityHolders::Fixed, roots),
        PlanError::Roots { .. }
    ));
    let none = Shape::GatherAtSources { roots: vec![] };
    assert!(matches!(
        refused(ParityHolders::Fixed, none),
        PlanError::Roots { .. }
    ));
    let few = ParityHolders::Rotating { partners: 1 };
    assert_eq!(
        refused(few, Shape::GatherAtKeepers),
        PlanError::ParityHolders { needed: 2, got: 1 }
    );
}

#[test]
fn a_wrong_plan_has_no_proof() {
    let coefficients = coefficients(4, 2);
    let good = CodingPlan::chain(&coefficients);
    assert_eq!(crate::prove(&good, &coefficients), Ok(()));
    let mut changed = good.clone();
    changed.hops[2].outputs[0].rows[1][2] ^= 1;
    assert_eq!(
        crate::prove(&changed, &coefficients),
        Err(PlanError::Wrong { sink: 1 })
    );
    let mut short = good;
    short.hops.remove(1);
    assert!(matches!(
        crate::prove(&short, &coefficients),
        Err(PlanError::Malformed { .. })
    ));
    let striped = encode_plan(&coefficients, ParityHolders::Fixed, &Shape::GatherAtKeepers);
    let striped = striped.expect("a plan");
    assert_eq!(striped.prove(&coefficients), Ok(()));
    let mut rows: Vec<Vec<u8>> = coefficients.rows().iter().map(|row| row.to_vec()).collect();
    rows[0][3] ^= 1;
    let other = Coefficients::new(rows).expect("rows");
    assert_eq!(striped.prove(&other), Err(PlanError::Wrong { sink: 0 }));
}

/// What the chooser compares: blocks of every stripe that a member has in its hands, times stripes in flight.
#[test]
fn blocks_in_flight_grow_with_the_stripes_in_flight() {
    let order = Order::Fixed(vec![0, 1, 2]);
    let plan = encode_plan(
        &coefficients(3, 2),
        ParityHolders::Fixed,
        &Shape::Chain { order },
    );
    let plan = plan.expect("a plan");
    let of = |stripes| {
        let members = 0..plan.members();
        let of_all = members.map(|member| plan.blocks_in_flight_max(member, stripes));
        of_all.collect::<Vec<_>>()
    };
    // The first sends its block as it is, the second makes two sums of it and its own, the third of those and its own.
    let one = of(1);
    assert_eq!(&one[..3], [1 + 1, 1 + 1 + 2, 2 + 1 + 2]);
    assert_eq!(
        of(8),
        one.iter().map(|blocks| blocks * 8).collect::<Vec<_>>()
    );
}

/// A member of a gather that sends its own block alone holds two, that one and what it sends; the one that gathers holds one of each
/// member and its sums.
#[test]
fn who_gathers_a_stripe_holds_more_of_it_than_who_sends_to_it() {
    let plan = encode_plan(
        &coefficients(4, 2),
        ParityHolders::Fixed,
        &Shape::gather_at_all_sources(4),
    );
    let plan = plan.expect("a plan");
    let held = |member| {
        (0..4)
            .map(|class| plan.blocks_held(member, class))
            .collect()
    };
    let of_first: Vec<_> = held(0);
    assert_eq!(of_first, [3 + 1 + 2, 2, 2, 2]);
    assert_eq!(plan.blocks_in_flight_max(0, 8), 8 * (3 + 1 + 2));
    // A coding node keeps what it receives; there is no fifth class.
    let of_coding: Vec<_> = held(4);
    assert_eq!(of_coding, [2; 4]);
    assert_eq!(plan.blocks_held(0, 4), 0);
}
