//! Restarts and upgrades of daemons whose memory outlives them.

use anyhow::{Result, ensure};
use rustix::process::Signal;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, Rank};
use storaged_tests::rolling::{SavingJob, upgrade};
use storaged_tests::system::{System, shards};

use crate::Figures;
use crate::nodes::{filled, until};

const ENCODED: &str = "storaged_encode_session_bytes_total";
const NODES: usize = 3;
/// Each node twice.
const RESTARTS: usize = 6;
/// Much of a machine with 24 GiB: it is there as the trainer's, in a slot and as parity, and once more in a load.
const LARGE: usize = 4 << 30;

fn encoded(system: &System) -> Result<u64> {
    let all = (0..NODES).map(|node| system.cluster.metric::<u64>(node, ENCODED));
    Ok(all.sum::<Result<u64, _>>()?)
}

/// `kill -9` of one daemon after the other: until it serves what it had, and what its peers sent because of it.
pub fn restarts(figures: &mut Figures) -> Result<()> {
    let after = after_kills("", &shards(2, 10))?;
    figures.insert("restart_serving_s", after.serving_s);
    figures.insert("restart_repair_bytes", after.repaired as f64);
    Ok(())
}

/// The same where nodes hold a rank of `LARGE` bytes, or its parity.
pub fn restarts_with_much(figures: &mut Figures) -> Result<()> {
    let large = vec![filled(LARGE, 10, 0), filled(1 << 20, 10, 1)];
    let after = after_kills("[memory]\nbudget = \"8GiB\"\n", &large)?;
    figures.insert("restart_serving_4gib_s", after.serving_s);
    figures.insert("restart_repair_bytes_4gib", after.repaired as f64);
    Ok(())
}

struct AfterKills {
    /// The longest.
    serving_s: f64,
    repaired: u64,
}

/// Of three nodes with a step of these two shards.
fn after_kills(settings: &str, shards: &[Vec<u8>]) -> Result<AfterKills> {
    let system = System::start_kept(NODES, Some((2, 1)), settings)?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 10, shards, DurableWish::Never)?;
    (0..NODES).try_for_each(|node| system.wait(node, run, 10, CheckpointState::Protected))?;
    drop(trainers);
    let mut after = AfterKills {
        serving_s: 0.0,
        repaired: 0,
    };
    for restart in 0..RESTARTS {
        let node = restart % NODES;
        let others: u64 = encoded(&system)? - system.cluster.metric::<u64>(node, ENCODED)?;
        let before = system.tell_daemon(node, Signal::KILL)?;
        let answers = system.back_after(node, before)?;
        let loads = until("a load", || {
            let mut reader = system.reader(node)?;
            let plan = reader.plan(None, 20_000)?;
            // What the coding node would load are other nodes' shards: its own load would count as a repair.
            if node < 2 {
                let rank = Rank::new(u32::try_from(node)?);
                let manifest = reader.manifest(plan.manifest)?;
                let shard = reader.open_shard(&manifest, rank, Vec::new(), 20_000)?;
                ensure!(shard.rung() == Rung::OwnRam, "{:?}", shard.rung());
            }
            Ok(())
        })?;
        after.serving_s = after.serving_s.max((answers + loads).as_secs_f64());
        system.cluster.wait_for_links()?;
        until("protection", || system.bears(node, 1))?;
        std::thread::sleep(std::time::Duration::from_secs(3));
        let sent = encoded(&system)? - others;
        println!(
            "n{node} back after {:.0} ms, its load after {:.0} ms more; {sent} bytes of sessions",
            answers.as_secs_f64() * 1e3,
            loads.as_secs_f64() * 1e3
        );
        after.repaired += sent;
    }
    let rungs = system.restore(&[0, 1], 10, shards)?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    Ok(after)
}

/// SIGUSR2 to one `storaged run` after the other, each three times, while a job saves without pause: protected steps that are not there
/// afterwards, the most saves that one upgrade made fail, and what was sent to repair something.
pub fn upgrades(figures: &mut Figures) -> Result<()> {
    let system = System::start_kept(NODES, Some((2, 1)), "")?;
    let mut job = SavingJob::start((*system).clone(), 2)?;
    let (mut lost, mut failed, mut repaired) = (0, 0, 0);
    for round in 0..3 * NODES {
        let node = round % NODES;
        let upgraded = upgrade(&system, &job, node)?;
        println!("n{node}: {upgraded:?}");
        lost += upgraded.lost;
        failed = failed.max(upgraded.failed.len());
        repaired += upgraded.repaired;
    }
    let newest = job.stop()?;
    println!("{newest} steps, {} saves failed", job.failed().len());
    figures.insert("upgrade_steps_lost", lost as f64);
    figures.insert("upgrade_failed_saves_per_node_max", failed as f64);
    figures.insert("upgrade_repair_bytes", repaired as f64);
    Ok(())
}
