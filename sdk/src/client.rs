//! What can be asked of the daemon, and what it answers.

use std::os::fd::OwnedFd;
use std::path::Path;

use storaged_arena::{Mapping, Slot};
use storaged_wire::failed::{FailedRestart, FailureReport};
use storaged_wire::local::{
    Bears, BoardKind, ByteRange, CheckpointInfo, DropReport, Keep, LiveRun, PinnedOnes, Removal,
    Reply, Request, Rung, VerifyReport,
};
use storaged_wire::plan::RestorePlan;
use storaged_wire::verdict::{RestartVerdict, VERDICT_MIN_MS};
use storaged_wire::{
    CheckpointState, DescribedManifest, Digest, Enclosures, ManifestBytes, Namespace, Rank, RunId,
    Step,
};

use crate::connection::{Answer, ConnectOptions, Connection, Welcome, unexpected};
use crate::error::ClientError;
use crate::patience::Patience;
use crate::restored::{OpenedShard, RestoredShard};

/// Where a daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/storaged/storaged.sock";

/// Whether a job is dropped, or its newest run removed, that has trainers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithTrainers {
    /// No: that is refused.
    Refused,
    /// Yes: they go on and save again.
    Too,
}

/// What one asks the daemon. Where its connection breaks, because the daemon was restarted, the next call connects again, and waits
/// some seconds for a daemon that was there a moment ago; what only asks is asked again in the same call.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
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
    /// Connects without saying who one is: enough for [`Client::status`] and [`Client::list`]. Such a connection does not come back by itself.
    ///
    /// # Errors
    /// [`ClientError::Unavailable`] if nobody listens, [`ClientError::NotAllowed`] if its file keeps this user out.
    pub fn connect_anonymous(socket: &Path) -> Result<Self, ClientError> {
        let connection = Connection::anonymous(socket)?;
        Ok(Self { connection })
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
        let (connection, welcome) = Connection::greeted(options, patience)?;
        Ok((Self { connection }, welcome))
    }

    /// The socket that it is connected to.
    pub fn socket(&self) -> &Path {
        self.connection.socket()
    }

    /// From now on answers without a time of their own may take this long, and this ends waits early.
    pub fn be_patient(&mut self, patience: Patience) {
        self.connection.be_patient(patience);
    }

    /// Ends the connection, with all that the daemon holds for it: shards that are open, slots that are being filled. The next call
    /// connects again.
    pub fn hang_up(&mut self) {
        self.connection.hang_up();
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn call(
        &mut self,
        name: &'static str,
        request: &Request,
        answer: Answer,
    ) -> Result<(Reply, Option<OwnedFd>), ClientError> {
        self.connection.call(name, request, answer)
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

    /// Takes back what was said of a step, that restarts have failed from it or, at this node, that its copy in the durable tier is
    /// damaged: it is offered again unless that has a mark of it.
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
            early: None,
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
        let (reply, fd) = self.call("open shard", request, Answer::After(timeout_ms))?;
        let opened = OpenedShard::of("open shard", reply, fd)?;
        RestoredShard::new(manifest.manifest(), rank, opened)
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

    /// Pins a checkpoint in RAM, as far as it is there, and in the durable tier, or unpins it.
    ///
    /// # Errors
    /// [`ClientError`] if there is no such checkpoint, if saves would find no room beside it, or the tier does not answer.
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
