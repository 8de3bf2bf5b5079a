//! What bytes cost at least on this machine: one thread's arithmetic on chunks, and the daemons' transport without a daemon.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use storaged_codec::{engine, fingerprint, leaf_digest};

use super::{CHUNK, ROUNDS, least, network};
use crate::net::raw::{self, Ends, How, Load};
use crate::net::scenario::Bench;

/// More than any cache has.
const BYTES: usize = 1 << 30;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("floors of this machine");
    let source: Vec<u8> = (0..BYTES).map(|at| (at ^ (at >> 9)) as u8).collect();
    let mut target = vec![1; BYTES];
    let chunk = CHUNK as usize;
    let memcpy = seconds_per_gb(|| {
        target.copy_from_slice(black_box(&source));
        black_box(&target);
    });
    let mut block = vec![1; chunk];
    let digest = seconds_per_gb(|| {
        for (index, bytes) in source.chunks(chunk).enumerate() {
            block.copy_from_slice(bytes);
            black_box((leaf_digest(&block, index as u64), fingerprint(&block)));
        }
    });
    let mut sums = [vec![0; chunk], vec![0; chunk]];
    let fold = seconds_per_gb(|| {
        for bytes in source.chunks(chunk) {
            let [first, second] = &mut sums;
            engine().fold(&mut [first, second], &[3, 5], black_box(bytes));
        }
    });
    black_box(&sums);
    bench.figures.put("floor_memcpy_s_per_gb", memcpy);
    bench.figures.put("floor_digest_s_per_gb", digest);
    bench.figures.put("floor_fold2_s_per_gb", fold);
    let certificates = bench.directory.join("floor-certs");
    raw::certificates(&certificates)?;
    let load = Load {
        how: How::Own,
        settings: "",
        bytes: 1 << 30,
        rounds: ROUNDS,
    };
    let done = raw::transfer(&network(2)?, &certificates, Ends { from: 0, to: 1 }, &load)?;
    bench.figures.put("raw_quinn_bytes_per_second", done.rate);
    bench.figures.put("raw_quinn_cpu_s_per_gb", done.cpu_per_gb);
    Ok(())
}

fn seconds_per_gb(mut pass: impl FnMut()) -> f64 {
    let mut best = None;
    for _ in 0..=ROUNDS {
        let started = Instant::now();
        pass();
        best = Some(least(best, started.elapsed().as_secs_f64()));
    }
    best.unwrap_or_default() * 1e9 / BYTES as f64
}
