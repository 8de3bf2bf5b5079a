//! Time and the names of what is under way or held.

use std::fmt;

use storaged_wire::peer::Lane;
use storaged_wire::{Rank, SlotId};

/// Milliseconds since the daemon started. The driver's clock; the core never asks for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Now(pub u64);

impl Now {
    /// This much later.
    pub fn plus(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Milliseconds since `earlier`.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// A connection on the Unix socket.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnId(pub u64);

/// A request on a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RequestId {
    /// The connection.
    pub conn: ConnId,
    /// Which of its requests, from 0.
    pub index: u64,
}

/// A question to peers or to the durable tier that is under way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct QueryId(pub u64);

/// A parity set in this node's RAM; never reused within a generation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ParityId(pub u64);

/// A block of a checkpoint that this node holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum HeldBlock {
    /// The shard of a rank, in a slot.
    Shard(Rank, SlotId),
    /// Parity of a lane: its index, and the set.
    Parity(Lane, u32, ParityId),
}

impl fmt::Display for HeldBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(rank, _) => write!(f, "shard of rank {rank}"),
            Self::Parity(lane, index, _) => {
                let (group, lane) = (lane.group, lane.index);
                write!(f, "parity {index} of group {group} lane {lane}")
            }
        }
    }
}
