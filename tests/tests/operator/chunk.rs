//! The size of a chunk belongs to the manifest: a daemon that is configured anew goes on with what it had.

use std::time::Duration;

use anyhow::Result;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_tests::system::{System, said, shards};

use crate::node::{rewrite, until};

const TIER: &str = "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\npart = \"1MiB\"\n";

#[test]
fn a_restart_with_another_chunk_size_keeps_what_it_restored() -> Result<()> {
    let mut system = System::start(3, Some((2, 1)), TIER)?;
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 10, &shards(2, 10), DurableWish::Policy)?;
    system.wait(0, run, 10, CheckpointState::Durable)?;
    drop(trainers);
    for node in 0..3 {
        system.cluster.kill(node)?;
        rewrite(&system, node, "m = 1\n", "m = 1\nchunk = \"64KiB\"\n")?;
    }
    system.cluster.start_all()?;
    let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
    assert_eq!(rungs, [Rung::Durable, Rung::Durable]);

    let whole = || {
        let verified = system.storaged(0, &["verify", "job"])?;
        // Until the parity is back, verify misses it and exits with 1.
        let said = said(&verified);
        let blocks = said.lines().filter(|line| !line.contains(" schema "));
        let all_good = blocks.filter(|line| line.ends_with("good")).count() == 3;
        Ok(verified.status.success() && all_good)
    };
    until(
        "two shards and the parity are good",
        Duration::from_secs(5),
        whole,
    )?;
    let rungs = system.restore(&[0, 1], 10, &shards(2, 10))?;
    assert_eq!(
        rungs,
        [Rung::OwnRam, Rung::OwnRam],
        "the next plan reads RAM"
    );

    // And a new step has chunks of the new size, on top of the old one.
    let (run, mut trainers) = system.trainers(2)?;
    system.save(&mut trainers, 20, &shards(2, 20), DurableWish::Policy)?;
    system.wait(0, run, 20, CheckpointState::Protected)?;
    Ok(())
}
