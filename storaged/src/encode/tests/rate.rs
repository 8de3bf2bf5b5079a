//! What the executor costs: its rate over loopback TCP against the rate of one bare stream in the same process.
//! Reading and keeping blocks is free here, so that what is left is the executor, the arithmetic and the streams.
//! Run with `cargo test --release -p storaged executor_rate -- --ignored --nocapture`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use storaged_codec::ChunkSize;
use storaged_core::encode::{
    CodingPlan, Coefficients, Keep, ParityId, SessionWork, SlotShard, Source,
};
use storaged_wire::peer::{SessionFault, StreamRecord};
use storaged_wire::{NodeName, SlotId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::world::{Receiver, locked, node, session_of};
use crate::encode::{
    BlockSender, BlockState, Blocks, Executor, ExecutorLimits, KeepBlocks, Pool, Streams,
};

const BLOCK: u32 = 1 << 20;
const STRIPES: u64 = 512;
/// The best of these counts, because other work on the machine only slows.
const ROUNDS: usize = 5;

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
    ) -> Result<Box<dyn BlockSender>, String> {
        let peer = locked(&self.peers).get(to).and_then(Weak::upgrade);
        let (near, far) = loopback().await;
        let peer = peer.ok_or("no such peer")?;
        peer.accept(record.clone(), self.me.clone(), Box::new(Receiver(far)));
        Ok(Box::new(TcpSender(near)))
    }
}

#[async_trait]
impl BlockSender for TcpSender {
    async fn send(&mut self, chunks: &mut [Bytes]) -> Result<(), String> {
        for chunk in chunks {
            let sent = self.0.write_all(chunk).await;
            sent.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), String> {
        self.0.shutdown().await.map_err(|error| error.to_string())
    }
}

/// Blocks that cost nothing.
struct FreeBlocks;

impl Blocks for FreeBlocks {
    fn read(&self, _: &Source, _: u64, _: &mut [u8]) -> Result<BlockState, SessionFault> {
        Ok(BlockState::Dirty)
    }

    fn begin_keep(&self, _: &Keep, _: &SessionWork) -> Result<Box<dyn KeepBlocks>, SessionFault> {
        Ok(Box::new(Self))
    }
}

impl KeepBlocks for FreeBlocks {
    fn put(&self, _: u64, _: Option<&[u8]>) -> Result<(), SessionFault> {
        Ok(())
    }

    fn finish(&self) -> Result<(), SessionFault> {
        Ok(())
    }
}

/// Seconds that a chain of `sources` blocks into `sinks` takes, and the bytes that it moves over all streams.
async fn chain(session: u64, rows: Vec<Vec<u8>>) -> (Duration, u64) {
    let plan = Arc::new(CodingPlan::chain(&Coefficients::new(rows).unwrap()));
    let members: Vec<usize> = (0..plan.hops.len()).collect();
    let per_stripe: usize = plan.edges.iter().map(|edge| edge.width).sum();
    let peers = Peers::default();
    let pool = Pool::start(1).unwrap();
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
        leaves: Arc::default(),
    };
    let local = |member: &usize| plan.hop(*member).and_then(|hop| hop.local);
    let sources: Vec<Option<Source>> = members
        .iter()
        .map(|member| {
            let shard = shard.clone();
            local(member).map(|_| Source::Shard { shard, basis: None })
        })
        .collect();
    let keep = Keep::Parity {
        set: ParityId(1),
        basis: None,
    };
    let keeps = vec![Some(keep); members.len()];
    let mut works = session_of(session, plan.clone(), &members, length, &sources, &keeps);
    for work in &mut works {
        work.chunk = ChunkSize::new(BLOCK).unwrap();
        work.stripes = std::iter::once(0..STRIPES).collect();
    }
    let began = Instant::now();
    let running = executors.into_iter().zip(works);
    let running = running
        .map(|(executor, work)| tokio::spawn(async move { executor.run(work).await.unwrap() }));
    futures::future::join_all(running).await;
    (began.elapsed(), per_stripe as u64 * length)
}

async fn bare() -> (Duration, u64) {
    let (mut near, mut far) = loopback().await;
    let began = Instant::now();
    let sender = tokio::spawn(async move {
        let block = vec![7; BLOCK as usize];
        for _ in 0..STRIPES {
            near.write_all(&block).await.unwrap();
        }
    });
    let mut block = vec![0; BLOCK as usize];
    for _ in 0..STRIPES {
        far.read_exact(&mut block).await.unwrap();
    }
    sender.await.unwrap();
    (began.elapsed(), STRIPES * u64::from(BLOCK))
}

fn rate((elapsed, bytes): (Duration, u64)) -> f64 {
    bytes as f64 / elapsed.as_secs_f64() / 1e9
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn executor_rate() {
    let (mut stream, mut copy, mut encode) = (0f64, 0f64, 0f64);
    let matrix = storaged_codec::CodingMatrix::cauchy(storaged_codec::Geometry::new(4, 2).unwrap());
    let rows: Vec<Vec<u8>> = (0..2).map(|row| matrix.parity_row(row).to_vec()).collect();
    for round in 0..ROUNDS as u64 {
        stream = stream.max(rate(bare().await));
        copy = copy.max(rate(chain(2 * round, vec![vec![1]]).await));
        encode = encode.max(rate(chain(2 * round + 1, rows.clone()).await));
    }
    println!("bare stream            {stream:.2} GB/s");
    println!(
        "copy, executor         {copy:.2} GB/s, {:.2} of bare",
        copy / stream
    );
    println!(
        "encode (4, 2), on all streams together {encode:.2} GB/s, {:.2} of bare",
        encode / stream
    );
    assert!(stream > 0.0 && copy > 0.0 && encode > 0.0);
}
