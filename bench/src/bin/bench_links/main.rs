//! `make bench-links`: what 34 daemons on this machine cost while nothing happens, how many connections they keep, and how
//! long 13 small shards of two nodes that were killed take to be back.

mod keep;
mod lost;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use storaged::cluster::{Cluster, ClusterSpec};
use storaged_bench::net::figures::Figures;

/// As many as the widest code has nodes, which is (32, 2).
const NODES: usize = 34;

/// Links are up and daemons have told each other what they had to within this time.
const CALM: Duration = Duration::from_secs(20);

/// First UDP port; the operator's HTTP has the next one.
const PORT: u16 = 9_720;

/// Measures clusters of real daemons on loopback addresses: their links, what they cost while idle, and small losses.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// The storaged executable; by default the one beside this program
    #[arg(long, value_name = "FILE")]
    executable: Option<PathBuf>,
    /// Seconds for which idle daemons are watched
    #[arg(long, default_value_t = 20)]
    idle_seconds: u64,
    /// Only one geometry: its number of data nodes, 32 or 8
    #[arg(long, value_name = "K")]
    only: Option<usize>,
    /// Puts the figures into this file, beside those of other benches
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
}

fn main() -> ExitCode {
    match measure(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-links: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// A geometry, and what its keys end with.
const GEOMETRIES: [(usize, &str); 2] = [(32, ""), (8, "_k8")];

fn measure(options: &Options) -> Result<()> {
    let executable = match &options.executable {
        Some(given) => given.clone(),
        None => std::env::current_exe()?.with_file_name("storaged"),
    };
    ensure!(
        executable.is_file(),
        "expected the storaged executable at {}: build it with `cargo build --release -p storaged`",
        executable.display()
    );
    let mut figures = Figures::default();
    let wanted = |k: usize| options.only.is_none_or(|only| only == k);
    for (k, suffix) in GEOMETRIES.into_iter().filter(|(k, _)| wanted(*k)) {
        eprintln!("{NODES} daemons, ({k}, 2)");
        let directory = Directory::make()?;
        let spec = ClusterSpec {
            executable: executable.clone(),
            directory: directory.0.clone(),
            nodes: NODES,
            geometry: Some((k, 2)),
            port: PORT,
            extra: "[memory]\nbudget = \"1GiB\"\n".into(),
        };
        let mut cluster = Cluster::prepare(spec)?;
        let started = Instant::now();
        cluster.start_all()?;
        let linked = started.elapsed().as_secs_f64();
        figures.put(format!("linked_seconds_{NODES}{suffix}"), linked);
        std::thread::sleep(CALM);
        let idle = Duration::from_secs(options.idle_seconds);
        idle_cost(&cluster, idle, suffix, &mut figures)?;
        lost::thirteen_shards(&mut cluster, suffix, &mut figures)?;
    }
    match &options.write {
        Some(path) => keep::put_into(path, &figures),
        None => Ok(()),
    }
}

/// Connections and cores of daemons to which nothing happens.
fn idle_cost(
    cluster: &Cluster,
    watched: Duration,
    suffix: &str,
    figures: &mut Figures,
) -> Result<()> {
    let mut connections = 0.0;
    for node in 0..NODES {
        connections += gauge(node, "storaged_place_connections")?;
    }
    figures.put(
        format!("connections_per_daemon_{NODES}{suffix}"),
        connections / NODES as f64,
    );
    let (before, began) = (cpu_seconds(cluster)?, Instant::now());
    std::thread::sleep(watched);
    let cores = (cpu_seconds(cluster)? - before) / began.elapsed().as_secs_f64();
    figures.put(format!("idle_cores_{NODES}_daemons{suffix}"), cores);
    Ok(())
}

/// What a daemon's metrics say.
fn gauge(node: usize, name: &str) -> Result<f64> {
    use std::io::{Read, Write};
    let address = format!("127.0.0.{}:{}", node + 1, PORT + 1);
    let mut stream = std::net::TcpStream::connect(&address)?;
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.with_context(|| format!("expected {name} among the metrics of n{node}"))?;
    Ok(value.trim().parse()?)
}

/// Processor time of all daemons that run, each since it began.
fn cpu_seconds(cluster: &Cluster) -> Result<f64> {
    let ticks_per_second = rustix::param::clock_ticks_per_second() as f64;
    let mut ticks = 0;
    for node in 0..NODES {
        let Some(pid) = cluster.pid(node) else {
            continue;
        };
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // Behind the name, which may have spaces in it, user and system time are the 12th and 13th field.
        let (_, fields) = stat.rsplit_once(')').context("expected a name in stat")?;
        for field in fields.split_whitespace().skip(11).take(2) {
            ticks += field.parse::<u64>()?;
        }
    }
    Ok(ticks as f64 / ticks_per_second)
}

/// A directory that goes when the bench ends.
struct Directory(PathBuf);

impl Directory {
    fn make() -> Result<Self> {
        let path =
            std::env::temp_dir().join(format!("storaged-bench-links-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(path: &Path) {
    // What is left behind in the temporary directory harms nobody.
    let _ = fs::remove_dir_all(path);
}
