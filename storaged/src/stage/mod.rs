//! Effect of the verb *stage*: the Unix sockets that trainers and readers connect to. One thread per connection
//! reads a request, hands it to the driver, and sends the answer with its descriptor. A process that dies is
//! noticed by its pidfd, also while a forked child keeps its socket open.

mod access;
mod watch;

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use storaged_arena::{Slot, recv_frame, send_frame};
use storaged_core::{ConnId, RequestId};
use storaged_wire::framing::LOCAL_FRAME_BYTES_MAX;
use storaged_wire::local::{Reply, Request};
use storaged_wire::{Refusal, RefusalCode, decode, encode};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};

pub use access::Access;
use watch::Watch;

/// Connections at once: each is a thread of little memory; a node has some dozens of trainers.
const CONNECTIONS_MAX: usize = 1024;
/// An answer that a client does not take within this time ends its connection.
const SEND_WAIT: Duration = Duration::from_secs(10);

/// Why a socket could not be opened.
#[derive(Debug, Error)]
#[error("listening on {path} failed: is another daemon running, and may this user write there?")]
pub struct StageError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// An answer on its way to a client.
#[derive(Debug)]
pub struct Answer {
    /// The record.
    pub reply: Reply,
    /// The slot whose descriptor goes along.
    pub slot: Option<Arc<Slot>>,
}

/// What clients do.
#[derive(Debug)]
pub enum StageEvent {
    /// A request, and where its answer goes.
    Request {
        id: RequestId,
        request: Request,
        answer: oneshot::Sender<Answer>,
    },
    /// A connection came through the operator's own socket; its requests follow.
    Operator { conn: ConnId },
    /// A connection or the process behind it is gone.
    Gone { conn: ConnId },
}

/// A tenant's socket, or the operator's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantSocket {
    /// Where it is.
    pub path: PathBuf,
    /// Who may use it.
    pub access: Access,
}

struct Door {
    access: Access,
    events: mpsc::Sender<StageEvent>,
    watch: Arc<Watch>,
    next: Arc<AtomicU64>,
    open: Arc<AtomicUsize>,
}

/// Listens on every tenant's socket; events come on `events`.
///
/// # Errors
/// [`StageError`] if a socket cannot be opened.
pub fn listen(
    sockets: &[TenantSocket],
    events: &mpsc::Sender<StageEvent>,
) -> Result<(), StageError> {
    let next = Arc::new(AtomicU64::new(1));
    let open = Arc::new(AtomicUsize::new(0));
    let Some(first) = sockets.first() else {
        return Ok(());
    };
    let started = Watch::start(events.clone());
    let watch = started.map_err(|source| StageError {
        path: first.path.clone(),
        source,
    })?;
    for socket in sockets {
        let failed = |source| StageError {
            path: socket.path.clone(),
            source,
        };
        let listener = bind(socket).map_err(failed)?;
        let door = Door {
            access: socket.access.clone(),
            events: events.clone(),
            watch: watch.clone(),
            next: next.clone(),
            open: open.clone(),
        };
        let accept = move || accept_all(&listener, &Arc::new(door));
        std::thread::Builder::new()
            .name("stage".into())
            .spawn(accept)
            .map_err(failed)?;
    }
    Ok(())
}

/// Binds a socket; one that nobody listens on any more is replaced.
fn bind(socket: &TenantSocket) -> io::Result<UnixListener> {
    let path = socket.path.as_path();
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    // Who may connect is decided by the peer's credentials, which cannot be forged; of the operator's socket by its
    // file's mode too.
    match &socket.access {
        Access::Users(_) => {}
        Access::Operators { group: None } => {}
        Access::Operators { group } => std::os::unix::fs::chown(path, None, *group)?,
    }
    fs::set_permissions(path, Permissions::from_mode(socket.access.mode()))?;
    Ok(listener)
}

fn accept_all(listener: &UnixListener, door: &Arc<Door>) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // Out of descriptors, most likely: others will close some.
            std::thread::sleep(Duration::from_millis(50));
            continue;
        };
        if door.open.load(Ordering::Relaxed) >= CONNECTIONS_MAX {
            continue;
        }
        door.open.fetch_add(1, Ordering::Relaxed);
        let conn = ConnId(door.next.fetch_add(1, Ordering::Relaxed));
        let served = door.clone();
        let serve = move || {
            serve(stream, conn, &served);
            served.watch.remove(conn);
            let _ = served.events.blocking_send(StageEvent::Gone { conn });
            served.open.fetch_sub(1, Ordering::Relaxed);
        };
        if std::thread::Builder::new()
            .name(format!("conn-{}", conn.0))
            .spawn(serve)
            .is_err()
        {
            door.open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

fn serve(mut stream: UnixStream, conn: ConnId, door: &Door) {
    let refusal = match rustix::net::sockopt::socket_peercred(&stream) {
        Ok(peer) => {
            door.watch.add(conn, peer.pid, &stream);
            door.access.check(&peer).err()
        }
        Err(_) => return,
    };
    let _ = stream.set_write_timeout(Some(SEND_WAIT));
    if matches!(door.access, Access::Operators { .. }) && refusal.is_none() {
        let operator = StageEvent::Operator { conn };
        if door.events.blocking_send(operator).is_err() {
            return;
        }
    }
    for index in 0.. {
        let Ok((body, _)) = recv_frame(&mut stream, LOCAL_FRAME_BYTES_MAX) else {
            return;
        };
        let request = decode::<Request>("request", &body);
        let answer = match (&refusal, request) {
            (Some(refusal), _) => plain(refusal.clone()),
            (None, Err(error)) => plain(Refusal::new(RefusalCode::Malformed, error.to_string())),
            (None, Ok(request)) => {
                let (sender, receiver) = oneshot::channel();
                let id = RequestId { conn, index };
                let event = StageEvent::Request {
                    id,
                    request,
                    answer: sender,
                };
                if door.events.blocking_send(event).is_err() {
                    return;
                }
                let draining = "the daemon is stopping: connect again when it is back";
                let stopped = |_| plain(Refusal::new(RefusalCode::Draining, draining));
                receiver.blocking_recv().unwrap_or_else(stopped)
            }
        };
        let descriptor = answer.slot.as_ref().map(|slot| slot.as_fd());
        if send_frame(&mut stream, &encode(&answer.reply), descriptor).is_err() {
            return;
        }
        if refusal.is_some() {
            return;
        }
    }
}

fn plain(refusal: Refusal) -> Answer {
    Answer {
        reply: Reply::Refused(refusal),
        slot: None,
    }
}
