//! One connection: a request, its answer, the next request.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use storaged_arena::{Mapping, PassingError, Slot, recv_frame_waiting, send_frame_waiting};
use storaged_wire::failed::{FailedRestart, FailureReport};
use storaged_wire::framing::LOCAL_FRAME_BYTES_MAX;
use storaged_wire::local::{
    Bears, BoardKind, ByteRange, CheckpointInfo, DropReport, Keep, LOCAL_VERSION, LiveRun,
    PinnedOnes, Removal, Reply, Request, Role, Rung, VerifyReport,
};
use storaged_wire::plan::RestorePlan;
use storaged_wire::verdict::{RestartVerdict, VERDICT_MIN_MS};
use storaged_wire::{
    CheckpointState, ChunkSize, DescribedManifest, Digest, Enclosures, Generation, Geometry,
    ManifestBytes, Namespace, NodeName, Rank, RunId, Step, decode, encode,
};

use crate::error::ClientError;
use crate::patience::{Deadline, Patience, was_called_away};
use crate::restored::{OpenedShard, RestoredShard};

/// Where a daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/storaged/storaged.sock";

/// What the answer may take beyond the wait that a request asks the daemon for: the daemon keeps time itself, so a live
/// one is late by scheduling alone.
const ANSWER_GRACE: Duration = Duration::from_millis(700);

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

/// Whether a job is dropped, or its newest run removed, that has trainers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithTrainers {
    /// No: that is refused.
    Refused,
    /// Yes: they go on and save again.
    Too,
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

/// A connection to the daemon.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    socket: PathBuf,
    patience: Patience,
    broken: bool,
}

/// How long the answer to a request may take.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    /// The daemon waits so many milliseconds itself.
    After(u32),
    /// At once; the caller's [`Patience`] says how long that may take.
    Prompt,
}

/// How far a checkpoint that was waited for has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reached {
    /// At least the state that was waited for.
    pub state: CheckpointState,
    /// Its manifest, once committed.
    pub manifest: Option<Digest>,
    /// How many more node losses it survives now, if it is coded and still in RAM, and this node knows: for a moment it may have
    /// heard that a step is protected and not yet of all its blocks. While a node is away a step is protected as far as it
    /// goes: fewer than `of`.
    pub bears: Option<Bears>,
}

impl Client {
    /// Connects without saying who one is: enough for [`Client::status`] and [`Client::list`].
    ///
    /// # Errors
    /// [`ClientError::Unavailable`] if nobody listens, [`ClientError::NotAllowed`] if its file keeps this user out.
    pub fn connect_anonymous(socket: &Path) -> Result<Self, ClientError> {
        let patience = Patience::default();
        let deadline = Instant::now() + patience.answer();
        Self::dial(socket, patience, deadline)
    }

    fn dial(socket: &Path, patience: Patience, deadline: Instant) -> Result<Self, ClientError> {
        let connected = patience.until(deadline).connect(socket);
        let stream = connected.map_err(|source| match source.kind() {
            _ if was_called_away(&source) => ClientError::CalledAway { request: "connect" },
            io::ErrorKind::TimedOut => timed_out("connect", patience.answer()),
            io::ErrorKind::PermissionDenied => ClientError::NotAllowed {
                socket: socket.into(),
                source,
            },
            _ => ClientError::Unavailable {
                socket: socket.into(),
                source,
            },
        })?;
        Ok(Self {
            stream,
            socket: socket.into(),
            patience,
            broken: false,
        })
    }

    /// Connects and says hello.
    ///
    /// # Errors
    /// [`ClientError`] if nobody listens or the daemon refuses.
    pub fn connect(options: &ConnectOptions) -> Result<(Self, Welcome), ClientError> {
        Self::connect_with(options, Patience::default())
    }

    /// Connects and says hello, both within the caller's patience, which the connection keeps.
    ///
    /// # Errors
    /// As `connect`.
    pub fn connect_with(
        options: &ConnectOptions,
        patience: Patience,
    ) -> Result<(Self, Welcome), ClientError> {
        let deadline = Instant::now() + patience.answer();
        let mut client = Self::dial(&options.socket, patience, deadline)?;
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace: options.namespace.clone(),
            token: options.token.clone().into(),
            role: options.role.clone(),
        };
        match client.call_until("hello", &hello, deadline)? {
            (
                Reply::Welcome {
                    node,
                    generation,
                    geometry,
                    chunk,
                },
                _,
            ) => Ok((
                client,
                Welcome {
                    node,
                    generation,
                    geometry,
                    chunk,
                },
            )),
            (other, _) => Err(unexpected("hello", "a welcome", &other)),
        }
    }

    /// The socket that it is connected to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// From now on answers without a time of their own may take this long, and this ends waits early.
    pub fn be_patient(&mut self, patience: Patience) {
        self.patience = patience;
    }

    pub(crate) fn patience(&self) -> &Patience {
        &self.patience
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn call(
        &mut self,
        name: &'static str,
        request: &Request,
        answer: Answer,
    ) -> Result<(Reply, Option<OwnedFd>), ClientError> {
        let limit = match answer {
            Answer::After(ms) => Duration::from_millis(ms.into()) + ANSWER_GRACE,
            Answer::Prompt => self.patience.answer(),
        };
        self.call_until(name, request, Instant::now() + limit)
    }

    fn call_until(
        &mut self,
        name: &'static str,
        request: &Request,
        deadline: Instant,
    ) -> Result<(Reply, Option<OwnedFd>), ClientError> {
        if self.broken {
            let source = PassingError::Closed;
            return Err(ClientError::Broken {
                request: name,
                source,
            });
        }
        let limit = deadline.saturating_duration_since(Instant::now());
        let mut wait = self.patience.until(deadline);
        let outcome = exchange(&self.stream, request, &mut wait);
        // After a failed exchange an answer may still come: the connection is of no use any more.
        self.broken = outcome.is_err();
        let (body, descriptor) = outcome.map_err(|source| failed(name, limit, source))?;
        match decode("reply", &body)? {
            Reply::Refused(refusal) => Err(refusal.into()),
            reply => Ok((reply, descriptor)),
        }
    }

    /// Opens a new run of the namespace, above every run that a live node knows.
    ///
    /// # Errors
    /// [`ClientError`] if no majority of the nodes agrees within `timeout_ms`.
    pub fn open_run(&mut self, timeout_ms: u32) -> Result<RunId, ClientError> {
        match self.call(
            "open run",
            &Request::OpenRun { timeout_ms },
            Answer::After(timeout_ms),
        )? {
            (Reply::RunOpened { run }, _) => Ok(run),
            (other, _) => Err(unexpected("open run", "a run", &other)),
        }
    }

    /// The board of a rank: memory of this node that outlives whoever writes it. There is one per rank and kind; with zero
    /// bytes it is the one that is there.
    ///
    /// # Errors
    /// [`ClientError::Refused`] if the budget is full, or there is none and none was to be made.
    pub fn board(
        &mut self,
        rank: Rank,
        kind: BoardKind,
        bytes: u64,
    ) -> Result<Mapping, ClientError> {
        let request = Request::Board { rank, kind, bytes };
        match self.call("board", &request, Answer::Prompt)? {
            (Reply::SlotGranted { .. }, Some(fd)) => Ok(Mapping::unfilled(&Slot::adopt(fd)?)?),
            (other, _) => Err(unexpected("board", "a board and its descriptor", &other)),
        }
    }

    /// Waits until a checkpoint is at least in `state`.
    ///
    /// # Errors
    /// [`ClientError`] if it is not within `timeout_ms`, or never will be.
    pub fn wait(
        &mut self,
        run: RunId,
        step: Step,
        state: CheckpointState,
        timeout_ms: u32,
    ) -> Result<Reached, ClientError> {
        let request = Request::Wait {
            run,
            step,
            state,
            timeout_ms,
        };
        match self.call("wait", &request, Answer::After(timeout_ms))? {
            (
                Reply::Reached {
                    state,
                    manifest,
                    bears,
                },
                _,
            ) => Ok(Reached {
                state,
                manifest,
                bears,
            }),
            (other, _) => Err(unexpected("wait", "a state", &other)),
        }
    }

    /// What speaks against restarting this daemon's node now, one line per namespace; nothing if nothing does. `bears` are
    /// the node losses that every namespace's newest checkpoint must bear before, by default min(2, m).
    ///
    /// # Errors
    /// [`ClientError`] if the daemon does not answer in `timeout_ms`.
    pub fn restart_objections(
        &mut self,
        bears: Option<u32>,
        timeout_ms: u32,
    ) -> Result<Vec<String>, ClientError> {
        match self.call(
            "restart-safe",
            &Request::RestartSafe { bears },
            Answer::After(timeout_ms),
        )? {
            (Reply::RestartSafe(objections), _) => Ok(objections),
            (other, _) => Err(unexpected("restart-safe", "objections", &other)),
        }
    }

    /// Asks what a restart would do; without a step, with the newest restorable checkpoint. Never offers one that is
    /// older than what is known to have been protected: it waits for nodes that have not answered.
    ///
    /// # Errors
    /// [`ClientError`] if nothing is restorable, or what is newer cannot be reached within `timeout_ms`.
    pub fn plan(
        &mut self,
        step: Option<Step>,
        timeout_ms: u32,
    ) -> Result<RestorePlan, ClientError> {
        let request = Request::Plan {
            step,
            timeout_ms,
            allow_older: false,
        };
        self.planned(&request, timeout_ms)
    }

    /// Like [`Client::plan`], but at the end of the wait takes the newest that could be reached: for when the nodes that
    /// hold newer ones will not come back.
    ///
    /// # Errors
    /// [`ClientError`] if nothing is restorable.
    pub fn plan_allowing_older(
        &mut self,
        step: Option<Step>,
        timeout_ms: u32,
    ) -> Result<RestorePlan, ClientError> {
        let request = Request::Plan {
            step,
            timeout_ms,
            allow_older: true,
        };
        self.planned(&request, timeout_ms)
    }

    pub(crate) fn planned(
        &mut self,
        request: &Request,
        timeout_ms: u32,
    ) -> Result<RestorePlan, ClientError> {
        match self.call("plan", request, Answer::After(timeout_ms))? {
            (Reply::Plan(plan), _) => Ok(plan),
            (other, _) => Err(unexpected("plan", "a plan", &other)),
        }
    }

    /// What a launcher should make of a restart from the newest checkpoint, and what it would gain by waiting. Where nodes do
    /// not answer, it is said at the end of the time, and not before
    /// those that can answer have (at most [`VERDICT_MIN_MS`]); it moves nothing.
    ///
    /// # Errors
    /// [`ClientError`] if the job belongs to another token, or the daemon does not answer. That nothing is restorable is a
    /// verdict and no error.
    pub fn verdict(&mut self, timeout_ms: u32) -> Result<RestartVerdict, ClientError> {
        let request = Request::Verdict { timeout_ms };
        let answer = Answer::After(timeout_ms.max(VERDICT_MIN_MS));
        match self.call("verdict", &request, answer)? {
            (Reply::Verdict(verdict), _) => Ok(verdict),
            (other, _) => Err(unexpected("verdict", "a verdict", &other)),
        }
    }

    /// Says that a restart from a step has failed (of the newest run that has it, if none is named). Plans and verdicts pass it
    /// over from now on: for a time that doubles, then for good. Within half a minute it counts once, whoever says it.
    ///
    /// # Errors
    /// [`ClientError`] if nobody who answers in `timeout_ms` has such a step, or the job belongs to another token.
    pub fn restart_failed(
        &mut self,
        run: Option<RunId>,
        step: Step,
        timeout_ms: u32,
    ) -> Result<Vec<FailedRestart>, ClientError> {
        let request = Request::RestartFailed(FailureReport {
            run,
            step,
            timeout_ms,
        });
        self.failures("restart failed", &request, Answer::After(timeout_ms))
    }

    /// Takes back what was said of a step: it is offered again.
    ///
    /// # Errors
    /// [`ClientError`] if nothing was said of it.
    pub fn lift_quarantine(&mut self, step: Step) -> Result<Vec<FailedRestart>, ClientError> {
        let request = Request::LiftQuarantine { step };
        self.failures("lift quarantine", &request, Answer::Prompt)
    }

    fn failures(
        &mut self,
        what: &'static str,
        request: &Request,
        answer: Answer,
    ) -> Result<Vec<FailedRestart>, ClientError> {
        match self.call(what, request, answer)? {
            (Reply::RestartsFailed(failed), _) => Ok(failed),
            (other, _) => Err(unexpected(what, "how the step stands", &other)),
        }
    }

    /// The manifest of that digest with its schema and torch metadata, verified.
    ///
    /// # Errors
    /// [`ClientError`] if it is unknown or does not have the digest.
    pub fn manifest(&mut self, name: Digest) -> Result<DescribedManifest, ClientError> {
        match self.call(
            "get manifest",
            &Request::GetManifest { manifest: name },
            Answer::Prompt,
        )? {
            (
                Reply::Manifest {
                    bytes,
                    schema,
                    torch_metadata,
                },
                _,
            ) => {
                let given = Enclosures {
                    schema,
                    torch_metadata,
                };
                Ok(DescribedManifest::verify(bytes, &given, name)?)
            }
            (other, _) => Err(unexpected("get manifest", "a manifest", &other)),
        }
    }

    /// Brings ranges of a shard (all of it if there are none) into this node's RAM, to be read with verification.
    ///
    /// # Errors
    /// [`ClientError`] if no rung of the ladder has them.
    pub fn open_shard(
        &mut self,
        manifest: &ManifestBytes,
        rank: Rank,
        ranges: Vec<ByteRange>,
        timeout_ms: u32,
    ) -> Result<RestoredShard, ClientError> {
        self.open_shard_without(manifest, rank, ranges, timeout_ms, None)
    }

    /// Like [`Client::open_shard`], but leaves a rung of the ladder out (only [`Rung::OwnRam`] has an effect: what comes
    /// from the others was verified on its way): for a reader that got
    /// [`ClientError::Corrupt`] from a shard of this node's own RAM ([`RestoredShard::rung`]).
    ///
    /// # Errors
    /// As `open_shard`.
    pub fn open_shard_without(
        &mut self,
        manifest: &ManifestBytes,
        rank: Rank,
        ranges: Vec<ByteRange>,
        timeout_ms: u32,
        without: Option<Rung>,
    ) -> Result<RestoredShard, ClientError> {
        let request = Request::OpenShard {
            manifest: manifest.name(),
            rank,
            ranges,
            timeout_ms,
            without,
            withheld: None,
        };
        self.open(manifest, rank, &request, timeout_ms)
    }

    pub(crate) fn open(
        &mut self,
        manifest: &ManifestBytes,
        rank: Rank,
        request: &Request,
        timeout_ms: u32,
    ) -> Result<RestoredShard, ClientError> {
        match self.call("open shard", request, Answer::After(timeout_ms))? {
            (
                Reply::ShardOpened {
                    length,
                    chunk,
                    leaves,
                    rung,
                    fingerprints,
                },
                Some(fd),
            ) => {
                let opened = OpenedShard {
                    slot: Slot::adopt(fd)?,
                    length,
                    chunk,
                    leaves,
                    rung,
                    fingerprints,
                };
                RestoredShard::new(manifest.manifest(), rank, opened)
            }
            (other, _) => Err(unexpected(
                "open shard",
                "a shard and its descriptor",
                &other,
            )),
        }
    }

    /// Gives an opened shard up.
    ///
    /// # Errors
    /// [`ClientError`] if the daemon cannot be told.
    pub fn close_shard(&mut self, manifest: Digest, rank: Rank) -> Result<(), ClientError> {
        self.done("close shard", &Request::CloseShard { manifest, rank })
    }

    /// The daemon's state, as a JSON object.
    ///
    /// # Errors
    /// [`ClientError`] if the daemon does not answer.
    pub fn status(&mut self) -> Result<String, ClientError> {
        match self.call("status", &Request::Status, Answer::Prompt)? {
            (Reply::Status(json), _) => Ok(json),
            (other, _) => Err(unexpected("status", "a status", &other)),
        }
    }

    /// Checkpoints that the node knows.
    ///
    /// # Errors
    /// [`ClientError`] if the namespace is unknown.
    pub fn list(
        &mut self,
        namespace: Option<Namespace>,
    ) -> Result<Vec<CheckpointInfo>, ClientError> {
        match self.call("list", &Request::List { namespace }, Answer::Prompt)? {
            (Reply::Checkpoints(infos), _) => Ok(infos),
            (other, _) => Err(unexpected("list", "a listing", &other)),
        }
    }

    /// Has every byte of a checkpoint that live nodes hold read and checked.
    ///
    /// # Errors
    /// [`ClientError`] if there is no such checkpoint.
    pub fn verify(
        &mut self,
        step: Option<Step>,
        timeout_ms: u32,
    ) -> Result<VerifyReport, ClientError> {
        match self.call(
            "verify",
            &Request::Verify { step, timeout_ms },
            Answer::After(timeout_ms),
        )? {
            (Reply::Verified(report), _) => Ok(report),
            (other, _) => Err(unexpected("verify", "a report", &other)),
        }
    }

    /// Pins a checkpoint in the durable tier, or unpins it.
    ///
    /// # Errors
    /// [`ClientError`] if there is no such checkpoint, or the tier does not answer.
    pub fn keep(
        &mut self,
        run: Option<RunId>,
        step: Step,
        keep: Keep,
        timeout_ms: u32,
    ) -> Result<(), ClientError> {
        let request = Request::Keep { run, step, keep };
        self.curate(&request, timeout_ms).map(|_| ())
    }

    /// Removes checkpoints from the durable tier; gives how many, and of how many objects.
    ///
    /// # Errors
    /// [`ClientError`] if there are none, if something else needs them, if they are pinned or of the newest run of a job
    /// that has trainers and nobody insists, or if the tier does not answer.
    pub fn remove(
        &mut self,
        removal: Removal,
        trainers: WithTrainers,
        pinned: PinnedOnes,
        timeout_ms: u32,
    ) -> Result<(u64, u64), ClientError> {
        let live = match trainers {
            WithTrainers::Refused => LiveRun::Spared,
            WithTrainers::Too => LiveRun::Too,
        };
        self.curate(&Request::Remove(removal, live, Some(pinned)), timeout_ms)
    }

    fn curate(&mut self, request: &Request, timeout_ms: u32) -> Result<(u64, u64), ClientError> {
        match self.call("curate", request, Answer::After(timeout_ms))? {
            (
                Reply::Removed {
                    checkpoints,
                    objects,
                },
                _,
            ) => Ok((checkpoints, objects)),
            (other, _) => Err(unexpected("curate", "what was removed", &other)),
        }
    }

    /// Drops all of the job's checkpoints from the RAM of all nodes; what is in the durable tier stays.
    ///
    /// # Errors
    /// [`ClientError`] if the job has trainers and nobody insists.
    pub fn drop_job(
        &mut self,
        trainers: WithTrainers,
        timeout_ms: u32,
    ) -> Result<DropReport, ClientError> {
        let force = trainers == WithTrainers::Too;
        let request = Request::Drop { force, timeout_ms };
        match self.call("drop", &request, Answer::After(timeout_ms))? {
            (Reply::Dropped(report), _) => Ok(report),
            (other, _) => Err(unexpected("drop", "a report", &other)),
        }
    }

    pub(crate) fn done(
        &mut self,
        name: &'static str,
        request: &Request,
    ) -> Result<(), ClientError> {
        match self.call(name, request, Answer::Prompt)? {
            (Reply::Done, _) => Ok(()),
            (other, _) => Err(unexpected(name, "done", &other)),
        }
    }
}

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

fn exchange(
    stream: &UnixStream,
    request: &Request,
    wait: &mut Deadline<'_>,
) -> Result<(Vec<u8>, Option<OwnedFd>), PassingError> {
    let body = encode(request);
    // The daemon would refuse it, and not read it to its end.
    let limit = Request::bytes_max(&body);
    if body.len() > limit {
        let got = body.len();
        return Err(PassingError::TooLong { got, limit });
    }
    send_frame_waiting(stream, &body, None, wait)?;
    recv_frame_waiting(stream, LOCAL_FRAME_BYTES_MAX, wait)
}

fn failed(request: &'static str, limit: Duration, source: PassingError) -> ClientError {
    match &source {
        PassingError::Io(error) if was_called_away(error) => ClientError::CalledAway { request },
        PassingError::Io(error) if error.kind() == io::ErrorKind::TimedOut => {
            timed_out(request, limit)
        }
        _ => ClientError::Broken { request, source },
    }
}

fn timed_out(request: &'static str, limit: Duration) -> ClientError {
    let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    ClientError::TimedOut { request, limit_ms }
}
