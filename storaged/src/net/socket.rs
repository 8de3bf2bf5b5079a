//! The UDP seam: real sockets here, simulated ones in tests.

use std::fmt::Debug;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};

/// Largest datagram that the path's MTU discovery tries: what fits a 9000-byte Ethernet frame.
pub(super) const DATAGRAM_BYTES_MAX: u16 = 8952;

/// One sendmsg with segmentation offload carries at most 64 KiB with its headers: 65000 / 8952 = 7 segments.
/// Without this cap every batch of larger datagrams fails, and the path's MTU is taken for a black hole.
const SEGMENTS_MAX: usize = 65000 / DATAGRAM_BYTES_MAX as usize;

/// Socket buffers that hold what a core can be behind by: 4 MiB is about 2 ms at 2 GB/s.
const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// Makes UDP sockets.
#[async_trait]
pub trait SocketFactory: Send + Sync + Debug {
    /// Binds a socket.
    ///
    /// # Errors
    /// As the system says.
    async fn bind(&self, address: SocketAddr) -> io::Result<Arc<dyn AsyncUdpSocket>>;

    /// Time until all nodes look at their links, which they do so often: with one clock for all, what they say and hear
    /// then comes together, and a node wakes a few times for all its peers instead of for each. Simulated nodes begin
    /// together anyhow.
    fn until_beat(&self, every: Duration) -> Duration {
        every
    }
}

/// Time until the wall clock has the next multiple of an interval, but at least half of it: a beat that comes a little
/// early, or a clock that is set, makes no two of one.
fn until_multiple(since_epoch: Duration, every: Duration) -> Duration {
    let into = Duration::from_nanos(
        u64::try_from(since_epoch.as_nanos() % every.as_nanos().max(1)).unwrap_or_default(),
    );
    let until = every.saturating_sub(into);
    if until < every / 2 {
        until + every
    } else {
        until
    }
}

/// The system's UDP.
#[derive(Debug, Clone, Copy, Default)]
pub struct UdpFactory;

#[async_trait]
impl SocketFactory for UdpFactory {
    async fn bind(&self, address: SocketAddr) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        let socket = std::net::UdpSocket::bind(address)?;
        // Best effort: the system's maximum may be lower.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&socket, SOCKET_BUFFER_BYTES);
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, SOCKET_BUFFER_BYTES);
        let inner = TokioRuntime.wrap_udp_socket(socket)?;
        Ok(Arc::new(Capped { inner }))
    }

    fn until_beat(&self, every: Duration) -> Duration {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        until_multiple(since_epoch.unwrap_or_default(), every)
    }
}

/// A socket that sends fewer segments at once.
#[derive(Debug)]
struct Capped {
    inner: Arc<dyn AsyncUdpSocket>,
}

impl AsyncUdpSocket for Capped {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.inner.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.inner.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments().min(SEGMENTS_MAX)
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_nodes_beat_when_the_clock_has_a_whole_half_second_and_none_twice() {
        let every = Duration::from_millis(500);
        for (clock, expected) in [
            (12_000, 500),
            (12_001, 499),
            (12_249, 251),
            (12_250, 250),
            (12_251, 749),
            (12_499, 501),
        ] {
            let until = until_multiple(Duration::from_millis(clock), every);
            assert_eq!(until, Duration::from_millis(expected), "at {clock} ms");
        }
    }
}
