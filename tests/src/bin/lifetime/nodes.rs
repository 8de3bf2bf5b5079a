//! What all parts do with nodes: wait, kill, save.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, RunId};
use storaged_tests::system::{System, shards};

/// Longer than anything takes that comes about at all.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Looks until it is so; how long that took.
pub fn until(what: &str, mut look: impl FnMut() -> Result<()>) -> Result<Duration> {
    let began = Instant::now();
    loop {
        match look() {
            Ok(()) => return Ok(began.elapsed()),
            Err(error) if began.elapsed() > PATIENCE => {
                return Err(error.context(format!("waited for {what}")));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Kills the daemon below a node's keeper, or tells it something else; its process.
pub fn tell_daemon(system: &System, node: usize, signal: Signal) -> Result<u32> {
    let daemon = system.cluster.daemon_below(node).context("a daemon")?;
    let process = Pid::from_raw(daemon.try_into()?).context("a process")?;
    kill_process(process, signal)?;
    Ok(daemon)
}

/// Waits until another daemon than this one answers; how long that took.
pub fn back_after(system: &System, node: usize, before: u32) -> Result<Duration> {
    until("a daemon", || {
        let daemon = system.cluster.daemon_below(node);
        ensure!(daemon.is_some_and(|it| it != before), "no other one");
        system.cluster.status(node)?;
        Ok(())
    })
}

/// A step is saved and protected as every node of these sees it.
pub fn save(
    system: &System,
    run: RunId,
    trainers: &mut [Trainer],
    step: u64,
    nodes: impl IntoIterator<Item = usize>,
) -> Result<()> {
    let shards = shards(u32::try_from(trainers.len())?, step);
    system.save(trainers, step, &shards, DurableWish::Never)?;
    let mut nodes = nodes.into_iter();
    nodes.try_for_each(|node| system.wait(node, run, step, CheckpointState::Protected))
}

/// The newest step bears so many losses, as a node says.
pub fn bears(system: &System, node: usize, losses: usize) -> Result<()> {
    let status = system.cluster.status(node)?;
    let found = status.contains(&format!(r#""bears":{losses}"#));
    ensure!(found, "{status}");
    Ok(())
}
