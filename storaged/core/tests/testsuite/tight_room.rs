//! Nodes that have shards of a job and code for it too, with room for its two slots and parity, and not for a third slot beside.

use crate::cluster::{CHUNK, Cluster, Room};
use crate::testkit::{acquire_slot, namespace};
use storaged_wire::Step;
use storaged_wire::local::{DurableWish, Reply, Request, Role};

const STRIPES: u64 = 100;
const SLOT: u64 = 2 << 20;
const PARITY: u64 = STRIPES * CHUNK;
const NODES: usize = 3;

fn with_budget(budget: u64) -> Cluster {
    let room = Room {
        budget,
        ..Room::default()
    };
    Cluster::start_with_ranks_on_all(2, 1, STRIPES, room)
}

fn newest_is_protected(cluster: &mut Cluster) {
    let everywhere = |cluster: &Cluster| (0..NODES).all(|node| cluster.is_protected(node));
    cluster.run_until(20_000, "protection", everywhere);
}

/// A third slot would take the room of the second step's parity, and both it and the third would stay unprotected in all slots.
#[test]
fn a_further_slot_leaves_the_parity_of_the_step_before_its_room() {
    let mut cluster = with_budget(3 * SLOT + 2 * PARITY - 1);
    cluster.save_and_wait(DurableWish::Never);
    for _ in 0..6 {
        cluster.save();
        cluster.save();
        newest_is_protected(&mut cluster);
    }
}

/// With room for all of it nobody waits.
#[test]
fn a_further_slot_is_there_at_once_where_there_is_room_for_parity_too() {
    let mut cluster = with_budget(3 * SLOT + 3 * PARITY);
    cluster.save_and_wait(DurableWish::Never);
    let began = cluster.now;
    cluster.save();
    cluster.save();
    assert!(cluster.now - began < 100, "{} ms", cluster.now - began);
    newest_is_protected(&mut cluster);
}

/// While another job has its room no step of this one can be coded. When that has gone the step is coded before a slot takes the room again.
#[test]
fn saves_go_on_when_another_job_has_taken_room_and_gone() {
    let mut cluster = with_budget(3 * SLOT + 2 * PARITY - 1);
    (0..2).for_each(|_| cluster.save_and_wait(DurableWish::Never));
    let run = cluster.run();
    cluster.begin_job("other");
    cluster.save();
    cluster.run_for(5_000);
    cluster.end_job();
    cluster.go_on_with(namespace().as_str(), run, 2);
    cluster.save();
    cluster.run_for(60_000);
    let unprotected = (0..NODES).any(|node| !cluster.is_protected(node));
    assert!(unprotected, "there is no room for its parity");
    cluster.ask_of("other");
    let other = cluster.connect(0, Role::Reader);
    let drop = Request::Drop {
        force: true,
        timeout_ms: 5_000,
    };
    let dropped = cluster.ask(0, other, drop);
    assert!(matches!(dropped, Reply::Dropped(_)), "{dropped:?}");
    cluster.go_on_with(namespace().as_str(), run, 3);
    for _ in 0..4 {
        cluster.save();
    }
    newest_is_protected(&mut cluster);
}

/// Its three slots were made while there was room. The other job stays, and beside it there is room for two and for parity.
#[test]
fn a_free_slot_gives_its_room_to_parity() {
    let mut cluster = with_budget(4 * SLOT + 3 * PARITY - 1);
    cluster.save_and_wait(DurableWish::Never);
    (0..2).for_each(|_| cluster.save());
    newest_is_protected(&mut cluster);
    cluster.run_for(1_000);
    let run = cluster.run();
    cluster.begin_job("other");
    cluster.save();
    newest_is_protected(&mut cluster);
    cluster.go_on_with(namespace().as_str(), run, 3);
    for _ in 0..4 {
        (0..2).for_each(|_| cluster.save());
        newest_is_protected(&mut cluster);
    }
}

/// Ranks of other nodes hang. What one has sealed alone gives way as it does where there is room.
#[test]
fn steps_that_a_rank_keeps_from_committing_give_way_in_little_room() {
    let mut cluster = with_budget(3 * SLOT + 2 * PARITY - 1);
    cluster.save_and_wait(DurableWish::Never);
    let trainer = cluster.trainer(0);
    let length = STRIPES * CHUNK;
    for step in 2..=6 {
        let began = cluster.now;
        let granted = cluster.ask(0, trainer, acquire_slot(length, 20_000));
        let Reply::SlotGranted { slot, .. } = granted else {
            panic!("step {step}: {granted:?}");
        };
        let waited = cluster.now - began;
        assert!(waited < 8_000, "step {step} waited {waited} ms");
        let step = Step::new(step);
        let sealed = cluster.ask(0, trainer, Request::SealSlot { slot, step, length });
        assert!(matches!(sealed, Reply::Done), "{sealed:?}");
    }
}
