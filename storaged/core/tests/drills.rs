//! Drills: shards that are opened as if nodes were lost. The others must do, and nothing that is held gives way.

mod cluster;
mod testkit;

use cluster::{Cluster, Room};
use storaged_wire::local::{ByteRange, DurableWish, Reply, Request, Role, Rung};
use storaged_wire::{NodeName, Rank, RefusalCode};
use testkit::{CHUNK_BYTES, name, plan_newest};

const STRIPES: u64 = 100;

/// (4,2), a step that is protected, and in the durable tier.
fn durable() -> Cluster {
    let mut cluster = Cluster::start_with_tier(4, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Required);
    cluster.run_for(2_000);
    cluster
}

/// Opens a chunk of a rank's shard at a node as if these nodes were lost.
fn opened(cluster: &mut Cluster, node: usize, rank: u32, lost: &[usize]) -> Reply {
    let reader = cluster.connect(node, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(node, reader, plan_newest(10_000)) else {
        panic!("a plan");
    };
    let lost: Vec<NodeName> = lost.iter().map(|node| name(*node)).collect();
    let open = Request::OpenShard {
        manifest: plan.manifest,
        rank: Rank::new(rank),
        ranges: vec![ByteRange {
            offset: u64::from(CHUNK_BYTES) * 7,
            length: u64::from(CHUNK_BYTES),
        }],
        timeout_ms: 30_000,
        without: None,
        withheld: Some(lost),
    };
    let reply = cluster.ask(node, reader, open);
    cluster.disconnect(node, reader);
    reply
}

#[test]
fn what_withheld_nodes_hold_is_decoded_from_the_others() {
    let mut cluster = durable();
    cluster.reset_counts();
    for (node, lost) in [(0, [0, 1]), (1, [0, 4]), (5, [0, 5]), (2, [0, 3])] {
        let before = cluster.sessions.counts.sent.clone();
        let reply = opened(&mut cluster, node, 0, &lost);
        let Reply::ShardOpened { rung, .. } = reply else {
            panic!("without {lost:?}: {reply:?}");
        };
        assert_eq!(rung, Rung::Decoded, "without {lost:?}");
        for node in lost {
            let sent = |counts: &std::collections::BTreeMap<usize, u64>| {
                counts.get(&node).copied().unwrap_or(0)
            };
            let now = &cluster.sessions.counts.sent;
            assert_eq!(sent(now), sent(&before), "n{node} was taken for lost");
        }
    }
    let moved: u64 = cluster.sessions.counts.sent.values().sum();
    assert!(moved <= 4 * 5, "a chunk of each, not the shard: {moved}");
    cluster.run_for(1_000);
    for node in 0..6 {
        let audit = cluster.ram(node).node.audit();
        assert_eq!(
            (audit.guests, audit.restoring, audit.sessions),
            (0, 0, 0),
            "n{node}"
        );
    }
}

#[test]
fn more_than_the_code_bears_is_refused_though_the_tier_has_it() {
    let mut cluster = durable();
    let reply = opened(&mut cluster, 3, 0, &[0, 1, 2]);
    let Reply::Refused(refusal) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(
        refusal.code,
        RefusalCode::TooManyLost,
        "{}",
        refusal.message
    );
}

/// A job that has ended would give way to a save, and does not to a drill.
#[test]
fn nothing_gives_way_to_a_drill() {
    let room = Room {
        budget: 5 << 20,
        idle_job_ms: 0,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, STRIPES, None, room);
    cluster.save_and_wait(DurableWish::Never);
    cluster.end_job();
    cluster.begin_job("another");
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(30_000);
    let before: Vec<u64> = (0..6).map(|node| cluster.ledger(node).used).collect();
    let reply = opened(&mut cluster, 1, 0, &[0]);
    let Reply::Refused(refusal) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(refusal.code, RefusalCode::BudgetFull, "{}", refusal.message);
    let after: Vec<u64> = (0..6).map(|node| cluster.ledger(node).used).collect();
    assert_eq!(after, before);
}
