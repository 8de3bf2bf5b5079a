//! What the executor costs: its rate over loopback TCP against the rate of one bare stream in the same process.
//! Reading and keeping blocks is free here, so that what is left is the executor, the arithmetic and the streams.
//! Run with `cargo test --release -p storaged executor_rate -- --ignored --nocapture`.

use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::{Buf, Bytes};
use storaged_codec::{ChunkSize, CodingMatrix, Geometry};
use storaged_core::{ParityId, SessionWork, Sink, SlotShard, Source};
use storaged_plan::{CodingPlan, Coefficients, StripedPlan};
use storaged_wire::peer::{SessionFault, StreamRecord};
use storaged_wire::{NodeName, SlotId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::world::{Receiver, locked, node, session_of};
use crate::encode::{
    BlockSender, BlockSink, BlockState, Blocks, Executor, ExecutorLimits, Pool, Proof, StreamError,
    Streams,
};
use crate::net::RailHint;

const BLOCK: u32 = 1 << 20;
const STRIPES: u64 = 512;
/// Places of the bare stream's blocks at either end.
const BLOCKS: usize = 64;
const ROUNDS: usize = 9;

async fn loopback() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
    (near.unwrap(), far.unwrap().0)
}

type Peers = Arc<Mutex<BTreeMap<NodeName, Weak<Executor>>>>;

struct TcpStreams {
    me: NodeName,
    peers: Peers,
}

struct TcpSender(TcpStream);

#[async_trait]
impl Streams for TcpStreams {
    async fn open(
        &self,
        to: &NodeName,
        record: &StreamRecord,
        _: RailHint,
    ) -> Result<Box<dyn BlockSender>, StreamError> {
        let peer = locked(&self.peers).get(to).and_then(Weak::upgrade);
        let (near, far) = loopback().await;
        let peer = peer.ok_or_else(|| StreamError::NoTransport { to: to.clone() })?;
        peer.accept(record.clone(), self.me.clone(), Box::new(Receiver(far)));
        Ok(Box::new(TcpSender(near)))
    }
}

#[async_trait]
impl BlockSender for TcpSender {
    async fn send(&mut self, chunks: &mut [Bytes]) -> Result<(), StreamError> {
        // One call for the header and all sums, as QUIC has it too.
        let mut frame = VecDeque::from(chunks.to_vec());
        while !frame.is_empty() {
            let parts: Vec<IoSlice<'_>> = frame.iter().map(|part| IoSlice::new(part)).collect();
            let sent = self.0.write_vectored(&parts).await;
            take_away(&mut frame, sent.map_err(StreamError::transport)?);
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), StreamError> {
        self.0.shutdown().await.map_err(StreamError::transport)
    }
}

fn take_away(frame: &mut VecDeque<Bytes>, mut sent: usize) {
    while let Some(part) = frame.front_mut() {
        let here = sent.min(part.len());
        part.advance(here);
        sent -= here;
        if !part.is_empty() {
            return;
        }
        frame.pop_front();
    }
}

/// Blocks that cost nothing.
struct FreeBlocks;

impl Blocks for FreeBlocks {
    fn read(&self, _: &Source, _: u64, _: Proof, _: &mut [u8]) -> Result<BlockState, SessionFault> {
        Ok(BlockState::Dirty)
    }

    fn begin_keep(&self, _: &Sink, _: &SessionWork) -> Result<Box<dyn BlockSink>, SessionFault> {
        Ok(Box::new(Self))
    }
}

impl BlockSink for FreeBlocks {
    fn put(&self, _: u64, _: Option<&[u8]>) -> Result<(), SessionFault> {
        Ok(())
    }

    fn finish(&self) -> Result<(), SessionFault> {
        Ok(())
    }
}

/// Seconds that the chain of these coefficients takes, and the bytes that it moves over all streams.
async fn chain(rows: Vec<Vec<u8>>, pool: &Pool) -> Timed {
    let plan = Arc::new(CodingPlan::chain(&Coefficients::new(rows).unwrap()));
    let members: Vec<usize> = (0..plan.hops.len()).collect();
    let per_stripe: usize = plan.edges.iter().map(|edge| edge.width).sum();
    let peers = Peers::default();
    let executors: Vec<Arc<Executor>> = members
        .iter()
        .map(|index| {
            let me = node(*index);
            let peers = peers.clone();
            let streams = Arc::new(TcpStreams { me, peers });
            let limits = ExecutorLimits::default();
            Arc::new(Executor::new(
                streams,
                Arc::new(FreeBlocks),
                pool.clone(),
                limits,
            ))
        })
        .collect();
    for (index, executor) in executors.iter().enumerate() {
        locked(&peers).insert(node(index), Arc::downgrade(executor));
    }
    let length = STRIPES * u64::from(BLOCK);
    let shard = SlotShard {
        slot: SlotId::new(1),
        length,
        chunk: ChunkSize::new(BLOCK).unwrap(),
        leaves: Arc::default(),
        prints: Arc::default(),
    };
    let local = |member: &usize| plan.hop(*member).and_then(|hop| hop.local);
    let sources: Vec<Option<Source>> = members
        .iter()
        .map(|member| {
            let shard = shard.clone();
            local(member).map(|_| Source::Shard { shard, basis: None })
        })
        .collect();
    let keep = Sink::Parity {
        set: ParityId(1),
        basis: None,
        prints: Arc::default(),
    };
    let keeps = vec![Some(keep); members.len()];
    let striped = Arc::new(StripedPlan::uniform((*plan).clone(), sources.len()));
    let mut works = session_of(1, striped, &members, length, &sources, &keeps);
    for work in &mut works {
        work.chunk = ChunkSize::new(BLOCK).unwrap();
        work.stripes = std::iter::once(0..STRIPES).collect();
    }
    let began = Instant::now();
    let running = executors.into_iter().zip(works);
    let running = running
        .map(|(executor, work)| tokio::spawn(async move { executor.run(work).await.unwrap() }));
    futures::future::join_all(running).await;
    Timed {
        elapsed: began.elapsed(),
        bytes: per_stripe as u64 * length,
    }
}

/// The same for one stream of nothing but blocks, which come from and go to `blocks` different places: with one,
/// everything stays in the cache, which no checkpoint does.
async fn bare(blocks: usize) -> Timed {
    let (mut near, mut far) = loopback().await;
    let place = move |stripe: u64| stripe as usize % blocks;
    let mut from = vec![vec![7; BLOCK as usize]; blocks];
    let mut into = from.clone();
    let began = Instant::now();
    let sender = tokio::spawn(async move {
        for stripe in 0..STRIPES {
            near.write_all(&from[place(stripe)]).await.unwrap();
        }
        from.clear();
    });
    for stripe in 0..STRIPES {
        far.read_exact(&mut into[place(stripe)]).await.unwrap();
    }
    sender.await.unwrap();
    Timed {
        elapsed: began.elapsed(),
        bytes: STRIPES * u64::from(BLOCK),
    }
}

/// How long bytes took.
struct Timed {
    elapsed: Duration,
    bytes: u64,
}

impl Timed {
    /// GB per second.
    fn rate(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64() / 1e9
    }
}

/// The middle one: half of the rounds did better.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn executor_rate() {
    let matrix = CodingMatrix::cauchy(Geometry::new(4, 2).unwrap());
    let rows: Vec<Vec<u8>> = (0..2).map(|row| matrix.parity_row(row).to_vec()).collect();
    let pool = Pool::start(1).unwrap();
    let mut rates: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    let mut ratios: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for _ in 0..ROUNDS {
        let cases = [("copy", vec![vec![1]]), ("encode (4, 2)", rows.clone())];
        for (name, rows) in cases {
            // Between two bare streams, so that what else the machine does meets both alike.
            let before = bare(BLOCKS).await.rate();
            let executor = chain(rows, &pool).await.rate();
            let after = bare(BLOCKS).await.rate();
            rates.entry(name).or_default().push(executor);
            rates
                .entry("bare stream")
                .or_default()
                .extend([before, after]);
            ratios
                .entry(name)
                .or_default()
                .push(2.0 * executor / (before + after));
        }
    }
    for (name, rates) in rates {
        println!(
            "{name:<14} {:.2} GB/s on all streams together (median)",
            median(rates)
        );
    }
    for (name, ratios) in ratios {
        println!(
            "{name:<14} {:.2} of bare (median), rounds {ratios:.2?}",
            median(ratios.clone())
        );
        assert!(ratios.iter().all(|ratio| *ratio > 0.0));
    }
}
