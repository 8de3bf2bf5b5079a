//! Somebody who may write in the tier and has no token: what he makes there is not offered, what he removes is missed, and what a
//! release before MACs wrote goes on being read, as the configuration says.

use storaged_core::SetAsideCause;
use storaged_wire::{DurableStep, Provenance};

use super::tier::job;
use super::*;
use crate::trickle::index::{Mark, StepKey, mark_key};

const LENGTH: usize = 3 * CHUNK as usize;

fn place(step: u64) -> StepKey {
    let run = RunId::new(1);
    let step = Step::new(step);
    StepKey { run, step }
}

fn object_of(step: u64, name: &str) -> String {
    format!("job/run-1/step-{step}/{name}")
}

impl World {
    fn requiring(require_mac: RequireMac) -> Self {
        let mut world = Self::new(0, Packing::None);
        world.limits.require_mac = require_mac;
        world.restart();
        world
    }

    /// As a release before MACs.
    async fn save_without(&mut self, step: u64) -> Saved {
        let saved = self.seal(step, noise(step, LENGTH));
        let upload = self.trickle.upload(
            &saved.manifest,
            RANK,
            &saved.shard,
            None,
            Leftovers::Perhaps,
        );
        upload.await.unwrap();
        let nobody = Authorship {
            keys: None,
            predecessor: None,
        };
        self.publish(&saved, &nobody).await.unwrap();
        saved
    }

    /// A manifest like another one, with all digests right, and an index entry.
    async fn forge(&self, like: &Saved, step: u64) -> ManifestBytes {
        let mut record = like.manifest.manifest().clone();
        record.step = Step::new(step);
        let forged = record.seal().unwrap();
        let object = crate::trickle::manifest_object(&forged).to_vec();
        self.put(&object_of(step, "storaged.manifest"), object)
            .await;
        let mark = mark_key(&job(), place(step), Mark::Full).unwrap();
        self.put(mark.as_str(), Vec::new()).await;
        forged
    }

    async fn provenance(&self, step: u64) -> Vec<u8> {
        let key = object_of(step, "storaged.provenance").parse().unwrap();
        self.store.get(&key, None).await.unwrap().to_vec()
    }

    async fn gone(&self, key: &str) {
        self.store.delete(&key.parse().unwrap()).await.unwrap();
    }

    /// A step with all that says that it was there.
    async fn vanishes(&self, step: u64) {
        let mark = mark_key(&job(), place(step), Mark::Full).unwrap();
        let folder = object_of(step, "");
        for key in self.objects().await {
            if key.starts_with(&folder) || key == mark.as_str() {
                self.gone(&key).await;
            }
        }
    }

    async fn aside(&self) -> Vec<(u64, SetAsideCause)> {
        let listing = self.listed(None).await;
        let aside = listing.set_aside.iter();
        aside.map(|one| (one.step.get(), one.cause)).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_forged_step_is_never_offered_however_it_is_made() {
    let mut world = World::new(0, Packing::None);
    let saved = world.save_full(1..=2).await;
    let forged = world.forge(&saved[1], 3).await;
    assert_eq!(world.steps().await, [2, 1]);
    assert_eq!(world.aside().await, [(3, SetAsideCause::WithoutMac)]);
    // With the record of a real step, with one under a guessed token, and with bytes that are none.
    let guessed = Provenance {
        version: Provenance::VERSION,
        manifest: forged.name(),
        key: storaged_wire::peer::CheckpointKey::of(forged.manifest()),
        predecessor: None,
        increments: Vec::new(),
    };
    let guessed = guessed.to_object(&ManifestKey::of_token(&job(), b"guess"));
    for bytes in [world.provenance(2).await, guessed, Vec::new(), vec![7; 100]] {
        let at = object_of(3, "storaged.provenance");
        world.put(&at, bytes).await;
        assert_eq!(world.steps().await, [2, 1]);
        assert_eq!(world.aside().await, [(3, SetAsideCause::Forged)]);
        let asked = world.listed(Some(3)).await;
        assert!(asked.manifests.is_empty(), "by its number neither");
        assert_eq!(asked.set_aside[0].cause, SetAsideCause::Forged);
        world.gone(&at).await;
    }
    // A real step's folder, copied under a newer number.
    world.vanishes(3).await;
    for name in ["storaged.manifest", "storaged.provenance"] {
        let key = object_of(2, name).parse().unwrap();
        let bytes = world.store.get(&key, None).await.unwrap().to_vec();
        world.put(&object_of(9, name), bytes).await;
    }
    let mark = mark_key(&job(), place(9), Mark::Full).unwrap();
    world.put(mark.as_str(), Vec::new()).await;
    assert_eq!(world.steps().await, [2, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_changed_manifest_in_a_real_steps_place_is_forged() {
    let mut world = World::new(0, Packing::None);
    let saved = world.save_full(1..=2).await;
    let mut record = saved[1].manifest.manifest().clone();
    record.shards[0].root = saved[0].manifest.manifest().shards[0].root;
    let object = crate::trickle::manifest_object(&record.seal().unwrap()).to_vec();
    let key = object_of(2, "storaged.manifest");
    world.change(&key, |bytes| *bytes = object).await;
    assert_eq!(world.steps().await, [1]);
    assert_eq!(world.aside().await, [(2, SetAsideCause::Forged)]);
}

#[tokio::test(start_paused = true)]
async fn a_step_that_was_removed_from_the_middle_is_missed() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=4).await;
    assert_eq!(world.aside().await, []);
    world.vanishes(3).await;
    assert_eq!(world.steps().await, [4, 2, 1]);
    assert_eq!(world.aside().await, [(3, SetAsideCause::Missing)]);
    let listing = world.listed(None).await;
    assert_eq!(listing.authentic.map(|it| it.step), Some(Step::new(4)));
}

#[tokio::test(start_paused = true)]
async fn what_the_retention_removes_is_not_missed() {
    let retention = Retention {
        keep_last: Some(2),
        ..Retention::default()
    };
    let mut world = World::retaining(0, retention);
    world.save_full(1..=5).await;
    assert_eq!(world.steps().await, [5, 4]);
    assert_eq!(world.aside().await, []);
}

#[tokio::test(start_paused = true)]
async fn forged_steps_push_no_sound_one_out_of_the_retention() {
    let retention = Retention {
        keep_last: Some(1),
        ..Retention::default()
    };
    let mut world = World::retaining(0, retention);
    let saved = world.save_full(1..=2).await;
    for step in 5..=8 {
        world.forge(&saved[1], step).await;
    }
    world.trickle.tidy(&job(), world.run, &of_job()).await;
    assert_eq!(world.steps().await, [2]);
    world.comes_back(&saved[1]).await;
    let owner = Owner::of_token(TOKEN);
    let stranger = Trust::Nothing { owner };
    world.trickle.tidy(&job(), world.run, &stranger).await;
    assert_eq!(world.steps().await, [2], "who cannot tell removes nothing");
}

#[tokio::test(start_paused = true)]
async fn steps_of_releases_before_macs_are_used_as_the_configuration_says() {
    let offered = [
        (RequireMac::AfterFirst, &[3, 2, 1][..]),
        (RequireMac::Always, &[3][..]),
        (RequireMac::Never, &[4, 3, 2, 1][..]),
    ];
    for (require_mac, expected) in offered {
        let mut world = World::requiring(require_mac);
        let first = world.save_without(1).await;
        world.save_without(2).await;
        if require_mac != RequireMac::Always {
            assert_eq!(world.steps().await, [2, 1], "{require_mac:?}");
            world.comes_back(&first).await;
        }
        world.save(3, noise(3, LENGTH), None).await;
        world.save_without(4).await;
        assert_eq!(world.steps().await, expected, "{require_mac:?}");
        for (_, cause) in world.aside().await {
            assert_eq!(cause, SetAsideCause::WithoutMac);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn macs_that_were_all_removed_are_missed_by_a_node_that_knows_of_one() {
    let mut world = World::new(0, Packing::None);
    let saved = world.save_full(1..=2).await;
    let known = DurableStep {
        run: world.run,
        step: Step::new(2),
        manifest: saved[1].manifest.name(),
    };
    for step in 1..=2 {
        world.gone(&object_of(step, "storaged.provenance")).await;
    }
    world.forge(&saved[1], 3).await;
    let trust = Trust::Job {
        owner: Owner::of_token(TOKEN),
        keys: job_keys(),
        known: Some(known),
    };
    let listing = world.trickle.list(&job(), None, &trust).await.unwrap();
    let steps = listing.manifests.iter().map(|it| it.manifest().step.get());
    assert_eq!(
        steps.collect::<Vec<_>>(),
        [1],
        "older than all that it knows"
    );
    assert_eq!(listing.authentic, None);
    let mut strict = World::requiring(RequireMac::Always);
    strict.store = world.store.clone();
    strict.restart();
    assert_eq!(strict.steps().await, Vec::<u64>::new());
}

/// Another home node, which has not heard what came before, comes late.
#[tokio::test(start_paused = true)]
async fn a_second_publisher_leaves_the_record_that_is_there() {
    let mut world = World::new(0, Packing::None);
    let saved = world.save_full(1..=2).await;
    let before = world.provenance(2).await;
    let late = Authorship {
        predecessor: Some(DurableStep {
            run: world.run,
            step: Step::new(1),
            manifest: saved[1].manifest.name(),
        }),
        ..by_job()
    };
    world.publish(&saved[1], &late).await.unwrap();
    assert_eq!(world.provenance(2).await, before);
}

#[tokio::test(start_paused = true)]
async fn without_the_jobs_key_nothing_with_a_mac_is_offered_and_it_is_said() {
    let mut world = World::new(0, Packing::None);
    world.save_full(1..=1).await;
    let owner = Owner::of_token(TOKEN);
    let trust = Trust::Nothing { owner };
    let listing = world.trickle.list(&job(), None, &trust).await.unwrap();
    assert!(listing.manifests.is_empty());
    let aside = &listing.set_aside[0];
    assert_eq!(aside.cause, SetAsideCause::Unchecked);
    assert!(aside.reason.contains("--token-file"), "{aside:?}");
}

#[cfg(feature = "moved")]
mod moved {
    //! Records that a C library takes apart.

    use storaged_codec::digest;
    use storaged_wire::IncrementIndex;

    use super::*;

    const INDEX: &str = "storaged.increment.0";

    /// The second step has records of content that moved.
    async fn saved() -> (World, Saved) {
        let mut world = World::over_a_link(8, Packing::None, 2 << 20);
        let bytes = noise(3, 6 * CHUNK as usize);
        let (first, _) = world.save(1, bytes.clone(), None).await;
        let moved = [&b"inserted"[..], &bytes].concat();
        let (second, copied) = world.save(2, moved, Some(&first)).await;
        assert!(chunks(increment(&copied), Kind::Moved) >= 4);
        (world, second)
    }

    async fn not_taken_apart(world: &mut World, second: &Saved, trust: Trust) {
        let fault = world.fetch_believing(second, trust).await.unwrap_err();
        assert!(matches!(fault, DurableFault::Unproven(_)), "{fault:?}");
        assert!(fault.to_string().contains("VCDIFF"), "{fault}");
    }

    #[tokio::test(start_paused = true)]
    async fn they_are_read_for_their_job_alone() {
        let (mut world, second) = saved().await;
        world.comes_back(&second).await;
        let owner = Owner::of_token(TOKEN);
        not_taken_apart(&mut world, &second, Trust::Nothing { owner }).await;
        not_taken_apart(&mut world, &second, Trust::Anything).await;
        world.comes_back(&second).await;
        assert_eq!(world.aside().await, [], "nothing is wrong with it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_was_replaced_together_with_its_digest_is_not_taken_apart() {
        let (mut world, second) = saved().await;
        let mut records = Vec::new();
        let at = object_of(2, "__0_0.increment");
        world
            .change(&at, |bytes| {
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
                records = bytes.clone();
            })
            .await;
        world
            .change(&object_of(2, INDEX), |bytes| {
                let mut index = IncrementIndex::from_object(bytes).unwrap();
                let mut from = 0;
                for (end, known) in index.ends.iter().zip(&mut index.digests) {
                    *known = digest(&records[from..*end as usize]);
                    from = *end as usize;
                }
                *bytes = index.to_object();
            })
            .await;
        not_taken_apart(&mut world, &second, of_job()).await;
        // Without a MAC at all neither.
        world.gone(&object_of(2, "storaged.provenance")).await;
        not_taken_apart(&mut world, &second, of_job()).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_configuration_that_wants_no_mac_reads_them_without_one() {
        let (mut world, second) = saved().await;
        world.gone(&object_of(2, "storaged.provenance")).await;
        world.limits.require_mac = RequireMac::Never;
        world.restart();
        world.comes_back(&second).await;
    }
}
