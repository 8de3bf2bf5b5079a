//! The memory that is measured on: random data, and room for outputs that has been written before, so that no page
//! fault is timed. Both begin at a page and are cut into blocks from there.

use rand::rngs::SmallRng;
use rand::{RngCore, SeedableRng};

const PAGE: usize = 4096;

/// Data and room for outputs, of one length.
pub struct Arena {
    data: Pages,
    out: Pages,
}

impl Arena {
    /// Allocates and fills both.
    pub fn new(bytes: usize) -> Self {
        let (mut data, mut out) = (Pages::new(bytes), Pages::new(bytes));
        SmallRng::seed_from_u64(1).fill_bytes(data.bytes_mut());
        out.bytes_mut().fill(1);
        Self { data, out }
    }

    /// Bytes of data.
    pub fn len(&self) -> usize {
        self.data.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.data.length == 0
    }

    /// The data and the room for outputs.
    pub fn parts(&mut self) -> (&[u8], &mut [u8]) {
        (self.data.bytes(), self.out.bytes_mut())
    }
}

/// Bytes that begin at a page.
struct Pages {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Pages {
    fn new(length: usize) -> Self {
        let bytes = vec![0; length + PAGE];
        let start = bytes.as_ptr().addr().wrapping_neg() % PAGE;
        Self {
            bytes,
            start,
            length,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..][..self.length]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::{Arena, PAGE};

    #[test]
    fn an_arena_begins_at_pages() {
        let mut arena = Arena::new(3 * PAGE);
        assert_eq!((arena.len(), arena.is_empty()), (3 * PAGE, false));
        let (data, out) = arena.parts();
        assert_eq!((data.len(), out.len()), (3 * PAGE, 3 * PAGE));
        assert!(data.as_ptr().addr() % PAGE == 0 && out.as_ptr().addr() % PAGE == 0);
        assert!(data.iter().any(|byte| *byte != data[0]));
    }
}
