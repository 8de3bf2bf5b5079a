//! Differences as byte planes: the first bytes of all elements, then the second bytes, and so on. One step changes a
//! number little, so its difference has high bytes that are nearly all zero and low bytes that are noise; apart they
//! pack well (Burtscher and Ratanaworabhan, FPC, 2009; the bit shuffle of Masui et al., 2015; measured again here).

use super::{Arithmetic, ElementSize};

/// Elements that are taken together: enough for every vector width.
const TOGETHER: usize = 64;

/// The planes of `new` against `old`: `element.bytes()` planes one after the other, then the bytes that fill no element,
/// as XOR. The slices have one length.
pub(super) fn split(
    old: &[u8],
    new: &[u8],
    element: ElementSize,
    arithmetic: Arithmetic,
    planes: &mut Vec<u8>,
) {
    planes.clear();
    planes.resize(new.len(), 0);
    let whole = whole(new.len(), element);
    let (front, tail) = planes.split_at_mut(whole);
    let (old, old_tail) = old.split_at(whole);
    let (new, new_tail) = new.split_at(whole);
    match (element.bytes(), arithmetic) {
        (8, Arithmetic::Subtract) => split_u64(old, new, front, difference_u64),
        (4, Arithmetic::Subtract) => split_u32(old, new, front, difference_u32),
        (2, Arithmetic::Subtract) => split_u16(old, new, front, difference_u16),
        (8, Arithmetic::Xor) => split_u64(old, new, front, |old, new| old ^ new),
        (4, Arithmetic::Xor) => split_u32(old, new, front, |old, new| old ^ new),
        (2, Arithmetic::Xor) => split_u16(old, new, front, |old, new| old ^ new),
        (_, Arithmetic::Subtract) => split_u8(old, new, front, difference_u8),
        (_, Arithmetic::Xor) => split_u8(old, new, front, |old, new| old ^ new),
    }
    for (out, (old, new)) in tail.iter_mut().zip(old_tail.iter().zip(new_tail)) {
        *out = old ^ new;
    }
}

/// Undoes [`split`]: what was `new`, from `old` and the planes. The slices have one length.
pub(super) fn join(
    old: &[u8],
    planes: &[u8],
    element: ElementSize,
    arithmetic: Arithmetic,
    new: &mut [u8],
) {
    let whole = whole(new.len(), element);
    let (front, tail) = planes.split_at(whole);
    let (old, old_tail) = old.split_at(whole);
    let (new, new_tail) = new.split_at_mut(whole);
    match (element.bytes(), arithmetic) {
        (8, Arithmetic::Subtract) => join_u64(old, front, new, sum_u64),
        (4, Arithmetic::Subtract) => join_u32(old, front, new, sum_u32),
        (2, Arithmetic::Subtract) => join_u16(old, front, new, sum_u16),
        (8, Arithmetic::Xor) => join_u64(old, front, new, |old, d| old ^ d),
        (4, Arithmetic::Xor) => join_u32(old, front, new, |old, d| old ^ d),
        (2, Arithmetic::Xor) => join_u16(old, front, new, |old, d| old ^ d),
        (_, Arithmetic::Subtract) => join_u8(old, front, new, sum_u8),
        (_, Arithmetic::Xor) => join_u8(old, front, new, |old, d| old ^ d),
    }
    for (new, (old, difference)) in new_tail.iter_mut().zip(old_tail.iter().zip(tail)) {
        *new = old ^ difference;
    }
}

/// Bytes of whole elements.
pub(super) fn whole(length: usize, element: ElementSize) -> usize {
    length / element.bytes() * element.bytes()
}

macro_rules! elements {
    ($word:ty, $signed:ty, $bytes:literal, $split:ident, $join:ident, $difference:ident, $sum:ident) => {
        /// `new - old`, wrapping, with the sign in the lowest bit: small changes either way have high bits of zero.
        #[inline(always)]
        fn $difference(old: $word, new: $word) -> $word {
            let d = new.wrapping_sub(old);
            (d << 1) ^ ((d as $signed >> (<$word>::BITS - 1)) as $word)
        }

        /// Undoes the difference.
        #[inline(always)]
        fn $sum(old: $word, zigzag: $word) -> $word {
            old.wrapping_add((zigzag >> 1) ^ (zigzag & 1).wrapping_neg())
        }

        fn $split(
            old: &[u8],
            new: &[u8],
            planes: &mut [u8],
            difference: impl Fn($word, $word) -> $word,
        ) {
            let count = new.len() / $bytes;
            if count == 0 {
                return;
            }
            let (old, old_rest) = old.as_chunks::<{ $bytes * TOGETHER }>();
            let (new, new_rest) = new.as_chunks::<{ $bytes * TOGETHER }>();
            let mut rows: [&mut [u8]; $bytes] = cut(planes, count);
            for (at, (old, new)) in old.iter().zip(new).enumerate() {
                let mut words = [0; TOGETHER];
                let pairs = old.as_chunks::<$bytes>().0.iter().zip(new.as_chunks().0);
                for (word, (old, new)) in words.iter_mut().zip(pairs) {
                    *word = difference(<$word>::from_le_bytes(*old), <$word>::from_le_bytes(*new));
                }
                for (p, row) in rows.iter_mut().enumerate() {
                    let out = &mut row[at * TOGETHER..(at + 1) * TOGETHER];
                    for (byte, word) in out.iter_mut().zip(&words) {
                        *byte = (*word >> (8 * p)) as u8;
                    }
                }
            }
            let first = count / TOGETHER * TOGETHER;
            let pairs = old_rest.as_chunks().0.iter().zip(new_rest.as_chunks().0);
            for (at, (old, new)) in pairs.enumerate() {
                let word = difference(<$word>::from_le_bytes(*old), <$word>::from_le_bytes(*new));
                for (row, byte) in rows.iter_mut().zip(word.to_le_bytes()) {
                    row[first + at] = byte;
                }
            }
        }

        fn $join(old: &[u8], planes: &[u8], new: &mut [u8], sum: impl Fn($word, $word) -> $word) {
            let count = new.len() / $bytes;
            if count == 0 {
                return;
            }
            let mut rows = planes.chunks_exact(count);
            let rows: [&[u8]; $bytes] = std::array::from_fn(|_| rows.next().unwrap_or_default());
            let (old, old_rest) = old.as_chunks::<{ $bytes * TOGETHER }>();
            let (new, new_rest) = new.as_chunks_mut::<{ $bytes * TOGETHER }>();
            for (at, (old, new)) in old.iter().zip(new).enumerate() {
                let mut words: [$word; TOGETHER] = [0; TOGETHER];
                for (p, row) in rows.iter().enumerate() {
                    let bytes = &row[at * TOGETHER..(at + 1) * TOGETHER];
                    for (word, byte) in words.iter_mut().zip(bytes) {
                        *word |= <$word>::from(*byte) << (8 * p);
                    }
                }
                let pairs = old
                    .as_chunks()
                    .0
                    .iter()
                    .zip(new.as_chunks_mut::<$bytes>().0);
                for (word, (old, new)) in words.iter().zip(pairs) {
                    *new = sum(<$word>::from_le_bytes(*old), *word).to_le_bytes();
                }
            }
            let first = count / TOGETHER * TOGETHER;
            let pairs = old_rest
                .as_chunks()
                .0
                .iter()
                .zip(new_rest.as_chunks_mut::<$bytes>().0);
            for (at, (old, new)) in pairs.enumerate() {
                let word = <$word>::from_le_bytes(rows.map(|row| row[first + at]));
                *new = sum(<$word>::from_le_bytes(*old), word).to_le_bytes();
            }
        }
    };
}

elements!(u8, i8, 1, split_u8, join_u8, difference_u8, sum_u8);
elements!(u16, i16, 2, split_u16, join_u16, difference_u16, sum_u16);
elements!(u32, i32, 4, split_u32, join_u32, difference_u32, sum_u32);
elements!(u64, i64, 8, split_u64, join_u64, difference_u64, sum_u64);

fn cut<const N: usize>(planes: &mut [u8], count: usize) -> [&mut [u8]; N] {
    let mut rows = planes.chunks_exact_mut(count);
    std::array::from_fn(|_| rows.next().unwrap_or_default())
}
