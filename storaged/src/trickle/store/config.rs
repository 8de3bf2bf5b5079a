//! Which durable tier a daemon has, and the check that it can be used.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Deserialize;

use super::lazy::{Attempt, Lazy};
use super::place::{EmptyPlace, MarkerConfig, Placed, check_expected, is_marked};
use super::unproven::{Check, Unproven};
use super::{
    AzureConfig, CloudStore, Directory, GcsConfig, ObjectKey, Randomness, RetryPolicy, Retrying,
    S3, S3Config, Store, StoreError, StoreLimits,
};

/// The durable tier's part of the configuration file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum StoreConfig {
    /// An existing directory, shared by all nodes or local.
    Directory {
        path: PathBuf,
        #[serde(default)]
        io: FileIoConfig,
        #[serde(default)]
        page_cache: PageCacheConfig,
        #[serde(default)]
        marker: MarkerConfig,
    },
    /// A bucket of an S3 server.
    S3(S3Config),
    /// A bucket of Google Cloud Storage.
    Gcs(GcsConfig),
    /// A container of Azure Blob Storage.
    Azure(AzureConfig),
}

/// By which calls a directory's files are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileIoConfig {
    /// io_uring where it is allowed, else plain calls.
    #[default]
    Auto,
    /// io_uring, or an error at start.
    Uring,
    /// Plain calls.
    Plain,
}

/// Whether a directory's parts, and long reads, go through the page cache.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageCacheConfig {
    /// Past it, where the file system takes direct I/O.
    #[default]
    Bypass,
    /// Through it.
    Use,
}

/// How a directory's files are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DirectoryIo {
    /// By which calls.
    pub calls: FileIoConfig,
    /// Where the bytes of parts go by.
    pub page_cache: PageCacheConfig,
}

impl From<FileIoConfig> for DirectoryIo {
    fn from(calls: FileIoConfig) -> Self {
        Self {
            calls,
            ..Self::default()
        }
    }
}

/// The check at start gives up sooner than a transfer: somebody waits for it.
const PROBE_POLICY: RetryPolicy = RetryPolicy {
    attempts_max: 3,
    attempt_limit: Duration::from_secs(5),
    bytes_per_second_min: 64 << 20,
    pause_first: Duration::from_millis(100),
    pause_max: Duration::from_secs(1),
};

/// Opens the durable tier, checks that it can be written, read and emptied, and gives it with time
/// limits and retries.
pub async fn open(
    config: &StoreConfig,
    randomness: Arc<dyn Randomness>,
) -> Result<Arc<dyn Store>, StoreError> {
    let (_, attempt) = attempts(config, randomness)?;
    attempt().await
}

/// Begins to open the durable tier. What is wrong with the configuration itself is an error at once; a tier that does
/// not answer is tried again until it does.
pub fn open_lazily(
    config: &StoreConfig,
    randomness: Arc<dyn Randomness>,
) -> Result<Lazy, StoreError> {
    let (limits, attempt) = attempts(config, randomness)?;
    Ok(Lazy::new(limits, attempt))
}

fn attempts(
    config: &StoreConfig,
    randomness: Arc<dyn Randomness>,
) -> Result<(StoreLimits, Attempt), StoreError> {
    match config {
        StoreConfig::Directory {
            path,
            io,
            page_cache,
            marker,
        } => {
            let io = DirectoryIo {
                calls: *io,
                page_cache: *page_cache,
            };
            let directory = Directory::new(path, io, Arc::clone(&randomness))?;
            let (limits, marker) = (directory.limits(), *marker);
            let empty = EmptyPlace::Directory(path.clone());
            let path = path.display().to_string();
            let attempt: Attempt = Box::new(move || {
                let (directory, randomness) = (directory.clone(), Arc::clone(&randomness));
                let (what, empty) = (format!("opening {path}"), empty.clone());
                let prepared = directory.clone();
                let preparing: Check = Box::new(move || {
                    let (directory, what) = (prepared.clone(), what.clone());
                    Box::pin(prepare(directory, marker, what))
                });
                Box::pin(async move {
                    settled(Arc::new(directory), preparing, randomness, &empty).await
                })
            });
            Ok((limits, attempt))
        }
        StoreConfig::S3(config) => Ok(bucket(Arc::new(S3::open(config)?), randomness)),
        StoreConfig::Gcs(config) => {
            let store = CloudStore::gcs(config, Arc::clone(&randomness))?;
            Ok(bucket(Arc::new(store), randomness))
        }
        StoreConfig::Azure(config) => {
            let store = CloudStore::azure(config, Arc::clone(&randomness))?;
            Ok(bucket(Arc::new(store), randomness))
        }
    }
}

/// Attempts to open what is there or not, and never only seems to be empty.
fn bucket(store: Arc<dyn Store>, randomness: Arc<dyn Randomness>) -> (StoreLimits, Attempt) {
    let limits = store.limits();
    let attempt: Attempt = Box::new(move || {
        let (store, randomness) = (Arc::clone(&store), Arc::clone(&randomness));
        let nothing: Check = Box::new(|| Box::pin(std::future::ready(Ok(()))));
        Box::pin(async move { settled(store, nothing, randomness, &EmptyPlace::Bucket).await })
    });
    (limits, attempt)
}

/// Makes a directory ready, in bounded time.
async fn prepare(
    directory: Directory,
    marker: MarkerConfig,
    what: String,
) -> Result<(), StoreError> {
    let preparing = async {
        check_expected(&directory, marker).await?;
        directory.prepare().await
    };
    let limit = PROBE_POLICY.attempt_limit;
    let prepared = tokio::time::timeout(limit, preparing).await;
    prepared.map_err(|_| StoreError::Timeout { what, limit })?
}

/// Checks a store and recognizes its place. One that takes no writes and has its marker is opened all the same: what it
/// holds can be read and removed, and the check is made again before a write.
pub(super) async fn settled(
    store: Arc<dyn Store>,
    preparing: Check,
    randomness: Arc<dyn Randomness>,
    empty: &EmptyPlace,
) -> Result<Arc<dyn Store>, StoreError> {
    let patient = Retrying::new(Arc::clone(&store), PROBE_POLICY, Arc::clone(&randomness));
    let patient = Arc::new(patient);
    let check = checked(preparing, Arc::clone(&patient), Arc::clone(&randomness));
    let policy = RetryPolicy::default();
    let retrying: Arc<dyn Store> = Arc::new(Retrying::new(store, policy, Arc::clone(&randomness)));
    let usable = match check().await {
        Ok(()) => retrying,
        Err(error) if refuses_writes(&error) && is_marked(&*patient).await => {
            tracing::warn!(
                reason = crate::driver::chain(&error),
                "the durable tier takes no writes: what it holds is read all the same, and nothing new becomes durable"
            );
            Arc::new(Unproven::new(retrying, check))
        }
        // Nothing is missing in the tier: it is not there itself.
        Err(StoreError::NotFound { what }) => return Err(StoreError::NotMounted { what }),
        Err(error) => return Err(error),
    };
    Ok(Arc::new(Placed::settle(usable, &*randomness, empty).await?))
}

/// All that comes before the first write.
fn checked(preparing: Check, store: Arc<Retrying>, randomness: Arc<dyn Randomness>) -> Check {
    Box::new(move || {
        let (prepared, store) = (preparing(), Arc::clone(&store));
        let randomness = Arc::clone(&randomness);
        Box::pin(async move {
            prepared.await?;
            probe(&*store, &*randomness).await
        })
    })
}

/// Full, or read-only: nothing is wrong with what is there.
fn refuses_writes(error: &StoreError) -> bool {
    matches!(error, StoreError::Full { .. } | StoreError::Denied { .. })
}

/// Writes, reads and removes a small object, and checks that a second writer of it loses: a server
/// that ignores the condition would let an older run replace a newer manifest.
pub async fn probe(store: &dyn Store, randomness: &dyn Randomness) -> Result<(), StoreError> {
    let key = ObjectKey::of_probe(randomness.next_u64());
    let checked = probe_object(store, &key).await;
    let deleted = store.delete(&key).await;
    checked.and(deleted)
}

async fn probe_object(store: &dyn Store, key: &ObjectKey) -> Result<(), StoreError> {
    let first = Bytes::from_static(b"storaged was here");
    store.put_new(key, first.clone()).await?;
    if store.get(key, None).await? != first {
        let what = "the object written to check the durable tier reads differently".into();
        return Err(StoreError::Corrupt {
            key: key.clone(),
            what,
        });
    }
    match store
        .put_new(key, Bytes::from_static(b"and this must be refused"))
        .await
    {
        Err(StoreError::AlreadyExists { .. }) => Ok(()),
        Err(error) => Err(error),
        Ok(()) => Err(StoreError::Invalid {
            what: "durable tier".into(),
            expected: "one that refuses to create an object twice (If-None-Match: *)".into(),
            got: "the second object replaced the first".into(),
        }),
    }
}
