//! A store whose objects are encrypted before they leave the node: frames with a key of the operator's (`frame`), which a reload
//! may replace (`keys`). It stands outside of retries, so that a part is sealed once, and inside of the trickle rate.
//!
//! Names stay as they are, and so do the store's own objects (the tier's marker, probes). Lengths are those of the sealed objects:
//! [`StoredForm::stored_bytes`] says which. Without keys it stores as given, and tells encrypted objects from damaged ones.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use serde::Deserialize;
use storaged_core::Leftovers;

use super::{
    KeyPrefix, ListPage, ObjectEntry, ObjectKey, PartBytes, PartNumber, PartState, Store,
    StoreError, StoreLimits, StoredForm, Upload, check_asked, range_within,
};
use crate::pool::Pool;

mod frame;
mod keys;

use frame::{End, FRAME_EXTRA, FrameFault, ObjectSeal, SEALED_BYTES, plain_length, sealed_under};
pub(super) use frame::{FRAME_BYTES, sealed_length};
pub use keys::{KeyId, KeyRing, KeysError, TierKeys};

/// So many bytes are sealed and opened where they are; more on the threads for arithmetic.
const AT_ONCE_BYTES: usize = 64 << 10;
/// Objects that are remembered as not encrypted; beyond them all are forgotten, which costs looking at their beginnings again.
const PLAIN_KNOWN_MAX: usize = 65_536;

/// What is done about objects that are not encrypted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlainObjects {
    /// Whoever reads one gets an error that names it: nobody without the key puts an object in the tier.
    #[default]
    Refuse,
    /// They are read, for checkpoints from before.
    Read,
}

/// A store behind encryption.
#[derive(Debug)]
pub struct Encrypted {
    inner: Arc<dyn Store>,
    sealing: Option<Sealing>,
}

/// How objects are sealed and opened.
#[derive(Debug)]
struct Sealing {
    ring: Arc<KeyRing>,
    plain: PlainObjects,
    pool: Option<Pool>,
    known_plain: Mutex<BTreeSet<ObjectKey>>,
}

impl Encrypted {
    /// With these keys, on these threads; without threads on those of the runtime that may block.
    pub fn new(
        inner: Arc<dyn Store>,
        ring: Arc<KeyRing>,
        plain: PlainObjects,
        pool: Option<Pool>,
    ) -> Self {
        let known_plain = Mutex::default();
        let sealing = Some(Sealing {
            ring,
            plain,
            pool,
            known_plain,
        });
        Self { inner, sealing }
    }

    /// Stores as given; what is encrypted is named where it is read whole.
    pub fn without_keys(inner: Arc<dyn Store>) -> Self {
        let sealing = None;
        Self { inner, sealing }
    }

    /// The store below. Without keys nothing is asked of it: what needs none would have the tier there and not there by turns.
    fn below(&self) -> Result<&dyn Store, StoreError> {
        if let Some(sealing) = &self.sealing {
            sealing.ring.get()?;
        }
        Ok(&*self.inner)
    }

    /// The size of the sealed parts.
    fn sealed_parts(&self, plain: PartBytes) -> Result<PartBytes, StoreError> {
        let frames = plain.get() / FRAME_BYTES;
        PartBytes::new(frames * SEALED_BYTES, &self.inner.limits())
    }

    /// An upload of the store below in parts of the size that they have here; none if no parts of that size are sealed.
    fn opened_upload(&self, below: &Upload) -> Option<Upload> {
        let sealed = below.part_bytes().get();
        let whole = sealed.is_multiple_of(SEALED_BYTES);
        let plain = PartBytes::new(sealed / SEALED_BYTES * FRAME_BYTES, &self.limits());
        // The frame that ends an object of whole parts is made again when the upload is completed; the caller knows of no such part.
        let below = below.without_parts_of(sealed_length(0));
        Some(below.in_parts_of(plain.ok().filter(|_| whole)?))
    }

    /// An upload as the store below knows it.
    fn sealed_upload(&self, upload: &Upload) -> Result<Upload, StoreError> {
        Ok(upload.in_parts_of(self.sealed_parts(upload.part_bytes())?))
    }

    fn forget_plain(&self, key: &ObjectKey) {
        if let Some(sealing) = &self.sealing {
            sealing.known_plain().remove(key);
        }
    }

    /// Reads frames, which may reach beyond the end of the object: the last frame is shorter than the others.
    async fn get_sealed(
        &self,
        sealing: &Sealing,
        key: &ObjectKey,
        range: &Range<u64>,
    ) -> Result<Bytes, StoreError> {
        let first = range.start / FRAME_BYTES;
        let wanted = first * SEALED_BYTES..range.end.div_ceil(FRAME_BYTES) * SEALED_BYTES;
        let sealed = match self.inner.get(key, Some(wanted.clone())).await {
            Err(StoreError::Truncated { got, .. }) => {
                let length = plain_length(got).ok_or_else(|| fault_of(key, &FrameFault::Cut))?;
                range_within(key, Some(range.clone()), length)?;
                self.inner.get(key, Some(wanted.start..got)).await?
            }
            outcome => outcome?,
        };
        let plain = sealing.open(key, first, sealed).await?;
        let from = range.start - first * FRAME_BYTES;
        let asked = from as usize..(range.end - range.start + from) as usize;
        if asked.end > plain.len() {
            return Err(fault_of(key, &FrameFault::Cut));
        }
        Ok(plain.slice(asked))
    }

    async fn get_range(
        &self,
        sealing: &Sealing,
        key: &ObjectKey,
        range: Range<u64>,
    ) -> Result<Bytes, StoreError> {
        if sealing.known_plain().contains(key) {
            return self.inner.get(key, Some(range)).await;
        }
        if range.is_empty() {
            let stored = self.inner.length(key).await?;
            range_within(key, Some(range), plain_length(stored).unwrap_or(stored))?;
            return Ok(Bytes::new());
        }
        match self.get_sealed(sealing, key, &range).await {
            Err(StoreError::Tampered { .. } | StoreError::Truncated { .. })
                if !self.is_sealed(sealing, key).await? =>
            {
                sealing.note_plain(key);
                self.inner.get(key, Some(range)).await
            }
            outcome => outcome,
        }
    }

    async fn get_whole(&self, sealing: &Sealing, key: &ObjectKey) -> Result<Bytes, StoreError> {
        let bytes = self.inner.get(key, None).await?;
        let keys = sealing.ring.get()?;
        if !sealing.is_sealed(key, &bytes, &keys)? {
            return Ok(bytes);
        }
        let (object, length) = (key.clone(), bytes.len());
        let open = move || frame::open_whole(&keys, &object, &bytes);
        let opened = sealing.compute(length, open).await?;
        opened.map_err(|fault| fault_of(key, &fault))
    }

    /// As [`Sealing::is_sealed`], of an object of which the beginning is not here.
    async fn is_sealed(&self, sealing: &Sealing, key: &ObjectKey) -> Result<bool, StoreError> {
        let keys = sealing.ring.get()?;
        let beginning = match self.inner.get(key, Some(0..FRAME_EXTRA)).await {
            Err(StoreError::Truncated { .. }) => self.inner.get(key, None).await,
            outcome => outcome,
        };
        sealing.is_sealed(key, &beginning?, &keys)
    }

    /// Whether the object that is there was made of these bytes, perhaps with an older key or none.
    async fn holds(&self, key: &ObjectKey, bytes: &Bytes) -> Result<bool, StoreError> {
        match self.get(key, None).await {
            Ok(there) => Ok(there == bytes),
            Err(
                StoreError::NotFound { .. }
                | StoreError::Tampered { .. }
                | StoreError::Locked { .. }
                | StoreError::NewerForm { .. }
                | StoreError::Unsealed { .. },
            ) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Sealing {
    fn known_plain(&self) -> std::sync::MutexGuard<'_, BTreeSet<ObjectKey>> {
        // No call leaves the set half-changed.
        self.known_plain
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn note_plain(&self, key: &ObjectKey) {
        let mut known = self.known_plain();
        if known.len() >= PLAIN_KNOWN_MAX {
            known.clear();
        }
        known.insert(key.clone());
    }

    /// Whether an object that begins with these bytes was sealed. If not, it may be read as it is.
    ///
    /// # Errors
    /// Where plain objects are refused: for a plain one that, for one that is shorter than any sealed one that it was cut. Which of
    /// the two a short one was nobody can tell; every manifest and every shard of before encryption is longer.
    fn is_sealed(
        &self,
        key: &ObjectKey,
        beginning: &[u8],
        keys: &TierKeys,
    ) -> Result<bool, StoreError> {
        match self.plain {
            _ if sealed_under(beginning, Some(keys)).is_some() => Ok(true),
            PlainObjects::Read => Ok(false),
            PlainObjects::Refuse if (beginning.len() as u64) < FRAME_EXTRA => {
                let got = beginning.len();
                let what = format!("expected at least {FRAME_EXTRA} bytes, got {got}");
                let key = key.clone();
                Err(StoreError::Tampered { key, what })
            }
            PlainObjects::Refuse => Err(StoreError::Unsealed { key: key.clone() }),
        }
    }

    /// Bytes that begin with this frame, sealed with the newest key.
    async fn seal(
        &self,
        key: &ObjectKey,
        first: u64,
        bytes: Bytes,
        end: End,
    ) -> Result<Bytes, StoreError> {
        let (keys, object) = (self.ring.get()?, key.clone());
        self.compute(bytes.len(), move || {
            ObjectSeal::new(keys.newest(), &object).seal(first, &bytes, end)
        })
        .await
    }

    /// A part of an upload. One that is shorter than the others is the last.
    async fn seal_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<Bytes, StoreError> {
        let each = upload.part_bytes().get();
        let first = u64::from(part.0) * (each / FRAME_BYTES);
        let end = if bytes.len() as u64 == each {
            End::Later
        } else {
            End::Here
        };
        self.seal(upload.key(), first, bytes, end).await
    }

    async fn open(&self, key: &ObjectKey, first: u64, sealed: Bytes) -> Result<Bytes, StoreError> {
        let (keys, object) = (self.ring.get()?, key.clone());
        let open = move || frame::open(&keys, &object, first, &sealed);
        let opened = self.compute(AT_ONCE_BYTES + 1, open).await?;
        opened.map_err(|fault| fault_of(key, &fault))
    }

    /// Does work on so many bytes.
    async fn compute<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let ended = |what: String| StoreError::Unavailable {
            what: "encryption".into(),
            source: what.into(),
        };
        match &self.pool {
            _ if bytes <= AT_ONCE_BYTES => Ok(work()),
            Some(pool) => (pool.compute(work).await).map_err(|error| ended(error.to_string())),
            None => {
                let done = tokio::task::spawn_blocking(work).await;
                done.map_err(|error| ended(error.to_string()))
            }
        }
    }
}

fn locked(key: &ObjectKey, id: KeyId, has: &str) -> StoreError {
    StoreError::Locked {
        key: key.clone(),
        what: format!("it is encrypted with key {id}, and this node has {has}"),
    }
}

fn fault_of(key: &ObjectKey, fault: &FrameFault) -> StoreError {
    let tampered = |what: String| StoreError::Tampered {
        key: key.clone(),
        what,
    };
    match fault {
        FrameFault::Version(got) => StoreError::NewerForm {
            key: key.clone(),
            got: *got,
        },
        FrameFault::Locked(id) => locked(key, *id, "other keys"),
        FrameFault::Tampered(index) => tampered(format!(
            "frame {index} is not what was encrypted at this place"
        )),
        FrameFault::Cut => tampered("its end is not the one that was encrypted".into()),
    }
}

#[async_trait]
impl Store for Encrypted {
    fn limits(&self) -> StoreLimits {
        let inner = self.inner.limits();
        match &self.sealing {
            None => inner,
            Some(_) => StoreLimits {
                part_bytes_min: inner.part_bytes_min.next_multiple_of(FRAME_BYTES),
                part_bytes_max: inner.part_bytes_max / SEALED_BYTES * FRAME_BYTES,
                // The end of an object that is a whole number of parts is one more.
                parts_max: inner.parts_max - 1,
                form: StoredForm::Encrypted,
            },
        }
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        let below = self.below()?;
        if self.sealing.is_none() {
            return below.begin(key, part_bytes).await;
        }
        let upload = below.begin(key, self.sealed_parts(part_bytes)?).await;
        Ok(upload?.in_parts_of(part_bytes))
    }

    async fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError> {
        let below = self.below()?;
        if self.sealing.is_none() {
            return below.resume(key, part_bytes).await;
        }
        let found = below.resume(key, self.sealed_parts(part_bytes)?).await?;
        Ok(found.and_then(|upload| self.opened_upload(&upload)))
    }

    async fn resume_or_begin(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
        leftovers: Leftovers,
    ) -> Result<Upload, StoreError> {
        let below = self.below()?;
        if self.sealing.is_none() {
            return below.resume_or_begin(key, part_bytes, leftovers).await;
        }
        let sealed = self.sealed_parts(part_bytes)?;
        let upload = below.resume_or_begin(key, sealed, leftovers).await?;
        match self.opened_upload(&upload) {
            Some(upload) => Ok(upload),
            // It was left from before encryption.
            None => self.begin(key, part_bytes).await,
        }
    }

    async fn has_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: &Bytes,
    ) -> Result<bool, StoreError> {
        let Some(there) = upload.done().get(&part) else {
            return Ok(false);
        };
        match &self.sealing {
            None => Ok(there.matches(bytes)),
            Some(sealing) => {
                let sealed = sealing.seal_part(upload, part, bytes.clone()).await?;
                Ok(there.matches(&sealed))
            }
        }
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        let Some(sealing) = &self.sealing else {
            return self.inner.put_part(upload, part, bytes).await;
        };
        upload.check_part(part, &bytes, &self.limits())?;
        let sealed = sealing.seal_part(upload, part, bytes).await?;
        let upload = self.sealed_upload(&upload.without_parts())?;
        self.inner.put_part(&upload, part, sealed).await
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        let Some(sealing) = &self.sealing else {
            return self.inner.complete(upload, length).await;
        };
        let (key, each) = (upload.key(), upload.part_bytes().get());
        let mut sealed = self.sealed_upload(upload)?;
        if length > 0 && length.is_multiple_of(each) {
            let part = PartNumber(u32::try_from(length / each).unwrap_or(u32::MAX));
            let end = Bytes::new();
            let end = (sealing.seal(key, length / FRAME_BYTES, end, End::Here)).await?;
            let bare = sealed.without_parts();
            match self.inner.put_part(&bare, part, end).await {
                Ok(state) => sealed.note(part, state),
                // An earlier call may have done it, and its answer was lost.
                Err(StoreError::NoUpload { .. })
                    if self.inner.length(key).await.ok() == Some(sealed_length(length)) =>
                {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        self.inner.complete(&sealed, sealed_length(length)).await?;
        self.forget_plain(key);
        Ok(())
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        self.inner.abort(upload).await
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        self.below()?.unfinished(under).await
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        let Some(sealing) = &self.sealing else {
            return self.inner.put_new(key, bytes).await;
        };
        let sealed = sealing.seal(key, 0, bytes.clone(), End::Here).await?;
        match self.inner.put_new(key, sealed).await {
            Err(StoreError::AlreadyExists { .. }) if self.holds(key, &bytes).await? => Ok(()),
            outcome => {
                self.forget_plain(key);
                outcome
            }
        }
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        check_asked(key, range.as_ref())?;
        let below = self.below()?;
        match (&self.sealing, range) {
            (Some(sealing), Some(range)) => self.get_range(sealing, key, range).await,
            (Some(sealing), None) => self.get_whole(sealing, key).await,
            (None, Some(range)) => below.get(key, Some(range)).await,
            (None, None) => {
                let bytes = below.get(key, None).await?;
                match sealed_under(&bytes, None) {
                    None => Ok(bytes),
                    Some(id) => Err(locked(key, id, "none (trickle.encryption)")),
                }
            }
        }
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        self.below()?.length(key).await
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        self.below()?.list(under).await
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        self.below()?.list_page(under, after, limit).await
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        self.below()?.list_folders(under).await
    }

    async fn check_place(&self) -> Result<(), StoreError> {
        self.below()?.check_place().await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.inner.delete(key).await?;
        self.forget_plain(key);
        Ok(())
    }
}
