//! Older steps that stay in RAM beside the newest one: as many as are configured, healed like it, and in nobody's way.

use crate::cluster::{self, Cluster, Conduct, Room, SLOT};
use storaged_core::DurableForm;
use storaged_wire::Step;
use storaged_wire::local::{DurableWish, Reply, Request, Role};

const NODES: usize = 6;
const PARITY: u64 = 10 * cluster::CHUNK;

fn keeping(keep_steps: usize, budget: u64) -> Cluster {
    let room = Room {
        keep_steps,
        budget,
        ..Room::default()
    };
    Cluster::start_with(4, 2, 10, None, room)
}

#[test]
fn as_many_protected_steps_stay_as_are_kept() {
    for kept in 1..=3 {
        let mut cluster = keeping(kept, 1 << 30);
        for step in 1..=6 {
            cluster.save_and_wait(DurableWish::Never);
            let oldest = (step + 1_u64).saturating_sub(kept as u64).max(1);
            cluster.assert_all_hold(oldest..=step);
        }
        for step in 7 - kept as u64..=6 {
            cluster.assert_restores(1, step, [1]);
        }
    }
}

#[test]
fn kept_steps_are_healed_when_a_node_was_lost() {
    for lost in [0, 5] {
        let mut cluster = keeping(3, 1 << 30);
        (0..4).for_each(|_| cluster.save_and_wait(DurableWish::Never));
        cluster.kill(lost);
        cluster.run_for(10_000);
        cluster.start_after(0, lost);
        cluster.run_for(60_000);
        cluster.assert_all_hold(2..=4);
    }
}

/// A kept step that the next increment builds on is coded and healed like any other that is kept.
#[test]
fn kept_steps_that_increments_build_on_keep_their_parity() {
    let room = Room {
        keep_steps: 2,
        durable_form: DurableForm::Increments,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, Some(Conduct::default()), room);
    (0..3).for_each(|_| cluster.save_and_wait(DurableWish::Required));
    cluster.assert_all_hold(2..=3);
    cluster.kill(5);
    cluster.run_for(10_000);
    cluster.start_after(0, 5);
    cluster.run_for(60_000);
    cluster.assert_all_hold(2..=3);
}

/// Eight saves on nodes of which some have little room; then all nodes hold the same steps, the newest among them.
fn saves_go_on(little: impl IntoIterator<Item = (usize, u64)>) {
    let budgets = little.into_iter().collect();
    let room = Room {
        keep_steps: 4,
        budgets,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    for step in 1..=8 {
        let began = cluster.now;
        cluster.save_and_wait(DurableWish::Never);
        let took = cluster.now - began;
        assert!(took < 8_000, "step {step}: {took} ms");
    }
    cluster.run_for(30_000);
    let everywhere = cluster.held(0);
    assert_eq!(everywhere.last(), Some(&(8, Some(2))));
    for node in 0..NODES {
        assert_eq!(cluster.held(node), everywhere, "n{node}");
    }
    let since = cluster.now;
    cluster.run_for(60_000);
    assert_eq!(cluster.held(0), everywhere, "it stays so");
    assert!(cluster.failures(since).is_empty());
}

#[test]
fn kept_steps_give_way_to_a_save_that_has_no_slot() {
    for slots in [2, 3, 4] {
        saves_go_on([(0, slots * SLOT)]);
        saves_go_on((0..4).map(|node| (node, slots * SLOT)));
    }
}

#[test]
fn kept_steps_give_way_to_a_save_whose_parity_has_no_room() {
    for parities in [2, 3, 4] {
        saves_go_on([(4, parities * PARITY)]);
        saves_go_on([(4, parities * PARITY), (5, parities * PARITY)]);
    }
}

/// Operators change the nodes' files one after the other.
#[test]
fn with_nodes_that_keep_less_than_others_nothing_moves_and_nothing_is_offered_that_is_not_there() {
    for few in [vec![0], vec![5], vec![0, 1, 2], vec![0, 1, 2, 3, 4]] {
        let room = Room {
            keep_steps: 3,
            keeping: few.iter().map(|node| (*node, 1)).collect(),
            ..Room::default()
        };
        let mut cluster = Cluster::start_with(4, 2, 10, None, room);
        for _ in 0..6 {
            cluster.save_and_wait(DurableWish::Never);
        }
        cluster.run_for(20_000);
        cluster.reset_counts();
        let since = cluster.now;
        cluster.run_for(60_000);
        assert!(cluster.sessions.counts.moved.is_empty(), "{few:?}");
        // Two steps that a node lacks are tried to be put back, each twice a minute.
        assert!(cluster.failures(since).len() <= 4, "{few:?}");
        for node in 0..NODES {
            let steps = cluster.held(node).into_iter().map(|(step, _)| step);
            let kept = if few.contains(&node) { 6..=6 } else { 4..=6 };
            assert_eq!(steps.collect::<Vec<_>>(), kept.collect::<Vec<_>>());
        }
        for node in 0..4 {
            cluster.assert_restores(node, 6, [node as u32]);
        }
        assert_eq!(is_offered(&mut cluster, 5), few.len() <= 2, "{few:?}");
    }
}

/// Whether a restart from a step is planned.
fn is_offered(cluster: &mut Cluster, step: u64) -> bool {
    let reader = cluster.connect(3, Role::Reader);
    let plan = Request::Plan {
        step: Some(Step::new(step)),
        timeout_ms: 10_000,
        allow_older: false,
    };
    let reply = cluster.ask(3, reader, plan);
    cluster.disconnect(3, reader);
    match reply {
        Reply::Plan(_) => true,
        Reply::Refused(_) => false,
        other => panic!("{other:?}"),
    }
}

/// A job that went back to step 2 saves step 3 again. The two that it has left do not take the place of the one that it may go back to again.
#[test]
fn a_job_that_went_back_keeps_what_it_went_back_to() {
    let mut cluster = keeping(3, 1 << 30);
    (0..4).for_each(|_| cluster.save_and_wait(DurableWish::Never));
    cluster.assert_all_hold(2..=4);
    cluster.begin_again();
    cluster.goes_back_to(2);
    cluster.save_and_wait(DurableWish::Never);
    cluster.assert_all_hold(2..=3);
    let run = cluster.run();
    let reader = cluster.connect(1, Role::Reader);
    let plan = Request::Plan {
        step: Some(Step::new(3)),
        timeout_ms: 10_000,
        allow_older: false,
    };
    let Reply::Plan(plan) = cluster.ask(1, reader, plan) else {
        panic!("step 3 is there");
    };
    assert_eq!(plan.run, run, "the step that was saved again");
    (0..2).for_each(|_| cluster.save_and_wait(DurableWish::Never));
    cluster.assert_all_hold(3..=5);
}

/// Steps are saved one after the other, and the job goes back to the newest protected one while they are coded: who restarted has read that
/// one, and all that were saved after it are left.
fn goes_back_while_steps_are_coded(cluster: &mut Cluster, steps: u64) {
    (0..steps).for_each(|_| cluster.save());
    let newest = |cluster: &Cluster| (0..NODES).all(|node| cluster.is_protected(node));
    cluster.begin_again();
    assert!(!newest(cluster), "the new run is there first");
    cluster.run_until(60_000, "protection of what is left", newest);
    cluster.run_for(1_000);
}

/// Steps 3 and 4 are protected after the job has gone back to step 2. They do not take its place: the first step of the new run leaves both,
/// and nothing would stay behind that one.
#[test]
fn steps_that_are_protected_when_the_job_has_left_them_take_no_place() {
    let mut cluster = keeping(2, 1 << 30);
    (0..2).for_each(|_| cluster.save_and_wait(DurableWish::Never));
    goes_back_while_steps_are_coded(&mut cluster, 2);
    cluster.assert_all_hold(2..=4);
    cluster.goes_back_to(2);
    let began = cluster.now;
    cluster.save_and_wait(DurableWish::Never);
    assert!(
        cluster.now - began < 2_000,
        "no save waits for what is kept"
    );
    cluster.assert_all_hold(2..=3);
    cluster.save_and_wait(DurableWish::Never);
    cluster.assert_all_hold(3..=4);
}

/// The job has not said where it went back to. It goes on from the newest of these: of them as many stay as of any others.
#[test]
fn nor_do_they_stay_where_the_job_goes_on_from_them() {
    let mut cluster = keeping(2, 1 << 30);
    (0..2).for_each(|_| cluster.save_and_wait(DurableWish::Never));
    goes_back_while_steps_are_coded(&mut cluster, 2);
    cluster.save_and_wait(DurableWish::Never);
    cluster.assert_all_hold(4..=5);
}

/// Coding nodes have room for the parity of two steps and of one that is coded, as `storaged config` counts: the step that the job went back to
/// stays there too.
#[test]
fn what_a_job_went_back_to_stays_in_the_room_that_kept_steps_have() {
    let room = Room {
        keep_steps: 2,
        budgets: (4..6).map(|node| (node, 3 * PARITY)).collect(),
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    (0..2).for_each(|_| cluster.save_and_wait(DurableWish::Never));
    goes_back_while_steps_are_coded(&mut cluster, 1);
    cluster.goes_back_to(2);
    cluster.save_and_wait(DurableWish::Never);
    cluster.assert_all_hold(2..=3);
}

/// Two jobs train. What is kept of the first one is in nobody's way: the second one gets its slots, and its steps are protected.
#[test]
fn kept_steps_give_way_to_the_saves_of_another_job() {
    let data = (0..4).map(|node| (node, 5 * SLOT));
    let coding = (4..6).map(|node| (node, 3 * PARITY));
    for budgets in [data.collect(), coding.collect()] {
        let room = Room {
            keep_steps: 3,
            budgets,
            ..Room::default()
        };
        let mut cluster = Cluster::start_with(4, 2, 10, None, room);
        (0..5).for_each(|_| cluster.save_and_wait(DurableWish::Never));
        cluster.begin_job("other");
        for _ in 0..3 {
            let began = cluster.now;
            cluster.save_and_wait(DurableWish::Never);
            assert!(cluster.now - began < 8_000, "{} ms", cluster.now - began);
        }
        for node in 0..NODES {
            let held = cluster.held(node);
            for newest in [5, 3] {
                assert!(held.contains(&(newest, Some(2))), "n{node}: {held:?}");
            }
        }
    }
}
