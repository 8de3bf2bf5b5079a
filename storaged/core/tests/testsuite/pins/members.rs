//! Nodes of a step's groups on which no rank of the job is: they hold nothing of it, and are not asked for what they never had.

use super::{keep, pinned, refused};
use crate::cluster::{Cluster, Room};
use storaged_wire::RefusalCode;
use storaged_wire::local::{DurableWish, Keep};

const NODES: usize = 5;

/// `n0`, `n1` and `n2` are coded by `n3`, and `n3` and `n4` by `n0`. Ranks are on the first nodes alone.
fn with_ranks_on(ranks: usize, room: Room) -> Cluster {
    Cluster::start_with_ranks(NODES, ranks, 3, 1, 10, room)
}

/// Two steps with ranks on `n0` and `n1`, both of which are kept, but the first one not by these nodes.
fn let_go_by(nodes: &[usize]) -> Cluster {
    let mut cluster = with_ranks_on(
        2,
        Room {
            keep_steps: 2,
            keeping: nodes.iter().map(|node| (*node, 1)).collect(),
            ..Room::default()
        },
    );
    for _ in 1..=2 {
        cluster.save_on_all(2, DurableWish::Never);
    }
    for node in nodes {
        assert_eq!(cluster.held(*node).len(), 1, "n{node} keeps one step");
    }
    cluster
}

fn has(cluster: &Cluster, node: usize, step: u64) -> bool {
    let held = cluster.held(node).into_iter();
    held.map(|(held, _)| held).any(|held| held == step)
}

/// With one rank all members of a group but that rank's node and the coding node have nothing, and the other group has no shard at all.
#[test]
fn a_step_is_pinned_whose_groups_have_nodes_without_a_rank() {
    for ranks in 1..=3 {
        let mut cluster = with_ranks_on(ranks, Room::default());
        cluster.save_on_all(1, DurableWish::Never);
        let empty = (0..NODES).filter(|node| !has(&cluster, *node, 1));
        assert_eq!(empty.count(), 4 - ranks, "{ranks} ranks");
        pinned(&mut cluster, 0, 1);
        for _ in 2..=4 {
            cluster.save_on_all(1, DurableWish::Never);
        }
        (0..ranks).for_each(|node| assert!(has(&cluster, node, 1), "n{node}"));
        assert!(has(&cluster, 3, 1), "its parity");
        keep(&mut cluster, 0, 1, Keep::Unpin).expect("it was pinned");
        cluster.run_for(1_000);
        assert!(!has(&cluster, 0, 1));
    }
}

/// It has nothing of it, and what it does not have is not lost with it.
#[test]
fn a_node_without_a_rank_that_is_down_is_in_no_pin_s_way() {
    let mut cluster = with_ranks_on(1, Room::default());
    cluster.save_on_all(1, DurableWish::Never);
    for node in [1, 2, 4] {
        cluster.kill(node);
    }
    cluster.run_for(10_000);
    pinned(&mut cluster, 0, 1);
}

/// One block may be lost: a shard, or the parity.
#[test]
fn a_node_that_has_let_its_block_go_counts_beside_those_that_never_had_one() {
    for lost in [1, 3] {
        let mut cluster = let_go_by(&[lost]);
        pinned(&mut cluster, 0, 1);
        for _ in 3..=4 {
            cluster.save_on_all(2, DurableWish::Never);
        }
        assert!(has(&cluster, 0, 1), "it was pinned without n{lost}");
    }
    let mut cluster = let_go_by(&[1, 3]);
    let refusal = refused(&mut cluster, 0, 1);
    assert_eq!(refusal.code, RefusalCode::TooManyLost);
    let said = &refusal.message;
    assert!(said.contains("got n1, n3:"), "{said}");
}
