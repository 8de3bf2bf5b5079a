//! How fast control messages, streams and requests of one peer are taken, on all its connections, and how many messages wait
//! here. A peer that says the same without end, because it lies or is broken, would otherwise keep the one loop that decides
//! from other peers, and the memory for what waits from everything else. What is not taken waits in the peer's own queue.
//!
//! It is the generic cell rate algorithm (ITU-T I.371): of a time that each message moves on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use storaged_wire::NodeName;
use storaged_wire::peer::CONTROL_FRAME_BYTES_MAX;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// 4,000 messages a second. A rank's step is some ten of them, between a node and a home node.
const EACH: Duration = Duration::from_micros(250);
/// A longer message counts as several: 64 MB a second. The table of a shard of 40 GB has 8 MB.
const EACH_BYTES: usize = 16 << 10;
/// So many at once: what two nodes tell each other of all jobs when their link comes up.
const AT_ONCE: u32 = 8192;

/// So many messages of a peer wait to be heard, or as many of the longest as have 4 MiB.
const WAITING: u32 = 256;

const _: () = assert!(CONTROL_FRAME_BYTES_MAX / EACH_BYTES < WAITING as usize);

/// A message's place among those that wait, until this is dropped.
#[derive(Debug)]
pub struct MessageRoom {
    _taken: Option<OwnedSemaphorePermit>,
}

/// The pace of one peer, on all its streams together.
#[derive(Debug)]
pub(super) struct MessagePace {
    /// Until when the messages that were taken last.
    until: Mutex<Instant>,
    is_told: AtomicBool,
    waiting: Arc<Semaphore>,
}

/// As how many messages one of so many bytes counts.
fn weight(bytes: usize) -> u32 {
    u32::try_from(1 + bytes / EACH_BYTES).unwrap_or(u32::MAX)
}

impl MessagePace {
    pub fn new() -> Self {
        Self {
            until: Mutex::new(Instant::now()),
            is_told: AtomicBool::new(false),
            waiting: Arc::new(Semaphore::new(WAITING as usize)),
        }
    }

    /// Takes a message of so many bytes from this peer, when there is room for it and its time has come.
    pub async fn take_message(&self, from: &NodeName, bytes: usize) -> MessageRoom {
        let weight = weight(bytes).min(WAITING);
        let taken = self.waiting.clone().acquire_many_owned(weight).await;
        self.take(from, bytes).await;
        // Nobody closes it.
        let taken = taken.ok();
        MessageRoom { _taken: taken }
    }

    /// Counts so many bytes of this peer, and waits until their time has come.
    pub async fn take(&self, from: &NodeName, bytes: usize) {
        let Some(at) = self.count(bytes) else {
            return;
        };
        if !self.is_told.swap(true, Ordering::Relaxed) {
            let most = 1.0 / EACH.as_secs_f64();
            tracing::warn!(peer = %from, "a peer sends more than {most} messages or 64 MB a second for long: they are taken at that pace");
        }
        tokio::time::sleep_until(at).await;
    }

    /// When what is counted here may be taken, if not at once.
    fn count(&self, bytes: usize) -> Option<Instant> {
        let now = Instant::now();
        let each = EACH * weight(bytes);
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = (*until).max(now) + each;
        let ahead = EACH * AT_ONCE;
        (*until > now + ahead).then(|| *until - ahead)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn many_are_taken_at_once_and_then_no_more_than_so_many_a_second() {
        let (pace, began) = (MessagePace::new(), Instant::now());
        for _ in 0..AT_ONCE {
            assert_eq!(pace.count(100), None);
        }
        for late in 1..=100 {
            let at = pace.count(100).unwrap();
            assert_eq!(at - began, EACH * late);
        }
        tokio::time::sleep(EACH * (AT_ONCE + 100)).await;
        for _ in 0..AT_ONCE {
            assert_eq!(
                pace.count(100),
                None,
                "who was silent may say as much again"
            );
        }
        assert!(pace.count(100).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn few_wait_and_who_is_heard_makes_room() {
        let (pace, from) = (MessagePace::new(), NodeName::new("liar").unwrap());
        let long = CONTROL_FRAME_BYTES_MAX;
        let most = WAITING as usize / weight(long) as usize;
        let mut waiting = Vec::new();
        for _ in 0..most {
            waiting.push(pace.take_message(&from, long).await);
        }
        let next = pace.take_message(&from, long);
        let in_time = tokio::time::timeout(Duration::from_secs(60), next);
        assert!(in_time.await.is_err());
        drop(waiting.pop());
        pace.take_message(&from, long).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_message_counts_as_many() {
        let pace = MessagePace::new();
        let long = EACH_BYTES * (AT_ONCE as usize / 2 - 1);
        assert_eq!((pace.count(long), pace.count(long)), (None, None));
        assert!(pace.count(0).is_some());
        assert!(pace.count(usize::MAX).is_some());
    }
}
