//! Whoever hears that a step is pinned can count on it, also if several nodes are asked for it or to let it go at once.

use storaged_core::{Input, RequestId};
use storaged_wire::local::{DurableWish, Keep, Reply, Role};
use storaged_wire::peer::PeerMessage;
use storaged_wire::pins::{NamespacePins, Pin};
use storaged_wire::{Owner, RefusalCode, Step};

use super::{pinned, request, with_a_pin, with_room};
use crate::cluster::{Cluster, Room};
use crate::testkit::{TOKEN, name, namespace};

/// One protected step, of a cluster in which nobody hears these nodes.
fn with_silent(nodes: impl IntoIterator<Item = usize>) -> Cluster {
    let mut cluster = with_room(Room::default());
    cluster.save_and_wait(DurableWish::Never);
    cluster.scene.unheard.extend(nodes);
    cluster
}

fn ask(cluster: &mut Cluster, node: usize, keep: Keep) -> RequestId {
    let reader = cluster.connect(node, Role::Reader);
    cluster.send(node, reader, request(1, keep))
}

/// For a minute two nodes are connected to others alone.
fn part(cluster: &mut Cluster, one: usize, other: usize) {
    let until = cluster.now + 60_000;
    for (from, to) in [(one, other), (other, one)] {
        cluster.part(from, to);
        cluster.link_of(from, to).cut_until = until;
    }
}

fn is_granted(cluster: &Cluster, id: RequestId) -> bool {
    matches!(cluster.answer(id), Some(Reply::Removed { .. }))
}

fn refused_with(cluster: &Cluster, id: RequestId) -> RefusalCode {
    match cluster.answer(id) {
        Some(Reply::Refused(refusal)) => refusal.code,
        other => panic!("{other:?}"),
    }
}

/// The two nodes that are asked cannot tell each other; others tell the second one of what the first one was asked for.
#[test]
fn a_pin_that_a_node_has_only_heard_of_is_granted_once_that_node_has_asked_too() {
    let mut cluster = with_silent([0, 1, 5]);
    part(&mut cluster, 2, 3);
    let first = ask(&mut cluster, 3, Keep::Pin);
    cluster.run_for(9_900);
    assert!(cluster.answer(first).is_none(), "it is being decided");
    let second = ask(&mut cluster, 2, Keep::Pin);
    cluster.run_for(40_000);
    for id in [first, second] {
        assert_eq!(refused_with(&cluster, id), RefusalCode::TooManyLost);
    }
}

/// The first one hears from too few to decide; the second one does not.
#[test]
fn a_pin_that_another_node_has_found_to_hold_is_not_taken_back() {
    let mut cluster = with_silent([]);
    let until = cluster.now + 11_000;
    for node in [0, 1, 5] {
        cluster.link_of(node, 3).cut_until = until;
    }
    let first = ask(&mut cluster, 3, Keep::Pin);
    cluster.run_for(100);
    assert!(cluster.answer(first).is_none(), "it is being decided");
    let second = ask(&mut cluster, 2, Keep::Pin);
    cluster.run_for(100);
    assert!(is_granted(&cluster, second), "{:?}", cluster.answer(second));
    cluster.run_for(70_000);
    for step in 2..=3 {
        cluster.save_and_wait(DurableWish::Never);
        cluster.assert_all_hold([1, step]);
    }
    assert!(is_granted(&cluster, first), "{:?}", cluster.answer(first));
}

#[test]
fn a_pin_that_was_let_go_while_it_was_decided_is_not_granted() {
    let mut cluster = with_silent([5]);
    let first = ask(&mut cluster, 3, Keep::Pin);
    cluster.run_for(2_000);
    let second = ask(&mut cluster, 2, Keep::Unpin);
    cluster.run_for(20_000);
    assert_eq!(refused_with(&cluster, first), RefusalCode::Abandoned);
    assert!(is_granted(&cluster, second), "{:?}", cluster.answer(second));
}

/// All nodes hear that it was decided, and remember it with their memory.
#[test]
fn what_is_pinned_stays_so_whichever_node_is_asked_again_while_too_many_are_away() {
    let mut cluster = with_a_pin();
    cluster.end_daemon(2);
    cluster.start_after(0, 2);
    cluster.run_for(10_000);
    for node in [0, 1, 5] {
        cluster.end_daemon(node);
    }
    cluster.run_for(10_000);
    for node in [2, 3, 4] {
        pinned(&mut cluster, node, 1);
    }
}

/// Nobody says any more what has become of it.
#[test]
fn a_pin_whose_node_has_died_before_it_was_decided_is_decided_by_the_next_one_that_is_asked() {
    let mut cluster = with_silent([5]);
    ask(&mut cluster, 3, Keep::Pin);
    cluster.run_for(1_000);
    cluster.end_daemon(3);
    cluster.run_for(30_000);
    cluster.scene.unheard.clear();
    pinned(&mut cluster, 2, 1);
    cluster.start_after(0, 3);
    cluster.run_for(20_000);
    (0..4).for_each(|node| cluster.attach(node));
    for step in 2..=3 {
        cluster.save_and_wait(DurableWish::Never);
        cluster.assert_all_hold([1, step]);
    }
}

/// A third node is asked for it at the same moment, and hears from nobody for as long as it asks.
#[test]
fn a_granted_pin_is_not_undone_by_a_node_that_was_asked_at_the_same_moment() {
    let mut cluster = with_silent([]);
    part(&mut cluster, 2, 3);
    let until = cluster.now + 11_000;
    for node in [0, 1, 4, 5] {
        cluster.link_of(node, 3).cut_until = until;
    }
    ask(&mut cluster, 3, Keep::Pin);
    let granted = ask(&mut cluster, 2, Keep::Pin);
    cluster.run_for(100);
    assert!(
        is_granted(&cluster, granted),
        "{:?}",
        cluster.answer(granted)
    );
    cluster.run_for(90_000);
    for step in 2..=3 {
        cluster.save_and_wait(DurableWish::Never);
        let held = cluster.held(4).into_iter().map(|(step, _)| step);
        assert_eq!(held.collect::<Vec<_>>(), [1, step]);
    }
}

/// A node that knows nothing of doubts repeats the pin that it was asked to note.
#[test]
fn a_pin_that_too_few_have_noted_is_refused_beside_nodes_of_the_previous_version() {
    let mut cluster = with_silent([0, 1, 5]);
    let id = ask(&mut cluster, 3, Keep::Pin);
    cluster.run_for(2_000);
    assert!(cluster.answer(id).is_none(), "it is being decided");
    let pin = Pin {
        run: cluster.run(),
        step: Step::new(1),
        pinned: true,
        changes: 1,
        doubt: None,
    };
    let of = NamespacePins {
        namespace: namespace(),
        owner: Owner::of_token(TOKEN),
        pins: vec![pin],
    };
    let (from, message) = (name(4), PeerMessage::Pins(None, of));
    cluster.tell(3, Input::Message { from, message });
    cluster.run_for(20_000);
    assert_eq!(refused_with(&cluster, id), RefusalCode::TooManyLost);
}
