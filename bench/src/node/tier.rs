//! Two shards of one node to a directory and back, beside what `dd` with O_DIRECT writes and reads on the same disk.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged::cluster::{Cluster, Hosts};
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{CheckpointState, ManifestBytes};

use super::{CHUNK, ROUNDS, chunks, in_directory, least, network};
use crate::net::job::{Job, ShardAt};
use crate::net::network::Network;
use crate::net::scenario::Bench;
use crate::s3_server::output;

const RANKS: usize = 2;
const SHARD: u64 = 512 << 20;
/// As many as a node has parts on their way to the tier.
const PROCESSES: u64 = 4;
const BYTES: u64 = RANKS as u64 * SHARD;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("one node, two shards, a directory");
    let folder = bench.directory.join("tier");
    fs::create_dir_all(&folder)?;
    let (write, read) = disk(&bench.directory.join("dd"))?;
    bench.figures.put("dd_write_bytes_per_second", write);
    bench.figures.put("dd_read_bytes_per_second", read);
    let network = network(1)?;
    let mut spec = bench.daemons(1, 0, CHUNK, SHARD, 8);
    spec.more = in_directory(&folder);
    let mut daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, RANKS, chunks(SHARD))?;
    job.durable = DurableWish::Required;
    let (mut cpu, mut took) = (None, None);
    for _ in 0..ROUNDS {
        let sealed = job.stage(1.0)?;
        job.committed(&daemons, sealed)?;
        let (before, started) = (daemons.cpu_time(), Instant::now());
        job.reach(&daemons, CheckpointState::Durable)?;
        took = Some(least(took, started.elapsed().as_secs_f64()));
        let used = daemons.cpu_time().since(before).total();
        cpu = Some(least(cpu, used * 1e9 / BYTES as f64));
    }
    let figures = &mut bench.figures;
    figures.put("trickle_dir_cpu_s_per_gb", cpu.context("a round")?);
    let rate = BYTES as f64 / took.context("a round")?;
    figures.put("trickle_dir_bytes_per_second", rate);
    figures.put("trickle_dir_vs_disk", rate / write);
    let manifest = job.manifest(&daemons, 0)?;
    job.end_training();
    let (took, cpu) = load(&mut daemons, &job, &manifest)?;
    let rate = BYTES as f64 / took;
    let figures = &mut bench.figures;
    figures.put("fetch_dir_cpu_s_per_gb", cpu);
    figures.put("fetch_dir_bytes_per_second", rate);
    figures.put("fetch_dir_vs_disk", rate / read);
    Ok(())
}

/// Seconds and CPU seconds per GB of bringing both shards back to a node that has lost its memory.
fn load(
    daemons: &mut Cluster<&Network>,
    job: &Job,
    manifest: &ManifestBytes,
) -> Result<(f64, f64)> {
    let (mut took, mut cpu) = (None, None);
    for _ in 0..ROUNDS {
        daemons.kill(0)?;
        drop_page_cache()?;
        daemons.start(0)?;
        daemons.wait_for_links()?;
        let before = daemons.cpu_time();
        let seconds = open_all(daemons, job, manifest)?.as_secs_f64();
        took = Some(least(took, seconds));
        let used = daemons.cpu_time().since(before).total();
        cpu = Some(least(cpu, used * 1e9 / BYTES as f64));
    }
    Ok((took.context("a round")?, cpu.context("a round")?))
}

/// All ranks of the node ask for their shards at once; the time until the last one has its own.
pub fn open_all(
    daemons: &Cluster<impl Hosts + Sync>,
    job: &Job,
    manifest: &ManifestBytes,
) -> Result<Duration> {
    thread::scope(|threads| {
        let open = |rank| {
            threads.spawn(move || {
                let started = Instant::now();
                job.open_shard(daemons, manifest, ShardAt { rank, node: 0 })?;
                anyhow::Ok(started.elapsed())
            })
        };
        let opened: Vec<_> = (0..job.ranks()).map(open).collect();
        let mut longest = Duration::ZERO;
        for one in opened {
            longest = longest.max(one.join().ok().context("a reader broke")??);
        }
        Ok(longest)
    })
}

/// Only root may, and only root makes the network.
pub fn drop_page_cache() -> Result<()> {
    output(&mut Command::new("sync"))?;
    fs::write("/proc/sys/vm/drop_caches", "3").context("dropping the page cache")
}

/// Bytes per second that several processes write to a disk, and read.
fn disk(folder: &Path) -> Result<(f64, f64)> {
    fs::create_dir_all(folder)?;
    let share = BYTES / PROCESSES;
    let source = InMemory::make(share)?;
    let count = format!("count={}", share >> 24);
    let (mut write, mut read) = (None, None);
    for _ in 0..ROUNDS {
        let wrote = together(|process| {
            let to = format!("of={}", folder.join(process.to_string()).display());
            let from = format!("if={}", source.0.display());
            let past = ["oflag=direct", "conv=fsync"].map(String::from);
            dd(&[&[from, to, count.clone()], &past[..]].concat())
        });
        write = Some(least(write, wrote?));
        drop_page_cache()?;
        let got = together(|process| {
            let from = format!("if={}", folder.join(process.to_string()).display());
            dd(&[
                from,
                "of=/dev/null".into(),
                count.clone(),
                "iflag=direct".into(),
            ])
        });
        read = Some(least(read, got?));
    }
    fs::remove_dir_all(folder)?;
    let rate = |seconds: Option<f64>| seconds.map(|seconds| BYTES as f64 / seconds);
    Ok((
        rate(write).context("a round")?,
        rate(read).context("a round")?,
    ))
}

/// A file in memory that nothing could shorten; it goes with its owner.
pub struct InMemory(pub PathBuf);

impl InMemory {
    /// One of so many bytes.
    pub fn make(bytes: u64) -> Result<Self> {
        let path = PathBuf::from(format!("/dev/shm/stbn-{}", std::process::id()));
        let file = Self(path);
        let mut random = fs::File::open("/dev/urandom")?.take(bytes);
        std::io::copy(&mut random, &mut fs::File::create(&file.0)?)?;
        Ok(file)
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        // The next one has another name.
        let _ = fs::remove_file(&self.0);
    }
}

fn dd(arguments: &[String]) -> Result<Child> {
    let mut command = Command::new("dd");
    command.arg("bs=16M").args(arguments);
    let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
    quiet.spawn().context("starting dd")
}

/// Seconds until all of the processes have ended.
fn together(start: impl Fn(u64) -> Result<Child>) -> Result<f64> {
    let started = Instant::now();
    let all: Vec<Child> = (0..PROCESSES).map(start).collect::<Result<_>>()?;
    for mut one in all {
        ensure!(one.wait()?.success(), "dd failed");
    }
    Ok(started.elapsed().as_secs_f64())
}
