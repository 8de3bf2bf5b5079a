//! Sets of stripes: what they hold and how they meet.

use std::ops::Range;

use proptest::prelude::*;
use storaged_codec::ChunkSize;

use crate::striped::placement;
use crate::{DirtyMap, StripeSet};

fn map(chunks: u64, dirty: &[u64]) -> DirtyMap {
    let mut map = DirtyMap::clean(chunks);
    dirty.iter().for_each(|chunk| map.mark(*chunk));
    map
}

proptest! {
    #[test]
    fn runs_are_exactly_the_marked_chunks(
        chunks in 0u64..300,
        marks in prop::collection::vec(0u64..300, 0..200),
        whole in 0u64..4,
    ) {
        let mut map = map(chunks, &marks);
        (whole * 64..(whole + 1) * 64).for_each(|chunk| map.mark(chunk));
        let runs = map.runs();
        let listed: Vec<u64> = runs.iter().cloned().flatten().collect();
        let expected: Vec<u64> = (0..chunks).filter(|c| map.is_dirty(*c)).collect();
        prop_assert_eq!(listed.len() as u64, map.count());
        prop_assert_eq!(listed, expected);
        prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
    }

    #[test]
    fn a_union_is_dirty_where_any_is(
        a in prop::collection::vec(0u64..200, 0..50),
        b in prop::collection::vec(0u64..90, 0..50),
    ) {
        let maps = [map(200, &a), map(90, &b)];
        let union = DirtyMap::union(&maps);
        prop_assert_eq!(union.chunks(), 200);
        let any = |chunk| maps.iter().any(|map| map.is_dirty(chunk));
        prop_assert!((0..200).all(|chunk| union.is_dirty(chunk) == any(chunk)));
    }

    #[test]
    fn a_byte_range_takes_only_the_stripes_it_touches(
        length in 0u64..100_000,
        from in 0u64..110_000,
        span in 0u64..30_000,
    ) {
        let chunk = ChunkSize::new(4096).expect("valid");
        let bytes = from..from + span;
        let set = StripeSet::of_bytes(chunk, length, bytes.clone());
        let touches = |stripe: u64| {
            let range: Range<u64> = chunk.range(stripe, length);
            range.start.max(bytes.start) < range.end.min(bytes.end)
        };
        let expected: Vec<u64> = (0..chunk.count(length)).filter(|s| touches(*s)).collect();
        prop_assert_eq!(set.iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn placement_is_even_in_every_aligned_round_and_at_every_power(
        period in 2usize..20,
        round in 0u64..5000,
        power in 1u32..4,
    ) {
        let size = period as u64;
        let mut seen: Vec<usize> = (0..size).map(|i| placement(round * size + i, period)).collect();
        seen.sort_unstable();
        prop_assert!(seen.into_iter().eq(0..period));
        let stride = size.pow(power);
        let mut far: Vec<usize> = (0..size).map(|i| placement((round * size + i) * stride, period)).collect();
        far.sort_unstable();
        prop_assert!(far.into_iter().eq(0..period));
    }
}

#[test]
fn an_empty_lane_has_no_stripes() {
    let chunk = ChunkSize::new(4096).expect("valid");
    assert_eq!(StripeSet::all(chunk, 0).count(), 0);
    assert_eq!(StripeSet::of_bytes(chunk, 10_000, 20..20).count(), 0);
    assert_eq!(StripeSet::all(chunk, 10_000).bytes(), 10_000);
}

#[test]
fn the_runs_of_a_set_are_its_stripes() {
    let mut map = DirtyMap::clean(9);
    map.mark_all([1..3, 5..6]);
    let chunk = ChunkSize::new(4096).expect("a size");
    let set = StripeSet::dirty(chunk, 9 * 4096, &map);
    assert_eq!(set.runs(), [1..3, 5..6]);
    assert_eq!(set.iter().collect::<Vec<_>>(), [1, 2, 5]);
}
