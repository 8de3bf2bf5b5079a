//! One large shard, of 6 GiB or, where memory and disk allow it, of 40 GiB as a rank of a large model has, through all that can happen to it:
//! protected, lost and decoded, uploaded, lost with all RAM and brought back; and what the daemons' own memory grows to meanwhile.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::fs::{MemfdFlags, memfd_create, statfs, statvfs};
use storaged::config::MemoryLimit;
use storaged_sdk::wire::CheckpointState;
use storaged_sdk::wire::local::{DurableWish, Rung};

use super::resident::{mebibytes, watched};
use super::{CHUNK, chunks, in_directory, network, tier};
use crate::net::job::{Job, ShardAt};
use crate::net::scenario::Bench;

/// What a machine of 24 GiB has room for.
const USUAL: u64 = 6 << 30;
/// What a rank of a large model has.
const REAL: u64 = 40 << 30;
/// So often a shard is in memory at once: its slot, its parity, and what a reader gets of it.
const COPIES: u64 = 3;
/// For the daemons' own memory, this process, and parts on their way to the disk.
const SPARE: u64 = 4 << 30;
/// As the kernel calls a file system in memory.
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    let folder = bench.directory.join("large-tier");
    fs::create_dir_all(&folder)?;
    let shard = shard_bytes(MemoryLimit::read().free, disk_available(&folder)?);
    let gibibytes = shard >> 30;
    eprintln!("a shard of {gibibytes} GiB on one of two data nodes, one coding node, a directory");
    bench.figures.put("large_shard_gib", gibibytes as f64);
    let new = new_memory(2 * shard)?;
    bench.figures.put("large_new_memory_s_per_gb", new);
    let network = network(3)?;
    let mut spec = bench.daemons(2, 1, CHUNK, shard, 2);
    spec.more = in_directory(&folder);
    let mut daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, 1, chunks(shard))?;
    job.durable = DurableWish::Required;
    let mut own = 0;
    let took = |bench: &mut Bench, what: &str, part: Duration| {
        let rate = part.as_secs_f64() * 1e9 / shard as f64;
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
    bench.figures.put("large_rss_beyond_mib", mebibytes(own));
    Ok(())
}

/// The larger one where memory holds all copies of it and the disk one.
fn shard_bytes(memory: u64, disk: u64) -> u64 {
    if memory >= COPIES * REAL + SPARE && disk >= REAL + SPARE {
        REAL
    } else {
        USUAL
    }
}

/// Nothing where files are in memory.
fn disk_available(folder: &Path) -> Result<u64> {
    if statfs(folder)?.f_type as i64 == TMPFS_MAGIC {
        return Ok(0);
    }
    let disk = statvfs(folder)?;
    Ok(disk.f_bavail * disk.f_frsize)
}

/// Seconds for a GB of memory that nobody has used before, so much as is taken in all for parity and what is decoded: this machine's host may have to
/// find it first. It takes back what is free again, so that what comes after may wait for it as well.
fn new_memory(bytes: u64) -> Result<f64> {
    let block = vec![1; 16 << 20];
    let mut file = fs::File::from(memfd_create("new", MemfdFlags::CLOEXEC)?);
    let started = Instant::now();
    for _ in 0..bytes / block.len() as u64 {
        file.write_all(&block)?;
    }
    Ok(started.elapsed().as_secs_f64() * 1e9 / bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_larger_shard_is_for_memory_and_disk_that_hold_it() {
        for (memory, disk, gibibytes) in [
            (124, 44, 40),
            (123, 44, 6),
            (124, 43, 6),
            (22, 500, 6),
            (0, 0, 6),
        ] {
            let got = shard_bytes(memory << 30, disk << 30);
            assert_eq!(got, gibibytes << 30, "{memory} GiB, {disk} GiB on disk");
        }
    }
}
