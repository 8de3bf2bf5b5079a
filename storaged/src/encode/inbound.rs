//! Streams that peers opened, handed to the session that waits for them. A stream may come a moment before its
//! session begins here, so a bounded number is parked for a bounded time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use storaged_wire::peer::StreamRecord;
use storaged_wire::{NodeName, SessionId};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::BlockReceiver;

/// Streams parked at once: more than the sessions of all leaders together have edges to one node.
const PARKED_MAX: usize = 1024;
/// A parked stream is dropped after this time.
const PARKED_FOR: Duration = Duration::from_secs(15);

type Key = (NodeName, SessionId, u32);

enum Place {
    Waiting(oneshot::Sender<(NodeName, Box<dyn BlockReceiver>)>),
    Parked(NodeName, Box<dyn BlockReceiver>, Instant),
}

/// The meeting point of streams and sessions.
#[derive(Default)]
pub(super) struct Inbound {
    places: Mutex<BTreeMap<Key, Place>>,
}

impl Inbound {
    /// A peer opened a stream.
    pub fn arrived(&self, record: StreamRecord, from: NodeName, stream: Box<dyn BlockReceiver>) {
        let key = (record.leader, record.session, record.edge);
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        places.retain(|_, place| match place {
            Place::Parked(_, _, since) => now.duration_since(*since) < PARKED_FOR,
            Place::Waiting(waiting) => !waiting.is_closed(),
        });
        match places.remove(&key) {
            Some(Place::Waiting(waiting)) => drop(waiting.send((from, stream))),
            _ if places.len() < PARKED_MAX => {
                places.insert(key, Place::Parked(from, stream, now));
            }
            // Too many: the stream is dropped, which resets it, and its sender's session fails and is tried again.
            _ => {}
        }
    }

    /// The stream of an edge, once it is there.
    pub async fn wait(&self, key: Key) -> Option<(NodeName, Box<dyn BlockReceiver>)> {
        let receiver = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(Place::Parked(from, stream, _)) = places.remove(&key) {
                return Some((from, stream));
            }
            let (sender, receiver) = oneshot::channel();
            places.insert(key, Place::Waiting(sender));
            receiver
        };
        receiver.await.ok()
    }
}
