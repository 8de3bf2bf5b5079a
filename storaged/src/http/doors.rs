//! A listener that cannot be held up: so many connections at once, each with an end.
//!
//! The HTTP server itself waits for ever for a request that never ends. Here a connection is cut that lives longer than its
//! time, whatever it does, or, where a body may be as large as the memory budget, one on which nothing moves. While all
//! places are taken newcomers wait in the kernel's queue.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

/// After a failed accept (no descriptors left, say) the next try waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where connections may stay as long as they get on, this many bytes must move, fewer than any request has.
const MOVED_BYTES: u64 = 64;

/// How HTTP/2 begins without TLS; no method of HTTP/1 is called so (RFC 9113, 3.4).
const HTTP2_BEGINS: &[u8] = b"PRI ";

/// How many connections, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct ListenerLimits {
    pub connections_max: usize,
    pub cut: Cut,
}

/// When a connection is cut.
#[derive(Debug, Clone, Copy)]
pub enum Cut {
    /// So long after it began.
    AfterLife(Duration),
    /// When hardly anything has moved on it for so long.
    WhenStill(Duration),
}

impl Cut {
    fn after(self) -> Duration {
        match self {
            Self::AfterLife(time) | Self::WhenStill(time) => time,
        }
    }
}

/// The listener.
pub struct LimitedListener {
    listener: TcpListener,
    places: Arc<Semaphore>,
    cut: Cut,
}

impl LimitedListener {
    pub fn new(listener: TcpListener, limits: ListenerLimits) -> Self {
        Self {
            listener,
            places: Arc::new(Semaphore::new(limits.connections_max)),
            cut: limits.cut,
        }
    }
}

impl axum::serve::Listener for LimitedListener {
    type Io = TimedStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let Ok(place) = self.places.clone().acquire_owned().await else {
                unreachable!("the semaphore is never closed")
            };
            match self.listener.accept().await {
                Ok((stream, from)) => {
                    let _ = stream.set_nodelay(true);
                    return (TimedStream::new(stream, Some(place), self.cut), from);
                }
                Err(error) => {
                    tracing::debug!(%error, "accepting an HTTP connection failed");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with an end.
pub struct TimedStream<S> {
    stream: S,
    cut: Cut,
    end: Pin<Box<Sleep>>,
    moved: u64,
    /// Of what HTTP/2 begins with, how much has come; none once something else has.
    preface: Option<usize>,
    _place: Option<OwnedSemaphorePermit>,
}

impl<S> TimedStream<S> {
    fn new(stream: S, place: Option<OwnedSemaphorePermit>, cut: Cut) -> Self {
        Self {
            stream,
            cut,
            end: Box::pin(sleep(cut.after())),
            moved: 0,
            preface: Some(0),
            _place: place,
        }
    }

    fn has_moved(&mut self, bytes: usize) {
        let Cut::WhenStill(still_max) = self.cut else {
            return;
        };
        self.moved += bytes as u64;
        if self.moved >= MOVED_BYTES {
            self.moved = 0;
            let end = Instant::now() + still_max;
            self.end.as_mut().reset(end);
        }
    }

    /// One connection of HTTP/2 has hundreds of requests at once, which nothing here counts. The server would speak it, because
    /// crates of the S3 client have it compiled in.
    fn check_preface(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(come) = self.preface else {
            return Ok(());
        };
        let (wanted, got) = (&HTTP2_BEGINS[come..], bytes);
        let count = wanted.len().min(got.len());
        if wanted[..count] != got[..count] {
            self.preface = None;
        } else if count == wanted.len() {
            let text = "expected HTTP/1.1, got the preface of HTTP/2";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        } else {
            self.preface = Some(come + count);
        }
        Ok(())
    }

    fn check_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(cx) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_time(cx)?;
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.has_moved(buffer.filled().len() - before);
        if let Err(error) = self.check_preface(&buffer.filled()[before..]) {
            // Whoever reads is given an error or bytes, not both.
            buffer.set_filled(before);
            return Poll::Ready(Err(error));
        }
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_time(cx)?;
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = &outcome {
            self.has_moved(*written);
        }
        outcome
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_lives_while_bytes_move_and_no_longer() {
        let (mut client, server) = duplex(1 << 20);
        let mut server = TimedStream::new(server, None, Cut::WhenStill(Duration::from_secs(10)));
        let mut bytes = vec![0; MOVED_BYTES as usize];
        for _ in 0..3 {
            sleep(Duration::from_secs(9)).await;
            client.write_all(&bytes).await.unwrap();
            server.read_exact(&mut bytes).await.unwrap();
        }
        // A byte now and then is not enough.
        for _ in 0..3 {
            client.write_all(b"x").await.unwrap();
            sleep(Duration::from_secs(4)).await;
        }
        let error = server.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn nobody_speaks_http_2_however_slowly_it_begins() {
        for pieces in [&["PRI * HTTP/2.0"][..], &["P", "R", "I", " * "]] {
            let (mut client, server) = duplex(1 << 10);
            let mut server =
                TimedStream::new(server, None, Cut::AfterLife(Duration::from_secs(10)));
            for piece in pieces {
                client.write_all(piece.as_bytes()).await.unwrap();
            }
            drop(client);
            let error = server.read_to_end(&mut Vec::new()).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let (mut client, server) = duplex(1 << 10);
        let mut server = TimedStream::new(server, None, Cut::AfterLife(Duration::from_secs(10)));
        client.write_all(b"PR").await.unwrap();
        client.write_all(b"OPFIND / PRI ").await.unwrap();
        drop(client);
        let mut all = Vec::new();
        server.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"PROPFIND / PRI ");
    }
}
