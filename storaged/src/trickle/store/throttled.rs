//! A store that moves at most so many bytes per second: the trickle rate, and slow tiers in tests.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_core::Leftovers;
use tokio::time::Instant;

use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PartBytes, PartNumber, PartState, Store,
    StoreError, StoreLimits, Upload,
};

/// Bytes at an even rate.
#[derive(Debug)]
pub struct ByteRate {
    bytes_per_second: u64,
    /// When all bytes that were let through so far are paid for.
    paid_until: Mutex<Instant>,
}

impl ByteRate {
    /// A rate of 0 counts as 1 byte per second.
    pub fn new(bytes_per_second: u64) -> Self {
        Self {
            bytes_per_second: bytes_per_second.max(1),
            paid_until: Mutex::new(Instant::now()),
        }
    }

    /// Waits until these bytes are paid for.
    pub async fn pay(&self, bytes: usize) {
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let until = {
            let mut paid = self
                .paid_until
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            // Time in which nobody wrote is not saved up, so a pause earns no burst.
            *paid = (*paid).max(Instant::now()) + cost;
            *paid
        };
        tokio::time::sleep_until(until).await;
    }

    /// Whoever has paid for more than was written has so many bytes for nothing.
    pub fn give_back(&self, bytes: u64) {
        let cost = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        let mut paid = self
            .paid_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *paid = paid.checked_sub(cost).unwrap_or(*paid);
    }
}

/// A rate around a store. Payload is paid for before it is written and after it is read;
/// calls that move no payload pass freely.
#[derive(Debug)]
pub struct Throttled {
    inner: Arc<dyn Store>,
    rate: ByteRate,
}

impl Throttled {
    /// A rate of 0 counts as 1 byte per second.
    pub fn new(inner: Arc<dyn Store>, bytes_per_second: u64) -> Self {
        let rate = ByteRate::new(bytes_per_second);
        Self { inner, rate }
    }
}

#[async_trait]
impl Store for Throttled {
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

    async fn has_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: &Bytes,
    ) -> Result<bool, StoreError> {
        self.inner.has_part(upload, part, bytes).await
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        self.rate.pay(bytes.len()).await;
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
        self.rate.pay(bytes.len()).await;
        self.inner.put_new(key, bytes).await
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let bytes = self.inner.get(key, range).await?;
        self.rate.pay(bytes.len()).await;
        Ok(bytes)
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

    async fn check_place(&self) -> Result<(), StoreError> {
        self.inner.check_place().await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.inner.delete(key).await
    }
}
