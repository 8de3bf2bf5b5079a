//! The holder: a process of its own (`storaged hold`) that has what a keeper has, so that memory outlives the keeper too, as at the end of its
//! pod.
//!
//! It is the keeper's likeness: one thread, no network, no configuration, and it reads nothing but datagrams of fixed forms (`message`). It
//! stays when pods are replaced, for months, so the less it does the better. One keeper at a time is attached, over a connection that is its
//! own for as long as it is open, and nobody else changes what is held; a daemon that outlives its keeper keeps the next one out.

mod unconnected;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::geteuid;
use storaged_arena::Received;
use tokio::io::Interest;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

use super::KeepError;
use super::keeper::raise_limit;
use super::kept_daemon::KeptDaemon;
use super::message::{
    DATAGRAM_MAX, FromKeeper, HeldCount, HoldAnswer, HoldOrder, HolderName, KeeperIdentity,
};
use super::packets::{Packets, is_gone, listen_at};
use super::table::{Table, Taken};

pub use unconnected::UnconnectedHolder;

/// Connections at once: a keeper's, the next keeper's, an operator's, and some that say nothing.
const CONNECTIONS_MAX: usize = 16;
/// Who is not attached has said something within this time, or goes.
const GUEST_WAIT: Duration = Duration::from_secs(5);
/// Datagrams of one connection before others have their turn.
const TURN: usize = 64;
/// When the system has no room for a datagram, or a descriptor, for a while.
const RETRY: Duration = Duration::from_millis(10);
/// An answer to who is no keeper comes at once, or not at all.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// Holds descriptors for the keeper that connects there, until this process is told to end.
///
/// # Errors
/// [`KeepError`] if the socket cannot be made.
pub fn hold(socket: &Path) -> Result<(), KeepError> {
    raise_limit();
    // So that `ps` tells it from a daemon. It is only a name.
    let _ = rustix::thread::set_name(c"storaged-holder");
    runtime()?.block_on(serve_all(socket))
}

/// Has a holder let go of everything; how many descriptors that were.
///
/// # Errors
/// [`KeepError::HolderTaken`] while a daemon is there, or another one if it does not answer.
pub fn release(socket: &Path) -> Result<usize, KeepError> {
    match ask(socket, HoldOrder::Release)? {
        Some(HoldAnswer::Released(count)) => Ok(count),
        Some(HoldAnswer::Busy(process)) => Err(KeepError::HolderTaken { process }),
        Some(HoldAnswer::Stranger(user)) => Err(KeepError::HolderStranger { user }),
        _ => Err(KeepError::Answer),
    }
}

/// The process of the keeper that is attached to a holder, by the number that it has for itself.
///
/// # Errors
/// [`KeepError`] if there is none, or the holder does not say.
pub fn attached_keeper(socket: &Path) -> Result<u32, KeepError> {
    match ask(socket, HoldOrder::Who)? {
        Some(HoldAnswer::Busy(process)) => Ok(process),
        Some(HoldAnswer::Stranger(user)) => Err(KeepError::HolderStranger { user }),
        _ => Err(KeepError::Answer),
    }
}

/// What the holder answers to whoever has no memory there.
fn ask(socket: &Path, order: HoldOrder) -> Result<Option<HoldAnswer>, KeepError> {
    runtime()?.block_on(async {
        let asked = tokio::time::timeout(ANSWER_WAIT, ask_over(socket, order)).await;
        let answer = asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        answer.map_err(KeepError::io("asking the holder"))
    })
}

fn runtime() -> Result<tokio::runtime::Runtime, KeepError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(KeepError::io("starting the holder's runtime"))
}

async fn ask_over(socket: &Path, order: HoldOrder) -> io::Result<Option<HoldAnswer>> {
    let packets = Packets::connect(socket)?;
    // A stranger is told before it has said anything: what cannot be sent then is no fault.
    let sent = packets.send(&order.encode()).await;
    let mut body = [0; DATAGRAM_MAX];
    match packets.receive(&mut body).await {
        Ok(Received::Whole { length, .. }) => Ok(HoldAnswer::decode(&body[..length])),
        Ok(Received::Odd) => Ok(None),
        Err(error) => sent.and(Err(error)),
    }
}

async fn serve_all(path: &Path) -> Result<(), KeepError> {
    let listen = |kind| signal(kind).map_err(KeepError::io("listening for signals"));
    let mut term = listen(SignalKind::terminate())?;
    let mut int = listen(SignalKind::interrupt())?;
    // What would end a process that does not say otherwise.
    let ignored = [
        SignalKind::hangup(),
        SignalKind::user_defined1(),
        SignalKind::user_defined2(),
        SignalKind::alarm(),
    ];
    let ignored = ignored.map(signal);
    let listener = listen_at(path).map_err(|source| KeepError::Holder {
        path: path.to_owned(),
        source,
    })?;
    let held = Arc::new(Mutex::new(HeldMemory::default()));
    tracing::info!(socket = %path.display(), "holding descriptors for a keeper");
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
        () = admit(&listener, &held) => {}
    }
    drop(ignored);
    // The next one makes it anew, and may do so as soon as nobody listens here.
    let _ = fs::remove_file(path);
    drop(listener);
    let descriptors = lock(&held).table.len();
    tracing::info!(descriptors, "ending: what nobody else holds is free");
    Ok(())
}

fn lock(held: &Mutex<HeldMemory>) -> MutexGuard<'_, HeldMemory> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets in who may, for ever.
async fn admit(listener: &UnixListener, held: &Arc<Mutex<HeldMemory>>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let own = geteuid().as_raw();
    let mut connection = 0;
    loop {
        let Ok((socket, _)) = listener.accept().await else {
            // Out of descriptors, most likely: others will close some.
            tokio::time::sleep(RETRY).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            continue;
        };
        let packets = Arc::new(Packets::of(socket));
        let Ok(user) = packets.peer() else { continue };
        if user != own && user != 0 {
            tracing::warn!(user, "another user was sent away");
            // There is room for it in the queue of a connection on which nothing was sent.
            let answer = HoldAnswer::Stranger(user).encode();
            let _ = tokio::time::timeout(RETRY, packets.send(&answer)).await;
            continue;
        }
        connection += 1;
        let (held, connection) = (Arc::clone(held), ConnectionNumber(connection));
        tokio::spawn(async move {
            let _place = place;
            serve(&held, &packets, connection).await;
            lock(&held).ended(connection);
        });
    }
}

/// Does what is said over a connection until its end.
async fn serve(held: &Mutex<HeldMemory>, packets: &Arc<Packets>, connection: ConnectionNumber) {
    let mut body = [0; DATAGRAM_MAX];
    let mut taken = 0;
    loop {
        taken += 1;
        if taken % TURN == 0 {
            tokio::task::yield_now().await;
        }
        let next = packets.receive(&mut body);
        let received = if lock(held).is_attached(connection) {
            next.await
        } else {
            let next = tokio::time::timeout(GUEST_WAIT, next).await;
            next.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        };
        let Ok(received) = received else { return };
        let reaction = match received {
            Received::Whole { length, descriptor } => {
                lock(held).take(connection, packets, &body[..length], descriptor)
            }
            Received::Odd => lock(held).missed(connection),
        };
        let gone = match reaction {
            Reaction::None => Ok(()),
            Reaction::Say(answer) => packets.send(&answer.encode()).await,
            Reaction::List(names) => list(held, packets, names).await,
            Reaction::Part(answer) => {
                if let Some(answer) = answer {
                    let _ = tokio::time::timeout(GUEST_WAIT, packets.send(&answer.encode())).await;
                }
                return;
            }
        };
        if gone.is_err() {
            return;
        }
    }
}

/// One datagram per descriptor, then how many there were.
async fn list(
    held: &Mutex<HeldMemory>,
    packets: &Packets,
    names: Vec<HolderName>,
) -> io::Result<()> {
    let mut sent = 0;
    for name in names {
        let body = FromKeeper::Held(name.clone()).encode();
        loop {
            let tried = {
                let held = lock(held);
                let Some(descriptor) = held.table.get(&name) else {
                    break;
                };
                packets.try_send(&body, Some(descriptor))
            };
            match tried {
                Ok(()) => {
                    sent += 1;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    packets.ready(Interest::WRITABLE).await?;
                }
                Err(error) if is_gone(&error) => return Err(error),
                Err(_) => tokio::time::sleep(RETRY).await,
            }
        }
    }
    packets.send(&FromKeeper::End(sent).encode()).await
}

/// One of a holder's connections: no number is given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ConnectionNumber(u64);

/// The keeper that is attached.
#[derive(Debug)]
struct AttachedKeeper {
    connection: ConnectionNumber,
    identity: KeeperIdentity,
    /// What it is told unasked goes here.
    packets: Arc<Packets>,
    /// What comes anew, until it is whole.
    anew: Option<Table>,
    /// What was not taken since it was last told how much is held.
    missed: usize,
}

/// The daemon of the keeper that was attached last.
#[derive(Debug)]
struct HeldDaemon {
    keeper: KeeperIdentity,
    process: KeptDaemon,
}

/// What is to be done about a datagram.
#[derive(Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Nothing.
    None,
    /// This is answered.
    Say(HoldAnswer),
    /// Descriptors by these names are sent.
    List(Vec<HolderName>),
    /// The connection is closed, once this was said.
    Part(Option<HoldAnswer>),
}

/// All that a holder has.
#[derive(Debug, Default)]
struct HeldMemory {
    table: Table,
    attached: Option<AttachedKeeper>,
    daemon: Option<HeldDaemon>,
}

impl HeldMemory {
    fn is_attached(&self, connection: ConnectionNumber) -> bool {
        let attached = self.attached.as_ref();
        attached.is_some_and(|it| it.connection == connection)
    }

    /// Whose memory it is, if not this keeper's own.
    fn taken_by(&self, keeper: Option<KeeperIdentity>) -> Option<u32> {
        let attached = self.attached.as_ref().map(|it| it.identity);
        let running = self.daemon.as_ref().filter(|it| it.process.is_running());
        let running = running.filter(|it| Some(it.keeper) != keeper);
        let attached = attached.filter(|it| Some(*it) != keeper);
        let attached = attached.map(|it| it.process);
        attached.or_else(|| running.map(|it| it.process.number))
    }

    /// Who would miss the memory: a daemon that runs, or a keeper that has started none yet. One whose daemon has ended does not: the next
    /// start may end as that one did, of what is held.
    fn needed_by(&self) -> Option<u32> {
        let attached = self.attached.as_ref().map(|it| it.identity);
        let ended = self.daemon.as_ref().filter(|it| !it.process.is_running());
        let ended = ended.filter(|it| Some(it.keeper) == attached);
        self.taken_by(None).filter(|_| ended.is_none())
    }

    /// Does what a datagram says.
    fn take(
        &mut self,
        connection: ConnectionNumber,
        packets: &Arc<Packets>,
        body: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> Reaction {
        match (HoldOrder::decode(body), descriptor) {
            (Some(HoldOrder::Attach(keeper)), None) => self.attach(connection, packets, keeper),
            (Some(HoldOrder::Release), None) => self.release(),
            (Some(HoldOrder::Who), None) => {
                let attached = self.attached.as_ref();
                Reaction::Part(attached.map(|it| HoldAnswer::Busy(it.identity.process)))
            }
            (Some(HoldOrder::Daemon(number)), Some(process)) => {
                self.note_daemon(connection, number, process)
            }
            (Some(HoldOrder::Anew), None) => self.begin_anew(connection),
            (Some(HoldOrder::Count), None) => self.count(connection),
            (None, descriptor) => self.change(connection, body, descriptor),
            (Some(_), _) => self.missed(connection),
        }
    }

    fn attach(
        &mut self,
        connection: ConnectionNumber,
        packets: &Arc<Packets>,
        identity: KeeperIdentity,
    ) -> Reaction {
        if let Some(process) = self.taken_by(Some(identity)) {
            return Reaction::Part(Some(HoldAnswer::Busy(process)));
        }
        let descriptors = self.table.len();
        let keeper = identity.process;
        tracing::info!(keeper, descriptors, "a keeper is attached");
        // In place of an earlier connection of its own too: what still comes over that one counts no longer.
        self.attached = Some(AttachedKeeper {
            connection,
            identity,
            packets: Arc::clone(packets),
            anew: None,
            missed: 0,
        });
        Reaction::None
    }

    fn release(&mut self) -> Reaction {
        if let Some(process) = self.needed_by() {
            return Reaction::Part(Some(HoldAnswer::Busy(process)));
        }
        let descriptors = self.table.len();
        let answer = HoldAnswer::Released(descriptors);
        if let Some(attached) = &self.attached
            && attached.packets.try_send(&answer.encode(), None).is_err()
        {
            // It has everything too, and would say it anew.
            return Reaction::Part(Some(HoldAnswer::Busy(attached.identity.process)));
        }
        self.table = self.table.emptied();
        tracing::info!(descriptors, "let go of everything, as told");
        Reaction::Part(Some(answer))
    }

    /// The keeper of this connection, if that is attached.
    fn attached_by(&mut self, connection: ConnectionNumber) -> Option<&mut AttachedKeeper> {
        let attached = self.attached.as_mut();
        attached.filter(|it| it.connection == connection)
    }

    fn note_daemon(
        &mut self,
        connection: ConnectionNumber,
        number: u32,
        process: OwnedFd,
    ) -> Reaction {
        let Some(attached) = self.attached_by(connection) else {
            return Reaction::Part(None);
        };
        let keeper = attached.identity;
        self.daemon = Some(HeldDaemon {
            keeper,
            process: KeptDaemon { number, process },
        });
        Reaction::None
    }

    fn begin_anew(&mut self, connection: ConnectionNumber) -> Reaction {
        let anew = self.table.emptied();
        let Some(attached) = self.attached_by(connection) else {
            return Reaction::Part(None);
        };
        attached.anew = Some(anew);
        attached.missed = 0;
        Reaction::None
    }

    /// What came anew takes the place of what was held, all at once: whenever the keeper ends, what is held is of one daemon.
    fn count(&mut self, connection: ConnectionNumber) -> Reaction {
        let Some(attached) = self.attached_by(connection) else {
            return Reaction::Part(None);
        };
        let (anew, missed) = (attached.anew.take(), std::mem::take(&mut attached.missed));
        let freed = anew.map_or(0, |anew| {
            let freed = self.table.beyond(&anew);
            self.table = anew;
            freed
        });
        let held = self.table.len();
        if freed > 0 {
            tracing::info!(held, freed, "another table took the place of what was held");
        }
        Reaction::Say(if missed > 0 {
            HoldAnswer::Lacks(missed)
        } else {
            HoldAnswer::Holds(HeldCount { held, freed })
        })
    }

    fn change(
        &mut self,
        connection: ConnectionNumber,
        body: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> Reaction {
        let attached = self.attached.as_mut();
        let Some(attached) = attached.filter(|it| it.connection == connection) else {
            return Reaction::Part(None);
        };
        let table = attached.anew.as_mut().unwrap_or(&mut self.table);
        match table.take(body, descriptor) {
            Taken::Stored(_) | Taken::Removed(_) => Reaction::None,
            Taken::Asked => Reaction::List(self.table.names().collect()),
            // A holder has none of its own to tell of.
            Taken::Watched | Taken::Odd | Taken::Full => self.missed(connection),
        }
    }

    /// Something came that was not taken: its keeper hears of it when it asks how much is held.
    fn missed(&mut self, connection: ConnectionNumber) -> Reaction {
        let Some(attached) = self.attached_by(connection) else {
            return Reaction::Part(None);
        };
        attached.missed += 1;
        if attached.missed == 1 {
            tracing::warn!("not all that the keeper sends is taken");
        }
        Reaction::None
    }

    /// Nothing comes over this connection any more.
    fn ended(&mut self, connection: ConnectionNumber) {
        if self.is_attached(connection) {
            self.attached = None;
            let descriptors = self.table.len();
            tracing::info!(descriptors, "the keeper has gone: holding for the next one");
        }
    }
}

#[cfg(test)]
mod tests;
