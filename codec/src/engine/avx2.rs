//! The engine on 32-byte vectors (AVX2): a product with a constant is the sum of two table look-ups, one for each
//! half of the byte, and a byte shuffle looks up 32 at once (Plank, Greenan, Miller: "Screaming fast Galois field
//! arithmetic using Intel SIMD instructions", FAST 2013).

use std::arch::x86_64::{
    __m256i, _mm_loadu_si128, _mm256_and_si256, _mm256_broadcastsi128_si256, _mm256_loadu_si256,
    _mm256_set1_epi8, _mm256_setzero_si256, _mm256_shuffle_epi8, _mm256_srli_epi64,
    _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256,
};

use super::Engine;
use super::blocks::{self, Stores};
use super::kernels::{COMBINE_AHEAD, FOLD_AHEAD};
use super::portable::Portable;
use super::x86::{fence, prefetch};
use crate::field::NIBBLES;

/// A processor with AVX2: only [`Avx2::detect`] makes a value.
pub(super) struct Avx2(());

impl Avx2 {
    /// The engine, if this processor can run it.
    pub(super) fn detect() -> Option<&'static Self> {
        is_x86_feature_detected!("avx2").then_some(&Self(()))
    }
}

const WIDTH: usize = 32;

type Vector = __m256i;
type Factor = &'static [[u8; 16]; 2];
/// The products with low and with high halves, each twice, since the shuffle looks up within 16 bytes.
type Spread = [__m256i; 2];

fn factor(coefficient: u8) -> Factor {
    &NIBBLES[usize::from(coefficient)]
}

#[inline]
#[target_feature(enable = "avx2")]
fn zero() -> Vector {
    _mm256_setzero_si256()
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(from: &[u8; WIDTH]) -> Vector {
    // SAFETY: the reference is valid for reads of the 32 bytes of a vector, and this load needs no alignment.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(to: &mut [u8; WIDTH], vector: Vector) {
    // SAFETY: the reference is valid for writes of the 32 bytes of a vector, and this store needs no alignment.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), vector) };
}

/// Past the cache if `to` is aligned.
#[inline]
#[target_feature(enable = "avx2")]
fn stream(to: &mut [u8; WIDTH], vector: Vector) {
    if !to.as_ptr().addr().is_multiple_of(WIDTH) {
        return store(to, vector);
    }
    // SAFETY: the reference is valid for writes of the 32 bytes of a vector, and its alignment was just looked at.
    // The kernel fences before it returns, so nobody who may read the bytes can miss the store.
    unsafe { _mm256_stream_si256(to.as_mut_ptr().cast(), vector) };
}

#[inline]
#[target_feature(enable = "avx2")]
fn xor(a: Vector, b: Vector) -> Vector {
    _mm256_xor_si256(a, b)
}

#[inline]
#[target_feature(enable = "avx2")]
fn spread(factor: &Factor) -> Spread {
    let [low, high] = factor;
    // SAFETY: both references are valid for reads of 16 bytes, and this load needs no alignment.
    let (low, high) = unsafe {
        (
            _mm_loadu_si128(low.as_ptr().cast()),
            _mm_loadu_si128(high.as_ptr().cast()),
        )
    };
    [
        _mm256_broadcastsi128_si256(low),
        _mm256_broadcastsi128_si256(high),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn multiply(by: Spread, x: Vector) -> Vector {
    let half = _mm256_set1_epi8(0x0f);
    let low = _mm256_shuffle_epi8(by[0], _mm256_and_si256(x, half));
    let high = _mm256_shuffle_epi8(by[1], _mm256_and_si256(_mm256_srli_epi64::<4>(x), half));
    _mm256_xor_si256(low, high)
}

fold_kernels!("avx2"; 1 => 4, 2 => 4, 3 => 4, 4 => 2, 5 => 2, 6 => 2, 7 => 2, 8 => 2);

// 16 registers: at most 8 sums, the inputs' halves, the two tables of a factor and the mask.
combine_kernels!("avx2"; 1 => 2, 2 => 2, 3 => 2, 4 => 2, 5 => 1, 6 => 1, 7 => 1, 8 => 1);

engine_on_kernels!(Avx2, "avx2", super::avx2);
