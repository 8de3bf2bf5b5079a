//! A node is lost and a spare takes its place: how long until the newest step bears as many losses as before, beside one plain copy
//! of what was lost, and how much the nodes sent one another for it. Then a place is added, and one taken away: what is sent because of that.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged_sdk::wire::Rank;
use storaged_sdk::wire::local::Rung;
use storaged_tests::system::{System, executable};

use crate::Figures;
use crate::nodes::until;

/// Bytes of a shard: long enough that they take longer than what is said about them.
const SHARD: usize = 192 << 20;
const USED: &str = "storaged_memory_used_bytes";
/// Bytes of blocks that a node got from others, by what the session was for.
const RECEIVED: [&str; 2] = [
    "storaged_encode_received_bytes_total{kind=\"encode\"}",
    "storaged_encode_received_bytes_total{kind=\"repair\"}",
];
/// A block is decoded from so many others, of which none is where the new one is to be.
const BLOCKS: u64 = 2;
/// Sessions that a change of places causes begin within this time.
const AFTER_A_CHANGE: Duration = Duration::from_secs(8);

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

/// Bytes of blocks that these nodes have received: what was sent is received by somebody.
fn received(system: &System, nodes: &[usize]) -> Result<u64> {
    let mut sum = 0;
    for node in nodes {
        for name in RECEIVED {
            sum += system.cluster.metric::<u64>(*node, name)?;
        }
    }
    Ok(sum)
}

/// Changes the places by `storaged node`, and says what these nodes receive until all of them are linked and some time after.
fn changed(system: &System, change: &[&str], linked: &[usize], receive: &[usize]) -> Result<u64> {
    let before = received(system, receive)?;
    let told = Command::new(executable())
        .arg("node")
        .args(change)
        .arg("--config")
        .arg(system.cluster.config_path(0))
        .output()?;
    ensure!(told.status.success(), "{told:?}");
    for node in linked {
        system.cluster.wait_for_peers(*node, linked.len() - 1)?;
    }
    std::thread::sleep(AFTER_A_CHANGE);
    Ok(received(system, receive)? - before)
}

/// The place that a machine fills, as node 0 says.
fn place_of(system: &System, machine: &str) -> Result<String> {
    let status = status_of(system, 0)?;
    let places = status["membership"]["places"].as_array();
    let found = places.context("places")?.iter();
    let mut of_machine = found.filter(|it| it["node"] == machine);
    let place = of_machine.next().and_then(|it| it["place"].as_str());
    Ok(place.context("a place")?.to_owned())
}

/// A place more and a place less, while a step is there that keeps its groups: nothing of it need be sent.
fn grow_and_shrink(system: &mut System, figures: &mut Figures) -> Result<()> {
    let grown = changed(system, &["resize", "4"], &[0, 2, 3], &[0, 2, 3])?;
    system.cluster.start(1)?;
    let began = received(system, &[0, 2, 3])?;
    for node in 0..4 {
        system.cluster.wait_for_peers(node, 3)?;
    }
    std::thread::sleep(AFTER_A_CHANGE);
    let grown = grown + received(system, &[0, 1, 2, 3])? - began;
    let added = place_of(system, "n1")?;
    let shrunk = changed(system, &["remove", &added], &[0, 2, 3], &[0, 2, 3])?;
    system.cluster.wait(1)?;
    system.bears(0, 1)?;
    figures.insert("grow_moved_bytes", grown as f64);
    figures.insert("shrink_moved_bytes", shrunk as f64);
    Ok(())
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
    let needed = BLOCKS * system.cluster.metric::<u64>(1, USED)?;
    let before = received(&system, &[0, 2])?;
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
    let moved = received(&system, &[0, 2, 3])? - before;
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
    grow_and_shrink(&mut system, figures)
}
