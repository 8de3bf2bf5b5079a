//! The engine on 64-byte vectors (AVX-512) with the instruction for 8x8 bit matrices over GF(2) (GFNI): a product
//! with a constant is one instruction, since it is linear over GF(2) in any polynomial's field. Folds go by the kernels
//! on 32-byte vectors: with sums in the second-level cache those are a quarter faster on a Zen 5 processor, and elsewhere
//! the cache or RAM is the limit of both.

use std::arch::x86_64::{
    __m512i, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512, _mm512_set1_epi64,
    _mm512_setzero_si512, _mm512_storeu_si512, _mm512_stream_si512, _mm512_xor_si512,
};

use super::Engine;
use super::blocks::{self, Stores};
use super::kernels::COMBINE_AHEAD;
use super::portable::Portable;
use super::x86::{fence, prefetch};
use crate::field::BIT_MATRICES;

/// A processor with AVX-512, AVX2 and GFNI: only [`Gfni512::detect`] makes a value.
pub(super) struct Gfni512(());

impl Gfni512 {
    /// The engine, if this processor can run it.
    pub(super) fn detect() -> Option<&'static Self> {
        let can = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("gfni");
        can.then_some(&Self(()))
    }
}

const WIDTH: usize = 64;

type Vector = __m512i;
type Factor = u64;
type Spread = __m512i;

fn factor(coefficient: u8) -> Factor {
    BIT_MATRICES[usize::from(coefficient)]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn zero() -> Vector {
    _mm512_setzero_si512()
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn load(from: &[u8; WIDTH]) -> Vector {
    // SAFETY: the reference is valid for reads of the 64 bytes of a vector, and this load needs no alignment.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn store(to: &mut [u8; WIDTH], vector: Vector) {
    // SAFETY: the reference is valid for writes of the 64 bytes of a vector, and this store needs no alignment.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), vector) };
}

/// Past the cache if `to` is aligned.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn stream(to: &mut [u8; WIDTH], vector: Vector) {
    if !to.as_ptr().addr().is_multiple_of(WIDTH) {
        return store(to, vector);
    }
    // SAFETY: the reference is valid for writes of the 64 bytes of a vector, and its alignment was just looked at.
    // The kernel fences before it returns, so nobody who may read the bytes can miss the store.
    unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), vector) };
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn xor(a: Vector, b: Vector) -> Vector {
    _mm512_xor_si512(a, b)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn spread(factor: &Factor) -> Spread {
    _mm512_set1_epi64(factor.cast_signed())
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn multiply(by: Spread, x: Vector) -> Vector {
    _mm512_gf2p8affine_epi64_epi8::<0>(x, by)
}

// 32 registers: at most 16 sums, the inputs and the factors.
combine_kernels!("avx512f,avx512bw,gfni"; 1 => 4, 2 => 4, 3 => 4, 4 => 4, 5 => 2, 6 => 2, 7 => 2, 8 => 2);

engine_on_kernels!(Gfni512, "gfni512", super::gfni256);
