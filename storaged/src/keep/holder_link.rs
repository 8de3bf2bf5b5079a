//! The keeper's side of its holder: what the keeper has is handed on as it comes, and taken back as it goes.
//!
//! Nothing here waits for the holder but what says so, before there is a daemon and after its end. A holder that is away, hangs or comes back
//! costs the daemon nothing: the keeper goes on, and says all of its table anew once somebody listens again, in place of whatever is held
//! there. What is said goes in the order in which the daemon said it, so that what is held is always what the keeper held a moment before.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use storaged_arena::Received;
use tokio::io::Interest;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::KeepError;
use super::kept_daemon::KeptDaemon;
use super::message::{
    DATAGRAM_MAX, FromKeeper, HeldCount, HoldAnswer, HoldOrder, HolderName, HolderReport,
    KeeperIdentity, ToHolder,
};
use super::packets::{Packets, is_gone};
use super::table::{Table, Taken};

/// A holder that does not answer is waited for so long before a daemon is started without what it has.
const HOLDER_WAIT: Duration = Duration::from_secs(10);
/// A holder says within this time whether another keeper has taken this one's place.
const TAKEN_WAIT: Duration = Duration::from_secs(3);
/// A daemon that still has the memory ends within this time: its pod is being replaced.
const TURN_WAIT: Duration = Duration::from_secs(30);
/// Between two looks meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Before a holder that is away is tried again.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A holder that takes and answers nothing for so long hangs.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// When the system has no room for a datagram for a while.
const RETRY: Duration = Duration::from_millis(10);
/// Changes that wait beside a table that is said anew. Beyond that it is said anew again.
const CHANGES_MAX: usize = 4_096;
/// Datagrams that are handled before the keeper looks at its daemon again.
const TURN: usize = 64;

/// A keeper's way to its holder.
#[derive(Debug)]
pub struct HolderLink {
    path: PathBuf,
    identity: KeeperIdentity,
    state: HolderState,
    /// The daemon that runs, or ran last.
    daemon: Option<KeptDaemon>,
    pause: Duration,
    /// That the holder is away was said.
    has_complained: bool,
    /// When that was, in seconds since 1970.
    complained_at: u64,
    /// The holder has let go of everything, while no daemon ran.
    has_let_go: bool,
    /// A daemon was started of which the system gave no descriptor: nobody can tell whether it runs.
    runs_unseen: bool,
    /// Whose memory the holder has now, as it said when this keeper came back.
    taken_by: Option<u32>,
}

#[derive(Debug)]
enum HolderState {
    Away { again_at: Instant },
    Up(HolderTalk),
}

/// What is to be said.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Saying {
    Order(HoldOrder),
    /// Which daemon there is.
    Daemon,
    /// Nothing, if the table has lost it meanwhile: that follows.
    Store(HolderName),
    Remove(HolderName),
}

/// A connection to a holder.
#[derive(Debug)]
struct HolderTalk {
    packets: Packets,
    outbox: VecDeque<Saying>,
    /// Counts that were asked for, and not answered yet.
    counts: usize,
    /// Something was said since the last of them.
    has_news: bool,
    /// The holder has said that it has all.
    is_agreed: bool,
    /// The system had no room until then.
    retry_at: Option<Instant>,
    /// Something must have moved by then.
    due: Instant,
}

/// Why a holder gives nothing.
enum NoHandover {
    /// It is not there, or says something else.
    Away(io::Error),
    /// It broke off while it gave.
    Broken(io::Error),
    /// It holds for another daemon.
    Busy(u32),
}

impl From<io::Error> for NoHandover {
    fn from(error: io::Error) -> Self {
        Self::Away(error)
    }
}

impl HolderTalk {
    fn over(packets: Packets) -> Self {
        Self {
            packets,
            outbox: VecDeque::new(),
            counts: 0,
            has_news: true,
            is_agreed: false,
            retry_at: None,
            due: Instant::now() + SILENCE_MAX,
        }
    }

    fn push(&mut self, saying: Saying) {
        if !self.waits() {
            self.due = Instant::now() + SILENCE_MAX;
        }
        if saying == Saying::Order(HoldOrder::Count) {
            self.counts += 1;
            self.has_news = false;
        } else {
            self.has_news = true;
            self.is_agreed = false;
        }
        self.outbox.push_back(saying);
    }

    /// What has changed, before a count that waits to be said: a table that comes anew may lack what was removed since, as its journal, and
    /// must not count before what took its place is there.
    fn push_change(&mut self, change: Saying) {
        let count = Saying::Order(HoldOrder::Count);
        let is_counted = self.outbox.back() == Some(&count);
        if is_counted {
            self.outbox.pop_back();
            self.counts = self.counts.saturating_sub(1);
        }
        self.push(change);
        if is_counted {
            self.push(count);
        }
    }

    /// What is held is asked for once more.
    fn ask_anew(&mut self) {
        self.has_news = true;
        self.is_agreed = false;
        self.due = Instant::now() + SILENCE_MAX;
    }

    /// All of the table, in place of what is held and of what waits to be said.
    fn push_all(&mut self, table: &Table) {
        let is_attach = |it: &&Saying| matches!(it, Saying::Order(HoldOrder::Attach(_)));
        let attach = self.outbox.front().filter(is_attach).cloned();
        let count = Saying::Order(HoldOrder::Count);
        let unsaid = self.outbox.iter().filter(|it| **it == count).count();
        self.counts = self.counts.saturating_sub(unsaid);
        self.outbox.clear();
        if let Some(attach) = attach {
            self.push(attach);
        }
        self.push(Saying::Order(HoldOrder::Anew));
        self.push(Saying::Daemon);
        for name in table.names() {
            self.push(Saying::Store(name));
        }
        self.push(count);
    }

    /// Something is to be said, or to be answered.
    fn waits(&self) -> bool {
        self.says() || self.counts > 0
    }

    fn says(&self) -> bool {
        !self.outbox.is_empty() || (self.has_news && self.counts == 0)
    }

    /// Returns when something may be done.
    async fn ready(&self) {
        let wish = match self.retry_at {
            None if self.says() => Interest::READABLE | Interest::WRITABLE,
            _ => Interest::READABLE,
        };
        let retry = async {
            match self.retry_at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            ready = self.packets.ready(wish) => if ready.is_err() {
                sleep(RETRY).await;
            },
            () = retry => {}
        }
    }

    /// Takes what was answered; the last answer of those that have come.
    fn receive(&mut self) -> io::Result<Option<HoldAnswer>> {
        let mut body = [0; DATAGRAM_MAX];
        let mut last = None;
        for _ in 0..TURN {
            match self.packets.try_receive(&mut body) {
                Ok(Received::Whole { length, .. }) => {
                    let answer = HoldAnswer::decode(&body[..length]);
                    let answer = answer.ok_or(io::ErrorKind::InvalidData)?;
                    self.due = Instant::now() + SILENCE_MAX;
                    // That one is told unasked.
                    if !matches!(answer, HoldAnswer::Released(_)) {
                        self.counts = self.counts.saturating_sub(1);
                    }
                    last = Some(answer);
                    if !matches!(answer, HoldAnswer::Holds(_)) {
                        break;
                    }
                }
                Ok(Received::Odd) => return Err(io::ErrorKind::InvalidData.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(last)
    }

    /// Why the holder has closed, if it said so.
    fn refusal(&self) -> Option<HoldAnswer> {
        let mut body = [0; DATAGRAM_MAX];
        let Ok(Received::Whole { length, .. }) = self.packets.last_word(&mut body) else {
            return None;
        };
        let answer = HoldAnswer::decode(&body[..length]);
        answer.filter(|it| matches!(it, HoldAnswer::Busy(_) | HoldAnswer::Stranger(_)))
    }

    /// Says what is to be said, as far as it goes without waiting.
    fn send(&mut self, table: &Table, daemon: Option<&KeptDaemon>) -> io::Result<()> {
        self.retry_at = None;
        if self.outbox.is_empty() && self.has_news && self.counts == 0 {
            self.push(Saying::Order(HoldOrder::Count));
        }
        for _ in 0..TURN {
            let Some(saying) = self.outbox.front() else {
                break;
            };
            let (body, descriptor) = match saying {
                Saying::Order(order) => (Some(order.encode()), None),
                Saying::Daemon => {
                    let order = daemon.map(|it| HoldOrder::Daemon(it.number).encode());
                    (order, daemon.map(|it| it.process.as_fd()))
                }
                Saying::Store(name) => match table.get(name) {
                    Some(descriptor) => {
                        let store = ToHolder::Store(name.clone());
                        (Some(store.encode()), Some(descriptor))
                    }
                    None => (None, None),
                },
                Saying::Remove(name) => (Some(ToHolder::Remove(name.clone()).encode()), None),
            };
            let sent = body.map_or(Ok(()), |body| self.packets.try_send(&body, descriptor));
            match sent {
                Ok(()) => {
                    self.outbox.pop_front();
                    self.due = Instant::now() + SILENCE_MAX;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if is_gone(&error) => return Err(error),
                Err(_) => {
                    self.retry_at = Some(Instant::now() + RETRY);
                    break;
                }
            }
        }
        Ok(())
    }
}

impl HolderLink {
    /// To the holder at this path. Nothing is said to it yet.
    pub fn to(path: PathBuf) -> Self {
        Self {
            path,
            identity: KeeperIdentity {
                process: std::process::id(),
                mark: rand::random(),
            },
            state: HolderState::Away {
                again_at: Instant::now(),
            },
            daemon: None,
            pause: PAUSE_MIN,
            has_complained: false,
            complained_at: wall_clock(),
            has_let_go: false,
            runs_unseen: false,
            taken_by: None,
        }
    }

    /// Takes what the holder has, before there is a daemon. Whoever has it still is waited for, and so is a holder that is about to start.
    ///
    /// # Errors
    /// [`KeepError::HolderTaken`] if another daemon does not end.
    pub async fn take_over(&mut self, table: &mut Table) -> Result<(), KeepError> {
        let began = Instant::now();
        // A holder that was there a moment ago is not away yet: what it has would be let go of.
        let mut away_since = began;
        let mut has_said = false;
        loop {
            let waited = match self.try_take_over(table).await {
                Ok(()) => return Ok(()),
                Err(NoHandover::Busy(process)) if began.elapsed() >= TURN_WAIT => {
                    return Err(KeepError::HolderTaken { process });
                }
                Err(NoHandover::Busy(process)) => {
                    away_since = Instant::now();
                    format!("it holds for process {process}")
                }
                Err(NoHandover::Broken(error)) if began.elapsed() < TURN_WAIT => {
                    away_since = Instant::now();
                    error.to_string()
                }
                Err(NoHandover::Broken(error)) => {
                    self.lose(&error);
                    return Ok(());
                }
                Err(NoHandover::Away(error)) if away_since.elapsed() >= HOLDER_WAIT => {
                    self.lose(&error);
                    return Ok(());
                }
                Err(NoHandover::Away(error)) => error.to_string(),
            };
            if !has_said {
                tracing::info!(socket = %self.path.display(), waited, "waiting for the holder");
            }
            has_said = true;
            sleep(LOOK_EVERY).await;
        }
    }

    async fn try_take_over(&mut self, table: &mut Table) -> Result<(), NoHandover> {
        let mut talk = HolderTalk::over(Packets::connect(&self.path)?);
        // What an attempt that fails has got is not mixed with what the next one gets.
        let mut listed = Table::default();
        let count = match self.list(&talk.packets, &mut listed).await {
            Err(NoHandover::Away(error)) if listed.len() > 0 => {
                return Err(NoHandover::Broken(error));
            }
            count => count?,
        };
        let got = listed.len();
        if count != got {
            tracing::warn!(count, got, "the holder's descriptors did not all arrive");
            talk.push_all(&listed);
        }
        if got > 0 {
            tracing::info!(descriptors = got, "took over what the holder has");
        }
        *table = listed;
        self.state = HolderState::Up(talk);
        Ok(())
    }

    async fn ask_list(&self, packets: &Packets) -> io::Result<()> {
        let attach = HoldOrder::Attach(self.identity).encode();
        packets.send(&attach).await?;
        packets.send(&ToHolder::List.encode()).await
    }

    /// What is held comes into the table; how much there was.
    async fn list(&self, packets: &Packets, table: &mut Table) -> Result<usize, NoHandover> {
        let sent = unless_silent(self.ask_list(packets)).await;
        let mut body = [0; DATAGRAM_MAX];
        loop {
            // Whoever is refused at its first word cannot say its second one, and is told why all the same.
            let received = match unless_silent(packets.receive(&mut body)).await {
                Ok(received) => received,
                Err(error) => return Err(sent.err().unwrap_or(error).into()),
            };
            // What there is no room for shows in the count.
            let Received::Whole { length, descriptor } = received else {
                continue;
            };
            let body = &body[..length];
            match (FromKeeper::decode(body), descriptor) {
                (Some(FromKeeper::Held(name)), Some(descriptor)) => table.put(name, descriptor),
                (Some(FromKeeper::End(count)), None) => return Ok(count),
                _ => return Err(refusal_in(body)),
            }
        }
    }

    /// The daemon that was started: nobody else is let in while it runs, whatever becomes of this process.
    pub fn daemon_is(&mut self, number: Option<u32>) {
        let number = number.and_then(|it| i32::try_from(it).ok().and_then(Pid::from_raw));
        // Whatever becomes of the rest, it is not the one before it any more.
        self.daemon = None;
        self.runs_unseen = true;
        let Some(pid) = number else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
            return;
        };
        self.runs_unseen = false;
        let number = pid.as_raw_nonzero().get().unsigned_abs();
        self.daemon = Some(KeptDaemon { number, process });
        if let HolderState::Up(talk) = &mut self.state {
            talk.push(Saying::Daemon);
        }
    }

    /// Hands on what has become of the table.
    pub fn note(&mut self, taken: &Taken, table: &Table) {
        let HolderState::Up(talk) = &mut self.state else {
            return;
        };
        talk.push_change(match taken {
            Taken::Stored(name) => Saying::Store(name.clone()),
            Taken::Removed(name) => Saying::Remove(name.clone()),
            Taken::Asked | Taken::Watched | Taken::Odd | Taken::Full => return,
        });
        if talk.outbox.len() > CHANGES_MAX + table.len() {
            talk.push_all(table);
        }
    }

    /// Returns when [`Self::turn`] has something to do.
    pub async fn ready(&self) {
        match &self.state {
            HolderState::Away { again_at } => sleep_until(*again_at).await,
            HolderState::Up(talk) if talk.waits() && !self.has_complained => {
                tokio::select! {
                    () = talk.ready() => {}
                    () = sleep_until(talk.due) => {}
                }
            }
            HolderState::Up(talk) => talk.ready().await,
        }
    }

    /// Does what goes without waiting.
    pub fn turn(&mut self, table: &Table) {
        let talked = match &mut self.state {
            HolderState::Away { again_at } if Instant::now() < *again_at => return,
            HolderState::Away { .. } => self.connect(table),
            HolderState::Up(talk) => {
                let answer = talk.receive();
                answer.and_then(|answer| {
                    if !matches!(answer, None | Some(HoldAnswer::Holds(_))) {
                        return Ok(answer);
                    }
                    let sent = talk.send(table, self.daemon.as_ref());
                    // Whoever is refused is told why before it finds nobody there.
                    sent.map(|()| answer)
                        .or_else(|error| talk.refusal().map(Some).ok_or(error))
                })
            }
        };
        let heeded = talked.and_then(|answer| answer.map_or(Ok(()), |it| self.heed(it, table)));
        if let Err(error) = heeded {
            self.lose(&error);
        } else {
            self.complain_of_silence();
        }
    }

    fn connect(&mut self, table: &Table) -> io::Result<Option<HoldAnswer>> {
        let connected = Packets::connect(&self.path);
        if connected.is_err() {
            self.taken_by = None;
        }
        let mut talk = HolderTalk::over(connected?);
        talk.push(Saying::Order(HoldOrder::Attach(self.identity)));
        talk.push_all(table);
        self.state = HolderState::Up(talk);
        Ok(None)
    }

    fn heed(&mut self, answer: HoldAnswer, table: &Table) -> io::Result<()> {
        let HolderState::Up(talk) = &mut self.state else {
            return Ok(());
        };
        let HeldCount { held, freed } = match answer {
            HoldAnswer::Holds(count) => {
                self.taken_by = None;
                count
            }
            HoldAnswer::Busy(process) => {
                self.taken_by = Some(process);
                return Err(other(format!("it holds for process {process}")));
            }
            HoldAnswer::Lacks(count) => {
                return Err(other(format!("it did not take {count} descriptors")));
            }
            HoldAnswer::Stranger(user) => return Err(other(format!("it refuses user id {user}"))),
            HoldAnswer::Released(_) => {
                self.heed_release(table);
                return Ok(());
            }
        };
        if freed > 0 {
            tracing::warn!(
                freed,
                "the holder let go of memory that this keeper does not have: an earlier daemon's, or of before a break"
            );
        }
        // What it was told to let go of is not counted before this keeper has let go of it too.
        if talk.counts > 0 || talk.has_news || self.has_let_go {
            return Ok(());
        }
        if held != table.len() {
            let kept = table.len();
            return Err(other(format!("it holds {held} descriptors of {kept}")));
        }
        talk.is_agreed = true;
        self.pause = PAUSE_MIN;
        if std::mem::take(&mut self.has_complained) {
            tracing::info!(held, "the holder is back, and has everything");
        }
        Ok(())
    }

    /// A daemon that was started meanwhile has the memory, and the holder gets it again.
    fn heed_release(&mut self, table: &Table) {
        let daemon = self.daemon.as_ref();
        if self.runs_unseen || daemon.is_some_and(KeptDaemon::is_running) {
            tracing::warn!(
                "the holder was told to let go of everything, and a daemon has it: saying it anew"
            );
            self.say_all(table);
        } else {
            self.has_let_go = true;
        }
    }

    /// Whether the holder has let go of everything while no daemon ran: said once.
    pub fn take_release(&mut self) -> bool {
        std::mem::take(&mut self.has_let_go)
    }

    /// The process for which the holder had memory when it was last heard, if that is not this keeper's.
    #[cfg(test)]
    pub fn taken_by(&self) -> Option<u32> {
        self.taken_by
    }

    /// The process for which the holder has memory now, if that is not this keeper's: asked again, for what was heard last may be over.
    pub async fn is_taken(&mut self, table: &Table) -> Option<u32> {
        self.taken_by.take()?;
        self.is_there(table);
        let by = Instant::now() + TAKEN_WAIT;
        while self.taken_by.is_none()
            && !matches!(&self.state, HolderState::Up(talk) if talk.is_agreed)
        {
            tokio::select! {
                () = sleep_until(by) => break,
                () = self.ready() => self.turn(table),
            }
        }
        self.taken_by
    }

    /// Says all of the table, in place of what is held.
    pub fn say_all(&mut self, table: &Table) {
        if let HolderState::Up(talk) = &mut self.state {
            talk.push_all(table);
        }
    }

    fn complain_of_silence(&mut self) {
        let HolderState::Up(talk) = &self.state else {
            return;
        };
        if talk.waits() && Instant::now() >= talk.due {
            self.complain(&"it does not answer");
        }
    }

    /// It has not confirmed what it was asked for.
    pub fn doubt(&mut self) {
        self.complain(&"it has not said that it has everything");
    }

    fn complain(&mut self, why: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.has_complained, true) {
            self.complained_at = wall_clock();
            let socket = self.path.display();
            tracing::warn!(%socket, %why, "the holder does not have the memory: it would not outlive this pod");
        }
    }

    fn lose(&mut self, error: &io::Error) {
        self.complain(error);
        self.state = HolderState::Away {
            again_at: Instant::now() + self.pause,
        };
        self.pause = (self.pause * 2).min(PAUSE_MAX);
    }

    /// Tries a holder that is away once more, now; whether somebody is there.
    pub fn is_there(&mut self, table: &Table) -> bool {
        if let HolderState::Away { again_at } = &mut self.state {
            *again_at = Instant::now();
            self.turn(table);
        }
        matches!(self.state, HolderState::Up(_))
    }

    /// The holder takes what it is given, as far as is known.
    pub fn is_well(&self) -> bool {
        matches!(self.state, HolderState::Up(_)) && !self.has_complained
    }

    /// What its daemon may know.
    pub fn report(&self) -> HolderReport {
        if self.is_well() {
            HolderReport::HasAll
        } else {
            let since = self.complained_at;
            HolderReport::Lacks { since }
        }
    }

    /// Waits until the holder has said that it has all, and says whether it has. What it said before does not count: it may hang since.
    pub async fn settle(&mut self, table: &Table, within: Duration) -> bool {
        let by = Instant::now() + within;
        if let HolderState::Up(talk) = &mut self.state {
            talk.ask_anew();
        }
        while !matches!(&self.state, HolderState::Up(talk) if talk.is_agreed) {
            tokio::select! {
                () = sleep_until(by) => return false,
                () = self.ready() => self.turn(table),
            }
        }
        true
    }
}

/// What comes of it, unless the holder is silent for too long; however much it has, each part of it comes soon.
async fn unless_silent<T>(work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let done = timeout(HOLDER_WAIT, work).await;
    done.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Seconds since 1970, by the machine's clock.
fn wall_clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

fn other(what: String) -> io::Error {
    io::Error::other(what)
}

/// What a holder says in place of what it was asked for.
fn refusal_in(body: &[u8]) -> NoHandover {
    match HoldAnswer::decode(body) {
        Some(HoldAnswer::Busy(process)) => NoHandover::Busy(process),
        Some(HoldAnswer::Stranger(user)) => {
            NoHandover::Away(other(format!("it refuses user id {user}")))
        }
        _ => NoHandover::Away(io::ErrorKind::InvalidData.into()),
    }
}
