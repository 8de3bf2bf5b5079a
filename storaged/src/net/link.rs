//! One outgoing link: dial, say hello, keep the connection, report its end, dial again.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use quinn::{Connection, Endpoint, VarInt};
use storaged_wire::{Generation, decode, encode};
use tokio::sync::{mpsc, watch};

use super::endpoint::{KIND_CONTROL, LinkHello, NetEvent, Peer, Shared, refused};
use super::wake::Wake;
use super::{NetError, frame, tls};

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
#[derive(Debug)]
pub(super) struct Link {
    queue: mpsc::Sender<Bytes>,
    connection: watch::Sender<Option<Connection>>,
}

impl Link {
    pub(super) fn start(
        endpoint: Endpoint,
        peer: Peer,
        shared: Arc<Shared>,
        wake: Arc<Wake>,
    ) -> Arc<Self> {
        let (queue, messages) = mpsc::channel(QUEUE);
        let connection = watch::Sender::new(None);
        let link = Arc::new(Self { queue, connection });
        tokio::spawn(link.clone().keep(endpoint, peer, shared, wake, messages));
        link
    }

    pub(super) fn send(&self, body: Bytes) {
        // A full queue means a link that is down or very slow: the message is lost, as documented.
        let _ = self.queue.try_send(body);
    }

    /// The connection, as soon as there is one; none if that takes too long.
    pub(super) async fn connection(&self) -> Option<Connection> {
        let mut connection = self.connection.subscribe();
        let up = connection.wait_for(Option::is_some);
        let up = tokio::time::timeout(UP_WAIT, up).await.ok()?.ok()?;
        up.clone()
    }

    async fn keep(
        self: Arc<Self>,
        endpoint: Endpoint,
        peer: Peer,
        shared: Arc<Shared>,
        wake: Arc<Wake>,
        mut messages: mpsc::Receiver<Bytes>,
    ) {
        let mut failures = 0u32;
        // Counted apart: a peer that was down for long and comes back with a bad certificate is told of at once.
        let mut refusals = 0u32;
        loop {
            let dialled = tokio::select! {
                biased;
                dialled = dial_in_time(&endpoint, &peer, &shared.hello) => dialled,
                () = wake.is_there() => continue,
            };
            match dialled {
                Ok((connection, generation)) => {
                    (failures, refusals) = (0, 0);
                    while messages.try_recv().is_ok() {}
                    wake.connected(generation);
                    self.connection.send_replace(Some(connection.clone()));
                    let up = NetEvent::Up {
                        peer: peer.name.clone(),
                        generation,
                    };
                    if shared.events.send(up).await.is_err() {
                        return;
                    }
                    let (reason, anew) = tokio::select! {
                        biased;
                        reason = carry(&connection, &mut messages) => (reason, false),
                        () = wake.is_another() => ("it was started anew".into(), true),
                    };
                    self.connection.send_replace(None);
                    wake.lost();
                    connection.close(VarInt::from_u32(0), b"");
                    let down = NetEvent::Down {
                        peer: peer.name.clone(),
                        reason,
                    };
                    if shared.events.send(down).await.is_err() {
                        return;
                    }
                    if anew {
                        continue;
                    }
                }
                Err(error) => {
                    let certificate = matches!(error, NetError::PeerCertificate { .. });
                    if certificate {
                        if refusals.is_multiple_of(TELL_EVERY) {
                            let _ = shared.events.send(NetEvent::Fault(error)).await;
                        }
                        refusals = refusals.saturating_add(1);
                    }
                    failures = failures.saturating_add(1);
                }
            }
            let wait = BACKOFF
                .saturating_mul(1 << failures.min(4))
                .min(BACKOFF_LONGEST);
            tokio::select! {
                biased;
                () = wake.is_there() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }
}

async fn dial_in_time(
    endpoint: &Endpoint,
    peer: &Peer,
    hello: &LinkHello,
) -> Result<(Connection, Generation), NetError> {
    let dialled = tokio::time::timeout(DIAL_WAIT, dial(endpoint, peer, hello)).await;
    dialled.unwrap_or_else(|_| {
        let reason = "no answer".into();
        Err(NetError::Connection {
            peer: peer.name.to_string(),
            reason,
        })
    })
}

async fn dial(
    endpoint: &Endpoint,
    peer: &Peer,
    hello: &LinkHello,
) -> Result<(Connection, Generation), NetError> {
    let name = peer.name.to_string();
    let failed = |reason: String| NetError::Connection {
        peer: name.clone(),
        reason,
    };
    let connecting = endpoint.connect(peer.address, &tls::dns_name(&peer.name));
    let connecting = connecting.map_err(|error| failed(error.to_string()))?;
    let connection = connecting.await.map_err(|error| refused(&name, &error))?;
    let opened = connection.open_bi().await;
    let (mut send, mut recv) = opened.map_err(|error| refused(&name, &error))?;
    frame::write(&mut send, encode(hello).into())
        .await
        .map_err(failed)?;
    let _ = send.finish();
    let body = frame::read(&mut recv, 4096).await;
    // A server that refuses our certificate says so by closing, which shows here.
    let body = body.map_err(|reason| match connection.close_reason() {
        Some(error) => refused(&name, &error),
        None => failed(reason),
    })?;
    let body = body.ok_or_else(|| failed("no hello".into()))?;
    let answer: LinkHello = decode("hello", &body).map_err(|error| failed(error.to_string()))?;
    if answer.version != hello.version || answer.node != peer.name {
        return Err(failed(format!(
            "expected {} version {}, got {} version {}",
            peer.name, hello.version, answer.node, answer.version
        )));
    }
    Ok((connection, answer.generation))
}

/// Carries messages until the connection ends; says why it did.
async fn carry(connection: &Connection, messages: &mut mpsc::Receiver<Bytes>) -> String {
    let sending = async {
        let mut stream = connection
            .open_uni()
            .await
            .map_err(|error| error.to_string())?;
        let kind = Bytes::from_static(&[KIND_CONTROL]);
        stream
            .write_chunk(kind)
            .await
            .map_err(|error| error.to_string())?;
        while let Some(body) = messages.recv().await {
            frame::write(&mut stream, body).await?;
        }
        std::future::pending::<Result<(), String>>().await
    };
    tokio::select! {
        biased;
        reason = connection.closed() => reason.to_string(),
        ended = sending => ended.err().unwrap_or_default(),
    }
}
