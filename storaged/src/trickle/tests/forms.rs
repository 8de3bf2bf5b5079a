//! How a shard is stored is not asked where this node would have written it raw; what is stored otherwise comes back all the same.

use std::io::Write;
use std::sync::Mutex;

use super::encrypted::encrypted;
use super::shared_reads::Gives;
use super::*;
use crate::trickle::store::FakeStore;

const RAW: &str = "job/run-1/step-2/__0_0.distcp";
const SHARD: usize = 3 * CHUNK as usize + 100;

/// What was logged.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<u8>>>);

impl Told {
    fn hears(&self) -> tracing::subscriber::DefaultGuard {
        let writer = self.clone();
        let log = tracing_subscriber::fmt().with_writer(move || writer.clone());
        tracing::subscriber::set_default(log.finish())
    }

    fn is_quiet(&self) -> bool {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        !text.contains("ERROR") && !text.contains("WARN")
    }
}

impl Write for Told {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl World {
    fn configured_for_raw(&mut self) {
        self.limits.packing = Packing::None;
        self.limits.increments = 0;
        self.restart();
    }
}

/// A full copy and what was saved on it, by a node that was configured otherwise than it is now.
async fn saved_otherwise(increments: u32, packing: Packing) -> (World, Vec<Saved>) {
    let mut world = World::new(increments, packing);
    let (full, _) = world.save(1, noise(1, SHARD), None).await;
    let base = (increments > 0).then_some(&full);
    let (next, copied) = world.save(2, trained(&full.bytes, 2), base).await;
    assert_eq!(copied.increment.is_some(), increments > 0);
    world.configured_for_raw();
    (world, vec![full, next])
}

#[tokio::test(start_paused = true)]
async fn a_raw_shard_takes_two_requests() {
    let store = Arc::new(FakeStore::new());
    let mut world = World::new(0, Packing::None);
    world.store = store.clone();
    world.restart();
    let (saved, _) = world.save(1, noise(1, SHARD), None).await;
    let before = store.requests();
    world.comes_back(&saved).await;
    assert_eq!(store.requests() - before, 2, "the leaves and the bytes");
}

#[tokio::test(start_paused = true)]
async fn what_is_stored_otherwise_comes_back_without_a_word() {
    for (increments, packing) in [(0, Packing::Zstd), (4, Packing::None), (4, Packing::Zstd)] {
        let (mut world, saved) = saved_otherwise(increments, packing).await;
        let told = Told::default();
        let _heard = told.hears();
        for step in &saved {
            world.comes_back(step).await;
        }
        // And by another node, which shares its reads.
        world.with_peers("n9", Gives::TheBytes);
        for step in &saved {
            world.comes_back(step).await;
        }
        assert!(told.is_quiet(), "{increments} {packing:?}");
        assert_eq!(world.listed(None).await.set_aside, []);
    }
}

#[tokio::test(start_paused = true)]
async fn raw_bytes_from_before_encryption_do_not_stand_before_an_increment() {
    let (mut world, below) = encrypted(4, Packing::None);
    let (full, _) = world.save(1, noise(1, SHARD), None).await;
    let (next, _) = world.save(2, trained(&full.bytes, 2), Some(&full)).await;
    let left = noise(7, SHARD).into();
    below.put_new(&RAW.parse().unwrap(), left).await.unwrap();
    world.configured_for_raw();
    let told = Told::default();
    let _heard = told.hears();
    world.comes_back(&next).await;
    assert!(told.is_quiet());
}

#[tokio::test(start_paused = true)]
async fn wrong_raw_bytes_beside_a_good_increment_are_not_taken() {
    for left in [noise(7, SHARD), noise(7, SHARD - 1)] {
        let (mut world, saved) = saved_otherwise(4, Packing::None).await;
        world.put(RAW, left).await;
        world.comes_back(&saved[1]).await;
        assert_eq!(world.listed(None).await.set_aside, []);
    }
}

#[tokio::test(start_paused = true)]
async fn raw_bytes_that_are_wrong_twice_are_quarantined_as_is_a_shard_in_no_form() {
    for is_missing in [false, true] {
        let mut world = World::new(0, Packing::None);
        world.save(1, noise(1, SHARD), None).await;
        let (saved, _) = world.save(2, noise(2, SHARD), None).await;
        if is_missing {
            world.store.delete(&RAW.parse().unwrap()).await.unwrap();
        } else {
            world.change(RAW, |bytes| bytes[SHARD - 1] ^= 1).await;
        }
        assert!(world.fetch(&saved).await.unwrap_err().is_damage());
        assert_eq!(world.steps().await, [1]);
        assert_eq!(world.listed(None).await.set_aside.len(), 1);
    }
}
