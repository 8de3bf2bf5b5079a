//! Daemons that end and start again while their nodes' memory stays: everything is there at once, nothing moves between nodes, and
//! what has rotted meanwhile is found.

use crate::cluster::{CHUNK, Cluster, Room, STRIPE_MS};
use crate::testkit::{acquire_slot, commit_step, namespace, open_shard, plan_newest};
use storaged_core::{Note, ParityId};
use storaged_wire::local::{DurableWish, Reply, Request, Role, Rung};
use storaged_wire::{CheckpointState, Digest, KeptRecord, Rank, RecordName, RefusalCode, Step};

const STRIPES: u64 = 100;

/// (8,2), a step that is protected, and nobody counted yet.
fn protected() -> Cluster {
    let mut cluster = Cluster::start(8, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Never);
    cluster.reset_counts();
    cluster.sessions.counts.begun.clear();
    cluster
}

/// The daemon of a node ends, and another one takes over its memory.
fn restart(cluster: &mut Cluster, node: usize, away_ms: u64) {
    cluster.end_daemon(node);
    cluster.run_for(away_ms);
    cluster.start_after(0, node);
    cluster.run_for(10);
}

fn planned(cluster: &mut Cluster, node: usize) -> Digest {
    let reader = cluster.connect(node, Role::Reader);
    match cluster.ask(node, reader, plan_newest(10_000)) {
        Reply::Plan(plan) => plan.manifest,
        other => panic!("expected a plan, got {other:?}"),
    }
}

fn opened(cluster: &mut Cluster, node: usize, manifest: Digest) -> Reply {
    let reader = cluster.connect(node, Role::Reader);
    let open = open_shard(manifest, Rank::new(node as u32), 60_000);
    cluster.ask(node, reader, open)
}

fn bears(cluster: &mut Cluster, node: usize) -> String {
    let reader = cluster.connect(node, Role::Reader);
    let reply = cluster.ask(node, reader, Request::List { namespace: None });
    let Reply::Checkpoints(infos) = reply else {
        panic!("{reply:?}");
    };
    format!("{:?}", infos.last().and_then(|info| info.bears))
}

#[test]
fn a_daemon_that_is_back_with_its_memory_has_all_and_nothing_moves() {
    for node in [0, 7, 8, 9] {
        for away_ms in [10, 1_500, 8_000] {
            let mut cluster = protected();
            let before = bears(&mut cluster, 5);
            restart(&mut cluster, node, away_ms);
            cluster.run_for(20_000);
            let begun = &cluster.sessions.counts.begun;
            assert!(begun.is_empty(), "n{node} after {away_ms} ms: {begun:?}");
            assert_eq!(bears(&mut cluster, 5), before, "n{node}");
            assert_eq!(bears(&mut cluster, node), before, "n{node}");
        }
    }
}

#[test]
fn a_shard_is_opened_from_own_ram_before_any_peer_is_heard() {
    let mut cluster = protected();
    let manifest = planned(&mut cluster, 3);
    cluster.end_daemon(0);
    cluster.links_notice_late(0, 60_000);
    cluster.run_for(50);
    cluster.start_after(0, 0);
    cluster.run_for(1);
    let reply = opened(&mut cluster, 0, manifest);
    let Reply::ShardOpened {
        rung: Rung::OwnRam,
        leaves,
        fingerprints,
        ..
    } = &reply
    else {
        panic!("expected own RAM, got {reply:?}");
    };
    // Readers compare with the fingerprints, which outlive the daemon like the digests.
    let prints = fingerprints.as_ref().map(|prints| prints.len());
    assert_eq!(prints, Some(leaves.len()));
}

#[test]
fn all_daemons_may_end_at_once() {
    let mut cluster = protected();
    let before = bears(&mut cluster, 5);
    for node in 0..10 {
        cluster.end_daemon(node);
    }
    cluster.run_for(500);
    for node in 0..10 {
        cluster.start_after(node as u64 * 30, node);
    }
    cluster.run_for(10_000);
    assert!(cluster.sessions.counts.begun.is_empty());
    assert_eq!(bears(&mut cluster, 5), before);
    let manifest = planned(&mut cluster, 5);
    for node in 0..8 {
        let reply = opened(&mut cluster, node, manifest);
        assert!(matches!(reply, Reply::ShardOpened { .. }), "{reply:?}");
    }
    // The job goes on under its run, and its next step is protected.
    (0..8).for_each(|node| cluster.attach(node));
    cluster.save_and_wait(DurableWish::Never);
}

/// The daemon ends while the step is coded: the others finish without it or with it, and it comes back to what was there.
#[test]
fn a_step_that_is_being_coded_is_protected_all_the_same() {
    for node in [0, 8] {
        let mut cluster = protected();
        cluster.save();
        cluster.run_for(STRIPES * STRIPE_MS / 2);
        restart(&mut cluster, node, 300);
        cluster.run_until(60_000, "protection", |cluster| cluster.is_protected(5));
        cluster.run_for(5_000);
        let ledger = cluster.ledger(node);
        assert_eq!(ledger.sessions, 0, "{ledger:?}");
    }
}

/// A save of which this rank has sealed its shard, and the others have not: it commits once they have.
#[test]
fn a_save_that_has_begun_goes_on() {
    let mut cluster = protected();
    cluster.save();
    cluster.run_for(2);
    restart(&mut cluster, 0, 50);
    cluster.run_until(20_000, "commit", |cluster| cluster.is_committed(5));
    cluster.run_until(60_000, "protection", |cluster| cluster.is_protected(5));
}

#[test]
fn memory_that_does_not_have_its_digests_any_more_is_healed() {
    let mut cluster = protected();
    let before = bears(&mut cluster, 5);
    cluster.end_daemon(0);
    cluster.left_by(0).rots = true;
    cluster.start_after(50, 0);
    cluster.run_for(5_000);
    cluster.run_until(60_000, "healing", |cluster| {
        cluster.healed_at(&[0], 0).is_some()
    });
    assert_eq!(bears(&mut cluster, 5), before);
}

/// What the records of a node name, which its holder does not have.
fn lose_memory(cluster: &mut Cluster, node: usize) {
    let left = cluster.left_by(node);
    for record in left.kept.values() {
        if let KeptRecord::Checkpoint(kept) = record {
            let slots = kept.shards.iter().map(|it| it.slot);
            left.unheld.slots.extend(slots);
            let sets = kept.parity.iter().map(|it| ParityId(it.set));
            left.unheld.parity.extend(sets);
        }
    }
}

/// The holder was full, or never got what the daemon handed over last. The records alone count for nothing: neither on this node nor
/// on those that count its blocks, be it a home node, a data node or one that codes.
#[test]
fn memory_that_nobody_held_is_lost_and_put_back() {
    for node in [0, 3, 7, 8, 9] {
        let mut cluster = protected();
        let before = bears(&mut cluster, 5);
        cluster.end_daemon(node);
        lose_memory(&mut cluster, node);
        cluster.start_after(50, node);
        cluster.run_for(50);
        let ledger = cluster.ledger(node);
        assert_eq!((ledger.slots, ledger.parity_sets), (0, 0), "n{node}");
        cluster.run_for(10);
        assert_eq!(cluster.held(node), [], "n{node}");
        let counted = |by: &usize| *by != node;
        for by in [0, 1, 2, 5].iter().filter(|by| counted(by)) {
            let held = cluster.held(*by);
            let bears_less = matches!(held.as_slice(), [(1, Some(0 | 1))]);
            assert!(bears_less, "n{by} after the loss of n{node}: {held:?}");
        }
        cluster.run_until(60_000, "healing", |cluster| {
            cluster.healed_at(&[node], 0).is_some()
        });
        cluster.run_for(2_000);
        assert_eq!(bears(&mut cluster, 5), before, "n{node}");
        assert_eq!(bears(&mut cluster, node), before, "n{node}");
    }
}

/// All ranks have sealed a step, and the shard of one has gone with its daemon before the step is committed. A step of which it is said
/// that it is there could never be coded.
#[test]
fn a_shard_that_nobody_held_does_not_count_for_a_commit() {
    let mut cluster = protected();
    let (step, length) = (Step::new(2), STRIPES * CHUNK);
    for node in 0..8 {
        let conn = cluster.trainer(node);
        let granted = cluster.ask(node, conn, acquire_slot(length, 10_000));
        let Reply::SlotGranted { slot, .. } = granted else {
            panic!("{granted:?}");
        };
        let seal = Request::SealSlot { slot, step, length };
        cluster.ask(node, conn, seal);
    }
    cluster.run_for(20);
    cluster.end_daemon(3);
    lose_memory(&mut cluster, 3);
    cluster.start_after(50, 3);
    cluster.run_for(1_000);
    let conn = cluster.trainer(0);
    cluster.send(0, conn, commit_step(step, DurableWish::Never));
    cluster.run_for(20_000);
    let mut notes = cluster.notes.iter().map(|(_, _, note)| note);
    let is_committed = |note: &Note| matches!(note, Note::State { key, state: CheckpointState::Committed } if key.step == step);
    assert!(!notes.any(is_committed), "the shard of rank 3 is nowhere");
}

/// Records that do not belong together, as of another version or a torn journal: nothing of them is used, and their memory goes.
#[test]
fn records_that_lack_something_make_nothing_usable() {
    let lacks: [fn(&RecordName) -> bool; 3] = [
        |name| matches!(name, RecordName::Manifest(_)),
        |name| matches!(name, RecordName::Table(..)),
        |name| matches!(name, RecordName::Checkpoint(_)),
    ];
    for lack in lacks {
        let mut cluster = protected();
        cluster.end_daemon(0);
        let kept = &mut cluster.left_by(0).kept;
        kept.retain(|name, _| !lack(name));
        cluster.start_after(0, 0);
        cluster.run_for(1);
        let ledger = cluster.ledger(0);
        assert_eq!((ledger.slots, ledger.used), (0, 0), "{ledger:?}");
        cluster.run_until(60_000, "healing", |cluster| {
            cluster.healed_at(&[0], 0).is_some()
        });
    }
    let mut cluster = protected();
    cluster.end_daemon(0);
    for record in cluster.left_by(0).kept.values_mut() {
        if let KeptRecord::Table(table) = record {
            table.leaves.reverse();
        }
    }
    cluster.start_after(0, 0);
    cluster.run_for(1);
    assert_eq!(cluster.ledger(0).slots, 0, "the tables are of another root");
}

/// The budget was made smaller: the newest step stays.
#[test]
fn what_does_not_fit_any_more_goes_oldest_first() {
    let room = Room {
        budget: 64 << 20,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, STRIPES, None, room);
    for _ in 0..2 {
        cluster.save_and_wait(DurableWish::Never);
    }
    let used = cluster.ledger(0).used;
    cluster.end_daemon(0);
    cluster.set_budget(0, used);
    cluster.start_after(50, 0);
    cluster.run_for(5_000);
    let ledger = cluster.ledger(0);
    assert!(ledger.used <= used, "{ledger:?}");
    let manifest = planned(&mut cluster, 0);
    let reply = opened(&mut cluster, 0, manifest);
    assert!(matches!(reply, Reply::ShardOpened { .. }), "{reply:?}");
}

/// What was promised to a run stays promised, though nobody else is there to say so.
#[test]
fn fences_outlive_the_daemon() {
    let mut cluster = Cluster::start(4, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Never);
    let old = cluster.run();
    cluster.begin_again();
    assert!(cluster.run() > old);
    cluster.end_daemon(0);
    for node in 1..6 {
        cluster.kill(node);
    }
    cluster.start_after(50, 0);
    cluster.run_for(50);
    let role = Role::Trainer {
        run: old,
        rank: Rank::new(0),
        world_size: storaged_wire::WorldSize::new(4).unwrap(),
    };
    let refused = cluster.try_connect(0, namespace(), role);
    let refusal = refused.expect_err("a newer run was opened");
    assert_eq!(refusal.code, RefusalCode::OlderRun, "{refusal:?}");
}
