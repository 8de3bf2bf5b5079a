//! What numbers a chunk holds, judged from a few of them: the element size and arithmetic whose planes have the least
//! entropy.

use super::{Arithmetic, ElementSize, entropy, planes};

/// Bytes taken in a row: whole elements of every size.
const PIECE: usize = 512;
/// Pieces taken.
const PIECES: usize = 8;
/// What another shape must save over the one given first to be taken instead.
const LEAST_GAIN: f32 = 0.02;

/// Pieces of a chunk, spread evenly, each at a multiple of 8; everything if there is little.
pub(super) fn pieces(chunk: &[u8], piece: usize, count: usize) -> Vec<u8> {
    if chunk.len() <= piece * count {
        return chunk.to_vec();
    }
    let stride = chunk.len() / count / 8 * 8;
    let starts = (0..count).map(|at| at * stride);
    let pieces = starts.flat_map(|start| chunk[start..start + piece].iter().copied());
    pieces.collect()
}

/// The best shape of a difference. With a given element size only the arithmetic is judged.
pub(super) fn shape(
    old: &[u8],
    new: &[u8],
    given: Option<ElementSize>,
) -> (ElementSize, Arithmetic) {
    let (old, new) = (pieces(old, PIECE, PIECES), pieces(new, PIECE, PIECES));
    let mut buffer = Vec::new();
    let mut bits = |element: ElementSize, arithmetic| {
        planes::split(&old, &new, element, arithmetic, &mut buffer);
        let plane = planes::whole(new.len(), element) / element.bytes();
        let planes = buffer.chunks_exact(plane.max(1)).take(element.bytes());
        planes.map(|plane| entropy::count(plane).bits).sum::<f32>() / element.bytes() as f32
    };
    let element = given.unwrap_or_else(|| best_element(&mut bits));
    let (xor, subtract) = (
        bits(element, Arithmetic::Xor),
        bits(element, Arithmetic::Subtract),
    );
    if xor < subtract * (1.0 - LEAST_GAIN) {
        (element, Arithmetic::Xor)
    } else {
        (element, Arithmetic::Subtract)
    }
}

/// Four bytes unless another size is clearly better.
fn best_element(bits: &mut impl FnMut(ElementSize, Arithmetic) -> f32) -> ElementSize {
    let mut best = (ElementSize(4), bits(ElementSize(4), Arithmetic::Subtract));
    for element in [ElementSize(2), ElementSize(8), ElementSize(1)] {
        let got = bits(element, Arithmetic::Subtract);
        if got < best.1 * (1.0 - LEAST_GAIN) {
            best = (element, got);
        }
    }
    best.0
}
