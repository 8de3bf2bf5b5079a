//! Steps that restarts have failed from, as nodes tell them to each other and keep them for the daemon that starts next.

use minicbor::{Decode, Encode};

use crate::ids::{Namespace, Owner, Step};
use crate::run::RunId;

/// A launcher says that a restart has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct FailureReport {
    /// The checkpoint's run. Without: the newest that has the step.
    #[n(0)]
    pub run: Option<RunId>,
    /// Its step.
    #[n(1)]
    pub step: Step,
    /// How long it may be looked for.
    #[n(2)]
    pub timeout_ms: u32,
}

/// A step that restarts have failed from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct FailedRestart {
    /// The checkpoint's run.
    #[n(0)]
    pub run: RunId,
    /// Its step.
    #[n(1)]
    pub step: Step,
    /// How often it was said; 0 once an operator has lifted it.
    #[n(2)]
    pub times: u32,
    /// Milliseconds until it is offered again; none if that takes an operator, or nothing is to be waited for.
    #[n(3)]
    pub wait_ms: Option<u64>,
    /// Rises with every change: of what two nodes say, the higher one counts.
    #[n(4)]
    pub changes: u32,
}

/// All of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct NamespaceFailures {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// Its steps.
    #[n(2)]
    pub failed: Vec<FailedRestart>,
}
