//! The engine on 16-byte vectors (NEON, which every aarch64 processor has): a product with a constant is the sum of two
//! table look-ups, one for each half of the byte, as in `avx2`.

use std::arch::aarch64::{
    uint8x16_t, vandq_u8, vdupq_n_u8, veorq_u8, vld1q_u8, vqtbl1q_u8, vshrq_n_u8, vst1q_u8,
};

use super::Engine;
use super::blocks::{self, Stores};
use super::kernels::{COMBINE_AHEAD, FOLD_AHEAD};
use super::portable::Portable;
use crate::field::NIBBLES;

/// A processor with NEON: only [`Neon::detect`] makes a value.
pub(super) struct Neon(());

impl Neon {
    /// The engine, if this processor can run it.
    pub(super) fn detect() -> Option<&'static Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(&Self(()))
    }
}

const WIDTH: usize = 16;

type Vector = uint8x16_t;
type Factor = &'static [[u8; 16]; 2];
/// The products with low and with high halves.
type Spread = [uint8x16_t; 2];

fn factor(coefficient: u8) -> Factor {
    &NIBBLES[usize::from(coefficient)]
}

#[inline]
#[target_feature(enable = "neon")]
fn zero() -> Vector {
    vdupq_n_u8(0)
}

#[inline]
#[target_feature(enable = "neon")]
fn load(from: &[u8; WIDTH]) -> Vector {
    // SAFETY: the reference is valid for reads of the 16 bytes of a vector, and this load needs no alignment.
    unsafe { vld1q_u8(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "neon")]
fn store(to: &mut [u8; WIDTH], vector: Vector) {
    // SAFETY: the reference is valid for writes of the 16 bytes of a vector, and this store needs no alignment.
    unsafe { vst1q_u8(to.as_mut_ptr(), vector) };
}

/// Into the cache as well: Rust has no stores past it for these processors.
#[inline]
#[target_feature(enable = "neon")]
fn stream(to: &mut [u8; WIDTH], vector: Vector) {
    store(to, vector);
}

#[inline]
#[target_feature(enable = "neon")]
fn xor(a: Vector, b: Vector) -> Vector {
    veorq_u8(a, b)
}

#[inline]
#[target_feature(enable = "neon")]
fn spread(factor: &Factor) -> Spread {
    let [low, high] = factor;
    [load(low), load(high)]
}

#[inline]
#[target_feature(enable = "neon")]
fn multiply(by: Spread, x: Vector) -> Vector {
    let low = vqtbl1q_u8(by[0], vandq_u8(x, vdupq_n_u8(0x0f)));
    let high = vqtbl1q_u8(by[1], vshrq_n_u8::<4>(x));
    veorq_u8(low, high)
}

/// Nothing: Rust has no stable way to ask these processors for memory ahead.
#[inline]
fn prefetch<const AHEAD: usize, const W: usize, const U: usize>(_step: &[[u8; W]; U]) {}

/// Nothing: no store went past the cache.
#[inline]
fn fence() {}

fold_kernels!("neon"; 1 => 4, 2 => 4, 3 => 4, 4 => 4, 5 => 4, 6 => 4, 7 => 4, 8 => 4);

// 32 registers: at most 16 sums, the inputs, the two tables of a factor and the mask.
combine_kernels!("neon"; 1 => 4, 2 => 4, 3 => 4, 4 => 4, 5 => 2, 6 => 2, 7 => 2, 8 => 2);

engine_on_kernels!(Neon, "neon", super::neon);
