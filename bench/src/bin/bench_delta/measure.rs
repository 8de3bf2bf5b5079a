//! One case: share of changed chunks, then size and speed of each way to write the next state.

use std::time::Instant;

use anyhow::ensure;
use storaged_codec::ChunkSize;
use storaged_codec::delta::{
    Arithmetic, Basis, Coder, CostModel, DeltaWriter, DirtyMap, ElementSize, Encoding, LinkRate,
    Processor, Record,
};
use zstd::zstd_safe::{CCtx, CParameter, compress_bound};

use crate::corpus::States;

/// The chunk size of all figures that name no other.
pub const CHUNK: u32 = 256 << 10;
const CHUNKS: [u32; 5] = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];
/// A link so slow that the smallest record is through first.
const SLOW: f64 = 50e6;

/// Size left of raw, and raw bytes per second of one core, in GB/s.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Figure {
    pub ratio: f64,
    pub gbps: f64,
}

pub struct Row {
    pub name: String,
    pub element: u8,
    pub bytes: usize,
    /// Chunk size in KiB, share of chunks that changed.
    pub changed: Vec<(u32, f64)>,
    /// One step apart, as the writer chooses for a slow link, the element size found by sampling.
    pub chosen: Figure,
    pub back_gbps: f64,
    pub chosen_t10: Figure,
    /// The same by chunk size in KiB.
    pub by_chunk: Vec<(u32, Figure)>,
    pub subtract: Figure,
    pub xor: Figure,
    pub zstd: Figure,
    pub zstd_previous: Figure,
    pub vcdiff: Figure,
    /// Chunks by kind of record.
    pub kinds: Vec<(&'static str, u64)>,
}

pub fn case(states: &States, rounds: u32) -> anyhow::Result<Row> {
    let (old, new) = (&states.t, &states.t1);
    let (chosen, kinds, back_gbps) = chosen(old, new, CHUNK, rounds)?;
    let element = ElementSize::new(states.element)?;
    let fixed = |encoding| fixed(old, new, encoding, rounds);
    let mut by_chunk = Vec::new();
    for chunk in CHUNKS {
        by_chunk.push((chunk >> 10, self::chosen(old, new, chunk, rounds)?.0));
    }
    Ok(Row {
        name: states.name.clone(),
        element: states.element,
        bytes: new.len(),
        changed: changed(old, new)?,
        chosen,
        back_gbps,
        chosen_t10: self::chosen(old, &states.t10, CHUNK, 1)?.0,
        by_chunk,
        subtract: fixed(Encoding::Difference(element, Arithmetic::Subtract))?,
        xor: fixed(Encoding::Difference(element, Arithmetic::Xor))?,
        zstd: fixed(Encoding::Packed)?,
        zstd_previous: zstd_previous(old, new)?,
        vcdiff: vcdiff(old, new)?,
        kinds,
    })
}

fn changed(old: &[u8], new: &[u8]) -> anyhow::Result<Vec<(u32, f64)>> {
    let share = |chunk: u32| {
        let map = DirtyMap::from_bytes(old, new, ChunkSize::new(chunk)?);
        Ok((chunk >> 10, map.count() as f64 / map.len().max(1) as f64))
    };
    CHUNKS.into_iter().map(share).collect()
}

/// How many chunks got which kind of record.
type Kinds = Vec<(&'static str, u64)>;

/// The writer's choice for every chunk: figure, kinds, speed of the way back.
fn chosen(old: &[u8], new: &[u8], chunk: u32, rounds: u32) -> anyhow::Result<(Figure, Kinds, f64)> {
    let began = Instant::now();
    let mut clock = || began.elapsed().as_secs_f64();
    let (mut best, mut back, mut records, mut kinds) =
        (f64::MAX, f64::MAX, touched(new.len()), Vec::new());
    let basis = Basis {
        start: 0,
        bytes: old,
    };
    for _ in 0..rounds {
        let model = CostModel::new(LinkRate::new(SLOW)?, Processor::WHOLE);
        let mut writer = DeltaWriter::new(model, None)?;
        records.clear();
        let mut ends = Vec::new();
        let start = Instant::now();
        for (index, block) in new.chunks(chunk as usize).enumerate() {
            let at = index as u64 * u64::from(chunk);
            let near = around(basis, at, block.len(), chunk);
            writer.write(at, block, Some(near), &mut clock, &mut records)?;
            ends.push(records.len());
        }
        best = best.min(start.elapsed().as_secs_f64());
        let tallies = writer.tallies().iter();
        kinds = tallies
            .map(|(kind, tally)| (kind.name(), tally.chunks))
            .collect();
        back = back.min(way_back(&records, &ends, basis, new, chunk)?);
    }
    let figure = figure(records.len(), new.len(), best);
    Ok((figure, kinds, new.len() as f64 / back / 1e9))
}

/// The chunk's place in the basis and one chunk on either side.
pub fn around<'a>(basis: Basis<'a>, at: u64, length: usize, chunk: u32) -> Basis<'a> {
    let start = at
        .saturating_sub(u64::from(chunk))
        .min(basis.bytes.len() as u64);
    let end = (at as usize + length + chunk as usize).min(basis.bytes.len());
    Basis {
        start,
        bytes: &basis.bytes[start as usize..end.max(start as usize)],
    }
}

/// Seconds to take all records apart; the result is compared.
fn way_back(
    records: &[u8],
    ends: &[usize],
    basis: Basis<'_>,
    new: &[u8],
    chunk: u32,
) -> anyhow::Result<f64> {
    let mut coder = Coder::new()?;
    let mut out = touched(new.len());
    out.resize(new.len(), 1);
    let (start, mut from) = (Instant::now(), 0);
    for (block, end) in out.chunks_mut(chunk as usize).zip(ends) {
        let record = Record::parse(&records[from..*end])?;
        coder.decode(&record, Some(basis), block)?;
        from = *end;
    }
    let seconds = start.elapsed().as_secs_f64();
    ensure!(out == new, "the records do not give the state back");
    Ok(seconds)
}

/// Every chunk in one encoding.
fn fixed(old: &[u8], new: &[u8], encoding: Encoding, rounds: u32) -> anyhow::Result<Figure> {
    let mut coder = Coder::new()?;
    let (mut best, mut length, mut out) = (f64::MAX, 0, touched(new.len()));
    for _ in 0..rounds {
        out.clear();
        let start = Instant::now();
        for (index, block) in new.chunks(CHUNK as usize).enumerate() {
            let at = index as u64 * u64::from(CHUNK);
            let basis = Basis {
                start: 0,
                bytes: old,
            };
            let known = at + block.len() as u64 <= old.len() as u64;
            let encoding = if known { encoding } else { Encoding::Packed };
            coder.encode(encoding, at, block, Some(basis), &mut out)?;
        }
        best = best.min(start.elapsed().as_secs_f64());
        length = out.len();
    }
    Ok(figure(length, new.len(), best))
}

/// zstd with the whole previous state as dictionary, as `zstd -1 --long=27 --patch-from` does it; once, it is slow.
fn zstd_previous(old: &[u8], new: &[u8]) -> anyhow::Result<Figure> {
    let failed = |code| anyhow::anyhow!("zstd: {}", zstd::zstd_safe::get_error_name(code));
    let mut context = CCtx::create();
    for setting in [
        CParameter::CompressionLevel(1),
        CParameter::WindowLog(27),
        CParameter::EnableLongDistanceMatching(true),
    ] {
        context.set_parameter(setting).map_err(failed)?;
    }
    context.ref_prefix(old).map_err(failed)?;
    let mut out = vec![0; compress_bound(new.len())];
    let start = Instant::now();
    let length = context.compress2(&mut out[..], new).map_err(failed)?;
    Ok(figure(length, new.len(), start.elapsed().as_secs_f64()))
}

/// VCDIFF of some chunks spread over the state, each against its surroundings; it is far too slow for all.
fn vcdiff(old: &[u8], new: &[u8]) -> anyhow::Result<Figure> {
    let mut coder = Coder::new()?;
    let count = new.len().div_ceil(CHUNK as usize);
    let (mut length, mut raw, mut seconds) = (0, 0, 0.0);
    for index in (0..count).step_by((count / 8).max(1)) {
        let at = index * CHUNK as usize;
        let block = &new[at..new.len().min(at + CHUNK as usize)];
        let basis = Basis {
            start: 0,
            bytes: old,
        };
        let near = around(basis, at as u64, block.len(), CHUNK);
        let mut out = Vec::new();
        let start = Instant::now();
        let outcome = coder.encode(Encoding::Moved, at as u64, block, Some(near), &mut out);
        seconds += start.elapsed().as_secs_f64();
        raw += block.len();
        length += match outcome {
            Ok(()) => out.len(),
            Err(_) => block.len(),
        };
    }
    Ok(figure(length, raw, seconds))
}

fn figure(length: usize, raw: usize, seconds: f64) -> Figure {
    Figure {
        ratio: length as f64 / raw as f64,
        gbps: raw as f64 / seconds / 1e9,
    }
}

/// An empty buffer with room that has been written to before: the first touch of memory costs more than the work.
fn touched(bytes: usize) -> Vec<u8> {
    let mut buffer = vec![1; bytes + bytes / 8 + (1 << 20)];
    buffer.clear();
    buffer
}
