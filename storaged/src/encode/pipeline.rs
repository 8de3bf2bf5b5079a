//! The three stages of a session at one member: receive, calculate, send. They run side by side, joined by bounded
//! queues; the first that fails ends the others, and dropping them resets their streams.
//!
//! Memory is bounded by a window: a stripe is admitted only once the stripe `stripes_in_flight` before it has been
//! sent on. All input edges share it, so that of many inputs none can run ahead and take the room of the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use storaged_core::encode::Target;
use storaged_wire::NodeName;
use storaged_wire::peer::{SessionFault, StreamRecord};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::frame::{self, Shape, Sums};
use super::inbound::{Inbound, Place};
use super::stripe::{Computed, Part};
use super::{BlockReceiver, BlockSender, BlockState, ExecutorLimits, Pool, Streams};

type Senders = BTreeMap<usize, Box<dyn BlockSender>>;
/// A result, and then what shows that its job goes on: in this order, so that the blocks of a result that nobody
/// takes any more are back before the session counts as ended.
type Outcome = (Result<Computed, SessionFault>, TaskTrackerToken);
type Job = oneshot::Receiver<Outcome>;

/// One session in progress.
pub(super) struct Pipeline<'a> {
    pub part: Arc<Part>,
    pub streams: &'a dyn Streams,
    pub inbound: &'a Inbound,
    pub pool: &'a Pool,
    pub limits: ExecutorLimits,
    /// Stripes being computed, over all sessions.
    pub in_flight: &'a Arc<AtomicUsize>,
    /// Jobs of this session that have not ended.
    pub jobs: &'a TaskTracker,
}

impl Pipeline<'_> {
    /// Runs to the end. Gives the bytes of the stripes that were not clean.
    pub async fn run(&self) -> Result<u64, SessionFault> {
        let room = self.limits.stripes_in_flight.max(1);
        let (done, window) = watch::channel(0);
        let senders = self.open_outputs().await?;
        let mut inputs = Vec::new();
        let mut receiving = Vec::new();
        for edge in &self.part.hop.inputs {
            let (queue, received) = mpsc::channel(room);
            inputs.push(received);
            receiving.push(self.receive(*edge, queue, window.clone()));
        }
        let (jobs, computed) = mpsc::channel(room);
        let receive = futures::future::try_join_all(receiving);
        let calculate = self.calculate(inputs, jobs, window);
        let send = self.send(senders, computed, done);
        let (_, (), bytes) = tokio::try_join!(receive, calculate, send)?;
        Ok(bytes)
    }

    /// Stripes in the plan's order, each with its position.
    fn stripes(&self) -> impl Iterator<Item = (usize, u64)> + use<> {
        self.part
            .work
            .stripes
            .clone()
            .into_iter()
            .flatten()
            .enumerate()
    }

    async fn admit(&self, position: usize, window: &mut watch::Receiver<usize>) {
        let first = (position + 1).saturating_sub(self.limits.stripes_in_flight.max(1));
        // An error means that sending has ended, and with it the session.
        let _ = window.wait_for(|done| *done >= first).await;
    }

    fn shape(&self, edge: usize, stripe: u64) -> Result<Shape, SessionFault> {
        let bytes = u32::try_from(self.part.work.stripe_bytes(stripe));
        let width = u8::try_from(self.part.work.plan.edges[edge].width);
        match (bytes, width) {
            (Ok(bytes), Ok(width)) => Ok(Shape {
                stripe,
                bytes,
                width,
            }),
            _ => Err(SessionFault::NoBlocks),
        }
    }

    async fn open_outputs(&self) -> Result<Senders, SessionFault> {
        let work = &self.part.work;
        let mut senders = BTreeMap::new();
        for output in &self.part.hop.outputs {
            let Target::Edge(edge) = output.target else {
                continue;
            };
            let to = &work.members[work.plan.edges[edge].to];
            let record = self.record(edge)?;
            let opened = self
                .in_time(to, "took no stream", self.streams.open(to, &record))
                .await?;
            senders.insert(edge, opened);
        }
        Ok(senders)
    }

    fn record(&self, edge: usize) -> Result<StreamRecord, SessionFault> {
        let work = &self.part.work;
        let edge = u32::try_from(edge).map_err(|_| SessionFault::NoBlocks)?;
        Ok(StreamRecord {
            leader: work.leader.clone(),
            session: work.session,
            edge,
        })
    }

    /// Awaits a step of a stream within the stall limit; what goes wrong is the neighbour's fault.
    async fn in_time<T>(
        &self,
        node: &NodeName,
        late: &str,
        step: impl Future<Output = Result<T, String>>,
    ) -> Result<T, SessionFault> {
        let blame = |reason: String| SessionFault::Neighbour {
            node: node.clone(),
            reason,
        };
        match tokio::time::timeout(self.limits.stall, step).await {
            Ok(outcome) => outcome.map_err(blame),
            Err(_) => Err(blame(format!(
                "{late} for {} ms",
                self.limits.stall.as_millis()
            ))),
        }
    }

    async fn receive(
        &self,
        edge: usize,
        queue: mpsc::Sender<Sums>,
        mut window: watch::Receiver<usize>,
    ) -> Result<(), SessionFault> {
        let work = &self.part.work;
        let from = &work.members[work.plan.edges[edge].from];
        let mut stream = self.arrived(edge, from).await?;
        for (position, stripe) in self.stripes() {
            self.admit(position, &mut window).await;
            let shape = self.shape(edge, stripe)?;
            let step = frame::receive(stream.as_mut(), shape, &self.part.buffers);
            let sums = self.in_time(from, "sent nothing whole", step).await?;
            if queue.send(sums).await.is_err() {
                return Ok(());
            }
        }
        self.in_time(from, "did not end its stream", stream.expect_end())
            .await
    }

    async fn arrived(
        &self,
        edge: usize,
        from: &NodeName,
    ) -> Result<Box<dyn BlockReceiver>, SessionFault> {
        let StreamRecord {
            leader,
            session,
            edge,
        } = self.record(edge)?;
        let place = Place {
            leader,
            session,
            edge,
            from: from.clone(),
        };
        let wait = async {
            self.inbound
                .wait(place)
                .await
                .ok_or_else(|| "opened its stream twice".to_owned())
        };
        self.in_time(from, "opened no stream", wait).await
    }

    async fn calculate(
        &self,
        mut inputs: Vec<mpsc::Receiver<Sums>>,
        queue: mpsc::Sender<Job>,
        mut window: watch::Receiver<usize>,
    ) -> Result<(), SessionFault> {
        for (position, stripe) in self.stripes() {
            self.admit(position, &mut window).await;
            let mut sums = Vec::with_capacity(inputs.len());
            for input in &mut inputs {
                match input.recv().await {
                    Some(received) => sums.push(received),
                    // Receiving failed, and its own error ends the session.
                    None => std::future::pending().await,
                }
            }
            let job = self.submit(stripe, sums).await?;
            if queue.send(job).await.is_err() {
                return Ok(());
            }
        }
        Ok(())
    }

    async fn submit(&self, stripe: u64, sums: Vec<Sums>) -> Result<Job, SessionFault> {
        let part = self.part.clone();
        let alive = self.jobs.token();
        let flight = InFlight::enter(self.in_flight);
        let job = move || {
            let outcome = part.compute(stripe, sums);
            drop((part, flight));
            (outcome, alive)
        };
        self.pool
            .submit(job)
            .await
            .map_err(|_| SessionFault::Aborted)
    }

    async fn send(
        &self,
        mut senders: Senders,
        mut computed: mpsc::Receiver<Job>,
        done: watch::Sender<usize>,
    ) -> Result<u64, SessionFault> {
        let mut dirty_bytes = 0;
        while let Some(job) = computed.recv().await {
            // No result at all means that the thread is gone, or broke on it.
            let (outcome, _alive) = job.await.map_err(|_| SessionFault::Aborted)?;
            let Computed {
                stripe,
                edges,
                state,
            } = outcome?;
            if state == BlockState::Dirty {
                dirty_bytes += self.part.work.stripe_bytes(stripe) as u64;
            }
            for (edge, sums) in edges {
                let Some(sender) = senders.get_mut(&edge) else {
                    continue;
                };
                let shape = self.shape(edge, stripe)?;
                let step = frame::send(sender.as_mut(), shape, sums);
                self.in_time(self.receiver_of(edge), "took nothing", step)
                    .await?;
            }
            done.send_modify(|stripes| *stripes += 1);
        }
        for (edge, sender) in &mut senders {
            let late = "did not acknowledge the end";
            self.in_time(self.receiver_of(*edge), late, sender.finish())
                .await?;
        }
        Ok(dirty_bytes)
    }

    fn receiver_of(&self, edge: usize) -> &NodeName {
        let work = &self.part.work;
        &work.members[work.plan.edges[edge].to]
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
