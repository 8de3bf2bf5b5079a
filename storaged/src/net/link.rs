//! One outgoing link: dial, say hello, keep the connection, report its end, dial again.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use quinn::{Connection, ConnectionError, Endpoint, VarInt, WriteError};
use storaged_wire::{Generation, NodeName, decode, encode};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::address::PeerAddress;
use super::endpoint::{FIRST_RECORD_BYTES_MAX, KIND_CONTROL, LinkHello, NetEvent, Shared};
use super::frame::ControlFrameError;
use super::wake::Wake;
use super::{NetError, failure, frame, tls};

/// Dial again after this time, doubled at each failure up to the longest.
const BACKOFF: Duration = Duration::from_millis(100);
const BACKOFF_LONGEST: Duration = Duration::from_secs(1);
/// A dial and its hello take no longer.
const DIAL_WAIT: Duration = Duration::from_secs(3);
/// Control messages that wait for the link; more are lost, and said again by the layer above.
const QUEUE: usize = 4096;
/// Repeated dial errors are told once in this many tries.
const TELL_EVERY: u32 = 30;
/// Whoever needs a link that is just coming up waits for it so long: members of a session hear of a node that came back
/// a few milliseconds one after the other.
const UP_WAIT: Duration = Duration::from_secs(2);

/// The outgoing link to one peer.
pub(super) struct Link {
    queue: mpsc::Sender<Bytes>,
    connection: watch::Sender<Option<Connection>>,
    address: Mutex<PeerAddress>,
}

/// A link that is not kept yet.
pub(super) struct NewLink {
    pub link: Arc<Link>,
    messages: mpsc::Receiver<Bytes>,
}

impl NewLink {
    /// Dials, and goes on until the peer is `gone` from the configuration.
    pub fn start(
        self,
        peer: NodeName,
        endpoint: Endpoint,
        shared: Arc<Shared>,
        wake: Arc<Wake>,
        gone: CancellationToken,
    ) {
        let keeper = Keeper {
            peer,
            endpoint,
            shared,
            wake,
            gone,
            link: self.link,
            messages: self.messages,
            failures: 0,
            refusals: 0,
        };
        tokio::spawn(keeper.keep());
    }
}

impl Link {
    #[expect(
        clippy::new_ret_no_self,
        reason = "a link comes with the ends that feed it"
    )]
    pub fn new(address: PeerAddress) -> NewLink {
        let (queue, messages) = mpsc::channel(QUEUE);
        let link = Arc::new(Self {
            queue,
            connection: watch::Sender::new(None),
            address: Mutex::new(address),
        });
        NewLink { link, messages }
    }

    pub fn send(&self, body: Bytes) {
        // A full queue means a link that is down or very slow: the message is lost, as documented.
        let _ = self.queue.try_send(body);
    }

    /// Where to dial from now on.
    pub fn set_address(&self, address: PeerAddress) {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = address;
    }

    fn address(&self) -> PeerAddress {
        let address = self.address.lock().unwrap_or_else(PoisonError::into_inner);
        address.clone()
    }

    /// The connection, as soon as there is one; none if that takes too long.
    pub async fn connection(&self) -> Option<Connection> {
        let mut connection = self.connection.subscribe();
        let up = connection.wait_for(Option::is_some);
        let up = tokio::time::timeout(UP_WAIT, up).await.ok()?.ok()?;
        up.clone()
    }
}

/// Why a link is not kept any more.
enum End {
    /// The daemon stops, or the peer is configured no more.
    Unwanted,
}

/// What keeps a link.
struct Keeper {
    peer: NodeName,
    endpoint: Endpoint,
    shared: Arc<Shared>,
    wake: Arc<Wake>,
    gone: CancellationToken,
    link: Arc<Link>,
    messages: mpsc::Receiver<Bytes>,
    failures: u32,
    /// Counted apart: a peer that was down for long and comes back with a bad certificate is told of at once.
    refusals: u32,
}

impl Keeper {
    async fn keep(mut self) {
        while let Ok(()) = self.once().await {}
    }

    /// Dials once, carries what comes of it, and waits for the next time.
    async fn once(&mut self) -> Result<(), End> {
        let address = self.link.address();
        let dialled = tokio::select! {
            biased;
            () = self.gone.cancelled() => return Err(End::Unwanted),
            dialled = dial_in_time(&self.endpoint, &self.peer, &address, &self.shared) => dialled,
            () = self.wake.is_there() => return Ok(()),
        };
        match dialled {
            Ok(dialled) => {
                if let After::DialNow = self.connected(dialled).await? {
                    return Ok(());
                }
            }
            Err(error) => self.not_connected(error).await,
        }
        let wait = BACKOFF
            .saturating_mul(1 << self.failures.min(4))
            .min(BACKOFF_LONGEST);
        tokio::select! {
            biased;
            () = self.gone.cancelled() => return Err(End::Unwanted),
            () = self.wake.is_there() => {}
            () = tokio::time::sleep(wait) => {}
        }
        Ok(())
    }

    async fn connected(&mut self, dialled: Dialled) -> Result<After, End> {
        let Dialled {
            connection,
            generation,
            version,
        } = dialled;
        (self.failures, self.refusals) = (0, 0);
        while self.messages.try_recv().is_ok() {}
        self.wake.connected(generation);
        self.link.connection.send_replace(Some(connection.clone()));
        let peer = self.peer.clone();
        self.tell(NetEvent::Up {
            peer,
            generation,
            version,
        })
        .await?;
        let (reason, after) = tokio::select! {
            biased;
            () = self.gone.cancelled() => ("it is not configured any more".into(), Ok(After::DialNow)),
            reason = carry(&connection, &mut self.messages) => (reason.to_string(), Ok(After::Wait)),
            () = self.wake.is_another() => ("it was started anew".into(), Ok(After::DialNow)),
        };
        self.link.connection.send_replace(None);
        self.wake.lost();
        connection.close(VarInt::from_u32(0), b"");
        let peer = self.peer.clone();
        self.tell(NetEvent::Down { peer, reason }).await?;
        after
    }

    async fn not_connected(&mut self, error: NetError) {
        self.failures = self.failures.saturating_add(1);
        // That nobody answers is the ordinary case of a node that is down.
        if matches!(error, NetError::Connection { .. } | NetError::Lost { .. }) {
            return;
        }
        if self.refusals.is_multiple_of(TELL_EVERY) {
            let event = match error {
                NetError::Protocol { .. } => NetEvent::Failed(error),
                why => NetEvent::Refused {
                    peer: self.peer.clone(),
                    why,
                },
            };
            let _ = self.tell(event).await;
        }
        self.refusals = self.refusals.saturating_add(1);
    }

    async fn tell(&self, event: NetEvent) -> Result<(), End> {
        let sent = self.shared.events.send(event).await;
        sent.map_err(|_| End::Unwanted)
    }
}

/// What comes after a connection.
enum After {
    DialNow,
    Wait,
}

/// A connection, and what its other end said.
struct Dialled {
    connection: Connection,
    generation: Generation,
    version: u16,
}

async fn dial_in_time(
    endpoint: &Endpoint,
    peer: &NodeName,
    address: &PeerAddress,
    shared: &Shared,
) -> Result<Dialled, NetError> {
    let dialled = tokio::time::timeout(DIAL_WAIT, dial(endpoint, peer, address, shared)).await;
    dialled.unwrap_or_else(|_| {
        let reason = "no answer".into();
        Err(NetError::Connection {
            peer: peer.to_string(),
            reason,
        })
    })
}

async fn dial(
    endpoint: &Endpoint,
    peer: &NodeName,
    address: &PeerAddress,
    shared: &Shared,
) -> Result<Dialled, NetError> {
    let name = peer.to_string();
    let down = |reason: String| NetError::Connection {
        peer: name.clone(),
        reason,
    };
    let from = endpoint.local_addr().map_err(|e| down(e.to_string()))?;
    let resolved = address.resolve(from).await;
    let resolved = resolved.map_err(|source| NetError::Address {
        peer: peer.clone(),
        address: address.clone(),
        source,
    })?;
    let connecting = endpoint.connect_with(shared.client(), resolved, &tls::dns_name(peer));
    let connecting = connecting.map_err(|error| down(error.to_string()))?;
    let of_connection = |error| failure::of_connection(&name, &error);
    let connection = connecting.await.map_err(of_connection)?;
    let (mut send, mut recv) = connection.open_bi().await.map_err(of_connection)?;
    // A server that refuses our certificate says so by closing, which shows in the streams.
    let of_stream = |error| failure::of_stream(&name, &connection, error);
    let wrong = |reason: String| of_stream(ControlFrameError::Wrong(reason));
    let hello = shared.hello();
    frame::write(&mut send, encode(&hello).into())
        .await
        .map_err(of_stream)?;
    let _ = send.finish();
    let body = frame::read(&mut recv, FIRST_RECORD_BYTES_MAX)
        .await
        .map_err(of_stream)?;
    let body = body.ok_or_else(|| wrong("no hello".into()))?;
    let answer: LinkHello = decode("hello", &body).map_err(|error| wrong(error.to_string()))?;
    if answer.node != *peer {
        let reason = format!("expected {peer}, got {}: see peers.address", answer.node);
        return Err(wrong(reason));
    }
    let version = hello.agree(&answer)?;
    Ok(Dialled {
        generation: answer.generation,
        connection,
        version,
    })
}

/// Why nothing is carried any more.
#[derive(Debug, Error)]
enum CarryError {
    #[error(transparent)]
    Closed(#[from] ConnectionError),
    #[error(transparent)]
    Stream(#[from] WriteError),
    #[error(transparent)]
    Frame(#[from] ControlFrameError),
}

/// Carries messages until the connection ends; says why it did.
async fn carry(connection: &Connection, messages: &mut mpsc::Receiver<Bytes>) -> CarryError {
    tokio::select! {
        biased;
        reason = connection.closed() => reason.into(),
        Err(error) = send_all(connection, messages) => error,
    }
}

/// Sends what comes, and does not end while it can.
async fn send_all(
    connection: &Connection,
    messages: &mut mpsc::Receiver<Bytes>,
) -> Result<Infallible, CarryError> {
    let mut stream = connection.open_uni().await?;
    let kind = Bytes::from_static(&[KIND_CONTROL]);
    stream.write_chunk(kind).await?;
    while let Some(body) = messages.recv().await {
        frame::write(&mut stream, body).await?;
    }
    std::future::pending().await
}
