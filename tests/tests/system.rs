//! Whole-system tests with real processes.

use anyhow::{Result, ensure};
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, RunId, Step};
use storaged_tests::clients::WAIT_MS;
use storaged_tests::system::{System, shards, wait};

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

/// Sockets, and a second rail, on all nodes but one: as while a cluster is changed node by node.
#[test]
fn data_goes_over_trunks_and_two_nodes_may_be_lost() -> Result<()> {
    let mut system = System::prepared(6, Some((4, 2)), "")?;
    for node in 0..5 {
        let rail = format!("127.0.1.{}", node + 1);
        let network = format!("[network]\nsockets = 2\nrails = [\"{rail}\"]\n");
        system.cluster.configure(node, &network)?;
    }
    system.cluster.start_all()?;
    // Several ranks of a node have streams to the same peers at once.
    let run = system.reader(0)?.open_run(WAIT_MS)?;
    let trainer = |rank: u32| system.trainer(rank as usize % 6, run, rank, 18);
    let mut trainers = (0..18).map(trainer).collect::<Result<Vec<_>>>()?;
    for step in [10, 20] {
        system.save(&mut trainers, step, &shards(18, step), DurableWish::Policy)?;
        system.wait(0, run, step, CheckpointState::Protected)?;
    }
    let trunks = |node| system.cluster.metric::<u64>(node, "storaged_place_trunks");
    wait("trunks", || {
        let of_all: Vec<u64> = (0..6).map(trunks).collect::<Result<_, _>>()?;
        let some = of_all[..5].iter().sum::<u64>() > 0;
        ensure!(some && of_all[5] == 0, "{of_all:?}");
        Ok(())
    })?;
    drop(trainers);
    system.cluster.kill(1)?;
    system.cluster.kill(5)?;
    system.cluster.start(1)?;
    system.cluster.start(5)?;
    system.restore(&[0, 1, 2, 3, 4, 5], 20, &shards(18, 20))?;
    Ok(())
}

#[test]
fn all_nodes_may_be_lost_after_durable() -> Result<()> {
    lose_everything("none").map(|_| ())
}

#[test]
fn so_they_may_when_the_durable_tier_is_packed() -> Result<()> {
    let (system, run) = lose_everything("zstd")?;
    let step = system
        .root
        .path()
        .join(format!("tier/job/run-{run}/step-40"));
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
    let tier = system.root.path().join(format!("tier/job/run-{run}"));
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

fn lose_everything(packing: &str) -> Result<(System, RunId)> {
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
    Ok((system, run))
}

/// What describes the tensors of a large model has tens of megabytes, far more than any message may have.
#[test]
fn descriptions_of_tens_of_megabytes_are_as_good_as_small_ones() -> Result<()> {
    let mut system = System::start(4, Some((2, 2)), "")?;
    let (run, mut trainers) = system.trainers(2)?;
    let metadata: Vec<u8> = (0..24u32 << 20)
        .map(|at| (at.wrapping_mul(at) >> 7) as u8)
        .collect();
    for step in [10, 20] {
        system.seal_all(&mut trainers, step, &shards(2, step))?;
        trainers[0].commit(
            Step::new(step),
            vec![1, 2, 3],
            metadata.clone(),
            DurableWish::Policy,
        )?;
        system.wait(0, run, step, CheckpointState::Protected)?;
    }
    drop(trainers);
    // Two nodes that know nothing of it any more get it from the others.
    for node in [0, 1] {
        system.cluster.kill(node)?;
    }
    for node in [0, 1] {
        system.cluster.start(node)?;
    }
    system.cluster.wait_for_links()?;
    system.restore(&[0, 1], 20, &shards(2, 20))?;
    let mut reader = system.reader(1)?;
    let plan = reader.plan(None, WAIT_MS)?;
    let manifest = reader.manifest(plan.manifest)?;
    assert!(manifest.torch_metadata()[..] == metadata[..]);
    Ok(())
}
