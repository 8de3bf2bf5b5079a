//! The whole daemon, transport and executor included, on a simulated network: six nodes save, two crash at once,
//! their replacements come up empty, and every rank's bytes come back. `STORAGED_SIM_NETWORKS=N` sets how many seeds
//! `many_seeds` tries, `STORAGED_SIM_NETWORK=N` replays one by `one_seed`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use storaged::config::{Config, ConfigFile};
use storaged::driver::Daemon;
use storaged::encode::Pool;
use storaged::env::{Entropy, Environment, Offload, SeededEntropy};
use storaged::keep::NoStore;
use storaged::net::cert::{create_ca, issue};
use storaged::net::{NodeNaming, Peer, TlsFiles};
use storaged::stage::{Answer, StageEvent};
use storaged_core::{ConnId, RequestId};
use storaged_plan::Member;
use storaged_sdk::wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role, Rung};
use storaged_sdk::wire::{
    CheckpointState, Geometry, Namespace, NodeName, Rank, RunId, Step, WorldSize,
};
use storaged_tests::sim::SimFactory;
use storaged_tests::system::shards;
use tokio::sync::{mpsc, oneshot};

const NODES: usize = 6;
const RANKS: u32 = 4;
const PORT: u16 = 9300;
const WAIT_MS: u32 = 60_000;

type Doors = Arc<Mutex<BTreeMap<usize, mpsc::Sender<StageEvent>>>>;

fn name(node: usize) -> NodeName {
    NodeName::new(format!("n{node}")).expect("a name")
}

fn config(
    directory: &Path,
    node: usize,
    addresses: &[IpAddr],
    link_rate: Option<u64>,
) -> Result<Config> {
    let mut config = ConfigFile::default().validate()?;
    config.name = name(node);
    config.node = name(node);
    config.listen = SocketAddr::new(addresses[node], PORT);
    config.ops_listen = None;
    config.sockets = Vec::new();
    config.geometry = Some(Geometry::new(4, 2)?);
    config.budget = 1 << 30;
    config.link_rates.usual = link_rate;
    config.members = (0..NODES)
        .map(|node| Member {
            name: name(node),
            failure_domain: format!("n{node}"),
            cordon: Default::default(),
            seat: None,
        })
        .collect();
    config.peers = (0..NODES)
        .filter(|peer| *peer != node)
        .map(|peer| Peer::named(name(peer), SocketAddr::new(addresses[peer], PORT)))
        .collect();
    config.tls = Some(TlsFiles {
        ca: directory.join("ca.pem"),
        certificate: directory.join(format!("n{node}.pem")),
        key: directory.join(format!("n{node}.key")),
        crl: None,
        naming: NodeNaming::Dns,
    });
    Ok(config)
}

/// A client in the same process: requests go straight to the driver.
struct Client {
    door: mpsc::Sender<StageEvent>,
    conn: ConnId,
    next: u64,
}

impl Client {
    async fn connect(doors: &Doors, node: usize, role: Role) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let door = doors
            .lock()
            .expect("unpoisoned")
            .get(&node)
            .cloned()
            .context("no such node")?;
        let mut client = Self {
            door,
            conn: ConnId(NEXT.fetch_add(1, Ordering::Relaxed)),
            next: 0,
        };
        let namespace = Namespace::new("job")?;
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace,
            token: vec![].into(),
            role,
        };
        client.ask(hello).await?;
        Ok(client)
    }

    async fn ask(&mut self, request: Request) -> Result<Answer> {
        let (answer, receiver) = oneshot::channel();
        let id = RequestId {
            conn: self.conn,
            index: self.next,
        };
        self.next += 1;
        self.door
            .send(StageEvent::Request {
                id,
                request,
                answer,
            })
            .await?;
        let answer = tokio::time::timeout(Duration::from_secs(90), receiver)
            .await
            .context("no answer")??;
        match answer.reply {
            Reply::Refused(refusal) => bail!(refusal.message),
            _ => Ok(answer),
        }
    }
}

/// Every rank saves its shard, and the step is committed.
async fn stage(doors: &Doors, run: RunId, step: u64) -> Result<Vec<Client>> {
    let world_size = WorldSize::new(RANKS)?;
    let step = Step::new(step);
    let mut trainers = Vec::new();
    for (rank, shard) in shards(RANKS, step.get()).into_iter().enumerate() {
        let role = Role::Trainer {
            run,
            rank: Rank::new(rank as u32),
            world_size,
        };
        let mut trainer = Client::connect(doors, rank, role).await?;
        let length = shard.len() as u64;
        let granted = trainer
            .ask(Request::AcquireSlot {
                bytes: length,
                timeout_ms: WAIT_MS,
            })
            .await?;
        let Reply::SlotGranted { slot, .. } = granted.reply else {
            bail!("no slot: {granted:?}")
        };
        granted
            .slot
            .context("no memory with the slot")?
            .write_at(0, &shard)?;
        trainer
            .ask(Request::SealSlot { slot, step, length })
            .await?;
        trainers.push(trainer);
    }
    let schema = vec![].into();
    let commit = Request::Commit {
        step,
        schema,
        torch_metadata: vec![].into(),
        durable: DurableWish::Never,
    };
    trainers[0].ask(commit).await?;
    Ok(trainers)
}

/// The same, until the step is protected.
async fn save(doors: &Doors, run: RunId, step: u64) -> Result<()> {
    let mut trainers = stage(doors, run, step).await?;
    let wait = Request::Wait {
        run,
        step: Step::new(step),
        state: CheckpointState::Protected,
        timeout_ms: WAIT_MS,
    };
    trainers[0].ask(wait).await?;
    Ok(())
}

/// Restores what the plan offers, which must be one of these steps, and compares every byte.
async fn restore(doors: &Doors, steps: &[u64]) -> Result<Vec<Rung>> {
    let mut first = Client::connect(doors, 0, Role::Reader).await?;
    let planned = first
        .ask(Request::Plan {
            step: None,
            timeout_ms: WAIT_MS,
            allow_older: false,
        })
        .await?;
    let Reply::Plan(plan) = planned.reply else {
        bail!("no plan: {planned:?}")
    };
    anyhow::ensure!(
        steps.contains(&plan.step.get()),
        "expected one of {steps:?}, got {}",
        plan.step
    );
    let mut rungs = Vec::new();
    for (rank, shard) in shards(RANKS, plan.step.get()).into_iter().enumerate() {
        let mut reader = Client::connect(doors, rank, Role::Reader).await?;
        let (manifest, ranges) = (plan.manifest, vec![]);
        let open = Request::OpenShard {
            manifest,
            rank: Rank::new(rank as u32),
            ranges,
            timeout_ms: WAIT_MS,
            without: None,
            withheld: None,
            early: None,
        };
        let opened = reader.ask(open).await?;
        let Reply::ShardOpened { rung, .. } = opened.reply else {
            bail!("not opened: {opened:?}")
        };
        let mut got = vec![0; shard.len()];
        opened
            .slot
            .context("no memory with the shard")?
            .read_at(0, &mut got)?;
        anyhow::ensure!(got == shard, "rank {rank} came back with other bytes");
        rungs.push(rung);
    }
    Ok(rungs)
}

/// Long after the crash.
const CALM: Duration = Duration::from_secs(8);

/// Where the shards came from, and the simulated time that it took.
type Restored = (Vec<Rung>, Duration);

/// What happens to a cluster.
#[derive(Debug, Clone, Copy)]
struct Scenario {
    seed: u64,
    /// One datagram in so many is lost; 0 for none.
    loss_one_in: u64,
    /// A node whose datagrams are lost more often: one in so many of them. Its streams crawl.
    slow: Option<(usize, u64)>,
    /// What the daemons are told of their links.
    link_rate: Option<u64>,
    /// The nodes that crash at once.
    crash: [usize; 2],
    /// They do so long after a third step is committed; without it, once the second one is protected.
    after_commit: Option<Duration>,
    /// The job restores so long after the crash; those that crash come back after a second.
    restore_after: Duration,
}

/// Two nodes crash once two steps are protected.
const PLAIN: Scenario = Scenario {
    seed: 1,
    loss_one_in: 0,
    slow: None,
    link_rate: None,
    crash: [1, 2],
    after_commit: None,
    restore_after: CALM,
};

impl Scenario {
    /// Any two nodes crash, mostly while the third step is encoded; some hop is slow in half of the seeds.
    fn of(seed: u64) -> Self {
        let entropy = SeededEntropy::new(seed);
        let below = |bound: u64| entropy.next() % bound;
        let first = below(NODES as u64) as usize;
        let second = (first + 1 + below(NODES as u64 - 1) as usize) % NODES;
        Self {
            seed,
            loss_one_in: [0, 0, 100, 30][below(4) as usize],
            slow: (below(2) == 0).then(|| (below(NODES as u64) as usize, 8)),
            link_rate: (below(2) == 0).then_some(125_000_000),
            crash: [first, second],
            after_commit: (below(4) > 0).then(|| Duration::from_millis(below(300))),
            restore_after: CALM,
        }
    }

    fn loss_of(&self, node: usize) -> u64 {
        let slow = self.slow.filter(|(slow, _)| *slow == node);
        slow.map_or(self.loss_one_in, |(_, one_in)| one_in)
    }

    /// The job: saves, tells of the time to crash, and restores when the nodes have been replaced.
    async fn job(self, doors: Doors, crash: std::sync::mpsc::Sender<()>) -> Result<Restored> {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let mut opener = Client::connect(&doors, 0, Role::Reader).await?;
        let timeout_ms = WAIT_MS;
        let opened = opener.ask(Request::OpenRun { timeout_ms }).await?;
        let Reply::RunOpened { run } = opened.reply else {
            bail!("no run: {opened:?}")
        };
        save(&doors, run, 10).await?;
        save(&doors, run, 20).await?;
        let mut offered = vec![20];
        if let Some(after) = self.after_commit {
            // The trainers live on: what they hold is theirs until the nodes are gone.
            let trainers = stage(&doors, run, 30).await?;
            tokio::time::sleep(after).await;
            drop(trainers);
            offered.push(30);
        }
        crash.send(())?;
        tokio::time::sleep(self.restore_after).await;
        let began = tokio::time::Instant::now();
        let rungs = restore(&doors, &offered).await?;
        Ok((rungs, began.elapsed()))
    }
}

fn run(scenario: Scenario) -> Result<Restored> {
    storaged::log::start(storaged::log::LogFormat::Text);
    let directory = tempfile::tempdir()?;
    let day = Duration::from_secs(86_400);
    create_ca(directory.path(), day)?;
    for node in 0..NODES {
        issue(directory.path(), &name(node), day)?;
    }
    let mut sim = turmoil::Builder::new()
        .rng_seed(scenario.seed)
        .tick_duration(Duration::from_millis(1))
        .simulation_duration(Duration::from_secs(300))
        .udp_capacity(1 << 16)
        // A machine room: delays of this order hardly reorder datagrams.
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(1))
        .build();
    let doors: Doors = Arc::default();
    add_daemons(&mut sim, scenario, directory.path(), &doors);
    let (told, ask_for_crash) = std::sync::mpsc::channel();
    let outcome: Arc<Mutex<Option<Result<Restored>>>> = Arc::default();
    let result = outcome.clone();
    sim.client("job", async move {
        let restored = scenario.job(doors, told).await;
        *result.lock().expect("unpoisoned") = Some(restored);
        Ok(())
    });
    let mut crash_at = None;
    loop {
        let done = sim.step();
        let done = done.map_err(|error| anyhow::anyhow!("{scenario:?}: {error}"))?;
        if ask_for_crash.try_recv().is_ok() {
            for node in scenario.crash {
                sim.crash(format!("n{node}"));
            }
            crash_at = Some(sim.elapsed());
        }
        if crash_at.is_some_and(|at| sim.elapsed() > at + Duration::from_secs(1)) {
            for node in scenario.crash {
                sim.bounce(format!("n{node}"));
            }
            crash_at = None;
        }
        if done {
            break;
        }
    }
    let restored = outcome.lock().expect("unpoisoned").take();
    restored
        .context("the job did not finish")?
        .with_context(|| format!("{scenario:?}"))
}

fn add_daemons(sim: &mut turmoil::Sim<'_>, scenario: Scenario, directory: &Path, doors: &Doors) {
    let addresses: Vec<IpAddr> = (0..NODES)
        .map(|node| sim.lookup(format!("n{node}")))
        .collect();
    let generations = Arc::new(AtomicU64::new(scenario.seed));
    for node in 0..NODES {
        let (doors, addresses, path) = (doors.clone(), addresses.clone(), directory.to_owned());
        let generations = generations.clone();
        sim.host(format!("n{node}"), move || {
            let config = config(&path, node, &addresses, scenario.link_rate);
            let entropy = SeededEntropy::new(generations.fetch_add(1 << 32, Ordering::Relaxed));
            let doors = doors.clone();
            async move {
                let sockets = SimFactory {
                    loss_one_in: scenario.loss_of(node),
                    entropy: entropy.clone(),
                    sent: Arc::default(),
                };
                let env = Environment {
                    sockets: Arc::new(sockets),
                    entropy,
                    net_runtime: tokio::runtime::Handle::current(),
                    pool: Pool::inline(),
                    offload: Offload::Inline,
                    store: None,
                    descriptors: Arc::new(NoStore),
                    inherited: Vec::new(),
                    ops: None,
                    stage: None,
                    members: None,
                };
                let daemon = Daemon::start(config?, env).await?;
                doors
                    .lock()
                    .expect("unpoisoned")
                    .insert(node, daemon.stage_events());
                let (_never, stops) = mpsc::channel(1);
                daemon.run(stops).await;
                Ok(())
            }
        });
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn six_nodes_lose_two_and_restore() -> Result<()> {
    let (rungs, _) = run(PLAIN)?;
    assert_eq!(rungs[0], Rung::OwnRam);
    Ok(())
}

#[test]
fn so_they_do_when_datagrams_are_lost() -> Result<()> {
    run(Scenario {
        seed: 2,
        loss_one_in: 50,
        ..PLAIN
    })
    .map(|_| ())
}

/// With a rate the leaders choose gathers by the data nodes instead of the chain.
#[test]
fn so_they_do_with_rotating_gathers() -> Result<()> {
    run(Scenario {
        seed: 3,
        link_rate: Some(125_000_000),
        ..PLAIN
    })
    .map(|_| ())
}

/// Any two nodes, at any time of an encode, with slow hops: `STORAGED_SIM_NETWORKS` says of how many seeds.
#[test]
fn many_seeds() -> Result<()> {
    let first = number("STORAGED_SIM_FIRST").unwrap_or(0);
    let seeds = number("STORAGED_SIM_NETWORKS").unwrap_or(12);
    let mut failed = Vec::new();
    for seed in first..first + seeds {
        if let Err(error) = run(Scenario::of(seed)) {
            println!("seed {seed} failed: {error:#}");
            failed.push(seed);
        }
    }
    anyhow::ensure!(failed.is_empty(), "seeds that failed: {failed:?}");
    Ok(())
}

/// `STORAGED_SIM_NETWORK` says which.
#[test]
fn one_seed() -> Result<()> {
    run(Scenario::of(number("STORAGED_SIM_NETWORK").unwrap_or(0))).map(|_| ())
}

/// Half a second after two nodes are back under their names everything is where it was, without anybody having asked:
/// their peers take their hellos for what they are, instead of waiting for silence on the connections to those that died.
#[test]
fn two_that_come_back_are_healed_at_once() -> Result<()> {
    let restore_after = Duration::from_millis(1_500);
    let (rungs, took) = run(Scenario {
        seed: 4,
        restore_after,
        ..PLAIN
    })?;
    anyhow::ensure!(rungs.iter().all(|rung| *rung == Rung::OwnRam), "{rungs:?}");
    anyhow::ensure!(took < Duration::from_millis(500), "{took:?}");
    Ok(())
}
