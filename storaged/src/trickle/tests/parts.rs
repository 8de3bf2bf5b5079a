//! How large parts are, and unfinished uploads whose parts have another size.

use storaged_core::UploadTally;

use super::*;
use crate::trickle::TenantRates;
use crate::trickle::parts::ObjectSize;
use crate::trickle::store::{FakeStore, PartBytes, PartNumber, S3_LIMITS, StoreLimits};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Bytes of a part of a shard with chunks of 256 KiB.
fn part_of(limits: StoreLimits, part: u64, in_flight: u64, length: u64) -> u64 {
    let unit = 256 << 10;
    let size = ObjectSize { unit, length };
    let bytes = size.part_bytes(part, in_flight, &limits).unwrap();
    assert!(bytes.parts_of(length) <= u64::from(limits.parts_max));
    assert!(bytes.get().is_multiple_of(unit));
    bytes.get()
}

#[test]
fn parts_grow_with_the_shard_as_far_as_some_are_under_way_at_once() {
    for (length, expected) in [
        (1, 16 * MIB),
        (4 * GIB, 16 * MIB),
        (4 * GIB + 1, 32 * MIB),
        (12 * GIB, 48 * MIB),
        (40 * GIB, 160 * MIB),
        (1000 * GIB, 256 * MIB),
    ] {
        let bytes = part_of(S3_LIMITS, 16 * MIB, 16 * GIB, length);
        assert_eq!(bytes, expected, "{length}");
    }
    // Ten of them are in the memory that there is.
    assert_eq!(part_of(S3_LIMITS, 16 * MIB, 320 * MIB, 40 * GIB), 32 * MIB);
    assert_eq!(part_of(S3_LIMITS, 16 * MIB, 16 * MIB, 40 * GIB), 16 * MIB);
    // What the operator wants stays, as far as the store takes it.
    assert_eq!(part_of(S3_LIMITS, 64 * MIB, 16 * MIB, MIB), 64 * MIB);
    assert_eq!(part_of(S3_LIMITS, GIB, 16 * MIB, MIB), 256 * MIB);
    assert_eq!(part_of(S3_LIMITS, MIB, 512 * MIB, MIB), 5 * MIB);
}

#[test]
fn parts_are_so_large_that_a_store_takes_as_many() {
    let few = StoreLimits {
        parts_max: 100,
        ..S3_LIMITS
    };
    let bytes = part_of(few, 16 * MIB, 16 * MIB, 10 * GIB);
    assert!((10 * GIB / 100..11 * GIB / 100).contains(&bytes), "{bytes}");
}

/// How long a copy takes is what a restart's first read is expected to take by.
#[tokio::test]
async fn a_copy_says_how_long_it_took_where_that_tells_how_fast_the_tier_is() {
    let mut world = World::new(0, Packing::None);
    let bytes = noise(1, 40 * CHUNK as usize + 5);
    let (_, held_back) = world.save(1, bytes.clone(), None).await;
    assert_eq!(held_back.tally(), UploadTally::default());
    world.limits.rate = None;
    world.trickle = Trickle::new(world.store.clone(), world.memory.clone(), world.limits);
    let (saved, whole) = world.save(2, bytes.clone(), None).await;
    assert!(whole.took.is_some());
    assert_eq!(whole.tally().bytes, bytes.len() as u64);
    // It is there already.
    assert_eq!(world.upload(&saved, None).await.unwrap().took, None);
    world.run = RunId::new(3);
    let saved = world.seal(1, bytes.clone());
    left(&world, &saved, 4 * u64::from(CHUNK), &[0, 1]).await;
    assert_eq!(world.copy(&saved, None).await.took, None, "in part");
    let slow = TenantRates::from([(None, 1 << 30)]);
    let trickle = Trickle::new(world.store.clone(), world.memory.clone(), world.limits);
    world.trickle = trickle.sharing(&slow);
    let (_, held_back) = world.save(2, bytes, None).await;
    assert_eq!(held_back.took, None);
}

/// Leaves some parts of a shard, as an earlier life with another configuration.
async fn left(world: &World, saved: &Saved, part_bytes: u64, parts: &[u32]) {
    let key = format!("job/run-{}/step-1/__0_0.distcp", world.run);
    let key = key.parse().unwrap();
    let size = PartBytes::new(part_bytes, &world.store.limits()).unwrap();
    let upload = world.store.begin(&key, size).await.unwrap();
    for number in parts {
        let from = *number as usize * part_bytes as usize;
        let to = (from + part_bytes as usize).min(saved.bytes.len());
        let bytes = saved.bytes[from..to].to_vec();
        let put = world
            .store
            .put_part(&upload, PartNumber(*number), bytes.into());
        put.await.unwrap();
    }
}

#[tokio::test]
async fn an_unfinished_upload_keeps_the_size_of_its_parts() {
    let chunk = u64::from(CHUNK);
    for (part_bytes, parts, begun) in [
        // It goes on.
        (4 * chunk, &[0, 1, 5][..], 1),
        (32 * chunk, &[0][..], 1),
        // These would cut chunks.
        (3 * chunk + 1, &[0, 1][..], 2),
    ] {
        let store = Arc::new(FakeStore::new());
        let mut world = World::new(0, Packing::None);
        world.store = store.clone();
        world.trickle = Trickle::new(store.clone(), world.memory.clone(), world.limits);
        let saved = world.seal(1, noise(1, 40 * CHUNK as usize + 5));
        left(&world, &saved, part_bytes, parts).await;
        world.copy(&saved, None).await;
        world.comes_back(&saved).await;
        assert_eq!(store.uploads_begun(), begun, "{part_bytes}");
    }
}
