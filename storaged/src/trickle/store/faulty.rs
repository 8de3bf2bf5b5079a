//! A store that fails on purpose, the same way for the same seed.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PartBytes, PartNumber, PartState, Randomness,
    SeededRandomness, Store, StoreError, StoreLimits, Upload,
};

/// How often each fault strikes, in calls of a thousand.
#[derive(Debug, Clone, Copy, Default)]
pub struct FaultPlan {
    /// The call does nothing and is answered by an error.
    pub fail_per_mille: u64,
    /// The call does its work, but its answer is an error.
    pub lose_answer_per_mille: u64,
    /// A read ends early and says so.
    pub truncate_per_mille: u64,
    /// A read gives bytes with one bit flipped and does not say so.
    pub flip_per_mille: u64,
    /// Writes fail as on a full disk once this many bytes were written.
    pub full_after_bytes: Option<u64>,
    /// Each part that is written and each read takes so long, however many there are at once: a connection to a distant tier.
    pub latency: Duration,
}

/// A store with the faults of a plan.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn Store>,
    plan: FaultPlan,
    dice: SeededRandomness,
    written: AtomicU64,
}

impl Faulty {
    pub fn new(inner: Arc<dyn Store>, plan: FaultPlan, seed: u64) -> Self {
        Self {
            inner,
            plan,
            dice: SeededRandomness::new(seed),
            written: AtomicU64::new(0),
        }
    }

    fn strikes(&self, per_mille: u64) -> bool {
        self.dice.below(1000) < per_mille
    }

    fn before(&self, what: &str) -> Result<(), StoreError> {
        if self.strikes(self.plan.fail_per_mille) {
            return Err(unavailable(what, "failed on purpose"));
        }
        Ok(())
    }

    fn before_write(&self, what: &str, bytes: &Bytes) -> Result<(), StoreError> {
        self.before(what)?;
        let length = bytes.len() as u64;
        let written = self.written.fetch_add(length, Ordering::Relaxed) + length;
        if self
            .plan
            .full_after_bytes
            .is_some_and(|full| written > full)
        {
            let source = io::Error::from(io::ErrorKind::StorageFull);
            return Err(StoreError::Full {
                what: what.to_owned(),
                source: source.into(),
            });
        }
        Ok(())
    }

    fn after<T>(&self, what: &str, answer: T) -> Result<T, StoreError> {
        if self.strikes(self.plan.lose_answer_per_mille) {
            return Err(unavailable(what, "answer lost on purpose"));
        }
        Ok(answer)
    }

    fn flip(&self, bytes: Bytes) -> Bytes {
        let mut flipped = bytes.to_vec();
        let bit = self.dice.below(bytes.len() as u64 * 8);
        if let Some(byte) = flipped.get_mut((bit / 8) as usize) {
            *byte ^= 1 << (bit % 8);
        }
        flipped.into()
    }
}

fn unavailable(what: &str, cause: &str) -> StoreError {
    StoreError::Unavailable {
        what: what.to_owned(),
        source: io::Error::other(cause).into(),
    }
}

#[async_trait]
impl Store for Faulty {
    fn limits(&self) -> StoreLimits {
        self.inner.limits()
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        self.before("begin")?;
        let upload = self.inner.begin(key, part_bytes).await?;
        self.after("begin", upload)
    }

    async fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError> {
        self.before("resume")?;
        let upload = self.inner.resume(key, part_bytes).await?;
        self.after("resume", upload)
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
        self.before_write("put_part", &bytes)?;
        tokio::time::sleep(self.plan.latency).await;
        let state = self.inner.put_part(upload, part, bytes).await?;
        self.after("put_part", state)
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        self.before("complete")?;
        self.inner.complete(upload, length).await?;
        self.after("complete", ())
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        self.before("abort")?;
        self.inner.abort(upload).await?;
        self.after("abort", ())
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        self.before("unfinished")?;
        let keys = self.inner.unfinished(under).await?;
        self.after("unfinished", keys)
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        self.before_write("put_new", &bytes)?;
        self.inner.put_new(key, bytes).await?;
        self.after("put_new", ())
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        self.before("get")?;
        tokio::time::sleep(self.plan.latency).await;
        let bytes = self.inner.get(key, range).await?;
        let length = bytes.len() as u64;
        if self.strikes(self.plan.truncate_per_mille) && length > 0 {
            let got = self.dice.below(length);
            return Err(StoreError::Truncated {
                key: key.clone(),
                expected: length,
                got,
            });
        }
        if self.strikes(self.plan.flip_per_mille) {
            return Ok(self.flip(bytes));
        }
        self.after("get", bytes)
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        self.before("length")?;
        let length = self.inner.length(key).await?;
        self.after("length", length)
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        self.before("list")?;
        let entries = self.inner.list(under).await?;
        self.after("list", entries)
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        self.before("list")?;
        let page = self.inner.list_page(under, after, limit).await?;
        self.after("list", page)
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        self.before("list")?;
        let names = self.inner.list_folders(under).await?;
        self.after("list", names)
    }

    async fn check_place(&self) -> Result<(), StoreError> {
        self.inner.check_place().await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.before("delete")?;
        self.inner.delete(key).await?;
        self.after("delete", ())
    }
}
