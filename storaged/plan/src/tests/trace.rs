//! What sums are made of, against the bytes that a plan's hops compute.

use super::encoding::coefficients;
use super::execute::{Shards, dot, shards};
use crate::{CodingPlan, Coefficients, Target};
use crate::{Order, ParityHolders, PlanError, Shape, encode_plan, trace};

fn shapes(k: usize) -> Vec<Shape> {
    let orders = [Order::Rotating, Order::Fixed((0..k).rev().collect())];
    let mut shapes = vec![Shape::gather_at_all_sources(k), Shape::GatherAtKeepers];
    for order in orders {
        shapes.push(Shape::Chain {
            order: order.clone(),
        });
        shapes.extend((2..=3).map(|fan_in| Shape::Tree {
            fan_in,
            order: order.clone(),
        }));
    }
    shapes
}

/// The bytes on every edge and those kept, by the definition of a hop.
fn computed(plan: &CodingPlan, blocks: &Shards) -> (Vec<Shards>, Vec<(usize, Vec<u8>)>) {
    let mut edges = vec![Shards::new(); plan.edges.len()];
    let mut kept = Vec::new();
    for hop in &plan.hops {
        let mut operands: Shards = hop.inputs.iter().flat_map(|e| edges[*e].clone()).collect();
        operands.extend(hop.local.map(|source| blocks[source].clone()));
        for output in &hop.outputs {
            let sums: Shards = output.rows.iter().map(|row| dot(row, &operands)).collect();
            match output.target {
                Target::Edge(edge) => edges[edge] = sums,
                Target::Keep(sink) => kept.push((sink, sums[0].clone())),
            }
        }
    }
    (edges, kept)
}

#[test]
fn every_sum_of_every_shape_is_what_it_is_said_to_be_made_of() {
    for (k, m) in [(1, 1), (2, 1), (3, 3), (4, 2), (8, 2), (9, 4), (5, 6)] {
        let coefficients = coefficients(k, m);
        let blocks = shards(k, 40, (k * m) as u64);
        for shape in shapes(k) {
            for keepers in [
                ParityHolders::Fixed,
                ParityHolders::Rotating { partners: m + 1 },
            ] {
                let plan = encode_plan(&coefficients, keepers, &shape).expect("a plan");
                for class in plan.classes() {
                    let made = trace(class, k).expect("it fits together");
                    let (edges, kept) = computed(class, &blocks);
                    for (made, sums) in made.edges.iter().zip(&edges) {
                        let said: Shards = made.iter().map(|row| dot(row, &blocks)).collect();
                        assert_eq!(said, *sums, "({k}, {m}) {shape:?}");
                    }
                    let said = made
                        .kept
                        .iter()
                        .map(|(sink, row)| (*sink, dot(row, &blocks)));
                    assert_eq!(said.collect::<Vec<_>>(), kept);
                }
            }
        }
    }
}

#[test]
fn the_plain_chain_is_traced_too() {
    let coefficients = Coefficients::new(vec![vec![3, 5, 7], vec![2, 4, 6]]).expect("rows");
    let plan = CodingPlan::chain(&coefficients);
    let made = trace(&plan, 3).expect("it fits together");
    assert_eq!(made.edges[0], [[3, 0, 0], [2, 0, 0]]);
    assert_eq!(made.edges[2], [[3, 5, 7], [2, 4, 6]]);
    assert_eq!(made.edges[3], [[2, 4, 6]]);
}

#[test]
fn a_plan_that_does_not_fit_together_is_not_traced() {
    let coefficients = Coefficients::new(vec![vec![3, 5]]).expect("rows");
    let good = CodingPlan::chain(&coefficients);
    assert!(trace(&good, 2).is_ok());
    // A source that is not there, an edge that is not there, a row too short, a hop before what it reads.
    assert_eq!(trace(&good, 1), Err(PlanError::Malformed { hop: 1 }));
    let spoilt: [fn(&mut CodingPlan); 3] = [
        |plan| plan.hops[0].outputs[0].target = Target::Edge(9),
        |plan| plan.hops[1].outputs[0].rows[0].truncate(1),
        |plan| plan.hops.swap(0, 1),
    ];
    for spoil in spoilt {
        let mut plan = good.clone();
        spoil(&mut plan);
        assert!(matches!(trace(&plan, 2), Err(PlanError::Malformed { .. })));
    }
}
