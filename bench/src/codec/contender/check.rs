//! Comparisons with the naive engine. The code works on each position of the blocks alone, so that some ranges of
//! positions, at the front, in the middle and at the end, show what was computed at little cost.

use std::ops::Range;

use anyhow::{Result, ensure};
use storaged_codec::{CodingMatrix, engine_named};

const SAMPLE: usize = 1000;

fn samples(length: usize) -> [Range<usize>; 3] {
    let at = |start: usize| start..length.min(start + SAMPLE);
    [at(0), at(length / 2), at(length.saturating_sub(SAMPLE))]
}

/// Whether `parity` is that of `data` by `matrix`.
pub(super) fn parity(matrix: &CodingMatrix, data: &[&[u8]], parity: &[&mut [u8]]) -> Result<()> {
    let naive = engine_named("naive")?;
    let length = data.first().map_or(0, |block| block.len());
    for range in samples(length) {
        let inputs: Vec<&[u8]> = data.iter().map(|block| &block[range.clone()]).collect();
        let mut expected = vec![vec![0; range.len()]; matrix.geometry().m()];
        let mut blocks: Vec<&mut [u8]> = expected.iter_mut().map(Vec::as_mut_slice).collect();
        naive.encode(matrix, &inputs, &mut blocks);
        same(&expected, parity, &range)?;
    }
    Ok(())
}

/// What some sums were before data was folded in.
pub(super) struct Before(Vec<Vec<u8>>);

impl Before {
    pub(super) fn of(sums: &[&mut [u8]]) -> Self {
        Self(sums.iter().map(|sum| sum.to_vec()).collect())
    }

    /// Whether `sums` are these with `data` folded in.
    pub(super) fn folded(
        mut self,
        coefficients: &[u8],
        data: &[u8],
        sums: &[&mut [u8]],
    ) -> Result<()> {
        let naive = engine_named("naive")?;
        let mut blocks: Vec<&mut [u8]> = self.0.iter_mut().map(Vec::as_mut_slice).collect();
        naive.fold(&mut blocks, coefficients, data);
        same(&self.0, sums, &(0..data.len()))
    }
}

fn same(expected: &[Vec<u8>], got: &[&mut [u8]], range: &Range<usize>) -> Result<()> {
    ensure!(
        expected.len() == got.len(),
        "expected {} outputs, got {}",
        expected.len(),
        got.len()
    );
    for (j, (expected, got)) in expected.iter().zip(got).enumerate() {
        ensure!(
            *expected == got[range.clone()],
            "output {j} has wrong bytes in {range:?}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use storaged_codec::{CodingMatrix, Geometry};

    use super::{Before, parity};

    #[test]
    fn wrong_bytes_are_found() {
        let matrix = CodingMatrix::cauchy(Geometry::new(1, 1).expect("a geometry"));
        let data = vec![7; 5000];
        let mut right = data.clone();
        storaged_codec::engine().encode(&matrix, &[&data], &mut [&mut right]);
        assert!(parity(&matrix, &[&data], &[&mut right]).is_ok());
        right[4999] ^= 1;
        assert!(parity(&matrix, &[&data], &[&mut right]).is_err());
        assert!(parity(&matrix, &[&data], &[]).is_err());
        let before = Before::of(&[&mut right]);
        assert!(before.folded(&[3], &data, &[&mut right]).is_err());
    }
}
