//! Maps of stripes: which of them moved since the basis, and how a map travels.

use storaged_codec::ChunkSize;
use storaged_plan::DirtyMap;
use storaged_wire::shape::StripeMap;

use crate::api::SlotShard;

/// The chunks of a shard that differ from the basis, of the stripes that its lane has.
pub(super) fn changed(
    shard: &SlotShard,
    basis: &SlotShard,
    chunk: ChunkSize,
    count: u64,
) -> DirtyMap {
    let of = |shard: &SlotShard, stripe: u64| {
        let range = chunk.range(stripe, shard.length);
        let leaf = shard.leaves.get(stripe as usize).copied();
        (leaf, range.end - range.start)
    };
    let mut map = DirtyMap::clean(count);
    (0..count)
        .filter(|stripe| of(shard, *stripe) != of(basis, *stripe))
        .for_each(|stripe| map.mark(stripe));
    map
}

/// A map as it is said.
pub(super) fn to_wire(map: &DirtyMap) -> StripeMap {
    StripeMap {
        stripes: map.chunks(),
        bits: map.to_bits().into(),
    }
}

/// A map as it was said, if it speaks of the lane's stripes and has as many bits as it takes.
pub(super) fn from_wire(map: &StripeMap, count: u64) -> Option<DirtyMap> {
    (map.stripes == count).then_some(())?;
    DirtyMap::of_bits(count, &map.bits)
}
