//! From errors of the store and of this node to what the decisions are told.

use storaged_codec::delta::DeltaError;
use storaged_core::DurableFault;

use super::store::StoreError;

impl From<StoreError> for DurableFault {
    fn from(error: StoreError) -> Self {
        Self::from(&error)
    }
}

impl From<&StoreError> for DurableFault {
    fn from(error: &StoreError) -> Self {
        let text = crate::driver::chain(error);
        match error {
            StoreError::Unavailable { .. } | StoreError::Throttled { .. } => {
                Self::Unavailable(text)
            }
            StoreError::Timeout { .. } => Self::TimedOut(text),
            StoreError::Denied { .. } => Self::Denied(text),
            StoreError::Full { .. } => Self::Full(text),
            StoreError::NotMounted { .. } => Self::NotMounted(text),
            StoreError::NotPlain { .. } => Self::NotPlain(text),
            StoreError::AlreadyExists { .. } => Self::Conflict(text),
            // What this node has no key for, or is too old for, is sound, and an older step must not pass for the newest.
            StoreError::Invalid { .. }
            | StoreError::Locked { .. }
            | StoreError::NewerForm { .. }
            | StoreError::Unsealed { .. } => Self::Misconfigured(text),
            StoreError::NotFound { .. }
            | StoreError::Truncated { .. }
            | StoreError::Tampered { .. } => Self::Damaged(text),
            // Bytes that changed on their way, and an upload that was given up elsewhere: both may pass.
            StoreError::Corrupt { .. } | StoreError::NoUpload { .. } => Self::Unavailable(text),
        }
    }
}

/// What is in the tier is not what was written.
pub(super) fn damaged(text: impl Into<String>) -> DurableFault {
    DurableFault::Damaged(text.into())
}

/// A record whose digest is right, and that this build does not read: is it damaged, or written by another build? What
/// another build wrote is sound, and no node may tell the others that it is not.
pub(super) fn unreadable(error: &DeltaError, text: String) -> DurableFault {
    match error {
        DeltaError::MovedNotBuilt | DeltaError::Version { .. } | DeltaError::Unknown { .. } => {
            local(text)
        }
        _ => damaged(text),
    }
}

/// Something of this node's own failed.
pub(super) fn local(error: impl std::fmt::Display) -> DurableFault {
    DurableFault::Local(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_build_wrote_is_not_called_damaged() {
        let of = |error: DeltaError| unreadable(&error, error.to_string());
        let version = DeltaError::Version {
            expected: 1,
            got: 2,
        };
        for error in [DeltaError::MovedNotBuilt, version] {
            assert!(matches!(of(error), DurableFault::Local(_)));
        }
        assert!(matches!(of(DeltaError::NotClean), DurableFault::Damaged(_)));
    }
}
