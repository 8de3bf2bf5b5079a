//! The plans worth a look.

use super::case::{CodingNodes, EncodeCase, NodeMeasure};
use super::estimate::{Estimate, Part, Volume};
use super::{ChooseError, estimate, shape_name};
use crate::Coefficients;
use crate::{Order, ParityHolders, PlanError, Shape, StripedPlan, encode_plan};

/// Fan-ins of the trees tried.
const FAN_INS: [usize; 3] = [2, 4, 8];
/// Rates further apart than this are taken for different.
const UNEVEN_ABOVE: f64 = 0.05;
/// Turns of uneven gathers per source: how finely unequal rates are matched.
const TURNS_PER_SOURCE: usize = 4;
/// And together: a turn is a class of stripes, which is written down.
const TURNS_MAX: usize = 255;

/// What kind of plan: what an executor may be able to run or not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ShapeKind {
    Chain,
    Tree,
    GatherAtSources,
    GatherAtKeepers,
}

impl ShapeKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [
        Self::Chain,
        Self::Tree,
        Self::GatherAtSources,
        Self::GatherAtKeepers,
    ];

    /// The kind of a shape.
    pub fn of(shape: &Shape) -> Self {
        match shape {
            Shape::Chain { .. } => Self::Chain,
            Shape::Tree { .. } => Self::Tree,
            Shape::GatherAtSources { .. } => Self::GatherAtSources,
            Shape::GatherAtKeepers => Self::GatherAtKeepers,
        }
    }
}

/// How to build a plan once the coefficients are known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// How the blocks come together.
    pub shape: Shape,
    /// Who keeps the sums.
    pub keepers: ParityHolders,
}

impl Plan {
    /// Builds it.
    ///
    /// # Errors
    /// [`PlanError`] if the coefficients are not those of the case it was chosen for.
    pub fn build(&self, coefficients: &Coefficients) -> Result<StripedPlan, PlanError> {
        encode_plan(coefficients, self.keepers, &self.shape)
    }

    /// Its name, as the operator reads it.
    pub fn name(&self) -> String {
        shape_name(&self.shape)
    }
}

/// All candidates of a case, in a fixed order.
pub(super) fn of(case: &EncodeCase) -> Vec<Plan> {
    let shapes = shapes(case, &busy(case));
    let keepers = keepers(&case.coding);
    let plan = |shape| Plan { shape, keepers };
    shapes.into_iter().map(plan).collect()
}

pub(super) fn keepers(coding: &CodingNodes) -> ParityHolders {
    match coding {
        CodingNodes::Dedicated(_) => ParityHolders::Fixed,
        CodingNodes::Partners(nodes) => ParityHolders::Rotating {
            partners: nodes.len(),
        },
    }
}

/// A node that may take part, and for how many other groups it receives parity meanwhile.
#[derive(Debug, Clone, Copy)]
struct Busy {
    node: NodeMeasure,
    codes_for: usize,
}

fn busy(case: &EncodeCase) -> Vec<Busy> {
    let busy = |(index, node): (usize, &NodeMeasure)| Busy {
        node: *node,
        codes_for: case.codes_for(index),
    };
    case.data.iter().enumerate().map(busy).collect()
}

fn idle(node: &NodeMeasure) -> Busy {
    Busy {
        node: *node,
        codes_for: 0,
    }
}

/// The shapes for one group; for the two groups of a case they come in the same order, each with its own slow nodes.
fn shapes(case: &EncodeCase, data: &[Busy]) -> Vec<Shape> {
    // In a rotating order a node is the last for some stripes and holds each of these until all before it have sent:
    // about two stripes per place must be in flight, or the window and not the links sets the pace.
    let mut orders = vec![Order::Fixed((0..data.len()).collect())];
    if 2 * data.len() <= case.stripes_in_flight {
        orders.push(Order::Rotating);
    }
    let coding: Vec<Busy> = case.coding.nodes().iter().map(idle).collect();
    if is_uneven(&busy(case)) || is_uneven(&coding) {
        orders.push(Order::Fixed(slowest_first(data)));
    }
    let chain = |order: &Order| Shape::Chain {
        order: order.clone(),
    };
    let mut shapes: Vec<Shape> = orders.iter().map(chain).collect();
    shapes.push(Shape::GatherAtKeepers);
    shapes.push(Shape::GatherAtSources {
        roots: roots(data, case.geometry.m()),
    });
    for order in orders {
        // With more, a tree is a gather whose root stays.
        let deep = FAN_INS
            .into_iter()
            .filter(|fan_in| fan_in + 1 < case.data.len());
        shapes.extend(deep.map(|fan_in| Shape::Tree {
            fan_in,
            order: order.clone(),
        }));
    }
    shapes.retain(|shape| case.allowed.contains(&ShapeKind::of(shape)));
    shapes
}

/// What a node has left for this group, roughly: its slower direction, shared with the groups that it codes for.
fn rate(busy: &Busy) -> u64 {
    let slower = busy.node.up_bytes_per_s.min(busy.node.down_bytes_per_s);
    slower / (1 + busy.codes_for as u64)
}

fn is_uneven(nodes: &[Busy]) -> bool {
    let slowest = nodes.iter().map(rate).min().unwrap_or(0) as f64;
    let fastest = nodes.iter().map(rate).max().unwrap_or(0) as f64;
    fastest > slowest * (1.0 + UNEVEN_ABOVE)
}

fn slowest_first(nodes: &[Busy]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    order.sort_by_key(|node| rate(&nodes[*node]));
    order
}

/// Who gathers: all in turn, or, of uneven nodes, as many turns of each as make the last of them end first.
fn roots(nodes: &[Busy], sums: usize) -> Vec<usize> {
    let sources = nodes.len();
    if !is_uneven(nodes) {
        return (0..sources).collect();
    }
    let most = (TURNS_PER_SOURCE * sources).min(TURNS_MAX).max(sources);
    let rounds = (sources..=most).map(|turns| dealt(nodes, sums, turns));
    let best = rounds.min_by(|(a, _), (b, _)| a.total_cmp(b));
    best.map_or_else(Vec::new, |(_, roots)| roots)
}

/// Each turn to the node that would then be the first to end; and when the last one ends, per turn.
fn dealt(nodes: &[Busy], sums: usize, turns: usize) -> (f64, Vec<usize>) {
    let mut taken = vec![0_usize; nodes.len()];
    let ends = |node: usize, taken: usize| {
        let Busy { node, codes_for } = &nodes[node];
        let sent = (turns - taken + sums * taken) as f64;
        // In each turn a block of parity of every other group that it codes for comes too.
        let received = ((nodes.len() - 1) * taken + codes_for * turns) as f64;
        let up = sent / node.up_bytes_per_s as f64;
        up.max(received / node.down_bytes_per_s as f64)
    };
    let mut roots = Vec::with_capacity(turns);
    for _ in 0..turns {
        let by_end =
            |a: &usize, b: &usize| ends(*a, taken[*a] + 1).total_cmp(&ends(*b, taken[*b] + 1));
        let next = (0..nodes.len()).min_by(by_end).unwrap_or(0);
        taken[next] += 1;
        roots.push(next);
    }
    let last = (0..nodes.len()).map(|node| ends(node, taken[node]));
    (last.fold(0.0, f64::max) / turns as f64, roots)
}

/// What a candidate takes; of partners, with the return service at the same time.
pub(super) fn estimate(case: &EncodeCase, plan: &Plan) -> Result<Estimate, ChooseError> {
    let (k, coding) = (case.data.len(), case.coding.nodes().len());
    let m = case.geometry.m();
    let own = plan.build(&stand_in(k, m)?)?;
    let mut parts = vec![Part {
        plan: &own,
        nodes: (0..k + coding).collect(),
    }];
    let returned;
    if let CodingNodes::Partners(nodes) = &case.coding {
        let place = of(case).iter().position(|candidate| candidate == plan);
        let partners: Vec<Busy> = nodes.iter().map(idle).collect();
        let shape = place.and_then(|place| shapes(case, &partners).into_iter().nth(place));
        let shape = shape.ok_or(ChooseError::NothingAllowed)?;
        let keepers = ParityHolders::Rotating { partners: k };
        returned = encode_plan(&stand_in(coding, m)?, keepers, &shape)?;
        parts.push(Part {
            plan: &returned,
            nodes: (k..k + coding).chain(0..k).collect(),
        });
    }
    let nodes: Vec<NodeMeasure> = case
        .data
        .iter()
        .chain(case.coding.nodes())
        .copied()
        .collect();
    let volume = Volume {
        stripes: case.stripes(),
        stripe_bytes: case.shard_bytes.min(case.chunk.bytes() as u64),
        dirty: case.dirty,
        stripes_in_flight: case.stripes_in_flight,
    };
    Ok(estimate::estimate(&parts, &nodes, &case.codes_for, &volume))
}

/// Any coefficients that are not 0 or 1 cost the same.
fn stand_in(sources: usize, sums: usize) -> Result<Coefficients, ChooseError> {
    let what = "data nodes or more";
    let none = ChooseError::Nodes {
        what,
        expected: 1,
        got: sources,
    };
    Coefficients::new(vec![vec![2; sources]; sums]).map_err(|_| none)
}
