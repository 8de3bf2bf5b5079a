//! The verdict on a restart: what a launcher should do now, why, what it costs, and what it would gain by waiting. It moves
//! nothing, and says only what the nodes that answered have shown.

use std::fmt;

use minicbor::{Decode, Encode};

use crate::ids::{Namespace, NodeName};
use crate::peer::HighMark;
use crate::plan::{RestorePlan, Unrestorable};

/// A verdict may take so long, in milliseconds, whatever its caller's time: nodes whose links are up and the durable tier are heard
/// first. That nobody has answered yet would read as if nothing were restorable.
pub const VERDICT_MIN_MS: u32 = 3_000;

/// What a restart can do with what can be had now.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum Verdict {
    /// Only processes died: every rank's bytes are in the RAM of the node that sealed them.
    #[n(0)]
    RecoverInPlace,
    /// Some shards are decoded from survivors, or are in the RAM of another node than the one that sealed them.
    #[n(1)]
    Recover,
    /// The newest restorable step needs the durable tier.
    #[n(2)]
    RestartFromDurable,
    /// No step is restorable now.
    #[n(3)]
    Impossible,
}

impl Verdict {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RecoverInPlace => "recover-in-place",
            Self::Recover => "recover",
            Self::RestartFromDurable => "restart-from-durable",
            Self::Impossible => "impossible",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a reason is about: programs act on it, people read the text beside it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum ReasonCode {
    /// Every shard is where it was sealed.
    #[n(0)]
    AllInPlace,
    /// Shards are decoded from survivors of their groups.
    #[n(1)]
    ShardsDecoded,
    /// Shards are in the RAM of another node than the one that sealed them.
    #[n(2)]
    ShardsElsewhere,
    /// Shards are in the durable tier alone.
    #[n(3)]
    ShardsDurable,
    /// Nodes have not answered.
    #[n(4)]
    NodesSilent,
    /// Less than a majority of the nodes answered: a newer step than any that was seen may exist.
    #[n(5)]
    TooFewAnswered,
    /// A newer step was protected and is not whole among what answered: a load refuses this one unless it is allowed to go back.
    #[n(6)]
    GoesBack,
    /// The durable tier could not be read: it may hold a newer step.
    #[n(7)]
    DurableUnreadable,
    /// The step was said to have failed before, and nothing else is restorable.
    #[n(8)]
    LastResort,
    /// Nothing that was saved is restorable now.
    #[n(9)]
    NothingRestorable,
    /// A majority answered, and the durable tier where there is one, and none has heard of a checkpoint: a first start.
    #[n(10)]
    NothingSaved,
}

impl ReasonCode {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AllInPlace => "all-in-place",
            Self::ShardsDecoded => "shards-decoded",
            Self::ShardsElsewhere => "shards-elsewhere",
            Self::ShardsDurable => "shards-durable",
            Self::NodesSilent => "nodes-silent",
            Self::TooFewAnswered => "too-few-answered",
            Self::GoesBack => "goes-back",
            Self::DurableUnreadable => "durable-unreadable",
            Self::LastResort => "last-resort",
            Self::NothingRestorable => "nothing-restorable",
            Self::NothingSaved => "nothing-saved",
        }
    }
}

/// One reason for a verdict.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Reason {
    /// What it is about.
    #[n(0)]
    pub code: ReasonCode,
    /// A sentence.
    #[n(1)]
    pub text: String,
}

/// A part of the expected time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum Stretch {
    /// Reading and verifying in RAM.
    #[n(0)]
    Ram,
    /// Moving or decoding between nodes.
    #[n(1)]
    Network,
    /// Reading the durable tier.
    #[n(2)]
    Durable,
}

impl Stretch {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Network => "network",
            Self::Durable => "durable",
        }
    }
}

/// Where a rate comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
#[cbor(index_only)]
pub enum RateSource {
    /// A constant, or of the durable tier what copies to it took: nothing of the kind was done on this node since its daemon started.
    #[n(0)]
    #[default]
    FirstGuess,
    /// What was done on this node since its daemon started.
    #[n(1)]
    Measured,
}

impl RateSource {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FirstGuess => "first-guess",
            Self::Measured => "measured",
        }
    }
}

/// What a part of the slowest rank's restore is expected to take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct ExpectedTime {
    /// Which part.
    #[n(0)]
    pub stretch: Stretch,
    /// Milliseconds.
    #[n(1)]
    pub ms: u64,
    /// Where its rate comes from.
    #[n(2)]
    pub rate: RateSource,
}

/// What the nodes of a [`Returning`] are known to have held.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum HeldBasis {
    /// Shards that they sealed, by the manifest.
    #[n(0)]
    Sealed,
    /// Parity too, because the step was protected. A coding node that was away at that time has none.
    #[n(1)]
    Coded,
}

impl HeldBasis {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sealed => "sealed",
            Self::Coded => "coded",
        }
    }
}

/// Nodes of which some must return, each with the RAM that it had.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
pub struct Returning {
    /// So many of them.
    #[n(0)]
    pub any: u32,
    /// These, none of which has answered.
    #[cbor(n(1), with = "crate::blocks")]
    pub of: Vec<NodeName>,
    /// What is known of what they held.
    #[n(2)]
    pub basis: HeldBasis,
}

impl fmt::Display for Returning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.of.iter().map(NodeName::as_str).collect();
        match (self.any as usize, names.as_slice()) {
            (1, [one]) => write!(f, "{one} returns"),
            (1, all) => write!(f, "{} returns", all.join(" or ")),
            (any, all) if any == all.len() => write!(f, "{} return", all.join(" and ")),
            (any, all) => write!(f, "{any} of {} return", all.join(", ")),
        }
    }
}

/// What becomes possible if nodes return with what they held in RAM. It is no promise that they will.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct WaitingGain {
    /// The step that is restorable then.
    #[n(0)]
    pub at: HighMark,
    /// What the verdict is then.
    #[n(1)]
    pub verdict: Verdict,
    /// All of these must be so.
    #[n(2)]
    pub returning: Vec<Returning>,
}

impl fmt::Display for WaitingGain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.returning.iter().map(Returning::to_string).collect();
        let (step, run, verdict) = (self.at.step, self.at.run, self.verdict);
        let conditions = all.join(", and ");
        write!(
            f,
            "step {step} of run {run} ({verdict}) if {conditions}, RAM intact"
        )
    }
}

/// The verdict, with all that it rests on.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct RestartVerdict {
    /// The job.
    #[n(0)]
    pub namespace: Namespace,
    /// What to do.
    #[n(1)]
    pub verdict: Verdict,
    /// Why.
    #[n(2)]
    pub reasons: Vec<Reason>,
    /// The step and each rank's source; none if the verdict is `Impossible`.
    #[n(3)]
    pub plan: Option<RestorePlan>,
    /// What the slowest rank's restore is expected to take, in parts.
    #[n(4)]
    pub expected: Vec<ExpectedTime>,
    /// The newest committed step that anybody who answered has heard of.
    #[n(5)]
    pub newest_seen: Option<HighMark>,
    /// Steps above the plan's that are not restorable now, newest first. The plan does not repeat them.
    #[n(6)]
    pub passed_over: Vec<Unrestorable>,
    /// What waiting would gain, the newest step first.
    #[n(7)]
    pub waiting: Vec<WaitingGain>,
}

impl RestartVerdict {
    /// What shell scripts see. 1 and 2 say that there is no verdict; 74, 75 and 78 are the daemon's.
    pub fn exit_code(&self) -> u8 {
        match self.verdict {
            Verdict::RecoverInPlace => 0,
            Verdict::Recover => 10,
            Verdict::RestartFromDurable => 11,
            Verdict::Impossible if self.has_reason(ReasonCode::NothingSaved) => 13,
            Verdict::Impossible => 12,
        }
    }

    /// Whether this is among its reasons.
    pub fn has_reason(&self, code: ReasonCode) -> bool {
        self.reasons.iter().any(|reason| reason.code == code)
    }
}
