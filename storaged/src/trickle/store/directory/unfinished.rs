//! Uploads: a folder each, found again after a restart, made visible by one rename.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use bytes::Bytes;

use super::Inner;
use super::files::{PlaceError, create_new, failed, make_folder, sync_folder};
use super::journal::{self, JOURNAL_BYTES_MAX, Journal};
use crate::trickle::store::{
    KeyPrefix, ObjectKey, PartBytes, PartNumber, PartState, StoreError, Upload, UploadId,
};

const DATA: &str = "data";
const JOURNAL: &str = "journal";

/// What the names of a key's upload folders start with; a hash, since keys have slashes.
fn folder_stem(key: &ObjectKey) -> String {
    blake3::hash(key.as_str().as_bytes()).to_hex()[..32].to_string()
}

fn no_upload(upload: &Upload) -> StoreError {
    StoreError::NoUpload {
        key: upload.key().clone(),
        upload: upload.id().to_string(),
    }
}

impl Inner {
    fn folder(&self, upload: &Upload) -> PathBuf {
        self.reserved("uploads").join(&upload.id().0)
    }

    pub(super) fn begin(&self, key: &ObjectKey, part: PartBytes) -> Result<Upload, StoreError> {
        for folder in self.folders_of(key)? {
            remove_folder(&folder)?;
        }
        let id = UploadId(format!("{}-{}", folder_stem(key), self.fresh_name()));
        let upload = Upload::new(key.clone(), id, part);
        let folder = self.folder(&upload);
        make_folder(&folder)?;
        let data = folder.join(DATA);
        create_new(&data).map_err(|error| failed("create", &data, error))?;
        let path = folder.join(JOURNAL);
        let mut file = create_new(&path).map_err(|error| failed("create", &path, error))?;
        let written = journal::write_header(&mut file, key, part.get());
        written
            .and_then(|()| file.sync_all())
            .map_err(|error| failed("write", &path, error))?;
        sync_folder(&folder)?;
        Ok(upload)
    }

    pub(super) fn resume(
        &self,
        key: &ObjectKey,
        part_bytes: PartBytes,
    ) -> Result<Option<Upload>, StoreError> {
        for folder in self.folders_of(key)? {
            let Some(journal) = read_journal(&folder)? else {
                continue;
            };
            // Without data the upload was completed, and only its folder outlived a crash.
            let Ok(data) = fs::metadata(folder.join(DATA)) else {
                continue;
            };
            if journal.key != *key || journal.part_bytes != part_bytes.get() {
                continue;
            }
            let Some(name) = folder.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            let mut upload = Upload::new(key.clone(), UploadId(name.to_owned()), part_bytes);
            for (part, state) in journal.parts {
                let end = u64::from(part.0).saturating_mul(part_bytes.get());
                // A journal that claims more than the file has is not believed.
                if end.saturating_add(state.length) <= data.len() {
                    upload.note(part, state);
                }
            }
            return Ok(Some(upload));
        }
        Ok(None)
    }

    pub(super) fn open_data(&self, upload: &Upload) -> Result<File, StoreError> {
        let path = self.folder(upload).join(DATA);
        OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => no_upload(upload),
                _ => failed("open", &path, error),
            })
    }

    pub(super) fn note_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: &Bytes,
    ) -> Result<PartState, StoreError> {
        let state = PartState::of(bytes);
        let path = self.folder(upload).join(JOURNAL);
        let _order = self
            .journal_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let file = OpenOptions::new().append(true).open(&path);
        let written = file.and_then(|mut file| journal::write_part(&mut file, part, &state));
        written.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => no_upload(upload),
            _ => failed("write", &path, error),
        })?;
        Ok(state)
    }

    pub(super) fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        let folder = self.folder(upload);
        let data = folder.join(DATA);
        let file = match self.open_data(upload) {
            Ok(file) => file,
            // An earlier call may have done it, and its answer was lost.
            Err(StoreError::NoUpload { .. }) if self.length(upload.key()).ok() == Some(length) => {
                return remove_folder(&folder);
            }
            Err(error) => return Err(error),
        };
        let got = file
            .metadata()
            .map_err(|error| failed("look at", &data, error))?
            .len();
        if got != length {
            let key = upload.key().clone();
            return Err(StoreError::Truncated {
                key,
                expected: length,
                got,
            });
        }
        file.sync_all()
            .map_err(|error| failed("sync", &data, error))?;
        match self.place(upload.key(), |to| fs::rename(&data, to)) {
            Ok(()) => remove_folder(&folder),
            Err(PlaceError::Store(error)) => Err(error),
            Err(PlaceError::Taken) => Err(StoreError::Invalid {
                what: format!("key {}", upload.key()),
                expected: "a name for an object".into(),
                got: "a folder of that name".into(),
            }),
        }
    }

    pub(super) fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        remove_folder(&self.folder(upload))
    }

    pub(super) fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        let mut keys = Vec::new();
        for folder in self.upload_folders("")? {
            let journal = read_journal(&folder)?;
            keys.extend(
                journal
                    .map(|journal| journal.key)
                    .filter(|key| under.covers(key)),
            );
        }
        keys.sort();
        keys.dedup();
        Ok(keys)
    }

    fn folders_of(&self, key: &ObjectKey) -> Result<Vec<PathBuf>, StoreError> {
        self.upload_folders(&folder_stem(key))
    }

    fn upload_folders(&self, stem: &str) -> Result<Vec<PathBuf>, StoreError> {
        let uploads = self.reserved("uploads");
        let names = match fs::read_dir(&uploads) {
            Ok(names) => names,
            // A read-only place where the folder was never made.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(failed("list", &uploads, error)),
        };
        let mut folders = Vec::new();
        for entry in names {
            let entry = entry.map_err(|error| failed("list", &uploads, error))?;
            if entry.file_name().to_string_lossy().starts_with(stem) {
                folders.push(entry.path());
            }
        }
        folders.sort();
        Ok(folders)
    }
}

/// Reads the journal in an upload's folder; none if there is none that can be believed.
fn read_journal(folder: &Path) -> Result<Option<Journal>, StoreError> {
    let path = folder.join(JOURNAL);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("open", &path, error)),
    };
    let mut bytes = Vec::new();
    let read = file.take(JOURNAL_BYTES_MAX).read_to_end(&mut bytes);
    read.map_err(|error| failed("read", &path, error))?;
    Ok(journal::read(&bytes))
}

fn remove_folder(folder: &Path) -> Result<(), StoreError> {
    match fs::remove_dir_all(folder) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed("remove", folder, error)),
    }
}
