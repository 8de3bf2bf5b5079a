//! The naive engine: the definition of the field's product, byte by byte. The oracle of the others' tests.

use super::Engine;
use crate::field::mul;

/// No tables at all.
pub(super) struct Naive;

impl Engine for Naive {
    fn name(&self) -> &'static str {
        "naive"
    }

    fn fold(&self, out: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]) {
        for (block, c) in out.iter_mut().zip(coefficients) {
            for (x, y) in block.iter_mut().zip(data) {
                *x ^= mul(*c, *y);
            }
        }
    }

    fn fold_from(&self, out: &mut [&mut [u8]], input: &[&[u8]], coefficients: &[u8], data: &[u8]) {
        for ((block, from), c) in out.iter_mut().zip(input).zip(coefficients) {
            for ((x, y), z) in block.iter_mut().zip(*from).zip(data) {
                *x = y ^ mul(*c, *z);
            }
        }
    }

    fn xor(&self, out: &mut [u8], data: &[u8]) {
        for (x, y) in out.iter_mut().zip(data) {
            *x ^= y;
        }
    }
}
