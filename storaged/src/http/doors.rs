//! A listener that cannot be held up: so many connections at once, each for so long.
//!
//! The HTTP server itself waits for ever for a request that never ends. Here a connection that lives longer than its
//! time is cut, whatever it does, and while all places are taken newcomers wait in the kernel's queue.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Sleep, sleep};

/// After a failed accept (no descriptors left, say) the next try waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct DoorLimits {
    pub connections_max: usize,
    pub lifetime: Duration,
}

/// The listener.
pub struct Doors {
    listener: TcpListener,
    places: Arc<Semaphore>,
    lifetime: Duration,
}

impl Doors {
    pub fn new(listener: TcpListener, limits: DoorLimits) -> Self {
        Self {
            listener,
            places: Arc::new(Semaphore::new(limits.connections_max)),
            lifetime: limits.lifetime,
        }
    }
}

impl axum::serve::Listener for Doors {
    type Io = Visit;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Visit, SocketAddr) {
        loop {
            let Ok(place) = self.places.clone().acquire_owned().await else {
                unreachable!("the semaphore is never closed")
            };
            match self.listener.accept().await {
                Ok((stream, from)) => return (Visit::new(stream, place, self.lifetime), from),
                Err(error) => {
                    tracing::debug!(%error, "accepting a connection of an operator failed");
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
pub struct Visit {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Visit {
    fn new(stream: TcpStream, place: OwnedSemaphorePermit, lifetime: Duration) -> Self {
        Self {
            stream,
            end: Box::pin(sleep(lifetime)),
            _place: place,
        }
    }

    fn check_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(cx) {
            Poll::Pending => Ok(()),
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
        }
    }
}

impl AsyncRead for Visit {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Visit {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, bytes)
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
