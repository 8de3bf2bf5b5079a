//! Clients of a cluster's daemons, and the steps that tests are made of: save, wait, restore.

use std::path::PathBuf;

use anyhow::{Context, Result};
use storaged_sdk::wire::local::{DurableWish, Role, Rung};
use storaged_sdk::wire::plan::RestorePlan;
use storaged_sdk::wire::{
    CheckpointState, DescribedManifest, Namespace, Rank, RunId, Step, WorldSize,
};
use storaged_sdk::{Client, ConnectOptions, Trainer};

/// How long a test waits for anything.
pub const WAIT_MS: u32 = 60_000;

/// Who the clients are, and where the daemons listen.
#[derive(Clone)]
pub struct Clients {
    /// Sockets of the daemons, by node.
    pub sockets: Vec<PathBuf>,
    pub namespace: Namespace,
    pub token: Vec<u8>,
}

impl Clients {
    fn options(&self, node: usize) -> ConnectOptions {
        ConnectOptions {
            socket: self.sockets[node].clone(),
            namespace: self.namespace.clone(),
            token: self.token.clone(),
            role: Role::Reader,
        }
    }

    /// A reader on a node.
    pub fn reader(&self, node: usize) -> Result<Client> {
        Ok(Client::connect(&self.options(node))?.0)
    }

    /// A trainer on a node.
    pub fn trainer(&self, node: usize, run: RunId, rank: u32, world: u32) -> Result<Trainer> {
        let world = WorldSize::new(world)?;
        Ok(Trainer::connect(
            self.options(node),
            run,
            Rank::new(rank),
            world,
        )?)
    }

    /// One trainer per node on nodes `0..world`, of a new run.
    pub fn trainers(&self, world: u32) -> Result<(RunId, Vec<Trainer>)> {
        let run = self.reader(0)?.open_run(WAIT_MS)?;
        let trainers = (0..world).map(|rank| self.trainer(rank as usize, run, rank, world));
        Ok((run, trainers.collect::<Result<_>>()?))
    }

    /// Every rank seals its shard.
    pub fn seal_all(&self, trainers: &mut [Trainer], step: u64, shards: &[Vec<u8>]) -> Result<()> {
        for (trainer, shard) in trainers.iter_mut().zip(shards) {
            let slot = trainer
                .acquire(shard.len() as u64, WAIT_MS)
                .context("acquiring")?;
            slot.copy_in(0, shard)?;
            trainer
                .seal(&slot, Step::new(step), shard.len() as u64)
                .context("sealing")?;
        }
        Ok(())
    }

    /// Every rank saves its shard; rank 0 commits.
    pub fn save(
        &self,
        trainers: &mut [Trainer],
        step: u64,
        shards: &[Vec<u8>],
        durable: DurableWish,
    ) -> Result<()> {
        self.seal_all(trainers, step, shards)?;
        trainers[0]
            .commit(Step::new(step), vec![1, 2, 3], Vec::new(), durable)
            .context("committing")
    }

    /// Waits on a node until a step is in a state.
    pub fn wait(&self, node: usize, run: RunId, step: u64, state: CheckpointState) -> Result<()> {
        let reached = self
            .reader(node)?
            .wait(run, Step::new(step), state, WAIT_MS);
        reached
            .map(|_| ())
            .with_context(|| format!("waiting on n{node} for step {step} to be {state}"))
    }

    /// Restores every rank on its node, as the plan of node 0 says, and compares with what was saved.
    pub fn restore(
        &self,
        nodes: &[usize],
        expect_step: u64,
        shards: &[Vec<u8>],
    ) -> Result<Vec<Rung>> {
        let plan = self.reader(nodes[0])?.plan(None, WAIT_MS);
        let plan = plan.context("planning")?;
        anyhow::ensure!(
            plan.step.get() == expect_step,
            "expected step {expect_step}, the plan offers {}",
            plan.step
        );
        self.restore_as(&plan, nodes, shards)
    }

    /// The same of an older step, which is asked for.
    ///
    /// # Errors
    /// If it cannot be restored, or is not what it was.
    pub fn restore_step(
        &self,
        nodes: &[usize],
        step: u64,
        shards: &[Vec<u8>],
    ) -> Result<Vec<Rung>> {
        let plan = self.reader(nodes[0])?.plan(Some(Step::new(step)), WAIT_MS);
        self.restore_as(&plan.context("planning")?, nodes, shards)
    }

    /// The same of the newest that can be reached, though too few nodes are left to say that there is none newer.
    ///
    /// # Errors
    /// If there is none, or it is not what it was.
    pub fn restore_with_few(&self, nodes: &[usize], shards: &[Vec<u8>]) -> Result<Vec<Rung>> {
        let plan = self.reader(nodes[0])?.plan_allowing_older(None, 2_500);
        self.restore_as(&plan.context("planning")?, nodes, shards)
    }

    fn restore_as(
        &self,
        plan: &RestorePlan,
        nodes: &[usize],
        shards: &[Vec<u8>],
    ) -> Result<Vec<Rung>> {
        let mut first = self.reader(nodes[0])?;
        let manifest: DescribedManifest = first.manifest(plan.manifest)?;
        let mut rungs = Vec::new();
        for (rank, expected) in shards.iter().enumerate() {
            let node = nodes[rank % nodes.len()];
            let rank = Rank::new(rank as u32);
            let mut reader = self.reader(node)?;
            let shard = reader
                .open_shard(&manifest, rank, Vec::new(), WAIT_MS)
                .with_context(|| format!("opening rank {rank} on n{node}"))?;
            let mut got = vec![0; expected.len()];
            shard.read_at(0, &mut got)?;
            anyhow::ensure!(got == *expected, "rank {rank} came back with other bytes");
            rungs.push(shard.rung());
        }
        Ok(rungs)
    }
}
