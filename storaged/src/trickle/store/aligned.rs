//! Memory that can go past the page cache: a disk takes it from where it lies if its address, length and place in the
//! file are multiples of the disk's blocks.

use bytes::{Buf, BytesMut};

/// A multiple of the blocks of every disk that is sold, and the size of a page.
pub const ALIGNMENT: usize = 4096;

/// So many zeros, from an address that direct I/O takes.
pub fn aligned(length: usize) -> BytesMut {
    let mut bytes = BytesMut::zeroed(length + ALIGNMENT);
    let before = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
    bytes.advance(before);
    bytes.truncate(length);
    bytes
}

/// How many of these bytes, from the first on, direct I/O takes at this place of a file.
pub fn direct_length(offset: u64, bytes: &[u8]) -> usize {
    let is_aligned =
        offset.is_multiple_of(ALIGNMENT as u64) && bytes.as_ptr().align_offset(ALIGNMENT) == 0;
    if is_aligned {
        bytes.len() / ALIGNMENT * ALIGNMENT
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_begins_where_direct_io_takes_it_and_only_whole_blocks_of_it_go() {
        for length in [0, 1, ALIGNMENT - 1, ALIGNMENT, 3 * ALIGNMENT + 5, 1 << 20] {
            let bytes = aligned(length).freeze();
            assert_eq!(bytes.len(), length);
            assert!(bytes.iter().all(|byte| *byte == 0));
            let whole = length / ALIGNMENT * ALIGNMENT;
            assert_eq!(direct_length(0, &bytes), whole);
            assert_eq!(direct_length(8 * ALIGNMENT as u64, &bytes), whole);
            assert_eq!(direct_length(512, &bytes), 0);
        }
        let bytes = aligned(2 * ALIGNMENT).freeze();
        assert_eq!(direct_length(0, &bytes.slice(1..)), 0);
    }
}
