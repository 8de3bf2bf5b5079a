//! The marker that says that a place is the durable tier: `.storaged/tier`, written once. With it an empty tier is told
//! from a directory whose file system is not mounted, or that somebody removed.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use storaged_core::Leftovers;

use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PartBytes, PartNumber, PartState, Randomness,
    Store, StoreError, StoreLimits, Upload,
};

/// Whether a place without a marker may be taken as a new tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MarkerConfig {
    /// It is given one.
    #[default]
    Write,
    /// It is not the tier.
    Expect,
}

/// The marker's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Marker {
    storaged_tier: u32,
    /// Random: tells this place from any other.
    id: String,
}

const VERSION: u32 = 1;

/// What an empty place without a marker may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmptyPlace {
    /// A directory: a new tier, or one whose file system is not mounted. Nothing here can tell the two apart.
    Directory(PathBuf),
    /// A bucket: it is there or it is not.
    Bucket,
}

/// A store in a place that was recognized once and is looked at again whenever it seems to be empty.
#[derive(Debug)]
pub struct Placed {
    inner: Arc<dyn Store>,
    id: String,
}

fn marker_key() -> ObjectKey {
    ObjectKey::reserved("tier")
}

/// Whether the marker is there and can be read.
pub async fn is_marked(store: &dyn Store) -> bool {
    matches!(read_marker(store).await, Ok(Some(_)))
}

async fn read_marker(store: &dyn Store) -> Result<Option<Marker>, StoreError> {
    let bytes = match store.get(&marker_key(), None).await {
        Ok(bytes) => bytes,
        Err(StoreError::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let marker: Option<Marker> = serde_json::from_slice(&bytes).ok();
    match marker.filter(|marker| marker.storaged_tier == VERSION) {
        Some(marker) => Ok(Some(marker)),
        None => Err(StoreError::NotMounted {
            what: format!(
                "expected {{\"storaged_tier\":{VERSION},...}} in {}, got {:?}",
                marker_key(),
                String::from_utf8_lossy(&bytes[..bytes.len().min(60)])
            ),
        }),
    }
}

/// Whether a place can be the tier, before anything is written to it.
pub async fn check_expected(store: &dyn Store, marker: MarkerConfig) -> Result<(), StoreError> {
    let absent = marker == MarkerConfig::Expect && read_marker(store).await?.is_none();
    if absent {
        Err(StoreError::NotMounted {
            what: format!(
                "durable.marker = \"expect\", and there is no {} in it",
                marker_key()
            ),
        })
    } else {
        Ok(())
    }
}

impl Placed {
    /// Recognizes the place by its marker. One without is new, or an older release's: it gets one.
    pub async fn settle(
        store: Arc<dyn Store>,
        randomness: &dyn Randomness,
        empty: &EmptyPlace,
    ) -> Result<Self, StoreError> {
        if let Some(marker) = read_marker(&*store).await? {
            return Ok(Self {
                inner: store,
                id: marker.id,
            });
        }
        let held = store.list_page(&KeyPrefix::root(), None, 2).await?.entries;
        let id = format!("{:016x}", randomness.next_u64());
        let marker = serde_json::json!({ "storaged_tier": VERSION, "id": id });
        match store
            .put_new(&marker_key(), marker.to_string().into())
            .await
        {
            Ok(()) if held.is_empty() => empty.say_new(&id),
            Ok(()) => tracing::info!(id, "a durable tier of an older release: marked as one"),
            // Another daemon was first.
            Err(StoreError::AlreadyExists { .. }) => {}
            Err(error) => return Err(error),
        }
        match read_marker(&*store).await? {
            Some(marker) => Ok(Self {
                inner: store,
                id: marker.id,
            }),
            None => Err(gone("it was just written")),
        }
    }
}

impl EmptyPlace {
    /// An empty place was taken for a new tier, once: from now on the marker is there.
    fn say_new(&self, id: &str) {
        match self {
            Self::Bucket => tracing::info!(id, "a new durable tier: it holds nothing yet"),
            Self::Directory(path) => tracing::warn!(
                id,
                path = %path.display(),
                "the directory was empty and is now a new durable tier: if it should have held checkpoints, its file system is not mounted: stop the daemon, remove .storaged from the empty directory, mount the file system and start again; if the tier is new, set durable.marker = \"expect\" on every node, so that an empty directory is never taken for it again"
            ),
        }
    }
}

fn gone(why: &str) -> StoreError {
    StoreError::NotMounted {
        what: format!("there is no {} in it, and {why}", marker_key()),
    }
}

#[async_trait]
impl Store for Placed {
    fn limits(&self) -> StoreLimits {
        self.inner.limits()
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        self.inner.begin(key, part_bytes).await
    }

    async fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError> {
        self.inner.resume(key, part_bytes).await
    }

    async fn resume_or_begin(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
        leftovers: Leftovers,
    ) -> Result<Upload, StoreError> {
        self.inner.resume_or_begin(key, part_bytes, leftovers).await
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        self.inner.put_part(upload, part, bytes).await
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        self.inner.complete(upload, length).await
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        self.inner.abort(upload).await
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        self.inner.unfinished(under).await
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        self.inner.put_new(key, bytes).await
    }

    async fn put_new_once(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        self.inner.put_new_once(key, bytes).await
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        self.inner.get(key, range).await
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        self.inner.length(key).await
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        self.inner.list(under).await
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        self.inner.list_page(under, after, limit).await
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        self.inner.list_folders(under).await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.inner.delete(key).await
    }

    async fn check_place(&self) -> Result<(), StoreError> {
        match read_marker(&*self.inner).await? {
            Some(marker) if marker.id == self.id => Ok(()),
            Some(marker) => Err(StoreError::NotMounted {
                what: format!("expected the tier {}, got the tier {}", self.id, marker.id),
            }),
            None => Err(gone("this daemon has seen it there")),
        }
    }
}
