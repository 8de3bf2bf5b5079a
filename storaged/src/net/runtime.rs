//! The network's threads: a runtime of its own, on the cores that the operator names, if any.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use tokio::runtime::{Builder, Runtime};

use crate::cores::{WorkerThreads, pin};

/// Starts a runtime whose threads have this name.
///
/// # Errors
/// As the system says, also if a thread cannot stay on its core.
pub fn runtime_of(name: &str, threads: &WorkerThreads) -> io::Result<Runtime> {
    let mut builder = Builder::new_multi_thread();
    builder.thread_name(name).enable_all();
    let WorkerThreads::Cores(cores) = threads else {
        return builder.worker_threads(threads.count()).build();
    };
    let (pinned, told) = channel();
    let started = Starting {
        cores: cores.clone(),
        next: AtomicUsize::new(0),
        pinned,
    };
    let started = Arc::new(started);
    let runtime = builder
        .worker_threads(cores.len())
        .on_thread_start(move || started.thread())
        .build()?;
    // The runtime starts its workers when it is built.
    for _ in cores {
        told.recv().map_err(io::Error::other)??;
    }
    Ok(runtime)
}

/// Threads that start one after the other.
struct Starting {
    cores: Vec<usize>,
    next: AtomicUsize,
    pinned: Sender<io::Result<()>>,
}

impl Starting {
    /// The first are the workers. Those that come later look names up, wait for nothing else, and stay where those are:
    /// the cores are taken in turn.
    fn thread(&self) {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let outcome = pin(self.cores[number % self.cores.len()]);
        // Only of the workers anybody wants to know it.
        let _ = self.pinned.send(outcome);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;

    use rustix::thread::{CpuSet, sched_getaffinity};

    use super::*;

    /// Which cores this process's threads of this name may use, as the system lists them.
    fn allowed(name: &str) -> Vec<String> {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let folders = tasks.map(|task| task.unwrap().path());
        let of_name = folders.filter(|folder| {
            // Threads of other tests come and go.
            let comm = fs::read_to_string(folder.join("comm")).unwrap_or_default();
            comm.trim() == name
        });
        let list = |folder: std::path::PathBuf| {
            let status = fs::read_to_string(folder.join("status")).unwrap();
            let mut lines = status.lines();
            let list = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            list.unwrap().trim().to_owned()
        };
        of_name.map(list).collect()
    }

    fn usable() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU)
            .filter(|core| set.is_set(*core))
            .collect()
    }

    #[test]
    fn every_thread_of_the_network_stays_on_its_core() {
        let cores = usable();
        let runtime = runtime_of("pinned-net", &WorkerThreads::Cores(cores.clone())).unwrap();
        let each: BTreeSet<String> = cores.iter().map(ToString::to_string).collect();
        let workers = allowed("pinned-net");
        assert_eq!(workers.len(), cores.len());
        assert_eq!(workers.into_iter().collect::<BTreeSet<_>>(), each);
        // One that looks something up goes nowhere else.
        let looks_up = runtime.block_on(runtime.spawn_blocking(|| sched_getaffinity(None)));
        assert_eq!(looks_up.unwrap().unwrap().count(), 1);
        runtime.block_on(async { tokio::spawn(async {}).await.unwrap() });
    }

    #[test]
    fn without_cores_the_system_puts_them_where_it_likes() {
        let runtime = runtime_of("free-net", &WorkerThreads::Anywhere(3)).unwrap();
        // A thread gives itself its name once it has begun.
        let named = || allowed("free-net").len();
        let began = std::time::Instant::now();
        while named() < 3 && began.elapsed().as_secs() < 30 {
            std::thread::yield_now();
        }
        assert_eq!(named(), 3);
        drop(runtime);
    }

    #[test]
    fn a_core_that_is_not_there_is_an_error_at_the_start() {
        let none = WorkerThreads::Cores(vec![CpuSet::MAX_CPU - 1]);
        let error = runtime_of("no-net", &none).unwrap_err().to_string();
        assert!(error.contains("staying on core 1023"), "{error}");
    }
}
