//! Nodes that operators drain at the same time: each may go only if what is left then bears the loss of all that go before it.

use crate::cluster::Cluster;
use storaged_core::{Input, RequestId, Viewer};
use storaged_wire::drain::{DrainOrder, PlaceAfter};
use storaged_wire::local::{DurableWish, Request, Role};

const M: usize = 2;
const NODES: usize = 4 + M;

fn protected() -> Cluster {
    let mut cluster = Cluster::start(4, M, 10);
    cluster.save_on_all(NODES, DurableWish::Never);
    cluster
}

/// An operator drains a node.
fn drain(cluster: &mut Cluster, node: usize) {
    let conn = cluster.connect(node, Role::Reader);
    cluster.tell(
        node,
        Input::Connected {
            conn,
            viewer: Viewer::Operator,
        },
    );
    let order = DrainOrder {
        within_ms: 60_000,
        place: PlaceAfter::GivenUp,
        bears: None,
    };
    let id = RequestId { conn, index: 1_000 };
    let request = Request::Drain(order);
    cluster.tell(node, Input::Request { id, request });
}

/// What keeps a drained node from going, as its daemon asks.
fn objections(cluster: &Cluster, node: usize) -> Vec<String> {
    let process = cluster.processes[node].as_ref().expect("it is up");
    process.node.restart_objections(Some(0), &Viewer::Operator)
}

/// Those of the drained nodes that may go.
fn free(cluster: &Cluster, drained: &[usize]) -> Vec<usize> {
    let may_go = |node: &&usize| objections(cluster, **node).is_empty();
    drained.iter().filter(may_go).copied().collect()
}

#[test]
fn as_many_as_can_be_lost_go_at_once_and_the_others_stay() {
    for gap_ms in [0, 1, 3, 1_000] {
        for order in [[0, 1, 5], [5, 1, 0], [4, 0, 2]] {
            let mut cluster = protected();
            for node in order {
                drain(&mut cluster, node);
                cluster.run_for(gap_ms);
            }
            cluster.run_for(200);
            let going = free(&cluster, &order);
            assert_eq!(going.len(), M, "{order:?}, {gap_ms} ms apart: {going:?}");
            // A daemon that may go once does not hear later that it should have stayed.
            cluster.run_for(10_000);
            assert_eq!(free(&cluster, &order), going, "{order:?}, {gap_ms} ms");
            if gap_ms == 1_000 {
                assert!(!going.contains(&order[2]), "the last one waits");
            }
        }
    }
}

#[test]
fn nobody_goes_before_peers_had_time_to_say_that_they_go_too() {
    let mut cluster = protected();
    drain(&mut cluster, 0);
    let said = objections(&cluster, 0);
    assert!(said[0].contains("not heard yet whether"), "{said:?}");
    cluster.run_for(200);
    assert_eq!(objections(&cluster, 0), [""; 0]);
}

/// What this node holds, and what those hold that go before it.
#[test]
fn what_a_step_bears_once_its_nodes_have_gone_is_known() {
    let mut cluster = protected();
    let after = |cluster: &Cluster, node: usize| {
        let process = cluster.processes[node].as_ref().expect("it is up");
        let steps = process.node.after_drain();
        let bears = steps.iter().map(|step| (step.bears.losses, step.bears.of));
        bears.collect::<Vec<_>>()
    };
    for (node, losses) in [(0, 1), (1, 0), (2, 0)] {
        drain(&mut cluster, node);
        cluster.run_for(1_000);
        assert_eq!(after(&cluster, node), [(losses, 2)], "node {node}");
    }
}

/// One that is of an older release never says it.
#[test]
fn a_peer_that_does_not_answer_is_not_waited_for_any_longer_than_a_few_seconds() {
    let mut cluster = protected();
    cluster.pause(1, 60_000);
    cluster.pause(2, 60_000);
    drain(&mut cluster, 0);
    cluster.run_for(1_000);
    assert_eq!(objections(&cluster, 0).len(), 1);
    cluster.start_after(0, 1);
    cluster.start_after(0, 2);
    cluster.run_until(60_000, "blocks that are back", |cluster| {
        objections(cluster, 0).is_empty()
    });
}

#[test]
fn who_waits_for_drained_nodes_goes_once_others_have_what_they_had() {
    let mut cluster = protected();
    for node in [0, 1, 2] {
        drain(&mut cluster, node);
        cluster.run_for(1_000);
    }
    let said = objections(&cluster, 2);
    assert!(said[0].contains("drained before this node: n0"), "{said:?}");
    for node in [0, 1] {
        cluster.kill(node);
        assert_eq!(objections(&cluster, 2).len(), 1);
        cluster.run_for(5_000);
    }
    assert_eq!(objections(&cluster, 2).len(), 1, "their blocks are missing");
    for node in [0, 1] {
        cluster.start_after(0, node);
    }
    cluster.run_until(60_000, "blocks that are back", |cluster| {
        objections(cluster, 2).is_empty()
    });
}

/// Whoever rolls a cluster asks another node meanwhile.
#[test]
fn a_restart_is_not_safe_beside_nodes_that_go() {
    let mut cluster = protected();
    for node in [0, 1] {
        assert_eq!(objections(&cluster, 3), [""; 0]);
        drain(&mut cluster, node);
        cluster.run_for(200);
    }
    let said = objections(&cluster, 3);
    assert!(
        said[0].contains("bears 2 of 2 losses, expected 3"),
        "{said:?}"
    );
    assert!(said[0].contains("drained before this node: n0"), "{said:?}");
}
