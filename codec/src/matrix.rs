//! The coding matrix: systematic, any k of its k + m rows are invertible, so any k blocks give back all others.

use thiserror::Error;

use crate::field::{MUL, inverse};
use crate::geometry::Geometry;

/// Parity rows over the data blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CodingMatrix {
    geometry: Geometry,
    rows: Vec<Vec<u8>>,
}

/// Survivors or wanted blocks that make no repair.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum RepairError {
    /// Not k of them, not increasing, or out of range.
    #[error("expected {k} different block indices below {n} in increasing order, got {got:?}")]
    Survivors { k: usize, n: usize, got: Vec<usize> },
    /// Out of range.
    #[error("expected wanted block indices below {n}, got {got}")]
    Wanted { n: usize, got: usize },
    /// The survivors' rows are dependent: not possible with a matrix made here.
    #[error("the survivors {0:?} do not determine the data")]
    Dependent(Vec<usize>),
}

impl CodingMatrix {
    /// The Cauchy matrix `c[j][i] = 1 / ((k + j) ^ i)`: every square part of it is invertible.
    pub fn cauchy(geometry: Geometry) -> Self {
        let k = geometry.k();
        let row = |j: usize| (0..k).map(|i| inverse(((k + j) ^ i) as u8)).collect();
        let rows = (0..geometry.m()).map(row).collect();
        Self { geometry, rows }
    }

    /// The matrix of `reed-solomon-erasure` (and of Backblaze's code before it): the Vandermonde matrix `r^c`, times
    /// the inverse of its upper square so that the data blocks come out unchanged.
    ///
    /// # Errors
    /// [`RepairError::Dependent`] if the upper square had no inverse: not possible, since its rows are different.
    pub fn vandermonde_rse(geometry: Geometry) -> Result<Self, RepairError> {
        let k = geometry.k();
        let power = |base: usize, exponent: usize| {
            (0..exponent).fold(1, |x: u8, _| MUL[base][usize::from(x)])
        };
        let powers = |r: usize| -> Vec<u8> { (0..k).map(|c| power(r, c)).collect() };
        let upper = (0..k).map(powers).collect();
        let inverted = invert(upper).ok_or_else(|| RepairError::Dependent((0..k).collect()))?;
        let rows = (k..geometry.n()).map(|r| product(&powers(r), &inverted));
        let rows = rows.collect();
        Ok(Self { geometry, rows })
    }

    /// k and m.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The coefficient of data block `data` in parity block `parity`.
    pub fn coefficient(&self, parity: usize, data: usize) -> u8 {
        self.rows[parity][data]
    }

    /// All coefficients of one parity block.
    pub fn parity_row(&self, parity: usize) -> &[u8] {
        &self.rows[parity]
    }

    fn row(&self, block: usize) -> Vec<u8> {
        let k = self.geometry.k();
        if block < k {
            (0..k).map(|i| u8::from(i == block)).collect()
        } else {
            self.rows[block - k].clone()
        }
    }

    /// Coefficients of `wanted` blocks over `survivors`: `wanted[w] = sum over s of rows[w][s] * survivors[s]`.
    ///
    /// # Errors
    /// [`RepairError`] unless `survivors` are exactly k increasing block indices and `wanted` are block indices.
    pub fn repair_coefficients(
        &self,
        survivors: &[usize],
        wanted: &[usize],
    ) -> Result<Vec<Vec<u8>>, RepairError> {
        let (k, n) = (self.geometry.k(), self.geometry.n());
        let increasing = survivors.windows(2).all(|pair| pair[0] < pair[1]);
        if survivors.len() != k || !increasing || survivors.iter().any(|block| *block >= n) {
            let got = survivors.to_vec();
            return Err(RepairError::Survivors { k, n, got });
        }
        if let Some(got) = wanted.iter().copied().find(|block| *block >= n) {
            return Err(RepairError::Wanted { n, got });
        }
        let rows: Vec<Vec<u8>> = survivors.iter().map(|block| self.row(*block)).collect();
        let inverted = invert(rows).ok_or_else(|| RepairError::Dependent(survivors.to_vec()))?;
        Ok(wanted
            .iter()
            .map(|block| product(&self.row(*block), &inverted))
            .collect())
    }
}

fn product(row: &[u8], matrix: &[Vec<u8>]) -> Vec<u8> {
    let column = |c: usize| {
        let terms = row.iter().zip(matrix);
        terms.fold(0, |sum, (x, other)| {
            sum ^ MUL[usize::from(*x)][usize::from(other[c])]
        })
    };
    (0..matrix.len()).map(column).collect()
}

/// Gauss-Jordan elimination.
fn invert(mut rows: Vec<Vec<u8>>) -> Option<Vec<Vec<u8>>> {
    let size = rows.len();
    let mut inverted: Vec<Vec<u8>> = (0..size)
        .map(|r| (0..size).map(|c| u8::from(r == c)).collect())
        .collect();
    for at in 0..size {
        let pivot = (at..size).find(|r| rows[*r][at] != 0)?;
        rows.swap(at, pivot);
        inverted.swap(at, pivot);
        let scale = inverse(rows[at][at]);
        for matrix in [&mut rows, &mut inverted] {
            matrix[at]
                .iter_mut()
                .for_each(|x| *x = MUL[usize::from(scale)][usize::from(*x)]);
        }
        for other in (0..size).filter(|r| *r != at) {
            let factor = rows[other][at];
            for matrix in [&mut rows, &mut inverted] {
                let source = matrix[at].clone();
                for (x, y) in matrix[other].iter_mut().zip(source) {
                    *x ^= MUL[usize::from(factor)][usize::from(y)];
                }
            }
        }
    }
    Some(inverted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::engine;
    use crate::field::mul;
    use reed_solomon_erasure::galois_8::ReedSolomon;

    fn geometries(n_max: usize) -> impl Iterator<Item = Geometry> {
        let pairs = (2..=n_max).flat_map(|n| (1..n).map(move |k| (k, n - k)));
        pairs.map(|(k, m)| Geometry::new(k, m).expect("valid"))
    }

    /// Data blocks of a fixed pseudo-random pattern, then parity by the definition of multiplication.
    fn stripe(matrix: &CodingMatrix, length: usize) -> Vec<Vec<u8>> {
        let k = matrix.geometry().k();
        let byte = |i: usize, o: usize| ((i * 257 + o + 1).wrapping_mul(2_654_435_761) >> 13) as u8;
        let mut blocks: Vec<Vec<u8>> = (0..k)
            .map(|i| (0..length).map(|o| byte(i, o)).collect())
            .collect();
        for j in 0..matrix.geometry().m() {
            let sum =
                |o: usize| (0..k).fold(0, |s, i| s ^ mul(matrix.coefficient(j, i), blocks[i][o]));
            blocks.push((0..length).map(sum).collect());
        }
        blocks
    }

    fn subsets(n: usize, size: usize) -> impl Iterator<Item = Vec<usize>> {
        let masks = (0u32..1 << n).filter(move |mask| mask.count_ones() as usize == size);
        masks.map(move |mask| (0..n).filter(|i| (mask >> i) & 1 == 1).collect())
    }

    #[test]
    fn every_loss_pattern_of_small_geometries_is_repaired() {
        for geometry in geometries(10) {
            for matrix in [
                CodingMatrix::cauchy(geometry),
                CodingMatrix::vandermonde_rse(geometry).unwrap(),
            ] {
                let blocks = stripe(&matrix, 3);
                for survivors in subsets(geometry.n(), geometry.k()) {
                    let all: Vec<usize> = (0..geometry.n()).collect();
                    let rows = matrix
                        .repair_coefficients(&survivors, &all)
                        .expect("repairable");
                    for (row, block) in rows.iter().zip(&blocks) {
                        let mut sum = vec![0; 3];
                        for (c, s) in row.iter().zip(&survivors) {
                            engine().fold(&mut [&mut sum[..]], &[*c], &blocks[*s]);
                        }
                        assert_eq!(&sum, block, "{geometry} from {survivors:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn parity_is_that_of_reed_solomon_erasure() {
        let wide =
            [(200, 55), (1, 254), (254, 1)].map(|(k, m)| Geometry::new(k, m).expect("valid"));
        for geometry in geometries(12).chain(wide) {
            let expected = stripe(&CodingMatrix::vandermonde_rse(geometry).unwrap(), 5);
            let mut got = expected.clone();
            got[geometry.k()..]
                .iter_mut()
                .for_each(|block| block.fill(0));
            let oracle = ReedSolomon::new(geometry.k(), geometry.m()).expect("valid");
            oracle.encode(&mut got).expect("encodes");
            assert_eq!(got, expected, "{geometry}");
        }
    }

    #[test]
    fn encoding_is_the_definition_at_every_short_length() {
        for matrix in [(4, 2), (8, 2), (5, 3)]
            .map(|(k, m)| CodingMatrix::cauchy(Geometry::new(k, m).expect("valid")))
        {
            let (k, m) = (matrix.geometry().k(), matrix.geometry().m());
            for length in 0..300 {
                let blocks = stripe(&matrix, length);
                let data: Vec<&[u8]> = blocks[..k].iter().map(|block| &block[..]).collect();
                let mut parity = vec![vec![0xA5; length]; m];
                let mut out: Vec<&mut [u8]> =
                    parity.iter_mut().map(|block| &mut block[..]).collect();
                engine().encode(&matrix, &data, &mut out);
                assert_eq!(parity, blocks[k..]);
            }
        }
    }

    #[test]
    fn the_cauchy_rows_of_four_plus_two_are_pinned() {
        // The inverses of 4, 5, 6 and 7 under 0x11D, and those of 5, 4, 7 and 6.
        let matrix = CodingMatrix::cauchy(Geometry::new(4, 2).expect("valid"));
        assert_eq!(matrix.parity_row(0), [0x47, 0xA7, 0x7A, 0xBA]);
        assert_eq!(matrix.parity_row(1), [0xA7, 0x47, 0xBA, 0x7A]);
    }
}
