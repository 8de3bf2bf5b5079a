//! What nodes say of the runs of a namespace.

use minicbor::{Decode, Encode};

use crate::ids::{Namespace, Owner};
use crate::run::RunId;

/// A run of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct NamedRun {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// Which.
    #[n(2)]
    pub run: RunId,
}

/// What a node knows of the runs of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Fence {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// Runs below are fenced off.
    #[n(2)]
    pub run: RunId,
    /// The highest run that was promised to whoever wants to open it; it fences nothing.
    #[n(3)]
    pub promised: RunId,
}

/// The answer of a node that was asked to promise a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub enum PromiseOutcome {
    /// Nobody else gets this number from it any more.
    #[n(0)]
    Promised,
    /// It knows a run of this number or a higher one.
    #[n(1)]
    Taken {
        /// The highest number that it knows.
        #[n(0)]
        highest: u64,
    },
    /// The namespace belongs to another token.
    #[n(2)]
    WrongOwner,
}
