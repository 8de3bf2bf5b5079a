//! Nodes that an operator removes while a step is on its way: what they should have coded or held is waited for by nobody, and the next
//! step is coded by those that are left.

use crate::cluster::Cluster;
use crate::testkit::name;
use storaged_wire::local::{DurableWish, Reply, Request};
use storaged_wire::{CheckpointState, Refusal, RefusalCode, Step};

/// More stripes than are coded while a node is removed.
const STRIPES: u64 = 200;

/// Whoever waits for a protection hears of it, or why not, long before its time is over.
fn waited(
    cluster: &mut Cluster,
    node: usize,
    step: u64,
    meanwhile: impl Fn(&mut Cluster),
) -> Reply {
    let wait = Request::Wait {
        run: cluster.run(),
        step: Step::new(step),
        state: CheckpointState::Protected,
        timeout_ms: 600_000,
    };
    let id = cluster.send(node, cluster.trainer(node), wait);
    meanwhile(cluster);
    cluster.run_until(60_000, "an answer", |cluster| cluster.answer(id).is_some());
    cluster.answer(id).cloned().expect("it was answered")
}

fn refused(reply: Reply) -> Refusal {
    match reply {
        Reply::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

fn committed(cluster: &mut Cluster, nodes: &[usize]) {
    cluster.save();
    let nodes = nodes.to_vec();
    cluster.run_until(10_000, "a commit", move |cluster| {
        nodes.iter().all(|node| cluster.is_committed(*node))
    });
}

fn holds(cluster: &mut Cluster, node: usize, step: u64) -> bool {
    let status = cluster
        .ram(node)
        .node
        .status_json(&storaged_core::Viewer::Operator);
    status.contains(&format!(r#""step":{step},"#))
}

/// Of four nodes n0 and n1 hold data of a (2,1) and n2 codes; with n2 removed n3 does.
#[test]
fn a_step_whose_coding_node_was_removed_ends_typed_and_the_next_one_is_coded_by_another() {
    let mut cluster = Cluster::start_of(4, 2, 1, STRIPES);
    committed(&mut cluster, &[0, 1, 2]);
    let reply = waited(&mut cluster, 0, 1, |cluster| {
        cluster.run_for(300);
        cluster.remove(2, 2);
    });
    let refusal = refused(reply);
    assert_eq!(refusal.code, RefusalCode::Abandoned, "{}", refusal.message);
    for part in [
        "will not be protected",
        "n2",
        "left the cluster",
        "save again",
    ] {
        assert!(refusal.message.contains(part), "{}", refusal.message);
    }
    // It is the newest there is: it stays till a newer one is safe.
    assert!(holds(&mut cluster, 0, 1) && holds(&mut cluster, 1, 1));
    cluster.save_as(DurableWish::Never);
    cluster.run_until(60_000, "protection", |cluster| {
        [0, 1, 3].iter().all(|node| cluster.is_protected(*node))
    });
    cluster.run_for(2_000);
    // Saves go on: its slots are free again.
    for _ in 3..=6 {
        cluster.save();
        cluster.run_until(60_000, "protection", |cluster| {
            [0, 1, 3].iter().all(|node| cluster.is_protected(*node))
        });
    }
    for node in [0, 1] {
        assert!(!holds(&mut cluster, node, 1), "n{node} has retired it");
        assert!(holds(&mut cluster, node, 6), "n{node}");
    }
}

/// One of two coding nodes that is left codes it: it bears what it can.
#[test]
fn a_step_of_which_one_coding_node_was_removed_is_protected_by_the_other() {
    let mut cluster = Cluster::start_of(5, 2, 2, STRIPES);
    committed(&mut cluster, &[0, 1, 2, 3]);
    let reply = waited(&mut cluster, 0, 1, |cluster| {
        cluster.run_for(300);
        cluster.remove(2, 2);
    });
    let Reply::Reached { state, bears, .. } = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(state, CheckpointState::Protected);
    assert_eq!(bears.map(|bears| (bears.losses, bears.of)), Some((1, 2)));
}

/// Its shard was nowhere else: nobody waits for it to come back, as one does for a node that is down.
#[test]
fn a_step_whose_data_node_was_removed_before_it_was_coded_is_given_up() {
    let mut cluster = Cluster::start_of(4, 2, 1, STRIPES);
    committed(&mut cluster, &[0, 1, 2]);
    let reply = waited(&mut cluster, 0, 1, |cluster| {
        cluster.run_for(300);
        cluster.remove(1, 2);
    });
    let refusal = refused(reply);
    assert_eq!(refusal.code, RefusalCode::Abandoned, "{}", refusal.message);
    let lost = format!("rank 1 was lost with {}", name(1));
    assert!(refusal.message.contains(&lost), "{}", refusal.message);
}
