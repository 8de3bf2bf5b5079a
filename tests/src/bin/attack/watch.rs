//! What is measured beside the attacks: the daemons' own memory, and how long `status` takes on the operator's socket.

use std::collections::VecDeque;
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
/// How often each daemon is asked what it has charged.
const CHARGED_EVERY: Duration = Duration::from_millis(40);
/// What is no longer charged may be given back to the machine so much later.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(1);

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

/// A daemon that is watched.
#[derive(Clone)]
pub struct Watched {
    pub process: u32,
    /// Its operator's socket.
    pub admin: PathBuf,
}

/// What a daemon has lately charged to its budget of what lies in its own memory.
struct Charge {
    client: Client,
    asked: Instant,
    recent: VecDeque<(Instant, u64)>,
}

impl Charge {
    fn new(of: &Watched) -> Option<Self> {
        Some(Self {
            client: Client::connect_anonymous(&of.admin).ok()?,
            asked: Instant::now(),
            recent: VecDeque::new(),
        })
    }

    /// The most within the time in which it may still be there.
    fn most(&mut self) -> u64 {
        if self.recent.is_empty() || self.asked.elapsed() >= CHARGED_EVERY {
            self.ask();
        }
        self.recent
            .retain(|(at, _)| at.elapsed() <= GIVEN_BACK_WITHIN);
        self.recent
            .iter()
            .map(|(_, bytes)| *bytes)
            .max()
            .unwrap_or_default()
    }

    fn ask(&mut self) {
        self.asked = Instant::now();
        let charged = self.charged().unwrap_or_default();
        self.recent.push_back((self.asked, charged));
    }

    /// Of so many bytes those that are not charged. 60 MiB come in less time than there is between two questions, and are charged before they
    /// come: who has more than ever before is asked again.
    fn beside(&mut self, own: u64, ever: u64) -> u64 {
        let beside = own.saturating_sub(self.most());
        if beside <= ever {
            return beside;
        }
        self.ask();
        own.saturating_sub(self.most())
    }

    fn charged(&mut self) -> Option<u64> {
        let status = self.client.status().ok()?;
        let status: serde_json::Value = serde_json::from_str(&status).ok()?;
        status["memory"]["records_charged"].as_u64()
    }
}

/// What was measured since it was last asked for.
#[derive(Clone, Default)]
pub struct Measured {
    /// The most of each daemon's own memory that its budget was not charged with, in bytes.
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

    fn look_at_memory(&self, daemons: &[Watched]) {
        let mut charges: Vec<Option<Charge>> = daemons.iter().map(Charge::new).collect();
        while self.goes_on() {
            let ever = self.measured().memory.clone();
            let ever = ever.into_iter().chain(std::iter::repeat(0));
            let all = daemons.iter().zip(&mut charges).zip(ever);
            let now = all.map(|((daemon, charge), ever)| {
                let own = own_memory(daemon.process).unwrap_or_default();
                charge.as_mut().map_or(own, |it| it.beside(own, ever))
            });
            let now: Vec<u64> = now.collect();
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
    /// Of these daemons; the first one's `status` is timed.
    pub fn start(daemons: Vec<Watched>) -> Self {
        let shared = Arc::<Shared>::default();
        let (first, second) = (shared.clone(), shared.clone());
        let timed = daemons
            .first()
            .map(|it| it.admin.clone())
            .unwrap_or_default();
        let threads = vec![
            std::thread::spawn(move || second.ask_for_status(&timed)),
            std::thread::spawn(move || first.look_at_memory(&daemons)),
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
