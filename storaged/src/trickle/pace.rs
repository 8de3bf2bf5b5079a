//! How much of the room for pieces is used. Memory that makes nothing faster is left alone: a disk gains nothing by a hundred parts at once, while
//! an object store moves the more the more connections there are, until the node's link is full. So more is tried as long as it helps. Where a
//! link is slow few share it, so that none takes longer than a request may ([`super::store::RetryPolicy`]).

use tokio::time::Instant;

/// Used from the beginning: eight parts of 16 MiB.
const OPEN_FIRST: u64 = 128 << 20;
/// Rounds in which what did not help is not tried again.
const PAUSE_ROUNDS: u32 = 16;

/// Whether pieces wait for room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Demand {
    Waiting,
    Met,
}

/// What was used before more was tried, and bytes per second with it.
#[derive(Debug, Clone, Copy)]
struct Before {
    open: u64,
    rate: f64,
}

/// How much is used, at most so much.
#[derive(Debug)]
pub(super) struct CopyPace {
    most: u64,
    open: u64,
    before: Option<Before>,
    pause: u32,
    round: Option<Round>,
}

/// As many bytes as may be under way at once, one after the other.
#[derive(Debug, Clone, Copy)]
struct Round {
    began: Instant,
    moved: u64,
}

impl CopyPace {
    pub fn new(most: u64) -> Self {
        Self {
            most,
            open: most.min(OPEN_FIRST),
            before: None,
            pause: 0,
            round: None,
        }
    }

    /// Bytes that may be under way.
    pub fn open(&self) -> u64 {
        self.open
    }

    /// A piece has come to its end.
    pub fn moved(&mut self, bytes: u64, now: Instant, demand: Demand) {
        let Some(round) = self.round.as_mut().filter(|_| demand == Demand::Waiting) else {
            // With nobody who waits the tier may be faster than this tells.
            self.round = (demand == Demand::Waiting).then_some(Round {
                began: now,
                moved: 0,
            });
            return;
        };
        round.moved += bytes;
        if round.moved >= self.open {
            let took = now.duration_since(round.began).as_secs_f64();
            let rate = round.moved as f64 / took.max(1e-6);
            self.round = Some(Round {
                began: now,
                moved: 0,
            });
            self.step(rate);
        }
    }

    /// A piece has not come: the tier may have become slow.
    pub fn failed(&mut self) {
        *self = Self {
            pause: PAUSE_ROUNDS,
            ..Self::new(self.most)
        };
    }

    fn step(&mut self, rate: f64) {
        if let Some(before) = self.before.take() {
            // At least half of what it could be.
            let ratio = self.open as f64 / before.open as f64;
            if rate < before.rate * f64::midpoint(ratio, 1.0) {
                self.open = before.open;
                self.pause = PAUSE_ROUNDS;
                return;
            }
        }
        if self.pause > 0 {
            self.pause -= 1;
            return;
        }
        if self.open < self.most {
            let open = self.open;
            self.before = Some(Before { open, rate });
            self.open = (open + open.div_ceil(2)).min(self.most);
        }
    }
}
