//! Losses of one node more than a group bears. What was in RAM alone is gone, and whoever restarts is told so by type, within its time:
//! without a durable tier nothing is offered, with one the step that it has is, to whoever allows an older one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use storaged_sdk::ClientError;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::plan::RestorePlan;
use storaged_sdk::wire::{CheckpointState, RefusalCode};

use crate::system::{System, shards, wait};

const TIER: &str =
    "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 1000000\n";
/// What a plan is given, and what it may take beyond that.
const PLAN_MS: u32 = 4_000;
const LATE: Duration = Duration::from_secs(2);

/// Where checkpoints are beside RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    None,
    Directory,
}

/// A cluster of one group, of which too many nodes are lost again and again.
pub struct DoomedGroup {
    k: usize,
    m: usize,
    tier: Tier,
    system: System,
    step: u64,
}

impl DoomedGroup {
    /// Starts its daemons.
    ///
    /// # Errors
    /// If they do not come up.
    pub fn start(k: usize, m: usize, tier: Tier) -> Result<Self> {
        let settings = match tier {
            Tier::None => "",
            Tier::Directory => TIER,
        };
        let system = System::start(k + m, Some((k, m)), settings)?;
        Ok(Self {
            k,
            m,
            tier,
            system,
            step: 0,
        })
    }

    fn shards(&self, step: u64) -> Vec<Vec<u8>> {
        shards(u32::try_from(self.k).expect("few nodes"), step)
    }

    /// Saves a step that becomes durable where there is a tier and one that is in RAM alone, loses the nodes, and starts others in their places.
    ///
    /// # Errors
    /// What was not as it must be.
    pub fn lose(&mut self, lost: &[usize]) -> Result<()> {
        self.save()?;
        for node in lost {
            self.system.cluster.kill(*node)?;
        }
        let left: Vec<usize> = (0..self.k + self.m)
            .filter(|node| !lost.contains(node))
            .collect();
        let outcome = self.is_said_and_restored(&left);
        for node in lost {
            self.system.cluster.start(*node)?;
        }
        self.system.cluster.wait_for_links()?;
        outcome.with_context(|| format!("({}, {}) without {lost:?}", self.k, self.m))
    }

    fn save(&mut self) -> Result<()> {
        self.step += 2;
        let (step, system) = (self.step, &self.system);
        let (run, mut trainers) = system.trainers(u32::try_from(self.k)?)?;
        if self.tier == Tier::Directory {
            let required = DurableWish::Required;
            system.save(&mut trainers, step, &self.shards(step), required)?;
            system.wait(0, run, step, CheckpointState::Durable)?;
        }
        let newer = self.shards(step + 1);
        system.save(&mut trainers, step + 1, &newer, DurableWish::Never)?;
        for node in 0..self.k + self.m {
            system.wait(node, run, step + 1, CheckpointState::Protected)?;
        }
        wait("protection", || system.bears(0, self.m))
    }

    fn is_said_and_restored(&self, left: &[usize]) -> Result<()> {
        let system = &self.system;
        let asked = Instant::now();
        is_lost(system.reader(left[0])?.plan(None, PLAN_MS))?;
        let took = asked.elapsed();
        let most = Duration::from_millis(PLAN_MS.into()) + LATE;
        ensure!(took < most, "it was said after {took:?}");
        if self.tier == Tier::None {
            let older = system.reader(left[0])?.plan_allowing_older(None, PLAN_MS);
            return is_lost(older).context("an older one is allowed, and there is none");
        }
        let rungs = system.restore_with_few(left, &self.shards(self.step));
        let rungs = rungs.context("from the durable tier")?;
        ensure!(rungs.contains(&Rung::Durable), "{rungs:?}");
        Ok(())
    }
}

/// Typed: what was in RAM is gone, or may be on nodes that do not answer.
fn is_lost(planned: Result<RestorePlan, ClientError>) -> Result<()> {
    use RefusalCode::{NewerUnreachable, NoCheckpoint, TooManyLost};
    match planned {
        Err(ClientError::Refused(refusal)) => ensure!(
            matches!(refusal.code, NewerUnreachable | NoCheckpoint | TooManyLost),
            "{refusal}"
        ),
        other => bail!("expected to be told that it is lost, got {other:?}"),
    }
    Ok(())
}
