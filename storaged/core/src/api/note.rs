//! What is worth a log line or a counter.

use storaged_wire::local::Bears;
use storaged_wire::peer::{CheckpointKey, Lane, SessionFault};
use storaged_wire::{CheckpointState, Namespace, NodeName};

use super::{DurableFault, FalseStatement, HeldBlock};

/// A change worth a log line or a counter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// A checkpoint reached a state, as this node knows it.
    State {
        key: CheckpointKey,
        state: CheckpointState,
    },
    /// A checkpoint bears another number of node losses than before, as far as this node knows.
    Bears { key: CheckpointKey, bears: Bears },
    /// A checkpoint's copy in the durable tier was given up; the checkpoint itself may live on in RAM.
    DurableGivenUp { key: CheckpointKey, reason: String },
    /// A checkpoint was given up.
    Abandoned { key: CheckpointKey, reason: String },
    /// A lane this node leads was protected, after so many milliseconds.
    LaneProtected {
        key: CheckpointKey,
        lane: Lane,
        elapsed_ms: u64,
    },
    /// The shape of an encode that this node leads, and why.
    ShapeChosen {
        key: CheckpointKey,
        lane: Lane,
        reason: String,
    },
    /// A session this node leads failed and will be tried again.
    SessionFailed {
        key: CheckpointKey,
        node: NodeName,
        fault: SessionFault,
    },
    /// A session this node leads was ended because of a slow member, to go on with a plan around it.
    Replanned {
        key: CheckpointKey,
        lane: Lane,
        node: NodeName,
        reason: String,
    },
    /// A lost block was put back.
    Healed {
        key: CheckpointKey,
        lane: Lane,
        node: NodeName,
    },
    /// Chunks in this node's RAM are not what they were.
    Rotten {
        key: CheckpointKey,
        block: HeldBlock,
        /// How many that had not been found before.
        chunks: u64,
    },
    /// A copy to or from the durable tier failed and will be tried again.
    DurableFailed { key: CheckpointKey, reason: String },
    /// The durable tier stopped answering, or answers again.
    DurableState { fault: Option<DurableFault> },
    /// A checkpoint in the durable tier proved damaged.
    Quarantined { key: CheckpointKey, reason: String },
    /// A job that has ended left RAM, because another one needed the room.
    Evicted { namespace: Namespace, bytes: u64 },
    /// A peer sent something that cannot be.
    PeerFault { node: NodeName, reason: String },
    /// A peer said what cannot be so, or what is not its to say.
    FalseStatement {
        node: NodeName,
        statement: FalseStatement,
    },
    /// As a home node: a step cannot commit here, because there is no room for what describes it.
    NotDescribed { key: CheckpointKey, reason: String },
    /// Parity of a step that could not be kept elsewhere makes way here for what could not be kept either.
    ParityYields { key: CheckpointKey },
    /// This node's process, or its machine, was stopped for so long. For some seconds it protects nothing by its own count.
    Stopped { ms: u64 },
    /// A peer has said so much that cannot be that nothing is believed any more which it alone says, until it is restarted.
    Disbelieved { node: NodeName },
}
