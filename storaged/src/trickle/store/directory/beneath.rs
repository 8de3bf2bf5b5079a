//! Names below the root of a directory store. Whoever may write there may put a symbolic link or a FIFO in place of any name, so
//! nothing is opened by its path alone: names are resolved below a descriptor of the root, no link is followed, no open waits, and
//! only regular files are read and written.
//!
//! The root itself is the operator's, who may reach it by a link. It is opened for each call: a file system that is mounted later is
//! seen, and one that was unmounted is not held.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::trickle::store::StoreError;

/// Owner writes, group reads, nobody else.
const FILE_MODE: u32 = 0o640;
const FOLDER_MODE: u32 = 0o750;
/// How often a name is resolved again that somebody renames meanwhile.
const RACES_MAX: u32 = 8;
/// Folders in a folder that is removed: the daemon makes none, and a deeper tree is somebody else's.
const TREE_DEPTH_MAX: u32 = 4;

/// Why a file operation failed.
#[derive(Debug)]
pub(super) enum FileFault {
    Os(io::Error),
    /// Something that is neither a regular file nor a folder of this file system stands in the way.
    NotPlain {
        path: PathBuf,
        got: &'static str,
    },
}

impl FileFault {
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Os(error) => error.kind(),
            Self::NotPlain { .. } => io::ErrorKind::Other,
        }
    }
}

impl From<io::Error> for FileFault {
    fn from(error: io::Error) -> Self {
        Self::Os(error)
    }
}

impl From<Errno> for FileFault {
    fn from(error: Errno) -> Self {
        Self::Os(error.into())
    }
}

/// The error of a file operation on a path.
pub(super) fn failed(verb: &str, path: &Path, fault: impl Into<FileFault>) -> StoreError {
    match fault.into() {
        FileFault::Os(error) => StoreError::from_io(format!("{verb} {}", path.display()), error),
        FileFault::NotPlain { path, got } => StoreError::NotPlain {
            path: path.display().to_string(),
            got,
        },
    }
}

/// How names are resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Resolver {
    /// By `openat2`, and folder by folder where the kernel or the container has no such call.
    #[default]
    Kernel,
    /// Folder by folder.
    #[cfg(test)]
    Walk,
}

/// The root of a store, as long as one call takes.
#[derive(Debug)]
pub(super) struct Beneath {
    root: OwnedFd,
    path: PathBuf,
    resolver: Resolver,
}

/// A name in a folder, with what it is.
#[derive(Debug)]
pub(super) struct FolderEntry {
    pub name: String,
    pub kind: FileType,
    pub length: u64,
    /// When a file was changed last, in seconds since 1970; 0 of a folder.
    pub changed_at: i64,
}

/// What a file is opened for.
#[derive(Debug, Clone, Copy)]
pub(super) enum OpenFor {
    Read,
    Write,
    /// Past the page cache.
    WriteDirect,
    Append,
    /// It must not exist yet.
    Create,
}

impl OpenFor {
    fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::Write => OFlags::WRONLY,
            Self::WriteDirect => OFlags::WRONLY | OFlags::DIRECT,
            Self::Append => OFlags::WRONLY | OFlags::APPEND,
            Self::Create => OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL,
        }
    }

    fn mode(self) -> Mode {
        match self {
            Self::Create => Mode::from_raw_mode(FILE_MODE),
            _ => Mode::empty(),
        }
    }
}

impl Beneath {
    /// Opens the root, which must be a directory.
    pub fn open(root: &Path, resolver: Resolver) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            root: rustix::fs::open(root, flags, Mode::empty())?,
            path: root.to_owned(),
            resolver,
        })
    }

    /// Opens a regular file. Nothing else is waited for, read or written.
    pub fn file(&self, name: &str, access: OpenFor) -> Result<File, FileFault> {
        // An open of a FIFO waits for its other end without this, with a permit and a thread.
        let flags = access.flags() | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = self.resolve(name, flags, access.mode())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        if kind != FileType::RegularFile {
            return Err(self.not_plain(name, kind));
        }
        // io_uring gives up, rather than waits, on a file that does not block.
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
        Ok(file.into())
    }

    /// What lies at a name, a link itself rather than what it names.
    pub fn look(&self, name: &str) -> Result<Stat, FileFault> {
        let (folder, last) = self.parent(name)?;
        Ok(rustix::fs::statat(
            &folder,
            last,
            AtFlags::SYMLINK_NOFOLLOW,
        )?)
    }

    /// Length of a regular file.
    pub fn length(&self, name: &str) -> Result<u64, FileFault> {
        let found = self.look(name)?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => Ok(found.st_size.unsigned_abs()),
            kind => Err(self.not_plain(name, kind)),
        }
    }

    /// Creates a folder, which may exist, and makes its name durable.
    pub fn make_folder(&self, name: &str) -> Result<(), FileFault> {
        let (folder, last) = self.parent(name)?;
        match rustix::fs::mkdirat(&folder, last, Mode::from_raw_mode(FOLDER_MODE)) {
            Ok(()) => self.sync_folder(parent_of(name)),
            Err(Errno::EXIST) => match FileType::from_raw_mode(self.look(name)?.st_mode) {
                FileType::Directory => Ok(()),
                FileType::RegularFile => Err(Errno::NOTDIR.into()),
                kind => Err(self.not_plain(name, kind)),
            },
            Err(error) => Err(error.into()),
        }
    }

    /// Makes the names in a folder durable.
    pub fn sync_folder(&self, name: &str) -> Result<(), FileFault> {
        let folder = self.resolve(name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        Ok(rustix::fs::fsync(&folder)?)
    }

    /// Gives a file a second, new name. Where hard links do not exist, it is renamed without replacing.
    pub fn link_new(&self, from: &str, to: &str) -> Result<(), FileFault> {
        let (old, from) = self.parent(from)?;
        let (new, to) = self.parent(to)?;
        match rustix::fs::linkat(&old, from, &new, to, AtFlags::empty()) {
            // Linux says EPERM for a file system without hard links.
            Err(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP | Errno::NOSYS) => {
                let renamed =
                    rustix::fs::renameat_with(&old, from, &new, to, RenameFlags::NOREPLACE);
                Ok(renamed?)
            }
            linked => Ok(linked?),
        }
    }

    /// Renames a file, in place of any file of that name. A link of that name is replaced, not followed.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), FileFault> {
        let (old, from) = self.parent(from)?;
        let (new, to) = self.parent(to)?;
        Ok(rustix::fs::renameat(&old, from, &new, to)?)
    }

    /// Removes a file, or a link or FIFO in its place.
    pub fn remove_file(&self, name: &str) -> Result<(), FileFault> {
        let (folder, last) = self.parent(name)?;
        Ok(rustix::fs::unlinkat(&folder, last, AtFlags::empty())?)
    }

    /// Removes a folder if it is empty.
    pub fn remove_empty(&self, name: &str) -> Result<(), FileFault> {
        let (folder, last) = self.parent(name)?;
        Ok(rustix::fs::unlinkat(&folder, last, AtFlags::REMOVEDIR)?)
    }

    /// Removes a folder with what is in it; no error if it is gone.
    pub fn remove_folder(&self, name: &str) -> Result<(), FileFault> {
        let (folder, last) = match self.parent(name) {
            Err(FileFault::Os(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        match remove_tree(folder.as_fd(), last, TREE_DEPTH_MAX) {
            Err(Errno::NOENT) => Ok(()),
            removed => Ok(removed?),
        }
    }

    /// What is in a folder. An entry that vanishes meanwhile is none.
    pub fn entries(&self, name: &str) -> Result<Vec<FolderEntry>, FileFault> {
        let folder = self.resolve(name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        let mut entries = Vec::new();
        for entry in Dir::read_from(&folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else {
                continue;
            };
            if name == "." || name == ".." {
                continue;
            }
            let found = match entry.file_type() {
                // Folders have no length: a name of each step need not be looked at.
                FileType::Directory => None,
                _ => match rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(found) => Some(found),
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error.into()),
                },
            };
            entries.push(FolderEntry {
                name: name.to_owned(),
                kind: found.map_or(FileType::Directory, |found| {
                    FileType::from_raw_mode(found.st_mode)
                }),
                length: found.map_or(0, |found| found.st_size.unsigned_abs()),
                changed_at: found.map_or(0, |found| found.st_mtime),
            });
        }
        Ok(entries)
    }

    /// The folder that a name is in, and the name in it.
    fn parent<'a>(&self, name: &'a str) -> Result<(OwnedFd, &'a str), FileFault> {
        let last = name.rsplit('/').next().unwrap_or(name);
        check_segment(last)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let folder = self.resolve(parent_of(name), flags, Mode::empty())?;
        Ok((folder, last))
    }

    fn resolve(&self, name: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, FileFault> {
        let flags = flags | OFlags::CLOEXEC;
        let found = match self.resolver {
            Resolver::Kernel => self.by_kernel(name, flags, mode),
            #[cfg(test)]
            Resolver::Walk => self.by_walk(name, flags, mode),
        };
        found.map_err(|error| self.explain(name, error))
    }

    fn by_kernel(&self, name: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let within =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let name = if name.is_empty() { "." } else { name };
        for _ in 0..RACES_MAX {
            match rustix::fs::openat2(&self.root, name, flags, mode, within) {
                // Somebody renames folders meanwhile.
                Err(Errno::AGAIN) => {}
                // Older kernels, and containers that forbid the call. Where the file itself is forbidden, the walk ends in the same error.
                Err(Errno::NOSYS | Errno::PERM) => break,
                found => return found,
            }
        }
        self.by_walk(name, flags, mode)
    }

    /// Folder by folder, each without following a link.
    fn by_walk(&self, name: &str, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let on_the_way = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if name.is_empty() || name == "." {
            return rustix::fs::openat(&self.root, ".", flags, mode);
        }
        let mut folder: Option<OwnedFd> = None;
        let mut segments = name.split('/').peekable();
        while let Some(segment) = segments.next() {
            check_segment(segment)?;
            let within = folder.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
            if segments.peek().is_none() {
                return rustix::fs::openat(within, segment, flags | OFlags::NOFOLLOW, mode);
            }
            let next = rustix::fs::openat(within, segment, on_the_way, Mode::empty())?;
            folder = Some(next);
        }
        Err(Errno::INVAL)
    }

    /// Names what stands in the way, if it is that.
    fn explain(&self, name: &str, error: Errno) -> FileFault {
        let is_of_kind = matches!(
            error,
            Errno::LOOP | Errno::NOTDIR | Errno::XDEV | Errno::NXIO | Errno::NODEV
        );
        let found = is_of_kind.then(|| self.obstacle(name)).flatten();
        found.unwrap_or_else(|| error.into())
    }

    fn obstacle(&self, name: &str) -> Option<FileFault> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut folder: Option<OwnedFd> = None;
        let mut path = String::new();
        for segment in name.split('/') {
            check_segment(segment).ok()?;
            path = join(&path, segment);
            let within = folder.as_ref().map_or(self.root.as_fd(), AsFd::as_fd);
            let found = rustix::fs::openat(within, segment, flags, Mode::empty()).ok()?;
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&found).ok()?.st_mode);
            if !matches!(kind, FileType::Directory | FileType::RegularFile) {
                return Some(self.not_plain(&path, kind));
            }
            folder = Some(found);
        }
        None
    }

    fn not_plain(&self, name: &str, kind: FileType) -> FileFault {
        let got = match kind {
            // A folder where an object should be is no object, as in any store.
            FileType::Directory | FileType::RegularFile => return Errno::NOENT.into(),
            FileType::Symlink => "a symbolic link",
            FileType::Fifo => "a FIFO",
            FileType::Socket => "a socket",
            FileType::CharacterDevice | FileType::BlockDevice => "a device",
            FileType::Unknown => "something else",
        };
        FileFault::NotPlain {
            path: self.path.join(name),
            got,
        }
    }
}

/// A name in a folder.
pub(super) fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() {
        name.to_owned()
    } else {
        format!("{folder}/{name}")
    }
}

/// The folder of a name; empty for the root.
pub(super) fn parent_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn check_segment(segment: &str) -> Result<(), Errno> {
    match segment {
        "" | "." | ".." => Err(Errno::INVAL),
        _ => Ok(()),
    }
}

fn remove_tree(folder: BorrowedFd<'_>, name: &str, depth: u32) -> Result<(), Errno> {
    match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) if depth > 0 => {}
        removed => return removed,
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let within = rustix::fs::openat(folder, name, flags, Mode::empty())?;
    for entry in Dir::read_from(&within)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().to_str() else {
            return Err(Errno::NOTEMPTY);
        };
        if name == "." || name == ".." {
            continue;
        }
        match remove_tree(within.as_fd(), name, depth - 1) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
    }
    rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)
}
