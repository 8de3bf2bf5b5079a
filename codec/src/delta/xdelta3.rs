//! The two functions of the C library in `codec/xdelta3/` that are used, on slices. It counts in 32 bits, so lengths are checked here;
//! what it may be given at all, `moved.rs` says.
#![allow(unsafe_code)]

use std::ffi::c_int;

/// `xd3_encode_memory` and `xd3_decode_memory`: input, basis, output, its length, its capacity, flags; 0 is success.
type Transform =
    unsafe extern "C" fn(*const u8, u32, *const u8, u32, *mut u8, *mut u32, u32, c_int) -> c_int;

unsafe extern "C" {
    fn xd3_encode_memory(
        input: *const u8,
        input_bytes: u32,
        basis: *const u8,
        basis_bytes: u32,
        output: *mut u8,
        output_bytes: *mut u32,
        capacity: u32,
        flags: c_int,
    ) -> c_int;
    fn xd3_decode_memory(
        input: *const u8,
        input_bytes: u32,
        basis: *const u8,
        basis_bytes: u32,
        output: *mut u8,
        output_bytes: *mut u32,
        capacity: u32,
        flags: c_int,
    ) -> c_int;
}

/// VCDIFF of `new` against `basis`; `None` if the library refuses.
pub(super) fn encode(new: &[u8], basis: &[u8]) -> Option<Vec<u8>> {
    // Room for a diff that is of no use; a longer one than that is refused.
    let capacity = new.len().checked_add(basis.len())?.checked_mul(2)?;
    run(xd3_encode_memory, new, basis, capacity)
}

/// What `diff` makes of `basis`, at most `length` bytes; `None` if the library refuses or there would be more.
pub(super) fn decode(diff: &[u8], basis: &[u8], length: usize) -> Option<Vec<u8>> {
    run(xd3_decode_memory, diff, basis, length)
}

fn run(transform: Transform, input: &[u8], basis: &[u8], capacity: usize) -> Option<Vec<u8>> {
    let short = |length: usize| u32::try_from(length).ok();
    let (input_bytes, basis_bytes) = (short(input.len())?, short(basis.len())?);
    // Zeroed, so that no count that the library gives can show memory that was never written.
    let (mut output, mut written) = (vec![0; capacity], 0);
    // SAFETY: the pointers are of slices with the lengths beside them, which live and are not written by others until the call
    // returns; the library writes at most `capacity` bytes of `output` and one count, and keeps no pointer. layout.c compares the types.
    let code = unsafe {
        transform(
            input.as_ptr(),
            input_bytes,
            basis.as_ptr(),
            basis_bytes,
            output.as_mut_ptr(),
            &raw mut written,
            short(capacity)?,
            0,
        )
    };
    if code != 0 {
        return None;
    }
    let written = usize::try_from(written).ok()?;
    (written <= capacity).then(|| output.truncate(written))?;
    Some(output)
}

#[cfg(test)]
mod tests {
    use super::{decode, encode};

    /// A patch that holds seven bytes of its own, as the library writes it.
    const PATCH: [u8; 20] = [
        0xD6, 0xC3, 0xC4, 0, 0, 0, 13, 7, 0, 7, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8,
    ];

    #[test]
    fn a_patch_goes_there_and_back() {
        let (new, basis) = ([1, 2, 3, 4, 5, 6, 7], [1, 2, 4, 4, 7, 6, 7]);
        assert_eq!(encode(&new, &basis).as_deref(), Some(&PATCH[..]));
        assert_eq!(decode(&PATCH, &basis, 7).as_deref(), Some(&new[..]));
        let long: Vec<u8> = (0..100_000_u32)
            .flat_map(|n| (n * 7919).to_le_bytes())
            .collect();
        let moved = [b"moved by a few bytes", &long[..]].concat();
        let diff = encode(&moved, &long).expect("a diff");
        assert!(diff.len() < 1000, "{}", diff.len());
        assert_eq!(decode(&diff, &long, moved.len()), Some(moved));
    }

    #[test]
    fn more_than_was_asked_for_is_refused() {
        assert_eq!(decode(&PATCH, &[1, 2, 4, 4, 7, 6, 7], 6), None);
    }

    #[test]
    fn secondary_compression_is_not_compiled_in() {
        // The same patch, with a header that names the compressor DJW: with it, 88 bytes could ask for 2 GiB.
        let mut named = PATCH.to_vec();
        named[4] = 1;
        named.insert(5, 1);
        assert_eq!(decode(&named, &[1, 2, 4, 4, 7, 6, 7], 7), None);
    }
}
