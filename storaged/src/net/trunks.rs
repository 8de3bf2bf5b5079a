//! Trunks: further connections to a peer, for data streams alone, each from a socket of this node's to one of the peer's
//! (the name is NFS's for several connections of one session). What one connection carries is sealed by one task and opened
//! by another, some 2 GB/s: a card of 400 Gbit/s needs a dozen. Hellos, control messages and the beat stay on the link, so
//! that a node without trunks is a peer like any other, and a trunk that does not come about costs nothing but speed.
//!
//! Whoever opens a stream dials the trunk, and closes it when nothing has needed it for a while: of a thousand peers most
//! never send each other data. Trunks of a link end with it. `trunk` is one of them, and whether it is trusted.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use minicbor::{Decode, Encode};
use quinn::{Connection, Endpoint, SendStream};
use storaged_wire::Generation;
use thiserror::Error;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::dial::{Dialling, Purpose};
use super::endpoint::{Known, Shared};
use super::pulse::Proximity;
use super::rails::{Interface, RailHint};
use super::trunk::{Dial, Doubt, Far, Trunk, TrunkState, Use, close};
use super::{NetError, streams};

/// Sockets of a node, the first one among them.
pub const SOCKETS_MAX: usize = 16;
/// A stream waits so long for a trunk that was never in doubt; then the link has to do, and nobody waits for that one any more.
const DIAL_WORTH: Duration = Duration::from_millis(200);

/// Where a node takes trunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub(super) struct TrunkAddress {
    /// None: where the node itself is reached.
    #[n(0)]
    ip: Option<IpAddr>,
    #[n(1)]
    port: u16,
    /// From 1 on; sockets that could not be bound are left out.
    #[n(2)]
    number: u8,
}

/// A socket for trunks.
pub(super) struct TrunkSocket {
    pub number: u8,
    pub endpoint: Endpoint,
    pub interface: Interface,
}

impl TrunkAddress {
    /// Of a socket beside the one at which the node itself is reached.
    pub fn of(number: u8, socket: SocketAddr, beside: SocketAddr) -> Self {
        let ip = match Interface::of(socket, beside) {
            Interface::OfLinks => None,
            Interface::Rail(ip) => Some(ip),
        };
        Self {
            ip,
            port: socket.port(),
            number,
        }
    }

    pub fn seen_from(self, link: &Connection) -> SocketAddr {
        let ip = self.ip.unwrap_or_else(|| link.remote_address().ip());
        SocketAddr::new(ip, self.port)
    }
}

/// Which of a node's sockets a connection comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SocketKind {
    /// The one at which the node is reached.
    Links,
    /// One beside it, by its number: its connections have smaller windows, and a peer has one of them.
    Trunks(u8),
}

/// A connection that comes to a socket which is not for it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum WrongSocket {
    #[error("trunks are not taken at this address")]
    TrunkAtLinks,
    #[error("only trunks are taken at this address: see peers.address")]
    LinkAtTrunks,
    #[error("expected the trunk of number {here}, which this socket has, got {got}")]
    Number { here: u8, got: u8 },
}

impl SocketKind {
    /// What a connection is for whose hello says that.
    ///
    /// # Errors
    /// [`WrongSocket`] if it does not belong here.
    pub fn purpose(self, trunk: Option<u8>) -> Result<Purpose, WrongSocket> {
        match (self, trunk) {
            (Self::Links, None) => Ok(Purpose::Link),
            (Self::Trunks(here), Some(got)) if here == got => Ok(Purpose::Trunk(got)),
            (Self::Trunks(here), Some(got)) => Err(WrongSocket::Number { here, got }),
            (Self::Links, Some(_)) => Err(WrongSocket::TrunkAtLinks),
            (Self::Trunks(_), None) => Err(WrongSocket::LinkAtTrunks),
        }
    }
}

/// A trunk that a peer has dialled.
pub(super) struct DialledTrunk {
    pub connection: Connection,
    pub number: u8,
    pub generation: Generation,
}

impl DialledTrunk {
    /// Serves it until it ends, or the link does.
    ///
    /// # Errors
    /// [`NetError::Lost`] if there is no link of the same incarnation beside it.
    pub async fn serve(self, known: Known, shared: Arc<Shared>) -> Result<(), NetError> {
        // The dialler's end of the link may have come up before this one.
        let link = known.link.connection().await;
        let ended = link.and_then(|_| known.link.take_trunk(self.number, self.generation));
        let Some(ended) = ended else {
            close(&self.connection);
            return Err(NetError::Lost {
                peer: known.name.to_string(),
                reason: "it has dialled a trunk of a link that is not up".into(),
            });
        };
        let from = streams::Speaker::new(known.name, known.link.pace());
        streams::serve(self.connection, from, shared, ended).await;
        Ok(())
    }
}

impl fmt::Display for TrunkAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ip {
            Some(ip) => SocketAddr::new(ip, self.port).fmt(f),
            None => write!(f, "port {} of its link's address", self.port),
        }
    }
}

/// A stream that data goes on; as long as there is one, its connection is in use.
pub struct DataStream {
    /// The stream.
    pub stream: SendStream,
    _users: UseCount,
    trunk: Option<Arc<Trunk>>,
}

impl DataStream {
    pub(super) fn new(stream: SendStream, chosen: Chosen) -> Self {
        Self {
            stream,
            _users: chosen.users,
            trunk: chosen.trunk,
        }
    }

    /// The peer has everything: its trunk is a good one.
    pub fn has_arrived(&self) {
        if let Some(trunk) = &self.trunk {
            trunk.prove();
        }
    }

    /// It was given up: whoever tries again had better take another connection.
    pub fn has_failed(&self) {
        if let Some(trunk) = &self.trunk {
            trunk.doubt(&Doubt::Stream);
        }
    }
}

/// A connection for the next stream.
pub(super) struct Chosen {
    pub connection: Connection,
    users: UseCount,
    trunk: Option<Arc<Trunk>>,
}

impl Chosen {
    /// The link's.
    pub fn link(connection: Connection, users: UseCount) -> Self {
        Self {
            connection,
            users,
            trunk: None,
        }
    }
}

/// One holder for each stream of a connection, and one for the connection.
pub(super) type UseCount = Arc<()>;

/// A connection that a stream may go on: a trunk, or the link.
struct Way<'a> {
    trunk: Option<&'a Arc<Trunk>>,
    users: &'a UseCount,
    interface: Interface,
    streams: usize,
}

impl<'a> Way<'a> {
    fn new(trunk: Option<&'a Arc<Trunk>>, users: &'a UseCount, interface: Interface) -> Self {
        Self {
            trunk,
            users,
            interface,
            streams: Arc::strong_count(users) - 1,
        }
    }
}

/// The trunks that this node has to a peer while the link to it is up.
pub(super) struct Trunks {
    far: Arc<Far>,
    link_users: UseCount,
    /// Held while a connection is chosen and counted.
    choosing: Mutex<()>,
    trunks: Vec<Arc<Trunk>>,
    ended: CancellationToken,
}

impl Trunks {
    /// To a peer that takes trunks there: one for each socket that both have.
    pub fn new(far: Far, sockets: &[TrunkSocket], taken_at: &[TrunkAddress]) -> Self {
        let far = Arc::new(far);
        let trunk = |socket: &TrunkSocket| {
            let there = taken_at.iter().find(|it| it.number == socket.number)?;
            Some(Arc::new(Trunk::new(far.clone(), socket, *there)))
        };
        let trunks: Vec<_> = sockets.iter().filter_map(trunk).collect();
        Self {
            far,
            link_users: UseCount::default(),
            choosing: Mutex::default(),
            trunks,
            ended: CancellationToken::new(),
        }
    }

    /// The connection for the next stream: the one with the fewest, of several such ones by the hint. A trunk is dialled if there is none yet.
    pub async fn choose(&self, link: Connection, hint: RailHint, shared: &Arc<Shared>) -> Chosen {
        let (trunk, users) = self.least_used(hint);
        if let Some(trunk) = trunk
            && let Some(connection) = self.connection(trunk, &link, shared).await
        {
            return Chosen {
                connection,
                users,
                trunk: Some(trunk.clone()),
            };
        }
        Chosen::link(link, self.link_users.clone())
    }

    /// The trunk with the fewest users, none where that is the link. The choice counts at once, so that streams which open together go apart.
    fn least_used(&self, hint: RailHint) -> (Option<&Arc<Trunk>>, UseCount) {
        let _one_at_a_time = self.choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let ways = self.ways();
        let on_interface = |interface: Interface| -> usize {
            let there = ways.iter().filter(|way| way.interface == interface);
            there.map(|way| way.streams).sum()
        };
        let load = |way: &Way<'_>| (way.streams, on_interface(way.interface));
        let least = ways.iter().map(load).min();
        // Of each interface the first: another socket of the same one costs CPU and may cost a dial.
        let mut equal: Vec<&Way<'_>> = Vec::new();
        for way in ways.iter().filter(|way| Some(load(way)) == least) {
            if equal.iter().all(|it| it.interface != way.interface) {
                equal.push(way);
            }
        }
        match equal.get(hint.among(equal.len())) {
            Some(way) => (way.trunk, way.users.clone()),
            None => (None, self.link_users.clone()),
        }
    }

    /// The link, and then the trunks that are trusted.
    fn ways(&self) -> Vec<Way<'_>> {
        let link = Way::new(None, &self.link_users, Interface::OfLinks);
        let trusted = self.trunks.iter().filter(|trunk| trunk.is_trusted());
        let trusted = trusted.map(|trunk| Way::new(Some(trunk), &trunk.users, trunk.interface));
        std::iter::once(link).chain(trusted).collect()
    }

    /// A trunk's connection, if it has one now or very soon.
    async fn connection(
        &self,
        trunk: &Arc<Trunk>,
        link: &Connection,
        shared: &Arc<Shared>,
    ) -> Option<Connection> {
        let mut state = trunk.state.subscribe();
        match trunk.begin_use() {
            Use::Now(connection) => return Some(connection),
            Use::Dial => self.dial(trunk, link, shared),
            Use::Wait => {}
        }
        if !shared.trunks_come_about.load(Ordering::Relaxed) {
            return None;
        }
        let settled = state.wait_for(|now| !matches!(now, TrunkState::Dialling(Dial::Awaited)));
        let Ok(settled) = tokio::time::timeout(DIAL_WORTH, settled).await else {
            // Were each stream to wait, a session that opens many would be late by all of it.
            trunk.wait_no_more();
            shared.trunks_come_about.store(false, Ordering::Relaxed);
            return None;
        };
        settled.ok()?.connection().cloned()
    }

    fn dial(&self, trunk: &Arc<Trunk>, link: &Connection, shared: &Arc<Shared>) {
        let dialling = Dialling {
            endpoint: trunk.endpoint.clone(),
            peer: self.far.peer.clone(),
            node: self.far.node.clone(),
            address: trunk.address.seen_from(link).into(),
            shared: shared.clone(),
            unneeded: self.ended.clone(),
            purpose: Purpose::Trunk(trunk.number),
            // Whether the peer is there, its link says.
            proximity: Proximity::Far,
        };
        tokio::spawn(trunk.clone().keep(dialling));
    }

    /// Closes what nobody has used for a while.
    pub fn rest(&self, now: Instant) {
        for trunk in &self.trunks {
            trunk.rest(now);
        }
    }
}

#[cfg(test)]
impl Trunks {
    pub fn streams_on(&self, interface: Interface) -> usize {
        let ways = self.ways().into_iter();
        let there = ways.filter(|way| way.interface == interface);
        there.map(|way| way.streams).sum()
    }

    pub fn none_is_trusted(&self) -> bool {
        !self.trunks.iter().any(|trunk| trunk.is_trusted())
    }

    pub fn first(&self) -> &Trunk {
        &self.trunks[0]
    }
}

impl Drop for Trunks {
    /// The link has gone down.
    fn drop(&mut self) {
        self.ended.cancel();
        for trunk in &self.trunks {
            trunk.close();
        }
    }
}
