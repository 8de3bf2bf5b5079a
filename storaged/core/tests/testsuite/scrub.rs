//! RAM that rots while daemons run: the scrub finds it, the block counts no longer, and what has rotted is put back where it was.

use crate::cluster::{Block, Cluster, Room};
use crate::testkit::{open_shard, plan_newest};
use storaged_codec::digest;
use storaged_core::{HeldBlock, Note, ParityId, ScrubPiece};
use storaged_wire::local::{DurableWish, Reply, Request, Role, Rung};
use storaged_wire::{Digest, Rank, RefusalCode, SlotId};

const STRIPES: u64 = 100;
const PERIOD_MS: u64 = 20_000;

fn with_scrub(k: usize, m: usize, period_ms: u64) -> Cluster {
    let room = Room {
        scrub_period_ms: period_ms,
        ..Room::default()
    };
    Cluster::start_with(k, m, STRIPES, None, room)
}

/// (4,2), a step that is protected, and nothing counted yet.
fn protected(period_ms: u64) -> Cluster {
    let mut cluster = with_scrub(4, 2, period_ms);
    cluster.save_and_wait(DurableWish::Never);
    cluster.reset_counts();
    cluster.sessions.counts.begun.clear();
    cluster
}

/// The slot of a data node's shard of the newest step.
fn slot_of(cluster: &mut Cluster, node: usize) -> SlotId {
    let shown = cluster.ram(node).node.shown();
    shown.last().expect("a step").shards[0].1
}

fn set_of(cluster: &mut Cluster, node: usize) -> ParityId {
    let shown = cluster.ram(node).node.shown();
    shown.last().expect("a step").parity[0].2
}

fn rot_shard(cluster: &mut Cluster, node: usize, chunks: &[usize]) {
    let slot = slot_of(cluster, node);
    let leaves = cluster.ram(node).leaves.get_mut(&slot).expect("a shard");
    let mut rotten = leaves.to_vec();
    chunks
        .iter()
        .for_each(|chunk| rotten[*chunk] = digest(b"rot"));
    *leaves = rotten.into();
}

fn rot_parity(cluster: &mut Cluster, node: usize, stripe: u64) {
    let set = set_of(cluster, node);
    cluster.ram(node).rotten_parity.insert((set, stripe));
}

fn bears(cluster: &mut Cluster, node: usize) -> Option<u32> {
    let shown = cluster.ram(node).node.shown();
    shown.last().expect("a step").bears
}

fn rotten_found(cluster: &Cluster) -> Vec<(usize, u64)> {
    let notes = cluster.notes.iter();
    let found = notes.filter_map(|(_, node, note)| match note {
        Note::Rotten { chunks, .. } => Some((*node, *chunks)),
        _ => None,
    });
    found.collect()
}

fn planned(cluster: &mut Cluster, node: usize) -> Digest {
    let reader = cluster.connect(node, Role::Reader);
    match cluster.ask(node, reader, plan_newest(10_000)) {
        Reply::Plan(plan) => plan.manifest,
        other => panic!("expected a plan, got {other:?}"),
    }
}

fn rung(cluster: &mut Cluster, node: usize, rank: u32) -> Reply {
    let manifest = planned(cluster, node);
    let reader = cluster.connect(node, Role::Reader);
    cluster.ask(node, reader, open_shard(manifest, Rank::new(rank), 60_000))
}

/// Stripes that sessions put in place at a node, and how often in all.
fn put(cluster: &Cluster, node: usize, block: Block) -> Vec<u64> {
    let put = cluster.sessions.counts.put.get(&(node, block));
    put.map_or_else(Vec::new, |put| put.keys().copied().collect())
}

#[test]
fn every_chunk_that_counts_is_read_within_the_period_and_again_within_the_next() {
    let mut cluster = protected(PERIOD_MS);
    for _ in 0..3 {
        cluster.scrubbed.clear();
        cluster.run_for(PERIOD_MS);
        for node in 0..6 {
            let read = cluster.scrubbed.get(&node).cloned().unwrap_or_default();
            let mut chunks: Vec<u64> = Vec::new();
            for piece in read {
                match piece {
                    ScrubPiece::Shard { chunks: some, .. } => chunks.extend(some),
                    ScrubPiece::Parity { stripes, .. } => chunks.extend(stripes),
                }
            }
            chunks.sort_unstable();
            chunks.dedup();
            assert_eq!(chunks, (0..STRIPES).collect::<Vec<_>>(), "n{node}");
        }
    }
    assert!(rotten_found(&cluster).is_empty());
    assert!(cluster.sessions.counts.begun.is_empty(), "nothing is moved");
}

#[test]
fn without_a_period_nothing_is_read() {
    let mut cluster = protected(0);
    rot_shard(&mut cluster, 1, &[3]);
    cluster.run_for(100_000);
    assert!(cluster.scrubbed.is_empty());
    assert_eq!(bears(&mut cluster, 1), Some(2));
}

#[test]
fn a_rotten_chunk_of_a_shard_is_put_back_where_it_was_and_nothing_else_moves() {
    for node in 0..4 {
        let mut cluster = protected(PERIOD_MS);
        let slot = slot_of(&mut cluster, node);
        rot_shard(&mut cluster, node, &[3, 70]);
        cluster.run_until(PERIOD_MS, "the rot to be found", |cluster| {
            !rotten_found(cluster).is_empty()
        });
        assert_eq!(rotten_found(&cluster), [(node, 2)]);
        cluster.run_until(10_000, "healing", |cluster| {
            cluster.healed_at(&[node], 0).is_some()
        });
        cluster.run_for(1_000);
        assert_eq!(put(&cluster, node, Block::Shard), [3, 70], "n{node}");
        assert_eq!(slot_of(&mut cluster, node), slot, "it is where it was");
        for at in 0..6 {
            assert_eq!(bears(&mut cluster, at), Some(2), "n{at}");
        }
        let reply = rung(&mut cluster, node, node as u32);
        let is_own = matches!(
            &reply,
            Reply::ShardOpened {
                rung: Rung::OwnRam,
                ..
            }
        );
        assert!(is_own, "{reply:?}");
        cluster.run_for(2 * PERIOD_MS);
        assert_eq!(rotten_found(&cluster), [(node, 2)], "it is right now");
    }
}

#[test]
fn a_rotten_chunk_of_parity_is_put_back_and_nothing_else_moves() {
    for node in [4, 5] {
        let mut cluster = protected(PERIOD_MS);
        rot_parity(&mut cluster, node, 42);
        cluster.run_until(PERIOD_MS, "healing", |cluster| {
            cluster.healed_at(&[node], 0).is_some()
        });
        cluster.run_for(1_000);
        assert_eq!(rotten_found(&cluster), [(node, 1)]);
        assert_eq!(put(&cluster, node, Block::Parity), [42], "n{node}");
        assert_eq!(bears(&mut cluster, 0), Some(2));
        cluster.run_for(2 * PERIOD_MS);
        assert_eq!(rotten_found(&cluster), [(node, 1)], "it is right now");
    }
}

/// While nobody can put it back, a block with a rotten chunk is one that was lost.
#[test]
fn what_has_rotted_does_not_count() {
    for node in [0, 4] {
        let mut cluster = with_scrub(4, 1, PERIOD_MS);
        cluster.save_and_wait(DurableWish::Never);
        assert_eq!(bears(&mut cluster, 1), Some(1));
        // Of another node the lane would be decoded; without it nothing can be.
        cluster.kill(2);
        cluster.run_for(5_000);
        if node == 0 {
            rot_shard(&mut cluster, 0, &[5]);
        } else {
            rot_parity(&mut cluster, 4, 5);
        }
        cluster.run_for(PERIOD_MS);
        assert_eq!(rotten_found(&cluster), [(node, 1)]);
        let reader = cluster.connect(1, Role::Reader);
        let reply = cluster.ask(1, reader, plan_newest(5_000));
        let Reply::Refused(refusal) = reply else {
            panic!("n{node}: two blocks of a lane are lost: {reply:?}");
        };
        let said = refusal.message;
        assert_eq!(refusal.code, RefusalCode::NewerUnreachable, "{said}");
        assert!(said.contains("cannot be decoded"), "{said}");
    }
}

#[test]
fn what_it_bears_goes_down_at_once_and_up_once_it_is_healed() {
    let mut cluster = protected(PERIOD_MS);
    rot_shard(&mut cluster, 2, &[1]);
    cluster.run_until(PERIOD_MS, "the rot to be found", |cluster| {
        !rotten_found(cluster).is_empty()
    });
    let told = |cluster: &Cluster, losses: u32| {
        cluster
            .notes
            .iter()
            .any(|(_, _, note)| matches!(note, Note::Bears { bears, .. } if bears.losses == losses))
    };
    cluster.run_until(5_000, "word of the loss", |cluster| told(cluster, 1));
    cluster.run_until(5_000, "word of the repair", |cluster| {
        cluster.healed_at(&[2], 0).is_some()
    });
    cluster.run_for(1_000);
    assert_eq!(bears(&mut cluster, 2), Some(2));
}

/// The rotten chunk of its own shard is decoded from others, which have it for others too.
#[test]
fn two_nodes_that_rot_in_one_lane_are_healed() {
    let mut cluster = protected(PERIOD_MS);
    rot_shard(&mut cluster, 0, &[7]);
    rot_parity(&mut cluster, 5, 7);
    cluster.run_until(2 * PERIOD_MS, "healing", |cluster| {
        cluster.healed_at(&[0, 5], 0).is_some()
    });
    cluster.run_for(2_000);
    assert_eq!(put(&cluster, 0, Block::Shard), [7]);
    assert_eq!(put(&cluster, 5, Block::Parity), [7]);
    assert_eq!(bears(&mut cluster, 1), Some(2));
}

#[test]
fn readers_keep_what_they_read_while_it_is_put_back() {
    let mut cluster = protected(PERIOD_MS);
    let manifest = planned(&mut cluster, 1);
    let reader = cluster.connect(1, Role::Reader);
    let reply = cluster.ask(1, reader, open_shard(manifest, Rank::new(1), 10_000));
    assert!(matches!(reply, Reply::ShardOpened { .. }), "{reply:?}");
    rot_shard(&mut cluster, 1, &[9]);
    cluster.run_until(PERIOD_MS, "healing", |cluster| {
        cluster.healed_at(&[1], 0).is_some()
    });
    cluster.run_for(1_000);
    let readers = |cluster: &mut Cluster| cluster.ram(1).node.shown()[0].readers;
    assert_eq!(readers(&mut cluster), 1);
    let rank = Rank::new(1);
    let reply = cluster.ask(1, reader, Request::CloseShard { manifest, rank });
    assert!(matches!(reply, Reply::Done), "{reply:?}");
    assert_eq!(readers(&mut cluster), 0);
}

#[test]
fn who_closes_a_shard_while_it_is_put_back_does_not_hold_it() {
    let mut cluster = protected(PERIOD_MS);
    let manifest = planned(&mut cluster, 1);
    let open = open_shard(manifest, Rank::new(1), 10_000);
    let (closes, goes) = (
        cluster.connect(1, Role::Reader),
        cluster.connect(1, Role::Reader),
    );
    for reader in [closes, goes] {
        let reply = cluster.ask(1, reader, open.clone());
        assert!(matches!(reply, Reply::ShardOpened { .. }), "{reply:?}");
    }
    rot_shard(&mut cluster, 1, &[9]);
    cluster.run_until(PERIOD_MS, "the rot to be found", |cluster| {
        !rotten_found(cluster).is_empty()
    });
    let rank = Rank::new(1);
    cluster.ask(1, closes, Request::CloseShard { manifest, rank });
    cluster.disconnect(1, goes);
    cluster.run_until(PERIOD_MS, "healing", |cluster| {
        cluster.healed_at(&[1], 0).is_some()
    });
    cluster.run_for(1_000);
    assert_eq!(cluster.ram(1).node.shown()[0].readers, 0);
}

/// A job that saves all the time: the scrub lets it go first, and comes to everything all the same.
#[test]
fn saves_go_first_and_the_period_is_kept() {
    let mut cluster = with_scrub(4, 2, 2 * PERIOD_MS);
    for _ in 0..12 {
        cluster.save_and_wait(DurableWish::Never);
    }
    for node in 0..6 {
        let state = cluster.ram(node).node.scrub_state();
        assert!(state.age_ms <= 2 * PERIOD_MS, "n{node}: {state:?}");
        assert!(state.passes > 0, "n{node}: {state:?}");
    }
    for node in 0..6 {
        let ledger = cluster.ledger(node);
        assert_eq!(ledger.sessions, 0, "{ledger:?}");
    }
}

/// Chunks that rot one after the other are counted all, pass by pass.
#[test]
fn all_that_was_found_since_the_start_is_counted() {
    let mut cluster = protected(PERIOD_MS);
    for times in 1..=3 {
        rot_shard(&mut cluster, 3, &[times as usize]);
        cluster.run_until(2 * PERIOD_MS, "healing", |cluster| {
            cluster.sessions.counts.begun.len() == times as usize
        });
        cluster.run_for(2_000);
        let state = cluster.ram(3).node.scrub_state();
        assert_eq!(state.rotten, times, "{state:?}");
    }
    let status = cluster
        .ram(3)
        .node
        .status_json(&storaged_core::Viewer::Operator);
    assert!(status.contains(r#""rotten_chunks":3"#), "{status}");
}

/// The step retires while its block waits for a repair: what is here of it goes.
#[test]
fn what_waits_for_a_repair_goes_with_its_step() {
    let mut cluster = with_scrub(4, 1, PERIOD_MS);
    cluster.save_and_wait(DurableWish::Never);
    cluster.kill(2);
    cluster.run_for(3_000);
    rot_shard(&mut cluster, 0, &[5]);
    cluster.run_for(PERIOD_MS);
    assert_eq!(rotten_found(&cluster), [(0, 1)]);
    cluster.start_after(0, 2);
    cluster.run_for(5_000);
    cluster.attach(2);
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(5_000);
    for node in 0..5 {
        let audit = cluster.ram(node).node.audit();
        assert_eq!(
            (audit.parts, audit.restoring, audit.unowned_bytes),
            (0, 0, 0),
            "n{node}: {audit:?}"
        );
    }
}

#[test]
fn a_block_is_called_by_what_it_is() {
    let shard = HeldBlock::Shard(Rank::new(3), SlotId::new(9));
    assert_eq!(shard.to_string(), "shard of rank 3");
}
