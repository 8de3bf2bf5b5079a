//! Schema and metadata of a step: who gets them when it is saved, and who can give them to a reader whatever is lost.

use std::collections::BTreeSet;

use crate::cluster::{Cluster, Listing, Room};
use crate::testkit::{TORCH_METADATA, index, members, namespace, plan_newest, schema_of};
use storaged_codec::digest;
use storaged_core::{ConnId, Shown};
use storaged_plan::homes;
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Digest, EnclosuresHeld, Refusal, RefusalCode, Step};

const K: usize = 4;
const M: usize = 2;
const NODES: usize = K + M;

fn saved() -> Cluster {
    let mut cluster = Cluster::start(K, M, 10);
    cluster.save_and_wait(DurableWish::Never);
    cluster
}

fn key(cluster: &Cluster, step: u64) -> CheckpointKey {
    CheckpointKey {
        namespace: namespace(),
        run: cluster.run(),
        step: Step::new(step),
    }
}

fn homes_of(cluster: &Cluster, step: u64) -> BTreeSet<usize> {
    let homes = homes(&members(NODES), &key(cluster, step), M + 1);
    homes.iter().map(index).collect()
}

fn schema(step: u64) -> Digest {
    digest(&schema_of(Step::new(step)))
}

/// Whoever was sent a part of something, and how much.
fn sent(cluster: &Cluster, what: Digest) -> Vec<(usize, u64)> {
    let pages = cluster.scene.pages.iter();
    let of_it = pages.filter(|((_, of), bytes)| *of == what && **bytes > 0);
    of_it.map(|((to, _), bytes)| (*to, *bytes)).collect()
}

/// What a node shows of a step.
fn shown(cluster: &Cluster, node: usize, step: u64) -> Option<Shown> {
    let key = key(cluster, step);
    let shown = cluster.processes[node].as_ref()?.node.shown();
    shown.into_iter().find(|it| it.key == key)
}

/// The manifest of the newest step as the reader on a node gets it.
fn read(cluster: &mut Cluster, node: usize) -> Reply {
    let reader = cluster.connect(node, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(node, reader, plan_newest(10_000)) else {
        panic!("expected a plan on n{node}");
    };
    let manifest = plan.manifest;
    cluster.ask(node, reader, Request::GetManifest { manifest })
}

#[track_caller]
fn is_described(reply: &Reply, step: u64) {
    let Reply::Manifest {
        schema,
        torch_metadata,
        ..
    } = reply
    else {
        panic!("expected a manifest, got {reply:?}");
    };
    assert_eq!(schema[..], schema_of(Step::new(step)));
    assert_eq!(torch_metadata[..], *TORCH_METADATA);
}

#[test]
fn a_node_that_is_no_home_gets_no_schema_when_a_step_is_saved() {
    let cluster = saved();
    let homes = homes_of(&cluster, 1);
    for what in [schema(1), digest(TORCH_METADATA)] {
        let to: BTreeSet<usize> = sent(&cluster, what).iter().map(|(to, _)| *to).collect();
        // The committing rank's node has been given it.
        let mut expected = homes.clone();
        expected.remove(&0);
        assert_eq!(to, expected);
    }
}

#[test]
fn a_schema_that_stays_the_same_is_sent_to_a_node_once() {
    let mut cluster = Cluster::start(K, M, 10);
    for _ in 1..=7 {
        cluster.save_and_wait(DurableWish::Never);
    }
    let all: BTreeSet<usize> = (4..=7).flat_map(|step| homes_of(&cluster, step)).collect();
    let length = schema_of(Step::new(7)).len() as u64;
    let sent = sent(&cluster, schema(7));
    assert!(all.len() > M + 1, "steps have other home nodes");
    assert!(
        sent.iter()
            .all(|(to, bytes)| all.contains(to) && *bytes == length),
        "{sent:?}"
    );
    // What no step names any more is not kept for ever.
    cluster.run_for(60_000);
    let left = cluster.processes.iter().flatten();
    let left: usize = left.map(|it| it.node.audit().enclosures).sum();
    assert_eq!(left, 0);
}

#[test]
fn every_reader_gets_the_schema_with_any_m_nodes_lost() {
    for first in 0..NODES {
        for second in first + 1..NODES {
            let mut cluster = saved();
            cluster.kill(first);
            cluster.kill(second);
            for node in (0..NODES).filter(|node| ![first, second].contains(node)) {
                is_described(&read(&mut cluster, node), 1);
            }
        }
    }
}

#[test]
fn a_home_node_that_was_restarted_gets_it_back() {
    let mut cluster = saved();
    let homes: Vec<usize> = homes_of(&cluster, 1).into_iter().collect();
    cluster.kill(homes[0]);
    cluster.start_after(100, homes[0]);
    cluster.run_for(20_000);
    let held = shown(&cluster, homes[0], 1).map(|it| it.enclosures);
    assert_eq!(held, Some(EnclosuresHeld::All));
    assert_eq!(
        shown(&cluster, homes[0], 1).and_then(|it| it.bears),
        Some(2)
    );
}

#[test]
fn another_node_holds_it_in_the_place_of_a_home_node_that_is_gone() {
    let mut cluster = saved();
    let homes = homes_of(&cluster, 1);
    let holds = |cluster: &Cluster, node: &usize| {
        let shown = shown(cluster, *node, 1);
        shown.is_some_and(|it| it.enclosures == EnclosuresHeld::All)
    };
    let before = (0..NODES).filter(|node| holds(&cluster, node)).count();
    let gone = *homes.iter().find(|home| **home != 0).unwrap();
    cluster.kill(gone);
    cluster.run_for(20_000);
    let after = (0..NODES).filter(|node| holds(&cluster, node)).count();
    assert!(after > M, "{before} held it, and {after} do");
}

/// The one rank is on `n0`, and its parity on `n3`: `n1` and `n2` are data nodes of its group that have nothing to do with the step.
#[test]
fn no_node_without_blocks_is_counted_on_in_the_place_of_a_home_node_that_is_gone() {
    let mut cluster = Cluster::start_with_ranks(5, 1, 3, 1, 10, Room::default());
    for step in 1..40 {
        cluster.save_on_all(1, DurableWish::Never);
        let of_step = homes(&members(5), &key(&cluster, step), 2);
        let of_step: BTreeSet<usize> = of_step.iter().map(index).collect();
        let other = of_step.iter().find(|home| ![0, 3].contains(*home));
        let Some(other) = other.filter(|_| of_step.contains(&0)) else {
            continue;
        };
        cluster.kill(*other);
        cluster.run_for(20_000);
        let held = shown(&cluster, 3, step).map(|it| it.enclosures);
        assert_eq!(held, Some(EnclosuresHeld::All), "n{other} is gone");
        return;
    }
    panic!("no step has homes n0 and one without blocks");
}

#[test]
fn what_is_said_to_bear_losses_is_held_by_more_nodes_than_that() {
    let mut cluster = Cluster::start(K, M, 10);
    cluster.save();
    let mut protected = false;
    for _ in 0..2_000 {
        cluster.run_for(1);
        let all: Vec<Shown> = (0..NODES).filter_map(|it| shown(&cluster, it, 1)).collect();
        let holders = all.iter().filter(|it| it.enclosures == EnclosuresHeld::All);
        let holders = holders.count() as u32;
        let said = all.iter().filter_map(|it| it.bears).max().unwrap_or(0);
        assert!(
            said == 0 || holders > said,
            "{said} at {} with {holders}",
            cluster.now
        );
        protected |= said == M as u32;
    }
    assert!(protected);
}

#[test]
fn every_reader_gets_it_from_the_durable_tier_when_all_nodes_were_restarted() {
    let mut cluster = Cluster::start_with_tier(K, M, 10);
    cluster.save_and_wait(DurableWish::Required);
    (0..NODES).for_each(|node| cluster.kill(node));
    (0..NODES).for_each(|node| cluster.start_after(100, node));
    cluster.run_for(10_000);
    // Only the first reader's node asks the tier because of its plan; the others know the manifest's name alone.
    let planner = cluster.connect(0, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(0, planner, plan_newest(10_000)) else {
        panic!("expected a plan");
    };
    let manifest = plan.manifest;
    for node in 0..NODES {
        let reader = cluster.connect(node, Role::Reader);
        let reply = cluster.ask(node, reader, Request::GetManifest { manifest });
        is_described(&reply, 1);
    }
    // Later it is read from the tier again.
    cluster.run_for(60_000);
    let reply = cluster.ask(0, planner, Request::GetManifest { manifest });
    is_described(&reply, 1);
}

#[test]
fn a_reader_is_told_who_should_have_it_when_nobody_does() {
    let mut cluster = Cluster::start_with_tier(K, M, 10);
    cluster.save_and_wait(DurableWish::Required);
    (0..NODES).for_each(|node| cluster.kill(node));
    (0..NODES).for_each(|node| cluster.start_after(100, node));
    cluster.run_for(10_000);
    let reader = cluster.connect(0, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(0, reader, plan_newest(10_000)) else {
        panic!("expected a plan");
    };
    cluster.run_for(60_000);
    cluster.scene.tier.as_mut().unwrap().listing = Listing::Hangs;
    let manifest = plan.manifest;
    let reply = cluster.ask(0, reader, Request::GetManifest { manifest });
    let Reply::Refused(refusal) = reply else {
        panic!("expected a refusal, got {reply:?}");
    };
    assert_eq!(refusal.code, RefusalCode::DurableUnavailable);
    assert!(refusal.message.contains("schema and metadata"), "{refusal}");
}

/// The code that the planned step's manifest is refused with, and the text.
#[track_caller]
fn not_described(cluster: &mut Cluster, node: usize, reader: ConnId, manifest: Digest) -> Refusal {
    match cluster.ask(node, reader, Request::GetManifest { manifest }) {
        Reply::Refused(refusal) => refusal,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

/// Newer steps have another schema: the one that it named went with it.
#[test]
fn what_a_step_named_that_was_retired_since_it_was_planned_is_no_checkpoints_and_not_lost() {
    const PLANNED: u64 = 3;
    let mut cluster = Cluster::start(K, M, 10);
    for _ in 1..=PLANNED {
        cluster.save_and_wait(DurableWish::Never);
    }
    let reader = cluster.connect(0, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(0, reader, plan_newest(10_000)) else {
        panic!("expected a plan");
    };
    assert_eq!(plan.step, Step::new(PLANNED));
    for _ in 0..2 {
        cluster.save_and_wait(DurableWish::Never);
    }
    cluster.run_for(60_000);
    let refusal = not_described(&mut cluster, 0, reader, plan.manifest);
    assert_eq!(refusal.code, RefusalCode::NoCheckpoint, "{refusal}");
    for named in ["step 3 ", "another plan"] {
        assert!(refusal.message.contains(named), "{refusal}");
    }
}

/// All that held it were restarted, and nothing is newer.
#[test]
fn what_a_step_named_that_was_lost_since_it_was_planned_is_lost() {
    let mut cluster = Cluster::start_of(NODES + 1, K, M, 10);
    cluster.save_on_all(NODES, DurableWish::Never);
    let reader = cluster.connect(NODES, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(NODES, reader, plan_newest(10_000)) else {
        panic!("expected a plan");
    };
    (0..NODES).for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    (0..NODES).for_each(|node| cluster.start_after(0, node));
    cluster.run_for(60_000);
    let refusal = not_described(&mut cluster, NODES, reader, plan.manifest);
    assert_eq!(refusal.code, RefusalCode::TooManyLost, "{refusal}");
}
