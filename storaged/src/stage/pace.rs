//! How many requests a tenant gets through per second: the others wait in their own threads, before the one loop that serves all tenants.

use std::num::NonZeroU32;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Requests of so long a time may come at once.
const BURST: Duration = Duration::from_millis(250);

/// Turns at an even pace.
#[derive(Debug)]
pub(super) struct RequestPace {
    gap: Duration,
    /// When the next turn would be if nobody had been idle.
    next: Mutex<Instant>,
}

impl RequestPace {
    pub fn new(per_second: NonZeroU32) -> Self {
        Self {
            gap: Duration::from_secs(1) / per_second.get(),
            next: Mutex::new(Instant::now()),
        }
    }

    /// Waits for the caller's turn.
    pub fn wait(&self) {
        let now = Instant::now();
        std::thread::sleep(self.turn(now).saturating_duration_since(now));
    }

    /// When whoever comes now has its turn. Time in which nobody came is kept for a burst, and no more of it.
    fn turn(&self, now: Instant) -> Instant {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(BURST).unwrap_or(now);
        let turn = (*next).max(earliest);
        *next = turn + self.gap;
        turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_burst_comes_at_an_even_pace() {
        let pace = RequestPace::new(NonZeroU32::new(100).unwrap());
        let idle = Instant::now() + Duration::from_secs(60);
        let turns: Vec<Instant> = (0..100).map(|_| pace.turn(idle)).collect();
        let at_once = turns.iter().filter(|turn| **turn <= idle).count();
        assert_eq!(at_once, 26);
        let last = turns[99].saturating_duration_since(idle);
        assert_eq!(last, Duration::from_millis(740));
        // And idle time beyond the burst is lost.
        assert_eq!(
            pace.turn(idle + Duration::from_secs(60)) + BURST,
            idle + Duration::from_secs(60)
        );
    }
}
