//! `storaged pin` and `unpin` with real processes: a step stays in the RAM of all nodes, through saves, daemons that die and a lost node.

use anyhow::{Result, ensure};
use rustix::process::Signal;
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::Rung;
use storaged_sdk::wire::{RunId, Step};
use storaged_tests::system::{System, said, save_protected, shards, wait};

const USED: &str = "storaged_memory_used_bytes";

/// What a command says that ends well.
fn done(system: &System, node: usize, arguments: &[&str]) -> Result<String> {
    let output = system.storaged(node, arguments)?;
    let text = said(&output);
    ensure!(output.status.success(), "{arguments:?}: {text}");
    Ok(text)
}

fn started(extra: &str) -> Result<(System, RunId, Vec<Trainer>)> {
    let system = System::start_kept(3, Some((2, 1)), extra)?;
    let (run, trainers) = system.trainers(2)?;
    Ok((system, run, trainers))
}

/// The step is restored out of the RAM of the nodes that sealed it.
fn is_in_place(system: &System, step: u64) -> Result<()> {
    let rungs = system.restore_step(&[0, 1], step, &shards(2, step))?;
    ensure!(rungs == [Rung::OwnRam, Rung::OwnRam], "{rungs:?}");
    Ok(())
}

/// How often a node's list and status say that a step is pinned.
fn told_pinned(system: &System, node: usize) -> Result<[usize; 2]> {
    let [list, status] = ["ls", "status"].map(|command| done(system, node, &[command]));
    Ok([list?, status?].map(|text| text.matches(", pinned").count()))
}

#[test]
fn a_pinned_step_stays_through_saves_dead_daemons_and_a_lost_node_until_it_is_unpinned()
-> Result<()> {
    let (mut system, run, mut trainers) = started("[memory]\nbudget = \"64MiB\"\n")?;
    save_protected(&system, run, &mut trainers, 1)?;
    save_protected(&system, run, &mut trainers, 2)?;
    let pinned = done(&system, 2, &["pin", "job", "2"])?;
    ensure!(pinned.contains("step 2: pinned in RAM"), "{pinned}");
    for step in 3..=8 {
        save_protected(&system, run, &mut trainers, step)?;
    }
    is_in_place(&system, 2)?;
    for node in 0..3 {
        ensure!(told_pinned(&system, node)? == [1, 1], "n{node}");
    }
    drop(trainers);
    for node in 0..3 {
        let before = system.tell_daemon(node, Signal::KILL)?;
        system.back_after(node, before)?;
    }
    system.cluster.wait_for_links()?;
    is_in_place(&system, 2)?;
    system.cluster.kill(1)?;
    let decoded = system.restore_step(&[0, 2], 2, &shards(2, 2))?;
    ensure!(decoded.contains(&Rung::Decoded), "{decoded:?}");
    system.cluster.start(1)?;
    system.cluster.wait_for_links()?;
    wait("the node that came back has it again", || {
        is_in_place(&system, 2)
    })?;
    let before: u64 = system.cluster.metric(0, USED)?;
    done(&system, 0, &["unpin", "job", "2"])?;
    wait("its memory is given back", || {
        let after: u64 = system.cluster.metric(0, USED)?;
        ensure!(after < before, "{after} of {before}");
        Ok(())
    })?;
    let gone = system.reader(0)?.plan(Some(Step::new(2)), 5_000);
    ensure!(gone.is_err(), "it went by the policy");
    ensure!(told_pinned(&system, 0)? == [0, 0]);
    let again = system.storaged(0, &["unpin", "job", "2"])?;
    ensure!(again.status.code() == Some(1));
    Ok(())
}

/// Each rank's shard takes a slot of 2 MiB: of three that fit two are needed by saves.
#[test]
fn pins_beside_which_saves_would_not_fit_are_refused_with_the_node_and_what_to_do() -> Result<()> {
    let (system, run, mut trainers) = started("[memory]\nbudget = \"6MiB\"\n")?;
    save_protected(&system, run, &mut trainers, 1)?;
    done(&system, 0, &["pin", "job", "1"])?;
    save_protected(&system, run, &mut trainers, 2)?;
    let refused = system.storaged(1, &["pin", "job", "2"])?;
    let text = said(&refused);
    ensure!(refused.status.code() == Some(1), "{text}");
    for part in [
        "step 2",
        "is not pinned, because of n",
        "step 1 is pinned: `storaged unpin` frees it",
    ] {
        ensure!(text.contains(part), "{part:?} in {text}");
    }
    for step in 3..=6 {
        save_protected(&system, run, &mut trainers, step)?;
    }
    is_in_place(&system, 1)
}
