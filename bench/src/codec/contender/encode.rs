//! Full encodes: k data blocks in, m parity blocks out.

use anyhow::{Result, ensure};
use reed_solomon_erasure::galois_8::ReedSolomon;
use reed_solomon_simd::ReedSolomonEncoder;
use storaged_codec::{CodingMatrix, Engine, Geometry};

use super::{Contender, MEMCPY, Outputs, RSE, SLOW, check, engine_share, engines_measured};
#[cfg(feature = "isal")]
use crate::isal::Tables;

pub(super) fn contenders(geometry: Geometry, block: usize) -> Result<Vec<Box<dyn Contender>>> {
    let matrix = CodingMatrix::cauchy(geometry);
    let mut all: Vec<Box<dyn Contender>> = Vec::new();
    for engine in engines_measured() {
        let matrix = matrix.clone();
        all.push(Box::new(Ours { engine, matrix }));
    }
    #[cfg(feature = "isal")]
    all.push(Box::new(Isal {
        tables: Tables::of(&matrix)?,
        matrix,
    }));
    all.push(Box::new(Rse {
        code: ReedSolomon::new(geometry.k(), geometry.m())?,
        matrix: CodingMatrix::vandermonde_rse(geometry)?,
    }));
    all.push(Box::new(RsSimd {
        code: ReedSolomonEncoder::new(geometry.k(), geometry.m(), block)?,
        geometry,
    }));
    all.push(Box::new(Copy { geometry }));
    Ok(all)
}

struct Ours {
    engine: &'static dyn Engine,
    matrix: CodingMatrix,
}

impl Contender for Ours {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn outputs(&self) -> Outputs {
        Outputs::Written(self.matrix.geometry().m())
    }

    fn share(&self) -> usize {
        engine_share(self.engine)
    }

    fn step(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        self.engine.encode(&self.matrix, data, out);
        Ok(())
    }

    fn check(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        self.step(data, out)?;
        check::parity(&self.matrix, data, out)
    }
}

#[cfg(feature = "isal")]
struct Isal {
    tables: Tables,
    matrix: CodingMatrix,
}

#[cfg(feature = "isal")]
impl Contender for Isal {
    fn name(&self) -> &'static str {
        "isal"
    }

    fn outputs(&self) -> Outputs {
        Outputs::Written(self.matrix.geometry().m())
    }

    fn step(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        self.tables.encode(data, out)
    }

    fn check(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        self.step(data, out)?;
        check::parity(&self.matrix, data, out)
    }
}

/// The crate `reed-solomon-erasure`; its matrix is another, at the same cost.
struct Rse {
    code: ReedSolomon,
    matrix: CodingMatrix,
}

impl Contender for Rse {
    fn name(&self) -> &'static str {
        RSE
    }

    fn outputs(&self) -> Outputs {
        Outputs::Written(self.matrix.geometry().m())
    }

    fn share(&self) -> usize {
        if cfg!(feature = "rse-simd") { 2 } else { SLOW }
    }

    fn step(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        Ok(self.code.encode_sep(data, out)?)
    }

    fn check(&mut self, data: &[&[u8]], out: &mut [&mut [u8]]) -> Result<()> {
        self.step(data, out)?;
        check::parity(&self.matrix, data, out)
    }
}

/// The crate `reed-solomon-simd`: another code, O(n log n), over GF(2^16). It copies the data in and gives the parity
/// in memory of its own, where it is left, which is to its advantage.
struct RsSimd {
    code: ReedSolomonEncoder,
    geometry: Geometry,
}

impl Contender for RsSimd {
    fn name(&self) -> &'static str {
        "rs_simd"
    }

    fn outputs(&self) -> Outputs {
        Outputs::Written(0)
    }

    fn share(&self) -> usize {
        2
    }

    fn step(&mut self, data: &[&[u8]], _out: &mut [&mut [u8]]) -> Result<()> {
        for block in data {
            self.code.add_original_shard(block)?;
        }
        self.code.encode()?;
        Ok(())
    }

    /// Loses as many data blocks as there are parity blocks and asks for them back.
    fn check(&mut self, data: &[&[u8]], _out: &mut [&mut [u8]]) -> Result<()> {
        let (k, m) = (self.geometry.k(), self.geometry.m());
        for block in data {
            self.code.add_original_shard(block)?;
        }
        let encoded = self.code.encode()?;
        let lost = m.min(k);
        let left = data.iter().enumerate().skip(lost);
        let repaired =
            reed_solomon_simd::decode(k, m, left, encoded.recovery_iter().enumerate().take(lost))?;
        let all = (0..lost).all(|i| repaired.get(&i).is_some_and(|block| *block == data[i]));
        ensure!(all, "lost blocks did not come back");
        Ok(())
    }
}

struct Copy {
    geometry: Geometry,
}

impl Contender for Copy {
    fn name(&self) -> &'static str {
        MEMCPY
    }

    fn outputs(&self) -> Outputs {
        Outputs::Written(self.geometry.k())
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
