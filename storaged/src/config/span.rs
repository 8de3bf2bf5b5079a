//! A length of time as an operator writes it: a number and its unit, such as `90s`, `30m`, `1h` or `2d`.

use std::str::FromStr;

use serde::Deserialize;
use thiserror::Error;

/// A length of time, in whole seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Span {
    seconds: u64,
}

/// Text that is no length of time.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected a whole number and its unit, such as 90s, 30m, 1h or 2d, got {0:?}")]
pub struct NoSpan(String);

impl Span {
    /// So many seconds.
    pub const fn from_secs(seconds: u64) -> Self {
        Self { seconds }
    }

    /// In milliseconds.
    pub const fn as_ms(self) -> u64 {
        self.seconds.saturating_mul(1_000)
    }
}

impl FromStr for Span {
    type Err = NoSpan;

    fn from_str(text: &str) -> Result<Self, NoSpan> {
        let no_span = || NoSpan(text.into());
        let unit = text.chars().next_back().ok_or_else(no_span)?;
        let in_seconds: u64 = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3_600,
            'd' => 86_400,
            _ => return Err(no_span()),
        };
        let number = text.strip_suffix(unit).unwrap_or(text).trim();
        let number: u64 = number.parse().map_err(|_| no_span())?;
        let seconds = number.checked_mul(in_seconds).ok_or_else(no_span)?;
        Ok(Self { seconds })
    }
}

impl TryFrom<String> for Span {
    type Error = NoSpan;

    fn try_from(text: String) -> Result<Self, NoSpan> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_and_its_unit_are_a_span_and_nothing_else_is() {
        for (text, seconds) in [
            ("0s", 0),
            ("90s", 90),
            ("30m", 1_800),
            ("1 h", 3_600),
            ("2d", 172_800),
        ] {
            assert_eq!(text.parse(), Ok(Span::from_secs(seconds)), "{text}");
        }
        for text in [
            "",
            "h",
            "1",
            "-1h",
            "1.5h",
            "1hh",
            "1w",
            "99999999999999999999s",
            "9999999999999999999d",
        ] {
            assert_eq!(text.parse::<Span>(), Err(NoSpan(text.into())));
        }
    }
}
