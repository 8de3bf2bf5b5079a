//! A node is lost and a spare takes its place: how long until the newest step bears as many losses as before, beside one plain copy
//! of what was lost, and how much the nodes sent one another for it; over links that are slower than the processor, and over loopback, where the
//! processor of the machine that all nodes share is what is measured. Then a place is added, and one taken away: what is sent because of that.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use storaged::cluster::{Cluster, ClusterSpec, Hosts, NodeListing};
use storaged_bench::net::network::{LinkRate, Network, NetworkSpec, Packets, remove_leftovers};
use storaged_sdk::wire::local::{DurableWish, Rung};
use storaged_sdk::wire::{CheckpointState, Namespace, Rank};
use storaged_tests::clients::Clients;
use storaged_tests::system::{System, executable};

use crate::Figures;
use crate::nodes::{filled, until};

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
/// Two that keep a shard, one that codes, and the spare.
const MACHINES: usize = 4;
const REPLACE_AFTER: &str = "replace_after = \"3s\"\n";
/// Each link, each way: a tenth of the rate at which a copy comes over loopback, so that the link is what limits.
const LINK: LinkRate = LinkRate::megabits(300);
/// Sessions that a change of places causes begin within this time.
const AFTER_A_CHANGE: Duration = Duration::from_secs(8);

fn status_of<H: Hosts>(cluster: &Cluster<H>, node: usize) -> Result<Value> {
    let page = cluster.page(node, "/status")?;
    Ok(serde_json::from_str(&page.body)?)
}

/// One plain copy of rank 1's shard: read by node 0 out of node 1's RAM.
fn plain_copy(clients: &Clients) -> Result<Duration> {
    let mut reader = clients.reader(0)?;
    let plan = reader.plan(None, 60_000)?;
    let manifest = reader.manifest(plan.manifest)?;
    let began = Instant::now();
    let shard = reader.open_shard(&manifest, Rank::new(1), Vec::new(), 60_000)?;
    ensure!(shard.rung() == Rung::PeerRam, "{:?}", shard.rung());
    Ok(began.elapsed())
}

/// Bytes of blocks that these nodes have received: what was sent is received by somebody.
fn received<H: Hosts>(cluster: &Cluster<H>, nodes: &[usize]) -> Result<u64> {
    let mut sum = 0;
    for node in nodes {
        for name in RECEIVED {
            sum += cluster.metric::<u64>(*node, name)?;
        }
    }
    Ok(sum)
}

/// Changes the places by `storaged node`, and says what these nodes receive until all of them are linked and some time after.
fn changed(system: &System, change: &[&str], linked: &[usize], receive: &[usize]) -> Result<u64> {
    let before = received(&system.cluster, receive)?;
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
    Ok(received(&system.cluster, receive)? - before)
}

/// The place that a machine fills, as node 0 says.
fn place_of(system: &System, machine: &str) -> Result<String> {
    let status = status_of(&system.cluster, 0)?;
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
    let began = received(&system.cluster, &[0, 2, 3])?;
    for node in 0..4 {
        system.cluster.wait_for_peers(node, 3)?;
    }
    std::thread::sleep(AFTER_A_CHANGE);
    let grown = grown + received(&system.cluster, &[0, 1, 2, 3])? - began;
    let added = place_of(system, "n1")?;
    let shrunk = changed(system, &["remove", &added], &[0, 2, 3], &[0, 2, 3])?;
    system.cluster.wait(1)?;
    system.bears(0, 1)?;
    figures.insert("grow_moved_bytes", grown as f64);
    figures.insert("shrink_moved_bytes", shrunk as f64);
    Ok(())
}

/// What the loss of a node and its replacement took.
struct Replacement {
    /// From the kill until the spare has the place.
    filled: Duration,
    /// From the spare's link until the step bears a loss again.
    reprotected: Duration,
    copy: Duration,
    moved_vs_needed: f64,
}

/// Three machines save a step of two ranks; the one with rank 1 is killed while a fourth one waits for a place.
fn replace<H: Hosts>(cluster: &mut Cluster<H>, clients: &Clients) -> Result<Replacement> {
    (0..3).try_for_each(|node| cluster.start(node))?;
    (0..3).try_for_each(|node| cluster.wait_for_peers(node, 2))?;
    cluster.start(3)?;
    let (run, mut trainers) = clients.trainers(2)?;
    let shards: Vec<Vec<u8>> = (0..2_u32).map(|rank| filled(SHARD, 1, rank)).collect();
    clients.save(&mut trainers, 1, &shards, DurableWish::Never)?;
    (0..3).try_for_each(|node| clients.wait(node, run, 1, CheckpointState::Protected))?;
    drop(trainers);
    let copy = plain_copy(clients)?;
    let needed = BLOCKS * cluster.metric::<u64>(1, USED)?;
    let before = received(cluster, &[0, 2])?;
    cluster.kill(1)?;
    let killed = Instant::now();
    until("the spare", || {
        let status = status_of(cluster, 0)?;
        let places = status["membership"]["places"].as_array();
        let is_filled = |it: &Value| it["place"] == "n1" && it["node"] == "n3";
        ensure!(places.context("places")?.iter().any(is_filled), "{status}");
        Ok(())
    })?;
    let filled = killed.elapsed();
    until("its link", || {
        let status = cluster.status(0)?;
        ensure!(!status.contains(r#""bears":1"#), "{status}");
        // The other node may have seen it first, and begun.
        let begun = received(cluster, &[0, 2])? > before;
        ensure!(
            begun || status.matches(r#""up":true"#).count() == 2,
            "{status}"
        );
        Ok(())
    })?;
    let linked = Instant::now();
    until("protection", || {
        let status = cluster.status(0)?;
        ensure!(status.contains(r#""bears":1"#), "{status}");
        Ok(())
    })?;
    let reprotected = linked.elapsed();
    let moved = received(cluster, &[0, 2, 3])? - before;
    println!(
        "the place was filled {:.1} s after the kill; one copy took {:.2} s, protection {:.2} s from the link on",
        filled.as_secs_f64(),
        copy.as_secs_f64(),
        reprotected.as_secs_f64()
    );
    Ok(Replacement {
        filled,
        reprotected,
        copy,
        moved_vs_needed: moved as f64 / needed as f64,
    })
}

impl Replacement {
    fn vs_copy(&self) -> f64 {
        self.reprotected.as_secs_f64() / self.copy.as_secs_f64()
    }
}

/// Each machine in a network namespace of its own.
fn over_links() -> Result<Replacement> {
    remove_leftovers()?;
    let network = Network::make(NetworkSpec {
        nodes: MACHINES,
        rate: Some(LINK),
        mtu: 9000,
        packets: Packets::Whole,
    })?;
    let root = tempfile::tempdir()?;
    let registry = root.path().join("registry");
    std::fs::create_dir(&registry)?;
    let settings = format!(
        "[coding]\nk = 2\nm = 1\n\n[membership]\nregistry = {{ kind = \"directory\", path = \"{}\" }}\nsize = 3\npoll = \"1s\"\n{REPLACE_AFTER}",
        registry.display()
    );
    let spec = ClusterSpec {
        executable: executable(),
        directory: root.path().join("cluster"),
        nodes: MACHINES,
        settings,
        listing: NodeListing::InRegistry,
    };
    let mut cluster = Cluster::prepare(&network, spec)?;
    let clients = Clients {
        sockets: (0..MACHINES).map(|node| cluster.socket(node)).collect(),
        namespace: Namespace::new("job")?,
        token: b"a-secret-of-tests".to_vec(),
    };
    replace(&mut cluster, &clients)
}

pub fn measure(figures: &mut Figures) -> Result<()> {
    let mut system = System::with_registry(MACHINES, 3, Some((2, 1)), REPLACE_AFTER)?;
    let clients = (*system).clone();
    let replaced = replace(&mut system.cluster, &clients)?;
    figures.insert("replace_reprotected_s_vs_copy_loopback", replaced.vs_copy());
    figures.insert("replace_filled_s", replaced.filled.as_secs_f64());
    grow_and_shrink(&mut system, figures)?;
    drop(system);
    let over_links = over_links().context("over shaped links (needs root)")?;
    figures.insert("replace_reprotected_s_vs_copy", over_links.vs_copy());
    let moved = replaced.moved_vs_needed.max(over_links.moved_vs_needed);
    figures.insert("epoch_change_moved_vs_needed", moved);
    Ok(())
}
