//! Whole-system tests with real processes.

use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, Rank};
use storaged_tests::system::{System, WAIT_MS, shards};

#[test]
fn two_nodes_of_six_may_be_lost() -> Result<()> {
    let mut system = System::start(6, Some((4, 2)), "")?;
    let (run, mut trainers) = system.trainers(4)?;
    for step in [10, 20, 30] {
        system.save(&mut trainers, step, &shards(4, step), DurableWish::Policy)?;
        system.wait(0, run, step, CheckpointState::Protected)?;
    }
    drop(trainers);
    system.cluster.kill(1)?;
    system.cluster.kill(2)?;
    system.cluster.start(1)?;
    system.cluster.start(2)?;
    let rungs = system.restore(&[0, 1, 2, 3], 30, &shards(4, 30))?;
    assert_eq!(rungs[0], Rung::OwnRam);
    Ok(())
}

#[test]
fn all_nodes_may_be_lost_after_durable() -> Result<()> {
    lose_everything("none").map(|_| ())
}

#[test]
fn so_they_may_when_the_durable_tier_is_packed() -> Result<()> {
    let system = lose_everything("zstd")?;
    let step = system.root.path().join("tier/job/run-1/step-40");
    assert!(step.join("__0_0.distcp.zst").exists());
    assert!(!step.join("__0_0.distcp").exists());
    Ok(())
}

#[test]
fn so_they_may_when_the_newest_copy_is_an_increment() -> Result<()> {
    let durable = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[memory]\nslots_per_rank = 4\n[trickle]\nevery = 10\n\
                   part = \"1MiB\"\nrate = \"16MiB\"\nincrements = 2\n";
    let mut system = System::start(3, Some((2, 1)), durable)?;
    let (run, mut trainers) = system.trainers(2)?;
    for step in [10, 20, 30, 40, 50] {
        system.save(&mut trainers, step, &shards(2, step), DurableWish::Policy)?;
        system.wait(0, run, step, CheckpointState::Durable)?;
    }
    let tier = system.root.path().join("tier/job/run-1");
    let full = |step: u64| tier.join(format!("step-{step}/__0_0.distcp")).exists();
    let increment = |step: u64| {
        tier.join(format!("step-{step}/storaged.increment.0"))
            .exists()
    };
    assert!(full(10) && increment(20) && increment(30) && full(40) && increment(50));
    assert!(!increment(10) && !full(20) && !full(30) && !increment(40) && !full(50));
    drop(trainers);
    for node in 0..3 {
        system.cluster.kill(node)?;
    }
    system.cluster.start_all()?;
    let rungs = system.restore(&[0, 1], 50, &shards(2, 50))?;
    assert_eq!(rungs, [Rung::Durable, Rung::Durable]);

    // The restored checkpoint is in RAM again, so the next copy builds on it, in another run.
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 60, &shards(2, 60), DurableWish::Policy)?;
    system.wait(0, run, 60, CheckpointState::Durable)?;
    let index = system
        .root
        .path()
        .join(format!("tier/job/run-{run}/step-60/storaged.increment.0"));
    assert!(index.exists());
    drop(trainers);
    for node in 0..3 {
        system.cluster.kill(node)?;
    }
    system.cluster.start_all()?;
    system.restore(&[0, 1], 60, &shards(2, 60))?;
    Ok(())
}

#[test]
fn a_shard_damaged_in_ram_comes_from_the_next_rung() -> Result<()> {
    let system = System::start(3, Some((2, 1)), "")?;
    let (run, mut trainers) = system.trainers(2)?;
    let saved = shards(2, 10);
    system.save(&mut trainers, 10, &saved, DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Protected)?;
    drop(trainers);
    flip_a_byte_of_every_slot(system.cluster.process_id(0).context("n0 runs")?)?;

    let mut reader = system.reader(0)?;
    let plan = reader.plan(None, WAIT_MS)?;
    let manifest = reader.manifest(plan.manifest)?;
    let rank = Rank::new(0);
    let own = reader.open_shard(&manifest, rank, Vec::new(), WAIT_MS)?;
    assert_eq!(own.rung(), Rung::OwnRam);
    let mut got = vec![0; saved[0].len()];
    let wrong = own.read_at(0, &mut got).unwrap_err();
    assert!(wrong.to_string().contains("digest"), "{wrong}");
    let without = Some(Rung::OwnRam);
    let other = reader.open_shard_without(&manifest, rank, Vec::new(), WAIT_MS, without)?;
    assert_eq!(other.rung(), Rung::Decoded);
    other.read_at(0, &mut got)?;
    assert_eq!(got, saved[0]);

    // A whole shard of the node itself takes the damaged one's place.
    let healed = system
        .reader(0)?
        .open_shard(&manifest, rank, Vec::new(), WAIT_MS)?;
    assert_eq!(healed.rung(), Rung::OwnRam);
    healed.read_at(0, &mut got)?;
    assert_eq!(got, saved[0]);
    Ok(())
}

/// Bit rot: writes into the daemon's shared memory behind its back.
fn flip_a_byte_of_every_slot(process: u32) -> Result<()> {
    let mut flipped = 0;
    for entry in std::fs::read_dir(format!("/proc/{process}/fd"))? {
        let path = entry?.path();
        let is_slot =
            std::fs::read_link(&path).is_ok_and(|name| name.to_string_lossy().contains("memfd:"));
        if is_slot {
            let file = std::fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)?;
            let mut byte = [0];
            file.read_exact_at(&mut byte, 1000)?;
            file.write_all_at(&[byte[0] ^ 1], 1000)?;
            flipped += 1;
        }
    }
    anyhow::ensure!(
        flipped > 0,
        "expected a slot among the descriptors of process {process}, got none"
    );
    Ok(())
}

fn lose_everything(packing: &str) -> Result<System> {
    let durable = format!(
        "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 20\npart = \"1MiB\"\npacking = \"{packing}\"\n"
    );
    let mut system = System::start(3, Some((2, 1)), &durable)?;
    let (run, mut trainers) = system.trainers(2)?;
    for step in [10, 20, 30] {
        system.save(&mut trainers, step, &shards(2, step), DurableWish::Policy)?;
        system.wait(0, run, step, CheckpointState::Protected)?;
    }
    system.save(&mut trainers, 40, &shards(2, 40), DurableWish::Policy)?;
    system.wait(0, run, 40, CheckpointState::Durable)?;
    drop(trainers);
    for node in 0..3 {
        system.cluster.kill(node)?;
    }
    system.cluster.start_all()?;
    let rungs = system.restore(&[0, 1], 40, &shards(2, 40))?;
    assert_eq!(rungs, [Rung::Durable, Rung::Durable]);
    Ok(system)
}
