//! What makes no plan.

use storaged_codec::RepairError;
use thiserror::Error;

/// Why there is no such plan.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum PlanError {
    /// An order that leaves a source out, names one twice or one that is not there.
    #[error("expected an order that names each of {sources} sources once, got {got:?}")]
    Order { sources: usize, got: Vec<usize> },
    /// A tree that is none.
    #[error("expected a fan-in of at least 2, got {0}: take a chain for 1")]
    FanIn(usize),
    /// Roots that are not sources, or none.
    #[error("expected at least one root, each below {sources}, got {got:?}")]
    Roots { sources: usize, got: Vec<usize> },
    /// Not enough nodes to keep the sums.
    #[error("expected at least {needed} different nodes that keep the sums, got {got}")]
    ParityHolders { needed: usize, got: usize },
    /// A member that would have to act twice in one stripe.
    #[error(
        "member {0} keeps a sum and is not the last to add to it: let it be the root or keep none"
    )]
    TwoRoles(usize),
    /// Too many or too few blocks for a stripe's plan.
    #[error("expected {expected} blocks, got {got}")]
    Blocks { expected: usize, got: usize },
    /// More lost than can be repaired.
    #[error("expected at least {needed} survivors, got {got}: restore from the durable tier")]
    Survivors { needed: usize, got: usize },
    /// The code's own refusal.
    #[error("the survivors give no coefficients")]
    Coefficients(#[from] RepairError),
    /// A plan that computes something else.
    #[error("sink {sink} gets another combination than it should, or more or less than one")]
    Wrong { sink: usize },
    /// Hops and edges that do not fit together.
    #[error("hop {hop} does not fit the edges of its plan")]
    Malformed { hop: usize },
}
