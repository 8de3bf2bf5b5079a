//! Cores of this machine: which this process may use, and threads that stay on one.

use std::fmt;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Which threads the codec or the network has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerThreads {
    /// So many, wherever the system puts them.
    Anywhere(usize),
    /// One on each of these cores.
    Cores(Vec<usize>),
}

impl WorkerThreads {
    /// How many.
    pub fn count(&self) -> usize {
        match self {
            Self::Anywhere(threads) => *threads,
            Self::Cores(cores) => cores.len(),
        }
    }

    /// The core of each thread, where it has one.
    pub fn cores(&self) -> Vec<Option<usize>> {
        match self {
            Self::Anywhere(threads) => vec![None; *threads],
            Self::Cores(cores) => cores.iter().copied().map(Some).collect(),
        }
    }
}

impl fmt::Display for WorkerThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anywhere(threads) => write!(f, "{threads} threads"),
            Self::Cores(cores) => write!(f, "threads on cores {cores:?}"),
        }
    }
}

/// A core that this process cannot have.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// There is no such core, or it may not be used here.
    #[error(
        "expected cores that this process may use ({usable}), got {got}: name others, or allow it (CPUAffinity=, cpuset)"
    )]
    Unusable { usable: String, got: usize },
    /// The system does not say which it may use.
    #[error("expected to be told which cores this process may use")]
    Unknown(#[from] rustix::io::Errno),
}

/// Whether this process may use these cores.
///
/// # Errors
/// [`CoreError`] for the first that it may not.
pub fn check_cores(cores: &[usize]) -> Result<(), CoreError> {
    let usable = sched_getaffinity(None)?;
    let may = |core: usize| core < CpuSet::MAX_CPU && usable.is_set(core);
    match cores.iter().copied().find(|core| !may(*core)) {
        None => Ok(()),
        Some(got) => Err(CoreError::Unusable {
            usable: runs_of((0..CpuSet::MAX_CPU).filter(|core| may(*core))),
            got,
        }),
    }
}

/// Numbers as people write them: `0-3,8`.
fn runs_of(numbers: impl Iterator<Item = usize>) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let text = runs.iter().map(|(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    });
    text.collect::<Vec<_>>().join(",")
}

/// Keeps the calling thread on a core.
///
/// # Errors
/// As the system says, also if there is no such core or this process may not use it.
pub fn pin(core: usize) -> std::io::Result<()> {
    let unknown = || {
        let (most, got) = (CpuSet::MAX_CPU - 1, core);
        std::io::Error::other(format!(
            "expected a core's number, at most {most}, got {got}"
        ))
    };
    let mut only = CpuSet::new();
    (core < CpuSet::MAX_CPU).then_some(()).ok_or_else(unknown)?;
    only.set(core);
    sched_setaffinity(None, &only).map_err(|error| {
        let source = std::io::Error::from(error);
        std::io::Error::new(source.kind(), format!("staying on core {core}: {source}"))
    })
}
