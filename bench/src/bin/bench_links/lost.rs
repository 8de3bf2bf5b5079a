//! Two nodes of many are killed and started again at once: how long their ranks wait for shards of one MiB.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use storaged::cluster::Cluster;
use storaged_bench::net::figures::Figures;
use storaged_sdk::wire::local::{DurableWish, Role};
use storaged_sdk::wire::{CheckpointState, ManifestBytes, Namespace, Rank, RunId, Step, WorldSize};
use storaged_sdk::{Client, ConnectOptions, Trainer};

/// Ranks, dealt to the first 32 nodes: seven on each of the first eight, six on the others.
const RANKS: u32 = 200;
const NODES_WITH_RANKS: u32 = 32;
/// Seven ranks and six.
const KILLED: [usize; 2] = [3, 20];
const SHARD_BYTES: usize = 1 << 20;
const WAIT_MS: u32 = 120_000;
/// A process that was just started has its socket within this time.
const START_WAIT: Duration = Duration::from_secs(20);
/// Two steps: with the second one the first gives way, as in any job.
const STEPS: [u64; 2] = [10, 20];

/// Times from the kill on: until the step is planned, and until all shards are there and compared.
pub fn thirteen_shards(cluster: &mut Cluster, suffix: &str, figures: &mut Figures) -> Result<()> {
    let job = Job::save(cluster)?;
    // What the daemons say to each other once a step is protected is not what is measured.
    thread::sleep(Duration::from_secs(3));
    let killed = Instant::now();
    for node in KILLED {
        cluster.kill(node)?;
    }
    let before = cluster.cpu_time();
    for node in KILLED {
        cluster.start(node)?;
    }
    let mut first = job.reader_in_time(cluster, KILLED[0])?;
    let plan = first.plan(None, WAIT_MS).context("planning")?;
    ensure!(
        plan.step.get() == STEPS[1],
        "the plan offers step {}",
        plan.step
    );
    let manifest = first.manifest(plan.manifest)?;
    let planned = killed.elapsed().as_secs_f64();
    let lost: Vec<u32> = (0..RANKS)
        .filter(|rank| KILLED.contains(&node_of(*rank)))
        .collect();
    ensure!(lost.len() == 13, "expected 13 shards, got {}", lost.len());
    thread::scope(|scope| {
        let (job, cluster, manifest) = (&job, &*cluster, &manifest);
        let readers: Vec<_> = (lost.iter())
            .map(|rank| scope.spawn(move || job.bring_back(cluster, manifest, *rank)))
            .collect();
        let joined = |reader: thread::ScopedJoinHandle<'_, Result<()>>| {
            let ended = reader.join().map_err(|_| anyhow!("a reader panicked"));
            ended.flatten()
        };
        readers.into_iter().try_for_each(joined)
    })?;
    let back = killed.elapsed().as_secs_f64();
    let cpu = cluster.cpu_time().since(before).total();
    figures.put(format!("thirteen_shards_cpu_s_34{suffix}"), cpu);
    figures.put(format!("thirteen_shards_planned_s_34{suffix}"), planned);
    figures.put(format!("thirteen_shards_back_s_34{suffix}"), back);
    Ok(())
}

fn node_of(rank: u32) -> usize {
    (rank % NODES_WITH_RANKS) as usize
}

/// What a rank saves at a step.
fn content(rank: u32, step: u64) -> Vec<u8> {
    let mut state = step.wrapping_mul(0x9E37_79B9).wrapping_add(rank.into()) | 1;
    let mut bytes = vec![0; SHARD_BYTES];
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    bytes
}

struct Job {
    namespace: Namespace,
}

impl Job {
    /// Saves all steps and waits until they are protected.
    fn save(cluster: &Cluster) -> Result<Self> {
        let job = Self {
            namespace: Namespace::new("bench")?,
        };
        let run = job.reader(cluster, 0)?.open_run(WAIT_MS)?;
        let trainers = (0..RANKS).map(|rank| job.trainer(cluster, run, rank));
        let mut trainers = trainers.collect::<Result<Vec<_>>>()?;
        for step in STEPS {
            for (rank, trainer) in (0..).zip(&mut trainers) {
                let slot = trainer.acquire(SHARD_BYTES as u64, WAIT_MS)?;
                slot.copy_in(0, &content(rank, step))?;
                trainer.seal(&slot, Step::new(step), SHARD_BYTES as u64)?;
            }
            let (step, sealed) = (Step::new(step), Instant::now());
            trainers[0].commit(step, vec![1, 2, 3], Vec::new(), DurableWish::Never)?;
            let mut reader = job.reader(cluster, 0)?;
            reader.wait(run, step, CheckpointState::Protected, WAIT_MS)?;
            let protected = sealed.elapsed().as_secs_f64();
            eprintln!("  step {step} of {RANKS} ranks protected after {protected:.2} s");
        }
        Ok(job)
    }

    fn options(&self, cluster: &Cluster, node: usize) -> ConnectOptions {
        ConnectOptions {
            socket: cluster.socket(node),
            namespace: self.namespace.clone(),
            token: Vec::new(),
            role: Role::Reader,
        }
    }

    fn reader(&self, cluster: &Cluster, node: usize) -> Result<Client> {
        Ok(Client::connect(&self.options(cluster, node))?.0)
    }

    /// As soon as the daemon listens.
    fn reader_in_time(&self, cluster: &Cluster, node: usize) -> Result<Client> {
        let asked = Instant::now();
        loop {
            match self.reader(cluster, node) {
                Ok(client) => return Ok(client),
                Err(error) if asked.elapsed() > START_WAIT => return Err(error),
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn trainer(&self, cluster: &Cluster, run: RunId, rank: u32) -> Result<Trainer> {
        let options = self.options(cluster, node_of(rank));
        let world = WorldSize::new(RANKS)?;
        Ok(Trainer::connect(options, run, Rank::new(rank), world)?)
    }

    /// Opens a lost shard on its own node and compares it.
    fn bring_back(&self, cluster: &Cluster, manifest: &ManifestBytes, rank: u32) -> Result<()> {
        let mut reader = self.reader_in_time(cluster, node_of(rank))?;
        let shard = reader
            .open_shard(manifest, Rank::new(rank), Vec::new(), WAIT_MS)
            .with_context(|| format!("opening rank {rank}"))?;
        let mut got = vec![0; SHARD_BYTES];
        shard.read_at(0, &mut got)?;
        ensure!(
            got == content(rank, STEPS[1]),
            "rank {rank} came back with other bytes"
        );
        Ok(())
    }
}
