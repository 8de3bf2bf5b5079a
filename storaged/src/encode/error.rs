//! What goes wrong on a data stream, and what a neighbour is blamed with for it.

use std::error::Error as StdError;

use storaged_wire::NodeName;
use thiserror::Error;

/// A data stream that cannot be opened, or that breaks.
#[derive(Debug, Error)]
pub enum StreamError {
    /// This daemon has no peers.
    #[error("there is no transport, and so no link to {to}")]
    NoTransport { to: NodeName },
    /// The transport gave up, for its own reason.
    #[error(transparent)]
    Transport(Box<dyn StdError + Send + Sync>),
    /// The peer wants no more of the stream.
    #[error("stopped the stream with code {code}")]
    Stopped { code: u64 },
    /// Bytes came where the stream should end.
    #[error("sent more than the plan has")]
    Surplus,
}

impl StreamError {
    /// What a transport gave up with.
    pub fn transport(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::Transport(error.into())
    }
}

/// A header that does not fit the plan.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum FrameError {
    #[error("sent stripe {got} where the plan has stripe {expected}")]
    Stripe { expected: u64, got: u64 },
    #[error("sent sums of {got} bytes for stripe {stripe} where the plan has {expected}")]
    Bytes {
        stripe: u64,
        expected: u32,
        got: u32,
    },
    #[error("sent {got} sums for stripe {stripe} where the plan has {expected}")]
    Width { stripe: u64, expected: u8, got: u8 },
    #[error("sent flag {got} for stripe {stripe}, expected 0 (clean) or 1 (dirty)")]
    Flag { stripe: u64, got: u8 },
    #[error("sent {got:02x?} in the reserved bytes of stripe {stripe}, expected zeros")]
    Reserved { stripe: u64, got: [u8; 2] },
}

/// What ends a session and is a neighbour's fault.
#[derive(Debug, Error)]
pub(super) enum NeighbourError {
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("opened its stream twice")]
    OpenedTwice,
    /// It let the stall limit pass.
    #[error("{what} for {millis} ms")]
    Stalled { what: &'static str, millis: u128 },
}
