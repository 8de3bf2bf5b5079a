//! A store in RAM for unit tests, and a wrapper that makes any store fail as real ones do.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;

use super::directory::check_parts;
use super::{ObjectKey, PartTag, Store, StoreError, Upload};

/// Objects in RAM.
#[derive(Debug, Default)]
pub struct InMemory {
    objects: Mutex<BTreeMap<String, Bytes>>,
    parts: Mutex<BTreeMap<String, BTreeMap<u32, Bytes>>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[async_trait]
impl Store for InMemory {
    async fn begin(&self, key: &ObjectKey) -> Result<Upload, StoreError> {
        let mut all = locked(&self.parts);
        let parts = all.entry(key.to_string()).or_default();
        let tag = |bytes: &Bytes| PartTag { bytes: bytes.len() as u64, tag: String::new() };
        let done = parts.iter().map(|(number, bytes)| (*number, tag(bytes))).collect();
        Ok(Upload { key: key.clone(), id: String::new(), done })
    }

    async fn put_part(&self, upload: &mut Upload, number: u32, _: u64, bytes: Bytes) -> Result<(), StoreError> {
        let tag = PartTag { bytes: bytes.len() as u64, tag: String::new() };
        locked(&self.parts).entry(upload.key.to_string()).or_default().insert(number, bytes);
        upload.done.insert(number, tag);
        Ok(())
    }

    async fn complete(&self, upload: Upload, parts: u32, length: u64) -> Result<(), StoreError> {
        check_parts(&upload, parts, length)?;
        let pieces = locked(&self.parts).remove(upload.key.as_str()).unwrap_or_default();
        let whole: Vec<u8> = pieces.values().flat_map(|piece| piece.iter().copied()).collect();
        locked(&self.objects).insert(upload.key.to_string(), whole.into());
        Ok(())
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        let mut objects = locked(&self.objects);
        match objects.get(key.as_str()) {
            Some(known) if *known != bytes => Err(StoreError::AlreadyExists { key: key.to_string() }),
            _ => {
                objects.insert(key.to_string(), bytes);
                Ok(())
            }
        }
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let objects = locked(&self.objects);
        let object = objects.get(key.as_str());
        let object = object.ok_or_else(|| StoreError::NotFound { key: key.to_string() })?;
        let got = object.len() as u64;
        let range = range.unwrap_or(0..got);
        if range.end > got {
            return Err(StoreError::Truncated { key: key.to_string(), expected: range.end, got });
        }
        Ok(object.slice(range.start as usize..range.end as usize))
    }

    async fn length(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError> {
        Ok(locked(&self.objects).get(key.as_str()).map(|bytes| bytes.len() as u64))
    }

    async fn folders(&self, key: &ObjectKey) -> Result<Vec<String>, StoreError> {
        let prefix = format!("{key}/");
        let objects = locked(&self.objects);
        let below = objects.keys().filter_map(|name| name.strip_prefix(&prefix)?.split_once('/'));
        let mut names: Vec<String> = below.map(|(folder, _)| folder.to_owned()).collect();
        names.dedup();
        Ok(names)
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        locked(&self.objects).remove(key.as_str());
        Ok(())
    }

    fn part_bytes_min(&self) -> u64 {
        1
    }
}

/// How often a faulty store fails.
#[derive(Debug, Clone, Copy)]
pub struct Faults {
    /// One call in this many fails before it does anything; 0 for none.
    pub refuse_one_in: u64,
    /// One write in this many is done and then said to have failed; 0 for none.
    pub lose_answer_one_in: u64,
    /// One read in this many has a bit flipped; 0 for none.
    pub flip_one_in: u64,
}

/// A store that fails at fixed counts, so that a test replays.
#[derive(Debug)]
pub struct Faulty<S> {
    inner: S,
    faults: Faults,
    calls: AtomicU64,
}

impl<S> Faulty<S> {
    /// Wraps a store.
    pub fn new(inner: S, faults: Faults) -> Self {
        Self { inner, faults, calls: AtomicU64::new(0) }
    }

    fn count(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        match hits(call, self.faults.refuse_one_in) {
            true => Err(unavailable(key)),
            false => Ok(call),
        }
    }

    fn answer<T>(&self, call: u64, key: &ObjectKey, value: T) -> Result<T, StoreError> {
        match hits(call, self.faults.lose_answer_one_in) {
            true => Err(unavailable(key)),
            false => Ok(value),
        }
    }
}

fn hits(call: u64, one_in: u64) -> bool {
    one_in > 0 && call.is_multiple_of(one_in)
}

fn unavailable(key: &ObjectKey) -> StoreError {
    StoreError::Unavailable { key: key.to_string(), reason: "made to fail".into() }
}

#[async_trait]
impl<S: Store> Store for Faulty<S> {
    async fn begin(&self, key: &ObjectKey) -> Result<Upload, StoreError> {
        self.count(key)?;
        self.inner.begin(key).await
    }

    async fn put_part(&self, upload: &mut Upload, number: u32, part_bytes: u64, bytes: Bytes) -> Result<(), StoreError> {
        let call = self.count(&upload.key)?;
        self.inner.put_part(upload, number, part_bytes, bytes).await?;
        self.answer(call, &upload.key.clone(), ())
    }

    async fn complete(&self, upload: Upload, parts: u32, length: u64) -> Result<(), StoreError> {
        let (call, key) = (self.count(&upload.key)?, upload.key.clone());
        self.inner.complete(upload, parts, length).await?;
        self.answer(call, &key, ())
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        let call = self.count(key)?;
        self.inner.put_new(key, bytes).await?;
        self.answer(call, key, ())
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let call = self.count(key)?;
        let bytes = self.inner.get(key, range).await?;
        if !hits(call, self.faults.flip_one_in) || bytes.is_empty() {
            return Ok(bytes);
        }
        let mut flipped = bytes.to_vec();
        let at = call as usize % flipped.len();
        flipped[at] ^= 1;
        Ok(flipped.into())
    }

    async fn length(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError> {
        self.count(key)?;
        self.inner.length(key).await
    }

    async fn folders(&self, key: &ObjectKey) -> Result<Vec<String>, StoreError> {
        self.count(key)?;
        self.inner.folders(key).await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.count(key)?;
        self.inner.delete(key).await
    }

    fn part_bytes_min(&self) -> u64 {
        self.inner.part_bytes_min()
    }
}
