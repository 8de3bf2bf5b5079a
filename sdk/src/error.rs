//! What a call can meet.

use std::path::PathBuf;

use storaged_arena::{PassingError, SlotError};
use storaged_wire::manifest::ManifestError;
use storaged_wire::{Digest, Refusal, RefusalCode, WireError};
use thiserror::Error;

/// Why a call did not do what was asked.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Nobody listens on the socket.
    #[error(
        "no storaged daemon at {socket}: is it running on this node, and is its socket directory mounted into this \
         container? STORAGED_SOCKET overrides the path"
    )]
    Unavailable {
        socket: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The socket's file, or its directory, is open to other users only.
    #[error(
        "this user may not open {socket}: use the socket of your own tenant, which STORAGED_SOCKET names, as an operator the one \
         of [admin], or ask the node's operator to add the user to [[tenants]]"
    )]
    NotAllowed {
        socket: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// The daemon said no, and why.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The daemon did not answer within the limit.
    #[error(
        "expected an answer to {request} within {limit_ms} ms, got none: is the daemon overloaded or stopped?{}",
        hint(.request)
    )]
    TimedOut {
        request: &'static str,
        limit_ms: u64,
    },
    /// The caller was called away, by Ctrl-C for example, before the answer came.
    #[error("the wait for an answer to {request} was ended by the caller")]
    CalledAway { request: &'static str },
    /// The connection broke: the daemon died or was restarted. Whether it did what was asked is not known. The next call of a connection that
    /// said hello connects again.
    #[error("the connection to the daemon broke during {request}; the next call connects again")]
    Broken {
        request: &'static str,
        #[source]
        source: PassingError,
    },
    /// What was put into a slot was not saved: the daemon was restarted before it had all of it, or the connection that acquired the slot broke.
    /// The next save goes on by itself.
    #[error(
        "expected at {request} a slot that this connection has acquired, got one from before the daemon was restarted or the \
         connection broke: this save is lost, the next one goes on by itself"
    )]
    SlotLost { request: &'static str },
    /// The daemon answered with something else than was asked.
    #[error("expected {expected} in answer to {request}, got {got}")]
    Protocol {
        request: &'static str,
        expected: &'static str,
        got: String,
    },
    /// Bytes that are no record.
    #[error("the daemon's answer could not be read")]
    Wire(#[from] WireError),
    /// The manifest is not the one asked for.
    #[error("the manifest could not be verified")]
    Manifest(#[from] ManifestError),
    /// Shared memory.
    #[error("shared memory failed")]
    Slot(#[from] SlotError),
    /// A chunk does not have its digest.
    #[error(
        "digest mismatch in chunk {chunk} of rank {rank}'s shard: expected {expected}, got {got}; nothing of it was used"
    )]
    Corrupt {
        rank: u32,
        chunk: u64,
        expected: Digest,
        got: Digest,
    },
    /// The table of chunk digests does not have the root that the manifest names.
    #[error(
        "the chunk digests of rank {rank}'s shard do not have the root that its manifest names"
    )]
    WrongLeaves { rank: u32 },
    /// The caller's range is outside of the shard.
    #[error("expected bytes within the shard's {length}, got {count} at {offset}")]
    Outside {
        length: u64,
        offset: u64,
        count: u64,
    },
}

/// What else it may be.
fn hint(request: &str) -> &'static str {
    match request {
        "hello" => {
            " One that has just started may wait for its durable tier, which hangs or fails: with more than 3 s it says so"
        }
        _ => "",
    }
}

impl ClientError {
    /// Whether it means that the job has saved nothing yet, so that it begins from scratch: every node and the durable
    /// tier were asked. That something could not be asked, or is lost, is never this.
    pub fn is_nothing_saved(&self) -> bool {
        let Self::Refused(refusal) = self else {
            return false;
        };
        matches!(
            refusal.code,
            RefusalCode::NoCheckpoint | RefusalCode::UnknownNamespace
        )
    }
}
