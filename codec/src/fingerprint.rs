//! Fingerprints: short linear functions of a block's bytes in the code's own field. So the fingerprint of a parity chunk
//! is the same combination of the data chunks' fingerprints as the chunk is of the chunks, and whoever has those can
//! check parity, and every partial sum on its way to it, without any of the data.
//!
//! The idea is of Hendricks, Ganger and Reiter, "Verifying distributed erasure-coded data" (PODC 2007), who call it
//! homomorphic fingerprinting. Theirs is keyed by a random choice that the forger does not know when it forges. Ours has
//! fixed, public coefficients: it finds errors, of hardware and software, and is **no** proof against a forger who
//! computes bytes to fit. What must withstand one is a digest.
//!
//! How it is made (every byte of it: docs/FORMATS.md). A block is cut into rows of 1024 bytes, the last one filled up with
//! zeros, so zeros at a block's end do not count, just as they do not count in a stripe. Four sums of all rows are
//! taken, each with its own pseudo-random coefficients. Of each sum's 16 pieces of 64 bytes four sums are taken again,
//! and each of those 16 becomes one byte, the product with its own 64 coefficients.
//!
//! What it misses. An error that does not depend on the coefficients leaves each of the four sums of rows as it was with
//! probability 2^-8, and so all of them with 2^-32. If they changed, then for each of the four sums of pieces the chance
//! that all bytes made from it are the same is 2^-8 and a little, so with 2^-32 and a little none shows it. Together
//! that is about 2^-31. A wrong single byte is always seen (tested for every place in the largest chunk).

use std::array;
use std::borrow::Cow;
use std::fmt;
use std::sync::OnceLock;

use crate::engine::{Engine, engine};
use crate::field::{MUL, mul};

/// Bytes of a row. Of 256 to 2048 bytes, the shortest with which the pass over a chunk in cache is near its best rate:
/// 40 GB/s on a Zen 5 processor with GFNI, where 512 give 32 and 2048 give 45.
const ROW: usize = 1024;
/// Rows that are summed at a time: 64 KiB of them.
const ROWS: usize = 64;
/// Bytes of a piece of a sum, and how many there are.
const PIECE: usize = 64;
const PIECES: usize = ROW / PIECE;
/// Independent sums, of rows and of pieces.
const SUMS: usize = 4;
/// Rows of the largest chunk: their coefficients are made once.
const ROWS_KNOWN: usize = (4 << 20) / ROW;

const CONTEXT: &str = "storaged 2026-11 fingerprint";

/// A fingerprint of a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Fingerprint([u8; 16]);

impl Fingerprint {
    /// Of a block of zeros, and of one without bytes.
    pub const ZERO: Self = Self([0; 16]);
    /// How many bytes it has.
    pub const BYTES: usize = 16;

    /// From its bytes.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// `self += coefficient * other`: what happens to the fingerprint of a sum when a block is folded into it.
    pub fn fold(&mut self, coefficient: u8, other: &Self) {
        let products = &MUL[usize::from(coefficient)];
        for (byte, other) in self.0.iter_mut().zip(other.0) {
            *byte ^= products[usize::from(other)];
        }
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The fingerprint of a block, by the fastest engine.
///
/// ```
/// use storaged_codec::{Fingerprint, engine, fingerprint};
/// let (a, b) = ([7u8; 5000], [9u8; 3000]);
/// let mut sum = vec![0; 5000];
/// engine().fold(&mut [&mut sum], &[3], &a);
/// engine().fold(&mut [&mut sum[..3000]], &[5], &b);
/// let mut expected = Fingerprint::ZERO;
/// expected.fold(3, &fingerprint(&a));
/// expected.fold(5, &fingerprint(&b));
/// assert_eq!(fingerprint(&sum), expected);
/// ```
pub fn fingerprint(block: &[u8]) -> Fingerprint {
    fingerprint_by(engine(), block)
}

/// [`fingerprint`] by this engine. All give the same.
pub fn fingerprint_by(engine: &dyn Engine, block: &[u8]) -> Fingerprint {
    let (rows, rest) = block.as_chunks::<ROW>();
    let mut sums = [[0; ROW]; SUMS];
    for (batch, first) in rows.chunks(ROWS).zip((0..).step_by(ROWS)) {
        add_rows(engine, &mut sums, batch, first);
    }
    if !rest.is_empty() {
        let mut last = [0; ROW];
        last[..rest.len()].copy_from_slice(rest);
        add_rows(engine, &mut sums, &[last], rows.len());
    }
    Fingerprint(compress(engine, &sums))
}

/// The eight products of 64 coefficients with the powers of x: a product is the sum of those whose bit the other factor
/// has, for all 64 bytes side by side.
type Powers = [[u8; PIECE]; 8];

/// All coefficients that are made once.
struct Coefficients {
    /// Per sum of rows, one per row.
    rows: [Vec<u8>; SUMS],
    /// Per sum of pieces, one per piece.
    pieces: [[u8; PIECES]; SUMS],
    /// Per sum of rows and sum of pieces.
    bytes: [[Powers; SUMS]; SUMS],
}

fn coefficients() -> &'static Coefficients {
    static KNOWN: OnceLock<Coefficients> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let mut rest = sequence(SUMS);
        Coefficients {
            rows: array::from_fn(|t| {
                let mut rows = vec![0; ROWS_KNOWN];
                sequence(t).fill(&mut rows);
                rows
            }),
            pieces: array::from_fn(|_| next(&mut rest)),
            bytes: array::from_fn(|_| array::from_fn(|_| powers(next(&mut rest)))),
        }
    })
}

fn next<const N: usize>(sequence: &mut blake3::OutputReader) -> [u8; N] {
    let mut bytes = [0; N];
    sequence.fill(&mut bytes);
    bytes
}

fn powers(coefficients: [u8; PIECE]) -> Powers {
    array::from_fn(|bit| coefficients.map(|c| mul(c, 1 << bit)))
}

/// An endless sequence of pseudo-random bytes.
fn sequence(number: usize) -> blake3::OutputReader {
    let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
    hasher.update(&[number as u8]);
    hasher.finalize_xof()
}

/// The coefficients of some rows in one sum; those of a block longer than any chunk are made anew.
fn row_coefficients(t: usize, first: usize, count: usize) -> Cow<'static, [u8]> {
    let known = &coefficients().rows[t];
    match known.get(first..first + count) {
        Some(part) => Cow::Borrowed(part),
        None => {
            let mut part = vec![0; count];
            let mut sequence = sequence(t);
            sequence.set_position(first as u64);
            sequence.fill(&mut part);
            Cow::Owned(part)
        }
    }
}

fn add_rows(engine: &dyn Engine, sums: &mut [[u8; ROW]; SUMS], batch: &[[u8; ROW]], first: usize) {
    let factors: [_; SUMS] = array::from_fn(|t| row_coefficients(t, first, batch.len()));
    let mut rows: [&[u8]; ROWS] = [&[]; ROWS];
    rows.iter_mut()
        .zip(batch)
        .for_each(|(place, row)| *place = row);
    let mut part = [[0; ROW]; SUMS];
    engine.combine(
        &factors.each_ref().map(|row| &**row),
        &rows[..batch.len()],
        &mut part.each_mut().map(|sum| &mut sum[..]),
    );
    for (sum, part) in sums.iter_mut().zip(&part) {
        engine.xor(sum, part);
    }
}

/// The sums of rows as 16 bytes. Pieces of the same place in all four go side by side, because an engine is fast only on
/// blocks of some hundred bytes.
fn compress(engine: &dyn Engine, sums: &[[u8; ROW]; SUMS]) -> [u8; Fingerprint::BYTES] {
    let known = coefficients();
    let side_by_side: [[[u8; PIECE]; SUMS]; PIECES] =
        array::from_fn(|piece| array::from_fn(|t| sums[t].as_chunks().0[piece]));
    let mut made = [[[0; PIECE]; SUMS]; SUMS];
    engine.combine(
        &known.pieces.each_ref().map(|row| &row[..]),
        &side_by_side.each_ref().map(|block| block.as_flattened()),
        &mut made.each_mut().map(|block| block.as_flattened_mut()),
    );
    array::from_fn(|at| {
        let (t, u) = (at / SUMS, at % SUMS);
        product(&made[u][t], &known.bytes[t][u])
    })
}

/// The sum of the products of all bytes with their coefficients.
fn product(bytes: &[u8; PIECE], powers: &Powers) -> u8 {
    let mut sums = [0; PIECE];
    for (bit, powers) in powers.iter().enumerate() {
        for ((sum, byte), power) in sums.iter_mut().zip(bytes).zip(powers) {
            *sum ^= power & ((byte >> bit) & 1).wrapping_neg();
        }
    }
    sums.iter().fold(0, |sum, byte| sum ^ byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_is_seen_in_every_place_of_the_largest_chunk() {
        let known = coefficients();
        for row in 0..ROWS_KNOWN {
            let in_sum = known.rows.each_ref().map(|rows| rows[row] != 0);
            for (piece, place) in (0..PIECES).flat_map(|p| (0..PIECE).map(move |at| (p, at))) {
                let seen = (0..SUMS).any(|u| {
                    let kept = |t: usize| in_sum[t] && known.bytes[t][u][0][place] != 0;
                    known.pieces[u][piece] != 0 && (0..SUMS).any(kept)
                });
                assert!(seen, "byte {place} of piece {piece} of row {row}");
            }
        }
    }

    #[test]
    fn no_two_rows_and_no_two_pieces_weigh_the_same() {
        let known = coefficients();
        let of = |all: [&[u8]; SUMS]| {
            let weight = |at: usize| all.map(|row| row[at]);
            (0..all[0].len()).map(weight).collect::<Vec<_>>()
        };
        let weights = [
            of(known.rows.each_ref().map(|rows| &rows[..])),
            of(known.pieces.each_ref().map(|row| &row[..])),
        ];
        for mut all in weights {
            let count = all.len();
            all.sort_unstable();
            all.dedup();
            assert_eq!(all.len(), count);
        }
    }

    #[test]
    fn coefficients_beyond_the_largest_chunk_go_on_where_the_known_ones_end() {
        let known = &coefficients().rows[2];
        let across = row_coefficients(2, ROWS_KNOWN - 3, 6);
        assert_eq!(across[..3], known[ROWS_KNOWN - 3..]);
        assert_eq!(across[3..], row_coefficients(2, ROWS_KNOWN, 3)[..]);
    }
}
