//! How fast bytes come: as it was measured on this node where it was, a first guess elsewhere, and which of both it is.

use storaged_wire::verdict::{ExpectedTime, RateSource, Stretch};

use crate::api::{DigestTally, Now, SessionTally, UploadTally};
use crate::limits;

/// Tiny transfers say nothing of a rate.
const TELLING_BYTES: u64 = 1 << 20;
/// Transfers that overlap for ever are not one burst for ever.
const BURST_MAX_MS: u64 = 60_000;

/// Rates for the plan's estimate: measured where something was measured, a first guess elsewhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    /// Of RAM to one reader's thread.
    pub(super) ram: TransferRate,
    pub(super) session: TransferRate,
    durable: TransferRate,
    /// What the durable tier takes.
    upload: TransferRate,
}

/// How fast bytes come one way, to this node as a whole: transfers at the same time share its links.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferRate {
    bytes_per_ms: u64,
    /// What was measured before the burst; nothing if that is the first one.
    settled: Option<u64>,
    burst: Option<Burst>,
    source: RateSource,
}

/// Transfers of which each began before the last one of the others had ended.
#[derive(Debug, Clone, Copy)]
struct Burst {
    begun: Now,
    ended: Now,
    bytes: u64,
}

impl TransferRate {
    pub fn guessed(bytes_per_ms: u64) -> Self {
        Self {
            bytes_per_ms,
            settled: None,
            burst: None,
            source: RateSource::FirstGuess,
        }
    }

    /// Takes what was seen first for the rate, and moves it a quarter of the way to what is seen later. Of transfers at the same time
    /// it is what they have moved together: each of them saw only its share.
    fn learn(&mut self, bytes: u64, elapsed_ms: u64, now: Now) {
        if bytes < TELLING_BYTES {
            return;
        }
        let begun = Now(now.0.saturating_sub(elapsed_ms));
        let goes_on = |burst: &Burst| begun < burst.ended && now.since(burst.begun) < BURST_MAX_MS;
        let burst = match self.burst.filter(goes_on) {
            Some(burst) => Burst {
                begun: burst.begun.min(begun),
                ended: now,
                bytes: burst.bytes.saturating_add(bytes),
            },
            None => {
                let was_measured = self.source == RateSource::Measured;
                self.settled = was_measured.then_some(self.bytes_per_ms);
                Burst {
                    begun,
                    ended: now,
                    bytes,
                }
            }
        };
        let seen = burst.bytes / burst.ended.since(burst.begun).max(1);
        self.move_to(seen, self.settled);
        self.burst = Some(burst);
    }

    /// Takes what one thread was seen to read. Threads at the same time are measured each by itself.
    fn learn_of_thread(&mut self, bytes: u64, busy_us: u64) {
        if bytes >= TELLING_BYTES && busy_us > 0 {
            let was_measured = self.source == RateSource::Measured;
            let before = was_measured.then_some(self.bytes_per_ms);
            self.move_to(bytes.saturating_mul(1_000) / busy_us, before);
        }
    }

    fn move_to(&mut self, seen: u64, before: Option<u64>) {
        let moved = match before {
            Some(before) => before.saturating_mul(3).saturating_add(seen).div_ceil(4),
            None => seen,
        };
        self.bytes_per_ms = moved.max(1);
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
            ram: TransferRate::guessed(limits::RAM_BYTES_PER_MS),
            session: TransferRate::guessed(limits::SESSION_BYTES_PER_MS),
            durable: TransferRate::guessed(limits::DURABLE_BYTES_PER_MS),
            upload: TransferRate::guessed(limits::DURABLE_BYTES_PER_MS),
        }
    }
}

impl Rates {
    /// A session has moved so much until now, over each link a sum for each of its sinks.
    pub fn session(&mut self, tally: &SessionTally, sinks: usize, now: Now) {
        let over_links = tally.bytes.saturating_mul(sinks as u64);
        self.session.learn(over_links, tally.elapsed_ms, now);
    }

    /// The node has digested a shard. Whoever loads one copies it and compares fingerprints instead: a quarter less of a thread with GFNI and
    /// AVX-512, up to two thirds more without.
    pub fn digest(&mut self, tally: &DigestTally) {
        self.ram.learn_of_thread(tally.bytes, tally.busy_us);
    }

    /// The durable tier has given so much until now.
    pub fn durable(&mut self, bytes: u64, elapsed_ms: u64, now: Now) {
        self.durable.learn(bytes, elapsed_ms, now);
    }

    /// It has taken so much until now.
    pub fn upload(&mut self, tally: &UploadTally, now: Now) {
        self.upload.learn(tally.bytes, tally.elapsed_ms, now);
    }

    /// Of the durable tier to this node. Before anything was read here it is what the tier took, over the same links: a guess still, but none that
    /// is the same for a disk and for a store far away.
    pub(super) fn of_tier(&self) -> TransferRate {
        match (self.durable.source, self.upload.source) {
            (RateSource::FirstGuess, RateSource::Measured) => {
                TransferRate::guessed(self.upload.bytes_per_ms)
            }
            _ => self.durable,
        }
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
        let session = TransferRate {
            source: RateSource::Measured,
            ..TransferRate::guessed(bytes_per_ms)
        };
        Rates {
            session,
            ..Rates::default()
        }
    }

    #[test]
    fn the_rate_of_sessions_moves_a_quarter_of_the_way_to_what_the_last_one_did() {
        let mut rates = of_sessions(1_000);
        rates.session(&session(50_000_000, 10_000), 1, Now(10_000));
        assert_eq!(rates.session.bytes_per_ms, (3 * 1_000 + 5_000) / 4);
        let expected = rates.session.expected(Stretch::Network, 20_001);
        assert_eq!(expected.ms, 11, "rounded up");
        for turn in 2..42 {
            rates.session(&session(50_000_000, 10_000), 1, Now(turn * 10_000));
        }
        assert_eq!(rates.session.bytes_per_ms, 5_000);
    }

    /// In (4, 4) a link carries four sums for each block that an encode makes, and one while a shard is decoded.
    #[test]
    fn each_sink_of_a_session_has_its_sums_on_every_link() {
        let mut rates = Rates::default();
        rates.session(&session(50_000_000, 10_000), 4, Now(10_000));
        assert_eq!(rates.session.bytes_per_ms, 20_000);
    }

    /// The guess may be wrong by far, and would be most of the estimate for several restores.
    #[test]
    fn what_is_measured_first_takes_the_place_of_the_guess() {
        let mut rates = Rates::default();
        rates.session(&session(50_000_000, 10_000), 1, Now(10_000));
        assert_eq!(rates.session.bytes_per_ms, 5_000);
    }

    #[test]
    fn transfers_at_the_same_time_are_measured_together() {
        let mut rates = Rates::default();
        // Four of 100 MB each over one link of 100 MB/s: each of them saw a quarter of it.
        for late in 0..4 {
            rates.durable(100_000_000, 4_000, Now(10_000 + late));
        }
        assert_eq!(rates.durable.bytes_per_ms, 400_000_000 / 4_003);
        // One after another burst is another measurement.
        rates.durable(100_000_000, 500, Now(20_000));
        assert_eq!(
            rates.durable.bytes_per_ms,
            (3 * 99_925 + 200_000_u64).div_ceil(4)
        );
    }

    #[test]
    fn a_burst_that_does_not_end_is_cut_off() {
        let mut rates = Rates::default();
        for turn in 1..=100 {
            rates.session(&session(2_000_000, 2_000), 1, Now(turn * 1_000));
        }
        // It becomes ten times as fast, and that is found out within some bursts.
        for turn in 101..=1_600 {
            rates.session(&session(20_000_000, 2_000), 1, Now(turn * 1_000));
        }
        assert!(
            (16_000..21_000).contains(&rates.session.bytes_per_ms),
            "{rates:?}"
        );
    }

    /// A constant would be off by as much as a tier is faster or slower than it.
    #[test]
    fn what_the_tier_takes_is_the_first_guess_of_what_it_gives() {
        let mut rates = Rates::default();
        let part = |rates: &Rates| {
            let part = rates.of_tier().expected(Stretch::Durable, 1_000_000_000);
            (part.ms, part.rate)
        };
        rates.upload(&UploadTally::default(), Now(1_000));
        assert_eq!(part(&rates), (10_000, RateSource::FirstGuess));
        // Two at once share the way.
        for late in 0..2 {
            let (bytes, elapsed_ms) = (100_000_000, 500);
            rates.upload(&UploadTally { bytes, elapsed_ms }, Now(2_000 + late));
        }
        let guess = 1_000_000_000_u64.div_ceil(200_000_000 / 501);
        assert_eq!(part(&rates), (guess, RateSource::FirstGuess));
        rates.durable(100_000_000, 100, Now(9_000));
        let read = (1_000, RateSource::Measured);
        assert_eq!(part(&rates), read);
        let (bytes, elapsed_ms) = (100_000_000, 50_000);
        rates.upload(&UploadTally { bytes, elapsed_ms }, Now(99_000));
        assert_eq!(part(&rates), read, "it was read itself");
    }

    #[test]
    fn a_session_of_less_than_a_mebibyte_says_nothing_of_the_rate() {
        let mut rates = of_sessions(1_000);
        rates.session(&session((1 << 20) - 1, 1), 1, Now(1));
        assert_eq!(rates.session.bytes_per_ms, 1_000);
        rates.session(&session(1 << 20, 1), 1, Now(1));
        assert_eq!(rates.session.bytes_per_ms, (3 * 1_000 + (1 << 20)) / 4);
    }

    /// A plan is shown an estimate, never a division by nothing.
    #[test]
    fn a_session_that_took_no_time_or_moved_hardly_anything_leaves_a_rate() {
        let mut rates = of_sessions(1);
        rates.session(&session(1 << 20, u64::MAX), 1, Now(u64::MAX));
        assert_eq!(rates.session.bytes_per_ms, 1);
        rates.session(&session(1 << 20, 0), 1, Now(u64::MAX));
        assert!(rates.session.bytes_per_ms > 1);
    }

    #[test]
    fn what_ram_gives_a_reader_follows_from_what_digests_took() {
        let mut rates = Rates::default();
        let of = |bytes, busy_us| DigestTally { bytes, busy_us };
        let part = |rates: &Rates| rates.ram.expected(Stretch::Ram, 12_000_000_000);
        for nothing in [of(0, 0), of(TELLING_BYTES - 1, 1), of(TELLING_BYTES, 0)] {
            rates.digest(&nothing);
            assert_eq!(part(&rates).rate, RateSource::FirstGuess);
        }
        // Two shards on two threads at once say what one does.
        for _ in 0..2 {
            rates.digest(&of(3_000_000_000, 1_000_000));
        }
        let measured = part(&rates);
        assert_eq!((measured.ms, measured.rate), (4_000, RateSource::Measured));
        rates.digest(&of(u64::MAX, 1));
        assert!(rates.ram.bytes_per_ms > 4_000_000);
        rates.digest(&of(TELLING_BYTES, u64::MAX));
        assert!(rates.ram.bytes_per_ms > 0);
    }

    #[test]
    fn a_rate_is_a_first_guess_until_something_was_measured() {
        let mut rates = Rates::default();
        let part = |rates: &Rates| rates.durable.expected(Stretch::Durable, 1 << 30);
        assert_eq!(part(&rates).rate, RateSource::FirstGuess);
        rates.durable(TELLING_BYTES - 1, 1, Now(1));
        assert_eq!(part(&rates).rate, RateSource::FirstGuess);
        let guessed = part(&rates).ms;
        rates.durable(1 << 30, 100 * guessed, Now(100 * guessed));
        assert_eq!(part(&rates).rate, RateSource::Measured);
        assert!(part(&rates).ms > guessed, "slower than guessed");
        let session = rates.session.expected(Stretch::Network, 1);
        assert_eq!(session.rate, RateSource::FirstGuess, "another rate");
    }
}
