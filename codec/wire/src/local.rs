//! Trainer and daemon: the requests and replies on the Unix socket. One request at a time per connection, each
//! answered in order; a descriptor, where a reply says so, travels with the reply's first byte (SCM_RIGHTS).

mod listing;
mod reports;
mod timeout;

pub use listing::{Bears, CheckpointInfo, KeptFor, standing};
pub use reports::{DropReport, DroppedNode, VerifiedPart, VerifyReport};

use minicbor::bytes::{ByteSlice, ByteVec};
use minicbor::{Decode, Encode};
use storaged_codec::{ChunkSize, Digest, Fingerprint, Geometry};

use crate::drain::{DrainOrder, DrainReport};
use crate::failed::{FailedRestart, FailureReport};
use crate::framing::{LOCAL_FRAME_BYTES_MAX, REQUEST_BYTES_MAX, WireError, decode};
use crate::ids::{Generation, Namespace, NodeName, Rank, SlotId, Step, WorldSize};
use crate::plan::RestorePlan;
pub use crate::ranges::ByteRange;
use crate::refusal::Refusal;
use crate::run::RunId;
use crate::shared::{SharedBytes, place_in};
use crate::shared_table::SharedTable;
use crate::state::CheckpointState;
use crate::succession::{Rotation, TokenStanding};
use crate::verdict::RestartVerdict;

/// Version of this protocol; both sides must have the same.
pub const LOCAL_VERSION: u16 = 3;

/// Shortest token of a job, in bytes, but for the empty one: a shorter one can be guessed.
pub const TOKEN_BYTES_MIN: usize = 16;
/// Longest token of a job, in bytes.
pub const TOKEN_BYTES_MAX: usize = 1024;

/// Whether a job's token may have this many bytes. None at all is for those who are told apart by their tenant alone.
pub const fn is_token_length(bytes: usize) -> bool {
    bytes == 0 || (bytes >= TOKEN_BYTES_MIN && bytes <= TOKEN_BYTES_MAX)
}

/// Number of `Request::Commit`.
const COMMIT: u32 = 5;

/// Who a connection speaks for.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Role {
    /// A trainer that saves as one rank of one run.
    #[n(0)]
    Trainer {
        #[n(0)]
        run: RunId,
        #[n(1)]
        rank: Rank,
        #[n(2)]
        world_size: WorldSize,
    },
    /// A process that opens runs, waits, plans and restores, and saves nothing.
    #[n(1)]
    Reader,
}

/// Whether a checkpoint must reach the durable tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum DurableWish {
    /// As the daemon's policy says.
    #[n(0)]
    Policy,
    /// Yes, whatever the policy.
    #[n(1)]
    Required,
    /// No, whatever the policy.
    #[n(2)]
    Never,
}

impl DurableWish {
    /// Of two wishes for one step that which asks for more: no rank takes back what another one wished.
    #[must_use]
    pub fn or_more(self, other: Self) -> Self {
        match (self, other) {
            (Self::Required, _) | (_, Self::Required) => Self::Required,
            (Self::Policy, _) | (_, Self::Policy) => Self::Policy,
            (Self::Never, Self::Never) => Self::Never,
        }
    }
}

/// Whether a checkpoint stays.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum Keep {
    /// It does.
    #[n(0)]
    Pin,
    /// It no longer does.
    #[n(1)]
    Unpin,
}

/// What to remove from the durable tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Removal {
    /// One checkpoint. Without a run: of the newest run that has the step.
    #[n(0)]
    Step {
        #[n(0)]
        run: Option<RunId>,
        #[n(1)]
        step: Step,
    },
    /// All of one run.
    #[n(1)]
    Run {
        #[n(0)]
        run: RunId,
    },
    /// All of the namespace.
    #[n(2)]
    All,
}

/// Whether a removal may touch the newest run of a job that has trainers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub enum LiveRun {
    /// No: that is refused.
    #[n(0)]
    Spared,
    /// Yes.
    #[n(1)]
    Too,
}

/// Whether a removal may touch checkpoints that somebody has pinned. Not said: it may not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum PinnedOnes {
    /// No: that is refused.
    #[n(0)]
    Spared,
    /// Yes.
    #[n(1)]
    Too,
}

/// What a board is for; its bytes are the trainer's own affair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum BoardKind {
    /// Marks of where each step began and ended.
    #[n(0)]
    Steps,
    /// Batches that were prefetched.
    #[n(1)]
    Batches,
}

/// A request.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Request {
    /// First on every connection that touches a namespace. An empty token is allowed and is an owner too.
    #[n(0)]
    Hello {
        #[n(0)]
        version: u16,
        #[n(1)]
        namespace: Namespace,
        #[n(2)]
        token: ByteVec,
        #[n(3)]
        role: Role,
    },
    /// Opens a new run of the namespace, above every run known to any live node. Creates the namespace.
    #[n(1)]
    OpenRun {
        #[n(0)]
        timeout_ms: u32,
    },
    /// Asks for a slot of at least `bytes` for this rank.
    #[n(2)]
    AcquireSlot {
        #[n(0)]
        bytes: u64,
        #[n(1)]
        timeout_ms: u32,
    },
    /// Every byte is in and nothing may change: the slot's first `length` bytes are this rank's shard at `step`.
    #[n(3)]
    SealSlot {
        #[n(0)]
        slot: SlotId,
        #[n(1)]
        step: Step,
        #[n(2)]
        length: u64,
    },
    /// Gives an acquired slot back unused.
    #[n(4)]
    ReleaseSlot {
        #[n(0)]
        slot: SlotId,
    },
    /// From one rank per step: the description of the whole checkpoint. It commits once every rank has sealed.
    #[n(5)]
    Commit {
        #[n(0)]
        step: Step,
        #[n(1)]
        schema: SharedBytes,
        #[n(2)]
        torch_metadata: SharedBytes,
        #[n(3)]
        durable: DurableWish,
    },
    /// Waits until (run, step) is at least in `state`.
    #[n(6)]
    Wait {
        #[n(0)]
        run: RunId,
        #[n(1)]
        step: Step,
        #[n(2)]
        state: CheckpointState,
        #[n(3)]
        timeout_ms: u32,
    },
    /// Asks what a restart would do. Without a step: the newest restorable checkpoint.
    #[n(7)]
    Plan {
        #[n(0)]
        step: Option<Step>,
        #[n(1)]
        timeout_ms: u32,
        /// Whether a checkpoint older than one that is known to have been protected may be offered at the end of the
        /// wait, because nodes that may hold that one have not answered.
        #[n(2)]
        allow_older: bool,
    },
    /// The manifest's bytes, with its schema and torch metadata.
    #[n(8)]
    GetManifest {
        #[n(0)]
        manifest: Digest,
    },
    /// Brings the byte ranges of one rank's shard into local RAM. An empty list means the whole shard.
    #[n(9)]
    OpenShard {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        rank: Rank,
        #[n(2)]
        #[cbor(decode_with = "crate::ranges::decode")]
        ranges: Vec<ByteRange>,
        #[n(3)]
        timeout_ms: u32,
        /// A rung to leave out: what came from it did not have its digests. Only own RAM is: what comes from the others
        /// was verified on its way.
        #[n(4)]
        without: Option<Rung>,
        /// Nodes that are taken for lost, to see whether the others can do without them; none, as by releases that do not know of it, and
        /// all are asked.
        #[n(5)]
        withheld: Option<Vec<NodeName>>,
        /// Whether the reader takes the shard while its bytes still come: then the reply may be `ShardComing`. Releases that do not
        /// know of it never say so.
        #[n(6)]
        early: Option<bool>,
    },
    /// Waits until a shard that `ShardComing` was said of on this connection is there, no longer than this.
    #[n(14)]
    FollowShard {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        rank: Rank,
        #[n(2)]
        timeout_ms: u32,
    },
    /// Gives up the shard that `OpenShard` opened on this connection.
    #[n(10)]
    CloseShard {
        #[n(0)]
        manifest: Digest,
        #[n(1)]
        rank: Rank,
    },
    /// The daemon's state. Needs no hello.
    #[n(11)]
    Status,
    /// Checkpoints known to this node, of one namespace or of all. Needs no hello; names only, no bytes.
    #[n(12)]
    List {
        #[n(0)]
        namespace: Option<Namespace>,
    },
    /// Reads every byte of a checkpoint that live nodes hold and checks it. Without a step: the newest.
    #[n(13)]
    Verify {
        #[n(0)]
        step: Option<Step>,
        #[n(1)]
        timeout_ms: u32,
    },
    /// Whether this node may be restarted now. Needs no hello.
    #[n(25)]
    RestartSafe {
        /// Node losses that the newest checkpoint of every namespace must bear now; none for min(2, m), so that with
        /// this node gone one more may be lost where m allows it.
        #[n(0)]
        bears: Option<u32>,
    },
    /// Keeps a checkpoint in RAM and in the durable tier whatever is saved later, or no longer.
    #[n(40)]
    Keep {
        /// Without: the newest run that has the step.
        #[n(0)]
        run: Option<RunId>,
        #[n(1)]
        step: Step,
        #[n(2)]
        keep: Keep,
    },
    /// Removes checkpoints from the durable tier.
    #[n(41)]
    Remove(#[n(0)] Removal, #[n(1)] LiveRun, #[n(2)] Option<PinnedOnes>),
    /// Asks for a rank's board: memory of this node that trainers write whenever they like, and that stays when they die.
    /// Nobody digests or copies it. There is one per rank and kind; one with fewer bytes than asked for makes way for an
    /// empty one. Zero bytes: the one that is there, or none.
    #[n(50)]
    Board {
        #[n(0)]
        rank: Rank,
        #[n(1)]
        kind: BoardKind,
        #[n(2)]
        bytes: u64,
    },
    /// Drops all of the job's checkpoints from the RAM of all nodes; what is in the durable tier stays. Refused while it
    /// has trainers, unless `force`.
    #[n(30)]
    Drop {
        #[n(0)]
        force: bool,
        #[n(1)]
        timeout_ms: u32,
    },
    /// Asks what a launcher should do about a restart of the newest checkpoint.
    #[n(60)]
    Verdict {
        #[n(0)]
        timeout_ms: u32,
    },
    /// Asks what a drill would decode, by what nodes hold in RAM: the newest protected step, or the one of this number. Answered by
    /// `Plan`, whose shards are those that can be decoded; the first of what was passed over says of the same step why others
    /// cannot. It waits for no node whose link is down.
    #[n(63)]
    PlanDrill {
        #[n(0)]
        step: Option<Step>,
        #[n(1)]
        timeout_ms: u32,
    },
    /// Says that a restart from a step has failed: plans pass it over from now on, for a time that doubles, then for good.
    #[n(61)]
    RestartFailed(#[n(0)] FailureReport),
    /// Takes back what was said of a step, of whichever run: that restarts have failed from it, and what this node has found or heard of a
    /// damaged copy in the durable tier.
    #[n(62)]
    LiftQuarantine {
        #[n(0)]
        step: Step,
    },
    /// Ends this daemon in order; asked again, how far it is. From operators alone; needs no hello.
    #[n(64)]
    Drain(#[n(0)] DrainOrder),
    /// Asks what must be known to change the job's token: answered by `Succession`.
    #[n(65)]
    Succession,
    /// Changes the job's token for another one, by whoever holds the one that opens it.
    #[n(66)]
    Rotate(#[n(0)] Box<Rotation>),
}

/// A commit of which the long parts are where the socket was read to.
#[derive(Decode)]
enum CommitInPlace<'b> {
    #[n(5)]
    Commit {
        #[n(0)]
        step: Step,
        #[b(1)]
        schema: &'b ByteSlice,
        #[b(2)]
        torch_metadata: &'b ByteSlice,
        #[n(3)]
        durable: DurableWish,
    },
}

impl Request {
    /// Reads a request out of the bytes of its frame. A commit keeps them: it may have 64 MiB, and they are in memory once.
    ///
    /// # Errors
    /// [`WireError`] if the bytes are anything but exactly one request.
    pub fn read(body: Vec<u8>) -> Result<Self, WireError> {
        if kind_of(&body) != Some(COMMIT) {
            return decode("request", &body);
        }
        let CommitInPlace::Commit {
            step,
            schema,
            torch_metadata,
            durable,
        } = decode("request", &body)?;
        let parts = [schema, torch_metadata].map(|part| place_in(&body, part));
        let [schema, torch_metadata] = SharedBytes::parts_of(body, parts);
        Ok(Self::Commit {
            step,
            schema,
            torch_metadata,
            durable,
        })
    }

    /// How long a request may be whose first bytes these are, or that are all there is: [`LOCAL_FRAME_BYTES_MAX`] for a commit, which
    /// brings a description of the whole checkpoint, [`REQUEST_BYTES_MAX`] for all others.
    pub fn bytes_max(start: &[u8]) -> usize {
        match kind_of(start) {
            Some(COMMIT) => LOCAL_FRAME_BYTES_MAX,
            _ => REQUEST_BYTES_MAX,
        }
    }
}

/// The number of the request that begins so.
fn kind_of(start: &[u8]) -> Option<u32> {
    let mut decoder = minicbor::Decoder::new(start);
    decoder.array().and_then(|_| decoder.u32()).ok()
}

/// A reply: what was asked for, or why not.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Reply {
    /// To `Hello`.
    #[n(0)]
    Welcome {
        #[n(0)]
        node: NodeName,
        #[n(1)]
        generation: Generation,
        #[n(2)]
        geometry: Option<Geometry>,
        #[n(3)]
        chunk: ChunkSize,
    },
    /// To `OpenRun`.
    #[n(1)]
    RunOpened {
        #[n(0)]
        run: RunId,
    },
    /// To `AcquireSlot` and `Board`. The memfd travels with the reply if `descriptor` is true: the first time this connection
    /// gets the slot; afterwards the client maps nothing anew.
    #[n(2)]
    SlotGranted {
        #[n(0)]
        slot: SlotId,
        #[n(1)]
        capacity: u64,
        #[n(2)]
        descriptor: bool,
    },
    /// To requests with nothing to say.
    #[n(3)]
    Done,
    /// To `Wait`.
    #[n(4)]
    Reached {
        #[n(0)]
        state: CheckpointState,
        #[n(1)]
        manifest: Option<Digest>,
        /// What it bears now; none where nothing is coded, and while this node has not heard of the blocks that make it so.
        #[n(2)]
        bears: Option<Bears>,
    },
    /// To `Plan`.
    #[n(5)]
    Plan(#[n(0)] RestorePlan),
    /// To `GetManifest`: its bytes, and of what it encloses that which it names. The reader checks both.
    #[n(6)]
    Manifest {
        #[n(0)]
        bytes: SharedBytes,
        #[n(1)]
        schema: SharedBytes,
        #[n(2)]
        torch_metadata: SharedBytes,
    },
    /// To `OpenShard`, with the memfd: bytes at their own offsets, only the ranges asked for are filled. The
    /// reader checks each chunk against `leaves`, and `leaves` against the root in the manifest.
    #[n(7)]
    ShardOpened {
        #[n(0)]
        length: u64,
        #[n(1)]
        chunk: ChunkSize,
        #[n(2)]
        leaves: SharedTable<Digest>,
        #[n(3)]
        rung: Rung,
        /// Of own RAM alone: what this node took of the chunks when it digested them, one per chunk. Whoever reads bytes
        /// that never left the node may compare with these, at an eighth of the cost.
        #[n(4)]
        fingerprints: Option<SharedTable<Fingerprint>>,
    },
    /// To an early `OpenShard`, with the memfd that a session fills, and to `FollowShard` where another one is filled now. A chunk
    /// that has its digest is there; any other is not there yet.
    #[n(26)]
    ShardComing {
        #[n(0)]
        length: u64,
        #[n(1)]
        chunk: ChunkSize,
        #[n(2)]
        leaves: SharedTable<Digest>,
        #[n(3)]
        rung: Rung,
    },
    /// To `FollowShard`: what was asked for is in the memfd that `ShardComing` came with. Where it is in another one, `ShardOpened`
    /// says so.
    #[n(27)]
    ShardCame(#[n(0)] Rung),
    /// To `FollowShard`: its time is over, and the shard still comes.
    #[n(28)]
    StillComing,
    /// To `Status`: a JSON object.
    #[n(8)]
    Status(#[n(0)] String),
    /// To `List`.
    #[n(9)]
    Checkpoints(#[n(0)] Vec<CheckpointInfo>),
    /// To `Verify`.
    #[n(10)]
    Verified(#[n(0)] VerifyReport),
    /// To any request.
    #[n(11)]
    Refused(#[n(0)] Refusal),
    /// To `RestartSafe`: what speaks against it, one line per namespace; nothing if the node may be restarted.
    #[n(25)]
    RestartSafe(#[n(0)] Vec<String>),
    /// To `Keep` and `Remove`: what is gone.
    #[n(40)]
    Removed {
        #[n(0)]
        checkpoints: u64,
        #[n(1)]
        objects: u64,
    },
    /// To `Drop`.
    #[n(30)]
    Dropped(#[n(0)] DropReport),
    /// To `Verdict`.
    #[n(60)]
    Verdict(#[n(0)] RestartVerdict),
    /// To `RestartFailed` and `LiftQuarantine`: how the step stands now.
    #[n(61)]
    RestartsFailed(#[n(0)] Vec<FailedRestart>),
    /// To `Drain`.
    #[n(64)]
    Draining(#[n(0)] DrainReport),
    /// To `Succession`.
    #[n(65)]
    Succession(#[n(0)] TokenStanding),
}

/// The rung of the ladder that a shard came from in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum Rung {
    /// This node's RAM.
    #[n(0)]
    OwnRam,
    /// Another node's RAM.
    #[n(1)]
    PeerRam,
    /// Decoded from survivors.
    #[n(2)]
    Decoded,
    /// The durable tier.
    #[n(3)]
    Durable,
}

#[cfg(test)]
mod tests;
