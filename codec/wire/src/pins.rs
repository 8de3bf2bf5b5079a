//! Steps that stay in RAM until somebody lets them go, as nodes tell them to each other and keep them for the daemon that starts next.

use minicbor::{Decode, Encode};

use crate::ids::{Namespace, Owner, Step};
use crate::run::RunId;

/// A step that was pinned, or let go again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Pin {
    /// The checkpoint's run.
    #[n(0)]
    pub run: RunId,
    /// Its step.
    #[n(1)]
    pub step: Step,
    /// Whether it stays.
    #[n(2)]
    pub pinned: bool,
    /// Rises with every change: of what two nodes say, the higher one counts.
    #[n(3)]
    pub changes: u32,
    /// Why nobody may count on it yet; none of what a node tells that does not know of doubts.
    #[n(4)]
    pub doubt: Option<PinDoubt>,
}

/// What a pin still waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum PinDoubt {
    /// The node that was asked for it has not heard yet from enough others, and may take it back.
    #[n(0)]
    Undecided,
}

/// Pins of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct NamespacePins {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// Its steps.
    #[n(2)]
    pub pins: Vec<Pin>,
}

/// What a node says to a pin that it was asked to note.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum PinAnswer {
    /// It goes by it, and what it has of the step stays, or goes.
    #[n(0)]
    Noted,
    /// It goes by it, but has nothing of the step: never had, or has let it go.
    #[n(1)]
    NotHere,
    /// It cannot: saves would find no room beside the step.
    #[n(2)]
    NoRoom(#[n(0)] String),
}
