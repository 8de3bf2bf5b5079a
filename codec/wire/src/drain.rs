//! How an operator ends a node's daemon in order, and how far it is.

use minicbor::{Decode, Encode};

use crate::local::Bears;
use crate::peer::CheckpointKey;
use crate::state::CheckpointState;

/// What becomes of the node's place in the roster, where there is one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum PlaceAfter {
    /// The next spare takes it, and this node gets none until it is admitted again.
    #[n(0)]
    GivenUp,
    /// The node is to come back to it soon.
    #[n(1)]
    Kept,
}

/// The daemon is to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DrainOrder {
    /// Within so many milliseconds from when it is first told, finished or not.
    #[n(0)]
    pub within_ms: u32,
    /// What becomes of its place.
    #[n(1)]
    pub place: PlaceAfter,
    /// Node losses that each job's newest step must bear before, as `RestartSafe` has it. None: it goes when something is left without it, in
    /// RAM or in the durable tier.
    #[n(2)]
    pub bears: Option<u32>,
}

/// How far a drain is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum DrainPhase {
    /// What only this node has, or can finish, is seen to.
    #[n(0)]
    Finishing,
    /// The registry is told that the place is vacant.
    #[n(1)]
    GivingUpPlace,
    /// The daemon ends.
    #[n(2)]
    Over,
}

/// Where a drain stands.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DrainReport {
    /// How far it is.
    #[n(0)]
    pub phase: DrainPhase,
    /// Milliseconds that are left of the time it was given.
    #[n(1)]
    pub within_ms: u32,
    /// What is not finished, a line each. Once it is over: what is lost with this node's memory, or stays half done.
    #[n(2)]
    pub left: Vec<String>,
    /// What became of the place, for people; none before that, or where nodes are listed in files.
    #[n(3)]
    pub place: Option<String>,
    /// What is coded of each job's newest step without this node, once its work is done; none before that, where others have its place
    /// already, and from a daemon that does not know it.
    #[n(4)]
    pub after: Option<Vec<StepAfterDrain>>,
}

/// A job's newest step, as it is when the node has gone and nobody has put back yet what was there.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct StepAfterDrain {
    /// Which one.
    #[n(0)]
    pub key: CheckpointKey,
    /// Further node losses that it bears.
    #[n(1)]
    pub bears: Bears,
    /// How far it came.
    #[n(2)]
    pub state: CheckpointState,
}
