//! What can go past the page cache: a disk takes bytes from where they lie if their address, length and place in the file are multiples
//! of the disk's blocks.

use storaged_arena::DIRECT_ALIGNMENT;

/// How many of these bytes, from the first on, direct I/O takes at this place of a file.
pub fn direct_length(offset: u64, bytes: &[u8]) -> usize {
    let is_aligned = offset.is_multiple_of(DIRECT_ALIGNMENT as u64)
        && bytes.as_ptr().align_offset(DIRECT_ALIGNMENT) == 0;
    if is_aligned {
        bytes.len() / DIRECT_ALIGNMENT * DIRECT_ALIGNMENT
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use storaged_arena::AlignedBytes;

    use super::*;

    #[test]
    fn only_whole_blocks_at_whole_blocks_go() {
        let mut bytes = AlignedBytes::with_room(1 << 20);
        bytes.append(&vec![0; 1 << 20]);
        let bytes = bytes.as_ref();
        for length in [0, 1, 4095, 4096, 3 * 4096 + 5, 1 << 20] {
            let whole = length / 4096 * 4096;
            assert_eq!(direct_length(0, &bytes[..length]), whole);
            assert_eq!(direct_length(8 * 4096, &bytes[..length]), whole);
            assert_eq!(direct_length(512, &bytes[..length]), 0);
        }
        assert_eq!(direct_length(0, &bytes[1..]), 0);
    }
}
