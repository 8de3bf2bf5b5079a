//! What a save waits for when slots or room are short: nothing that is worth less than it.

use std::collections::BTreeMap;

use crate::cluster::{Cluster, Conduct, Room, SLOT, Uploads};
use crate::testkit::{
    acquire_slot, hello, index, members, name, namespace, open_shard, plan_newest,
};
use storaged_core::{DurableForm, Input, Viewer};
use storaged_plan::homes;
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{CheckpointState, Namespace, Rank, RefusalCode, Step, WorldSize};

/// Seals a step on n0 alone, whose peers' ranks hang; gives how long it waited for the slot.
fn seal_alone(cluster: &mut Cluster, step: u64) -> u64 {
    let (trainer, began) = (cluster.trainer(0), cluster.now);
    let length = 10 * crate::cluster::CHUNK;
    let acquire = acquire_slot(length, 10_000);
    let Reply::SlotGranted { slot, .. } = cluster.ask(0, trainer, acquire) else {
        panic!("no slot for step {step}");
    };
    let waited = cluster.now - began;
    let step = Step::new(step);
    let sealed = cluster.ask(0, trainer, Request::SealSlot { slot, step, length });
    assert!(matches!(sealed, Reply::Done), "{sealed:?}");
    waited
}

/// A connection may say hello again. What it acquired before has its place in the first job's part of the budget, and its room among
/// the first rank's slots.
#[test]
fn a_slot_is_sealed_as_a_shard_of_the_job_and_rank_that_it_was_acquired_for() {
    let mut cluster = Cluster::start(4, 2, 10);
    let (first, of_first) = (cluster.trainer(0), cluster.run());
    let length = 10 * crate::cluster::CHUNK;
    let step = Step::new(1);
    cluster.begin_job("another");
    let another = Namespace::new("another").unwrap();
    let of_another = cluster.run();
    for (job, run, rank) in [(another, of_another, 0), (namespace(), of_first, 1)] {
        let says_hello = |job, run, rank| {
            let world_size = WorldSize::new(4).unwrap();
            let rank = Rank::new(rank);
            let role = Role::Trainer {
                run,
                rank,
                world_size,
            };
            hello(job, role)
        };
        let welcome = cluster.ask(0, first, says_hello(namespace(), of_first, 0));
        assert!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
        let granted = cluster.ask(0, first, acquire_slot(length, 10_000));
        let Reply::SlotGranted { slot, .. } = granted else {
            panic!("no slot: {granted:?}");
        };
        let welcome = cluster.ask(0, first, says_hello(job, run, rank));
        assert!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
        let sealed = cluster.ask(0, first, Request::SealSlot { slot, step, length });
        let Reply::Refused(refusal) = sealed else {
            panic!("a slot of another job or rank was sealed: {sealed:?}");
        };
        assert_eq!(refusal.code, RefusalCode::WrongSlot, "{refusal}");
        // It is its own all the same, and can be let go.
        let released = cluster.ask(0, first, Request::ReleaseSlot { slot });
        assert!(matches!(released, Reply::Done), "{released:?}");
    }
}

/// A rank that hangs may still seal the steps that the others wait with: these give way to newer ones only after a while.
#[test]
fn steps_that_a_rank_keeps_from_committing_give_way_after_three_seconds() {
    let mut cluster = Cluster::start(4, 2, 10);
    for step in 1..=3 {
        assert!(seal_alone(&mut cluster, step) < 100, "three slots are free");
    }
    for step in 4..=6 {
        let waited = seal_alone(&mut cluster, step);
        assert!((3_000..4_200).contains(&waited), "step {step}: {waited} ms");
    }
    // Whoever waits for one that has gone hears at once that it never comes, and why.
    let wait = Request::Wait {
        run: cluster.run(),
        step: Step::new(1),
        state: CheckpointState::Committed,
        timeout_ms: 10_000,
    };
    let (reader, began) = (cluster.connect(0, Role::Reader), cluster.now);
    let Reply::Refused(refusal) = cluster.ask(0, reader, wait) else {
        panic!("it was given up");
    };
    assert_eq!(refusal.code, RefusalCode::Abandoned, "{refusal}");
    assert!(
        refusal.message.contains("a newer step needs its slot"),
        "{refusal}"
    );
    assert!(cluster.now - began < 100);
}

#[test]
fn a_tier_that_hangs_costs_saves_no_waiting() {
    let tier = Conduct {
        uploads: Uploads::Hang,
        ..Conduct::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, Some(tier), Room::default());
    for step in 1..=12 {
        let began = cluster.now;
        cluster.save_as(DurableWish::Required);
        let waited = cluster.now - began;
        assert!(waited < 100, "step {step} waited {waited} ms for its slots");
        cluster.run_until(5_000, "protection", |cluster| cluster.is_protected(0));
        cluster.run_for(200);
    }
}

/// With increments the newest durable step stays in RAM as the base of the next copy, which is worth less than any save: it
/// goes at once, whether a rank's slots are short or the budget is.
#[test]
fn the_base_of_the_next_increment_gives_way_to_a_save_at_once() {
    for (budget, slots) in [(1 << 30, 2), (2 * SLOT, 1)] {
        let small = Room {
            budgets: BTreeMap::from([(0, budget)]),
            durable_form: DurableForm::Increments,
            ..Room::default()
        };
        let tier = Some(Conduct::default());
        let mut cluster = Cluster::start_with(4, 2, 10, tier, small);
        cluster.save_and_wait(DurableWish::Required);
        cluster.save_and_wait(DurableWish::Never);
        let ledger = cluster.ledger(0);
        assert_eq!(
            ledger.slots, 2,
            "step 2, and step 1 as its base: {ledger:?}"
        );
        for _ in 0..slots {
            let (trainer, began) = (cluster.trainer(0), cluster.now);
            let acquire = acquire_slot(SLOT, 10_000);
            let granted = cluster.ask(0, trainer, acquire);
            assert!(matches!(granted, Reply::SlotGranted { .. }), "{granted:?}");
            let waited = cluster.now - began;
            assert!(waited < 100, "{waited} ms with a budget of {budget}");
        }
        let ledger = cluster.ledger(0);
        assert_eq!(ledger.slots, 1 + slots, "the base is gone: {ledger:?}");
    }
}

/// What a slot is refused with names what is in the way, and nothing to raise that has room.
#[test]
fn refusals_of_slots_say_what_is_in_the_way() {
    let mut cluster = Cluster::start_with(
        4,
        2,
        10,
        None,
        Room {
            budget: 100 * SLOT,
            ..Room::default()
        },
    );
    let trainer = cluster.trainer(0);
    let acquire = |bytes: u64| acquire_slot(bytes, 1_000);
    let Reply::Refused(refusal) = cluster.ask(0, trainer, acquire(101 * SLOT)) else {
        panic!("expected a refusal");
    };
    let text = refusal.message;
    assert!(text.contains("it is more than the whole budget"), "{text}");
    for _ in 0..3 {
        let granted = cluster.ask(0, trainer, acquire(SLOT));
        assert!(matches!(granted, Reply::SlotGranted { .. }), "{granted:?}");
    }
    let (code, text) = cluster.refused_slot(0, SLOT);
    assert_eq!(code, RefusalCode::Busy);
    assert!(text.contains("has sealed none"), "{text}");
}

/// It could be saved, and nobody could be told the digests of its chunks.
#[test]
fn a_shard_of_more_chunks_than_a_reader_can_be_told_of_gets_no_slot() {
    let room = Room {
        budget: 1 << 40,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    let trainer = cluster.trainer(0);
    let acquire = acquire_slot(8_100_000_000, 1_000);
    let Reply::Refused(refusal) = cluster.ask(0, trainer, acquire) else {
        panic!("expected a refusal");
    };
    assert_eq!(refusal.code, RefusalCode::ShardTooLong);
    assert!(refusal.message.contains("raise coding.chunk"), "{refusal}");
}

/// The step that waits for a tier that hangs gives way to a trainer that has waited for long, while a reader elsewhere gets a shard of
/// it: the session that reads it here is stopped before the trainer is given the slot.
#[test]
fn a_slot_is_given_only_once_no_session_reads_it() {
    let tier = Conduct {
        uploads: Uploads::Hang,
        ..Conduct::default()
    };
    let room = Room {
        budgets: BTreeMap::from([(0, 3 * SLOT)]),
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 400, Some(tier), room);
    let protect = |cluster: &mut Cluster, durable| {
        cluster.save_as(durable);
        cluster.run_until(60_000, "protection", |cluster| {
            (0..6).all(|node| cluster.is_protected(node))
        });
    };
    protect(&mut cluster, DurableWish::Required);
    let reader = cluster.connect(5, Role::Reader);
    let plan = plan_newest(10_000);
    let Reply::Plan(plan) = cluster.ask(5, reader, plan) else {
        panic!("step 1 is protected");
    };
    protect(&mut cluster, DurableWish::Never);
    let trainer = cluster.trainer(0);
    let acquire = || acquire_slot(SLOT, 10_000);
    let third = cluster.ask(0, trainer, acquire());
    assert!(matches!(third, Reply::SlotGranted { .. }), "{third:?}");
    let fourth = cluster.send(0, trainer, acquire());
    cluster.run_for(1_500);
    let open = open_shard(plan.manifest, Rank::new(0), 10_000);
    cluster.sessions.counts.begun.clear();
    cluster.send(5, reader, open);
    cluster.run_for(1_000);
    assert_eq!(
        cluster.sessions.counts.begun.len(),
        1,
        "{:?}",
        cluster.answer(fourth)
    );
    cluster.run_until(5_000, "a slot", |cluster| cluster.answer(fourth).is_some());
    let fourth = cluster.answer(fourth);
    assert!(
        matches!(fourth, Some(Reply::SlotGranted { .. })),
        "{fourth:?}"
    );
}

/// A short step is protected before the long one that it follows. Both that are older go then, and whoever waits is given a slot of
/// neither before the sessions of both are stopped.
#[test]
fn of_two_steps_that_go_no_slot_is_given_before_the_sessions_of_both_are_stopped() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    cluster.save_and_wait(DurableWish::Never);
    // In the slot that the first step had, which is asked for first.
    cluster.scene.stripes = 400;
    cluster.save();
    cluster.run_for(500);
    cluster.scene.stripes = 10;
    cluster.save();
    let acquire = acquire_slot(SLOT, 10_000);
    let waits = cluster.send(0, cluster.trainer(0), acquire);
    cluster.run_for(10);
    assert_eq!(cluster.answer(waits), None);
    cluster.run_until(2_000, "a slot", |cluster| cluster.answer(waits).is_some());
    let granted = cluster.answer(waits);
    assert!(
        matches!(granted, Some(Reply::SlotGranted { .. })),
        "{granted:?}"
    );
}

/// What has given way is not room enough: a trainer is told so as soon as one for which nothing could, whatever its patience.
#[test]
fn a_save_that_does_not_fit_is_refused_at_once_also_if_something_gave_way() {
    let room = Room {
        budgets: BTreeMap::from([(0, 4 * SLOT)]),
        durable_form: DurableForm::Increments,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, Some(Conduct::default()), room);
    cluster.save_and_wait(DurableWish::Required);
    cluster.save_and_wait(DurableWish::Never);
    let trainer = cluster.trainer(0);
    let acquire = |bytes: u64| acquire_slot(bytes, 60_000);
    let granted = cluster.ask(0, trainer, acquire(SLOT));
    assert!(matches!(granted, Reply::SlotGranted { .. }), "{granted:?}");
    let began = cluster.now;
    let Reply::Refused(refusal) = cluster.ask(0, trainer, acquire(3 * SLOT)) else {
        panic!("step 2 and what is being filled leave room for two");
    };
    assert_eq!(refusal.code, RefusalCode::BudgetFull, "{refusal}");
    let waited = cluster.now - began;
    assert!(waited < 4_000, "{waited} ms");
}

/// Home nodes of a step among five.
fn homes_among_five(cluster: &Cluster, step: u64) -> Vec<usize> {
    let key = CheckpointKey {
        namespace: namespace(),
        run: cluster.run(),
        step: Step::new(step),
    };
    homes(&members(5), &key, 2).iter().map(index).collect()
}

fn shows(cluster: &mut Cluster, node: usize, step: u64) -> bool {
    let status = cluster.ram(node).node.status_json(&Viewer::Operator);
    status.contains(&format!(r#""step":{step},"#))
}

/// Home nodes go by what a step bears before all others hear of it. Whoever hears late, when the newer step bears nothing any more, keeps
/// the older one; that nobody else has it does not stop his saves.
#[test]
fn a_step_that_its_home_nodes_have_let_go_stops_no_save() {
    const CODES: usize = 3;
    let mut cluster = Cluster::start_of(5, 3, 1, 100);
    let mut step = 0;
    let late = loop {
        cluster.save_on_all(3, DurableWish::Never);
        step += 1;
        let decide = [step, step + 1].map(|step| homes_among_five(&cluster, step));
        let decides = |node: &usize| decide.concat().contains(node);
        let late = (0..3).find(|node| !decides(node));
        if let Some(late) = late.filter(|_| !decides(&CODES)) {
            break late;
        }
    };
    cluster.save_as(DurableWish::Never);
    let next = Step::new(step + 1);
    cluster.run_until(60_000, "its parity", |cluster| {
        let shown = cluster.processes[CODES].iter();
        let mut shown = shown.flat_map(|process| process.node.shown());
        shown.any(|it| it.key.step == next && !it.parity.is_empty())
    });
    let decide = homes_among_five(&cluster, step + 1);
    cluster.scene.unheard.extend(decide.iter().copied());
    cluster.run_for(100);
    assert!(decide.iter().all(|node| cluster.is_protected(*node)));
    cluster.kill(CODES);
    cluster.run_for(6_000);
    cluster.scene.unheard.clear();
    cluster.run_for(3_000);
    assert!(cluster.is_protected(late));
    assert!(shows(&mut cluster, late, step), "it may be the safer one");
    for node in decide {
        assert!(!shows(&mut cluster, node, step), "n{node} has retired it");
    }
    for _ in 0..4 {
        cluster.save();
        cluster.run_for(2_000);
    }
    assert!(!shows(&mut cluster, late, step));
}

/// A peer that errs has one node give up what it has of a committed step. Nobody can make that whole again: the others give it up too,
/// though the word of the first may be lost, and begin no session of it again and again.
#[test]
fn a_committed_step_that_one_node_was_made_to_give_up_is_given_up_by_all() {
    for (erring, gives_up, is_heard) in [(5, 0, true), (5, 1, true), (4, 0, false), (5, 2, false)] {
        let mut cluster = Cluster::start(4, 2, 400);
        cluster.save_on_all(6, DurableWish::Never);
        cluster.save_as(DurableWish::Never);
        cluster.run_until(10_000, "a commit", |cluster| {
            (0..6).all(|node| cluster.is_committed(node))
        });
        cluster.run_for(1_500);
        if !is_heard {
            cluster.scene.unheard.insert(gives_up);
        }
        let key = CheckpointKey {
            namespace: namespace(),
            run: cluster.run(),
            step: Step::new(2),
        };
        let message = PeerMessage::Abandoned {
            key,
            reason: "because".into(),
        };
        let from = name(erring);
        cluster.tell(gives_up, Input::Message { from, message });
        assert!(!shows(&mut cluster, gives_up, 2), "it is believed");
        cluster.run_for(50);
        cluster.scene.unheard.clear();
        cluster.run_for(60_000);
        for node in 0..6 {
            let audit = cluster.ram(node).node.audit();
            assert!(!shows(&mut cluster, node, 2), "n{node} keeps it");
            assert!(shows(&mut cluster, node, 1), "n{node}");
            assert_eq!(audit.sessions, 0, "n{node}");
        }
    }
}
