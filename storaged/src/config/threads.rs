//! How many threads the codec and the network have, and where: the shares of a node's cores that are the daemon's in a burst.
//! The arithmetic is in docs/decisions/2026-11-28-shares-of-the-cores.md.

use std::collections::BTreeSet;

use super::{ConfigError, value};
use crate::cores::{WorkerThreads, check_cores};

/// Threads of one kind, at most: each of the codec has blocks in its cache and two jobs in the queue.
const THREADS_MAX: usize = 256;
/// Of a machine with many cores the codec and the network have a thread for so many each, by default: half of the cores are the job's also
/// while both are busy.
const CORES_PER_THREAD: usize = 4;
/// On a small machine the codec has half of the cores, up to so many.
const CODEC_THREADS_SMALL: usize = 4;
/// The network's threads by default, at least: one encrypts and sends while another receives.
const NETWORK_THREADS_MIN: usize = 2;
/// And at most: each of the sockets that a node may have sends on one connection and receives on another, and a connection keeps one thread busy.
const NETWORK_THREADS_MAX: usize = 2 * crate::net::SOCKETS_MAX;

/// The codec's on a machine with so many cores.
pub(super) fn codec_threads(cores: usize) -> usize {
    let small = cores.div_ceil(2).min(CODEC_THREADS_SMALL);
    small.max(cores / CORES_PER_THREAD).min(THREADS_MAX)
}

/// The network's.
pub(super) fn network_threads(cores: usize) -> usize {
    (cores / CORES_PER_THREAD).clamp(NETWORK_THREADS_MIN, NETWORK_THREADS_MAX)
}

/// What this process may use: neither cores that it is kept from (affinity, cpuset) nor more than its control group's quota.
fn usable_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// What they are called in the file.
pub(super) struct ThreadKeys {
    pub(super) threads: &'static str,
    pub(super) cores: &'static str,
}

impl ThreadKeys {
    /// What is asked for, or by default what `of_cores` makes of the machine.
    pub(super) fn validate(
        &self,
        threads: Option<usize>,
        cores: Option<&[usize]>,
        of_cores: fn(usize) -> usize,
    ) -> Result<WorkerThreads, ConfigError> {
        match (threads, cores) {
            (Some(_), Some(_)) => {
                let cores = self.cores;
                Err(value(
                    self.threads,
                    format!("expected this or {cores}, which has a thread for each core, got both"),
                ))
            }
            (None, None) => Ok(WorkerThreads::Anywhere(of_cores(usable_cores()))),
            (Some(threads), None) if (1..=THREADS_MAX).contains(&threads) => {
                Ok(WorkerThreads::Anywhere(threads))
            }
            (Some(threads), None) => Err(value(
                self.threads,
                format!("expected 1 to {THREADS_MAX}, got {threads}"),
            )),
            (None, Some(cores)) => self.on_cores(cores),
        }
    }

    fn on_cores(&self, cores: &[usize]) -> Result<WorkerThreads, ConfigError> {
        let once = cores.iter().collect::<BTreeSet<_>>().len() == cores.len();
        if !once || !(1..=THREADS_MAX).contains(&cores.len()) {
            return Err(value(
                self.cores,
                format!("expected 1 to {THREADS_MAX} different cores, got {cores:?}"),
            ));
        }
        check_cores(cores).map_err(|error| value(self.cores, error))?;
        Ok(WorkerThreads::Cores(cores.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both together never have more than half of a machine that is large enough for both to have two.
    #[test]
    fn the_codec_and_the_network_have_shares_of_the_cores() {
        for (cores, codec, network) in [
            (1, 1, 2),
            (2, 1, 2),
            (3, 2, 2),
            (4, 2, 2),
            (8, 4, 2),
            (16, 4, 4),
            (32, 8, 8),
            (64, 16, 16),
            (96, 24, 24),
            (192, 48, 32),
            (384, 96, 32),
            (2048, 256, 32),
        ] {
            let got = (codec_threads(cores), network_threads(cores));
            assert_eq!(got, (codec, network), "{cores} cores");
        }
        for cores in 16..1024 {
            let both = codec_threads(cores) + network_threads(cores);
            assert!(both <= cores / 2, "{both} of {cores}");
        }
    }

    const KEYS: ThreadKeys = ThreadKeys {
        threads: "threads",
        cores: "cores",
    };

    #[test]
    fn cores_that_are_named_have_a_thread_each() {
        let usable = rustix::thread::sched_getaffinity(None).unwrap();
        let mut all = 0..rustix::thread::CpuSet::MAX_CPU;
        let core = all.find(|core| usable.is_set(*core)).unwrap();
        let threads = KEYS.validate(None, Some(&[core]), codec_threads).unwrap();
        assert_eq!(threads.cores(), [Some(core)]);
        let twice = KEYS.validate(None, Some(&[core, core]), codec_threads);
        assert!(twice.unwrap_err().to_string().contains("key cores"));
    }

    #[test]
    fn defaults_go_by_the_cores_that_this_process_may_use() {
        let all = KEYS.validate(None, None, |cores| cores);
        let allowed = rustix::thread::sched_getaffinity(None).unwrap().count() as usize;
        let WorkerThreads::Anywhere(all) = all.unwrap() else {
            panic!("nobody named cores");
        };
        // A control group's quota may allow less.
        assert!((1..=allowed).contains(&all), "{all} of {allowed}");
    }
}
