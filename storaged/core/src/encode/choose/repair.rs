//! Which repair plan, and which of the survivors.

use super::case::{Dirty, NodeMeasure, check_rates};
use super::estimate::{Estimate, Part, Volume, estimate};
use super::{ChooseError, rank};
use crate::encode::Coefficients;
use crate::encode::plans::{RepairShape, RepairTask, StripedPlan, repair_plans};

/// A repair to choose a plan for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RepairCase {
    /// Nodes that hold a block each.
    pub survivors: Vec<NodeMeasure>,
    /// Nodes that get a block each.
    pub newcomers: Vec<NodeMeasure>,
    /// How many survivors a stripe takes.
    pub needed: usize,
    /// Stripes to repair.
    pub stripes: u64,
    /// Bytes of a block.
    pub stripe_bytes: u64,
    /// Stripes in flight per node and plan.
    pub stripes_in_flight: usize,
    /// Shapes to consider.
    pub allowed: Vec<RepairShape>,
}

/// One way to repair.
#[derive(Clone, PartialEq, Debug)]
pub struct RepairChoice {
    /// The shape.
    pub shape: RepairShape,
    /// Which of the survivors to use, as indices into the case's, ascending.
    pub survivors: Vec<usize>,
    /// What it will take.
    pub estimate: Estimate,
}

/// All ways considered, the chosen one first, then by expected time.
///
/// # Errors
/// [`ChooseError`] if there are too few survivors, a node has no rate, or nothing is allowed.
pub fn choose_repair(case: &RepairCase) -> Result<Vec<RepairChoice>, ChooseError> {
    check_rates(case.survivors.iter().chain(&case.newcomers))?;
    if case.survivors.len() < case.needed || case.needed == 0 || case.newcomers.is_empty() {
        let (expected, got) = (case.needed.max(1), case.survivors.len());
        let what = "survivors, and a newcomer";
        return Err(ChooseError::Nodes {
            what,
            expected,
            got,
        });
    }
    let mut choices = Vec::new();
    for survivors in survivor_sets(case) {
        for shape in &case.allowed {
            let estimate = of(case, *shape, &survivors)?;
            choices.push(RepairChoice {
                shape: *shape,
                survivors: survivors.clone(),
                estimate,
            });
        }
    }
    match choices.is_empty() {
        true => Err(ChooseError::NothingAllowed),
        false => Ok(rank(choices, |choice| &choice.estimate)),
    }
}

/// All survivors, then all but the slowest, and so on down to as many as are needed.
fn survivor_sets(case: &RepairCase) -> Vec<Vec<usize>> {
    let rate = |s: &usize| {
        let node = &case.survivors[*s];
        node.up_bytes_per_s.min(node.down_bytes_per_s)
    };
    let mut fastest: Vec<usize> = (0..case.survivors.len()).collect();
    fastest.sort_by_key(|s| std::cmp::Reverse(rate(s)));
    let set = |count: usize| {
        let mut set = fastest[..count].to_vec();
        set.sort_unstable();
        set
    };
    (case.needed..=case.survivors.len())
        .rev()
        .map(set)
        .collect()
}

fn of(case: &RepairCase, shape: RepairShape, survivors: &[usize]) -> Result<Estimate, ChooseError> {
    let count = survivors.len();
    let blocks: Vec<usize> = (0..count).collect();
    let lost: Vec<usize> = (count..count + case.newcomers.len()).collect();
    let task = RepairTask {
        survivors: &blocks,
        lost: &lost,
        needed: case.needed,
    };
    let stand_in = |survivors: &[usize], lost: &[usize]| {
        Ok(Coefficients::new(vec![vec![2; survivors.len()]; lost.len()]).ok())
    };
    let plans = repair_plans(&task, shape, stand_in)?;
    let parts: Vec<Part<'_>> = plans
        .iter()
        .map(|plan| part(plan, count + lost.len()))
        .collect();
    let of_survivors = survivors.iter().map(|s| case.survivors[*s]);
    let nodes: Vec<NodeMeasure> = of_survivors.chain(case.newcomers.iter().copied()).collect();
    let volume = Volume {
        stripes: case.stripes,
        stripe_bytes: case.stripe_bytes,
        dirty: Dirty::FULL,
        stripes_in_flight: case.stripes_in_flight,
    };
    Ok(estimate(&parts, &nodes, &[], &volume))
}

fn part(plan: &StripedPlan, members: usize) -> Part<'_> {
    Part {
        plan,
        nodes: (0..members).collect(),
    }
}
