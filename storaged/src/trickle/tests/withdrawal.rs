//! Steps that were given up: what this node has copied of them leaves the tier, and what is left of them by nodes that are
//! gone does too, once newer steps have taken their place. What is durable, or may still be, stays.

use std::time::Duration;

use storaged_core::CurationFault;
use storaged_wire::local::Removal;

use super::*;
use crate::trickle::chain::Stored;
use crate::trickle::store::FaultPlan;

const SHARD: usize = 3 * CHUNK as usize;
const MANIFEST: &str = "job/run-1/step-5/storaged.manifest";

fn keeping(last: u32) -> Retention {
    Retention {
        keep_last: Some(last),
        ..Retention::default()
    }
}

/// All shards are there, and no manifest.
async fn uploaded(world: &mut World, step: u64) -> Saved {
    let saved = world.seal(step, noise(step, SHARD));
    let (manifest, shard) = (&saved.manifest, &saved.shard);
    let upload = (world.trickle).upload(manifest, RANK, shard, None, Leftovers::Perhaps);
    upload.await.unwrap();
    saved
}

#[tokio::test(start_paused = true)]
async fn a_shard_of_a_step_that_is_given_up_leaves_the_tier_and_those_of_others_stay() {
    for packing in [Packing::None, Packing::Zstd] {
        let mut world = World::new(0, packing);
        world.limits.retention = keeping(1);
        world.restart();
        let saved = uploaded(&mut world, 5).await;
        let others = [
            "job/run-1/step-5/__1_0.distcp",
            "job/run-1/step-6/__0_0.distcp",
            "other/run-1/step-5/__0_0.distcp",
        ];
        for other in others {
            world.put(other, vec![1; 10]).await;
        }
        assert!(world.objects().await.len() > others.len() + 1);
        world.trickle.withdraw(&saved.manifest, RANK).await;
        assert_eq!(world.objects().await, others, "{packing:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_increment_that_is_given_up_goes_and_its_base_stays() {
    let mut world = World::retaining(8, keeping(1));
    let (first, _) = world.save(4, noise(4, SHARD), None).await;
    let before = world.objects().await;
    let second = world.seal(5, trained(&first.bytes, 5));
    let (manifest, shard, base) = (&second.manifest, &second.shard, first.base());
    let upload = (world.trickle).upload(manifest, RANK, shard, Some(&base), Leftovers::Perhaps);
    assert!(upload.await.unwrap().increment.is_some());
    world.trickle.withdraw(&second.manifest, RANK).await;
    assert_eq!(world.objects().await, before);
    world.comes_back(&first).await;
}

#[tokio::test(start_paused = true)]
async fn a_step_that_is_durable_meanwhile_is_not_withdrawn() {
    let mut world = World::retaining(0, keeping(1));
    let (saved, _) = world.save(5, noise(5, SHARD), None).await;
    let before = world.objects().await;
    world.trickle.withdraw(&saved.manifest, RANK).await;
    assert_eq!(world.objects().await, before);
    assert_eq!(world.steps().await, [5]);
    world.comes_back(&saved).await;
}

#[tokio::test(start_paused = true)]
async fn where_all_checkpoints_are_kept_nothing_that_is_finished_is_withdrawn() {
    let mut world = World::new(0, Packing::None);
    let saved = uploaded(&mut world, 5).await;
    let before = world.objects().await;
    world.trickle.withdraw(&saved.manifest, RANK).await;
    assert_eq!(world.objects().await, before);
}

#[tokio::test(start_paused = true)]
async fn a_full_tier_has_room_again_once_a_step_is_given_up() {
    let mut world = World::retaining(0, keeping(1));
    let saved = uploaded(&mut world, 5).await;
    let plan = FaultPlan {
        full_after_bytes: Some(0),
        ..FaultPlan::default()
    };
    let full = world.through(plan);
    full.withdraw(&saved.manifest, RANK).await;
    assert_eq!(world.objects().await, Vec::<String>::new());
    // Not even the empty mark has room.
    let saved = uploaded(&mut world, 6).await;
    let before = world.objects().await;
    let key = "job/x".parse().unwrap();
    full.store.put_new(&key, "x".into()).await.unwrap_err();
    full.withdraw(&saved.manifest, RANK).await;
    assert_eq!(world.objects().await, before);
}

#[tokio::test(start_paused = true)]
async fn a_step_without_a_shard_is_not_published_and_the_shard_can_be_copied_again() {
    let mut world = World::retaining(0, keeping(1));
    let saved = uploaded(&mut world, 5).await;
    world.trickle.withdraw(&saved.manifest, RANK).await;
    let refused = world.publish(&saved, &by_job()).await.unwrap_err();
    let is_missing =
        matches!(&refused, DurableFault::ShardMissing { text, .. } if text.contains("no object"));
    assert!(is_missing, "{refused:?}");
    assert!(!world.has(MANIFEST).await);
    world.copy(&saved, None).await;
    world.comes_back(&saved).await;
}

/// Whoever withdrew a shard was cut off before it looked for a manifest.
#[tokio::test(start_paused = true)]
async fn a_manifest_that_names_a_shard_which_is_gone_is_taken_down_by_the_next_try() {
    let mut world = World::retaining(0, keeping(1));
    let (saved, _) = world.save(5, noise(5, SHARD), None).await;
    let shard = "job/run-1/step-5/__0_0.distcp".parse().unwrap();
    world.store.delete(&shard).await.unwrap();
    let refused = world.publish(&saved, &by_job()).await.unwrap_err();
    let is_missing = matches!(refused, DurableFault::ShardMissing { .. });
    assert!(is_missing, "{refused:?}");
    assert!(!world.has(MANIFEST).await);
}

/// What each of the two sees of the other, whichever comes first.
#[tokio::test(start_paused = true)]
async fn a_manifest_that_is_written_while_a_shard_is_withdrawn_does_not_stay_without_it() {
    let mut world = World::retaining(0, keeping(1));
    let (saved, _) = world.save(5, noise(5, SHARD), None).await;
    let record = saved.manifest.manifest();
    let mark = format!(
        "job/run-1/step-5/storaged.withdrawn.0.{}",
        saved.manifest.name()
    );
    world.put(&mark, Vec::new()).await;
    let refused = world.publish(&saved, &by_job()).await.unwrap_err();
    assert!(matches!(refused, DurableFault::Conflict(_)), "{refused:?}");
    assert!(world.has(MANIFEST).await, "whoever has marked it sees it");
    let mark = mark.parse().unwrap();
    world.store.delete(&mark).await.unwrap();
    world.publish(&saved, &by_job()).await.unwrap();
    let shard = "job/run-1/step-5/__0_0.distcp".parse().unwrap();
    world.store.delete(&shard).await.unwrap();
    let shards = [(record.shard(RANK).unwrap(), Stored::Raw)];
    let refused = world.trickle.check_not_withdrawn(record, &shards).await;
    let refused = refused.unwrap_err();
    let is_missing = matches!(refused, DurableFault::ShardMissing { .. });
    assert!(is_missing, "{refused:?}");
    assert!(!world.has(MANIFEST).await);
}

#[tokio::test(start_paused = true)]
async fn what_is_left_of_steps_that_the_job_has_passed_by_goes() {
    let retention = Retention {
        keep_every: Some(4),
        ..keeping(2)
    };
    let mut world = World::retaining(0, retention);
    let left = |step: u64| format!("job/run-1/step-{step}/__0_0.distcp");
    for step in [1, 4, 6, 9] {
        world.put(&left(step), vec![1; 10]).await;
    }
    world.save_full(2..=3).await;
    assert!(world.has(&left(1)).await, "it may still change");
    tokio::time::advance(Duration::from_secs(601)).await;
    world.save_full(5..=5).await;
    assert!(!world.has(&left(1)).await);
    world.save_full(7..=8).await;
    tokio::time::advance(Duration::from_secs(601)).await;
    assert!(world.has(&left(6)).await);
    world.save_full(10..=10).await;
    assert!(!world.has(&left(6)).await);
    assert!(world.has(&left(4)).await, "finished, it would be kept");
    assert!(world.has(&left(9)).await, "it may still become durable");
    assert_eq!(world.steps().await, [10, 8]);
}

#[tokio::test(start_paused = true)]
async fn what_is_left_of_a_step_is_removed_by_hand() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=1).await;
    world
        .put("job/run-1/step-7/__0_0.distcp", vec![1; 10])
        .await;
    let step = Removal::Step {
        run: None,
        step: Step::new(7),
    };
    let live = Some(world.run);
    let refused = world.remove_sparing(step, live).await.unwrap_err();
    assert!(matches!(refused, CurationFault::Live(_)), "{refused:?}");
    assert_eq!(world.remove(step).await, Ok(1));
    assert!(!world.has("job/run-1/step-7/__0_0.distcp").await);
    let refused = world.remove(step).await.unwrap_err();
    assert!(matches!(refused, CurationFault::NoSuch(_)), "{refused:?}");
    assert_eq!(world.steps().await, [1]);
}
