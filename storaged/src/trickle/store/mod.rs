//! The durable tier: one trait, and the back ends and wrappers that implement it.
//!
//! Order of reading: [`Store`], then `key`, `upload` and `error`, then the back ends
//! [`Directory`], [`S3`], [`CloudStore`] and the fake [`FakeStore`], then the wrappers [`Retrying`], [`Throttled`], [`Encrypted`] and
//! [`Faulty`], and last [`open`], which makes a store from its configuration.
//!
//! A store knows keys and bytes, nothing of checkpoints. What it promises, and what one conformance
//! suite checks for every back end: an object is visible only when it is whole; [`Store::put_new`]
//! has exactly one winner; a read gives exactly the bytes asked for or an error. It does not promise
//! that bytes come back unchanged: whoever reads them compares them with the manifest's digests.

use std::fmt::Debug;
use std::ops::Range;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_core::Leftovers;

mod aligned;
mod cloud;
mod config;
mod directory;
mod encrypted;
mod error;
mod fake;
mod faulty;
mod key;
mod lazy;
mod place;
mod random;
mod remote;
mod retry;
mod s3;
mod throttled;
mod unproven;
mod upload;
mod write_watch;

#[cfg(test)]
mod tests;

pub use cloud::{AzureConfig, CloudStore, GcsConfig};
pub use config::{
    DirectoryIo, FileIoConfig, PageCacheConfig, StoreConfig, open, open_lazily, probe,
};
pub use directory::{Directory, FileIo};
pub use encrypted::{Encrypted, KeyRing, KeysError, PlainObjects, TierKeys};
pub use error::{Retry, StoreError};
pub use fake::FakeStore;
pub use faulty::{FaultPlan, Faulty};
pub use key::{KeyPrefix, ObjectKey};
pub use lazy::{Attempt, Lazy, Opening};
pub use place::{MarkerConfig, Placed};
pub use random::{Randomness, SeededRandomness, SystemRandomness};
pub use retry::{RetryPolicy, Retrying};
#[cfg(test)]
pub(super) use s3::S3_LIMITS;
pub use s3::{S3, S3Config};
pub use throttled::{ByteRate, Throttled};
pub use upload::{PartBytes, PartDigest, PartNumber, PartState, Upload, UploadId};
pub use write_watch::WriteWatch;

/// The largest read or small object that one call moves; larger objects are read by ranges and
/// written by parts, so that a caller's memory stays bounded.
pub const CALL_BYTES_MAX: u64 = 256 << 20;

/// The most objects that one listing returns; a prefix that holds more is listed by its folders.
pub const LIST_ENTRIES_MAX: usize = 1_000_000;

/// What a store can take, asked before an upload is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// Smallest size of every part but the last.
    pub part_bytes_min: u64,
    /// Largest size of a part.
    pub part_bytes_max: u64,
    /// Most parts of one upload.
    pub parts_max: u32,
    /// How objects are kept.
    pub form: StoredForm,
}

/// How a store keeps what it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StoredForm {
    /// As it is.
    #[default]
    Plain,
    /// In frames with a tag each.
    Encrypted,
}

impl StoredForm {
    /// How long an object of so many bytes is in the store.
    pub fn stored_bytes(self, length: u64) -> u64 {
        match self {
            Self::Plain => length,
            Self::Encrypted => encrypted::sealed_length(length),
        }
    }

    /// What the size of parts is a multiple of.
    pub fn part_unit(self) -> u64 {
        match self {
            Self::Plain => 1,
            Self::Encrypted => encrypted::FRAME_BYTES,
        }
    }
}

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectEntry {
    pub key: ObjectKey,
    /// Length in bytes, as it is kept: [`StoredForm::stored_bytes`].
    pub length: u64,
}

/// One page of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListPage {
    /// Objects in the order of their keys.
    pub entries: Vec<ObjectEntry>,
    /// Whether there are more behind the last one.
    pub rest: Rest,
}

/// What lies behind a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rest {
    /// Nothing.
    #[default]
    None,
    /// At least one more object.
    More,
}

/// The most entries of one page: what S3 gives in one answer.
pub const PAGE_ENTRIES_MAX: usize = 1_000;

/// A durable place for objects.
///
/// All calls may be repeated after an error without harm: that is what [`Retrying`] relies on.
/// Back ends do not limit their own time; [`open`] wraps them in [`Retrying`], which does.
///
/// One writer per key is assumed for uploads: a key names the run and step it belongs to, and a run
/// is fenced. Only [`Store::put_new`] settles races between writers.
#[async_trait]
pub trait Store: Send + Sync + Debug {
    /// Part sizes and counts that this store takes.
    fn limits(&self) -> StoreLimits;

    /// Starts a write of `key` in parts, all `part_bytes` long except the last. Unfinished uploads
    /// of the same key are given up.
    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError>;

    /// Finds an unfinished upload of `key`, begun by this or an earlier process, and says which parts it has and of
    /// which size: perhaps another one than is asked for. A part counts as usable only after
    /// [`Store::has_part`] has compared it with the bytes that it should hold.
    async fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError>;

    /// Whether an upload that was found again has this part with these bytes.
    async fn has_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: &Bytes,
    ) -> Result<bool, StoreError> {
        let there = upload.done().get(&part);
        Ok(there.is_some_and(|there| there.matches(bytes)))
    }

    /// Writes one part; writing it again replaces it. Parts may be written concurrently. The caller
    /// notes the answer in the upload with [`Upload::note`].
    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError>;

    /// Makes the object visible, whole and durable, in place of any object of that key. `length` is
    /// what the parts must add up to. Completing again what is already complete is no error.
    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError>;

    /// Drops the upload and its parts; no error if it is gone already.
    async fn abort(&self, upload: &Upload) -> Result<(), StoreError>;

    /// Keys at or below `under` that have unfinished uploads, sorted: what garbage collection drops.
    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError>;

    /// Creates a small object, only if its key is free. An object with the very same bytes counts
    /// as this call's own earlier success, so that a retry after a lost answer is no error; other
    /// bytes are [`StoreError::AlreadyExists`].
    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError>;

    /// Reads a whole object of at most [`CALL_BYTES_MAX`], or a byte range of it. A range that
    /// reaches beyond the object's end is [`StoreError::Truncated`], never a short answer.
    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError>;

    /// Length of an object in bytes, as it is kept: [`StoredForm::stored_bytes`].
    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError>;

    /// All objects below `under`, sorted by key, at most [`LIST_ENTRIES_MAX`].
    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError>;

    /// The first objects below `under` in the order of their keys, behind `after` if it is given: at most `limit`, and
    /// at most [`PAGE_ENTRIES_MAX`]. One request, however many objects there are.
    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError>;

    /// The names of the folders right below `under` that hold objects, sorted, at most [`LIST_ENTRIES_MAX`]. What is in
    /// them is not read: one request for every [`PAGE_ENTRIES_MAX`] folders.
    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError>;

    /// Whether the place is still the one that was opened. Asked before its emptiness is believed.
    async fn check_place(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Creates an object with one attempt: whoever waits for it learns whether the store hangs. Nothing breaks it off, so that a file system
    /// that hangs has one thread of it; a store behind a network ends it with [`StoreError::Timeout`] (`remote::in_time`), since an answer that
    /// was lost on the way never comes.
    async fn put_new_once(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        self.put_new(key, bytes).await
    }

    /// Removes an object; no error if it is gone already.
    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError>;

    /// Resumes an upload of `key` where there is one, in parts of its own size, else begins one. Where there can be no leftovers, none need be looked for.
    async fn resume_or_begin(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
        _leftovers: Leftovers,
    ) -> Result<Upload, StoreError> {
        match self.resume(key, part_bytes).await? {
            Some(upload) => Ok(upload),
            None => self.begin(key, part_bytes).await,
        }
    }
}

/// Checks a read's range and gives its length; the end of a whole read is `length` of the object.
fn range_within(
    key: &ObjectKey,
    range: Option<Range<u64>>,
    length: u64,
) -> Result<Range<u64>, StoreError> {
    let range = range.unwrap_or(0..length);
    check_range(key, &range)?;
    if range.end > length {
        return Err(StoreError::Truncated {
            key: key.clone(),
            expected: range.end,
            got: length,
        });
    }
    Ok(range)
}

/// Checks the range that a caller asks for, before the object is looked at.
fn check_asked(key: &ObjectKey, range: Option<&Range<u64>>) -> Result<(), StoreError> {
    range.map_or(Ok(()), |range| check_range(key, range))
}

/// Refuses a range that is reversed or larger than one call may move.
fn check_range(key: &ObjectKey, range: &Range<u64>) -> Result<(), StoreError> {
    if range.start > range.end || range.end - range.start > CALL_BYTES_MAX {
        return Err(StoreError::Invalid {
            what: format!("byte range of {key}"),
            expected: format!("start <= end and at most {CALL_BYTES_MAX} bytes"),
            got: format!("{}..{}", range.start, range.end),
        });
    }
    Ok(())
}

/// Refuses a small object that is larger than one call may move.
fn check_small(key: &ObjectKey, bytes: &Bytes) -> Result<(), StoreError> {
    if bytes.len() as u64 > CALL_BYTES_MAX {
        return Err(StoreError::Invalid {
            what: format!("size of {key} written in one call"),
            expected: format!("at most {CALL_BYTES_MAX} bytes (write larger objects by parts)"),
            got: format!("{} bytes", bytes.len()),
        });
    }
    Ok(())
}
