//! Eight nodes in network namespaces, on whose places etcd or an S3 server has them agree, beside a job that saves: machines are lost and others with
//! other names come, the registry is away, two machines come at once.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{scope, sleep};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use storaged::cluster::{Cluster, ClusterSpec, NodeListing};
use storaged_bench::net::network::{Network, NetworkSpec, Packets};
use storaged_bench::s3_server::{BUCKET, S3Server, credentials};
use storaged_sdk::Trainer;
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, Namespace, RunId};
use storaged_tests::clients::Clients;
use storaged_tests::etcd::Etcd;
use storaged_tests::system::{executable, shards, wait};

use crate::can_run;

/// Places, and machines that come later: the two after them.
const PLACES: usize = 8;
const MACHINES: usize = PLACES + 2;
/// Ranks of the job, each on a data node.
const RANKS: u32 = 6;
/// Where the registry runs.
const REGISTRY: usize = MACHINES;
const S3_PORT: u16 = 7_480;

/// What the machines agree in, a real process on a machine of its own.
enum Registry<'a> {
    Etcd(Box<Etcd>),
    S3(S3Server<'a>),
}

impl<'a> Registry<'a> {
    fn etcd(network: &'a Network) -> Result<Self> {
        // Programs of a namespace are started by a command whose text does not change.
        let like = network.command(REGISTRY, Path::new("etcd"));
        let parts: Vec<_> = like.get_args().map(ToOwned::to_owned).collect();
        let program = like.get_program().to_owned();
        let command_of = move |etcd: &Path| {
            let mut command = Command::new(&program);
            command.args(&parts[..parts.len() - 1]).arg(etcd);
            command
        };
        let mut etcd = Etcd::prepare(network.address(REGISTRY), command_of)?;
        etcd.spawn()?;
        network.inside(REGISTRY, || etcd.wait_for_it())?;
        Ok(Self::Etcd(Box::new(etcd)))
    }

    fn s3(network: &'a Network, directory: &Path) -> Result<Self> {
        let at = SocketAddr::new(network.address(REGISTRY), S3_PORT);
        let command_of = |program: &Path| network.command(REGISTRY, program);
        let server = S3Server::start_where(directory.join("s3"), at, command_of)?;
        Ok(Self::S3(server))
    }

    /// As `[membership]` names it.
    fn settings(&self, directory: &Path) -> Result<String> {
        Ok(match self {
            Self::Etcd(etcd) => format!(
                "{{ kind = \"etcd\", endpoints = [\"{}\"], prefix = \"storaged/eight\" }}",
                etcd.endpoint()
            ),
            Self::S3(server) => format!(
                "{{ kind = \"s3\", bucket = \"{BUCKET}\", prefix = \"eight\", endpoint = \"{}\", credentials_file = \"{}\" }}",
                server.endpoint(),
                credentials(directory)?.display()
            ),
        })
    }

    /// As by a power cut.
    fn goes(&mut self) -> Result<()> {
        match self {
            Self::Etcd(etcd) => etcd.kill(),
            Self::S3(server) => server.kill_gateway(),
        }
    }

    fn comes_back(&mut self) -> Result<()> {
        match self {
            Self::Etcd(etcd) => etcd.spawn(),
            Self::S3(server) => server.start_gateway(),
        }
    }
}

/// The machines, and what they agree in.
struct Machines<'a> {
    cluster: Cluster<&'a Network>,
    clients: Clients,
    registry: Registry<'a>,
}

impl<'a> Machines<'a> {
    fn network() -> Result<Network> {
        Network::make(NetworkSpec {
            nodes: MACHINES + 1,
            rate: None,
            mtu: 9000,
            packets: Packets::Whole,
        })
    }

    fn prepare(network: &'a Network, directory: &Path, registry: Registry<'a>) -> Result<Self> {
        let settings = format!(
            "[coding]\nk = 6\nm = 2\n\n[membership]\nregistry = {}\nsize = {PLACES}\npoll = \"1s\"\nreplace_after = \"2s\"\n",
            registry.settings(directory)?
        );
        let cluster = Cluster::prepare(
            network,
            ClusterSpec {
                executable: executable(),
                directory: directory.join("cluster"),
                nodes: MACHINES,
                settings,
                listing: NodeListing::InRegistry,
            },
        )?;
        let clients = Clients {
            sockets: (0..MACHINES).map(|node| cluster.socket(node)).collect(),
            namespace: Namespace::new("job")?,
            token: b"a-secret-of-tests".to_vec(),
        };
        Ok(Self {
            cluster,
            clients,
            registry,
        })
    }

    fn start(&mut self, machines: &[usize]) -> Result<()> {
        let mut machines = machines.iter();
        machines.try_for_each(|machine| Ok(self.cluster.start(*machine)?))
    }

    /// Who fills the places, as the first machine says.
    fn filled(&self) -> Result<BTreeSet<String>> {
        let page = self.cluster.page(0, "/status")?;
        let status: Value = serde_json::from_str(&page.body)?;
        let places = status["membership"]["places"].as_array();
        let places = places.context("places")?.iter();
        let nodes = places.filter_map(|it| it["node"].as_str());
        Ok(nodes.map(ToOwned::to_owned).collect())
    }

    /// Waits until these machines and no others have the places, and the newest step bears two losses.
    fn are_members(&self, machines: &[usize]) -> Result<()> {
        let expected: BTreeSet<String> = machines.iter().map(|it| format!("n{it}")).collect();
        wait("the members", || {
            let filled = self.filled()?;
            ensure!(filled == expected, "{filled:?}");
            let status = self.cluster.status(0)?;
            ensure!(status.contains(r#""bears":2"#), "{status}");
            Ok(())
        })
    }

    fn lose(&mut self, machines: &[usize]) -> Result<()> {
        let mut machines = machines.iter();
        machines.try_for_each(|machine| Ok(self.cluster.kill(*machine)?))
    }
}

/// A job that saves until it is told to end.
#[derive(Default)]
struct Job {
    step: AtomicU64,
    ends: AtomicBool,
}

impl Job {
    /// No save may fail: no machine with a rank is lost.
    fn go_on(&self, clients: &Clients, trainers: &mut [Trainer]) -> Result<()> {
        while !self.ends.load(Ordering::Relaxed) {
            let step = self.step.load(Ordering::Relaxed) + 1;
            clients.save(trainers, step, &shards(RANKS, step), DurableWish::Never)?;
            self.step.store(step, Ordering::Relaxed);
            sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Waits until it has saved some steps more.
    fn goes_on(&self) -> Result<()> {
        let before = self.step.load(Ordering::Relaxed);
        wait("steps", || {
            let now = self.step.load(Ordering::Relaxed);
            ensure!(now > before + 5, "step {now} after {before}");
            Ok(())
        })
    }
}

fn months_of(machines: &mut Machines<'_>, job: &Job) -> Result<()> {
    job.goes_on()?;
    // A machine with another name comes for one that is lost.
    machines.start(&[8])?;
    machines.lose(&[7])?;
    machines.are_members(&[0, 1, 2, 3, 4, 5, 6, 8])?;
    job.goes_on()?;
    // Nobody can be agreed on, and the job saves on, also when another machine is lost.
    machines.registry.goes()?;
    machines.lose(&[6])?;
    job.goes_on()?;
    machines.registry.comes_back()?;
    // Two come at once for two that are lost; nothing was coded in between.
    machines.lose(&[8])?;
    job.goes_on()?;
    machines.start(&[9, 7])?;
    machines.are_members(&[0, 1, 2, 3, 4, 5, 7, 9])?;
    job.goes_on()
}

fn finish(machines: &Machines<'_>, job: &Job, run: RunId) -> Result<()> {
    let last = job.step.load(Ordering::Relaxed);
    for node in [0, 5, 7, 9] {
        let protected = CheckpointState::Protected;
        machines.clients.wait(node, run, last, protected)?;
    }
    let nodes: Vec<usize> = (0..RANKS as usize).collect();
    let restored = machines.clients.restore(&nodes, last, &shards(RANKS, last));
    restored.map(drop)
}

#[test]
fn machines_come_and_go_beside_a_job_that_saves() -> Result<()> {
    if !can_run() {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let network = Machines::network()?;
    let registry = Registry::etcd(&network)?;
    machines_come_and_go(&network, directory.path(), registry)
}

/// Ceph's gateway, which is killed and started again.
#[test]
#[ignore = "needs Ceph's Debian packages: `make places-in-s3`, which `make check` runs"]
fn machines_come_and_go_by_an_s3_server() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let network = Machines::network()?;
    let registry = Registry::s3(&network, directory.path())?;
    machines_come_and_go(&network, directory.path(), registry)
}

fn machines_come_and_go<'a>(
    network: &'a Network,
    directory: &Path,
    registry: Registry<'a>,
) -> Result<()> {
    let mut machines = Machines::prepare(network, directory, registry)?;
    machines.start(&[0, 1, 2, 3, 4, 5, 6, 7])?;
    for node in 0..PLACES {
        machines.cluster.wait_for_peers(node, PLACES - 1)?;
    }
    let clients = machines.clients.clone();
    let (run, mut trainers) = clients.trainers(RANKS)?;
    let job = Job::default();
    scope(|threads| {
        let saving = threads.spawn(|| job.go_on(&clients, &mut trainers));
        let outcome = months_of(&mut machines, &job);
        job.ends.store(true, Ordering::Relaxed);
        let saved = saving.join().expect("it does not panic");
        outcome.and(saved)
    })
    .with_context(|| {
        let ends = (0..MACHINES).map(|node| machines.cluster.log_end(node, 8));
        ends.collect::<Vec<_>>().join("\n")
    })?;
    finish(&machines, &job, run)
}
