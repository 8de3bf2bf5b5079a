//! Streams that peers opened, handed to the session that waits for them. A stream may come a moment before its
//! session begins here, so a bounded number is parked for a bounded time.
//!
//! The peer that opened a stream is part of its place: a stream from the wrong node never reaches a session.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use storaged_wire::peer::StreamRecord;
use storaged_wire::{NodeName, SessionId};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::BlockReceiver;

/// Streams parked at once, over all peers.
const PARKED_MAX: usize = 1024;
/// And of one peer, so that none can take the places of all: four sessions led by each of 32 nodes.
const PARKED_PER_PEER_MAX: usize = 128;
/// A parked stream is dropped after this time.
pub(super) const PARKED_FOR: Duration = Duration::from_secs(15);

/// Where a stream belongs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StreamKey {
    pub leader: NodeName,
    pub session: SessionId,
    pub edge: u32,
    pub from: NodeName,
}

enum Visitor {
    Session(oneshot::Sender<Box<dyn BlockReceiver>>),
    Stream(Box<dyn BlockReceiver>, Instant),
}

/// The meeting point of streams and sessions.
#[derive(Default)]
pub(super) struct Inbound {
    places: Mutex<BTreeMap<StreamKey, Visitor>>,
}

impl Inbound {
    /// A peer opened a stream. One too many is dropped, which resets it: its sender's session fails and is tried
    /// again.
    pub fn arrived(
        self: &Arc<Self>,
        record: StreamRecord,
        from: NodeName,
        stream: Box<dyn BlockReceiver>,
    ) {
        let StreamRecord {
            leader,
            session,
            edge,
        } = record;
        let place = StreamKey {
            leader,
            session,
            edge,
            from,
        };
        let mut places = self.lock();
        if let Some(Visitor::Session(waiting)) = places.remove(&place) {
            // Whoever waited may have gone meanwhile; then the stream goes too.
            let _ = waiting.send(stream);
            return;
        }
        let of_peer = |(at, visitor): &(&StreamKey, &Visitor)| {
            at.from == place.from && matches!(visitor, Visitor::Stream(..))
        };
        if places.len() < PARKED_MAX && places.iter().filter(of_peer).count() < PARKED_PER_PEER_MAX
        {
            places.insert(place, Visitor::Stream(stream, Instant::now()));
            drop(places);
            self.sweep_later();
        }
    }

    /// The stream of an edge, once it is there; none if another session took its place.
    pub async fn wait(&self, place: StreamKey) -> Option<Box<dyn BlockReceiver>> {
        let waiting = {
            let mut places = self.lock();
            if let Some(Visitor::Stream(stream, _)) = places.remove(&place) {
                return Some(stream);
            }
            let (session, waiting) = oneshot::channel();
            places.insert(place, Visitor::Session(session));
            waiting
        };
        waiting.await.ok()
    }

    /// A session is over: nobody waits for its streams any more.
    pub fn forget(&self, leader: &NodeName, session: SessionId) {
        self.lock()
            .retain(|place, _| place.session != session || &place.leader != leader);
    }

    /// Streams parked now.
    pub fn parked(&self) -> usize {
        self.lock()
            .values()
            .filter(|visitor| matches!(visitor, Visitor::Stream(..)))
            .count()
    }

    fn sweep_later(self: &Arc<Self>) {
        // Outside a runtime there is no time to wait for.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let inbound = Arc::downgrade(self);
        runtime.spawn(async move {
            tokio::time::sleep(PARKED_FOR).await;
            if let Some(inbound) = inbound.upgrade() {
                inbound.sweep();
            }
        });
    }

    fn sweep(&self) {
        let now = Instant::now();
        self.lock().retain(|_, visitor| match visitor {
            Visitor::Stream(_, since) => now.duration_since(*since) < PARKED_FOR,
            Visitor::Session(waiting) => !waiting.is_closed(),
        });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<StreamKey, Visitor>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
