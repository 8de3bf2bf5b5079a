//! Whose turn it is in the driver's loop. What peers say comes first, because whole groups wait for it; but a peer that never ends must not
//! keep the node from its trainers, its own work and the time.

use std::time::Duration;

use tokio::time::Instant;

/// Peers are heard for so long before anything else is looked at.
const PEERS_FOR: Duration = Duration::from_millis(1);

/// Who is heard next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DriverTurn {
    /// Whoever has something, peers first; since then these alone were heard.
    Peers(Option<Instant>),
    /// What is due by now first, and no peer.
    Time,
    /// All but peers.
    Others,
}

impl DriverTurn {
    /// At the beginning, and after anything but a peer.
    pub const FIRST: Self = Self::Peers(None);

    /// Whose turn it is at this moment.
    pub fn at(self, now: Instant) -> Self {
        match self {
            Self::Peers(Some(since)) if now >= since + PEERS_FOR => Self::Time,
            turn => turn,
        }
    }

    /// A peer is heard.
    pub fn after_a_peer(self, now: Instant) -> Self {
        match self {
            Self::Peers(since) => Self::Peers(since.or(Some(now))),
            turn => turn,
        }
    }

    pub fn is_for_peers(self) -> bool {
        matches!(self, Self::Peers(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_heard_for_a_moment_and_then_all_others_once() {
        let now = Instant::now();
        let turn = DriverTurn::FIRST.at(now + PEERS_FOR).after_a_peer(now);
        assert!(turn.at(now + PEERS_FOR / 2).is_for_peers());
        let later = turn.after_a_peer(now + PEERS_FOR / 2);
        assert_eq!(later.at(now + PEERS_FOR), DriverTurn::Time);
        assert!(!DriverTurn::Time.is_for_peers() && !DriverTurn::Others.is_for_peers());
    }
}
