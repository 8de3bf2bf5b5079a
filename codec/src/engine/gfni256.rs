//! The engine on 32-byte vectors (AVX2) with the instruction for 8x8 bit matrices over GF(2) (GFNI), for processors
//! that have it without AVX-512.

use std::arch::x86_64::{
    __m256i, _mm256_gf2p8affine_epi64_epi8, _mm256_loadu_si256, _mm256_set1_epi64x,
    _mm256_setzero_si256, _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256,
};

use super::Engine;
use super::blocks::{self, Stores};
use super::kernels::{COMBINE_AHEAD, FOLD_AHEAD};
use super::portable::Portable;
use super::x86::{fence, prefetch};
use crate::field::BIT_MATRICES;

/// A processor with AVX2 and GFNI: only [`Gfni256::detect`] makes a value.
pub(super) struct Gfni256(());

impl Gfni256 {
    /// The engine, if this processor can run it.
    pub(super) fn detect() -> Option<&'static Self> {
        let can = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("gfni");
        can.then_some(&Self(()))
    }
}

const WIDTH: usize = 32;

type Vector = __m256i;
type Factor = u64;
type Spread = __m256i;

fn factor(coefficient: u8) -> Factor {
    BIT_MATRICES[usize::from(coefficient)]
}

#[inline]
#[target_feature(enable = "avx2,gfni")]
fn zero() -> Vector {
    _mm256_setzero_si256()
}

#[inline]
#[target_feature(enable = "avx2,gfni")]
fn load(from: &[u8; WIDTH]) -> Vector {
    // SAFETY: the reference is valid for reads of the 32 bytes of a vector, and this load needs no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,gfni")]
fn store(to: &mut [u8; WIDTH], vector: Vector) {
    // SAFETY: the reference is valid for writes of the 32 bytes of a vector, and this store needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), vector) };
}

/// Past the cache if `to` is aligned.
#[inline]
#[target_feature(enable = "avx2,gfni")]
fn stream(to: &mut [u8; WIDTH], vector: Vector) {
    if !to.as_ptr().addr().is_multiple_of(WIDTH) {
        return store(to, vector);
    }
    // SAFETY: the reference is valid for writes of the 32 bytes of a vector, and its alignment was just looked at.
    // The kernel fences before it returns, so nobody who may read the bytes can miss the store.
    unsafe { _mm256_stream_si256(to.as_mut_ptr().cast(), vector) };
}

#[inline]
#[target_feature(enable = "avx2,gfni")]
fn xor(a: Vector, b: Vector) -> Vector {
    _mm256_xor_si256(a, b)
}

#[inline]
#[target_feature(enable = "avx2,gfni")]
fn spread(factor: &Factor) -> Spread {
    _mm256_set1_epi64x(factor.cast_signed())
}

#[inline]
#[target_feature(enable = "avx2,gfni")]
fn multiply(by: Spread, x: Vector) -> Vector {
    _mm256_gf2p8affine_epi64_epi8::<0>(x, by)
}

fold_kernels!("avx2,gfni"; 1 => 4, 2 => 4, 3 => 4, 4 => 2, 5 => 2, 6 => 2, 7 => 2, 8 => 2);

// 16 registers: at most 8 sums, the inputs and a factor.
combine_kernels!("avx2,gfni"; 1 => 4, 2 => 4, 3 => 2, 4 => 2, 5 => 1, 6 => 1, 7 => 1, 8 => 1);

engine_on_kernels!(Gfni256, "gfni256", super::gfni256);
