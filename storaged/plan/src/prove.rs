//! A proof that a plan computes the matrix product, for any bytes: what its sums are made of says so (`trace`). A
//! node can ask for it before it takes part in a plan that it was sent.

use super::error::PlanError;
use super::striped::StripedPlan;
use super::trace::trace;
use crate::{CodingPlan, Coefficients};

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
    let mut kept: Vec<Option<Vec<u8>>> = vec![None; coefficients.sinks()];
    for (sink, sum) in trace(plan, coefficients.sources())?.kept {
        let place = kept.get_mut(sink).filter(|kept| kept.is_none());
        *place.ok_or(PlanError::Wrong { sink })? = Some(sum);
    }
    let wrong = kept
        .iter()
        .zip(coefficients.rows())
        .position(|(got, row)| got.as_ref() != Some(row));
    wrong.map_or(Ok(()), |sink| Err(PlanError::Wrong { sink }))
}
