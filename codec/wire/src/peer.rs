//! Daemon and daemon: control messages on the ordered control stream of a connection, and the first record of a
//! data stream. Messages may be lost when a connection ends; every sender repeats what still matters.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};
use storaged_codec::Digest;

use crate::enclosure::{Enclosure, EnclosuresHeld};
use crate::failed::NamespaceFailures;
use crate::ids::{Namespace, NodeName, Owner, Rank, SessionId, Step, WorldSize};
use crate::local::{DurableWish, VerifiedPart};
use crate::manifest::Manifest;
use crate::pins::{NamespacePins, PinAnswer};
use crate::provenance::{KeyTold, KeyWanted};
use crate::run::RunId;
use crate::shape::{EncodeShape, StripeMap};
use crate::shared::SharedBytes;
use crate::state::CheckpointState;
use crate::succession::Rotated;

mod drop_job;
mod runs;
mod session;

pub use drop_job::{DropAnswer, DropOrder, OrderKey, OrderProof};
pub use runs::{Fence, NamedRun, PromiseOutcome};
pub use session::{
    LinkTally, MemberTally, SessionFault, SessionKind, SessionRecord, StreamRecord, SumChecks,
    TablePage, TablePlace,
};

/// Longest control message. What is longer travels as a parcel.
pub const CONTROL_FRAME_BYTES_MAX: usize = 1 << 20;

/// A checkpoint's place in its namespace: ordered by run, then step, so that no older run outranks a newer one.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct CheckpointKey {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// The incarnation of its trainers.
    #[n(1)]
    pub run: RunId,
    /// The training step.
    #[n(2)]
    pub step: Step,
}

impl CheckpointKey {
    /// Of the checkpoint that a manifest describes.
    pub fn of(manifest: &Manifest) -> Self {
        Self {
            namespace: manifest.namespace.clone(),
            run: manifest.run,
            step: manifest.step,
        }
    }

    /// Its place among the checkpoints of its job.
    pub fn mark(&self) -> HighMark {
        HighMark {
            run: self.run,
            step: self.step,
        }
    }
}

/// The stripes of one group that take one shard from each data node: the `index`-th local rank of every node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct Lane {
    /// Index into the manifest's groups.
    #[n(0)]
    pub group: u32,
    /// Position among the ranks of a node, in rank order.
    #[n(1)]
    pub index: u32,
}

/// What one node holds of one checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Holding {
    /// The checkpoint.
    #[n(0)]
    pub manifest: Digest,
    /// Where it is in its namespace.
    #[n(1)]
    pub key: CheckpointKey,
    /// How safe this node knows it to be.
    #[n(2)]
    pub state: CheckpointState,
    /// Whole shards.
    #[n(3)]
    pub shards: Vec<Rank>,
    /// Whole parity sets: lane and parity index.
    #[n(4)]
    pub parity: Vec<(Lane, u32)>,
    /// Schema and torch metadata.
    #[n(5)]
    pub enclosures: EnclosuresHeld,
}

/// A shard that is sealed and digested.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct SealedShard {
    /// Whose it is.
    #[n(0)]
    pub rank: Rank,
    /// Bytes.
    #[n(1)]
    pub length: u64,
    /// Root of the digest tree over its chunks.
    #[n(2)]
    pub root: Digest,
}

/// The highest checkpoint of a namespace that is known to have been protected: a plan does not go below it unasked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct HighMark {
    /// Its run.
    #[n(0)]
    pub run: RunId,
    /// Its step.
    #[n(1)]
    pub step: Step,
}

/// A namespace's high-water mark.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct NamespaceMark {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// How far it got.
    #[n(2)]
    pub mark: HighMark,
}

/// A control message.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum PeerMessage {
    /// First after a link comes up: what the sender knows that the receiver may have forgotten.
    #[n(0)]
    Fences(#[n(0)] Vec<Fence>),
    /// Asks to keep a run for the sender, who wants to open it. Nothing is fenced off by it.
    #[n(30)]
    PromiseRun {
        #[n(0)]
        query: u64,
        #[n(1)]
        run: NamedRun,
    },
    /// The answer.
    #[n(31)]
    RunPromised {
        #[n(0)]
        query: u64,
        /// The run that was asked for.
        #[n(1)]
        run: RunId,
        #[n(2)]
        outcome: PromiseOutcome,
    },
    /// The run is opened: lower ones are fenced off from now on.
    #[n(32)]
    RaiseFence {
        #[n(0)]
        query: u64,
        #[n(1)]
        run: NamedRun,
    },
    /// They are, at the sender.
    #[n(33)]
    FenceRaised {
        #[n(0)]
        query: u64,
    },
    /// Asks what the receiver knows of the runs of a namespace: a trainer has come with one that is unknown here.
    #[n(34)]
    RunQuery {
        #[n(0)]
        query: u64,
        #[n(1)]
        namespace: Namespace,
    },
    /// The answer; none if it knows nothing of the namespace.
    #[n(35)]
    RunAnswer {
        #[n(0)]
        query: u64,
        #[n(1)]
        fence: Option<Fence>,
    },
    /// Shards that are sealed and digested on this node; to the checkpoint's home nodes, until they have noted them. Empty
    /// where all are noted and the sender waits for the commit.
    #[n(78)]
    ShardsSealed {
        #[n(0)]
        key: CheckpointKey,
        #[n(1)]
        owner: Owner,
        #[n(2)]
        world_size: WorldSize,
        #[n(3)]
        shards: Vec<SealedShard>,
        /// Shards here that are still being digested.
        #[n(4)]
        digesting: u32,
    },
    /// From a home node: the digests of the receiver's announcement that is noted, and of the description; and how long ago
    /// something new was heard of the checkpoint. To the other home nodes too, of what is collected for long.
    #[n(79)]
    SealedNoted {
        #[n(0)]
        key: CheckpointKey,
        #[n(1)]
        shards: Option<Digest>,
        #[n(2)]
        description: Option<Digest>,
        #[n(3)]
        quiet_ms: u32,
    },
    /// The committing rank's description of the checkpoint; to its home nodes, until they have noted it.
    #[n(4)]
    Description {
        #[n(0)]
        key: CheckpointKey,
        #[n(1)]
        owner: Owner,
        #[n(2)]
        world_size: WorldSize,
        #[n(3)]
        schema: Enclosure,
        #[n(4)]
        torch_metadata: Enclosure,
        #[n(5)]
        durable: DurableWish,
        /// Epoch of the members whose groups code it, counted from 1.
        #[n(6)]
        epoch: u64,
    },
    /// From a home node: the checkpoint is committed. The receiver stores the manifest and answers.
    #[n(5)]
    Committed {
        #[n(0)]
        manifest: SharedBytes,
        #[n(1)]
        durable: DurableWish,
    },
    /// Answer to `Committed`, `Protected` and `Durable`: the manifest is stored, and the receiver has said that the
    /// checkpoint is in `state` and bears so many losses.
    #[n(6)]
    ManifestStored {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        state: CheckpointState,
        #[n(2)]
        bears: u32,
    },
    /// A home node gave the checkpoint up.
    #[n(7)]
    Abandoned {
        #[n(0)]
        key: CheckpointKey,
        #[n(1)]
        reason: String,
    },
    /// Leader to members: take part in a session.
    #[n(8)]
    Propose(#[n(0)] SessionRecord),
    /// Member to leader: ready, with the stripes that this member needs to move: those of its shard that changed since the
    /// basis, or that its wanted block lacks.
    #[n(9)]
    Ready {
        #[n(0)]
        session: SessionId,
        #[n(1)]
        stripes: Option<StripeMap>,
    },
    /// Member to leader: will not or could not.
    #[n(10)]
    Failed {
        #[n(0)]
        session: SessionId,
        #[n(1)]
        fault: SessionFault,
    },
    /// Leader to members: begin. With it comes the union of the stripes that members need (all, if none said), and for an
    /// encode its shape (none: the plain chain).
    #[n(11)]
    Begin {
        #[n(0)]
        session: SessionId,
        #[n(1)]
        stripes: Option<StripeMap>,
        #[n(2)]
        shape: Option<EncodeShape>,
    },
    /// Member to leader: this member's part is done and what it keeps is stored and verified. With it comes what the
    /// member measured on its links.
    #[n(12)]
    Finished {
        #[n(0)]
        session: SessionId,
        #[n(1)]
        tally: MemberTally,
    },
    /// Leader to members: over. Blocks kept by it count if `kept`, else they go.
    #[n(13)]
    Close {
        #[n(0)]
        session: SessionId,
        #[n(1)]
        kept: bool,
    },
    /// Home node to everyone in the manifest: the checkpoint is protected, and from now on bears the loss of so many
    /// more nodes. Said again when that number changes.
    #[n(15)]
    Protected {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        bears: u32,
    },
    /// Home node to everyone in the manifest: the durable tier holds the checkpoint whole.
    #[n(17)]
    Durable {
        #[n(0)]
        manifest: Digest,
    },
    /// Asks what the receiver holds of a namespace.
    #[n(18)]
    HoldingsQuery {
        #[n(0)]
        query: u64,
        #[n(1)]
        namespace: Namespace,
    },
    /// The answer.
    #[n(19)]
    Holdings {
        #[n(0)]
        query: u64,
        #[n(1)]
        owner: Option<Owner>,
        #[n(2)]
        holdings: Vec<Holding>,
        /// The highest checkpoint of the namespace that the sender knows to have been protected.
        #[n(3)]
        mark: Option<HighMark>,
        /// The highest checkpoint of which the sender has copied a shard to the durable tier: it may be durable though nobody who
        /// answers has heard so.
        #[n(4)]
        copied: Option<HighMark>,
    },
    /// Asks for a manifest.
    #[n(20)]
    ManifestQuery {
        #[n(0)]
        query: u64,
        #[n(1)]
        manifest: Digest,
    },
    /// The answer.
    #[n(21)]
    ManifestAnswer {
        /// None if it is long, so that all who ask for it are told the same.
        #[n(0)]
        query: Option<u64>,
        #[n(1)]
        manifest: Option<ByteVec>,
    },
    /// Asks the receiver to read and check what it holds of a checkpoint.
    #[n(22)]
    VerifyQuery {
        #[n(0)]
        query: u64,
        #[n(1)]
        manifest: Digest,
    },
    /// The answer.
    #[n(23)]
    VerifyAnswer {
        #[n(0)]
        query: u64,
        #[n(1)]
        parts: Vec<VerifiedPart>,
    },
    /// To everyone: a restore found the durable copy of a checkpoint damaged.
    #[n(70)]
    Quarantined {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        key: CheckpointKey,
        #[n(2)]
        reason: String,
    },
    /// From the leader of a session to all that a checkpoint concerns: this node has no room for its part of it.
    #[n(71)]
    NoRoom {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        node: NodeName,
        #[n(2)]
        reason: String,
    },
    /// Member to leader, when it is asked again and about once a second while tables come: room is being made or tables are
    /// on their way here.
    #[n(74)]
    Preparing {
        #[n(0)]
        session: SessionId,
    },
    /// Asks for a page of a shard's table, from the chunk named on.
    #[n(72)]
    TableQuery(#[n(0)] TablePlace),
    /// The answer: as many chunks as fit a message, and none if the sender has no such table.
    #[n(73)]
    TablePage {
        #[n(0)]
        place: TablePlace,
        #[n(1)]
        page: TablePage,
    },
    /// What the sender has to say does not fit a message: the receiver fetches it from there, page by page. It is the
    /// encoding of another message, and counts as if it had come itself.
    #[n(75)]
    Parcel {
        #[n(0)]
        parcel: Digest,
        #[n(1)]
        length: u64,
        /// Of a commit: in whose name, and who is to hear of it from the receiver.
        #[n(2)]
        relay: Option<Relay>,
    },
    /// Asks for a page of a parcel.
    #[n(76)]
    ParcelQuery(#[n(0)] ParcelPlace),
    /// The answer; no bytes if the sender has no such parcel (any more).
    #[n(77)]
    ParcelPage {
        #[n(0)]
        place: ParcelPlace,
        #[n(1)]
        bytes: ByteVec,
    },
    /// Member to leader, about once a second while a session runs: how far this member is, and what it measured.
    #[n(24)]
    Progress {
        #[n(0)]
        session: SessionId,
        #[n(1)]
        tally: MemberTally,
    },
    /// To home nodes: the blocks of a checkpoint that the sender holds whole, all of them. Repeated until `HeldNoted`
    /// answers with the same version, which rises whenever the sender gains or loses a block.
    #[n(40)]
    Held {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        version: u32,
        #[n(2)]
        shards: Vec<Rank>,
        #[n(3)]
        parity: Vec<(Lane, u32)>,
        #[n(4)]
        enclosures: EnclosuresHeld,
    },
    /// The answer.
    #[n(41)]
    HeldNoted {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        version: u32,
    },
    /// To home nodes: the sender keeps its shards of a checkpoint for their way to the durable tier, where these ranks'
    /// are by now. Repeated until `Durable` or `Unowed` answers.
    #[n(42)]
    Owed {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        done: Vec<Rank>,
    },
    /// Nobody need keep the checkpoint for the durable tier: the sender gave its copy up for the reason said, or is a
    /// home node that does not know it any more.
    #[n(43)]
    Unowed {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        cause: UnowedCause,
    },
    /// A checkpoint could not be made safer and gave way to a newer one. A receiver that has no newer one keeps it.
    #[n(45)]
    Superseded {
        #[n(0)]
        key: CheckpointKey,
        #[n(1)]
        reason: String,
    },
    /// To everyone in the manifest: the durable tier did not take the sender's part, in its own words. It is tried again.
    #[n(44)]
    DurableFailed {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        reason: String,
    },
    /// After a link comes up, and from a home node when a checkpoint becomes protected: how far namespaces got.
    #[n(50)]
    Marks(#[n(0)] Vec<NamespaceMark>),
    /// Jobs that have trainers at the sender: all of them, when a link comes up, when they change and every now and then.
    #[n(51)]
    Attached(#[n(0)] Vec<Namespace>),
    /// The sender needed the room of a job that has ended: its checkpoints up to this one leave RAM everywhere.
    #[n(52)]
    Evicted {
        #[n(0)]
        namespace: Namespace,
        #[n(1)]
        up_to: HighMark,
        /// Whether the durable tier holds the newest of them.
        #[n(2)]
        durable: bool,
    },
    /// Somebody wants a job's checkpoints dropped from RAM.
    #[n(53)]
    Drop(#[n(0)] DropOrder),
    /// The answer.
    #[n(54)]
    Dropped {
        #[n(0)]
        query: u64,
        #[n(1)]
        answer: DropAnswer,
    },
    /// After a link comes up, and when a launcher has said so: steps that restarts have failed from.
    #[n(60)]
    FailedRestarts(#[n(0)] Vec<NamespaceFailures>),
    /// Steps that are pinned in RAM, or not any more: when a link comes up, and now and then. With a query, which is answered, of one step.
    #[n(63)]
    Pins(#[n(0)] Option<u64>, #[n(1)] NamespacePins),
    /// The answer.
    #[n(64)]
    PinNoted(#[n(0)] u64, #[n(1)] PinAnswer),
    /// An operator drains the sender, which ends for good as soon as nothing is lost with it. Repeated until it is noted.
    #[n(61)]
    Draining {
        /// Lower ones go first; of equal ones, the node whose name sorts first.
        #[n(0)]
        turn: u64,
    },
    /// The answer.
    #[n(62)]
    DrainNoted {
        /// The receiver of `Draining` is drained too: its own turn.
        #[n(0)]
        turn: Option<u64>,
    },
    /// Asks for the key of a job's MACs; an older node warns and goes on without it.
    #[n(90)]
    KeyWanted(#[n(0)] KeyWanted),
    /// The answer, if the sender has it from one of the job's trainers.
    #[n(91)]
    KeyTold(#[n(0)] KeyTold),
    /// The job's owner has removed checkpoints of it from the durable tier: none that is missing there was taken away by somebody else.
    #[n(92)]
    DurableRemoved {
        #[n(0)]
        namespace: Namespace,
        #[n(1)]
        owner: Owner,
    },
    /// The token of a job was changed for another one.
    #[n(93)]
    Rotated(#[n(0)] Box<Rotated>),
    /// The sender does not open this run any more: what was promised to it for it holds the job's name no longer. An older node warns and
    /// goes on without it.
    #[n(94)]
    WithdrawRun(#[n(0)] NamedRun),
    /// Whether a job's order is proven, from a node that has never heard the job's token to one that may have. An older node warns, and the
    /// order does not count there.
    #[n(95)]
    CheckOrder {
        /// To be named in the answer.
        #[n(0)]
        query: u64,
        /// As it came.
        #[n(1)]
        order: Box<DropOrder>,
    },
    /// The answer.
    #[n(96)]
    OrderChecked {
        #[n(0)]
        query: u64,
        /// Whether the job's token was said to the sender, and the order has the proof that it makes.
        #[n(1)]
        is_proven: bool,
    },
    /// From the node whose shard a session brings back, to the session's other members: a trainer waits for it there, so it is held
    /// back beside no save. An older node warns and goes on without it.
    #[n(97)]
    RepairAwaited {
        /// Who leads the session.
        #[n(0)]
        leader: NodeName,
        #[n(1)]
        session: SessionId,
    },
}

/// Why a checkpoint is not owed to the durable tier any more.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum UnowedCause {
    /// A shard or its upload was given up.
    #[n(0)]
    GivenUp(#[n(0)] String),
    /// The home node has retired it: if it is in the durable tier, others have been told.
    #[n(1)]
    Retired,
}

/// A home node tells a commit to a few nodes, each of which tells it to its share of the others.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Relay {
    /// The home node, which gets the answers.
    #[n(0)]
    pub of: NodeName,
    /// The receiver's share.
    #[cbor(n(1), with = "crate::blocks")]
    pub to: Vec<NodeName>,
}

/// Where a page of a parcel begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct ParcelPlace {
    /// Digest of the parcel's bytes.
    #[n(0)]
    pub parcel: Digest,
    /// Bytes before the page.
    #[n(1)]
    pub offset: u64,
}

#[cfg(test)]
mod tests;
