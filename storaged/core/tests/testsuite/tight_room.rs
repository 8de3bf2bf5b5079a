//! Nodes that have shards of a job and code for it too, with room for its two slots and parity, and not for a third slot beside.

use std::collections::BTreeSet;

use crate::cluster::{CHUNK, Cluster, Room, SLOT};
use crate::testkit::{acquire_slot, commit_step, namespace};
use storaged_core::ConnId;
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::{Digest, RefusalCode, Step};

const STRIPES: u64 = 100;
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

/// The others have not sealed it yet, so that its parity has no room so far.
#[test]
fn a_slot_that_is_refused_for_parity_says_so() {
    let mut cluster = with_budget(3 * SLOT + 2 * PARITY - 1);
    cluster.save_and_wait(DurableWish::Never);
    let first = vec![(0, cluster.trainer(0))];
    stage(&mut cluster, &first, STRIPES, Step::new(2));
    let (code, text) = cluster.refused_slot(0, STRIPES * CHUNK);
    assert_eq!(code, RefusalCode::Busy, "{text}");
    assert!(
        text.contains(&format!("beside the {PARITY} of parity")),
        "{text}"
    );
    assert!(text.contains("raise memory.budget"), "{text}");
}

/// Two jobs that have ended, with the room that nodes have beside what their first steps and the slots of their second ones take.
struct Rivals {
    cluster: Cluster,
    /// The newest step of the large job; that of the small one is its second.
    last: u64,
}

const JOBS: [&str; 2] = ["job", "other"];

const LESS: u64 = 40;
const LESS_PARITY: u64 = LESS * CHUNK;
/// So many steps of the large job come before, so that now one and now the other newest step has the smaller name.
const BEFORE: std::ops::Range<u64> = 1..5;

impl Rivals {
    /// The large job's newest step commits first, and both nodes that code have so much room.
    fn begin(before: u64, beside: [u64; 2], idle_job_ms: u64) -> Self {
        let taken = 4 * SLOT + PARITY + LESS_PARITY;
        let [first, second] = beside;
        let room = Room {
            budgets: [(0, taken + first), (2, taken + second)].into(),
            idle_job_ms,
            ..Room::default()
        };
        let mut cluster = Cluster::start_with_ranks_on_all(2, 1, STRIPES, room);
        (0..before).for_each(|_| cluster.save_and_wait(DurableWish::Never));
        let large = trainers(&cluster);
        cluster.scene.stripes = LESS;
        cluster.begin_job(JOBS[1]);
        cluster.save_and_wait(DurableWish::Never);
        let small = trainers(&cluster);
        let both = [(&large, STRIPES, before + 1), (&small, LESS, 2)];
        for (trainers, stripes, step) in both {
            stage(&mut cluster, trainers, stripes, Step::new(step));
        }
        for (trainers, _, step) in both {
            let commit = commit_step(Step::new(step), DurableWish::Never);
            cluster.send(0, trainers[0].1, commit);
            cluster.run_for(2_000);
        }
        for (node, conn) in [large, small].concat() {
            cluster.disconnect(node, conn);
        }
        let last = before + 1;
        let rivals = Self { cluster, last };
        for job in JOBS {
            assert_eq!(rivals.newest(0, job), Some((rivals.last_of(job), Some(0))));
        }
        rivals
    }

    fn last_of(&self, job: &str) -> u64 {
        if job == JOBS[0] { self.last } else { 2 }
    }

    /// On n0 the large step has its parity and the small one finds no room, on n2 it is the other way round.
    fn in_each_others_way(before: u64, idle_job_ms: u64) -> Self {
        Self::begin(before, [PARITY + LESS_PARITY - 1, PARITY - 1], idle_job_ms)
    }

    /// The newest step of a job, and what it bears as this node knows it.
    fn newest(&self, node: usize, job: &str) -> Option<(u64, Option<u32>)> {
        let process = self.cluster.processes[node].as_ref().expect("it is up");
        let shown = process.node.shown().into_iter();
        let of_job = shown.filter(|it| it.key.namespace.as_str() == job);
        of_job
            .map(|it| (it.key.step.get(), it.bears))
            .max_by_key(|it| it.0)
    }

    /// Whether a node has parity of the newest step of a job.
    fn has_parity(&self, node: usize, job: &str) -> bool {
        let process = self.cluster.processes[node].as_ref().expect("it is up");
        let mut shown = process.node.shown().into_iter();
        let step = Step::new(self.last_of(job));
        shown.any(|it| {
            it.key.namespace.as_str() == job && it.key.step == step && !it.parity.is_empty()
        })
    }

    fn name_of(&self, job: &str) -> Option<Digest> {
        let process = self.cluster.processes[0].as_ref().expect("it is up");
        let shown = process.node.shown().into_iter();
        let of_job = shown.filter(|it| it.key.namespace.as_str() == job);
        of_job.max_by_key(|it| it.key.step)?.manifest
    }

    /// Meanwhile what is protected stays so.
    fn both_are_protected_within(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.cluster.run_for(1_000);
            for job in JOBS {
                let process = self.cluster.processes[1].as_ref().expect("it is up");
                let shown = process.node.shown().into_iter();
                let mut of_job = shown.filter(|it| it.key.namespace.as_str() == job);
                assert!(of_job.any(|it| it.bears == Some(1)), "{job}");
            }
        }
        for node in 0..NODES {
            for job in JOBS {
                let expected = Some((self.last_of(job), Some(1)));
                assert_eq!(self.newest(node, job), expected, "n{node}: {job}");
            }
        }
    }
}

fn trainers(cluster: &Cluster) -> Vec<(usize, ConnId)> {
    (0..NODES)
        .map(|node| (node, cluster.trainer(node)))
        .collect()
}

/// All ranks have sealed it, and it is not committed yet.
fn stage(cluster: &mut Cluster, trainers: &[(usize, ConnId)], stripes: u64, step: Step) {
    let length = stripes * CHUNK;
    for (node, conn) in trainers {
        let granted = cluster.ask(*node, *conn, acquire_slot(length, 10_000));
        let Reply::SlotGranted { slot, .. } = granted else {
            panic!("{granted:?}");
        };
        let sealed = cluster.ask(*node, *conn, Request::SealSlot { slot, step, length });
        assert!(matches!(sealed, Reply::Done), "{sealed:?}");
    }
}

/// Whichever of the two has the smaller name: where only the other one fits, it takes longer.
#[test]
fn two_jobs_that_hold_what_the_other_needs_are_both_protected_in_the_end() {
    let mut orders = BTreeSet::new();
    for before in BEFORE {
        let mut rivals = Rivals::in_each_others_way(before, 3_600_000);
        let [large, small] = JOBS.map(|job| rivals.name_of(job));
        orders.insert(large < small);
        rivals.both_are_protected_within(90);
    }
    assert_eq!(orders.len(), 2, "both orders are tried");
}

/// A node was stopped for a moment, and is the same as before: what it sealed is there.
#[test]
fn a_link_that_was_lost_for_a_moment_keeps_no_parity_from_making_way() {
    let mut rivals = Rivals::in_each_others_way(1, 3_600_000);
    rivals.cluster.pause(1, 3_000);
    rivals.cluster.run_for(8_000);
    rivals.both_are_protected_within(90);
}

/// A large step finds room on one of the nodes that code it and the small one after it on the other. The older one is not worth a wait.
#[test]
fn of_two_steps_of_one_job_that_are_in_each_others_way_the_newer_is_protected_soon() {
    let taken = 3 * SLOT + PARITY;
    let (first, second) = (PARITY + LESS_PARITY - 1, PARITY - 1);
    let room = Room {
        budgets: [(0, taken + first), (2, taken + second)].into(),
        ..Room::default()
    };
    let mut cluster = Cluster::start_with_ranks_on_all(2, 1, STRIPES, room);
    cluster.save_and_wait(DurableWish::Never);
    let trainers = trainers(&cluster);
    let sizes = [(2, STRIPES), (3, LESS)];
    let mut slots = Vec::new();
    for (step, stripes) in sizes {
        for (node, conn) in &trainers {
            let granted = cluster.ask(*node, *conn, acquire_slot(stripes * CHUNK, 10_000));
            let Reply::SlotGranted { slot, .. } = granted else {
                panic!("step {step}: {granted:?}");
            };
            slots.push((*node, *conn, slot, step, stripes * CHUNK));
        }
    }
    for (node, conn, slot, step, length) in slots {
        let step = Step::new(step);
        let sealed = cluster.ask(node, conn, Request::SealSlot { slot, step, length });
        assert!(matches!(sealed, Reply::Done), "{sealed:?}");
    }
    for (step, _) in sizes {
        let commit = commit_step(Step::new(step), DurableWish::Never);
        cluster.send(0, trainers[0].1, commit);
        cluster.run_for(2_000);
    }
    cluster.goes_back_to(3);
    let everywhere = |cluster: &Cluster| (0..NODES).all(|node| cluster.is_protected(node));
    assert!(!everywhere(&cluster), "they are in each other's way");
    cluster.run_until(6_000, "protection", everywhere);
}

/// Both have been idle for longer than a job may be while its room is needed, and neither is what the other has room for.
#[test]
fn of_two_jobs_that_have_ended_neither_takes_the_only_copy_of_the_other() {
    for before in BEFORE {
        Rivals::in_each_others_way(before, 2_000).both_are_protected_within(90);
    }
}

/// What the small one has on n2 is not enough for the large one.
#[test]
fn parity_makes_way_for_nobody_who_would_not_fit_even_so() {
    for before in BEFORE {
        let mut rivals = Rivals::begin(before, [PARITY + LESS_PARITY - 1, LESS_PARITY], 3_600_000);
        for _ in 0..60 {
            rivals.cluster.run_for(1_000);
            assert!(rivals.has_parity(2, JOBS[1]), "{before}");
        }
        rivals.both_are_protected_within(60);
    }
}

/// Home nodes would count a set that has gone, and with the last one that is lacking call a step protected.
#[test]
fn parity_goes_when_home_nodes_do_not_count_it_any_more() {
    let mut rivals = Rivals::in_each_others_way(1, 3_600_000);
    rivals.cluster.scene.unheard.insert(0);
    for _ in 0..60 {
        rivals.cluster.run_for(1_000);
        assert!(rivals.has_parity(0, JOBS[0]), "nobody knows of it");
    }
    rivals.cluster.scene.unheard.clear();
    rivals.both_are_protected_within(60);
}
