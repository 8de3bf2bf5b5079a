//! GFNI with 512-bit registers: a multiplication by a constant is one 8x8 bit matrix over GF(2), applied to 64 bytes by
//! one instruction (GF2P8AFFINEQB), whatever the field's polynomial.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m512i, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512, _mm512_set1_epi64,
    _mm512_storeu_si512, _mm512_xor_si512,
};

use super::Engine;
use super::portable::Portable;
use crate::field::mul;

/// Bytes of one register.
const LANE_BYTES: usize = 64;

/// The engine; made only where the processor has what it needs.
pub(super) struct Gfni512(());

impl Gfni512 {
    /// The engine, if this processor can run it.
    pub(super) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("gfni") && is_x86_feature_detected!("avx512f");
        has.then_some(Self(()))
    }
}

/// The bit matrix of `x -> c * x`: row i, in byte 7 - i, has the bits of x that bit i of the product sums.
const fn matrix(c: u8) -> u64 {
    let mut matrix = 0u64;
    let mut bit = 0;
    while bit < 8 {
        let product = mul(c, 1 << bit);
        let mut row = 0;
        while row < 8 {
            let set = ((product >> row) & 1) as u64;
            matrix |= set << (8 * (7 - row) + bit);
            row += 1;
        }
        bit += 1;
    }
    matrix
}

static MATRICES: [u64; 256] = {
    let mut all = [0; 256];
    let mut c = 0;
    while c < 256 {
        all[c] = matrix(c as u8);
        c += 1;
    }
    all
};

/// `out ^= c * data` on whole registers; both have the same length, a multiple of 64.
#[target_feature(enable = "gfni,avx512f")]
fn fold_lanes(out: &mut [u8], coefficient: u8, data: &[u8]) {
    assert!(out.len() == data.len() && out.len().is_multiple_of(LANE_BYTES));
    let by = _mm512_set1_epi64(MATRICES[usize::from(coefficient)].cast_signed());
    for (sum, block) in out
        .chunks_exact_mut(LANE_BYTES)
        .zip(data.chunks_exact(LANE_BYTES))
    {
        let (sum, block) = (
            sum.as_mut_ptr().cast::<__m512i>(),
            block.as_ptr().cast::<__m512i>(),
        );
        // SAFETY: both chunks are exactly 64 bytes, so the unaligned loads and the store stay inside of them; `sum` is
        // borrowed exclusively and `block` shared, so they do not overlap.
        unsafe {
            let product = _mm512_gf2p8affine_epi64_epi8::<0>(_mm512_loadu_si512(block), by);
            _mm512_storeu_si512(sum, _mm512_xor_si512(_mm512_loadu_si512(sum), product));
        }
    }
}

impl Engine for Gfni512 {
    fn name(&self) -> &'static str {
        "gfni512"
    }

    fn fold(&self, out: &mut [&mut [u8]], coefficients: &[u8], data: &[u8]) {
        let whole = data.len() - data.len() % LANE_BYTES;
        for (block, coefficient) in out.iter_mut().zip(coefficients) {
            if *coefficient == 0 {
                continue;
            }
            // SAFETY: `detect` is the only way to make this engine, and it checked for these features.
            unsafe { fold_lanes(&mut block[..whole], *coefficient, &data[..whole]) };
            let tail = &mut block[whole..];
            Portable.fold(&mut [tail], &[*coefficient], &data[whole..]);
        }
    }

    fn xor(&self, out: &mut [u8], data: &[u8]) {
        Portable.xor(out, data);
    }
}
