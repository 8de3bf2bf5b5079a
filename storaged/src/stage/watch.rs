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

/// Watched connections, with the processes behind them where these are known.
#[derive(Debug)]
pub(super) struct Watch {
    epoll: OwnedFd,
    watched: Mutex<BTreeMap<u64, (Option<OwnedFd>, UnixStream)>>,
}

impl Watch {
    /// Starts the thread.
    pub fn start(events: mpsc::Sender<StageEvent>) -> io::Result<Arc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = Arc::new(Self {
            epoll,
            watched: Mutex::default(),
        });
        let watching = watch.clone();
        std::thread::Builder::new()
            .name("watch".into())
            .spawn(move || watching.run(&events))?;
        Ok(watch)
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<u64, (Option<OwnedFd>, UnixStream)>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches a connection and the process behind it. In another pid namespace its number is unknown; then the end of
    /// the connection has to do.
    pub fn add(&self, conn: ConnId, pid: Pid, stream: &UnixStream) {
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
            watched.insert(conn.0, (pidfd, stream));
        }
    }

    /// The connection ended: closing its pidfd and this descriptor of it ends the watch.
    pub fn remove(&self, conn: ConnId) {
        self.locked().remove(&conn.0);
    }

    fn run(&self, events: &mpsc::Sender<StageEvent>) {
        let mut ready = Vec::with_capacity(64);
        loop {
            ready.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut ready), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(_) => return,
            }
            for event in &ready {
                let conn = event.data.u64();
                let Some((_, stream)) = self.locked().remove(&conn) else {
                    continue;
                };
                if events
                    .blocking_send(StageEvent::Gone { conn: ConnId(conn) })
                    .is_err()
                {
                    return;
                }
                // The connection's thread may wait on a socket that a child of the dead process keeps open.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }
}
