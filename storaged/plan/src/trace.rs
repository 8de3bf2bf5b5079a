//! What every sum of a plan is made of: the plan is linear, so it is run on the coefficients themselves. A node that gets
//! a sum can so say what it must be from what is known of the sources' blocks.

use storaged_codec::engine;

use super::error::PlanError;
use crate::{CodingPlan, HopOutput, Target};

/// Per sum, the coefficient of every source's block in it.
pub type CoefficientRows = Vec<Vec<u8>>;

/// What a plan's sums are made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Trace {
    /// Of the sums on each edge.
    pub edges: Vec<CoefficientRows>,
    /// Of each sum that is kept, and by which hop, as sink and coefficients, in the order of the hops.
    pub kept: Vec<(usize, Vec<u8>)>,
}

/// Follows the blocks of `sources` sources through a plan.
///
/// # Errors
/// [`PlanError::Malformed`] if hops and edges do not fit together.
pub fn trace(plan: &CodingPlan, sources: usize) -> Result<Trace, PlanError> {
    let mut edges: Vec<Option<CoefficientRows>> = vec![None; plan.edges.len()];
    let mut read = vec![false; plan.edges.len()];
    let mut kept = Vec::new();
    for (index, hop) in plan.hops.iter().enumerate() {
        let malformed = || PlanError::Malformed { hop: index };
        let mut operands = CoefficientRows::new();
        for edge in &hop.inputs {
            let ours = plan.edges.get(*edge).is_some_and(|e| e.to == hop.member);
            let sums = edges.get(*edge).and_then(Option::as_ref).filter(|_| ours);
            operands.extend(sums.ok_or_else(malformed)?.iter().cloned());
            if std::mem::replace(&mut read[*edge], true) {
                return Err(malformed());
            }
        }
        if let Some(source) = hop.local {
            operands.push(unit(source, sources).ok_or_else(malformed)?);
        }
        for output in &hop.outputs {
            let sums = combine(output, &operands).ok_or_else(malformed)?;
            match output.target {
                Target::Edge(edge) => {
                    let declared = plan.edges.get(edge).ok_or_else(malformed)?;
                    let fits = declared.from == hop.member && declared.width == sums.len();
                    let place = edges[edge].is_none().then_some(()).filter(|()| fits);
                    place.ok_or_else(malformed)?;
                    edges[edge] = Some(sums);
                }
                Target::Keep(sink) => kept.extend(sums.into_iter().next().map(|sum| (sink, sum))),
            }
        }
    }
    // An edge that nobody writes brings nothing.
    let edges = edges.into_iter().map(Option::unwrap_or_default).collect();
    Ok(Trace { edges, kept })
}

fn unit(source: usize, sources: usize) -> Option<Vec<u8>> {
    (source < sources).then(|| (0..sources).map(|i| u8::from(i == source)).collect())
}

fn combine(output: &HopOutput, operands: &CoefficientRows) -> Option<CoefficientRows> {
    let sources = operands.first()?.len();
    let sum = |row: &Vec<u8>| {
        let mut sum = vec![0; sources];
        for (c, operand) in row.iter().zip(operands) {
            engine().fold(&mut [&mut sum[..]], &[*c], operand);
        }
        (row.len() == operands.len()).then_some(sum)
    };
    output.rows.iter().map(sum).collect()
}
