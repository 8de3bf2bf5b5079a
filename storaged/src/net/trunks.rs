//! Trunks: further connections to a peer, for data streams alone, each from a socket of this node's to one of the peer's
//! (the name is NFS's for several connections of one session). What one connection carries is sealed by one task and opened
//! by another, some 2 GB/s: a card of 400 Gbit/s needs a dozen. Hellos, control messages and the beat stay on the link, so
//! that a node without trunks is a peer like any other, and a trunk that does not come about costs nothing but speed.
//!
//! Whoever opens a stream dials the trunk, and closes it when nothing has needed it for a while: of a thousand peers most
//! never send each other data. Trunks of a link end with it.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use minicbor::{Decode, Encode};
use quinn::{Connection, Endpoint, SendStream, VarInt};
use storaged_wire::{Generation, NodeName};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::dial::{self, Dialling, Purpose};
use super::endpoint::{Known, Shared};
use super::{NetError, streams};

/// Sockets of a node, the first one among them.
pub const SOCKETS_MAX: usize = 16;
/// A stream waits so long for a trunk that was never tried; then the link has to do.
const DIAL_WORTH: Duration = Duration::from_millis(500);
/// One that could not be dialled is tried again so much later.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// One that nobody has used for so long is closed.
const UNUSED_MAX: Duration = Duration::from_secs(10);

/// Where a node takes trunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub(super) struct TrunkAddress {
    /// None: where the node itself is reached.
    #[n(0)]
    ip: Option<IpAddr>,
    #[n(1)]
    port: u16,
}

impl TrunkAddress {
    /// Of a socket beside the one at which the node itself is reached.
    pub fn of(socket: SocketAddr, beside: SocketAddr) -> Self {
        let is_there = socket.ip() == beside.ip() || socket.ip().is_unspecified();
        Self {
            ip: (!is_there).then_some(socket.ip()),
            port: socket.port(),
        }
    }

    fn seen_from(self, link: &Connection) -> SocketAddr {
        let ip = self.ip.unwrap_or_else(|| link.remote_address().ip());
        SocketAddr::new(ip, self.port)
    }
}

/// Which of a node's sockets a connection comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SocketKind {
    /// The one at which the node is reached.
    Links,
    /// One beside it, whose connections have smaller windows.
    Trunks,
}

/// A connection that comes to a socket which is not for it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum WrongSocket {
    #[error("trunks are not taken at this address")]
    TrunkAtLinks,
    #[error("only trunks are taken at this address: see peers.address")]
    LinkAtTrunks,
    #[error("expected a trunk's number below {SOCKETS_MAX}, got {0}")]
    Number(u8),
}

impl SocketKind {
    /// What a connection is for whose hello says that.
    ///
    /// # Errors
    /// [`WrongSocket`] if it does not belong here.
    pub fn purpose(self, trunk: Option<u8>) -> Result<Purpose, WrongSocket> {
        match (self, trunk) {
            (Self::Links, None) => Ok(Purpose::Link),
            (Self::Trunks, Some(number)) if usize::from(number) < SOCKETS_MAX => {
                Ok(Purpose::Trunk(number))
            }
            (Self::Trunks, Some(number)) => Err(WrongSocket::Number(number)),
            (Self::Links, Some(_)) => Err(WrongSocket::TrunkAtLinks),
            (Self::Trunks, None) => Err(WrongSocket::LinkAtTrunks),
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
        streams::serve(self.connection, known.name, shared, ended).await;
        Ok(())
    }
}

/// A stream that data goes on; as long as there is one, its connection is in use.
#[derive(Debug)]
pub struct DataStream {
    /// The stream.
    pub stream: SendStream,
    _users: UseCount,
}

impl DataStream {
    pub(super) fn new(stream: SendStream, users: UseCount) -> Self {
        Self {
            stream,
            _users: users,
        }
    }
}

/// One holder for each stream of a connection, and one for the connection.
pub(super) type UseCount = Arc<()>;

/// Whom this node dials.
#[derive(Clone)]
pub(super) struct Far {
    pub peer: NodeName,
    /// The name in its certificate.
    pub node: NodeName,
    /// A trunk of another incarnation is no trunk of this link.
    pub generation: Generation,
}

/// The trunks that this node has to a peer while the link to it is up.
pub(super) struct Trunks {
    far: Far,
    /// The link's users, and those of every trunk.
    users: Mutex<Vec<UseCount>>,
    trunks: Vec<Arc<Trunk>>,
    ended: CancellationToken,
}

struct Trunk {
    number: u8,
    endpoint: Endpoint,
    address: TrunkAddress,
    state: watch::Sender<TrunkState>,
}

#[derive(Debug, Clone)]
enum TrunkState {
    /// Nobody has needed it yet, or for a while.
    Closed,
    Dialling(Dial),
    Open {
        connection: Connection,
        used: Instant,
    },
    Failed {
        at: Instant,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dial {
    /// Streams wait for it.
    First,
    /// It has failed before: nobody waits.
    Again,
}

/// What somebody gets who needs a trunk.
enum Use {
    Now(Connection),
    /// It is to be dialled.
    Dial,
    /// Somebody dials it.
    Wait,
}

impl TrunkState {
    fn connection(&self) -> Option<&Connection> {
        match self {
            Self::Open { connection, .. } => {
                Some(connection).filter(|it| it.close_reason().is_none())
            }
            _ => None,
        }
    }

    /// How it is dialled if it is to be.
    fn next_dial(&self) -> Option<Dial> {
        match self {
            Self::Closed => Some(Dial::First),
            Self::Dialling(_) => None,
            Self::Open { connection, .. } => connection.close_reason().map(|_| Dial::First),
            Self::Failed { at } => (at.elapsed() >= AGAIN_AFTER).then_some(Dial::Again),
        }
    }
}

impl Trunks {
    /// To a peer that takes trunks there: one for each socket that both have.
    pub fn new(far: Far, sockets: &[Endpoint], taken_at: &[TrunkAddress]) -> Self {
        let both = (1_u8..).zip(sockets.iter().zip(taken_at));
        let trunks: Vec<_> = both
            .map(|(number, (endpoint, address))| {
                Arc::new(Trunk {
                    number,
                    endpoint: endpoint.clone(),
                    address: *address,
                    state: watch::Sender::new(TrunkState::Closed),
                })
            })
            .collect();
        Self {
            far,
            users: Mutex::new((0..=trunks.len()).map(|_| Arc::new(())).collect()),
            trunks,
            ended: CancellationToken::new(),
        }
    }

    /// The connection for the next stream: the one with the fewest. A trunk is dialled if there is none yet.
    pub async fn choose(&self, link: Connection, shared: &Arc<Shared>) -> (Connection, UseCount) {
        let (number, users) = self.least_used();
        let trunk = number.checked_sub(1).and_then(|at| self.trunks.get(at));
        let connection = match trunk {
            Some(trunk) => self.connection(trunk, &link, shared).await,
            None => None,
        };
        match connection {
            Some(connection) => (connection, users),
            None => (link, self.users()[0].clone()),
        }
    }

    fn least_used(&self) -> (usize, UseCount) {
        let users = self.users();
        // The choice counts at once, so that streams which open together go apart.
        let least = (users.iter().enumerate())
            .filter(|(number, _)| *number == 0 || self.trunks[number - 1].is_worth_it())
            .min_by_key(|(number, users)| (Arc::strong_count(users), *number));
        let (number, users) = least.expect("the link is always there");
        (number, users.clone())
    }

    fn users(&self) -> std::sync::MutexGuard<'_, Vec<UseCount>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
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
        let settled = state.wait_for(|now| !matches!(now, TrunkState::Dialling(Dial::First)));
        let settled = tokio::time::timeout(DIAL_WORTH, settled).await.ok()?.ok()?;
        settled.connection().cloned()
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
        };
        let dialled = trunk.clone().dial(dialling, self.far.generation);
        tokio::spawn(dialled);
    }

    /// Closes what nobody has used for a while.
    pub fn rest(&self, now: Instant) {
        let users = self.users();
        for (trunk, users) in self.trunks.iter().zip(users.iter().skip(1)) {
            trunk.rest(users, now);
        }
    }
}

#[cfg(test)]
impl Trunks {
    pub fn none_is_worth_it(&self) -> bool {
        !self.trunks.iter().any(|trunk| trunk.is_worth_it())
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

impl Trunk {
    /// Whether a stream should wait for it.
    fn is_worth_it(&self) -> bool {
        let state = self.state.borrow();
        let dialled_again = matches!(&*state, TrunkState::Dialling(Dial::Again));
        let rests = matches!(&*state, TrunkState::Failed { .. }) && state.next_dial().is_none();
        !dialled_again && !rests
    }

    /// What somebody gets who needs it now.
    fn begin_use(&self) -> Use {
        let mut begins = Use::Wait;
        self.state.send_if_modified(|state| {
            if let Some(dial) = state.next_dial() {
                *state = TrunkState::Dialling(dial);
                begins = Use::Dial;
            } else if let TrunkState::Open { connection, used } = state {
                *used = Instant::now();
                begins = Use::Now(connection.clone());
            }
            matches!(begins, Use::Dial)
        });
        begins
    }

    async fn dial(self: Arc<Self>, dialling: Dialling, generation: Generation) {
        let ended = dialling.unneeded.clone();
        let (peer, address) = (dialling.peer.clone(), dialling.address.clone());
        let dialled = dial::dial(dialling).await;
        let dialled = dialled.and_then(|offer| {
            if offer.agreed.generation == generation {
                Ok(offer.connection)
            } else {
                Err(NetError::Down(peer.clone()))
            }
        });
        if ended.is_cancelled() {
            if let Ok(connection) = dialled {
                close(&connection);
            }
            return;
        }
        let now = Instant::now();
        let (state, told) = match dialled {
            Ok(connection) => (
                TrunkState::Open {
                    connection,
                    used: now,
                },
                None,
            ),
            Err(error) => (TrunkState::Failed { at: now }, Some(error)),
        };
        let before = self.state.send_replace(state);
        // One line when it fails, not one for each try.
        if let (Some(error), TrunkState::Dialling(Dial::First)) = (told, before) {
            let error = crate::driver::chain(&error);
            tracing::warn!(%peer, %address, "data goes without this trunk, because it cannot be dialled: {error}");
        }
    }

    fn rest(&self, users: &UseCount, now: Instant) {
        self.state.send_if_modified(|state| {
            let TrunkState::Open { connection, used } = state else {
                return false;
            };
            if Arc::strong_count(users) > 1 {
                *used = now;
                return false;
            }
            let is_over = now.saturating_duration_since(*used) >= UNUSED_MAX;
            if is_over {
                close(connection);
                *state = TrunkState::Closed;
            }
            is_over
        });
    }

    fn close(&self) {
        if let TrunkState::Open { connection, .. } = self.state.send_replace(TrunkState::Closed) {
            close(&connection);
        }
    }
}

fn close(connection: &Connection) {
    connection.close(VarInt::from_u32(0), b"not needed");
}
