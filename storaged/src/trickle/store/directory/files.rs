//! Whole objects as files: made visible at once, read exactly, listed, removed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rustix::fs::{CWD, RenameFlags};

use super::Inner;
use crate::trickle::store::key::RESERVED;
use crate::trickle::store::{
    KeyPrefix, LIST_ENTRIES_MAX, ObjectEntry, ObjectKey, StoreError, check_asked, range_within,
};

/// Owner writes, group reads, nobody else.
const FILE_MODE: u32 = 0o640;
const FOLDER_MODE: u32 = 0o750;
/// How often a rename is tried again whose folder another call removed as empty.
const PLACE_TRIES_MAX: u32 = 4;

/// The error of a file operation on a path.
pub(super) fn failed(verb: &str, path: &Path, error: io::Error) -> StoreError {
    StoreError::from_io(format!("{verb} {}", path.display()), error)
}

/// Writes all bytes at an offset and waits until they are on disk.
pub(super) fn write_durably(file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    file.write_all_at(bytes, offset)?;
    file.sync_data()
}

/// Creates a file that must not exist yet.
pub(super) fn create_new(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(FILE_MODE)
        .open(path)
}

/// Creates a folder, which may exist, and makes its name durable.
pub(super) fn make_folder(path: &Path) -> Result<(), StoreError> {
    match fs::DirBuilder::new().mode(FOLDER_MODE).create(path) {
        Ok(()) => path.parent().map_or(Ok(()), sync_folder),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(failed("create folder", path, error)),
    }
}

/// Makes the names in a folder durable.
pub(super) fn sync_folder(path: &Path) -> Result<(), StoreError> {
    let synced = File::open(path).and_then(|folder| folder.sync_all());
    synced.map_err(|error| failed("sync folder", path, error))
}

impl Inner {
    pub(super) fn reserved(&self, name: &str) -> PathBuf {
        self.root.join(RESERVED).join(name)
    }

    /// Makes the folders for unfinished work. The root itself must exist: a mount that is missing
    /// must not turn into files on the disk below it.
    pub(super) fn prepare(&self) -> Result<(), StoreError> {
        if !self.root.is_dir() {
            return Err(StoreError::NotMounted {
                what: format!(
                    "expected an existing directory (is the file system mounted?), got {}",
                    self.root.display()
                ),
            });
        }
        make_folder(&self.root.join(RESERVED))?;
        make_folder(&self.reserved("uploads"))?;
        make_folder(&self.reserved("tmp"))
    }

    pub(super) fn path(&self, key: &ObjectKey) -> PathBuf {
        self.root.join(key.as_str())
    }

    pub(super) fn fresh_name(&self) -> String {
        format!(
            "{:016x}{:016x}",
            self.randomness.next_u64(),
            self.randomness.next_u64()
        )
    }

    pub(super) fn put_new(&self, key: &ObjectKey, bytes: &Bytes) -> Result<(), StoreError> {
        let temporary = self.reserved("tmp").join(self.fresh_name());
        let placed = self.put_new_from(&temporary, key, bytes);
        // After a link the object has its own name; after a failure nobody wants the bytes.
        let removed = fs::remove_file(&temporary);
        match (placed, removed) {
            (Err(error), _) => Err(error),
            (Ok(()), Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", &temporary, error))
            }
            (Ok(()), _) => Ok(()),
        }
    }

    fn put_new_from(&self, from: &Path, key: &ObjectKey, bytes: &Bytes) -> Result<(), StoreError> {
        let mut file = create_new(from).map_err(|error| failed("create", from, error))?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|error| failed("write", from, error))?;
        match self.place(key, |to| link_new(from, to)) {
            Err(PlaceError::Taken) if self.holds(key, bytes)? => Ok(()),
            Err(PlaceError::Taken) => Err(StoreError::AlreadyExists { key: key.clone() }),
            Err(PlaceError::Store(error)) => Err(error),
            Ok(()) => Ok(()),
        }
    }

    /// Whether the object that is there has exactly these bytes.
    fn holds(&self, key: &ObjectKey, bytes: &Bytes) -> Result<bool, StoreError> {
        let path = self.path(key);
        let length = fs::metadata(&path)
            .map_err(|error| failed("look at", &path, error))?
            .len();
        Ok(length == bytes.len() as u64 && self.get(key, None)? == *bytes)
    }

    /// Gives a finished file its visible name by `name_it` and makes the name durable.
    pub(super) fn place(
        &self,
        key: &ObjectKey,
        name_it: impl Fn(&Path) -> io::Result<()>,
    ) -> Result<(), PlaceError> {
        let to = self.path(key);
        let mut tries = 0;
        loop {
            self.make_folders_of(key)?;
            tries += 1;
            match name_it(&to) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(PlaceError::Taken);
                }
                // A delete may just have removed the folder as empty.
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound && tries < PLACE_TRIES_MAX => {}
                Err(error) => return Err(failed("name", &to, error).into()),
            }
        }
        Ok(sync_folder(to.parent().unwrap_or(&self.root))?)
    }

    fn make_folders_of(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let mut folder = self.root.clone();
        let Some((folders, _)) = key.as_str().rsplit_once('/') else {
            return Ok(());
        };
        for segment in folders.split('/') {
            folder.push(segment);
            if !folder.is_dir() {
                make_folder(&folder)?;
            }
        }
        Ok(())
    }

    pub(super) fn get(
        &self,
        key: &ObjectKey,
        range: Option<Range<u64>>,
    ) -> Result<Bytes, StoreError> {
        check_asked(key, range.as_ref())?;
        let path = self.path(key);
        let file = File::open(&path).map_err(|error| failed("open", &path, error))?;
        let metadata = file
            .metadata()
            .map_err(|error| failed("look at", &path, error))?;
        if !metadata.is_file() {
            return Err(StoreError::NotFound {
                what: path.display().to_string(),
            });
        }
        let range = range_within(key, range, metadata.len())?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        match file.read_exact_at(&mut bytes, range.start) {
            Ok(()) => Ok(bytes.into()),
            // Somebody cut the file after its length was read.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let got = file.metadata().map_or(0, |metadata| metadata.len());
                Err(StoreError::Truncated {
                    key: key.clone(),
                    expected: range.end,
                    got,
                })
            }
            Err(error) => Err(failed("read", &path, error)),
        }
    }

    pub(super) fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let path = self.path(key);
        let metadata = fs::metadata(&path).map_err(|error| failed("look at", &path, error))?;
        if !metadata.is_file() {
            return Err(StoreError::NotFound {
                what: path.display().to_string(),
            });
        }
        Ok(metadata.len())
    }

    pub(super) fn list(&self, under: &KeyPrefix) -> Result<Vec<ObjectEntry>, StoreError> {
        let mut entries = Vec::new();
        let mut folders = vec![
            under
                .as_folder()
                .map(ToString::to_string)
                .unwrap_or_default(),
        ];
        while let Some(folder) = folders.pop() {
            let path = self.root.join(&folder);
            let names = match fs::read_dir(&path) {
                Ok(names) => names,
                // A folder that was never made or was just removed holds no object.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                    ) =>
                {
                    continue;
                }
                Err(error) => return Err(failed("list", &path, error)),
            };
            for entry in names {
                let entry = entry.map_err(|error| failed("list", &path, error))?;
                visit(&folder, &entry, &mut folders, &mut entries)?;
            }
        }
        entries.sort();
        Ok(entries)
    }

    pub(super) fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let path = self.path(key);
        match fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed("remove", &path, error)),
        }
        // Folders that became empty go too; removing one that is not empty fails, as it should.
        let folders = path
            .ancestors()
            .skip(1)
            .take_while(|folder| *folder != self.root);
        for folder in folders {
            if fs::remove_dir(folder).is_err() {
                break;
            }
        }
        Ok(())
    }
}

/// Notes one directory entry: a folder to visit or an object. Names that are no keys are not ours.
fn visit(
    folder: &str,
    entry: &fs::DirEntry,
    folders: &mut Vec<String>,
    entries: &mut Vec<ObjectEntry>,
) -> Result<(), StoreError> {
    let Ok(name) = entry.file_name().into_string() else {
        return Ok(());
    };
    let full = if folder.is_empty() {
        name
    } else {
        format!("{folder}/{name}")
    };
    let Ok(key) = full.parse::<ObjectKey>() else {
        return Ok(());
    };
    // An entry that vanished meanwhile is no error and no object.
    let Ok(metadata) = entry.metadata() else {
        return Ok(());
    };
    if metadata.is_dir() {
        folders.push(full);
    } else if metadata.is_file() {
        entries.push(ObjectEntry {
            key,
            length: metadata.len(),
        });
    }
    if entries.len() > LIST_ENTRIES_MAX {
        return Err(StoreError::Invalid {
            what: "listing".into(),
            expected: format!("at most {LIST_ENTRIES_MAX} objects (list a folder of it)"),
            got: "more".into(),
        });
    }
    Ok(())
}

/// Gives a file a second, new name. Where hard links do not exist, it is renamed without replacing.
fn link_new(from: &Path, to: &Path) -> io::Result<()> {
    match fs::hard_link(from, to) {
        Err(error) if links_unsupported(&error) => Ok(rustix::fs::renameat_with(
            CWD,
            from,
            CWD,
            to,
            RenameFlags::NOREPLACE,
        )?),
        linked => linked,
    }
}

fn links_unsupported(error: &io::Error) -> bool {
    // Linux says EPERM for a file system without hard links.
    matches!(
        error.kind(),
        io::ErrorKind::Unsupported | io::ErrorKind::PermissionDenied
    )
}

/// Why a file did not get its visible name.
pub(super) enum PlaceError {
    Taken,
    Store(StoreError),
}

impl From<StoreError> for PlaceError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
