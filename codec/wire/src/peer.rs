//! Daemon and daemon: control messages on the ordered control stream of a connection, and the first record of a
//! data stream. Messages may be lost when a connection ends; every sender repeats what still matters.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};
use storaged_codec::{Digest, Fingerprint};

use crate::ids::{Namespace, NodeName, Owner, Rank, SessionId, Step, WorldSize};
use crate::local::{DurableWish, VerifiedPart};
use crate::run::RunId;
use crate::shape::{EncodeShape, RepairShape, StripeMap};
use crate::state::CheckpointState;

/// Longest control message.
pub const CONTROL_FRAME_BYTES_MAX: usize = 64 << 20;

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

/// What a session computes.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum SessionKind {
    /// Parity of a lane, in full or as an increment on the parity of `basis`.
    #[n(0)]
    Encode {
        #[n(0)]
        lane: Lane,
        #[n(1)]
        basis: Option<Digest>,
        /// What is compared on the way.
        #[n(2)]
        checks: SumChecks,
        /// Which parity blocks are made, ascending: those of the coding nodes that are up.
        #[cbor(n(3), with = "crate::blocks")]
        parities: Vec<u32>,
    },
    /// Blocks of a lane computed from those of `survivors` (block indices: data 0..k, parity k..k+m) for
    /// `wanted`, each of which goes to the node named. A plain copy is the case of one survivor, itself.
    #[n(1)]
    Repair {
        #[n(0)]
        lane: Lane,
        #[cbor(n(1), with = "crate::blocks")]
        survivors: Vec<u32>,
        #[cbor(n(2), with = "crate::blocks")]
        wanted: Vec<(u32, NodeName)>,
        /// Chunks that are wanted, as (first, count); empty means all.
        #[n(3)]
        stripes: Vec<(u64, u64)>,
        /// How the survivors' blocks come together.
        #[n(4)]
        shape: RepairShape,
    },
}

impl SessionKind {
    /// What is compared on the way; of a repair nothing by fingerprints but parity.
    pub fn checks(&self) -> SumChecks {
        match self {
            Self::Encode { checks, .. } => *checks,
            Self::Repair { .. } => SumChecks::Parity,
        }
    }
}

/// Which sums of an encode are compared with the fingerprints of the chunks that they are made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum SumChecks {
    /// The parity chunks, by the nodes that keep them.
    #[n(0)]
    Parity,
    /// Also every sum on its way, by the node that gets it: after a wrong one, to find out whose it is. Needs an encode
    /// in full.
    #[n(1)]
    Every,
}

/// One execution of a coding plan: all members derive the same plan from this record.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct SessionRecord {
    /// Unique among the sessions of its leader's generation.
    #[n(0)]
    pub session: SessionId,
    /// The checkpoint.
    #[n(1)]
    pub manifest: Digest,
    /// What is computed.
    #[n(2)]
    pub kind: SessionKind,
}

/// Why a member will not, or could not, do its part.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum SessionFault {
    /// The checkpoint's manifest is not here.
    #[n(0)]
    NoManifest,
    /// The blocks that this member should read are not here.
    #[n(1)]
    NoBlocks,
    /// The blocks of the basis are not here: encode in full.
    #[n(2)]
    NoBasis,
    /// The budget has no room for the result.
    #[n(3)]
    NoRoom(#[n(0)] String),
    /// A block of this member does not have its digest.
    #[n(4)]
    Corrupt(#[n(0)] String),
    /// A neighbour was slow, gone or sent something else than the plan says.
    #[n(5)]
    Neighbour {
        #[n(0)]
        node: NodeName,
        #[n(1)]
        reason: String,
    },
    /// The computed block does not have its digest: some survivor lied.
    #[n(6)]
    WrongResult(#[n(0)] String),
    /// Ended by its leader.
    #[n(7)]
    Aborted,
    /// A node sent a block that does not have its digest.
    #[n(8)]
    WrongBytes {
        #[n(0)]
        node: NodeName,
        #[n(1)]
        reason: String,
    },
    /// The computed block does not have its digest, and of the blocks that it was computed from only that of this
    /// node could not be checked. It may hold what another one sent.
    #[n(9)]
    Unproven {
        #[n(0)]
        node: NodeName,
        #[n(1)]
        reason: String,
    },
}

impl SessionFault {
    /// Whom it blames, if anybody but the member that tells of it.
    pub fn blamed(&self) -> Option<&NodeName> {
        match self {
            Self::Neighbour { node, .. }
            | Self::WrongBytes { node, .. }
            | Self::Unproven { node, .. } => Some(node),
            _ => None,
        }
    }
}

/// A table of chunk digests of one shard, which its root proves, and of the chunks' fingerprints, which nothing proves:
/// they are what the shard's node says.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct LeafTable {
    /// Whose shard.
    #[n(0)]
    pub rank: Rank,
    /// One digest per chunk.
    #[n(1)]
    pub leaves: Vec<Digest>,
    /// One fingerprint per chunk; none at all where they are not known.
    #[n(2)]
    pub prints: Vec<Fingerprint>,
}

/// What a member of a session has measured since it began. Every number only grows.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct MemberTally {
    /// Milliseconds since the session began at this member.
    #[n(0)]
    pub elapsed_ms: u64,
    /// Stripes of which this member has done its part.
    #[n(1)]
    pub stripes: u64,
    /// One entry per neighbour that sends to this member.
    #[cbor(n(2), with = "crate::blocks")]
    pub links: Vec<LinkTally>,
}

/// What came over a link, as its receiving end saw it. While a block is on its way and not whole the link carries it as
/// fast as it can: what waits for a sender that has nothing, or for room, has no block on its way.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct LinkTally {
    /// The neighbour that sends.
    #[n(0)]
    pub node: NodeName,
    /// Bytes of blocks that came.
    #[n(1)]
    pub bytes: u64,
    /// Milliseconds in which a block had begun to come and was waited for.
    #[n(2)]
    pub waiting_ms: u64,
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
}

/// A run of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct NamedRun {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// Which.
    #[n(2)]
    pub run: RunId,
}

/// What a node knows of the runs of a namespace.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Fence {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// Whom it belongs to.
    #[n(1)]
    pub owner: Owner,
    /// Runs below are fenced off.
    #[n(2)]
    pub run: RunId,
    /// The highest run that was promised to whoever wants to open it; it fences nothing.
    #[n(3)]
    pub promised: RunId,
}

/// The answer of a node that was asked to promise a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub enum PromiseOutcome {
    /// Nobody else gets this number from it any more.
    #[n(0)]
    Promised,
    /// It knows a run of this number or a higher one.
    #[n(1)]
    Taken {
        /// The highest number that it knows.
        #[n(0)]
        highest: u64,
    },
    /// The namespace belongs to another token.
    #[n(2)]
    WrongOwner,
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

/// Drops a job's checkpoints from the RAM of whoever gets it.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct DropOrder {
    /// To be named in the answer.
    #[n(0)]
    pub query: u64,
    /// The job.
    #[n(1)]
    pub namespace: Namespace,
    /// In whose name.
    #[n(2)]
    pub owner: Owner,
    /// Also if it has trainers.
    #[n(3)]
    pub force: bool,
}

/// What a node did with a [`DropOrder`].
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum DropAnswer {
    /// It held so much, and does not any more.
    #[n(0)]
    Freed {
        #[n(0)]
        bytes: u64,
        #[n(1)]
        checkpoints: u32,
    },
    /// Nothing, for this reason.
    #[n(1)]
    Refused(#[n(0)] String),
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
    /// A rank's shard is sealed and digested; to the checkpoint's home nodes, repeated until it commits.
    #[n(3)]
    ShardSealed {
        #[n(0)]
        key: CheckpointKey,
        #[n(1)]
        owner: Owner,
        #[n(2)]
        world_size: WorldSize,
        #[n(3)]
        rank: Rank,
        #[n(4)]
        length: u64,
        #[n(5)]
        root: Digest,
    },
    /// The committing rank's description of the checkpoint; to its home nodes, repeated until it commits.
    #[n(4)]
    Description {
        #[n(0)]
        key: CheckpointKey,
        #[n(1)]
        owner: Owner,
        #[n(2)]
        world_size: WorldSize,
        #[n(3)]
        schema: ByteVec,
        #[n(4)]
        torch_metadata: ByteVec,
        #[n(5)]
        durable: DurableWish,
    },
    /// From a home node: the checkpoint is committed. The receiver stores the manifest and answers.
    #[n(5)]
    Committed {
        #[n(0)]
        manifest: ByteVec,
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
    /// Member to leader: ready, with the leaf tables that the leader's wanted shards need, and the stripes that
    /// this member needs to move: those of its shard that changed since the basis, or that its wanted block lacks.
    #[n(9)]
    Ready {
        #[n(0)]
        session: SessionId,
        #[n(1)]
        leaves: Vec<LeafTable>,
        #[n(2)]
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
    /// Leader to members: begin. The leaf tables that prove the wanted or coded shards come with it, and the union
    /// of the stripes that members need (all, if none said), and for an encode its shape (none: the plain chain).
    #[n(11)]
    Begin {
        #[n(0)]
        session: SessionId,
        #[n(1)]
        leaves: Vec<LeafTable>,
        #[n(2)]
        stripes: Option<StripeMap>,
        #[n(3)]
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
        #[n(0)]
        query: u64,
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

/// First record of a data stream.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct StreamRecord {
    /// The node that leads the session.
    #[n(0)]
    pub leader: NodeName,
    /// The session.
    #[n(1)]
    pub session: SessionId,
    /// Index of the link in the session's plan: of its pairs of nodes, in order.
    #[n(2)]
    pub edge: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{decode, encode};

    fn tally(links: usize) -> MemberTally {
        let link = LinkTally {
            node: NodeName::new("a").expect("a name"),
            bytes: 300,
            waiting_ms: 5,
        };
        MemberTally {
            elapsed_ms: 1000,
            stripes: 3,
            links: vec![link; links],
        }
    }

    #[test]
    fn the_bytes_of_what_a_member_measured_are_pinned() {
        for (number, message) in [
            (
                12,
                PeerMessage::Finished {
                    session: SessionId::new(7),
                    tally: tally(1),
                },
            ),
            (
                24,
                PeerMessage::Progress {
                    session: SessionId::new(7),
                    tally: tally(1),
                },
            ),
        ] {
            let bytes = encode(&message);
            assert_eq!(decode::<PeerMessage>("message", &bytes).unwrap(), message);
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            let number = if number < 24 {
                format!("{number:02x}")
            } else {
                format!("18{number:02x}")
            };
            let expected = format!("82{number} 8207 83 1903e8 03 81 83 6161 19012c 05");
            assert_eq!(hex, expected.replace(' ', ""), "{message:?}");
        }
    }

    #[test]
    fn more_links_than_a_stripe_has_blocks_are_refused() {
        let with = |links| PeerMessage::Progress {
            session: SessionId::new(7),
            tally: tally(links),
        };
        assert!(decode::<PeerMessage>("message", &encode(&with(255))).is_ok());
        let error = decode::<PeerMessage>("message", &encode(&with(256))).unwrap_err();
        assert!(format!("{error:?}").contains("at most 255"), "{error:?}");
    }
}
