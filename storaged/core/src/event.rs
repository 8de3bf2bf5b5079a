//! What one machine tells the others, heard once the call that it came of is over. Called at once it would change tables
//! under the hands of whoever tells, and an answer to it would call back into a call that has not ended.

use std::sync::Arc;

use storaged_wire::local::DurableWish;
use storaged_wire::peer::{CheckpointKey, PeerMessage, SessionFault};
use storaged_wire::{CheckpointState, Digest, ManifestBytes, Namespace, NodeName, Rank, SlotId};

use crate::api::{HeldBlock, QueryId};

/// What waits in the loop-back queue: the oldest first, but blocks that are gone before all else.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// A message of this node to itself, or one that came as a parcel from another.
    Message(NodeName, PeerMessage),
    /// A commit of which a node told in a parcel.
    CommitTold(NodeName, Arc<ManifestBytes>, DurableWish),
    /// The answer of a node that was asked for a manifest, which came in a parcel.
    ManifestTold(NodeName, Option<QueryId>, Option<Arc<ManifestBytes>>),
    /// Schema or metadata that somebody waits for is here, or nobody who was asked has it.
    EnclosuresMoved,
    /// A manifest is known here.
    Adopted,
    /// A checkpoint came further.
    Reached(CheckpointKey, CheckpointState),
    /// Blocks of a checkpoint that sessions may be at have left RAM, or all of it has. Heard before all else.
    BlocksGone(CheckpointKey),
    /// Whoever waits for a slot may have one now.
    RoomMade,
    /// A slot was freed: this one, of that rank.
    SlotFreed(SlotId, Namespace, Rank),
    /// A slot for an opening is there, or why not.
    OpeningSlot(SlotId, Result<(), NoSlot>),
    /// The same of a shard that a session repairs.
    RepairSlot(SlotId, Result<(), NoSlot>),
    /// A session has begun to fill a slot here with this shard of a checkpoint, or somebody waits for one that may be filled already.
    ShardComes(Digest, Rank),
    /// The session that fills an opening's slot ended well; with the table of digests of the shard's chunks, if it is known.
    OpeningFilled(SlotId, Option<Arc<[Digest]>>),
    /// It did not, because of this node's fault.
    OpeningFailed(SlotId, NodeName, SessionFault),
    /// No session fills the slot of an opening any more, and it is not filled yet.
    OpeningIdle(SlotId),
    /// A session that was led here has ended well.
    SessionOver,
    /// These chunks of a block here, ascending, are not what they were.
    Rotten(CheckpointKey, HeldBlock, Vec<u64>),
    /// A session found a chunk of a block here rotten before the scrub did, and the block has gone.
    RottenSource(CheckpointKey, HeldBlock),
    /// A shard of this rank was restored into this node's RAM.
    ShardBack(Rank),
}

/// Why a slot could not be made, as whoever makes them says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NoSlot(pub String);
