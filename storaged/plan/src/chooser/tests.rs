//! Tests of this module.

use proptest::prelude::*;
use storaged_codec::{ChunkSize, Geometry};

use super::*;

const GBIT: u64 = 125_000_000;

fn node(rate: u64) -> NodeMeasure {
    NodeMeasure {
        up_bytes_per_s: rate,
        down_bytes_per_s: rate,
        round_trip_us: 200,
        loss_ppm: 0,
        fold_bytes_per_s: 15_000_000_000,
        transport_bytes_per_s: 10_000_000_000,
    }
}

fn case(k: usize, m: usize, coding: CodingNodes) -> EncodeCase {
    EncodeCase {
        geometry: Geometry::new(k, m).expect("valid"),
        shard_bytes: 1 << 30,
        chunk: ChunkSize::new(1 << 16).expect("valid"),
        dirty: Dirty::FULL,
        data: vec![node(GBIT); k],
        coding,
        codes_for: Vec::new(),
        stripes_in_flight: 8,
        allowed: ShapeKind::ALL.to_vec(),
    }
}

fn partners(k: usize, m: usize) -> EncodeCase {
    case(k, m, CodingNodes::Partners(vec![node(GBIT); k]))
}

fn dedicated(k: usize, m: usize) -> EncodeCase {
    case(k, m, CodingNodes::Dedicated(vec![node(GBIT); m]))
}

fn of_kind(choice: &Choice, kind: ShapeKind) -> &Candidate {
    let is = |candidate: &&Candidate| ShapeKind::of(&candidate.plan.shape) == kind;
    choice.candidates.iter().find(is).expect("considered")
}

fn only(mut case: EncodeCase, kinds: &[ShapeKind]) -> EncodeCase {
    case.allowed = kinds.to_vec();
    case
}

fn best_kind(case: &EncodeCase) -> ShapeKind {
    ShapeKind::of(&choose_encode(case).expect("a choice").best().plan.shape)
}

#[test]
fn with_partners_the_gather_wins_by_its_share_of_the_chains_bytes() {
    let choice = choose_encode(&partners(8, 2)).expect("a choice");
    let best = choice.best();
    assert_eq!(best.plan.shape, Shape::GatherAtKeepers, "{}", best.reason);
    assert_eq!(best.estimate.busiest_bytes, (1 << 30) * 9 / 8);
    let chain = of_kind(&choice, ShapeKind::Chain);
    // The chain's nodes but the first receive two shards, and a quarter of one as the other group's keepers.
    let ratio = best.estimate.seconds / chain.estimate.seconds;
    assert!((ratio - 0.5).abs() < 0.01, "{ratio}");
    assert!(
        chain.reason.contains("2.00 times as long"),
        "{}",
        chain.reason
    );
}

#[test]
fn with_dedicated_coding_nodes_gathering_at_them_is_worse_than_the_chain() {
    // Each of the two coding nodes would receive half of every shard of 32 and half of the other's parity.
    let kinds = [ShapeKind::Chain, ShapeKind::GatherAtKeepers];
    let choice = choose_encode(&only(dedicated(32, 2), &kinds)).expect("a choice");
    assert_eq!(ShapeKind::of(&choice.best().plan.shape), ShapeKind::Chain);
    let gather = of_kind(&choice, ShapeKind::GatherAtKeepers);
    assert_eq!(gather.estimate.busiest_bytes, (1 << 30) * 33 / 2);
    assert!(
        gather.reason.contains("downlink of coding node"),
        "{}",
        gather.reason
    );
    // With hardly more data nodes than coding nodes it is the other way round.
    assert_eq!(
        best_kind(&only(dedicated(3, 3), &kinds)),
        ShapeKind::GatherAtKeepers
    );
}

#[test]
fn with_dedicated_coding_nodes_gathering_at_the_data_nodes_beats_the_chain() {
    for (k, m) in [(8, 2), (8, 4), (32, 2)] {
        let choice = choose_encode(&dedicated(k, m)).expect("a choice");
        assert_eq!(
            ShapeKind::of(&choice.best().plan.shape),
            ShapeKind::GatherAtSources
        );
        let share = choice.best().estimate.busiest_bytes as f64 / f64::from(1 << 30);
        assert!(
            (share - (k + m - 1) as f64 / k as f64).abs() < 1e-6,
            "{share}"
        );
    }
}

#[test]
fn with_one_parity_all_move_the_same_and_the_chain_needs_the_fewest_connections() {
    let choice = choose_encode(&dedicated(8, 1)).expect("a choice");
    assert_eq!(ShapeKind::of(&choice.best().plan.shape), ShapeKind::Chain);
    let gather = of_kind(&choice, ShapeKind::GatherAtSources);
    assert!(gather.estimate.seconds < choice.best().estimate.seconds * 1.02);
    assert!(
        gather.reason.contains("connections instead of"),
        "{}",
        gather.reason
    );
}

#[test]
fn a_small_increment_of_a_deep_group_on_slow_links_takes_a_tree() {
    let mut case = dedicated(32, 1);
    let slow = node(GBIT / 100);
    case.data = vec![slow; 32];
    case.coding = CodingNodes::Dedicated(vec![slow]);
    // One stripe: a gather waits for 31 blocks on one downlink, a chain for 32 hops.
    case.shard_bytes = 1 << 16;
    let choice = choose_encode(&case).expect("a choice");
    assert_eq!(
        ShapeKind::of(&choice.best().plan.shape),
        ShapeKind::Tree,
        "{choice:#?}"
    );
    assert_eq!(choice.best().estimate.bound, Bound::Delay);
    case.shard_bytes = 1 << 30;
    assert_ne!(best_kind(&case), ShapeKind::Tree);
}

#[test]
fn a_tree_beats_the_chain_where_one_lossy_connection_cannot_carry_a_hop() {
    let kinds = [ShapeKind::Chain, ShapeKind::Tree];
    let clean = only(dedicated(32, 2), &kinds);
    let mut lossy = clean.clone();
    let bad = NodeMeasure {
        loss_ppm: 10_000,
        round_trip_us: 20_000,
        ..node(GBIT)
    };
    lossy.data = vec![bad; 32];
    lossy.coding = CodingNodes::Dedicated(vec![bad; 2]);
    lossy.shard_bytes = 4 << 20;
    let choice = choose_encode(&lossy).expect("a choice");
    assert_eq!(
        ShapeKind::of(&choice.best().plan.shape),
        ShapeKind::Tree,
        "{choice:#?}"
    );
    let chain = of_kind(&choice, ShapeKind::Chain);
    assert!(chain.estimate.seconds > 1.02 * choice.best().estimate.seconds);
}

#[test]
fn a_rotating_chain_needs_a_window_of_two_stripes_per_place() {
    let chains = |case: EncodeCase| {
        let choice = choose_encode(&only(case, &[ShapeKind::Chain])).expect("a choice");
        let names = choice.candidates.iter().map(|c| c.plan.name());
        names.collect::<Vec<_>>()
    };
    assert_eq!(chains(dedicated(8, 2)), ["chain"]);
    assert_eq!(chains(dedicated(4, 2)).len(), 2);
}

#[test]
fn a_slow_node_stands_first_in_the_chain() {
    let mut case = only(dedicated(8, 2), &[ShapeKind::Chain]);
    case.data[5] = node(GBIT / 10);
    let choice = choose_encode(&case).expect("a choice");
    let Shape::Chain {
        order: Order::Fixed(order),
    } = &choice.best().plan.shape
    else {
        panic!("{choice:#?}");
    };
    assert_eq!(order, &[5, 0, 1, 2, 3, 4, 6, 7]);
    // There it sends its shard once and receives nothing; elsewhere it would send two sums and receive two.
    assert_eq!(choice.best().estimate.bound, Bound::Up(5));
    let rotating = &choice.candidates[1];
    assert!(rotating.estimate.seconds > 1.7 * choice.best().estimate.seconds);
}

#[test]
fn a_slow_node_never_gathers() {
    let mut case = dedicated(8, 2);
    case.data[5] = node(GBIT / 10);
    let choice = choose_encode(&case).expect("a choice");
    let gather = of_kind(&choice, ShapeKind::GatherAtSources);
    let Shape::GatherAtSources { roots } = &gather.plan.shape else {
        panic!("{choice:#?}");
    };
    assert!(!roots.contains(&5));
    // No plan can do better than this node's shard over its own uplink.
    let least = (1u64 << 30) as f64 / (GBIT / 10) as f64;
    assert!(gather.estimate.seconds < least * 1.01);
}

#[test]
fn a_slow_coding_node_moves_the_gather_away_from_it() {
    let mut case = partners(8, 2);
    let CodingNodes::Partners(nodes) = &mut case.coding else {
        panic!("partners");
    };
    nodes[3].down_bytes_per_s = GBIT / 3;
    let choice = choose_encode(&case).expect("a choice");
    assert_eq!(
        ShapeKind::of(&choice.best().plan.shape),
        ShapeKind::GatherAtSources
    );
}

#[test]
fn what_is_clean_costs_nothing() {
    let full = choose_encode(&partners(8, 2)).expect("a choice");
    let mut case = partners(8, 2);
    case.dirty = Dirty {
        union_ppm: 100_000,
        own_ppm: 100_000,
    };
    let tenth = choose_encode(&case).expect("a choice");
    let share = tenth.best().estimate.seconds / full.best().estimate.seconds;
    assert!((0.1..0.102).contains(&share), "{share}");
    // Members that change different chunks: a gather moves each dirty chunk once, a chain m sums for any of them.
    case.dirty = Dirty {
        union_ppm: 570_000,
        own_ppm: 100_000,
    };
    let apart = choose_encode(&case).expect("a choice");
    let gather = apart.best().estimate;
    let chain = of_kind(&apart, ShapeKind::Chain).estimate;
    assert_eq!(
        ShapeKind::of(&apart.best().plan.shape),
        ShapeKind::GatherAtKeepers
    );
    assert!(gather.seconds < 0.3 * chain.seconds, "{gather:?} {chain:?}");
    case.dirty = Dirty {
        union_ppm: 0,
        own_ppm: 0,
    };
    assert_eq!(
        choose_encode(&case)
            .expect("a choice")
            .best()
            .estimate
            .seconds,
        0.0
    );
}

#[test]
fn cases_that_do_not_fit_are_refused() {
    let mut case = dedicated(8, 2);
    case.data.pop();
    let refused = choose_encode(&case).expect_err("refused");
    assert_eq!(refused.to_string(), "expected 8 data nodes, got 7");
    let narrow = partners(1, 2);
    assert!(matches!(
        choose_encode(&narrow),
        Err(ChooseError::Nodes { .. })
    ));
    let mut dead = dedicated(8, 2);
    dead.data[3].up_bytes_per_s = 0;
    assert_eq!(choose_encode(&dead), Err(ChooseError::NoRate(3)));
    let none = only(dedicated(8, 2), &[]);
    assert_eq!(choose_encode(&none), Err(ChooseError::NothingAllowed));
}

prop_compose! {
    fn measured()(
        up in 1u64..2_000_000_000,
        down in 1u64..2_000_000_000,
        round_trip_us in 0u64..200_000,
        loss_ppm in 0u32..100_000,
    ) -> NodeMeasure {
        NodeMeasure {
            up_bytes_per_s: up,
            down_bytes_per_s: down,
            round_trip_us,
            loss_ppm,
            ..node(GBIT)
        }
    }
}

prop_compose! {
    fn any_case()(
        k in 1usize..12,
        m in 1usize..5,
    )(
        data in prop::collection::vec(measured(), k),
        coding in prop::collection::vec(measured(), m.max(k)),
        with_partners in any::<bool>(),
        shard_bytes in 0u64..1 << 34,
        union_ppm in 0u32..=1_000_000,
        own_ppm in 0u32..=1_000_000,
        m in Just(m),
    ) -> EncodeCase {
        let dedicated = || CodingNodes::Dedicated(coding[..m].to_vec());
        let coding = if with_partners && data.len() >= m {
            CodingNodes::Partners(coding.clone())
        } else {
            dedicated()
        };
        EncodeCase {
            geometry: Geometry::new(data.len(), m).expect("valid"),
            shard_bytes,
            dirty: Dirty { union_ppm, own_ppm },
            data,
            coding,
            ..super::tests::dedicated(1, 1)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_case_has_a_finite_choice_and_always_the_same(case in any_case()) {
        let choice = choose_encode(&case).expect("a choice");
        prop_assert_eq!(&choice, &choose_encode(&case).expect("a choice"));
        let best = choice.best().estimate.seconds;
        for candidate in &choice.candidates {
            prop_assert!(candidate.estimate.seconds.is_finite() && !candidate.reason.is_empty());
            prop_assert!(best <= candidate.estimate.seconds * (1.0 + EQUAL_WITHIN));
        }
    }
}

#[test]
fn of_two_groups_that_code_for_each_other_those_gather_that_keep_no_parity() {
    let mut case = dedicated(8, 2);
    case.codes_for = vec![1, 1];
    let choice = choose_encode(&case).expect("a choice");
    let Shape::GatherAtSources { roots } = &choice.best().plan.shape else {
        panic!("{choice:#?}");
    };
    // The other group's parity takes nearly all of what their downlinks carry meanwhile.
    let turns = |node: usize| roots.iter().filter(|root| **root == node).count();
    assert!(turns(0) == 0 && turns(1) == 0 && turns(7) > 0, "{roots:?}");
    let share = choice.best().estimate.busiest_bytes as f64 / f64::from(1 << 30);
    assert!((1.125..1.18).contains(&share), "{share}");
    let chain = of_kind(&choice, ShapeKind::Chain);
    assert!(chain.estimate.seconds > choice.best().estimate.seconds / 0.62);
}

#[test]
fn the_case_of_a_group_says_which_of_its_nodes_code_for_others() {
    let members: Vec<crate::Member> = (0..16)
        .map(|i| crate::Member {
            name: storaged_wire::NodeName::new(format!("n{i:02}")).expect("a name"),
            failure_domain: format!("n{i:02}"),
            cordon: Default::default(),
            seat: None,
        })
        .collect();
    let geometry = Geometry::new(8, 2).expect("valid");
    let groups = crate::groups(&members, geometry).expect("grouped");
    let facts = GroupFacts {
        shard_bytes: 1 << 30,
        chunk: ChunkSize::new(1 << 16).expect("valid"),
        dirty: Dirty::FULL,
        link_bytes_per_s: GBIT,
    };
    let all: Vec<usize> = (0..8).collect();
    let first = EncodeCase::of_group(&groups, 0, &all, &facts).expect("a case");
    assert_eq!(first.codes_for, [1, 1, 0, 0, 0, 0, 0, 0]);
    let part = EncodeCase::of_group(&groups, 1, &all[1..], &facts).expect("a case");
    assert_eq!((part.codes_for.len(), part.codes_for[0]), (7, 1));
    assert!(EncodeCase::of_group(&groups, 2, &all, &facts).is_err());
    assert!(EncodeCase::of_group(&groups, 0, &[], &facts).is_err());
}
