//! The endpoints: a UDP socket for links, those for trunks, and what comes in on accepted connections.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use quinn::{Endpoint, EndpointConfig, Incoming, RecvStream, TokioRuntime, VarInt};
use storaged_wire::peer::{CONTROL_FRAME_BYTES_MAX, StreamRecord};
use storaged_wire::{Generation, NodeName, encode};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::address::PeerAddress;
use super::agreement::{Agreement, Difference, VersionRange};
use super::dial::Purpose;
use super::hello::{LinkHello, welcome};
use super::link::{Link, Offer};
use super::node_naming::NodeNaming;
use super::pace::MessageRoom;
use super::pulse::{BEAT, Proximity, Side};
use super::rails::{Interface, RailHint};
use super::requests::PeerAnswer;
use super::revoked::Revoked;
use super::socket::{DATAGRAM_BYTES_MAX, SocketFactory};
use super::streams::{FIRST_RECORD_WAIT, KIND_DATA};
use super::trunks::{
    Chosen, DataStream, DialledTrunk, SocketKind, TrunkAddress, TrunkSocket, UseCount,
};
use super::{NetError, TlsIdentity, failure, frame, tls, transport};

/// A handshake takes no longer.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(5);
/// First records are small.
pub(super) const FIRST_RECORD_BYTES_MAX: usize = 4096;
/// A peer that was refused reads why before the connection ends.
const REFUSED_WAIT: Duration = Duration::from_secs(1);
/// Of the protocol. What is new gets the next number, and both are spoken until no node speaks the old one only.
pub const LINK_VERSIONS: VersionRange = VersionRange { min: 8, max: 10 };
/// The first version in which a node says on a link that is up what it should have in common with its peer, when that has changed.
pub(super) const AGREEMENT_SAID_AGAIN: u16 = 9;

/// A peer to link to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its name: of its place, where machines may change.
    pub name: NodeName,
    /// The name in its certificate: of the machine that fills the place now.
    pub node: NodeName,
    /// Where it listens.
    pub address: PeerAddress,
}

impl Peer {
    /// One whose place is called as its machine is.
    pub fn named(name: NodeName, address: impl Into<PeerAddress>) -> Self {
        Self {
            node: name.clone(),
            name,
            address: address.into(),
        }
    }
}

/// How to start.
#[derive(Debug)]
pub struct NetConfig {
    /// What peers call this node: the name of its place.
    pub place: NodeName,
    /// The name in its certificate.
    pub node: NodeName,
    /// This incarnation.
    pub generation: Generation,
    /// Where to listen.
    pub listen: SocketAddr,
    /// Where to take trunks beside that (`trunks`), fewer than [`SOCKETS_MAX`](super::SOCKETS_MAX).
    pub trunks: Vec<SocketAddr>,
    /// Who we are.
    pub identity: TlsIdentity,
    /// Whom to link to.
    pub peers: Vec<Peer>,
    /// Those of them whose silence is noticed soonest.
    pub near: BTreeSet<NodeName>,
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
    /// The link to a peer is up.
    Up {
        peer: NodeName,
        generation: Generation,
        version: u16,
    },
    /// A peer that is linked to says what it should have in common with this node: that has changed there.
    AgreementSaid { peer: NodeName },
    /// The link to a peer is down.
    Down {
        peer: NodeName,
        reason: String,
        /// For how long nothing had come, where that is the reason.
        silent: Option<Duration>,
    },
    /// A control message.
    Message {
        from: NodeName,
        body: Vec<u8>,
        /// Kept until it is heard: without room its sender's next ones are not taken.
        room: MessageRoom,
    },
    /// A data stream.
    Stream {
        from: NodeName,
        record: StreamRecord,
        recv: RecvStream,
    },
    /// A request, and where its answer goes.
    Request {
        from: NodeName,
        body: Vec<u8>,
        answer: PeerAnswer,
    },
    /// A peer that could be reached is not linked to, and will be tried again: one of the two must be changed.
    Refused { peer: NodeName, why: NetError },
    /// A connection did not come about or ended: somebody did what he may not, or it just ended.
    Failed(NetError),
}

/// The transport of one daemon.
pub struct Net {
    /// Of links.
    endpoint: Endpoint,
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub events: mpsc::Sender<NetEvent>,
    /// What peers must and should have in common with this node.
    pub agreement: watch::Sender<Agreement>,
    /// What connections that are up may not go on with.
    revoked: watch::Sender<Arc<Revoked>>,
    /// Those of trunks.
    trunk_sockets: Vec<TrunkSocket>,
    /// Trunks that were dialled came about: a stream that needs one waits for it. Where the ports are closed, one wait tells.
    pub trunks_come_about: AtomicBool,
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
    trunk_client: quinn::ClientConfig,
    naming: NodeNaming,
    known: BTreeMap<NodeName, Known>,
    /// Links to those that were configured and may not have ended yet.
    ending: BTreeMap<NodeName, CancellationToken>,
}

/// A configured peer.
#[derive(Clone)]
pub(super) struct Known {
    pub name: NodeName,
    /// The name in its certificate.
    pub node: NodeName,
    pub link: Arc<Link>,
    /// It is configured no more.
    pub gone: CancellationToken,
    /// Its link has ended, and that was told.
    pub ended: CancellationToken,
}

impl Known {
    /// The connection of its link, on which something is sent.
    pub async fn connection(&self) -> Result<quinn::Connection, NetError> {
        let connection = self.link.connection().await;
        let connection = connection.ok_or_else(|| NetError::Down(self.name.clone()))?;
        self.link.note_word();
        Ok(connection)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, EndpointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this node says first.
    pub fn hello(&self) -> LinkHello {
        let hello = self.state().hello.clone();
        let agreement = Some(self.agreement.borrow().clone());
        LinkHello { agreement, ..hello }
    }

    /// Who this node is to those that it dials.
    pub fn client(&self, purpose: Purpose) -> quinn::ClientConfig {
        let state = self.state();
        match purpose {
            Purpose::Link => state.client.clone(),
            Purpose::Trunk(_) => state.trunk_client.clone(),
        }
    }

    /// The sockets of trunks, in the order of their numbers.
    pub fn trunk_sockets(&self) -> &[TrunkSocket] {
        &self.trunk_sockets
    }

    /// How certificates name nodes.
    pub fn naming(&self) -> NodeNaming {
        self.state().naming.clone()
    }

    /// Whether the certificate that the other end has shown is revoked.
    pub fn is_revoked(&self, connection: &quinn::Connection) -> bool {
        let revoked = self.revoked.borrow().clone();
        let shown = tls::shown(connection).unwrap_or_default();
        shown.iter().any(|one| revoked.contains(one))
    }

    /// Ends once the certificate that the other end has shown is revoked.
    pub async fn until_revoked(&self, connection: &quinn::Connection) {
        let shown = tls::shown(connection).unwrap_or_default();
        let mut revoked = self.revoked.subscribe();
        let is_among = |revoked: &Revoked| shown.iter().any(|one| revoked.contains(one));
        if revoked.wait_for(|now| is_among(now)).await.is_err() {
            // The endpoint is gone, and its connections with it.
            std::future::pending::<()>().await;
        }
    }

    pub fn known(&self, peer: &NodeName) -> Option<Known> {
        self.state().known.get(peer).cloned()
    }

    /// A configured peer to which something is sent.
    pub fn peer(&self, name: &NodeName) -> Result<Known, NetError> {
        let known = self.known(name);
        known.ok_or_else(|| NetError::UnknownPeer(name.clone()))
    }

    /// Peers that are linked to and answer requests.
    pub fn answering(&self) -> Vec<NodeName> {
        let state = self.state();
        let known = state.known.values();
        let answering = known.filter(|known| known.link.answers());
        answering.map(|known| known.name.clone()).collect()
    }

    fn links(&self) -> Vec<Arc<Link>> {
        let state = self.state();
        state
            .known
            .values()
            .map(|known| known.link.clone())
            .collect()
    }
}

impl NetConfig {
    /// A socket, for links the one of number 0.
    async fn bind(
        &self,
        address: SocketAddr,
        server: quinn::ServerConfig,
        number: u8,
    ) -> Result<Endpoint, NetError> {
        let failed = |source| NetError::Bind { address, source };
        let socket = self.sockets.bind(address).await.map_err(failed)?;
        let mut config = EndpointConfig::default();
        // Random choices of one socket are not those of the next.
        let seed = self.seed.map(|mut seed| {
            seed[0] ^= number;
            seed
        });
        config.rng_seed(seed);
        // Peers' path discovery goes no higher than what we say we take.
        let sized = config.max_udp_payload_size(DATAGRAM_BYTES_MAX);
        sized.map_err(|error| failed(std::io::Error::other(error)))?;
        let runtime = Arc::new(TokioRuntime);
        Endpoint::new_with_abstract_socket(config, Some(server), socket, runtime).map_err(failed)
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
        let (links, trunks) = transport::both_sides(&config.identity, config.trunks.len())?;
        let endpoint = config.bind(config.listen, links.server, 0).await?;
        let mut trunk_sockets = Vec::new();
        for (number, address) in (1_u8..).zip(&config.trunks) {
            match config.bind(*address, trunks.server.clone(), number).await {
                Ok(endpoint) => trunk_sockets.push(TrunkSocket {
                    number,
                    endpoint,
                    interface: Interface::of(*address, config.listen),
                }),
                // A card that is broken costs speed, not the node.
                Err(error) => {
                    let error = crate::driver::chain(&error);
                    tracing::warn!(
                        "a socket of network.sockets or network.rails is left out until the daemon is started again: {error}"
                    );
                }
            }
        }
        let taken_at = taken_at(&endpoint, &trunk_sockets)?;
        let hello = LinkHello {
            version: config.versions.max,
            place: config.place,
            node: Some(config.node),
            generation: config.generation,
            version_min: Some(config.versions.min),
            agreement: None,
            trunks: Some(taken_at).filter(|some| !some.is_empty()),
            trunk: None,
            proximity: None,
        };
        let state = EndpointState {
            hello,
            client: links.client,
            trunk_client: trunks.client,
            naming: config.identity.naming(),
            known: BTreeMap::new(),
            ending: BTreeMap::new(),
        };
        let shared = Arc::new(Shared {
            events,
            agreement: watch::Sender::new(config.agreement),
            revoked: watch::Sender::new(config.identity.revoked()),
            trunk_sockets,
            trunks_come_about: AtomicBool::new(true),
            state: Mutex::new(state),
        });
        let net = Arc::new(Self { endpoint, shared });
        net.link_to(config.peers, &config.near);
        let links = (&net.endpoint, SocketKind::Links);
        let trunks = net.shared.trunk_sockets.iter();
        let trunks = trunks.map(|it| (&it.endpoint, SocketKind::Trunks(it.number)));
        for (endpoint, kind) in std::iter::once(links).chain(trunks) {
            tokio::spawn(accept_all(endpoint.clone(), kind, net.shared.clone()));
        }
        tokio::spawn(beat_all(net.shared.clone(), config.sockets));
        Ok(net)
    }

    /// Takes another certificate for the connections that begin from now on, and ends those of certificates that are revoked.
    ///
    /// # Errors
    /// [`NetError`] if it is not this node's, or cannot be used; then nothing changes.
    pub fn set_identity(&self, identity: &TlsIdentity) -> Result<(), NetError> {
        identity.check_name(self.shared.hello().machine())?;
        let (links, trunks) = transport::both_sides(identity, self.shared.trunk_sockets.len())?;
        self.endpoint.set_server_config(Some(links.server));
        for socket in &self.shared.trunk_sockets {
            let server = Some(trunks.server.clone());
            socket.endpoint.set_server_config(server);
        }
        let mut state = self.shared.state();
        (state.client, state.trunk_client) = (links.client, trunks.client);
        state.naming = identity.naming();
        drop(state);
        self.shared.revoked.send_replace(identity.revoked());
        Ok(())
    }

    /// Takes what peers must have in common with this node from now on; links that are up stay, and it is said on them.
    pub fn set_agreement(&self, agreement: Agreement) {
        self.shared.agreement.send_replace(agreement);
    }

    /// What this node and a peer that is linked to should have in common and have not; none while it is not linked to, when nobody knows.
    pub fn advice(&self, peer: &NodeName) -> Option<Vec<Difference>> {
        let theirs = self.shared.known(peer)?.link.theirs()?;
        Some(self.shared.agreement.borrow().advice(&theirs))
    }

    /// Takes another list of peers and what they must have in common with this node from now on: links to those that
    /// stay go on, also if their address is another one.
    pub fn set_peers(&self, peers: Vec<Peer>, near: &BTreeSet<NodeName>, agreement: Agreement) {
        self.set_agreement(agreement);
        let mut state = self.shared.state();
        // Another machine in a place is another peer: the link to the one before it ends.
        let stays = |known: &Known| {
            let is_same = |peer: &Peer| peer.name == known.name && peer.node == known.node;
            peers.iter().any(is_same)
        };
        let gone: Vec<NodeName> = (state.known.values())
            .filter(|known| !stays(known))
            .map(|known| known.name.clone())
            .collect();
        state.ending.retain(|_, ended| !ended.is_cancelled());
        for name in gone {
            if let Some(known) = state.known.remove(&name) {
                known.gone.cancel();
                state.ending.insert(name, known.ended);
            }
        }
        drop(state);
        self.link_to(peers, near);
    }

    /// As if the link to a peer that was configured before had not ended yet.
    #[cfg(test)]
    pub(super) fn ends_late(&self, peer: NodeName) -> CancellationToken {
        let ended = CancellationToken::new();
        self.shared.state().ending.insert(peer, ended.clone());
        ended
    }

    /// Links to those that are new, and says where the others are now.
    fn link_to(&self, peers: Vec<Peer>, near: &BTreeSet<NodeName>) {
        for peer in peers {
            let proximity = if near.contains(&peer.name) {
                Proximity::Near
            } else {
                Proximity::Far
            };
            if let Some(known) = self.shared.known(&peer.name) {
                known.link.set(peer.address, proximity);
                continue;
            }
            let link = Link::new(peer.address, proximity);
            let known = Known {
                name: peer.name.clone(),
                node: peer.node,
                link: link.link.clone(),
                gone: CancellationToken::new(),
                ended: CancellationToken::new(),
            };
            let mut state = self.shared.state();
            let last = state.ending.remove(&peer.name);
            let before = state.known.insert(peer.name, known.clone());
            drop(state);
            debug_assert!(before.is_none(), "one link per peer");
            link.start(known, last, self.endpoint.clone(), self.shared.clone());
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

    /// Opens a data stream; `hint` says over which interface where several are equally free.
    ///
    /// # Errors
    /// [`NetError`] if the peer is unknown, down or takes no more streams.
    pub async fn open_stream(
        &self,
        to: &NodeName,
        record: &StreamRecord,
        hint: RailHint,
    ) -> Result<DataStream, NetError> {
        let known = self.shared.peer(to)?;
        let connection = known.connection().await?;
        let failed = |reason: String| NetError::failed(to, reason);
        let chosen = match known.link.trunks() {
            Some(trunks) => trunks.choose(connection, hint, &self.shared).await,
            None => Chosen::link(connection, UseCount::default()),
        };
        let opening = chosen.connection.open_uni();
        let opened = tokio::time::timeout(FIRST_RECORD_WAIT, opening).await;
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
        Ok(DataStream::new(stream, chosen))
    }

    /// Connections that there are now, both ways, trunks not among them.
    pub fn connections(&self) -> usize {
        self.endpoint.open_connections()
    }

    /// Trunks that there are now, both ways.
    pub fn trunks(&self) -> usize {
        let sockets = self.shared.trunk_sockets.iter();
        sockets.map(|it| it.endpoint.open_connections()).sum()
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
        let trunks = self.shared.trunk_sockets.iter();
        let all = trunks.map(|it| &it.endpoint).chain([&self.endpoint]);
        for endpoint in all.clone() {
            endpoint.close(VarInt::from_u32(0), b"stopping");
        }
        let all_idle = async {
            for endpoint in all {
                endpoint.wait_idle().await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_millis(500), all_idle).await;
    }
}

/// Where trunks are taken, as peers are told.
fn taken_at(links: &Endpoint, trunks: &[TrunkSocket]) -> Result<Vec<TrunkAddress>, NetError> {
    let address = |endpoint: &Endpoint| {
        let unspecified = SocketAddr::from(([0, 0, 0, 0], 0));
        endpoint.local_addr().map_err(|source| NetError::Bind {
            address: unspecified,
            source,
        })
    };
    let beside = address(links)?;
    let taken_at = |socket: &TrunkSocket| {
        let bound = address(&socket.endpoint)?;
        Ok(TrunkAddress::of(socket.number, bound, beside))
    };
    trunks.iter().map(taken_at).collect()
}

async fn accept_all(endpoint: Endpoint, kind: SocketKind, shared: Arc<Shared>) {
    while let Some(incoming) = endpoint.accept().await {
        let shared = shared.clone();
        tokio::spawn(async move {
            if let Err(error) = accept(incoming, kind, &shared).await {
                let _ = shared.events.send(failed(error)).await;
            }
        });
    }
}

/// One beat of all links after the other (`pulse`), as long as somebody wants to hear of them. A process that was paused
/// does not make up for those it missed: it has missed what its peers said too, and they are not to blame.
async fn beat_all(shared: Arc<Shared>, sockets: Arc<dyn SocketFactory>) {
    while !shared.events.is_closed() {
        tokio::time::sleep(sockets.until_beat(BEAT)).await;
        for link in shared.links() {
            link.beat();
        }
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

/// Takes a connection to the end of its hellos; then it is the link's.
async fn accept(
    incoming: Incoming,
    kind: SocketKind,
    shared: &Arc<Shared>,
) -> Result<(), NetError> {
    let address = incoming.remote_address().to_string();
    let lost = |reason: &str| NetError::Lost {
        peer: address.clone(),
        reason: reason.into(),
    };
    let connected = tokio::time::timeout(HANDSHAKE_WAIT, incoming).await;
    let connected = connected.map_err(|_| lost("no end of the handshake in time"))?;
    let connection = connected.map_err(|error| failure::of_connection(&address, &error))?;
    let hello = welcome(&connection, shared, kind);
    let hello = tokio::time::timeout(FIRST_RECORD_WAIT, hello).await;
    match hello {
        Ok(Ok((known, agreed, Purpose::Trunk(number)))) => {
            let trunk = DialledTrunk {
                connection,
                number,
                generation: agreed.generation,
            };
            trunk.serve(known, shared.clone()).await
        }
        Ok(Ok((known, agreed, Purpose::Link))) => {
            let offer = Offer {
                connection,
                agreed,
                side: Side::Accepted,
            };
            known.link.offer(offer).await;
            Ok(())
        }
        Ok(Err(error)) => {
            if matches!(failed_kind(&error), Answered::Yes) {
                // It reads our hello, finds the same and goes.
                let _ = tokio::time::timeout(REFUSED_WAIT, connection.closed()).await;
            }
            connection.close(VarInt::from_u32(1), b"refused");
            Err(error)
        }
        Err(_) => {
            connection.close(VarInt::from_u32(1), b"no hello");
            Err(lost("no hello in time"))
        }
    }
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
