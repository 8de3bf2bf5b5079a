//! How real daemons stop: at SIGTERM they finish first what only they can, within the time that they are given.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, shards};

/// A tier to which a shard of a test takes seconds.
const SLOW: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\nrate = \"300KB\"\n";
/// One to which it takes longer than any daemon is given.
const ENDLESS: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\nrate = \"1KB\"\n";

/// A node that holds one committed step, not in the tier yet, and whose trainers are gone.
fn owing(tier: &str, leave_within: &str) -> Result<System> {
    let mut system = System::start(1, None, tier)?;
    system.cluster.kill(0)?;
    let path = system.cluster.config_path(0);
    let config = std::fs::read_to_string(&path)?;
    let node = format!("[node]\nleave_within = \"{leave_within}\"\n");
    std::fs::write(&path, config.replace("[node]\n", &node))?;
    system.cluster.start_all()?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 10, &shards(1, 10), DurableWish::Required)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    Ok(system)
}

/// The step that the nodes restart from, once all are up again.
fn restored(system: &mut System) -> Result<u64> {
    system.cluster.start_all()?;
    Ok(system.reader(0)?.plan(None, WAIT_MS)?.step.get())
}

#[test]
fn a_daemon_that_is_stopped_finishes_its_uploads_without_its_trainers() -> Result<()> {
    let mut system = owing(SLOW, "100s")?;
    let left = system.cluster.stop(0)?;
    ensure!(left.is_some_and(|left| left.success()), "{left:?}");
    ensure!(restored(&mut system)? == 10);
    Ok(())
}

#[test]
fn all_nodes_that_are_stopped_at_once_leave_a_durable_checkpoint() -> Result<()> {
    const NODES: usize = 5;
    // Home nodes may be such as hold nothing of it.
    let mut system = System::start(NODES, Some((2, 1)), SLOW)?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 10, &shards(2, 10), DurableWish::Required)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    drop(trainers);
    for node in 0..NODES {
        system.cluster.signal(node, Signal::TERM)?;
    }
    for node in 0..NODES {
        let left = system.cluster.wait(node)?;
        let log = std::fs::read_to_string(system.cluster.log(node))?;
        ensure!(left.is_some_and(|left| left.success()), "{left:?}: {log}");
    }
    ensure!(restored(&mut system)? == 10);
    Ok(())
}

#[test]
fn a_daemon_goes_when_its_time_is_over_and_says_what_it_left() -> Result<()> {
    let mut system = owing(ENDLESS, "1s")?;
    let began = Instant::now();
    let left = system.cluster.stop(0)?.context("it was stopped")?;
    ensure!(left.code() == Some(75), "{left:?}");
    ensure!(began.elapsed() >= Duration::from_secs(1));
    let log = std::fs::read_to_string(system.cluster.log(0))?;
    let said = "job: step 10 of run ";
    let said = log.contains("stopped with work unfinished") && log.contains(said);
    ensure!(
        said && log.contains("1 shards of this node are not in the durable tier"),
        "{log}"
    );
    Ok(())
}

#[test]
fn a_second_signal_stops_a_daemon_at_once() -> Result<()> {
    let mut system = owing(ENDLESS, "1000s")?;
    system.cluster.signal(0, Signal::TERM)?;
    // Two signals that come at once are one.
    let says = |system: &System| -> Result<bool> {
        Ok(std::fs::read_to_string(system.cluster.log(0))?.contains("leaving within"))
    };
    let began = Instant::now();
    while !says(&system)? {
        ensure!(began.elapsed() < Duration::from_secs(60), "it says nothing");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(600));
    let left = system.cluster.stop(0)?.context("it was stopped")?;
    ensure!(left.code() == Some(75), "{left:?}");
    Ok(())
}

#[test]
fn a_daemon_with_nothing_to_finish_stops_at_once_beside_a_job() -> Result<()> {
    let mut system = System::start(3, Some((2, 1)), "")?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 1, &shards(2, 1), DurableWish::Never)?;
    system.wait(0, run, 1, CheckpointState::Protected)?;
    let began = Instant::now();
    let left = system.cluster.stop(0)?.context("it was stopped")?;
    ensure!(left.success(), "{left:?}");
    ensure!(
        began.elapsed() < Duration::from_secs(15),
        "the limit is 20 s"
    );
    Ok(())
}

/// No other node has anything of the step, and there is no durable tier.
#[test]
fn a_daemon_that_takes_the_only_copy_with_it_says_so() -> Result<()> {
    let mut system = System::start(1, None, "")?;
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 3, &shards(1, 3), DurableWish::Never)?;
    system.wait(0, run, 3, CheckpointState::Committed)?;
    drop(trainers);
    let left = system.cluster.stop(0)?.context("it was stopped")?;
    ensure!(left.code() == Some(75), "{left:?}");
    let log = std::fs::read_to_string(system.cluster.log(0))?;
    ensure!(
        log.contains(&format!("job: step 3 of run {run} is not coded")),
        "{log}"
    );
    system.cluster.start_all()?;
    let left = system.cluster.stop(0)?.context("it was stopped")?;
    ensure!(left.success(), "it holds nothing: {left:?}");
    Ok(())
}
