//! Drills: shards that are opened as if nodes were lost. The others must do, and nothing that is held gives way.

use crate::cluster::{Cluster, Room};
use crate::testkit::{CHUNK_BYTES, name, open_shard, plan_newest};
use storaged_wire::local::{ByteRange, DurableWish, Reply, Request, Role, Rung};
use storaged_wire::plan::{RestorePlan, Source};
use storaged_wire::{CheckpointState, KeptRecord, NodeName, Rank, RefusalCode, SlotId, Step};

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
        early: None,
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

/// The slot of each shard that a node has kept.
fn slots(cluster: &mut Cluster, node: usize) -> Vec<SlotId> {
    let kept = cluster.ram(node).kept.values();
    let checkpoints = kept.filter_map(|record| match record {
        KeptRecord::Checkpoint(checkpoint) => Some(checkpoint),
        _ => None,
    });
    let shards = checkpoints.flat_map(|checkpoint| &checkpoint.shards);
    shards.map(|shard| shard.slot).collect()
}

/// Readers, uploads and sessions are at that slot, and a trainer would be given it.
#[test]
fn a_node_that_is_taken_for_lost_keeps_its_shard_where_it_is() {
    let mut cluster = durable();
    let before = slots(&mut cluster, 0);
    let copies = cluster.tier.expected.len();
    let reader = cluster.connect(0, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(0, reader, plan_newest(10_000)) else {
        panic!("a plan");
    };
    let (manifest, rank) = (plan.manifest, Rank::new(0));
    let mut open = open_shard(manifest, rank, 30_000);
    if let Request::OpenShard { withheld, .. } = &mut open {
        *withheld = Some(vec![name(0)]);
    }
    let reply = cluster.ask(0, reader, open);
    let Reply::ShardOpened { rung, .. } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(rung, Rung::Decoded);
    cluster.run_for(1_000);
    assert_eq!(slots(&mut cluster, 0), before);
    cluster.ask(0, reader, Request::CloseShard { manifest, rank });
    cluster.run_for(1_000);
    assert_eq!(slots(&mut cluster, 0), before);
    assert_eq!(
        cluster.tier.expected.len(),
        copies,
        "nothing is copied again"
    );
    assert_eq!(cluster.ram(0).node.audit().guests, 0);
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

/// What a drill would decode, as a node says it.
fn planned(cluster: &mut Cluster, node: usize, step: Option<u64>) -> Reply {
    let reader = cluster.connect(node, Role::Reader);
    let asked = Request::PlanDrill {
        step: step.map(Step::new),
        timeout_ms: 60_000,
    };
    let reply = cluster.ask(node, reader, asked);
    cluster.disconnect(node, reader);
    reply
}

fn offered(reply: Reply) -> RestorePlan {
    match reply {
        Reply::Plan(plan) => plan,
        other => panic!("{other:?}"),
    }
}

/// While a job saves, its newest step is always one that is not coded yet.
#[test]
fn a_drill_takes_the_newest_protected_step_and_another_only_by_its_number() {
    let mut cluster = Cluster::start(4, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Never);
    cluster.save();
    cluster.run_until(10_000, "a commit", |cluster| {
        (0..6).all(|node| cluster.is_committed(node))
    });
    for node in 0..6 {
        let plan = offered(planned(&mut cluster, node, None));
        assert_eq!(
            (plan.step.get(), plan.state),
            (1, CheckpointState::Protected),
            "n{node}"
        );
        assert_eq!((plan.shards.len(), plan.passed_over), (4, vec![]));
    }
    let named = offered(planned(&mut cluster, 3, Some(2)));
    assert_eq!(
        (named.step.get(), named.state),
        (2, CheckpointState::Committed)
    );
    let absent = planned(&mut cluster, 3, Some(7));
    let Reply::Refused(refusal) = absent else {
        panic!("{absent:?}");
    };
    assert_eq!(refusal.code, RefusalCode::NoCheckpoint);
}

#[test]
fn with_more_than_m_nodes_down_a_drill_says_at_once_what_is_missing() {
    let mut cluster = durable();
    [1, 2, 5].into_iter().for_each(|node| cluster.kill(node));
    let began = cluster.now;
    let reply = planned(&mut cluster, 0, None);
    assert!(cluster.now - began < 5_000, "{} ms", cluster.now - began);
    let Reply::Refused(refusal) = reply else {
        panic!("the tier has it, and a drill is about RAM: {reply:?}");
    };
    assert_eq!(refusal.code, RefusalCode::TooManyLost);
    for part in ["step 1", "4 of 4 shards", "n1, n2, n5", "no other"] {
        assert!(refusal.message.contains(part), "{}", refusal.message);
    }
}

/// With m nodes down every shard can still be decoded, by those that are there.
#[test]
fn with_m_nodes_down_a_drill_goes_on_with_the_others() {
    let mut cluster = Cluster::start(4, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Never);
    [1, 2].into_iter().for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    let plan = offered(planned(&mut cluster, 0, None));
    assert_eq!((plan.shards.len(), plan.passed_over), (4, vec![]));
    let lost: Vec<NodeName> = vec![name(1), name(2)];
    for shard in &plan.shards {
        let Source::Decode(nodes) = &shard.source else {
            panic!("{shard:?}");
        };
        assert!(nodes.iter().all(|node| !lost.contains(node)), "{nodes:?}");
    }
}
