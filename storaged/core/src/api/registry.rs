//! The registry of runs: what is asked of it, and what it answers.

use thiserror::Error;

/// What the registry makes of a run that is to be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// The run has its number there, which is above that of every other; also if an earlier answer that said so was lost.
    Registered,
    /// The registry has a run of this number or a higher one; the highest is given.
    Taken { highest: u64 },
}

/// Why the registry was not asked, or what it answered that cannot be used. The text has its own words.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct RegistryFault(pub String);
