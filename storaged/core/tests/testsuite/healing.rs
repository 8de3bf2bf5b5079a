//! Nodes that come back with empty RAM: several are healed at the speed of one, and nothing waits without need.

use std::collections::BTreeSet;

use crate::cluster::{Block, Cluster, STRIPE_MS};
use crate::testkit::{CHUNK_BYTES, acquire_slot, open_shard, open_without_own, plan_newest};
use storaged_core::Note;
use storaged_wire::local::{ByteRange, DurableWish, Reply, Request, Role, Rung};
use storaged_wire::{Digest, Rank};

const STRIPES: u64 = 400;

/// A protected checkpoint at (8, 2).
fn protected(stripes: u64) -> Cluster {
    let mut cluster = Cluster::start(8, 2, stripes);
    cluster.save();
    let everywhere = |cluster: &Cluster| (0..10).all(|node| cluster.is_protected(node));
    cluster.run_until(60_000, "protection", everywhere);
    cluster.run_for(2_000);
    cluster
}

/// Two data nodes that come back this far apart. Gives the time from the second one's start until both are healed.
fn two_come_back(gap_ms: u64) -> (Cluster, u64) {
    let mut cluster = protected(STRIPES);
    cluster.kill(0);
    cluster.kill(1);
    cluster.run_for(10_000);
    cluster.reset_counts();
    let since = cluster.now;
    cluster.start_after(0, 0);
    cluster.start_after(gap_ms, 1);
    cluster.run_until(60_000, "healing", |cluster| {
        cluster.healed_at(&[0, 1], since).is_some()
    });
    let healed = cluster.healed_at(&[0, 1], since).unwrap_or_default();
    assert!(
        cluster.failures(since).is_empty(),
        "{:?}",
        cluster.failures(since)
    );
    cluster.run_for(3_000);
    (cluster, healed - since - gap_ms)
}

#[test]
fn two_replacements_are_healed_by_one_gather_and_nothing_is_sent_twice() {
    for gap_ms in [0, 50, 500, 3_000] {
        let (cluster, took_ms) = two_come_back(gap_ms);
        for node in [0, 1] {
            let put = &cluster.sessions.counts.put[&(node, Block::Shard)];
            assert_eq!(
                put.len() as u64,
                STRIPES,
                "n{node} has all, {gap_ms} ms apart"
            );
            let again: Vec<_> = put.iter().filter(|(_, times)| **times > 1).collect();
            assert!(
                again.is_empty(),
                "sent again to n{node}, {gap_ms} ms apart: {again:?}"
            );
        }
        // From the second one's start on all of its shard comes, and of the other one's what is left comes with it.
        let copy_ms = STRIPES * STRIPE_MS;
        assert!(
            took_ms <= copy_ms * 105 / 100 + 100,
            "{gap_ms} ms apart: {took_ms} of {copy_ms}"
        );
        // Nine eighths of a block per stripe of both, and one of each other stripe for each of them.
        let alone = (gap_ms / STRIPE_MS).min(STRIPES);
        let most = (STRIPES - alone) * 9 / 8 + 2 * alone + 12;
        let sent = sent_most(&cluster);
        assert!(sent <= most, "{gap_ms} ms apart: {sent} of {most}");
        assert!(
            cluster.sessions.counts.moved.len() <= 3,
            "{gap_ms} ms apart: {} sessions",
            cluster.sessions.counts.moved.len()
        );
    }
}

/// The blocks that the node sent that sent most.
fn sent_most(cluster: &Cluster) -> u64 {
    let sent = cluster.sessions.counts.sent.values();
    sent.max().copied().unwrap_or_default()
}

/// A coding node is killed half-way through an encode and comes back at once. Gives the time from its start until the
/// step is protected.
fn coding_node_comes_back(node: usize, noticed_after_ms: u64) -> (Cluster, u64) {
    let mut cluster = protected(STRIPES);
    cluster.save();
    cluster.run_for(STRIPES * STRIPE_MS / 2);
    assert!(!cluster.is_protected(0));
    cluster.kill(node);
    cluster.reset_counts();
    cluster.start_after(50, node);
    cluster.run_for(50);
    cluster.links_notice_late(node, noticed_after_ms);
    let took = cluster.run_until(60_000, "protection", |cluster| cluster.is_protected(0));
    (cluster, took)
}

#[test]
fn a_coding_node_killed_during_an_encode_costs_that_encode_and_hardly_more() {
    for node in [8, 9] {
        let (cluster, took_ms) = coding_node_comes_back(node, 0);
        let encode_ms = STRIPES * STRIPE_MS;
        assert!(
            took_ms <= encode_ms + 300,
            "n{node}: {took_ms} of {encode_ms}"
        );
        // The step before it is not healed meanwhile: it is not needed any more.
        let put = &cluster.sessions.counts.put[&(node, Block::Parity)];
        assert!(put.values().all(|times| *times == 1), "n{node}: {put:?}");
    }
}

#[test]
fn what_was_proposed_to_peers_that_had_not_noticed_a_restart_is_said_again() {
    for node in [8, 9] {
        let (_, took_ms) = coding_node_comes_back(node, 2_000);
        // They notice by silence, up to 2.5 s after the death; a proposal is said again every second.
        let bound = STRIPES * STRIPE_MS + 2_500 + 1_100;
        assert!(took_ms <= bound, "n{node}: {took_ms} of {bound}");
    }
}

/// A reader on a node opens the shard of that node's rank.
fn open(cluster: &mut Cluster, node: usize, manifest: Digest) -> storaged_core::RequestId {
    open_of(cluster, node, node, manifest)
}

fn open_of(
    cluster: &mut Cluster,
    node: usize,
    rank: usize,
    manifest: Digest,
) -> storaged_core::RequestId {
    let reader = cluster.connect(node, Role::Reader);
    let open = open_shard(manifest, Rank::new(rank as u32), 60_000);
    cluster.send(node, reader, open)
}

/// The checkpoint that a restart would take.
fn planned(cluster: &mut Cluster, node: usize) -> Digest {
    let reader = cluster.connect(node, Role::Reader);
    let plan = plan_newest(10_000);
    match cluster.ask(node, reader, plan) {
        Reply::Plan(plan) => plan.manifest,
        other => panic!("expected a plan, got {other:?}"),
    }
}

fn is_open(cluster: &Cluster, id: storaged_core::RequestId) -> bool {
    match cluster.answer(id) {
        Some(Reply::ShardOpened { rung, .. }) => *rung == Rung::OwnRam,
        Some(other) => panic!("{other:?}"),
        None => false,
    }
}

/// Trainers on two nodes that came back with empty RAM open their shards, as whole ones or by these ranges of stripes.
fn shares_one_heal(ranges: &[(u64, u64)]) {
    let mut cluster = protected(STRIPES);
    let manifest = planned(&mut cluster, 5);
    cluster.kill(0);
    cluster.kill(1);
    cluster.run_for(10_000);
    cluster.reset_counts();
    for node in [0, 1] {
        cluster.start_after(0, node);
    }
    cluster.run_for(10);
    let chunk = u64::from(CHUNK_BYTES);
    let opened = [0, 1].map(|node| {
        let reader = cluster.connect(node, Role::Reader);
        let mut open = open_shard(manifest, Rank::new(node as u32), 60_000);
        if let Request::OpenShard { ranges: asked, .. } = &mut open {
            let bytes = ranges.iter().map(|(first, count)| ByteRange {
                offset: first * chunk,
                length: count * chunk,
            });
            asked.extend(bytes);
        }
        cluster.send(node, reader, open)
    });
    let took_ms = cluster.run_until(60_000, "opening", |cluster| {
        opened.iter().all(|id| is_open(cluster, *id))
    });
    let copy_ms = STRIPES * STRIPE_MS;
    assert!(
        took_ms <= copy_ms * 105 / 100 + 100,
        "{took_ms} of {copy_ms}"
    );
    let sent = sent_most(&cluster);
    assert!(sent <= STRIPES * 9 / 8 + 12, "{sent}");
}

#[test]
fn trainers_that_open_their_shards_on_replaced_nodes_share_one_heal() {
    shares_one_heal(&[]);
}

#[test]
fn trainers_that_ask_for_all_ranges_of_their_shards_share_one_heal_too() {
    shares_one_heal(&[(0, STRIPES)]);
    shares_one_heal(&[(1, STRIPES - 1), (0, 1)]);
}

/// Nodes hold a heal back beside a save, but not if a trainer waits for it: all its members know.
#[test]
fn a_heal_is_awaited_at_all_its_members_once_a_trainer_waits_for_it() {
    let mut cluster = protected(STRIPES);
    let manifest = planned(&mut cluster, 5);
    cluster.kill(0);
    cluster.run_for(10_000);
    cluster.reset_counts();
    cluster.start_after(0, 0);
    cluster.run_until(10_000, "a heal", |cluster| {
        !cluster.sessions.counts.moved.is_empty()
    });
    cluster.run_for(1_000);
    assert_eq!(cluster.sessions.counts.awaited.len(), 0);
    let opened = open(&mut cluster, 0, manifest);
    cluster.run_for(600);
    assert!(!is_open(&cluster, opened), "the heal still runs");
    let awaited = cluster.sessions.counts.awaited.iter().cloned();
    let (members, sessions): (Vec<usize>, BTreeSet<_>) = awaited.unzip();
    // Eight survivors and the one that gets the shard.
    assert_eq!(members.len(), 9, "{members:?}");
    assert!(members.contains(&0), "{members:?}");
    assert_eq!(sessions.len(), 1, "one session");
    cluster.run_until(60_000, "opening", |cluster| is_open(cluster, opened));
}

/// A reader on another node than the shard's gets a copy of it: one session, and its table of digests is known when it ends.
#[test]
fn an_opening_takes_one_session() {
    let mut cluster = protected(STRIPES);
    let manifest = planned(&mut cluster, 5);
    cluster.sessions.counts.begun.clear();
    cluster.sessions.counts.awaited.clear();
    let opened = open_of(&mut cluster, 5, 0, manifest);
    cluster.run_until(60_000, "opening", |cluster| {
        cluster.answer(opened).is_some()
    });
    let answer = cluster.answer(opened);
    assert!(
        matches!(answer, Some(Reply::ShardOpened { .. })),
        "{answer:?}"
    );
    assert_eq!(
        cluster.sessions.counts.begun.len(),
        1,
        "{:?}",
        cluster.sessions.counts.begun
    );
    // The node that has it sends it, and holds nothing back: its record says for whom it is.
    let awaited = cluster.sessions.counts.awaited.iter().map(|it| it.0);
    assert_eq!(awaited.collect::<Vec<_>>(), [0, 5]);
}

/// A newer step retires the one that a reader is opening, while a session fills the reader's slot. The durable tier has it too, but
/// it puts nothing there before the session's executor has said that it does not any more.
#[test]
fn a_shard_is_fetched_only_once_no_session_fills_its_slot() {
    let mut cluster = Cluster::start_with_tier(4, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Required);
    let manifest = planned(&mut cluster, 5);
    cluster.save();
    cluster.run_for(STRIPES * STRIPE_MS * 3 / 4);
    let opened = open_of(&mut cluster, 5, 0, manifest);
    cluster.run_until(60_000, "an answer", |cluster| {
        cluster.answer(opened).is_some()
    });
    assert!(cluster.is_protected(5));
    assert_eq!(cluster.tier.fetches, 1, "{:?}", cluster.answer(opened));
}

/// A job is dropped while its parity is being made: the memory goes once the executor has said that it is not at it any more.
#[test]
fn parity_goes_only_once_no_session_makes_it() {
    let mut cluster = Cluster::start(4, 2, STRIPES);
    cluster.save();
    cluster.run_for(STRIPES * STRIPE_MS / 2);
    assert!(!cluster.sessions.counts.begun.is_empty() && !cluster.is_protected(4));
    let reader = cluster.connect(4, Role::Reader);
    let drop_it = Request::Drop {
        force: true,
        timeout_ms: 5_000,
    };
    let reply = cluster.ask(4, reader, drop_it);
    assert!(matches!(reply, Reply::Dropped(_)), "{reply:?}");
    cluster.run_for(1_000);
    for node in [4, 5] {
        let ledger = cluster.ledger(node);
        assert_eq!(ledger.used, 0, "n{node}: {ledger:?}");
    }
}

/// A reader says that its node's copy is wrong, and the shard is made anew while others are healed from that copy: their session ends,
/// is led again, and a trainer is given the slot at no time (the world sees to that).
#[test]
fn a_shard_that_a_reader_found_wrong_is_replaced_once_no_session_reads_it() {
    let mut cluster = protected(STRIPES);
    let manifest = planned(&mut cluster, 5);
    cluster.kill(1);
    cluster.run_for(10_000);
    let reader = cluster.connect(0, Role::Reader);
    let open = open_without_own(manifest, Rank::new(0), 60_000);
    let opened = cluster.send(0, reader, open);
    cluster.run_for(STRIPES * STRIPE_MS / 2);
    let since = cluster.now;
    cluster.start_after(0, 1);
    cluster.run_until(60_000, "opening", |cluster| {
        cluster.answer(opened).is_some()
    });
    let answer = cluster.answer(opened);
    let decoded = matches!(
        answer,
        Some(Reply::ShardOpened {
            rung: Rung::Decoded,
            ..
        })
    );
    assert!(decoded, "{answer:?}");
    assert!(cluster.healed_at(&[1], since).is_none());
    let trainer = cluster.trainer(0);
    for _ in 0..3 {
        cluster.send(0, trainer, acquire_slot(1, 100));
    }
    cluster.run_until(60_000, "healing", |cluster| {
        cluster.healed_at(&[1], since).is_some()
    });
    let own = open_of(&mut cluster, 0, 0, manifest);
    cluster.run_for(10);
    assert!(is_open(&cluster, own));
}

#[test]
fn an_opening_goes_its_own_way_if_nothing_heals_its_shard() {
    let mut cluster = protected(STRIPES);
    let manifest = planned(&mut cluster, 5);
    cluster.kill(0);
    // The lane's leader has gone too, and its death is not noticed before the other one is back.
    cluster.run_for(10_000);
    cluster.start_after(0, 0);
    cluster.run_for(1);
    cluster.kill(8);
    cluster.run_for(10);
    let opened = open(&mut cluster, 0, manifest);
    let bound_ms = 2_500 + 3_000 + 500 + STRIPES * STRIPE_MS * 2;
    let opens = |cluster: &Cluster| cluster.answer(opened).is_some();
    cluster.run_until(bound_ms, "opening", opens);
    let answer = cluster.answer(opened);
    assert!(
        matches!(answer, Some(Reply::ShardOpened { .. })),
        "{answer:?}"
    );
}

/// Blocks of a node that is away are not there, whatever it held before: with m = 2 the one that is back is healed from the
/// other eight, and does not wait for the one that stays away.
#[test]
fn one_of_two_lost_nodes_is_healed_while_the_other_stays_away() {
    for (back, away) in [(0, 1), (1, 9), (8, 9), (9, 0)] {
        let mut cluster = protected(STRIPES);
        cluster.kill(back);
        cluster.kill(away);
        cluster.run_for(10_000);
        let since = cluster.now;
        cluster.start_after(0, back);
        let took_ms = cluster.run_until(30_000, "healing", |cluster| {
            cluster.healed_at(&[back], since).is_some()
        });
        let copy_ms = STRIPES * STRIPE_MS;
        assert!(
            took_ms <= copy_ms + 2_000,
            "n{back}: {took_ms} of {copy_ms}"
        );
        assert_eq!(cluster.failures(since), Vec::<&Note>::new(), "n{back}");
    }
}

/// A coding node whose link has just ended may be back any moment: an encode without it would have to be topped up by a
/// second one. Once it is gone for good nothing waits for it.
#[test]
fn an_encode_waits_for_a_coding_node_that_was_only_just_lost() {
    for (comes_back, sessions) in [(true, 1), (false, 1)] {
        let mut cluster = protected(STRIPES);
        cluster.kill(9);
        cluster.run_for(2_600);
        cluster.reset_counts();
        cluster.save();
        if comes_back {
            cluster.start_after(500, 9);
        }
        cluster.run_until(60_000, "protection", |cluster| cluster.is_protected(0));
        cluster.run_for(2_000);
        let keeps = |node| {
            cluster
                .sessions
                .counts
                .put
                .contains_key(&(node, Block::Parity))
        };
        assert_eq!((keeps(8), keeps(9)), (true, comes_back));
        assert_eq!(
            cluster.sessions.counts.moved.len(),
            sessions,
            "comes back: {comes_back}"
        );
    }
}

/// The node that leads a lane has lost its own block: it hears that this counts again before it looks for more to heal.
#[test]
fn a_leader_puts_its_own_parity_back_once() {
    let mut cluster = protected(STRIPES);
    cluster.kill(8);
    cluster.run_for(5_000);
    cluster.reset_counts();
    let since = cluster.now;
    cluster.start_after(0, 8);
    cluster.run_until(60_000, "healing", |cluster| {
        cluster.healed_at(&[8], since).is_some()
    });
    cluster.run_for(2 * STRIPES * STRIPE_MS);
    let put = &cluster.sessions.counts.put[&(8, Block::Parity)];
    assert_eq!(put.len() as u64, STRIPES);
    assert!(put.values().all(|times| *times == 1), "{put:?}");
}
