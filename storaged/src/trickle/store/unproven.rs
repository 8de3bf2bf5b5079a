//! A store that took no writes when it was opened: full, or read-only. What it holds is read and removed all the same; what
//! the check at start looks for is looked for before the first write.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use storaged_core::Leftovers;
use tokio::sync::OnceCell;

use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PartBytes, PartNumber, PartState, Store,
    StoreError, StoreLimits, Upload,
};

/// The check that a store can be written, with all that comes before it.
pub type Check = Box<dyn Fn() -> BoxFuture<'static, Result<(), StoreError>> + Send + Sync>;

/// A store whose writes each end in what the check says, until it says that all is well.
pub struct Unproven {
    inner: Arc<dyn Store>,
    check: Check,
    proven: OnceCell<()>,
}

impl fmt::Debug for Unproven {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unproven")
            .field("inner", &self.inner)
            .field("proven", &self.proven.initialized())
            .finish_non_exhaustive()
    }
}

impl Unproven {
    pub fn new(inner: Arc<dyn Store>, check: Check) -> Self {
        Self {
            inner,
            check,
            proven: OnceCell::new(),
        }
    }

    /// The store for a write: one check for all that wait, and none once it has succeeded.
    async fn writable(&self) -> Result<&Arc<dyn Store>, StoreError> {
        let checked = || async {
            (self.check)().await?;
            tracing::info!("the durable tier takes writes again");
            Ok(())
        };
        self.proven.get_or_try_init(checked).await?;
        Ok(&self.inner)
    }
}

#[async_trait]
impl Store for Unproven {
    fn limits(&self) -> StoreLimits {
        self.inner.limits()
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        self.writable().await?.begin(key, part_bytes).await
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
        self.writable()
            .await?
            .resume_or_begin(key, part_bytes, leftovers)
            .await
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        self.writable().await?.put_part(upload, part, bytes).await
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        self.writable().await?.complete(upload, length).await
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        self.inner.abort(upload).await
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        self.inner.unfinished(under).await
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        self.writable().await?.put_new(key, bytes).await
    }

    async fn put_new_once(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        self.writable().await?.put_new_once(key, bytes).await
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
        self.inner.check_place().await
    }
}
