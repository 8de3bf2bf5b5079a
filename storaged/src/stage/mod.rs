//! Effect of the verb *stage*: the Unix sockets that trainers and readers connect to. Whoever connects is judged by the kernel's word for
//! it before anything is read; then one thread per connection reads a request, hands it to the driver, and sends the answer with its
//! descriptor. A process that dies is noticed by its pidfd, also while a forked child keeps its socket open.

mod access;
mod answers;
mod pace;
mod places;
mod presence;
mod queue;
mod requests;
mod watch;

use std::fs::{self, Permissions};
use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::UCred;
use storaged_arena::{PassingError, Slot, SlotError, begin_frame, recv_body, send_frame_waiting};
use storaged_core::{ConnId, RequestId, Viewer};
use storaged_wire::framing::FIRST_REQUEST_BYTES_MAX;
use storaged_wire::local::{Reply, Request};
use storaged_wire::{Refusal, RefusalCode, encode};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};

pub use access::Access;
use answers::answer_bytes;
use pace::RequestPace;
pub use places::CONNECTIONS_MAX;
use places::{ConnectionPlace, LongPool, LongRequests, NoPlaceLeft, Places, Porch};
pub use presence::SocketFaults;
use presence::{Attended, Entrance, attend};
pub use queue::{FromStage, ToDriver, queues};
use requests::{Greeted, Patience, Received, Unreceived, begin};
use watch::Watch;

/// Mode of directories above that of a socket: trainers must get to it, and who may connect is for the socket to say.
const REACHABLE: u32 = 0o755;
/// Who may not connect is heard for so long before it is told so.
const TURNED_AWAY_WAIT: Duration = Duration::from_secs(2);
/// The first wrong token of a connection is answered after so long, each further one after twice the time, up to the longest.
const WRONG_TOKEN_WAIT: Duration = Duration::from_millis(25);
const WRONG_TOKEN_WAIT_MAX: Duration = Duration::from_secs(1);
/// That connections are not accepted is said so often.
const UNACCEPTED_SAID_EVERY: Duration = Duration::from_secs(30);
/// An answer that a client does not take within this time ends its connection.
const SEND_WAIT: Duration = Duration::from_secs(10);
/// A long answer waits so long for the memory of others: longer than one that nobody reads holds it.
const ANSWER_MEMORY_WAIT: Duration = Duration::from_secs(30);

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
    /// A connection sends a request of so many bytes, or has sent them, and they were none: 0.
    RequestComes { conn: ConnId, bytes: u64 },
    /// Whose socket a connection came through; its requests follow.
    Connected { conn: ConnId, viewer: Viewer },
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
    /// Which jobs they see.
    pub viewer: Viewer,
    /// Requests per second that they get through, if that is bounded.
    pub requests: Option<NonZeroU32>,
    /// Connections that they have at once.
    pub connections: usize,
}

struct Door {
    pace: Option<RequestPace>,
    access: Access,
    viewer: Viewer,
    events: mpsc::Sender<StageEvent>,
    watch: Arc<Watch>,
    next: Arc<AtomicU64>,
    places: Arc<Places>,
    porch: Arc<Porch>,
    long: Arc<LongRequests>,
    /// The same of long answers, which have their own: neither kind keeps the other waiting.
    answers: Arc<LongRequests>,
}

/// Listens on every tenant's socket; events come on `events`. Gives what is found later of sockets that lead nowhere.
///
/// # Errors
/// [`StageError`] if a socket cannot be opened.
pub fn listen(sockets: &[TenantSocket], events: &ToDriver) -> Result<SocketFaults, StageError> {
    let next = Arc::new(AtomicU64::new(1));
    let porch = Arc::new(Porch::default());
    let pool = Arc::<LongPool>::default();
    let pool_of_answers = Arc::<LongPool>::default();
    let Some(first) = sockets.first() else {
        return Ok(SocketFaults::default());
    };
    let failed_at_first = |source| StageError {
        path: first.path.clone(),
        source,
    };
    let watch = Watch::start().map_err(failed_at_first)?;
    let mut all = Vec::new();
    for socket in sockets {
        let failed = |source| StageError {
            path: socket.path.clone(),
            source,
        };
        let door = Door {
            pace: socket.requests.map(RequestPace::new),
            access: socket.access.clone(),
            viewer: socket.viewer.clone(),
            events: events.of(&socket.viewer).clone(),
            watch: watch.clone(),
            next: next.clone(),
            places: Places::new(socket.access.users(), socket.connections),
            porch: porch.clone(),
            long: LongRequests::of(&pool),
            answers: LongRequests::of(&pool_of_answers),
        };
        all.push(Attended::open(socket, Arc::new(door)).map_err(failed)?);
    }
    attend(all).map_err(failed_at_first)
}

/// Binds a socket; one that nobody listens on any more is replaced.
fn bind(socket: &TenantSocket) -> io::Result<UnixListener> {
    let path = socket.path.as_path();
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    // Who may connect is decided by the peer's credentials, which cannot be forged; by its file's mode too, as far as a mode can say it.
    give(path, &socket.access, socket.access.mode())?;
    Ok(listener)
}

/// Makes a socket's directory, which has its mode whatever the umask is; those above it can be reached. One that exists keeps its own.
///
/// # Errors
/// What the system says.
pub fn make_directory(socket: &TenantSocket) -> io::Result<()> {
    let missing = socket.path.ancestors().skip(1);
    let missing = missing.take_while(|it| !it.as_os_str().is_empty() && !it.exists());
    let missing: Vec<&Path> = missing.collect();
    for directory in missing.iter().rev() {
        fs::create_dir(directory)?;
        fs::set_permissions(directory, Permissions::from_mode(REACHABLE))?;
    }
    let own = missing.first();
    own.map_or(Ok(()), |own| {
        give(own, &socket.access, socket.access.directory_mode())
    })
}

fn give(path: &Path, access: &Access, mode: u32) -> io::Result<()> {
    if let Some(group) = access.group() {
        std::os::unix::fs::chown(path, None, Some(group))?;
    }
    fs::set_permissions(path, Permissions::from_mode(mode))
}

fn accept_all(entrance: &Entrance, door: &Arc<Door>) {
    let mut said_at: Option<Instant> = None;
    for stream in entrance.listener.incoming() {
        if entrance.is_retired() {
            return;
        }
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                if said_at.is_none_or(|at| at.elapsed() >= UNACCEPTED_SAID_EVERY) {
                    said_at = Some(Instant::now());
                    tracing::warn!(%error, "connections to a socket of this daemon are not accepted now: whoever connects waits");
                }
                // Out of descriptors, most likely: others will close some.
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        let Ok(peer) = rustix::net::sockopt::socket_peercred(&stream) else {
            continue;
        };
        if stream.set_nonblocking(true).is_err() {
            continue;
        }
        match door.admit(&peer) {
            Ok(place) => door.serve(stream, &peer, place),
            Err(refusal) => door.turn_away(stream, refusal),
        }
    }
}

impl Door {
    /// Who may not use the socket takes no place from those who may, and nothing of theirs is read before.
    fn admit(&self, peer: &UCred) -> Result<ConnectionPlace, Refusal> {
        self.access.check(peer)?;
        let place = self.places.take(peer.uid.as_raw());
        place.map_err(|NoPlaceLeft(taken)| {
            let uid = peer.uid.as_raw();
            let text = format!("{taken} connections are open, of this socket or of user id {uid} on it: as many as may be; close some, or wait for others to");
            Refusal::new(RefusalCode::Busy, text)
        })
    }

    /// Says why, to a few at a time; others are left without a word.
    fn turn_away(&self, stream: UnixStream, refusal: Refusal) {
        let Some(place) = self.porch.step_on() else {
            return;
        };
        let tell = move || {
            let _place = place;
            tell(&stream, refusal);
        };
        let _ = std::thread::Builder::new().name("porch".into()).spawn(tell);
    }

    fn serve(self: &Arc<Self>, stream: UnixStream, peer: &UCred, place: ConnectionPlace) {
        let conn = ConnId(self.next.fetch_add(1, Ordering::Relaxed));
        self.watch.add(conn, peer.pid, &stream, &self.events);
        let mut connection = Connection {
            stream,
            conn,
            door: self.clone(),
            greeted: Greeted::NotYet,
            wrong_tokens: 0,
            told_after_end: false,
        };
        let serve = move || {
            let _place = place;
            let _ = connection.serve();
            connection.end();
        };
        let thread = std::thread::Builder::new().name(format!("conn-{}", conn.0));
        if thread.spawn(serve).is_err() {
            self.watch.remove(conn);
        }
    }
}

/// Tells somebody who may not connect. What it asks is read before, because who still writes reads no answer.
fn tell(stream: &UnixStream, refusal: Refusal) {
    let mut soon = Patience::of(TURNED_AWAY_WAIT);
    let Ok(frame) = begin_frame(stream, &mut soon) else {
        return;
    };
    let length = frame.length.min(FIRST_REQUEST_BYTES_MAX);
    let _ = recv_body(stream, length, &mut Vec::new(), &mut soon);
    let _ = send(stream, &plain(refusal));
}

/// A connection that is served.
struct Connection {
    stream: UnixStream,
    conn: ConnId,
    door: Arc<Door>,
    greeted: Greeted,
    wrong_tokens: u32,
    /// The driver may have heard something of it after it had heard of its end.
    told_after_end: bool,
}

/// Nothing more is to be said on a connection.
struct Ended;

impl Connection {
    fn serve(&mut self) -> Result<(), Ended> {
        self.tell_driver(StageEvent::Connected {
            conn: self.conn,
            viewer: self.door.viewer.clone(),
        })?;
        for index in 0.. {
            let answer = match self.receive() {
                Ok(received) => self.ask(index, received)?,
                Err(Unreceived::Ended) => return Err(Ended),
                Err(Unreceived::Malformed(refusal)) => plain(refusal),
                Err(Unreceived::Refused(refusal)) => {
                    return send(&self.stream, &plain(refusal)).map_err(|_| Ended);
                }
            };
            self.note(&answer.reply);
            self.answer(&answer)?;
        }
        Ok(())
    }

    /// The next request. Of a long one the driver hears before its bytes are here: they count in the budget of whoever sends them.
    fn receive(&mut self) -> Result<Received, Unreceived> {
        let begun = begin(&self.stream, self.greeted, &self.door.long)?;
        let counted = begun.counted_bytes();
        if let Some(bytes) = counted {
            self.tell_of_bytes(bytes)?;
        }
        let received = begun.receive(&self.stream, &self.door.long);
        if counted.is_some() && matches!(received, Err(Unreceived::Malformed(_))) {
            self.tell_of_bytes(0)?;
        }
        received
    }

    fn tell_of_bytes(&mut self, bytes: u64) -> Result<(), Unreceived> {
        let conn = self.conn;
        let told = self.tell_driver(StageEvent::RequestComes { conn, bytes });
        told.map_err(|Ended| Unreceived::Ended)
    }

    /// Tells the driver once that the connection is gone, which is work for it.
    fn end(&self) {
        let is_told = self.door.watch.remove(self.conn);
        if !is_told || self.told_after_end {
            let gone = StageEvent::Gone { conn: self.conn };
            let _ = self.door.events.blocking_send(gone);
        }
    }

    fn tell_driver(&mut self, event: StageEvent) -> Result<(), Ended> {
        let told = self.door.events.blocking_send(event);
        self.told_after_end |= self.door.watch.has_told(self.conn);
        told.map_err(|_| Ended)
    }

    /// The memory of a long request is held until it is answered.
    fn ask(&mut self, index: u64, received: Received) -> Result<Answer, Ended> {
        let Received {
            request,
            memory: _memory,
        } = received;
        let (answer, answered) = oneshot::channel();
        let id = RequestId {
            conn: self.conn,
            index,
        };
        if let Some(pace) = &self.door.pace {
            pace.wait();
        }
        self.tell_driver(StageEvent::Request {
            id,
            request,
            answer,
        })?;
        let draining = "the daemon is stopping: connect again when it is back";
        let stopped = |_| plain(Refusal::new(RefusalCode::Draining, draining));
        Ok(answered.blocking_recv().unwrap_or_else(stopped))
    }

    /// A long answer waits for memory to be written down in: whoever asks on a thousand connections and reads nothing has the daemon write one
    /// or two. What it is written from is shared. Where there is none in time the connection ends, and what was opened goes with it: a refusal would be the
    /// answer to something that was done.
    fn answer(&self, answer: &Answer) -> Result<(), Ended> {
        let bytes = answer_bytes(&answer.reply);
        let memory = self.door.answers.hold(bytes, ANSWER_MEMORY_WAIT);
        let _memory = memory.map_err(|waited| {
            tracing::info!(
                bytes,
                ?waited,
                "an answer found no memory: others on this socket do not read theirs"
            );
            Ended
        })?;
        send(&self.stream, answer).map_err(|_| Ended)
    }

    /// Who guesses tokens waits longer each time.
    fn note(&mut self, reply: &Reply) {
        match reply {
            Reply::Welcome { .. } => self.greeted = Greeted::Yes,
            Reply::Refused(refusal) if refusal.code == RefusalCode::WrongToken => {
                let wait = WRONG_TOKEN_WAIT.saturating_mul(1 << self.wrong_tokens.min(10));
                self.wrong_tokens = self.wrong_tokens.saturating_add(1);
                std::thread::sleep(wait.min(WRONG_TOKEN_WAIT_MAX));
            }
            _ => {}
        }
    }
}

/// Why an answer did not go out.
#[derive(Debug, Error)]
enum SendError {
    #[error(transparent)]
    Passing(#[from] PassingError),
    #[error(transparent)]
    Slot(#[from] SlotError),
}

fn send(stream: &UnixStream, answer: &Answer) -> Result<(), SendError> {
    let reads: OwnedFd;
    let descriptor = match (&answer.slot, &answer.reply) {
        (None, _) => None,
        (Some(slot), Reply::SlotGranted { .. }) => Some(slot.as_fd()),
        // What a reader could write to would be spoilt for all others.
        (Some(slot), _) => {
            reads = slot.read_only()?;
            Some(reads.as_fd())
        }
    };
    let mut in_time = Patience::of(SEND_WAIT);
    Ok(send_frame_waiting(
        stream,
        &encode(&answer.reply),
        descriptor,
        &mut in_time,
    )?)
}

fn plain(refusal: Refusal) -> Answer {
    Answer {
        reply: Reply::Refused(refusal),
        slot: None,
    }
}

#[cfg(test)]
mod tests;
