//! What the kernels for x86-64 share: asking for memory ahead, and ordering stores that went past the cache.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm_sfence};

/// Asks for the cache lines that lie `AHEAD` bytes after those of `step`.
#[inline]
pub(super) fn prefetch<const AHEAD: usize, const W: usize, const U: usize>(step: &[[u8; W]; U]) {
    let start = step.as_ptr().cast::<i8>().wrapping_add(AHEAD);
    for line in (0..W * U).step_by(64) {
        // SAFETY: a prefetch is only a hint: it reads nothing that the program can see and never faults, whatever
        // the address; x86-64 always has the instruction. The address comes from wrapping arithmetic.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line)) };
    }
}

/// Orders stores that went past the cache before all later ones.
#[inline]
pub(super) fn fence() {
    // SAFETY: the instruction has no operand and every x86-64 processor has it.
    unsafe { _mm_sfence() };
}
