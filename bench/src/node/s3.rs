//! One node and a real S3 server behind a slow way, beside s5cmd on the same way.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use storaged::cluster::{Cluster, Loopback};
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::DurableWish;

use super::slow_proxy::{SlowProxy, Way};
use super::tier::{InMemory, open_all};
use super::{CHUNK, ROUNDS, chunks, least};
use crate::net::job::Job;
use crate::net::scenario::Bench;
use crate::s3_server::{BUCKET, KEYS, S3Server, credentials, output};

/// The server's port, and the daemon's.
const S3_PORT: u16 = 7_484;
const PORT: u16 = 9_760;
const WAY: Way = Way {
    rate: 40e6,
    delay: Duration::from_millis(20),
};
/// Shard that is timed, and shards whose requests are counted.
const TIMED: u64 = 160 << 20;
const COUNTED: u64 = 64 << 20;
/// Ranks of the two steps whose requests are compared: what belongs to the step itself is in both.
const FEW: usize = 1;
const MORE: usize = 3;
/// See the module. Without s5cmd (its path is in `S5CMD`) ours alone is measured.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("one node, an S3 server behind {} MB/s", WAY.rate / 1e6);
    let _server = S3Server::start(bench.directory.join("s3"), S3_PORT)?;
    let proxy = SlowProxy::start((Ipv4Addr::LOCALHOST, S3_PORT).into(), WAY)?;
    let (put, get) = ours(bench, &proxy)?;
    bench.figures.put("s3_put_seconds", put);
    bench.figures.put("s3_get_seconds", get);
    match std::env::var_os("S5CMD") {
        None => eprintln!("  s5cmd is not compared: S5CMD does not say where it is"),
        Some(program) => {
            let (put_by, get_by) = s5cmd(&PathBuf::from(program), proxy.address)?;
            let figures = &mut bench.figures;
            figures.put("s5cmd_put_seconds", put_by);
            figures.put("s5cmd_get_seconds", get_by);
            figures.put("s3_put_vs_s5cmd_40mbs", put_by / put);
            figures.put("s3_get_vs_s5cmd_40mbs", get_by / get);
        }
    }
    let [few, more] = [FEW, MORE].map(|ranks| requests(bench, &proxy, ranks));
    let each = (more? - few?) / (MORE - FEW) as f64;
    bench.figures.put("s3_requests_per_shard_64mib", each);
    Ok(())
}

fn cluster(bench: &mut Bench, proxy: &SlowProxy, shard: u64) -> Result<Cluster> {
    let mut spec = bench.daemons(1, 0, CHUNK, shard, 12);
    let folder = spec.directory.file_name().unwrap_or_default().to_owned();
    // The daemon's environment is that of whoever runs the bench; a file of the bench's own names the keys.
    spec.more = format!(
        "[durable]\nkind = \"s3\"\nbucket = \"{BUCKET}\"\nprefix = \"{}\"\nendpoint = \"http://{}\"\n\
         credentials_file = \"{}\"\n",
        folder.display(),
        proxy.address,
        credentials(&bench.directory)?.display(),
    );
    spec.start_at(Loopback { port: PORT }, 1)
}

fn job(daemons: &Cluster, ranks: usize, shard: u64) -> Result<Job> {
    let mut job = Job::open(daemons, ranks, chunks(shard))?;
    job.durable = DurableWish::Required;
    Ok(job)
}

/// Seconds up and down.
fn ours(bench: &mut Bench, proxy: &SlowProxy) -> Result<(f64, f64)> {
    let mut daemons = cluster(bench, proxy, TIMED)?;
    let mut job = job(&daemons, 1, TIMED)?;
    let (mut put, mut get) = (None, None);
    for _ in 0..ROUNDS {
        let sealed = job.stage(1.0)?;
        job.committed(&daemons, sealed)?;
        let started = Instant::now();
        job.reach(&daemons, CheckpointState::Durable)?;
        put = Some(least(put, started.elapsed().as_secs_f64()));
    }
    let manifest = job.manifest(&daemons, 0)?;
    job.end_training();
    for _ in 0..ROUNDS {
        daemons.kill(0)?;
        daemons.start(0)?;
        daemons.wait_for_links()?;
        let took = open_all(&daemons, &job, &manifest)?;
        get = Some(least(get, took.as_secs_f64()));
    }
    Ok((put.context("a round")?, get.context("a round")?))
}

fn s5cmd(program: &Path, proxy: SocketAddr) -> Result<(f64, f64)> {
    let file = InMemory::make(TIMED)?;
    let back = file.0.with_extension("back");
    let object = format!("s3://{BUCKET}/s5cmd");
    let (mut put, mut get) = (None, None);
    for _ in 0..ROUNDS {
        let up = [file.0.display().to_string(), object.clone()];
        put = Some(least(put, copy(program, proxy, &up)?));
        let down = [object.clone(), back.display().to_string()];
        get = Some(least(get, copy(program, proxy, &down)?));
        std::fs::remove_file(&back)?;
    }
    Ok((put.context("a round")?, get.context("a round")?))
}

fn copy(program: &Path, proxy: SocketAddr, ends: &[String; 2]) -> Result<f64> {
    let started = Instant::now();
    let mut command = Command::new(program);
    let endpoint = format!("http://{proxy}");
    command.args(["--endpoint-url", &endpoint, "cp"]).args(ends);
    output(command.envs(KEYS))?;
    Ok(started.elapsed().as_secs_f64())
}

/// Requests from the commit of a step until it is durable, all that are its own and its shards'.
fn requests(bench: &mut Bench, proxy: &SlowProxy, ranks: usize) -> Result<f64> {
    let daemons = cluster(bench, proxy, COUNTED)?;
    let mut job = job(&daemons, ranks, COUNTED)?;
    let mut fewest = None;
    for _ in 0..ROUNDS {
        let before = proxy.answers();
        let sealed = job.stage(1.0)?;
        job.committed(&daemons, sealed)?;
        job.reach(&daemons, CheckpointState::Durable)?;
        fewest = Some(least(fewest, (proxy.answers() - before) as f64));
    }
    fewest.context("a round")
}
