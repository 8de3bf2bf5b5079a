//! Coding sessions among six nodes, run by the daemon's own executors over its own memory: what the data streams between them carry,
//! and what one of the nodes makes of streams that carry something else.

use std::collections::BTreeMap;
use std::iter;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use storaged::encode::{
    BlockReceiver, BlockSender, BlockState, Blocks, Executor, ExecutorLimits, Pool, Proof,
    SessionEnd, StreamError, Streams,
};
use storaged::keep::NoStore;
use storaged::memory::Memory;
use storaged::net::RailHint;
use storaged_codec::{ChunkSize, CodingMatrix, Fingerprint, Geometry};
use storaged_core::{
    ExpectedShard, ParityId, SessionPurpose, SessionWork, Sink, SlotShard, Source, Urgency,
};
use storaged_plan::{
    Coefficients, Order, ParityHolders, RepairShape, RepairTask, Shape, StripedPlan, encode_plan,
    repair_plans,
};
use storaged_wire::peer::StreamRecord;
use storaged_wire::{NodeName, SessionId, SlotId};
use tokio::sync::Notify;

pub const CHUNK: u32 = 4096;
/// Data nodes and coding nodes of the lane; the node after them has lost what it held.
const K: usize = 3;
const M: usize = 2;
/// Two stripes and a short one, of which the first two nodes have one only: they say of the others that they are clean.
const LENGTHS: [usize; K] = [3000, 4000, 2 * CHUNK as usize + 100];
/// One stripe, so short that all frames of a session fit an input.
const SHORT_LENGTHS: [usize; K] = [60, 90, 100];
/// The shard that is repaired: the longest.
const LOST: usize = 2;
/// The parity set that encodes make, and then repairs read.
const HONEST_SET: ParityId = ParityId(1);
/// The slot that honest repairs fill; shards lie in the first.
const HONEST_SLOT: SlotId = SlotId::new(2);

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn node(index: usize) -> NodeName {
    NodeName::new(format!("n{index}")).expect("a name")
}

fn chunk() -> ChunkSize {
    ChunkSize::new(CHUNK).expect("a size")
}

/// What one data stream carries, while it is written and after.
#[derive(Debug, Default)]
pub struct Tape {
    rolled: Mutex<Rolled>,
    more: Notify,
}

#[derive(Debug, Default)]
struct Rolled {
    bytes: Vec<u8>,
    is_over: bool,
    /// Bytes that its receiver has taken.
    read: usize,
    /// The most that its receiver has asked for at once.
    asked_most: usize,
}

impl Tape {
    /// A stream that is over already.
    fn of(bytes: &[u8]) -> Arc<Self> {
        let tape = Arc::new(Self::default());
        locked(&tape.rolled).bytes = bytes.to_vec();
        locked(&tape.rolled).is_over = true;
        tape
    }

    pub fn bytes(&self) -> Vec<u8> {
        locked(&self.rolled).bytes.clone()
    }

    pub fn read(&self) -> usize {
        locked(&self.rolled).read
    }

    pub fn asked_most(&self) -> usize {
        locked(&self.rolled).asked_most
    }
}

struct TapeReader(Arc<Tape>);

#[async_trait]
impl BlockReceiver for TapeReader {
    async fn read_exact(&mut self, out: &mut [u8]) -> Result<(), StreamError> {
        loop {
            {
                let mut rolled = locked(&self.0.rolled);
                rolled.asked_most = rolled.asked_most.max(out.len());
                let from = rolled.read;
                if let Some(bytes) = rolled.bytes.get(from..from + out.len()) {
                    out.copy_from_slice(bytes);
                    rolled.read += out.len();
                    return Ok(());
                }
                if rolled.is_over {
                    rolled.read = rolled.bytes.len();
                    return Err(StreamError::transport("the stream ended early"));
                }
            }
            self.0.more.notified().await;
        }
    }

    async fn expect_end(&mut self) -> Result<(), StreamError> {
        loop {
            {
                let rolled = locked(&self.0.rolled);
                if rolled.read < rolled.bytes.len() {
                    return Err(StreamError::Surplus);
                }
                if rolled.is_over {
                    return Ok(());
                }
            }
            self.0.more.notified().await;
        }
    }
}

struct TapeWriter(Arc<Tape>);

#[async_trait]
impl BlockSender for TapeWriter {
    async fn send(&mut self, chunks: &mut [Bytes]) -> Result<(), StreamError> {
        let mut rolled = locked(&self.0.rolled);
        chunks
            .iter()
            .for_each(|chunk| rolled.bytes.extend_from_slice(chunk));
        self.0.more.notify_one();
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), StreamError> {
        locked(&self.0.rolled).is_over = true;
        self.0.more.notify_one();
        Ok(())
    }
}

/// A stream from one node to another.
#[derive(Debug, Clone)]
pub struct SentStream {
    pub from: NodeName,
    pub to: NodeName,
    pub record: StreamRecord,
    pub tape: Arc<Tape>,
}

/// The streams that were opened, and who takes them; without anybody they are only written down.
#[derive(Default)]
struct Wires {
    opened: Mutex<Vec<SentStream>>,
    takers: Mutex<BTreeMap<NodeName, Arc<Executor>>>,
}

struct WiresOf {
    me: NodeName,
    wires: Arc<Wires>,
}

#[async_trait]
impl Streams for WiresOf {
    async fn open(
        &self,
        to: &NodeName,
        record: &StreamRecord,
        _: RailHint,
    ) -> Result<Box<dyn BlockSender>, StreamError> {
        let stream = SentStream {
            from: self.me.clone(),
            to: to.clone(),
            record: record.clone(),
            tape: Arc::default(),
        };
        let tape = stream.tape.clone();
        locked(&self.wires.opened).push(stream);
        if let Some(taker) = locked(&self.wires.takers).get(to) {
            let reader = Box::new(TapeReader(tape.clone()));
            taker.accept(record.clone(), self.me.clone(), reader);
        }
        Ok(Box::new(TapeWriter(tape)))
    }
}

/// A stream that no session waits for.
#[derive(Debug)]
pub struct StrayStream {
    pub from: NodeName,
    pub record: StreamRecord,
}

/// What a member holds of a stripe that it was to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldStripe {
    /// Nothing, or zeros where something should be.
    Nothing,
    /// What the honest session has kept.
    Right,
    Wrong,
}

/// How a member's part ended.
#[derive(Debug)]
pub struct Ran {
    pub end: SessionEnd,
    /// Of the streams that came, in the order of `incoming`.
    pub tapes: Vec<Arc<Tape>>,
    pub strays: Vec<Arc<Tape>>,
    pub sent: Vec<SentStream>,
    /// Of every stripe, if it keeps any.
    pub held: Vec<HeldStripe>,
}

/// A session that has run among honest nodes.
pub struct DataSession {
    pub name: String,
    pub works: Vec<SessionWork>,
    memories: Vec<Arc<Memory>>,
    streams: Vec<SentStream>,
}

fn executor(me: NodeName, memory: &Arc<Memory>, wires: &Arc<Wires>) -> Executor {
    let wires = wires.clone();
    let streams = Arc::new(WiresOf { me, wires });
    let limits = ExecutorLimits::default();
    Executor::new(streams, memory.clone(), Pool::inline(), limits)
}

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().build().expect("a runtime")
}

thread_local! {
    static RUNTIME: tokio::runtime::Runtime = runtime();
}

impl DataSession {
    /// Runs all parts, and writes down what they send.
    fn among(nodes: &SixNodes, name: String, works: Vec<SessionWork>) -> Self {
        let memory = |work: &SessionWork| {
            let me = &work.members[work.member];
            let at = (0..nodes.memories.len()).find(|at| node(*at) == *me);
            nodes.memories[at.expect("a node")].clone()
        };
        let memories: Vec<Arc<Memory>> = works.iter().map(memory).collect();
        let wires = Arc::new(Wires::default());
        for (work, memory) in works.iter().zip(&memories) {
            let me = work.members[work.member].clone();
            let executor = Arc::new(executor(me.clone(), memory, &wires));
            locked(&wires.takers).insert(me, executor);
        }
        runtime().block_on(async {
            let running: Vec<_> = (works.iter().cloned())
                .map(|work| {
                    let me = &work.members[work.member];
                    let executor = locked(&wires.takers)[me].clone();
                    tokio::spawn(async move { executor.run(work).await })
                })
                .collect();
            for part in running {
                let ended = part.await.expect("it does not break");
                ended.expect("all are honest");
            }
        });
        locked(&wires.takers).clear();
        let streams = std::mem::take(&mut *locked(&wires.opened));
        Self {
            name,
            works,
            memories,
            streams,
        }
    }

    fn me(&self, member: usize) -> &NodeName {
        &self.works[member].members[member]
    }

    /// What comes to a member among honest nodes.
    pub fn incoming(&self, member: usize) -> Vec<&SentStream> {
        let me = self.me(member);
        self.streams.iter().filter(|it| it.to == *me).collect()
    }

    /// What a member sends then.
    pub fn outgoing(&self, member: usize) -> Vec<&SentStream> {
        let me = self.me(member);
        self.streams.iter().filter(|it| it.from == *me).collect()
    }

    /// Runs one member's part, to which these bytes come in place of what honest nodes send.
    pub fn run(&self, member: usize, said: &[Vec<u8>], strays: &[StrayStream]) -> Ran {
        let memory = &self.memories[member];
        let mut work = self.works[member].clone();
        let honest = work.keep.clone();
        work.keep = honest.as_ref().map(|keep| elsewhere(memory, keep));
        let wires = Arc::new(Wires::default());
        let executor = executor(self.me(member).clone(), memory, &wires);
        // Not within the runtime: there each stream that waits would leave a timer behind.
        let stray = |stray: &StrayStream| {
            let tape = Tape::of(b"of no session");
            let reader = Box::new(TapeReader(tape.clone()));
            executor.accept(stray.record.clone(), stray.from.clone(), reader);
            tape
        };
        let strays: Vec<Arc<Tape>> = strays.iter().map(stray).collect();
        let arrive = |(stream, bytes): (&SentStream, &Vec<u8>)| {
            let tape = Tape::of(bytes);
            let reader = Box::new(TapeReader(tape.clone()));
            executor.accept(stream.record.clone(), stream.from.clone(), reader);
            tape
        };
        let streams = self.incoming(member);
        let tapes = streams.into_iter().zip(said).map(arrive).collect();
        let end = RUNTIME.with(|runtime| runtime.block_on(executor.run_to_end(work.clone())));
        let blocks = (executor.blocks_in_flight(), executor.stripes_in_flight());
        assert_eq!(blocks, (0, 0), "something of the session goes on");
        let most = ExecutorLimits::default().blocks_max(&work);
        assert!(executor.blocks_in_flight_most() <= most, "too much memory");
        assert!(executor.streams_parked() <= strays.len(), "streams stay");
        let keeps = honest.as_ref().zip(work.keep.as_ref());
        let held = keeps.map(|(honest, keep)| held(memory, &work, honest, keep));
        work.keep.iter().for_each(|keep| let_go(memory, keep));
        let sent = std::mem::take(&mut *locked(&wires.opened));
        Ran {
            end,
            tapes,
            strays,
            sent,
            held: held.unwrap_or_default(),
        }
    }
}

/// The same place beside the one that the honest session has filled.
fn elsewhere(memory: &Memory, keep: &Sink) -> Sink {
    static NEXT: AtomicU64 = AtomicU64::new(100);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    match keep {
        Sink::Parity { basis, prints, .. } => Sink::Parity {
            set: ParityId(number),
            basis: *basis,
            prints: prints.clone(),
        },
        Sink::Shard(shard) => {
            let slot = SlotId::new(number);
            memory.create_slot(slot, shard.length).expect("memory");
            let shard = shard.clone();
            Sink::Shard(SlotShard { slot, ..shard })
        }
    }
}

fn let_go(memory: &Memory, keep: &Sink) {
    match keep {
        Sink::Parity { set, .. } => memory.drop_parity(*set),
        Sink::Shard(shard) => memory.drop_slot(shard.slot),
    }
}

fn held(memory: &Memory, work: &SessionWork, honest: &Sink, keep: &Sink) -> Vec<HeldStripe> {
    let stripe = |stripe: u64| {
        let read = |keep: &Sink| {
            let mut block = vec![0; work.stripe_bytes(stripe)];
            let state = memory.read(&kept_in(keep), stripe, Proof::Reader, &mut block);
            state.map(|state| (state == BlockState::Dirty).then_some(block))
        };
        let honest = read(honest).expect("it is there");
        match read(keep) {
            Ok(block) if block == honest => HeldStripe::Right,
            // A shard's chunk that was not put there does not have its digest.
            Ok(None) | Err(_) => HeldStripe::Nothing,
            Ok(Some(_)) => HeldStripe::Wrong,
        }
    };
    let stripes = work.stripes.iter().cloned().flatten();
    stripes.map(stripe).collect()
}

fn kept_in(keep: &Sink) -> Source {
    match keep {
        Sink::Parity { set, .. } => Source::Parity { set: *set },
        Sink::Shard(shard) => shard_at(shard),
    }
}

fn shard_at(shard: &SlotShard) -> Source {
    Source::Shard {
        shard: shard.clone(),
        basis: None,
    }
}

/// What a member reads and keeps.
#[derive(Debug, Clone, Default)]
struct Ends {
    source: Option<Source>,
    keep: Option<Sink>,
}

/// Whether the members are told what the others' shards must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wariness {
    Trusting,
    Wary,
}

/// The nodes and what they hold.
struct SixNodes {
    memories: Vec<Arc<Memory>>,
    shards: Vec<SlotShard>,
    prints: Vec<Arc<[Fingerprint]>>,
    matrix: CodingMatrix,
}

impl SixNodes {
    fn new(lengths: [usize; K]) -> Self {
        let memories = (0..=K + M).map(|_| Arc::new(Memory::new(Arc::new(NoStore))));
        let memories: Vec<Arc<Memory>> = memories.collect();
        let (mut shards, mut prints) = (Vec::new(), Vec::new());
        for (at, length) in lengths.into_iter().enumerate() {
            let (slot, bytes) = (SlotId::new(1), length as u64);
            let made = memories[at].create_slot(slot, bytes);
            made.expect("memory");
            let made = memories[at].slot(slot).expect("it was made");
            let noise = (0..length).map(|byte| (byte * 7 + byte / 251 + at * 89) as u8);
            let noise: Vec<u8> = noise.collect();
            made.write_at(0, &noise).expect("it has room");
            let all = 0..chunk().count(bytes);
            let digested = memories[at].digest(slot, bytes, chunk(), all);
            let (leaves, of_shard) = digested.expect("a slot");
            shards.push(SlotShard {
                slot,
                length: bytes,
                chunk: chunk(),
                leaves: leaves.into(),
                prints: Arc::default(),
            });
            prints.push(of_shard.into());
        }
        let matrix = CodingMatrix::cauchy(Geometry::new(K, M).expect("a geometry"));
        Self {
            memories,
            shards,
            prints,
            matrix,
        }
    }

    fn lane_length(&self) -> u64 {
        let lengths = self.shards.iter().map(|shard| shard.length);
        lengths.max().unwrap_or(0)
    }

    fn parity_prints(&self, parity: usize) -> Arc<[Fingerprint]> {
        let print = |stripe: u64| {
            let mut sum = Fingerprint::ZERO;
            for (source, prints) in self.prints.iter().enumerate() {
                if let Some(print) = prints.get(stripe as usize) {
                    sum.fold(self.matrix.coefficient(parity, source), print);
                }
            }
            sum
        };
        (0..chunk().count(self.lane_length())).map(print).collect()
    }

    fn expected(&self, shard: usize) -> ExpectedShard {
        ExpectedShard {
            length: self.shards[shard].length,
            leaves: self.shards[shard].leaves.clone(),
            prints: self.prints[shard].clone(),
        }
    }

    fn works(
        &self,
        purpose: SessionPurpose,
        plan: StripedPlan,
        nodes: &[usize],
        ends: Vec<Ends>,
        proofs: &BTreeMap<usize, ExpectedShard>,
    ) -> Vec<SessionWork> {
        let plan = Arc::new(plan);
        let members: Arc<[NodeName]> = nodes.iter().copied().map(node).collect();
        let work = |(member, ends): (usize, Ends)| SessionWork {
            leader: node(0),
            session: SessionId::new(1),
            purpose,
            urgency: Urgency::Background,
            plan: plan.clone(),
            members: members.clone(),
            member,
            chunk: chunk(),
            lane_length: self.lane_length(),
            stripes: iter::once(0..chunk().count(self.lane_length())).collect(),
            source: ends.source,
            keep: ends.keep,
            carried: Vec::new(),
            proofs: proofs.clone(),
        };
        ends.into_iter().enumerate().map(work).collect()
    }

    fn encode(&self, shape: &Shape, wariness: Wariness) -> DataSession {
        let rows = (0..M).map(|row| self.matrix.parity_row(row).to_vec());
        let coefficients = Coefficients::new(rows.collect()).expect("rows");
        let plan = encode_plan(&coefficients, ParityHolders::Fixed, shape).expect("a plan");
        let data = self.shards.iter().map(|shard| Ends {
            source: Some(shard_at(shard)),
            keep: None,
        });
        let coding = (0..M).map(|parity| Ends {
            source: None,
            keep: Some(Sink::Parity {
                set: HONEST_SET,
                basis: None,
                prints: self.parity_prints(parity),
            }),
        });
        let proofs = match wariness {
            Wariness::Trusting => BTreeMap::new(),
            Wariness::Wary => (0..K).map(|at| (at, self.expected(at))).collect(),
        };
        let nodes: Vec<usize> = (0..K + M).collect();
        let ends = data.chain(coding).collect();
        let works = self.works(SessionPurpose::Encode, plan, &nodes, ends, &proofs);
        DataSession::among(self, format!("encode-{shape:?}-{wariness:?}"), works)
    }

    fn repair(&self, shape: RepairShape) -> DataSession {
        let survivors: Vec<usize> = (0..K + M).filter(|block| *block != LOST).collect();
        let task = RepairTask {
            survivors: &survivors,
            lost: &[LOST],
            needed: K,
        };
        let rows = |survivors: &[usize], lost: &[usize]| {
            let rows = self.matrix.repair_coefficients(survivors, lost)?;
            Ok(Coefficients::new(rows).ok())
        };
        let plan = repair_plans(&task, shape, rows).expect("a plan").remove(0);
        let source = |block: &usize| match self.shards.get(*block) {
            Some(shard) => shard_at(shard),
            None => Source::Parity { set: HONEST_SET },
        };
        let reads = survivors.iter().map(|block| Ends {
            source: Some(source(block)),
            keep: None,
        });
        let lost = self.shards[LOST].clone();
        let newcomer = &self.memories[K + M];
        let made = newcomer.create_slot(HONEST_SLOT, lost.length);
        made.expect("memory");
        let slot = HONEST_SLOT;
        let ends = reads.chain([Ends {
            source: None,
            keep: Some(Sink::Shard(SlotShard { slot, ..lost })),
        }]);
        let told = survivors
            .iter()
            .enumerate()
            .filter(|(_, block)| **block < K);
        // Parity has no digests that others know. Without fingerprints nothing but a block that comes as it is can be checked.
        let by_digest = |block: usize| ExpectedShard {
            prints: Arc::default(),
            ..self.expected(block)
        };
        let proofs = told.map(|(member, block)| (member, by_digest(*block)));
        let nodes: Vec<usize> = survivors.iter().copied().chain([K + M]).collect();
        let works = self.works(
            SessionPurpose::Repair,
            plan,
            &nodes,
            ends.collect(),
            &proofs.collect(),
        );
        DataSession::among(self, format!("repair-{shape:?}"), works)
    }
}

/// Sessions of all shapes.
pub fn sessions() -> &'static [DataSession] {
    static SESSIONS: OnceLock<Vec<DataSession>> = OnceLock::new();
    SESSIONS.get_or_init(|| {
        let order = Order::Fixed((0..K).collect());
        let chain = Shape::Chain {
            order: order.clone(),
        };
        let shapes = [
            chain.clone(),
            Shape::Tree { fan_in: 2, order },
            Shape::gather_at_all_sources(K),
            Shape::GatherAtKeepers,
        ];
        let nodes = SixNodes::new(LENGTHS);
        let mut all = vec![SixNodes::new(SHORT_LENGTHS).encode(&chain, Wariness::Trusting)];
        for shape in &shapes {
            all.push(nodes.encode(shape, Wariness::Trusting));
            all.push(nodes.encode(shape, Wariness::Wary));
        }
        let repairs = [
            RepairShape::Chain,
            RepairShape::Gather,
            RepairShape::GatherAtNewcomers,
        ];
        all.extend(repairs.map(|shape| nodes.repair(shape)));
        all
    })
}
