//! The portable engine: one table row per coefficient, no assumptions about the processor.

use super::Engine;
use crate::field::MUL;

/// Tables and plain loops.
pub(super) struct Portable;

impl Engine for Portable {
    fn name(&self) -> &'static str {
        "portable"
    }

    fn fold(&self, out: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]) {
        for (block, coefficient) in out.iter_mut().zip(coefficients) {
            match coefficient {
                0 => {}
                1 => self.xor(block, data),
                c => {
                    let row = &MUL[usize::from(*c)];
                    for (x, y) in block.iter_mut().zip(data) {
                        *x ^= row[usize::from(*y)];
                    }
                }
            }
        }
    }

    fn fold_from(&self, out: &mut [&mut [u8]], input: &[&[u8]], coefficients: &[u8], data: &[u8]) {
        for ((block, from), c) in out.iter_mut().zip(input).zip(coefficients) {
            let row = &MUL[usize::from(*c)];
            for ((x, y), z) in block.iter_mut().zip(*from).zip(data) {
                *x = y ^ row[usize::from(*z)];
            }
        }
    }

    fn xor(&self, out: &mut [u8], data: &[u8]) {
        for (x, y) in out.iter_mut().zip(data) {
            *x ^= y;
        }
    }
}
