//! Sessions: what is computed, the first record of their data streams, why a member could not, and what members measure.

use minicbor::{Decode, Encode};
use storaged_codec::{Digest, Fingerprint};

use super::Lane;
use crate::ids::{NodeName, Rank, SessionId};
use crate::shape::RepairShape;

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

/// Where a page of a shard's table of chunk digests and fingerprints begins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct TablePlace {
    /// The checkpoint.
    #[n(0)]
    pub manifest: Digest,
    /// Whose shard.
    #[n(1)]
    pub rank: Rank,
    /// The first chunk of the page.
    #[n(2)]
    pub first: u64,
}

/// A page of a table: digests, which the shard's root proves once all are there, and fingerprints, which nothing proves:
/// they are what the sender says.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct TablePage {
    /// One digest per chunk.
    #[n(0)]
    pub leaves: Vec<Digest>,
    /// One fingerprint per chunk; none at all where they are not known.
    #[n(1)]
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
