//! Committed steps that go for newer ones while nodes are away that would code them.

use storaged_wire::CheckpointState;
use storaged_wire::local::{CheckpointInfo, DurableWish, Reply, Request, Role};

use crate::cluster::{CHUNK, Cluster, Conduct, Room, SLOT};
use crate::testkit::acquire_slot;

const STRIPES: u64 = 10;
/// What a trainer waits before anything goes for it, and a tick.
const ASKED_MS: u64 = 2_200;
/// What it takes until a home node that does not answer is waited for no more, and a tick.
const AT_LAST_MS: u64 = 4_000;

/// Both coding nodes are gone, and the steps after `first` fill the slots of node 0, none of them protected.
fn with_full_slots(first: u64) -> Cluster {
    with_full_slots_in(first, Room::default())
}

fn with_full_slots_in(first: u64, room: Room) -> Cluster {
    let mut cluster = Cluster::start_with(2, 2, STRIPES, None, room);
    cluster.goes_back_to(first - 1);
    cluster.save_and_wait(DurableWish::Never);
    cluster.kill(2);
    cluster.kill(3);
    cluster.run_for(5_000);
    cluster.save();
    cluster.save();
    cluster.run_for(3_000);
    cluster
}

fn asks_for_slot(cluster: &mut Cluster) {
    let trainer = cluster.trainer(0);
    cluster.send(0, trainer, acquire_slot(STRIPES * CHUNK, 20_000));
}

fn holds(cluster: &Cluster, step: u64) -> bool {
    cluster.held(0).iter().any(|(of, _)| *of == step)
}

/// Home nodes that count its shard still could call the step protected at that moment. One that does not answer is not waited for
/// for good.
#[test]
fn a_step_goes_for_a_newer_one_when_home_nodes_do_not_count_it_any_more() {
    let mut waited = 0;
    for first in 1..6 {
        let mut cluster = with_full_slots(first);
        cluster.scene.unheard.insert(0);
        asks_for_slot(&mut cluster);
        cluster.run_for(ASKED_MS);
        waited += u32::from(holds(&cluster, first + 1));
        cluster.run_for(AT_LAST_MS);
        assert!(!holds(&cluster, first + 1), "saves go on: {first}");
    }
    assert!(waited > 0, "node 1 is a home node of some step");
}

/// A budget that is full is waited for shortly, and what makes way takes longer: refused before, the next trainer would wait as long in vain.
#[test]
fn a_save_that_something_makes_way_for_is_not_refused_before() {
    let mut waited = 0;
    for first in 1..6 {
        let room = Room {
            budgets: [(0, 3 * SLOT)].into(),
            slots_beside: 4,
            ..Room::default()
        };
        let mut cluster = with_full_slots_in(first, room);
        cluster.scene.unheard.insert(0);
        let began = cluster.now;
        let trainer = cluster.trainer(0);
        let reply = cluster.ask(0, trainer, acquire_slot(STRIPES * CHUNK, 20_000));
        assert!(
            matches!(reply, Reply::SlotGranted { .. }),
            "{first}: {reply:?}"
        );
        waited += u32::from(cluster.now - began > 3_000);
    }
    assert!(waited > 0, "node 1 is a home node of some step");
}

#[test]
fn it_goes_at_once_where_they_hear_of_that() {
    for first in 1..6 {
        let mut cluster = with_full_slots(first);
        asks_for_slot(&mut cluster);
        cluster.run_for(ASKED_MS);
        assert!(!holds(&cluster, first + 1), "{first}");
        let left = cluster.held(0).len();
        assert_eq!(
            left, 2,
            "what is newest stays, and what was protected: {first}"
        );
    }
}

/// The other coding node makes each step bear a loss: superseded by every save, none would ever be protected.
#[test]
fn while_one_coding_node_of_two_is_gone_steps_are_protected_however_often_the_job_saves() {
    let mut cluster = Cluster::start_with(4, 2, 40, None, Room::default());
    cluster.save_and_wait(DurableWish::Never);
    cluster.kill(5);
    cluster.run_for(5_000);
    let reader = cluster.connect(0, Role::Reader);
    let advances = (0..20).any(|_| {
        cluster.save();
        cluster.run_for(20);
        let Reply::Checkpoints(infos) = cluster.ask(0, reader, Request::List { namespace: None })
        else {
            panic!("expected the list");
        };
        let is_protected =
            |info: &CheckpointInfo| info.state >= CheckpointState::Protected && info.step.get() > 1;
        infos.iter().any(is_protected)
    });
    assert!(advances, "no step after the first is protected");
}

/// What nothing codes has the durable tier alone, three seconds later: it does not go for the next save before.
#[test]
fn while_all_are_gone_steps_that_are_to_be_durable_become_so() {
    let mut cluster = Cluster::start_with(2, 2, STRIPES, Some(Conduct::default()), Room::default());
    cluster.save_and_wait(DurableWish::Never);
    cluster.kill(2);
    cluster.kill(3);
    cluster.run_for(5_000);
    for _ in 0..10 {
        cluster.save_as(DurableWish::Required);
        cluster.run_for(1_000);
    }
    assert!(!cluster.tier.published.is_empty(), "nothing is durable");
}

/// Whoever waited goes before it is granted the slot.
#[test]
fn a_step_stays_that_nobody_needs_the_slot_of_any_more() {
    let mut waited = 0;
    for first in 1..6 {
        let mut cluster = with_full_slots(first);
        cluster.scene.unheard.insert(0);
        asks_for_slot(&mut cluster);
        cluster.run_for(ASKED_MS);
        if !holds(&cluster, first + 1) {
            continue;
        }
        let trainer = cluster.trainer(0);
        cluster.disconnect(0, trainer);
        cluster.scene.unheard.clear();
        cluster.run_for(6_000);
        assert!(holds(&cluster, first + 1), "{first}");
        let plan = cluster.held(1);
        assert!(plan.iter().any(|(step, _)| *step == first + 1), "{plan:?}");
        waited += 1;
    }
    assert!(waited > 0, "node 1 is a home node of some step");
}
