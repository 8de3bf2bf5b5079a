//! `memory.budget` as it is written: bytes, or a share of what there is.

use std::fmt;

use bytesize::ByteSize;
use serde::Deserialize;
use thiserror::Error;

/// Bytes, or a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum BudgetSize {
    /// So many bytes.
    Bytes(ByteSize),
    /// So many hundredths of what this machine or container has.
    Percent(u8),
}

/// A text that is no budget.
#[derive(Debug, Error)]
#[error("expected bytes such as \"256GiB\" or a share from \"1%\" to \"100%\", got {got:?}")]
pub struct BudgetSizeError {
    got: String,
}

impl TryFrom<String> for BudgetSize {
    type Error = BudgetSizeError;

    fn try_from(text: String) -> Result<Self, BudgetSizeError> {
        let wrong = || BudgetSizeError { got: text.clone() };
        match text.strip_suffix('%') {
            Some(share) => match share.trim().parse() {
                Ok(share @ 1..=100) => Ok(Self::Percent(share)),
                _ => Err(wrong()),
            },
            None => text.parse().map(Self::Bytes).map_err(|_| wrong()),
        }
    }
}

impl fmt::Display for BudgetSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "{bytes}"),
            Self::Percent(share) => write!(f, "{share}%"),
        }
    }
}

impl BudgetSize {
    /// Bytes, where there is so much.
    pub fn of(self, limit: u64) -> ByteSize {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(share) => ByteSize::b(limit / 100 * u64::from(share)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_shares_are_taken() {
        let size = |text: &str| BudgetSize::try_from(text.to_owned());
        assert_eq!(size("50%").unwrap().of(1000), ByteSize::b(500));
        assert_eq!(size("4GiB").unwrap().of(1000), ByteSize::gib(4));
        for wrong in ["0%", "101%", "%", "x", "-1%"] {
            assert!(size(wrong).unwrap_err().to_string().contains(wrong));
        }
    }
}
