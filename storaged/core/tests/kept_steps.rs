//! Older steps that stay in RAM beside the newest one: as many as are configured, healed like it, and in nobody's way.

mod cluster;
mod testkit;

use cluster::{Cluster, Conduct, Room};
use storaged_core::DurableForm;
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::{Rank, Step};
use testkit::open_shard;

const NODES: usize = 6;
/// A slot of a shard of ten stripes, and its parity.
const SLOT: u64 = 2 << 20;
const PARITY: u64 = 10 * cluster::CHUNK;

fn keeping(keep_steps: usize, budget: u64) -> Cluster {
    let room = Room {
        keep_steps,
        budget,
        ..Room::default()
    };
    Cluster::start_with(4, 2, 10, None, room)
}

/// The steps that a node holds blocks of, with what they bear.
fn held(cluster: &Cluster, node: usize) -> Vec<(u64, Option<u32>)> {
    let process = cluster.processes[node].as_ref().expect("it is up");
    let shown = process.node.shown().into_iter();
    let blocks = shown.filter(|it| !it.shards.is_empty() || !it.parity.is_empty());
    blocks.map(|it| (it.key.step.get(), it.bears)).collect()
}

fn all_hold(cluster: &Cluster, steps: impl IntoIterator<Item = u64>) {
    let expected: Vec<_> = steps.into_iter().map(|step| (step, Some(2))).collect();
    for node in 0..NODES {
        assert_eq!(held(cluster, node), expected, "n{node}");
    }
}

fn restored(cluster: &mut Cluster, node: usize, step: u64) {
    let reader = cluster.connect(node, Role::Reader);
    let plan = Request::Plan {
        step: Some(Step::new(step)),
        timeout_ms: 10_000,
        allow_older: false,
    };
    let Reply::Plan(plan) = cluster.ask(node, reader, plan) else {
        panic!("step {step} is there");
    };
    let open = open_shard(plan.manifest, Rank::new(node as u32), 10_000);
    let opened = cluster.ask(node, reader, open);
    assert!(matches!(opened, Reply::ShardOpened { .. }), "{opened:?}");
    cluster.disconnect(node, reader);
}

#[test]
fn as_many_protected_steps_stay_as_are_kept() {
    for kept in 1..=3 {
        let mut cluster = keeping(kept, 1 << 30);
        for step in 1..=6 {
            cluster.save_and_wait(DurableWish::Never);
            let oldest = (step + 1_u64).saturating_sub(kept as u64).max(1);
            all_hold(&cluster, oldest..=step);
        }
        for step in 7 - kept as u64..=6 {
            restored(&mut cluster, 1, step);
        }
    }
}

#[test]
fn kept_steps_are_healed_when_a_node_was_lost() {
    for lost in [0, 5] {
        let mut cluster = keeping(3, 1 << 30);
        (0..4).for_each(|_| cluster.save_and_wait(DurableWish::Never));
        cluster.kill(lost);
        cluster.run_for(10_000);
        cluster.start_after(0, lost);
        cluster.run_for(60_000);
        all_hold(&cluster, 2..=4);
    }
}

/// A kept step that the next increment builds on is coded and healed like any other that is kept.
#[test]
fn kept_steps_that_increments_build_on_keep_their_parity() {
    let room = Room {
        keep_steps: 2,
        durable_form: DurableForm::Increments,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, Some(Conduct::default()), room);
    (0..3).for_each(|_| cluster.save_and_wait(DurableWish::Required));
    all_hold(&cluster, 2..=3);
    cluster.kill(5);
    cluster.run_for(10_000);
    cluster.start_after(0, 5);
    cluster.run_for(60_000);
    all_hold(&cluster, 2..=3);
}

/// Eight saves on nodes of which some have little room; then all nodes hold the same steps, the newest among them.
fn saves_go_on(little: impl IntoIterator<Item = (usize, u64)>) {
    let budgets = little.into_iter().collect();
    let room = Room {
        keep_steps: 4,
        budgets,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    for step in 1..=8 {
        let began = cluster.now;
        cluster.save_and_wait(DurableWish::Never);
        let took = cluster.now - began;
        assert!(took < 8_000, "step {step}: {took} ms");
    }
    cluster.run_for(30_000);
    let everywhere = held(&cluster, 0);
    assert_eq!(everywhere.last(), Some(&(8, Some(2))));
    for node in 0..NODES {
        assert_eq!(held(&cluster, node), everywhere, "n{node}");
    }
    let since = cluster.now;
    cluster.run_for(60_000);
    assert_eq!(held(&cluster, 0), everywhere, "it stays so");
    assert!(cluster.failures(since).is_empty());
}

#[test]
fn kept_steps_give_way_to_a_save_that_has_no_slot() {
    for slots in [2, 3, 4] {
        saves_go_on([(0, slots * SLOT)]);
        saves_go_on((0..4).map(|node| (node, slots * SLOT)));
    }
}

#[test]
fn kept_steps_give_way_to_a_save_whose_parity_has_no_room() {
    for parities in [2, 3, 4] {
        saves_go_on([(4, parities * PARITY)]);
        saves_go_on([(4, parities * PARITY), (5, parities * PARITY)]);
    }
}
