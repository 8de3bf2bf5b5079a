//! From errors of the store and of this node to what the decisions are told.

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
            StoreError::AlreadyExists { .. } => Self::Conflict(text),
            StoreError::Invalid { .. } => Self::Misconfigured(text),
            StoreError::NotFound { .. } | StoreError::Truncated { .. } => Self::Damaged(text),
            // Bytes that changed on their way, and an upload that was given up elsewhere: both may pass.
            StoreError::Corrupt { .. } | StoreError::NoUpload { .. } => Self::Unavailable(text),
        }
    }
}

/// What is in the tier is not what was written.
pub(super) fn damaged(text: impl Into<String>) -> DurableFault {
    DurableFault::Damaged(text.into())
}

/// Something of this node's own failed.
pub(super) fn local(error: impl std::fmt::Display) -> DurableFault {
    DurableFault::Local(error.to_string())
}
