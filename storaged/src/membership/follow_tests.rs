//! When a follower looks: at what is in sight, and at the registry. Under simulated time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::tests::{after, entering, following, lost, name, places, sight, three_in_a_registry};
use super::*;

const POLL: Duration = Duration::from_secs(60);

/// The node of the first of three places, which looks once a minute and gives a place up after ten seconds.
struct Follower {
    sight: watch::Sender<Sight>,
    news: Arc<Notify>,
    changes: mpsc::Receiver<Change>,
    registry: Registry,
}

impl Follower {
    async fn start() -> Self {
        let (registry, roster) = three_in_a_registry().await;
        let news = Arc::new(Notify::new());
        let node = Following {
            registry: registry.clone(),
            poll: POLL,
            news: news.clone(),
            ..following(&roster, "a")
        };
        let (in_sight, seen) = watch::channel(sight(&["b", "c"]));
        let (changes, received) = mpsc::channel(4);
        tokio::spawn(follow(node, seen, changes));
        Self {
            sight: in_sight,
            news,
            changes: received,
            registry,
        }
    }

    /// The places once the follower has changed them, or heard that they are others.
    async fn next_places(&mut self) -> Vec<String> {
        match self.changes.recv().await {
            Some(Change::Roster { roster, .. }) => places(&roster),
            other => panic!("{other:?}"),
        }
    }

    async fn newest(&self) -> Vec<String> {
        let newest = self.registry.newest().await.expect("a registry");
        places(&newest.expect("a roster"))
    }
}

const WITHOUT_C: [&str; 3] = ["a=a/1", "b=b/1", "c=-/1"];

#[tokio::test(start_paused = true)]
async fn a_place_is_given_up_when_its_time_is_over_and_not_at_the_next_look() {
    let mut follower = Follower::start().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let lost = Instant::now();
    follower.sight.send_replace(sight(&["b"]));
    assert_eq!(follower.next_places().await, WITHOUT_C);
    let took = lost.elapsed();
    let expected = Duration::from_secs(10)..Duration::from_secs(11);
    assert!(expected.contains(&took), "{took:?}");
}

/// Its time begins anew.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_back_for_a_moment_has_not_been_missed() {
    let mut follower = Follower::start().await;
    follower.sight.send_replace(sight(&["b"]));
    tokio::time::sleep(Duration::from_secs(9)).await;
    follower.sight.send_replace(sight(&["b", "c"]));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let lost = Instant::now();
    follower.sight.send_replace(sight(&["b"]));
    assert_eq!(follower.next_places().await, WITHOUT_C);
    assert!(lost.elapsed() >= Duration::from_secs(10));
}

/// It was stopped for most of the time that is between two looks: the other one may have come back and gone again.
#[tokio::test(start_paused = true)]
async fn a_node_that_was_stopped_between_two_looks_gives_nobody_up_at_once() {
    let mut follower = Follower::start().await;
    tokio::time::sleep(Duration::from_secs(65)).await;
    follower.sight.send_replace(sight(&["b"]));
    tokio::time::sleep(Duration::from_secs(3)).await;
    tokio::time::advance(Duration::from_secs(50)).await;
    let woken = Instant::now();
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert_eq!(follower.newest().await, ["a=a/1", "b=b/1", "c=c/1"]);
    assert_eq!(follower.next_places().await, WITHOUT_C);
    assert!(woken.elapsed() >= Duration::from_secs(10));
}

/// A registry that cannot be used is not asked all the time for a place that is to be given up.
#[tokio::test(start_paused = true)]
async fn who_has_looked_in_vain_looks_again_after_its_poll() {
    let (_, roster) = three_in_a_registry().await;
    // Nothing lies there, so it has gone back, and nothing is proposed.
    let (store, registry) = tests::registry();
    let node = Following {
        registry,
        poll: POLL,
        ..following(&roster, "a")
    };
    let (in_sight, seen) = watch::channel(sight(&["b", "c"]));
    let (changes, mut received) = mpsc::channel(4);
    let began = Instant::now();
    tokio::spawn(follow(node, seen, changes));
    tokio::time::sleep(Duration::from_secs(1)).await;
    in_sight.send_replace(sight(&["b"]));
    let fault = received.recv().await;
    assert!(matches!(fault, Some(Change::Fault(Some(_)))), "{fault:?}");
    let took = began.elapsed();
    assert!(took < Duration::from_secs(12), "{took:?}: when it was due");
    let asked = store.requests();
    tokio::time::sleep(POLL - Duration::from_secs(1)).await;
    assert_eq!(store.requests(), asked, "not before its next look");
}

#[tokio::test(start_paused = true)]
async fn whoever_is_there_without_a_known_place_has_the_registry_looked_at() {
    let mut follower = Follower::start().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let newest = follower.registry.newest().await.unwrap().unwrap();
    follower
        .registry
        .propose(&lost(&newest, "b"))
        .await
        .unwrap();
    let told = Instant::now();
    follower.news.notify_one();
    assert_eq!(follower.next_places().await, ["a=a/1", "b=-/1", "c=c/1"]);
    let took = told.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
}

/// A machine that will have no place may knock all the time.
#[tokio::test(start_paused = true)]
async fn the_registry_is_not_looked_at_for_every_word_of_news() {
    for (poll, looks) in [(POLL, 9), (Duration::from_secs(2), 61)] {
        let (_, roster) = three_in_a_registry().await;
        let (store, registry) = tests::registry();
        let news = Arc::new(Notify::new());
        let node = Following {
            registry,
            poll,
            news: news.clone(),
            ..following(&roster, "a")
        };
        let (_sight, seen) = watch::channel(sight(&["b", "c"]));
        let (changes, _received) = mpsc::channel(4);
        tokio::spawn(follow(node, seen, changes));
        for _ in 0..300 {
            news.notify_one();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let asked = store.requests();
        assert!((looks / 2..=looks).contains(&asked), "{asked} in 30 s");
    }
}

/// Nodes of one registry have the same news at the same moment.
#[tokio::test(start_paused = true)]
async fn after_news_the_nodes_look_one_after_the_other() {
    let (_, roster) = three_in_a_registry().await;
    let now = Instant::now();
    let looked_at = now - POLL;
    let after = |place: &str| {
        let node = Following {
            poll: POLL,
            ..following(&roster, place)
        };
        node.looks_after_news(looked_at, now) - now
    };
    assert_eq!(after("a"), Duration::ZERO);
    assert_eq!(after("b"), POLL / 16 / 3);
    assert_eq!(after("c"), POLL / 16 * 2 / 3);
}

#[tokio::test(start_paused = true)]
async fn a_spare_takes_a_vacant_place_within_a_quarter_of_its_poll() {
    let (registry, _) = three_in_a_registry().await;
    let waits = Entering {
        poll: POLL,
        ..entering(&registry, "d", 3)
    };
    let entered = tokio::spawn(async move { enter(&waits, |_| ()).await });
    // Its next look is in 55 s.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let newest = registry.newest().await.unwrap().unwrap();
    registry.propose(&lost(&newest, "b")).await.unwrap();
    let vacant = Instant::now();
    let entered = entered.await.unwrap().unwrap();
    assert_eq!(entered.place, name("b"));
    let took = vacant.elapsed();
    assert!(took <= Duration::from_secs(15), "{took:?}");
}

/// Nodes that looked in between may have described steps in each of these epochs.
#[tokio::test(start_paused = true)]
async fn whoever_looks_late_hears_of_the_epochs_in_between() {
    for (count, first) in [(1, 4), (2, 4), (20, 16)] {
        let mut follower = Follower::start().await;
        let mut all = vec![follower.registry.newest().await.unwrap().unwrap()];
        for change in 0..count {
            let newest = all.last().expect("a roster");
            let next = match change % 2 {
                0 => lost(newest, "b"),
                _ => after(newest, "b"),
            };
            follower.registry.propose(&next).await.unwrap();
            all.push(next);
        }
        let Some(Change::Roster { roster, passed }) = follower.changes.recv().await else {
            panic!("no roster after {count} epochs");
        };
        assert_eq!(*roster, all[count]);
        let expected = all
            .iter()
            .filter(|it| (first..3 + count as u64).contains(&it.epoch));
        assert_eq!(passed, expected.map(Roster::passed).collect::<Vec<_>>());
    }
}

/// Its place was given up and it takes it again: the driver hears of both epochs.
#[tokio::test(start_paused = true)]
async fn whoever_takes_its_place_again_tells_of_the_epoch_before() {
    let mut follower = Follower::start().await;
    let newest = follower.registry.newest().await.unwrap().unwrap();
    let without = lost(&newest, "a");
    follower.registry.propose(&without).await.unwrap();
    let Some(Change::Roster { roster, passed }) = follower.changes.recv().await else {
        panic!("it keeps its place");
    };
    assert_eq!(places(&roster), ["a=a/1", "b=b/1", "c=c/1"]);
    assert_eq!(passed, [without.passed()]);
}
