//! The cost model: when the last byte of a chunk is through the link, for each way to write it. Writing and sending
//! overlap, so time on the processor costs nothing while the link still has earlier chunks to send.

use thiserror::Error;

use super::Encoding;

/// Seconds of sending that may lie ahead: more does not wait in memory.
const AHEAD_BYTES_MAX: f64 = (64 << 20) as f64;
/// What an encoding must save of the raw chunk's time to be chosen: less would be lost in a wrong expectation.
const LEAST_GAIN: f64 = 0.05;

/// A rate or a share that is none.
#[derive(Clone, Copy, PartialEq, Debug, Error)]
pub enum RateError {
    /// Of a link.
    #[error("expected a link rate above 0 bytes per second, got {0}")]
    Link(f64),
    /// Of the processor.
    #[error("expected a share of one core above 0 and at most 1, got {0}")]
    Processor(f64),
}

/// Bytes per second that a link carries.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub struct LinkRate(f64);

impl LinkRate {
    /// Validates bytes per second.
    ///
    /// # Errors
    /// [`RateError::Link`] if it is not a number above 0.
    pub fn new(bytes_per_second: f64) -> Result<Self, RateError> {
        if bytes_per_second.is_finite() && bytes_per_second > 0.0 {
            Ok(Self(bytes_per_second))
        } else {
            Err(RateError::Link(bytes_per_second))
        }
    }

    /// Bytes per second.
    pub fn get(self) -> f64 {
        self.0
    }
}

/// The share of one core that encoding may take.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub struct Processor(f64);

impl Processor {
    /// A whole core.
    pub const WHOLE: Self = Self(1.0);

    /// Validates a share.
    ///
    /// # Errors
    /// [`RateError::Processor`] if it is not above 0 and at most 1.
    pub fn new(share: f64) -> Result<Self, RateError> {
        if share > 0.0 && share <= 1.0 {
            Ok(Self(share))
        } else {
            Err(RateError::Processor(share))
        }
    }
}

/// What writing a chunk takes: expected, or measured.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Estimate {
    /// Seconds of one core.
    pub seconds: f64,
    /// Bytes to send.
    pub bytes: f64,
}

impl std::ops::AddAssign for Estimate {
    fn add_assign(&mut self, other: Self) {
        self.seconds += other.seconds;
        self.bytes += other.bytes;
    }
}

/// Judges encodings for one link.
#[derive(Clone, Copy, Debug)]
pub struct CostModel {
    link: LinkRate,
    processor: Processor,
    /// Seconds that the link has still to send when the processor is free again.
    ahead: f64,
}

impl CostModel {
    /// For a link that has nothing to send yet.
    pub fn new(link: LinkRate, processor: Processor) -> Self {
        Self {
            link,
            processor,
            ahead: 0.0,
        }
    }

    /// The link's rate has been measured anew.
    pub fn set_link(&mut self, link: LinkRate) {
        self.ahead *= self.link.0 / link.0;
        self.link = link;
    }

    /// Whether so many seconds of one core before a chunk of so many bytes cost little: the link is busy with earlier
    /// chunks meanwhile, or they are at most `share` of what the chunk itself takes on the link.
    pub(super) fn is_hidden(&self, seconds: f64, bytes: usize, share: f64) -> bool {
        let seconds = seconds / self.processor.0;
        seconds <= self.ahead || seconds <= share * bytes as f64 / self.link.0
    }

    /// Seconds by which the link's last byte moves back.
    fn added(&self, estimate: Estimate) -> f64 {
        let seconds = estimate.seconds / self.processor.0;
        seconds.max(self.ahead) - self.ahead + estimate.bytes / self.link.0
    }

    /// The encoding that is through first; `raw` unless another one is clearly sooner.
    pub fn choose(
        &self,
        raw: Estimate,
        others: impl IntoIterator<Item = (Encoding, Estimate)>,
    ) -> (Encoding, Estimate) {
        let limit = self.added(raw) * (1.0 - LEAST_GAIN);
        let sooner = others
            .into_iter()
            .map(|(encoding, estimate)| (self.added(estimate), encoding, estimate))
            .filter(|(added, _, _)| *added < limit)
            .min_by(|a, b| a.0.total_cmp(&b.0));
        sooner.map_or((Encoding::Raw, raw), |(_, encoding, estimate)| {
            (encoding, estimate)
        })
    }

    /// A chunk was written at this cost, and is on its way.
    pub fn took(&mut self, got: Estimate) {
        let seconds = got.seconds / self.processor.0;
        let ahead = self.ahead.max(seconds) - seconds + got.bytes / self.link.0;
        self.ahead = ahead.min(AHEAD_BYTES_MAX / self.link.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(rate: f64, share: f64) -> CostModel {
        CostModel::new(LinkRate::new(rate).unwrap(), Processor::new(share).unwrap())
    }

    const RAW: Estimate = Estimate {
        seconds: 0.0,
        bytes: 1e6,
    };

    fn packed(seconds: f64, bytes: f64) -> [(Encoding, Estimate); 1] {
        [(Encoding::Packed, Estimate { seconds, bytes })]
    }

    #[test]
    fn a_slow_link_gets_few_bytes_and_a_fast_one_raw_ones() {
        let packed = || packed(0.001, 0.5e6);
        assert_eq!(model(1e8, 1.0).choose(RAW, packed()).0, Encoding::Packed);
        assert_eq!(model(1e10, 1.0).choose(RAW, packed()).0, Encoding::Raw);
    }

    #[test]
    fn a_small_share_of_a_core_makes_packing_dear() {
        let packed = || packed(0.004, 0.5e6);
        assert_eq!(model(1e8, 1.0).choose(RAW, packed()).0, Encoding::Packed);
        assert_eq!(model(1e8, 0.1).choose(RAW, packed()).0, Encoding::Raw);
    }

    #[test]
    fn time_on_the_processor_is_free_while_the_link_is_behind() {
        let mut model = model(1e9, 1.0);
        let packed = || packed(0.0009, 0.5e6);
        assert_eq!(model.choose(RAW, packed()).0, Encoding::Raw);
        model.took(RAW);
        assert_eq!(model.choose(RAW, packed()).0, Encoding::Packed);
    }

    #[test]
    fn rates_that_are_none_are_refused() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(LinkRate::new(rate).is_err());
        }
        for share in [0.0, 1.5, f64::NAN] {
            assert!(Processor::new(share).is_err());
        }
    }
}
