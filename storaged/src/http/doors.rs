//! A listener that cannot be held up: so many connections at once, each with an end, and requests that begin within a time.
//!
//! A connection is cut that lives longer than its time, whatever it does, or, where a body may be as large as the memory budget, one
//! on which nothing moves. Who has a place is in `places.rs`.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep, sleep};

use super::places::{HttpPlace, HttpPlaces, WhenFull};

/// After a failed accept (no descriptors left, say) the next try waits so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where connections may stay as long as they get on, this many bytes must move, fewer than any request has.
const MOVED_BYTES: u64 = 64;

/// How many connections, for how long, and what they may begin with.
#[derive(Debug, Clone, Copy)]
pub struct ListenerLimits {
    pub connections_max: usize,
    pub when_full: WhenFull,
    pub cut: Cut,
    pub head: HeadLimits,
}

/// What comes before a request's body.
#[derive(Debug, Clone, Copy)]
pub struct HeadLimits {
    /// It has ended so long after the connection began or the answer before it ended; else the connection does.
    pub within: Duration,
    /// It has less than so many bytes, and so has what is read at once; at least 8 KiB.
    pub bytes_max: usize,
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

/// Serves for as long as the process lives. HTTP/1 alone: one connection of HTTP/2 has hundreds of requests at once, which nothing here
/// counts.
pub async fn serve(listener: TcpListener, limits: ListenerLimits, app: Router) {
    let places = HttpPlaces::new(limits.connections_max);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let place = places.take(from.ip(), limits.when_full).await;
                tokio::spawn(serve_one(stream, place, limits, app.clone()));
            }
            Err(error) => {
                tracing::debug!(%error, "accepting an HTTP connection failed");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_one(stream: TcpStream, mut place: HttpPlace, limits: ListenerLimits, app: Router) {
    let _ = stream.set_nodelay(true);
    let stream = TokioIo::new(TimedStream::new(stream, limits.cut));
    let mut server = http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head.within)
        .max_buf_size(limits.head.bytes_max);
    let connection = server.serve_connection(stream, TowerToHyperService::new(app));
    tokio::select! {
        ended = connection => if let Err(error) = ended {
            tracing::debug!(%error, "an HTTP connection was cut or broke off");
        },
        () = place.lost() => {}
    }
}

/// A connection with an end.
struct TimedStream<S> {
    stream: S,
    cut: Cut,
    end: Pin<Box<Sleep>>,
    moved: u64,
}

impl<S> TimedStream<S> {
    fn new(stream: S, cut: Cut) -> Self {
        Self {
            stream,
            cut,
            end: Box::pin(sleep(cut.after())),
            moved: 0,
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
        let mut server = TimedStream::new(server, Cut::WhenStill(Duration::from_secs(10)));
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
