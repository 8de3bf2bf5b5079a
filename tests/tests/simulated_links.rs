//! Links alone, on a simulated network: how many connections a pair has, what they cost while nothing is said, and how
//! soon the end of a node is noticed, by those that are near it and by others.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Result, ensure};
use storaged::env::SeededEntropy;
use storaged::net::cert::{create_ca, issue};
use storaged::net::{
    Agreement, LINK_VERSIONS, Net, NetConfig, NetEvent, NodeNaming, Peer, TlsFiles, TlsIdentity,
};
use storaged_sdk::wire::{ChunkSize, Generation, NodeName};
use storaged_tests::sim::SimFactory;

const PORT: u16 = 9300;
/// All links are up, and second connections, if there were any, have ended.
const CALM: Duration = Duration::from_secs(20);

fn name(node: usize) -> NodeName {
    NodeName::new(format!("n{node}")).expect("a name")
}

/// What happened to a link.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Up(Generation),
    /// For how long it had been silent, where that is why.
    Down(Option<Duration>),
    Message(Vec<u8>),
}

/// At which node, of which peer, when, and what.
type Log = Arc<Mutex<Vec<(usize, NodeName, Duration, Seen)>>>;

/// A cluster of transports, of which some are near each other.
struct Links<'a> {
    sim: turmoil::Sim<'a>,
    log: Log,
    nets: Arc<Mutex<Vec<Option<Arc<Net>>>>>,
    sent: Arc<AtomicU64>,
}

/// What every host is made of.
#[derive(Clone)]
struct Site {
    directory: std::path::PathBuf,
    addresses: Vec<IpAddr>,
    near: Vec<usize>,
    seed: u64,
    log: Log,
    nets: Arc<Mutex<Vec<Option<Arc<Net>>>>>,
    sent: Arc<AtomicU64>,
}

impl Site {
    fn config(&self, node: usize, generation: u64) -> Result<NetConfig> {
        let files = TlsFiles {
            ca: self.directory.join("ca.pem"),
            certificate: self.directory.join(format!("n{node}.pem")),
            key: self.directory.join(format!("n{node}.key")),
            crl: None,
            naming: NodeNaming::Dns,
        };
        let others = (0..self.addresses.len()).filter(|peer| *peer != node);
        let address = |peer: usize| SocketAddr::new(self.addresses[peer], PORT);
        let peers = others.map(|peer| Peer::named(name(peer), address(peer)));
        let near: BTreeSet<NodeName> = if self.near.contains(&node) {
            self.near.iter().map(|peer| name(*peer)).collect()
        } else {
            BTreeSet::new()
        };
        let entropy = SeededEntropy::new(self.seed + node as u64);
        Ok(NetConfig {
            place: name(node),
            node: name(node),
            generation: Generation::new(generation),
            listen: SocketAddr::new(self.addresses[node], PORT),
            trunks: Vec::new(),
            identity: TlsIdentity::load(&files)?,
            peers: peers.collect(),
            near,
            agreement: Agreement::of(None, ChunkSize::new(1 << 16)?, &[]),
            versions: LINK_VERSIONS,
            sockets: Arc::new(SimFactory {
                loss_one_in: 0,
                entropy,
                sent: self.sent.clone(),
            }),
            seed: Some([self.seed as u8 ^ node as u8; 32]),
        })
    }

    /// One transport, whose events are noted.
    async fn run(self, node: usize, generation: u64) -> Result<(), Box<dyn std::error::Error>> {
        let (sender, mut events) = tokio::sync::mpsc::channel(64);
        let net = Net::start(self.config(node, generation)?, sender).await?;
        self.nets.lock().expect("unpoisoned")[node] = Some(net);
        while let Some(event) = events.recv().await {
            let (peer, seen) = match event {
                NetEvent::Up {
                    peer, generation, ..
                } => (peer, Seen::Up(generation)),
                NetEvent::Down { peer, silent, .. } => (peer, Seen::Down(silent)),
                NetEvent::Message { from, body, .. } => (from, Seen::Message(body)),
                _ => continue,
            };
            let now = turmoil::sim_elapsed().expect("inside the simulation");
            let mut log = self.log.lock().expect("unpoisoned");
            log.push((node, peer, now, seen));
        }
        Ok(())
    }
}

impl Links<'_> {
    fn start(directory: &Path, nodes: usize, near: &[usize], seed: u64) -> Result<Self> {
        storaged::log::start(storaged::log::LogFormat::Text);
        let day = Duration::from_secs(86_400);
        create_ca(directory, day)?;
        for node in 0..nodes {
            issue(directory, &name(node), day)?;
        }
        let mut sim = turmoil::Builder::new()
            .rng_seed(seed)
            .tick_duration(Duration::from_millis(1))
            .simulation_duration(Duration::from_secs(300))
            .udp_capacity(1 << 16)
            .min_message_latency(Duration::from_millis(1))
            .max_message_latency(Duration::from_millis(1))
            .build();
        let addresses = (0..nodes).map(|node| sim.lookup(format!("n{node}")));
        let site = Site {
            directory: directory.into(),
            addresses: addresses.collect(),
            near: near.into(),
            seed,
            log: Log::default(),
            nets: Arc::new(Mutex::new(vec![None; nodes])),
            sent: Arc::default(),
        };
        let generations = Arc::new(AtomicU64::new(1));
        for node in 0..nodes {
            let (site, generations) = (site.clone(), generations.clone());
            sim.host(format!("n{node}"), move || {
                let generation = generations.fetch_add(1, Ordering::Relaxed);
                site.clone().run(node, generation)
            });
        }
        Ok(Self {
            sim,
            log: site.log,
            nets: site.nets,
            sent: site.sent,
        })
    }

    fn run_for(&mut self, time: Duration) -> Result<()> {
        let until = self.sim.elapsed() + time;
        while self.sim.elapsed() < until {
            let stepped = self.sim.step();
            stepped.map_err(|error| anyhow::anyhow!("{error}"))?;
        }
        Ok(())
    }

    /// The node's machine is gone, without a word.
    fn crash(&mut self, node: usize) -> Duration {
        self.nets.lock().expect("unpoisoned")[node] = None;
        self.sim.crash(format!("n{node}"));
        self.sim.elapsed()
    }

    fn send(&self, from: usize, to: usize, body: &'static [u8]) {
        let nets = self.nets.lock().expect("unpoisoned");
        let net = nets[from].as_ref().expect("the node runs");
        net.send(&name(to), bytes::Bytes::from_static(body));
    }

    fn connections(&self) -> Vec<usize> {
        let nets = self.nets.lock().expect("unpoisoned");
        nets.iter().flatten().map(|net| net.connections()).collect()
    }

    /// What a node saw of a peer since then, each with the time that had passed.
    fn seen(&self, node: usize, peer: usize, since: Duration) -> Vec<(Duration, Seen)> {
        let log = self.log.lock().expect("unpoisoned");
        let of_both = log
            .iter()
            .filter(|(at, of, when, _)| *at == node && *of == name(peer) && *when >= since);
        of_both
            .map(|(.., when, seen)| (*when - since, seen.clone()))
            .collect()
    }
}

fn seconds(from: f64, to: f64) -> std::ops::Range<Duration> {
    Duration::from_secs_f64(from)..Duration::from_secs_f64(to)
}

/// Both dial at once when all begin at once; whatever comes of it, no link goes down, and one connection stays.
#[test]
fn a_pair_has_one_connection_and_none_goes_down_when_all_start_at_once() -> Result<()> {
    for seed in 0..4 {
        let directory = tempfile::tempdir()?;
        let mut links = Links::start(directory.path(), 5, &[0, 1, 2], seed)?;
        links.run_for(CALM)?;
        for (node, peer) in (0..5).flat_map(|node| (0..5).map(move |peer| (node, peer))) {
            let seen = links.seen(node, peer, Duration::ZERO);
            ensure!(
                seen.len() == usize::from(node != peer),
                "seed {seed}: n{node} saw of n{peer}: {seen:?}"
            );
        }
        ensure!(links.connections() == [4; 5], "{:?}", links.connections());
    }
    Ok(())
}

#[test]
fn both_ends_of_a_connection_send_on_it() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut links = Links::start(directory.path(), 2, &[], 1)?;
    links.run_for(Duration::from_secs(1))?;
    links.send(0, 1, b"down");
    links.send(1, 0, b"up");
    links.run_for(Duration::from_secs(1))?;
    for (node, peer, body) in [(1, 0, b"down".to_vec()), (0, 1, b"up".to_vec())] {
        let seen = links.seen(node, peer, Duration::ZERO);
        let (_, last) = seen.last().expect("something was seen");
        assert_eq!(*last, Seen::Message(body));
    }
    Ok(())
}

/// Of ten pairs three are near each other. Each of these says one word per half second, which is acknowledged; the others one in
/// three seconds.
#[test]
fn links_of_which_nobody_needs_anything_cost_next_to_nothing() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut links = Links::start(directory.path(), 5, &[0, 1, 2], 3)?;
    links.run_for(CALM)?;
    let before = links.sent.load(Ordering::Relaxed);
    links.run_for(Duration::from_secs(20))?;
    let sent = links.sent.load(Ordering::Relaxed) - before;
    let (near, far) = (3 * 2 * 2 * 20, 7 * 2 * 7);
    ensure!(sent <= near + far, "{sent} datagrams in 20 s");
    ensure!(sent >= near, "{sent} datagrams in 20 s");
    Ok(())
}

#[test]
fn who_is_near_notices_a_death_in_two_and_a_half_seconds_and_all_others_within_six() -> Result<()> {
    for dies in [0, 2] {
        let directory = tempfile::tempdir()?;
        let mut links = Links::start(directory.path(), 5, &[0, 1, 2], 5)?;
        links.run_for(CALM)?;
        let at = links.crash(dies);
        links.run_for(Duration::from_secs(10))?;
        for node in (0..5).filter(|node| *node != dies) {
            let expected = if node < 3 {
                seconds(1.9, 2.6)
            } else {
                seconds(1.9, 6.1)
            };
            let seen = links.seen(node, dies, at);
            ensure!(
                matches!(&seen[..], [(after, Seen::Down(_))] if expected.contains(after)),
                "n{node} saw of n{dies}: {seen:?}"
            );
            // Silence counts from the last word, which from one that is far may be seconds before the death.
            let known = matches!(&seen[..], [(after, Seen::Down(Some(silent)))]
                if *silent >= Duration::from_millis(1_900)
                    && (node >= 3 || silent.abs_diff(*after) <= Duration::from_millis(600)));
            ensure!(known, "n{node} noticed the silence of n{dies}: {seen:?}");
        }
    }
    Ok(())
}

/// Whoever needs an answer of a dead node does not wait for it longer than one that is near.
#[test]
fn a_dead_node_that_is_far_is_noticed_as_soon_when_it_is_sent_something() -> Result<()> {
    for (speaks, dies) in [(3, 0), (0, 3)] {
        let directory = tempfile::tempdir()?;
        let mut links = Links::start(directory.path(), 5, &[0, 1, 2], 6)?;
        links.run_for(CALM)?;
        links.crash(dies);
        links.run_for(Duration::from_millis(300))?;
        let at = links.sim.elapsed();
        links.send(speaks, dies, b"are you there?");
        links.run_for(Duration::from_secs(4))?;
        let seen = links.seen(speaks, dies, at);
        ensure!(
            matches!(&seen[..], [(after, Seen::Down(_))] if *after < Duration::from_millis(2_600)),
            "{seen:?}"
        );
    }
    Ok(())
}

/// Its peers take the hello of its new incarnation for what it is, whatever they think of the connection to the old one.
#[test]
fn a_node_that_is_back_at_once_is_linked_to_at_once() -> Result<()> {
    for restarts in [0, 4] {
        let directory = tempfile::tempdir()?;
        let mut links = Links::start(directory.path(), 5, &[0, 1, 2], 7)?;
        links.run_for(CALM)?;
        links.crash(restarts);
        links.run_for(Duration::from_millis(200))?;
        let at = links.sim.elapsed();
        links.sim.bounce(format!("n{restarts}"));
        links.run_for(Duration::from_secs(5))?;
        for node in (0..5).filter(|node| *node != restarts) {
            let seen = links.seen(node, restarts, at);
            let is_anew = |seen: &Seen| *seen == Seen::Up(Generation::new(6));
            ensure!(
                matches!(&seen[..], [(_, Seen::Down(_)), (after, up)]
                    if is_anew(up) && *after < Duration::from_millis(250)),
                "n{node} saw of n{restarts}: {seen:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn a_cut_of_a_second_and_a_half_breaks_no_link_and_a_longer_one_heals_in_three() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut links = Links::start(directory.path(), 3, &[0, 1, 2], 8)?;
    links.run_for(CALM)?;
    let at = links.sim.elapsed();
    links.sim.partition("n0", "n1");
    links.run_for(Duration::from_millis(1_500))?;
    links.sim.repair("n0", "n1");
    links.run_for(Duration::from_secs(3))?;
    ensure!(links.seen(0, 1, at).is_empty() && links.seen(1, 0, at).is_empty());
    links.sim.partition("n0", "n1");
    links.run_for(Duration::from_secs(6))?;
    links.sim.repair("n0", "n1");
    let healed = links.sim.elapsed();
    links.run_for(Duration::from_secs(5))?;
    for (node, peer) in [(0, 1), (1, 0)] {
        let seen = links.seen(node, peer, at);
        ensure!(
            matches!(&seen[..], [(_, Seen::Down(_)), (after, Seen::Up(_))]
                if *after + at < healed + Duration::from_secs(3)),
            "n{node} saw of n{peer}: {seen:?}"
        );
    }
    Ok(())
}
