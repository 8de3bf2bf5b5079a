//! All nodes' daemons are upgraded in turn below their keepers, or move to other addresses, while a job saves without pause over connections
//! that nobody makes again.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use storaged::cluster::NodeMemory;
use storaged_tests::rolling::{SavingJob, upgrade};
use storaged_tests::system::{System, free_ports, wait};

const NODES: usize = 3;

#[test]
fn a_job_that_saves_all_the_time_loses_no_step_and_at_most_one_save_per_node() -> Result<()> {
    let system = System::start_kept(NODES, Some((2, 1)), "")?;
    let mut job = SavingJob::start((*system).clone(), 2)?;
    for node in [2, 0, 1, 0, 2, 1] {
        let upgraded = upgrade(&system, &job, node)?;
        println!("n{node}: {upgraded:?}");
        ensure!(upgraded.lost == 0, "n{node}: {upgraded:?}");
        ensure!(upgraded.failed.len() <= 1, "n{node}: {upgraded:?}");
        ensure!(upgraded.repaired == 0, "n{node}: {upgraded:?}");
    }
    let newest = job.stop()?;
    let failed = job.failed().len() as u64;
    println!("{newest} steps, {failed} saves failed");
    ensure!(newest > 2 * failed + 12, "{newest} steps, {failed} failed");
    Ok(())
}

/// The same file with another port for peers; where the node listened and will listen.
fn moves(system: &System, node: usize) -> Result<(String, String)> {
    let path = system.cluster.config_path(node);
    let file = std::fs::read_to_string(&path)?;
    let line = file.lines().find(|line| line.starts_with("listen"));
    let before = line.and_then(|line| line.split('"').nth(1));
    let before = before.context("where it listens")?.to_owned();
    let (host, _) = before.rsplit_once(':').context("a port")?;
    let after = format!("{host}:{}", free_ports());
    std::fs::write(&path, file.replace(&before, &after))?;
    Ok((before, after))
}

/// Where a node says that peers reach another one, and of which epoch that is.
fn address_of(system: &System, asked: usize, place: &str) -> Result<(String, u64)> {
    let page = system.cluster.page(asked, "/status")?;
    let status: Value = serde_json::from_str(&page.body)?;
    let places = status["membership"]["places"].as_array();
    let mut places = places.context("places")?.iter();
    let found = places.find(|it| it["place"] == place);
    let address = found.and_then(|it| it["address"].as_str());
    let epoch = status["membership"]["epoch"].as_u64();
    Ok((
        address.context("an address")?.to_owned(),
        epoch.context("an epoch")?,
    ))
}

/// A node is reached elsewhere from some step on, as after a change of its network: its place and what it holds stay its own, and steps that
/// are being encoded at that moment become protected or give way to the next.
#[test]
fn nodes_that_move_to_other_addresses_under_a_job_that_saves_keep_their_places_and_memory()
-> Result<()> {
    let mut system = System::with_registry(NODES, NODES, Some((2, 1)), "")?;
    system.cluster.set_memory(NodeMemory::OutlivesDaemon);
    (0..NODES).try_for_each(|node| system.cluster.start(node))?;
    (0..NODES).try_for_each(|node| system.cluster.wait_for_peers(node, NODES - 1))?;
    let mut job = SavingJob::start((*system).clone(), 2)?;
    let mut seen = 0;
    // The one that codes, and both that train.
    for node in [2, 0, 1] {
        let place = format!("n{node}");
        let asked = (node + 1) % NODES;
        // Each node hears of an epoch in its own time: what another said of the last move, this one may not know yet.
        let (listed, epoch) = wait("the epoch of the last move", || {
            let (listed, epoch) = address_of(&system, asked, &place)?;
            ensure!(epoch >= seen, "epoch {epoch}, another node said {seen}");
            Ok((listed, epoch))
        })?;
        let (before, after) = moves(&system, node)?;
        ensure!(listed == before, "{listed} and not {before}");
        let moved = upgrade(&system, &job, node)?;
        println!("n{node} from {before} to {after}: {moved:?}");
        ensure!(moved.lost == 0, "n{node}: {moved:?}");
        ensure!(moved.failed.len() <= 1, "n{node}: {moved:?}");
        ensure!(moved.repaired == 0, "n{node}: {moved:?}");
        let now = wait("its new address", || {
            let (listed, now) = address_of(&system, asked, &place)?;
            ensure!(listed == after, "{listed} and not {after}");
            Ok(now)
        })?;
        ensure!(now == epoch + 1, "epoch {now} after {epoch}");
        seen = now;
    }
    let newest = job.stop()?;
    ensure!(newest >= job.safe(), "{newest}");
    Ok(())
}
