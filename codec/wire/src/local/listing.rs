//! What a listing says of a checkpoint.

use minicbor::{Decode, Encode};
use storaged_codec::Digest;

use crate::ids::{Namespace, Step, WorldSize};
use crate::run::RunId;
use crate::state::CheckpointState;

/// One line of a listing.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct CheckpointInfo {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Its run.
    #[n(1)]
    pub run: RunId,
    /// Its step.
    #[n(2)]
    pub step: Step,
    /// How safe it is.
    #[n(3)]
    pub state: CheckpointState,
    /// Whether the durable tier holds it.
    #[n(4)]
    pub durable: bool,
    /// Ranks.
    #[n(5)]
    pub world_size: WorldSize,
    /// Bytes of all shards; those sealed so far if it is not committed yet.
    #[n(6)]
    pub length: u64,
    /// Its manifest, once committed.
    #[n(7)]
    pub manifest: Option<Digest>,
    /// What it bears now, if it is committed and coded.
    #[n(8)]
    pub bears: Option<Bears>,
    /// Why it is in this node's RAM though a newer one has made it needless.
    #[n(9)]
    pub kept_for: Option<KeptFor>,
    /// Whether it stays in RAM until it is unpinned; an older daemon does not say.
    #[n(10)]
    pub pinned: Option<bool>,
}

/// Who keeps a checkpoint in RAM that is needless otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum KeptFor {
    /// Somebody on this node has a shard of it open.
    #[n(0)]
    Reader,
}

/// How many node losses a checkpoint in RAM survives from now on.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct Bears {
    /// Any so many.
    #[n(0)]
    pub losses: u32,
    /// And with every block in place: m.
    #[n(1)]
    pub of: u32,
}

impl Bears {
    /// Every block is in place.
    pub fn is_full(self) -> bool {
        self.losses >= self.of
    }
}

/// How `storaged` shows a checkpoint that is in this state and bears so much: `protected` alone only while any m nodes
/// may be lost, `protected, bears 1 of 2` while blocks are missing, `exposed` when the next loss may be one too many. One
/// that is needless and only read has given its blocks back: what it bears is of no concern.
pub fn standing(state: CheckpointState, bears: Option<Bears>, kept_for: Option<KeptFor>) -> String {
    if let Some(KeptFor::Reader) = kept_for {
        return "superseded, held by a reader".into();
    }
    match bears {
        Some(bears) if state == CheckpointState::Protected && !bears.is_full() => {
            match bears.losses {
                0 => format!("exposed, bears 0 of {}", bears.of),
                losses => format!("protected, bears {losses} of {}", bears.of),
            }
        }
        _ => state.to_string(),
    }
}
