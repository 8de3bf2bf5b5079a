//! Steps that somebody has pinned: they stay in the RAM of all nodes, healed like the newest one, and in the way of no save that there
//! was room for when they were pinned.

mod decided;
mod members;

use crate::cluster::{self, Cluster, Room, SLOT};
use crate::testkit::{TOKEN, name, namespace};
use storaged_core::Input;
use storaged_wire::local::{DurableWish, Keep, Reply, Request, Role};
use storaged_wire::peer::PeerMessage;
use storaged_wire::pins::{NamespacePins, Pin};
use storaged_wire::{Owner, Refusal, RefusalCode, Step};

const NODES: usize = 6;
const PARITY: u64 = 10 * cluster::CHUNK;

fn with_room(room: Room) -> Cluster {
    Cluster::start_with(4, 2, 10, None, room)
}

/// Steps 1 and 2, of which the first is pinned while it is the newest.
fn with_a_pin() -> Cluster {
    let mut cluster = with_room(Room::default());
    cluster.save_and_wait(DurableWish::Never);
    pinned(&mut cluster, 3, 1);
    cluster.save_and_wait(DurableWish::Never);
    cluster.assert_all_hold([1, 2]);
    cluster
}

/// Steps 1 and 2, both of which are kept, but the first one not by these nodes.
fn let_go_by(nodes: impl IntoIterator<Item = usize>, room: Room) -> Cluster {
    let keeping = nodes.into_iter().map(|node| (node, 1));
    let mut cluster = with_room(Room {
        keep_steps: 2,
        keeping: keeping.collect(),
        ..room
    });
    cluster.save_and_wait(DurableWish::Never);
    cluster.save_and_wait(DurableWish::Never);
    cluster
}

fn request(step: u64, keep: Keep) -> Request {
    Request::Keep {
        run: None,
        step: Step::new(step),
        keep,
    }
}

fn keep(cluster: &mut Cluster, node: usize, step: u64, keep: Keep) -> Result<(), Refusal> {
    let reader = cluster.connect(node, Role::Reader);
    let reply = cluster.ask(node, reader, request(step, keep));
    cluster.disconnect(node, reader);
    match reply {
        Reply::Removed { .. } => Ok(()),
        Reply::Refused(refusal) => Err(refusal),
        other => panic!("{other:?}"),
    }
}

fn pinned(cluster: &mut Cluster, node: usize, step: u64) {
    keep(cluster, node, step, Keep::Pin).expect("it is pinned");
}

fn refused(cluster: &mut Cluster, node: usize, step: u64) -> Refusal {
    keep(cluster, node, step, Keep::Pin).expect_err("it is not pinned")
}

#[test]
fn a_pinned_step_stays_on_all_nodes_until_it_is_unpinned() {
    let mut cluster = with_a_pin();
    for step in 3..=6 {
        cluster.save_and_wait(DurableWish::Never);
        cluster.assert_all_hold([1, step]);
    }
    keep(&mut cluster, 5, 1, Keep::Unpin).expect("it was pinned");
    cluster.run_for(1_000);
    cluster.assert_all_hold([6]);
    let again = keep(&mut cluster, 5, 1, Keep::Unpin).expect_err("it is not any more");
    assert_eq!(again.code, RefusalCode::NoCheckpoint, "{}", again.message);
    let gone = refused(&mut cluster, 0, 1);
    assert_eq!(gone.code, RefusalCode::NoCheckpoint, "{}", gone.message);
}

/// Each set of m nodes at once, and their memory with them: the step is there meanwhile, and back on all when they are.
#[test]
fn a_pinned_step_survives_m_losses_and_is_healed_like_the_newest() {
    for first in 0..NODES {
        for second in first + 1..NODES {
            let mut cluster = with_a_pin();
            let began = cluster.now;
            for node in [first, second] {
                cluster.kill(node);
            }
            cluster.run_for(10_000);
            let left = (0..NODES).find(|node| ![first, second].contains(node));
            cluster.assert_restores(left.unwrap(), 1, 0..4);
            for node in [first, second] {
                cluster.start_after(0, node);
            }
            cluster.run_for(60_000);
            cluster.assert_all_hold([1, 2]);
            assert!(cluster.healed_at(&[first, second], began).is_some());
        }
    }
}

#[test]
fn pins_are_remembered_with_the_memory_that_they_keep() {
    for ended in [vec![0], vec![5], (0..NODES).collect()] {
        let mut cluster = with_a_pin();
        cluster.reset_counts();
        ended.iter().for_each(|node| cluster.end_daemon(*node));
        cluster.run_for(1_000);
        ended.iter().for_each(|node| cluster.start_after(0, *node));
        cluster.run_for(10_000);
        cluster.assert_all_hold([1, 2]);
        assert!(cluster.sessions.counts.moved.is_empty(), "{ended:?}");
        (0..NODES.min(4)).for_each(|node| cluster.attach(node));
        cluster.save_and_wait(DurableWish::Never);
        cluster.assert_all_hold([1, 3]);
    }
}

#[test]
fn a_node_that_was_away_hears_of_a_pin_when_it_is_back() {
    for away in [0, 5] {
        let mut cluster = with_room(Room::default());
        cluster.save_and_wait(DurableWish::Never);
        cluster.kill(away);
        cluster.run_for(10_000);
        pinned(&mut cluster, 3, 1);
        cluster.start_after(0, away);
        cluster.run_for(30_000);
        (0..4).for_each(|node| cluster.attach(node));
        cluster.save_and_wait(DurableWish::Never);
        cluster.run_for(20_000);
        cluster.assert_all_hold([1, 2]);
        cluster.kill(away);
        cluster.run_for(10_000);
        keep(&mut cluster, 3, 1, Keep::Unpin).expect("it was pinned");
        cluster.start_after(0, away);
        cluster.run_for(30_000);
        cluster.assert_all_hold([2]);
    }
}

/// A node that let the step go before it heard of the pin gets it back from the others.
#[test]
fn a_step_that_is_leaving_is_pinned_as_long_as_enough_nodes_have_it() {
    let mut cluster = let_go_by([0, 5], Room::default());
    assert_eq!(cluster.held(5).len(), 1, "it keeps one step");
    pinned(&mut cluster, 3, 1);
    cluster.run_for(60_000);
    cluster.assert_all_hold([1, 2]);
}

/// The same where it would leave that node no room for saves.
#[test]
fn a_step_that_is_to_come_back_needs_room_too() {
    let room = Room {
        budgets: [(0, 2 * SLOT)].into(),
        ..Room::default()
    };
    let mut cluster = let_go_by([0], room);
    assert_eq!(cluster.held(0).len(), 1, "it keeps one step");
    let refusal = refused(&mut cluster, 3, 1);
    assert_eq!(refusal.code, RefusalCode::BudgetFull);
    assert!(refusal.message.contains("n0"), "{}", refusal.message);
}

/// Steps 1 to 3, of which this node keeps the newest alone, with room for three steps.
fn with_room_for_three(node: usize) -> Cluster {
    let mut cluster = with_room(Room {
        keep_steps: 3,
        keeping: [(node, 1)].into(),
        budgets: [(node, 3 * SLOT)].into(),
        ..Room::default()
    });
    for _ in 1..=3 {
        cluster.save_and_wait(DurableWish::Never);
    }
    assert_eq!(cluster.held(node).len(), 1, "it keeps one step");
    cluster
}

/// The first one is not back yet when the second one is pinned: the node would find itself without room for saves.
#[test]
fn steps_that_are_to_come_back_need_room_together() {
    let mut cluster = with_room_for_three(0);
    pinned(&mut cluster, 3, 1);
    let refusal = refused(&mut cluster, 3, 2);
    assert_eq!(refusal.code, RefusalCode::BudgetFull);
    for part in ["n0", "step 1 is pinned"] {
        assert!(refusal.message.contains(part), "{}", refusal.message);
    }
    cluster.run_for(60_000);
    for step in 4..=6 {
        cluster.save_and_wait(DurableWish::Never);
        assert_eq!(cluster.held(0), [(1, Some(2)), (step, Some(2))]);
    }
}

/// The same of two jobs, of which each has let go what is pinned.
#[test]
fn what_is_to_come_back_of_one_job_is_no_room_for_pins_of_another() {
    for (slots, fits) in [(5, false), (6, true)] {
        let mut cluster = let_go_by(
            [0],
            Room {
                budgets: [(0, slots * SLOT)].into(),
                ..Room::default()
            },
        );
        cluster.begin_job("other");
        for _ in 1..=2 {
            cluster.save_and_wait(DurableWish::Never);
        }
        cluster.ask_of(namespace().as_str());
        pinned(&mut cluster, 3, 1);
        cluster.ask_of("other");
        let said = keep(&mut cluster, 3, 1, Keep::Pin);
        assert_eq!(said.is_ok(), fits, "{slots} slots: {said:?}");
        if let Err(refusal) = said {
            assert_eq!(refusal.code, RefusalCode::BudgetFull);
            let others = format!("other jobs need {SLOT} bytes");
            assert!(refusal.message.contains(&others), "{}", refusal.message);
        }
    }
}

/// Pins a step, loses the memory of all its home nodes at once, and says whether that can be borne and one of them had a shard.
fn loses_all_homes(step: u64) -> Option<bool> {
    let mut cluster = Cluster::start_of(9, 4, 2, 10);
    for _ in 0..step {
        cluster.save_on_all(6, DurableWish::Never);
    }
    let (homes, blocks) = cluster.homes_of(step);
    if blocks > 2 {
        return None;
    }
    pinned(&mut cluster, 3, step);
    cluster.save_on_all(6, DurableWish::Never);
    let before = cluster.held_by_all();
    cluster.restart_empty(&homes);
    cluster.run_for(60_000);
    assert_eq!(
        cluster.held_by_all(),
        before,
        "step {step} of homes {homes:?}"
    );
    Some(homes.iter().any(|home| *home < 4))
}

/// No home node is left that knows of the step, and all of its blocks are there but those that can be made again: who holds them tells of it.
#[test]
fn a_pinned_step_of_which_all_home_nodes_have_lost_their_memory_is_healed_from_its_members() {
    let borne: Vec<bool> = (1..=12).filter_map(loses_all_homes).collect();
    let with_shards = borne.iter().filter(|had_shard| **had_shard).count();
    assert!(
        with_shards > 0 && with_shards < borne.len(),
        "homes with shards and without: {borne:?}"
    );
}

#[test]
fn what_too_many_nodes_have_let_go_is_not_pinned() {
    let mut cluster = let_go_by([0, 1, 5], Room::default());
    let refusal = refused(&mut cluster, 3, 1);
    assert_eq!(refusal.code, RefusalCode::TooManyLost);
    assert!(
        refusal.message.contains("n0, n1, n5"),
        "{}",
        refusal.message
    );
    for _ in 0..2 {
        cluster.save_and_wait(DurableWish::Never);
    }
    cluster.run_for(20_000);
    let steps = cluster.held(3).into_iter().map(|(step, _)| step);
    assert_eq!(steps.collect::<Vec<_>>(), [3, 4], "nothing is pinned");
}

/// As an operator does once it has become durable.
#[test]
fn a_step_that_is_pinned_stays_so_when_it_is_pinned_again_while_too_many_nodes_are_away() {
    let mut cluster = with_a_pin();
    for node in [0, 1, 5] {
        cluster.end_daemon(node);
    }
    cluster.run_for(10_000);
    pinned(&mut cluster, 3, 1);
    for node in [0, 1, 5] {
        cluster.start_after(0, node);
    }
    cluster.run_for(20_000);
    (0..4).for_each(|node| cluster.attach(node));
    cluster.save_and_wait(DurableWish::Never);
    cluster.assert_all_hold([1, 3]);
}

/// Nobody may hear that a step is pinned before that is decided: who asked second would count on what is let go again.
#[test]
fn who_pins_a_step_that_is_being_pinned_hears_what_becomes_of_it() {
    let mut cluster = with_room(Room::default());
    cluster.save_and_wait(DurableWish::Never);
    cluster.scene.unheard.extend([0, 1, 5]);
    let asked: Vec<_> = (0..2)
        .map(|_| {
            let reader = cluster.connect(3, Role::Reader);
            let id = cluster.send(3, reader, request(1, Keep::Pin));
            cluster.run_for(1_000);
            id
        })
        .collect();
    cluster.run_for(10_000);
    for id in asked {
        match cluster.answer(id) {
            Some(Reply::Refused(refusal)) => assert_eq!(refusal.code, RefusalCode::TooManyLost),
            other => panic!("{other:?}"),
        }
    }
}

/// It would stay at the nodes that have been told, in the way of saves, and be coded again and again.
#[test]
fn a_step_that_is_not_protected_is_not_pinned_by_the_word_of_a_peer() {
    let mut cluster = with_room(Room::default());
    cluster.save_and_wait(DurableWish::Never);
    cluster.save_as(DurableWish::Never);
    cluster.run_for(1);
    let told = NamespacePins {
        namespace: namespace(),
        owner: Owner::of_token(TOKEN),
        pins: vec![Pin {
            run: cluster.run(),
            step: Step::new(2),
            pinned: true,
            changes: 1,
            doubt: None,
        }],
    };
    let from = name(4);
    for query in [Some(7), None] {
        let message = PeerMessage::Pins(query, told.clone());
        let from = from.clone();
        cluster.tell(0, Input::Message { from, message });
    }
    assert!(!cluster.is_protected(0), "it was told before that");
    cluster.run_for(5_000);
    for step in 3..=4 {
        cluster.save_and_wait(DurableWish::Never);
        cluster.assert_all_hold([step]);
    }
}

/// Node 0 has room for one pin, and node 5 is silent, so that each is decided late: the first one for the second step finds no room.
#[test]
fn a_pin_that_is_not_granted_does_not_end_one_that_was_asked_for_later() {
    let room = Room {
        budgets: [(0, 3 * SLOT)].into(),
        ..Room::default()
    };
    let mut cluster = with_room(room);
    cluster.save_and_wait(DurableWish::Never);
    pinned(&mut cluster, 3, 1);
    cluster.save_and_wait(DurableWish::Never);
    cluster.scene.unheard.insert(5);
    let reader = cluster.connect(3, Role::Reader);
    let orders = [
        (2, Keep::Pin),
        (1, Keep::Unpin),
        (2, Keep::Unpin),
        (2, Keep::Pin),
    ];
    let asked = orders.map(|(step, keep)| {
        let id = cluster.send(3, reader, request(step, keep));
        cluster.run_for(500);
        id
    });
    cluster.run_for(15_000);
    let said = |at: usize| cluster.answer(asked[at]);
    assert!(matches!(said(0), Some(Reply::Refused(_))), "{:?}", said(0));
    assert!(
        matches!(said(3), Some(Reply::Removed { .. })),
        "{:?}",
        said(3)
    );
    cluster.scene.unheard.clear();
    for step in 3..=4 {
        cluster.save_and_wait(DurableWish::Never);
        cluster.assert_all_hold([2, step]);
    }
}

/// Two more steps must fit on every node, or no later one could be saved beside the last protected one.
#[test]
fn a_pin_that_leaves_no_room_for_saves_is_refused_on_all_nodes() {
    for (full, bytes) in [(0, 2 * SLOT), (4, 2 * PARITY), (3, 2 * SLOT)] {
        let room = Room {
            budgets: [(full, bytes)].into(),
            ..Room::default()
        };
        let mut cluster = with_room(room);
        cluster.save_and_wait(DurableWish::Never);
        let refusal = refused(&mut cluster, 3, 1);
        assert_eq!(refusal.code, RefusalCode::BudgetFull);
        for part in [format!("n{full}"), "memory.budget".into()] {
            assert!(refusal.message.contains(&part), "{}", refusal.message);
        }
        for step in 2..=4 {
            cluster.save_and_wait(DurableWish::Never);
            cluster.assert_all_hold([step]);
        }
    }
}

/// Two jobs on the same nodes, of which each needs room for its newest step and for the one that it saves.
#[test]
fn a_pin_leaves_the_saves_of_another_job_their_room() {
    let job = namespace();
    for (slots, fits) in [(4, false), (5, true)] {
        let room = Room {
            budgets: [(0, slots * SLOT)].into(),
            ..Room::default()
        };
        let mut cluster = with_room(room);
        cluster.save_and_wait(DurableWish::Never);
        cluster.begin_job("other");
        cluster.save_and_wait(DurableWish::Never);
        let other = cluster.run();
        cluster.ask_of(job.as_str());
        let said = keep(&mut cluster, 3, 1, Keep::Pin);
        assert_eq!(said.is_ok(), fits, "{said:?}");
        if let Err(refusal) = said {
            assert_eq!(refusal.code, RefusalCode::BudgetFull);
            let others = format!("other jobs need {SLOT} bytes");
            assert!(refusal.message.contains(&others), "{}", refusal.message);
        }
        cluster.go_on_with("other", other, 1);
        for _ in 2..=4 {
            cluster.save_and_wait(DurableWish::Never);
        }
    }
}

fn restart_objections(cluster: &mut Cluster, node: usize) -> Vec<String> {
    let reader = cluster.connect(node, Role::Reader);
    let reply = cluster.ask(node, reader, Request::RestartSafe { bears: None });
    cluster.disconnect(node, reader);
    match reply {
        Reply::RestartSafe(objections) => objections,
        other => panic!("{other:?}"),
    }
}

/// Of a step that cannot become whole any more: who rolls a cluster must know that nobody needs it but who pinned it.
#[test]
fn an_objection_to_a_restart_says_that_a_pinned_step_is_the_cause() {
    let mut cluster = with_a_pin();
    for node in [0, 1, 5] {
        cluster.kill(node);
    }
    cluster.run_for(10_000);
    for node in [0, 1, 5] {
        cluster.start_after(0, node);
    }
    cluster.run_for(30_000);
    (0..4).for_each(|node| cluster.attach(node));
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(30_000);
    let said = restart_objections(&mut cluster, 2).join(", ");
    assert!(said.contains("step 1 of run 1-"), "{said}");
    assert!(said.contains("`storaged unpin`"), "{said}");
    keep(&mut cluster, 3, 1, Keep::Unpin).expect("it was pinned");
    cluster.run_for(10_000);
    assert_eq!(restart_objections(&mut cluster, 2), [""; 0]);
}

/// As many as are pinned take none of the slots that ranks may have.
#[test]
fn saves_go_on_beside_pins_as_before() {
    let three = [(0, 5 * SLOT), (4, 5 * PARITY)];
    let room = Room {
        budgets: three.into(),
        ..Room::default()
    };
    let mut cluster = with_room(room);
    for step in 1..=3 {
        cluster.save_and_wait(DurableWish::Never);
        pinned(&mut cluster, 0, step);
    }
    for step in 4..=8 {
        let began = cluster.now;
        cluster.save_and_wait(DurableWish::Never);
        let took = cluster.now - began;
        assert!(took < 4_000, "step {step}: {took} ms");
        cluster.assert_all_hold([1, 2, 3, step]);
    }
    let full = refused(&mut cluster, 1, 8);
    assert_eq!(full.code, RefusalCode::BudgetFull);
    for part in ["n0", "steps 1, 2, 3 are pinned", "storaged unpin"] {
        assert!(full.message.contains(part), "{}", full.message);
    }
}

/// Shards have grown since: the save fails, says why within its time, and goes on once the step is let go.
#[test]
fn a_save_that_finds_no_room_beside_a_pin_is_told_so() {
    let room = Room {
        budgets: [(0, 4 * SLOT)].into(),
        ..Room::default()
    };
    let mut cluster = with_room(room);
    cluster.save_and_wait(DurableWish::Never);
    pinned(&mut cluster, 0, 1);
    cluster.save_and_wait(DurableWish::Never);
    let (code, text) = cluster.refused_slot(0, 3 * SLOT);
    assert_eq!(code, RefusalCode::BudgetFull);
    assert!(
        text.contains("step 1 is pinned: `storaged unpin` frees it"),
        "{text}"
    );
    keep(&mut cluster, 0, 1, Keep::Unpin).expect("it was pinned");
    cluster.run_for(1_000);
    let acquire = cluster::acquire_slot(3 * SLOT, 1_000);
    let granted = cluster.ask(0, cluster.trainer(0), acquire);
    assert!(matches!(granted, Reply::SlotGranted { .. }), "{granted:?}");
}

/// A job without trainers goes when others need its room, but for one of which a step is pinned.
#[test]
fn an_idle_job_with_a_pin_makes_no_room_for_others_and_is_dropped_by_force_alone() {
    let room = Room {
        budget: 4 * SLOT,
        idle_job_ms: 20_000,
        ..Room::default()
    };
    let mut cluster = with_room(room);
    cluster.save_and_wait(DurableWish::Never);
    pinned(&mut cluster, 0, 1);
    cluster.end_job();
    cluster.run_for(60_000);
    cluster.begin_job("other");
    let (code, text) = cluster.refused_slot(0, 4 * SLOT);
    assert_eq!(code, RefusalCode::BudgetFull);
    assert!(text.contains("step 1 is pinned"), "{text}");
    let job = namespace();
    cluster.ask_of(job.as_str());
    let mut dropped = |force| {
        let reader = cluster.connect(2, Role::Reader);
        let drop = Request::Drop {
            force,
            timeout_ms: 5_000,
        };
        cluster.ask(2, reader, drop)
    };
    match dropped(false) {
        Reply::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::InUse),
        other => panic!("{other:?}"),
    }
    assert!(matches!(dropped(true), Reply::Dropped(_)));
    cluster.run_for(20_000);
    (0..NODES).for_each(|node| assert_eq!(cluster.held(node), []));
}

/// A node that has nothing of the step knows of its pin too.
#[test]
fn a_job_with_a_pin_is_not_dropped_by_a_node_without_the_step() {
    let mut cluster = Cluster::start_of(9, 4, 2, 10);
    cluster.save_on_all(6, DurableWish::Never);
    pinned(&mut cluster, 3, 1);
    cluster.end_job();
    cluster.run_for(20_000);
    let without = (0..9).find(|node| cluster.held(*node).is_empty());
    let without = without.expect("a node of no group");
    let reader = cluster.connect(without, Role::Reader);
    let drop = Request::Drop {
        force: false,
        timeout_ms: 5_000,
    };
    match cluster.ask(without, reader, drop) {
        Reply::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::InUse),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_list_and_the_status_say_what_is_pinned() {
    let mut cluster = with_a_pin();
    let reader = cluster.connect(2, Role::Reader);
    let reply = cluster.ask(2, reader, Request::List { namespace: None });
    let Reply::Checkpoints(infos) = reply else {
        panic!("{reply:?}");
    };
    let said = infos.iter().map(|it| (it.step.get(), it.pinned));
    assert_eq!(
        said.collect::<Vec<_>>(),
        [(1, Some(true)), (2, Some(false))]
    );
    let status = cluster
        .ram(2)
        .node
        .status_json(&storaged_core::Viewer::Operator);
    assert_eq!(status.matches(r#""pinned":true"#).count(), 1, "{status}");
}
