//! Runs this node's part of sessions: which are going on, how they begin and end, and what they may take.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use storaged_core::{SessionTally, SessionWork};
use storaged_wire::peer::{SessionFault, StreamRecord};
use storaged_wire::{NodeName, SessionId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

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
    /// transport. See [`ExecutorLimits::blocks_max`].
    pub stripes_in_flight: usize,
    /// A session whose streams do not move for this long is over.
    pub stall: Duration,
}

impl Default for ExecutorLimits {
    fn default() -> Self {
        Self {
            stripes_in_flight: 8,
            stall: Duration::from_secs(10),
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

type SessionKey = (NodeName, SessionId);

/// Stops of sessions that have not begun to run here, at most, and for how long they count.
const EARLY_STOPS_MAX: usize = 64;
const EARLY_STOP_FOR: Duration = Duration::from_secs(15);

/// Which sessions run, and which must not begin any more.
#[derive(Default)]
struct Running {
    sessions: BTreeMap<SessionKey, (u64, CancellationToken)>,
    /// A session is run by a task of its own, so its end may be told before that task has begun.
    early_stops: VecDeque<(SessionKey, Instant)>,
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
        let place = (leader.clone(), session);
        let mut running = self.running();
        match running.sessions.get(&place) {
            Some((_, over)) => over.cancel(),
            None => {
                running.early_stops.truncate(EARLY_STOPS_MAX - 1);
                running.early_stops.push_front((place, Instant::now()));
            }
        }
        drop(running);
        self.inbound.forget(leader, session);
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
        let checked = CheckedWork { work, plan };
        let jobs = TaskTracker::new();
        jobs.close();
        let outcome = tokio::select! {
            biased;
            () = registered.over.cancelled() => Err(SessionFault::Aborted),
            outcome = self.execute(checked, kept, &registered.over, &jobs, meters) => outcome,
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
        over: &CancellationToken,
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
            over: over.clone(),
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
        };
        let bytes = pipeline.run().await?;
        if let Some(keep) = &part.keep {
            keep.finish()?;
        }
        Ok(bytes)
    }

    fn register(&self, work: &SessionWork) -> Registered<'_> {
        let place = (work.leader.clone(), work.session);
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let over = CancellationToken::new();
        let mut running = self.running();
        running
            .early_stops
            .retain(|(_, at)| at.elapsed() < EARLY_STOP_FOR);
        let stopped = running.early_stops.iter().position(|(at, _)| *at == place);
        if let Some(stopped) = stopped {
            running.early_stops.remove(stopped);
            over.cancel();
        }
        // A leader that was restarted may use a number again; its older session has no end of its own any more.
        let older = running
            .sessions
            .insert(place.clone(), (number, over.clone()));
        if let Some((_, older)) = older {
            older.cancel();
        }
        drop(running);
        Registered {
            executor: self,
            place,
            number,
            over,
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
    over: CancellationToken,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.over.cancel();
        let mut running = self.executor.running();
        let current = running.sessions.get(&self.place);
        if current.is_some_and(|(number, _)| *number == self.number) {
            running.sessions.remove(&self.place);
            drop(running);
            self.executor.inbound.forget(&self.place.0, self.place.1);
        }
    }
}
