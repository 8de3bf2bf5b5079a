//! Who writes a manifest to the durable tier: the first home node, unless that one cannot.

use storaged_wire::local::DurableWish;

use crate::cluster::{Cluster, Conduct, Manifests};

const STRIPES: u64 = 4;

/// A step is in the tier but for its manifest; how long it takes from there until all nodes but the first home node know it to be durable.
fn published_after(manifests: fn(usize) -> Manifests) -> u64 {
    let mut cluster = Cluster::start_with_tier(4, 2, STRIPES);
    let uploads = cluster.scene.tier.as_ref().expect("a tier").uploads;
    cluster.save_as(DurableWish::Required);
    cluster.run_until(5_000, "a commit", |cluster| cluster.is_committed(0));
    let (homes, _) = cluster.homes_of(1);
    cluster.scene.tier = Some(Conduct {
        manifests: manifests(homes[0]),
        uploads,
        ..Conduct::default()
    });
    let began = cluster.now;
    cluster.run_until(60_000, "durability", |cluster| {
        let nodes = 0..cluster.processes.len();
        let mut others = nodes.filter(|node| *node != homes[0]);
        others.all(|node| cluster.is_durable(node))
    });
    cluster.now - began
}

#[test]
fn a_home_node_whose_writes_fail_keeps_no_step_from_becoming_durable() {
    let took = published_after(Manifests::RefusedOf);
    assert!(took < 5_000, "{took} ms: it says that it fails");
}

#[test]
fn a_home_node_that_hangs_keeps_no_step_from_becoming_durable() {
    let took = published_after(Manifests::HangOf);
    assert!(took < 20_000, "{took} ms");
}
