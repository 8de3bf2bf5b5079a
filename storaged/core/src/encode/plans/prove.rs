//! A proof that a plan computes the matrix product, for any bytes: the plan is linear, so it is run on the
//! coefficients themselves. A node can ask for it before it takes part in a plan that it was sent.

use storaged_codec::engine;

use super::error::PlanError;
use super::striped::StripedPlan;
use crate::encode::{CodingPlan, Coefficients, HopOutput, Target};

impl StripedPlan {
    /// Proves every class.
    ///
    /// # Errors
    /// As [`prove`].
    pub fn prove(&self, coefficients: &Coefficients) -> Result<(), PlanError> {
        let mut classes = self.classes().iter();
        classes.try_for_each(|plan| prove(plan, coefficients))
    }
}

/// Proves that every sink gets its row of the coefficients, once.
///
/// # Errors
/// [`PlanError::Malformed`] if hops and edges do not fit, [`PlanError::Wrong`] if a sink gets anything else.
pub fn prove(plan: &CodingPlan, coefficients: &Coefficients) -> Result<(), PlanError> {
    let mut edges: Vec<Option<Vec<Vec<u8>>>> = vec![None; plan.edges.len()];
    let mut kept: Vec<Option<Vec<u8>>> = vec![None; coefficients.sinks()];
    for (index, hop) in plan.hops.iter().enumerate() {
        let malformed = || PlanError::Malformed { hop: index };
        let mut operands = Vec::new();
        for edge in &hop.inputs {
            let ours = plan.edges.get(*edge).is_some_and(|e| e.to == hop.member);
            let sums = edges.get_mut(*edge).and_then(Option::take);
            operands.extend(sums.filter(|_| ours).ok_or_else(malformed)?);
        }
        if let Some(source) = hop.local {
            operands.push(unit(source, coefficients.sources()).ok_or_else(malformed)?);
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
                Target::Keep(sink) => {
                    let place = kept.get_mut(sink).filter(|kept| kept.is_none());
                    let sum = sums.into_iter().next();
                    *place.ok_or(PlanError::Wrong { sink })? = sum;
                }
            }
        }
    }
    let wrong = kept
        .iter()
        .zip(coefficients.rows())
        .position(|(got, row)| got.as_ref() != Some(row));
    wrong.map_or(Ok(()), |sink| Err(PlanError::Wrong { sink }))
}

fn unit(source: usize, sources: usize) -> Option<Vec<u8>> {
    (source < sources).then(|| (0..sources).map(|i| u8::from(i == source)).collect())
}

fn combine(output: &HopOutput, operands: &[Vec<u8>]) -> Option<Vec<Vec<u8>>> {
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
