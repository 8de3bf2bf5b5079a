//! The tier in an ordinary month: what dead incarnations leave behind, damage, growth, removal, and older releases.

use std::time::Duration;

use storaged_core::{Curation, CurationFault, DurableListing, SetAsideCause};
use storaged_wire::local::{Keep, PinnedOnes, Removal};

use super::shared_reads::Gives;
use super::*;
use crate::memory::ShardSize;
use crate::trickle::store::{FaultPlan, Faulty, KeyPrefix, PartBytes};

const SHARD: usize = 3 * CHUNK as usize;

pub(super) fn job() -> Namespace {
    Namespace::new("job").unwrap()
}

impl World {
    pub(super) fn retaining(increments: u32, retention: Retention) -> Self {
        let mut world = Self::new(increments, Packing::None);
        world.limits.retention = retention;
        world.restart();
        world
    }

    /// Another life of the daemon: what is in the store stays.
    pub(super) fn restart(&mut self) {
        self.trickle = Trickle::new(self.store.clone(), self.memory.clone(), self.limits);
    }

    /// The same store as it looks through faults.
    pub(super) fn through(&self, plan: FaultPlan) -> Trickle {
        let faulty = Arc::new(Faulty::new(self.store.clone(), plan, 3));
        Trickle::new(faulty, self.memory.clone(), self.limits)
    }

    pub(super) async fn put(&self, key: &str, bytes: Vec<u8>) {
        let key = key.parse().unwrap();
        self.store.put_new(&key, bytes.into()).await.unwrap();
    }

    pub(super) async fn listed(&self, step: Option<u64>) -> DurableListing {
        self.trickle
            .list(&job(), step.map(Step::new), &of_job())
            .await
            .unwrap()
    }

    pub(super) async fn steps(&self) -> Vec<u64> {
        let listing = self.listed(None).await;
        let steps = listing
            .manifests
            .iter()
            .map(|one| one.manifest().step.get());
        steps.collect()
    }

    pub(super) async fn remove(&self, removal: Removal) -> Result<u64, CurationFault> {
        self.remove_sparing(removal, None).await
    }

    pub(super) async fn remove_pinned_too(&self, removal: Removal) -> Result<u64, CurationFault> {
        let owner = Owner::of_token(b"token");
        let removal = Curation::Remove {
            removal,
            spared: None,
            pinned: PinnedOnes::Too,
        };
        let removed = self.trickle.curate(&job(), owner, &removal).await?;
        Ok(removed.checkpoints)
    }

    pub(super) async fn remove_sparing(
        &self,
        removal: Removal,
        spared: Option<RunId>,
    ) -> Result<u64, CurationFault> {
        let owner = Owner::of_token(b"token");
        let removal = Curation::Remove {
            removal,
            spared,
            pinned: PinnedOnes::Spared,
        };
        let removed = self.trickle.curate(&job(), owner, &removal).await?;
        Ok(removed.checkpoints)
    }

    pub(super) async fn pin(&self, step: u64, keep: Keep) {
        let owner = Owner::of_token(b"token");
        let step = Step::new(step);
        let keep = Curation::Keep {
            run: None,
            step,
            keep,
        };
        self.trickle.curate(&job(), owner, &keep).await.unwrap();
    }

    pub(super) async fn objects(&self) -> Vec<String> {
        let listed = self.store.list(&KeyPrefix::root()).await.unwrap();
        listed.iter().map(|entry| entry.key.to_string()).collect()
    }

    /// As many full copies, one step after the other, each with what follows a publication.
    pub(super) async fn save_full(&mut self, steps: std::ops::RangeInclusive<u64>) -> Vec<Saved> {
        let mut all = Vec::new();
        for step in steps {
            let (saved, _) = self.save(step, noise(step, SHARD), None).await;
            self.trickle.tidy(&job(), self.run, &of_job()).await;
            all.push(saved);
        }
        all
    }
}

#[tokio::test(start_paused = true)]
async fn leftovers_of_a_dead_incarnation_are_no_part_of_a_checkpoint() {
    let other = World::new(0, Packing::None).seal(5, noise(99, SHARD));
    let leaves: Vec<u8> = other
        .shard
        .leaves
        .iter()
        .flat_map(|leaf| *leaf.as_bytes())
        .collect();
    for (packing, with_leaves) in [
        (Packing::None, false),
        (Packing::None, true),
        (Packing::Zstd, false),
        (Packing::Zstd, true),
    ] {
        let mut world = World::new(0, packing);
        world
            .put("job/run-1/step-5/__0_0.distcp", other.bytes.clone())
            .await;
        let ends: Vec<u8> = [100u64, 200, 300]
            .iter()
            .flat_map(|end| end.to_le_bytes())
            .collect();
        world.put("job/run-1/step-5/storaged.frames.0", ends).await;
        world
            .put("job/run-1/step-5/__0_0.distcp.zst", vec![7; 300])
            .await;
        if with_leaves {
            world
                .put("job/run-1/step-5/storaged.leaves.0", leaves.clone())
                .await;
        }
        let (saved, _) = world.save(5, noise(5, SHARD), None).await;
        world.comes_back(&saved).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_shard_that_is_there_whole_is_not_sent_again() {
    let mut world = World::new(0, Packing::None);
    let saved = world.seal(5, noise(5, SHARD));
    let upload = world.trickle.upload(
        &saved.manifest,
        RANK,
        &saved.shard,
        None,
        Leftovers::Perhaps,
    );
    upload.await.unwrap();
    world.restart();
    let full = FaultPlan {
        full_after_bytes: Some(0),
        ..FaultPlan::default()
    };
    // A store that takes not one more byte.
    let upload = world.through(full);
    let upload = upload.upload(
        &saved.manifest,
        RANK,
        &saved.shard,
        None,
        Leftovers::Perhaps,
    );
    let error = upload.await.unwrap_err();
    assert!(
        matches!(error, DurableFault::Full(_)),
        "only the table is written: {error:?}"
    );
    world.copy(&saved, None).await;
    world.comes_back(&saved).await;
}

#[tokio::test(start_paused = true)]
async fn a_damaged_checkpoint_is_quarantined_and_the_next_is_offered() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=3).await;
    let damaged = world.seal(4, noise(4, SHARD));
    world.copy(&damaged, None).await;
    let flip = |bytes: &mut Vec<u8>| bytes[70_000] ^= 1;
    world.change("job/run-1/step-4/__0_0.distcp", flip).await;
    assert_eq!(world.steps().await, [4, 3, 2, 1]);
    let error = world.fetch(&damaged).await.unwrap_err();
    assert!(error.is_damage(), "{error:?}");
    world.restart();
    assert_eq!(world.steps().await, [3, 2, 1]);
    let set_aside = world.listed(None).await.set_aside;
    assert_eq!(set_aside.len(), 1);
    assert_eq!(set_aside[0].step, Step::new(4));
    assert_eq!(set_aside[0].cause, SetAsideCause::Quarantined);
    assert!(
        set_aside[0].reason.contains("digest mismatch in chunk 1"),
        "{set_aside:?}"
    );
    // Who asks for it by number gets it.
    let asked = world.listed(Some(4)).await;
    assert_eq!(asked.manifests[0].name(), damaged.manifest.name());
}

#[tokio::test]
async fn a_shard_that_was_fetched_whole_for_this_node_is_not_read_to_be_known() {
    let mut world = World::new(0, Packing::None);
    let (saved, _) = world.save(1, noise(1, SHARD), None).await;
    let pool = crate::pool::Pool::start(1).unwrap();
    let all = std::slice::from_ref(&(0..SHARD as u64));
    for (me, ranges, expected) in [("n0", &[][..], 0), ("n0", all, SHARD), ("n9", &[], SHARD)] {
        world.with_peers(me, Gives::TheBytes);
        let slot = world.slot(&vec![0; SHARD]);
        let trust = of_job();
        let fetch = (world.trickle).fetch(&saved.manifest, RANK, slot, ranges, &trust);
        fetch.await.unwrap();
        let SlotShard { length, chunk, .. } = saved.shard;
        let size = ShardSize { length, chunk };
        let known = crate::digest::digest_restored(&pool, &world.memory, slot, size);
        let known = known.await.unwrap();
        assert_eq!(known.read, expected as u64, "{me} {ranges:?}");
        assert_eq!(known.leaves, saved.shard.leaves);
        assert_eq!(known.prints, saved.shard.prints);
    }
}

/// It can be read alone, or is full: whoever found it has to remember it for all.
#[tokio::test(start_paused = true)]
async fn a_damaged_checkpoint_of_which_the_tier_takes_no_mark_is_told_as_such() {
    let mut world = World::new(0, Packing::None);
    let saved = world.save_full(1..=2).await;
    let flip = |bytes: &mut Vec<u8>| bytes[70_000] ^= 1;
    world.change("job/run-1/step-2/__0_0.distcp", flip).await;
    let full = FaultPlan {
        full_after_bytes: Some(0),
        ..FaultPlan::default()
    };
    world.trickle = world.through(full);
    let error = world.fetch(&saved[1]).await.unwrap_err();
    assert!(
        matches!(error, DurableFault::DamagedUnmarked(_)),
        "{error:?}"
    );
    world.restart();
    assert_eq!(world.steps().await, [2, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_missing_object_quarantines_too() {
    let mut world = World::new(0, Packing::None);
    let saved = world.save_full(1..=2).await;
    let key = "job/run-1/step-2/__0_0.distcp".parse().unwrap();
    world.store.delete(&key).await.unwrap();
    assert!(world.fetch(&saved[1]).await.unwrap_err().is_damage());
    assert_eq!(world.steps().await, [1]);
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_fails_quarantines_nothing() {
    let mut world = World::new(0, Packing::None);
    let saved = world.save_full(1..=2).await;
    let down = FaultPlan {
        fail_per_mille: 1000,
        ..FaultPlan::default()
    };
    let slot = world.slot(&vec![0; SHARD]);
    let trickle = world.through(down);
    let trust = of_job();
    let fetch = trickle.fetch(&saved[1].manifest, RANK, slot, &[], &trust);
    let outcome = fetch.await.map_err(DurableFault::from);
    assert!(
        matches!(outcome, Err(DurableFault::Unavailable(_))),
        "{outcome:?}"
    );
    let outcome = trickle.list(&job(), None, &of_job()).await;
    assert!(
        matches!(outcome, Err(DurableFault::Unavailable(_))),
        "{outcome:?}"
    );
    assert_eq!(world.steps().await, [2, 1]);
    assert_eq!(world.listed(None).await.set_aside, []);
}

#[tokio::test(start_paused = true)]
async fn the_newest_is_found_with_eleven_requests_among_a_million_objects() {
    let store = Arc::new(store::FakeStore::new());
    let mut world = World::new(0, Packing::None);
    world.store = store.clone();
    world.restart();
    world.save_full(7_990..=8_000).await;
    for step in 1..7_990u64 {
        let folder = format!("job/run-1/step-{step}");
        let place = crate::trickle::index::StepKey {
            run: world.run,
            step: Step::new(step),
        };
        let key = crate::trickle::index::mark_key(&job(), place, crate::trickle::index::Mark::Full);
        store.put_new(&key.unwrap(), Bytes::new()).await.unwrap();
        for rank in 0..63 {
            world
                .put(&format!("{folder}/__{rank}_0.distcp"), vec![])
                .await;
            world
                .put(&format!("{folder}/storaged.leaves.{rank}"), vec![])
                .await;
        }
    }
    let objects = world.objects().await.len();
    assert!(objects > 1_000_000, "{objects}");
    let before = store.requests();
    assert_eq!(world.steps().await, [8_000, 7_999, 7_998, 7_997]);
    let requests = store.requests() - before;
    // A page of the index, four manifests, each with who wrote it, and the schema and metadata that all four name.
    assert!(requests <= 11, "{requests} requests");
    assert_eq!(world.listed(Some(7_995)).await.manifests.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn checkpoints_of_an_older_release_are_found_by_their_folders() {
    let mut world = World::new(0, Packing::None);
    world.save_full(9..=11).await;
    for key in world.objects().await {
        if key.starts_with("job/.storaged/steps/") {
            world.store.delete(&key.parse().unwrap()).await.unwrap();
        }
    }
    assert_eq!(world.steps().await, [11, 10, 9]);
    assert_eq!(world.listed(None).await.newest_run, Some(RunId::new(1)));
    world.run = RunId::with_identity(2, 5);
    world.save_full(1..=2).await;
    assert_eq!(world.steps().await, [2, 1, 11, 10]);
    assert_eq!(world.listed(Some(9)).await.manifests.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn retention_keeps_the_last_the_nth_and_the_pinned() {
    let retention = Retention {
        keep_last: Some(2),
        keep_every: Some(4),
        abandoned_after: None,
    };
    let mut world = World::retaining(0, retention);
    world.save_full(1..=2).await;
    world.pin(2, Keep::Pin).await;
    let saved = world.save_full(3..=9).await;
    assert_eq!(world.steps().await, [9, 8, 4, 2]);
    for one in &saved[1..2] {
        world.comes_back(one).await;
    }
    let objects = world.objects().await;
    for gone in [1, 3, 5, 6, 7] {
        let folder = format!("/step-{gone}/");
        assert!(
            !objects.iter().any(|key| key.contains(&folder)),
            "{gone}: {objects:?}"
        );
    }
    world.pin(2, Keep::Unpin).await;
    world.save_full(10..=10).await;
    assert_eq!(world.steps().await, [10, 9, 8, 4]);
}

#[tokio::test(start_paused = true)]
async fn without_a_word_nothing_is_removed() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=6).await;
    assert_eq!(world.listed(Some(1)).await.manifests.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_base_of_a_kept_increment_stays_and_the_only_whole_step_too() {
    let retention = Retention {
        keep_last: Some(1),
        ..Retention::default()
    };
    let mut world = World::retaining(8, retention);
    let (first, _) = world.save(1, noise(1, SHARD), None).await;
    let (second, _) = world.save(2, trained(&first.bytes, 2), Some(&first)).await;
    let (third, _) = world
        .save(3, trained(&second.bytes, 3), Some(&second))
        .await;
    world.trickle.tidy(&job(), world.run, &of_job()).await;
    assert_eq!(world.steps().await, [3, 2, 1]);
    world.comes_back(&third).await;
    let mut alone = World::retaining(0, retention);
    let (first, _) = alone.save(1, noise(1, SHARD), None).await;
    let (second, _) = alone.save(2, noise(2, SHARD), None).await;
    // The newest is damaged: the one before is the only whole one.
    let flip = |bytes: &mut Vec<u8>| bytes[9] ^= 1;
    alone.change("job/run-1/step-2/__0_0.distcp", flip).await;
    assert!(alone.fetch(&second).await.unwrap_err().is_damage());
    alone.trickle.tidy(&job(), alone.run, &of_job()).await;
    assert_eq!(alone.steps().await, [1]);
    alone.comes_back(&first).await;
}

#[tokio::test(start_paused = true)]
async fn an_interrupted_removal_leaves_no_checkpoint_and_is_finished() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=3).await;
    for seed in 0..200 {
        let plan = FaultPlan {
            fail_per_mille: 300,
            ..FaultPlan::default()
        };
        let faulty = Arc::new(Faulty::new(world.store.clone(), plan, seed));
        let trickle = Trickle::new(faulty, world.memory.clone(), world.limits);
        let removal = Removal::Step {
            run: None,
            step: Step::new(2),
        };
        let removal = Curation::Remove {
            removal,
            spared: None,
            pinned: PinnedOnes::Spared,
        };
        let owner = Owner::of_token(b"token");
        if trickle.curate(&job(), owner, &removal).await.is_ok() {
            break;
        }
        let steps = world.steps().await;
        assert!(steps == [3, 2, 1] || steps == [3, 1], "{steps:?}");
        for one in world.listed(None).await.manifests {
            let slot = world.slot(&vec![0; SHARD]);
            let trust = of_job();
            let fetch = world.trickle.fetch(&one, RANK, slot, &[], &trust);
            fetch.await.unwrap();
        }
    }
    assert_eq!(world.steps().await, [3, 1]);
    assert!(
        !world
            .objects()
            .await
            .iter()
            .any(|key| key.contains("step-2/"))
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_pinned_goes_only_if_that_is_said_and_nothing_is_no_removal() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=3).await;
    world.pin(2, Keep::Pin).await;
    let step = Removal::Step {
        run: None,
        step: Step::new(2),
    };
    for removal in [step, Removal::All] {
        let refused = world.remove(removal).await.unwrap_err();
        assert!(matches!(refused, CurationFault::Pinned(_)), "{refused:?}");
        let told = refused.to_string();
        assert!(
            told.contains("step 2") && told.contains("--pinned"),
            "{told}"
        );
    }
    assert_eq!(world.steps().await, [3, 2, 1]);
    assert_eq!(world.remove_pinned_too(step).await, Ok(1));
    assert_eq!(world.steps().await, [3, 1]);
    let run = RunId::new(77);
    for removal in [step, Removal::Run { run }] {
        let refused = world.remove(removal).await.unwrap_err();
        assert!(matches!(refused, CurationFault::NoSuch(_)), "{refused:?}");
    }
    assert_eq!(world.remove(Removal::All).await, Ok(2));
    let refused = world.remove(Removal::All).await.unwrap_err();
    assert!(refused.to_string().contains("got none"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn what_others_build_on_and_what_is_not_ones_own_is_not_removed() {
    let mut world = World::new(8, Packing::None);
    let (first, _) = world.save(1, noise(1, SHARD), None).await;
    world.save(2, trained(&first.bytes, 2), Some(&first)).await;
    let step = |step| Removal::Step {
        run: None,
        step: Step::new(step),
    };
    let refused = world.remove(step(1)).await.unwrap_err();
    assert!(matches!(refused, CurationFault::Needed(_)), "{refused:?}");
    let refused = world.remove(step(7)).await.unwrap_err();
    assert!(matches!(refused, CurationFault::NoSuch(_)), "{refused:?}");
    let other = Owner::of_token(b"other");
    let all = Curation::Remove {
        removal: Removal::All,
        spared: None,
        pinned: PinnedOnes::Spared,
    };
    let refused = world.trickle.curate(&job(), other, &all).await.unwrap_err();
    assert_eq!(refused, CurationFault::WrongOwner);
    assert_eq!(world.steps().await, [2, 1]);
    assert_eq!(world.remove(step(2)).await, Ok(1));
    assert_eq!(world.remove(Removal::All).await, Ok(1));
    assert_eq!(world.objects().await, Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn nothing_of_a_run_that_is_spared_is_removed() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=2).await;
    world.run = RunId::with_identity(2, 9);
    world.save_full(3..=3).await;
    let step = |step| Removal::Step {
        run: None,
        step: Step::new(step),
    };
    let live = Some(world.run);
    let run = world.run;
    for removal in [step(3), Removal::Run { run }, Removal::All] {
        let refused = world.remove_sparing(removal, live).await.unwrap_err();
        assert!(matches!(refused, CurationFault::Live(_)), "{refused:?}");
        assert!(refused.to_string().contains("--live"), "{refused}");
    }
    assert_eq!(world.steps().await, [3, 2, 1]);
    assert_eq!(world.remove_sparing(step(2), live).await, Ok(1));
    assert_eq!(world.remove(step(3)).await, Ok(1));
    assert_eq!(world.steps().await, [1]);
}

#[tokio::test(start_paused = true)]
async fn only_what_an_older_run_has_left_for_long_counts_as_abandoned() {
    let retention = Retention {
        abandoned_after: Some(Duration::from_secs(3600)),
        ..Retention::default()
    };
    let mut world = World::retaining(0, retention);
    world
        .put("job/run-1/step-5/__0_0.distcp", vec![1; 10])
        .await;
    world
        .put("job/run-3/step-1/__0_0.distcp", vec![1; 10])
        .await;
    world.run = RunId::with_identity(2, 9);
    world.save_full(1..=1).await;
    tokio::time::advance(Duration::from_secs(3000)).await;
    // It still changes.
    world
        .put("job/run-1/step-5/__1_0.distcp", vec![1; 10])
        .await;
    world.save_full(2..=2).await;
    tokio::time::advance(Duration::from_secs(3000)).await;
    world.save_full(3..=3).await;
    assert!(world.has("job/run-1/step-5/__0_0.distcp").await);
    tokio::time::advance(Duration::from_secs(3000)).await;
    world.save_full(4..=4).await;
    assert!(!world.has("job/run-1/step-5/__0_0.distcp").await);
    assert!(
        world.has("job/run-3/step-1/__0_0.distcp").await,
        "a newer run's is not touched"
    );
    assert_eq!(world.steps().await, [4, 3, 2, 1]);
}

/// Begins an upload that nobody goes on with.
async fn begin(world: &World, key: &str) {
    let size = PartBytes::new(1 << 20, &world.store.limits()).unwrap();
    let key = key.parse().unwrap();
    world.store.begin(&key, size).await.unwrap();
}

async fn unfinished(world: &World) -> Vec<String> {
    let keys = world.store.unfinished(&KeyPrefix::root()).await.unwrap();
    keys.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn a_stopped_upload_leaves_nothing_unfinished() {
    let mut world = World::new(0, Packing::None);
    let saved = world.seal(5, noise(5, SHARD));
    begin(&world, "job/run-1/step-5/__0_0.distcp").await;
    begin(&world, "job/run-1/step-5/__0_0.distcp.zst").await;
    begin(&world, "job/run-1/step-5/__1_0.distcp").await;
    begin(&world, "job/run-1/step-6/__0_0.distcp").await;
    world.trickle.drop_upload(&saved.manifest, RANK).await;
    let others = [
        "job/run-1/step-5/__1_0.distcp",
        "job/run-1/step-6/__0_0.distcp",
    ];
    assert_eq!(unfinished(&world).await, others, "of others: they go on");
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_left_no_object_is_abandoned_too() {
    let retention = Retention {
        abandoned_after: Some(Duration::from_secs(3600)),
        ..Retention::default()
    };
    let mut world = World::retaining(0, retention);
    begin(&world, "job/run-1/step-5/__0_0.distcp").await;
    world.run = RunId::with_identity(2, 9);
    world.save_full(1..=1).await;
    assert_eq!(unfinished(&world).await.len(), 1, "it may live");
    tokio::time::advance(Duration::from_secs(3601)).await;
    world.save_full(2..=2).await;
    assert!(unfinished(&world).await.is_empty());
}

#[tokio::test]
async fn metadata_that_is_not_packed_is_no_fault_of_the_tier() {
    let mut world = World::new(0, Packing::None);
    let saved = world.seal(5, noise(5, SHARD));
    let mut record = saved.manifest.manifest().clone();
    record.torch_metadata = Enclosed::naming(b"not zstd");
    let enclosures = Enclosures {
        torch_metadata: b"not zstd".to_vec().into(),
        ..saved.enclosures
    };
    let manifest = Arc::new(record.seal().unwrap());
    let copied = world
        .trickle
        .upload(&manifest, RANK, &saved.shard, None, Leftovers::Perhaps);
    copied.await.unwrap();
    let published = world
        .trickle
        .publish(&manifest, &enclosures, &by_job())
        .await;
    let fault = published.unwrap_err();
    assert!(matches!(fault, DurableFault::Local(_)), "{fault:?}");
    assert!(!fault.is_of_tier());
    assert!(fault.to_string().contains("torch metadata"), "{fault}");
}

#[tokio::test]
async fn a_full_tier_gives_up_what_is_removed() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=2).await;
    let plan = FaultPlan {
        full_after_bytes: Some(0),
        ..FaultPlan::default()
    };
    world.trickle = world.through(plan);
    let key = "job/x".parse().unwrap();
    let full = world.trickle.store.put_new(&key, "x".into());
    full.await.unwrap_err();
    let step = Removal::Step {
        run: None,
        step: Step::new(1),
    };
    assert_eq!(world.remove(step).await.unwrap(), 1);
    assert_eq!(world.steps().await, [2]);
    assert!(!world.has("job/run-1/step-1/__0_0.distcp").await);
}
