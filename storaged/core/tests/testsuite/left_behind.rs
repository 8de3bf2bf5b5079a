//! The committed step that a run has gone on from, when a node with a part of it goes before anything newer is whole.

use storaged_wire::Step;
use storaged_wire::local::{DurableWish, Reply, Request};

use crate::cluster::{CHUNK, Cluster};
use crate::testkit::acquire_slot;

const STRIPES: u64 = 10;
const LENGTH: u64 = STRIPES * CHUNK;

/// The second step has committed, and those are gone that would code it. Each rank has opened these steps, and a new run goes on from one of
/// them.
fn goes_on_from(opened: &[u64]) -> Cluster {
    let mut cluster = Cluster::start_of(6, 2, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Never);
    let coding: Vec<usize> = (2..6)
        .filter(|node| !cluster.held(*node).is_empty())
        .collect();
    assert_eq!(coding.len(), 2);
    coding.iter().for_each(|node| cluster.kill(*node));
    cluster.run_for(5_000);
    cluster.save();
    cluster.run_until(5_000, "a commit", |cluster| {
        cluster.is_committed(0) && cluster.is_committed(1)
    });
    for step in opened {
        reads(&mut cluster, *step);
    }
    cluster.begin_again();
    cluster
}

fn reads(cluster: &mut Cluster, step: u64) {
    for node in 0..2 {
        cluster.assert_restores(node, step, [node as u32]);
    }
}

/// Its rank seals one step alone, of which no more comes, and needs another slot.
fn asks_for_one_slot_too_many(cluster: &mut Cluster, node: usize) {
    let trainer = cluster.trainer(node);
    let reply = cluster.ask(node, trainer, acquire_slot(LENGTH, 20_000));
    let Reply::SlotGranted { slot, .. } = reply else {
        panic!("no slot: {reply:?}");
    };
    let seal = Request::SealSlot {
        slot,
        step: Step::new(3),
        length: LENGTH,
    };
    cluster.ask(node, trainer, seal);
    cluster.ask(node, trainer, acquire_slot(LENGTH, 20_000));
}

/// The other node goes, and this one lacks room.
fn left_alone(mut cluster: Cluster) -> Cluster {
    cluster.kill(0);
    cluster.run_for(3_000);
    asks_for_one_slot_too_many(&mut cluster, 1);
    cluster
}

fn has_second(cluster: &Cluster) -> bool {
    cluster.held(1).iter().any(|(step, _)| *step == 2)
}

#[test]
fn it_stays_until_something_newer_is_whole() {
    let mut cluster = goes_on_from(&[2]);
    // As somebody does who compares it.
    reads(&mut cluster, 1);
    assert!(has_second(&left_alone(cluster)));
}

/// They may have looked at the first before the run began, or gone back to it.
#[test]
fn one_of_several_that_were_opened_stays_too() {
    assert!(has_second(&left_alone(goes_on_from(&[2, 1]))));
}

#[test]
fn one_that_nobody_opened_goes_where_others_were() {
    let mut cluster = goes_on_from(&[1]);
    reads(&mut cluster, 1);
    assert!(!has_second(&left_alone(cluster)));
}

/// The processes go on with what they have, or another node's shards were read.
#[test]
fn the_newest_of_the_run_before_stays_where_nothing_was_opened() {
    assert!(has_second(&left_alone(goes_on_from(&[]))));
}

/// The node does not come back, and each request has less patience than it takes.
#[test]
fn it_goes_when_saves_have_lacked_room_for_long() {
    let mut cluster = left_alone(goes_on_from(&[2]));
    let began = cluster.now;
    while has_second(&cluster) {
        let trainer = cluster.trainer(1);
        cluster.ask(1, trainer, acquire_slot(LENGTH, 2_000));
        assert!(cluster.now - began < 30_000, "saves have stopped");
    }
    assert!(cluster.now - began > 5_000, "it may come back");
}
