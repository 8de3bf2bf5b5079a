//! A store in memory: the fake for unit tests and simulations.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};

use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PAGE_ENTRIES_MAX, PartBytes, PartNumber,
    PartState, Rest, Store, StoreError, StoreLimits, StoredForm, Upload, UploadId, check_asked,
    check_small, range_within,
};

/// Objects and unfinished uploads, as long as the value lives.
#[derive(Debug, Default)]
pub struct FakeStore {
    state: Mutex<FakeState>,
    requests: AtomicU64,
}

#[derive(Debug, Default)]
struct FakeState {
    objects: BTreeMap<ObjectKey, Bytes>,
    uploads: BTreeMap<UploadId, Unfinished>,
    uploads_begun: u64,
}

#[derive(Debug)]
struct Unfinished {
    key: ObjectKey,
    part_bytes: PartBytes,
    parts: BTreeMap<PartNumber, Bytes>,
}

impl FakeStore {
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests so far, as S3 counts them: one per call, and one per page of a listing.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Uploads that were begun so far.
    #[cfg(test)]
    pub fn uploads_begun(&self) -> u64 {
        self.state().uploads_begun
    }

    /// Counts the pages of a listing behind the first.
    fn pages(&self, entries: usize) {
        let more = entries.saturating_sub(1) / PAGE_ENTRIES_MAX;
        self.requests.fetch_add(more as u64, Ordering::Relaxed);
    }

    fn state(&self) -> MutexGuard<'_, FakeState> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        // No call leaves the state half-changed, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn no_upload(upload: &Upload) -> StoreError {
    StoreError::NoUpload {
        key: upload.key().clone(),
        upload: upload.id().to_string(),
    }
}

fn not_found(key: &ObjectKey) -> StoreError {
    StoreError::NotFound {
        what: key.to_string(),
    }
}

#[async_trait]
impl Store for FakeStore {
    fn limits(&self) -> StoreLimits {
        StoreLimits {
            part_bytes_min: 1,
            part_bytes_max: super::CALL_BYTES_MAX,
            parts_max: 10_000,
            form: StoredForm::Plain,
        }
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        let mut state = self.state();
        state.uploads.retain(|_, unfinished| unfinished.key != *key);
        state.uploads_begun += 1;
        let id = UploadId(format!("{:016x}", state.uploads_begun));
        let unfinished = Unfinished {
            key: key.clone(),
            part_bytes,
            parts: BTreeMap::new(),
        };
        state.uploads.insert(id.clone(), unfinished);
        Ok(Upload::new(key.clone(), id, part_bytes))
    }

    async fn resume(&self, key: &ObjectKey, _: PartBytes) -> Result<Option<Upload>, StoreError> {
        let state = self.state();
        let mut uploads = state.uploads.iter();
        let found = uploads.find(|(_, unfinished)| unfinished.key == *key);
        Ok(found.map(|(id, unfinished)| {
            let mut upload = Upload::new(key.clone(), id.clone(), unfinished.part_bytes);
            for (part, bytes) in &unfinished.parts {
                upload.note(*part, PartState::of(bytes));
            }
            upload
        }))
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        upload.check_part(part, &bytes, &self.limits())?;
        let mut state = self.state();
        let unfinished = state
            .uploads
            .get_mut(upload.id())
            .ok_or_else(|| no_upload(upload))?;
        let part_state = PartState::of(&bytes);
        unfinished.parts.insert(part, bytes);
        Ok(part_state)
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        upload.check_complete(length)?;
        let mut state = self.state();
        let Some(unfinished) = state.uploads.remove(upload.id()) else {
            let there = state
                .objects
                .get(upload.key())
                .map(|bytes| bytes.len() as u64);
            return if there == Some(length) {
                Ok(())
            } else {
                Err(no_upload(upload))
            };
        };
        let mut object = BytesMut::new();
        for bytes in unfinished.parts.values() {
            object.extend_from_slice(bytes);
        }
        state.objects.insert(unfinished.key, object.freeze());
        Ok(())
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        self.state().uploads.remove(upload.id());
        Ok(())
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        let state = self.state();
        let keys = state
            .uploads
            .values()
            .map(|unfinished| unfinished.key.clone());
        let mut keys: Vec<_> = keys.filter(|key| under.covers(key)).collect();
        keys.sort();
        Ok(keys)
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        check_small(key, &bytes)?;
        let mut state = self.state();
        match state.objects.get(key) {
            Some(there) if *there == bytes => Ok(()),
            Some(_) => Err(StoreError::AlreadyExists { key: key.clone() }),
            None => {
                state.objects.insert(key.clone(), bytes);
                Ok(())
            }
        }
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        check_asked(key, range.as_ref())?;
        let state = self.state();
        let object = state.objects.get(key).ok_or_else(|| not_found(key))?;
        let range = range_within(key, range, object.len() as u64)?;
        Ok(object.slice(range.start as usize..range.end as usize))
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let state = self.state();
        let object = state.objects.get(key).ok_or_else(|| not_found(key))?;
        Ok(object.len() as u64)
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        let state = self.state();
        let entry = |(key, bytes): (&ObjectKey, &Bytes)| ObjectEntry {
            key: key.clone(),
            length: bytes.len() as u64,
        };
        let entries: Vec<ObjectEntry> = state
            .objects
            .iter()
            .filter(|(key, _)| under.covers(key))
            .map(entry)
            .collect();
        self.pages(entries.len());
        Ok(entries)
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        let limit = limit.min(PAGE_ENTRIES_MAX);
        let state = self.state();
        let entry = |(key, bytes): (&ObjectKey, &Bytes)| ObjectEntry {
            key: key.clone(),
            length: bytes.len() as u64,
        };
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let behind = state.objects.range((from, Bound::Unbounded));
        let covered = behind.filter(|(key, _)| under.covers(key)).map(entry);
        let mut entries: Vec<ObjectEntry> = covered.take(limit + 1).collect();
        let rest = if entries.len() > limit {
            Rest::More
        } else {
            Rest::None
        };
        entries.truncate(limit);
        Ok(ListPage { entries, rest })
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        let state = self.state();
        let prefix = under.text();
        let folder = |key: &ObjectKey| {
            let (name, _) = key.as_str().strip_prefix(&prefix)?.split_once('/')?;
            Some(name.to_owned())
        };
        let mut names: Vec<String> = state.objects.keys().filter_map(folder).collect();
        names.dedup();
        self.pages(names.len());
        Ok(names)
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.state().objects.remove(key);
        Ok(())
    }
}
