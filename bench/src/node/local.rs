//! A rank reads its own shard back out of its node's RAM, verified, as a restarted process does; by one thread, two, and more where there
//! are cores for them.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::Instant;

use anyhow::{Result, ensure};
use storaged_sdk::wire::local::Rung;

use super::{CHUNK, ROUNDS, chunks, least, network, thread_counts};
use crate::codec::machine::cores_usable;
use crate::net::job::{Job, ShardAt};
use crate::net::scenario::Bench;

const SHARD: u64 = 1 << 30;
/// Parts that a reader asks for: tensors of a large model.
const PART: usize = 16 << 20;
/// Where a framework's tensors begin. The kernel's copy takes twice as long on some processors (AMD EPYC) to where a vector of bytes
/// begins, 16 bytes into a page.
const ALIGNED: usize = 64;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("own RAM to a reader");
    let network = network(2)?;
    let daemons = bench.daemons(1, 1, CHUNK, SHARD, 4).start(&network)?;
    let mut job = Job::open(&daemons, 1, chunks(SHARD))?;
    job.save(&daemons, 1.0)?;
    let manifest = job.manifest(&daemons, 0)?;
    let shard = job.open_shard(&daemons, &manifest, ShardAt { rank: 0, node: 0 })?;
    ensure!(shard.rung() == Rung::OwnRam, "expected own RAM");
    let [source, mut target] = [(); 2].map(|()| vec![1; SHARD as usize + ALIGNED]);
    let source = &source[source.as_ptr().align_offset(ALIGNED)..][..SHARD as usize];
    let aligned = target.as_ptr().align_offset(ALIGNED);
    let target = &mut target[aligned..][..SHARD as usize];
    let counts = thread_counts(cores_usable()).into_iter();
    let mut loads: Vec<_> = counts.map(|threads| (threads, None)).collect();
    let mut memcpy = None;
    // In turns, so that what else the machine does falls on all of them.
    for _ in 0..=ROUNDS {
        memcpy = Some(least(memcpy, copy(source, target)));
        for (threads, best) in &mut loads {
            let threads = NonZeroUsize::new(*threads).unwrap_or(NonZeroUsize::MIN);
            let mut parts: Vec<(u64, &mut [u8])> =
                (0..).step_by(PART).zip(target.chunks_mut(PART)).collect();
            let started = Instant::now();
            shard.read_many(&mut parts, threads)?;
            *best = Some(least(*best, started.elapsed().as_secs_f64()));
        }
    }
    job.compare(&daemons, &manifest, 0)?;
    let memcpy = memcpy.unwrap_or_default();
    for (threads, took) in loads {
        let took = took.unwrap_or_default();
        let figures = &mut bench.figures;
        figures.put(format!("local_load_vs_memcpy_{threads}t"), memcpy / took);
        let rate = SHARD as f64 / took;
        figures.put(format!("local_load_bytes_per_second_{threads}t"), rate);
    }
    Ok(())
}

fn copy(source: &[u8], target: &mut [u8]) -> f64 {
    let started = Instant::now();
    target.copy_from_slice(black_box(source));
    black_box(&target);
    started.elapsed().as_secs_f64()
}
