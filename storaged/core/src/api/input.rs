//! What happened: all that a node decides by.

use std::ops::Range;
use std::sync::Arc;

use storaged_codec::Fingerprint;
use storaged_plan::Member;
use storaged_wire::local::Request;
use storaged_wire::peer::{PeerMessage, SessionFault};
use storaged_wire::{
    Digest, Generation, KeptRecord, ManifestBytes, Namespace, NodeName, Rank, RunId, SessionId,
    SlotId, Succession,
};

use super::{
    ClaimFault, ClaimedRun, ConnId, CurationFault, DigestTally, DurableFault, DurableListing,
    FoundSuccessions, Prepared, QueryId, Registration, RegistryFault, Removed, RequestId,
    ScrubTally, SessionTally, SuccessionFault, Unread, UploadTally, Viewer,
};

/// The nodes of an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EpochMembers {
    pub epoch: u64,
    pub members: Vec<Member>,
}

/// What is found out of the durable tier apart from what is asked of it.
#[derive(Debug, Clone)]
pub enum TierNews {
    /// It was opened, or could not be.
    Opened(Result<(), DurableFault>),
    /// Whether writes are answered: they may hang while reads go on.
    Writes(Result<(), DurableFault>),
    /// A restore of what builds on it found this checkpoint damaged, or another one that it builds on itself.
    Damaged(Arc<ManifestBytes>, DurableFault),
}

/// What happened.
#[derive(Debug, Clone)]
pub enum Input {
    /// The deadline came.
    Tick,
    /// First of all, of a daemon that starts where another one ended: what that one kept, and the memory behind it is there.
    Recovered { records: Vec<KeptRecord> },
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
    /// A connection sends a request of so many bytes, or has sent them, and they were none: 0. They count in its tenant's part of the budget
    /// until the request is here and worked on.
    RequestComes { conn: ConnId, bytes: u64 },
    /// Through which socket a connection came; one of which nothing is said is of the tenant without a name. Readers of the operator's
    /// need no job's token.
    Connected { conn: ConnId, viewer: Viewer },
    /// A connection ended, or the process behind it died.
    Disconnected { conn: ConnId },
    /// There is another list of nodes, this one included, that can be grouped: of another epoch where a registry gives them
    /// one, else of epoch 1 again. Others may have described steps in epochs that
    /// passed before this node looked.
    Members {
        newest: EpochMembers,
        passed: Vec<EpochMembers>,
    },
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
        tally: DigestTally,
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
        outcome: Result<UploadTally, DurableFault>,
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
    /// How the durable tier is; said whenever that changes.
    DurableState(TierNews),
    /// `Output::ClaimRun` ended: the run that is now this proposal's.
    RunClaimed {
        query: QueryId,
        outcome: Result<RunId, ClaimFault>,
    },
    /// `Output::RegisterRun` ended.
    RunRegistered {
        query: QueryId,
        run: RunId,
        outcome: Result<Registration, RegistryFault>,
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
    /// `Output::FindSuccessions` ended.
    SuccessionsFound {
        query: QueryId,
        outcome: Result<FoundSuccessions, DurableFault>,
    },
    /// `Output::Succeed` ended: the record that is there.
    Succeeded {
        query: QueryId,
        outcome: Result<Box<Succession>, SuccessionFault>,
    },
    /// `Output::Fetch` ended: every byte asked for is in the slot and has its digest.
    Fetched {
        slot: SlotId,
        outcome: Result<Arc<[Digest]>, DurableFault>,
    },
    /// `Output::Prepare` is done.
    Prepared(Prepared),
    /// `Output::Check` ended: per part, in order, the bytes read and what is wrong, if anything.
    Checked {
        query: QueryId,
        outcomes: Vec<(u64, Option<String>)>,
    },
    /// `Output::Scrub` ended.
    Scrubbed {
        query: QueryId,
        outcome: Result<ScrubTally, Unread>,
    },
}
