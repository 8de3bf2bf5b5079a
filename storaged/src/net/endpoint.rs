//! The endpoint: one UDP socket for dialling and accepting, and what comes in on accepted connections.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use minicbor::{Decode, Encode};
use quinn::{Connection, Endpoint, EndpointConfig, RecvStream, SendStream, TokioRuntime, VarInt};
use rustls::pki_types::CertificateDer;
use storaged_wire::peer::{CONTROL_FRAME_BYTES_MAX, StreamRecord};
use storaged_wire::{Generation, NodeName, decode, encode};
use tokio::sync::mpsc;

use super::link::Link;
use super::socket::{DATAGRAM_BYTES_MAX, SocketFactory};
use super::wake::Wake;
use super::{NetError, TlsIdentity, frame, tls};

/// Keep-alives: a dead peer is seen after four missed ones, in 2.0 to 2.5 s.
const KEEP_ALIVE: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(2);
/// First records of connections and streams come within this time.
const FIRST_RECORD_WAIT: Duration = Duration::from_secs(5);
/// First records are small.
const FIRST_RECORD_BYTES_MAX: usize = 4096;
/// Unread bytes that one stream may have in flight: bandwidth times delay of 100 Gbit/s over 0.3 ms, 4 MB. More of
/// them fall out of the cache between the socket and the reader, and cost a tenth more CPU (docs/operate/transport.md).
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// The same for all streams of a connection.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Streams that a peer may have open to us at once: 64 sessions of 4 edges.
const STREAMS_MAX: u32 = 256;
/// Of the protocol.
const VERSION: u16 = 4;

pub(super) const KIND_CONTROL: u8 = 0;
pub(super) const KIND_DATA: u8 = 1;

/// A configured peer.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its name.
    pub name: NodeName,
    /// Where it listens.
    pub address: SocketAddr,
}

/// How to start.
#[derive(Debug)]
pub struct NetConfig {
    /// This node.
    pub node: NodeName,
    /// This incarnation.
    pub generation: Generation,
    /// Where to listen.
    pub listen: SocketAddr,
    /// Who we are.
    pub identity: TlsIdentity,
    /// Whom to link to.
    pub peers: Vec<Peer>,
    /// Where sockets come from.
    pub sockets: Arc<dyn SocketFactory>,
    /// Seed of the endpoint's random choices; none for the system's.
    pub seed: Option<[u8; 32]>,
}

/// What happened on the network.
#[derive(Debug)]
pub enum NetEvent {
    /// Our link to a peer is up.
    Up {
        peer: NodeName,
        generation: Generation,
    },
    /// Our link to a peer is down.
    Down { peer: NodeName, reason: String },
    /// A control message.
    Message { from: NodeName, body: Vec<u8> },
    /// A data stream.
    Stream {
        from: NodeName,
        record: StreamRecord,
        recv: RecvStream,
    },
    /// A peer or somebody else did what it may not; worth a log line.
    Fault(NetError),
}

/// First record of a connection, both ways.
#[derive(Debug, Clone, Encode, Decode)]
pub(super) struct LinkHello {
    #[n(0)]
    pub version: u16,
    #[n(1)]
    pub node: NodeName,
    #[n(2)]
    pub generation: Generation,
}

/// The transport of one daemon.
#[derive(Debug)]
pub struct Net {
    endpoint: Endpoint,
    links: BTreeMap<NodeName, Arc<Link>>,
}

pub(super) struct Shared {
    pub hello: LinkHello,
    pub events: mpsc::Sender<NetEvent>,
    /// The configured peers, and what wakes our links to them.
    pub known: BTreeMap<NodeName, Arc<Wake>>,
}

impl Net {
    /// Binds, accepts and dials. Events come on `events`; whoever reads them must keep up or peers wait.
    ///
    /// # Errors
    /// [`NetError`] if the certificates or the socket cannot be used.
    pub async fn start(
        config: NetConfig,
        events: mpsc::Sender<NetEvent>,
    ) -> Result<Arc<Self>, NetError> {
        config.identity.check_name(&config.node)?;
        let transport = Arc::new(transport());
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(config.identity.server()?));
        server.transport_config(transport.clone());
        let mut client = quinn::ClientConfig::new(Arc::new(config.identity.client()?));
        client.transport_config(transport);
        let bound = config.sockets.bind(config.listen).await;
        let socket = bound.map_err(|source| NetError::Bind {
            address: config.listen,
            source,
        })?;
        let mut endpoint_config = EndpointConfig::default();
        endpoint_config.rng_seed(config.seed);
        // Peers' path discovery goes no higher than what we say we take.
        let sized = endpoint_config.max_udp_payload_size(DATAGRAM_BYTES_MAX);
        sized.map_err(|error| NetError::Bind {
            address: config.listen,
            source: std::io::Error::other(error),
        })?;
        let runtime = Arc::new(TokioRuntime);
        let made =
            Endpoint::new_with_abstract_socket(endpoint_config, Some(server), socket, runtime);
        let mut endpoint = made.map_err(|source| NetError::Bind {
            address: config.listen,
            source,
        })?;
        endpoint.set_default_client_config(client);
        let shared = Arc::new(Shared {
            hello: LinkHello {
                version: VERSION,
                node: config.node,
                generation: config.generation,
            },
            events,
            known: (config.peers.iter())
                .map(|peer| (peer.name.clone(), Arc::default()))
                .collect(),
        });
        let links = config.peers.into_iter().map(|peer| {
            let name = peer.name.clone();
            let wake = shared.known.get(&name).cloned().unwrap_or_default();
            let link = Link::start(endpoint.clone(), peer, shared.clone(), wake);
            (name, link)
        });
        let links = links.collect();
        tokio::spawn(accept_all(endpoint.clone(), shared));
        Ok(Arc::new(Self { endpoint, links }))
    }

    /// Queues a control message; it is lost if the link is down or its queue is full.
    pub fn send(&self, to: &NodeName, body: Bytes) {
        if let Some(link) = self.links.get(to) {
            link.send(body);
        }
    }

    /// Opens a data stream.
    ///
    /// # Errors
    /// [`NetError`] if the peer is unknown, down or takes no more streams.
    pub async fn open_stream(
        &self,
        to: &NodeName,
        record: &StreamRecord,
    ) -> Result<SendStream, NetError> {
        let link = self
            .links
            .get(to)
            .ok_or_else(|| NetError::UnknownPeer(to.clone()))?;
        let connection = link
            .connection()
            .await
            .ok_or_else(|| NetError::Down(to.clone()))?;
        let failed = |reason: String| NetError::Connection {
            peer: to.to_string(),
            reason,
        };
        let opened = tokio::time::timeout(FIRST_RECORD_WAIT, connection.open_uni()).await;
        let opened = opened.map_err(|_| failed("it takes no more streams".into()))?;
        let mut stream = opened.map_err(|error| failed(error.to_string()))?;
        let kind = Bytes::from_static(&[KIND_DATA]);
        stream
            .write_chunk(kind)
            .await
            .map_err(|error| failed(error.to_string()))?;
        frame::write(&mut stream, encode(record).into())
            .await
            .map_err(failed)?;
        Ok(stream)
    }

    /// Address that it listens on.
    ///
    /// # Errors
    /// As the system says.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.endpoint.local_addr()
    }

    /// Ends every connection, with a word to the peers.
    pub async fn close(&self) {
        self.endpoint.close(VarInt::from_u32(0), b"stopping");
        let _ = tokio::time::timeout(Duration::from_millis(500), self.endpoint.wait_idle()).await;
    }
}

fn transport() -> quinn::TransportConfig {
    let mut config = quinn::TransportConfig::default();
    let mut discovery = quinn::MtuDiscoveryConfig::default();
    discovery.upper_bound(DATAGRAM_BYTES_MAX);
    config
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(IDLE.try_into().ok())
        .stream_receive_window(STREAM_WINDOW_BYTES.into())
        .receive_window(CONNECTION_WINDOW_BYTES.into())
        .send_window(u64::from(CONNECTION_WINDOW_BYTES))
        .max_concurrent_uni_streams(STREAMS_MAX.into())
        .max_concurrent_bidi_streams(1u32.into())
        .datagram_receive_buffer_size(None)
        .mtu_discovery_config(Some(discovery));
    config
}

async fn accept_all(endpoint: Endpoint, shared: Arc<Shared>) {
    while let Some(incoming) = endpoint.accept().await {
        let shared = shared.clone();
        tokio::spawn(async move {
            let address = incoming.remote_address().to_string();
            let outcome = match incoming.await {
                Ok(connection) => serve(connection, &shared).await,
                Err(error) => Err(refused(&address, &error)),
            };
            if let Err(error) = outcome {
                let _ = shared.events.send(NetEvent::Fault(error)).await;
            }
        });
    }
}

/// A connection error, told apart by whether a certificate is to blame.
pub(super) fn refused(peer: &str, error: &quinn::ConnectionError) -> NetError {
    let reason = error.to_string();
    let peer = peer.to_owned();
    let about_certificate = [
        "certificate",
        "Certificate",
        "cert",
        "BadSignature",
        "UnknownIssuer",
    ]
    .iter()
    .any(|word| reason.contains(word));
    match about_certificate {
        true => NetError::PeerCertificate { peer, reason },
        false => NetError::Connection { peer, reason },
    }
}

async fn serve(connection: Connection, shared: &Arc<Shared>) -> Result<(), NetError> {
    let address = connection.remote_address().to_string();
    let hello = tokio::time::timeout(FIRST_RECORD_WAIT, welcome(&connection, shared)).await;
    let from = match hello {
        Ok(Ok(from)) => from,
        Ok(Err(error)) => {
            connection.close(VarInt::from_u32(1), b"refused");
            return Err(error);
        }
        Err(_) => {
            connection.close(VarInt::from_u32(1), b"no hello");
            let reason = "no hello in time".into();
            return Err(NetError::Protocol {
                peer: address,
                reason,
            });
        }
    };
    while let Ok(stream) = connection.accept_uni().await {
        let (shared, from, connection) = (shared.clone(), from.clone(), connection.clone());
        tokio::spawn(async move {
            if let Err(reason) = serve_stream(stream, &from, &shared).await {
                connection.close(VarInt::from_u32(2), b"protocol");
                let peer = from.to_string();
                let _ = shared
                    .events
                    .send(NetEvent::Fault(NetError::Protocol { peer, reason }))
                    .await;
            }
        });
    }
    Ok(())
}

/// Takes the peer's hello, checks that its certificate is the node's it says it is, and answers.
async fn welcome(connection: &Connection, shared: &Shared) -> Result<NodeName, NetError> {
    let peer = connection.remote_address().to_string();
    let broke = |reason: String| NetError::Protocol {
        peer: peer.clone(),
        reason,
    };
    let (mut send, mut recv) = connection
        .accept_bi()
        .await
        .map_err(|e| broke(e.to_string()))?;
    let body = frame::read(&mut recv, FIRST_RECORD_BYTES_MAX)
        .await
        .map_err(broke)?;
    let body = body.ok_or_else(|| broke("the hello is empty".into()))?;
    let hello: LinkHello = decode("hello", &body).map_err(|e| broke(e.to_string()))?;
    if hello.version != shared.hello.version {
        let text = format!(
            "expected version {}, got {}",
            shared.hello.version, hello.version
        );
        return Err(broke(text));
    }
    check_identity(connection, &hello.node)?;
    let Some(wake) = shared.known.get(&hello.node) else {
        return Err(NetError::UnknownPeer(hello.node));
    };
    frame::write(&mut send, encode(&shared.hello).into())
        .await
        .map_err(broke)?;
    let _ = send.finish();
    wake.heard(hello.generation);
    Ok(hello.node)
}

fn check_identity(connection: &Connection, node: &NodeName) -> Result<(), NetError> {
    let refuse = |reason: String| NetError::PeerCertificate {
        peer: node.to_string(),
        reason,
    };
    let identity = connection
        .peer_identity()
        .ok_or_else(|| refuse("there is none".into()))?;
    let chain = identity
        .downcast::<Vec<CertificateDer<'static>>>()
        .map_err(|_| refuse("it is of an unknown kind".into()))?;
    let first = chain
        .first()
        .ok_or_else(|| refuse("there is none".into()))?;
    tls::names(first, node).map_err(refuse)
}

async fn serve_stream(
    mut recv: RecvStream,
    from: &NodeName,
    shared: &Shared,
) -> Result<(), String> {
    let mut kind = [0];
    let first = tokio::time::timeout(FIRST_RECORD_WAIT, recv.read_exact(&mut kind)).await;
    first
        .map_err(|_| "a stream without a first byte")?
        .map_err(|e| e.to_string())?;
    match kind[0] {
        KIND_CONTROL => {
            // The connection's end shows here as an error of the stream; that is no fault of the protocol.
            while let Ok(Some(body)) = frame::read(&mut recv, CONTROL_FRAME_BYTES_MAX).await {
                let message = NetEvent::Message {
                    from: from.clone(),
                    body,
                };
                if shared.events.send(message).await.is_err() {
                    break;
                }
            }
            Ok(())
        }
        KIND_DATA => {
            let first = frame::read(&mut recv, FIRST_RECORD_BYTES_MAX);
            let body = tokio::time::timeout(FIRST_RECORD_WAIT, first).await;
            let Ok(Ok(Some(body))) = body else {
                return Ok(());
            };
            let record = decode("stream record", &body).map_err(|e| e.to_string())?;
            let stream = NetEvent::Stream {
                from: from.clone(),
                record,
                recv,
            };
            let _ = shared.events.send(stream).await;
            Ok(())
        }
        other => Err(format!("expected a stream of kind 0 or 1, got {other}")),
    }
}
