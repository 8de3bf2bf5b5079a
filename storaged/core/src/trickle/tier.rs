//! What the durable tier answers: what it holds of a namespace, or why it could not be asked, so that "nothing there"
//! is never taken for "could not look".

use std::sync::Arc;

use storaged_wire::plan::Unrestorable;
use storaged_wire::{ManifestBytes, RefusalCode, RunId, Step};
use storaged_wire::{Namespace, Refusal};
use thiserror::Error;

/// What the durable tier holds of one namespace.
#[derive(Debug, Clone, Default)]
pub struct DurableListing {
    /// The newest sound manifests, newest first. Damaged checkpoints are among them only where their step was asked for.
    pub manifests: Vec<Arc<ManifestBytes>>,
    /// The newest run seen in any folder or claim, whether it has finished a checkpoint or not.
    pub newest_run: Option<RunId>,
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

impl SetAside {
    /// As a plan says it.
    pub(crate) fn passed_over(&self) -> Unrestorable {
        let cause = match self.cause {
            SetAsideCause::Quarantined => "its copy in the durable tier is damaged and quarantined",
            SetAsideCause::Unusable => "its copy in the durable tier cannot be used",
        };
        Unrestorable {
            run: self.run,
            step: self.step,
            reason: format!("{cause}: {}", self.reason),
        }
    }
}

/// Why a checkpoint is not offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetAsideCause {
    /// A restore found it damaged, and a marker in the tier says so.
    Quarantined,
    /// It cannot be read now: its manifest is damaged, or what it builds on is gone.
    Unusable,
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
            Self::Damaged(_) => "damaged",
            Self::Conflict(_) => "conflict",
            Self::Local(_) => "local",
        }
    }

    /// Whether the tier as a whole fails, not one object in it and not this node.
    pub fn is_of_tier(&self) -> bool {
        !matches!(self, Self::Damaged(_) | Self::Conflict(_) | Self::Local(_))
    }

    /// Whether it may be gone the next time.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::TimedOut(_))
    }

    /// Whether it tells of the content rather than of the way to it.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged(_))
    }
}

/// The refusal where the answer hangs on a tier that could not be asked.
pub(crate) fn durable_unavailable(namespace: &Namespace, fault: &DurableFault) -> Refusal {
    let text = format!(
        "expected to read the durable tier, which may hold checkpoints of {namespace}, got: {fault}; try again when it answers"
    );
    Refusal::new(RefusalCode::DurableUnavailable, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_pass_by_itself_is_tried_again() {
        let faults: [fn(String) -> DurableFault; 9] = [
            DurableFault::Unavailable,
            DurableFault::TimedOut,
            DurableFault::Denied,
            DurableFault::NotMounted,
            DurableFault::Full,
            DurableFault::Misconfigured,
            DurableFault::Damaged,
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
