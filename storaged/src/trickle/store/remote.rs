//! What back ends share that are reached by HTTP: the folder of a bucket, and what is wrong before anything is sent.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use storaged_sdk::{TokenError, read_secret};

use super::{KeyPrefix, LIST_ENTRIES_MAX, ObjectKey, Store, StoreError};

/// The longest prefix, so that prefix and key fit S3's 1024 bytes.
const PREFIX_BYTES_MAX: usize = 200;

/// A file of credentials is no longer.
const CREDENTIALS_BYTES_MAX: u64 = 64 << 10;

/// For how long one attempt of a small write may go unanswered.
const SMALL_WRITE_LIMIT: Duration = Duration::from_secs(20);

/// One attempt of a small write, ended in time: a server that went away with the request says nothing for ever.
pub(super) async fn in_time(
    what: &str,
    attempt: impl Future<Output = Result<(), StoreError>>,
) -> Result<(), StoreError> {
    let limit = SMALL_WRITE_LIMIT;
    let late = |_| StoreError::Timeout {
        what: what.into(),
        limit,
    };
    tokio::time::timeout(limit, attempt).await.map_err(late)?
}

/// The folder of a bucket that all keys are in: empty for the bucket itself, or ending in a slash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BucketFolder(String);

impl BucketFolder {
    pub fn new(prefix: &str) -> Result<Self, StoreError> {
        let prefix = prefix.trim_end_matches('/');
        if prefix.is_empty() {
            return Ok(Self(String::new()));
        }
        let key: ObjectKey = prefix.parse()?;
        if prefix.len() > PREFIX_BYTES_MAX {
            return Err(StoreError::Invalid {
                what: "prefix of the durable tier".into(),
                expected: format!("at most {PREFIX_BYTES_MAX} bytes"),
                got: format!("{} bytes", prefix.len()),
            });
        }
        Ok(Self(format!("{key}/")))
    }

    /// What an object is called in the bucket.
    pub fn name(&self, key: &ObjectKey) -> String {
        format!("{}{key}", self.0)
    }

    /// What the names of objects below a prefix begin with.
    pub fn prefix_of(&self, under: &KeyPrefix) -> String {
        format!("{}{}", self.0, under.text())
    }

    /// The key of a name in the bucket; none for names that are not ours.
    pub fn key_of(&self, name: &str) -> Option<ObjectKey> {
        name.strip_prefix(&self.0)?.parse().ok()
    }
}

/// A variable of the environment that is not empty.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Reads a file with credentials, which other users cannot read.
pub(super) fn read_credentials(path: &Path) -> Result<Vec<u8>, StoreError> {
    read_secret(path, CREDENTIALS_BYTES_MAX).map_err(|error| {
        let got = match &error {
            TokenError::Mode { mode, .. } => {
                format!(
                    "mode {mode:04o}: chmod 600 it, and make new ones if others may have read them"
                )
            }
            _ => crate::driver::chain(&error),
        };
        StoreError::Invalid {
            what: format!("credentials in {}", path.display()),
            expected: "a file that other users cannot use".into(),
            got,
        }
    })
}

pub(super) fn check_endpoint(endpoint: &str) -> Result<(), StoreError> {
    let rest = endpoint
        .strip_prefix("http://")
        .or_else(|| endpoint.strip_prefix("https://"));
    if rest.is_some_and(|host| !host.is_empty()) {
        return Ok(());
    }
    Err(StoreError::Invalid {
        what: "endpoint of the durable tier".into(),
        expected: "a URL that starts with http:// or https://".into(),
        got: format!("{endpoint:?}"),
    })
}

/// Ends a listing that is longer than memory was planned for.
pub(super) fn check_listed(what: &str, got: usize) -> Result<(), StoreError> {
    if got > LIST_ENTRIES_MAX {
        return Err(StoreError::Invalid {
            what: what.into(),
            expected: format!("at most {LIST_ENTRIES_MAX} entries (list a folder of it)"),
            got: "more".into(),
        });
    }
    Ok(())
}

/// An object was there before it was to be created: with the very same bytes it is this writer's own, and its answer was lost.
pub(super) async fn check_own(
    store: &dyn Store,
    key: &ObjectKey,
    bytes: &[u8],
) -> Result<(), StoreError> {
    if store.length(key).await? == bytes.len() as u64 && store.get(key, None).await? == bytes {
        return Ok(());
    }
    Err(StoreError::AlreadyExists { key: key.clone() })
}
