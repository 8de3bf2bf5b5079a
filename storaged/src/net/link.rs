//! The link to one peer: one connection, whoever dialled it, kept until it ends; then another one.
//!
//! A node that starts dials all peers: those that still take their link to its last incarnation for sound hear of it so.
//! When a link has ended, the node with the lower name dials first, and a dial that was not answered yet ends when the
//! peer's own comes. Where both have dialled nevertheless, both prefer the connection of the lower name, and the other
//! one is served until it ends by itself, as nothing is said on it any more: no link goes down because of it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use quinn::{Connection, ConnectionError, Endpoint, SendStream, VarInt, WriteError};
use storaged_wire::{Generation, NodeName, encode};
use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::address::PeerAddress;
use super::agreement::Agreement;
use super::dial::{self, Dialling, Purpose};
use super::endpoint::{AGREEMENT_SAID_AGAIN, Known, NetEvent, Shared};
use super::frame::ControlFrameError;
use super::hello::Agreed;
use super::pace::MessagePace;
use super::pulse::{Beat, Proximity, Pulse, Side, Spoke};
use super::requests::REQUESTS;
use super::streams::{KIND_AGREEMENT, KIND_CONTROL, Speaker};
use super::trunk::Far;
use super::trunks::Trunks;
use super::{NetError, frame, streams};

/// Dial again after this time, doubled at each failure up to the longest.
const BACKOFF: Duration = Duration::from_millis(100);
const BACKOFF_LONGEST: Duration = Duration::from_secs(1);
/// Once a link has ended, the node with the higher name gives the other one so long to dial: ten handshakes in a machine
/// room.
const HIGHER_WAITS: Duration = Duration::from_millis(100);
/// Control messages that wait for the link; more are lost, and said again by the layer above.
const QUEUE: usize = 4096;
/// Connections that wait to be looked at.
const OFFERS: usize = 16;
/// Repeated dial errors are told once in this many tries.
const TELL_EVERY: u32 = 30;
/// Whoever needs a link that is just coming up waits for it so long: members of a session hear of a node that came back
/// a few milliseconds one after the other.
const UP_WAIT: Duration = Duration::from_secs(2);
/// A dial that began before the connection in use was there may end so much later: then it is one too many. Later than
/// that, the peer has lost the one in use.
const RACE_MAX: Duration = dial::DIAL_WAIT;

/// What is said to be acknowledged by the peer's transport.
const WORD: Bytes = Bytes::from_static(&[0]);

/// The link to one peer.
pub(super) struct Link {
    queue: mpsc::Sender<Bytes>,
    offers: mpsc::Sender<Offer>,
    connection: watch::Sender<Option<Connection>>,
    /// Something was sent since the last beat.
    spoke: AtomicBool,
    /// On all connections of the peer.
    pace: Arc<MessagePace>,
    state: Mutex<LinkState>,
}

struct LinkState {
    address: PeerAddress,
    proximity: Proximity,
    watched: Option<Watched>,
    /// What the peer said last of what it should have in common with this node, while the link is up.
    theirs: Option<Agreement>,
    /// The version that both speak, while the link is up.
    version: Option<u16>,
    /// While it is up.
    trunks: Option<UpTrunks>,
}

/// The trunks beside a link that is up.
struct UpTrunks {
    generation: Generation,
    /// That this node dials.
    dialled: Arc<Trunks>,
    /// That the peer has dialled.
    taken: BTreeMap<u8, CancellationToken>,
}

/// A connection whose beats are counted.
struct Watched {
    connection: Connection,
    pulse: Pulse,
    /// Nothing comes any more.
    silent: CancellationToken,
}

/// A connection with all that must be said before it can be used.
#[derive(Debug)]
pub(super) struct Offer {
    pub connection: Connection,
    pub agreed: Agreed,
    pub side: Side,
}

/// A link that is not kept yet.
pub(super) struct NewLink {
    pub link: Arc<Link>,
    messages: mpsc::Receiver<Bytes>,
    offers: mpsc::Receiver<Offer>,
}

impl NewLink {
    /// Dials, and goes on until the peer is gone from the configuration. Another machine's link in that place has been told of to its end
    /// before anything of this one is: that end would be taken for this one's.
    pub fn start(
        self,
        known: Known,
        before: Option<CancellationToken>,
        endpoint: Endpoint,
        shared: Arc<Shared>,
    ) {
        let own = shared.hello().place;
        let keeper = Keeper {
            prefers: if own < known.name {
                Side::Dialled
            } else {
                Side::Accepted
            },
            peer: known.name,
            node: known.node,
            gone: known.gone,
            link: self.link,
            endpoint,
            shared,
            messages: self.messages,
            offers: self.offers,
            failures: 0,
            refusals: 0,
        };
        let ended = known.ended.drop_guard();
        tokio::spawn(async move {
            if let Some(before) = before {
                before.cancelled().await;
            }
            keeper.keep().await;
            drop(ended);
        });
    }
}

impl Link {
    #[expect(
        clippy::new_ret_no_self,
        reason = "a link comes with the ends that feed it"
    )]
    pub fn new(address: PeerAddress, proximity: Proximity) -> NewLink {
        let (queue, messages) = mpsc::channel(QUEUE);
        let (to_keeper, offers) = mpsc::channel(OFFERS);
        let link = Arc::new(Self {
            queue,
            offers: to_keeper,
            connection: watch::Sender::new(None),
            spoke: AtomicBool::new(false),
            pace: Arc::new(MessagePace::new()),
            state: Mutex::new(LinkState {
                address,
                proximity,
                watched: None,
                theirs: None,
                version: None,
                trunks: None,
            }),
        });
        NewLink {
            link,
            messages,
            offers,
        }
    }

    /// How fast its messages are taken.
    pub fn pace(&self) -> Arc<MessagePace> {
        self.pace.clone()
    }

    pub fn send(&self, body: Bytes) {
        self.note_word();
        // A full queue means a link that is down or very slow: the message is lost, as documented.
        let _ = self.queue.try_send(body);
    }

    /// Something is sent: the peer is to be lost if nothing comes of it.
    pub fn note_word(&self) {
        self.spoke.store(true, Ordering::Relaxed);
    }

    /// Where to dial from now on, and how soon its silence must be noticed.
    pub fn set(&self, address: PeerAddress, proximity: Proximity) {
        let mut state = self.state();
        (state.address, state.proximity) = (address, proximity);
    }

    /// A connection of the peer's.
    pub async fn offer(&self, offer: Offer) {
        // Nobody takes it when the peer was just removed; then it ends with its last holder.
        let _ = self.offers.send(offer).await;
    }

    /// The connection, as soon as there is one; none if that takes too long.
    pub async fn connection(&self) -> Option<Connection> {
        let mut connection = self.connection.subscribe();
        let up = connection.wait_for(Option::is_some);
        let up = tokio::time::timeout(UP_WAIT, up).await.ok()?.ok()?;
        up.clone()
    }

    /// Looks whether the peer is there, and asks it where that is not known.
    pub fn beat(&self) {
        let spoke = if self.spoke.swap(false, Ordering::Relaxed) {
            Spoke::Yes
        } else {
            Spoke::No
        };
        let mut state = self.state();
        if let Some(trunks) = &state.trunks {
            trunks.dialled.rest(Instant::now());
        }
        let proximity = state.proximity;
        let Some(watched) = &mut state.watched else {
            return;
        };
        let received = watched.connection.stats().udp_rx.datagrams;
        match watched.pulse.beat(received, spoke, proximity) {
            Beat::Rest => {}
            // It fails with the connection, of which the keeper hears.
            Beat::Ask => drop(watched.connection.send_datagram(WORD)),
            Beat::Lost => watched.silent.cancel(),
        }
    }

    /// Uses a connection from now on; the token says when its peer has been silent for too long.
    fn watch(&self, offer: &Offer) -> CancellationToken {
        let silent = CancellationToken::new();
        self.state().watched = Some(Watched {
            connection: offer.connection.clone(),
            pulse: Pulse::new(offer.side, offer.agreed.promised),
            silent: silent.clone(),
        });
        self.connection.send_replace(Some(offer.connection.clone()));
        silent
    }

    /// Uses no connection any more. For how long the peer had been silent, if that ended it.
    fn unwatch(&self) -> Option<Duration> {
        self.connection.send_replace(None);
        let mut state = self.state();
        let watched = state.watched.take();
        (state.theirs, state.version) = (None, None);
        let trunks = state.trunks.take();
        drop(state);
        for ended in trunks.iter().flat_map(|up| up.taken.values()) {
            ended.cancel();
        }
        let silent = watched.filter(|watched| watched.silent.is_cancelled());
        silent.map(|watched| watched.pulse.silence())
    }

    /// The link comes up with that incarnation, and these trunks are dialled beside it.
    fn begin_trunks(&self, generation: Generation, dialled: Trunks) {
        self.state().trunks = Some(UpTrunks {
            generation,
            dialled: Arc::new(dialled),
            taken: BTreeMap::new(),
        });
    }

    /// The trunks to dial, while the link is up.
    pub fn trunks(&self) -> Option<Arc<Trunks>> {
        self.state().trunks.as_ref().map(|up| up.dialled.clone())
    }

    /// The incarnation of the peer that it is up with.
    #[cfg(test)]
    pub fn generation(&self) -> Option<Generation> {
        self.state().trunks.as_ref().map(|up| up.generation)
    }

    /// Takes a trunk of the peer's until the token says otherwise; none if the link is not up with that incarnation.
    pub fn take_trunk(&self, number: u8, generation: Generation) -> Option<CancellationToken> {
        let mut state = self.state();
        let up = state.trunks.as_mut();
        let up = up.filter(|up| up.generation == generation)?;
        let ended = CancellationToken::new();
        // The peer dials a number anew because it has lost the one before.
        if let Some(before) = up.taken.insert(number, ended.clone()) {
            before.cancel();
        }
        Some(ended)
    }

    fn set_version(&self, version: u16) {
        self.state().version = Some(version);
    }

    /// Whether the link is up and the peer answers requests.
    pub fn answers(&self) -> bool {
        self.state().version.is_some_and(|it| it >= REQUESTS)
    }

    pub fn set_theirs(&self, agreement: Option<Agreement>) {
        self.state().theirs = agreement;
    }

    pub fn theirs(&self) -> Option<Agreement> {
        self.state().theirs.clone()
    }

    fn address(&self) -> PeerAddress {
        self.state().address.clone()
    }

    fn proximity(&self) -> Proximity {
        self.state().proximity
    }

    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The daemon stops, or the peer is configured no more.
struct Unwanted;

/// What keeps a link.
struct Keeper {
    peer: NodeName,
    /// The name in its certificate.
    node: NodeName,
    /// Of two connections the one that the node with the lower name dialled stays.
    prefers: Side,
    gone: CancellationToken,
    link: Arc<Link>,
    endpoint: Endpoint,
    shared: Arc<Shared>,
    messages: mpsc::Receiver<Bytes>,
    offers: mpsc::Receiver<Offer>,
    failures: u32,
    /// Counted apart: a peer that was down for long and comes back with a bad certificate is told of at once.
    refusals: u32,
}

/// The connection in use, and since when.
struct Current {
    offer: Offer,
    since: Instant,
    silent: CancellationToken,
}

/// What another connection to the same peer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Second {
    /// The one in use stays.
    Surplus,
    /// It takes the place of the one in use.
    Better,
    /// The peer was restarted.
    Anew,
}

impl Current {
    fn beside(&self, other: &Offer, prefers: Side) -> Second {
        if other.agreed.generation != self.offer.agreed.generation {
            return Second::Anew;
        }
        let is_race = self.since.elapsed() < RACE_MAX;
        let is_surplus = is_race && self.offer.side == prefers && other.side != prefers;
        if is_surplus || other.connection.close_reason().is_some() {
            Second::Surplus
        } else {
            Second::Better
        }
    }
}

/// How the use of a connection ends.
enum Ends {
    /// There is a better one.
    Better(Offer),
    /// The link goes down; the peer's next incarnation may be there already.
    Down {
        reason: String,
        next: Result<Option<Offer>, Unwanted>,
    },
}

impl Ends {
    fn down(reason: &str, next: Result<Option<Offer>, Unwanted>) -> Self {
        let reason = reason.into();
        Self::Down { reason, next }
    }
}

impl Keeper {
    async fn keep(mut self) {
        let (mut next, mut wait) = (None, Duration::ZERO);
        let again = match self.prefers {
            Side::Dialled => BACKOFF,
            Side::Accepted => BACKOFF + HIGHER_WAITS,
        };
        loop {
            let offer = match next.take() {
                Some(offer) => Ok(offer),
                None => self.first_connection(wait).await,
            };
            let Ok(offer) = offer else { return };
            // It was made before the list came: nobody must hear that the peer is up.
            if self.shared.is_revoked(&offer.connection) {
                streams::end_revoked(&offer.connection);
                wait = again;
                continue;
            }
            match self.connected(offer).await {
                Ok(another) => (next, wait) = (another, again),
                Err(Unwanted) => return,
            }
        }
    }

    /// Dials after this time, or is dialled.
    async fn first_connection(&mut self, mut wait: Duration) -> Result<Offer, Unwanted> {
        loop {
            tokio::select! {
                biased;
                () = self.gone.cancelled() => return Err(Unwanted),
                Some(offer) = self.offers.recv() => return Ok(offer),
                () = tokio::time::sleep(wait) => {}
            }
            let dialling = Dialling {
                endpoint: self.endpoint.clone(),
                peer: self.peer.clone(),
                node: self.node.clone(),
                address: self.link.address(),
                shared: self.shared.clone(),
                unneeded: CancellationToken::new(),
                purpose: Purpose::Link,
                proximity: self.link.proximity(),
            };
            let unneeded = dialling.unneeded.clone();
            let mut dialled = Box::pin(dial::dial(dialling));
            let dialled = tokio::select! {
                biased;
                () = self.gone.cancelled() => return Err(Unwanted),
                Some(offer) = self.offers.recv() => {
                    unneeded.cancel();
                    // The peer may have it already, and prefer it.
                    tokio::spawn(offer_late(dialled, self.link.clone()));
                    return Ok(offer);
                }
                dialled = &mut dialled => dialled,
            };
            match dialled {
                Ok(offer) => return Ok(offer),
                Err(error) => self.not_connected(error).await,
            }
            let doubled = BACKOFF.saturating_mul(1 << self.failures.min(4));
            wait = doubled.min(BACKOFF_LONGEST);
        }
    }

    /// Uses a connection, or a better one that comes, until it ends. Gives the first one of the peer's next incarnation.
    async fn connected(&mut self, offer: Offer) -> Result<Option<Offer>, Unwanted> {
        (self.failures, self.refusals) = (0, 0);
        while self.messages.try_recv().is_ok() {}
        let Agreed {
            generation,
            version,
            ref theirs,
            ref trunks,
            ..
        } = offer.agreed;
        self.link.set_theirs(theirs.clone());
        let far = Far::new(self.peer.clone(), self.node.clone(), generation);
        let trunks = Trunks::new(far, self.shared.trunk_sockets(), trunks);
        self.link.begin_trunks(generation, trunks);
        let peer = self.peer.clone();
        self.tell(NetEvent::Up {
            peer,
            generation,
            version,
        })
        .await?;
        let mut current = self.take(offer);
        let (reason, next) = loop {
            match self.use_until(&mut current).await {
                Ends::Better(better) => current = self.take(better),
                Ends::Down { reason, next } => break (reason, next),
            }
        };
        let silent = self.link.unwatch();
        current.offer.connection.close(VarInt::from_u32(0), b"");
        let peer = self.peer.clone();
        let down = NetEvent::Down {
            peer,
            reason,
            silent,
        };
        self.tell(down).await?;
        next
    }

    /// Uses a connection until it ends, or there is a better one.
    async fn use_until(&mut self, current: &mut Current) -> Ends {
        let connection = current.offer.connection.clone();
        let agreed = &current.offer.agreed;
        let saying = say_agreement(&connection, agreed, self.shared.agreement.subscribe());
        let carried = carry(&connection, &mut self.messages, saying);
        let mut carried = std::pin::pin!(carried);
        loop {
            let offer = tokio::select! {
                biased;
                () = self.gone.cancelled() => return Ends::down("it is not configured any more", Err(Unwanted)),
                Some(offer) = self.offers.recv() => offer,
                () = current.silent.cancelled() => return Ends::down("timed out", Ok(None)),
                reason = &mut carried => return Ends::down(&reason.to_string(), Ok(None)),
            };
            match current.beside(&offer, self.prefers) {
                Second::Better => return Ends::Better(offer),
                Second::Anew => return Ends::down("it was started anew", Ok(Some(offer))),
                Second::Surplus => {
                    let (peer, shared) = (self.peer.clone(), self.shared.clone());
                    let from = Speaker::new(peer, self.link.pace());
                    let gone = self.gone.clone();
                    tokio::spawn(streams::serve(offer.connection, from, shared, gone));
                }
            }
        }
    }

    /// Uses a connection from now on. The one before is served as long as something comes on it.
    fn take(&self, offer: Offer) -> Current {
        let silent = self.link.watch(&offer);
        self.link.set_theirs(offer.agreed.theirs.clone());
        self.link.set_version(offer.agreed.version);
        let (connection, shared) = (offer.connection.clone(), self.shared.clone());
        let from = Speaker::new(self.peer.clone(), self.link.pace());
        let gone = self.gone.clone();
        tokio::spawn(streams::serve(connection, from, shared, gone));
        Current {
            offer,
            since: Instant::now(),
            silent,
        }
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

    async fn tell(&self, event: NetEvent) -> Result<(), Unwanted> {
        let sent = self.shared.events.send(event).await;
        sent.map_err(|_| Unwanted)
    }
}

/// A connection that was dialled in vain, because the peer was quicker: which of the two stays is not for the dial to say.
async fn offer_late(dialled: impl Future<Output = Result<Offer, NetError>>, link: Arc<Link>) {
    if let Ok(offer) = dialled.await {
        link.offer(offer).await;
    }
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
async fn carry(
    connection: &Connection,
    messages: &mut mpsc::Receiver<Bytes>,
    saying: impl Future<Output = Result<Infallible, CarryError>>,
) -> CarryError {
    tokio::select! {
        biased;
        reason = connection.closed() => reason.into(),
        Err(error) = send_all(connection, messages) => error,
        Err(error) = saying => error,
    }
}

/// Says what the two should have in common whenever it is not what was said last, and does not end while it can.
fn say_agreement(
    connection: &Connection,
    agreed: &Agreed,
    mut agreement: watch::Receiver<Agreement>,
) -> impl Future<Output = Result<Infallible, CarryError>> + use<> {
    let (connection, version) = (connection.clone(), agreed.version);
    let mut said = agreed.said.clone();
    async move {
        if version < AGREEMENT_SAID_AGAIN {
            return std::future::pending().await;
        }
        let mut stream = None;
        loop {
            let now = Some(agreement.borrow_and_update().clone());
            if let Some(changed) = now.as_ref().filter(|_| now != said) {
                let stream = match &mut stream {
                    Some(stream) => stream,
                    None => stream.insert(begin(&connection, KIND_AGREEMENT).await?),
                };
                frame::write(stream, encode(changed).into()).await?;
                said = now;
            }
            if agreement.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

async fn begin(connection: &Connection, kind: u8) -> Result<SendStream, CarryError> {
    let mut stream = connection.open_uni().await?;
    let kind = Bytes::copy_from_slice(&[kind]);
    stream.write_chunk(kind).await?;
    Ok(stream)
}

/// Sends what comes, and does not end while it can.
async fn send_all(
    connection: &Connection,
    messages: &mut mpsc::Receiver<Bytes>,
) -> Result<Infallible, CarryError> {
    let mut stream = begin(connection, KIND_CONTROL).await?;
    while let Some(body) = messages.recv().await {
        frame::write(&mut stream, body).await?;
    }
    std::future::pending().await
}
