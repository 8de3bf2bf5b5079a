//! Eight ranks on one node, as one of eight GPUs has: what its daemon's own memory grows to while they save.

use anyhow::Result;

use super::resident::{mebibytes, watched};
use super::{CHUNK, chunks, network};
use crate::net::job::Job;
use crate::net::scenario::Bench;

const RANKS: usize = 8;
const SHARD: u64 = 128 << 20;
/// Of slots, and of parity on the other node: with three of each, 6 GiB in all.
const SETS: u64 = 6;
/// Until every slot of a rank and every parity set has been used once.
const SAVES: usize = 4;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("eight ranks on one node, one coding node, everything changed");
    let network = network(2)?;
    let all = RANKS as u64 * SHARD;
    let daemons = bench.daemons(1, 1, CHUNK, all, SETS).start(&network)?;
    let mut job = Job::open_among(&daemons, 1, RANKS, chunks(SHARD))?;
    let mut own = 0;
    for _ in 0..SAVES {
        watched(&daemons, &mut own, || job.save(&daemons, 1.0))?;
    }
    let figure = mebibytes(own);
    bench.figures.put("rss_beyond_mib_8_ranks", figure);
    Ok(())
}
