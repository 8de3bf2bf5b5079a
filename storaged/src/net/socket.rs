//! The UDP seam: real sockets here, simulated ones in tests.

use std::fmt::Debug;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

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
