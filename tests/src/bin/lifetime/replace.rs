//! A node is lost and a spare takes its place: how long until the newest step bears as many losses as before, beside one plain copy
//! of what was lost, and how much was moved.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged_sdk::wire::Rank;
use storaged_sdk::wire::local::Rung;
use storaged_tests::system::System;

use crate::Figures;
use crate::nodes::until;

/// Bytes of a shard: long enough that they take longer than what is said about them.
const SHARD: usize = 192 << 20;
const USED: &str = "storaged_memory_used_bytes";

fn filled(step: u64, rank: usize) -> Vec<u8> {
    let mut state = step.wrapping_mul(0x9E37_79B9).wrapping_add(rank as u64) | 1;
    let words = (0..SHARD / 8).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().collect()
}

fn status_of(system: &System, node: usize) -> Result<serde_json::Value> {
    let page = system.cluster.page(node, "/status")?;
    Ok(serde_json::from_str(&page.body)?)
}

/// One plain copy of rank 1's shard: read by node 0 out of node 1's RAM.
fn plain_copy(system: &System) -> Result<Duration> {
    let mut reader = system.reader(0)?;
    let plan = reader.plan(None, 60_000)?;
    let manifest = reader.manifest(plan.manifest)?;
    let began = Instant::now();
    let shard = reader.open_shard(&manifest, Rank::new(1), Vec::new(), 60_000)?;
    ensure!(shard.rung() == Rung::PeerRam, "{:?}", shard.rung());
    Ok(began.elapsed())
}

pub fn measure(figures: &mut Figures) -> Result<()> {
    let mut system = System::with_registry(4, 3, Some((2, 1)), "replace_after = \"3s\"\n")?;
    (0..3).try_for_each(|node| system.cluster.start(node))?;
    (0..3).try_for_each(|node| system.cluster.wait_for_peers(node, 2))?;
    system.cluster.start(3)?;
    let (run, mut trainers) = system.trainers(2)?;
    let shards: Vec<Vec<u8>> = (0..2).map(|rank| filled(1, rank)).collect();
    let never = storaged_sdk::wire::local::DurableWish::Never;
    system.save(&mut trainers, 1, &shards, never)?;
    let protected = storaged_sdk::wire::CheckpointState::Protected;
    (0..3).try_for_each(|node| system.wait(node, run, 1, protected))?;
    drop(trainers);
    let copy = plain_copy(&system)?;
    let needed: u64 = system.cluster.metric(1, USED)?;
    system.cluster.kill(1)?;
    let killed = Instant::now();
    until("the spare", || {
        let status = status_of(&system, 0)?;
        let places = status["membership"]["places"]
            .as_array()
            .context("places")?;
        let filled = places
            .iter()
            .any(|it| it["place"] == "n1" && it["node"] == "n3");
        ensure!(filled, "{status}");
        Ok(())
    })?;
    let detected = killed.elapsed();
    until("its link", || {
        let status = system.cluster.status(0)?;
        ensure!(status.matches(r#""up":true"#).count() == 2, "{status}");
        Ok(())
    })?;
    let linked = Instant::now();
    until("protection", || system.bears(0, 1))?;
    let reprotected = linked.elapsed();
    let moved: u64 = system.cluster.metric(3, USED)?;
    println!(
        "the place was filled {:.1} s after the kill; one copy took {:.2} s, protection {:.2} s from the link on",
        detected.as_secs_f64(),
        copy.as_secs_f64(),
        reprotected.as_secs_f64()
    );
    let ratio = reprotected.as_secs_f64() / copy.as_secs_f64();
    figures.insert("replace_reprotected_s_vs_copy", ratio);
    figures.insert("replace_filled_s", detected.as_secs_f64());
    figures.insert("epoch_change_moved_vs_needed", moved as f64 / needed as f64);
    Ok(())
}
