//! On which threads copies compute: without these threads nothing of a copy is computed anywhere.

use super::*;
use crate::cores::WorkerThreads;
use crate::pool::Pool;
use crate::trickle::TrickleThreads;

fn threads() -> TrickleThreads {
    TrickleThreads {
        short: Pool::start(1).unwrap(),
        long: Pool::start_named("tier", &WorkerThreads::Anywhere(1)).unwrap(),
    }
}

fn without_short() -> Option<TrickleThreads> {
    Some(TrickleThreads {
        short: Pool::closed(),
        ..threads()
    })
}

fn without_long() -> Option<TrickleThreads> {
    Some(TrickleThreads {
        long: Pool::closed(),
        ..threads()
    })
}

impl World {
    pub(super) async fn upload(
        &self,
        saved: &Saved,
        base: Option<&Saved>,
    ) -> Result<Copied, DurableFault> {
        let base = base.map(Saved::base);
        let copied = self.trickle.upload(
            &saved.manifest,
            RANK,
            &saved.shard,
            base.as_ref(),
            Leftovers::Perhaps,
        );
        copied.await
    }
}

#[tokio::test]
async fn reads_digests_and_zstd_are_computed_on_the_codecs_threads() {
    for packing in [Packing::None, Packing::Zstd] {
        let mut world = World::new(0, packing);
        let bytes = noise(3, 300_000);
        let saved = world.seal(10, bytes);
        world.trickle.threads = without_short();
        assert!(world.upload(&saved, None).await.is_err(), "{packing:?}");
        world.trickle.threads = without_long();
        world.copy(&saved, None).await;
        world.comes_back(&saved).await;
        world.trickle.threads = without_short();
        assert!(world.fetch(&saved).await.is_err(), "{packing:?}");
    }
}

#[tokio::test]
async fn increments_are_made_on_threads_of_their_own_and_put_together_on_the_codecs() {
    let mut world = World::new(4, Packing::None);
    world.trickle.threads = Some(threads());
    let first = noise(5, 400_000);
    let second = trained(&first, 1);
    let (full, _) = world.save(10, first, None).await;
    let saved = world.seal(20, second);
    world.trickle.threads = without_long();
    assert!(world.upload(&saved, Some(&full)).await.is_err());
    world.trickle.threads = Some(threads());
    assert!(world.copy(&saved, Some(&full)).await.increment.is_some());
    world.comes_back(&saved).await;
    world.trickle.threads = without_short();
    assert!(world.fetch(&saved).await.is_err());
}

#[tokio::test]
async fn what_waits_for_the_tier_keeps_nothing_short_waiting() {
    let mut world = World::new(0, Packing::None);
    world.trickle.threads = Some(threads());
    let name = || {
        std::thread::current()
            .name()
            .unwrap_or_default()
            .to_string()
    };
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let long = move || (wait.recv().is_ok(), name());
    let long = world.trickle.begin(long).await.unwrap();
    assert_eq!(world.trickle.compute(name).await.unwrap(), "codec-0");
    go.send(()).unwrap();
    assert_eq!(long.await.unwrap(), (true, "tier-0".into()));
}
