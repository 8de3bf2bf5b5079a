//! What a peer says that cannot be so, or that is not its to say.

use std::fmt;

/// What is wrong with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FalseStatement {
    /// A run's number is above every one that is given out.
    RunOutOfRange { number: u64 },
    /// A run of this number is taken, by one that is lower.
    TakenByLower { asked: u64, highest: u64 },
    /// A checkpoint bears the loss of more nodes than it has parity for.
    BearsTooMany { said: u32, most: u32 },
    /// A rank that the job does not have.
    RankOutOfWorld { rank: u32, world_size: u32 },
    /// A checkpoint is durable, where there is no durable tier.
    NoDurableTier,
    /// Another world size than the trainers of this run have.
    OtherWorldSize,
    /// A parcel that is here has so many bytes, and it says that they are others.
    OtherLength { said: u64, is: u64 },
    /// It has told of as much as one peer may make this node keep.
    TooMuch,
}

/// What follows from a statement about its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Severity {
    /// No sound node of any release says it, however it is configured.
    Proof,
    /// A node may say it that is configured otherwise, or has not heard of an epoch.
    Doubt,
}

impl FalseStatement {
    pub(crate) fn severity(self) -> Severity {
        match self {
            Self::RunOutOfRange { .. }
            | Self::TakenByLower { .. }
            | Self::BearsTooMany { .. }
            | Self::RankOutOfWorld { .. } => Severity::Proof,
            Self::NoDurableTier
            | Self::OtherWorldSize
            | Self::OtherLength { .. }
            | Self::TooMuch => Severity::Doubt,
        }
    }

    /// As metrics and the status name it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RunOutOfRange { .. } => "run_out_of_range",
            Self::TakenByLower { .. } => "taken_by_lower",
            Self::BearsTooMany { .. } => "bears_too_many",
            Self::RankOutOfWorld { .. } => "rank_out_of_world",
            Self::NoDurableTier => "no_durable_tier",
            Self::OtherWorldSize => "other_world_size",
            Self::OtherLength { .. } => "other_length",
            Self::TooMuch => "too_much",
        }
    }
}

impl fmt::Display for FalseStatement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RunOutOfRange { number } => {
                write!(f, "a run number that nobody gives out, got {number}")
            }
            Self::TakenByLower { asked, highest } => {
                write!(f, "run {asked} is taken, and the highest run is {highest}")
            }
            Self::BearsTooMany { said, most } => write!(
                f,
                "a checkpoint bears {said} losses, expected at most {most}"
            ),
            Self::RankOutOfWorld { rank, world_size } => {
                write!(
                    f,
                    "a shard of rank {rank}, expected ranks below {world_size}"
                )
            }
            Self::NoDurableTier => {
                f.write_str("a checkpoint is durable, and there is no durable tier")
            }
            Self::OtherWorldSize => {
                f.write_str("another world size than the trainers of the run have")
            }
            Self::OtherLength { said, is } => {
                write!(f, "a parcel of {said} bytes, expected {is}: it is here")
            }
            Self::TooMuch => f.write_str("more than one peer may make this node keep"),
        }
    }
}
