//! What the durable tier's answers are to whoever asked: a refusal, a line of a plan.

use storaged_wire::plan::{CopyFault, PassedOverCause, Unrestorable};
use storaged_wire::{Namespace, Refusal, RefusalCode};

use crate::api::{DurableFault, SetAside, SetAsideCause};

impl SetAside {
    /// As a plan says it.
    pub(crate) fn passed_over(&self) -> Unrestorable {
        let unusable = PassedOverCause::UnusableCopy;
        let (cause, copy, text) = match self.cause {
            SetAsideCause::Quarantined => (
                PassedOverCause::DamagedCopy,
                None,
                "its copy in the durable tier is damaged and quarantined",
            ),
            SetAsideCause::Unusable => (
                unusable,
                None,
                "its copy in the durable tier cannot be used",
            ),
            SetAsideCause::Forged => (
                unusable,
                Some(CopyFault::Forged),
                "its copy in the durable tier is forged",
            ),
            SetAsideCause::WithoutMac => (
                unusable,
                Some(CopyFault::WithoutMac),
                "its copy in the durable tier has no MAC",
            ),
            SetAsideCause::Unchecked => (
                unusable,
                Some(CopyFault::Unchecked),
                "its copy in the durable tier cannot be checked without the job's token",
            ),
            SetAsideCause::Missing => (
                unusable,
                Some(CopyFault::Missing),
                "a newer one was known: it was in the durable tier, and is not there any more",
            ),
        };
        Unrestorable {
            run: self.run,
            step: self.step,
            reason: format!("{text}: {}", self.reason),
            cause: Some(cause),
            copy,
        }
    }
}

/// The refusal where the answer hangs on a tier that could not be asked.
pub(crate) fn durable_unavailable(namespace: &Namespace, fault: &DurableFault) -> Refusal {
    let text = format!(
        "expected to read the durable tier, which may hold checkpoints of {namespace}, got: {fault}; try again when it answers"
    );
    Refusal::new(RefusalCode::DurableUnavailable, text)
}
