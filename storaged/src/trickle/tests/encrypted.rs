//! Copies through encryption: every form comes back, an upload goes on after a kill, and what is changed is damaged.

use super::*;
use crate::trickle::parts::ObjectSize;
use crate::trickle::store::{Encrypted, FakeStore, KeyRing, PlainObjects, TierKeys};

const FRAME: usize = 256 << 10;

/// A world whose store encrypts, and the store below.
pub(super) fn encrypted(increments: u32, packing: Packing) -> (World, Arc<FakeStore>) {
    let mut world = World::new(increments, packing);
    let below = Arc::new(FakeStore::new());
    let ring = Arc::new(KeyRing::default());
    ring.replace(TierKeys::parse("5a".repeat(32).as_bytes()).unwrap());
    let plain = PlainObjects::Refuse;
    world.store = Arc::new(Encrypted::new(below.clone(), ring, plain, None));
    world.restart();
    (world, below)
}

#[tokio::test(start_paused = true)]
async fn chains_and_packed_copies_come_back_and_nothing_is_left_for_stock_readers() {
    for packing in [Packing::None, Packing::Zstd] {
        let (mut world, below) = encrypted(2, packing);
        let mut saved: Vec<Saved> = Vec::new();
        for step in 1..=4 {
            let bytes = match saved.last() {
                Some(last) => trained(&last.bytes, step),
                // A whole number of frames, and of parts.
                None => noise(1, 8 * FRAME),
            };
            let (next, copied) = world.save(step, bytes, saved.last()).await;
            let depth = copied.increment.as_ref().map_or(0, |report| report.depth);
            assert_eq!(u64::from(depth), (step - 1) % 3);
            saved.push(next);
        }
        world.restart();
        for step in &saved {
            world.comes_back(step).await;
        }
        assert_eq!(world.steps().await, [4, 3, 2, 1]);
        assert!(!world.has("job/run-1/step-1/.metadata").await);
        let manifest = "job/run-1/step-1/storaged.manifest".parse().unwrap();
        let stored = below.get(&manifest, None).await.unwrap();
        assert!(stored.windows(3).all(|window| window != b"job"));
    }
}

/// A rank may hold nothing; were its object not written, no later step of the job would become durable.
#[tokio::test(start_paused = true)]
async fn a_shard_without_a_byte_is_published_and_comes_back() {
    for packing in [Packing::None, Packing::Zstd] {
        let mut plain = World::new(0, packing);
        let (mut sealed, _) = encrypted(0, packing);
        for world in [&mut plain, &mut sealed] {
            let (saved, _) = world.save(1, Vec::new(), None).await;
            world.restart();
            world.comes_back(&saved).await;
            assert_eq!(world.steps().await, [1]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_was_killed_goes_on_and_is_published() {
    let (mut other, of_other) = encrypted(0, Packing::None);
    let never_killed = other.seal(1, noise(2, 21 * FRAME));
    other.copy(&never_killed, None).await;
    let (mut world, below) = encrypted(0, Packing::None);
    let saved = world.seal(1, noise(2, 21 * FRAME));
    let key: ObjectKey = "job/run-1/step-1/__0_0.distcp".parse().unwrap();
    let part = world.trickle.part_bytes(ObjectSize::of_shard(
        saved.manifest.manifest(),
        saved.shard.length,
    ));
    let part = part.unwrap();
    let begun = world.store.begin(&key, part).await.unwrap();
    for number in 0..3 {
        let from = number * part.get() as usize;
        let bytes = Bytes::copy_from_slice(&saved.bytes[from..from + part.get() as usize]);
        let number = store::PartNumber(number as u32);
        world.store.put_part(&begun, number, bytes).await.unwrap();
    }
    let before = below.requests();
    world.copy(&saved, None).await;
    assert_eq!(part.parts_of(saved.shard.length), 6);
    // Three parts less, and nothing to begin.
    let (again, whole) = (below.requests() - before, of_other.requests());
    assert_eq!(again + 3 + 1, whole);
    world.restart();
    world.comes_back(&saved).await;
}

#[tokio::test(start_paused = true)]
async fn leftovers_that_are_whole_count_as_copied_and_changed_ones_are_replaced() {
    let (mut world, below) = encrypted(0, Packing::None);
    let (saved, _) = world.save(1, noise(4, 3 * FRAME + 100), None).await;
    world.restart();
    let copied = world.copy(&saved, None).await;
    assert_eq!(copied.stored, saved.shard.length);
    let key: ObjectKey = "job/run-1/step-1/__0_0.distcp".parse().unwrap();
    let mut stored = below.get(&key, None).await.unwrap().to_vec();
    stored[FRAME + 500] ^= 1;
    below.delete(&key).await.unwrap();
    below.put_new(&key, stored.into()).await.unwrap();
    let fault = world.fetch(&saved).await.unwrap_err();
    assert!(fault.is_damage(), "{fault}");
    assert!(
        fault.to_string().contains("changed after it was encrypted"),
        "{fault}"
    );
    world.restart();
    world.copy(&saved, None).await;
    world.comes_back(&saved).await;
}
