//! What a caller is told when something cannot be done: a code to act on, and a sentence that says what was
//! expected, what was got and what to do.

use std::fmt;

use minicbor::{Decode, Encode};

/// Why a request was refused. Python's exceptions and the CLI's exit codes follow from it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum RefusalCode {
    /// The frame is not a request, or a field is out of range.
    #[n(0)]
    Malformed,
    /// The protocol version differs.
    #[n(1)]
    Version,
    /// No such namespace here or on any live peer.
    #[n(2)]
    UnknownNamespace,
    /// The namespace belongs to another token.
    #[n(3)]
    WrongToken,
    /// The process's user may not use this socket.
    #[n(4)]
    WrongUser,
    /// A newer run of the namespace exists.
    #[n(5)]
    OlderRun,
    /// The step is not above the last one of the same run.
    #[n(6)]
    StepNotNewer,
    /// Ranks disagree on the world size.
    #[n(7)]
    WorldSize,
    /// The shard is longer than its slot.
    #[n(8)]
    ShardTooLong,
    /// The memory budget has no room.
    #[n(9)]
    BudgetFull,
    /// Every slot is in use until a bounded wait ended.
    #[n(10)]
    Busy,
    /// The slot is not this connection's, or not in the state that the request needs.
    #[n(11)]
    WrongSlot,
    /// No restorable checkpoint, or a newer one took the place of the one that was planned: ask for another plan.
    #[n(12)]
    NoCheckpoint,
    /// The checkpoint exists but too much of it is lost, and nothing newer took its place.
    #[n(13)]
    TooManyLost,
    /// Bytes do not have the digest that they must have, on every rung.
    #[n(14)]
    Corrupt,
    /// The checkpoint was given up before it reached the state waited for.
    #[n(15)]
    Abandoned,
    /// The bounded wait ended first.
    #[n(16)]
    TimedOut,
    /// The durable tier could not be asked, and RAM does not settle the question.
    #[n(17)]
    DurableUnavailable,
    /// The request needs a hello first, or a trainer's hello.
    #[n(18)]
    NotAttached,
    /// The daemon is shutting down or draining.
    #[n(19)]
    Draining,
    /// A newer checkpoint than could be offered was protected, or may have been, and nodes that may hold it have not
    /// answered.
    #[n(20)]
    NewerUnreachable,
    /// The job has trainers.
    #[n(21)]
    InUse,
    /// Nobody has opened the run.
    #[n(22)]
    UnknownRun,
    /// The namespace has had the highest number that a run can have.
    #[n(23)]
    NoRunLeft,
    /// This node has no place in its cluster: a spare, or one that has just come.
    #[n(24)]
    NoPlace,
}

/// A refused request.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Refusal {
    /// What to act on.
    #[n(0)]
    pub code: RefusalCode,
    /// What to read: expected, got, and what to do.
    #[n(1)]
    pub message: String,
}

impl Refusal {
    /// A refusal with its sentence.
    pub fn new(code: RefusalCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}
