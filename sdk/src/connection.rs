//! One connection to the daemon of this node: a request, its answer, the next request. Where it broke, because the daemon was restarted, the
//! next call connects again with the same job and role; what may be said twice is said again in the same call. What the daemon held
//! for the connection itself is gone with it: slots that were being filled, shards that were open.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use storaged_arena::{PassingError, recv_frame_waiting, send_frame_waiting};
use storaged_wire::framing::LOCAL_FRAME_BYTES_MAX;
use storaged_wire::local::{LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::{
    ChunkSize, Generation, Geometry, Namespace, NodeName, RefusalCode, decode, encode,
};

use crate::error::ClientError;
use crate::patience::{Deadline, Patience, was_called_away};

/// What the answer may take beyond the wait that a request asks the daemon for: the daemon keeps time itself, so a live
/// one is late by scheduling alone.
const ANSWER_GRACE: Duration = Duration::from_millis(700);

/// A daemon that is restarted or upgraded serves again within two seconds. One that is not back after this time is away: from then on calls
/// look once and go on.
pub const AWAY_AFTER: Duration = Duration::from_secs(5);

/// How to reach the daemon and as whom.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// The job.
    pub namespace: Namespace,
    /// The job token; empty for none.
    pub token: Vec<u8>,
    /// Trainer or reader.
    pub role: Role,
}

/// What the daemon says of itself.
#[derive(Debug, Clone)]
pub struct Welcome {
    /// Its node.
    pub node: NodeName,
    /// Its incarnation.
    pub generation: Generation,
    /// k and m, if it codes.
    pub geometry: Option<Geometry>,
    /// Size of a chunk.
    pub chunk: ChunkSize,
}

/// How long the answer to a request may take.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    /// The daemon waits so many milliseconds itself.
    After(u32),
    /// At once; the caller's [`Patience`] says how long that may take.
    Prompt,
}

/// A connection to the daemon. One that said hello comes back by itself; whoever asks without a name may be about to end this very daemon, and
/// not the next one.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: PathBuf,
    patience: Patience,
    /// What is said first, and what the daemon answered.
    hello: Option<ConnectOptions>,
    welcome: Option<Welcome>,
    stream: UnixStream,
    /// How many there were before it: what was given on one of another number is not held any more.
    number: u64,
    broken_since: Option<Instant>,
}

impl Connection {
    pub fn anonymous(socket: &Path) -> Result<Self, ClientError> {
        let patience = Patience::default();
        let call = Call::within("connect", patience.answer());
        let stream = dial(socket, &patience, call)?;
        Ok(Self {
            socket: socket.into(),
            patience,
            hello: None,
            welcome: None,
            stream,
            number: 0,
            broken_since: None,
        })
    }

    /// Connects and says hello, both within the caller's patience.
    pub fn greeted(
        options: &ConnectOptions,
        patience: Patience,
    ) -> Result<(Self, Welcome), ClientError> {
        let call = Call::within("hello", patience.answer());
        let (stream, welcome) = greet(options, &patience, call)?;
        let connection = Self {
            socket: options.socket.clone(),
            patience,
            hello: Some(options.clone()),
            welcome: Some(welcome.clone()),
            stream,
            number: 0,
            broken_since: None,
        };
        Ok((connection, welcome))
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    pub fn be_patient(&mut self, patience: Patience) {
        self.patience = patience;
    }

    /// What the daemon said of itself last, if it was told who speaks.
    pub fn welcome(&self) -> Option<&Welcome> {
        self.welcome.as_ref()
    }

    /// How many connections there were before this one; none while it is broken.
    pub fn number(&self) -> Option<u64> {
        self.broken_since.is_none().then_some(self.number)
    }

    /// Ends it: the daemon takes back what it held for it. The next call connects again.
    pub fn hang_up(&mut self) {
        self.broken_since.get_or_insert_with(Instant::now);
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Sends a request and waits for its answer, on another connection if this one is broken.
    pub fn call(
        &mut self,
        name: &'static str,
        request: &Request,
        answer: Answer,
    ) -> Result<(Reply, Option<OwnedFd>), ClientError> {
        let limit = match answer {
            Answer::After(ms) => Duration::from_millis(ms.into()) + ANSWER_GRACE,
            Answer::Prompt => self.patience.answer(),
        };
        let call = Call::within(name, limit);
        if self.broken_since.is_none() {
            match self.exchange(call, request) {
                Err(failure) if self.hello.is_some() && failure.may_be_said_again(request) => {}
                outcome => return outcome.map_err(|failure| failure.error),
            }
        }
        self.come_back(call, request)?;
        // Once: what ends the daemon each time must not do so for as long as the caller waits.
        let again = request
            .clone()
            .within(call.left().saturating_sub(ANSWER_GRACE));
        self.exchange(call, &again).map_err(|failure| failure.error)
    }

    fn exchange(
        &mut self,
        call: Call,
        request: &Request,
    ) -> Result<(Reply, Option<OwnedFd>), Failure> {
        let outcome = ask(&self.stream, &self.patience, call, request);
        let is_broken = outcome
            .as_ref()
            .is_err_and(|failure| failure.heard != Heard::Answered);
        if is_broken {
            // An answer may still come: the connection is of no use any more.
            self.hang_up();
        }
        outcome
    }

    /// Connects again, and waits for a daemon that was there a moment ago.
    fn come_back(&mut self, call: Call, request: &Request) -> Result<(), ClientError> {
        let may = Again::of(request) != Again::Never;
        let (Some(options), Some(since)) = (self.hello.clone().filter(|_| may), self.broken_since)
        else {
            let source = PassingError::Closed;
            let request = call.name;
            return Err(ClientError::Broken { request, source });
        };
        let error = loop {
            let error = match greet(&options, &self.patience, call) {
                Ok((stream, welcome)) => {
                    self.stream = stream;
                    self.welcome = Some(welcome);
                    self.number += 1;
                    self.broken_since = None;
                    return Ok(());
                }
                Err(error) => error,
            };
            if since.elapsed() >= AWAY_AFTER || !is_absence(&error) {
                break error;
            }
            if let Err(ended) = self.patience.until(call.deadline).pause() {
                break if was_called_away(&ended) {
                    ClientError::CalledAway { request: call.name }
                } else {
                    error
                };
            }
        };
        Err(error)
    }
}

/// One call of the caller's, however often it asks.
#[derive(Clone, Copy)]
struct Call {
    name: &'static str,
    limit: Duration,
    deadline: Instant,
}

impl Call {
    fn within(name: &'static str, limit: Duration) -> Self {
        let deadline = Instant::now() + limit;
        Self {
            name,
            limit,
            deadline,
        }
    }

    fn left(self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn timed_out(self) -> ClientError {
        let limit_ms = u64::try_from(self.limit.as_millis()).unwrap_or(u64::MAX);
        let request = self.name;
        ClientError::TimedOut { request, limit_ms }
    }
}

/// What became of a request that has no reply to show.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Heard {
    /// The daemon answered it, with something else than a reply, or it was not even sent: the connection is as good as before.
    Answered,
    /// Not all of it was sent, so that nobody acted on it.
    No,
    /// That is not known.
    Perhaps,
}

struct Failure {
    heard: Heard,
    error: ClientError,
}

impl Failure {
    fn answered(error: impl Into<ClientError>) -> Self {
        let (heard, error) = (Heard::Answered, error.into());
        Self { heard, error }
    }

    fn may_be_said_again(&self, request: &Request) -> bool {
        let is_over = matches!(
            self.error,
            ClientError::TimedOut { .. } | ClientError::CalledAway { .. }
        );
        let may = match self.heard {
            Heard::Answered => false,
            Heard::No => Again::of(request) >= Again::IfUnheard,
            Heard::Perhaps => Again::of(request) == Again::Always,
        };
        may && !is_over
    }
}

/// Whether a request may be said once more, on another connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Again {
    /// It is about what the daemon holds for this connection, or ends the daemon.
    Never,
    /// Heard twice, it would do something else than heard once.
    IfUnheard,
    /// It asks, or it says what may be said twice.
    Always,
}

impl Again {
    fn of(request: &Request) -> Self {
        match request {
            Request::Hello { .. }
            | Request::SealSlot { .. }
            | Request::ReleaseSlot { .. }
            | Request::FollowShard { .. }
            | Request::CloseShard { .. }
            | Request::Drain(_) => Self::Never,
            Request::OpenRun { .. }
            | Request::Keep { .. }
            | Request::Remove(..)
            | Request::Drop { .. }
            | Request::RestartFailed(_)
            | Request::LiftQuarantine { .. }
            | Request::Rotate(_) => Self::IfUnheard,
            Request::AcquireSlot { .. }
            | Request::Commit { .. }
            | Request::Wait { .. }
            | Request::Plan { .. }
            | Request::GetManifest { .. }
            | Request::OpenShard { .. }
            | Request::Status
            | Request::List { .. }
            | Request::Verify { .. }
            | Request::RestartSafe { .. }
            | Request::Board { .. }
            | Request::Verdict { .. }
            | Request::PlanDrill { .. }
            | Request::Succession => Self::Always,
        }
    }
}

/// Whether a daemon that was here is not any more, or not yet again: its socket is made anew, and then opened to its users.
fn is_absence(error: &ClientError) -> bool {
    match error {
        ClientError::Unavailable { .. }
        | ClientError::NotAllowed { .. }
        | ClientError::Broken { .. } => true,
        ClientError::Refused(refusal) => {
            matches!(refusal.code, RefusalCode::Draining | RefusalCode::NoPlace)
        }
        _ => false,
    }
}

fn dial(socket: &Path, patience: &Patience, call: Call) -> Result<UnixStream, ClientError> {
    let connected = patience.until(call.deadline).connect(socket);
    connected.map_err(|source| match source.kind() {
        _ if was_called_away(&source) => ClientError::CalledAway { request: "connect" },
        io::ErrorKind::TimedOut => Call {
            name: "connect",
            ..call
        }
        .timed_out(),
        io::ErrorKind::PermissionDenied => ClientError::NotAllowed {
            socket: socket.into(),
            source,
        },
        _ => ClientError::Unavailable {
            socket: socket.into(),
            source,
        },
    })
}

/// Connects and says hello.
fn greet(
    options: &ConnectOptions,
    patience: &Patience,
    call: Call,
) -> Result<(UnixStream, Welcome), ClientError> {
    let stream = dial(&options.socket, patience, call)?;
    let hello = Request::Hello {
        version: LOCAL_VERSION,
        namespace: options.namespace.clone(),
        token: options.token.clone().into(),
        role: options.role.clone(),
    };
    let call = Call {
        name: "hello",
        ..call
    };
    match ask(&stream, patience, call, &hello).map_err(|failure| failure.error)? {
        (
            Reply::Welcome {
                node,
                generation,
                geometry,
                chunk,
            },
            _,
        ) => {
            let welcome = Welcome {
                node,
                generation,
                geometry,
                chunk,
            };
            Ok((stream, welcome))
        }
        (other, _) => Err(unexpected("hello", "a welcome", &other)),
    }
}

/// Sends a request and waits for its answer.
fn ask(
    stream: &UnixStream,
    patience: &Patience,
    call: Call,
    request: &Request,
) -> Result<(Reply, Option<OwnedFd>), Failure> {
    let body = encode(request);
    // The daemon would refuse it, and not read it to its end.
    let limit = Request::bytes_max(&body);
    if body.len() > limit {
        let got = body.len();
        let source = PassingError::TooLong { got, limit };
        return Err(Failure::answered(passing_failed(call, source)));
    }
    let failed = |heard| {
        move |source| Failure {
            heard,
            error: passing_failed(call, source),
        }
    };
    let mut wait: Deadline<'_> = patience.until(call.deadline);
    send_frame_waiting(stream, &body, None, &mut wait).map_err(failed(Heard::No))?;
    let answer = recv_frame_waiting(stream, LOCAL_FRAME_BYTES_MAX, &mut wait);
    let (body, descriptor) = answer.map_err(failed(Heard::Perhaps))?;
    match decode("reply", &body).map_err(Failure::answered)? {
        // It ends, and nobody acts on anything any more.
        Reply::Refused(refusal) if refusal.code == RefusalCode::Draining => Err(Failure {
            heard: Heard::Perhaps,
            error: refusal.into(),
        }),
        Reply::Refused(refusal) => Err(Failure::answered(refusal)),
        reply => Ok((reply, descriptor)),
    }
}

fn passing_failed(call: Call, source: PassingError) -> ClientError {
    let request = call.name;
    match &source {
        PassingError::Io(error) if was_called_away(error) => ClientError::CalledAway { request },
        PassingError::Io(error) if error.kind() == io::ErrorKind::TimedOut => call.timed_out(),
        _ => ClientError::Broken { request, source },
    }
}

/// The daemon answered with something else than was asked.
pub(crate) fn unexpected(
    request: &'static str,
    expected: &'static str,
    got: &Reply,
) -> ClientError {
    let text = format!("{got:?}");
    ClientError::Protocol {
        request,
        expected,
        got: text.chars().take(80).collect(),
    }
}
