//! Kills at any moment of trainers, daemons, keepers and nodes, while steps are saved. No protected step may be lost, no byte be wrong, and in
//! the end memory is as much as one step takes.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use storaged::cluster::NodeMemory;
use storaged::env::{Entropy, SeededEntropy};
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RunId};
use storaged_tests::system::{System, shards};

use crate::Figures;
use crate::nodes::{save, until};

const NODES: usize = 3;
const USED: &str = "storaged_memory_used_bytes";

/// A number below this one: a seed says what is killed and when.
fn below(dice: &dyn Entropy, most: u64) -> u64 {
    dice.next() % most
}

/// Where nobody waits for orphans, one that has ended stays a zombie.
fn has_ended(process: u32) -> Result<()> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    ensure!(stat.is_empty() || stat.contains(") Z "), "{stat}");
    Ok(())
}

/// What is killed.
#[derive(Debug, Clone, Copy)]
enum Victim {
    /// The client after its commit: it goes without a word.
    Trainers,
    /// The client in the middle of a copy: a slot of the step that is half written stays behind.
    Copying,
    /// A daemon, whose memory stays.
    Daemon(usize),
    /// Two daemons at once, whose memory stays.
    Daemons(usize),
    /// A node with its memory.
    Node(usize),
    /// A keeper alone: its daemon leaves in order, and the node's memory goes with it.
    Keeper(usize),
}

struct Job {
    system: System,
    run: RunId,
    trainers: Vec<Trainer>,
    step: u64,
    /// The newest step that was protected.
    safe: u64,
}

impl Job {
    fn start() -> Result<Self> {
        let mut system = System::start(NODES, Some((2, 1)), "")?;
        (0..NODES).try_for_each(|node| system.cluster.kill(node))?;
        system.cluster.set_memory(NodeMemory::OutlivesDaemon);
        system.cluster.start_all()?;
        let (run, mut trainers) = system.trainers(2)?;
        save(&system, run, &mut trainers, 1, 0..NODES)?;
        Ok(Self {
            system,
            run,
            trainers,
            step: 1,
            safe: 1,
        })
    }

    fn kill(&mut self, victim: Victim) -> Result<()> {
        match victim {
            Victim::Trainers | Victim::Copying => self.trainers.clear(),
            Victim::Daemon(node) => {
                let before = self.system.tell_daemon(node, Signal::KILL)?;
                self.system.back_after(node, before)?;
            }
            Victim::Daemons(but) => {
                let nodes: Vec<usize> = (0..NODES).filter(|node| *node != but).collect();
                let tell = |node: &usize| self.system.tell_daemon(*node, Signal::KILL);
                let before = nodes.iter().map(tell).collect::<Result<Vec<u32>>>()?;
                for (node, before) in nodes.into_iter().zip(before) {
                    self.system.back_after(node, before)?;
                }
            }
            Victim::Node(node) => {
                self.system.cluster.kill(node)?;
                self.system.cluster.start(node)?;
            }
            Victim::Keeper(node) => {
                let daemon = self.system.cluster.daemon_below(node).context("a daemon")?;
                self.system.cluster.signal(node, Signal::KILL)?;
                self.system.cluster.wait(node)?;
                until("the end of the daemon", || has_ended(daemon))?;
                self.system.cluster.start(node)?;
            }
        }
        self.system.cluster.wait_for_links()?;
        Ok(())
    }

    fn copy_half(&mut self, shard: &[u8]) -> Result<()> {
        let slot = self.trainers[0].acquire(shard.len() as u64, 60_000)?;
        Ok(slot.copy_in(0, &shard[..shard.len() / 2])?)
    }

    /// Begins a step, kills in the middle of it, and looks at what is there.
    fn round(&mut self, victim: Victim, after: Duration) -> Result<()> {
        self.step += 1;
        let (step, shards_of) = (self.step, shards(2, self.step));
        let saved = match victim {
            Victim::Copying => self.copy_half(&shards_of[0]),
            _ => self
                .system
                .save(&mut self.trainers, step, &shards_of, DurableWish::Never),
        };
        std::thread::sleep(after);
        self.kill(victim)?;
        let wait = |node| {
            self.system
                .wait(node, self.run, step, CheckpointState::Protected)
        };
        // A step that had not been protected may be given up; one that is said to be is.
        let wait_for_it = saved.is_ok()
            && !matches!(
                victim,
                Victim::Node(_) | Victim::Keeper(_) | Victim::Copying
            );
        if wait_for_it && (0..NODES).try_for_each(wait).is_ok() {
            self.safe = step;
        }
        let plan = self.system.reader(0)?.plan(None, 60_000);
        let newest = plan.with_context(|| format!("step {} was safe", self.safe))?;
        let newest = newest.step.get();
        ensure!(
            newest >= self.safe,
            "step {newest} after {} was protected",
            self.safe
        );
        self.system.restore(&[0, 1], newest, &shards(2, newest))?;
        self.safe = newest;
        let again = (0..2).map(|rank| self.system.trainer(rank as usize, self.run, rank, 2));
        self.trainers = again.collect::<Result<_>>()?;
        // The next kill may take a node: what is there bears that again first.
        until("protection", || self.system.bears(0, 1)).map(drop)
    }

    fn used(&self) -> Result<Vec<u64>> {
        let all = (0..NODES).map(|node| self.system.cluster.metric(node, USED));
        Ok(all.collect::<Result<_, _>>()?)
    }

    /// Saves some steps in peace, and says how much memory each node uses after.
    fn settle(&mut self) -> Result<Vec<u64>> {
        for _ in 0..4 {
            self.step += 1;
            save(
                &self.system,
                self.run,
                &mut self.trainers,
                self.step,
                0..NODES,
            )?;
            self.safe = self.step;
        }
        std::thread::sleep(Duration::from_secs(2));
        self.used()
    }
}

pub fn measure(figures: &mut Figures, kills: u32, seed: u64) -> Result<()> {
    let dice = SeededEntropy::new(seed);
    let mut job = Job::start()?;
    let before = job.settle()?;
    let mut lost = 0;
    for kill in 0..kills {
        let node = below(&*dice, NODES as u64) as usize;
        let victim = match below(&*dice, 10) {
            0 => Victim::Trainers,
            1 => Victim::Node(node),
            2 => Victim::Daemons(node),
            3 => Victim::Copying,
            4 => Victim::Keeper(node),
            _ => Victim::Daemon(node),
        };
        let after = Duration::from_millis(below(&*dice, 60));
        if let Err(error) = job.round(victim, after) {
            println!("kill {kill} of seed {seed}, {victim:?} after {after:?}: {error:#}");
            lost += 1;
            job = Job::start()?;
        }
    }
    let after = job.settle()?;
    println!("memory used before {before:?}, after {after:?}");
    let leaks = before
        .iter()
        .zip(&after)
        .filter(|(before, after)| after > before)
        .count();
    figures.insert("kills", f64::from(kills));
    figures.insert("kills_lost", f64::from(lost));
    figures.insert("kills_leaking_nodes", leaks as f64);
    Ok(())
}
