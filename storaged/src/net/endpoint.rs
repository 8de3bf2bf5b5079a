//! The endpoint: one UDP socket for dialling and accepting, and what comes in on accepted connections.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use minicbor::{Decode, Encode};
use quinn::{Connection, Endpoint, EndpointConfig, RecvStream, SendStream, TokioRuntime, VarInt};
use rustls::pki_types::CertificateDer;
use storaged_wire::peer::{CONTROL_FRAME_BYTES_MAX, StreamRecord};
use storaged_wire::{Generation, NodeName, decode, encode};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::address::PeerAddress;
use super::agreement::{Agreement, Difference, VersionRange};
use super::frame::ControlFrameError;
use super::link::Link;
use super::socket::{DATAGRAM_BYTES_MAX, SocketFactory};
use super::wake::Wake;
use super::{NetError, TlsIdentity, failure, frame, tls};

/// Keep-alives: a dead peer is seen after four missed ones, in 2.0 to 2.5 s.
const KEEP_ALIVE: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(2);
/// First records of connections and streams come within this time.
const FIRST_RECORD_WAIT: Duration = Duration::from_secs(5);
/// First records are small.
pub(super) const FIRST_RECORD_BYTES_MAX: usize = 4096;
/// Unread bytes that one stream may have in flight: bandwidth times delay of 100 Gbit/s over 0.3 ms, 4 MB. More of
/// them fall out of the cache between the socket and the reader, and cost a tenth more CPU (docs/operate/transport.md).
const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// The same for all streams of a connection.
const CONNECTION_WINDOW_BYTES: u32 = 64 << 20;
/// Streams that a peer may have open to us at once: 64 sessions of 4 edges.
const STREAMS_MAX: u32 = 256;
/// A peer that was refused reads why before the connection ends.
const REFUSED_WAIT: Duration = Duration::from_secs(1);
/// Of the protocol. What is new gets the next number, and both are spoken until no node speaks the old one only.
pub const LINK_VERSIONS: VersionRange = VersionRange { min: 5, max: 5 };

pub(super) const KIND_CONTROL: u8 = 0;
pub(super) const KIND_DATA: u8 = 1;

/// A configured peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: NodeName,
    /// Where it listens.
    pub address: PeerAddress,
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
    /// What they must have in common with this node.
    pub agreement: Agreement,
    /// Versions of the protocol to speak: [`LINK_VERSIONS`], but in tests.
    pub versions: VersionRange,
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
        version: u16,
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
    /// A peer that could be reached is not linked to, and will be tried again: one of the two must be changed.
    Refused { peer: NodeName, why: NetError },
    /// A connection did not come about or ended: somebody did what he may not, or it just ended.
    Failed(NetError),
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
    /// The lowest version; without it `version` is the only one.
    #[n(3)]
    pub version_min: Option<u16>,
    #[n(4)]
    pub agreement: Option<Agreement>,
}

impl LinkHello {
    fn versions(&self) -> VersionRange {
        VersionRange {
            min: self.version_min.unwrap_or(self.version),
            max: self.version,
        }
    }

    /// The version that both speak, if they speak one and are configured alike.
    pub fn agree(&self, there: &Self) -> Result<u16, NetError> {
        let (here, theirs) = (self.versions(), there.versions());
        let version = here.common(theirs).ok_or_else(|| NetError::Version {
            peer: there.node.clone(),
            here,
            there: theirs,
        })?;
        let differences = self.differences(there);
        match differences.is_empty() {
            true => Ok(version),
            false => Err(NetError::Disagreement {
                peer: there.node.clone(),
                differences,
            }),
        }
    }

    fn differences(&self, there: &Self) -> Vec<Difference> {
        let both = self.agreement.as_ref().zip(there.agreement.as_ref());
        both.map_or_else(Vec::new, |(here, there)| here.differences(there))
    }
}

/// The transport of one daemon.
pub struct Net {
    endpoint: Endpoint,
    shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub events: mpsc::Sender<NetEvent>,
    state: Mutex<EndpointState>,
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Net")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

/// What a reload may change.
struct EndpointState {
    hello: LinkHello,
    client: quinn::ClientConfig,
    known: BTreeMap<NodeName, Known>,
}

/// A configured peer.
#[derive(Clone)]
struct Known {
    link: Arc<Link>,
    /// Wakes our link to it.
    wake: Arc<Wake>,
    /// It is configured no more.
    gone: CancellationToken,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this node says first.
    pub fn hello(&self) -> LinkHello {
        self.state().hello.clone()
    }

    /// Who this node is to those that it dials.
    pub fn client(&self) -> quinn::ClientConfig {
        self.state().client.clone()
    }

    fn known(&self, peer: &NodeName) -> Option<Known> {
        self.state().known.get(peer).cloned()
    }
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
        let (server, client) = credentials(&config.identity)?;
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
        let endpoint = made.map_err(|source| NetError::Bind {
            address: config.listen,
            source,
        })?;
        let hello = LinkHello {
            version: config.versions.max,
            node: config.node,
            generation: config.generation,
            version_min: Some(config.versions.min),
            agreement: Some(config.agreement),
        };
        let state = EndpointState {
            hello,
            client,
            known: BTreeMap::new(),
        };
        let shared = Arc::new(Shared {
            events,
            state: Mutex::new(state),
        });
        let net = Arc::new(Self { endpoint, shared });
        net.link_to(config.peers);
        tokio::spawn(accept_all(net.endpoint.clone(), net.shared.clone()));
        Ok(net)
    }

    /// Takes another certificate for the connections that begin from now on.
    ///
    /// # Errors
    /// [`NetError`] if it is not this node's, or cannot be used; then nothing changes.
    pub fn set_identity(&self, identity: &TlsIdentity) -> Result<(), NetError> {
        identity.check_name(&self.shared.hello().node)?;
        let (server, client) = credentials(identity)?;
        self.endpoint.set_server_config(Some(server));
        self.shared.state().client = client;
        Ok(())
    }

    /// Takes another list of peers and what they must have in common with this node from now on: links to those that
    /// stay go on, also if their address is another one.
    pub fn set_peers(&self, peers: Vec<Peer>, agreement: Agreement) {
        let mut state = self.shared.state();
        state.hello.agreement = Some(agreement);
        let stays = |name: &NodeName| peers.iter().any(|peer| peer.name == *name);
        let gone: Vec<NodeName> = (state.known.keys())
            .filter(|name| !stays(name))
            .cloned()
            .collect();
        for name in gone {
            if let Some(known) = state.known.remove(&name) {
                known.gone.cancel();
            }
        }
        drop(state);
        self.link_to(peers);
    }

    /// Links to those that are new, and says where the others are now.
    fn link_to(&self, peers: Vec<Peer>) {
        for peer in peers {
            if let Some(known) = self.shared.known(&peer.name) {
                known.link.set_address(peer.address);
                continue;
            }
            let (wake, gone) = (Arc::<Wake>::default(), CancellationToken::new());
            let name = peer.name.clone();
            let link = Link::new(peer.address);
            let known = Known {
                link: link.link.clone(),
                wake: wake.clone(),
                gone: gone.clone(),
            };
            self.shared.state().known.insert(name.clone(), known);
            link.start(name, self.endpoint.clone(), self.shared.clone(), wake, gone);
        }
    }

    /// Queues a control message; it is lost if the link is down or its queue is full. One that no peer would take is not
    /// sent: the link would end by it, and again each time that it is said.
    pub fn send(&self, to: &NodeName, body: Bytes) {
        if body.len() > CONTROL_FRAME_BYTES_MAX {
            let (got, most) = (body.len(), CONTROL_FRAME_BYTES_MAX);
            tracing::error!(peer = %to, "a message of {got} bytes is not sent: at most {most} are taken");
            return;
        }
        if let Some(known) = self.shared.known(to) {
            known.link.send(body);
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
        let known = self.shared.known(to);
        let known = known.ok_or_else(|| NetError::UnknownPeer(to.clone()))?;
        let connection = known
            .link
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
            .map_err(|error| failed(error.to_string()))?;
        Ok(stream)
    }

    /// Connections that there are now, both ways.
    pub fn connections(&self) -> usize {
        self.endpoint.open_connections()
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

/// Who a node is to those that dial it, and to those that it dials.
fn credentials(
    identity: &TlsIdentity,
) -> Result<(quinn::ServerConfig, quinn::ClientConfig), NetError> {
    let transport = Arc::new(transport());
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(identity.server()?));
    server.transport_config(transport.clone());
    let mut client = quinn::ClientConfig::new(Arc::new(identity.client()?));
    client.transport_config(transport);
    Ok((server, client))
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
                Err(error) => Err(failure::of_connection(&address, &error)),
            };
            if let Err(error) = outcome {
                let _ = shared.events.send(failed(error)).await;
            }
        });
    }
}

/// Which event an error is.
pub(super) fn failed(error: NetError) -> NetEvent {
    let peer = match &error {
        NetError::Disagreement { peer, .. } | NetError::Version { peer, .. } => peer.clone(),
        _ => return NetEvent::Failed(error),
    };
    NetEvent::Refused { peer, why: error }
}

async fn serve(connection: Connection, shared: &Arc<Shared>) -> Result<(), NetError> {
    let address = connection.remote_address().to_string();
    let hello = tokio::time::timeout(FIRST_RECORD_WAIT, welcome(&connection, shared)).await;
    let (from, gone) = match hello {
        Ok(Ok(peer)) => peer,
        Ok(Err(error)) => {
            if matches!(failed_kind(&error), Answered::Yes) {
                // It reads our hello, finds the same and goes.
                let _ = tokio::time::timeout(REFUSED_WAIT, connection.closed()).await;
            }
            connection.close(VarInt::from_u32(1), b"refused");
            return Err(error);
        }
        Err(_) => {
            connection.close(VarInt::from_u32(1), b"no hello");
            let reason = "no hello in time".into();
            return Err(NetError::Lost {
                peer: address,
                reason,
            });
        }
    };
    loop {
        let stream = tokio::select! {
            biased;
            () = gone.cancelled() => break,
            stream = connection.accept_uni() => stream,
        };
        let Ok(stream) = stream else { return Ok(()) };
        let (shared, from, connection) = (shared.clone(), from.clone(), connection.clone());
        tokio::spawn(async move {
            if let Err(error) = serve_stream(stream, &from, &shared).await {
                let is_wrong = matches!(error, ControlFrameError::Wrong(_));
                let error = failure::of_stream(from.as_str(), &connection, error);
                let _ = shared.events.send(NetEvent::Failed(error)).await;
                if is_wrong {
                    connection.close(VarInt::from_u32(2), b"protocol");
                }
            }
        });
    }
    connection.close(VarInt::from_u32(1), b"not a peer any more");
    Ok(())
}

/// Whether the peer got our hello before it was refused.
enum Answered {
    Yes,
    No,
}

fn failed_kind(error: &NetError) -> Answered {
    match error {
        NetError::Disagreement { .. } | NetError::Version { .. } => Answered::Yes,
        _ => Answered::No,
    }
}

/// Takes the peer's hello, checks that its certificate is the node's it says it is, and answers.
async fn welcome(
    connection: &Connection,
    shared: &Shared,
) -> Result<(NodeName, CancellationToken), NetError> {
    let peer = connection.remote_address().to_string();
    let of_stream = |error| failure::of_stream(&peer, connection, error);
    let wrong = |reason: String| of_stream(ControlFrameError::Wrong(reason));
    let (mut send, mut recv) = connection
        .accept_bi()
        .await
        .map_err(|error| failure::of_connection(&peer, &error))?;
    let body = frame::read(&mut recv, FIRST_RECORD_BYTES_MAX)
        .await
        .map_err(of_stream)?;
    let body = body.ok_or_else(|| wrong("the hello is empty".into()))?;
    let hello: LinkHello = decode("hello", &body).map_err(|error| wrong(error.to_string()))?;
    check_identity(connection, &hello.node)?;
    let Some(known) = shared.known(&hello.node) else {
        return Err(NetError::UnknownPeer(hello.node));
    };
    let own = shared.hello();
    frame::write(&mut send, encode(&own).into())
        .await
        .map_err(of_stream)?;
    let _ = send.finish();
    own.agree(&hello)?;
    known.wake.heard(hello.generation);
    Ok((hello.node, known.gone))
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
    tls::names(first, node).map_err(|error| refuse(error.to_string()))
}

async fn serve_stream(
    mut recv: RecvStream,
    from: &NodeName,
    shared: &Shared,
) -> Result<(), ControlFrameError> {
    let mut kind = [0];
    let first = tokio::time::timeout(FIRST_RECORD_WAIT, recv.read_exact(&mut kind)).await;
    let late = |_| ControlFrameError::Lost("no first byte of a stream in time".into());
    first.map_err(late)??;
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
            let record = decode("stream record", &body);
            let record = record.map_err(|error| ControlFrameError::Wrong(error.to_string()))?;
            let stream = NetEvent::Stream {
                from: from.clone(),
                record,
                recv,
            };
            let _ = shared.events.send(stream).await;
            Ok(())
        }
        other => Err(ControlFrameError::Wrong(format!(
            "expected a stream of kind 0 or 1, got {other}"
        ))),
    }
}
