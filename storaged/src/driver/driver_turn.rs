//! Whose turn it is in the driver's loop. What peers say comes first, because whole groups wait for it; but a peer that never ends must not
//! keep the node from its trainers, its own work and the time.

use std::time::Duration;

use tokio::time::Instant;

/// Peers are heard for so long before something else is, and what is due is late by so much at most.
const PEERS_FOR: Duration = Duration::from_millis(1);

/// Who is heard now: the first that has something, of peers, the node's own work, trainers and the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DriverTurn {
    All,
    /// What is due by now, alone.
    Time,
    ButPeers,
    /// Own work that a peer causes may be without end too.
    ButPeersAndWork,
    /// And so may trainers.
    Rest,
}

impl DriverTurn {
    pub fn hears_peers(self) -> bool {
        self == Self::All
    }

    pub fn hears_work(self) -> bool {
        matches!(self, Self::All | Self::ButPeers)
    }

    pub fn hears_trainers(self) -> bool {
        matches!(self, Self::All | Self::ButPeers | Self::ButPeersAndWork)
    }
}

/// Gives turns.
#[derive(Debug, Default)]
pub(super) struct DriverTurns {
    /// The first peer since others had their turn.
    peer_heard_at: Option<Instant>,
    /// Turns without peers.
    without_peers: u32,
    /// The last turn was the time's.
    was_time: bool,
}

impl DriverTurns {
    /// The next one.
    pub fn next(&mut self, now: Instant, deadline: Instant) -> DriverTurn {
        if deadline + PEERS_FOR <= now && !self.was_time {
            self.was_time = true;
            return DriverTurn::Time;
        }
        self.was_time = false;
        if self.peer_heard_at.is_none_or(|at| now < at + PEERS_FOR) {
            return DriverTurn::All;
        }
        self.peer_heard_at = None;
        self.without_peers = self.without_peers.wrapping_add(1);
        match self.without_peers % 4 {
            0 | 2 => DriverTurn::ButPeers,
            1 => DriverTurn::ButPeersAndWork,
            _ => DriverTurn::Rest,
        }
    }

    /// A peer is heard.
    pub fn note_peer(&mut self, now: Instant) {
        self.peer_heard_at.get_or_insert(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All have something all the time, and each event takes a while.
    #[test]
    fn all_are_heard_whoever_has_something_without_end() {
        let (mut turns, mut now) = (DriverTurns::default(), Instant::now());
        let mut heard = [0; 5];
        for _ in 0..1000 {
            let turn = turns.next(now, now - PEERS_FOR);
            let who = match turn {
                DriverTurn::Time => 0,
                turn if turn.hears_peers() => {
                    turns.note_peer(now);
                    1
                }
                turn if turn.hears_work() => 2,
                turn if turn.hears_trainers() => 3,
                _ => 4,
            };
            heard[who] += 1;
            now += PEERS_FOR / 4;
        }
        assert!(heard.iter().all(|count| *count >= 20), "{heard:?}");
        assert!(heard[1] > heard[2] + heard[3] + heard[4], "{heard:?}");
    }

    #[test]
    fn where_nothing_is_late_nobody_is_left_out() {
        let (mut turns, now) = (DriverTurns::default(), Instant::now());
        for _ in 0..100 {
            turns.note_peer(now);
            assert_eq!(turns.next(now, now), DriverTurn::All);
        }
    }
}
