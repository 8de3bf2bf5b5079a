//! One shard of 6 GiB, as a rank of a large model has, through all that can happen to it: protected, lost and decoded, uploaded, lost with all RAM and
//! brought back; and what the daemons' own memory grows to meanwhile.

use std::fs;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::fs::{MemfdFlags, memfd_create};
use storaged::cluster::Cluster;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::{DurableWish, Rung};

use super::{CHUNK, chunks, in_directory, network, tier};
use crate::net::job::{Job, ShardAt};
use crate::net::network::Network;
use crate::net::scenario::Bench;

/// With its parity and what a reader gets of it, as much as a machine of 24 GiB has room for.
const SHARD: u64 = 6 << 30;
const SHARD_GB: f64 = SHARD as f64 / 1e9;
/// As much memory as nobody has used before is taken in all: parity, and what is decoded.
const NEW: u64 = 2 * SHARD;
/// How often memory is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("a shard of 6 GiB on one of two data nodes, one coding node, a directory");
    bench
        .figures
        .put("large_new_memory_s_per_gb", new_memory()?);
    let folder = bench.directory.join("large-tier");
    fs::create_dir_all(&folder)?;
    let network = network(3)?;
    let mut spec = bench.daemons(2, 1, CHUNK, SHARD, 2);
    spec.more = in_directory(&folder);
    let mut daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, 1, chunks(SHARD))?;
    job.durable = DurableWish::Required;
    let mut own = 0;
    let took = |bench: &mut Bench, what: &str, part: Duration| {
        let rate = part.as_secs_f64() / SHARD_GB;
        bench.figures.put(format!("large_{what}_s_per_gb"), rate);
    };
    let sealed = job.stage(1.0)?;
    let started = Instant::now();
    watched(&daemons, &mut own, || {
        job.committed(&daemons, sealed)?;
        took(bench, "committed", started.elapsed());
        job.reach(&daemons, CheckpointState::Protected)?;
        took(bench, "protected", started.elapsed());
        job.reach(&daemons, CheckpointState::Durable)
    })?;
    took(bench, "durable", started.elapsed());
    let manifest = job.manifest(&daemons, 0)?;
    job.end_training();

    daemons.kill(0)?;
    daemons.start(0)?;
    daemons.wait_for_links()?;
    let at = ShardAt { rank: 0, node: 0 };
    // Healing may have begun, for whose end the reader then waits.
    let decoded = watched(&daemons, &mut own, || {
        job.bring(&daemons, &manifest, at, &[Rung::Decoded, Rung::OwnRam])
    })?;
    took(bench, "decoded", decoded);
    let local = watched(&daemons, &mut own, || {
        job.bring(&daemons, &manifest, at, &[Rung::OwnRam])
    })?;
    took(bench, "opened_in_own_ram", local);

    (0..3).try_for_each(|node| daemons.kill(node))?;
    tier::drop_page_cache()?;
    (0..3).try_for_each(|node| daemons.start(node))?;
    daemons.wait_for_links()?;
    let fetched = watched(&daemons, &mut own, || {
        job.bring(&daemons, &manifest, at, &[Rung::Durable])
    })?;
    took(bench, "fetched", fetched);
    bench
        .figures
        .put("large_rss_beyond_mib", own as f64 / f64::from(1 << 20));
    Ok(())
}

/// Seconds for a GB of memory that this machine's host may have to find first. It takes back what is free again, so that what comes after may wait
/// for it as well.
fn new_memory() -> Result<f64> {
    let block = vec![1; 16 << 20];
    let mut file = fs::File::from(memfd_create("new", MemfdFlags::CLOEXEC)?);
    let started = Instant::now();
    for _ in 0..NEW / block.len() as u64 {
        file.write_all(&block)?;
    }
    Ok(started.elapsed().as_secs_f64() * 1e9 / NEW as f64)
}

/// Does something, and notes the most memory of its own that any of the daemons has meanwhile.
fn watched<T: Send>(
    daemons: &Cluster<&Network>,
    most: &mut u64,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let (ended, seen) = (AtomicBool::new(false), AtomicU64::new(*most));
    let done = thread::scope(|threads| {
        threads.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for resident in (0..3).filter_map(|node| daemons.resident(node).ok()) {
                    seen.fetch_max(resident.own, Ordering::Relaxed);
                }
                thread::sleep(LOOK);
            }
        });
        let done = work();
        ended.store(true, Ordering::Relaxed);
        done
    });
    *most = seen.into_inner();
    done
}
