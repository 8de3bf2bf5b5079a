//! What is measured, a file each. Every scenario makes its network and daemons, verifies the bytes it timed, and
//! leaves nothing behind.

mod chain;
mod faults;
mod gather;
mod repair;
mod unshaped;

use std::fs;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};

use super::daemons::DaemonsSpec;
use super::figures::Figures;
use crate::codec::machine::cores_usable;

/// All scenarios by name, in order.
pub const ALL: [(&str, Scenario); 8] = [
    ("chain8", chain::eight),
    ("chain16", chain::sixteen),
    ("chain32", chain::thirty_two),
    ("chain8-mtu1500", chain::usual_frames),
    ("gather", gather::measure),
    ("repair", repair::measure),
    ("faults", faults::measure),
    ("unshaped", unshaped::measure),
];

/// A scenario: measures, and notes its figures.
pub type Scenario = fn(&mut Bench) -> Result<()>;

/// What scenarios share.
#[derive(Debug)]
pub struct Bench {
    /// The `storaged` executable.
    pub executable: PathBuf,
    /// Where everything goes.
    pub directory: PathBuf,
    /// What was measured so far.
    pub figures: Figures,
    /// Clusters made so far, for names of directories.
    clusters: usize,
}

impl Bench {
    /// Nothing measured yet.
    pub fn new(executable: PathBuf, directory: PathBuf) -> Self {
        Self {
            executable,
            directory,
            figures: Figures::default(),
            clusters: 0,
        }
    }

    /// Daemons in a directory of their own. The budget holds `sets` times a shard.
    pub(crate) fn daemons(
        &mut self,
        k: usize,
        m: usize,
        chunk: u64,
        shard: u64,
        sets: u64,
    ) -> DaemonsSpec {
        self.clusters += 1;
        DaemonsSpec {
            executable: self.executable.clone(),
            directory: self.directory.join(format!("cluster-{}", self.clusters)),
            k,
            m,
            chunk,
            budget: shard * sets,
            link_rate: None,
            more: String::new(),
        }
    }
}

/// How busy all cores were since some moment: near 1, the cores and not the links set the pace.
struct Busy {
    started: Instant,
    busy: f64,
}

impl Busy {
    fn start() -> Result<Self> {
        Ok(Self {
            started: Instant::now(),
            busy: busy_seconds()?,
        })
    }

    fn share(&self) -> Result<f64> {
        let cores = cores_usable() as f64;
        let elapsed = self.started.elapsed().as_secs_f64() * cores;
        Ok((busy_seconds()? - self.busy) / elapsed)
    }
}

/// Seconds that all cores together have been busy since the machine started.
fn busy_seconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
    let numbers = text.lines().next().unwrap_or_default();
    let ticks: Vec<f64> = numbers
        .split_whitespace()
        .skip(1)
        .filter_map(|number| number.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal; guests are within user.
    let busy: f64 = [0, 1, 2, 5, 6, 7]
        .iter()
        .filter_map(|at| ticks.get(*at))
        .sum();
    Ok(busy / rustix::param::clock_ticks_per_second() as f64)
}
