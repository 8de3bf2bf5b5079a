//! A damaged step that increments build on: one restore that fails on it sets aside all that it was read through, and nothing else.

use std::ops::RangeInclusive;

use storaged_core::SetAsideCause;

use super::*;
use crate::trickle::SetAsideBase;
use crate::trickle::store::{FaultPlan, KeyPrefix};

/// A full copy, and increments each on the one before.
async fn chain_of(world: &mut World, steps: RangeInclusive<u64>) -> Vec<Saved> {
    let mut chain: Vec<Saved> = Vec::new();
    for step in steps {
        let bytes = match chain.last() {
            Some(last) => trained(&last.bytes, step),
            None => noise(step, 3 * CHUNK as usize),
        };
        let (saved, copied) = world.save(step, bytes, chain.last()).await;
        assert_eq!(copied.increment.is_some(), !chain.is_empty());
        chain.push(saved);
    }
    chain
}

impl World {
    async fn flip(&self, key: &str) {
        self.change(key, |bytes| bytes[20] ^= 4).await;
    }

    async fn quarantined(&self) -> Vec<u64> {
        let listing = self.listed(None).await;
        let set_aside = listing.set_aside.iter();
        let quarantined = set_aside.filter(|one| one.cause == SetAsideCause::Quarantined);
        quarantined.map(|one| one.step.get()).collect()
    }

    async fn marks_of_damage(&self) -> usize {
        let objects = self.store.list(&KeyPrefix::root()).await.unwrap();
        let keys = objects.iter().map(|entry| entry.key.as_str());
        keys.filter(|key| key.ends_with(".quarantined")).count()
    }
}

#[tokio::test(start_paused = true)]
async fn a_damaged_base_costs_one_restore_however_many_increments_build_on_it() {
    let damages = [
        "job/run-1/step-15/__0_0.distcp",
        "job/run-1/step-15/storaged.leaves.0",
    ];
    for key in damages {
        let mut world = World::new(8, Packing::None);
        world.save(14, noise(14, 3 * CHUNK as usize), None).await;
        let chain = chain_of(&mut world, 15..=21).await;
        world.flip(key).await;
        assert_eq!(world.steps().await, [21, 20, 19, 18], "{key}");
        let error = world.fetch(&chain[6]).await.unwrap_err();
        assert!(error.is_damage(), "{key}: {error:?}");
        world.restart();
        assert_eq!(world.steps().await, [14], "{key}");
        let expected: Vec<u64> = (15..=21).rev().collect();
        assert_eq!(world.quarantined().await, expected, "{key}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_lies_below_the_damage_and_beside_it_is_offered_on() {
    let mut world = World::new(8, Packing::None);
    let chain = chain_of(&mut world, 1..=3).await;
    let (beside, _) = world
        .save(4, trained(&chain[0].bytes, 4), Some(&chain[0]))
        .await;
    let (newest, _) = world
        .save(5, trained(&chain[2].bytes, 5), Some(&chain[2]))
        .await;
    world.flip("job/run-1/step-2/__0_0.increment").await;
    assert!(world.fetch(&newest).await.unwrap_err().is_damage());
    assert_eq!(world.quarantined().await, [5, 3, 2]);
    assert_eq!(world.steps().await, [4, 1]);
    world.comes_back(&beside).await;
    world.comes_back(&chain[0]).await;
}

/// They were asked for one by one, the older one first: what builds on it is found with the next.
#[tokio::test(start_paused = true)]
async fn steps_newer_than_the_one_that_failed_cost_one_more_restore_together() {
    let mut world = World::new(8, Packing::None);
    world.save(1, noise(1, 3 * CHUNK as usize), None).await;
    let chain = chain_of(&mut world, 2..=6).await;
    world.flip("job/run-1/step-2/__0_0.distcp").await;
    assert!(world.fetch(&chain[1]).await.unwrap_err().is_damage());
    assert_eq!(world.quarantined().await, [3, 2]);
    assert!(world.fetch(&chain[4]).await.unwrap_err().is_damage());
    assert_eq!(world.quarantined().await, [6, 5, 4, 3, 2]);
    assert_eq!(world.steps().await, [1]);
}

/// What was removed is not there to be marked; one of another digest may be sound.
#[tokio::test(start_paused = true)]
async fn a_base_whose_manifest_is_not_the_one_expected_gets_no_mark_itself() {
    for is_missing in [true, false] {
        let mut world = World::new(8, Packing::None);
        let chain = chain_of(&mut world, 1..=3).await;
        let key = "job/run-1/step-1/storaged.manifest".parse().unwrap();
        world.store.delete(&key).await.unwrap();
        if !is_missing {
            let other = world.seal(1, noise(9, 3 * CHUNK as usize));
            let object = crate::trickle::manifest_object(&other.manifest);
            world.store.put_new(&key, object).await.unwrap();
        }
        assert!(world.fetch(&chain[2]).await.unwrap_err().is_damage());
        assert_eq!(world.quarantined().await, [3, 2], "{is_missing}");
        assert_eq!(world.marks_of_damage().await, 2, "{is_missing}");
    }
}

/// It can be read alone, or is full: the decisions are told of each, the oldest first.
#[tokio::test(start_paused = true)]
async fn bases_of_which_the_tier_takes_no_mark_are_told_as_such() {
    let mut world = World::new(8, Packing::None);
    let chain = chain_of(&mut world, 1..=3).await;
    world.flip("job/run-1/step-1/__0_0.distcp").await;
    let full = FaultPlan {
        full_after_bytes: Some(0),
        ..FaultPlan::default()
    };
    world.trickle = world.through(full);
    let slot = world.slot(&vec![0; chain[2].bytes.len()]);
    let trust = of_job();
    let fetch = (world.trickle).fetch(&chain[2].manifest, RANK, slot, &[], &trust);
    let not_fetched = fetch.await.unwrap_err();
    let is_unmarked = |fault: &DurableFault| matches!(fault, DurableFault::DamagedUnmarked(_));
    assert!(is_unmarked(&not_fetched.fault), "{not_fetched:?}");
    let bases = &not_fetched.bases;
    assert!(bases.iter().all(|base| is_unmarked(&base.fault)));
    let step = |base: &SetAsideBase| base.manifest.manifest().step.get();
    let steps: Vec<u64> = bases.iter().map(step).collect();
    assert_eq!(steps, [1, 2]);
    assert_eq!(world.marks_of_damage().await, 0);
    assert_eq!(world.steps().await, [3, 2, 1]);
}
