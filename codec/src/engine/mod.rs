//! Engines: the arithmetic on blocks, behind one seam. The fastest that the processor can run is found once.

#[cfg(target_arch = "x86_64")]
mod gfni512;
mod portable;

use std::sync::OnceLock;

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

/// Every engine that this processor can run, the portable one first.
pub fn engines() -> &'static [Box<dyn Engine>] {
    static ENGINES: OnceLock<Vec<Box<dyn Engine>>> = OnceLock::new();
    ENGINES.get_or_init(|| {
        let mut found: Vec<Box<dyn Engine>> = vec![Box::new(Portable)];
        #[cfg(target_arch = "x86_64")]
        if let Some(engine) = gfni512::Gfni512::detect() {
            found.push(Box::new(engine));
        }
        found
    })
}

/// The fastest engine that this processor can run.
pub fn engine() -> &'static dyn Engine {
    engines().last().map_or(&Portable, |engine| engine.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field::mul;

    fn noise(length: usize, seed: usize) -> Vec<u8> {
        (0..length)
            .map(|at| ((at * 167 + seed * 89) ^ (at >> 3)) as u8)
            .collect()
    }

    #[test]
    fn every_engine_folds_by_the_definition_at_every_length_and_offset() {
        for engine in engines() {
            for length in 0..300 {
                for offset in [0, 1, 7] {
                    let data = noise(length + offset, 1);
                    let coefficients = [0, 1, 2, (length % 256) as u8];
                    let before: Vec<Vec<u8>> =
                        (2..6).map(|seed| noise(length + offset, seed)).collect();
                    let mut after = before.clone();
                    let mut out: Vec<&mut [u8]> =
                        after.iter_mut().map(|block| &mut block[offset..]).collect();
                    engine.fold(&mut out, &coefficients, &data[offset..]);
                    for ((after, before), c) in after.iter().zip(&before).zip(coefficients) {
                        assert_eq!(after[..offset], before[..offset]);
                        for at in offset..length + offset {
                            let expected = before[at] ^ mul(c, data[at]);
                            assert_eq!(after[at], expected, "{} {length} {offset}", engine.name());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_engine_multiplies_by_every_constant() {
        let data: Vec<u8> = (0..=255).collect();
        for engine in engines() {
            for c in 0..=255 {
                let mut out = vec![0; 256];
                engine.fold(&mut [&mut out], &[c], &data);
                let expected: Vec<u8> = data.iter().map(|x| mul(c, *x)).collect();
                assert_eq!(out, expected, "{} times {c}", engine.name());
            }
        }
    }
}
