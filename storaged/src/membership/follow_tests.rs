//! When a follower looks: at what is in sight, and at the registry. Under simulated time.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::tests::{following, places, sight, three_in_a_registry};
use super::*;

const POLL: Duration = Duration::from_secs(60);

/// The node of the first of three places, which looks once a minute and gives a place up after ten seconds.
struct Follower {
    sight: watch::Sender<Sight>,
    changes: mpsc::Receiver<Change>,
    registry: Registry,
}

impl Follower {
    async fn start() -> Self {
        let (registry, roster) = three_in_a_registry().await;
        let node = Following {
            registry: registry.clone(),
            poll: POLL,
            ..following(&roster, "a")
        };
        let (in_sight, seen) = watch::channel(sight(&["b", "c"]));
        let (changes, received) = mpsc::channel(4);
        tokio::spawn(follow(node, seen, changes));
        Self {
            sight: in_sight,
            changes: received,
            registry,
        }
    }

    /// The places once the follower has changed them, or heard that they are others.
    async fn next_places(&mut self) -> Vec<String> {
        match self.changes.recv().await {
            Some(Change::Roster(roster)) => places(&roster),
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
