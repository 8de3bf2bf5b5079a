//! What can go wrong in the durable tier, what to do about it, and whether to try again.

use std::io;
use std::time::Duration;

use super::ObjectKey;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// An operation on the durable tier that did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("no object or bucket at {what}; {}", self.hint())]
    NotFound { what: String },
    #[error("expected no object at {key}, got one with other bytes; {}", self.hint())]
    AlreadyExists { key: ObjectKey },
    #[error("no unfinished upload {upload} of {key}; {}", self.hint())]
    NoUpload { key: ObjectKey, upload: String },
    #[error("the durable tier is full: {what}; {}", self.hint())]
    Full { what: String, source: Source },
    #[error("access denied: {what}; {}", self.hint())]
    Denied { what: String, source: Source },
    #[error("the durable tier asks for fewer requests: {what}; {}", self.hint())]
    Throttled { what: String, source: Source },
    #[error("the durable tier does not serve: {what}; {}", self.hint())]
    Unavailable { what: String, source: Source },
    #[error("expected {expected} bytes of {key}, got {got}; {}", self.hint())]
    Truncated {
        key: ObjectKey,
        expected: u64,
        got: u64,
    },
    #[error("this is not the durable tier: {what}; {}", self.hint())]
    NotMounted { what: String },
    #[error("expected a regular file or a folder at {path}, got {got}; {}", self.hint())]
    NotPlain { path: String, got: &'static str },
    #[error("{key} cannot be decrypted: {what}; {}", self.hint())]
    Locked { key: ObjectKey, what: String },
    #[error("expected {key} in frames of version 1, got version {got} of a newer release; {}", self.hint())]
    NewerForm { key: ObjectKey, got: u8 },
    #[error("expected {key} to be encrypted, got plain bytes; {}", self.hint())]
    Unsealed { key: ObjectKey },
    #[error("{key} was changed after it was encrypted: {what}; {}", self.hint())]
    Tampered { key: ObjectKey, what: String },
    #[error("bytes of {key} changed on their way: {what}; {}", self.hint())]
    Corrupt { key: ObjectKey, what: String },
    #[error("invalid {what}: expected {expected}, got {got}; {}", self.hint())]
    Invalid {
        what: String,
        expected: String,
        got: String,
    },
    #[error("no answer to {what} within {limit:?}; {}", self.hint())]
    Timeout { what: String, limit: Duration },
}

/// Whether the same call may succeed later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The cause may pass: try again after a pause.
    Later,
    /// The same call fails again until somebody changes something.
    Never,
}

impl StoreError {
    /// Whether the same call may succeed later without anybody doing anything.
    pub fn retryable(&self) -> Retry {
        match self {
            Self::Throttled { .. }
            | Self::Unavailable { .. }
            | Self::Corrupt { .. }
            | Self::Timeout { .. } => Retry::Later,
            Self::NotFound { .. }
            | Self::AlreadyExists { .. }
            | Self::NoUpload { .. }
            | Self::Full { .. }
            | Self::Denied { .. }
            | Self::NotMounted { .. }
            | Self::NotPlain { .. }
            | Self::Truncated { .. }
            | Self::Locked { .. }
            | Self::NewerForm { .. }
            | Self::Unsealed { .. }
            | Self::Tampered { .. }
            | Self::Invalid { .. } => Retry::Never,
        }
    }

    /// The same error once more, for another caller.
    pub fn again(&self) -> Self {
        let words = |source: &Source| -> Source { crate::driver::chain(&**source).into() };
        match self {
            Self::NotFound { what } => Self::NotFound { what: what.clone() },
            Self::AlreadyExists { key } => Self::AlreadyExists { key: key.clone() },
            Self::NoUpload { key, upload } => Self::NoUpload {
                key: key.clone(),
                upload: upload.clone(),
            },
            Self::Full { what, source } => Self::Full {
                what: what.clone(),
                source: words(source),
            },
            Self::Denied { what, source } => Self::Denied {
                what: what.clone(),
                source: words(source),
            },
            Self::Throttled { what, source } => Self::Throttled {
                what: what.clone(),
                source: words(source),
            },
            Self::Unavailable { what, source } => Self::Unavailable {
                what: what.clone(),
                source: words(source),
            },
            Self::Truncated { key, expected, got } => Self::Truncated {
                key: key.clone(),
                expected: *expected,
                got: *got,
            },
            Self::NotMounted { what } => Self::NotMounted { what: what.clone() },
            Self::NotPlain { path, got } => Self::NotPlain {
                path: path.clone(),
                got,
            },
            Self::Locked { key, what } => Self::Locked {
                key: key.clone(),
                what: what.clone(),
            },
            Self::NewerForm { key, got } => Self::NewerForm {
                key: key.clone(),
                got: *got,
            },
            Self::Unsealed { key } => Self::Unsealed { key: key.clone() },
            Self::Tampered { key, what } => Self::Tampered {
                key: key.clone(),
                what: what.clone(),
            },
            Self::Corrupt { key, what } => Self::Corrupt {
                key: key.clone(),
                what: what.clone(),
            },
            Self::Invalid {
                what,
                expected,
                got,
            } => Self::Invalid {
                what: what.clone(),
                expected: expected.clone(),
                got: got.clone(),
            },
            Self::Timeout { what, limit } => Self::Timeout {
                what: what.clone(),
                limit: *limit,
            },
        }
    }

    /// What to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "check its name and the store's path, bucket and prefix",
            Self::AlreadyExists { .. } => "another writer was first: read what it wrote",
            Self::NoUpload { .. } => "it was given up or completed elsewhere: begin it again",
            Self::Full { .. } => "free space or raise the quota; nothing older was dropped",
            Self::Denied { .. } => "check the credentials, the bucket's policy or the file owner",
            Self::NotMounted { .. } => {
                "mount the file system, or correct durable.path, the bucket or the container"
            }
            Self::NotPlain { .. } => {
                "nothing was read or written behind it: remove it, and see who may write in the durable tier"
            }
            Self::Throttled { .. } => "it is tried again; lower the trickle rate if it stays",
            Self::Unavailable { .. } => "it is tried again; check the endpoint, mount and network",
            Self::Truncated { .. } => "the object is damaged: restore from another copy or step",
            Self::Locked { .. } => {
                "give this node the key too, behind the newest one (docs/operate/config.md)"
            }
            Self::NewerForm { .. } => "upgrade this node to the release that wrote it",
            Self::Unsealed { .. } => {
                "trickle.encryption.plain = \"read\" reads what is older than encryption; else somebody without the key put it there"
            }
            Self::Tampered { .. } => "the object is damaged: restore from another copy or step",
            Self::Corrupt { .. } => "it is tried again; check memory and network if it stays",
            Self::Invalid { .. } => "correct the setting or the call",
            Self::Timeout { .. } => "it is tried again; check the endpoint, mount and network",
        }
    }

    /// The error for a file operation that failed; `what` names the operation and its path.
    pub(super) fn from_io(what: impl Into<String>, error: io::Error) -> Self {
        use io::ErrorKind as Kind;
        let what = what.into();
        match error.kind() {
            Kind::NotFound => Self::NotFound { what },
            Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge => Self::Full {
                what,
                source: error.into(),
            },
            Kind::PermissionDenied | Kind::ReadOnlyFilesystem => Self::Denied {
                what,
                source: error.into(),
            },
            Kind::NotADirectory | Kind::IsADirectory | Kind::CrossesDevices => Self::Invalid {
                what,
                expected: "files and folders of one file system, never one name for both".into(),
                got: error.to_string(),
            },
            _ => Self::Unavailable {
                what,
                source: error.into(),
            },
        }
    }
}
