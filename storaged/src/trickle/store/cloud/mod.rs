//! Google Cloud Storage and Azure Blob Storage as durable tier, through `object_store`.
//!
//! Neither tells by that library what an earlier process has left of an upload: all parts are sent again. Azure drops what was left within a
//! week. Google keeps it for good, so that the name of every upload under way is written down beside the objects, and what was left is
//! given up when the same object is begun again, or its run is cleared.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutMode};
use storaged_core::Leftovers;
use twox_hash::XxHash3_128;

use super::remote::{BucketFolder, check_listed, check_own, in_time};
use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PAGE_ENTRIES_MAX, PartBytes, PartDigest,
    PartNumber, PartState, Randomness, Rest, Store, StoreError, StoreLimits, Upload, UploadId,
    check_asked, check_range, check_small, range_within,
};

mod config;
mod failure;
mod http;

pub use config::{AzureConfig, GcsConfig};
use failure::CloudRequest;
#[cfg(test)]
pub(super) use http::CloudHttp;

/// Where the names of uploads under way are.
const UPLOADS: &str = "uploads";

/// What a cloud's client can do.
pub(super) trait Service: ObjectStore + MultipartStore + PaginatedListStore {}
impl<T: ObjectStore + MultipartStore + PaginatedListStore> Service for T {}

/// A bucket or container, and the folder of it that is ours.
#[derive(Debug, Clone)]
pub(super) struct Bucket {
    /// For whoever reads of it.
    name: String,
    folder: BucketFolder,
}

impl Bucket {
    pub(super) fn new(name: String, prefix: &str) -> Result<Self, StoreError> {
        let folder = BucketFolder::new(prefix)?;
        Ok(Self { name, folder })
    }
}

/// What becomes of parts that nobody has put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leavings {
    /// They stay until they are given up by name.
    Stay,
    /// The service drops them after some days, and knows uploads by no name.
    Vanish,
}

/// An upload that is neither finished nor given up.
#[derive(Debug, Clone)]
struct OpenUpload {
    id: UploadId,
    completion: Completion,
}

/// Whether a service may have put an object together already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Completion {
    /// Nobody has asked for it.
    NotAsked,
    /// It was asked for, and its answer may have been lost.
    Asked,
}

/// An object store of a cloud.
#[derive(Clone)]
pub struct CloudStore {
    service: Arc<dyn Service>,
    bucket: Bucket,
    limits: StoreLimits,
    leavings: Leavings,
    /// Uploads that this process has begun, and neither finished nor given up.
    open: Arc<Mutex<BTreeMap<ObjectKey, OpenUpload>>>,
    randomness: Arc<dyn Randomness>,
}

/// Without the client, which shows its credentials.
impl fmt::Debug for CloudStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CloudStore")
            .field("bucket", &self.bucket)
            .finish_non_exhaustive()
    }
}

impl CloudStore {
    pub(super) fn new(
        service: Arc<dyn Service>,
        bucket: Bucket,
        limits: StoreLimits,
        leavings: Leavings,
        randomness: Arc<dyn Randomness>,
    ) -> Self {
        Self {
            service,
            bucket,
            limits,
            leavings,
            open: Arc::default(),
            randomness,
        }
    }

    fn path(&self, key: &ObjectKey) -> Result<Path, StoreError> {
        let name = self.bucket.folder.name(key);
        Path::parse(name).map_err(|error| self.request("name", key).error(error.into()))
    }

    fn request(&self, verb: &str, key: &ObjectKey) -> CloudRequest {
        let Bucket { name, folder } = &self.bucket;
        CloudRequest {
            what: format!("{verb} {name}/{}", folder.name(key)),
            key: Some(key.clone()),
        }
    }

    fn list_request(&self, under: &KeyPrefix) -> CloudRequest {
        let Bucket { name, folder } = &self.bucket;
        CloudRequest {
            what: format!("list {name}/{}", folder.prefix_of(under)),
            key: None,
        }
    }

    /// Where it is written down that an object is being uploaded.
    fn note_of(key: &ObjectKey) -> ObjectKey {
        ObjectKey::reserved(&format!("{UPLOADS}/{key}"))
    }

    async fn put(&self, key: &ObjectKey, bytes: Bytes, mode: PutMode) -> Result<(), StoreError> {
        let path = self.path(key)?;
        let creates = matches!(mode, PutMode::Create);
        let sent = self
            .service
            .put_opts(&path, bytes.into(), mode.into())
            .await;
        let request = self.request("write", key);
        match sent {
            Ok(_) => Ok(()),
            Err(error) if creates => Err(request.error_of_creation(error)),
            Err(error) => Err(request.error(error)),
        }
    }

    fn is_open(&self, upload: &Upload) -> bool {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.get(upload.key()).map(|it| &it.id) == Some(upload.id())
    }

    /// An object is about to be put together. Whether that was asked for before; none if the upload is not open.
    fn asks_for_completion(&self, upload: &Upload) -> Option<Completion> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open
            .get_mut(upload.key())
            .filter(|it| it.id == *upload.id())?;
        Some(std::mem::replace(&mut open.completion, Completion::Asked))
    }

    fn check_open(&self, upload: &Upload) -> Result<(), StoreError> {
        if self.is_open(upload) {
            return Ok(());
        }
        Err(no_upload(upload))
    }

    /// Begins an upload; what was left of one is given up before.
    async fn create(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        let path = self.path(key)?;
        let begun = self.service.create_multipart(&path).await;
        let named = begun.map_err(|error| self.request("begin upload of", key).error(error))?;
        let id = match self.leavings {
            Leavings::Stay => {
                // Before a part is sent: had this process ended first, nobody would know of it.
                let note = Bytes::from(named.clone());
                self.put(&Self::note_of(key), note, PutMode::Overwrite)
                    .await?;
                UploadId(named)
            }
            // One of its own, as the service gives none.
            Leavings::Vanish => UploadId(format!("{:016x}", self.randomness.next_u64())),
        };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = OpenUpload {
            id: id.clone(),
            completion: Completion::NotAsked,
        };
        open.insert(key.clone(), begun);
        Ok(Upload::new(key.clone(), id, part_bytes))
    }

    /// Gives up what another process, or this one, has left of an upload of this object.
    async fn give_up_noted(&self, key: &ObjectKey) -> Result<(), StoreError> {
        if self.leavings == Leavings::Vanish {
            return Ok(());
        }
        let note = Self::note_of(key);
        match self.get(&note, None).await {
            Ok(id) => {
                self.drop_parts(key, &String::from_utf8_lossy(&id)).await?;
                self.delete(&note).await
            }
            Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Drops what the service has of an upload; no error if it is gone already.
    async fn drop_parts(&self, key: &ObjectKey, id: &str) -> Result<(), StoreError> {
        let path = self.path(key)?;
        let dropped = self.service.abort_multipart(&path, &id.into()).await;
        match dropped.map_err(|error| self.request("give up the upload of", key).error(error)) {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// It is finished or given up.
    async fn close(&self, upload: &Upload) -> Result<(), StoreError> {
        if self.leavings == Leavings::Stay {
            self.delete(&Self::note_of(upload.key())).await?;
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.remove(upload.key());
        Ok(())
    }

    /// One answer of a listing.
    async fn page(
        &self,
        under: &KeyPrefix,
        options: PaginatedListOptions,
    ) -> Result<object_store::list::PaginatedListResult, StoreError> {
        let prefix = self.bucket.folder.prefix_of(under);
        let prefix = (!prefix.is_empty()).then_some(&*prefix);
        let listed = self.service.list_paginated(prefix, options).await;
        listed.map_err(|error| self.list_request(under).error(error))
    }

    /// What is wrong with a range that reaches beyond the end: the error of a request for it does not say so in a way of its own.
    async fn beyond(&self, key: &ObjectKey, range: Option<&Range<u64>>) -> Option<StoreError> {
        let range = range?.clone();
        let length = self.length(key).await.ok()?;
        range_within(key, Some(range), length).err()
    }

    /// All names below a prefix, which need be none of ours.
    async fn entries(&self, under: &KeyPrefix) -> Result<Vec<(String, u64)>, StoreError> {
        let mut entries = Vec::new();
        let mut page_token = None;
        loop {
            let options = PaginatedListOptions {
                page_token,
                ..PaginatedListOptions::default()
            };
            let page = self.page(under, options).await?;
            let objects = page.result.objects.into_iter();
            entries.extend(objects.map(|it| (it.location.to_string(), it.size)));
            check_listed(&self.list_request(under).what, entries.len())?;
            page_token = page.page_token;
            if page_token.is_none() {
                return Ok(entries);
            }
        }
    }
}

fn no_upload(upload: &Upload) -> StoreError {
    StoreError::NoUpload {
        key: upload.key().clone(),
        upload: upload.id().to_string(),
    }
}

#[async_trait]
impl Store for CloudStore {
    fn limits(&self) -> StoreLimits {
        self.limits
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        self.give_up_noted(key).await?;
        self.create(key, part_bytes).await
    }

    async fn resume_or_begin(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
        leftovers: Leftovers,
    ) -> Result<Upload, StoreError> {
        match leftovers {
            Leftovers::None => self.create(key, part_bytes).await,
            Leftovers::Perhaps => self.begin(key, part_bytes).await,
        }
    }

    async fn resume(&self, _: &ObjectKey, _: PartBytes) -> Result<Option<Upload>, StoreError> {
        Ok(None)
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        upload.check_part(part, &bytes, &self.limits)?;
        self.check_open(upload)?;
        let (length, hash) = (bytes.len() as u64, XxHash3_128::oneshot(&bytes));
        if bytes.is_empty() && self.leavings == Leavings::Vanish {
            // Azure takes no empty block, and makes an empty object of none.
            let digest = PartDigest::Named {
                hash,
                name: String::new(),
            };
            return Ok(PartState { length, digest });
        }
        let (path, id) = (self.path(upload.key())?, upload.id().to_string());
        let sent = self
            .service
            .put_part(&path, &id, part.0 as usize, bytes.into())
            .await;
        let request = self.request(&format!("write part {part} of"), upload.key());
        match sent.map_err(|error| request.error(error)) {
            Ok(PartId { content_id: name }) => Ok(PartState {
                length,
                digest: PartDigest::Named { hash, name },
            }),
            Err(StoreError::NotFound { .. }) => Err(no_upload(upload)),
            Err(error) => Err(error),
        }
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        upload.check_complete(length)?;
        let key = upload.key();
        let is_there = async || self.length(key).await.ok() == Some(length);
        let Some(asked) = self.asks_for_completion(upload) else {
            // An earlier call has done it.
            return if is_there().await {
                Ok(())
            } else {
                Err(no_upload(upload))
            };
        };
        let parts = upload
            .done()
            .values()
            .filter_map(|part| match &part.digest {
                PartDigest::Named { name, .. } if !name.is_empty() => Some(PartId {
                    content_id: name.clone(),
                }),
                _ => None,
            });
        let (path, id, parts) = (self.path(key)?, upload.id().to_string(), parts.collect());
        let done = self.service.complete_multipart(&path, &id, parts).await;
        match done.map_err(|error| self.request("complete", key).error(error)) {
            Ok(_) => {}
            // The answer of an earlier call was lost: Google knows no such upload any more, and Azure no such blocks.
            Err(StoreError::NotFound { .. } | StoreError::Invalid { .. })
                if asked == Completion::Asked && is_there().await => {}
            Err(StoreError::NotFound { .. }) => return Err(no_upload(upload)),
            Err(error) => return Err(error),
        }
        self.close(upload).await
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        if self.leavings == Leavings::Stay {
            self.drop_parts(upload.key(), &upload.id().to_string())
                .await?;
        }
        // The name that is written down is that of the open one.
        if self.is_open(upload) {
            self.close(upload).await?;
        }
        Ok(())
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        if self.leavings == Leavings::Vanish {
            // What other processes have left is neither known nor kept.
            let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            return Ok(open
                .keys()
                .filter(|key| under.covers(key))
                .cloned()
                .collect());
        }
        let notes = ObjectKey::reserved(UPLOADS);
        let noted_under = match under.as_folder() {
            Some(folder) => KeyPrefix::folder(Self::note_of(folder)),
            None => KeyPrefix::folder(notes.clone()),
        };
        let within = self.bucket.folder.name(&notes) + "/";
        let noted = self.entries(&noted_under).await?;
        let keys = noted
            .iter()
            .filter_map(|(name, _)| name.strip_prefix(&within)?.parse().ok());
        let mut keys: Vec<ObjectKey> = keys.collect();
        keys.sort();
        Ok(keys)
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        check_small(key, &bytes)?;
        match self.put(key, bytes.clone(), PutMode::Create).await {
            Err(StoreError::AlreadyExists { key }) => check_own(self, &key, &bytes).await,
            done => done,
        }
    }

    async fn put_new_once(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        in_time("put_new_once", self.put_new(key, bytes)).await
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        check_asked(key, range.as_ref())?;
        if range.as_ref().is_some_and(Range::is_empty) {
            // HTTP cannot name an empty range.
            range_within(key, range, self.length(key).await?)?;
            return Ok(Bytes::new());
        }
        let request = self.request("read", key);
        let options = GetOptions {
            range: range.clone().map(GetRange::Bounded),
            ..GetOptions::default()
        };
        let answer = self.service.get_opts(&self.path(key)?, options).await;
        let answer = match answer.map_err(|error| request.error(error)) {
            Ok(answer) => answer,
            Err(error) => return Err(self.beyond(key, range.as_ref()).await.unwrap_or(error)),
        };
        let got = answer.range.clone();
        let expected = range.unwrap_or(0..answer.meta.size);
        check_range(key, &expected)?;
        let lacks = |got: u64| StoreError::Truncated {
            key: key.clone(),
            expected: expected.end,
            got,
        };
        if got != expected {
            return Err(lacks(got.end));
        }
        let bytes = answer.bytes().await.map_err(|error| request.error(error))?;
        if bytes.len() as u64 != expected.end - expected.start {
            return Err(lacks(expected.start + bytes.len() as u64));
        }
        Ok(bytes)
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let looked_at = self.service.head(&self.path(key)?).await;
        let meta = looked_at.map_err(|error| self.request("look at", key).error(error))?;
        Ok(meta.size)
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        let all = self.entries(under).await?.into_iter();
        let ours = all.filter_map(|(name, length)| {
            let key = self.bucket.folder.key_of(&name)?;
            Some(ObjectEntry { key, length })
        });
        let mut entries: Vec<ObjectEntry> = ours.collect();
        entries.sort();
        Ok(entries)
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        let limit = limit.min(PAGE_ENTRIES_MAX);
        let offset = after.map(|key| self.bucket.folder.name(key));
        let mut entries = Vec::new();
        let mut page_token = None;
        loop {
            let options = PaginatedListOptions {
                offset: offset.clone(),
                // Azure counts the offset itself, which the answer leaves out.
                max_keys: Some(limit + 1),
                page_token,
                ..PaginatedListOptions::default()
            };
            let page = self.page(under, options).await?;
            let objects = page.result.objects.iter().filter_map(|object| {
                let key = self.bucket.folder.key_of(object.location.as_ref())?;
                let length = object.size;
                Some(ObjectEntry { key, length })
            });
            // A server that knows no offset (Azurite) begins at the first of all.
            entries.extend(objects.filter(|entry| after.is_none_or(|after| entry.key > *after)));
            page_token = page.page_token;
            if page_token.is_none() || entries.len() > limit {
                break;
            }
        }
        let rest = if entries.len() > limit {
            Rest::More
        } else {
            Rest::None
        };
        entries.truncate(limit);
        Ok(ListPage { entries, rest })
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        let prefix = self.bucket.folder.prefix_of(under);
        let mut names = Vec::new();
        let mut page_token = None;
        loop {
            let options = PaginatedListOptions {
                delimiter: Some("/".into()),
                page_token,
                ..PaginatedListOptions::default()
            };
            let page = self.page(under, options).await?;
            for folder in &page.result.common_prefixes {
                let name = folder.as_ref().strip_prefix(&*prefix).unwrap_or_default();
                names.extend((!name.is_empty()).then(|| name.to_owned()));
            }
            check_listed(&self.list_request(under).what, names.len())?;
            page_token = page.page_token;
            if page_token.is_none() {
                names.sort();
                return Ok(names);
            }
        }
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let removed = self.service.delete(&self.path(key)?).await;
        match removed.map_err(|error| self.request("remove", key).error(error)) {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
