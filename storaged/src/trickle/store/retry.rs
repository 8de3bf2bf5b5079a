//! A time limit and bounded retries around every call of a store.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_core::Leftovers;

use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PartBytes, PartNumber, PartState, Randomness,
    Retry, Store, StoreError, StoreLimits, Upload,
};

/// How long and how often a call is tried.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// How often a call is made at most, the first time included.
    pub attempts_max: u32,
    /// Time limit of one attempt that moves no bytes.
    pub attempt_limit: Duration,
    /// The slowest rate that counts as alive: an attempt that moves bytes gets that much more time.
    pub bytes_per_second_min: u64,
    /// Pause after the first failure; it doubles with each one. The real pause is a random share,
    /// between a half and all of it, so that the nodes of a job do not come back all at once.
    pub pause_first: Duration,
    pub pause_max: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts_max: 6,
            attempt_limit: Duration::from_secs(20),
            bytes_per_second_min: 1 << 20,
            pause_first: Duration::from_millis(100),
            pause_max: Duration::from_secs(10),
        }
    }
}

impl RetryPolicy {
    fn limit(&self, bytes: u64) -> Duration {
        self.attempt_limit + Duration::from_secs(bytes.div_ceil(self.bytes_per_second_min.max(1)))
    }

    /// The pause after failure number `failures`, counted from 1.
    fn pause(&self, failures: u32, randomness: &dyn Randomness) -> Duration {
        let doublings = failures.saturating_sub(1).min(20);
        let whole = self
            .pause_first
            .saturating_mul(1 << doublings)
            .min(self.pause_max);
        let half = whole / 2;
        half + Duration::from_micros(randomness.below(half.as_micros() as u64 + 1))
    }
}

/// A store whose calls end in bounded time and survive failures that pass.
#[derive(Debug)]
pub struct Retrying {
    inner: Arc<dyn Store>,
    policy: RetryPolicy,
    randomness: Arc<dyn Randomness>,
}

impl Retrying {
    pub fn new(
        inner: Arc<dyn Store>,
        policy: RetryPolicy,
        randomness: Arc<dyn Randomness>,
    ) -> Self {
        Self {
            inner,
            policy,
            randomness,
        }
    }

    async fn attempts<T, F>(
        &self,
        what: &str,
        bytes: u64,
        mut call: impl FnMut() -> F + Send,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>> + Send,
    {
        let limit = self.policy.limit(bytes);
        let mut failures = 0;
        loop {
            let error = match tokio::time::timeout(limit, call()).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => error,
                Err(_) => StoreError::Timeout {
                    what: what.to_owned(),
                    limit,
                },
            };
            failures += 1;
            if error.retryable() == Retry::Never || failures >= self.policy.attempts_max {
                return Err(error);
            }
            tracing::debug!(what, failures, %error, "a call of the durable tier is tried again");
            tokio::time::sleep(self.policy.pause(failures, &*self.randomness)).await;
        }
    }
}

#[async_trait]
impl Store for Retrying {
    fn limits(&self) -> StoreLimits {
        self.inner.limits()
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        self.attempts("begin", 0, || self.inner.begin(key, part_bytes))
            .await
    }

    async fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError> {
        self.attempts("resume", 0, || self.inner.resume(key, part_bytes))
            .await
    }

    async fn resume_or_begin(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
        leftovers: Leftovers,
    ) -> Result<Upload, StoreError> {
        // An answer may have been lost: from the second time on there may be what the first one began.
        let mut leftovers = leftovers;
        self.attempts("begin", 0, || {
            let expected = std::mem::replace(&mut leftovers, Leftovers::Perhaps);
            self.inner.resume_or_begin(key, part_bytes, expected)
        })
        .await
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        let length = bytes.len() as u64;
        self.attempts("put_part", length, || {
            self.inner.put_part(upload, part, bytes.clone())
        })
        .await
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        // Some stores copy the parts together, so completing counts as moving the bytes.
        self.attempts("complete", length, || self.inner.complete(upload, length))
            .await
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        self.attempts("abort", 0, || self.inner.abort(upload)).await
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        self.attempts("unfinished", 0, || self.inner.unfinished(under))
            .await
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        let length = bytes.len() as u64;
        self.attempts("put_new", length, || self.inner.put_new(key, bytes.clone()))
            .await
    }

    async fn put_new_once(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        self.inner.put_new_once(key, bytes).await
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let bytes = range.as_ref().map_or(super::CALL_BYTES_MAX, |range| {
            range
                .end
                .saturating_sub(range.start)
                .min(super::CALL_BYTES_MAX)
        });
        self.attempts("get", bytes, || self.inner.get(key, range.clone()))
            .await
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        self.attempts("length", 0, || self.inner.length(key)).await
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        self.attempts("list", 0, || self.inner.list(under)).await
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        self.attempts("list", 0, || self.inner.list_page(under, after, limit))
            .await
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        self.attempts("list", 0, || self.inner.list_folders(under))
            .await
    }

    async fn check_place(&self) -> Result<(), StoreError> {
        self.inner.check_place().await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.attempts("delete", 0, || self.inner.delete(key)).await
    }
}
