//! Links without a limit, so that the cores set the pace: TCP, quinn as it comes, the daemons' transport, and the
//! executor on it, between the same two nodes.

use std::path::Path;

use anyhow::Result;

use super::Bench;
use crate::net::job::{Chunks, Job};
use crate::net::network::{LinkRate, Network, NetworkSpec, Packets};
use crate::net::raw::{self, Ends, How, Load};

/// Bytes of a transfer, and of the shard: 512 MiB.
const CHUNKS: usize = 512;
const CHUNK: u64 = 1 << 20;
const SHARD: Chunks = Chunks {
    count: CHUNKS,
    bytes: CHUNK,
};
/// Sizes of a chunk that are compared; the default is one of them.
const CHUNKS_TRIED: [u64; 4] = [64 << 10, 256 << 10, CHUNK, 4 << 20];
const ROUNDS: usize = 3;
/// Steps until every slot of a rank and every parity set has been used once.
const WARM_UP: usize = 4;
/// What a link carries where the cores are not to be the limit.
const LINK: LinkRate = LinkRate::megabits(1000);
/// One data node and at most two coding nodes.
const NODES: usize = 3;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("links without a limit");
    let network = Network::make(NetworkSpec {
        nodes: NODES,
        rate: None,
        mtu: 9000,
        packets: Packets::Whole,
    })?;
    let bytes = CHUNKS as u64 * CHUNK;
    let certificates = bench.directory.join("unshaped-certs");
    raw::certificates(&certificates)?;
    let ways = [
        (How::Tcp, "raw_tcp"),
        (How::Quinn, "raw_quinn_default"),
        (How::Own, "raw_quinn_tuned"),
    ];
    let mut rates = Vec::new();
    for (how, name) in ways {
        let load = Load {
            how,
            settings: "",
            bytes,
            rounds: ROUNDS,
        };
        let done = raw::transfer(&network, &certificates, Ends { from: 0, to: 1 }, &load)?;
        let figures = &mut bench.figures;
        figures.put(format!("{name}_bytes_per_second"), done.rate);
        figures.put(format!("{name}_cpu_s_per_gb"), done.cpu_per_gb);
        figures.put(format!("{name}_cpu_system_share"), done.system_share);
        rates.push(done.rate);
    }
    bench
        .figures
        .put("tuned_vs_default_quinn", rates[2] / rates[1]);
    bench.figures.put("raw_quinn_vs_tcp", rates[2] / rates[0]);
    executor(bench, &network, rates[2])?;
    drop(network);
    at_a_link(bench, &certificates)
}

/// The same two nodes with a link that leaves the cores some time.
fn at_a_link(bench: &mut Bench, certificates: &Path) -> Result<()> {
    eprintln!("a link of 1 Gbit/s");
    let network = Network::make(NetworkSpec {
        nodes: 2,
        rate: Some(LINK),
        mtu: 9000,
        packets: Packets::Whole,
    })?;
    let shard = CHUNKS as u64 * CHUNK;
    let load = Load {
        how: How::Own,
        settings: "",
        bytes: shard,
        rounds: 1,
    };
    let raw = raw::transfer(&network, certificates, Ends { from: 0, to: 1 }, &load)?;
    let daemons = bench.daemons(1, 1, CHUNK, shard, 6).start(&network)?;
    let mut job = Job::open(&daemons, 1, SHARD)?;
    let saved = job.save(&daemons, 1.0)?;
    let rate = shard as f64 / saved.protected.as_secs_f64();
    let figures = &mut bench.figures;
    figures.put("raw_quinn_tuned_1gbit_bytes_per_second", raw.rate);
    figures.put("executor_1gbit_bytes_per_second", rate);
    figures.put("executor_vs_raw_quinn_1gbit", rate / raw.rate);
    Ok(())
}

/// One data node and one coding node: the same bytes over the same link, read, coded, kept and verified; with chunks of
/// several sizes.
fn executor(bench: &mut Bench, network: &Network, raw: f64) -> Result<()> {
    for chunk in CHUNKS_TRIED {
        let (rate, cpu) = encode(bench, network, chunk)?;
        let figures = &mut bench.figures;
        let of_size = |what: &str| format!("{what}_{}kib_chunks", chunk >> 10);
        figures.put(of_size("executor_encode_bytes_per_second"), rate);
        figures.put(of_size("cpu_s_per_gb_encode"), cpu);
        if chunk == CHUNK {
            figures.put("executor_encode_bytes_per_second", rate);
            figures.put("executor_vs_raw_quinn", rate / raw);
            figures.put("cpu_s_per_gb_encode", cpu);
        }
    }
    repair(bench, network, raw)
}

/// Bytes per second, and CPU seconds of both daemons for 1e9 bytes.
fn encode(bench: &mut Bench, network: &Network, chunk: u64) -> Result<(f64, f64)> {
    let shard = CHUNKS as u64 * CHUNK;
    let daemons = bench.daemons(1, 1, chunk, shard, 6).start(network)?;
    let chunks = Chunks {
        count: usize::try_from(shard / chunk)?,
        bytes: chunk,
    };
    let mut job = Job::open(&daemons, 1, chunks)?;
    // The first steps make slots, buffers and parity sets, which later ones use again: not timed.
    for _ in 0..WARM_UP {
        job.save(&daemons, 1.0)?;
    }
    let (mut encode, mut cpu) = (f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        let sealed = job.stage(1.0)?;
        let before = daemons.cpu_time();
        let saved = job.protect(&daemons, sealed)?;
        let used = daemons.cpu_time().since(before);
        let took = saved.protected.saturating_sub(saved.committed);
        encode = encode.min(took.as_secs_f64());
        cpu = cpu.min(used.total());
    }
    Ok((shard as f64 / encode, cpu * 1e9 / shard as f64))
}

/// One data node that is lost, and two coding nodes: one sends what it has, the other makes the shard of it.
fn repair(bench: &mut Bench, network: &Network, raw: f64) -> Result<()> {
    let shard = CHUNKS as u64 * CHUNK;
    let mut daemons = bench.daemons(1, 2, CHUNK, shard, 6).start(network)?;
    let mut job = Job::open(&daemons, 1, SHARD)?;
    job.save(&daemons, 1.0)?;
    let reader = NODES - 1;
    let manifest = job.manifest(&daemons, reader)?;
    job.end_training();
    daemons.kill(0)?;
    daemons.wait_for_peers(reader, NODES - 2)?;
    let mut repair = f64::MAX;
    for _ in 0..ROUNDS {
        let took = job.decode(&daemons, &manifest, 0, reader, &[])?;
        repair = repair.min(took.as_secs_f64());
    }
    let rate = shard as f64 / repair;
    bench.figures.put("executor_repair_bytes_per_second", rate);
    bench
        .figures
        .put("executor_repair_vs_raw_quinn", rate / raw);
    Ok(())
}
