//! One thread that watches all connections for their ends, and the processes behind them by their pidfds. A connection's own thread does not
//! see its end while it waits for an answer, which may take ten minutes.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::buffer::spare_capacity;
use rustix::event::epoll;
use rustix::process::{Pid, PidfdFlags};
use storaged_core::ConnId;
use tokio::sync::mpsc;

use super::StageEvent;

/// WatchedConnection connections, with the processes behind them where these are known.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
    watched: Mutex<BTreeMap<u64, WatchedConnection>>,
}

/// A connection, until its thread has ended.
#[derive(Debug)]
enum WatchedConnection {
    Open {
        /// Closed with this: while it is open it is watched.
        _pidfd: Option<OwnedFd>,
        stream: UnixStream,
        events: mpsc::Sender<StageEvent>,
    },
    /// The driver has been told that it is gone.
    Told,
}

impl WatchedConnection {
    fn take(&mut self) -> Self {
        std::mem::replace(self, Self::Told)
    }
}

impl Watch {
    /// Starts the thread.
    pub fn start() -> io::Result<Arc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = Arc::new(Self {
            epoll,
            watched: Mutex::default(),
        });
        let watching = watch.clone();
        std::thread::Builder::new()
            .name("watch".into())
            .spawn(move || watching.run())?;
        Ok(watch)
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<u64, WatchedConnection>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a connection and the process behind it. In another pid namespace its number is unknown; then the end of
    /// the connection has to do.
    pub fn add(
        &self,
        conn: ConnId,
        pid: Pid,
        stream: &UnixStream,
        events: &mpsc::Sender<StageEvent>,
    ) {
        let Ok(stream) = stream.try_clone() else {
            return;
        };
        let mut watched = self.locked();
        let data = epoll::EventData::new_u64(conn.0);
        // Nothing is wished for: the end of a connection is told all the same, and that of one half of it is not.
        let hung_up = epoll::EventFlags::ONESHOT;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok();
        let ended = pidfd.as_ref().map(|pidfd| {
            let exited = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
            epoll::add(&self.epoll, pidfd, data, exited)
        });
        let watches = epoll::add(&self.epoll, &stream, data, hung_up).is_ok();
        if watches || ended.is_some_and(|ended| ended.is_ok()) {
            let open = WatchedConnection::Open {
                _pidfd: pidfd,
                stream,
                events: events.clone(),
            };
            watched.insert(conn.0, open);
        }
    }

    /// The connection's thread ends: closing its pidfd and this descriptor of it ends the watch. Whether the driver was told.
    pub fn remove(&self, conn: ConnId) -> bool {
        let removed = self.locked().remove(&conn.0);
        matches!(removed, Some(WatchedConnection::Told))
    }

    /// Whether the driver has been told, or is being told, that a connection is gone.
    pub fn has_told(&self, conn: ConnId) -> bool {
        matches!(self.locked().get(&conn.0), Some(WatchedConnection::Told))
    }

    fn run(&self) {
        let mut ready = Vec::with_capacity(64);
        loop {
            ready.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut ready), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            for event in &ready {
                let conn = event.data.u64();
                let Some(watched) = self.locked().get_mut(&conn).map(WatchedConnection::take)
                else {
                    continue;
                };
                let WatchedConnection::Open { stream, events, .. } = watched else {
                    continue;
                };
                let gone = StageEvent::Gone { conn: ConnId(conn) };
                if events.blocking_send(gone).is_err() {
                    return;
                }
                // The connection's thread may wait on a socket that a child of the dead process keeps open.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}
