//! The set-up of the 2009 paper (Jitsumoto et al., IPSJ SIG 2009-HPC-122): k data nodes and two dedicated coding
//! nodes in a chain, blocks of 64 KiB; full steps at k = 8, 16, 32, then increments.

use anyhow::Result;

use super::{Bench, Busy};
use crate::net::daemons::Daemons;
use crate::net::job::Job;
use crate::net::network::{LinkRate, Network, NetworkSpec, Packets};

const RATE: LinkRate = LinkRate::megabits(100);
const M: usize = 2;
const BLOCK: u64 = 64 << 10;
/// Chunks of a shard: 64 MiB, so that a full step takes 10.7 s.
const CHUNKS: usize = 1024;
/// Chunks that are decoded and compared afterwards.
const COMPARED: [usize; 4] = [0, 341, 682, 1023];
/// Rounds; the best counts, because other work on the machine only slows.
const ROUNDS: usize = 2;

/// Frames of Ethernet: the large ones of a cluster's network, and the usual ones.
const JUMBO: u16 = 9000;
const USUAL: u16 = 1500;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    let mut full = Vec::new();
    for k in [8, 16, 32] {
        full.push(at(bench, k, JUMBO, &format!("k{k}"))?);
    }
    bench.figures.put("chain_k32_vs_k8_time", full[2] / full[0]);
    at(bench, 8, USUAL, "k8_mtu1500")?;
    Ok(())
}

/// Measures one length of the chain; gives the seconds of a full step.
fn at(bench: &mut Bench, k: usize, mtu: u16, name: &str) -> Result<f64> {
    eprintln!("chain of {k} data nodes, links of 100 Mbit/s, MTU {mtu}");
    let network = Network::make(NetworkSpec {
        nodes: k + M,
        rate: Some(RATE),
        mtu,
        packets: Packets::Whole,
    })?;
    let spec = bench.daemons((k, M), BLOCK, CHUNKS as u64 * BLOCK, 8);
    let mut daemons = Daemons::start(&network, spec)?;
    let mut job = Job::open(&daemons, k, CHUNKS)?;
    let (mut seconds, mut commit, mut busy) = (f64::MAX, 0.0, 0.0);
    let sent_before = network.bytes_sent(k - 1)?;
    for _ in 0..ROUNDS {
        let cores = Busy::start()?;
        let saved = job.save(&daemons, 1.0)?;
        if saved.protected.as_secs_f64() < seconds {
            seconds = saved.protected.as_secs_f64();
            commit = saved.committed.as_secs_f64();
            busy = cores.share()?;
        }
    }
    let sent = (network.bytes_sent(k - 1)? - sent_before) as f64 / ROUNDS as f64;
    let ideal_bytes = M as u64 * job.shard_bytes();
    let figures = &mut bench.figures;
    figures.put(
        format!("chain_efficiency_{name}"),
        RATE.seconds(ideal_bytes) / seconds,
    );
    figures.put(format!("chain_{name}_seconds"), seconds);
    figures.put(format!("chain_{name}_commit_seconds"), commit);
    figures.put(format!("chain_{name}_cpu_busy"), busy);
    figures.put(
        format!("chain_{name}_wire_bytes_per_byte"),
        sent / ideal_bytes as f64,
    );
    if k == 8 && mtu == JUMBO {
        increments(bench, &daemons, &mut job, seconds)?;
    }
    compare(&mut daemons, &mut job, k)?;
    Ok(seconds)
}

/// Steps in which the same 0.1 % and 60 % of the chunks are dirty on every node.
fn increments(bench: &mut Bench, daemons: &Daemons<'_>, job: &mut Job, full: f64) -> Result<()> {
    for (name, share) in [("0p1", 0.001), ("60", 0.6)] {
        let mut seconds = f64::MAX;
        for _ in 0..ROUNDS {
            seconds = seconds.min(job.save(daemons, share)?.protected.as_secs_f64());
        }
        let figures = &mut bench.figures;
        figures.put(format!("incremental_{name}_share"), seconds / full);
        figures.put(format!("incremental_{name}_seconds"), seconds);
    }
    Ok(())
}

/// Loses two data nodes and decodes a few chunks of both on a coding node.
fn compare(daemons: &mut Daemons<'_>, job: &mut Job, k: usize) -> Result<()> {
    let manifest = job.manifest(daemons, k)?;
    job.end_training();
    for lost in [0, 1] {
        daemons.kill(lost)?;
    }
    daemons.wait_for_peers(k, k + M - 3)?;
    for lost in [0, 1] {
        job.decode(daemons, &manifest, lost, k, &COMPARED)?;
    }
    Ok(())
}
