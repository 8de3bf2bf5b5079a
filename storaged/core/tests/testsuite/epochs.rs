//! What moves when the list of nodes changes: the blocks of a place that another machine fills, once, and nothing else.

use crate::cluster::{Block, Cluster};
use crate::testkit::members;
use storaged_core::{EpochMembers, Input};
use storaged_wire::local::DurableWish;

const NODES: usize = 6;
const STRIPES: u64 = 20;

/// Four data nodes and two coding nodes, and a step that is protected.
fn protected() -> Cluster {
    let mut cluster = Cluster::start(4, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Never);
    cluster.reset_counts();
    cluster
}

/// One node after the other hears of an epoch with so many members.
fn all_hear(cluster: &mut Cluster, epoch: u64, count: usize) {
    for node in 0..NODES {
        let members = members(count);
        let passed = Vec::new();
        let heard = Input::Members {
            newest: EpochMembers { epoch, members },
            passed,
        };
        cluster.tell(node, heard);
        cluster.run_for(150);
    }
}

/// Which blocks were put in place, with their stripes, and how often each.
fn put(cluster: &Cluster) -> Vec<((usize, Block), Vec<u32>)> {
    let put = cluster.sessions.counts.put.iter();
    put.map(|(block, stripes)| (*block, stripes.values().copied().collect()))
        .collect()
}

/// The one before has died; its place is given up and filled, which are two epochs.
#[test]
fn a_machine_that_fills_a_place_gets_its_blocks_and_nothing_else_moves() {
    for (lost, block) in [(2, Block::Shard), (5, Block::Parity)] {
        let mut cluster = protected();
        cluster.kill(lost);
        cluster.run_for(3_000);
        all_hear(&mut cluster, 2, NODES);
        assert!(put(&cluster).is_empty(), "a vacant place takes nothing");
        cluster.start_after(0, lost);
        cluster.run_for(200);
        all_hear(&mut cluster, 3, NODES);
        let is_healed = |cluster: &Cluster| cluster.healed_at(&[lost], 0).is_some();
        cluster.run_until(60_000, "its blocks", is_healed);
        cluster.run_for(5_000);
        let once = vec![1; STRIPES as usize];
        assert_eq!(put(&cluster), [((lost, block), once)], "n{lost}");
        // Each stripe is made of k blocks, and each of them goes over one link.
        let sent: u64 = cluster.sessions.counts.sent.values().sum();
        assert_eq!(sent, 4 * STRIPES, "n{lost}");
    }
}

/// Older steps keep the groups of their manifests.
#[test]
fn nothing_moves_when_places_are_added_or_removed() {
    for count in [NODES + 1, NODES + 2] {
        let mut cluster = protected();
        all_hear(&mut cluster, 2, count);
        cluster.run_for(5_000);
        all_hear(&mut cluster, 3, NODES);
        cluster.run_for(5_000);
        assert!(cluster.sessions.counts.moved.is_empty(), "{count} places");
    }
}
