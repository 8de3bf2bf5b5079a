//! Runs this node's part of sessions: which are going on, how they begin and end, and what they may take.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use storaged_core::{SessionPurpose, SessionTally, SessionWork, Urgency};
use storaged_wire::peer::{SessionFault, StreamRecord};
use storaged_wire::{NodeName, SessionId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::bound::{RepairBound, SaveGuard};
use super::buffer::BufferPool;
use super::check::{self, CheckedPlan};
use super::inbound::Inbound;
use super::meter::Meters;
use super::pipeline::Pipeline;
use super::stripe::MemberTask;
use super::{BlockReceiver, Blocks, Pool, Streams};

/// What a session may take.
#[derive(Debug, Clone, Copy)]
pub struct ExecutorLimits {
    /// Stripes in flight per session, up to twice as many where roles rotate: from the first byte received of one until its results are handed to the
    /// transport. Of those that need less memory here than the class that needs most there are more: see [`ExecutorLimits::blocks_max`].
    pub stripes_in_flight: usize,
    /// A session whose streams do not move for this long is over.
    pub stall: Duration,
    /// Bytes per second that all repairs together send from here while a save is being protected here; none for no bound.
    pub repair_rate: Option<NonZeroU64>,
}

impl Default for ExecutorLimits {
    fn default() -> Self {
        Self {
            stripes_in_flight: 8,
            stall: Duration::from_secs(10),
            repair_rate: None,
        }
    }
}

impl ExecutorLimits {
    /// Most blocks that a session holds at this member: per stripe in flight the received sums, the local block and
    /// the results, those that go on in the memory of a received sum counted twice; of the class of stripes that
    /// needs most. Blocks that the transport has not had acknowledged come on top, and its send window bounds them.
    pub fn blocks_max(&self, work: &SessionWork) -> usize {
        let stripes = work.plan.stripes_in_flight(self.stripes_in_flight);
        work.plan.blocks_in_flight_max(work.member, stripes)
    }
}

/// How a session ended at this member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionEnd {
    /// What it did, or what went wrong first, and who is to blame.
    pub outcome: Result<SessionTally, SessionFault>,
    /// Stripes that are kept: of a shard verified, of parity whole; ascending.
    pub kept: Vec<Range<u64>>,
}

/// Stripes in any order as ascending runs.
fn runs(mut stripes: Vec<u64>) -> Vec<Range<u64>> {
    stripes.sort_unstable();
    let mut runs: Vec<Range<u64>> = Vec::new();
    for stripe in stripes {
        match runs.last_mut() {
            Some(last) if last.end == stripe => last.end += 1,
            _ => runs.push(stripe..stripe + 1),
        }
    }
    runs
}

/// A session as its members name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SessionKey {
    leader: NodeName,
    session: SessionId,
}

impl SessionKey {
    fn of(leader: &NodeName, session: SessionId) -> Self {
        Self {
            leader: leader.clone(),
            session,
        }
    }
}

/// Orders of sessions that have not begun to run here, at most, and for how long they count.
const EARLY_ORDERS_MAX: usize = 64;
const EARLY_ORDER_FOR: Duration = Duration::from_secs(15);

/// What is told of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionOrder {
    Stop,
    Hasten,
}

/// An order of a session that does not run here yet.
struct EarlyOrder {
    of: SessionKey,
    order: SessionOrder,
    at: Instant,
}

/// A session that runs.
struct RunningSession {
    number: u64,
    signals: SessionSignals,
}

/// What a session hears while it runs.
#[derive(Debug, Clone, Default)]
struct SessionSignals {
    over: CancellationToken,
    /// A reader waits for it.
    awaited: CancellationToken,
}

impl SessionSignals {
    fn give(&self, order: SessionOrder) {
        match order {
            SessionOrder::Stop => self.over.cancel(),
            SessionOrder::Hasten => self.awaited.cancel(),
        }
    }
}

/// Which sessions run, and what those are told that are about to begin.
#[derive(Default)]
struct Running {
    sessions: BTreeMap<SessionKey, RunningSession>,
    /// A session is run by a task of its own, so its end, or that it is awaited, may be told before that task has begun.
    early: VecDeque<EarlyOrder>,
}

impl Running {
    /// Tells a session, also one that is about to begin.
    fn tell(&mut self, of: SessionKey, order: SessionOrder) {
        if let Some(running) = self.sessions.get(&of) {
            return running.signals.give(order);
        }
        let at = Instant::now();
        self.early.truncate(EARLY_ORDERS_MAX - 1);
        self.early.push_front(EarlyOrder { of, order, at });
    }

    /// Tells a session that begins what came before it.
    fn tell_early(&mut self, of: &SessionKey, signals: &SessionSignals) {
        self.early.retain(|early| {
            let counts = early.at.elapsed() < EARLY_ORDER_FOR;
            let is_its = early.of == *of;
            if counts && is_its {
                signals.give(early.order);
            }
            counts && !is_its
        });
    }
}

/// A session's work with what its plan comes to here.
struct CheckedWork {
    work: SessionWork,
    plan: CheckedPlan,
}

/// The executor of one daemon.
pub struct Executor {
    streams: Arc<dyn Streams>,
    blocks: Arc<dyn Blocks>,
    pool: Pool,
    limits: ExecutorLimits,
    inbound: Arc<Inbound>,
    buffers: Arc<BufferPool>,
    running: Mutex<Running>,
    bound: Arc<RepairBound>,
    begun: AtomicU64,
    in_flight: Arc<AtomicUsize>,
}

impl Executor {
    /// An executor over a network, RAM and threads.
    pub fn new(
        streams: Arc<dyn Streams>,
        blocks: Arc<dyn Blocks>,
        pool: Pool,
        limits: ExecutorLimits,
    ) -> Self {
        Self {
            streams,
            blocks,
            pool,
            limits,
            inbound: Arc::default(),
            buffers: BufferPool::new(),
            running: Mutex::default(),
            bound: RepairBound::new(limits.repair_rate, limits.stall),
            begun: AtomicU64::new(0),
            in_flight: Arc::default(),
        }
    }

    /// A peer opened a stream for a session.
    pub fn accept(&self, record: StreamRecord, from: NodeName, stream: Box<dyn BlockReceiver>) {
        self.inbound.arrived(record, from, stream);
    }

    /// Ends a session, also one whose running is about to begin.
    pub fn stop(&self, leader: &NodeName, session: SessionId) {
        let place = SessionKey::of(leader, session);
        self.running().tell(place, SessionOrder::Stop);
        self.inbound.forget(leader, session);
    }

    /// A reader waits for what a session brings: it is held back beside no save any more.
    pub fn hasten(&self, leader: &NodeName, session: SessionId) {
        let place = SessionKey::of(leader, session);
        self.running().tell(place, SessionOrder::Hasten);
    }

    /// A save begins to be protected: until the guard is dropped repairs are held back.
    pub fn beside_save(&self) -> SaveGuard {
        self.bound.beside_save()
    }

    /// How long frames of repairs have waited beside saves, all streams added up.
    pub fn repairs_held(&self) -> Duration {
        self.bound.held()
    }

    /// Stripes being computed now, over all sessions: zero when nothing runs.
    pub fn stripes_in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Blocks in use now, over all sessions and in the transport: zero when nothing runs and all is acknowledged.
    pub fn blocks_in_flight(&self) -> usize {
        self.buffers.lent()
    }

    /// Most blocks that were in use at once.
    pub fn blocks_in_flight_most(&self) -> usize {
        self.buffers.lent_most()
    }

    /// Streams of peers that wait for their session to begin here.
    pub fn streams_parked(&self) -> usize {
        self.inbound.parked()
    }

    /// Runs a session to its end. When it returns, nothing of the session goes on here: no block is read or kept.
    ///
    /// # Errors
    /// What went wrong first, and who is to blame.
    pub async fn run(&self, work: SessionWork) -> Result<SessionTally, SessionFault> {
        self.run_to_end(work).await.outcome
    }

    /// Runs a session, and says also of one that failed which stripes are in place.
    pub async fn run_to_end(&self, work: SessionWork) -> SessionEnd {
        self.run_metered(work, &Meters::default()).await
    }

    /// The same, with meters that others may read meanwhile.
    pub async fn run_metered(&self, work: SessionWork, meters: &Meters) -> SessionEnd {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let outcome = self.run_keeping(work, &kept, meters).await;
        let stripes = std::mem::take(&mut *kept.lock().unwrap_or_else(PoisonError::into_inner));
        SessionEnd {
            outcome,
            kept: runs(stripes),
        }
    }

    async fn run_keeping(
        &self,
        work: SessionWork,
        kept: &Arc<Mutex<Vec<u64>>>,
        meters: &Meters,
    ) -> Result<SessionTally, SessionFault> {
        let plan = check::checked_plan(&work)?;
        let registered = self.register(&work);
        let _save = (work.purpose == SessionPurpose::Encode).then(|| self.beside_save());
        let checked = CheckedWork { work, plan };
        let jobs = TaskTracker::new();
        jobs.close();
        let outcome = tokio::select! {
            biased;
            () = registered.signals.over.cancelled() => Err(SessionFault::Aborted),
            outcome = self.execute(checked, kept, &registered.signals, &jobs, meters) => outcome,
        };
        drop(registered);
        jobs.wait().await;
        let bytes = outcome?;
        Ok(SessionTally {
            bytes,
            ..meters.tally()
        })
    }

    async fn execute(
        &self,
        checked: CheckedWork,
        kept: &Arc<Mutex<Vec<u64>>>,
        signals: &SessionSignals,
        jobs: &TaskTracker,
        meters: &Meters,
    ) -> Result<u64, SessionFault> {
        let CheckedWork { work, plan } = checked;
        let keep = match &work.keep {
            Some(keep) => Some(self.blocks.begin_keep(keep, &work)?),
            None => None,
        };
        let (blocks, buffers) = (self.blocks.clone(), self.buffers.clone());
        let part = Arc::new(MemberTask {
            work,
            plan,
            blocks,
            keep,
            buffers,
            kept: kept.clone(),
            over: signals.over.clone(),
        });
        let pipeline = Pipeline {
            part: part.clone(),
            streams: self.streams.as_ref(),
            inbound: &self.inbound,
            pool: &self.pool,
            limits: self.limits,
            in_flight: &self.in_flight,
            jobs,
            meters,
            bound: &self.bound,
            awaited: &signals.awaited,
        };
        let bytes = pipeline.run().await?;
        if let Some(keep) = &part.keep {
            keep.finish()?;
        }
        Ok(bytes)
    }

    fn register(&self, work: &SessionWork) -> Registered<'_> {
        let place = SessionKey::of(&work.leader, work.session);
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let signals = SessionSignals::default();
        if work.urgency == Urgency::Awaited {
            signals.give(SessionOrder::Hasten);
        }
        let mut running = self.running();
        running.tell_early(&place, &signals);
        // A leader that was restarted may use a number again; its older session has no end of its own any more.
        let session = RunningSession {
            number,
            signals: signals.clone(),
        };
        if let Some(older) = running.sessions.insert(place.clone(), session) {
            older.signals.give(SessionOrder::Stop);
        }
        drop(running);
        Registered {
            executor: self,
            place,
            number,
            signals,
        }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A session among those that run; dropping it ends the session.
struct Registered<'a> {
    executor: &'a Executor,
    place: SessionKey,
    number: u64,
    signals: SessionSignals,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.signals.give(SessionOrder::Stop);
        let mut running = self.executor.running();
        let current = running.sessions.get(&self.place);
        if current.is_some_and(|running| running.number == self.number) {
            running.sessions.remove(&self.place);
            drop(running);
            let SessionKey { leader, session } = &self.place;
            self.executor.inbound.forget(leader, *session);
        }
    }
}
