//! The keeper: the process that `storaged run` starts as. It runs the daemon as its child, holds the descriptors that the daemon hands to
//! it, and when the daemon dies starts it again and hands them back.
//!
//! It must not die of what the daemon dies of: one thread, no network, no configuration, and it reads nothing but datagrams of a fixed form
//! (`message`). It stays when the daemon below it is upgraded, so the less it does the better. The daemon has the other end of a pair of
//! sockets as its standard input: descriptors and numbers need no other way to it.
//!
//! What ends with its container it hands on to a holder (`holdings`). It needs nothing of that one while it lives.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};
use std::{env, fs, io};

use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use storaged_arena::{Received, Recipient, recv_datagram, send_datagram};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal as Heard, SignalKind, signal};

use super::holder_reports::ToldOfHolder;
use super::holdings::{AfterKeeper, Holdings};
use super::message::{DATAGRAM_MAX, FromKeeper, HolderName};
use super::table::{Table, Taken};
use super::{KEEPER_NAME, KEPT_BY_VARIABLE, KeepError, TELLS_OF_HOLDER, TELLS_VARIABLE};

/// How a daemon ends that is to be started again at once (EX_IOERR of sysexits.h, which nothing else here ends with).
pub const EXIT_AGAIN: u8 = 74;
/// Ends that a new start would not mend: done, stopped with work unfinished, a configuration that cannot be used.
const FINAL: [i32; 3] = [0, 75, UNUSABLE];
/// The configuration cannot be used.
const UNUSABLE: i32 = 78;

/// Before a daemon that died is started again.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// One that lived for so long did not die of its start.
const STEADY: Duration = Duration::from_secs(60);
/// A daemon that is to be started again ends at once, or is ended.
const AGAIN_WITHIN: Duration = Duration::from_secs(2);
/// When the system has no room for a datagram for a while.
const RETRY: Duration = Duration::from_millis(10);
/// Datagrams that are handled before signals are looked at again.
const TURN: usize = 64;

/// What the daemon is started as.
#[derive(Debug, Clone)]
pub struct Program {
    /// Looked up again at each start, so that a binary that was replaced is used.
    pub path: PathBuf,
    /// Without the name.
    pub arguments: Vec<OsString>,
}

impl Program {
    /// As this process was started.
    ///
    /// # Errors
    /// If the system does not say what this process is.
    pub fn of_this_process() -> Result<Self, KeepError> {
        let own = env::current_exe().map_err(KeepError::io("finding this program"))?;
        let mut arguments = env::args_os();
        let named = arguments.next().map(PathBuf::from);
        let arguments = arguments.collect();
        let path = named.and_then(|name| path_as_named(&name, &own));
        let path = path.unwrap_or(own);
        Ok(Self { path, arguments })
    }
}

/// The path by which a program was started, if it leads to it. It may go by a link, and an upgrade may change that link.
fn path_as_named(name: &Path, own: &Path) -> Option<PathBuf> {
    // Without a slash it was looked for in PATH, and may be anything in this folder.
    let has_folder = name.parent().is_some_and(|it| it != Path::new(""));
    let path = std::path::absolute(name).ok().filter(|_| has_folder)?;
    let leads_to = fs::canonicalize(&path).ok()?;
    (leads_to == fs::canonicalize(own).ok()?).then_some(path)
}

/// Whether this process was started by a keeper.
pub fn is_kept() -> bool {
    env::var_os(KEPT_BY_VARIABLE).is_some()
}

/// Runs the daemon until it ends for good, or is left to the holder; the exit code that this process ends with then.
///
/// # Errors
/// [`KeepError`] if the daemon cannot be started a first time, or the holder has another one's memory.
pub fn keep(program: Program, holder: Option<PathBuf>) -> Result<u8, KeepError> {
    raise_limit();
    // So that `ps` tells the two apart. It is only a name.
    let _ = rustix::thread::set_name(KEEPER_NAME);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build();
    let runtime = runtime.map_err(KeepError::io("starting the keeper's runtime"))?;
    runtime.block_on(async { KeeperProcess::over(program, holder)?.run().await })
}

/// A table of descriptors needs more than the 1,024 that a process may open unless it asks; the daemon, which is started with the same
/// limit, needs as many.
pub(super) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of open descriptors stays as it is");
    }
}

/// What this process is told by signals.
struct Signals {
    term: Heard,
    int: Heard,
    hup: Heard,
    usr1: Heard,
    usr2: Heard,
    /// What would end a process that does not say otherwise.
    _ignored: io::Result<Heard>,
}

impl Signals {
    fn listen() -> Result<Self, KeepError> {
        let listen = |kind| signal(kind).map_err(KeepError::io("listening for signals"));
        Ok(Self {
            term: listen(SignalKind::terminate())?,
            int: listen(SignalKind::interrupt())?,
            hup: listen(SignalKind::hangup())?,
            usr1: listen(SignalKind::user_defined1())?,
            usr2: listen(SignalKind::user_defined2())?,
            _ignored: signal(SignalKind::alarm()),
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.term.recv() => Signal::TERM,
            _ = self.int.recv() => Signal::INT,
            _ = self.hup.recv() => Signal::HUP,
            _ = self.usr1.recv() => Signal::USR1,
            _ = self.usr2.recv() => Signal::USR2,
        }
    }

    /// Returns when this process is told to end; what it ends with, where there was no daemon yet.
    async fn end(&mut self) -> u8 {
        loop {
            let told = self.next().await;
            if told == Signal::TERM || told == Signal::INT {
                return u8::try_from(128 + told.as_raw()).unwrap_or(1);
            }
        }
    }
}

/// What a daemon was told about its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Nothing.
    Live,
    /// To end by then, to be started again.
    EndBy(tokio::time::Instant),
    /// It did not, and was killed.
    Killed,
}

impl Order {
    /// Returns when a daemon that was told to end is late.
    async fn late(self) {
        match self {
            Self::EndBy(by) => tokio::time::sleep_until(by).await,
            Self::Live | Self::Killed => std::future::pending().await,
        }
    }
}

/// How a wait ended.
#[derive(Debug, PartialEq, Eq)]
enum Lull {
    /// It is over.
    Over,
    /// The keeper was told to end.
    Cut,
    /// It was told to leave everything to the holder, which takes it.
    HandOver,
}

/// One life of the daemon.
struct Life {
    child: Child,
    socket: UnixDatagram,
    /// What it asked for and was not sent yet.
    answers: VecDeque<HolderName>,
    /// How many it was sent, from when it asked until it has all.
    sent: Option<usize>,
    /// What it knows of the holder.
    told_of_holder: ToldOfHolder,
    began: Instant,
    order: Order,
    /// The daemon has asked what is held for it, which it does before it reads its configuration.
    has_asked: bool,
    /// An odd datagram is said once.
    said_odd: bool,
}

impl Life {
    fn wish(&self) -> Interest {
        if self.sent.is_some() || self.told_of_holder.waits() {
            Interest::READABLE | Interest::WRITABLE
        } else {
            Interest::READABLE
        }
    }

    /// Tells the daemon. Its number is its own until its end was waited for.
    fn signal(&self, told: Signal) {
        let process = self.child.id().and_then(|id| i32::try_from(id).ok());
        if let Some(process) = process.and_then(Pid::from_raw)
            && let Err(error) = kill_process(process, told)
        {
            tracing::warn!(%error, "the daemon cannot be told");
        }
    }

    /// Takes what has come and answers what was asked, as far as it goes without waiting.
    fn turn(&mut self, held: &mut Holdings) -> io::Result<()> {
        let mut body = [0; DATAGRAM_MAX];
        for _ in 0..TURN {
            let received = self.socket.try_io(Interest::READABLE, || {
                recv_datagram(&self.socket, &mut body)
            });
            match received {
                Ok(received) => self.take(held, &body, received),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        self.answer(held.table())
    }

    /// Takes what a daemon that has ended handed over last. Nobody writes to the queue any more, so it has an end.
    fn drain(&mut self, held: &mut Holdings) {
        let mut body = [0; DATAGRAM_MAX];
        while let Ok(received) = recv_datagram(&self.socket, &mut body) {
            self.take(held, &body, received);
        }
    }

    fn take(&mut self, held: &mut Holdings, body: &[u8], received: Received) {
        let taken = match received {
            Received::Whole { length, descriptor } => held.take(&body[..length], descriptor),
            Received::Odd => Taken::Odd,
        };
        match taken {
            Taken::Stored(_) | Taken::Removed(_) => {}
            Taken::Asked => {
                self.has_asked = true;
                self.answers = held.table().names().collect();
                self.sent = Some(0);
            }
            Taken::Watched => self.told_of_holder = ToldOfHolder::Waits,
            Taken::Odd | Taken::Full => {
                if !self.said_odd {
                    let held = held.table().len();
                    tracing::warn!(
                        ?taken,
                        held,
                        "the keeper does not take what the daemon sends"
                    );
                }
                self.said_odd = true;
            }
        }
    }

    /// One datagram per descriptor, then how many there were.
    fn answer(&mut self, table: &Table) -> io::Result<()> {
        while let Some(sent) = self.sent {
            let name = self.answers.front().cloned();
            let descriptor = name.as_ref().and_then(|name| table.get(name));
            let (message, then) = match name {
                // Let go of meanwhile.
                Some(_) if descriptor.is_none() => {
                    self.answers.pop_front();
                    continue;
                }
                Some(name) => (FromKeeper::Held(name), Some(sent + 1)),
                None => (FromKeeper::End(sent), None),
            };
            let body = message.encode();
            let gone = self.socket.try_io(Interest::WRITABLE, || {
                send_datagram(&self.socket, &Recipient::Peer, body.as_bytes(), descriptor)
            });
            match gone {
                Ok(()) => {
                    self.answers.pop_front();
                    self.sent = then;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    // Whoever asked is ending.
                    self.answers.clear();
                    self.sent = None;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// How a life ended.
struct Death {
    status: ExitStatus,
    lived: Duration,
    was_told_again: bool,
}

/// What then.
#[derive(Debug, PartialEq, Eq)]
enum Then {
    /// The keeper ends too, with this exit code.
    End(u8),
    /// The daemon is started again after a while.
    Start(Duration),
}

/// How long a daemon that died stays dead.
#[derive(Debug)]
struct Pause {
    next: Duration,
}

impl Pause {
    fn after(&mut self, lived: Duration) -> Duration {
        if lived >= STEADY {
            self.next = PAUSE_MIN;
        }
        let pause = self.next;
        self.next = (pause * 2).min(PAUSE_MAX);
        pause
    }
}

/// The exit code that says how a process ended, as a shell has it.
fn code_of(status: ExitStatus) -> u8 {
    let code = status.code();
    let code = code.or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// The keeper's whole state.
struct KeeperProcess {
    program: Program,
    held: Holdings,
    signals: Signals,
    pause: Pause,
    /// This process was told to end, and so was the daemon.
    is_ending: bool,
    /// It was told to leave everything to the holder, and the daemon to end for that.
    is_handing_over: bool,
}

impl KeeperProcess {
    fn over(program: Program, holder: Option<PathBuf>) -> Result<Self, KeepError> {
        Ok(Self {
            program,
            held: Holdings::with_holder(holder),
            signals: Signals::listen()?,
            pause: Pause { next: PAUSE_MIN },
            is_ending: false,
            is_handing_over: false,
        })
    }

    /// Its own end is the holder's to outlive, whatever the daemon's was: one that went for good has had everything let go of.
    async fn run(mut self) -> Result<u8, KeepError> {
        tokio::select! {
            taken = self.held.take_over() => taken?,
            code = self.signals.end() => return Ok(code),
        }
        let code = self.keep_daemon().await?;
        let descriptors = self.held.table().len();
        let (signals, was_told) = (&mut self.signals, self.is_ending);
        let told_once_more = async {
            if !was_told {
                signals.end().await;
            }
            signals.end().await
        };
        let after = tokio::select! {
            after = self.held.hand_on() => after,
            _ = told_once_more => AfterKeeper::Unsure,
        };
        match after {
            AfterKeeper::Free => {}
            AfterKeeper::Held if descriptors == 0 => {
                tracing::info!("ending: the holder has nothing for this node")
            }
            AfterKeeper::Held => {
                tracing::info!(descriptors, "ending: the memory stays with the holder")
            }
            AfterKeeper::Unsure if descriptors == 0 => tracing::warn!(
                "ending, and the holder has not said that it let go of everything: `storaged hold --release` frees what it has"
            ),
            AfterKeeper::Unsure => tracing::warn!(
                descriptors,
                "ending, and the holder has not said that it has the memory"
            ),
        }
        Ok(code)
    }

    async fn keep_daemon(&mut self) -> Result<u8, KeepError> {
        let mut life = self.start()?;
        let program = self.program.path.display();
        tracing::info!(%program, daemon = life.child.id(), "holding descriptors for the daemon");
        loop {
            let death = self.live(life).await;
            if std::mem::take(&mut self.is_handing_over) && self.has_handed_over().await {
                return Ok(0);
            }
            let mut wait = match self.then(&death, self.held.table().len()) {
                Then::End(code) => return Ok(code),
                Then::Start(wait) => wait,
            };
            let (how, descriptors) = (death.status, self.held.table().len());
            if death.was_told_again {
                tracing::info!(%how, descriptors, "starting the daemon again, as told");
            } else {
                tracing::warn!(%how, descriptors, after = ?wait, "the daemon died and is started again");
            }
            life = loop {
                match self.rest(wait).await {
                    Lull::Cut => {
                        self.is_ending = true;
                        return Ok(code_of(death.status));
                    }
                    Lull::HandOver if self.has_handed_over().await => return Ok(0),
                    Lull::HandOver if self.is_ending => return Ok(code_of(death.status)),
                    Lull::HandOver | Lull::Over => {}
                }
                // That one's daemon may have this memory too, and two would write over each other.
                if let Some(process) = self.held.is_taken().await {
                    return Err(KeepError::HolderTaken { process });
                }
                self.held.let_go_if_told();
                match self.start() {
                    Ok(life) => break life,
                    // The binary may be about to be replaced.
                    Err(error) => {
                        wait = self.pause.after(Duration::ZERO);
                        let error = crate::driver::chain(&error);
                        tracing::warn!(error, after = ?wait, "the daemon cannot be started");
                    }
                }
            };
        }
    }

    /// The daemon has ended for that. Without a holder that has said that it has all, it is started again.
    async fn has_handed_over(&mut self) -> bool {
        let handing_on = self.held.hand_on();
        tokio::pin!(handing_on);
        let after = tokio::select! {
            after = &mut handing_on => after,
            // It ends in any case then, and the holder has its time all the same.
            _ = self.signals.end() => {
                self.is_ending = true;
                handing_on.await
            }
        };
        if after != AfterKeeper::Held {
            tracing::warn!(
                ?after,
                "not handed over: the holder has not said that it has the memory"
            );
        }
        after == AfterKeeper::Held
    }

    fn then(&mut self, death: &Death, held: usize) -> Then {
        // A configuration that cannot be used is mended sooner or later. What is held now would not come back.
        let may_be_mended = |code: i32| code == UNUSABLE && held > 0;
        let is_final = death
            .status
            .code()
            .is_some_and(|code| FINAL.contains(&code) && !may_be_mended(code));
        if is_final || self.is_ending {
            Then::End(code_of(death.status))
        } else if death.was_told_again {
            Then::Start(Duration::ZERO)
        } else {
            Then::Start(self.pause.after(death.lived))
        }
    }

    /// Waits before a start. Whoever ends the keeper or has it hand over meanwhile cuts it short; what else it is told is for a daemon that is
    /// not there.
    async fn rest(&mut self, wait: Duration) -> Lull {
        let over = tokio::time::sleep(wait);
        tokio::pin!(over);
        loop {
            self.held.let_go_if_told();
            tokio::select! {
                () = &mut over => {
                    self.held.turn();
                    self.held.let_go_if_told();
                    return Lull::Over;
                }
                () = self.held.ready() => self.held.turn(),
                told = self.signals.next() => {
                    if told == Signal::TERM || told == Signal::INT {
                        return Lull::Cut;
                    }
                    if told == Signal::USR1 && self.may_hand_over() {
                        return Lull::HandOver;
                    }
                }
            }
        }
    }

    /// Each life has sockets of its own: it must not read what was meant for the one before.
    fn start(&mut self) -> Result<Life, KeepError> {
        let starting = || KeepError::io("starting the daemon");
        let pair = std::os::unix::net::UnixDatagram::pair().map_err(starting())?;
        let (here, there) = pair;
        here.set_nonblocking(true).map_err(starting())?;
        let socket = UnixDatagram::from_std(here).map_err(starting())?;
        let child = Command::new(&self.program.path)
            .args(&self.program.arguments)
            .env(KEPT_BY_VARIABLE, std::process::id().to_string())
            .env(TELLS_VARIABLE, TELLS_OF_HOLDER)
            .stdin(OwnedFd::from(there))
            .spawn();
        let child = child.map_err(starting())?;
        self.held.daemon_is(child.id());
        self.held.turn();
        Ok(Life {
            child,
            socket,
            answers: VecDeque::new(),
            sent: None,
            told_of_holder: ToldOfHolder::default(),
            began: Instant::now(),
            order: Order::Live,
            has_asked: false,
            said_odd: false,
        })
    }

    /// Serves a daemon until it ends.
    async fn live(&mut self, mut life: Life) -> Death {
        let status = loop {
            let report = self.held.report();
            life.told_of_holder.tell(report, &life.socket);
            let wish = life.wish();
            let order = life.order;
            tokio::select! {
                // A flood of datagrams keeps nothing else waiting.
                biased;
                status = life.child.wait() => match status {
                    Ok(status) => break status,
                    // Without it nobody could say how the daemon ended; it is there until it was waited for.
                    Err(error) => {
                        tracing::error!(%error, "waiting for the daemon failed");
                        tokio::time::sleep(RETRY).await;
                    }
                },
                told = self.signals.next() => self.pass_on(told, &mut life),
                () = order.late() => {
                    life.order = Order::Killed;
                    life.signal(Signal::KILL);
                }
                ready = life.socket.ready(wish) => {
                    if ready.is_err() || life.turn(&mut self.held).is_err() {
                        tokio::time::sleep(RETRY).await;
                    }
                    // What has come goes on at once, whatever else comes.
                    self.held.turn();
                }
                () = self.held.ready() => self.held.turn(),
            }
        };
        life.drain(&mut self.held);
        Death {
            status,
            lived: life.began.elapsed(),
            was_told_again: life.order != Order::Live,
        }
    }

    fn pass_on(&mut self, told: Signal, life: &mut Life) {
        if told == Signal::TERM || told == Signal::INT {
            self.is_ending = true;
        } else if told == Signal::USR2 {
            life.order = Order::EndBy(tokio::time::Instant::now() + AGAIN_WITHIN);
        } else if told == Signal::USR1 {
            self.begin_to_hand_over(life);
            return;
        } else if told == Signal::HUP && !life.has_asked {
            // It would die of it, and is about to read its configuration in any case.
            return;
        }
        life.signal(told);
    }

    fn may_hand_over(&self) -> bool {
        let has_holder = self.held.has_holder();
        if !has_holder {
            tracing::warn!("not handed over: there is no holder that takes the memory");
        }
        has_holder
    }

    /// Ends the daemon as an upgrade does, if somebody is there to whom this process can leave what it has.
    fn begin_to_hand_over(&mut self, life: &mut Life) {
        if !self.may_hand_over() {
            return;
        }
        tracing::info!("ending the daemon, to leave its memory to the holder");
        self.is_handing_over = true;
        life.order = Order::EndBy(tokio::time::Instant::now() + AGAIN_WITHIN);
        life.signal(Signal::USR2);
    }
}

#[cfg(test)]
mod tests;
