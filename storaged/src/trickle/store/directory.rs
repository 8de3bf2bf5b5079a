//! A directory as durable tier: Lustre, NFS, FSx, local disks. An object is written under a hidden name beside its
//! own, synchronized, and renamed into place; a journal beside it says which parts are there, so that a write can
//! go on after a restart.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use bytes::Bytes;

use super::{ObjectKey, PartTag, Store, StoreError, Upload};

/// Objects are readable by the daemon's group, as tools that archive them want.
const FILE_MODE: u32 = 0o640;

/// Objects as files below a root.
#[derive(Debug, Clone)]
pub struct Directory {
    root: PathBuf,
}

fn failed(key: &ObjectKey, error: &io::Error) -> StoreError {
    let key = key.to_string();
    match error.kind() {
        io::ErrorKind::NotFound => StoreError::NotFound { key },
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreError::Full { key },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            StoreError::Denied { key, reason: error.to_string() }
        }
        _ => StoreError::Unavailable { key, reason: error.to_string() },
    }
}

impl Directory {
    /// Opens a directory, making it if it is not there.
    ///
    /// # Errors
    /// [`StoreError`] if it cannot be made.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(root).map_err(|error| StoreError::Invalid {
            what: format!("the durable directory {} ({error})", root.display()),
        })?;
        Ok(Self { root: root.into() })
    }

    fn path(&self, key: &ObjectKey) -> PathBuf {
        self.root.join(key.as_str())
    }

    /// Runs file work on a blocking thread.
    async fn on_thread<T: Send + 'static>(
        &self,
        key: &ObjectKey,
        work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let this = self.clone();
        match tokio::task::spawn_blocking(move || work(&this)).await {
            Ok(outcome) => outcome.map_err(|error| failed(key, &error)),
            Err(error) => Err(StoreError::Unavailable { key: key.to_string(), reason: error.to_string() }),
        }
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{suffix}"))
}

fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

fn open_for_write(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).mode(FILE_MODE).open(path)
}

/// Journal lines are `part bytes`; a torn last line says nothing.
fn read_journal(path: &Path) -> io::Result<BTreeMap<u32, PartTag>> {
    let text = match fs::read_to_string(beside(path, "journal")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        outcome => outcome?,
    };
    let whole = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    let parse = |line: &str| {
        let (part, bytes) = line.split_once(' ')?;
        Some((part.parse().ok()?, PartTag { bytes: bytes.parse().ok()?, tag: String::new() }))
    };
    Ok(whole.lines().filter_map(parse).collect())
}

#[async_trait]
impl Store for Directory {
    async fn begin(&self, key: &ObjectKey) -> Result<Upload, StoreError> {
        let path = self.path(key);
        let done = self.on_thread(key, move |_| {
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            open_for_write(&beside(&path, "partial"))?;
            read_journal(&path)
        });
        let done = done.await?;
        Ok(Upload { key: key.clone(), id: String::new(), done })
    }

    async fn put_part(&self, upload: &mut Upload, number: u32, part_bytes: u64, bytes: Bytes) -> Result<(), StoreError> {
        let path = self.path(&upload.key);
        let length = bytes.len() as u64;
        let work = move |_: &Self| {
            let file = open_for_write(&beside(&path, "partial"))?;
            file.write_all_at(&bytes, u64::from(number) * part_bytes)?;
            file.sync_data()?;
            let mut journal = OpenOptions::new()
                .create(true)
                .append(true)
                .mode(FILE_MODE)
                .open(beside(&path, "journal"))?;
            journal.write_all(format!("{number} {length}\n").as_bytes())
        };
        self.on_thread(&upload.key, work).await?;
        upload.done.insert(number, PartTag { bytes: length, tag: String::new() });
        Ok(())
    }

    async fn complete(&self, upload: Upload, parts: u32, length: u64) -> Result<(), StoreError> {
        check_parts(&upload, parts, length)?;
        let path = self.path(&upload.key);
        let work = move |_: &Self| {
            let partial = beside(&path, "partial");
            let file = open_for_write(&partial)?;
            file.set_len(length)?;
            file.sync_all()?;
            fs::rename(&partial, &path)?;
            sync_parent(&path)?;
            match fs::remove_file(beside(&path, "journal")) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            }
        };
        self.on_thread(&upload.key, work).await
    }

    async fn put_new(&self, key: &ObjectKey, bytes: Bytes) -> Result<(), StoreError> {
        let path = self.path(key);
        let content = bytes.clone();
        let work = move |_: &Self| {
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            let temporary = beside(&path, &format!("new-{:016x}", rand::random::<u64>()));
            let mut file = OpenOptions::new().create_new(true).write(true).mode(FILE_MODE).open(&temporary)?;
            let written = file.write_all(&bytes).and_then(|()| file.sync_all());
            // A hard link is made only if the name is free: the atomic "create if absent" of every file system.
            let linked = written.and_then(|()| fs::hard_link(&temporary, &path));
            fs::remove_file(&temporary)?;
            match linked {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
                Err(error) => Err(error),
                Ok(()) => sync_parent(&path).map(|()| true),
            }
        };
        if self.on_thread(key, work).await? {
            return Ok(());
        }
        match self.get(key, None).await? == content {
            true => Ok(()),
            false => Err(StoreError::AlreadyExists { key: key.to_string() }),
        }
    }

    async fn get(&self, key: &ObjectKey, range: Option<Range<u64>>) -> Result<Bytes, StoreError> {
        let path = self.path(key);
        let work = move |_: &Self| {
            let file = File::open(&path)?;
            let length = file.metadata()?.len();
            let range = range.unwrap_or(0..length);
            if range.end > length {
                return Ok(Err((range.end, length)));
            }
            let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(0)];
            file.read_exact_at(&mut bytes, range.start)?;
            Ok(Ok(Bytes::from(bytes)))
        };
        let outcome = self.on_thread(key, work).await?;
        outcome.map_err(|(expected, got)| StoreError::Truncated { key: key.to_string(), expected, got })
    }

    async fn length(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError> {
        let path = self.path(key);
        let work = move |_: &Self| match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            outcome => outcome.map(|metadata| Some(metadata.len())),
        };
        self.on_thread(key, work).await
    }

    async fn folders(&self, key: &ObjectKey) -> Result<Vec<String>, StoreError> {
        let path = self.path(key);
        let work = move |_: &Self| {
            let entries = match fs::read_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                outcome => outcome?,
            };
            let mut names = Vec::new();
            for entry in entries {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    names.push(entry.file_name().to_string_lossy().into_owned());
                }
            }
            Ok(names)
        };
        self.on_thread(key, work).await
    }

    async fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let path = self.path(key);
        let work = move |_: &Self| match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        };
        self.on_thread(key, work).await
    }

    fn part_bytes_min(&self) -> u64 {
        1
    }
}

/// All parts are there and add up.
pub(super) fn check_parts(upload: &Upload, parts: u32, length: u64) -> Result<(), StoreError> {
    let all = (0..parts).all(|part| upload.done.contains_key(&part));
    let got: u64 = upload.done.range(..parts).map(|(_, part)| part.bytes).sum();
    match all && got == length {
        true => Ok(()),
        false => Err(StoreError::Truncated { key: upload.key.to_string(), expected: length, got }),
    }
}
