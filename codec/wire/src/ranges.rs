//! Which bytes of a shard a reader asks for.

use minicbor::decode::{Decoder, Error};
use minicbor::{Decode, Encode};
use storaged_codec::ChunkSize;

/// So many ranges are read before they are merged.
const MERGED_EACH: usize = 1 << 16;

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
        // A million that have become one would hold the memory of a million for as long as it is worked on.
        ranges.shrink_to_fit();
        ranges
    }
}

/// A list of ranges, merged as it is read: a long one of ranges that overlap is never here whole.
pub(crate) fn decode<C>(decoder: &mut Decoder<'_>, cx: &mut C) -> Result<Vec<ByteRange>, Error> {
    let mut ranges = Vec::new();
    let mut merged_at = MERGED_EACH;
    for range in decoder.array_iter_with(cx)? {
        ranges.push(range?);
        if ranges.len() >= merged_at {
            ranges = ByteRange::merged(ranges);
            merged_at = MERGED_EACH.max(2 * ranges.len());
        }
    }
    Ok(ranges)
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
    fn a_long_list_is_merged_while_it_is_read() {
        struct List(Vec<ByteRange>);
        impl<'b> Decode<'b, ()> for List {
            fn decode(decoder: &mut Decoder<'b>, cx: &mut ()) -> Result<Self, Error> {
                decode(decoder, cx).map(Self)
            }
        }
        let read = |ranges: &[ByteRange]| -> Vec<ByteRange> {
            let List(read) = minicbor::decode(&minicbor::to_vec(ranges).unwrap()).unwrap();
            read
        };
        let short = [range(5, 1), range(0, 9), range(5, 0)];
        assert_eq!(read(&short), short);
        let overlapping: Vec<_> = (0..600_000).map(|at| range(at % 1000, 1)).collect();
        let few = read(&overlapping);
        assert!(few.capacity() <= 2 * MERGED_EACH, "{}", few.capacity());
        assert_eq!(ByteRange::merged(few), [range(0, 1000)]);
        let apart: Vec<_> = (0..200_000).map(|at| range(at << 20, 1)).collect();
        assert_eq!(read(&apart), apart);
        assert!(
            minicbor::decode::<List>(&[0x82, 0x82, 1, 2]).is_err(),
            "one of two"
        );
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
