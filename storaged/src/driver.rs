//! The driver: one loop that feeds the decisions and performs what they say. One input, all outputs, sleep to the
//! deadline. Everything slow is done elsewhere and comes back as an input.

mod certificate;
mod drain;
mod driver_turn;
mod durable;
mod hook;
mod kept;
mod leaving;
mod members;
mod notes;
mod operate;
mod readiness;
mod refusals;
mod restores;
mod said;
mod scrub;
mod shared_reads;
mod start;
mod tier;
mod tier_keys;
#[cfg(test)]
mod tier_tests;
mod watch;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use certificate::OwnCertificate;
use storaged_core::{
    CheckPart, ConnId, DigestCause, DigestTally, Input, Node, Output, QueryId, RequestId,
    SessionWork, Sink, SlotEnd,
};
use storaged_wire::local::Reply;
use storaged_wire::{Digest, Generation, ManifestBytes, Rank, RecordName, SlotId, encode};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::config::Config;
use crate::digest;
use crate::encode::{Executor, Meters, Pool, SessionEnd};
use crate::env::{Clock, Environment, Offload, OpsDoor, StageDoor};
use crate::http::{self, OpsState, RestartAsked};
use crate::keep::{JournalError, MemoryJournal};
use crate::memory::{Digested, Memory, ShardSize};
use crate::net::{Net, NetError, NetEvent};
use crate::repeats::Repeats;
use crate::stage::{self, Answer, FromStage, StageError, StageEvent, ToDriver};
use crate::trickle::Trickle;
use crate::trickle::store::StoreError;
pub use certificate::{date, expiry_fault};
use driver_turn::{DriverTurn, DriverTurns};
pub use hook::end_programs;
use kept::Left;
use leaving::Leaving;
pub use members::{Members, PlaceTaken};
use members::{MembersNews, next_change};
use readiness::LinkFacts;
use refusals::{RefusalLine, RefusalLines};
use restores::RestoreTimes;
use scrub::RotCount;
pub(crate) use scrub::timed;
use start::{own_certificate, setup, start_net};
use tier_keys::KeyService;
pub use tier_keys::{KeyCommandError, first_keys};
use watch::WatchedFiles;

/// A session that runs says so often how it goes.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// Events of each kind that wait for the driver; senders wait when it is full.
const QUEUE: usize = 4096;

/// Why a daemon did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The network.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The sockets of trainers.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The durable tier.
    #[error("the durable tier cannot be used")]
    Store(#[from] StoreError),
    /// What an earlier daemon kept.
    #[error(transparent)]
    Kept(#[from] JournalError),
    /// The members.
    #[error(transparent)]
    Groups(#[from] storaged_plan::GroupError),
    /// Threads or the operator's HTTP.
    #[error("starting {what} failed")]
    Start {
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
}

/// Why a daemon has ended.
#[derive(Debug)]
pub enum Ending {
    /// It was told to, and leaves this unfinished.
    Told(Vec<String>),
    /// Another node fills its place.
    PlaceTaken(PlaceTaken),
}

/// Serves the operator's pages, if they are configured.
///
/// # Errors
/// [`StartError`] if the address cannot be bound.
pub async fn serve_operator(config: &Config) -> Result<OpsDoor, StartError> {
    let state = Arc::new(OpsState::default());
    let (to_driver, asked) = mpsc::channel(QUEUE);
    if let Some(address) = config.ops_listen {
        let served = http::serve(address, state.clone(), to_driver).await;
        served.map_err(|source| StartError::Start {
            what: "the operator's HTTP",
            source,
        })?;
    }
    Ok(OpsDoor { state, asked })
}

/// Opens the sockets of trainers and of the operator.
///
/// # Errors
/// [`StartError`] if one cannot be opened.
pub fn open_stage(config: &Config) -> Result<StageDoor, StartError> {
    for socket in &config.sockets {
        let made = stage::make_directory(socket);
        let what = "making the directory of a socket";
        made.map_err(|source| StartError::Start { what, source })?;
    }
    let (events, received) = stage::queues();
    let faults = stage::listen(&config.sockets, &events)?;
    Ok(StageDoor {
        events,
        received,
        faults,
    })
}

/// An upload that runs, and of what.
struct RunningUpload {
    manifest: Arc<ManifestBytes>,
    task: JoinHandle<()>,
}

/// A daemon.
pub struct Daemon {
    node: Node,
    clock: Clock,
    memory: Arc<Memory>,
    /// What the next daemon is to know of it, if anybody holds it for that one.
    journal: Option<MemoryJournal>,
    executor: Arc<Executor>,
    net: Option<Arc<Net>>,
    trickle: Option<Arc<Trickle>>,
    tier_keys: KeyService,
    ops: Arc<OpsState>,
    offload: Offload,
    answers: BTreeMap<RequestId, oneshot::Sender<Answer>>,
    /// Uploads that run: they are ended when their checkpoint is given up.
    uploads: BTreeMap<(Digest, Rank), RunningUpload>,
    /// What runs now; a reload changes some of it.
    config: Config,
    links: LinkFacts,
    certificate: Option<OwnCertificate>,
    repeats: Repeats,
    refusals: RefusalLines,
    restores: RestoreTimes,
    rot: RotCount,
    net_runtime: tokio::runtime::Handle,
    pool: Pool,
    members: Option<Members>,
    leaving: Option<Leaving>,
    /// Another node has this one's place, and nobody drains it.
    place_taken: Option<PlaceTaken>,
    reloads: mpsc::Sender<Config>,
    from_reloads: mpsc::Receiver<Config>,
    watched: WatchedFiles,
    inputs: mpsc::Sender<Input>,
    from_effects: mpsc::Receiver<Input>,
    from_net: mpsc::Receiver<NetEvent>,
    from_ops: mpsc::Receiver<RestartAsked>,
    from_stage: FromStage,
    to_stage: ToDriver,
}

impl Daemon {
    /// Starts all parts; [`Daemon::run`] then drives them.
    ///
    /// # Errors
    /// [`StartError`] if a part cannot start.
    pub async fn start(config: Config, mut env: Environment) -> Result<Self, StartError> {
        let generation = Generation::new(env.entropy.next());
        let tier_keys = KeyService::start(&config);
        let memory = Arc::new(Memory::new(env.descriptors.clone()));
        let left = Left::read(&memory, std::mem::take(&mut env.inherited))?;
        let (to_net, from_net) = mpsc::channel(QUEUE);
        let net = start_net(&config, &env, generation, to_net).await?;
        let executor = start::start_executor(&config, net.as_ref(), &memory, &env.pool);
        let (inputs, from_effects) = mpsc::channel(QUEUE);
        let parts = tier::TierParts::of(&memory, &tier_keys.ring, net.as_ref());
        let trickle = tier::start_trickle(&config, &env, parts, &inputs).await?;
        let ops = match env.ops.take() {
            Some(ops) => ops,
            None => serve_operator(&config).await?,
        };
        let OpsDoor {
            state: ops,
            asked: from_ops,
        } = ops;
        let node = Node::new(setup(&config, generation))?;
        let door = env.stage.take();
        let StageDoor {
            events: to_stage,
            received: from_stage,
            faults: sockets,
        } = door.map_or_else(|| open_stage(&config), Ok)?;
        start::start_hyperpod(&config, to_stage.of_tenants(), &ops).await?;
        let (reloads, from_reloads) = mpsc::channel(1);
        ops.metrics.expect_nodes(&config.members);
        tracing::info!(node = %config.name, generation = %format!("{:016x}", generation.get()),
            geometry = %config.geometry.map_or("none".into(), |g| g.to_string()),
            budget = %bytesize::ByteSize::b(config.budget), "started");
        let mut daemon = Self {
            node,
            clock: Clock::start(),
            memory,
            journal: None,
            executor,
            net,
            trickle,
            tier_keys,
            ops,
            offload: env.offload,
            answers: BTreeMap::new(),
            uploads: BTreeMap::new(),
            links: LinkFacts {
                configured: operate::names(&config.peers),
                sockets,
                ..LinkFacts::default()
            },
            certificate: own_certificate(&config)?,
            repeats: Repeats::default(),
            refusals: RefusalLines::default(),
            restores: RestoreTimes::default(),
            rot: RotCount::default(),
            net_runtime: env.net_runtime,
            pool: env.pool,
            reloads,
            from_reloads,
            watched: start::watch_certificates(&config),
            config,
            members: env.members,
            leaving: None,
            place_taken: None,
            inputs,
            from_effects,
            from_net,
            from_ops,
            from_stage,
            to_stage,
        };
        daemon.show_members();
        daemon.take_over(left, &env.descriptors)?;
        Ok(daemon)
    }

    /// Where requests of a client in the same process go: tests under simulated time have no Unix sockets.
    pub fn stage_events(&self) -> mpsc::Sender<StageEvent> {
        self.to_stage.of_tenants().clone()
    }

    /// Where a configuration that was read again goes: what may change while the daemon runs does.
    pub fn reloads(&self) -> mpsc::Sender<Config> {
        self.reloads.clone()
    }

    /// Runs until it is told to stop and has finished what only it can, as far as `node.leave_within` reaches; told again, or
    /// by nobody any more, it stops at once. It ends too if another node has taken its place.
    pub async fn run(mut self, mut stops: mpsc::Receiver<()>) -> Ending {
        self.show();
        let mut turns = DriverTurns::default();
        let left = loop {
            if let Some(left) = self.has_left() {
                break left;
            }
            let deadline = self.clock.instant(self.node.deadline());
            let look_at = self.leaving.as_ref().map_or(deadline, Leaving::look_at);
            // By the clock: a timer that is made anew in each turn may never be seen to have fired.
            let turn = turns.next(Instant::now(), deadline);
            let input = tokio::select! {
                biased;
                stop = stops.recv() => match self.heed_signal(stop) {
                    Some(()) => None,
                    None => break self.left_now(),
                },
                change = next_change(&mut self.members) => match self.members_changed(change) {
                    MembersNews::Taken(input) => input,
                    MembersNews::Over(by) => {
                        self.heed_loss_of_place(by);
                        None
                    }
                },
                Some(event) = self.from_stage.operators.recv() => Some(self.stage_event(event)),
                () = std::future::ready(()), if turn == DriverTurn::Time => Some(Input::Tick),
                Some(event) = self.from_net.recv(), if turn.hears_peers() => {
                    turns.note_peer(Instant::now());
                    self.net_event(event)
                }
                Some(input) = self.from_effects.recv(), if turn.hears_work() => Some(input),
                Some(event) = self.from_stage.tenants.recv(), if turn.hears_trainers() => {
                    Some(self.stage_event(event))
                }
                Some(asked) = self.from_ops.recv() => self.restart_asked(asked),
                Some(config) = self.from_reloads.recv() => self.reload(&config),
                Some(keys) = self.tier_keys.given.recv() => {
                    self.take_keys(keys);
                    None
                }
                Some(()) = self.watched.changes.recv() => self.certificates_changed(),
                () = tokio::time::sleep_until(deadline) => Some(Input::Tick),
                () = tokio::time::sleep_until(look_at) => None,
                () = std::future::ready(()), if turn != DriverTurn::All => None,
            };
            if let Some(input) = input {
                let tick = matches!(input, Input::Tick);
                let outputs = self.node.handle(self.clock.now(), input);
                // What was just reserved is about to be taken.
                self.memory.spare_at_most(self.node.budget_free());
                for output in outputs {
                    self.perform(output);
                }
                if tick {
                    self.rest();
                    self.show();
                }
            }
        };
        end_programs();
        // While there are links: who has given up its place has none, and others count without it.
        let leaving = self.leaving.as_ref();
        let is_for_good = leaving.is_some_and(|leaving| {
            let is_needed = self.members.is_none() && !self.left_by(leaving).is_empty();
            leaving.is_for_good(&left) && !is_needed
        });
        if let Some(net) = &self.net {
            net.close().await;
        }
        if is_for_good {
            self.give_up_memory();
        }
        tracing::info!("stopped");
        self.place_taken
            .map_or(Ending::Told(left), Ending::PlaceTaken)
    }

    fn stage_event(&mut self, event: StageEvent) -> Input {
        match event {
            StageEvent::Request {
                id,
                request,
                answer,
            } => {
                self.answers.insert(id, answer);
                self.restores.asks(id, &request, &self.ops.metrics);
                Input::Request { id, request }
            }
            StageEvent::RequestComes { conn, bytes } => Input::RequestComes { conn, bytes },
            StageEvent::Connected { conn, viewer } => {
                self.refusals.connected(conn, viewer.clone());
                Input::Connected { conn, viewer }
            }
            StageEvent::Gone { conn } => {
                self.forget_answers(conn);
                self.restores.forget(conn);
                self.refusals.forget(conn);
                Input::Disconnected { conn }
            }
        }
    }

    fn forget_answers(&mut self, conn: ConnId) {
        let first = RequestId { conn, index: 0 };
        let last = RequestId {
            conn,
            index: u64::MAX,
        };
        let waiting: Vec<RequestId> = self.answers.range(first..=last).map(|it| *it.0).collect();
        for id in waiting {
            self.answers.remove(&id);
        }
    }

    fn perform(&mut self, output: Output) {
        match output {
            Output::Reply {
                id,
                reply,
                descriptor,
            } => self.answer(id, reply, descriptor),
            Output::Send { to, message } => {
                if let Some(net) = &self.net {
                    net.send(&to, encode(&message).into());
                }
            }
            Output::CreateSlot { slot, bytes } => self.create_slot(slot, bytes),
            Output::DropSlot { slot, end } => self.drop_slot(slot, end),
            Output::Digest {
                slot,
                length,
                chunk,
                cause,
            } => self.digest(slot, ShardSize { length, chunk }, cause),
            Output::Run(work) => self.run_session(work),
            Output::Hasten { leader, session } => self.executor.hasten(&leader, session),
            Output::Stop { leader, session } => self.executor.stop(&leader, session),
            Output::DropParity { set } => self.drop_parity(set),
            Output::Keep(record) => self.keep(&record),
            Output::Forget(name) => self.forget(&name),
            Output::Check { query, parts } => self.check(query, parts),
            Output::Scrub { query, piece } => self.scrub(query, piece),
            Output::Prepare(work) => {
                self.later(move || Input::Prepared(work.run()));
            }
            Output::RegisterRun {
                query,
                namespace,
                run,
            } => self.register_run(query, namespace, run),
            Output::Drain { id, order } => self.drain(id, order),
            Output::Note(note) => self.note(&note),
            Output::Upload { .. }
            | Output::StopUpload { .. }
            | Output::Withdraw { .. }
            | Output::Publish { .. }
            | Output::ListDurable { .. }
            | Output::Curate { .. }
            | Output::ClaimRun { .. }
            | Output::RecordRun { .. }
            | Output::FindRun { .. }
            | Output::FindSuccessions { .. }
            | Output::Succeed { .. }
            | Output::Fetch { .. } => {
                self.perform_durable(output);
            }
        }
    }

    fn create_slot(&self, slot: SlotId, bytes: u64) {
        let memory = self.memory.clone();
        self.later(move || match memory.create_slot(slot, bytes) {
            Ok(()) => Input::SlotCreated { slot },
            Err(error) => Input::SlotFailed {
                slot,
                reason: chain(&error),
            },
        });
    }

    /// The kernel takes a slot's pages back when its last descriptor is closed: tens of milliseconds for gigabytes.
    fn drop_slot(&self, slot: SlotId, end: SlotEnd) {
        if let Some(slot) = self.memory.take_slot(slot, end) {
            self.let_go(slot);
        }
    }

    /// What has not been used for some time goes back to the system.
    fn rest(&self) {
        self.memory.rest();
        if let Some(idle) = storaged_arena::take_idle_memory() {
            self.let_go(idle);
        }
    }

    /// Drops what takes the system a while, beside the loop.
    fn let_go(&self, memory: impl Send + 'static) {
        match self.offload {
            Offload::Inline => drop(memory),
            Offload::Threads => drop(tokio::task::spawn_blocking(move || drop(memory))),
        }
    }

    fn digest(&self, slot: SlotId, size: ShardSize, cause: DigestCause) {
        let (memory, ops) = (self.memory.clone(), self.ops.clone());
        let pool = self.pool.clone();
        let save = (cause == DigestCause::Saved).then(|| self.executor.beside_save());
        self.when_done(async move {
            let _save = save;
            let digested = match cause {
                DigestCause::Saved => digest::digest(&pool, &memory, slot, size).await,
                DigestCause::Restored => digest::digest_restored(&pool, &memory, slot, size).await,
            };
            match digested {
                Ok(Digested {
                    leaves,
                    prints,
                    root,
                    read,
                    busy,
                }) => {
                    ops.metrics.observe_digest(read);
                    let busy_us = u64::try_from(busy.as_micros()).unwrap_or(u64::MAX);
                    Input::Digested {
                        slot,
                        leaves,
                        prints,
                        root,
                        tally: DigestTally {
                            bytes: read,
                            busy_us,
                        },
                    }
                }
                Err(error) => Input::DigestFailed {
                    slot,
                    reason: chain(&error),
                },
            }
        });
    }

    fn run_session(&mut self, work: SessionWork) {
        let (executor, ops) = (self.executor.clone(), self.ops.clone());
        let inputs = self.inputs.clone();
        if let Some(Sink::Parity { set, .. }) = &work.keep {
            // Of a set that was there before and is put back in part: where its chunks lie is about to change.
            self.forget(&RecordName::Parity(set.0));
        }
        self.when_done(async move {
            let (leader, session) = (work.leader.clone(), work.session);
            let purpose = work.purpose;
            let SessionEnd { outcome, kept } = run(&executor, work, &inputs).await;
            if let Ok(tally) = &outcome {
                ops.metrics.observe_session(purpose, tally);
            }
            Input::SessionEnded {
                leader,
                session,
                outcome,
                kept,
            }
        });
    }

    fn check(&self, query: QueryId, parts: Vec<CheckPart>) {
        let (memory, pool) = (self.memory.clone(), self.pool.clone());
        self.when_done(async move {
            let outcomes = digest::check_all(&pool, &memory, parts).await;
            Input::Checked { query, outcomes }
        });
    }

    fn answer(&mut self, id: RequestId, reply: Reply, descriptor: Option<SlotId>) {
        let reply = match reply {
            Reply::Status(status) => Reply::Status(self.links.complete(&status).0),
            other => other,
        };
        if let Reply::Refused(refusal) = &reply {
            let told = self.refusals.tell(id.conn, refusal, self.clock.now());
            if let Some(RefusalLine { whom, silent }) = told {
                tracing::info!(code = ?refusal.code, refusal.message, whom, silent, "refused a request");
            }
        }
        self.restores.answers(id, &reply, &self.ops.metrics);
        if let Some(answer) = self.answers.remove(&id) {
            let slot = descriptor.and_then(|slot| self.memory.slot(slot));
            // The client may have gone meanwhile; its thread says so itself.
            let _ = answer.send(Answer { reply, slot });
        }
    }

    /// Does slow work elsewhere; its result comes back as an input.
    fn later(&self, work: impl FnOnce() -> Input + Send + 'static) {
        let offload = self.offload;
        self.when_done(async move {
            match offload {
                Offload::Inline => work(),
                Offload::Threads => match tokio::task::spawn_blocking(work).await {
                    Ok(input) => input,
                    // The runtime is going down; nobody waits any more.
                    Err(_) => std::future::pending().await,
                },
            }
        });
    }

    fn when_done(&self, work: impl Future<Output = Input> + Send + 'static) -> JoinHandle<()> {
        let inputs = self.inputs.clone();
        tokio::spawn(async move {
            let _ = inputs.send(work.await).await;
        })
    }
}

/// Runs a session, and says from time to time how it goes.
async fn run(executor: &Executor, work: SessionWork, inputs: &mpsc::Sender<Input>) -> SessionEnd {
    let (leader, session) = (work.leader.clone(), work.session);
    let meters = Meters::default();
    let running = executor.run_metered(work, &meters);
    tokio::pin!(running);
    loop {
        tokio::select! {
            biased;
            end = &mut running => return end,
            () = tokio::time::sleep(PROGRESS_EVERY) => {
                let (leader, tally) = (leader.clone(), meters.tally());
                // Nothing depends on one report: with a full queue the next one says it.
                let _ = inputs.try_send(Input::SessionProgress { leader, session, tally });
            }
        }
    }
}

/// An error with its causes, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
