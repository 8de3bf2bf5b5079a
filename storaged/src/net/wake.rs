//! A peer that was restarted says hello to us long before we would notice by ourselves: our connection to its last
//! incarnation ends by silence only, after two seconds, and a dial to a machine that was down is not repeated for up to
//! four. So its hello wakes our own link to it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use storaged_wire::Generation;
use tokio::sync::Notify;

/// What one outgoing link is told of its peer by the connections that the peer makes to us.
#[derive(Debug, Default)]
pub(super) struct Wake {
    state: Mutex<WakeState>,
    news: Notify,
}

#[derive(Debug, Default)]
struct WakeState {
    /// The peer's newest incarnation, as it said itself.
    heard: Option<Generation>,
    /// The one that our link is connected to.
    connected: Option<Generation>,
    /// Whether the link was woken since its last connection began. A second hello does not wake it again, or two nodes
    /// that dial each other at the same time would break off each other's dials for ever.
    woken: bool,
}

impl Wake {
    /// The peer said hello as this incarnation.
    pub fn heard(&self, generation: Generation) {
        let mut state = self.state();
        state.heard = Some(generation);
        if state.connected != Some(generation) && !state.woken {
            state.woken = true;
            self.news.notify_one();
        }
    }

    /// Our link is connected to this incarnation.
    pub fn connected(&self, generation: Generation) {
        let mut state = self.state();
        state.connected = Some(generation);
        state.woken = false;
    }

    /// Our link is not connected any more.
    pub fn lost(&self) {
        self.state().connected = None;
    }

    /// While the link is not connected: until the peer says hello, so that dialling is worth while.
    pub async fn is_there(&self) {
        self.news.notified().await;
    }

    /// While the link is connected: until the peer says hello as another incarnation than the connected one.
    pub async fn is_another(&self) {
        loop {
            self.news.notified().await;
            let state = self.state();
            if state.heard != state.connected {
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, WakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const OLD: Generation = Generation::new(1);
    const NEW: Generation = Generation::new(2);

    #[test]
    fn a_hello_wakes_a_dial_once() {
        let wake = Wake::default();
        assert!(wake.is_there().now_or_never().is_none());
        wake.heard(OLD);
        wake.heard(OLD);
        assert!(wake.is_there().now_or_never().is_some());
        assert!(wake.is_there().now_or_never().is_none());
    }

    #[test]
    fn a_connection_ends_when_its_peer_is_another_incarnation() {
        let wake = Wake::default();
        wake.connected(OLD);
        wake.heard(OLD);
        assert!(wake.is_another().now_or_never().is_none());
        wake.heard(NEW);
        assert!(wake.is_another().now_or_never().is_some());
        wake.lost();
        wake.connected(NEW);
        wake.heard(NEW);
        assert!(wake.is_another().now_or_never().is_none());
    }

    /// Its hello may come between our dial's end and the link's noting it.
    #[test]
    fn a_hello_of_the_connected_incarnation_breaks_nothing() {
        let wake = Wake::default();
        wake.heard(NEW);
        wake.connected(NEW);
        assert!(wake.is_another().now_or_never().is_none());
    }
}
