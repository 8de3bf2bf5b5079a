//! What the vector engines share outside their kernels: slices of unlike lengths go to the portable engine, many
//! outputs go in groups over pieces that stay in cache, and the bytes that fill no vector go to the portable engine.

use std::ops::Range;

use super::Engine;
use super::portable::Portable;

/// The most outputs of one kernel pass: what the registers hold as sums or factors.
pub(super) const GROUP: usize = 8;

/// Bytes of each block that several groups of a fold go over before the next: with eight sums they stay in a
/// second-level cache of 512 KiB.
const FOLD_PIECE: usize = 32 << 10;

/// Bytes of all inputs together that several groups of a combination go over before the next, for the same reason.
const COMBINE_PIECE: usize = 256 << 10;

/// Blocks from this length on are not kept in cache when they are written whole: at (8,2) ten of them are 2.5 MiB.
const STREAM_MIN: usize = 256 << 10;

/// Alignment of outputs that may go past the cache: whole cache lines.
const LINE: usize = 64;

/// How a kernel writes its outputs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stores {
    /// Into the cache: somebody reads them soon.
    Cached,
    /// Past the cache, and the inputs are asked for ahead of time.
    Streamed,
}

/// Coefficient `index` of a row; 0 where the row ends before.
pub(super) fn entry(row: &[u8], index: usize) -> u8 {
    row.get(index).copied().unwrap_or(0)
}

/// [`Engine::fold`] by `pass`, which takes at most [`GROUP`] outputs and says how many bytes from the front it did.
pub(super) fn fold(
    out: &mut [&mut [u8]],
    coefficients: &[u8],
    data: &[u8],
    pass: impl Fn(&mut [&mut [u8]], &[u8], &[u8]) -> usize,
) {
    let count = out.len().min(coefficients.len());
    let (out, coefficients) = (&mut out[..count], &coefficients[..count]);
    if out.iter().any(|block| block.len() != data.len()) {
        return Portable.fold(out, coefficients, data);
    }
    if count <= GROUP {
        let done = pass(out, coefficients, data);
        return fold_rest(out, coefficients, data, done);
    }
    for piece in pieces(data.len(), FOLD_PIECE) {
        let mut parts = cut_mut(out, piece.clone());
        let groups = parts.chunks_mut(GROUP).zip(coefficients.chunks(GROUP));
        for (group, coefficients) in groups {
            let done = pass(group, coefficients, &data[piece.clone()]);
            fold_rest(group, coefficients, &data[piece.clone()], done);
        }
    }
}

/// [`Engine::fold_from`] by `pass`, which takes at most [`GROUP`] outputs and says how many bytes from the front it did.
pub(super) fn fold_from(
    out: &mut [&mut [u8]],
    input: &[&[u8]],
    coefficients: &[u8],
    data: &[u8],
    pass: impl Fn(&mut [&mut [u8]], &[&[u8]], &[u8], &[u8]) -> usize,
) {
    let count = out.len().min(input.len()).min(coefficients.len());
    let (out, input, coefficients) = (&mut out[..count], &input[..count], &coefficients[..count]);
    let unlike = |length: usize| length != data.len();
    let (mut outs, mut ins) = (out.iter(), input.iter());
    if outs.any(|block| unlike(block.len())) || ins.any(|block| unlike(block.len())) {
        return Portable.fold_from(out, input, coefficients, data);
    }
    for piece in pieces(data.len(), FOLD_PIECE) {
        let mut parts = cut_mut(out, piece.clone());
        let from: Vec<&[u8]> = input.iter().map(|block| &block[piece.clone()]).collect();
        let data = &data[piece];
        let groups = parts.chunks_mut(GROUP).zip(from.chunks(GROUP));
        for ((group, from), coefficients) in groups.zip(coefficients.chunks(GROUP)) {
            let done = pass(group, from, coefficients, data);
            for ((block, from), c) in group.iter_mut().zip(from).zip(coefficients) {
                let (block, from) = (&mut block[done..], &from[done..]);
                Portable.fold_from(&mut [block], &[from], &[*c], &data[done..]);
            }
        }
    }
}

/// [`Engine::combine`] by `pass`, which takes at most [`GROUP`] outputs and says how many bytes from the front it did.
pub(super) fn combine(
    rows: &[&[u8]],
    data: &[&[u8]],
    out: &mut [&mut [u8]],
    pass: impl Fn(&[&[u8]], &[&[u8]], &mut [&mut [u8]], Stores) -> usize,
) {
    let count = rows.len().min(out.len());
    let (rows, out) = (&rows[..count], &mut out[..count]);
    let Some(length) = out.first().map(|block| block.len()) else {
        return;
    };
    let unlike = out.iter().any(|block| block.len() != length);
    if unlike || data.iter().any(|block| block.len() != length) {
        return Portable.combine(rows, data, out);
    }
    let stores = stores(out, length);
    if count <= GROUP {
        let done = pass(rows, data, out, stores);
        return combine_rest(rows, data, out, done);
    }
    let share = (COMBINE_PIECE / data.len().max(1)).max(4096) & !4095;
    for piece in pieces(length, share) {
        let inputs: Vec<&[u8]> = data.iter().map(|block| &block[piece.clone()]).collect();
        let mut parts = cut_mut(out, piece);
        for (rows, group) in rows.chunks(GROUP).zip(parts.chunks_mut(GROUP)) {
            let done = pass(rows, &inputs, group, stores);
            combine_rest(rows, &inputs, group, done);
        }
    }
}

fn stores(out: &[&mut [u8]], length: usize) -> Stores {
    let aligned = out.iter().all(|block| block.as_ptr().addr() % LINE == 0);
    if aligned && length >= STREAM_MIN {
        Stores::Streamed
    } else {
        Stores::Cached
    }
}

fn pieces(length: usize, piece: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length)
        .step_by(piece)
        .map(move |start| start..length.min(start + piece))
}

fn cut_mut<'a>(blocks: &'a mut [&mut [u8]], range: Range<usize>) -> Vec<&'a mut [u8]> {
    let parts = blocks.iter_mut().map(|block| &mut block[range.clone()]);
    parts.collect()
}

fn fold_rest(out: &mut [&mut [u8]], coefficients: &[u8], data: &[u8], done: usize) {
    for (block, c) in out.iter_mut().zip(coefficients) {
        Portable.fold(&mut [&mut block[done..]], &[*c], &data[done..]);
    }
}

fn combine_rest(rows: &[&[u8]], data: &[&[u8]], out: &mut [&mut [u8]], done: usize) {
    for (row, block) in rows.iter().zip(out.iter_mut()) {
        let rest = &mut block[done..];
        rest.fill(0);
        for (i, input) in data.iter().enumerate() {
            Portable.fold(&mut [&mut *rest], &[entry(row, i)], &input[done..]);
        }
    }
}
