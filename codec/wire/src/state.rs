//! The states of a checkpoint, in the order it passes through them.

use std::fmt;
use std::str::FromStr;

use minicbor::{Decode, Encode};
use thiserror::Error;

/// How safe a checkpoint is. Later states imply the earlier ones, up to `Durable`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum CheckpointState {
    /// This rank's shard is sealed in its daemon's RAM; the trainer may change its tensors again.
    #[n(0)]
    Staged,
    /// Every rank's shard is sealed and the manifest stored: restorable while all its nodes live.
    #[n(1)]
    Committed,
    /// Every parity chunk is held and the manifest is on more than m nodes: survives any m node losses.
    #[n(2)]
    Protected,
    /// The durable tier holds it whole, manifest last: survives the loss of every node.
    #[n(3)]
    Durable,
    /// No longer in RAM. A retired checkpoint may still be in the durable tier.
    #[n(4)]
    Retired,
}

impl CheckpointState {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Staged => "staged",
            Self::Committed => "committed",
            Self::Protected => "protected",
            Self::Durable => "durable",
            Self::Retired => "retired",
        }
    }
}

impl fmt::Display for CheckpointState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that is no state.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("state must be staged, committed, protected, durable or retired, got {got:?}")]
pub struct UnknownState {
    got: String,
}

impl FromStr for CheckpointState {
    type Err = UnknownState;

    fn from_str(text: &str) -> Result<Self, UnknownState> {
        [
            Self::Staged,
            Self::Committed,
            Self::Protected,
            Self::Durable,
            Self::Retired,
        ]
        .into_iter()
        .find(|state| state.as_str() == text)
        .ok_or_else(|| UnknownState { got: text.into() })
    }
}
