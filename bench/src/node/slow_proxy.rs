//! A proxy that stands for the way to a distant S3: so many bytes per second on each connection, each direction, after a delay.
//! It counts the answers that pass.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

const PIECE: usize = 64 << 10;
/// Pieces that are on their way: more than the delay holds at the rate.
const ON_THE_WAY: usize = 64;
/// How an answer begins, and how one that only asks for more does.
const ANSWER: &[u8] = b"HTTP/1.1 ";
const GO_ON: &[u8] = b"HTTP/1.1 100";

/// What a connection through the proxy is like.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    /// Bytes per second.
    pub rate: f64,
    /// Of each byte.
    pub delay: Duration,
}

/// A running proxy; it ends with its owner.
#[derive(Debug)]
pub struct SlowProxy {
    /// Where it listens.
    pub address: SocketAddr,
    answers: Arc<AtomicU64>,
    _runtime: tokio::runtime::Runtime,
}

impl SlowProxy {
    /// One in front of `server`.
    ///
    /// # Errors
    /// If it cannot listen.
    pub fn start(server: SocketAddr, way: Way) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let address = listener.local_addr()?;
        let answers = Arc::new(AtomicU64::new(0));
        let counted = answers.clone();
        runtime.spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let counted = counted.clone();
                tokio::spawn(async move {
                    // What breaks off here breaks off for both ends.
                    let _ = pass(client, server, way, counted).await;
                });
            }
        });
        Ok(Self {
            address,
            answers,
            _runtime: runtime,
        })
    }

    /// Answers that have passed so far.
    pub fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }
}

async fn pass(
    client: TcpStream,
    server: SocketAddr,
    way: Way,
    answers: Arc<AtomicU64>,
) -> Result<()> {
    let server = TcpStream::connect(server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let there = tokio::spawn(one_way(from_client, to_server, way, None));
    one_way(from_server, to_client, way, Some(answers)).await?;
    there.abort();
    Ok(())
}

async fn one_way(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    way: Way,
    answers: Option<Arc<AtomicU64>>,
) -> Result<()> {
    let (sender, mut receiver) = mpsc::channel::<(Instant, Vec<u8>)>(ON_THE_WAY);
    let reading = tokio::spawn(async move {
        let mut count = AnswerCount::default();
        let mut free = Instant::now();
        let mut piece = vec![0; PIECE];
        while let Ok(got @ 1..) = from.read(&mut piece).await {
            if let Some(answers) = &answers {
                answers.fetch_add(count.of(&piece[..got]), Ordering::Relaxed);
            }
            free = free.max(Instant::now()) + Duration::from_secs_f64(got as f64 / way.rate);
            tokio::time::sleep_until(free.into()).await;
            let due = free + way.delay;
            if sender.send((due, piece[..got].to_vec())).await.is_err() {
                return;
            }
        }
    });
    while let Some((due, piece)) = receiver.recv().await {
        tokio::time::sleep_until(due.into()).await;
        to.write_all(&piece).await?;
    }
    reading.await?;
    to.shutdown().await?;
    Ok(())
}

/// Answers in bytes that come in pieces.
#[derive(Default)]
struct AnswerCount {
    /// The end of the piece before, too short to tell.
    rest: Vec<u8>,
}

impl AnswerCount {
    fn of(&mut self, piece: &[u8]) -> u64 {
        self.rest.extend_from_slice(piece);
        let starts = |window: &[u8]| window.starts_with(ANSWER) && !window.starts_with(GO_ON);
        let found = self.rest.windows(GO_ON.len()).filter(|it| starts(it));
        let found = found.count() as u64;
        let kept = self.rest.len().saturating_sub(GO_ON.len() - 1);
        self.rest.drain(..kept);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::AnswerCount;

    #[test]
    fn answers_are_counted_once_wherever_they_are_cut() {
        let bytes = b"HTTP/1.1 200 OK\r\n\r\nbodyHTTP/1.1 404 No\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 X\r\n\r\n";
        for cut in 0..bytes.len() {
            let mut count = AnswerCount::default();
            let (first, second) = bytes.split_at(cut);
            assert_eq!(count.of(first) + count.of(second), 3, "cut at {cut}");
        }
    }
}
