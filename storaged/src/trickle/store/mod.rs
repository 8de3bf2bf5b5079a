//! The durable tier behind a seam: objects that become visible only whole, small objects that are created only if
//! absent, ranged reads. A directory and S3 here; a fake in RAM and a faulty wrapper for tests.

mod directory;
mod fake;
mod s3;

use std::fmt::{self, Debug};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use directory::Directory;
pub use fake::{Faults, Faulty, InMemory};
pub use s3::S3;

/// Name of an object: segments joined by `/`, none of them empty, `.` or `..`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey(String);

impl ObjectKey {
    /// Validates a name.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if it could leave its place.
    pub fn new(text: impl Into<String>) -> Result<Self, StoreError> {
        let text = text.into();
        let good = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains('\0');
        match text.split('/').all(good) {
            true => Ok(Self(text)),
            false => Err(StoreError::Invalid { what: format!("object name {text:?}") }),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Debug for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a store can meet.
#[derive(Debug, Clone, Error)]
pub enum StoreError {
    /// No such object.
    #[error("{key} is not there")]
    NotFound { key: String },
    /// Somebody else's object has the name.
    #[error("{key} exists already with other content")]
    AlreadyExists { key: String },
    /// No room.
    #[error("the durable tier is full while writing {key}: free space or name another place in [durable]")]
    Full { key: String },
    /// Not allowed.
    #[error("{key}: access denied: {reason}; check the credentials and permissions of the daemon")]
    Denied { key: String, reason: String },
    /// Fewer bytes than there must be.
    #[error("{key}: expected {expected} bytes, got {got}")]
    Truncated { key: String, expected: u64, got: u64 },
    /// A configuration or name that cannot be.
    #[error("{what} cannot be used")]
    Invalid { what: String },
    /// It may work later.
    #[error("{key}: {reason}")]
    Unavailable { key: String, reason: String },
}

/// An object being written, part by part.
#[derive(Debug, Clone)]
pub struct Upload {
    /// The object.
    pub key: ObjectKey,
    /// What the store calls it.
    pub id: String,
    /// Parts that are there, from this or an earlier life of the daemon: number and tag.
    pub done: std::collections::BTreeMap<u32, PartTag>,
}

/// What a store says of a part that it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartTag {
    /// Bytes.
    pub bytes: u64,
    /// The store's own tag.
    pub tag: String,
}

/// A durable tier.
#[async_trait]
pub trait Store: Send + Sync + Debug {
    /// Begins to write an object, or finds an unfinished write of it and what is there already.
    async fn begin(&self, key: &ObjectKey) -> Result<Upload, StoreError>;
    /// Writes one part; parts are numbered from 0, of equal size `part_bytes` but the last.
    async fn put_part(&self, upload: &mut Upload, number: u32, part_bytes: u64, bytes: Bytes) -> Result<(), StoreError>;
    /// All `parts` are there: the object of `length` bytes becomes visible, whole, in place of an older one.
    async fn complete(&self, upload: Upload, parts: u32, length: u64) -> Result<(), StoreError>;
    /// Writes a small object unless it exists. The same content already there is success.
    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError>;
    /// Reads an object or a range of it; fewer bytes than asked for are an error.
    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError>;
    /// Bytes of an object; none if there is none.
    async fn length(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError>;
    /// Names of the folders directly below a folder.
    async fn folders(&self, key: &ObjectKey) -> Result<Vec<String>, StoreError>;
    /// Removes an object; none there is success.
    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError>;
    /// Smallest part that the store takes, but for the last.
    fn part_bytes_min(&self) -> u64;
}

/// Where the durable tier is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum StoreConfig {
    /// A directory: Lustre, NFS, FSx or local disks.
    Directory {
        /// Its path; made if it is not there.
        path: PathBuf,
    },
    /// A bucket. Credentials come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.
    S3 {
        /// The bucket, which must exist.
        bucket: String,
        /// Prepended to every key.
        #[serde(default)]
        prefix: String,
        /// The server, if not AWS.
        endpoint: Option<String>,
        /// The region.
        #[serde(default = "default_region")]
        region: String,
        /// Bucket in the path, not in the host name: what most other servers want.
        #[serde(default)]
        path_style: bool,
    },
}

fn default_region() -> String {
    "us-east-1".into()
}

/// Opens a store, and checks that it can be written, read and deleted from.
///
/// # Errors
/// [`StoreError`] if it cannot.
pub async fn open(config: &StoreConfig) -> Result<Arc<dyn Store>, StoreError> {
    let store: Arc<dyn Store> = match config {
        StoreConfig::Directory { path } => Arc::new(Directory::open(path)?),
        StoreConfig::S3 { bucket, prefix, endpoint, region, path_style } => {
            let endpoint = endpoint.as_deref();
            Arc::new(S3::open(bucket, prefix, endpoint, region, *path_style)?)
        }
    };
    probe(store.as_ref()).await?;
    Ok(store)
}

async fn probe(store: &dyn Store) -> Result<(), StoreError> {
    let key = ObjectKey::new(format!("storaged-probe-{:016x}", rand::random::<u64>()))?;
    store.put_new(&key, Bytes::from_static(b"probe")).await?;
    let back = store.get(&key, None).await?;
    store.delete(&key).await?;
    match back.as_ref() == b"probe" {
        true => Ok(()),
        false => Err(StoreError::Unavailable {
            key: key.to_string(),
            reason: "the store gave back other bytes than were written".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn conforms(store: &dyn Store) {
        let key = |text: &str| ObjectKey::new(text).unwrap();
        let part = store.part_bytes_min().max(8) as usize;
        let content: Vec<u8> = (0..part * 2 + 5).map(|i| (i % 251) as u8).collect();
        let object = key("job/run-1/step-2/__0_0.distcp");
        assert_eq!(store.length(&object).await.unwrap(), None);
        let mut upload = store.begin(&object).await.unwrap();
        let piece = |n: usize| Bytes::copy_from_slice(&content[n * part..content.len().min((n + 1) * part)]);
        store.put_part(&mut upload, 0, part as u64, piece(0)).await.unwrap();
        assert_eq!(store.length(&object).await.unwrap(), None, "an unfinished object is not visible");
        // The daemon restarts: the unfinished write is found with its part.
        let mut upload = store.begin(&object).await.unwrap();
        assert_eq!(upload.done.len(), 1);
        store.put_part(&mut upload, 1, part as u64, piece(1)).await.unwrap();
        store.put_part(&mut upload, 2, part as u64, piece(2)).await.unwrap();
        store.complete(upload, 3, content.len() as u64).await.unwrap();
        assert_eq!(store.length(&object).await.unwrap(), Some(content.len() as u64));
        assert_eq!(store.get(&object, None).await.unwrap(), content);
        assert_eq!(store.get(&object, Some(7..21)).await.unwrap(), content[7..21]);
        let beyond = content.len() as u64 + 1;
        assert!(store.get(&object, Some(0..beyond)).await.is_err());
        let small = key("job/run-1/step-2/storaged.manifest");
        store.put_new(&small, Bytes::from_static(b"a")).await.unwrap();
        store.put_new(&small, Bytes::from_static(b"a")).await.unwrap();
        let other = store.put_new(&small, Bytes::from_static(b"b")).await;
        assert!(matches!(other, Err(StoreError::AlreadyExists { .. })), "{other:?}");
        store.put_new(&key("job/run-1/step-10/x"), Bytes::new()).await.unwrap();
        let mut folders = store.folders(&key("job/run-1")).await.unwrap();
        folders.sort();
        assert_eq!(folders, ["step-10", "step-2"]);
        assert!(store.folders(&key("nothing")).await.unwrap().is_empty());
        store.delete(&small).await.unwrap();
        store.delete(&small).await.unwrap();
        assert!(matches!(store.get(&small, None).await, Err(StoreError::NotFound { .. })));
    }

    #[tokio::test]
    async fn the_fake_conforms() {
        conforms(&InMemory::default()).await;
    }

    #[tokio::test]
    async fn a_directory_conforms() {
        let root = tempfile::tempdir().unwrap();
        conforms(&Directory::open(root.path()).unwrap()).await;
    }

    #[tokio::test]
    async fn an_s3_server_conforms() {
        let Ok(endpoint) = std::env::var("STORAGED_TEST_S3_ENDPOINT") else {
            eprintln!("skipped: set STORAGED_TEST_S3_ENDPOINT and STORAGED_TEST_S3_BUCKET to test S3");
            return;
        };
        let bucket = std::env::var("STORAGED_TEST_S3_BUCKET").unwrap();
        let prefix = format!("conformance-{:x}", rand::random::<u64>());
        conforms(&S3::open(&bucket, &prefix, Some(&endpoint), "us-east-1", true).unwrap()).await;
    }

    #[test]
    fn keys_stay_in_their_place() {
        for bad in ["", "/a", "a/", "a//b", "../a", "a/./b"] {
            assert!(ObjectKey::new(bad).is_err(), "{bad:?} must be refused");
        }
    }

    #[tokio::test]
    async fn a_full_disk_is_said_and_nothing_is_visible() {
        let root = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"])
            .arg(root.path())
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            eprintln!("skipped: mounting a small tmpfs needs root");
            return;
        }
        let store = Directory::open(root.path()).unwrap();
        let key = ObjectKey::new("job/big").unwrap();
        let mut upload = store.begin(&key).await.unwrap();
        let written = store.put_part(&mut upload, 0, 1 << 20, Bytes::from(vec![1; 1 << 20])).await;
        let visible = store.length(&key).await.unwrap();
        drop(store);
        let unmounted = std::process::Command::new("umount").arg("-l").arg(root.path()).status();
        assert!(matches!(written, Err(StoreError::Full { .. })), "{written:?}");
        assert_eq!(visible, None);
        assert!(unmounted.is_ok_and(|status| status.success()));
    }

    #[tokio::test]
    async fn of_many_who_create_one_object_one_wins() {
        let root = tempfile::tempdir().unwrap();
        let store = Arc::new(Directory::open(root.path()).unwrap());
        let key = ObjectKey::new("job/manifest").unwrap();
        let tries = (0..8u8).map(|who| {
            let (store, key) = (store.clone(), key.clone());
            tokio::spawn(async move { store.put_new(&key, Bytes::from(vec![who])).await.is_ok() })
        });
        let won = futures::future::join_all(tries).await;
        assert_eq!(won.into_iter().filter(|ok| *ok.as_ref().unwrap()).count(), 1);
    }
}
