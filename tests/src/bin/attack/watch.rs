//! What is measured beside the attacks: the daemons' own memory, and how long `status` takes on the operator's socket.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use storaged_sdk::Client;

const MEMORY_EVERY: Duration = Duration::from_millis(10);
const STATUS_EVERY: Duration = Duration::from_millis(20);

/// Bytes of a process's own memory: what it shares with trainers is not in it.
///
/// # Errors
/// If it is gone.
pub fn own_memory(process: u32) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kibibytes = line.context("the process has ended")?.trim();
    let kibibytes: u64 = kibibytes.trim_end_matches(" kB").parse()?;
    Ok(kibibytes << 10)
}

/// What was measured since it was last asked for.
#[derive(Clone, Default)]
pub struct Measured {
    /// The most of each daemon, in bytes.
    pub memory: Vec<u64>,
    /// Of `status`, each from the connection to the answer.
    pub status: Vec<Duration>,
    /// Calls of `status` that were not answered.
    pub faults: Vec<String>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    measured: Mutex<Measured>,
}

impl Shared {
    fn measured(&self) -> MutexGuard<'_, Measured> {
        self.measured.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn look_at_memory(&self, processes: &[u32]) {
        while self.goes_on() {
            let now = processes.iter().map(|process| own_memory(*process));
            let now: Vec<u64> = now.map(Result::unwrap_or_default).collect();
            let mut measured = self.measured();
            measured.memory.resize(now.len(), 0);
            for (most, now) in measured.memory.iter_mut().zip(now) {
                *most = now.max(*most);
            }
            drop(measured);
            std::thread::sleep(MEMORY_EVERY);
        }
    }

    fn ask_for_status(&self, socket: &Path) {
        while self.goes_on() {
            let began = Instant::now();
            let asked = Client::connect_anonymous(socket).and_then(|mut it| it.status());
            let mut measured = self.measured();
            measured.status.push(began.elapsed());
            if let Err(error) = asked {
                measured.faults.push(format!("status: {error}"));
            }
            drop(measured);
            std::thread::sleep(STATUS_EVERY);
        }
    }
}

/// Measures until it is dropped.
pub struct Watch {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    /// Of these daemons; the first one's operator has this socket.
    pub fn start(processes: Vec<u32>, socket: PathBuf) -> Self {
        let shared = Arc::<Shared>::default();
        let (first, second) = (shared.clone(), shared.clone());
        let threads = vec![
            std::thread::spawn(move || first.look_at_memory(&processes)),
            std::thread::spawn(move || second.ask_for_status(&socket)),
        ];
        Self { shared, threads }
    }

    /// What was measured since the last time.
    pub fn take(&self) -> Measured {
        std::mem::take(&mut *self.shared.measured())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
