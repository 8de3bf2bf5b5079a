//! Which bytes of a shard a reader asks for.

use minicbor::{Decode, Encode};
use storaged_codec::ChunkSize;

/// `offset..offset + length` of a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct ByteRange {
    /// First byte.
    #[n(0)]
    pub offset: u64,
    /// Bytes.
    #[n(1)]
    pub length: u64,
}

impl ByteRange {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// The same bytes in ascending, disjoint ranges, with gaps between them that are shorter than any chunk: who reads whole chunks
    /// reads no other ones for them. Ranges of nothing stay only if all are, because no ranges are all bytes.
    pub fn merged(mut ranges: Vec<Self>) -> Vec<Self> {
        let nothing = ranges.first().copied();
        ranges.retain(|range| range.length > 0);
        if ranges.is_empty() {
            return nothing.into_iter().collect();
        }
        ranges.sort_unstable_by_key(|range| range.offset);
        ranges.dedup_by(|next, last| {
            let joins = next.offset.saturating_sub(last.end()) < ChunkSize::BYTES_MIN;
            if joins {
                last.length = last.end().max(next.end()) - last.offset;
            }
            joins
        });
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(offset: u64, length: u64) -> ByteRange {
        ByteRange { offset, length }
    }

    #[test]
    fn ranges_of_neighbouring_chunks_become_one() {
        let every_other = (0..700_000).rev().map(|at| range(2 * at, 1)).collect();
        assert_eq!(ByteRange::merged(every_other), [range(0, 1_399_999)]);
        let apart = vec![range(9_000, 10), range(0, 10), range(4_105, 1), range(2, 3)];
        assert_eq!(
            ByteRange::merged(apart),
            [range(0, 4_106), range(9_000, 10)]
        );
        let far = vec![range(0, 10), range(4_106, 1)];
        assert_eq!(ByteRange::merged(far.clone()), far);
    }

    #[test]
    fn ranges_of_nothing_do_not_become_all_of_a_shard() {
        assert_eq!(
            ByteRange::merged(vec![range(7, 0), range(9, 0)]),
            [range(7, 0)]
        );
        assert_eq!(
            ByteRange::merged(vec![range(7, 0), range(9, 1)]),
            [range(9, 1)]
        );
        assert!(ByteRange::merged(Vec::new()).is_empty());
        let beyond = vec![range(u64::MAX, 5), range(u64::MAX - 1, u64::MAX)];
        assert_eq!(ByteRange::merged(beyond), [range(u64::MAX - 1, 1)]);
    }
}
