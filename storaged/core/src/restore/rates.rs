//! How fast bytes come: as it was measured on this node where it was, a first guess elsewhere, and which of both it is.

use storaged_wire::verdict::{ExpectedTime, RateSource, Stretch};

use crate::api::SessionTally;
use crate::limits;

/// Tiny transfers say nothing of a rate.
const TELLING_BYTES: u64 = 1 << 20;

/// Rates for the plan's estimate: measured where something was measured, a first guess elsewhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    pub(super) session: TransferRate,
    pub(super) durable: TransferRate,
}

/// How fast bytes come one way.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferRate {
    bytes_per_ms: u64,
    source: RateSource,
}

impl TransferRate {
    pub fn guessed(bytes_per_ms: u64) -> Self {
        Self {
            bytes_per_ms,
            source: RateSource::FirstGuess,
        }
    }

    /// Moves the estimate a quarter of the way to what was just seen.
    fn learn(&mut self, bytes: u64, elapsed_ms: u64) {
        if bytes < TELLING_BYTES {
            return;
        }
        let measured = bytes / elapsed_ms.max(1);
        let moved = self.bytes_per_ms.saturating_mul(3).saturating_add(measured);
        self.bytes_per_ms = moved.div_ceil(4).max(1);
        self.source = RateSource::Measured;
    }

    /// What so many bytes take.
    pub fn expected(self, stretch: Stretch, bytes: u64) -> ExpectedTime {
        ExpectedTime {
            stretch,
            ms: bytes.div_ceil(self.bytes_per_ms),
            rate: self.source,
        }
    }
}

impl Default for Rates {
    fn default() -> Self {
        Self {
            session: TransferRate::guessed(limits::SESSION_BYTES_PER_MS),
            durable: TransferRate::guessed(limits::DURABLE_BYTES_PER_MS),
        }
    }
}

impl Rates {
    /// A session has moved so much.
    pub fn session(&mut self, tally: &SessionTally) {
        self.session.learn(tally.bytes, tally.elapsed_ms);
    }

    /// The durable tier has given so much.
    pub fn durable(&mut self, bytes: u64, elapsed_ms: u64) {
        self.durable.learn(bytes, elapsed_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(bytes: u64, elapsed_ms: u64) -> SessionTally {
        SessionTally {
            bytes,
            elapsed_ms,
            ..SessionTally::default()
        }
    }

    fn of_sessions(bytes_per_ms: u64) -> Rates {
        Rates {
            session: TransferRate::guessed(bytes_per_ms),
            ..Rates::default()
        }
    }

    #[test]
    fn the_rate_of_sessions_moves_a_quarter_of_the_way_to_what_the_last_one_did() {
        let mut rates = of_sessions(1_000);
        rates.session(&session(50_000_000, 10_000));
        assert_eq!(rates.session.bytes_per_ms, (3 * 1_000 + 5_000) / 4);
        let expected = rates.session.expected(Stretch::Network, 20_001);
        assert_eq!(expected.ms, 11, "rounded up");
        for _ in 0..40 {
            rates.session(&session(50_000_000, 10_000));
        }
        assert_eq!(rates.session.bytes_per_ms, 5_000);
    }

    #[test]
    fn a_session_of_less_than_a_mebibyte_says_nothing_of_the_rate() {
        let mut rates = of_sessions(1_000);
        rates.session(&session((1 << 20) - 1, 1));
        assert_eq!(rates.session.bytes_per_ms, 1_000);
        rates.session(&session(1 << 20, 1));
        assert_eq!(rates.session.bytes_per_ms, (3 * 1_000 + (1 << 20)) / 4);
    }

    /// A plan is shown an estimate, never a division by nothing.
    #[test]
    fn a_session_that_took_no_time_or_moved_hardly_anything_leaves_a_rate() {
        let mut rates = of_sessions(1);
        rates.session(&session(1 << 20, u64::MAX));
        assert_eq!(rates.session.bytes_per_ms, 1);
        rates.session(&session(1 << 20, 0));
        assert!(rates.session.bytes_per_ms > 1);
    }

    #[test]
    fn a_rate_is_a_first_guess_until_something_was_measured() {
        let mut rates = Rates::default();
        let part = |rates: &Rates| rates.durable.expected(Stretch::Durable, 1 << 30);
        assert_eq!(part(&rates).rate, RateSource::FirstGuess);
        rates.durable(TELLING_BYTES - 1, 1);
        assert_eq!(part(&rates).rate, RateSource::FirstGuess);
        let guessed = part(&rates).ms;
        rates.durable(1 << 30, 100 * guessed);
        assert_eq!(part(&rates).rate, RateSource::Measured);
        assert!(part(&rates).ms > guessed, "slower than guessed");
        let session = rates.session.expected(Stretch::Network, 1);
        assert_eq!(session.rate, RateSource::FirstGuess, "another rate");
    }
}
