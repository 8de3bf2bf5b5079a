//! All nodes restarted in turn by a script that asks `storaged restart-safe --wait` before each: what was protected stays.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use storaged::cluster::Page;
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RunId, Step};
use storaged_tests::clients::{Clients, WAIT_MS};
use storaged_tests::system::{System, said, shards};

use crate::node::until;

const NODES: usize = 6;
const RANKS: u32 = 4;
/// A save that meets a node on its way down or up is given up soon: the next one is tried.
const SAVE_MS: u32 = 2_000;

/// What the script does to one node.
fn restart_when_safe(system: &mut System, node: usize) -> Result<()> {
    let asked = system.storaged(node, &["restart-safe", "--wait", "--timeout", "60"])?;
    ensure!(asked.status.success(), "n{node}: {}", said(&asked));
    system.cluster.stop(node)?;
    system.cluster.start(node)?;
    system.cluster.wait_for_peers(node, NODES - 1)?;
    Ok(())
}

/// The newest step that a node calls protected.
fn newest_protected(clients: &Clients, node: usize) -> Result<u64> {
    let listed = clients
        .reader(node)?
        .list(Some(clients.namespace.clone()))?;
    let safe = listed
        .iter()
        .filter(|one| one.state >= CheckpointState::Protected);
    let newest = safe.max_by_key(|one| (one.run, one.step));
    Ok(newest.context("nothing is protected")?.step.get())
}

#[test]
fn an_idle_job_survives_a_rolling_restart() -> Result<()> {
    let mut system = System::start(NODES, Some((4, 2)), "")?;
    let (run, mut trainers) = system.trainers(RANKS)?;
    for step in [10, 20] {
        system.save(
            &mut trainers,
            step,
            &shards(RANKS, step),
            DurableWish::Policy,
        )?;
        system.wait(0, run, step, CheckpointState::Protected)?;
    }
    drop(trainers);
    // One node has said that the step is protected; another may hear it a moment later.
    until("all is whole", Duration::from_secs(30), || {
        Ok(system.cluster.page(5, "/readyz?restart=safe")?.code == 200)
    })?;
    for node in 0..NODES {
        restart_when_safe(&mut system, node)?;
    }
    let rungs = system.restore(&[0, 1, 2, 3], 20, &shards(RANKS, 20))?;
    ensure!(rungs.len() == RANKS as usize);
    Ok(())
}

#[test]
fn while_a_node_is_away_no_other_may_be_restarted_and_http_says_the_same() -> Result<()> {
    let mut system = System::start(NODES, Some((4, 2)), "")?;
    let (run, mut trainers) = system.trainers(RANKS)?;
    system.save(&mut trainers, 10, &shards(RANKS, 10), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Protected)?;
    drop(trainers);
    system.cluster.stop(5)?;
    // A daemon that is stopped closes its links: nobody waits for a timeout, and nobody says yes meanwhile.
    for node in 0..5 {
        until("what is missing is said", Duration::from_secs(30), || {
            let asked = system.storaged(node, &["restart-safe"])?;
            ensure!(!asked.status.success(), "n{node}: {}", said(&asked));
            let Page { code, body } = system.cluster.page(node, "/readyz?restart=safe")?;
            ensure!(code == 503, "n{node}: {code} {body}");
            // A node that has just started is still linking up.
            // Whoever opens the page is not told the job's name.
            ensure!(body.starts_with("job-"), "n{node}: {body}");
            let why = body.trim_end().split_once(' ').unwrap_or_default().1;
            Ok(why.contains("bears 1 of 2 losses, expected 2") && said(&asked).contains(why))
        })?;
        let Page { code, body } = system.cluster.page(node, "/readyz?restart=safe&bears=1")?;
        ensure!(code == 200 && body == "safe to restart\n", "{code} {body}");
        until("it is ready all the same", Duration::from_secs(30), || {
            Ok(system.cluster.page(node, "/readyz")?.code == 200)
        })?;
    }
    Ok(())
}

/// A job that saves all the time, also while nodes go and come.
struct Busy {
    ending: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Busy {
    fn start(system: &System) -> Result<Self> {
        let clients = Clients {
            sockets: system.sockets.clone(),
            namespace: system.namespace.clone(),
            token: system.token.clone(),
        };
        let run = clients.reader(0)?.open_run(WAIT_MS)?;
        let ending = Arc::new(AtomicBool::new(false));
        let ended = ending.clone();
        let thread = spawn(move || train(&clients, run, &ended));
        Ok(Self { ending, thread })
    }

    /// How many saves there were.
    fn end(self) -> Result<u64> {
        self.ending.store(true, Ordering::Relaxed);
        let joined = self.thread.join();
        joined.map_err(|_| anyhow::anyhow!("the job broke"))
    }
}

fn train(clients: &Clients, run: RunId, ending: &AtomicBool) -> u64 {
    let (mut ranks, mut saved) = (Vec::new(), 0);
    for step in 1.. {
        if ending.load(Ordering::Relaxed) {
            break;
        }
        match save(clients, run, &mut ranks, step) {
            Ok(()) => saved += 1,
            // All connect anew; what they held returns with their connections.
            Err(_) => ranks.clear(),
        }
        sleep(Duration::from_millis(200));
    }
    saved
}

fn save(clients: &Clients, run: RunId, ranks: &mut Vec<Trainer>, step: u64) -> Result<()> {
    for rank in ranks.len() as u32..RANKS {
        ranks.push(clients.trainer(rank as usize, run, rank, RANKS)?);
    }
    let mut slots = Vec::new();
    for (trainer, shard) in ranks.iter_mut().zip(shards(RANKS, step)) {
        let slot = trainer.acquire(shard.len() as u64, SAVE_MS)?;
        slot.copy_in(0, &shard)?;
        slots.push((slot, shard.len() as u64));
    }
    for (trainer, (slot, length)) in ranks.iter_mut().zip(&slots) {
        trainer.seal(slot, Step::new(step), *length)?;
    }
    Ok(ranks[0].commit(Step::new(step), vec![1], Vec::new(), DurableWish::Policy)?)
}

#[test]
fn a_job_that_saves_all_the_time_survives_a_rolling_restart() -> Result<()> {
    let mut system = System::start(NODES, Some((4, 2)), "")?;
    let job = Busy::start(&system)?;
    let first = wait_protected(&system, 0, 0)?;
    let mut newest = first;
    for node in 0..NODES {
        let other = (node + 1) % NODES;
        // A node may hear of the first a moment later.
        newest = newest_protected(&system, other).unwrap_or(0).max(newest);
        restart_when_safe(&mut system, node)?;
        let plan = system.reader(other)?.plan(None, WAIT_MS)?;
        ensure!(
            plan.step.get() >= newest,
            "after n{node}: step {newest} was protected, the plan offers {}",
            plan.step
        );
        // And it goes on.
        newest = wait_protected(&system, other, newest)?;
    }
    let saved = job.end()?;
    ensure!(
        saved > NODES as u64 && newest > first,
        "{saved} saves, {newest}"
    );
    let newest = newest_protected(&system, 0)?.max(newest);
    let plan = system.reader(0)?.plan(None, WAIT_MS)?;
    ensure!(plan.step.get() >= newest, "{newest}, {}", plan.step);
    let step = plan.step.get();
    system.restore(&[0, 1, 2, 3], step, &shards(RANKS, step))?;
    Ok(())
}

/// Waits until a step above another is protected, and gives it.
fn wait_protected(system: &System, node: usize, above: u64) -> Result<u64> {
    let mut newest = 0;
    until("a newer step is protected", Duration::from_secs(60), || {
        newest = newest_protected(system, node).unwrap_or(0);
        Ok(newest > above)
    })?;
    Ok(newest)
}
