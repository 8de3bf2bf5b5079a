//! The whole daemon, transport and executor included, on a simulated network: six nodes save, two crash at once,
//! their replacements come up empty, and every rank's bytes come back.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use storaged::config::{Config, ConfigFile};
use storaged::driver::{Daemon, Offload, Seams};
use storaged::encode::Pool;
use storaged::net::cert::{create_ca, issue};
use storaged::net::{Peer, TlsFiles};
use storaged::seam::SeededEntropy;
use storaged::stage::{Answer, StageEvent};
use storaged_core::place::Member;
use storaged_core::{ConnId, RequestId};
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
        })
        .collect();
    config.peers = (0..NODES)
        .filter(|peer| *peer != node)
        .map(|peer| Peer {
            name: name(peer),
            address: SocketAddr::new(addresses[peer], PORT),
        })
        .collect();
    config.tls = Some(TlsFiles {
        ca: directory.join("ca.pem"),
        certificate: directory.join(format!("n{node}.pem")),
        key: directory.join(format!("n{node}.key")),
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

async fn save(doors: &Doors, run: RunId, step: u64) -> Result<Vec<Client>> {
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
    let state = CheckpointState::Protected;
    trainers[0]
        .ask(Request::Wait {
            run,
            step,
            state,
            timeout_ms: WAIT_MS,
        })
        .await?;
    Ok(trainers)
}

async fn restore(doors: &Doors, step: u64) -> Result<Vec<Rung>> {
    let mut first = Client::connect(doors, 0, Role::Reader).await?;
    let planned = first
        .ask(Request::Plan {
            step: None,
            timeout_ms: WAIT_MS,
        })
        .await?;
    let Reply::Plan(plan) = planned.reply else {
        bail!("no plan: {planned:?}")
    };
    anyhow::ensure!(
        plan.step.get() == step,
        "expected step {step}, got {}",
        plan.step
    );
    let mut rungs = Vec::new();
    for (rank, shard) in shards(RANKS, step).into_iter().enumerate() {
        let mut reader = Client::connect(doors, rank, Role::Reader).await?;
        let (manifest, ranges) = (plan.manifest, vec![]);
        let open = Request::OpenShard {
            manifest,
            rank: Rank::new(rank as u32),
            ranges,
            timeout_ms: WAIT_MS,
            without: None,
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

/// Where the shards came from, and the simulated time that it took.
struct Restored {
    rungs: Vec<Rung>,
    took: Duration,
}

/// The two that crash come back after a second, and the job restores so long after the crash.
fn run(
    seed: u64,
    loss_one_in: u64,
    link_rate: Option<u64>,
    restore_after: Duration,
) -> Result<Restored> {
    storaged::log::start(storaged::log::LogFormat::Text);
    let directory = tempfile::tempdir()?;
    let day = Duration::from_secs(86_400);
    create_ca(directory.path(), day)?;
    for node in 0..NODES {
        issue(directory.path(), &name(node), day)?;
    }
    let mut sim = turmoil::Builder::new()
        .rng_seed(seed)
        .tick_duration(Duration::from_millis(1))
        .simulation_duration(Duration::from_secs(300))
        .udp_capacity(1 << 16)
        // A machine room: delays of this order hardly reorder datagrams.
        .min_message_latency(Duration::from_millis(1))
        .max_message_latency(Duration::from_millis(1))
        .build();
    let addresses: Vec<IpAddr> = (0..NODES)
        .map(|node| sim.lookup(format!("n{node}")))
        .collect();
    let doors: Doors = Arc::default();
    let generations = Arc::new(AtomicU64::new(seed));
    for node in 0..NODES {
        let (doors, addresses, path) = (
            doors.clone(),
            addresses.clone(),
            directory.path().to_owned(),
        );
        let generations = generations.clone();
        sim.host(format!("n{node}"), move || {
            let config = config(&path, node, &addresses, link_rate);
            let entropy = SeededEntropy::new(generations.fetch_add(1 << 32, Ordering::Relaxed));
            let doors = doors.clone();
            async move {
                let sockets = SimFactory {
                    loss_one_in,
                    entropy: entropy.clone(),
                    sent: Arc::default(),
                };
                let seams = Seams {
                    sockets: Arc::new(sockets),
                    entropy,
                    net_runtime: tokio::runtime::Handle::current(),
                    pool: Pool::inline(),
                    offload: Offload::Inline,
                    store: None,
                };
                let daemon = Daemon::start(config?, seams).await?;
                doors
                    .lock()
                    .expect("unpoisoned")
                    .insert(node, daemon.stage_events());
                daemon.run(std::future::pending()).await;
                Ok(())
            }
        });
    }
    let (told, ask_for_crash) = std::sync::mpsc::channel();
    let outcome: Arc<Mutex<Option<Restored>>> = Arc::default();
    let (result, seen) = (outcome.clone(), doors.clone());
    sim.client("job", async move {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let mut opener = Client::connect(&seen, 0, Role::Reader).await?;
        let opened = opener
            .ask(Request::OpenRun {
                timeout_ms: WAIT_MS,
            })
            .await?;
        let Reply::RunOpened { run } = opened.reply else {
            return Err("no run".into());
        };
        save(&seen, run, 10).await?;
        save(&seen, run, 20).await?;
        told.send(())?;
        tokio::time::sleep(restore_after).await;
        let began = tokio::time::Instant::now();
        let rungs = restore(&seen, 20).await?;
        *result.lock().expect("unpoisoned") = Some(Restored {
            rungs,
            took: began.elapsed(),
        });
        Ok(())
    });
    let mut crash_at = None;
    loop {
        let done = sim
            .step()
            .map_err(|error| anyhow::anyhow!("seed {seed}: {error}"))?;
        if ask_for_crash.try_recv().is_ok() {
            sim.crash("n1");
            sim.crash("n2");
            crash_at = Some(sim.elapsed());
        }
        if crash_at.is_some_and(|at| sim.elapsed() > at + Duration::from_secs(1)) {
            sim.bounce("n1");
            sim.bounce("n2");
            crash_at = None;
        }
        if done {
            break;
        }
    }
    let restored = outcome.lock().expect("unpoisoned").take();
    restored.context("the job did not finish")
}

/// Long after the crash.
const CALM: Duration = Duration::from_secs(8);

#[test]
fn six_nodes_lose_two_and_restore() -> Result<()> {
    let Restored { rungs, .. } = run(1, 0, None, CALM)?;
    assert_eq!(rungs[0], Rung::OwnRam);
    Ok(())
}

#[test]
fn so_they_do_when_datagrams_are_lost() -> Result<()> {
    run(2, 50, None, CALM).map(|_| ())
}

/// With a rate the leaders choose gathers by the data nodes instead of the chain.
#[test]
fn so_they_do_with_rotating_gathers() -> Result<()> {
    run(3, 0, Some(125_000_000), CALM).map(|_| ())
}

/// Half a second after two nodes are back under their names everything is where it was, without anybody having asked:
/// their peers take their hellos for what they are, instead of waiting for silence on the connections to those that died.
#[test]
fn two_that_come_back_are_healed_at_once() -> Result<()> {
    let Restored { rungs, took } = run(4, 0, None, Duration::from_millis(1_500))?;
    anyhow::ensure!(rungs.iter().all(|rung| *rung == Rung::OwnRam), "{rungs:?}");
    anyhow::ensure!(took < Duration::from_millis(500), "{took:?}");
    Ok(())
}
