//! What a hop costs that is slow, dies half-way, or whose packets are lost; every time with the bytes compared.

use std::thread::{scope, sleep};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;
use storaged::cluster::Cluster;

use super::Bench;
use crate::net::job::{Chunks, Job};
use crate::net::network::{LinkRate, Network, NetworkSpec, Packets};

const RATE: LinkRate = LinkRate::megabits(200);
const K: usize = 4;
const M: usize = 2;
const CHUNK: u64 = 64 << 10;
/// Chunks of a shard: 32 MiB, 2.7 s for a full step.
const CHUNKS: usize = 512;
const SHARD: Chunks = Chunks {
    count: CHUNKS,
    bytes: CHUNK,
};
/// Where lost shards are brought to: the last coding node.
const READER: usize = K + M - 1;
/// Lost packets in a hundred.
const LOSS_PERCENT: u8 = 1;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    slow_and_dead(bench)?;
    lossy(bench)
}

fn spec(packets: Packets) -> NetworkSpec {
    NetworkSpec {
        nodes: K + M,
        rate: Some(RATE),
        mtu: 9000,
        packets,
    }
}

fn slow_and_dead(bench: &mut Bench) -> Result<()> {
    eprintln!("a slow hop and dead hops at (4,2), links of 200 Mbit/s");
    let network = Network::make(spec(Packets::Whole))?;
    let shard = CHUNKS as u64 * CHUNK;
    let mut daemons = bench.daemons(K, M, CHUNK, shard, 8).start(&network)?;
    let mut job = Job::open(&daemons, K, SHARD)?;
    let full = job.save(&daemons, 1.0)?.protected.as_secs_f64();
    bench.figures.put("faultless_seconds", full);

    network.shape(1, RATE.tenth())?;
    let slow = job.save(&daemons, 1.0)?.protected.as_secs_f64();
    bench.figures.put("slow_hop_seconds", slow);
    let ideal = RATE.tenth().seconds(M as u64 * shard);
    bench.figures.put("slow_hop_efficiency", ideal / slow);
    network.shape(1, RATE)?;

    // A coding node dies half-way and comes back with empty RAM.
    let reborn = K;
    let sealed = job.stage(1.0)?;
    sleep(Duration::from_secs_f64(full / 2.0).saturating_sub(sealed.elapsed()));
    daemons.kill(reborn)?;
    daemons.start(reborn)?;
    let late = job.protect(&daemons, sealed)?.protected.as_secs_f64();
    bench.figures.put("coding_node_killed_seconds", late);

    // A survivor dies while a lost shard is repaired.
    let manifest = job.manifest(&daemons, K)?;
    job.end_training();
    daemons.kill(0)?;
    daemons.wait_for_peers(READER, K + M - 2)?;
    let repair = RATE.seconds(shard);
    let took = scope(|threads| {
        let repaired = {
            let (job, manifest) = (&job, &manifest);
            let daemons: &Cluster<&Network> = &daemons;
            threads.spawn(move || job.decode(daemons, manifest, 0, READER, &[]))
        };
        sleep(Duration::from_secs_f64(repair / 2.0));
        let killed = daemons.signal(1, Signal::KILL);
        let repaired = repaired.join();
        killed.map(|()| repaired)
    })?;
    let took = took.ok().context("the repair broke")??.as_secs_f64();
    bench.figures.put("repair_hop_killed_seconds", took);
    bench
        .figures
        .put("repair_hop_killed_vs_ideal", took / repair);
    Ok(())
}

fn lossy(bench: &mut Bench) -> Result<()> {
    eprintln!("1 % of all packets lost at (4,2), links of 200 Mbit/s");
    let network = Network::make(spec(Packets::Single))?;
    let shard = CHUNKS as u64 * CHUNK;
    let mut daemons = bench.daemons(K, M, CHUNK, shard, 8).start(&network)?;
    network.lose(LOSS_PERCENT)?;
    let mut job = Job::open(&daemons, K, SHARD)?;
    let saved = job.save(&daemons, 1.0)?.protected.as_secs_f64();
    bench.figures.put("loss_1_percent_seconds", saved);
    let ideal = RATE.seconds(M as u64 * shard);
    bench
        .figures
        .put("loss_1_percent_efficiency", ideal / saved);
    let manifest = job.manifest(&daemons, K)?;
    job.end_training();
    daemons.kill(0)?;
    daemons.kill(1)?;
    daemons.wait_for_peers(READER, K + M - 3)?;
    let took = job.decode(&daemons, &manifest, 1, READER, &[])?;
    let efficiency = RATE.seconds(shard) / took.as_secs_f64();
    bench
        .figures
        .put("loss_1_percent_repair_efficiency", efficiency);
    Ok(())
}
