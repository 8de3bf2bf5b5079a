//! Rotating gather against the chain on the same nodes: two groups of 8 that code for each other, every node a data
//! node. Daemons that know the rate of their links choose the shape themselves; without it they take the chain.

use anyhow::{Context, Result};

use super::{Bench, Busy};
use crate::net::job::{Chunks, Job};
use crate::net::network::{LinkRate, Network, NetworkSpec, Packets};

const RATE: LinkRate = LinkRate::megabits(100);
const K: usize = 8;
const NODES: usize = 2 * K;
const BLOCK: u64 = 64 << 10;
/// Chunks of a shard: 64 MiB, 5.4 s on a link.
const CHUNKS: usize = 1024;
const SHARD: Chunks = Chunks {
    count: CHUNKS,
    bytes: BLOCK,
};
/// Saves of which the best counts.
const ROUNDS: usize = 2;
/// Up to fifteen senders meet at a link. Whole offloaded packets of 62 KiB, of which its queue holds four, would be
/// dropped seven frames at a time, as no switch does.
const PACKETS: Packets = Packets::Single;

/// What a full step took.
struct Took {
    seconds: f64,
    /// Bytes that a node sent, for each byte of its shard: of all nodes together, and of the one that sent most.
    sent: f64,
    sent_most: f64,
    /// The same of the one that received most.
    received_most: f64,
    /// How busy all cores of the machine were.
    cpu_busy: f64,
}

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    for m in [2, 4] {
        let chain = full_step(bench, m, None)?;
        let gather = full_step(bench, m, Some(RATE))?;
        let figures = &mut bench.figures;
        figures.put(format!("chain_16_nodes_8_{m}_seconds"), chain.seconds);
        figures.put(format!("gather_16_nodes_8_{m}_seconds"), gather.seconds);
        figures.put(format!("chain_16_nodes_8_{m}_cpu_busy"), chain.cpu_busy);
        figures.put(format!("gather_16_nodes_8_{m}_cpu_busy"), gather.cpu_busy);
        let ratio = gather.seconds / chain.seconds;
        figures.put(format!("gather_vs_chain_time_8_{m}"), ratio);
        figures.put(format!("gather_wire_bytes_per_byte_8_{m}"), gather.sent);
        figures.put(format!("gather_wire_bytes_most_8_{m}"), gather.sent_most);
        let received = format!("gather_wire_bytes_received_most_8_{m}");
        figures.put(received, gather.received_most);
        figures.put(format!("chain_wire_bytes_per_byte_8_{m}"), chain.sent);
    }
    Ok(())
}

fn full_step(bench: &mut Bench, m: usize, told: Option<LinkRate>) -> Result<Took> {
    let known = if told.is_some() { "known" } else { "not known" };
    eprintln!("two groups at (8,{m}), links of 100 Mbit/s, their rate {known}");
    let network = Network::make(NetworkSpec {
        nodes: NODES,
        rate: Some(RATE),
        mtu: 9000,
        packets: PACKETS,
    })?;
    let shard = CHUNKS as u64 * BLOCK;
    let mut spec = bench.daemons(K, m, BLOCK, shard, 12);
    spec.link_rate = told.map(|rate| rate.bytes_per_second() as u64);
    let mut daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, NODES, SHARD)?;
    let sent = || {
        (0..NODES)
            .map(|node| network.bytes_sent(node))
            .collect::<Result<Vec<_>>>()
    };
    let received = || {
        (0..NODES)
            .map(|node| network.bytes_received(node))
            .collect::<Result<Vec<_>>>()
    };
    let mut best: Option<Took> = None;
    for _ in 0..ROUNDS {
        let (cores, before) = (Busy::start()?, (sent()?, received()?));
        let seconds = job.save(&daemons, 1.0)?.protected.as_secs_f64();
        let cpu_busy = cores.share()?;
        let after = (sent()?, received()?);
        if best.as_ref().is_none_or(|best| seconds < best.seconds) {
            let sent = per_byte(&before.0, &after.0, shard);
            best = Some(Took {
                seconds,
                sent: sent.iter().sum::<f64>() / NODES as f64,
                sent_most: most(&sent),
                received_most: most(&per_byte(&before.1, &after.1, shard)),
                cpu_busy,
            });
        }
    }
    let manifest = job.manifest(&daemons, K)?;
    job.end_training();
    daemons.kill(0)?;
    daemons.wait_for_peers(K, NODES - 2)?;
    job.decode(&daemons, &manifest, 0, K, &[0, CHUNKS / 2, CHUNKS - 1])?;
    best.context("no round")
}

fn most(figures: &[f64]) -> f64 {
    figures.iter().copied().fold(0.0, f64::max)
}

/// What was counted between two readings, for each byte of a shard.
fn per_byte(before: &[u64], after: &[u64], shard: u64) -> Vec<f64> {
    let each = before.iter().zip(after);
    each.map(|(before, after)| (after - before) as f64 / shard as f64)
        .collect()
}
