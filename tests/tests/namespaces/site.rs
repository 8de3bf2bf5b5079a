//! A cluster with a network of its own, and a job that saves on it: what cases are made of. Every wait has a limit.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;
use storaged::cluster::Cluster;
use storaged_bench::net::daemons::DaemonsSpec;
use storaged_bench::net::network::{LinkRate, Network, NetworkSpec, Packets};
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, Namespace, RunId};
use storaged_tests::clients::{Clients, WAIT_MS};
use storaged_tests::system::executable;

/// Data nodes, each with a rank of the job.
pub const K: usize = 4;
/// Coding nodes.
pub const M: usize = 2;
/// All of them.
pub const NODES: usize = K + M;

/// Anything that daemons do by themselves is done within this time.
const SETTLE: Duration = Duration::from_secs(60);
/// How often something is looked at that is waited for.
const LOOK: Duration = Duration::from_millis(10);
/// More than the control messages of a save or of a restart come to: with so many bytes, blocks move.
const MOVING_BYTES: u64 = 96 << 10;
/// What a daemon may have resident of its own, beside its program and the slots that it maps: stacks and TLS sessions, blocks kept for
/// later (32 MiB at most) and those in flight.
const OWN_BYTES_MAX: u64 = 48 << 20;

/// What a cluster is like.
#[derive(Clone, Copy, Debug)]
pub struct SiteSpec {
    /// Every link, each way.
    pub rate: LinkRate,
    /// Bytes of a chunk.
    pub chunk: u64,
    /// Bytes of slots and parity per node.
    pub budget: u64,
    /// Bytes of each rank's shard.
    pub shards: [usize; K],
}

impl SiteSpec {
    /// The shards of a step: random words (xorshift, Marsaglia 2003), so that no chunk is as in another step.
    fn contents(&self, step: u64) -> Vec<Vec<u8>> {
        let of_rank = |(rank, length): (usize, &usize)| {
            let mut state = step.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (rank as u64 + 1);
            let mut shard = Vec::with_capacity(length.next_multiple_of(8));
            while shard.len() < *length {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                shard.extend_from_slice(&state.to_le_bytes());
            }
            shard.truncate(*length);
            shard
        };
        self.shards.iter().enumerate().map(of_rank).collect()
    }

    /// Bytes of the longest shard: what a lost block comes to on the wire.
    fn block_bytes(&self) -> u64 {
        self.shards.iter().copied().max().unwrap_or(0) as u64
    }
}

/// A checkpoint: of which run, at which step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Checkpoint {
    pub run: RunId,
    pub step: u64,
}

/// See the module.
pub struct Site<'a> {
    pub spec: SiteSpec,
    pub network: &'a Network,
    pub clients: Clients,
    daemons: Cluster<&'a Network>,
    training: Option<(RunId, Vec<Trainer>)>,
    step: u64,
}

impl<'a> Site<'a> {
    /// The network for a cluster.
    pub fn network(spec: &SiteSpec) -> Result<Network> {
        Network::make(NetworkSpec {
            nodes: NODES,
            rate: Some(spec.rate),
            mtu: 9000,
            packets: Packets::Whole,
        })
    }

    /// Starts the daemons; all links are up when it returns.
    pub fn start(spec: SiteSpec, network: &'a Network, directory: PathBuf) -> Result<Self> {
        let executable = executable();
        ensure!(
            executable.is_file(),
            "expected the daemon at {}: build it with `cargo build -p storaged`",
            executable.display()
        );
        let daemons = DaemonsSpec {
            executable,
            directory,
            k: K,
            m: M,
            chunk: spec.chunk,
            budget: spec.budget,
            link_rate: None,
            more: String::new(),
        };
        let daemons = daemons.start(network)?;
        let clients = Clients {
            sockets: (0..NODES).map(|node| daemons.socket(node)).collect(),
            namespace: Namespace::new("job")?,
            token: b"a-secret-of-tests".to_vec(),
        };
        Ok(Self {
            spec,
            network,
            clients,
            daemons,
            training: None,
            step: 0,
        })
    }

    /// Every rank saves a step of this run, or of a new one if there is none; gives the checkpoint once it is sealed
    /// everywhere.
    pub fn save(&mut self) -> Result<Checkpoint> {
        if self.training.is_none() {
            self.training = Some(self.clients.trainers(K as u32)?);
        }
        self.step += 1;
        let shards = self.spec.contents(self.step);
        let Some((run, trainers)) = &mut self.training else {
            bail!("expected trainers, got none")
        };
        self.clients
            .save(trainers, self.step, &shards, DurableWish::Never)?;
        Ok(Checkpoint {
            run: *run,
            step: self.step,
        })
    }

    /// Saves, and waits until the step is protected and all its blocks are where they belong.
    pub fn save_protected(&mut self) -> Result<Checkpoint> {
        let checkpoint = self.save()?;
        self.wait_protected(checkpoint)?;
        self.wait_whole(checkpoint)?;
        Ok(checkpoint)
    }

    /// The trainers end, and with them their run.
    pub fn end_training(&mut self) {
        self.training = None;
    }

    /// Waits until a checkpoint is protected.
    pub fn wait_protected(&self, Checkpoint { run, step }: Checkpoint) -> Result<()> {
        self.clients.wait(0, run, step, CheckpointState::Protected)
    }

    /// Waits until every node has its block of a checkpoint.
    pub fn wait_whole(&self, checkpoint: Checkpoint) -> Result<()> {
        for node in 0..NODES {
            let what = || format!("waiting until n{node} has its block of {checkpoint:?}");
            until(SETTLE, || Ok(self.has_block(node, checkpoint))).with_context(what)?;
        }
        Ok(())
    }

    /// Whether a node has its block, shard or parity, of a checkpoint.
    pub fn has_block(&self, node: usize, checkpoint: Checkpoint) -> bool {
        let field = if node < K {
            "shards_here"
        } else {
            "parity_here"
        };
        let known = self.known(node, checkpoint);
        known.is_some_and(|known| known[field].as_u64() == Some(1))
    }

    /// Whether some node that answers calls a checkpoint protected.
    pub fn is_protected(&self, checkpoint: Checkpoint) -> bool {
        (0..NODES).any(|node| {
            let known = self.known(node, checkpoint);
            known.is_some_and(|known| known["state"] == CheckpointState::Protected.as_str())
        })
    }

    /// What a node's status says of a checkpoint.
    fn known(&self, node: usize, Checkpoint { run, step }: Checkpoint) -> Option<Value> {
        let status = self.status(node).ok()?;
        let mut checkpoints = status["checkpoints"].as_array()?.iter();
        let is_it = |one: &&Value| one["run"] == run.to_string() && one["step"] == step;
        checkpoints.find(is_it).cloned()
    }

    fn status(&self, node: usize) -> Result<Value> {
        Ok(serde_json::from_str(&self.daemons.status(node)?)?)
    }

    /// Saves, and returns when blocks of the step move between the nodes, `part` of its encode later.
    pub fn begin_encode(&mut self, part: f64) -> Result<Checkpoint> {
        let before = self.sent()?;
        let checkpoint = self.save()?;
        until(SETTLE, || Ok(self.sent()? >= before + MOVING_BYTES))
            .context("waiting for an encode to begin")?;
        // Every hop of a chain sends m blocks; all have begun when the first one has.
        let encode = self.spec.rate.seconds(M as u64 * self.spec.block_bytes());
        sleep(Duration::from_secs_f64(encode * part));
        Ok(checkpoint)
    }

    fn sent(&self) -> Result<u64> {
        (0..NODES).map(|node| self.network.bytes_sent(node)).sum()
    }

    /// Starts replacements, with empty RAM, and returns when one of them gets blocks, `part` of a repair later.
    pub fn begin_repair(&mut self, nodes: &[usize], part: f64) -> Result<()> {
        let network = self.network;
        let received = || -> Result<Vec<u64>> {
            let each = nodes.iter().map(|node| network.bytes_received(*node));
            each.collect()
        };
        let before = received()?;
        self.replace(nodes)?;
        let moves = || {
            let now = received()?;
            Ok(now
                .iter()
                .zip(&before)
                .any(|(now, before)| *now >= before + MOVING_BYTES))
        };
        until(SETTLE, moves).context("waiting for a repair to begin")?;
        let repair = self.spec.rate.seconds(self.spec.block_bytes());
        sleep(Duration::from_secs_f64(repair * part));
        Ok(())
    }

    /// Kills nodes at once, with SIGKILL: their RAM is gone. Until then their memory was within its bound.
    pub fn lose(&mut self, nodes: &[usize]) -> Result<()> {
        nodes.iter().try_for_each(|node| self.check_memory(*node))?;
        for node in nodes {
            self.daemons.signal(*node, Signal::KILL)?;
        }
        nodes.iter().try_for_each(|node| self.daemons.kill(*node))?;
        Ok(())
    }

    /// Starts replacements, with empty RAM.
    pub fn replace(&mut self, nodes: &[usize]) -> Result<()> {
        nodes
            .iter()
            .try_for_each(|node| self.daemons.start(*node))?;
        Ok(())
    }

    /// Waits until every node sees every other one.
    pub fn wait_links(&self) -> Result<()> {
        Ok(self.daemons.wait_for_links()?)
    }

    /// What a restart is offered: the same on every node.
    pub fn offered(&self) -> Result<Checkpoint> {
        let mut offers = BTreeSet::new();
        for node in 0..NODES {
            let plan = self.clients.reader(node)?.plan(None, WAIT_MS);
            let plan = plan.with_context(|| format!("planning on n{node}"))?;
            offers.insert(Checkpoint {
                run: plan.run,
                step: plan.step.get(),
            });
        }
        let offer = offers.pop_first().context("no offer")?;
        ensure!(offers.is_empty(), "nodes offer {offer:?} and {offers:?}");
        Ok(offer)
    }

    /// Restores a checkpoint's ranks, each on its node, compares every byte, and waits until the checkpoint is whole.
    pub fn restore(&mut self, checkpoint: Checkpoint) -> Result<()> {
        let step = checkpoint.step;
        let nodes: Vec<usize> = (0..K).collect();
        self.clients
            .restore(&nodes, step, &self.spec.contents(step))?;
        self.end_training();
        self.wait_whole(checkpoint)
    }

    /// Slots and parity are within the budget, the process within what it may have beside them, no more blocks were in
    /// flight at once than
    /// `blocks_max`, and nothing is left of sessions.
    pub fn check_bounds(&self, blocks_max: u64) -> Result<()> {
        for node in 0..NODES {
            self.check_memory(node)?;
            let idle = || {
                let none = |name| anyhow::Ok(self.daemons.metric::<u64>(node, name)? == 0);
                Ok(none("storaged_sessions")?
                    && none("storaged_encode_stripes_in_flight")?
                    && none("storaged_encode_blocks_in_flight")?)
            };
            until(SETTLE, idle).with_context(|| format!("n{node} is not idle"))?;
            let number = |name| self.daemons.metric::<u64>(node, name);
            let blocks = number("storaged_encode_blocks_in_flight_most")?;
            ensure!(
                blocks <= blocks_max,
                "n{node} had {blocks} blocks in flight, expected {blocks_max} at most"
            );
            let used = number("storaged_memory_used_bytes")?;
            ensure!(
                used <= self.spec.budget,
                "n{node} uses {used} bytes of {}",
                self.spec.budget
            );
        }
        Ok(())
    }

    fn check_memory(&self, node: usize) -> Result<()> {
        let resident = self.daemons.resident(node)?;
        let in_files = resident.now - resident.own;
        let most = resident.most.saturating_sub(in_files);
        ensure!(
            most <= OWN_BYTES_MAX,
            "n{node} had {most} bytes of its own resident, expected {OWN_BYTES_MAX} at most: {resident:?}"
        );
        Ok(())
    }

    /// The ends of all logs, for a case that failed.
    pub fn logs(&self) -> String {
        let end = |node: usize| {
            let last = self.daemons.log_end(node, 25);
            format!("--- n{node}\n{last}\n")
        };
        (0..NODES).map(end).collect()
    }
}

/// Looks again and again until something holds.
pub fn until(limit: Duration, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let started = Instant::now();
    while !holds()? {
        ensure!(started.elapsed() < limit, "it did not within {limit:?}");
        sleep(LOOK);
    }
    Ok(())
}
