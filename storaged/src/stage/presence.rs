//! Whether the path of each socket still leads to it. Somebody may remove its file, and then trainers that are connected go on while no new
//! one gets in. A thread looks once a second: where nothing is there any more it listens there anew; what somebody else has put there is left.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Door, TenantSocket, accept_all, bind};

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Sockets through which nobody new gets in, and why.
#[derive(Debug, Clone, Default)]
pub struct SocketFaults(Arc<Mutex<BTreeMap<PathBuf, String>>>);

impl SocketFaults {
    /// What is wrong with each.
    pub fn reasons(&self) -> Vec<String> {
        self.locked().values().cloned().collect()
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<PathBuf, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether that was not known before.
    fn note(&self, path: &Path, fault: String) -> bool {
        let known = self.locked().insert(path.to_owned(), fault);
        known.is_none()
    }

    fn clear(&self, path: &Path) {
        self.locked().remove(path);
    }
}

/// A file that is the same only as long as nobody puts another one in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    /// None if nothing is there.
    fn of(path: &Path) -> io::Result<Option<Self>> {
        match std::fs::symlink_metadata(path) {
            Ok(found) => Ok(Some(Self {
                device: found.dev(),
                inode: found.ino(),
            })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// A socket that is listened on.
pub(super) struct Entrance {
    pub listener: UnixListener,
    is_retired: AtomicBool,
}

impl Entrance {
    fn new(listener: UnixListener) -> Self {
        Self {
            listener,
            is_retired: AtomicBool::new(false),
        }
    }

    /// Nobody comes through it any more.
    pub fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Relaxed)
    }

    /// Its thread ends.
    fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
    }
}

/// A socket, who lets people in, and what was found of it.
pub(super) struct Attended {
    socket: TenantSocket,
    door: Arc<Door>,
    entrance: Arc<Entrance>,
    own: Option<FileIdentity>,
}

impl Attended {
    /// Listens, on a thread of its own.
    pub fn open(socket: &TenantSocket, door: Arc<Door>) -> io::Result<Self> {
        let entrance = Arc::new(Entrance::new(bind(socket)?));
        let own = FileIdentity::of(&socket.path)?;
        let (at, by) = (entrance.clone(), door.clone());
        std::thread::Builder::new()
            .name("stage".into())
            .spawn(move || accept_all(&at, &by))?;
        Ok(Self {
            socket: socket.clone(),
            door,
            entrance,
            own,
        })
    }

    /// Whether the daemon is there that hears of those who come.
    fn is_heard(&self) -> bool {
        !self.door.events.is_closed()
    }

    fn look(&mut self, faults: &SocketFaults) {
        let path = self.socket.path.clone();
        let fault = match FileIdentity::of(&path) {
            Ok(found) if found.is_some() && found == self.own => return faults.clear(&path),
            Ok(None) => match self.listen_anew() {
                Ok(()) => {
                    tracing::warn!(path = %path.display(), "the socket was removed: it is made anew, and new trainers get in again");
                    return faults.clear(&path);
                }
                Err(error) => {
                    format!("it was removed, and could not be made anew: {error}")
                }
            },
            Ok(Some(_)) => {
                "something else is in its place: remove that, and it is made anew".into()
            }
            Err(error) => format!("it cannot be looked at: {error}"),
        };
        let reason = format!(
            "nobody new gets in through the socket {}: {fault}",
            path.display()
        );
        if faults.note(&path, reason) {
            tracing::warn!(path = %path.display(), fault, "nobody new gets in through a socket");
        }
    }

    /// Its directory is not made anew: with it others may be gone too.
    fn listen_anew(&mut self) -> io::Result<()> {
        check_directory(&self.socket.path)?;
        let anew = Self::open(&self.socket, self.door.clone())?;
        let before = std::mem::replace(self, anew);
        before.entrance.retire();
        Ok(())
    }
}

/// Where others may write, what is made could be exchanged for something else before it gets its mode.
fn check_directory(path: &Path) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let found = std::fs::metadata(directory)?;
    let own = rustix::process::geteuid().as_raw();
    if found.mode() & 0o022 == 0 && [0, own].contains(&found.uid()) {
        return Ok(());
    }
    let text = "others may write in its directory; restart the daemon";
    Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
}

/// Starts the thread that looks; it ends with the daemon that hears of connections.
pub(super) fn attend(mut all: Vec<Attended>) -> io::Result<SocketFaults> {
    let faults = SocketFaults::default();
    let told = faults.clone();
    let attend = move || {
        while all.iter().all(Attended::is_heard) {
            for one in &mut all {
                one.look(&told);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    };
    std::thread::Builder::new()
        .name("sockets".into())
        .spawn(attend)?;
    Ok(faults)
}
