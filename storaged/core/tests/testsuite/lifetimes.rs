//! What becomes of the RAM of jobs that have ended, of slots whose trainers are gone, and of names that nobody uses.

use std::collections::BTreeMap;

use crate::cluster::{self, Cluster, Conduct, Room, SLOT};
use crate::testkit::{acquire_slot, open_shard, plan_newest};
use storaged_core::Note;
use storaged_wire::local::{DurableWish, Reply, Request, Role, standing};
use storaged_wire::peer::DropAnswer;
use storaged_wire::{CheckpointState, NodeName, Rank, RefusalCode, Step, WorldSize};

const NODES: usize = 6;
/// Its parity.
const PARITY: u64 = 10 * cluster::CHUNK;

fn room(budget: u64, idle_job_ms: u64) -> Room {
    Room {
        budget,
        idle_job_ms,
        ..Room::default()
    }
}

fn evictions(cluster: &Cluster) -> Vec<String> {
    let notes = cluster.notes.iter();
    let evicted = notes.filter_map(|(_, _, note)| match note {
        Note::Evicted { namespace, .. } => Some(namespace.to_string()),
        _ => None,
    });
    evicted.collect()
}

fn planned(cluster: &mut Cluster, node: usize) -> Result<u64, RefusalCode> {
    let reader = cluster.connect(node, Role::Reader);
    let plan = plan_newest(10_000);
    let reply = cluster.ask(node, reader, plan);
    cluster.disconnect(node, reader);
    match reply {
        Reply::Plan(plan) => Ok(plan.step.get()),
        Reply::Refused(refusal) => Err(refusal.code),
        other => panic!("{other:?}"),
    }
}

#[test]
fn jobs_one_after_the_other_are_all_served() {
    let budget = 4 * SLOT;
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(budget, 1_000));
    cluster.end_job();
    for number in 0..40 {
        cluster.begin_job(&format!("job-{number}"));
        cluster.save_and_wait(DurableWish::Never);
        cluster.end_job();
        cluster.run_for(1_500);
    }
    for node in 0..NODES {
        let ledger = cluster.ledger(node);
        assert!(ledger.used <= budget, "{ledger:?}");
        assert!(ledger.slots <= 4 && ledger.jobs <= 40, "{ledger:?}");
    }
    assert_eq!(planned(&mut cluster, 3), Ok(1), "the last one is there");
}

#[test]
fn a_job_that_is_durable_gives_way_at_once_and_the_others_least_recently_used_first() {
    let tier = Some(Conduct::default());
    let mut cluster = Cluster::start_with(4, 2, 10, tier, room(3 * SLOT, 3_600_000));
    cluster.end_job();
    let wishes = [
        DurableWish::Never,
        DurableWish::Required,
        DurableWish::Required,
    ];
    for (name, wish) in ["a", "b", "c"].into_iter().zip(wishes) {
        cluster.begin_job(name);
        cluster.save_and_wait(wish);
        cluster.end_job();
        cluster.run_for(2_000);
    }
    cluster.begin_job("d");
    cluster.save_and_wait(DurableWish::Never);
    assert_eq!(
        evictions(&cluster),
        ["b"],
        "the older of the durable ones, once"
    );
    cluster.end_job();
    cluster.ask_of("b");
    assert_eq!(planned(&mut cluster, 0), Ok(1), "from the tier");
}

#[test]
fn a_job_whose_only_copy_is_in_ram_is_kept_for_its_time_and_named() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(2 * SLOT, 60_000));
    cluster.end_job();
    cluster.begin_job("a");
    cluster.save_and_wait(DurableWish::Never);
    cluster.save_and_wait(DurableWish::Never);
    cluster.end_job();
    cluster.begin_job("b");
    cluster.run_for(1_500);
    cluster.save_and_wait(DurableWish::Never);
    let (code, text) = cluster.refused_slot(0, SLOT);
    assert_eq!(code, RefusalCode::BudgetFull, "{text}");
    for named in [
        "a 2097152 bytes",
        "not durable",
        "storaged drop a",
        "b 2097152 bytes (has trainers on n0)",
    ] {
        assert!(text.contains(named), "{named}: {text}");
    }
    assert!(evictions(&cluster).is_empty());
    cluster.run_for(60_000);
    cluster.save_and_wait(DurableWish::Never);
    assert_eq!(evictions(&cluster), ["a"]);
}

/// The trainers of the job before are gone for less than its time: the next one's save does not fail for that.
#[test]
fn a_save_waits_for_the_ram_of_a_job_that_is_about_to_give_way() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(2 * SLOT, 1_000));
    cluster.end_job();
    for job in ["a", "b", "c"] {
        cluster.begin_job(job);
        cluster.save_and_wait(DurableWish::Never);
        cluster.save_and_wait(DurableWish::Never);
        cluster.end_job();
    }
    assert_eq!(evictions(&cluster), ["a", "b"]);
}

#[test]
fn what_would_not_be_enough_is_not_dropped() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(3 * SLOT, 1_000));
    cluster.end_job();
    cluster.begin_job("a");
    cluster.save_and_wait(DurableWish::Never);
    cluster.end_job();
    cluster.begin_job("b");
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(5_000);
    let acquire = acquire_slot(3 * SLOT, 1_000);
    let trainer = cluster.trainer(0);
    let reply = cluster.ask(0, trainer, acquire);
    assert!(
        matches!(&reply, Reply::Refused(r) if r.code == RefusalCode::BudgetFull),
        "{reply:?}"
    );
    assert!(evictions(&cluster).is_empty());
}

#[test]
fn a_coding_node_does_not_take_a_quiet_job_for_one_that_has_ended() {
    let coding = [(4, 3 * PARITY / 2), (5, 3 * PARITY / 2)];
    let room = Room {
        budgets: BTreeMap::from(coding),
        ..room(1 << 30, 1_000)
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(60_000);
    cluster.begin_job("other");
    cluster.save();
    cluster.run_for(30_000);
    assert!(evictions(&cluster).is_empty(), "{:?}", evictions(&cluster));
    assert!(!cluster.is_protected(0), "there is no room for its parity");
}

#[test]
fn what_was_evicted_is_not_repaired_back_also_not_by_a_node_that_missed_it() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(2 * SLOT, 1_000));
    cluster.end_job();
    cluster.begin_job("a");
    cluster.save_and_wait(DurableWish::Never);
    cluster.end_job();
    cluster.run_for(5_000);
    cluster.pause(5, 20_000);
    cluster.run_for(3_000);
    cluster.begin_job("b");
    // Without the paused node nothing can be coded: that is of no concern here.
    for _ in 0..2 {
        cluster.save();
        cluster.run_for(500);
    }
    assert_eq!(evictions(&cluster).first().map(String::as_str), Some("a"));
    cluster.run_for(30_000);
    for node in 0..4 {
        assert_eq!(
            cluster.ledger(node).slots,
            2,
            "n{node}: {:?}",
            cluster.ledger(node)
        );
    }
    let parity_sets = cluster.ledger(5).parity_sets;
    assert!(parity_sets <= 2, "only of b: {parity_sets}");
}

#[test]
fn a_dropped_job_is_gone_everywhere_unless_it_has_trainers() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(1 << 30, 3_600_000));
    cluster.save_and_wait(DurableWish::Never);
    let drop_it = |cluster: &mut Cluster, force| {
        let reader = cluster.connect(5, Role::Reader);
        let timeout_ms = 5_000;
        let reply = cluster.ask(5, reader, Request::Drop { force, timeout_ms });
        cluster.disconnect(5, reader);
        reply
    };
    cluster.run_for(2_000);
    let Reply::Refused(refusal) = drop_it(&mut cluster, false) else {
        panic!("it has trainers");
    };
    assert_eq!(refusal.code, RefusalCode::InUse);
    assert!(refusal.message.contains("n0"), "{}", refusal.message);
    assert_eq!(planned(&mut cluster, 0), Ok(1));
    cluster.end_job();
    cluster.run_for(2_000);
    let Reply::Dropped(report) = drop_it(&mut cluster, false) else {
        panic!("it has no trainers any more");
    };
    let silent: Vec<NodeName> = vec![];
    assert_eq!((report.nodes.len(), report.silent), (NODES, silent));
    for node in &report.nodes {
        let bytes = match node.node.as_str() {
            "n4" | "n5" => PARITY,
            _ => SLOT,
        };
        let checkpoints = 1;
        assert_eq!(
            node.answer,
            DropAnswer::Freed { bytes, checkpoints },
            "{node:?}"
        );
    }
    cluster.run_for(100_000);
    for node in 0..NODES {
        let ledger = cluster.ledger(node);
        assert_eq!(
            (ledger.used, ledger.slots, ledger.parity_sets, ledger.jobs),
            (0, 0, 0, 0)
        );
    }
    assert_eq!(planned(&mut cluster, 0), Err(RefusalCode::UnknownNamespace));
}

#[test]
fn a_drop_ends_at_the_callers_limit_and_names_who_was_silent() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    let reader = cluster.connect(0, Role::Reader);
    cluster.pause(5, 1_900);
    let (began, timeout_ms) = (cluster.now, 700);
    let force = true;
    let Reply::Dropped(report) = cluster.ask(0, reader, Request::Drop { force, timeout_ms }) else {
        panic!("n5 alone is silent");
    };
    assert_eq!(report.silent, [cluster::name(5)]);
    let took = cluster.now - began;
    assert!((700..750).contains(&took), "{took} ms");
}

#[test]
fn a_job_dropped_by_force_saves_on() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    let reader = cluster.connect(0, Role::Reader);
    let drop_it = Request::Drop {
        force: true,
        timeout_ms: 5_000,
    };
    let reply = cluster.ask(0, reader, drop_it);
    assert!(matches!(reply, Reply::Dropped(_)), "{reply:?}");
    cluster.save_and_wait(DurableWish::Never);
    assert_eq!(planned(&mut cluster, 0), Ok(2));
}

#[test]
fn free_slots_go_with_their_trainer_and_sealed_ones_stay() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    cluster.save_and_wait(DurableWish::Never);
    assert_eq!(
        cluster.ledger(0).slots,
        2,
        "one sealed, one to be used again"
    );
    cluster.end_job();
    for node in 0..4 {
        let ledger = cluster.ledger(node);
        assert_eq!((ledger.slots, ledger.used), (1, SLOT), "the newest step");
    }
    assert_eq!(planned(&mut cluster, 0), Ok(2));
}

#[test]
fn trainers_of_a_fenced_run_lose_what_they_hold_and_are_told_so() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    let old = cluster.trainer(0);
    let acquire = acquire_slot(SLOT, 60_000);
    // They hang in the middle of filling; the last one waits for a slot that never comes free.
    for _ in 0..2 {
        let reply = cluster.ask(0, old, acquire.clone());
        assert!(matches!(reply, Reply::SlotGranted { .. }), "{reply:?}");
    }
    let waiting = cluster.send(0, old, acquire.clone());
    cluster.run_for(100);
    assert!(cluster.answer(waiting).is_none());
    let reader = cluster.connect(1, Role::Reader);
    let reply = cluster.ask(1, reader, Request::OpenRun { timeout_ms: 10_000 });
    assert!(matches!(reply, Reply::RunOpened { .. }), "{reply:?}");
    cluster.run_for(10);
    let is_older = |reply: Option<&Reply>| match reply {
        Some(Reply::Refused(refusal)) => refusal.code == RefusalCode::OlderRun,
        _ => false,
    };
    assert!(
        is_older(cluster.answer(waiting)),
        "{:?}",
        cluster.answer(waiting)
    );
    assert_eq!(cluster.ledger(0).slots, 1, "the protected step");
    let next = cluster.send(0, old, acquire);
    assert!(is_older(cluster.answer(next)), "{:?}", cluster.answer(next));
}

#[test]
fn names_that_nobody_uses_are_forgotten() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(1 << 30, 5_000));
    cluster.end_job();
    for number in 0..50 {
        cluster.begin_job(&format!("name-{number}"));
        cluster.end_job();
    }
    assert!(cluster.ledger(0).jobs >= 50);
    cluster.run_for(70_000);
    for node in 0..NODES {
        assert_eq!(cluster.ledger(node).jobs, 0, "n{node}");
    }
}

/// Processes of earlier incarnations that hang with a step open do not keep a rank from saving, as long as there is room;
/// nothing but what they read stays for them.
#[test]
fn readers_that_hang_with_old_steps_open_do_not_stop_saves() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(100 * SLOT, 3_600_000));
    let mut hanging = Vec::new();
    for _ in 0..5 {
        cluster.save_and_wait(DurableWish::Policy);
        hanging.push(open_own(&mut cluster, 0));
    }
    cluster.save_and_wait(DurableWish::Policy);
    cluster.save_and_wait(DurableWish::Policy);
    let read = (hanging.len() + 3) as u64;
    assert!(cluster.ledger(0).used <= read * SLOT + 4 * PARITY);
    for reader in hanging {
        cluster.disconnect(0, reader);
    }
    cluster.save_and_wait(DurableWish::Policy);
    assert!(cluster.ledger(0).used <= 3 * SLOT + 4 * PARITY);
}

/// Opens the newest checkpoint's shard that lies on the node, and keeps it open.
fn open_own(cluster: &mut Cluster, node: usize) -> storaged_core::ConnId {
    let reader = cluster.connect(node, Role::Reader);
    let plan = plan_newest(10_000);
    let Reply::Plan(plan) = cluster.ask(node, reader, plan) else {
        panic!("expected a plan");
    };
    let open = open_shard(plan.manifest, storaged_wire::Rank::new(node as u32), 60_000);
    let opened = cluster.ask(node, reader, open);
    assert!(matches!(opened, Reply::ShardOpened { .. }), "{opened:?}");
    reader
}

/// A node is restarted again and again before a step is protected: each of these steps has lost a shard that nothing can be
/// decoded from. They must not hold the other ranks' slots, or nothing is saved any more.
#[test]
fn steps_that_lost_a_shard_before_they_were_protected_give_way() {
    let mut cluster = Cluster::start_with(4, 2, 1_000, None, Room::default());
    cluster.save_and_wait(DurableWish::Policy);
    for _ in 0..4 {
        cluster.save();
        let committed = |cluster: &Cluster| (0..NODES).all(|node| cluster.is_committed(node));
        cluster.run_until(1_000, "a commit", committed);
        cluster.kill(0);
        cluster.start_after(200, 0);
        cluster.run_for(5_000);
        cluster.attach(0);
    }
    cluster.save_and_wait(DurableWish::Policy);
    assert_eq!(planned(&mut cluster, 5), Ok(6));
}

fn committed(cluster: &mut Cluster) {
    cluster.save();
    let committed = |cluster: &Cluster| (0..4).all(|node| cluster.is_committed(node));
    cluster.run_until(1_000, "a commit", committed);
    cluster.run_for(2_000);
}

/// With all coding nodes down the step that was protected bears no more than newer ones that have only committed. It is the
/// one that a restart may not go below: these give way, or the save is refused while somebody reads them.
#[test]
fn a_protected_step_stays_while_newer_ones_only_commit() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, Room::default());
    cluster.save_and_wait(DurableWish::Policy);
    [4, 5].into_iter().for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    committed(&mut cluster);
    let reader = open_own(&mut cluster, 0);
    committed(&mut cluster);
    let acquire = acquire_slot(SLOT, 30_000);
    let trainer = cluster.trainer(0);
    let refused = cluster.ask(0, trainer, acquire);
    assert!(matches!(&refused, Reply::Refused(refusal) if refusal.code == RefusalCode::Busy));
    cluster.disconnect(0, reader);
    committed(&mut cluster);
    committed(&mut cluster);
    let gone = |step: u64| {
        let is_it = |note: &Note| match note {
            Note::State { key, state } => {
                *state == CheckpointState::Retired && key.step.get() == step
            }
            Note::Abandoned { key, .. } => key.step.get() == step,
            _ => false,
        };
        cluster.notes.iter().any(|(_, _, note)| is_it(note))
    };
    assert_eq!([1, 2, 3].map(gone), [false, true, true]);
}

/// A coding node without room for parity stops protection and, because the last protected step stays, in the end saves. The
/// refusal and the status name that node, what it needs, what it has and the key, on every node.
#[test]
fn a_budget_too_small_for_parity_is_named_where_a_save_is_refused() {
    let mut room = room(100 * SLOT, 3_600_000);
    room.budgets.insert(5, PARITY - 1);
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    for _ in 0..3 {
        cluster.save();
        cluster.run_for(2_000);
    }
    let (code, text) = cluster.refused_slot(0, SLOT);
    assert_eq!(code, RefusalCode::Busy);
    for node in [0, 5] {
        let reader = cluster.connect(node, Role::Reader);
        let Reply::Status(status) = cluster.ask(node, reader, Request::Status) else {
            panic!("expected the status");
        };
        for word in [
            "n5 has no room: ".to_owned(),
            format!("needs {PARITY} bytes"),
            format!("of the budget of {}", PARITY - 1),
            "raise memory.budget there".into(),
        ] {
            assert!(text.contains(&word), "{word} in {text}");
            assert!(status.contains(&word), "n{node}: {word} in {status}");
        }
    }
}

/// What is only kept because somebody has it open bears nothing any more, and need not: a newer step is safe. It is shown so,
/// and nobody waits for it.
#[test]
fn a_step_that_is_only_read_is_shown_as_superseded_and_waited_for_by_nobody() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, room(100 * SLOT, 3_600_000));
    cluster.save_and_wait(DurableWish::Policy);
    let reader = open_own(&mut cluster, 0);
    cluster.save_and_wait(DurableWish::Policy);
    let of_steps = |cluster: &mut Cluster| {
        let Reply::Checkpoints(infos) = cluster.ask(0, reader, Request::List { namespace: None })
        else {
            panic!("expected the list");
        };
        let shown = infos.iter();
        shown
            .map(|info| standing(info.state, info.bears, info.kept_for))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of_steps(&mut cluster),
        ["superseded, held by a reader", "protected"]
    );
    let Reply::Status(status) = cluster.ask(0, reader, Request::Status) else {
        panic!("expected the status");
    };
    assert!(
        status.contains(r#""standing":"superseded, held by a reader","superseded":true"#)
            && !status.contains("exposed"),
        "{status}"
    );
    let asked = Request::RestartSafe { bears: None };
    let Reply::RestartSafe(objections) = cluster.ask(0, reader, asked) else {
        panic!("expected what speaks against a restart");
    };
    assert_eq!(objections, Vec::<String>::new());
    cluster.disconnect(0, reader);
    let again = cluster.connect(0, Role::Reader);
    let Reply::Checkpoints(infos) = cluster.ask(0, again, Request::List { namespace: None }) else {
        panic!("expected the list");
    };
    assert_eq!(infos.len(), 1, "{infos:?}");
}

#[test]
fn nothing_waits_for_a_job_that_was_evicted_with_its_only_copy() {
    let small = Room {
        budgets: BTreeMap::from([(2, 2 * SLOT)]),
        ..room(1 << 30, 1_000)
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, small);
    cluster.end_job();
    cluster.begin_job("a");
    cluster.save_and_wait(DurableWish::Never);
    cluster.end_job();
    cluster.run_for(5_000);
    cluster.begin_job("b");
    for _ in 0..3 {
        cluster.save();
        cluster.run_for(500);
    }
    assert_eq!(evictions(&cluster), ["a"], "n2 alone is short of room");
    cluster.ask_of("a");
    for node in 0..NODES {
        let began = cluster.now;
        let refused = planned(&mut cluster, node).expect_err("it is gone");
        let nothing = [RefusalCode::NoCheckpoint, RefusalCode::UnknownNamespace];
        assert!(nothing.contains(&refused), "n{node}: {refused:?}");
        let waited = cluster.now - began;
        assert!(
            waited < 1_000,
            "n{node} waited {waited} ms for what is gone"
        );
    }
}

/// A step goes with its job for another job's slot, while that one waits: whoever waits for the step is told at once.
#[test]
fn whoever_waits_for_a_step_hears_that_its_job_has_made_room() {
    let room = Room {
        budgets: BTreeMap::from([(0, SLOT)]),
        idle_job_ms: 2_500,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    let acquire = || acquire_slot(SLOT, 10_000);
    let (trainer, run) = (cluster.trainer(0), cluster.run());
    let Reply::SlotGranted { slot, .. } = cluster.ask(0, trainer, acquire()) else {
        panic!("there is room for one");
    };
    let (step, length) = (Step::new(1), SLOT);
    let sealed = cluster.ask(0, trainer, Request::SealSlot { slot, step, length });
    assert!(matches!(sealed, Reply::Done), "{sealed:?}");
    let reader = cluster.connect(0, Role::Reader);
    cluster.end_job();
    cluster.begin_job("other");
    cluster.run_for(2_000);
    let granted = cluster.send(0, cluster.trainer(0), acquire());
    let state = CheckpointState::Committed;
    let wait = Request::Wait {
        run,
        step,
        state,
        timeout_ms: 60_000,
    };
    let waits = cluster.send(0, reader, wait);
    cluster.run_for(1);
    assert_eq!(
        (cluster.answer(granted), cluster.answer(waits)),
        (None, None)
    );
    cluster.run_for(2_900);
    let (granted, told) = (cluster.answer(granted), cluster.answer(waits));
    assert!(
        matches!(granted, Some(Reply::SlotGranted { .. })),
        "{granted:?}"
    );
    assert!(matches!(told, Some(Reply::Refused(_))), "{told:?}");
}

/// A node is lost for good after two steps have committed and before they were coded. The run that comes after it goes on from the
/// step before, and must not be kept from saving by what nobody can give back.
#[test]
fn steps_that_a_lost_node_has_left_uncoded_do_not_hold_all_slots() {
    let mut cluster = Cluster::start(2, 2, 2_000);
    cluster.save_and_wait(DurableWish::Never);
    for _ in 0..2 {
        cluster.save();
        cluster.run_until(5_000, "a commit", |cluster| cluster.is_committed(1));
    }
    cluster.kill(0);
    cluster.run_for(5_000);
    let launcher = cluster.connect(1, Role::Reader);
    let reply = cluster.ask(1, launcher, Request::OpenRun { timeout_ms: 10_000 });
    let Reply::RunOpened { run } = reply else {
        panic!("no run: {reply:?}");
    };
    let role = Role::Trainer {
        run,
        rank: Rank::new(1),
        world_size: WorldSize::new(2).unwrap(),
    };
    let trainer = cluster.connect(1, role);
    let reply = cluster.ask(1, trainer, acquire_slot(2_000 * cluster::CHUNK, 10_000));
    assert!(matches!(reply, Reply::SlotGranted { .. }), "{reply:?}");
}
