//! Readers that find the copy of their own node wrong, and drills: what is made anew for them costs nobody else anything.

use crate::cluster::{Cluster, Room};
use crate::testkit::{
    CHUNK_BYTES, acquire_slot, commit_step, name, open_shard, open_without_own, plan_newest,
};
use storaged_core::{Input, Note};
use storaged_wire::local::{DurableWish, Reply, Request, Role, Rung};
use storaged_wire::peer::SessionFault;
use storaged_wire::{Digest, Rank, Step, WorldSize};

fn manifest_at(cluster: &mut Cluster, node: usize) -> Digest {
    let reader = cluster.connect(node, Role::Reader);
    let plan = cluster.ask(node, reader, plan_newest(10_000));
    let Reply::Plan(plan) = plan else {
        panic!("a plan: {plan:?}");
    };
    cluster.disconnect(node, reader);
    plan.manifest
}

fn drilled(manifest: Digest, rank: u32, lost: usize, timeout_ms: u32) -> Request {
    let mut open = open_shard(manifest, Rank::new(rank), timeout_ms);
    if let Request::OpenShard { withheld, .. } = &mut open {
        *withheld = Some(vec![name(lost)]);
    }
    open
}

/// Four data nodes with two ranks each, of which the second ones save much more: the lane of the first ones is coded long before the step
/// is protected.
fn two_lanes(short: u64, long: u64) -> Cluster {
    let mut cluster = Cluster::start(4, 2, short);
    cluster.ask_of("big");
    let reader = cluster.connect(0, Role::Reader);
    let reply = cluster.ask(0, reader, Request::OpenRun { timeout_ms: 10_000 });
    let Reply::RunOpened { run } = reply else {
        panic!("no run: {reply:?}");
    };
    let mut first = None;
    for rank in 0..8u32 {
        let node = (rank % 4) as usize;
        let role = Role::Trainer {
            run,
            rank: Rank::new(rank),
            world_size: WorldSize::new(8).unwrap(),
        };
        let conn = cluster.connect(node, role);
        first.get_or_insert(conn);
        let stripes = if rank < 4 { short } else { long };
        let length = stripes * u64::from(CHUNK_BYTES);
        let reply = cluster.ask(node, conn, acquire_slot(length, 10_000));
        let Reply::SlotGranted { slot, .. } = reply else {
            panic!("no slot: {reply:?}");
        };
        let step = Step::new(1);
        cluster.ask(node, conn, Request::SealSlot { slot, step, length });
    }
    cluster.send(
        0,
        first.unwrap(),
        commit_step(Step::new(1), DurableWish::Never),
    );
    cluster
}

/// A reader at a data node has its own shard decoded from the parity of a lane that is coded
/// already, the lane's leader dies before the other lane is done, and its successor codes the lane anew. The copy that is replaced meanwhile
/// ends that session, but not as corrupt: whoever leads would give the step up, though nothing of it is lost.
#[test]
fn a_reader_that_finds_its_copy_wrong_does_not_cost_the_step_while_it_is_coded() {
    let mut cluster = two_lanes(400, 4_000);
    let lane = |cluster: &Cluster| {
        let mut notes = cluster.notes.iter();
        notes.any(|(_, _, note)| matches!(note, Note::LaneProtected { .. }))
    };
    cluster.run_until(60_000, "the short lane", lane);
    cluster.run_for(200);
    let manifest = manifest_at(&mut cluster, 0);
    let reader = cluster.connect(0, Role::Reader);
    let id = cluster.send(0, reader, open_without_own(manifest, Rank::new(0), 60_000));
    cluster.run_for(300);
    cluster.kill(4);
    cluster.run_for(100_000);
    let opened = cluster.answer(id).cloned();
    let opened = matches!(
        opened,
        Some(Reply::ShardOpened {
            rung: Rung::Decoded,
            ..
        })
    );
    assert!(opened, "{:?}", cluster.answer(id));
    let told: Vec<_> = cluster
        .notes
        .iter()
        .filter(|(_, _, note)| !matches!(note, Note::State { .. } | Note::ShapeChosen { .. }))
        .collect();
    let abandoned = told
        .iter()
        .any(|(_, _, note)| matches!(note, Note::Abandoned { .. }));
    assert!(!abandoned, "{told:#?}");
    assert_eq!(cluster.held(0).len(), 1, "{told:#?}");
}

/// Of two sessions that read the copy one finds it corrupt: no trainer is given its slot then (the world sees to that).
#[test]
fn a_copy_that_a_session_finds_corrupt_is_nobody_elses_while_others_read_it() {
    let mut cluster = Cluster::start(8, 2, 400);
    cluster.save_and_wait(DurableWish::Never);
    let manifest = manifest_at(&mut cluster, 0);
    // Two readers elsewhere open rank 0's shard: each has a session that reads it at n0.
    for node in [5, 6] {
        let reader = cluster.connect(node, Role::Reader);
        cluster.send(node, reader, open_shard(manifest, Rank::new(0), 60_000));
    }
    cluster.run_for(1_000);
    let keys = cluster.sessions.of(0);
    assert_eq!(keys.len(), 2, "{keys:?}");
    let key = keys[0].clone();
    let ended = Input::SessionEnded {
        leader: key.leader,
        session: key.session,
        outcome: Err(SessionFault::Corrupt("chunk 7".into())),
        kept: Vec::new(),
    };
    cluster.tell(0, ended);
    let trainer = cluster.trainer(0);
    for _ in 0..3 {
        cluster.send(0, trainer, acquire_slot(1, 100));
    }
    cluster.run_for(200);
}

/// What is decoded for readers takes none of the slots that a rank saves in.
#[test]
fn drills_do_not_keep_a_trainer_from_its_slots() {
    let mut cluster = Cluster::start(4, 2, 1_000);
    cluster.save_and_wait(DurableWish::Never);
    let manifest = manifest_at(&mut cluster, 0);
    for _ in 0..3 {
        let reader = cluster.connect(0, Role::Reader);
        cluster.send(0, reader, drilled(manifest, 0, 0, 60_000));
    }
    cluster.run_for(500);
    let length = 1_000 * u64::from(CHUNK_BYTES);
    let reply = cluster.ask(0, cluster.trainer(0), acquire_slot(length, 5_000));
    assert!(matches!(reply, Reply::SlotGranted { .. }), "{reply:?}");
}

/// The same where readers say that what they were given is wrong.
#[test]
fn readers_that_find_their_copy_wrong_leave_nothing_behind() {
    let mut cluster = Cluster::start_with_tier(4, 2, 100);
    cluster.save_and_wait(DurableWish::Required);
    let before = cluster.ledger(0);
    let manifest = manifest_at(&mut cluster, 0);
    for _ in 0..5 {
        let reader = cluster.connect(0, Role::Reader);
        let other = cluster.connect(0, Role::Reader);
        let own = cluster.ask(0, other, open_shard(manifest, Rank::new(0), 30_000));
        assert!(matches!(own, Reply::ShardOpened { .. }), "{own:?}");
        let one = cluster.send(0, reader, open_without_own(manifest, Rank::new(0), 30_000));
        let two = cluster.send(0, other, open_without_own(manifest, Rank::new(0), 30_000));
        cluster.run_until_answered(&[one, two]);
        cluster.disconnect(0, reader);
        cluster.run_for(100);
        cluster.disconnect(0, other);
    }
    cluster.run_for(5_000);
    let after = cluster.ledger(0);
    let audit = cluster.ram(0).node.audit();
    assert_eq!(
        (audit.guests, audit.restoring, audit.sessions, audit.astray),
        (0, 0, 0, 0)
    );
    assert_eq!(audit.unowned_bytes, 0);
    assert_eq!((after.used, after.slots), (before.used, before.slots));
    for node in 0..6 {
        assert_eq!(cluster.held(node), [(1, Some(2))], "n{node}");
    }
    assert!(cluster.is_durable(0));
}

/// Two readers, one of which says again and again that its copy is wrong: another node's shard is healed all the same.
#[test]
fn a_reader_that_says_so_again_and_again_does_not_keep_others_from_being_healed() {
    let mut cluster = Cluster::start(8, 2, 400);
    cluster.save_and_wait(DurableWish::Never);
    let manifest = manifest_at(&mut cluster, 5);
    cluster.kill(1);
    cluster.run_for(10_000);
    let since = cluster.now;
    let reader = cluster.connect(0, Role::Reader);
    let mut asked = cluster.send(0, reader, open_without_own(manifest, Rank::new(0), 60_000));
    cluster.run_for(2_000);
    cluster.start_after(0, 1);
    for _ in 0..120 {
        cluster.run_for(500);
        if cluster.answer(asked).is_some() {
            asked = cluster.send(0, reader, open_without_own(manifest, Rank::new(0), 60_000));
        }
        if cluster.healed_at(&[1], since).is_some() {
            break;
        }
    }
    let healed = cluster.healed_at(&[1], since);
    assert!(healed.is_some(), "{:?}", cluster.failures(since));
    cluster.run_for(10_000);
    for node in 0..10 {
        assert_eq!(cluster.held(node), [(1, Some(2))], "n{node}");
    }
}

/// A step stays while somebody has it open, also by the copy that another reader has replaced.
#[test]
fn a_step_stays_for_the_reader_whose_copy_another_one_has_replaced() {
    for with_another in [false, true] {
        let mut cluster = Cluster::start(4, 2, 10);
        cluster.save_and_wait(DurableWish::Never);
        let manifest = manifest_at(&mut cluster, 0);
        let reader = cluster.connect(0, Role::Reader);
        let own = cluster.ask(0, reader, open_shard(manifest, Rank::new(0), 10_000));
        assert!(matches!(own, Reply::ShardOpened { .. }), "{own:?}");
        if with_another {
            let other = cluster.connect(0, Role::Reader);
            let opened = cluster.ask(0, other, open_without_own(manifest, Rank::new(0), 10_000));
            assert!(matches!(opened, Reply::ShardOpened { .. }), "{opened:?}");
            cluster.disconnect(0, other);
        }
        for _ in 0..3 {
            cluster.save_and_wait(DurableWish::Never);
        }
        let steps: Vec<u64> = cluster.held(0).into_iter().map(|it| it.0).collect();
        assert!(steps.contains(&1), "another: {with_another}: {steps:?}");
    }
}

/// A peer's opening that reads the copy goes on, or goes around, and is not refused.
#[test]
fn openings_elsewhere_outlive_the_replacement_of_the_copy_that_they_read() {
    let mut cluster = Cluster::start(4, 2, 400);
    cluster.save_and_wait(DurableWish::Never);
    let manifest = manifest_at(&mut cluster, 0);
    let reader = cluster.connect(0, Role::Reader);
    let replaced = cluster.send(0, reader, open_without_own(manifest, Rank::new(0), 60_000));
    cluster.run_for(2_000);
    let mut asked = Vec::new();
    for (node, rank) in [(5, 0), (3, 0), (0, 1)] {
        let reader = cluster.connect(node, Role::Reader);
        let request = if node == 0 {
            let mut open = open_shard(manifest, Rank::new(rank), 60_000);
            if let Request::OpenShard { without, .. } = &mut open {
                *without = Some(Rung::PeerRam);
            }
            open
        } else {
            open_shard(manifest, Rank::new(rank), 60_000)
        };
        asked.push(cluster.send(node, reader, request));
    }
    cluster.run_until_answered(&[replaced]);
    cluster.run_until_answered(&asked);
    for id in asked {
        let reply = cluster.answer(id);
        assert!(
            matches!(reply, Some(Reply::ShardOpened { .. })),
            "{reply:?}"
        );
    }
}

fn settled(cluster: &mut Cluster, what: &str) {
    for node in 0..6 {
        assert_eq!(cluster.held(node), [(1, Some(2))], "{what}: n{node}");
        let audit = cluster.ram(node).node.audit();
        assert_eq!(
            (
                audit.guests,
                audit.restoring,
                audit.sessions,
                audit.astray,
                audit.parts
            ),
            (0, 0, 0, 0, 0),
            "{what}: n{node}"
        );
        assert_eq!(audit.unowned_bytes, 0, "{what}: n{node}");
    }
    let sealed = cluster.ram(0).node.audit().sealed;
    assert_eq!(sealed, 1, "{what}");
}

/// Rot that the scrub finds at any moment of an opening that makes the shard anew.
#[test]
fn rot_that_is_found_while_a_reader_has_the_shard_made_anew_leaves_nothing_behind() {
    for delay in (0..24_000).step_by(400) {
        let room = Room {
            scrub_period_ms: 20_000,
            ..Room::default()
        };
        let mut cluster = Cluster::start_with(4, 2, 100, None, room);
        cluster.save_and_wait(DurableWish::Never);
        let manifest = manifest_at(&mut cluster, 0);
        let first = cluster.connect(0, Role::Reader);
        cluster.ask(0, first, open_shard(manifest, Rank::new(0), 10_000));
        let slot = cluster.ram(0).node.shown().last().unwrap().shards[0].1;
        let leaves = cluster.ram(0).leaves.get_mut(&slot).unwrap();
        let mut rotten = leaves.to_vec();
        (0..80).for_each(|at| rotten[at] = manifest);
        *leaves = rotten.into();
        cluster.run_for(delay);
        let reader = cluster.connect(0, Role::Reader);
        let other = cluster.connect(0, Role::Reader);
        let one = cluster.send(0, reader, open_without_own(manifest, Rank::new(0), 60_000));
        cluster.run_for(300);
        let two = cluster.send(0, other, open_without_own(manifest, Rank::new(0), 60_000));
        cluster.run_until_answered(&[one, two]);
        for id in [one, two] {
            let reply = cluster.answer(id);
            assert!(
                matches!(reply, Some(Reply::ShardOpened { .. })),
                "{delay}: {reply:?}"
            );
        }
        cluster.run_for(50_000);
        for conn in [first, reader, other] {
            cluster.disconnect(0, conn);
        }
        cluster.run_for(2_000);
        settled(&mut cluster, &format!("{delay} ms"));
    }
}

/// The next daemon finds the copy that took the other one's place, whenever the one before ended.
#[test]
fn the_next_daemon_has_the_copy_that_is_kept() {
    for delay in (900..1_300).step_by(3) {
        let mut cluster = Cluster::start(4, 2, 100);
        cluster.save_and_wait(DurableWish::Never);
        let manifest = manifest_at(&mut cluster, 0);
        let reader = cluster.connect(0, Role::Reader);
        let opened = cluster.send(0, reader, open_without_own(manifest, Rank::new(0), 60_000));
        cluster.run_for(delay);
        let was_opened = cluster.answer(opened).is_some();
        let since = cluster.now;
        cluster.end_daemon(0);
        cluster.run_for(200);
        cluster.start_after(0, 0);
        cluster.run_for(30_000);
        settled(&mut cluster, &format!("{delay} ms, opened: {was_opened}"));
        assert!(
            cluster.healed_at(&[0], since).is_none(),
            "{delay}: nothing was lost"
        );
    }
}
