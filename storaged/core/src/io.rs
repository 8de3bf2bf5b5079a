//! What goes in and what comes out. One input, drain all outputs, come back at the deadline.

use std::ops::Range;
use std::sync::Arc;

use storaged_codec::Fingerprint;
use storaged_plan::Member;
use storaged_wire::local::{Bears, Reply, Request};
use storaged_wire::peer::{CheckpointKey, Lane, LinkTally, PeerMessage, SessionFault};
use storaged_wire::{
    CheckpointState, ChunkSize, Digest, Generation, ManifestBytes, Namespace, NodeName, Owner,
    Rank, RunId, SessionId, SlotId, Step,
};

use crate::encode::{ParityId, SessionWork, SlotShard};
use crate::trickle::{Curation, CurationFault, DurableFault, DurableListing, Removed, UploadBase};

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

/// What happened.
#[derive(Debug, Clone)]
pub enum Input {
    /// The deadline came.
    Tick,
    /// The link to a peer is up.
    PeerUp {
        node: NodeName,
        generation: Generation,
    },
    /// The link to a peer is down.
    PeerDown { node: NodeName },
    /// A control message.
    Message {
        from: NodeName,
        message: PeerMessage,
    },
    /// A request of a trainer, a reader or an operator.
    Request { id: RequestId, request: Request },
    /// A connection came through the operator's own socket: its readers need no job's token.
    OperatorConnected { conn: ConnId },
    /// A connection ended, or the process behind it died.
    Disconnected { conn: ConnId },
    /// The configuration has another list of nodes, this one included, that can be grouped.
    Members { members: Vec<Member> },
    /// `Output::CreateSlot` is done.
    SlotCreated { slot: SlotId },
    /// `Output::CreateSlot` failed.
    SlotFailed { slot: SlotId, reason: String },
    /// `Output::Digest` is done.
    Digested {
        slot: SlotId,
        leaves: Arc<[Digest]>,
        prints: Arc<[Fingerprint]>,
        root: Digest,
    },
    /// `Output::Digest` failed.
    DigestFailed { slot: SlotId, reason: String },
    /// `Output::Run` ended.
    SessionEnded {
        leader: NodeName,
        session: SessionId,
        outcome: Result<SessionTally, SessionFault>,
        /// Stripes that are kept, ascending, also if the session failed: of a shard verified, of parity whole.
        kept: Vec<Range<u64>>,
    },
    /// Of an `Output::Run` that goes on, about once a second: how far it is.
    SessionProgress {
        leader: NodeName,
        session: SessionId,
        tally: SessionTally,
    },
    /// `Output::Upload` ended.
    Uploaded {
        manifest: Digest,
        rank: Rank,
        outcome: Result<(), DurableFault>,
    },
    /// `Output::Publish` ended.
    Published {
        manifest: Digest,
        outcome: Result<(), DurableFault>,
    },
    /// `Output::ListDurable` ended: what the tier holds, or why it could not be asked.
    DurableListed {
        query: QueryId,
        outcome: Result<DurableListing, DurableFault>,
    },
    /// `Output::Curate` ended.
    Curated {
        id: RequestId,
        outcome: Result<Removed, CurationFault>,
    },
    /// The durable tier was opened, or could not be; said whenever that changes.
    DurableState(Result<(), DurableFault>),
    /// `Output::ClaimRun` ended: the run that is now this proposal's.
    RunClaimed {
        query: QueryId,
        outcome: Result<RunId, ClaimFault>,
    },
    /// `Output::RecordRun` ended.
    RunRecorded {
        namespace: Namespace,
        run: RunId,
        outcome: Result<(), DurableFault>,
    },
    /// `Output::FindRun` ended.
    RunFound {
        query: QueryId,
        outcome: Result<ClaimedRun, DurableFault>,
    },
    /// `Output::Fetch` ended: every byte asked for is in the slot and has its digest.
    Fetched {
        slot: SlotId,
        outcome: Result<Arc<[Digest]>, DurableFault>,
    },
    /// `Output::Check` ended: per part, in order, the bytes read and what is wrong, if anything.
    Checked {
        query: QueryId,
        outcomes: Vec<(u64, Option<String>)>,
    },
}

/// What the durable tier knows of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimedRun {
    /// Nobody has claimed it.
    Unknown,
    /// Its owner has claimed it, and nobody a newer one.
    Newest(Owner),
    /// It was claimed, and newer ones up to this number after it.
    Superseded { newest: u64 },
}

/// Why the durable tier gave no run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimFault {
    /// The namespace belongs to another token.
    WrongOwner,
    /// It could not be asked.
    Durable(DurableFault),
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

/// A shard or parity set to read and check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckPart {
    /// A shard in a slot.
    Shard(SlotShard),
    /// A parity set.
    Parity(ParityId),
}

/// What to do.
#[derive(Debug, Clone)]
pub enum Output {
    /// Answer a request; `descriptor` is the slot whose memfd goes along.
    Reply {
        id: RequestId,
        reply: Reply,
        descriptor: Option<SlotId>,
    },
    /// Send a control message; it may be lost.
    Send { to: NodeName, message: PeerMessage },
    /// Make and preallocate a slot.
    CreateSlot { slot: SlotId, bytes: u64 },
    /// Unmap and close a slot.
    DropSlot { slot: SlotId },
    /// Digest the first `length` bytes of a sealed slot, chunk by chunk.
    Digest {
        slot: SlotId,
        length: u64,
        chunk: ChunkSize,
    },
    /// Do this node's part of a session.
    Run(SessionWork),
    /// End this node's part of a session.
    Stop {
        leader: NodeName,
        session: SessionId,
    },
    /// Free a parity set.
    DropParity { set: ParityId },
    /// Copy a shard to the durable tier.
    Upload {
        manifest: Arc<ManifestBytes>,
        rank: Rank,
        shard: SlotShard,
        /// What it may be written against, if increments are wanted and there is one.
        base: Option<UploadBase>,
    },
    /// Give up the upload of a shard: its checkpoint has left RAM or is not owed any more.
    StopUpload { manifest: Digest, rank: Rank },
    /// Write the checkpoint's manifest to the durable tier: all its shards are there.
    Publish { manifest: Arc<ManifestBytes> },
    /// Find the newest manifests of a namespace in the durable tier.
    ListDurable {
        query: QueryId,
        namespace: Namespace,
        /// That step of any run; the newest ones without it.
        step: Option<Step>,
    },
    /// Claim a run in the durable tier, by create-if-absent: above `above` and above every run that has a folder or a
    /// claim there.
    ClaimRun {
        query: QueryId,
        namespace: Namespace,
        owner: Owner,
        above: u64,
        identity: u64,
    },
    /// Claim a run in the durable tier that was opened without it.
    RecordRun {
        namespace: Namespace,
        owner: Owner,
        run: RunId,
    },
    /// Look for the claim of this very run in the durable tier.
    FindRun {
        query: QueryId,
        namespace: Namespace,
        run: RunId,
    },
    /// Read ranges of a shard from the durable tier into a slot and verify them. Empty: all of it.
    Fetch {
        manifest: Arc<ManifestBytes>,
        rank: Rank,
        slot: SlotId,
        ranges: Vec<Range<u64>>,
    },
    /// Pin, unpin or remove checkpoints in the durable tier, which must be the owner's.
    Curate {
        id: RequestId,
        namespace: Namespace,
        owner: Owner,
        curation: Curation,
    },
    /// Read and check parts.
    Check {
        query: QueryId,
        parts: Vec<CheckPart>,
    },
    /// For logs and metrics.
    Note(Note),
}

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
}
