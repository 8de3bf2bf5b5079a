//! Steps that all their home nodes have forgotten, and nodes hold that decide nothing of them.

use storaged_wire::local::DurableWish;

use crate::cluster::Cluster;

const NODES: usize = 9;

/// All home nodes of the newest protected step lose their memory, which can be borne: whether one of them had a shard.
fn loses_homes_of_protected(step: u64) -> Option<bool> {
    let mut cluster = Cluster::start_of(NODES, 4, 2, 10);
    cluster.goes_back_to(step - 1);
    cluster.save_on_all(6, DurableWish::Never);
    let (homes, blocks) = cluster.homes_of(step);
    // Node 0 has the only copy of schema and metadata beside the home nodes'.
    if blocks > 2 || homes.contains(&0) {
        return None;
    }
    let before = cluster.held_by_all();
    cluster.restart_empty(&homes);
    cluster.run_for(60_000);
    assert_eq!(
        cluster.held_by_all(),
        before,
        "step {step} of homes {homes:?}"
    );
    Some(homes.iter().any(|home| *home < 4))
}

#[test]
fn a_protected_step_that_its_home_nodes_have_forgotten_is_healed_from_its_members() {
    let had_shard: Vec<bool> = (1..=12).filter_map(loses_homes_of_protected).collect();
    assert!(
        had_shard.contains(&true) && had_shard.contains(&false),
        "homes with shards and without: {had_shard:?}"
    );
}

/// The coding nodes are away when a step is committed, whose home nodes hold nothing of it and lose their memory; then all are back.
/// None if its home nodes are others. It would hold its slots, neither protected nor given up.
fn commit_that_homes_forget(step: u64, unheard: &[usize]) -> Option<Cluster> {
    let mut cluster = Cluster::start_of(NODES, 2, 2, 10);
    cluster.goes_back_to(step - 2);
    cluster.save_on_all(4, DurableWish::Never);
    let coding = (2..NODES).filter(|node| !cluster.held(*node).is_empty());
    let coding: Vec<usize> = coding.collect();
    coding.iter().for_each(|node| cluster.kill(*node));
    cluster.run_for(5_000);
    cluster.save();
    let is_committed = |cluster: &Cluster| (0..2).all(|node| cluster.is_committed(node));
    cluster.run_until(5_000, "a commit", is_committed);
    let (homes, _) = cluster.homes_of(step);
    if homes.iter().any(|home| *home < 2 || coding.contains(home)) {
        return None;
    }
    cluster.scene.unheard.extend(unheard);
    cluster.restart_empty(&homes);
    coding.iter().for_each(|node| cluster.start_after(0, *node));
    cluster.run_for(2_000);
    Some(cluster)
}

fn becomes_protected(mut cluster: Cluster) {
    let is_protected = |cluster: &Cluster| (0..2).all(|node| cluster.is_protected(node));
    cluster.run_until(30_000, "protection", is_protected);
}

#[test]
fn a_committed_step_that_its_home_nodes_have_forgotten_is_coded() {
    let such = (2..=12).filter_map(|step| commit_that_homes_forget(step, &[]));
    assert!(such.map(becomes_protected).count() > 0);
}

/// What is said once, when a link comes up, may come too early.
#[test]
fn home_nodes_hear_of_it_again() {
    let such = (2..=12).filter_map(|step| commit_that_homes_forget(step, &[0, 1]));
    let heard_late = such.map(|mut cluster| {
        cluster.scene.unheard.clear();
        becomes_protected(cluster);
    });
    assert!(heard_late.count() > 0);
}
