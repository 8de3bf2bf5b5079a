//! The set-up of the 2009 paper (Jitsumoto et al., IPSJ SIG 2009-HPC-122): k data nodes and two dedicated coding
//! nodes in a chain, blocks of 64 KiB; full steps at k = 8, 16, 32, then increments.

use std::time::Duration;

use anyhow::Result;
use storaged::cluster::Cluster;

use super::{Bench, Busy};
use crate::net::job::{Chunks, Job};
use crate::net::network::{LinkRate, Network, NetworkSpec, Packets};

/// So low that two cores are not the limit: 34 daemons need more than one of them already at this rate, because
/// packets of a slow link come one by one and each wakes its receiver.
const RATE: LinkRate = LinkRate::megabits(50);
const M: usize = 2;
const BLOCK: u64 = 64 << 10;
/// Chunks of a shard: 64 MiB, so that a full step takes 21.5 s, and filling a chain of 33 hops 3 % of that.
const CHUNKS: usize = 1024;
const SHARD: Chunks = Chunks {
    count: CHUNKS,
    bytes: BLOCK,
};
/// Chunks that are decoded and compared afterwards.
const COMPARED: [usize; 4] = [0, 341, 682, 1023];
/// Rounds; the best counts, because other work on the machine only slows.
const ROUNDS: usize = 2;

/// How long the daemons are watched while nothing is saved.
const IDLE: Duration = Duration::from_secs(3);

/// Frames of Ethernet: the large ones of a cluster's network, and the usual ones.
const JUMBO: u16 = 9000;
const USUAL: u16 = 1500;

/// k = 8, and the increments.
pub fn eight(bench: &mut Bench) -> Result<()> {
    at(bench, 8, JUMBO, "k8")
}

/// k = 16.
pub fn sixteen(bench: &mut Bench) -> Result<()> {
    at(bench, 16, JUMBO, "k16")
}

/// k = 32, and how its time compares to that at k = 8, if that was measured.
pub fn thirty_two(bench: &mut Bench) -> Result<()> {
    at(bench, 32, JUMBO, "k32")?;
    let seconds = |k: &str| bench.figures.get(&format!("chain_{k}_seconds"));
    if let (Some(long), Some(short)) = (seconds("k32"), seconds("k8")) {
        bench.figures.put("chain_k32_vs_k8_time", long / short);
    }
    Ok(())
}

/// k = 8 with the usual frames of Ethernet.
pub fn usual_frames(bench: &mut Bench) -> Result<()> {
    at(bench, 8, USUAL, "k8_mtu1500")
}

/// Measures one length of the chain.
fn at(bench: &mut Bench, k: usize, mtu: u16, name: &str) -> Result<()> {
    eprintln!("chain of {k} data nodes, links of 50 Mbit/s, MTU {mtu}");
    let network = Network::make(NetworkSpec {
        nodes: k + M,
        rate: Some(RATE),
        mtu,
        packets: Packets::Whole,
    })?;
    let spec = bench.daemons(k, M, BLOCK, CHUNKS as u64 * BLOCK, 8);
    let mut daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, k, SHARD)?;
    let idle = daemons.cpu_time();
    std::thread::sleep(IDLE);
    let idle = daemons.cpu_time().since(idle).total() / IDLE.as_secs_f64();
    let (mut seconds, mut commit, mut busy, mut own) = (f64::MAX, 0.0, 0.0, 0.0);
    let sent_before = network.bytes_sent(k - 1)?;
    for _ in 0..ROUNDS {
        let sealed = job.stage(1.0)?;
        let (cores, before) = (Busy::start()?, daemons.cpu_time());
        let saved = job.protect(&daemons, sealed)?;
        if saved.protected.as_secs_f64() < seconds {
            seconds = saved.protected.as_secs_f64();
            commit = saved.committed.as_secs_f64();
            busy = cores.share()?;
            own = daemons.cpu_time().since(before).total() / seconds;
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
    figures.put(format!("chain_{name}_daemons_cores"), own);
    figures.put(format!("chain_{name}_daemons_idle_cores"), idle);
    figures.put(
        format!("chain_{name}_wire_bytes_per_byte"),
        sent / ideal_bytes as f64,
    );
    if k == 8 && mtu == JUMBO {
        increments(bench, &daemons, &mut job, seconds)?;
    }
    compare(&mut daemons, &mut job, k)
}

/// Steps in which the same 0.1 % and 60 % of the chunks are dirty on every node.
fn increments(
    bench: &mut Bench,
    daemons: &Cluster<&Network>,
    job: &mut Job,
    full: f64,
) -> Result<()> {
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
fn compare(daemons: &mut Cluster<&Network>, job: &mut Job, k: usize) -> Result<()> {
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
