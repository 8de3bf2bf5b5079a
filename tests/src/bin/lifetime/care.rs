//! What a drain saves within its time, and what it costs to read memory again.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::DurableWish;
use storaged_tests::system::{System, executable};

use crate::Figures;
use crate::nodes::until;

/// Ranks on the node, and bytes of each one's shard.
const RANKS: u32 = 24;
const SHARD: usize = 2 << 20;
/// What the tier takes in a second: less than all within the deadline.
const RATE: usize = 1_600_000;
const DEADLINE_S: usize = 25;

/// All RAM of the reference node is read again in this time.
const HOUR_S: f64 = 3_600.0;
const REFERENCE_BYTES: f64 = 64e9;
/// Passes that are measured.
const PASSES: u64 = 4;

/// One node whose ranks have all saved a step.
fn saved(extra: &str, durable: DurableWish) -> Result<System> {
    let system = System::start(1, None, extra)?;
    let run = system.reader(0)?.open_run(20_000)?;
    let trainers = (0..RANKS).map(|rank| system.trainer(0, run, rank, RANKS));
    let mut trainers = trainers.collect::<Result<Vec<_>>>()?;
    let shards: Vec<Vec<u8>> = (0..RANKS)
        .map(|rank| vec![u8::try_from(rank).unwrap_or(0); SHARD])
        .collect();
    system.save(&mut trainers, 10, &shards, durable)?;
    system.wait(0, run, 10, CheckpointState::Committed)?;
    Ok(system)
}

/// `storaged drain` with 25 s, of a node that owes more than its tier takes in them: the share of what it could have taken.
pub fn drain(figures: &mut Figures) -> Result<()> {
    let tier = format!(
        "[durable]\nkind = \"directory\"\npath = \"ROOT/tier\"\n[trickle]\nevery = 10\nrate = \"{RATE}B\"\n"
    );
    let mut system = saved(&tier, DurableWish::Required)?;
    let socket = system.cluster.socket(0).with_file_name("admin.sock");
    let drained = Command::new(executable())
        .args(["drain", "--deadline", &format!("{DEADLINE_S}s"), "--socket"])
        .arg(socket)
        .output()?;
    ensure!(drained.status.code() == Some(75), "{drained:?}");
    system.cluster.wait(0)?;
    let whole = count_whole(&system.root.path().join("tier"))?;
    let could = (RATE * DEADLINE_S).min(SHARD * RANKS as usize);
    println!("{whole} of {RANKS} shards of {SHARD} bytes are in the tier");
    figures.insert(
        "drain_saved_share_25s",
        (whole * SHARD) as f64 / could as f64,
    );
    Ok(())
}

/// Files of a whole shard's length below a folder.
fn count_whole(folder: &std::path::Path) -> Result<usize> {
    let mut count = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let about = entry.metadata()?;
        if about.is_dir() {
            count += count_whole(&entry.path())?;
        } else if about.len() >= SHARD as u64 {
            count += 1;
        }
    }
    Ok(count)
}

/// Seconds of a thread per byte that the scrub reads, as the share of a core that 64 GB within an hour take.
pub fn scrub(figures: &mut Figures) -> Result<()> {
    let system = saved("[scrub]\nperiod = \"5s\"\n", DurableWish::Never)?;
    let metric = |name: &str| system.cluster.metric::<f64>(0, name);
    let (bytes, seconds) = ("storaged_scrub_bytes_total", "storaged_scrub_seconds_total");
    let wanted = (PASSES * u64::from(RANKS) * SHARD as u64) as f64;
    until("passes of the scrub", || {
        std::thread::sleep(Duration::from_millis(200));
        ensure!(metric(bytes)? >= wanted);
        Ok(())
    })?;
    let per_byte = metric(seconds).context("seconds")? / metric(bytes)?;
    println!("the scrub takes {:.2} s per GB", per_byte * 1e9);
    figures.insert("scrub_cpu_share", per_byte * REFERENCE_BYTES / HOUR_S);
    Ok(())
}
