//! A world of executors: one per node, in-memory streams between them, and RAM that can be spoiled.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use storaged_codec::{
    ChunkSize, CodingMatrix, Fingerprint, Geometry, engine, fingerprint, leaf_digest,
};
use storaged_core::{
    ExpectedShard, ParityId, SessionPurpose, SessionTally, SessionWork, Sink, SlotShard, Source,
    Urgency,
};
use storaged_plan::{CodingPlan, Coefficients, ParityHolders, Shape, StripedPlan, encode_plan};
use storaged_wire::peer::{SessionFault, StreamRecord};
use storaged_wire::{NodeName, SessionId, SlotId};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::Instant;

use crate::encode::{
    BlockReceiver, BlockSender, BlockSink, BlockState, Blocks, Executor, ExecutorLimits, Pool,
    Proof, StreamError, Streams,
};
use crate::net::RailHint;

pub const CHUNK: u32 = 4096;
/// What a stream takes without being read: less than two frames, so that back-pressure is felt.
const STREAM_BYTES: usize = 6000;

pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn node(index: usize) -> NodeName {
    NodeName::new(format!("n{index}")).unwrap()
}

/// Bytes that look random and are the same every time.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(length).collect()
}

/// The wires between the nodes.
#[derive(Default)]
pub struct Wires {
    executors: Mutex<BTreeMap<NodeName, Weak<Executor>>>,
    /// Bytes sent, by sender and receiver.
    pub sent: Mutex<BTreeMap<(NodeName, NodeName), u64>>,
    /// Streams opened so far.
    pub opened: Mutex<usize>,
    /// What the last stream of each pair was opened with.
    pub hints: Mutex<BTreeMap<(NodeName, NodeName), RailHint>>,
    /// Nodes that open streams and then send nothing on them.
    pub silent: Mutex<BTreeSet<NodeName>>,
    /// Bytes per second of every node's uplink and downlink; none for no limit.
    pub rate: Mutex<Option<u64>>,
    /// Of nodes on other links.
    pub rates: Mutex<BTreeMap<NodeName, u64>>,
    /// When each node's uplink and downlink are free again.
    busy: Mutex<BTreeMap<(NodeName, Side), Instant>>,
    /// Nodes that send wrong bytes.
    pub liars: Mutex<BTreeSet<NodeName>>,
    /// From this stripe on.
    pub lies_from: Mutex<u64>,
}

/// A side of a node's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    Up,
    Down,
}

impl Wires {
    /// What has left the sender waits in the network for the receiver's downlink: a few blocks per stream.
    fn carry(self: Arc<Self>, mut from: DuplexStream, to: NodeName) -> DuplexStream {
        let (mut near, far) = duplex(4 * STREAM_BYTES);
        tokio::spawn(async move {
            let mut bytes = vec![0; CHUNK as usize];
            while let Ok(count @ 1..) = from.read(&mut bytes).await {
                self.pass(&to, Side::Down, count).await;
                if near.write_all(&bytes[..count]).await.is_err() {
                    return;
                }
            }
        });
        far
    }

    /// Waits while bytes pass one side of a node's link, after all that came before them.
    async fn pass(&self, node: &NodeName, side: Side, bytes: usize) {
        let Some(rate) = *locked(&self.rate) else {
            return;
        };
        let rate = locked(&self.rates).get(node).copied().unwrap_or(rate);
        let takes = Duration::from_secs_f64(bytes as f64 / rate as f64);
        let until = {
            let mut busy = locked(&self.busy);
            let now = Instant::now();
            let free = busy.entry((node.clone(), side)).or_insert(now);
            *free = (*free).max(now) + takes;
            *free
        };
        tokio::time::sleep_until(until).await;
    }
}

struct NodeStreams {
    me: NodeName,
    wires: Arc<Wires>,
}

#[async_trait]
impl Streams for NodeStreams {
    async fn open(
        &self,
        to: &NodeName,
        record: &StreamRecord,
        hint: RailHint,
    ) -> Result<Box<dyn BlockSender>, StreamError> {
        let executor = locked(&self.wires.executors)
            .get(to)
            .and_then(Weak::upgrade);
        let executor = executor.ok_or_else(|| StreamError::NoTransport { to: to.clone() })?;
        *locked(&self.wires.opened) += 1;
        let way = (self.me.clone(), to.clone());
        locked(&self.wires.hints).insert(way.clone(), hint);
        let (near, far) = duplex(STREAM_BYTES);
        let far = match *locked(&self.wires.rate) {
            None => far,
            Some(_) => self.wires.clone().carry(far, to.clone()),
        };
        executor.accept(record.clone(), self.me.clone(), Box::new(Receiver(far)));
        Ok(Box::new(Sender {
            stream: near,
            way,
            wires: self.wires.clone(),
        }))
    }
}

pub struct Receiver<R>(pub R);

#[async_trait]
impl<R: tokio::io::AsyncRead + Send + Unpin> BlockReceiver for Receiver<R> {
    async fn read_exact(&mut self, out: &mut [u8]) -> Result<(), StreamError> {
        self.0
            .read_exact(out)
            .await
            .map(|_| ())
            .map_err(StreamError::transport)
    }

    async fn expect_end(&mut self) -> Result<(), StreamError> {
        match self.0.read(&mut [0]).await {
            Ok(0) => Ok(()),
            Ok(_) => Err(StreamError::Surplus),
            Err(error) => Err(StreamError::transport(error)),
        }
    }
}

struct Sender {
    stream: DuplexStream,
    way: (NodeName, NodeName),
    wires: Arc<Wires>,
}

#[async_trait]
impl BlockSender for Sender {
    async fn send(&mut self, chunks: &mut [Bytes]) -> Result<(), StreamError> {
        if locked(&self.wires.silent).contains(&self.way.0) {
            return std::future::pending().await;
        }
        let is_liar = locked(&self.wires.liars).contains(&self.way.0);
        let stripe = chunks.first().and_then(|header| header.first_chunk());
        let stripe = stripe.map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let lies = is_liar && stripe >= *locked(&self.wires.lies_from);
        for chunk in chunks {
            // The headers are right: a wrong one would be noticed as it comes.
            if lies && chunk.len() > 16 {
                let mut spoilt = chunk.to_vec();
                spoilt[7] ^= 0x20;
                *chunk = spoilt.into();
            }
            self.wires.pass(&self.way.0, Side::Up, chunk.len()).await;
            self.stream
                .write_all(chunk)
                .await
                .map_err(StreamError::transport)?;
            *locked(&self.wires.sent)
                .entry(self.way.clone())
                .or_default() += chunk.len() as u64;
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), StreamError> {
        self.stream.shutdown().await.map_err(StreamError::transport)
    }
}

type ParitySet = BTreeMap<u64, Vec<u8>>;

/// One node's RAM.
#[derive(Default)]
pub struct Ram {
    pub slots: Mutex<BTreeMap<SlotId, Vec<u8>>>,
    /// The slots as they were stored.
    sealed: Mutex<BTreeMap<SlotId, Vec<u8>>>,
    pub parity: Arc<Mutex<BTreeMap<ParityId, ParitySet>>>,
    /// Sleeps this long in every read, on the pool's thread.
    pub slow: Mutex<Duration>,
    /// Breaks on reading this stripe.
    pub broken: Mutex<Option<u64>>,
}

impl Ram {
    fn chunk_of(&self, shard: &SlotShard, stripe: u64) -> Result<Vec<u8>, SessionFault> {
        let range = ChunkSize::new(CHUNK).unwrap().range(stripe, shard.length);
        let slots = locked(&self.slots);
        let slot = slots.get(&shard.slot).ok_or(SessionFault::NoBlocks)?;
        let bytes = slot[range.start as usize..range.end as usize].to_vec();
        match shard.leaves.get(stripe as usize) {
            Some(leaf) if *leaf != leaf_digest(&bytes, stripe) => {
                Err(SessionFault::Corrupt(format!("chunk {stripe}")))
            }
            _ => Ok(bytes),
        }
    }
}

/// A node's RAM as its executor sees it.
struct NodeBlocks(Arc<Ram>);

impl Blocks for NodeBlocks {
    fn read(
        &self,
        source: &Source,
        stripe: u64,
        _: Proof,
        out: &mut [u8],
    ) -> Result<BlockState, SessionFault> {
        std::thread::sleep(*locked(&self.0.slow));
        assert_ne!(*locked(&self.0.broken), Some(stripe), "broken on purpose");
        let bytes = match source {
            Source::Shard { shard, basis: None } => self.0.chunk_of(shard, stripe)?,
            Source::Shard {
                shard,
                basis: Some(basis),
            } => {
                let mut new = self.0.chunk_of(shard, stripe)?;
                let old = self.0.chunk_of(basis, stripe)?;
                engine().xor(&mut new, &old);
                new
            }
            Source::Parity { set } => {
                let parity = locked(&self.0.parity);
                let set = parity.get(set).ok_or(SessionFault::NoBlocks)?;
                set.get(&stripe).cloned().unwrap_or_default()
            }
        };
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(BlockState::Clean);
        }
        out[..bytes.len()].copy_from_slice(&bytes);
        out[bytes.len()..].fill(0);
        Ok(BlockState::Dirty)
    }

    fn begin_keep(
        &self,
        keep: &Sink,
        work: &SessionWork,
    ) -> Result<Box<dyn BlockSink>, SessionFault> {
        if let Sink::Parity { set, basis, .. } = keep {
            let mut sets = locked(&self.0.parity);
            let mut fresh = match basis {
                Some(basis) => sets.get(basis).cloned().ok_or(SessionFault::NoBasis)?,
                None => ParitySet::new(),
            };
            for stripe in work.carried.iter().cloned().flatten() {
                let made = sets.get(set).and_then(|set| set.get(&stripe)).cloned();
                fresh.insert(stripe, made.ok_or(SessionFault::NoBlocks)?);
            }
            sets.insert(*set, fresh);
        }
        Ok(Box::new(NodeKeep {
            ram: self.0.clone(),
            keep: keep.clone(),
        }))
    }
}

struct NodeKeep {
    ram: Arc<Ram>,
    keep: Sink,
}

impl BlockSink for NodeKeep {
    fn put(&self, stripe: u64, block: Option<&[u8]>) -> Result<(), SessionFault> {
        match &self.keep {
            Sink::Parity { set, prints, .. } => {
                let mut sets = locked(&self.ram.parity);
                let set = sets.get_mut(set).ok_or(SessionFault::NoBlocks)?;
                let mut new = set.get(&stripe).cloned().unwrap_or_default();
                if let Some(block) = block {
                    new.resize(block.len().max(new.len()), 0);
                    engine().xor(&mut new[..block.len()], block);
                }
                // Without a table, as in benches, nothing is compared.
                let expected = prints.get(stripe as usize);
                if expected.is_some_and(|print| *print != fingerprint(&new)) {
                    return Err(SessionFault::WrongResult(format!("stripe {stripe}")));
                }
                if block.is_some() {
                    set.insert(stripe, new);
                }
                Ok(())
            }
            Sink::Shard(shard) => {
                let range = ChunkSize::new(CHUNK).unwrap().range(stripe, shard.length);
                let length = (range.end - range.start) as usize;
                let bytes = block.map_or(vec![0; length], |block| block[..length].to_vec());
                let leaf = shard.leaves.get(stripe as usize);
                if leaf.is_some_and(|leaf| *leaf != leaf_digest(&bytes, stripe)) {
                    return Err(SessionFault::WrongResult(format!("chunk {stripe}")));
                }
                let mut slots = locked(&self.ram.slots);
                let slot = slots.get_mut(&shard.slot).ok_or(SessionFault::NoBlocks)?;
                slot[range.start as usize..range.end as usize].copy_from_slice(&bytes);
                Ok(())
            }
        }
    }

    fn finish(&self) -> Result<(), SessionFault> {
        Ok(())
    }
}

/// The nodes of a group: n0.. are the data nodes, then the coding nodes.
pub struct World {
    pub geometry: Geometry,
    pub matrix: CodingMatrix,
    pub wires: Arc<Wires>,
    pub rams: Vec<Arc<Ram>>,
    pub executors: Vec<Arc<Executor>>,
    pub limits: ExecutorLimits,
    /// How encodes come together; none for the plain chain.
    pub shape: Option<Shape>,
}

impl World {
    pub fn new(k: usize, m: usize, pool: &Pool, limits: ExecutorLimits) -> Self {
        let geometry = Geometry::new(k, m).unwrap();
        let wires = Arc::new(Wires::default());
        let mut world = Self {
            geometry,
            matrix: CodingMatrix::cauchy(geometry),
            wires: wires.clone(),
            rams: Vec::new(),
            executors: Vec::new(),
            limits,
            shape: None,
        };
        for index in 0..k + m {
            let ram = Arc::new(Ram::default());
            let streams = NodeStreams {
                me: node(index),
                wires: wires.clone(),
            };
            let blocks = NodeBlocks(ram.clone());
            let executor = Executor::new(Arc::new(streams), Arc::new(blocks), pool.clone(), limits);
            let executor = Arc::new(executor);
            locked(&wires.executors).insert(node(index), Arc::downgrade(&executor));
            world.rams.push(ram);
            world.executors.push(executor);
        }
        world
    }

    /// With threads for arithmetic, as in the daemon.
    pub fn threaded(k: usize, m: usize) -> Self {
        Self::new(k, m, &Pool::start(2).unwrap(), ExecutorLimits::default())
    }

    /// With arithmetic in place, for a paused clock.
    pub fn inline(k: usize, m: usize) -> Self {
        Self::new(k, m, &Pool::inline(), ExecutorLimits::default())
    }

    /// Puts a shard into a slot of a node.
    pub fn store(&self, at: usize, slot: u64, bytes: &[u8]) -> SlotShard {
        let slot = SlotId::new(slot);
        locked(&self.rams[at].slots).insert(slot, bytes.to_vec());
        locked(&self.rams[at].sealed).insert(slot, bytes.to_vec());
        let leaves = bytes
            .chunks(CHUNK as usize)
            .zip(0..)
            .map(|(chunk, index)| leaf_digest(chunk, index));
        SlotShard {
            slot,
            length: bytes.len() as u64,
            chunk: ChunkSize::new(CHUNK).unwrap(),
            leaves: leaves.collect(),
            prints: Arc::default(),
        }
    }

    /// The part of every member of a full encode of `shards`, into parity set `set` of the coding nodes.
    pub fn encode(&self, session: u64, shards: &[SlotShard], set: u64) -> Vec<SessionWork> {
        let sources = shards.iter().map(|shard| Source::Shard {
            shard: shard.clone(),
            basis: None,
        });
        self.encode_from(session, sources.collect(), shards, set, None)
    }

    /// Increments: only what changed since `old` goes onto set `from`, and makes set `to`.
    pub fn increment(
        &self,
        session: u64,
        new: &[SlotShard],
        old: &[SlotShard],
        from: u64,
        to: u64,
    ) -> Vec<SessionWork> {
        let pairs = new.iter().zip(old);
        let sources = pairs.map(|(new, old)| Source::Shard {
            shard: new.clone(),
            basis: Some(old.clone()),
        });
        self.encode_from(session, sources.collect(), new, to, Some(from))
    }

    fn encode_from(
        &self,
        session: u64,
        sources: Vec<Source>,
        shards: &[SlotShard],
        set: u64,
        basis: Option<u64>,
    ) -> Vec<SessionWork> {
        let rows = (0..self.geometry.m())
            .map(|row| self.matrix.parity_row(row).to_vec())
            .collect();
        let coefficients = Coefficients::new(rows).unwrap();
        let plan = match &self.shape {
            None => StripedPlan::uniform(CodingPlan::chain(&coefficients), self.geometry.k()),
            Some(shape) => encode_plan(&coefficients, ParityHolders::Fixed, shape).unwrap(),
        };
        let plan = Arc::new(plan);
        let lengths = sources.iter().filter_map(|source| match source {
            Source::Shard { shard, .. } => Some(shard.length),
            Source::Parity { .. } => None,
        });
        let lane_length = lengths.max().unwrap_or(0);
        let tables: Vec<_> = (0..shards.len())
            .map(|at| self.prints(at, &shards[at]))
            .collect();
        let keep = |parity: usize| {
            Some(Sink::Parity {
                set: ParityId(set),
                basis: basis.map(ParityId),
                prints: self.parity_prints(parity, &tables, lane_length),
            })
        };
        let keeps: Vec<_> = (0..self.geometry.m()).map(keep).collect();
        let sources: Vec<Option<Source>> = sources.into_iter().map(Some).collect();
        let members = (0..self.geometry.n()).collect::<Vec<_>>();
        session_of(session, plan, &members, lane_length, &sources, &keeps)
    }

    /// The same session with every sum checked by the member that gets it.
    pub fn wary(&self, mut works: Vec<SessionWork>, shards: &[SlotShard]) -> Vec<SessionWork> {
        let proof = |(at, shard): (usize, &SlotShard)| {
            let proof = ExpectedShard {
                length: shard.length,
                leaves: shard.leaves.clone(),
                prints: self.prints(at, shard),
            };
            (at, proof)
        };
        let proofs: BTreeMap<_, _> = shards.iter().enumerate().map(proof).collect();
        works
            .iter_mut()
            .for_each(|work| work.proofs = proofs.clone());
        works
    }

    /// The fingerprints of a shard's chunks, as they were when it was stored.
    pub fn prints(&self, at: usize, shard: &SlotShard) -> Arc<[Fingerprint]> {
        let sealed = locked(&self.rams[at].sealed);
        let bytes = &sealed[&shard.slot];
        bytes.chunks(CHUNK as usize).map(fingerprint).collect()
    }

    fn parity_prints(
        &self,
        parity: usize,
        tables: &[Arc<[Fingerprint]>],
        lane_length: u64,
    ) -> Arc<[Fingerprint]> {
        let stripes = lane_length.div_ceil(u64::from(CHUNK));
        let print = |stripe: u64| {
            let mut sum = Fingerprint::ZERO;
            for (source, table) in tables.iter().enumerate() {
                if let Some(print) = table.get(stripe as usize) {
                    sum.fold(self.matrix.coefficient(parity, source), print);
                }
            }
            sum
        };
        (0..stripes).map(print).collect()
    }

    /// Runs all members; one outcome each, in their order.
    pub async fn run(&self, works: Vec<SessionWork>) -> Vec<Result<SessionTally, SessionFault>> {
        let running = works.into_iter().map(|work| {
            let at =
                (0..self.executors.len()).find(|index| node(*index) == work.members[work.member]);
            let executor = self.executors[at.unwrap()].clone();
            tokio::spawn(async move { executor.run(work).await })
        });
        let ended = futures::future::join_all(running).await;
        ended.into_iter().map(|outcome| outcome.unwrap()).collect()
    }

    /// Parity block `row` as one run of bytes, of the lane's length.
    pub fn parity(&self, row: usize, set: u64, lane_length: usize) -> Vec<u8> {
        let sets = locked(&self.rams[self.geometry.k() + row].parity);
        let mut whole = vec![0; lane_length];
        for (stripe, block) in &sets[&ParityId(set)] {
            let start = *stripe as usize * CHUNK as usize;
            whole[start..start + block.len()].copy_from_slice(block);
        }
        whole
    }

    /// What the codec says the parity is.
    pub fn oracle(&self, shards: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let length = shards.iter().map(Vec::len).max().unwrap_or(0);
        let padded: Vec<Vec<u8>> = shards
            .iter()
            .map(|shard| {
                let mut padded = shard.clone();
                padded.resize(length, 0);
                padded
            })
            .collect();
        let data: Vec<&[u8]> = padded.iter().map(Vec::as_slice).collect();
        let mut parity = vec![vec![0; length]; self.geometry.m()];
        let mut out: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
        engine().encode(&self.matrix, &data, &mut out);
        parity
    }

    /// Bytes sent over all wires.
    pub fn sent(&self) -> u64 {
        locked(&self.wires.sent).values().sum()
    }

    /// After a session nothing may be left of it anywhere.
    pub fn assert_all_came_back(&self) {
        for executor in &self.executors {
            assert_eq!(executor.blocks_in_flight(), 0);
            assert_eq!(executor.stripes_in_flight(), 0);
        }
    }
}

/// The work of every member of a plan. Keeps go to the hops that keep, in order.
pub fn session_of(
    session: u64,
    plan: Arc<StripedPlan>,
    nodes: &[usize],
    lane_length: u64,
    sources: &[Option<Source>],
    keeps: &[Option<Sink>],
) -> Vec<SessionWork> {
    let chunk = ChunkSize::new(CHUNK).unwrap();
    let members: Arc<[NodeName]> = nodes.iter().map(|index| node(*index)).collect();
    let all = std::iter::once(0..chunk.count(lane_length)).collect::<Vec<_>>();
    let mut keeps = keeps.iter();
    let mut works = Vec::new();
    for member in 0..nodes.len() {
        let hops = plan.classes().iter().filter_map(|class| class.hop(member));
        let kept = hops
            .flat_map(|hop| &hop.outputs)
            .any(|output| matches!(output.target, storaged_plan::Target::Keep(_)));
        works.push(SessionWork {
            leader: node(0),
            session: SessionId::new(session),
            purpose: SessionPurpose::Encode,
            urgency: Urgency::Background,
            plan: plan.clone(),
            members: members.clone(),
            member,
            chunk,
            lane_length,
            stripes: all.clone(),
            source: sources.get(member).cloned().flatten(),
            proofs: BTreeMap::new(),
            carried: Vec::new(),
            keep: if kept {
                keeps.next().cloned().flatten()
            } else {
                None
            },
        });
    }
    works
}
