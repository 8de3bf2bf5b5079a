//! Whole objects as files: made visible at once, read exactly, listed, removed.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rustix::fs::{FileType, OFlags};
use storaged_arena::{AlignedBytes, DIRECT_ALIGNMENT};

use super::Inner;
use super::beneath::{Beneath, FileFault, FolderEntry, OpenFor, failed, join, parent_of};
use super::io_choice::refuses_direct;
use crate::trickle::store::key::{PROBE_STEM, RESERVED};
use crate::trickle::store::{
    KeyPrefix, LIST_ENTRIES_MAX, ObjectEntry, ObjectKey, StoreError, check_asked, range_within,
};

/// How often a rename is tried again whose folder another call removed as empty.
const PLACE_TRIES_MAX: u32 = 4;

/// Shorter reads are as well served by the page cache.
const DIRECT_BYTES_MIN: u64 = 1 << 20;

/// A check of the tier, or a small object on its way, takes seconds: what is older is of a daemon that was killed. So much longer that clocks
/// which differ do not matter.
const LITTER_AFTER: Duration = Duration::from_secs(24 * 3_600);
/// Removed each time that a store is opened.
const LITTER_MAX: usize = 200;

/// Reads whole blocks while there are such, beyond the range's end too.
fn read_blocks(file: &File, range: &Range<u64>, bytes: &mut AlignedBytes) -> io::Result<()> {
    while bytes.room() > 0 {
        let read = read_once(file, range, bytes, bytes.room())?;
        if read == 0 || !read.is_multiple_of(DIRECT_ALIGNMENT) {
            break;
        }
    }
    Ok(())
}

/// Reads what a range has beyond the bytes that are there, up to the file's end.
fn read_rest(file: &File, range: &Range<u64>, mut bytes: AlignedBytes) -> io::Result<AlignedBytes> {
    let length = (range.end - range.start) as usize;
    loop {
        let missing = length.saturating_sub(bytes.as_ref().len());
        if missing == 0 || read_once(file, range, &mut bytes, missing)? == 0 {
            return Ok(bytes);
        }
    }
}

fn read_once(
    file: &File,
    range: &Range<u64>,
    bytes: &mut AlignedBytes,
    length: usize,
) -> io::Result<usize> {
    loop {
        let offset = range.start + bytes.as_ref().len() as u64;
        match bytes.read_from(file.as_fd(), offset, length) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

/// Writes all bytes at an offset and waits until they are on disk.
pub(super) fn write_durably(file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
    file.write_all_at(bytes, offset)?;
    file.sync_data()
}

/// The store's own name for something unfinished.
pub(super) fn reserved(name: &str) -> String {
    format!("{RESERVED}/{name}")
}

/// Removes what daemons that were killed have left: checks of the tier and small objects on their way. Nobody waits for any of it, so that what
/// cannot be removed stays.
fn remove_litter(beneath: &Beneath) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let before = now.unwrap_or_default().saturating_sub(LITTER_AFTER);
    let before = i64::try_from(before.as_secs()).unwrap_or(0);
    for (folder, stem) in [(RESERVED.to_owned(), PROBE_STEM), (reserved("tmp"), "")] {
        let entries = beneath.entries(&folder).unwrap_or_default();
        let is_litter = |it: &FolderEntry| {
            it.kind == FileType::RegularFile && it.name.starts_with(stem) && it.changed_at < before
        };
        for entry in entries.into_iter().filter(is_litter).take(LITTER_MAX) {
            let _ = beneath.remove_file(&join(&folder, &entry.name));
        }
    }
}

impl Inner {
    /// The root, for one call.
    pub(super) fn beneath(&self) -> Result<Beneath, StoreError> {
        Beneath::open(&self.root, self.resolver).map_err(|error| failed("open", &self.root, error))
    }

    /// The error of an operation on a name.
    pub(super) fn failed(&self, verb: &str, name: &str, fault: impl Into<FileFault>) -> StoreError {
        failed(verb, &self.root.join(name), fault)
    }

    /// Makes the folders for unfinished work. The root itself must exist: a mount that is missing
    /// must not turn into files on the disk below it.
    pub(super) fn prepare(&self) -> Result<(), StoreError> {
        let got = match fs::metadata(&self.root) {
            Ok(found) if found.is_dir() => None,
            Ok(_) => Some("something else".to_owned()),
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Some(error.to_string())
            }
            // The system says what is wrong: there is something, which does not answer as it should.
            Err(error) => return Err(failed("open", &self.root, error)),
        };
        if let Some(got) = got {
            return Err(StoreError::NotMounted {
                what: format!(
                    "expected an existing directory (is the file system mounted?) at {}, got {got}",
                    self.root.display()
                ),
            });
        }
        let beneath = self.beneath()?;
        for name in [RESERVED.to_owned(), reserved("uploads"), reserved("tmp")] {
            self.make_folder(&beneath, &name)?;
        }
        Ok(())
    }

    /// Removes litter on a thread of its own, one of this process at a time: it takes as long as the file system takes, for which nobody who opens
    /// the tier waits.
    pub(super) fn remove_litter_later(self: &Arc<Self>) {
        static IS_REMOVING: AtomicBool = AtomicBool::new(false);
        if IS_REMOVING.swap(true, Ordering::Relaxed) {
            return;
        }
        let inner = Arc::clone(self);
        let remove = move || {
            if let Ok(beneath) = inner.beneath() {
                remove_litter(&beneath);
            }
            IS_REMOVING.store(false, Ordering::Relaxed);
        };
        let thread = thread::Builder::new().name("litter".into()).spawn(remove);
        if thread.is_err() {
            IS_REMOVING.store(false, Ordering::Relaxed);
        }
    }

    pub(super) fn make_folder(&self, beneath: &Beneath, name: &str) -> Result<(), StoreError> {
        let made = beneath.make_folder(name);
        made.map_err(|fault| self.failed("create folder", name, fault))
    }

    pub(super) fn fresh_name(&self) -> String {
        format!(
            "{:016x}{:016x}",
            self.randomness.next_u64(),
            self.randomness.next_u64()
        )
    }

    pub(super) fn put_new(&self, key: &ObjectKey, bytes: &Bytes) -> Result<(), StoreError> {
        let beneath = self.beneath()?;
        let temporary = join(&reserved("tmp"), &self.fresh_name());
        let placed = self.put_new_from(&beneath, &temporary, key, bytes);
        // After a link the object has its own name; after a failure nobody wants the bytes.
        let removed = beneath.remove_file(&temporary);
        match (placed, removed) {
            (Err(error), _) => Err(error),
            (Ok(()), Err(fault)) if fault.kind() != ErrorKind::NotFound => {
                Err(self.failed("remove", &temporary, fault))
            }
            (Ok(()), _) => Ok(()),
        }
    }

    fn put_new_from(
        &self,
        beneath: &Beneath,
        from: &str,
        key: &ObjectKey,
        bytes: &Bytes,
    ) -> Result<(), StoreError> {
        let file = beneath.file(from, OpenFor::Create);
        let mut file = file.map_err(|fault| self.failed("create", from, fault))?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|error| self.failed("write", from, error))?;
        match self.place(beneath, key, |to| beneath.link_new(from, to)) {
            Err(PlaceError::Taken) if self.holds(beneath, key, bytes)? => Ok(()),
            Err(PlaceError::Taken) => Err(StoreError::AlreadyExists { key: key.clone() }),
            Err(PlaceError::Store(error)) => Err(error),
            Ok(()) => Ok(()),
        }
    }

    /// Whether the object that is there has exactly these bytes.
    fn holds(&self, beneath: &Beneath, key: &ObjectKey, bytes: &Bytes) -> Result<bool, StoreError> {
        let length = beneath.length(key.as_str());
        let length = length.map_err(|fault| self.failed("look at", key.as_str(), fault))?;
        Ok(length == bytes.len() as u64 && self.get(key, None)? == *bytes)
    }

    /// Gives a finished file its visible name by `name_it` and makes the name durable.
    pub(super) fn place(
        &self,
        beneath: &Beneath,
        key: &ObjectKey,
        name_it: impl Fn(&str) -> Result<(), FileFault>,
    ) -> Result<(), PlaceError> {
        let to = key.as_str();
        let mut tries = 0;
        loop {
            self.make_folders_of(beneath, key)?;
            tries += 1;
            match name_it(to) {
                Ok(()) => break,
                Err(fault) if fault.kind() == ErrorKind::AlreadyExists => {
                    return Err(PlaceError::Taken);
                }
                // A delete may just have removed the folder as empty.
                Err(fault) if fault.kind() == ErrorKind::NotFound && tries < PLACE_TRIES_MAX => {}
                Err(fault) => return Err(self.failed("name", to, fault).into()),
            }
        }
        let synced = beneath.sync_folder(parent_of(to));
        Ok(synced.map_err(|fault| self.failed("sync folder of", to, fault))?)
    }

    fn make_folders_of(&self, beneath: &Beneath, key: &ObjectKey) -> Result<(), StoreError> {
        let mut folder = String::new();
        for segment in parent_of(key.as_str()).split('/') {
            if !segment.is_empty() {
                folder = join(&folder, segment);
                self.make_folder(beneath, &folder)?;
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
        let name = key.as_str();
        let file = self.beneath()?.file(name, OpenFor::Read);
        let file = file.map_err(|fault| self.failed("open", name, fault))?;
        let metadata = file
            .metadata()
            .map_err(|error| self.failed("look at", name, error))?;
        let range = range_within(key, range, metadata.len())?;
        let length = (range.end - range.start) as usize;
        let bytes = if self.is_direct(&range) {
            self.read_direct(&file, &range)
        } else {
            Ok(AlignedBytes::unaligned_with_room(length))
        };
        let bytes = bytes.and_then(|bytes| read_rest(&file, &range, bytes));
        let bytes = bytes.map_err(|error| self.failed("read", name, error))?;
        if bytes.as_ref().len() == length {
            return Ok(Bytes::from_owner(bytes));
        }
        // Somebody cut the file after its length was read.
        Err(StoreError::Truncated {
            key: key.clone(),
            expected: range.end,
            got: file.metadata().map_or(0, |metadata| metadata.len()),
        })
    }

    /// Long ranges are read past the page cache, where they begin with a block: the cache is the trainers', and its copy is one more.
    fn is_direct(&self, range: &Range<u64>) -> bool {
        let is_aligned = range.start.is_multiple_of(DIRECT_ALIGNMENT as u64);
        let is_long = range.end - range.start >= DIRECT_BYTES_MIN;
        self.direct_reads.is_tried() && is_aligned && is_long
    }

    fn read_direct(&self, file: &File, range: &Range<u64>) -> io::Result<AlignedBytes> {
        let length = (range.end - range.start) as usize;
        let mut bytes = AlignedBytes::with_room(length.next_multiple_of(DIRECT_ALIGNMENT));
        let plain = rustix::fs::fcntl_getfl(file)?;
        let read = match rustix::fs::fcntl_setfl(file, plain | OFlags::DIRECT) {
            Ok(()) => read_blocks(file, range, &mut bytes),
            Err(errno) => Err(errno.into()),
        };
        rustix::fs::fcntl_setfl(file, plain)?;
        bytes.truncate(length);
        match read {
            Err(error) if refuses_direct(error.kind()) => {
                self.direct_reads.give_up(&self.root);
                Ok(bytes)
            }
            read => read.map(|()| bytes),
        }
    }

    pub(super) fn length(&self, key: &ObjectKey) -> Result<u64, StoreError> {
        let length = self.beneath()?.length(key.as_str());
        length.map_err(|fault| self.failed("look at", key.as_str(), fault))
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
            for entry in self.entries(&folder)? {
                visit(&folder, entry, &mut folders, &mut entries)?;
            }
        }
        entries.sort();
        Ok(entries)
    }

    /// What is in a folder; a folder that was never made or was just removed holds nothing.
    pub(super) fn entries(&self, folder: &str) -> Result<Vec<FolderEntry>, StoreError> {
        let found = match Beneath::open(&self.root, self.resolver) {
            Ok(beneath) => beneath.entries(folder),
            Err(error) => Err(error.into()),
        };
        match found {
            Err(fault)
                if matches!(fault.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
            {
                Ok(Vec::new())
            }
            found => found.map_err(|fault| self.failed("list", folder, fault)),
        }
    }

    pub(super) fn delete(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let name = key.as_str();
        let beneath = self.beneath()?;
        match beneath.remove_file(name) {
            Ok(()) => {}
            Err(fault) if fault.kind() == ErrorKind::NotFound => return Ok(()),
            Err(fault) => return Err(self.failed("remove", name, fault)),
        }
        // Folders that became empty go too; removing one that is not empty fails, as it should.
        let mut folder = parent_of(name);
        while !folder.is_empty() && beneath.remove_empty(folder).is_ok() {
            folder = parent_of(folder);
        }
        Ok(())
    }
}

/// Notes one directory entry: a folder to visit or an object. Names that are no keys are not ours, and neither are links and FIFOs.
fn visit(
    folder: &str,
    entry: FolderEntry,
    folders: &mut Vec<String>,
    entries: &mut Vec<ObjectEntry>,
) -> Result<(), StoreError> {
    let full = join(folder, &entry.name);
    let Ok(key) = full.parse::<ObjectKey>() else {
        return Ok(());
    };
    match entry.kind {
        FileType::Directory => folders.push(full),
        FileType::RegularFile => entries.push(ObjectEntry {
            key,
            length: entry.length,
        }),
        _ => {}
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
