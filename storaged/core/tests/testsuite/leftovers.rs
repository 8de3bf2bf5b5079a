//! Copies to the durable tier: what others or earlier tries may have left there is looked for, and where nothing can be there it is not,
//! because each look costs an S3 server requests.

use crate::cluster::{Cluster, Conduct, Room, Uploads};
use storaged_core::Leftovers;
use storaged_wire::local::DurableWish;

const DATA_NODES: usize = 2;

fn published(cluster: &mut Cluster) {
    cluster.run_until(60_000, "a durable step", |cluster| {
        !cluster.tier.published.is_empty()
    });
}

/// With a step before the one that is looked at: of the first one an earlier life of the daemon may have begun to copy something.
fn at_work(cluster: &mut Cluster) {
    cluster.save_and_wait(DurableWish::Never);
}

#[test]
fn where_nothing_can_lie_in_the_tier_nothing_is_looked_for() {
    let mut cluster = Cluster::start_with_tier(DATA_NODES, 1, 10);
    at_work(&mut cluster);
    cluster.save_as(DurableWish::Required);
    published(&mut cluster);
    assert_eq!(cluster.tier.expected, [Leftovers::None; DATA_NODES]);
}

/// A trainer whose seal was not answered seals the step once more with the daemon that came after.
#[test]
fn what_an_earlier_life_of_the_daemon_may_have_left_is_looked_for() {
    let mut cluster = Cluster::start_with_tier(DATA_NODES, 1, 10);
    cluster.save_as(DurableWish::Required);
    published(&mut cluster);
    assert_eq!(cluster.tier.expected, [Leftovers::Perhaps; DATA_NODES]);
}

#[test]
fn what_a_try_that_failed_has_left_is_looked_for() {
    let tier = Conduct {
        uploads: Uploads::Refused,
        ..Conduct::default()
    };
    let mut cluster = Cluster::start_with(DATA_NODES, 1, 10, Some(tier), Room::default());
    at_work(&mut cluster);
    cluster.save_as(DurableWish::Required);
    cluster.run_for(2_000);
    cluster.scene.tier.as_mut().expect("a tier").uploads = Uploads::Taken;
    published(&mut cluster);
    let (first, later) = cluster.tier.expected.split_at(DATA_NODES);
    assert_eq!(first, [Leftovers::None; DATA_NODES]);
    assert!(later.len() >= DATA_NODES);
    assert!(later.iter().all(|it| *it == Leftovers::Perhaps));
}

#[test]
fn what_a_node_may_have_left_that_was_out_of_sight_is_looked_for() {
    let mut cluster = Cluster::start_with_tier(DATA_NODES, 1, 200);
    at_work(&mut cluster);
    cluster.save_as(DurableWish::Required);
    // Its coding is under way. The node comes back before it begins again, so all are in sight when it has ended.
    cluster.kill(DATA_NODES);
    cluster.run_for(10);
    cluster.start_process(DATA_NODES);
    published(&mut cluster);
    assert_eq!(cluster.tier.expected, [Leftovers::Perhaps; DATA_NODES]);
}

#[test]
fn what_a_node_may_have_left_that_is_out_of_sight_is_looked_for() {
    let mut cluster = Cluster::start_with_tier(DATA_NODES, 1, 10);
    at_work(&mut cluster);
    cluster.kill(DATA_NODES);
    cluster.run_for(10_000);
    cluster.save_as(DurableWish::Required);
    published(&mut cluster);
    assert_eq!(cluster.tier.expected, [Leftovers::Perhaps; DATA_NODES]);
}
