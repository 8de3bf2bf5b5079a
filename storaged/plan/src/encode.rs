//! The shapes that an encoding can take. Members are the sources, in coding order, and then the nodes that keep the
//! parity.
//!
//! Blocks per stripe, k sources and m sums: the chain carries `k*m - m*(m-1)/2` (the first hops have fewer blocks
//! than sums), a gather `k + m - 1`. The chain's traffic is between neighbours only, the gather's between all.

use super::error::PlanError;
use super::reduce::{Vertex, reduce};
use super::striped::{CLASSES_MAX, Rotation, StripedPlan};
use crate::{CodingPlan, Coefficients};

/// Which nodes keep the parity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParityHolders {
    /// One node per parity block, the same for every stripe: members `k..k + m`.
    Fixed,
    /// A partner group of this many nodes, `k..k + partners`: parity j of a stripe is on the j-th after the one
    /// that begins, and that one rotates.
    Rotating { partners: usize },
}

/// Who stands where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Order {
    /// Every source in every place in turn.
    Rotating,
    /// The first stands farthest from the root, where the least is sent and nothing received: the place of the
    /// slowest.
    Fixed(Vec<usize>),
}

/// How the blocks come together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Shape {
    /// One after the other.
    Chain { order: Order },
    /// Every source has at most `fan_in` others behind it.
    Tree { fan_in: usize, order: Order },
    /// Every stripe is gathered by one of these sources, in turn, which sends each sum to its keeper. A source may
    /// come several times, or, if it is slow, never.
    GatherAtSources { roots: Vec<usize> },
    /// Every stripe is gathered by one of its keepers, which keeps one sum and sends the others to theirs.
    GatherAtKeepers,
}

impl Shape {
    /// The gather in which all sources take turns.
    pub fn gather_at_all_sources(sources: usize) -> Self {
        Self::GatherAtSources {
            roots: (0..sources).collect(),
        }
    }
}

/// The plan of an encoding: `coefficients.rows()[j]` is parity j.
///
/// # Errors
/// [`PlanError`] if the shape, the order or the keepers do not fit the coefficients.
pub fn encode_plan(
    coefficients: &Coefficients,
    keepers: ParityHolders,
    shape: &Shape,
) -> Result<StripedPlan, PlanError> {
    let (sources, sums) = (coefficients.sources(), coefficients.sinks());
    check(shape, sources)?;
    let roles = roles(shape, sources, sums, keepers);
    let (kept_by, rotation, count) = match keepers {
        ParityHolders::Fixed => (sums, Rotation::ByTurn, roles),
        ParityHolders::Rotating { partners } => {
            if partners < sums {
                let (needed, got) = (sums, partners);
                return Err(PlanError::ParityHolders { needed, got });
            }
            let rotation = Rotation::ByStripe { period: partners };
            (partners, rotation, classes(partners, roles))
        }
    };
    let class = |class: usize| -> Result<CodingPlan, PlanError> {
        let first = match (keepers, shape) {
            (ParityHolders::Rotating { .. }, _) | (_, Shape::GatherAtKeepers) => class % kept_by,
            (ParityHolders::Fixed, _) => 0,
        };
        let keeper = |sum: usize| sources + (first + sum) % kept_by;
        let (sinks, root): (Vec<usize>, usize) = match keepers {
            ParityHolders::Rotating { .. } => ((0..sums).map(keeper).collect(), keeper(0)),
            ParityHolders::Fixed => ((sources..sources + sums).collect(), keeper(0)),
        };
        let vertices = vertices(shape, sources, class, root);
        reduce(coefficients, &vertices, &sinks)
    };
    let classes = (0..count).map(class).collect::<Result<Vec<_>, _>>()?;
    StripedPlan::new(sources + kept_by, sources, rotation, classes)
}

/// How many stripes it takes until every role comes round.
fn roles(shape: &Shape, sources: usize, sums: usize, keepers: ParityHolders) -> usize {
    match (shape, keepers) {
        (Shape::Chain { order } | Shape::Tree { order, .. }, _) => match order {
            Order::Rotating => sources,
            Order::Fixed(_) => 1,
        },
        (Shape::GatherAtSources { roots }, _) => roots.len(),
        (Shape::GatherAtKeepers, ParityHolders::Fixed) => sums,
        (Shape::GatherAtKeepers, ParityHolders::Rotating { .. }) => 1,
    }
}

/// The smallest number of classes in which all roles meet all partners equally often, or nearly so if that is too
/// many to write down.
fn classes(partners: usize, roles: usize) -> usize {
    let blocks = (1..=roles).find(|blocks| (partners * blocks).is_multiple_of(roles));
    let blocks_max = (CLASSES_MAX / partners).max(1);
    partners * blocks.unwrap_or(roles).min(blocks_max)
}

fn check(shape: &Shape, sources: usize) -> Result<(), PlanError> {
    match shape {
        Shape::Tree { fan_in, .. } if *fan_in < 2 => Err(PlanError::FanIn(*fan_in)),
        Shape::Chain { order } | Shape::Tree { order, .. } => match order {
            Order::Rotating => Ok(()),
            Order::Fixed(order) => check_order(order, sources),
        },
        Shape::GatherAtSources { roots } => {
            let fits = !roots.is_empty() && roots.iter().all(|root| *root < sources);
            let got = roots.clone();
            fits.then_some(()).ok_or(PlanError::Roots { sources, got })
        }
        Shape::GatherAtKeepers => Ok(()),
    }
}

fn check_order(order: &[usize], sources: usize) -> Result<(), PlanError> {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    let got = order.to_vec();
    let fits = sorted.into_iter().eq(0..sources);
    fits.then_some(()).ok_or(PlanError::Order { sources, got })
}

fn vertices(shape: &Shape, sources: usize, class: usize, keeper: usize) -> Vec<Vertex> {
    match shape {
        Shape::Chain { order } => chain(&placed(order, sources, class)),
        Shape::Tree { fan_in, order } => tree(&placed(order, sources, class), *fan_in),
        Shape::GatherAtSources { roots } => {
            let root = roots[class % roots.len()];
            let others: Vec<usize> = (0..sources).filter(|source| *source != root).collect();
            star(&others, |children| Vertex::source(root, children))
        }
        Shape::GatherAtKeepers => {
            let all: Vec<usize> = (0..sources).collect();
            star(&all, |children| Vertex {
                member: keeper,
                source: None,
                children,
            })
        }
    }
}

fn placed(order: &Order, sources: usize, class: usize) -> Vec<usize> {
    match order {
        Order::Rotating => (0..sources).map(|i| (i + class) % sources).collect(),
        Order::Fixed(order) => order.clone(),
    }
}

/// Each adds to what the one before it sent.
pub(super) fn chain(order: &[usize]) -> Vec<Vertex> {
    let vertex = |(index, source): (usize, &usize)| {
        Vertex::source(*source, index.checked_sub(1).into_iter().collect())
    };
    order.iter().enumerate().map(vertex).collect()
}

/// A tree as flat as it can be with this fan-in, its last level filled from one side: as an array heap, backwards.
fn tree(order: &[usize], fan_in: usize) -> Vec<Vertex> {
    let last = order.len() - 1;
    let vertex = |(index, source): (usize, &usize)| {
        let place = last - index;
        let children = (fan_in * place + 1)..=(fan_in * place + fan_in);
        let children = children.filter(|child| *child <= last);
        Vertex::source(*source, children.map(|child| last - child).collect())
    };
    order.iter().enumerate().map(vertex).collect()
}

/// All send to one.
pub(super) fn star(leaves: &[usize], root: impl FnOnce(Vec<usize>) -> Vertex) -> Vec<Vertex> {
    let leaf = |source: &usize| Vertex::source(*source, Vec::new());
    let mut vertices: Vec<Vertex> = leaves.iter().map(leaf).collect();
    vertices.push(root((0..leaves.len()).collect()));
    vertices
}
