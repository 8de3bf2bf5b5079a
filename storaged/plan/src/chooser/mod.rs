//! Which plan: from k, m, what is dirty and the links as measured, which candidate ends first, and why.
//!
//! Order of reading: `case` (what is known), `group` (a case as a node knows it), `candidates` (the plans worth a look), `estimate` (how long one takes
//! and what bounds it), `reason` (the sentences). The same case always gives the same answer.

mod candidates;
mod case;
mod estimate;
mod group;
mod reason;
#[cfg(test)]
mod tests;

use crate::{Order, Shape};

pub use candidates::{Plan, ShapeKind};
pub use case::{CodingNodes, Dirty, EncodeCase, NodeMeasure};
pub use estimate::{Bound, Estimate};
pub use group::GroupFacts;

use thiserror::Error;

/// Candidates whose expected times lie this close to the best one's count as equal: the estimate is no better than
/// that. Then fewer connections and less memory win.
const EQUAL_WITHIN: f64 = 0.02;

/// Why no plan can be chosen.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ChooseError {
    /// Not the nodes that the geometry asks for.
    #[error("expected {expected} {what}, got {got}")]
    Nodes {
        what: &'static str,
        expected: usize,
        got: usize,
    },
    /// A rate that would make every time infinite.
    #[error("node {0} has a measured rate of 0: measure it again or leave it out")]
    NoRate(usize),
    /// Every kind of plan was left out.
    #[error("no kind of plan is allowed: allow at least the chain")]
    NothingAllowed,
    /// A candidate that does not fit.
    #[error("a candidate does not fit the case")]
    Plan(#[from] crate::PlanError),
}

/// A candidate and what is expected of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Candidate {
    /// How to build it.
    pub plan: Plan,
    /// What it will take.
    pub estimate: Estimate,
    /// Why it was chosen, or why not: one sentence.
    pub reason: String,
}

/// All candidates, the chosen one first, then by expected time.
#[derive(Clone, PartialEq, Debug)]
pub struct Choice {
    /// Never empty.
    pub candidates: Vec<Candidate>,
}

impl Choice {
    /// The chosen one.
    pub fn best(&self) -> &Candidate {
        &self.candidates[0]
    }
}

/// Chooses the plan of an encoding.
///
/// # Errors
/// [`ChooseError`] if the case does not fit together or allows nothing.
pub fn choose_encode(case: &EncodeCase) -> Result<Choice, ChooseError> {
    case.check()?;
    let mut estimated = Vec::new();
    for plan in candidates::of(case) {
        let estimate = candidates::estimate(case, &plan)?;
        estimated.push((plan, estimate));
    }
    let ranked = rank(estimated, |(_, estimate)| estimate);
    let Some((_, best)) = ranked.first().cloned() else {
        return Err(ChooseError::NothingAllowed);
    };
    let candidate = |(place, (plan, estimate)): (usize, (Plan, Estimate))| Candidate {
        reason: match place {
            0 => reason::chosen(case, &plan, &estimate, ranked.get(1).map(|(p, e)| (p, e))),
            _ => reason::not_chosen(case, &plan, &estimate, &best),
        },
        plan,
        estimate,
    };
    let candidates = ranked.iter().cloned().enumerate().map(candidate).collect();
    Ok(Choice { candidates })
}

/// What an encoding is expected to take in a shape, whether it is among the candidates or not.
///
/// # Errors
/// [`ChooseError`] if the case or the shape does not fit.
pub fn estimate_encode(case: &EncodeCase, shape: &Shape) -> Result<Estimate, ChooseError> {
    case.check()?;
    let plan = Plan {
        shape: shape.clone(),
        keepers: candidates::keepers(&case.coding),
    };
    candidates::estimate(case, &plan)
}

/// By expected time, but the first place goes to the one with the fewest connections, and then the least memory,
/// among those that are as good as the best; of equals, the one named first.
fn rank<T>(all: Vec<T>, estimate: impl Fn(&T) -> &Estimate) -> Vec<T> {
    let Some(best) = all
        .iter()
        .map(|c| estimate(c).seconds)
        .min_by(f64::total_cmp)
    else {
        return all;
    };
    let as_good = |candidate: &T| estimate(candidate).seconds <= best * (1.0 + EQUAL_WITHIN);
    let cost = |candidate: &T| {
        let estimate = estimate(candidate);
        (estimate.connections, estimate.blocks_in_flight_max)
    };
    let chosen = (0..all.len())
        .filter(|index| as_good(&all[*index]))
        .min_by_key(|index| cost(&all[*index]))
        .unwrap_or(0);
    let mut all = all;
    let first = all.remove(chosen);
    all.sort_by(|a, b| estimate(a).seconds.total_cmp(&estimate(b).seconds));
    all.insert(0, first);
    all
}

/// A plan's name in one word or a few, as the operator reads it.
pub fn shape_name(shape: &Shape) -> String {
    let placed = |order: &Order| match order {
        Order::Rotating => ", rotating",
        Order::Fixed(order) if order.iter().copied().eq(0..order.len()) => "",
        Order::Fixed(_) => ", slowest first",
    };
    match shape {
        Shape::Chain { order } => format!("chain{}", placed(order)),
        Shape::Tree { fan_in, order } => format!("tree of fan-in {fan_in}{}", placed(order)),
        Shape::GatherAtSources { .. } => "rotating gather at the data nodes".into(),
        Shape::GatherAtKeepers => "rotating gather at the coding nodes".into(),
    }
}
