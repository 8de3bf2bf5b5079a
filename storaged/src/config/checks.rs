//! Values that hold one by one and not together, or that would do nothing.

use std::ops::RangeInclusive;

use bytesize::ByteSize;

use super::{Config, ConfigError, ConfigFile, TrickleSection, value};
use crate::trickle::SharedReadsMode;
use crate::trickle::store::StoreConfig;

impl ConfigFile {
    /// What is said of the durable tier goes together.
    pub(super) fn check_tier(&self) -> Result<(), ConfigError> {
        match &self.durable {
            Some(StoreConfig::Directory { path, .. }) if !path.is_absolute() => Err(value(
                "durable.path",
                format!(
                    "expected an absolute path, such as /shared/checkpoints, got {}: the daemon may be started in any directory",
                    path.display()
                ),
            )),
            Some(_) => Ok(()),
            None => match self.trickle.first_useless() {
                None => Ok(()),
                Some((key, got)) => Err(value(
                    key,
                    format!(
                        "expected a durable tier, [durable], beside it, got none and {got}: it has no effect without one; add [durable] or leave the key out"
                    ),
                )),
            },
        }
    }
}

/// Less holds up every part, and more is a typing error.
const IN_FLIGHT: RangeInclusive<u64> = 16 << 20..=64 << 30;

impl TrickleSection {
    pub(super) fn in_flight_bytes(&self) -> Result<u64, ConfigError> {
        let bytes = self.in_flight.as_u64();
        if IN_FLIGHT.contains(&bytes) {
            return Ok(bytes);
        }
        let text = format!("expected 16MiB to 64GiB, got {}", self.in_flight);
        Err(value("trickle.in_flight", text))
    }

    /// The first key that does something only with a durable tier, and what is set.
    fn first_useless(&self) -> Option<(&'static str, String)> {
        let set = |key, got: String, usual: String| (got != usual).then_some((key, got));
        let usual = Self::default();
        let rate = |rate: Option<ByteSize>| rate.map_or_else(String::new, |rate| rate.to_string());
        [
            set(
                "trickle.every",
                self.every.to_string(),
                usual.every.to_string(),
            ),
            set(
                "trickle.shared_reads",
                format!("{:?}", self.shared_reads),
                format!("{:?}", usual.shared_reads),
            ),
            set(
                "trickle.in_flight",
                self.in_flight.to_string(),
                usual.in_flight.to_string(),
            ),
            set("trickle.rate", rate(self.rate), rate(usual.rate)),
            set(
                "trickle.increments",
                self.increments.to_string(),
                usual.increments.to_string(),
            ),
            set(
                "trickle.keep_last",
                self.keep_last.to_string(),
                usual.keep_last.to_string(),
            ),
            set(
                "trickle.encryption",
                self.encryption.is_some().to_string(),
                usual.encryption.is_some().to_string(),
            ),
            set(
                "trickle.abandoned_hours",
                self.abandoned_hours.to_string(),
                usual.abandoned_hours.to_string(),
            ),
        ]
        .into_iter()
        .flatten()
        .next()
    }
}

impl Config {
    /// Whether nodes pass on what they read from the durable tier.
    pub fn shares_reads(&self) -> bool {
        match self.shared_reads {
            SharedReadsMode::Always => true,
            SharedReadsMode::Never => false,
            SharedReadsMode::Auto => matches!(
                self.durable,
                Some(StoreConfig::S3(_) | StoreConfig::Gcs(_) | StoreConfig::Azure(_))
            ),
        }
    }

    /// A budget in which not even the smallest rank could save and be protected is a typing error.
    pub(super) fn check_budget(&self) -> Result<(), ConfigError> {
        let least = self.budget_min();
        if self.budget >= least {
            return Ok(());
        }
        Err(value(
            "memory.budget",
            format!(
                "expected at least {}, for two slots of one rank and the parity that this node keeps beside, got {}: raise it",
                ByteSize::b(least),
                ByteSize::b(self.budget)
            ),
        ))
    }
}
