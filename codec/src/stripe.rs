//! Whether the blocks of a stripe fit together, and which of them are wrong if not. Needs no digests, so it finds what
//! digests cannot: a coefficient, a delta or a fold that went wrong before the digest was taken.
//!
//! With r blocks more than k, the r *syndromes* (each extra block minus what k others say it should be) are zero if all
//! is well. An error in block b adds a multiple of column b of the check matrix to them at each byte. Any r columns
//! are independent, so at most r / 2 wrong blocks are found without doubt.

use thiserror::Error;

use crate::engine::Engine;
use crate::field::{MUL, inverse};
use crate::matrix::{CodingMatrix, RepairError};

/// Bytes of each block gone over at a time: the syndromes stay in cache.
const PIECE: usize = 32 << 10;

/// Sets of blocks that are tried before a stripe counts as unlocatable: a second of work or so. Reached only where
/// m is large and the wrong bytes of different blocks depend on one another.
const TRIALS_MAX: usize = 1 << 18;

/// What the blocks of a stripe say about one another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StripeCheck {
    /// They fit together.
    Consistent,
    /// These do not fit the others, which fit together: the only explanation with at most half as many wrong blocks
    /// as there are blocks beyond k.
    Wrong(Vec<usize>),
    /// They do not fit together, and there are too few blocks to say which are wrong.
    Inconsistent,
}

/// Blocks that cannot be checked.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum StripeError {
    /// No redundancy, or no such blocks.
    #[error(
        "expected more than {k} different block indices below {n} in increasing order, got {got:?}"
    )]
    Blocks { k: usize, n: usize, got: Vec<usize> },
    /// Unlike lengths.
    #[error("expected block {block} to have {expected} bytes, as the first one has, got {got}")]
    Length {
        block: usize,
        expected: usize,
        got: usize,
    },
    /// The first k blocks do not determine the data: not possible with a matrix made here.
    #[error("the stripe cannot be checked")]
    Repair(#[from] RepairError),
}

/// Checks blocks of one stripe: pairs of index (data `0..k`, parity `k..n`) and bytes, more than k of them, in
/// increasing order.
///
/// # Errors
/// [`StripeError`] if these are not such blocks or have unlike lengths.
pub fn check_stripe(
    engine: &dyn Engine,
    matrix: &CodingMatrix,
    blocks: &[(usize, &[u8])],
) -> Result<StripeCheck, StripeError> {
    let length = check_blocks(matrix, blocks)?;
    let (basis, extra) = blocks.split_at(matrix.geometry().k());
    let indices =
        |part: &[(usize, &[u8])]| -> Vec<usize> { part.iter().map(|(b, _)| *b).collect() };
    let rows = matrix.repair_coefficients(&indices(basis), &indices(extra))?;
    let redundancy = extra.len();
    let mut space = Space::new(redundancy);
    let mut syndromes = vec![vec![0; PIECE.min(length)]; redundancy];
    for start in (0..length).step_by(PIECE) {
        let end = length.min(start + PIECE);
        syndromes_of(engine, &rows, basis, extra, start..end, &mut syndromes);
        let found = &syndromes
            .iter()
            .map(|s| &s[..end - start])
            .collect::<Vec<_>>();
        space.add_columns(found);
        if space.rank() > redundancy / 2 {
            return Ok(StripeCheck::Inconsistent);
        }
    }
    if space.rank() == 0 {
        return Ok(StripeCheck::Consistent);
    }
    let located = locate(&space, &check_columns(&rows));
    let name = |at: Vec<usize>| at.into_iter().map(|at| blocks[at].0).collect();
    Ok(located.map_or(StripeCheck::Inconsistent, |at| StripeCheck::Wrong(name(at))))
}

fn check_blocks(matrix: &CodingMatrix, blocks: &[(usize, &[u8])]) -> Result<usize, StripeError> {
    let (k, n) = (matrix.geometry().k(), matrix.geometry().n());
    let increasing = blocks.windows(2).all(|pair| pair[0].0 < pair[1].0);
    let last = blocks.last().is_some_and(|(block, _)| *block < n);
    if blocks.len() <= k || !increasing || !last {
        let got = blocks.iter().map(|(block, _)| *block).collect();
        return Err(StripeError::Blocks { k, n, got });
    }
    let expected = blocks[0].1.len();
    match blocks.iter().find(|(_, bytes)| bytes.len() != expected) {
        Some((block, bytes)) => Err(StripeError::Length {
            block: *block,
            expected,
            got: bytes.len(),
        }),
        None => Ok(expected),
    }
}

/// Each extra block plus what the basis says it should be, which is nothing where they agree.
fn syndromes_of(
    engine: &dyn Engine,
    rows: &[Vec<u8>],
    basis: &[(usize, &[u8])],
    extra: &[(usize, &[u8])],
    range: std::ops::Range<usize>,
    syndromes: &mut [Vec<u8>],
) {
    let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
    let inputs: Vec<&[u8]> = basis
        .iter()
        .map(|(_, bytes)| &bytes[range.clone()])
        .collect();
    let mut out: Vec<&mut [u8]> = syndromes
        .iter_mut()
        .map(|s| &mut s[..range.len()])
        .collect();
    engine.combine(&rows, &inputs, &mut out);
    for (syndrome, (_, bytes)) in out.iter_mut().zip(extra) {
        engine.xor(syndrome, &bytes[range.clone()]);
    }
}

/// For each block, what an error of 1 in it adds to the syndromes.
fn check_columns(rows: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let k = rows.first().map_or(0, Vec::len);
    let of_basis = (0..k).map(|i| rows.iter().map(|row| row[i]).collect());
    let of_extra = (0..rows.len()).map(|j| (0..rows.len()).map(|r| u8::from(r == j)).collect());
    of_basis.chain(of_extra).collect()
}

/// The fewest blocks whose errors explain all syndromes, if they are at most half of the redundancy.
fn locate(space: &Space, columns: &[Vec<u8>]) -> Option<Vec<usize>> {
    // Wrong bytes of different blocks are hardly ever multiples of one another; then the syndromes span just the
    // space of the wrong blocks' columns, and no other column lies in it.
    let inside: Vec<usize> = (0..columns.len())
        .filter(|at| space.holds(&columns[*at]))
        .collect();
    if inside.len() == space.rank() {
        return Some(inside);
    }
    let mut trials = 0;
    (space.rank() + 1..=space.width / 2).find_map(|size| {
        let mut chosen = Vec::with_capacity(size);
        search(space, columns, &mut chosen, size, &mut trials)
    })
}

fn search(
    space: &Space,
    columns: &[Vec<u8>],
    chosen: &mut Vec<usize>,
    size: usize,
    trials: &mut usize,
) -> Option<Vec<usize>> {
    if chosen.len() == size {
        *trials += 1;
        let mut spanned = Space::new(space.width);
        chosen
            .iter()
            .for_each(|at| spanned.add(columns[*at].clone()));
        let explains = space.basis.iter().all(|vector| spanned.holds(vector));
        return explains.then(|| chosen.clone());
    }
    let first = chosen.last().map_or(0, |last| last + 1);
    for at in first..columns.len() {
        if *trials >= TRIALS_MAX {
            return None;
        }
        chosen.push(at);
        let found = search(space, columns, chosen, size, trials);
        chosen.pop();
        if found.is_some() {
            return found;
        }
    }
    None
}

/// A space of vectors over the field, as a basis in which each vector is 1 at its pivot and 0 at the earlier pivots.
struct Space {
    width: usize,
    basis: Vec<Vec<u8>>,
    pivots: Vec<usize>,
}

impl Space {
    fn new(width: usize) -> Self {
        Self {
            width,
            basis: Vec::new(),
            pivots: Vec::new(),
        }
    }

    fn rank(&self) -> usize {
        self.basis.len()
    }

    /// What is left of a vector when the basis is taken out of it: nothing if it lies inside.
    fn reduce(&self, mut vector: Vec<u8>) -> Vec<u8> {
        for (base, pivot) in self.basis.iter().zip(&self.pivots) {
            let factor = &MUL[usize::from(vector[*pivot])];
            let terms = vector.iter_mut().zip(base);
            terms.for_each(|(x, y)| *x ^= factor[usize::from(*y)]);
        }
        vector
    }

    fn holds(&self, vector: &[u8]) -> bool {
        self.reduce(vector.to_vec()).iter().all(|x| *x == 0)
    }

    fn add(&mut self, vector: Vec<u8>) {
        let mut left = self.reduce(vector);
        let Some(pivot) = left.iter().position(|x| *x != 0) else {
            return;
        };
        let scale = &MUL[usize::from(inverse(left[pivot]))];
        left.iter_mut().for_each(|x| *x = scale[usize::from(*x)]);
        self.basis.push(left);
        self.pivots.push(pivot);
    }

    /// Adds the vectors that stand at each byte across `rows`, until they are more than half of the width.
    fn add_columns(&mut self, rows: &[&[u8]]) {
        let zero = |row: &&[u8]| row.iter().fold(0, |any, x| any | x) == 0;
        if rows.iter().all(zero) {
            return;
        }
        let length = rows.first().map_or(0, |row| row.len());
        for at in 0..length {
            if rows.iter().any(|row| row[at] != 0) {
                self.add(rows.iter().map(|row| row[at]).collect());
            }
            if self.rank() > self.width / 2 {
                return;
            }
        }
    }
}
