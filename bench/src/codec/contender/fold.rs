//! Folds: one data block in, times a coefficient each into sums that stay.

use anyhow::{Result, ensure};
use reed_solomon_erasure::galois_8;
use storaged_codec::{CodingMatrix, Engine, Geometry};

use super::{Contender, MEMCPY, Outputs, RSE, SLOW, check, engine_share, engines_measured};
#[cfg(feature = "isal")]
use crate::isal::Tables;

/// The code whose column the sums take.
const DATA_BLOCKS: usize = 8;
const COLUMN: usize = 3;

pub(super) fn contenders(sums: usize) -> Result<Vec<Box<dyn Contender>>> {
    let matrix = CodingMatrix::cauchy(Geometry::new(DATA_BLOCKS, sums)?);
    let coefficients: Vec<u8> = (0..sums).map(|j| matrix.coefficient(j, COLUMN)).collect();
    let mut all: Vec<Box<dyn Contender>> = Vec::new();
    for engine in engines_measured() {
        all.push(Box::new(Folded {
            coefficients: coefficients.clone(),
            by: Ours(engine),
        }));
    }
    #[cfg(feature = "isal")]
    all.push(Box::new(Folded {
        coefficients: coefficients.clone(),
        by: Isal(Tables::of(&matrix)?),
    }));
    all.push(Box::new(Folded {
        coefficients,
        by: Rse,
    }));
    all.push(Box::new(Copy));
    Ok(all)
}

/// Folds one block.
trait Fold {
    fn name(&self) -> &'static str;
    fn share(&self) -> usize;
    fn fold(&self, sums: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]) -> Result<()>;
}

struct Folded<F> {
    coefficients: Vec<u8>,
    by: F,
}

impl<F: Fold> Contender for Folded<F> {
    fn name(&self) -> &'static str {
        self.by.name()
    }

    fn outputs(&self) -> Outputs {
        Outputs::Kept(self.coefficients.len())
    }

    fn share(&self) -> usize {
        self.by.share()
    }

    fn step(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        let mut blocks = data.iter();
        blocks.try_for_each(|block| self.by.fold(out, &self.coefficients, block))
    }

    fn check(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        for block in data {
            let before = check::Before::of(out);
            self.by.fold(out, &self.coefficients, block)?;
            before.folded(&self.coefficients, block, out)?;
        }
        Ok(())
    }
}

struct Ours(&'static dyn Engine);

impl Fold for Ours {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn share(&self) -> usize {
        engine_share(self.0)
    }

    fn fold(&self, sums: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]) -> Result<()> {
        self.0.fold(sums, coefficients, data);
        Ok(())
    }
}

#[cfg(feature = "isal")]
struct Isal(Tables);

#[cfg(feature = "isal")]
impl Fold for Isal {
    fn name(&self) -> &'static str {
        "isal"
    }

    fn share(&self) -> usize {
        1
    }

    fn fold(&self, sums: &mut [&mut [u8]], _coefficients: &[u8], data: &[u8]) -> Result<()> {
        self.0.update(COLUMN, data, sums)
    }
}

struct Rse;

impl Fold for Rse {
    fn name(&self) -> &'static str {
        RSE
    }

    fn share(&self) -> usize {
        if cfg!(feature = "rse-simd") { 1 } else { SLOW }
    }

    fn fold(&self, sums: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]) -> Result<()> {
        for (sum, coefficient) in sums.iter_mut().zip(coefficients) {
            galois_8::mul_slice_xor(*coefficient, data, sum);
        }
        Ok(())
    }
}

/// A copy of the same data from RAM to RAM.
struct Copy;

impl Contender for Copy {
    fn name(&self) -> &'static str {
        MEMCPY
    }

    fn outputs(&self) -> Outputs {
        Outputs::Written(1)
    }

    fn step(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        for (block, copy) in data.iter().zip(out) {
            copy.copy_from_slice(block);
        }
        Ok(())
    }

    fn check(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        self.step(data, out)?;
        let same = data.iter().zip(out).all(|(block, copy)| *block == *copy);
        ensure!(same, "the copy differs");
        Ok(())
    }
}
