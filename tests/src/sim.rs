//! UDP for the daemon's transport on turmoil's simulated network, with loss from a seeded source.

use std::fmt;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use async_trait::async_trait;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use storaged::env::{Entropy, SeededEntropy};
use storaged::net::SocketFactory;

/// Makes simulated sockets. Only inside a turmoil host.
pub struct SimFactory {
    /// One datagram in this many is lost; 0 for none.
    pub loss_one_in: u64,
    /// Where losses come from.
    pub entropy: Arc<SeededEntropy>,
    /// Datagrams sent so far.
    pub sent: Arc<AtomicU64>,
}

impl fmt::Debug for SimFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimFactory")
    }
}

#[async_trait]
impl SocketFactory for SimFactory {
    async fn bind(&self, address: SocketAddr) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        let inner = turmoil::net::UdpSocket::bind(("0.0.0.0", address.port())).await?;
        Ok(Arc::new(SimSocket {
            inner: Arc::new(inner),
            local: address,
            readable: Mutex::new(None),
            loss_one_in: self.loss_one_in,
            entropy: self.entropy.clone(),
            sent: self.sent.clone(),
        }))
    }
}

type Readable = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

struct SimSocket {
    inner: Arc<turmoil::net::UdpSocket>,
    local: SocketAddr,
    readable: Mutex<Option<Readable>>,
    loss_one_in: u64,
    entropy: Arc<SeededEntropy>,
    sent: Arc<AtomicU64>,
}

impl fmt::Debug for SimSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimSocket({})", self.local)
    }
}

/// The simulated network takes every datagram at once.
#[derive(Debug)]
struct AlwaysWritable;

impl UdpPoller for AlwaysWritable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl AsyncUdpSocket for SimSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysWritable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.sent.fetch_add(1, Ordering::Relaxed);
        if self.loss_one_in > 0 && self.entropy.next().is_multiple_of(self.loss_one_in) {
            return Ok(());
        }
        match self
            .inner
            .try_send_to(transmit.contents, transmit.destination)
        {
            // A crashed host takes nothing; real UDP would not say so either.
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut readable = self.readable.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let waiting = readable.get_or_insert_with(|| {
                let inner = self.inner.clone();
                Box::pin(async move { inner.readable().await })
            });
            match waiting.as_mut().poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(outcome) => {
                    *readable = None;
                    outcome?;
                }
            }
            match self.inner.try_recv_from(&mut bufs[0]) {
                Ok((length, from)) => {
                    meta[0] = RecvMeta::default();
                    meta[0].addr = from;
                    meta[0].len = length;
                    meta[0].stride = length;
                    return Poll::Ready(Ok(1));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    fn may_fragment(&self) -> bool {
        false
    }
}
