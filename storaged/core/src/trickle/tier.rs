//! What the durable tier's answers are to whoever asked: a refusal, a line of a plan.

use storaged_wire::plan::{PassedOverCause, Unrestorable};
use storaged_wire::{Namespace, Refusal, RefusalCode};

use crate::api::{DurableFault, SetAside, SetAsideCause};

impl SetAside {
    /// As a plan says it.
    pub(crate) fn passed_over(&self) -> Unrestorable {
        let (cause, text) = match self.cause {
            SetAsideCause::Quarantined => (
                PassedOverCause::DamagedCopy,
                "its copy in the durable tier is damaged and quarantined",
            ),
            SetAsideCause::Unusable => (
                PassedOverCause::UnusableCopy,
                "its copy in the durable tier cannot be used",
            ),
        };
        Unrestorable {
            run: self.run,
            step: self.step,
            reason: format!("{text}: {}", self.reason),
            cause: Some(cause),
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
