//! A directory as durable tier: Lustre, NFS, FSx or a local disk.
//!
//! An object is a file of its key's name. Everything unfinished lies below `.storaged/`, on the
//! same file system, and becomes visible by one rename or link after it was synced. An upload is a
//! folder with a `data` file, written in place part by part, and a `journal` that says which parts
//! are on disk with which digest. Blocking calls run on tokio's blocking threads, a bounded number
//! at a time, so that a mount that hangs cannot take every thread of the daemon.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::Semaphore;

use super::aligned::direct_length;
use super::{
    DirectoryIo, KeyPrefix, ListPage, ObjectEntry, ObjectKey, PartBytes, PartNumber, PartState,
    Randomness, Store, StoreError, StoreLimits, StoredForm, Upload, check_small,
};

mod beneath;
mod files;
mod io_choice;
mod journal;
mod unfinished;
mod uring;
mod walk;

use beneath::Resolver;
pub use io_choice::FileIo;
use io_choice::{DirectIo, refuses_direct};

/// Blocking calls in flight at a time: enough to keep a parallel file system busy.
const BLOCKING_CALLS_MAX: usize = 16;

const LIMITS: StoreLimits = StoreLimits {
    part_bytes_min: 1,
    part_bytes_max: super::CALL_BYTES_MAX,
    parts_max: 100_000,
    form: StoredForm::Plain,
};

/// Objects as files below one directory.
#[derive(Debug, Clone)]
pub struct Directory {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    root: PathBuf,
    resolver: Resolver,
    io: FileIo,
    direct: DirectIo,
    /// A file system may take it of what is opened so, as parts are, and not of what is switched to it.
    direct_reads: DirectIo,
    randomness: Arc<dyn Randomness>,
    permits: Arc<Semaphore>,
    /// Orders the journal's lines; they are short, so one lock for all uploads does.
    journal_lock: std::sync::Mutex<()>,
}

impl Directory {
    /// Opens a store in an existing directory; the folders for unfinished work are made in it.
    pub async fn open(
        root: &Path,
        io: DirectoryIo,
        randomness: Arc<dyn Randomness>,
    ) -> Result<Self, StoreError> {
        let directory = Self::new(root, io, randomness)?;
        directory.prepare().await?;
        Ok(directory)
    }

    /// A store in a directory that need not be there yet; [`Self::prepare`] makes it ready.
    pub fn new(
        root: &Path,
        io: DirectoryIo,
        randomness: Arc<dyn Randomness>,
    ) -> Result<Self, StoreError> {
        let inner = Inner {
            root: root.to_owned(),
            resolver: Resolver::default(),
            io: FileIo::open(io.calls)?,
            direct: DirectIo::new(io.page_cache, "parts are written"),
            direct_reads: DirectIo::new(io.page_cache, "long reads go"),
            randomness,
            permits: Arc::new(Semaphore::new(BLOCKING_CALLS_MAX)),
            journal_lock: std::sync::Mutex::new(()),
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// The same without `openat2`, as on an older kernel.
    #[cfg(test)]
    pub(super) fn walking(
        root: &Path,
        randomness: Arc<dyn Randomness>,
    ) -> Result<Self, StoreError> {
        let mut directory = Self::new(root, super::FileIoConfig::Plain.into(), randomness)?;
        let inner = Arc::get_mut(&mut directory.inner).expect("nobody else has it yet");
        inner.resolver = Resolver::Walk;
        Ok(directory)
    }

    /// Makes the folders for unfinished work.
    pub async fn prepare(&self) -> Result<(), StoreError> {
        self.blocking("open", Inner::prepare).await?;
        self.inner.remove_litter_later();
        Ok(())
    }

    /// Which kind of file I/O is in use.
    pub fn file_io(&self) -> &FileIo {
        &self.inner.io
    }

    /// Runs a blocking piece of work off the async threads.
    async fn blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Inner) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let inner = Arc::clone(&self.inner);
        let gone = |cause: String| StoreError::from_io(what, io::Error::other(cause));
        let permit = Arc::clone(&inner.permits).acquire_owned().await;
        let permit = permit.map_err(|error| gone(error.to_string()))?;
        let task = tokio::task::spawn_blocking(move || {
            // The permit goes with the thread: a caller that gives up does not free a stuck thread.
            let _permit = permit;
            work(&inner)
        });
        task.await.map_err(|error| gone(error.to_string()))?
    }

    /// Writes what can go past the page cache, and says how much that was: the rest is for `write_durably`.
    async fn write_direct(
        &self,
        upload: &Upload,
        offset: u64,
        bytes: &Bytes,
    ) -> Result<io::Result<usize>, StoreError> {
        let length = direct_length(offset, bytes);
        if length == 0 {
            return Ok(Ok(0));
        }
        let wanted = upload.clone();
        let opened = self.blocking("put_part", move |inner| inner.open_direct(&wanted));
        let Some(file) = opened.await? else {
            return Ok(Ok(0));
        };
        match self
            .write_durably(file, offset, bytes.slice(..length))
            .await
        {
            // Opened, and yet not written so: larger blocks, or a file system that tells only now.
            Err(error) if refuses_direct(error.kind()) => {
                self.inner.direct.give_up(&self.inner.root);
                Ok(Ok(0))
            }
            written => Ok(written.map(|()| length)),
        }
    }

    /// Writes bytes at an offset and waits until they are on disk.
    async fn write_durably(&self, file: File, offset: u64, bytes: Bytes) -> io::Result<()> {
        match &self.inner.io {
            FileIo::Uring(uring) => uring.write_durably(file, offset, bytes).await,
            FileIo::Plain => {
                let written = self.blocking("write", move |_| {
                    Ok(files::write_durably(&file, offset, &bytes))
                });
                written.await.map_err(io::Error::other)?
            }
        }
    }
}

#[async_trait]
impl Store for Directory {
    fn limits(&self) -> StoreLimits {
        LIMITS
    }

    async fn begin(&self, key: &ObjectKey, part_bytes: PartBytes) -> Result<Upload, StoreError> {
        let key = key.clone();
        self.blocking("begin", move |inner| inner.begin(&key, part_bytes))
            .await
    }

    async fn resume(&self, key: &ObjectKey, _: PartBytes) -> Result<Option<Upload>, StoreError> {
        let key = key.clone();
        self.blocking("resume", move |inner| inner.resume(&key))
            .await
    }

    async fn put_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: Bytes,
    ) -> Result<PartState, StoreError> {
        let offset = upload.check_part(part, &bytes, &self.limits())?;
        let what = || format!("write part {part} of {}", upload.key());
        let failed = |error| StoreError::from_io(what(), error);
        let direct = self.write_direct(upload, offset, &bytes).await?;
        let written = direct.map_err(failed)?;
        if written < bytes.len() || bytes.is_empty() {
            let wanted = upload.clone();
            let file = self
                .blocking("put_part", move |inner| inner.open_data(&wanted))
                .await?;
            let (offset, rest) = (offset + written as u64, bytes.slice(written..));
            let written = self.write_durably(file, offset, rest).await;
            written.map_err(failed)?;
        }
        // Only now may the journal claim the part: it must never say more than the disk holds.
        let upload = upload.clone();
        self.blocking("put_part", move |inner| {
            inner.note_part(&upload, part, &bytes)
        })
        .await
    }

    async fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        upload.check_complete(length)?;
        let upload = upload.clone();
        self.blocking("complete", move |inner| inner.complete(&upload, length))
            .await
    }

    async fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        let upload = upload.clone();
        self.blocking("abort", move |inner| inner.abort(&upload))
            .await
    }

    async fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        let under = under.clone();
        self.blocking("unfinished", move |inner| inner.unfinished(&under))
            .await
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        check_small(key, &bytes)?;
        let key = key.clone();
        self.blocking("put_new", move |inner| inner.put_new(&key, &bytes))
            .await
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let key = key.clone();
        self.blocking("get", move |inner| inner.get(&key, range))
            .await
    }

    async fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let key = key.clone();
        self.blocking("length", move |inner| inner.length(&key))
            .await
    }

    async fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        let under = under.clone();
        self.blocking("list", move |inner| inner.list(&under)).await
    }

    async fn list_page(
        &self,
        under: &KeyPrefix,
        after: Option<&ObjectKey>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        let (under, after) = (under.clone(), after.cloned());
        self.blocking("list", move |inner| {
            inner.list_page(&under, after.as_ref(), limit)
        })
        .await
    }

    async fn list_folders(&self, under: &KeyPrefix) -> Result<Vec<String>, StoreError> {
        let under = under.clone();
        self.blocking("list", move |inner| inner.list_folders(&under))
            .await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let key = key.clone();
        self.blocking("delete", move |inner| inner.delete(&key))
            .await
    }
}
