//! The durable tier: what is asked of it, and what it answers. It is either what it holds of a namespace, or why it could not
//! be asked, so that "nothing there" is never taken for "could not look".

use std::collections::BTreeMap;
use std::sync::Arc;

use storaged_wire::local::{Keep, PinnedOnes, Removal};
use storaged_wire::{
    Digest, DurableStep, JobKeys, ManifestBytes, Owner, Rank, RunId, SharedBytes, Step, Succession,
};
use thiserror::Error;

use super::SlotShard;

/// What is believed of what lies in the durable tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// All of it: by those who only remove it or put marks on it.
    Anything,
    /// What its job has authenticated.
    Job {
        owner: Owner,
        keys: JobKeys,
        /// The newest that is known to have been written with a MAC: what comes behind it without one is none of the job's.
        known: Option<DurableStep>,
    },
    /// Nothing that must be authenticated: the key is not known here.
    Nothing { owner: Owner },
}

/// By what a checkpoint is told from a forged one once it is durable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authorship {
    /// None if nobody who answers knows them. The newest authenticates, the others tell what came before.
    pub keys: Option<JobKeys>,
    /// The newest older one that this node knows to have been durable.
    pub predecessor: Option<DurableStep>,
}

/// What the durable tier holds of one namespace.
#[derive(Debug, Clone, Default)]
pub struct DurableListing {
    /// The newest sound manifests, newest first. Damaged checkpoints are among them only where their step was asked for.
    pub manifests: Vec<Arc<ManifestBytes>>,
    /// What these name, by digest, which was compared.
    pub enclosures: BTreeMap<Digest, SharedBytes>,
    /// The newest run seen in any folder or claim, whether it has finished a checkpoint or not.
    pub newest_run: Option<RunId>,
    /// The newest that its job has authenticated.
    pub authentic: Option<DurableStep>,
    /// Newer or equally new checkpoints that are not offered, newest first.
    pub set_aside: Vec<SetAside>,
}

/// A checkpoint in the durable tier that is not offered by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    pub run: RunId,
    pub step: Step,
    pub cause: SetAsideCause,
    /// What was found.
    pub reason: String,
}

/// Why a checkpoint is not offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetAsideCause {
    /// A restore found it damaged, and a marker in the tier says so.
    Quarantined,
    /// It cannot be read now: its manifest is damaged, or what it builds on is gone.
    Unusable,
    /// It was not written by its job, or was changed since.
    Forged,
    /// It has no MAC, and the configuration wants one.
    WithoutMac,
    /// The key that it could be checked with is not known here.
    Unchecked,
    /// It is known to have been durable, and the tier does not have it any more.
    Missing,
}

/// Why the durable tier did not do what was asked. The text has the tier's own words and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DurableFault {
    /// It does not answer, or asks for fewer requests: it may pass.
    #[error("{0}")]
    Unavailable(String),
    /// It answered too late.
    #[error("{0}")]
    TimedOut(String),
    /// It refuses this daemon.
    #[error("{0}")]
    Denied(String),
    /// Its place is not what it was: a file system that is not mounted, a directory that was removed.
    #[error("{0}")]
    NotMounted(String),
    /// It has no room.
    #[error("{0}")]
    Full(String),
    /// It is not what the configuration says.
    #[error("{0}")]
    Misconfigured(String),
    /// What is there is not what was written: bytes without their digest, an object that is missing.
    #[error("{0}")]
    Damaged(String),
    /// The same, and the tier took no mark of it: nobody knows of it but this node and whom it tells.
    #[error("{0}")]
    DamagedUnmarked(String),
    /// A symbolic link, a FIFO or the like stands in place of an object or a folder of a directory.
    #[error("{0}")]
    NotPlain(String),
    /// It is not authenticated, and would have to be.
    #[error("{0}")]
    Unproven(String),
    /// The job's token was changed for another one than whoever asks has.
    #[error("{0}")]
    TokenChanged(String),
    /// A shard that was copied is not there whole: its node has withdrawn it, or a listing lags behind.
    #[error("{text}")]
    ShardMissing { rank: Rank, text: String },
    /// Another writer's object is in the way.
    #[error("{0}")]
    Conflict(String),
    /// This node's own doing: its RAM no longer has the bytes, or it is stopping.
    #[error("{0}")]
    Local(String),
}

impl DurableFault {
    /// Its kind, for status and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unavailable(_) => "unavailable",
            Self::TimedOut(_) => "timed_out",
            Self::Denied(_) => "denied",
            Self::NotMounted(_) => "not_mounted",
            Self::Full(_) => "full",
            Self::Misconfigured(_) => "misconfigured",
            Self::Damaged(_) | Self::DamagedUnmarked(_) => "damaged",
            Self::NotPlain(_) => "not_plain",
            Self::Unproven(_) => "unproven",
            Self::TokenChanged(_) => "token_changed",
            Self::ShardMissing { .. } => "shard_missing",
            Self::Conflict(_) => "conflict",
            Self::Local(_) => "local",
        }
    }

    /// Whether the tier as a whole fails, not one object in it and not this node.
    pub fn is_of_tier(&self) -> bool {
        !matches!(
            self,
            Self::Damaged(_)
                | Self::DamagedUnmarked(_)
                | Self::NotPlain(_)
                | Self::Unproven(_)
                | Self::TokenChanged(_)
                | Self::ShardMissing { .. }
                | Self::Conflict(_)
                | Self::Local(_)
        )
    }

    /// Whether it may be gone the next time.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::TimedOut(_))
    }

    /// Whether it tells of the content rather than of the way to it.
    pub fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Damaged(_) | Self::DamagedUnmarked(_) | Self::NotPlain(_)
        )
    }
}

/// Something to do to checkpoints in the durable tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Curation {
    /// Pin one or unpin it. Without a run: the newest that has the step.
    Keep {
        run: Option<RunId>,
        step: Step,
        keep: Keep,
    },
    /// Remove some, but nothing of this run or a newer one, and pinned ones only if that is said.
    Remove {
        removal: Removal,
        spared: Option<RunId>,
        pinned: PinnedOnes,
    },
}

/// What was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Removed {
    pub checkpoints: u64,
    pub objects: u64,
}

/// Why it was not done.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CurationFault {
    /// The tier did not do it.
    #[error("{0}")]
    Durable(#[from] DurableFault),
    /// The namespace belongs to another token.
    #[error("it belongs to another job token: set STORAGED_TOKEN to the token that opens it")]
    WrongOwner,
    /// There is no such checkpoint.
    #[error("{0}")]
    NoSuch(String),
    /// Something else needs it.
    #[error("{0}")]
    Needed(String),
    /// Somebody has pinned it.
    #[error("{0}")]
    Pinned(String),
    /// A job that trains wrote it.
    #[error("{0}")]
    Live(String),
}

/// What an upload may be written against: the same rank's shard of a checkpoint that is in the durable tier.
#[derive(Debug, Clone)]
pub struct UploadBase {
    /// The checkpoint.
    pub manifest: Arc<ManifestBytes>,
    /// The shard in RAM.
    pub shard: SlotShard,
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

/// What the durable tier has of changes of a job's token.
#[derive(Debug, Clone, Default)]
pub struct FoundSuccessions {
    /// Records that are none of the asker's may be among them.
    pub records: Vec<Succession>,
    /// The newest checkpoint that the asker's keys have authenticated; none if none was asked for.
    pub newest: Option<DurableStep>,
}

/// Why the durable tier did not take the change of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SuccessionFault {
    /// The namespace belongs to another token.
    WrongOwner,
    /// It has another one of this number.
    Another(Box<Succession>),
    /// It did not do it.
    Durable(DurableFault),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_pass_by_itself_is_tried_again() {
        let faults: [fn(String) -> DurableFault; 13] = [
            DurableFault::Unavailable,
            DurableFault::TimedOut,
            DurableFault::Denied,
            DurableFault::NotMounted,
            DurableFault::Full,
            DurableFault::Misconfigured,
            DurableFault::Damaged,
            DurableFault::NotPlain,
            DurableFault::Unproven,
            DurableFault::TokenChanged,
            |text| DurableFault::ShardMissing {
                rank: Rank::new(0),
                text,
            },
            DurableFault::Conflict,
            DurableFault::Local,
        ];
        let pass = faults.map(|fault| fault(String::new())).into_iter();
        let pass: Vec<&str> = pass
            .filter(DurableFault::may_pass)
            .map(|it| it.name())
            .collect();
        assert_eq!(pass, ["unavailable", "timed_out"]);
    }
}
