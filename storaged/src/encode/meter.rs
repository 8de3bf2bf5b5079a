//! What a session measures of the links over which this member receives: bytes, and the time in which a block had begun
//! to come and was waited for. While that is so the link carries what it can; what else keeps a member waiting (a sender
//! that has nothing, a window that is full) is not counted. `storaged_core` puts the members' figures together.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use storaged_core::SessionTally;
use storaged_wire::NodeName;
use storaged_wire::peer::LinkTally;
use tokio::time::Instant;

/// The meters of one session at one member.
#[derive(Debug)]
pub struct Meters {
    began: Instant,
    bytes: AtomicU64,
    stripes: AtomicU64,
    flows: Mutex<BTreeMap<NodeName, Arc<Flow>>>,
}

/// What comes over one link.
#[derive(Debug, Default)]
pub(super) struct Flow(Mutex<Counts>);

#[derive(Debug, Default, Clone, Copy)]
struct Counts {
    bytes: u64,
    waited: Duration,
    /// Since when somebody waits now.
    since: Option<Instant>,
}

impl Default for Meters {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            bytes: AtomicU64::new(0),
            stripes: AtomicU64::new(0),
            flows: Mutex::default(),
        }
    }
}

impl Meters {
    /// The session at this time.
    pub fn tally(&self) -> SessionTally {
        let now = Instant::now();
        let flows = locked(&self.flows);
        let link = |(node, flow): (&NodeName, &Arc<Flow>)| {
            let (bytes, waiting_ms) = flow.read(now);
            LinkTally {
                node: node.clone(),
                bytes,
                waiting_ms,
            }
        };
        SessionTally {
            bytes: self.bytes.load(Ordering::Relaxed),
            elapsed_ms: milliseconds(now.duration_since(self.began)),
            stripes: self.stripes.load(Ordering::Relaxed),
            links: flows.iter().map(link).collect(),
        }
    }

    /// What comes from a neighbour.
    pub(super) fn from(&self, node: &NodeName) -> Arc<Flow> {
        locked(&self.flows).entry(node.clone()).or_default().clone()
    }

    /// A stripe is done here; its bytes, if it was not clean.
    pub(super) fn did(&self, bytes: u64) {
        self.stripes.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Flow {
    /// Counts the time that a step takes as waited for.
    pub async fn waits<T>(&self, step: impl Future<Output = T>) -> T {
        locked(&self.0).since = Some(Instant::now());
        let _waiting = Waiting(self);
        step.await
    }

    /// So many bytes went through.
    pub fn moved(&self, bytes: u64) {
        locked(&self.0).bytes += bytes;
    }

    fn read(&self, now: Instant) -> (u64, u64) {
        let counts = *locked(&self.0);
        let going_on = counts.since.map(|since| now.duration_since(since));
        let waited = counts.waited + going_on.unwrap_or_default();
        (counts.bytes, milliseconds(waited))
    }
}

/// Somebody waits; dropped with the step, also with one that is given up.
struct Waiting<'a>(&'a Flow);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut counts = locked(&self.0.0);
        if let Some(since) = counts.since.take() {
            counts.waited += since.elapsed();
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waiting_counts_while_it_goes_on_and_afterwards() {
        let meters = Meters::default();
        let node = NodeName::new("n1").expect("a name");
        let flow = meters.from(&node);
        tokio::time::sleep(Duration::from_millis(5)).await;
        let wait = flow.waits(tokio::time::sleep(Duration::from_millis(30)));
        tokio::pin!(wait);
        let early = tokio::time::timeout(Duration::from_millis(10), &mut wait).await;
        assert!(early.is_err());
        assert_eq!(meters.tally().links[0].waiting_ms, 10);
        wait.await;
        flow.moved(7);
        meters.did(3);
        let tally = meters.tally();
        assert_eq!((tally.elapsed_ms, tally.stripes, tally.bytes), (35, 1, 3));
        let expected = LinkTally {
            node,
            bytes: 7,
            waiting_ms: 30,
        };
        assert_eq!(tally.links, [expected]);
    }
}
