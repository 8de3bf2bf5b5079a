//! The roster's rules, and nodes that use one registry at once, under simulated time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use storaged_wire::NodeName;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::follow::Absences;
use super::*;
use crate::net::PeerAddress;
use crate::trickle::store::{FakeStore, Store};

pub(super) fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

pub(super) fn arrival(node: &str) -> Arrival {
    Arrival {
        node: name(node),
        address: "10.0.0.1:9300".parse().unwrap(),
        failure_domain: None,
    }
}

/// What a node's arrival makes of a roster.
pub(super) fn after(roster: &Roster, node: &str) -> Roster {
    match roster.arrive(&arrival(node)) {
        Arrived::Propose(next) => *next,
        other => panic!("{node}: {other:?}"),
    }
}

pub(super) fn full(nodes: &[&str]) -> Roster {
    let empty = Roster::empty("c".into(), nodes.len());
    nodes
        .iter()
        .fold(empty, |roster, node| after(&roster, node))
}

pub(super) fn places(roster: &Roster) -> Vec<String> {
    let line = |place: &Place| {
        let node = place.node.as_ref().map_or("-", |node| node.as_str());
        format!("{}={node}/{}", place.name, place.term)
    };
    roster.places.iter().map(line).collect()
}

pub(super) fn lost(roster: &Roster, place: &str) -> Roster {
    roster
        .vacated(&name(place), Comeback::Allowed, "lost")
        .unwrap()
}

#[test]
fn places_are_given_once_all_have_come_and_all_at_once() {
    let two = full(&["b", "a", "c"]);
    assert_eq!(places(&two), ["a=a/1", "b=b/1", "c=c/1"]);
    let first = after(&Roster::empty("c".into(), 3), "b");
    assert!(first.places.is_empty());
    let waits = Arrived::Waiting {
        there: 1,
        wanted: 3,
    };
    assert_eq!(first.arrive(&arrival("b")), waits);
    assert_eq!(two.epoch, 3);
    assert_eq!(two.arrive(&arrival("a")), Arrived::Placed(name("a")));
    assert_eq!(two.arrive(&arrival("d")), Arrived::Spare);
}

#[test]
fn a_spare_takes_a_place_and_the_groups_stay() {
    let before = full(&["a", "b", "c"]);
    let after_spare = after(&lost(&before, "b"), "d");
    assert_eq!(places(&after_spare), ["a=a/1", "b=d/2", "c=c/1"]);
    assert_eq!(after_spare.members(), before.members());
    let peers = after_spare.peers_of(&name("a"));
    let (place, node) = (&peers[0].name, &peers[0].node);
    assert_eq!((place.as_str(), node.as_str()), ("b", "d"));
    assert_eq!(after_spare.arrive(&arrival("b")), Arrived::Spare);
}

#[test]
fn who_was_thought_lost_takes_its_own_place_and_no_term_begins() {
    let both = lost(&lost(&full(&["a", "b", "c"]), "a"), "b");
    assert_eq!(places(&after(&both, "b")), ["a=-/1", "b=b/1", "c=c/1"]);
}

#[test]
fn who_was_replaced_or_removed_by_the_operator_gets_no_place_before_it_is_admitted() {
    let roster = full(&["a", "b", "c"]);
    let roster = roster
        .vacated(&name("b"), Comeback::Refused, "broken")
        .unwrap();
    assert_eq!(roster.arrive(&arrival("b")), Arrived::Dismissed);
    let both = roster.vacated(&name("c"), Comeback::Refused, "broken");
    assert!(
        matches!(both, Err(ChangeError::AnotherVacant { .. })),
        "{both:?}"
    );
    let roster = lost(&after(&roster, "d"), "c");
    assert_eq!(places(&roster), ["a=a/1", "b=d/2", "c=-/1"]);
    assert_eq!(
        roster.arrive(&arrival("b")),
        Arrived::Dismissed,
        "nor another one"
    );
    let admitted = roster.admitted(&name("b")).unwrap();
    assert_eq!(places(&after(&admitted, "b")), ["a=a/1", "b=d/2", "c=b/2"]);
    let never = roster.admitted(&name("d"));
    assert_eq!(never, Err(ChangeError::NotDismissed(name("d"))));
    // There were to be more places: the one that is removed must not come back as one of them.
    let removed = full(&["a", "b", "c"])
        .resized(4)
        .unwrap()
        .removed(&name("c"))
        .unwrap();
    assert_eq!(
        (removed.size, removed.arrive(&arrival("c"))),
        (2, Arrived::Dismissed)
    );
}

#[test]
fn a_spare_prefers_a_place_of_its_failure_domain() {
    let in_rack = |node: &str, rack: &str| Arrival {
        failure_domain: Some(rack.into()),
        ..arrival(node)
    };
    let mut roster = Roster::empty("c".into(), 3);
    for (node, rack) in [("a", "r1"), ("b", "r2"), ("c", "r3")] {
        let Arrived::Propose(next) = roster.arrive(&in_rack(node, rack)) else {
            panic!("it comes");
        };
        roster = *next;
    }
    let roster = lost(&lost(&roster, "a"), "c");
    let Arrived::Propose(next) = roster.arrive(&in_rack("d", "r3")) else {
        panic!("it takes one");
    };
    assert_eq!(places(&next), ["a=-/1", "b=b/1", "c=d/2"]);
}

#[test]
fn a_spare_prefers_a_place_that_shares_levels_with_it_and_other_releases_do_not_read_them() {
    let in_domain = |node: &str, domain: &str| Arrival {
        failure_domain: Some(domain.into()),
        ..arrival(node)
    };
    let mut roster = Roster::empty("c".into(), 3);
    for (node, domain) in [("a", "z1/r1"), ("b", "z2/r1"), ("c", "z2/r2")] {
        let Arrived::Propose(next) = roster.arrive(&in_domain(node, domain)) else {
            panic!("it comes");
        };
        roster = *next;
    }
    let roster = lost(&lost(&lost(&roster, "a"), "b"), "c");
    for (domain, taken) in [
        ("z2/r2", "c=d/2"),
        ("z2/r7", "b=d/2"),
        ("z1/r2", "a=d/2"),
        ("z3/r1", "a=d/2"),
    ] {
        let Arrived::Propose(next) = roster.arrive(&in_domain("d", domain)) else {
            panic!("it takes one");
        };
        assert!(
            places(&next).contains(&taken.to_owned()),
            "{domain}: {:?}",
            places(&next)
        );
        let record: serde_json::Value = serde_json::from_slice(&next.bytes()).unwrap();
        assert_eq!(record["version"], 4);
        assert_eq!(Roster::parse(&next.bytes()).unwrap(), *next);
    }
}

#[test]
fn a_cluster_grows_at_once_and_a_name_that_is_taken_is_not_given_twice() {
    let roster = after(&lost(&full(&["a", "b"]), "a"), "d");
    let roster = roster.resized(4).unwrap();
    let one = after(&roster, "a");
    assert_eq!(places(&one), ["a=d/2", "b=b/1"]);
    let both = after(&one, "e");
    let names: Vec<&str> = both.places.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names.len(), 4);
    assert!(names.contains(&"a") && names.contains(&"e"), "{names:?}");
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 4);
}

#[test]
fn what_cannot_be_changed_is_refused() {
    let roster = full(&["a", "b"]);
    let unknown = roster.removed(&name("x")).unwrap_err();
    assert!(unknown.to_string().contains("a, b"), "{unknown}");
    assert!(matches!(
        roster.resized(1),
        Err(ChangeError::Smaller { .. })
    ));
    let vacant = lost(&roster, "a");
    let again = vacant.vacated(&name("a"), Comeback::Allowed, "again");
    assert_eq!(again, Err(ChangeError::Vacant(name("a"))));
    let one = roster.removed(&name("a")).unwrap();
    assert_eq!(one.size, 1);
    assert_eq!(one.removed(&name("b")), Err(ChangeError::Last(name("b"))));
}

#[test]
fn a_record_comes_back_as_it_was_and_others_are_refused() {
    let roster = after(&lost(&full(&["a", "b", "c"]), "b"), "d")
        .resized(5)
        .unwrap();
    let roster = after(&roster, "e");
    assert_eq!(Roster::parse(&roster.bytes()).unwrap(), roster);
    let text = String::from_utf8(roster.bytes()).unwrap();
    let newer = text.replacen("\"version\": 1", "\"version\": 5", 1);
    assert!(matches!(
        Roster::parse(newer.as_bytes()),
        Err(RosterError::Version { got: 5 })
    ));
    let twice = text.replace("\"node\": \"d\"", "\"node\": \"a\"");
    assert!(matches!(
        Roster::parse(twice.as_bytes()),
        Err(RosterError::Inconsistent { .. })
    ));
    for wrong in ["", "{}", "[1]", "{\"version\": 1}"] {
        assert!(
            matches!(
                Roster::parse(wrong.as_bytes()),
                Err(RosterError::Form { .. })
            ),
            "{wrong}"
        );
    }
}

pub(super) fn registry() -> (Arc<FakeStore>, Registry) {
    let store = Arc::new(FakeStore::default());
    let shared: Arc<dyn Store> = store.clone();
    (store, Registry::new(Arc::new(ObjectRecords::new(shared))))
}

pub(super) fn entering(registry: &Registry, node: &str, size: usize) -> Entering {
    Entering {
        registry: registry.clone(),
        arrival: arrival(node),
        first: Roster::empty(format!("of {node}"), size),
        poll: Duration::from_secs(1),
        remembered: None,
        memory: None,
        geometry: None,
        presence: Arc::new(Nobody),
    }
}

/// Whoever is asked is not there.
#[derive(Debug)]
struct Nobody;

impl Presence for Nobody {
    fn answers<'a>(&'a self, _: &'a NodeName, _: &'a PeerAddress) -> BoxFuture<'a, bool> {
        Box::pin(async { false })
    }
}

/// Whoever is asked is there.
#[derive(Debug)]
struct Everybody;

impl Presence for Everybody {
    fn answers<'a>(&'a self, _: &'a NodeName, _: &'a PeerAddress) -> BoxFuture<'a, bool> {
        Box::pin(async { true })
    }
}

/// Nodes that start at once, each with an idea of its own of what the cluster is called.
#[tokio::test(start_paused = true)]
async fn of_many_that_come_at_once_each_gets_a_place_of_one_cluster() {
    let (_, registry) = registry();
    let mut entered = Vec::new();
    for node in ["a", "b", "c", "d", "e"] {
        let entering = entering(&registry, node, 5);
        entered.push(tokio::spawn(async move {
            enter(&entering, |_| ()).await.unwrap()
        }));
    }
    let mut places = BTreeSet::new();
    let mut clusters = BTreeSet::new();
    for one in entered {
        let Entered { roster, place } = one.await.unwrap();
        assert_eq!(roster.epoch, 5);
        places.insert(place.to_string());
        clusters.insert(roster.cluster);
    }
    assert_eq!(
        (places.len(), clusters.len()),
        (5, 1),
        "{places:?} {clusters:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn two_spares_do_not_take_one_place() {
    let (registry, _) = three_in_a_registry().await;
    let spares = ["d", "e"].map(|node| {
        let entering = entering(&registry, node, 3);
        tokio::spawn(async move { enter(&entering, |_| ()).await.unwrap().place })
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(spares.iter().all(|spare| !spare.is_finished()));
    for place in ["b", "c"] {
        let newest = registry.newest().await.unwrap().unwrap();
        registry.propose(&lost(&newest, place)).await.unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
    }
    let [one, other] = spares;
    let taken = BTreeSet::from([one.await.unwrap(), other.await.unwrap()]);
    assert_eq!(taken, BTreeSet::from([name("b"), name("c")]));
}

#[tokio::test]
async fn a_registry_that_has_gone_back_is_not_followed() {
    let (_, registry) = registry();
    let roster = full(&["a", "b"]);
    assert!(matches!(
        registry.confirm(&roster).await,
        Err(RegistryError::GoneBack { .. })
    ));
    registry.propose(&roster).await.unwrap();
    registry.confirm(&roster).await.unwrap();
    let other = Roster {
        change: "another history".into(),
        ..roster.clone()
    };
    let gone_back = registry.confirm(&other).await.unwrap_err();
    assert!(gone_back.to_string().contains("epoch 2"), "{gone_back}");
    assert_eq!(registry.propose(&other).await.unwrap(), Proposal::Outrun);
    assert_eq!(
        registry.propose(&roster).await.unwrap(),
        Proposal::Taken,
        "it is its own"
    );
}

/// A registry in which three nodes have come, one after the other.
pub(super) async fn three_in_a_registry() -> (Registry, Roster) {
    let (_, registry) = registry();
    let mut roster = Roster::empty("c".into(), 3);
    for node in ["a", "b", "c"] {
        roster = after(&roster, node);
        assert_eq!(registry.propose(&roster).await.unwrap(), Proposal::Taken);
    }
    (registry, roster)
}

pub(super) fn following(roster: &Roster, place: &str) -> Following {
    Following {
        registry: registry().1,
        arrival: arrival(place),
        place: name(place),
        roster: roster.clone(),
        geometry: None,
        poll: Duration::from_secs(1),
        replace_after: Some(Duration::from_secs(10)),
        is_news: false,
        passed: Vec::new(),
        is_doubtful: false,
        news: Arc::new(Notify::new()),
        going: Arc::new(Notify::new()),
        is_going: false,
    }
}

pub(super) fn sight(up: &[&str]) -> Sight {
    Sight {
        up: up.iter().map(|place| name(place)).collect(),
    }
}

/// Whom a node gives up after it has looked at this for so many seconds, one after the other.
fn given_up(following: &Following, looks: &[(&Sight, u64)]) -> Option<NodeName> {
    let mut absences = Absences::default();
    let mut now = Instant::now();
    for (sight, seconds) in looks {
        for _ in 0..*seconds {
            now += Duration::from_secs(1);
            absences.look(following, sight, now);
            let found = absences.to_give_up(following, sight, now);
            if found.is_some() {
                return found;
            }
        }
    }
    None
}

#[tokio::test(start_paused = true)]
async fn a_node_is_given_up_by_a_majority_that_has_missed_it_for_long_enough() {
    let roster = full(&["a", "b", "c", "d", "e"]);
    let node = following(&roster, "a");
    let (all, without) = (sight(&["b", "c", "d", "e"]), sight(&["b", "c", "d"]));
    assert_eq!(given_up(&node, &[(&all, 1), (&without, 9)]), None);
    assert_eq!(
        given_up(&node, &[(&all, 1), (&without, 12)]),
        Some(name("e"))
    );
    // It was there for a moment.
    assert_eq!(
        given_up(&node, &[(&all, 1), (&without, 9), (&all, 1), (&without, 9)]),
        None
    );
    // Of five, two are no majority.
    assert_eq!(given_up(&node, &[(&all, 1), (&sight(&["b"]), 600)]), None);
    // One that has never been in sight may still be booting.
    assert_eq!(given_up(&node, &[(&without, 60)]), None);
    assert_eq!(given_up(&node, &[(&without, 200)]), Some(name("e")));
    let by_hand = Following {
        replace_after: None,
        ..following(&roster, "a")
    };
    assert_eq!(given_up(&by_hand, &[(&all, 1), (&without, 600)]), None);
}

#[tokio::test(start_paused = true)]
async fn the_first_in_sight_gives_up_and_the_next_only_if_it_does_not() {
    let roster = full(&["a", "b", "c", "d", "e"]);
    let node = following(&roster, "c");
    let (all, without) = (sight(&["a", "b", "d", "e"]), sight(&["a", "b", "d"]));
    assert_eq!(given_up(&node, &[(&all, 1), (&without, 13)]), None);
    assert_eq!(
        given_up(&node, &[(&all, 1), (&without, 20)]),
        Some(name("e"))
    );
}

#[tokio::test(start_paused = true)]
async fn whoever_stood_still_itself_has_seen_nobody_missing() {
    let roster = full(&["a", "b", "c"]);
    let node = following(&roster, "a");
    let (all, without) = (sight(&["b", "c"]), sight(&["b"]));
    let mut absences = Absences::default();
    let began = Instant::now();
    absences.look(&node, &all, began);
    absences.look(&node, &without, began + Duration::from_secs(1));
    let woken = began + Duration::from_secs(60);
    absences.look(&node, &without, woken);
    assert_eq!(absences.to_give_up(&node, &without, woken), None);
}

/// A follower whose registry fails in the middle of taking its place again tells the driver all the same, later.
#[tokio::test(start_paused = true)]
async fn a_node_takes_its_place_again_and_hears_when_another_has_it() {
    let (registry, roster) = three_in_a_registry().await;
    let node = Following {
        registry: registry.clone(),
        ..following(&roster, "b")
    };
    let (_sight, seen) = watch::channel(sight(&["a", "c"]));
    let (changes, mut received) = mpsc::channel(4);
    tokio::spawn(follow(node, seen, changes));
    registry.propose(&lost(&roster, "b")).await.unwrap();
    let Some(Change::Roster { roster: own, .. }) = received.recv().await else {
        panic!("it has its place");
    };
    assert_eq!(places(&own), ["a=a/1", "b=b/1", "c=c/1"]);
    let replaced = own
        .vacated(&name("b"), Comeback::Refused, "broken")
        .unwrap();
    registry.propose(&replaced).await.unwrap();
    let Some(Change::PlaceTaken(_)) = received.recv().await else {
        panic!("it has none");
    };
    assert!(
        received.recv().await.is_none(),
        "it follows nobody any more"
    );
}

/// The registry is away while a node takes a place, is seen and is lost: it is given up as one that was there, not as one that boots.
#[tokio::test(start_paused = true)]
async fn a_node_that_was_seen_between_two_looks_has_come() {
    let (registry, roster) = three_in_a_registry().await;
    let node = Following {
        registry: registry.clone(),
        ..following(&roster, "a")
    };
    let (in_sight, seen) = watch::channel(sight(&["b"]));
    let (changes, mut received) = mpsc::channel(4);
    let began = Instant::now();
    tokio::spawn(follow(node, seen, changes));
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    in_sight.send_replace(sight(&["b", "c"]));
    tokio::time::sleep(Duration::from_millis(100)).await;
    in_sight.send_replace(sight(&["b"]));
    let Some(Change::Roster {
        roster: without, ..
    }) = received.recv().await
    else {
        panic!("it is given up");
    };
    assert_eq!(places(&without), ["a=a/1", "b=b/1", "c=-/1"]);
    let took = began.elapsed();
    assert!(
        took < Duration::from_secs(20),
        "{took:?}, as if it had yet to come"
    );
}

/// A node that goes for good waits for no other place to be filled: it is not there either way.
#[tokio::test(start_paused = true)]
async fn a_node_that_goes_gives_up_its_place_beside_another_vacant_one() {
    let (registry, roster) = three_in_a_registry().await;
    let going = Arc::new(Notify::new());
    let node = Following {
        registry: registry.clone(),
        going: going.clone(),
        ..following(&roster, "b")
    };
    // It has not heard of this yet.
    let without_c = lost(&roster, "c");
    registry.propose(&without_c).await.unwrap();
    let (_sight, seen) = watch::channel(sight(&["a"]));
    let (changes, mut received) = mpsc::channel(4);
    let began = Instant::now();
    tokio::spawn(follow(node, seen, changes));
    going.notify_one();
    let Some(Change::PlaceTaken(seen)) = received.recv().await else {
        panic!("it has none");
    };
    assert!(
        began.elapsed() < Duration::from_secs(1),
        "not at its next look"
    );
    assert_eq!(seen.epoch, without_c.epoch + 1);
    assert_eq!(seen.change, "b no longer fills b: it was drained");
    let newest = registry.newest().await.unwrap().unwrap();
    assert_eq!(places(&newest), ["a=a/1", "b=-/1", "c=-/1"]);
    assert_eq!(newest.arrive(&arrival("b")), Arrived::Dismissed);
}

/// A rack that is mistyped must not take the groups of all others away.
#[tokio::test(start_paused = true)]
async fn a_node_with_which_nothing_could_be_coded_gets_no_place() {
    let (registry, roster) = three_in_a_registry().await;
    registry.propose(&lost(&roster, "c")).await.unwrap();
    let in_rack_of_a = Entering {
        arrival: Arrival {
            failure_domain: Some("a".into()),
            ..arrival("d")
        },
        geometry: Some(storaged_wire::Geometry::new(2, 1).unwrap()),
        ..entering(&registry, "d", 3)
    };
    let mut said = String::new();
    let waits = enter(&in_rack_of_a, |waits| said = waits.to_string());
    assert!(
        tokio::time::timeout(Duration::from_secs(60), waits)
            .await
            .is_err()
    );
    assert!(said.contains("no checkpoint could be coded"), "{said}");
    assert_eq!(registry.newest().await.unwrap().unwrap().epoch, 4);
}

/// A bucket that holds another cluster's rosters, or older ones: the node goes by what it has seen.
#[tokio::test(start_paused = true)]
async fn a_node_that_is_started_again_believes_no_older_and_no_other_registry() {
    let known = full(&["a", "b", "c"]);
    let other = Roster {
        cluster: "another".into(),
        ..lost(&known, "b")
    };
    for found in [None, Some(full(&["a", "b"])), Some(other)] {
        let (_, registry) = registry();
        if let Some(found) = &found {
            registry.propose(found).await.unwrap();
        }
        let again = Entering {
            remembered: Some(known.clone()),
            ..entering(&registry, "a", 3)
        };
        let mut said = String::new();
        let entered = enter(&again, |waits| said = waits.to_string())
            .await
            .unwrap();
        assert_eq!((entered.roster, entered.place), (known.clone(), name("a")));
        assert!(said.contains("gone back"), "{said}");
        let epoch = registry.newest().await.unwrap().map(|it| it.epoch);
        assert_eq!(epoch, found.map(|it| it.epoch), "nothing is proposed");
    }
}

#[tokio::test]
async fn what_is_no_epoch_is_passed_over_and_one_under_a_wrong_name_is_refused() {
    let (store, registry) = registry();
    let roster = full(&["a", "b"]);
    registry.propose(&roster).await.unwrap();
    let put = async |key: String, bytes: Vec<u8>| {
        store
            .put_new(&key.parse().unwrap(), bytes.into())
            .await
            .unwrap();
    };
    put("epochs/.nfs0001".into(), b"x".to_vec()).await;
    put("epochs/0.tmp".into(), b"x".to_vec()).await;
    assert_eq!(registry.newest().await.unwrap(), Some(roster.clone()));
    let wrong = format!("epochs/{:020}", u64::MAX - roster.epoch - 1);
    put(wrong.clone(), roster.bytes()).await;
    let error = registry.newer_than(&roster).await.unwrap_err();
    assert!(error.to_string().contains(&wrong), "{error}");
}

/// It has moved, or another machine has its name: which of the two is asked at the old address.
#[tokio::test]
async fn a_place_is_not_taken_from_a_machine_that_answers_with_the_same_certificate() {
    let (_, registry) = registry();
    registry.propose(&full(&["a", "b", "c"])).await.unwrap();
    let there = arrival("b").address;
    let here: PeerAddress = "10.9.9.9:9300".parse().unwrap();
    let again = Entering {
        arrival: Arrival {
            address: here.clone(),
            ..arrival("b")
        },
        presence: Arc::new(Everybody),
        ..entering(&registry, "b", 3)
    };
    let epoch = registry.newest().await.unwrap().unwrap().epoch;
    let twin = enter(&again, |_| ()).await.unwrap_err();
    assert_eq!((twin.node.as_str(), &twin.address), ("b", &there));
    assert!(twin.to_string().contains(&there.to_string()), "{twin}");
    let newest = registry.newest().await.unwrap().unwrap();
    assert_eq!(newest.epoch, epoch, "nothing was proposed");
    let moved = Entering {
        presence: Arc::new(Nobody),
        ..again
    };
    let entered = enter(&moved, |_| ()).await.unwrap();
    assert_eq!(entered.roster.place(&name("b")).unwrap().address, here);
}

/// Machines that were ordered and never come must not keep those out that have come.
#[tokio::test(start_paused = true)]
async fn a_cluster_that_is_to_be_much_larger_grows_by_the_machines_that_come() {
    let (registry, roster) = three_in_a_registry().await;
    registry
        .propose(&roster.resized(100).unwrap())
        .await
        .unwrap();
    let comers = ["d", "e"].map(|node| {
        let entering = entering(&registry, node, 3);
        tokio::spawn(async move { enter(&entering, |_| ()).await.unwrap() })
    });
    for (comer, node) in comers.into_iter().zip(["d", "e"]) {
        assert_eq!(comer.await.unwrap().place, name(node));
    }
    let newest = registry.newest().await.unwrap().unwrap();
    assert_eq!((newest.size, newest.places.len()), (100, 5));
    assert!(newest.arriving.is_empty() && newest.vacant().count() == 0);
    assert_eq!(newest.epoch, 7, "both at once: {}", newest.change);
    // The next one comes later, and gets its place too.
    let late = enter(&entering(&registry, "f", 3), |_| ()).await.unwrap();
    assert_eq!((late.place, late.roster.places.len()), (name("f"), 6));
}

/// A cluster that begins waits for all of its nodes: it would have too few to code with.
#[tokio::test(start_paused = true)]
async fn a_cluster_that_begins_waits_for_all_of_its_nodes() {
    let (_, registry) = registry();
    let first = entering(&registry, "a", 3);
    let waits = enter(&first, |_| ());
    let waited = tokio::time::timeout(Duration::from_secs(600), waits).await;
    assert!(waited.is_err());
    let newest = registry.newest().await.unwrap().unwrap();
    assert_eq!((newest.epoch, newest.places.len()), (1, 0));
}
