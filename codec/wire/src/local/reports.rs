//! What dropping a job and verifying a checkpoint found.

use minicbor::{Decode, Encode};
use storaged_codec::Digest;

use crate::ids::{Namespace, NodeName, Step};
use crate::peer::DropAnswer;

/// What dropping a job did.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DropReport {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// What each node did that answered.
    #[n(1)]
    pub nodes: Vec<DroppedNode>,
    /// Nodes that did not: they may still hold some of it.
    #[n(2)]
    pub silent: Vec<NodeName>,
}

/// What one node did when a job was dropped.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DroppedNode {
    /// The node.
    #[n(0)]
    pub node: NodeName,
    /// What it did.
    #[n(1)]
    pub answer: DropAnswer,
}

/// What a verification found.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct VerifyReport {
    /// The checkpoint.
    #[n(0)]
    pub manifest: Digest,
    /// Its step.
    #[n(1)]
    pub step: Step,
    /// One line per shard and parity set, in order.
    #[n(2)]
    pub parts: Vec<VerifiedPart>,
}

/// One shard or parity set that was read and checked, or was not.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct VerifiedPart {
    /// Where it is.
    #[n(0)]
    pub node: NodeName,
    /// Such as `shard of rank 3` or `parity 1 of group 0`.
    #[n(1)]
    pub what: String,
    /// Bytes read.
    #[n(2)]
    pub bytes: u64,
    /// What is wrong, if anything.
    #[n(3)]
    pub fault: Option<String>,
}
