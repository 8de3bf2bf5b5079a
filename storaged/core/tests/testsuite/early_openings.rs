//! Readers that take a shard while it still comes: they have its memory as soon as a session fills it, and hear what becomes of it.

use crate::cluster::{Cluster, STRIPE_MS};
use crate::testkit::{name, open_early, open_shard, plan_newest};
use storaged_core::{ConnId, RequestId};
use storaged_wire::local::{DurableWish, Reply, Request, Role, Rung};
use storaged_wire::{Digest, Rank, RefusalCode};

const STRIPES: u64 = 400;

/// A protected checkpoint at (4, 2), of four ranks.
fn protected() -> (Cluster, Digest) {
    let mut cluster = Cluster::start(4, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(2_000);
    let reader = cluster.connect(5, Role::Reader);
    let manifest = match cluster.ask(5, reader, plan_newest(10_000)) {
        Reply::Plan(plan) => plan.manifest,
        other => panic!("expected a plan, got {other:?}"),
    };
    cluster.disconnect(5, reader);
    (cluster, manifest)
}

/// A reader on a node, and the shard that it has opened.
#[derive(Clone, Copy)]
struct Opened {
    node: usize,
    conn: ConnId,
    id: RequestId,
    manifest: Digest,
    rank: u32,
}

fn opens(cluster: &mut Cluster, node: usize, rank: u32, manifest: Digest) -> Opened {
    opens_within(cluster, node, rank, manifest, 60_000)
}

fn opens_within(
    cluster: &mut Cluster,
    node: usize,
    rank: u32,
    manifest: Digest,
    timeout_ms: u32,
) -> Opened {
    let conn = cluster.connect(node, Role::Reader);
    let open = open_early(manifest, Rank::new(rank), timeout_ms);
    let id = cluster.send(node, conn, open);
    Opened {
        node,
        conn,
        id,
        manifest,
        rank,
    }
}

impl Opened {
    /// The rung that it comes from, once it has been said that it comes.
    fn comes(&self, cluster: &mut Cluster) -> Rung {
        let id = self.id;
        cluster.run_until(60_000, "an early answer", |cluster| {
            cluster.answer(id).is_some()
        });
        match cluster.answer(id) {
            Some(Reply::ShardComing { length, rung, .. }) => {
                assert!(*length > 0);
                *rung
            }
            other => panic!("expected a shard that comes, got {other:?}"),
        }
    }

    fn follow(&self, cluster: &mut Cluster, timeout_ms: u32) -> RequestId {
        let follow = Request::FollowShard {
            manifest: self.manifest,
            rank: Rank::new(self.rank),
            timeout_ms,
        };
        cluster.send(self.node, self.conn, follow)
    }

    fn followed(&self, cluster: &mut Cluster, timeout_ms: u32) -> Reply {
        let follow = self.follow(cluster, timeout_ms);
        cluster.run_until(90_000, "an answer to who follows", |cluster| {
            cluster.answer(follow).is_some()
        });
        cluster.answer(follow).cloned().expect("it was waited for")
    }

    fn close(&self, cluster: &mut Cluster) {
        let close = Request::CloseShard {
            manifest: self.manifest,
            rank: Rank::new(self.rank),
        };
        let reply = cluster.ask(self.node, self.conn, close);
        assert_eq!(reply, Reply::Done);
    }
}

#[test]
fn a_shard_of_another_node_is_given_while_it_comes_and_its_reader_hears_when_it_is_there() {
    let (mut cluster, manifest) = protected();
    let began = cluster.now;
    let opened = opens(&mut cluster, 5, 0, manifest);
    assert_eq!(opened.comes(&mut cluster), Rung::PeerRam);
    let early_ms = cluster.now - began;
    assert!(early_ms < STRIPES * STRIPE_MS / 4, "{early_ms}");
    assert_eq!(opened.followed(&mut cluster, 50), Reply::StillComing);
    let looked_at = cluster.now;
    assert_eq!(opened.followed(&mut cluster, 0), Reply::StillComing);
    assert!(
        cluster.now - looked_at <= 2,
        "who only looks waits for no tick"
    );
    let came = opened.followed(&mut cluster, 60_000);
    assert_eq!(came, Reply::ShardCame(Rung::PeerRam));
    let took_ms = cluster.now - began;
    assert!(took_ms >= STRIPES * STRIPE_MS, "{took_ms}");
    opened.close(&mut cluster);
}

#[test]
fn what_has_come_before_its_reader_follows_is_said_at_once_and_only_once() {
    let (mut cluster, manifest) = protected();
    let opened = opens(&mut cluster, 5, 0, manifest);
    opened.comes(&mut cluster);
    cluster.run_for(10_000);
    let came = opened.followed(&mut cluster, 60_000);
    assert_eq!(came, Reply::ShardCame(Rung::PeerRam));
    for _ in 0..2 {
        match opened.followed(&mut cluster, 1_000) {
            Reply::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::WrongSlot),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn what_is_in_own_ram_is_open_at_once_as_ever() {
    let (mut cluster, manifest) = protected();
    let reader = cluster.connect(0, Role::Reader);
    let reply = cluster.ask(0, reader, open_early(manifest, Rank::new(0), 10_000));
    let is_own = matches!(
        reply,
        Reply::ShardOpened {
            rung: Rung::OwnRam,
            ..
        }
    );
    assert!(is_own, "{reply:?}");
}

/// Whoever comes when the heal has begun already has its memory as well.
#[test]
fn trainers_on_replaced_nodes_have_their_shards_while_one_heal_brings_them() {
    for late_ms in [0, 1_500] {
        let (mut cluster, manifest) = protected();
        cluster.kill(0);
        cluster.kill(1);
        cluster.run_for(10_000);
        cluster.reset_counts();
        for node in [0, 1] {
            cluster.start_after(0, node);
        }
        cluster.run_for(10 + late_ms);
        let opened = [0, 1].map(|node| opens(&mut cluster, node, node as u32, manifest));
        let early = cluster.now;
        for one in opened {
            assert_eq!(one.comes(&mut cluster), Rung::Decoded);
        }
        let early_ms = cluster.now - early;
        assert!(early_ms < STRIPES * STRIPE_MS / 2, "{early_ms}");
        for one in opened {
            let came = one.followed(&mut cluster, 60_000);
            assert_eq!(came, Reply::ShardCame(Rung::Decoded));
            one.close(&mut cluster);
        }
        cluster.run_for(5_000);
        for node in [0, 1] {
            assert_eq!(cluster.held(node), [(1, Some(2))], "n{node}");
        }
    }
}

/// The node that it is copied from dies on the way: it is decoded into the same memory.
#[test]
fn a_shard_that_comes_from_elsewhere_in_the_end_comes_to_the_same_memory() {
    let (mut cluster, manifest) = protected();
    let opened = opens(&mut cluster, 5, 0, manifest);
    opened.comes(&mut cluster);
    cluster.kill(0);
    let came = opened.followed(&mut cluster, 60_000);
    assert_eq!(came, Reply::ShardCame(Rung::Decoded));
}

/// A survivor of a heal dies on the way.
#[test]
fn a_heal_that_goes_another_way_is_followed_to_its_end() {
    let (mut cluster, manifest) = protected();
    cluster.kill(0);
    cluster.run_for(10_000);
    cluster.start_after(0, 0);
    cluster.run_for(10);
    let opened = opens(&mut cluster, 0, 0, manifest);
    opened.comes(&mut cluster);
    cluster.kill(1);
    let ends = |reply: &Reply| matches!(reply, Reply::ShardCame(_) | Reply::ShardOpened { .. });
    let mut said = Vec::new();
    while !said.last().is_some_and(ends) {
        let reply = opened.followed(&mut cluster, 60_000);
        let goes_on = matches!(reply, Reply::ShardComing { .. } | Reply::StillComing);
        assert!(goes_on || ends(&reply), "{reply:?}");
        said.push(reply);
        assert!(said.len() < 5, "{said:?}");
    }
    cluster.run_for(5_000);
    assert_eq!(cluster.held(0), [(1, Some(1))]);
}

#[test]
fn whoever_follows_hears_that_a_shard_is_lost_or_late() {
    let (mut cluster, manifest) = protected();
    let opened = opens(&mut cluster, 5, 0, manifest);
    opened.comes(&mut cluster);
    for node in [0, 1, 2] {
        cluster.kill(node);
    }
    match opened.followed(&mut cluster, 60_000) {
        Reply::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::TooManyLost),
        other => panic!("{other:?}"),
    }
    let (mut cluster, manifest) = protected();
    let used = cluster.ledger(5).used;
    let opened = opens_within(&mut cluster, 5, 0, manifest, 1_000);
    opened.comes(&mut cluster);
    match opened.followed(&mut cluster, 60_000) {
        Reply::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::TimedOut),
        other => panic!("{other:?}"),
    }
    cluster.run_for(100);
    assert_eq!(cluster.ledger(5).used, used);
}

/// A reader that has all it needs goes before the session has ended.
#[test]
fn what_its_reader_has_given_up_stays_where_it_is_the_nodes_own_and_goes_elsewhere() {
    let (mut cluster, manifest) = protected();
    let used = cluster.ledger(5).used;
    let opened = opens(&mut cluster, 5, 0, manifest);
    opened.comes(&mut cluster);
    opened.close(&mut cluster);
    cluster.run_for(100);
    assert_eq!(cluster.ledger(5).used, used);
    assert!(matches!(
        opened.followed(&mut cluster, 1_000),
        Reply::Refused(_)
    ));

    // Its own copy is found wrong, so that no heal brings it.
    let conn = cluster.connect(0, Role::Reader);
    let mut open = open_early(manifest, Rank::new(0), 60_000);
    if let Request::OpenShard { without, .. } = &mut open {
        *without = Some(Rung::OwnRam);
    }
    let id = cluster.send(0, conn, open);
    let opened = Opened {
        node: 0,
        conn,
        id,
        manifest,
        rank: 0,
    };
    let used = cluster.ledger(0).used;
    opened.comes(&mut cluster);
    opened.close(&mut cluster);
    cluster.disconnect(0, conn);
    cluster.run_for(100);
    assert!(cluster.ledger(0).used > used, "it goes on coming");
    cluster.run_for(10_000);
    assert_eq!(cluster.held(0), [(1, Some(2))]);
    assert_eq!(
        cluster.ledger(0).used,
        used,
        "it took the place of the wrong one"
    );
    let reader = cluster.connect(0, Role::Reader);
    let reply = cluster.ask(0, reader, open_shard(manifest, Rank::new(0), 10_000));
    assert!(matches!(reply, Reply::ShardOpened { .. }), "{reply:?}");
    cluster.disconnect(0, reader);
    for _ in 0..3 {
        cluster.save_and_wait(DurableWish::Never);
    }
    // Nobody reads it any more: it goes for newer ones, and so does its memory.
    let steps: Vec<u64> = cluster.held(0).into_iter().map(|it| it.0).collect();
    assert!(!steps.contains(&1), "{steps:?} on {}", name(0));
}

/// The first opening is answered to nobody, and goes with its connection like the second.
#[test]
fn who_opens_twice_and_goes_leaves_nothing() {
    let (mut cluster, manifest) = protected();
    cluster.kill(0);
    cluster.run_for(10_000);
    cluster.start_after(0, 0);
    cluster.run_for(10);
    let opened = opens(&mut cluster, 0, 0, manifest);
    opened.comes(&mut cluster);
    let again = Opened {
        id: cluster.send(0, opened.conn, open_early(manifest, Rank::new(0), 60_000)),
        ..opened
    };
    again.comes(&mut cluster);
    cluster.disconnect(0, opened.conn);
    cluster.run_for(60_000);
    let process = cluster.processes[0].as_ref().expect("it is up");
    assert_eq!(process.node.audit().requests, 0);
}

#[test]
fn nobody_follows_what_somebody_else_has_opened() {
    let (mut cluster, manifest) = protected();
    let opened = opens(&mut cluster, 5, 0, manifest);
    opened.comes(&mut cluster);
    let other = cluster.connect(5, Role::Reader);
    let stranger = Opened {
        conn: other,
        ..opened
    };
    match stranger.followed(&mut cluster, 1_000) {
        Reply::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::WrongSlot),
        answer => panic!("{answer:?}"),
    }
    let came = opened.followed(&mut cluster, 60_000);
    assert_eq!(came, Reply::ShardCame(Rung::PeerRam));
}
