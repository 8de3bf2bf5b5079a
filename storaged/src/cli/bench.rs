//! `storaged bench`: stage, encode and restore through the public SDK on a throw-away cluster of six processes on
//! this machine, against memcpy and a raw QUIC stream in the same run. Bytes are verified; ratios are what counts.

use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use serde_json::{Map, Value};
use storaged_sdk::wire::local::{DurableWish, Role, Rung};
use storaged_sdk::wire::peer::StreamRecord;
use storaged_sdk::wire::{
    CheckpointState, Generation, Namespace, NodeName, Rank, RunId, SessionId, Step, WorldSize,
};
use storaged_sdk::{Client, ConnectOptions, Trainer};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::{CliError, print};
use crate::cluster::{Cluster, ClusterError, ClusterSpec, Loopback, NodeListing};
use crate::net::cert::{CA_CERTIFICATE, create_ca, issue};
use crate::net::{
    Agreement, LINK_VERSIONS, Net, NetConfig, NetEvent, NodeNaming, Peer, RailHint, TlsFiles,
    TlsIdentity, UdpFactory,
};

const NODES: usize = 6;
const K: usize = 4;
const M: usize = 2;
/// Any wait of the bench.
const WAIT_MS: u32 = 120_000;
/// The raw stream's certificates are valid so long.
const DAY: Duration = Duration::from_secs(86_400);
/// Rounds of every measurement; the best counts, because this machine's other work only slows.
const ROUNDS: usize = 5;

#[derive(Debug, Args)]
#[command(
    after_help = "What the figures mean:\n  stage_blocked_vs_memcpy    time a trainer is blocked by a save / time of one memcpy of the same bytes\n  encode_vs_raw_quic         bytes per second over all links while a step is coded / those of one raw QUIC stream\n  restore_local_vs_memcpy    bytes per second of a verified read from own RAM / those of memcpy\n  restore_decode_vs_raw_quic bytes per second over all links while a lost shard is decoded / those of one raw stream\nAll six nodes share this machine's cores, so the last three say what a byte costs, not what a network can do."
)]
pub struct BenchArgs {
    /// Bytes of every rank's shard
    #[arg(long, default_value = "64MiB")]
    shard: bytesize::ByteSize,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Commit to name in the JSON
    #[arg(long, default_value = "")]
    commit: String,
}

type Figures = BTreeMap<&'static str, f64>;

pub fn bench(args: &BenchArgs) -> Result<(), CliError> {
    let directory = BenchDirectory::make()?;
    let length = usize::try_from(args.shard.as_u64()).unwrap_or(usize::MAX);
    let mut figures = Figures::new();
    figures.insert(
        "raw_quic_bytes_per_second",
        raw_quic(&directory.path, length)?,
    );
    measure(&directory, length, &mut figures)?;
    if args.json {
        print(&json(&figures, &args.commit).to_string());
        return Ok(());
    }
    for (name, value) in &figures {
        print(&format!("{name:<32} {value:>16.3}"));
    }
    Ok(())
}

/// A directory that goes when the bench ends.
struct BenchDirectory {
    path: PathBuf,
}

impl BenchDirectory {
    fn make() -> Result<Self, CliError> {
        let path = std::env::temp_dir().join(format!("storaged-bench-{}", std::process::id()));
        let made = std::fs::create_dir_all(&path);
        made.map_err(|source| CliError::Io {
            what: "making a directory for the bench",
            source,
        })?;
        Ok(Self { path })
    }
}

impl Drop for BenchDirectory {
    fn drop(&mut self) {
        // What is left behind in the temporary directory harms nobody.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn cluster_error(error: ClusterError) -> CliError {
    CliError::Unexpected(crate::driver::chain(&error))
}

fn content(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = vec![0; length];
    for word in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    bytes
}

/// The fastest of some rounds.
fn best(mut round: impl FnMut() -> Result<Duration, CliError>) -> Result<Duration, CliError> {
    let mut fastest = round()?;
    for _ in 1..ROUNDS {
        fastest = fastest.min(round()?);
    }
    Ok(fastest)
}

fn measure(
    directory: &BenchDirectory,
    length: usize,
    figures: &mut Figures,
) -> Result<(), CliError> {
    let executable = std::env::current_exe();
    let spec = ClusterSpec {
        listing: NodeListing::InFiles,
        executable: executable.map_err(|source| CliError::Io {
            what: "finding this executable",
            source,
        })?,
        directory: directory.path.join("cluster"),
        nodes: NODES,
        settings: format!("[coding]\nk = {K}\nm = {M}\n"),
    };
    let mut cluster = Cluster::prepare(Loopback { port: 9_700 }, spec).map_err(cluster_error)?;
    cluster.start_all().map_err(cluster_error)?;
    let job = BenchJob::open(&cluster)?;
    let mut trainers = job.trainers(&cluster)?;
    let shards: Vec<Vec<u8>> = (0..K)
        .map(|rank| content(length, rank as u64 + 1))
        .collect();
    let memcpy = memcpy(&shards[0]);
    figures.insert(
        "memcpy_bytes_per_second",
        length as f64 / memcpy.as_secs_f64(),
    );
    save_steps(&cluster, &job, &mut trainers, &shards, memcpy, figures)?;
    drop(trainers);
    restore(&mut cluster, &job, &shards, memcpy, figures)
}

/// One copy into memory that is there already, as a reused slot is.
fn memcpy(source: &[u8]) -> Duration {
    let mut target = vec![1; source.len()];
    let round = |target: &mut Vec<u8>| {
        let started = Instant::now();
        target.copy_from_slice(black_box(source));
        black_box(&target);
        started.elapsed()
    };
    (0..ROUNDS)
        .map(|_| round(&mut target))
        .min()
        .unwrap_or_default()
}

struct BenchJob {
    namespace: Namespace,
    run: RunId,
}

impl BenchJob {
    fn open(cluster: &Cluster) -> Result<Self, CliError> {
        let namespace =
            Namespace::new("bench").map_err(|error| CliError::Unexpected(error.to_string()))?;
        let mut job = Self {
            namespace,
            run: RunId::new(0),
        };
        job.run = job.reader(cluster, 0)?.open_run(WAIT_MS)?;
        Ok(job)
    }

    fn options(&self, cluster: &Cluster, node: usize) -> ConnectOptions {
        ConnectOptions {
            socket: cluster.socket(node),
            namespace: self.namespace.clone(),
            token: Vec::new(),
            role: Role::Reader,
        }
    }

    fn reader(&self, cluster: &Cluster, node: usize) -> Result<Client, CliError> {
        Ok(Client::connect(&self.options(cluster, node))?.0)
    }

    fn trainers(&self, cluster: &Cluster) -> Result<Vec<Trainer>, CliError> {
        let world =
            WorldSize::new(K as u32).map_err(|error| CliError::Unexpected(error.to_string()))?;
        (0..K)
            .map(|rank| {
                let options = self.options(cluster, rank);
                Ok(Trainer::connect(
                    options,
                    self.run,
                    Rank::new(rank as u32),
                    world,
                )?)
            })
            .collect()
    }
}

/// Full steps, every byte changed: how long each rank is blocked, and how long until the step is protected.
fn save_steps(
    cluster: &Cluster,
    job: &BenchJob,
    trainers: &mut [Trainer],
    shards: &[Vec<u8>],
    memcpy: Duration,
    figures: &mut Figures,
) -> Result<(), CliError> {
    let mut step = 0;
    let mut blocked = Duration::MAX;
    // Slots are made in the first steps: those are not timed.
    let mut save = |timed: &mut Duration| -> Result<Duration, CliError> {
        step += 1;
        let mut last_seal = Instant::now();
        for (trainer, shard) in trainers.iter_mut().zip(shards) {
            let mut bytes = shard.clone();
            // Every chunk differs from the step before, so everything is coded anew.
            bytes
                .iter_mut()
                .step_by(4096)
                .for_each(|byte| *byte ^= step as u8);
            let started = Instant::now();
            let slot = trainer.acquire(bytes.len() as u64, WAIT_MS)?;
            slot.copy_in(0, &bytes)?;
            trainer.seal(&slot, Step::new(step), bytes.len() as u64)?;
            *timed = (*timed).min(started.elapsed());
            last_seal = Instant::now();
        }
        trainers[0].commit(Step::new(step), Vec::new(), Vec::new(), DurableWish::Never)?;
        job.reader(cluster, 0)?.wait(
            job.run,
            Step::new(step),
            CheckpointState::Protected,
            WAIT_MS,
        )?;
        Ok(last_seal.elapsed())
    };
    for _ in 0..3 {
        save(&mut Duration::default())?;
    }
    let protected = best(|| save(&mut blocked))?;
    figures.insert(
        "stage_blocked_vs_memcpy",
        blocked.as_secs_f64() / memcpy.as_secs_f64(),
    );
    // The chain carries m sums over each of k links between data and coding nodes, and m-1, m-2 .. 1 between coding nodes.
    let blocks = K * M + M * (M - 1) / 2;
    let carried = (blocks * shards[0].len()) as f64 / protected.as_secs_f64();
    figures.insert(
        "encode_payload_bytes_per_second",
        (K * shards[0].len()) as f64 / protected.as_secs_f64(),
    );
    figures.insert(
        "encode_vs_raw_quic",
        carried / figures["raw_quic_bytes_per_second"],
    );
    Ok(())
}

fn restore(
    cluster: &mut Cluster,
    job: &BenchJob,
    shards: &[Vec<u8>],
    memcpy: Duration,
    figures: &mut Figures,
) -> Result<(), CliError> {
    let length = shards[0].len();
    let mut out = vec![0; length];
    let mut first = job.reader(cluster, 0)?;
    let plan = first.plan(None, WAIT_MS)?;
    let manifest = first.manifest(plan.manifest)?;
    let local = best(|| {
        let shard = first.open_shard(&manifest, Rank::new(0), Vec::new(), WAIT_MS)?;
        let started = Instant::now();
        shard.read_at(0, &mut out)?;
        Ok(started.elapsed())
    })?;
    figures.insert(
        "restore_local_vs_memcpy",
        memcpy.as_secs_f64() / local.as_secs_f64(),
    );
    let lost = 1;
    let mut decode = || -> Result<Duration, CliError> {
        cluster.kill(lost).map_err(cluster_error)?;
        // Until the links to it are down everywhere: nobody waits for its answers then.
        std::thread::sleep(Duration::from_secs(3));
        let mut reader = job.reader(cluster, 0)?;
        let started = Instant::now();
        let shard = reader.open_shard(&manifest, Rank::new(lost as u32), Vec::new(), WAIT_MS)?;
        let elapsed = started.elapsed();
        match shard.rung() {
            Rung::Decoded => Ok(elapsed),
            rung => Err(CliError::Unexpected(format!(
                "expected a decoded shard, got one from {rung:?}"
            ))),
        }
    };
    let decoded = best(&mut decode)?;
    // The chain of k survivors ends in the reader, itself a survivor: k - 1 links, one block each.
    let carried = ((K - 1) * length) as f64 / decoded.as_secs_f64();
    let raw = figures["raw_quic_bytes_per_second"];
    figures.insert("restore_decode_vs_raw_quic", carried / raw);
    figures.insert(
        "restore_decode_bytes_per_second",
        length as f64 / decoded.as_secs_f64(),
    );
    Ok(())
}

/// Bytes per second of one stream between two endpoints of this transport, in one process.
fn raw_quic(directory: &std::path::Path, length: usize) -> Result<f64, CliError> {
    let certificates = directory.join("raw");
    create_ca(&certificates, DAY)?;
    let (sender_runtime, sender, mut sender_events) = raw_endpoint(&certificates, 0)?;
    let (receiver_runtime, receiver, mut received) = raw_endpoint(&certificates, 1)?;
    let reading = receiver_runtime.spawn(async move {
        let _keep = receiver;
        let mut buffer = vec![0; 1 << 20];
        while let Some(event) = received.recv().await {
            if let NetEvent::Stream { mut recv, .. } = event {
                while let Ok(Some(_)) = recv.read(&mut buffer).await {}
            }
        }
    });
    let block = Bytes::from(content(1 << 20, 7));
    let blocks = (4 * length).div_ceil(block.len());
    let to = node_name(1)?;
    let outcome = sender_runtime.block_on(async {
        while !matches!(sender_events.recv().await, None | Some(NetEvent::Up { .. })) {}
        let mut fastest = Duration::MAX;
        for session in 0..3 {
            let record = StreamRecord {
                leader: node_name(0)?,
                session: SessionId::new(session),
                edge: 0,
            };
            let opened = sender.open_stream(&to, &record, RailHint::default()).await;
            let mut opened = opened.map_err(|error| CliError::Unexpected(error.to_string()))?;
            let stream = &mut opened.stream;
            let started = Instant::now();
            for _ in 0..blocks {
                let sent = stream.write_chunk(block.clone()).await;
                sent.map_err(|error| CliError::Unexpected(error.to_string()))?;
            }
            let _ = stream.finish();
            let _ = stream.stopped().await;
            fastest = fastest.min(started.elapsed());
        }
        Ok::<_, CliError>(fastest)
    });
    reading.abort();
    sender_runtime.shutdown_background();
    receiver_runtime.shutdown_background();
    Ok((blocks * block.len()) as f64 / outcome?.as_secs_f64())
}

/// One of the two endpoints, on a thread of its own.
fn raw_endpoint(
    certificates: &std::path::Path,
    node: u8,
) -> Result<(Runtime, Arc<Net>, mpsc::Receiver<NetEvent>), CliError> {
    let name = node_name(node)?;
    issue(certificates, &name, DAY)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build();
    let runtime = runtime.map_err(|source| CliError::Io {
        what: "starting a runtime",
        source,
    })?;
    let (events, received) = mpsc::channel(64);
    let config = NetConfig {
        identity: identity(certificates, &name)?,
        place: name.clone(),
        node: name,
        generation: Generation::new(u64::from(node)),
        listen: address(node),
        trunks: Vec::new(),
        peers: vec![Peer::named(node_name(1 - node)?, address(1 - node))],
        near: BTreeSet::new(),
        agreement: Agreement::of(
            None,
            storaged_sdk::wire::ChunkSize::new(1 << 18).expect("a size"),
            &[],
        ),
        versions: LINK_VERSIONS,
        sockets: Arc::new(UdpFactory),
        seed: None,
    };
    let net = runtime.block_on(Net::start(config, events));
    let net = net.map_err(|error| CliError::Unexpected(crate::driver::chain(&error)))?;
    Ok((runtime, net, received))
}

fn node_name(node: u8) -> Result<NodeName, CliError> {
    NodeName::new(format!("raw{node}")).map_err(|error| CliError::Unexpected(error.to_string()))
}

fn address(node: u8) -> std::net::SocketAddr {
    ([127, 0, 1, node + 1], 9_720).into()
}

fn identity(directory: &std::path::Path, name: &NodeName) -> Result<TlsIdentity, CliError> {
    let files = TlsFiles {
        ca: directory.join(CA_CERTIFICATE),
        certificate: directory.join(format!("{name}.pem")),
        key: directory.join(format!("{name}.key")),
        crl: None,
        naming: NodeNaming::Dns,
    };
    TlsIdentity::load(&files).map_err(|error| CliError::Unexpected(crate::driver::chain(&error)))
}

fn json(figures: &Figures, commit: &str) -> Value {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let machine = format!(
        "{}, {cores} cores",
        model.trim_start_matches([' ', '\t', ':'])
    );
    let date = time::OffsetDateTime::now_utc().date().to_string();
    let mut object: Map<String, Value> = figures
        .iter()
        .map(|(name, value)| ((*name).into(), (*value).into()))
        .collect();
    object.insert("machine".into(), machine.into());
    object.insert("date".into(), date.into());
    object.insert("commit".into(), commit.into());
    Value::Object(object)
}
