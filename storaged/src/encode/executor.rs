//! Runs this node's part of sessions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use storaged_core::SessionTally;
use storaged_core::encode::{Hop, SessionWork, Target};
use storaged_wire::peer::{SessionFault, StreamRecord};
use storaged_wire::{NodeName, SessionId};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::frame::{self, Sums};
use super::inbound::Inbound;
use super::stripe::{Computed, compute};
use super::{BlockReceiver, BlockSender, Blocks, KeepBlocks, Pool, Streams};

/// What a session may take.
#[derive(Debug, Clone, Copy)]
pub struct ExecutorLimits {
    /// Stripes in flight per session and queue: received, being computed, and waiting to be sent. A member holds
    /// at most `3 * stripes_in_flight` blocks times the partial sums of its plan.
    pub stripes_in_flight: usize,
    /// A session whose streams do not move for this long is over.
    pub stall: Duration,
}

impl Default for ExecutorLimits {
    fn default() -> Self {
        Self {
            stripes_in_flight: 4,
            stall: Duration::from_secs(10),
        }
    }
}

type Job = Result<oneshot::Receiver<Result<Computed, SessionFault>>, SessionFault>;

/// The executor of one daemon.
pub struct Executor {
    streams: Arc<dyn Streams>,
    blocks: Arc<dyn Blocks>,
    pool: Pool,
    limits: ExecutorLimits,
    inbound: Inbound,
    running: Mutex<BTreeMap<(NodeName, SessionId), CancellationToken>>,
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
            inbound: Inbound::default(),
            running: Mutex::default(),
            in_flight: Arc::default(),
        }
    }

    /// A peer opened a stream for a session.
    pub fn accept(&self, record: StreamRecord, from: NodeName, stream: Box<dyn BlockReceiver>) {
        self.inbound.arrived(record, from, stream);
    }

    /// Ends a session.
    pub fn stop(&self, leader: &NodeName, session: SessionId) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(token) = running.get(&(leader.clone(), session)) {
            token.cancel();
        }
    }

    /// Stripes being computed now, over all sessions: zero when nothing runs.
    pub fn stripes_in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Runs a session to its end.
    ///
    /// # Errors
    /// What went wrong first, and who is to blame.
    pub async fn run(&self, work: SessionWork) -> Result<SessionTally, SessionFault> {
        let place = (work.leader.clone(), work.session);
        let token = CancellationToken::new();
        let lock = || self.running.lock().unwrap_or_else(PoisonError::into_inner);
        lock().insert(place.clone(), token.clone());
        let started = Instant::now();
        let outcome = tokio::select! {
            biased;
            () = token.cancelled() => Err(SessionFault::Aborted),
            outcome = self.execute(Arc::new(work)) => outcome,
        };
        lock().remove(&place);
        let bytes = outcome?;
        let elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(SessionTally { bytes, elapsed_ms })
    }

    async fn execute(&self, work: Arc<SessionWork>) -> Result<u64, SessionFault> {
        let hop = work
            .plan
            .hop(work.member)
            .cloned()
            .ok_or(SessionFault::NoBlocks)?;
        let hop = Arc::new(hop);
        let keep: Option<Arc<dyn KeepBlocks>> = match &work.keep {
            Some(keep) => Some(Arc::from(self.blocks.begin_keep(keep, &work)?)),
            None => None,
        };
        let senders = self.open_outputs(&work, &hop).await?;
        let mut inputs = Vec::with_capacity(hop.inputs.len());
        let mut receiving = Vec::with_capacity(hop.inputs.len());
        for edge in &hop.inputs {
            let (queue, received) = mpsc::channel(self.limits.stripes_in_flight);
            inputs.push(received);
            receiving.push(self.receive_edge(work.clone(), *edge, queue));
        }
        let (jobs, computed) = mpsc::channel(self.limits.stripes_in_flight);
        let receive = futures::future::try_join_all(receiving);
        let calculate = self.calculate(work.clone(), hop.clone(), inputs, keep.clone(), jobs);
        let send = self.send_outputs(&work, senders, computed);
        let (_, (), bytes) = tokio::try_join!(receive, calculate, send)?;
        if let Some(keep) = keep {
            keep.finish()?;
        }
        Ok(bytes)
    }

    async fn open_outputs(
        &self,
        work: &SessionWork,
        hop: &Hop,
    ) -> Result<BTreeMap<usize, Box<dyn BlockSender>>, SessionFault> {
        let mut senders = BTreeMap::new();
        for output in &hop.outputs {
            let Target::Edge(edge) = output.target else {
                continue;
            };
            let to = &work.members[work.plan.edges[edge].to];
            let record = StreamRecord {
                leader: work.leader.clone(),
                session: work.session,
                edge: edge as u32,
            };
            let opened = self.in_time(to, self.streams.open(to, &record)).await?;
            senders.insert(edge, opened);
        }
        Ok(senders)
    }

    /// Awaits a step of a stream within the stall limit; what goes wrong is the neighbour's fault.
    async fn in_time<T>(
        &self,
        node: &NodeName,
        step: impl Future<Output = Result<T, String>>,
    ) -> Result<T, SessionFault> {
        let blame = |reason: String| SessionFault::Neighbour {
            node: node.clone(),
            reason,
        };
        match tokio::time::timeout(self.limits.stall, step).await {
            Ok(outcome) => outcome.map_err(blame),
            Err(_) => {
                let ms = self.limits.stall.as_millis();
                Err(blame(format!("did not move for {ms} ms")))
            }
        }
    }

    async fn receive_edge(
        &self,
        work: Arc<SessionWork>,
        edge: usize,
        queue: mpsc::Sender<Sums>,
    ) -> Result<(), SessionFault> {
        let shape = work.plan.edges[edge];
        let from = work.members[shape.from].clone();
        let key = (work.leader.clone(), work.session, edge as u32);
        let arrived = async {
            self.inbound
                .wait(key)
                .await
                .ok_or_else(|| "closed its stream".to_owned())
        };
        let (sender, mut stream) = self.in_time(&from, arrived).await?;
        if sender != from {
            let reason = format!("opened the stream of {from}");
            return Err(SessionFault::Neighbour {
                node: sender,
                reason,
            });
        }
        for stripe in work.stripes.iter().cloned().flatten() {
            let bytes = work.stripe_bytes(stripe);
            let step = frame::receive(stream.as_mut(), stripe, bytes, shape.width);
            let sums = self.in_time(&from, step).await?;
            if queue.send(sums).await.is_err() {
                return Ok(());
            }
        }
        self.in_time(&from, stream.expect_end()).await
    }

    async fn calculate(
        &self,
        work: Arc<SessionWork>,
        hop: Arc<Hop>,
        mut inputs: Vec<mpsc::Receiver<Sums>>,
        keep: Option<Arc<dyn KeepBlocks>>,
        jobs: mpsc::Sender<Job>,
    ) -> Result<(), SessionFault> {
        for stripe in work.stripes.iter().cloned().flatten() {
            let mut sums = Vec::with_capacity(inputs.len());
            for input in &mut inputs {
                // A closed queue means that receiving failed: its own error ends the session.
                let Some(received) = input.recv().await else {
                    return std::future::pending().await;
                };
                sums.push(received);
            }
            let (work, hop, keep) = (work.clone(), hop.clone(), keep.clone());
            let blocks = self.blocks.clone();
            let flight = InFlight::enter(&self.in_flight);
            let job = move || {
                let _flight = flight;
                compute(&work, &hop, stripe, sums, blocks.as_ref(), keep.as_deref())
            };
            let job = self
                .pool
                .submit(job)
                .await
                .map_err(|_| SessionFault::Aborted);
            if jobs.send(job).await.is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    async fn send_outputs(
        &self,
        work: &SessionWork,
        mut senders: BTreeMap<usize, Box<dyn BlockSender>>,
        mut computed: mpsc::Receiver<Job>,
    ) -> Result<u64, SessionFault> {
        let mut total = 0;
        while let Some(job) = computed.recv().await {
            let done = job?.await.map_err(|_| SessionFault::Aborted)??;
            let bytes = work.stripe_bytes(done.stripe);
            total += if done.dirty { bytes as u64 } else { 0 };
            for (edge, sums) in done.edges {
                let shape = work.plan.edges[edge];
                let to = &work.members[shape.to];
                let Some(sender) = senders.get_mut(&edge) else {
                    continue;
                };
                let step = frame::send(sender.as_mut(), done.stripe, bytes, shape.width, sums);
                self.in_time(to, step).await?;
            }
        }
        for (edge, sender) in &mut senders {
            let to = &work.members[work.plan.edges[*edge].to];
            self.in_time(to, sender.finish()).await?;
        }
        Ok(total)
    }
}

/// Counts a stripe from its submission until its result is there.
struct InFlight(Arc<AtomicUsize>);

impl InFlight {
    fn enter(gauge: &Arc<AtomicUsize>) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Self(gauge.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
