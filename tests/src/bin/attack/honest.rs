//! The job of the other tenant: it saves and restores all the time, and counts what came of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RunId};
use storaged_tests::clients::Clients;
use storaged_tests::system::shards;

/// Ranks, each on a node of its own.
pub const WORLD: u32 = 2;
/// A save is protected in time if it is within what the loss of a node may cost.
const IN_TIME: Duration = Duration::from_secs(10);
/// Each step that is a multiple of it is waited for in the durable tier.
pub const DURABLE_EVERY: u64 = 5;
/// Between a restore and the next save.
const PAUSE: Duration = Duration::from_millis(50);

/// What came of its saves and restores.
#[derive(Clone, Default)]
pub struct Count {
    /// Those that have ended, well or not.
    pub tried: u64,
    /// Protected within 10 s.
    pub in_time: u64,
    /// Read back and compared.
    pub restored: u64,
    pub faults: Vec<String>,
}

impl Count {
    /// What has come to it since an earlier one.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            tried: self.tried - before.tried,
            in_time: self.in_time - before.in_time,
            restored: self.restored - before.restored,
            faults: self.faults[before.faults.len()..].to_vec(),
        }
    }
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    count: Mutex<Count>,
}

impl Shared {
    fn count(&self) -> MutexGuard<'_, Count> {
        self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The running job. It ends when this is dropped.
pub struct Honest {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Honest {
    pub fn start(clients: Clients) -> Self {
        let shared = Arc::<Shared>::default();
        let job = Job {
            clients,
            shared: shared.clone(),
            step: 0,
        };
        Self {
            shared,
            thread: Some(std::thread::spawn(move || job.work())),
        }
    }

    pub fn count(&self) -> Count {
        self.shared.count().clone()
    }
}

impl Drop for Honest {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Job {
    clients: Clients,
    shared: Arc<Shared>,
    step: u64,
}

impl Job {
    fn work(mut self) {
        while !self.is_over() {
            if let Err(error) = self.incarnation() {
                self.shared.count().faults.push(format!("{error:#}"));
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn is_over(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    /// A run of the job, until something fails.
    fn incarnation(&mut self) -> Result<()> {
        let (run, mut trainers) = self.clients.trainers(WORLD).context("opening a run")?;
        while !self.is_over() {
            self.step += 1;
            let saved = self.save(run, &mut trainers);
            let in_time = saved.as_ref().is_ok_and(|took| *took <= IN_TIME);
            let mut count = self.shared.count();
            count.tried += 1;
            count.in_time += u64::from(in_time);
            drop(count);
            saved.with_context(|| format!("saving step {}", self.step))?;
            self.clients
                .restore(&[0, 1], self.step, &shards(WORLD, self.step))
                .with_context(|| format!("restoring step {}", self.step))?;
            self.shared.count().restored += 1;
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// How long it took until it was protected.
    fn save(&self, run: RunId, trainers: &mut [Trainer]) -> Result<Duration> {
        let (step, shards) = (self.step, shards(WORLD, self.step));
        let began = Instant::now();
        self.clients
            .save(trainers, step, &shards, DurableWish::Policy)?;
        let wait = |state| self.clients.wait(0, run, step, state);
        wait(CheckpointState::Protected)?;
        let took = began.elapsed();
        if step.is_multiple_of(DURABLE_EVERY) {
            wait(CheckpointState::Durable)?;
        }
        Ok(took)
    }
}
