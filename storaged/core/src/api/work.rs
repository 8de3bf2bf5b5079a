//! What is done with blocks: one member's part of a session, what it reports of it, and parts to check or to scrub.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use storaged_codec::Fingerprint;
use storaged_plan::{StripedPlan, stripe_bytes};
use storaged_wire::peer::LinkTally;
use storaged_wire::{ChunkSize, Digest, Enclosure, NodeName, SessionId, SharedBytes, SlotId};
use thiserror::Error;

use super::ParityId;

/// A sealed shard in a slot, with the digests of its chunks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotShard {
    /// Where it is.
    pub slot: SlotId,
    /// Bytes.
    pub length: u64,
    /// Size of the chunks that it was digested in: its manifest's, whatever is configured now.
    pub chunk: ChunkSize,
    /// One digest per chunk.
    pub leaves: Arc<[Digest]>,
    /// One fingerprint per chunk, as this node has taken them of these bytes; none at all where it has not.
    pub prints: Arc<[Fingerprint]>,
}

/// What may lie in the durable tier of a shard whose upload begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leftovers {
    /// Nothing: its trainer has sealed an earlier step in this life of the daemon, and no other node can have thought this one lost.
    None,
    /// Something of an earlier life, of another try or of another node: it is looked for, which costs an S3 server four requests.
    Perhaps,
}

/// The blocks that a member reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Source {
    /// Chunks of a sealed shard; with a basis, their XOR difference from the basis checkpoint's shard of the rank.
    Shard {
        shard: SlotShard,
        basis: Option<SlotShard>,
    },
    /// Chunks of a parity set.
    Parity { set: ParityId },
}

/// The blocks that a member keeps.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Sink {
    /// A new parity set; with a basis, what arrives is the difference from that set, which stays as it is. Every chunk
    /// must have its fingerprint, also those that are the basis' own.
    Parity {
        set: ParityId,
        basis: Option<ParityId>,
        /// Of every stripe of the lane.
        prints: Arc<[Fingerprint]>,
    },
    /// A shard into a slot; every chunk must have its digest.
    Shard(SlotShard),
}

/// One member's part of a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionWork {
    /// The node that leads the session; with `session` it names the session everywhere.
    pub leader: NodeName,
    /// Unique per leader.
    pub session: SessionId,
    /// What it is for.
    pub purpose: SessionPurpose,
    /// Of a repair: whether somebody waits for it.
    pub urgency: Urgency,
    /// The plan that all members derived.
    pub plan: Arc<StripedPlan>,
    /// The plan's members, in its order.
    pub members: Arc<[NodeName]>,
    /// Which of them this node is.
    pub member: usize,
    /// Size of a chunk.
    pub chunk: ChunkSize,
    /// Length of the longest shard of the lane: the last stripe is only as long as it needs to be.
    pub lane_length: u64,
    /// Stripes to compute, ascending; the same at every member, because a stripe's place among them may say who does
    /// what for it.
    pub stripes: Vec<Range<u64>>,
    /// Blocks to read.
    pub source: Option<Source>,
    /// Blocks to keep.
    pub keep: Option<Sink>,
    /// Of a kept parity set, the stripes that an earlier session, which broke off, has made: they stay, and none of
    /// them is among the stripes to compute.
    pub carried: Vec<Range<u64>>,
    /// What the members' shards must be, by member, if what they send is to be checked: a block that comes as it is
    /// against its digest, a sum against the fingerprints of the blocks in it.
    pub proofs: BTreeMap<usize, ExpectedShard>,
}

/// What a session is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SessionPurpose {
    /// Parity of a step that was saved.
    Encode,
    /// Blocks that were lost, and shards for readers who are elsewhere.
    Repair,
}

/// Whether a repair may be held back beside a save.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// Nobody waits for it: what was lost is put back so that the next loss costs nothing.
    Background,
    /// A reader waits for what it brings.
    Awaited,
}

/// What a member's shard must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExpectedShard {
    /// Bytes.
    pub length: u64,
    /// One digest per chunk.
    pub leaves: Arc<[Digest]>,
    /// One fingerprint per chunk; none at all if sums are not checked.
    pub prints: Arc<[Fingerprint]>,
}

/// A stripe of a session and the class of the plan that it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StripeTurn {
    /// Which stripe.
    pub stripe: u64,
    /// Index into the plan's classes.
    pub class: usize,
}

impl SessionWork {
    /// The stripes of the session in order, also those in which this member has no part.
    pub fn turns(&self) -> impl Iterator<Item = StripeTurn> + use<> {
        let plan = self.plan.clone();
        let stripes = self.stripes.clone().into_iter().flatten();
        (0..).zip(stripes).map(move |(turn, stripe)| StripeTurn {
            stripe,
            class: plan.class_of(stripe, turn),
        })
    }

    /// Bytes of every block of `stripe`.
    pub fn stripe_bytes(&self, stripe: u64) -> usize {
        stripe_bytes(self.chunk, self.lane_length, stripe)
    }
}

/// What a session moved, for the measured rates.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SessionTally {
    /// Bytes of blocks computed or kept by this member.
    pub bytes: u64,
    /// Milliseconds.
    pub elapsed_ms: u64,
    /// Stripes of which this member has done its part.
    pub stripes: u64,
    /// What this member saw of the links to its neighbours.
    pub links: Vec<LinkTally>,
}

/// What a copy to the durable tier moved, for the first guess of how fast it is read; nothing where that says little of it: an increment, one
/// of which a part was there already, one that a rate held back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UploadTally {
    /// Bytes of the shard.
    pub bytes: u64,
    /// Milliseconds.
    pub elapsed_ms: u64,
}

/// What reading a shard for its digests took, for the measured rates; nothing where it was not measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DigestTally {
    /// Its bytes.
    pub bytes: u64,
    /// Microseconds of all threads that were at it.
    pub busy_us: u64,
}

/// A shard or parity set to read and check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckPart {
    /// A shard in a slot.
    Shard(SlotShard),
    /// A parity set.
    Parity(ParityId),
    /// Schema or torch metadata.
    Enclosure { name: Enclosure, bytes: SharedBytes },
}

/// A piece of a block to read again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScrubPiece {
    /// Chunks of a shard in a slot, each to be compared with its digest.
    Shard {
        shard: SlotShard,
        chunks: Range<u64>,
    },
    /// Chunks of a parity set, each to be compared with its fingerprint.
    Parity {
        set: ParityId,
        stripes: Range<u64>,
        /// Size of a whole chunk.
        chunk: ChunkSize,
        /// What these stripes must have by the data that they protect, in order; none if that is not known here.
        prints: Option<Arc<[Fingerprint]>>,
    },
}

/// What reading a piece came to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ScrubTally {
    /// Bytes read.
    pub bytes: u64,
    /// Chunks that are not what they were, ascending.
    pub rotten: Vec<u64>,
    /// How many of those were found rotten before: chunks that several parity sets share.
    pub known: u64,
}

/// A piece that could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unread {
    /// Its block was dropped meanwhile.
    #[error("expected the block in memory, it is gone")]
    Gone,
    /// Nobody computes any more.
    #[error("expected a result of the codec's threads, got none: the daemon is stopping")]
    Stopped,
}
