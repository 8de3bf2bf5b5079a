//! Repair at (8,2): one lost shard and two lost shards, against a plain copy of a shard over the same link.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use storaged::cluster::Cluster;

use super::{Bench, Busy};
use crate::net::job::{Chunks, Job};
use crate::net::network::{LinkRate, Network, NetworkSpec, Packets};
use crate::net::raw::{self, Ends, How, Load};

const RATE: LinkRate = LinkRate::megabits(100);
const K: usize = 8;
const M: usize = 2;
const CHUNK: u64 = 64 << 10;
/// Chunks of a shard: 64 MiB, so that a plain copy takes 5.4 s.
const CHUNKS: usize = 1024;
const SHARD: Chunks = Chunks {
    count: CHUNKS,
    bytes: CHUNK,
};
/// Where lost shards are brought to: coding nodes. While one data node is lost, the first of them is not among the k
/// survivors that are read, so it takes part as an empty node would; when two are lost, every node left is one of them.
const READERS: [usize; 2] = [K + 1, K];

/// Lost shards are back within this time.
const HEAL_WAIT: Duration = Duration::from_secs(60);
/// More than handshakes and manifests: bytes of a shard are coming. It takes 42 ms at the rate of the link.
const HEAL_BEGUN_BYTES: u64 = 512 << 10;

/// The best counts, because other work on the machine only slows.
const ROUNDS: usize = 2;

/// Seconds that the faster way of sending takes to copy a shard.
fn copied(bench: &mut Bench, network: &Network, shard: u64) -> Result<f64> {
    let certificates = bench.directory.join("repair-certs");
    raw::certificates(&certificates)?;
    let mut copy = f64::MAX;
    for (how, name) in [(How::Tcp, "tcp"), (How::Own, "quic")] {
        let ends = Ends {
            from: 0,
            to: READERS[0],
        };
        let load = Load {
            how,
            settings: "",
            bytes: shard,
            rounds: 2,
        };
        let done = raw::transfer(network, &certificates, ends, &load)?;
        let seconds = shard as f64 / done.rate;
        bench.figures.put(format!("copy_{name}_seconds"), seconds);
        copy = copy.min(seconds);
    }
    Ok(copy)
}

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("repair at (8,2), links of 100 Mbit/s");
    let network = Network::make(NetworkSpec {
        nodes: K + M,
        rate: Some(RATE),
        mtu: 9000,
        // As in `gather`: nine nodes send to each at once.
        packets: Packets::Single,
    })?;
    let shard = CHUNKS as u64 * CHUNK;
    let copy = copied(bench, &network, shard)?;
    let spec = bench.daemons(K, M, CHUNK, shard, 4);
    let mut daemons = spec.start(&network)?;
    let mut job = Job::open(&daemons, K, SHARD)?;
    let saved = job.save(&daemons, 1.0)?;
    bench.figures.put(
        "chain_efficiency_8_2_100mbit",
        RATE.seconds(M as u64 * shard) / saved.protected.as_secs_f64(),
    );
    let manifest = job.manifest(&daemons, K)?;
    job.end_training();
    let nodes = network.spec().nodes;

    daemons.kill(0)?;
    READERS
        .iter()
        .try_for_each(|node| daemons.wait_for_peers(*node, nodes - 2))?;
    let mut one = f64::MAX;
    let count = || -> Result<Vec<(u64, u64)>> {
        let both = |node| Ok((network.bytes_sent(node)?, network.bytes_received(node)?));
        (1..nodes).map(both).collect()
    };
    for _ in 0..ROUNDS {
        let (cores, before) = (Busy::start()?, count()?);
        let took = job.decode(&daemons, &manifest, 0, READERS[0], &[])?;
        let most = before
            .iter()
            .zip(count()?)
            .map(|(before, after)| (after.0 - before.0).max(after.1 - before.1))
            .max();
        bench.figures.put(
            "repair_one_wire_bytes_most",
            most.unwrap_or_default() as f64 / shard as f64,
        );
        one = one.min(took.as_secs_f64());
        bench.figures.put("repair_one_cpu_busy", cores.share()?);
    }
    bench.figures.put("repair_one_seconds", one);
    bench.figures.put("repair_one_vs_copy", one / copy);

    daemons.kill(1)?;
    READERS
        .iter()
        .try_for_each(|node| daemons.wait_for_peers(*node, nodes - 3))?;
    let decode = |lost: usize| job.decode(&daemons, &manifest, lost, READERS[lost], &[]);
    let (first, second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| decode(1));
        (decode(0), second.join())
    });
    let second: Duration = second.ok().context("a repair broke")??;
    let both = first?.max(second).as_secs_f64();
    bench.figures.put("open_two_vs_copy", both / copy);

    let two = heal(&mut daemons, &[0, 1])?;
    for rank in [0, 1] {
        job.compare(&daemons, &manifest, rank)?;
    }
    bench.figures.put("repair_two_seconds", two);
    bench.figures.put("repair_two_vs_copy", two / copy);
    Ok(())
}

/// Lost nodes come back with empty RAM, and their shards heal without anybody asking. Gives the seconds from the first
/// bytes of a shard on one of their links until all shards are there.
fn heal(daemons: &mut Cluster<&Network>, lost: &[usize]) -> Result<f64> {
    let network = *daemons.hosts();
    let received = |node: &usize| network.bytes_received(*node);
    let before: Vec<u64> = lost.iter().map(received).collect::<Result<_>>()?;
    for node in lost {
        daemons.start(*node)?;
    }
    let deadline = Instant::now() + HEAL_WAIT;
    let mut begun = None;
    while !lost.iter().all(|node| has_shard(daemons, *node)) {
        ensure!(Instant::now() < deadline, "nothing healed within a minute");
        if begun.is_none() {
            let now: Vec<u64> = lost.iter().map(received).collect::<Result<_>>()?;
            let grown = |(now, before): (&u64, &u64)| now - before > HEAL_BEGUN_BYTES;
            begun = now.iter().zip(&before).any(grown).then(Instant::now);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let begun = begun.context("the shards were there before any bytes came")?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Whether a node has a sealed shard of a step in its RAM.
fn has_shard(daemons: &Cluster<&Network>, node: usize) -> bool {
    let status = daemons.status(node);
    status.is_ok_and(|text| text.contains(r#""shards_here":1"#))
}
