//! `make bench-links`: what 34 and 100 daemons on this machine cost while nothing happens, how many connections they keep, and
//! how long 13 small shards of two of 34 nodes that were killed take to be back.

mod keep;
mod lost;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Parser;
use storaged::cluster::{Cluster, ClusterSpec, Loopback, NodeListing};
use storaged_bench::net::figures::Figures;

/// As many as the widest code has nodes, which is (32, 2).
const NODES: usize = 34;

/// So many show by the difference what a link costs to a node outside the group.
const NODES_MANY: usize = 100;

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
    /// Only so many daemons, 34 or 100
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,
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

/// A cluster, and what its keys end with.
struct Case {
    nodes: usize,
    k: usize,
    suffix: &'static str,
}

const CASES: [Case; 3] = [
    Case {
        nodes: NODES,
        k: 32,
        suffix: "",
    },
    Case {
        nodes: NODES,
        k: 8,
        suffix: "_k8",
    },
    Case {
        nodes: NODES_MANY,
        k: 8,
        suffix: "_k8",
    },
];

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
    let is_wanted = |case: &&Case| {
        options.only.is_none_or(|only| only == case.k)
            && options.nodes.is_none_or(|nodes| nodes == case.nodes)
    };
    for case in CASES.iter().filter(is_wanted) {
        let Case { nodes, k, suffix } = *case;
        eprintln!("{nodes} daemons, ({k}, 2)");
        let directory = Directory::make()?;
        let spec = ClusterSpec {
            listing: NodeListing::InFiles,
            executable: executable.clone(),
            directory: directory.0.clone(),
            nodes,
            settings: format!("[coding]\nk = {k}\nm = 2\n\n[memory]\nbudget = \"1GiB\"\n"),
        };
        let mut cluster = Cluster::prepare(Loopback { port: PORT }, spec)?;
        let started = Instant::now();
        cluster.start_all()?;
        let linked = started.elapsed().as_secs_f64();
        figures.put(format!("linked_seconds_{nodes}{suffix}"), linked);
        std::thread::sleep(CALM);
        let idle = Duration::from_secs(options.idle_seconds);
        idle_cost(&cluster, idle, case, &mut figures)?;
        if nodes == NODES {
            lost::thirteen_shards(&mut cluster, suffix, &mut figures)?;
        }
    }
    match &options.write {
        Some(path) => keep::put_into(path, &figures),
        None => Ok(()),
    }
}

/// Connections, memory and cores of daemons to which nothing happens.
fn idle_cost(
    cluster: &Cluster,
    watched: Duration,
    case: &Case,
    figures: &mut Figures,
) -> Result<()> {
    let Case { nodes, suffix, .. } = case;
    let (mut connections, mut resident) = (0.0, 0);
    for node in 0..*nodes {
        connections += cluster.metric::<f64>(node, "storaged_place_connections")?;
        resident += cluster.resident(node)?.now;
    }
    figures.put(
        format!("connections_per_daemon_{nodes}{suffix}"),
        connections / *nodes as f64,
    );
    let resident_mib = resident as f64 / f64::from(1 << 20);
    figures.put(
        format!("daemon_rss_mib_{nodes}{suffix}"),
        resident_mib / *nodes as f64,
    );
    let (before, began) = (cluster.cpu_time(), Instant::now());
    std::thread::sleep(watched);
    let cores = cluster.cpu_time().since(before).total() / began.elapsed().as_secs_f64();
    figures.put(format!("idle_cores_{nodes}_daemons{suffix}"), cores);
    Ok(())
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
