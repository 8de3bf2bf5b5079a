//! Digest, encode and decode of four ranks on four data nodes and two coding nodes, each by the CPU seconds that all daemons use.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use storaged::cluster::Cluster;
use storaged_sdk::wire::ManifestBytes;

use super::resident::{mebibytes, own_bytes};
use super::{CHUNK, ROUNDS, chunks, least, network};
use crate::net::job::Job;
use crate::net::network::Network;
use crate::net::scenario::Bench;

pub(super) const K: usize = 4;
pub(super) const M: usize = 2;
const SHARD: u64 = 256 << 20;
/// Steps until every slot of a rank and every parity set has been used once.
pub(super) const WARM_UP: usize = 4;
/// The nodes that are lost, as many as a group bears.
pub(super) const LOST: [usize; 2] = [0, 1];

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("four data nodes, two coding nodes, everything changed");
    let network = network(K + M)?;
    let mut daemons = bench.daemons(K, M, CHUNK, SHARD, 6).start(&network)?;
    let mut job = Job::open(&daemons, K, chunks(SHARD))?;
    for _ in 0..WARM_UP {
        job.save(&daemons, 1.0)?;
    }
    let gigabytes = (K as u64 * SHARD) as f64 / 1e9;
    let (mut digest, mut encode, mut took) = (None, None, None);
    let mut wire = 0;
    for _ in 0..ROUNDS {
        let before = daemons.cpu_time();
        let sealed = job.stage(1.0)?;
        job.committed(&daemons, sealed)?;
        let (committed, sent) = (daemons.cpu_time(), sent(&network)?);
        let started = Instant::now();
        job.protect(&daemons, sealed)?;
        let elapsed = started.elapsed().as_secs_f64();
        let protected = daemons.cpu_time();
        digest = Some(least(digest, committed.since(before).total() / gigabytes));
        encode = Some(least(
            encode,
            protected.since(committed).total() / gigabytes,
        ));
        if took.is_none_or(|known| elapsed < known) {
            (took, wire) = (Some(elapsed), self::sent(&network)? - sent);
        }
    }
    let (digest, encode, took) = (
        digest.context("a round")?,
        encode.context("a round")?,
        took.context("a round")?,
    );
    let wire = wire as f64 / 1e9;
    let figures = &mut bench.figures;
    figures.put("digest_cpu_s_per_gb", digest);
    figures.put("encode_cpu_s_per_gb_4_2", encode);
    figures.put("encode_wire_bytes_per_byte", wire / gigabytes);
    figures.put("encode_cpu_s_per_wire_gb", encode * gigabytes / wire);
    figures.put("encode_seconds_per_gb", took / gigabytes);
    if let Some(floor) = figures.get("floor_digest_s_per_gb") {
        figures.put("digest_vs_floor", digest / floor);
    }
    let raw = figures.get("raw_quinn_bytes_per_second");
    if let Some(raw) = raw {
        figures.put("encode_vs_raw_quinn", wire * 1e9 / took / raw);
    }
    let floors = ["raw_quinn_cpu_s_per_gb", "floor_fold2_s_per_gb"].map(|key| figures.get(key));
    if let [Some(quinn), Some(fold)] = floors {
        let floor = wire / gigabytes * quinn + fold;
        figures.put("encode_floor_cpu_s_per_gb", floor);
    }
    // The most that a node has after the last round.
    let beyond = mebibytes(own_bytes(&daemons)?);
    bench.figures.put("rss_beyond_mib", beyond);
    let manifest = job.manifest(&daemons, K)?;
    job.end_training();
    decode(bench, &network, &mut daemons, &job, &manifest)
}

/// Bytes that all nodes have sent.
fn sent(network: &Network) -> Result<u64> {
    (0..network.spec().nodes)
        .map(|node| network.bytes_sent(node))
        .sum()
}

fn decode(
    bench: &mut Bench,
    network: &Network,
    daemons: &mut Cluster<&Network>,
    job: &Job,
    manifest: &ManifestBytes,
) -> Result<()> {
    let lost = (LOST.len() as u64 * SHARD) as f64 / 1e9;
    let (mut cpu, mut took, mut when_there) = (None, None, None);
    let mut wire = 0;
    // As a trainer's they are there before a load begins; of zeros the kernel would give their pages only then. And once the nodes are back
    // the readers ask at once: what is lost is put back without them, too.
    let mut tensors = LOST.map(|_| vec![1; SHARD as usize]);
    for (_, copies) in (0..ROUNDS).flat_map(|round| COPIES.map(|copies| (round, copies))) {
        tensors.iter_mut().for_each(|bytes| bytes.fill(1));
        restart_lost(daemons)?;
        let (before, sent) = (daemons.cpu_time(), sent(network)?);
        let seconds = open_both(daemons, job, manifest, copies, &mut tensors)?.as_secs_f64();
        let used = daemons.cpu_time().since(before).total();
        match copies {
            Copies::WhenThere => when_there = Some(least(when_there, seconds)),
            Copies::WhileItComes => {
                cpu = Some(least(cpu, used / lost));
                if took.is_none_or(|known| seconds < known) {
                    (took, wire) = (Some(seconds), self::sent(network)? - sent);
                }
            }
        }
        // Only now: it would take processor time from whoever still reads.
        for (rank, bytes) in LOST.iter().zip(&tensors) {
            job.check(*rank, bytes)?;
        }
    }
    let took = took.context("a round")?;
    let figures = &mut bench.figures;
    figures.put("decode_cpu_s_per_gb", cpu.context("a round")?);
    figures.put("decode_wire_bytes_per_byte", wire as f64 / 1e9 / lost);
    figures.put("restart_two_lost_s_per_gb", took / lost);
    let when_there = when_there.context("a round")?;
    figures.put("restart_copied_early_vs_after", took / when_there);
    if let Some(quinn) = figures.get("raw_quinn_cpu_s_per_gb") {
        let floor = wire as f64 / 1e9 / lost * quinn;
        figures.put("decode_floor_cpu_s_per_gb", floor);
    }
    if let Some(raw) = figures.get("raw_quinn_bytes_per_second") {
        figures.put("decode_vs_raw_quinn", wire as f64 / took / raw);
        figures.put("restart_vs_ideal", took * raw / wire as f64);
    }
    Ok(())
}

/// When a reader copies a shard that is brought back.
#[derive(Debug, Clone, Copy)]
pub(super) enum Copies {
    /// As trainers do.
    WhileItComes,
    /// All of it at once in the end.
    WhenThere,
}

const COPIES: [Copies; 2] = [Copies::WhileItComes, Copies::WhenThere];

/// The nodes lose their memory, and are back.
pub(super) fn restart_lost(daemons: &mut Cluster<&Network>) -> Result<()> {
    for node in LOST {
        daemons.kill(node)?;
    }
    for node in LOST {
        daemons.start(node)?;
    }
    Ok(daemons.wait_for_links()?)
}

/// Both ranks ask for their shards at once, as after a restart; the time until the last one has its own.
pub(super) fn open_both(
    daemons: &Cluster<&Network>,
    job: &Job,
    manifest: &ManifestBytes,
    copies: Copies,
    tensors: &mut [Vec<u8>; LOST.len()],
) -> Result<Duration> {
    let started = Instant::now();
    thread::scope(|threads| {
        let opened = LOST.into_iter().zip(tensors).map(|(rank, bytes)| {
            threads.spawn(move || match copies {
                Copies::WhileItComes => job.bring_back_early(daemons, manifest, rank, bytes),
                Copies::WhenThere => job.bring_back(daemons, manifest, rank, bytes),
            })
        });
        let opened: Vec<_> = opened.collect();
        let mut opened = opened.into_iter();
        opened.try_for_each(|one| one.join().ok().context("a reader broke")?)
    })?;
    Ok(started.elapsed())
}
