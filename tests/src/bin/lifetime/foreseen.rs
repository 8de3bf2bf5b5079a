//! What a restart takes beside what its plan said that it would take, from each place that bytes come from: two ranks open their shards at
//! once, each on the node that saved it, or both on one node where the other is lost, and read them into memory that is there already, on one thread
//! each.

use std::sync::Barrier;
use std::thread::scope;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::plan::RestorePlan;
use storaged_sdk::wire::{CheckpointState, Rank, RunId, Step};
use storaged_sdk::{Client, Trainer};
use storaged_tests::system::System;

use crate::Figures;
use crate::nodes::{filled, until};

/// No more than any machine has cores, so that no rank waits for another one's thread.
const RANKS: u32 = 2;
const NODES: usize = 3;
const SHARD: usize = 192 << 20;
const ROUNDS: usize = 3;
const WAIT_MS: u32 = 60_000;
const SETTINGS: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n";

/// Where the bytes of rank 0 come from, and the key of the figure.
const PLACES: [(Rung, &str); 3] = [
    (Rung::OwnRam, "restart_expected_off_own_ram"),
    (Rung::Decoded, "restart_expected_off_decoded"),
    (Rung::Durable, "restart_expected_off_durable"),
];

struct Job {
    system: System,
    run: RunId,
    trainers: Vec<Trainer>,
    step: u64,
}

impl Job {
    fn start() -> Result<Self> {
        let system = System::start(NODES, Some((2, 1)), SETTINGS)?;
        let (run, trainers) = system.trainers(RANKS)?;
        Ok(Self {
            system,
            run,
            trainers,
            step: 0,
        })
    }

    /// Saves a step, to the end.
    fn save(&mut self) -> Result<u64> {
        self.step += 1;
        let step = self.step;
        let shards: Vec<Vec<u8>> = (0..RANKS).map(|rank| filled(SHARD, step, rank)).collect();
        let required = DurableWish::Required;
        self.system
            .save(&mut self.trainers, step, &shards, required)?;
        for state in [CheckpointState::Protected, CheckpointState::Durable] {
            let mut nodes = 0..NODES;
            nodes.try_for_each(|node| self.system.wait(node, self.run, step, state))?;
        }
        Ok(step)
    }
}

/// How far the expected time is off: 2 where it is twice what was taken, or half of it.
fn off(expected: Duration, taken: Duration) -> f64 {
    let ratio = expected.as_secs_f64() / taken.as_secs_f64();
    ratio.max(1.0 / ratio)
}

/// One rank's restart.
struct Loaded {
    from: Rung,
    began: Instant,
    ended: Instant,
}

fn load(mut reader: Client, plan: &RestorePlan, rank: u32, all: &Barrier) -> Result<Loaded> {
    let manifest = reader.manifest(plan.manifest);
    let expected = filled(SHARD, plan.step.get(), rank);
    let mut memory = vec![1; SHARD];
    all.wait();
    let began = Instant::now();
    let loaded = manifest.and_then(|manifest| {
        let shard = reader.open_shard(&manifest, Rank::new(rank), Vec::new(), WAIT_MS)?;
        shard.read_at(0, &mut memory)?;
        Ok(shard.rung())
    });
    let ended = Instant::now();
    // Nobody compares while another one still loads.
    all.wait();
    let from = loaded?;
    ensure!(memory == expected, "rank {rank} came back with other bytes");
    Ok(Loaded { from, began, ended })
}

/// All ranks at once, each on one of these nodes, of which the last is asked for the plan. How far that was off, and where the first
/// rank's bytes came from.
fn restart(system: &System, nodes: &[usize], step: Option<u64>) -> Result<(Rung, f64)> {
    let asked = *nodes.last().context("nodes")?;
    let plan = system.reader(asked)?.plan(step.map(Step::new), WAIT_MS);
    let plan = plan.context("planning")?;
    let readers = nodes.iter().map(|node| system.reader(*node));
    let readers = readers.collect::<Result<Vec<_>>>()?;
    let all = Barrier::new(readers.len());
    let ranks = scope(|scope| {
        let (plan, all) = (&plan, &all);
        let load = |(rank, reader)| scope.spawn(move || load(reader, plan, rank, all));
        let ranks: Vec<_> = (0..).zip(readers).map(load).collect();
        let loaded = ranks.into_iter().map(|rank| match rank.join() {
            Ok(loaded) => loaded,
            Err(_) => Err(anyhow!("a rank panicked")),
        });
        loaded.collect::<Result<Vec<_>>>()
    })?;
    let began = ranks.iter().map(|rank| rank.began).min();
    let ended = ranks.iter().map(|rank| rank.ended).max();
    let taken = ended.context("ranks")? - began.context("ranks")?;
    let expected = Duration::from_millis(plan.expected_ms);
    let off = off(expected, taken);
    let rungs: Vec<Rung> = ranks.iter().map(|rank| rank.from).collect();
    println!(
        "step {}: expected {expected:.2?}, took {taken:.2?}, off by {off:.2}; {rungs:?}",
        plan.step
    );
    Ok((rungs[0], off))
}

/// A restart whose first rank's bytes come from there.
fn restart_from(job: &mut Job, from: Rung) -> Result<f64> {
    let newest = job.save()?;
    let (got, off) = match from {
        Rung::Decoded => {
            job.system.cluster.kill(0)?;
            let restarted = restart(&job.system, &[1, 1], None)?;
            job.system.cluster.start(0)?;
            job.system.cluster.wait_for_links()?;
            until("protection", || job.system.bears(0, 1))?;
            restarted
        }
        Rung::Durable => restart(&job.system, &[0, 1], Some(newest - 3))?,
        _ => restart(&job.system, &[0, 1], None)?,
    };
    ensure!(got == from, "expected bytes from {from:?}, got {got:?}");
    Ok(off)
}

pub fn measure(figures: &mut Figures) -> Result<()> {
    let mut job = Job::start()?;
    for _ in 0..3 {
        job.save()?;
    }
    // What the tier gives nobody knows before it was read once.
    let first = restart_from(&mut job, Rung::Durable)?;
    figures.insert("restart_expected_off_durable_first_guess", first);
    for (from, key) in PLACES {
        let mut worst = 1_f64;
        for _ in 0..ROUNDS {
            worst = worst.max(restart_from(&mut job, from)?);
        }
        figures.insert(key, worst);
    }
    Ok(())
}
