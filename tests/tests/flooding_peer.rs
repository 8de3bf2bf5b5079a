//! A node of the cluster that says something without end, faster than anybody can decide.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Result, ensure};
use storaged::config::ConfigFile;
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::peer::CheckpointKey;
use storaged_sdk::wire::{CheckpointState, RunId, Step};
use storaged_tests::peer::{HostilePeer, many_fences};
use storaged_tests::system::{System, shards, wait};

/// Says it until it is over.
fn flood(
    system: &System,
    peer: &HostilePeer,
    is_over: &AtomicBool,
    said: &AtomicU64,
) -> Result<()> {
    let message = many_fences()?;
    while !is_over.load(Ordering::Relaxed) {
        peer.say(&system.cluster.name(0), &message);
        said.fetch_add(1, Ordering::Relaxed);
        std::thread::yield_now();
    }
    Ok(())
}

/// Saves steps, each of which is committed, while a lot is said.
fn save_beside(
    system: &System,
    run: RunId,
    trainers: &mut [Trainer],
    said: &AtomicU64,
) -> Result<()> {
    let members = ConfigFile::load(&system.cluster.config_path(0))?
        .validate()?
        .members;
    wait("a flood", || {
        let said = said.load(Ordering::Relaxed);
        ensure!(said > 5_000, "{said}");
        Ok(())
    })?;
    // It decides nothing itself, so steps that it is the home node of are not committed.
    let is_decided = |step: &u64| {
        let key = CheckpointKey {
            namespace: system.namespace.clone(),
            run,
            step: Step::new(*step),
        };
        storaged_plan::homes(&members, &key, 1) != [system.cluster.name(2)]
    };
    for step in (1..).filter(is_decided).take(8) {
        system.save(trainers, step, &shards(2, step), DurableWish::Policy)?;
        system.wait(0, run, step, CheckpointState::Committed)?;
    }
    Ok(())
}

#[test]
fn a_peer_that_says_something_without_end_keeps_nobody_from_saving() -> Result<()> {
    let mut system = System::start(3, None, "")?;
    let (run, mut trainers) = system.trainers(2)?;
    system.cluster.kill(2)?;
    let peer = HostilePeer::start(&system, 2, &[0])?;
    let (is_over, said) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|threads| {
        let flood = threads.spawn(|| flood(&system, &peer, &is_over, &said));
        let saved = save_beside(&system, run, &mut trainers, &said);
        is_over.store(true, Ordering::Relaxed);
        flood.join().expect("it does not panic")?;
        saved
    })
}
