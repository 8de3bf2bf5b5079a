//! A job that saves without pause while something is done to its nodes: what each save came to, and what was lost.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RunId, Step};
use storaged_sdk::{Client, Trainer};

use crate::clients::Clients;
use crate::system::{System, executable, shards, wait};

/// A save that is not protected within this time has failed.
const SAVE_MS: u32 = 20_000;

/// Bytes that a node's daemon has received in repairs, since it was started.
const REPAIRED: &str = "storaged_encode_received_bytes_total{kind=\"repair\"}";

/// What the upgrade of a node's daemon came to.
#[derive(Debug)]
pub struct Upgraded {
    /// Until another daemon answered.
    pub took: Duration,
    /// Steps that were protected, and that the node did not offer afterwards.
    pub lost: u64,
    /// Saves that failed until it was over, and why.
    pub failed: Vec<(u64, String)>,
    /// Bytes that were sent to repair something.
    pub repaired: u64,
}

/// Upgrades the daemon below a node's keeper while the job saves, and waits until two further saves are protected.
///
/// # Errors
/// If it does not come back, or the job does not go on.
pub fn upgrade(system: &System, job: &SavingJob, node: usize) -> Result<Upgraded> {
    let before = BeforeUpgrade::of(system, job)?;
    let daemon = system.cluster.daemon_below(node).context("a daemon")?;
    system.cluster.signal(node, Signal::USR2)?;
    let took = system.back_after(node, daemon)?;
    before.until_two_more(system, job, UpgradedNode { node, took })
}

/// Replaces a node's pod, whose memory its holder has: keeper and daemon end, as at `storaged hand-over`, and others begin.
///
/// # Errors
/// If they do not end, do not come back, or the job does not go on.
pub fn replace_pod(system: &mut System, job: &SavingJob, node: usize) -> Result<Upgraded> {
    let before = BeforeUpgrade::of(system, job)?;
    let began = Instant::now();
    let told = Command::new(executable())
        .args(["hand-over", "--socket"])
        .arg(system.cluster.socket(node))
        .output()?;
    ensure!(told.status.success(), "{told:?}");
    let ended = system.cluster.wait(node)?.context("its end")?;
    ensure!(ended.success(), "{ended}");
    system.cluster.start(node)?;
    wait("the next pod", || {
        Ok(system.cluster.status(node).map(drop)?)
    })?;
    let took = began.elapsed();
    before.until_two_more(system, job, UpgradedNode { node, took })
}

/// What is compared after an upgrade.
struct BeforeUpgrade {
    repaired: Vec<u64>,
    failed: usize,
}

/// The one whose daemon is another one now.
struct UpgradedNode {
    node: usize,
    took: Duration,
}

impl BeforeUpgrade {
    fn of(system: &System, job: &SavingJob) -> Result<Self> {
        Ok(Self {
            repaired: repaired(system)?,
            failed: job.failed().len(),
        })
    }

    fn until_two_more(
        self,
        system: &System,
        job: &SavingJob,
        upgraded: UpgradedNode,
    ) -> Result<Upgraded> {
        let UpgradedNode { node, took } = upgraded;
        system.cluster.wait_for_links()?;
        let lost = job.lost_as_seen_by(node)?;
        job.reaches(job.begun() + 2)?;
        let after = repaired(system)?;
        // Another daemon counts from zero.
        let since = |at: usize| after[at] - if at == node { 0 } else { self.repaired[at] };
        Ok(Upgraded {
            took,
            lost,
            failed: job.failed().split_off(self.failed),
            repaired: (0..after.len()).map(since).sum(),
        })
    }
}

/// Of each node.
fn repaired(system: &System) -> Result<Vec<u64>> {
    let all = 0..system.cluster.nodes();
    let repaired = all.map(|node| system.cluster.metric::<u64>(node, REPAIRED));
    Ok(repaired.collect::<Result<Vec<_>, _>>()?)
}

/// What is known of the job while it saves.
#[derive(Default)]
struct Known {
    stop: AtomicBool,
    begun: AtomicU64,
    /// The newest step that was protected, as both ranks' nodes say.
    safe: AtomicU64,
    /// Steps whose save failed, and why.
    failed: Mutex<Vec<(u64, String)>>,
}

/// One thread with all ranks' trainers, which are made once.
pub struct SavingJob {
    clients: Clients,
    run: RunId,
    ranks: u32,
    known: Arc<Known>,
    thread: Option<JoinHandle<()>>,
}

impl SavingJob {
    /// Rank r saves on node r; the first step is protected when this returns.
    ///
    /// # Errors
    /// If the ranks cannot connect.
    pub fn start(clients: Clients, ranks: u32) -> Result<Self> {
        let (run, mut trainers) = clients.trainers(ranks)?;
        let waits = (0..ranks as usize).map(|node| clients.reader(node));
        let mut waits = waits.collect::<Result<Vec<_>>>()?;
        let known = Arc::new(Known::default());
        let (saving, shared) = (clients.clone(), known.clone());
        let thread = std::thread::spawn(move || {
            while !shared.stop.load(Ordering::Relaxed) {
                let step = 1 + shared.begun.fetch_add(1, Ordering::Relaxed);
                match save(&saving, run, &mut trainers, &mut waits, step) {
                    Ok(()) => shared.safe.store(step, Ordering::SeqCst),
                    Err(error) => {
                        let failed = shared.failed.lock();
                        let mut failed = failed.unwrap_or_else(PoisonError::into_inner);
                        failed.push((step, format!("{error:#}")));
                    }
                }
            }
        });
        let job = Self {
            clients,
            run,
            ranks,
            known,
            thread: Some(thread),
        };
        job.reaches(1)?;
        Ok(job)
    }

    /// Waits until a step of this number or a later one is protected.
    ///
    /// # Errors
    /// If none is for very long.
    pub fn reaches(&self, step: u64) -> Result<()> {
        wait("further saves", || {
            let (safe, failed) = (self.safe(), self.failed());
            ensure!(safe >= step, "{safe} of {step}, failed: {failed:?}");
            Ok(())
        })
    }

    /// Its run.
    pub fn run(&self) -> RunId {
        self.run
    }

    /// Steps that were begun.
    pub fn begun(&self) -> u64 {
        self.known.begun.load(Ordering::Relaxed)
    }

    /// The newest step that was protected.
    pub fn safe(&self) -> u64 {
        self.known.safe.load(Ordering::SeqCst)
    }

    /// Steps whose save failed, and why.
    pub fn failed(&self) -> Vec<(u64, String)> {
        let failed = self.known.failed.lock();
        failed.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What a node offers is no older than what was protected before it was asked. Steps that were, and are not offered.
    ///
    /// # Errors
    /// If it offers nothing.
    pub fn lost_as_seen_by(&self, node: usize) -> Result<u64> {
        let safe = self.safe();
        let plan = self.clients.reader(node)?.plan(None, 20_000)?;
        Ok(safe.saturating_sub(plan.step.get()))
    }

    /// No further save; the newest that was protected, which is there with the right bytes.
    ///
    /// # Errors
    /// If it is not.
    pub fn stop(&mut self) -> Result<u64> {
        self.known.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            ensure!(thread.join().is_ok(), "the saving thread panicked");
        }
        let nodes: Vec<usize> = (0..self.ranks as usize).collect();
        let newest = self.clients.reader(0)?.plan(None, 20_000)?.step.get();
        let safe = self.safe();
        ensure!(newest >= safe, "step {newest} after {safe} was protected");
        let expected = shards(self.ranks, newest);
        self.clients.restore(&nodes, newest, &expected)?;
        Ok(newest)
    }
}

fn save(
    clients: &Clients,
    run: RunId,
    trainers: &mut [Trainer],
    waits: &mut [Client],
    step: u64,
) -> Result<()> {
    let shards = shards(u32::try_from(trainers.len())?, step);
    clients.save(trainers, step, &shards, DurableWish::Never)?;
    for (node, client) in waits.iter_mut().enumerate() {
        let step = Step::new(step);
        client
            .wait(run, step, CheckpointState::Protected, SAVE_MS)
            .with_context(|| format!("waiting on n{node}"))?;
    }
    Ok(())
}
