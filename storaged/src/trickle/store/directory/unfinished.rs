//! Uploads: a folder each, found again after a restart, made visible by one rename.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::sync::PoisonError;

use bytes::Bytes;
use rustix::fs::FileType;

use super::beneath::{Beneath, FileFault, OpenFor, join};
use super::files::{PlaceError, reserved};
use super::io_choice::refuses_direct;
use super::journal::{self, JOURNAL_BYTES_MAX, Journal};
use super::{Inner, LIMITS};
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

/// The folder of an upload.
fn folder_of(upload: &Upload) -> String {
    join(&reserved("uploads"), &upload.id().0)
}

impl Inner {
    pub(super) fn begin(&self, key: &ObjectKey, part: PartBytes) -> Result<Upload, StoreError> {
        let beneath = self.beneath()?;
        for folder in self.folders_of(key)? {
            self.remove_folder(&beneath, &folder)?;
        }
        let id = UploadId(format!("{}-{}", folder_stem(key), self.fresh_name()));
        let upload = Upload::new(key.clone(), id, part);
        let folder = folder_of(&upload);
        self.make_folder(&beneath, &folder)?;
        let data = join(&folder, DATA);
        let created = beneath.file(&data, OpenFor::Create);
        created.map_err(|fault| self.failed("create", &data, fault))?;
        let journal = join(&folder, JOURNAL);
        let file = beneath.file(&journal, OpenFor::Create);
        let mut file = file.map_err(|fault| self.failed("create", &journal, fault))?;
        let written = journal::write_header(&mut file, key, part.get());
        written
            .and_then(|()| file.sync_all())
            .map_err(|error| self.failed("write", &journal, error))?;
        let synced = beneath.sync_folder(&folder);
        synced.map_err(|fault| self.failed("sync folder", &folder, fault))?;
        Ok(upload)
    }

    pub(super) fn resume(&self, key: &ObjectKey) -> Result<Option<Upload>, StoreError> {
        let beneath = self.beneath()?;
        for folder in self.folders_of(key)? {
            let Some(journal) = self.read_journal(&beneath, &folder)? else {
                continue;
            };
            // Without data the upload was completed, and only its folder outlived a crash.
            let Ok(data) = beneath.length(&join(&folder, DATA)) else {
                continue;
            };
            let Ok(part_bytes) = PartBytes::new(journal.part_bytes, &LIMITS) else {
                continue;
            };
            if journal.key != *key {
                continue;
            }
            let name = folder.rsplit('/').next().unwrap_or_default();
            let mut upload = Upload::new(key.clone(), UploadId(name.to_owned()), part_bytes);
            for (part, state) in journal.parts {
                let end = u64::from(part.0).saturating_mul(part_bytes.get());
                // A journal that claims more than the file has is not believed.
                if end.saturating_add(state.length) <= data {
                    upload.note(part, state);
                }
            }
            return Ok(Some(upload));
        }
        Ok(None)
    }

    pub(super) fn open_data(&self, upload: &Upload) -> Result<File, StoreError> {
        let name = join(&folder_of(upload), DATA);
        let file = self.beneath()?.file(&name, OpenFor::Write);
        file.map_err(|fault| self.of_upload("open", upload, &name, fault))
    }

    /// The same, past the page cache; none where the file system does not let files be opened so.
    pub(super) fn open_direct(&self, upload: &Upload) -> Result<Option<File>, StoreError> {
        if !self.direct.is_tried() {
            return Ok(None);
        }
        let name = join(&folder_of(upload), DATA);
        match self.beneath()?.file(&name, OpenFor::WriteDirect) {
            Ok(file) => Ok(Some(file)),
            Err(fault) if refuses_direct(fault.kind()) => {
                self.direct.give_up(&self.root);
                Ok(None)
            }
            Err(fault) => Err(self.of_upload("open", upload, &name, fault)),
        }
    }

    fn of_upload(
        &self,
        verb: &str,
        upload: &Upload,
        name: &str,
        fault: impl Into<FileFault>,
    ) -> StoreError {
        let fault = fault.into();
        match fault.kind() {
            ErrorKind::NotFound => no_upload(upload),
            _ => self.failed(verb, name, fault),
        }
    }

    pub(super) fn note_part(
        &self,
        upload: &Upload,
        part: PartNumber,
        bytes: &Bytes,
    ) -> Result<PartState, StoreError> {
        let state = PartState::of(bytes);
        let name = join(&folder_of(upload), JOURNAL);
        let beneath = self.beneath()?;
        let _order = self
            .journal_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let file = beneath.file(&name, OpenFor::Append);
        let mut file = file.map_err(|fault| self.of_upload("open", upload, &name, fault))?;
        let written = journal::write_part(&mut file, part, &state);
        written.map_err(|error| self.of_upload("write", upload, &name, error))?;
        Ok(state)
    }

    pub(super) fn complete(&self, upload: &Upload, length: u64) -> Result<(), StoreError> {
        let beneath = self.beneath()?;
        let folder = folder_of(upload);
        let data = join(&folder, DATA);
        let file = match self.open_data(upload) {
            Ok(file) => file,
            // An earlier call may have done it, and its answer was lost.
            Err(StoreError::NoUpload { .. }) if self.length(upload.key()).ok() == Some(length) => {
                return self.remove_folder(&beneath, &folder);
            }
            Err(error) => return Err(error),
        };
        let got = file
            .metadata()
            .map_err(|error| self.failed("look at", &data, error))?
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
            .map_err(|error| self.failed("sync", &data, error))?;
        match self.place(&beneath, upload.key(), |to| beneath.rename(&data, to)) {
            Ok(()) => self.remove_folder(&beneath, &folder),
            Err(PlaceError::Store(error)) => Err(error),
            Err(PlaceError::Taken) => Err(StoreError::Invalid {
                what: format!("key {}", upload.key()),
                expected: "a name for an object".into(),
                got: "a folder of that name".into(),
            }),
        }
    }

    pub(super) fn abort(&self, upload: &Upload) -> Result<(), StoreError> {
        self.remove_folder(&self.beneath()?, &folder_of(upload))
    }

    pub(super) fn unfinished(&self, under: &KeyPrefix) -> Result<Vec<ObjectKey>, StoreError> {
        let beneath = self.beneath()?;
        let mut keys = Vec::new();
        for folder in self.upload_folders("")? {
            let journal = self.read_journal(&beneath, &folder)?;
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

    fn folders_of(&self, key: &ObjectKey) -> Result<Vec<String>, StoreError> {
        self.upload_folders(&folder_stem(key))
    }

    /// Folders of uploads, as names; none in a read-only place where there never was one.
    fn upload_folders(&self, stem: &str) -> Result<Vec<String>, StoreError> {
        let uploads = reserved("uploads");
        let found = self.entries(&uploads)?.into_iter();
        let found =
            found.filter(|entry| entry.kind == FileType::Directory && entry.name.starts_with(stem));
        let mut folders: Vec<String> = found.map(|entry| join(&uploads, &entry.name)).collect();
        folders.sort();
        Ok(folders)
    }

    /// Reads the journal in an upload's folder; none if there is none that can be believed.
    fn read_journal(&self, beneath: &Beneath, folder: &str) -> Result<Option<Journal>, StoreError> {
        let name = join(folder, JOURNAL);
        let file = match beneath.file(&name, OpenFor::Read) {
            Ok(file) => file,
            Err(fault) if fault.kind() == ErrorKind::NotFound => return Ok(None),
            Err(fault) => return Err(self.failed("open", &name, fault)),
        };
        let mut bytes = Vec::new();
        let read = file.take(JOURNAL_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(|error| self.failed("read", &name, error))?;
        Ok(journal::read(&bytes))
    }

    fn remove_folder(&self, beneath: &Beneath, folder: &str) -> Result<(), StoreError> {
        let removed = beneath.remove_folder(folder);
        removed.map_err(|fault| self.failed("remove", folder, fault))
    }
}
