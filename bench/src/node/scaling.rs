//! How a node's work scales: digests of one shard by threads, encodes and decodes of a whole group by the cores that all
//! its nodes share, and what more connections carry between two nodes. On a machine of two cores it is one thread and two
//! for a digest, and nothing else.

use anyhow::{Context, Result};
use storaged::cluster::Cluster;
use storaged::config::MemoryLimit;

use super::coding::{Copies, K, LOST, M, WARM_UP, open_both, restart_lost};
use super::{CHUNK, ROUNDS, chunks, least, network, thread_counts};
use crate::codec::machine::{Confined, cores_usable};
use crate::net::job::Job;
use crate::net::network::Network;
use crate::net::scenario::Bench;

const GIB: u64 = 1 << 30;
/// What the machine keeps for all else: daemons' own memory, this process, page cache.
const SPARE: u64 = 2 * GIB;
/// Shards that the budgets of both nodes hold together, of which one is digested.
const ONE_SHARD_SETS: u64 = 4;
/// Of a rank of the group: twice as much as is encoded elsewhere, so that a round is longer than what nodes say to one another.
const GROUP_SHARD: u64 = 512 << 20;
const GROUP_SETS: u64 = 6;
/// Fewer cores say nothing that the other scenarios do not.
const CORES_MIN: usize = 4;
/// UDP sockets of each node; 16 are the most.
const SOCKETS: [usize; 3] = [1, 4, 16];

/// One shard, digested by one thread, by two, and by more where there are cores for them.
pub fn threads(bench: &mut Bench) -> Result<()> {
    let counts = thread_counts(cores_usable());
    let most = counts.last().copied().unwrap_or(1);
    let shard = digested_bytes(most, MemoryLimit::read().free);
    let gibibytes = shard / GIB;
    eprintln!("one shard of {gibibytes} GiB, digested by {counts:?} threads");
    let mut one = None;
    for threads in counts {
        let rate = digest_rate(bench, threads, shard)?;
        let key = format!("digest_bytes_per_second_{threads}_threads");
        bench.figures.put(key, rate);
        let one = *one.get_or_insert(rate);
        if threads > 1 {
            let key = format!("threads_speedup_{threads}_vs_1");
            bench.figures.put(key, rate / one);
        }
    }
    Ok(())
}

/// A quarter of a GiB for each thread, so that arithmetic is most of a round, if both nodes' budgets have room; at least 1 GiB.
fn digested_bytes(threads: usize, memory: u64) -> u64 {
    let room = memory.saturating_sub(SPARE) / (2 * ONE_SHARD_SETS);
    let wanted = threads as u64 * (GIB / 4);
    (wanted.min(room) / GIB).max(1) * GIB
}

/// Bytes per second, from the seal until the step is committed.
fn digest_rate(bench: &mut Bench, threads: usize, shard: u64) -> Result<f64> {
    let network = network(2)?;
    let mut spec = bench.daemons(1, 1, CHUNK, shard, ONE_SHARD_SETS);
    spec.more = format!("threads = {threads}\n");
    let daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, 1, chunks(shard))?;
    let mut best = None;
    for _ in 0..ROUNDS {
        let sealed = job.stage(1.0)?;
        let committed = job.committed(&daemons, sealed)?;
        best = Some(least(best, committed.as_secs_f64()));
        job.protect(&daemons, sealed)?;
    }
    Ok(shard as f64 / best.context("a round")?)
}

/// A group of four data nodes and two coding nodes on 2, 4, 8 and 16 of the machine's cores, then two nodes with more sockets.
pub fn cores(bench: &mut Bench) -> Result<()> {
    let usable = cores_usable();
    let memory = MemoryLimit::read().free;
    if usable < CORES_MIN || memory < group_bytes() {
        eprintln!(
            "not measured by cores: expected {CORES_MIN} cores and {} GiB of memory, got {usable} and {}",
            group_bytes() / GIB,
            memory / GIB,
        );
        return Ok(());
    }
    let mut of_two = None;
    for cores in thread_counts(usable).into_iter().filter(|it| *it > 1) {
        eprintln!("four data nodes, two coding nodes, {cores} cores");
        let took = group_on(bench, cores)?;
        let two = *of_two.get_or_insert(took);
        let parts = [
            ("encode", took.encode, two.encode),
            ("decode", took.decode, two.decode),
        ];
        for (what, took, two) in parts {
            let key = format!("{what}_seconds_per_gb_{cores}_cores");
            bench.figures.put(key, took);
            if cores > 2 {
                let key = format!("{what}_speedup_{cores}_vs_2_cores");
                bench.figures.put(key, two / took);
            }
        }
    }
    SOCKETS
        .into_iter()
        .filter(|sockets| *sockets <= usable)
        .try_for_each(|sockets| pair(bench, sockets))
}

/// What all daemons' budgets hold together.
fn group_bytes() -> u64 {
    (K + M) as u64 * GROUP_SETS * GROUP_SHARD + SPARE
}

/// Seconds for a GB.
#[derive(Debug, Clone, Copy)]
struct GroupTimes {
    /// From the commit until the step is protected.
    encode: f64,
    /// From the requests of two readers on restarted nodes until both have their shards.
    decode: f64,
}

/// All six nodes, and their trainers, share so many cores and have the threads that they take by default there.
fn group_on(bench: &mut Bench, cores: usize) -> Result<GroupTimes> {
    let _confined = Confined::to(cores)?;
    let network = network(K + M)?;
    let spec = bench.daemons(K, M, CHUNK, GROUP_SHARD, GROUP_SETS);
    let mut daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, K, chunks(GROUP_SHARD))?;
    for _ in 0..WARM_UP {
        job.save(&daemons, 1.0)?;
    }
    let (mut encode, mut decode) = (None, None);
    for _ in 0..ROUNDS {
        encode = Some(least(encode, encode_seconds(&mut job, &daemons)?));
    }
    let manifest = job.manifest(&daemons, K)?;
    job.end_training();
    let mut tensors = LOST.map(|_| vec![1; GROUP_SHARD as usize]);
    for _ in 0..ROUNDS {
        tensors.iter_mut().for_each(|bytes| bytes.fill(1));
        restart_lost(&mut daemons)?;
        let early = Copies::WhileItComes;
        let took = open_both(&daemons, &job, &manifest, early, &mut tensors)?;
        decode = Some(least(decode, took.as_secs_f64()));
        for (rank, bytes) in LOST.iter().zip(&tensors) {
            job.check(*rank, bytes)?;
        }
    }
    let gigabytes = |shards: usize| (shards as u64 * GROUP_SHARD) as f64 / 1e9;
    Ok(GroupTimes {
        encode: encode.context("a round")? / gigabytes(K),
        decode: decode.context("a round")? / gigabytes(LOST.len()),
    })
}

/// What one data node encodes on one coding node with so many sockets each, and a thread of the network for each socket.
fn pair(bench: &mut Bench, sockets: usize) -> Result<()> {
    eprintln!("one data node, one coding node, {sockets} sockets");
    let network = network(2)?;
    let mut spec = bench.daemons(1, 1, CHUNK, GIB, ONE_SHARD_SETS);
    let threads = sockets.max(2);
    spec.more = format!("[network]\nsockets = {sockets}\nthreads = {threads}\n");
    let daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, 1, chunks(GIB))?;
    let mut best = None;
    // The first one makes slots and parity.
    for _ in 0..=ROUNDS {
        best = Some(least(best, encode_seconds(&mut job, &daemons)?));
    }
    let rate = GIB as f64 / best.context("a round")?;
    let key = format!("encode_pair_bytes_per_second_{sockets}_sockets");
    bench.figures.put(key, rate);
    Ok(())
}

/// From the commit of a step of which everything has changed until it is protected.
fn encode_seconds(job: &mut Job, daemons: &Cluster<&Network>) -> Result<f64> {
    let sealed = job.stage(1.0)?;
    let saved = job.protect(daemons, sealed)?;
    Ok(saved
        .protected
        .saturating_sub(saved.committed)
        .as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shard_that_is_digested_fits_both_nodes() {
        for (threads, memory, gibibytes) in [
            (2, 22, 1),
            (4, 256, 1),
            (8, 22, 2),
            (8, 17, 1),
            (16, 34, 4),
            (16, 20, 2),
            (16, 0, 1),
        ] {
            let got = digested_bytes(threads, memory * GIB);
            assert_eq!(got, gibibytes * GIB, "{threads} threads, {memory} GiB");
        }
    }

    #[test]
    fn a_group_has_room_for_all_budgets() {
        assert_eq!(group_bytes(), 20 * GIB);
    }
}
