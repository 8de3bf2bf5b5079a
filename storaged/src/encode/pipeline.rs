//! The stages of a session at one member: receive, calculate, send. They run side by side, and stripes overtake each
//! other where nothing orders them; the first stage that fails ends the others, and dropping them resets their
//! streams.
//!
//! One stream per neighbour and direction carries what all stripes send this way, in their order. None is opened that no
//! stripe of the session needs: a gather of 32 nodes has 992 of them, a shard of a MiB four stripes. Stripes are begun
//! in order too (`Pipeline::begin`): each tells the streams it reads what it expects, and those it writes what will
//! come, and is then computed whenever its inputs are there. So a stripe that waits for a slow neighbour holds up
//! the streams it needs and no other.
//!
//! Memory is bounded by a window of blocks (`StripeWindow`, within `ExecutorLimits::blocks_max`): a stripe is begun only while there is room for those
//! that this member holds of it until its results are handed over. A stripe to which it adds its own block alone takes a fraction of one
//! that it gathers, so that its blocks are on their way long before their roots come to them: a gather of stripes that all counted
//! alike kept links 0.7 full (docs/operate/transport.md). No window deadlocks: of all stripes that are unfinished
//! anywhere, the first is begun at all of its members, and nothing is before it on any stream.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::stream::{FuturesUnordered, StreamExt};
use storaged_core::{SessionPurpose, StripeTurn};
use storaged_wire::NodeName;
use storaged_wire::peer::{SessionFault, StreamRecord};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::bound::{RepairBound, RepairFrame};
use super::check::EdgeRef;
use super::error::NeighbourError;
use super::frame::{self, Shape, Sums};
use super::inbound::{Inbound, StreamKey};
use super::meter::Meters;
use super::stripe::{Computed, MemberTask};
use super::{BlockReceiver, BlockSender, BlockState, ExecutorLimits, Pool, Streams};
use crate::net::RailHint;

/// A result, and then what shows that its job goes on: in this order, so that the blocks of a result that nobody
/// takes any more are back before the session counts as ended.
type Outcome = (Result<Computed, SessionFault>, TaskTrackerToken);

/// What an input stream is to bring next, and who waits for it.
struct Expected {
    shape: Shape,
    to: oneshot::Sender<Sums>,
}

/// What an output stream is to send next. The stripe is in flight until its last result is handed over.
struct Promised {
    shape: Shape,
    from: oneshot::Receiver<Sums>,
    _in_flight: Arc<OwnedSemaphorePermit>,
}

/// A stripe that has begun.
struct Begun {
    turn: StripeTurn,
    inputs: Vec<oneshot::Receiver<Sums>>,
    outputs: Vec<oneshot::Sender<Sums>>,
    _in_flight: Arc<OwnedSemaphorePermit>,
}

/// A window has no more room than this, unless so many stripes in flight as the limits name take more. All of `blocks_max` would be 100 MiB and
/// more for a session of many members or large chunks, of which several run at once.
const WINDOW_BYTES: usize = 32 << 20;

/// Room for the blocks of stripes in flight.
struct StripeWindow {
    blocks: Arc<Semaphore>,
    /// What a stripe takes, for each class.
    takes: Vec<u32>,
    /// Most stripes that there is room for.
    stripes_max: usize,
}

impl StripeWindow {
    fn of(part: &MemberTask, limits: &ExecutorLimits) -> Self {
        let work = &part.work;
        let classes = part.plan.classes.len();
        let takes = (0..classes).map(|class| work.plan.blocks_held(work.member, class));
        // Stripes go through the classes in turn: so many of them in a row hold no more than this.
        let stripes = work.plan.stripes_in_flight(limits.stripes_in_flight);
        let in_a_row = stripes.div_ceil(classes.max(1)) * takes.clone().sum::<usize>();
        let by_bytes = WINDOW_BYTES / work.chunk.bytes();
        let blocks = limits.blocks_max(work).min(by_bytes.max(in_a_row));
        Self::new(blocks, takes)
    }

    /// For so many blocks; at least for one stripe of each class, of which none takes nothing.
    fn new(blocks: usize, takes: impl Iterator<Item = usize>) -> Self {
        let takes = takes.map(|blocks| u32::try_from(blocks).unwrap_or(u32::MAX).max(1));
        let takes: Vec<u32> = takes.collect();
        let least = takes.iter().copied().min().unwrap_or(1) as usize;
        let most = takes.iter().copied().max().unwrap_or(1) as usize;
        let blocks = blocks.max(most);
        Self {
            blocks: Arc::new(Semaphore::new(blocks)),
            takes,
            stripes_max: blocks / least,
        }
    }

    /// Waits for room for a stripe of this class, behind those that came before.
    async fn enter(&self, class: usize) -> Result<Arc<OwnedSemaphorePermit>, SessionFault> {
        let takes = self.takes.get(class).ok_or(SessionFault::NoBlocks)?;
        let permit = self.blocks.clone().acquire_many_owned(*takes).await;
        Ok(Arc::new(permit.map_err(|_| SessionFault::Aborted)?))
    }
}

/// Where stripes announce what they need: per link, in the order of the stripes.
struct Orders {
    receive: BTreeMap<usize, mpsc::Sender<Expected>>,
    send: BTreeMap<usize, mpsc::Sender<Promised>>,
}

/// One session in progress.
pub(super) struct Pipeline<'a> {
    pub part: Arc<MemberTask>,
    pub streams: &'a dyn Streams,
    pub inbound: &'a Inbound,
    pub pool: &'a Pool,
    pub limits: ExecutorLimits,
    /// Stripes being computed, over all sessions.
    pub in_flight: &'a Arc<AtomicUsize>,
    /// Jobs of this session that have not ended.
    pub jobs: &'a TaskTracker,
    pub meters: &'a Meters,
    pub bound: &'a RepairBound,
    /// Set once a reader waits for this session.
    pub awaited: &'a CancellationToken,
}

impl Pipeline<'_> {
    /// Runs to the end. Gives the bytes of the stripes that were not clean.
    pub async fn run(&self) -> Result<u64, SessionFault> {
        let window = StripeWindow::of(&self.part, &self.limits);
        let mut orders = Orders {
            receive: BTreeMap::new(),
            send: BTreeMap::new(),
        };
        let mut sending = Vec::new();
        let mut receiving = Vec::new();
        let used = self.part.links_used();
        let links = self.part.plan.links.iter().enumerate();
        for (link, ends) in links.filter(|(link, _)| used.contains(link)) {
            if ends.from == self.part.work.member {
                let (order, promised) = mpsc::channel(window.stripes_max);
                orders.send.insert(link, order);
                sending.push(self.send(link, self.open(link).await?, promised));
            }
            if ends.to == self.part.work.member {
                let (order, expected) = mpsc::channel(window.stripes_max);
                orders.receive.insert(link, order);
                receiving.push(self.receive(link, expected));
            }
        }
        let receive = futures::future::try_join_all(receiving);
        let calculate = self.calculate(orders, &window);
        let send = futures::future::try_join_all(sending);
        let (_, bytes, _) = tokio::try_join!(receive, calculate, send)?;
        Ok(bytes)
    }

    fn shape(&self, edge: EdgeRef, stripe: u64) -> Result<Shape, SessionFault> {
        let bytes = u32::try_from(self.part.work.stripe_bytes(stripe));
        let bytes = bytes.map_err(|_| SessionFault::NoBlocks)?;
        let width = edge.width;
        Ok(Shape {
            stripe,
            bytes,
            width,
        })
    }

    async fn open(&self, link: usize) -> Result<Box<dyn BlockSender>, SessionFault> {
        let (to, record) = (self.receiver_of(link), self.record(link)?);
        let ends = self.part.plan.links[link];
        let hint = RailHint::new(ends.from + ends.to);
        self.in_time(to, "took no stream", self.streams.open(to, &record, hint))
            .await
    }

    fn record(&self, link: usize) -> Result<StreamRecord, SessionFault> {
        let work = &self.part.work;
        let edge = u32::try_from(link).map_err(|_| SessionFault::NoBlocks)?;
        Ok(StreamRecord {
            leader: work.leader.clone(),
            session: work.session,
            edge,
        })
    }

    /// Awaits a step of a stream within the stall limit; what goes wrong is the neighbour's fault.
    async fn in_time<T, E: Into<NeighbourError>>(
        &self,
        node: &NodeName,
        what: &'static str,
        step: impl Future<Output = Result<T, E>>,
    ) -> Result<T, SessionFault> {
        let millis = self.limits.stall.as_millis();
        let outcome = match tokio::time::timeout(self.limits.stall, step).await {
            Ok(outcome) => outcome.map_err(Into::into),
            Err(_) => Err(NeighbourError::Stalled { what, millis }),
        };
        outcome.map_err(|error| SessionFault::Neighbour {
            node: node.clone(),
            reason: error.to_string(),
        })
    }

    async fn receive(
        &self,
        link: usize,
        mut expected: mpsc::Receiver<Expected>,
    ) -> Result<(), SessionFault> {
        let from = self.sender_of(link);
        let mut stream = self.arrived(link, from).await?;
        let flow = self.meters.from(from);
        while let Some(Expected { shape, to }) = expected.recv().await {
            let step = frame::receive(stream.as_mut(), shape, &self.part.buffers, &flow);
            let sums = self.in_time(from, "sent nothing whole", step).await?;
            // Whoever does not wait any more has failed, and its own error ends the session.
            let _ = to.send(sums);
        }
        self.in_time(from, "did not end its stream", stream.expect_end())
            .await
    }

    async fn arrived(
        &self,
        link: usize,
        from: &NodeName,
    ) -> Result<Box<dyn BlockReceiver>, SessionFault> {
        let StreamRecord {
            leader,
            session,
            edge,
        } = self.record(link)?;
        let place = StreamKey {
            leader,
            session,
            edge,
            from: from.clone(),
        };
        let wait = async {
            let stream = self.inbound.wait(place).await;
            stream.ok_or(NeighbourError::OpenedTwice)
        };
        self.in_time(from, "opened no stream", wait).await
    }

    /// Begins the stripes in order and computes them as their inputs come.
    async fn calculate(&self, orders: Orders, window: &StripeWindow) -> Result<u64, SessionFault> {
        let classes = &self.part.plan.classes;
        let mine = self.part.work.turns();
        let mine = mine.filter(|turn| classes.get(turn.class).is_some_and(Option::is_some));
        let mut bytes = 0;
        let mut computing = FuturesUnordered::new();
        for turn in mine {
            let begin = self.begin(turn, &orders, window);
            tokio::pin!(begin);
            let begun = loop {
                tokio::select! {
                    biased;
                    Some(computed) = computing.next(), if !computing.is_empty() => bytes += computed?,
                    begun = &mut begin => break begun?,
                }
            };
            computing.push(self.compute(begun));
        }
        while let Some(computed) = computing.next().await {
            bytes += computed?;
        }
        Ok(bytes)
    }

    /// Waits for room, and tells the streams what this stripe expects and promises.
    async fn begin(
        &self,
        turn: StripeTurn,
        orders: &Orders,
        window: &StripeWindow,
    ) -> Result<Begun, SessionFault> {
        let in_flight = window.enter(turn.class).await?;
        let class = self.part.class(turn.class)?;
        let mut inputs = Vec::with_capacity(class.inputs.len());
        for edge in &class.inputs {
            let shape = self.shape(*edge, turn.stripe)?;
            let (to, from) = oneshot::channel();
            announce(orders.receive.get(&edge.link), Expected { shape, to }).await;
            inputs.push(from);
        }
        let mut outputs = Vec::with_capacity(class.outputs.len());
        for edge in &class.outputs {
            let shape = self.shape(*edge, turn.stripe)?;
            let (to, from) = oneshot::channel();
            let promised = Promised {
                shape,
                from,
                _in_flight: in_flight.clone(),
            };
            announce(orders.send.get(&edge.link), promised).await;
            outputs.push(to);
        }
        Ok(Begun {
            turn,
            inputs,
            outputs,
            _in_flight: in_flight,
        })
    }

    /// Computes a stripe once its inputs are there. Gives its bytes if it was not clean.
    async fn compute(&self, begun: Begun) -> Result<u64, SessionFault> {
        let mut sums = Vec::with_capacity(begun.inputs.len());
        for input in begun.inputs {
            sums.push(or_never(input.await).await);
        }
        let part = self.part.clone();
        let alive = self.jobs.token();
        let flight = InFlight::enter(self.in_flight);
        let turn = begun.turn;
        let job = move || -> Outcome {
            let outcome = part.compute(turn, sums);
            drop((part, flight));
            (outcome, alive)
        };
        let job = self.pool.submit(job).await;
        let job = job.map_err(|_| SessionFault::Aborted)?;
        // No result at all means that the thread is gone, or broke on it.
        let (outcome, _alive) = job.await.map_err(|_| SessionFault::Aborted)?;
        let Computed { edges, state } = outcome?;
        for (output, sums) in begun.outputs.into_iter().zip(edges) {
            // A stream that does not wait any more has failed, and its own error ends the session.
            let _ = output.send(sums);
        }
        let bytes = match state {
            BlockState::Dirty => self.part.work.stripe_bytes(turn.stripe) as u64,
            BlockState::Clean => 0,
        };
        self.meters.did(bytes);
        Ok(bytes)
    }

    async fn send(
        &self,
        link: usize,
        mut sender: Box<dyn BlockSender>,
        mut promised: mpsc::Receiver<Promised>,
    ) -> Result<(), SessionFault> {
        let to = self.receiver_of(link);
        while let Some(next) = promised.recv().await {
            let sums = or_never(next.from.await).await;
            // Not within the stall limit: nobody is to blame for this wait.
            self.wait_for_turn(&sums).await;
            let step = frame::send(sender.as_mut(), next.shape, sums);
            self.in_time(to, "took nothing", step).await?;
        }
        self.in_time(to, "did not acknowledge the end", sender.finish())
            .await
    }

    /// Waits until these sums of a repair may be sent beside the saves here. Of a clean stripe there is a header alone.
    async fn wait_for_turn(&self, sums: &Sums) {
        if let (SessionPurpose::Repair, Some(sums)) = (self.part.work.purpose, sums) {
            let frame = RepairFrame {
                bytes: sums.iter().map(|sum| sum.len() as u64).sum(),
                members: self.part.work.members.len(),
                awaited: self.awaited,
            };
            self.bound.wait_for_turn(frame).await;
        }
    }

    fn sender_of(&self, link: usize) -> &NodeName {
        &self.part.work.members[self.part.plan.links[link].from]
    }

    fn receiver_of(&self, link: usize) -> &NodeName {
        &self.part.work.members[self.part.plan.links[link].to]
    }
}

/// Queues an order. A stream that takes none has failed, and its own error ends the session.
async fn announce<T>(queue: Option<&mpsc::Sender<T>>, order: T) {
    match queue {
        Some(queue) if queue.send(order).await.is_ok() => {}
        _ => std::future::pending().await,
    }
}

/// What another stage gives; if it failed, its own error ends the session, and nothing comes here.
async fn or_never<T>(outcome: Result<T, oneshot::error::RecvError>) -> T {
    match outcome {
        Ok(value) => value,
        Err(_) => std::future::pending().await,
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

#[cfg(test)]
mod tests {
    use super::StripeWindow;
    use futures::FutureExt;

    #[test]
    fn a_stripe_of_one_block_takes_a_part_of_the_room_that_a_gathered_one_takes() {
        let (gathered, own) = (0, 1);
        let window = StripeWindow::new(12, [6, 2].into_iter());
        assert_eq!(window.stripes_max, 6);
        let begin = |class| window.enter(class).now_or_never().map(Result::unwrap);
        let first = begin(gathered).unwrap();
        let others: Vec<_> = std::iter::from_fn(|| begin(own)).collect();
        assert_eq!(others.len(), 3);
        drop(others);
        let second = begin(gathered).unwrap();
        assert!(begin(own).is_none());
        drop((first, second));
        let others: Vec<_> = std::iter::from_fn(|| begin(own)).collect();
        assert_eq!(others.len(), 6);
    }

    /// A stripe that waits for much room is not overtaken for good by those that need little.
    #[tokio::test]
    async fn stripes_begin_in_their_order() {
        let window = StripeWindow::new(6, [6, 2].into_iter());
        let first = window.enter(1).await.unwrap();
        let mut gathered = Box::pin(window.enter(0));
        assert!((&mut gathered).now_or_never().is_none());
        assert!(window.enter(1).now_or_never().is_none());
        drop(first);
        assert!(gathered.await.is_ok());
    }

    #[test]
    fn there_is_room_for_a_stripe_whatever_the_limits_are() {
        let window = StripeWindow::new(0, [9, 0].into_iter());
        for class in [0, 1] {
            assert!(window.enter(class).now_or_never().is_some());
        }
        assert_eq!(StripeWindow::new(0, std::iter::empty()).stripes_max, 1);
    }
}
