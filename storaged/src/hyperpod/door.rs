//! A listener that cannot be held up: so many connections at once, and a connection on which nothing moves is cut. Unlike
//! the operator's, a connection has no fixed end: a body may be as large as the memory budget.

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

/// A node has some dozens of ranks, each with a connection or two.
const CONNECTIONS_MAX: usize = 512;
/// A connection on which less than [`MOVED_BYTES`], less than any request has, moves for so long is cut; longer than any
/// answer takes.
const STILL_MAX: Duration = Duration::from_secs(90);
const MOVED_BYTES: u64 = 64;
/// After a failed accept (no descriptors left, say) the next try waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The listener.
pub struct BusyDoors {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl BusyDoors {
    pub fn new(listener: TcpListener) -> Self {
        Self {
            listener,
            places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
        }
    }
}

impl axum::serve::Listener for BusyDoors {
    type Io = Moving<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let Ok(place) = self.places.clone().acquire_owned().await else {
                unreachable!("the semaphore is never closed")
            };
            match self.listener.accept().await {
                Ok((stream, from)) => {
                    let _ = stream.set_nodelay(true);
                    return (Moving::new(stream, STILL_MAX, Some(place)), from);
                }
                Err(error) => {
                    tracing::debug!(%error, "accepting a connection of a client failed");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection on which something must move.
pub struct Moving<S> {
    stream: S,
    still_max: Duration,
    end: Pin<Box<Sleep>>,
    moved: u64,
    _place: Option<OwnedSemaphorePermit>,
}

impl<S> Moving<S> {
    fn new(stream: S, still_max: Duration, place: Option<OwnedSemaphorePermit>) -> Self {
        Self {
            stream,
            still_max,
            end: Box::pin(sleep(still_max)),
            moved: 0,
            _place: place,
        }
    }

    fn has_moved(&mut self, bytes: usize) {
        self.moved += bytes as u64;
        if self.moved >= MOVED_BYTES {
            self.moved = 0;
            let end = Instant::now() + self.still_max;
            self.end.as_mut().reset(end);
        }
    }

    fn check_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(cx) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Moving<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_time(cx)?;
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buffer);
        self.has_moved(buffer.filled().len() - before);
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Moving<S> {
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
        let mut server = Moving::new(server, Duration::from_secs(10), None);
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
}
