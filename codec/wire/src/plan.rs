//! The restore plan: said before anything moves. Which checkpoint is whole, where each rank's bytes come from,
//! and why newer ones are not offered.

use minicbor::{Decode, Encode};
use storaged_codec::Digest;

use crate::ids::{Namespace, NodeName, Rank, Step, WorldSize};
use crate::run::RunId;
use crate::state::CheckpointState;

/// The rung of the ladder that a shard comes from.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Source {
    /// The RAM of the node that sealed it, which is the node named.
    #[n(0)]
    Ram(#[n(0)] NodeName),
    /// Decoded from the named survivors of its group.
    #[n(1)]
    Decode(#[cbor(n(0), with = "crate::blocks")] Vec<NodeName>),
    /// The durable tier.
    #[n(2)]
    Durable,
}

/// Where one rank's bytes come from.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct ShardSource {
    /// The rank.
    #[n(0)]
    pub rank: Rank,
    /// Bytes of its shard.
    #[n(1)]
    pub length: u64,
    /// The rung.
    #[n(2)]
    pub source: Source,
}

/// Why a checkpoint is not offered: programs act on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum PassedOverCause {
    /// Nobody who answered has its manifest.
    #[n(0)]
    NoManifest,
    /// Nobody who answered has its schema and metadata.
    #[n(1)]
    NotDescribed,
    /// Shards are lost and cannot be decoded from what answered.
    #[n(2)]
    ShardsLost,
    /// Its copy in the durable tier is damaged, and RAM does not have it.
    #[n(3)]
    DamagedCopy,
    /// Its copy in the durable tier cannot be used, and RAM does not have it.
    #[n(4)]
    UnusableCopy,
    /// Restarts from it have failed.
    #[n(5)]
    Quarantined,
    /// It was protected, and nobody who answered holds anything of it.
    #[n(6)]
    NobodyHasIt,
}

impl PassedOverCause {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoManifest => "no-manifest",
            Self::NotDescribed => "not-described",
            Self::ShardsLost => "shards-lost",
            Self::DamagedCopy => "damaged-copy",
            Self::UnusableCopy => "unusable-copy",
            Self::Quarantined => "quarantined",
            Self::NobodyHasIt => "nobody-has-it",
        }
    }
}

/// What is wrong with a copy in the durable tier that cannot be used. Clients that do not know it have [`PassedOverCause::UnusableCopy`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum CopyFault {
    /// Its MAC is not that of the job's token.
    #[n(0)]
    Forged,
    /// It has no MAC, and the configuration wants one.
    #[n(1)]
    WithoutMac,
    /// Nobody who may be asked knows the job's token.
    #[n(2)]
    Unchecked,
    /// It was there, and is not any more.
    #[n(3)]
    Missing,
}

impl CopyFault {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Forged => "forged-copy",
            Self::WithoutMac => "copy-without-mac",
            Self::Unchecked => "unchecked-copy",
            Self::Missing => "missing-copy",
        }
    }
}

/// A checkpoint that was found and cannot be offered.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Unrestorable {
    /// Its run.
    #[n(0)]
    pub run: RunId,
    /// Its step.
    #[n(1)]
    pub step: Step,
    /// What is missing.
    #[n(2)]
    pub reason: String,
    /// The same for programs; none from a daemon that does not say it yet.
    #[n(3)]
    pub cause: Option<PassedOverCause>,
    /// More of a copy that cannot be used.
    #[n(4)]
    pub copy: Option<CopyFault>,
}

impl Unrestorable {
    /// The word for the cause, the closest that is known.
    pub fn cause_word(&self) -> Option<&'static str> {
        let copy = self.copy.map(CopyFault::as_str);
        copy.or(self.cause.map(PassedOverCause::as_str))
    }
}

/// What a restart will do.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct RestorePlan {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// The checkpoint's run.
    #[n(1)]
    pub run: RunId,
    /// The checkpoint's step.
    #[n(2)]
    pub step: Step,
    /// Its manifest: every rank names this digest, so ranks cannot disagree.
    #[n(3)]
    pub manifest: Digest,
    /// Ranks that wrote it.
    #[n(4)]
    pub world_size: WorldSize,
    /// How safe it is.
    #[n(5)]
    pub state: CheckpointState,
    /// One entry per rank.
    #[n(6)]
    pub shards: Vec<ShardSource>,
    /// Expected milliseconds for the slowest rank, from the rates measured so far.
    #[n(7)]
    pub expected_ms: u64,
    /// Newer checkpoints that were passed over, and why.
    #[n(8)]
    pub passed_over: Vec<Unrestorable>,
}
