//! Schema and torch metadata beside the manifest that names them: written before it, removed with it, and damage to them is
//! damage to the step.

use storaged_core::SetAsideCause;
use storaged_wire::local::Removal;

use super::*;

const FOLDER: &str = "job/run-1/step-1";
const ENCLOSED: [&str; 2] = ["storaged.schema", "storaged.torch_metadata"];

fn key(step: u64, object: &str) -> String {
    format!("job/run-1/step-{step}/{object}")
}

async fn saved(steps: std::ops::RangeInclusive<u64>) -> World {
    let mut world = World::new(0, Packing::None);
    world.save_full(steps).await;
    world
}

#[tokio::test]
async fn what_a_manifest_names_is_listed_with_it_and_removed_with_it() {
    let mut world = saved(1..=2).await;
    let listing = world.listed(None).await;
    let record = listing.manifests[0].manifest();
    let schema = record.schema.to_fetch().unwrap();
    assert_eq!(&listing.enclosures[&schema.digest][..], SCHEMA);
    assert_eq!(listing.enclosures.len(), 2, "equal ones of two steps once");
    for object in ENCLOSED {
        assert!(world.has(&key(1, object)).await);
    }
    let (run, step) = (None, Step::new(1));
    world.remove(Removal::Step { run, step }).await.unwrap();
    let objects = world.objects().await;
    assert!(
        !objects.iter().any(|it| it.starts_with(FOLDER)),
        "{objects:?}"
    );
    world.restart();
    assert_eq!(world.steps().await, [2]);
}

#[tokio::test]
async fn what_a_step_lacks_is_read_from_another_and_without_any_it_is_damaged() {
    for object in ENCLOSED {
        let world = saved(1..=3).await;
        let gone = key(3, object).parse().unwrap();
        world.store.delete(&gone).await.unwrap();
        world.change(&key(2, object), |bytes| bytes[0] ^= 1).await;
        assert_eq!(world.steps().await, [3, 2, 1], "the first one has it");
        world.change(&key(1, object), |bytes| bytes[0] ^= 1).await;
        let listing = world.listed(None).await;
        assert_eq!(listing.manifests.len(), 0);
        assert_eq!(listing.set_aside.len(), 3, "{:?}", listing.set_aside);
        for (step, said) in [(3, "got no object"), (2, "of digest"), (1, "of digest")] {
            let alone = world.listed(Some(step)).await;
            assert_eq!(alone.manifests.len(), 0);
            let [one] = &alone.set_aside[..] else {
                panic!("{:?}", alone.set_aside);
            };
            assert_eq!(one.cause, SetAsideCause::Unusable);
            assert!(one.reason.contains(object), "{}", one.reason);
            assert!(one.reason.contains(said), "{}", one.reason);
        }
    }
}

#[tokio::test]
async fn a_manifest_is_not_written_without_what_it_names() {
    let mut world = World::new(0, Packing::None);
    let first = world.seal(1, noise(1, 1000));
    let copied = world.trickle.upload(
        &first.manifest,
        RANK,
        &first.shard,
        None,
        Leftovers::Perhaps,
    );
    copied.await.unwrap();
    let plan = store::FaultPlan {
        full_after_bytes: Some(0),
        ..store::FaultPlan::default()
    };
    let full = world
        .through(plan)
        .publish(&first.manifest, &first.enclosures, &by_job())
        .await;
    assert!(matches!(full, Err(DurableFault::Full(_))), "{full:?}");
    assert!(!world.has(&key(1, "storaged.manifest")).await);
    // What another upload has left under the name is replaced.
    let leftover = key(1, ENCLOSED[0]).parse().unwrap();
    world
        .store
        .put_new(&leftover, "other".into())
        .await
        .unwrap();
    world.copy(&first, None).await;
    assert_eq!(world.steps().await, [1]);
}

#[tokio::test]
async fn a_manifest_of_an_older_release_carries_them_as_before() {
    let mut world = World::new(0, Packing::None);
    let saved = world.seal(1, noise(1, 1000));
    let mut record = saved.manifest.manifest().clone();
    record.version = 2;
    record.schema = Enclosed::Inline(saved.enclosures.schema.clone());
    record.torch_metadata = Enclosed::Inline(saved.enclosures.torch_metadata.clone());
    let old = Saved {
        manifest: Arc::new(record.seal().unwrap()),
        ..saved
    };
    world.copy(&old, None).await;
    for object in ENCLOSED {
        assert!(!world.has(&key(1, object)).await);
    }
    assert!(world.has(&key(1, ".metadata")).await);
    let listing = world.listed(None).await;
    assert_eq!(listing.manifests, std::slice::from_ref(&old.manifest));
    assert_eq!(listing.enclosures.len(), 0);
}
