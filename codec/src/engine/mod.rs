//! Engines: the arithmetic on blocks, behind one seam.

mod portable;

use portable::Portable;

use crate::matrix::CodingMatrix;

/// Arithmetic on blocks of bytes. All slices of one call have the same length.
pub trait Engine: Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;
    /// `out[i] ^= coefficients[i] * data`.
    fn fold(&self, out: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]);
    /// `out ^= data`.
    fn xor(&self, out: &mut [u8], data: &[u8]);
    /// `parity[j] = sum over i of c[j][i] * data[i]`.
    fn encode(&self, matrix: &CodingMatrix, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        parity.iter_mut().for_each(|block| block.fill(0));
        for (i, block) in data.iter().enumerate() {
            let coefficients: Vec<u8> = (0..parity.len())
                .map(|j| matrix.coefficient(j, i))
                .collect();
            self.fold(parity, &coefficients, block);
        }
    }
}

/// The engine to use: the portable one, the only one so far.
pub fn engine() -> &'static dyn Engine {
    &Portable
}
