//! What bytes cost at least on this machine: one thread's arithmetic on chunks, reading a slot, writing a file past the page cache, and the
//! daemons' transport without a daemon.

use std::fs::File;
use std::hint::black_box;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};
use storaged_arena::Slot;
use storaged_codec::{engine, fingerprint, leaf_digest};

use super::{CHUNK, ROUNDS, least, network};
use crate::codec::machine::cores_usable;
use crate::net::raw::{self, Ends, How, Load};
use crate::net::scenario::Bench;

/// More than any cache has.
const BYTES: usize = 1 << 30;
/// What the daemon writes at once: a part.
const PIECE: usize = 16 << 20;
/// What O_DIRECT asks of addresses and lengths, on any disk.
const ALIGNMENT: usize = 4096;

/// See the module.
pub fn measure(bench: &mut Bench) -> Result<()> {
    eprintln!("floors of this machine");
    bench.figures.put("machine_cores", cores_usable() as f64);
    let source: Vec<u8> = (0..BYTES).map(|at| (at ^ (at >> 9)) as u8).collect();
    arithmetic(bench, &source);
    let slot = slot_floors(&source)?;
    bench.figures.put("floor_pread_s_per_gb", slot.pread);
    bench.figures.put("floor_mapping_s_per_gb", slot.mapping);
    let file = bench.directory.join("floor-direct");
    match direct_write(&file, &source)? {
        Some(cpu) => bench.figures.put("floor_direct_write_cpu_s_per_gb", cpu),
        None => eprintln!("  no file system that takes O_DIRECT at {}", file.display()),
    }
    drop(source);
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

fn arithmetic(bench: &mut Bench, source: &[u8]) {
    let mut target = vec![1; source.len()];
    let chunk = CHUNK as usize;
    let memcpy = seconds_per_gb(source.len(), || {
        target.copy_from_slice(black_box(source));
        black_box(&target);
    });
    let mut block = vec![1; chunk];
    let digest = seconds_per_gb(source.len(), || {
        for (index, bytes) in source.chunks(chunk).enumerate() {
            block.copy_from_slice(bytes);
            black_box((leaf_digest(&block, index as u64), fingerprint(&block)));
        }
    });
    let mut sums = [vec![0; chunk], vec![0; chunk]];
    let fold = seconds_per_gb(source.len(), || {
        for bytes in source.chunks(chunk) {
            let [first, second] = &mut sums;
            engine().fold(&mut [first, second], &[3, 5], black_box(bytes));
        }
    });
    black_box(&sums);
    bench.figures.put("floor_memcpy_s_per_gb", memcpy);
    bench.figures.put("floor_digest_s_per_gb", digest);
    bench.figures.put("floor_fold2_s_per_gb", fold);
}

/// Seconds for 1e9 bytes out of shared memory into a private block, chunk by chunk.
struct SlotFloors {
    /// Through the slot's descriptor, as the daemon reads.
    pread: f64,
    /// From a mapping of it whose pages are there.
    mapping: f64,
}

fn slot_floors(source: &[u8]) -> Result<SlotFloors> {
    let slot = Slot::create(source.len() as u64)?;
    slot.write_at(0, source)?;
    let pread = reading_seconds_per_gb(&slot, source.len())?;
    storaged_arena::survive_memory_faults()?;
    let mapping = reading_seconds_per_gb(&slot.viewed(), source.len())?;
    Ok(SlotFloors { pread, mapping })
}

fn reading_seconds_per_gb(slot: &Slot, bytes: usize) -> Result<f64> {
    let mut block = vec![1; CHUNK as usize];
    let mut outcome = Ok(());
    let seconds = seconds_per_gb(bytes, || {
        for start in (0..bytes).step_by(block.len()) {
            let part = block.len().min(bytes - start);
            if outcome.is_ok() {
                outcome = slot.read_at(start as u64, &mut block[..part]);
            }
            black_box(&block);
        }
    });
    outcome?;
    Ok(seconds)
}

/// CPU seconds for 1e9 bytes that one thread writes to a new file past the page cache; none where the file system does not take that.
fn direct_write(path: &Path, source: &[u8]) -> Result<Option<f64>> {
    let length = source.len().min(PIECE);
    let mut unaligned = vec![0; length + ALIGNMENT];
    let start = unaligned.as_ptr().align_offset(ALIGNMENT);
    let piece = &mut unaligned[start..start + length];
    piece.copy_from_slice(&source[..length]);
    let mut best = None;
    for _ in 0..ROUNDS {
        let mut file = match open_direct(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::InvalidInput => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("opening {}", path.display()));
            }
        };
        let before = thread_cpu_seconds();
        for _ in 0..source.len() / length {
            file.write_all(black_box(piece))?;
        }
        best = Some(least(best, thread_cpu_seconds() - before));
        std::fs::remove_file(path)?;
    }
    let written = (source.len() / length * length) as f64;
    Ok(best.map(|seconds| seconds * 1e9 / written))
}

fn open_direct(path: &Path) -> std::io::Result<File> {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true);
    let direct = OFlags::DIRECT.bits().cast_signed();
    options.custom_flags(direct).open(path)
}

fn thread_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn seconds_per_gb(bytes: usize, mut pass: impl FnMut()) -> f64 {
    let mut best = None;
    for _ in 0..=ROUNDS {
        let started = Instant::now();
        pass();
        best = Some(least(best, started.elapsed().as_secs_f64()));
    }
    best.unwrap_or_default() * 1e9 / bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_of_a_slot_and_of_a_file_are_measured() -> Result<()> {
        let source: Vec<u8> = (0..4_usize << 20).map(|at| (at % 251) as u8).collect();
        let slot = slot_floors(&source)?;
        assert!(slot.pread > 0.0 && slot.mapping > 0.0);
        let folder = std::env::temp_dir().join(format!("floors-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let path = folder.join("direct");
        let wrote = direct_write(&path, &source)?;
        assert!(wrote.is_none_or(|cpu| cpu >= 0.0) && !path.exists());
        Ok(std::fs::remove_dir(folder)?)
    }
}
