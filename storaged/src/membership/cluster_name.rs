//! Which cluster a registry is: two that are given one by mistake must not mix. Each has a number of its own, made with its first epoch, which
//! nodes remember; an operator may give it a name in front of it, by which a machine that remembers nothing finds out as well.

use std::fmt;

use thiserror::Error;

/// A name has at most so many bytes.
const NAME_BYTES_MAX: usize = 64;
/// Between the name and the number.
const MARK: char = '.';

/// `membership.cluster`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterName(String);

/// A text that is no name of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("expected 1 to {NAME_BYTES_MAX} of a-z, 0-9, _ and -, got {got:?}")]
pub struct ClusterNameError {
    got: String,
}

impl ClusterName {
    /// Checks it.
    ///
    /// # Errors
    /// [`ClusterNameError`] if it has other characters, too many or none.
    pub fn new(text: &str) -> Result<Self, ClusterNameError> {
        let is_good = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
        if (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_good) {
            return Ok(Self(text.into()));
        }
        let got = text.chars().take(NAME_BYTES_MAX).collect();
        Err(ClusterNameError { got })
    }

    /// What a roster calls a cluster of this name that begins now.
    pub fn with_number(&self, number: u64) -> String {
        format!("{self}{MARK}{number:016x}")
    }

    /// Whether a roster is this cluster's. One that began without a name is called by its number.
    pub fn is(&self, cluster: &str) -> bool {
        let name = cluster.split_once(MARK).map_or(cluster, |(name, _)| name);
        name == self.0
    }
}

impl fmt::Display for ClusterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_that_of_its_own_cluster_alone() {
        let prod = ClusterName::new("prod").unwrap();
        let began = prod.with_number(0x3f);
        assert_eq!(began, "prod.000000000000003f");
        assert!(prod.is(&began));
        for other in ["production.000000000000003f", "3f", "test.000000000000003f"] {
            assert!(!prod.is(other), "{other}");
        }
        let unnamed = ClusterName::new("000000000000003f").unwrap();
        assert!(unnamed.is("000000000000003f") && !unnamed.is(&began));
        for wrong in ["", "a.b", "A", "a b", &"x".repeat(65)] {
            assert!(ClusterName::new(wrong).is_err(), "{wrong:?}");
        }
    }
}
