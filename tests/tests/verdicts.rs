//! What `storaged plan --verdict` says of a cluster of three nodes, (2,1), whose trainers die, whose nodes are killed or stopped, or
//! whose restarts fail; and that it comes true.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_tests::system::{System, executable, shards};

const TIER: &str =
    "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 1000\n";

/// What `storaged plan job --json` says with these arguments on a node, and its exit code.
fn plan(system: &System, node: usize, arguments: &[&str]) -> Result<(i32, Value)> {
    let done = Command::new(executable())
        .args(["plan", "job", "--json"])
        .args(arguments)
        .env("STORAGED_SOCKET", system.cluster.socket(node))
        .env("STORAGED_TOKEN", "a-secret-of-tests")
        .output()?;
    let text = String::from_utf8(done.stdout)?;
    let errors = String::from_utf8_lossy(&done.stderr).into_owned();
    let said: Value = serde_json::from_str(&text).with_context(|| text + &errors)?;
    Ok((done.status.code().context("it ends by itself")?, said))
}

/// What a launcher on a node gets: the exit code and the JSON object.
fn verdict(system: &System, node: usize, timeout_s: u32) -> Result<(i32, Value)> {
    let timeout = timeout_s.to_string();
    let (code, said) = plan(system, node, &["--verdict", "--timeout", &timeout])?;
    ensure!(said["exit_code"] == code, "{code}: {said}");
    Ok((code, said))
}

fn reasons(said: &Value) -> Vec<&str> {
    let all = said["reasons"].as_array().into_iter().flatten();
    all.filter_map(|reason| reason["code"].as_str()).collect()
}

/// Three nodes of which two train; these steps are protected, the first is durable too where there is a tier.
fn saved(steps: &[u64], extra: &str) -> Result<System> {
    let system = System::start(3, Some((2, 1)), extra)?;
    let (run, mut trainers) = system.trainers(2)?;
    for (index, step) in steps.iter().enumerate() {
        let (wish, state) = match index {
            0 if !extra.is_empty() => (DurableWish::Required, CheckpointState::Durable),
            _ => (DurableWish::Never, CheckpointState::Protected),
        };
        system.save(&mut trainers, *step, &shards(2, *step), wish)?;
        (0..3).try_for_each(|node| system.wait(node, run, *step, state))?;
    }
    Ok(system)
}

/// The step and the nodes of the first gain, of which any one suffices.
fn gain(said: &Value) -> Result<(u64, Vec<String>)> {
    let gain = &said["waiting"][0];
    let returning = &gain["returning"][0];
    ensure!(returning["any"] == 1, "{said}");
    let of = returning["of"].as_array().context("names")?;
    let of = of
        .iter()
        .filter_map(|node| node.as_str().map(str::to_owned));
    Ok((gain["step"].as_u64().context("a step")?, of.collect()))
}

#[test]
fn processes_that_died_recover_in_place_and_a_lost_node_is_decoded() -> Result<()> {
    let mut system = saved(&[10], "")?;
    for node in 0..3 {
        let (code, said) = verdict(&system, node, 20)?;
        ensure!(code == 0 && said["verdict"] == "recover-in-place", "{said}");
        ensure!(reasons(&said) == ["all-in-place"], "{said}");
        ensure!(said["plan"]["step"] == 10, "{said}");
        for (rank, home) in [(0, "n0"), (1, "n1")] {
            let shard = &said["plan"]["shards"][rank];
            ensure!(shard["source"]["ram"] == home, "{said}");
            ensure!(shard["bytes"] == shards(2, 10)[rank].len(), "{said}");
        }
    }
    let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");

    system.cluster.kill(1)?;
    let (code, said) = verdict(&system, 0, 20)?;
    ensure!(code == 10 && said["verdict"] == "recover", "{said}");
    ensure!(
        reasons(&said) == ["shards-decoded", "nodes-silent"],
        "{said}"
    );
    ensure!(gain(&said)? == (10, vec!["n1".to_owned()]), "{said}");
    ensure!(
        said["waiting"][0]["verdict"] == "recover-in-place",
        "{said}"
    );
    let rungs = system.restore(&[0, 2], 10, &shards(2, 10))?;
    ensure!(rungs == [Rung::OwnRam, Rung::Decoded], "{rungs:?}");
    Ok(())
}

/// A node that is only stopped has its RAM: what it was said to bring it brings, to the bit.
#[test]
fn a_stopped_node_that_returns_brings_the_step_that_was_said() -> Result<()> {
    let system = saved(&[10, 20], TIER)?;
    for node in [0, 1] {
        system.cluster.signal(node, Signal::STOP)?;
    }
    let (code, said) = verdict(&system, 2, 8)?;
    ensure!(code == 11, "{code}: {said}");
    ensure!(said["verdict"] == "restart-from-durable", "{said}");
    ensure!(
        said["plan"]["step"] == 10 && said["newest_seen"]["step"] == 20,
        "{said}"
    );
    ensure!(said["passed_over"][0]["step"] == 20, "{said}");
    ensure!(said["passed_over"][0]["cause"] == "shards-lost", "{said}");
    ensure!(reasons(&said).contains(&"goes-back"), "{said}");
    let both = vec!["n0".to_owned(), "n1".to_owned()];
    ensure!(gain(&said)? == (20, both), "{said}");

    system.cluster.signal(1, Signal::CONT)?;
    let (code, said) = verdict(&system, 2, 60)?;
    ensure!(code == 10 && said["plan"]["step"] == 20, "{said}");
    let rungs = system.restore(&[2, 1], 20, &shards(2, 20))?;
    ensure!(rungs == [Rung::Decoded, Rung::OwnRam], "{rungs:?}");
    system.cluster.signal(0, Signal::CONT)?;
    Ok(())
}

/// Without a tier nothing is left; a node that comes back without its RAM is not waited for any more.
#[test]
fn with_two_nodes_killed_nothing_is_restorable_and_one_that_lost_its_ram_is_not_waited_for()
-> Result<()> {
    let mut system = saved(&[10], "")?;
    system.cluster.kill(0)?;
    system.cluster.signal(1, Signal::STOP)?;
    let (code, said) = verdict(&system, 2, 8)?;
    ensure!(
        code == 12 && said["verdict"] == "impossible",
        "{code}: {said}"
    );
    ensure!(said["plan"].is_null(), "{said}");
    let both = vec!["n0".to_owned(), "n1".to_owned()];
    ensure!(gain(&said)? == (10, both), "{said}");

    system.cluster.start(0)?;
    system.cluster.wait_for_peers(0, 1)?;
    let (code, said) = verdict(&system, 2, 8)?;
    ensure!(code == 12, "{code}: {said}");
    ensure!(gain(&said)? == (10, vec!["n1".to_owned()]), "{said}");
    system.cluster.signal(1, Signal::CONT)?;
    let (code, said) = verdict(&system, 2, 60)?;
    ensure!(code == 10 && said["plan"]["step"] == 10, "{code}: {said}");
    Ok(())
}

/// Two nodes whose memory outlives their daemons; step 10 is in the tier, step 20 in RAM.
#[test]
fn a_step_that_failed_is_passed_over_by_all_nodes_and_by_the_daemons_that_start_next() -> Result<()>
{
    let system = System::start_kept(2, None, TIER)?;
    let (run, mut trainers) = system.trainers(2)?;
    for (step, wish, state) in [
        (10, DurableWish::Required, CheckpointState::Durable),
        (20, DurableWish::Never, CheckpointState::Committed),
    ] {
        system.save(&mut trainers, step, &shards(2, step), wish)?;
        (0..2).try_for_each(|node| system.wait(node, run, step, state))?;
    }
    ensure!(plan(&system, 0, &[])?.1["step"] == 20);
    for node in [0, 1] {
        let (code, said) = plan(&system, node, &["--failed", "20"])?;
        ensure!((code, said[0]["times"] == 1) == (0, true), "{said}");
    }
    // Both at once: neither could tell the other.
    let before: Vec<u32> = (0..2)
        .filter_map(|node| system.cluster.daemon_below(node))
        .collect();
    for daemon in &before {
        let process = Pid::from_raw((*daemon).try_into()?).context("a process")?;
        kill_process(process, Signal::KILL)?;
    }
    for (node, daemon) in before.iter().enumerate() {
        let is_back = |system: &System| {
            let another = system
                .cluster
                .daemon_below(node)
                .is_some_and(|it| it != *daemon);
            another && system.cluster.status(node).is_ok()
        };
        let began = std::time::Instant::now();
        while !is_back(&system) {
            ensure!(
                began.elapsed().as_secs() < 60,
                "{}",
                system.cluster.log_end(node, 20)
            );
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
    system.cluster.wait_for_links()?;
    for node in [0, 1] {
        let (code, said) = verdict(&system, node, 20)?;
        ensure!(
            code == 11 && said["plan"]["step"] == 10,
            "n{node}: {code} {said}"
        );
        ensure!(said["passed_over"][0]["cause"] == "quarantined", "{said}");
    }
    system.restore(&[0, 1], 10, &shards(2, 10))?;
    plan(&system, 1, &["--lift", "20"])?;
    let (code, said) = verdict(&system, 1, 20)?;
    ensure!(code == 0 && said["plan"]["step"] == 20, "{code} {said}");
    Ok(())
}

#[test]
fn a_first_start_has_an_exit_code_of_its_own_and_a_wrong_token_gets_no_verdict() -> Result<()> {
    let mut system = System::start(1, None, "")?;
    let (code, said) = verdict(&system, 0, 20)?;
    ensure!(
        code == 13 && said["verdict"] == "impossible",
        "{code}: {said}"
    );
    ensure!(reasons(&said) == ["nothing-saved"], "{said}");
    let (run, mut trainers) = system.trainers(1)?;
    system.save(&mut trainers, 1, &shards(1, 1), DurableWish::Never)?;
    system.wait(0, run, 1, CheckpointState::Committed)?;
    system.token = b"of-another-job-here".to_vec();
    ensure!(system.reader(0).is_err(), "the namespace is another's");
    Ok(())
}
