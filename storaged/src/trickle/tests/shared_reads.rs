//! Shards of other nodes are read together with peers, whoever they are: what they give is checked.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::super::{FellowError, Fellows};
use super::*;

/// What the one peer there is gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gives {
    /// What the tier has.
    TheBytes,
    /// As many others.
    Lies,
}

/// Many peers, so that few pieces are this node's own.
struct Peer {
    me: NodeName,
    gives: Gives,
    reads: Trickle,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "peers that give {:?}", self.gives)
    }
}

#[async_trait]
impl Fellows for Peer {
    fn me(&self) -> &NodeName {
        &self.me
    }

    fn up(&self) -> Vec<NodeName> {
        (1..40)
            .map(|index| NodeName::new(format!("peer-{index}")).unwrap())
            .collect()
    }

    async fn ask(&self, _: &NodeName, piece: Bytes, bytes: u64) -> Result<Bytes, FellowError> {
        match self.gives {
            Gives::Lies => Ok(Bytes::from(vec![0xAB; bytes as usize])),
            Gives::TheBytes => {
                let given = self.reads.read_for_peer(&piece).await;
                let given = given.map_err(|error| FellowError(error.into()))?;
                Ok(given.bytes())
            }
        }
    }
}

impl World {
    /// From now on this node shares its reads with peers that do this.
    pub(super) fn with_peers(&mut self, me: &str, gives: Gives) {
        let trickle = || Trickle::new(self.store.clone(), self.memory.clone(), self.limits);
        let peer = |gives, reads| {
            let me = NodeName::new(me).unwrap();
            Arc::new(Peer { me, gives, reads })
        };
        // The peers' own reads: they pass on, and ask nobody.
        let theirs = trickle().reading_with(peer(Gives::Lies, trickle()));
        self.trickle = trickle().reading_with(peer(gives, theirs));
    }

    async fn sets_nothing_aside(&self) {
        let listed = self.trickle.list(&self.job, None, &of_job()).await.unwrap();
        assert!(listed.set_aside.is_empty(), "{:?}", listed.set_aside);
    }
}

/// What a node reads that shares its reads with peers: what is saved in every form.
async fn saved_beside(packing: Packing, me: &str, gives: Gives) -> (World, Vec<Saved>) {
    let (mut world, saved) = saved(packing).await;
    world.with_peers(me, gives);
    (world, saved)
}

/// A chain of every form: a full copy, plain or packed, and an increment on it.
async fn saved(packing: Packing) -> (World, Vec<Saved>) {
    let mut world = World::new(4, packing);
    let (full, _) = world
        .save(1, noise(1, 5 * CHUNK as usize + 100), None)
        .await;
    let (next, copied) = world.save(2, trained(&full.bytes, 2), Some(&full)).await;
    assert!(copied.increment.is_some());
    (world, vec![full, next])
}

#[tokio::test(start_paused = true)]
async fn shards_of_other_nodes_come_from_peers_in_every_form() {
    for packing in [Packing::None, Packing::Zstd] {
        let (mut world, saved) = saved_beside(packing, "n9", Gives::TheBytes).await;
        for step in &saved {
            let before = world.trickle.passed_on().got;
            world.comes_back(step).await;
            assert!(world.trickle.passed_on().got > before, "{packing:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_nodes_own_shard_is_read_by_itself() {
    let (mut world, saved) = saved_beside(Packing::None, "n0", Gives::Lies).await;
    for step in &saved {
        world.comes_back(step).await;
    }
    assert_eq!(world.trickle.passed_on().got, 0);
}

/// A step must not be set aside by what a peer says.
#[tokio::test(start_paused = true)]
async fn wrong_bytes_of_a_peer_are_found_and_read_from_the_tier_instead() {
    for packing in [Packing::None, Packing::Zstd] {
        let (mut world, saved) = saved_beside(packing, "n9", Gives::Lies).await;
        for step in &saved {
            world.comes_back(step).await;
            // Whoever was believed a moment ago is asked again.
            world.comes_back(step).await;
        }
        assert!(world.trickle.passed_on().got > 0);
        world.sets_nothing_aside().await;
    }
}

/// As when a launcher kills a rank in the middle of a restore.
#[tokio::test(start_paused = true)]
async fn a_restore_that_nobody_waits_for_any_more_says_nothing_against_the_tier() {
    for gone_after in [Duration::ZERO, Duration::from_millis(500)] {
        let (mut world, saved) = saved(Packing::None).await;
        let slow = Arc::new(store::Throttled::new(world.store.clone(), 100_000));
        world.trickle = Trickle::new(slow, world.memory.clone(), world.limits);
        let slot = world.slot(&vec![0; saved[0].bytes.len()]);
        let trust = of_job();
        let fetch = world
            .trickle
            .fetch(&saved[0].manifest, RANK, slot, &[], &trust);
        let goes = async {
            tokio::time::sleep(gone_after).await;
            world.memory.drop_slot(slot);
        };
        let (fetched, ()) = futures::future::join(fetch, goes).await;
        let fetched = fetched.map_err(DurableFault::from);
        assert!(
            matches!(fetched, Err(DurableFault::Local(_))),
            "{fetched:?}"
        );
        world.sets_nothing_aside().await;
        world.comes_back(&saved[0]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_rate_of_copies_is_not_that_of_a_restart() {
    let mut world = World::over_a_link(0, Packing::None, 100_000);
    let (saved, _) = world.save(1, noise(1, 30 * CHUNK as usize), None).await;
    let began = Instant::now();
    world.comes_back(&saved).await;
    // The table of digests is read beside the copies.
    assert!(
        began.elapsed() < Duration::from_millis(100),
        "{:?}",
        began.elapsed()
    );
}
