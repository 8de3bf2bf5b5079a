//! One trunk to a peer, and whether it is trusted. Anything that goes wrong on it, a dial, its end while it was in use, a stream that was given
//! up, puts it in doubt: data goes without it for a while, longer each time, until a stream on it has arrived. Else a rail that lets
//! handshakes through and loses data would be the one with the fewest streams, and taken first by every retry.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use quinn::{Connection, ConnectionError, Endpoint, VarInt};
use storaged_wire::{Generation, NodeName};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::NetError;
use super::dial::{self, Dialling};
use super::rails::Interface;
use super::trunks::{TrunkAddress, TrunkSocket, UseCount};

/// Nobody uses a trunk in doubt for so long, and twice as long each time until one stream has arrived.
const DOUBTED: Duration = Duration::from_secs(10);
/// It is no longer doubled after so many times: eleven minutes.
const DOUBLED_MAX: u32 = 6;
/// One that nobody has used for so long is closed.
const UNUSED_MAX: Duration = Duration::from_secs(10);

/// Whom this node dials.
pub(super) struct Far {
    pub peer: NodeName,
    /// The name in its certificate.
    pub node: NodeName,
    /// A trunk of another incarnation is no trunk of this link.
    pub generation: Generation,
    /// Some trunk to it is in doubt, and that was told: nobody waits for a dial.
    is_troubled: AtomicBool,
}

impl Far {
    pub fn new(peer: NodeName, node: NodeName, generation: Generation) -> Self {
        Self {
            peer,
            node,
            generation,
            is_troubled: AtomicBool::new(false),
        }
    }
}

/// See the module.
pub(super) struct Trunk {
    pub number: u8,
    pub endpoint: Endpoint,
    pub interface: Interface,
    pub address: TrunkAddress,
    pub state: watch::Sender<TrunkState>,
    pub users: UseCount,
    far: Arc<Far>,
    doubts: Mutex<Doubts>,
}

#[derive(Debug, Clone)]
pub(super) enum TrunkState {
    /// Nobody has needed it yet, or for a while.
    Closed,
    Dialling(Dial),
    Open {
        connection: Connection,
        used: Instant,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dial {
    /// Streams wait for it.
    Awaited,
    /// Nobody does.
    Aside,
}

/// What somebody gets who needs a trunk.
pub(super) enum Use {
    Now(Connection),
    /// It is to be dialled.
    Dial,
    /// Somebody dials it.
    Wait,
}

/// How often it was put in doubt since a stream has arrived, and until when it is.
#[derive(Debug, Default)]
struct Doubts {
    times: u32,
    until: Option<Instant>,
}

/// Why a trunk is not trusted.
#[derive(Debug)]
pub(super) enum Doubt {
    Dial(NetError),
    End(ConnectionError),
    Stream,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Who answers there is somebody else: what helps is not a certificate.
            Self::Dial(NetError::PeerCertificate { reason, .. }) => {
                write!(
                    f,
                    "another node answers there, see network.rails on both: {reason}"
                )
            }
            Self::Dial(error) => {
                let error = crate::driver::chain(error);
                write!(f, "it cannot be dialled: {error}")
            }
            Self::End(reason) => write!(f, "it has ended: {reason}"),
            Self::Stream => f.write_str("a stream on it was given up"),
        }
    }
}

impl TrunkState {
    pub fn connection(&self) -> Option<&Connection> {
        match self {
            Self::Open { connection, .. } => {
                Some(connection).filter(|it| it.close_reason().is_none())
            }
            _ => None,
        }
    }
}

impl Trunk {
    pub fn new(far: Arc<Far>, from: &TrunkSocket, address: TrunkAddress) -> Self {
        Self {
            number: from.number,
            endpoint: from.endpoint.clone(),
            interface: from.interface,
            address,
            state: watch::Sender::new(TrunkState::Closed),
            users: UseCount::default(),
            far,
            doubts: Mutex::default(),
        }
    }

    fn doubts(&self) -> MutexGuard<'_, Doubts> {
        self.doubts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a stream should go on it.
    pub fn is_trusted(&self) -> bool {
        let until = self.doubts().until;
        until.is_none_or(|until| until <= Instant::now())
            && !matches!(*self.state.borrow(), TrunkState::Dialling(Dial::Aside))
    }

    /// Data goes without it for a while.
    pub fn doubt(&self, why: &Doubt) {
        let mut doubts = self.doubts();
        let now = Instant::now();
        // Streams of one session, which fail together, are one doubt.
        if doubts.until.is_some_and(|until| now < until) {
            return;
        }
        let pause = DOUBTED * 2_u32.pow(doubts.times.min(DOUBLED_MAX));
        (doubts.times, doubts.until) = (doubts.times.saturating_add(1), Some(now + pause));
        drop(doubts);
        let (peer, number, seconds) = (&self.far.peer, self.number, pause.as_secs());
        // Sessions are given up for many reasons; what is surely the trunk's is told once until one of the peer's is good again.
        let is_news =
            !matches!(why, Doubt::Stream) && !self.far.is_troubled.swap(true, Ordering::Relaxed);
        if is_news {
            tracing::warn!(%peer, trunk = number, address = %self.address, "data goes without this trunk for {seconds} s: {why}");
        } else {
            tracing::info!(%peer, trunk = number, address = %self.address, "data goes without this trunk for {seconds} s: {why}");
        }
    }

    /// A stream has arrived.
    pub fn prove(&self) {
        let before = std::mem::take(&mut *self.doubts());
        if before.times > 0 {
            self.far.is_troubled.store(false, Ordering::Relaxed);
            let (peer, number) = (&self.far.peer, self.number);
            tracing::info!(%peer, trunk = number, "data goes on this trunk again");
        }
    }

    /// How often it was put in doubt since a stream has arrived.
    #[cfg(test)]
    pub fn paused_times(&self) -> u32 {
        self.doubts().times
    }

    /// What somebody gets who needs it now.
    pub fn begin_use(&self) -> Use {
        let mut begins = Use::Wait;
        self.state.send_if_modified(|state| match state {
            TrunkState::Open { connection, used } if connection.close_reason().is_none() => {
                *used = Instant::now();
                begins = Use::Now(connection.clone());
                false
            }
            TrunkState::Dialling(_) => false,
            TrunkState::Open { .. } | TrunkState::Closed => {
                let is_doubtful =
                    self.doubts().times > 0 || self.far.is_troubled.load(Ordering::Relaxed);
                let dial = if is_doubtful {
                    Dial::Aside
                } else {
                    Dial::Awaited
                };
                *state = TrunkState::Dialling(dial);
                begins = Use::Dial;
                true
            }
        });
        begins
    }

    /// The dial goes on, and nobody waits for it.
    pub fn wait_no_more(&self) {
        self.state.send_if_modified(|state| {
            let is_awaited = matches!(state, TrunkState::Dialling(Dial::Awaited));
            if is_awaited {
                *state = TrunkState::Dialling(Dial::Aside);
            }
            is_awaited
        });
    }

    /// Dials, and looks after the connection until it ends.
    pub async fn keep(self: Arc<Self>, dialling: Dialling) {
        let ended = dialling.unneeded.clone();
        match self.dial(dialling).await {
            Ok(connection) => self.until_closed(connection, &ended).await,
            Err(_) if ended.is_cancelled() => {}
            Err(error) => {
                self.state.send_replace(TrunkState::Closed);
                self.doubt(&Doubt::Dial(error));
            }
        }
    }

    async fn dial(&self, dialling: Dialling) -> Result<Connection, NetError> {
        let shared = dialling.shared.clone();
        let offer = dial::dial(dialling).await?;
        if offer.agreed.generation == self.far.generation {
            shared.trunks_come_about.store(true, Ordering::Relaxed);
            Ok(offer.connection)
        } else {
            Err(NetError::Down(self.far.peer.clone()))
        }
    }

    async fn until_closed(&self, connection: Connection, ended: &CancellationToken) {
        self.state.send_replace(TrunkState::Open {
            connection: connection.clone(),
            used: Instant::now(),
        });
        let reason = tokio::select! {
            biased;
            // The link went down, maybe before this was there to be closed with it.
            () = ended.cancelled() => return close(&connection),
            reason = connection.closed() => reason,
        };
        self.state.send_if_modified(|state| {
            // Another one may have been dialled since.
            let is_this = matches!(state, TrunkState::Open { connection: it, .. } if it.stable_id() == connection.stable_id());
            if is_this {
                *state = TrunkState::Closed;
            }
            is_this
        });
        // The other ends are a peer's that stops or is started anew, of which the link hears too.
        let is_fault = matches!(
            reason,
            ConnectionError::TimedOut | ConnectionError::TransportError(_)
        );
        if is_fault {
            self.doubt(&Doubt::End(reason));
        }
    }

    /// Closes it if nobody has used it for a while.
    pub fn rest(&self, now: Instant) {
        self.state.send_if_modified(|state| {
            let TrunkState::Open { connection, used } = state else {
                return false;
            };
            if Arc::strong_count(&self.users) > 1 {
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

    pub fn close(&self) {
        if let TrunkState::Open { connection, .. } = self.state.send_replace(TrunkState::Closed) {
            close(&connection);
        }
    }
}

pub(super) fn close(connection: &Connection) {
    connection.close(VarInt::from_u32(0), b"not needed");
}
