//! Who wrote what lies in the durable tier: the job's key is where it is needed, outlives daemons, and what was durable is missed.

use crate::cluster::{Cluster, Conduct, Room, Uploads};
use crate::testkit::{TOKEN, namespace};
use storaged_core::Authorship;
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::plan::CopyFault;
use storaged_wire::{JobKeys, Step};

const STRIPES: u64 = 10;

fn keys() -> JobKeys {
    JobKeys::of_token(&namespace(), TOKEN)
}

fn authors(cluster: &Cluster) -> Vec<Authorship> {
    let published = cluster.tier.published.values();
    published.map(|one| one.authorship.clone()).collect()
}

fn saved(steps: u64) -> Cluster {
    let mut cluster = Cluster::start_with_tier(4, 2, STRIPES);
    (0..steps).for_each(|_| cluster.save_and_wait(DurableWish::Required));
    cluster
}

#[test]
fn whoever_publishes_has_the_jobs_key_and_names_the_one_before() {
    let cluster = saved(8);
    let authors = authors(&cluster);
    assert_eq!(authors.len(), 8);
    let before = authors.iter().map(|by| by.predecessor.map(|it| it.step));
    let expected = (0..8).map(|step| Some(Step::new(step)).filter(|_| step > 0));
    assert!(before.eq(expected), "{authors:?}");
    // Nodes that code have no trainers: they have asked for it.
    assert!(
        authors.iter().all(|by| by.keys == Some(keys())),
        "{authors:?}"
    );
}

#[test]
fn a_daemon_that_takes_over_memory_has_the_key_without_a_trainer() {
    let conduct = Conduct {
        uploads: Uploads::Refused,
        ..Conduct::default()
    };
    let mut cluster = Cluster::start_with(4, 2, STRIPES, Some(conduct), Room::default());
    cluster.save_as(DurableWish::Required);
    cluster.run_for(5_000);
    assert_eq!(cluster.tier.published.len(), 0);
    (0..6).for_each(|node| cluster.end_daemon(node));
    cluster.run_for(500);
    cluster.scene.tier = Some(Conduct::default());
    (0..6).for_each(|node| cluster.start_after(0, node));
    cluster.run_until(200_000, "publication", |cluster| {
        !cluster.tier.published.is_empty()
    });
    assert_eq!(authors(&cluster)[0].keys, Some(keys()));
}

/// A plan at a node, which may be older than what was known.
fn planned(cluster: &mut Cluster, node: usize) -> Reply {
    let reader = cluster.connect(node, Role::Reader);
    let plan = Request::Plan {
        step: None,
        timeout_ms: 30_000,
        allow_older: true,
    };
    let reply = cluster.ask(node, reader, plan);
    cluster.disconnect(node, reader);
    reply
}

fn missing(reply: &Reply) -> Vec<u64> {
    let Reply::Plan(plan) = reply else {
        panic!("expected a plan, got {reply:?}");
    };
    let gone = plan.passed_over.iter();
    let gone = gone.filter(|one| one.copy == Some(CopyFault::Missing));
    gone.map(|one| one.step.get()).collect()
}

/// The newest step is gone from the tier, and from the RAM of all nodes but one.
fn rolled_back() -> Cluster {
    let mut cluster = saved(2);
    let newest = cluster.tier.published.keys().next_back().cloned();
    cluster
        .tier
        .published
        .remove(&newest.expect("it was saved"));
    for node in 1..6 {
        cluster.kill(node);
    }
    for node in 1..6 {
        cluster.start_after(50, node);
    }
    cluster.run_for(20_000);
    cluster
}

#[test]
fn a_tier_that_was_put_back_to_an_older_state_is_seen_through() {
    let mut cluster = rolled_back();
    let reply = planned(&mut cluster, 0);
    assert_eq!(missing(&reply), [2], "{reply:?}");
    let Reply::Plan(plan) = reply else {
        unreachable!("it was one");
    };
    assert_eq!(plan.step, Step::new(1));
    let reason = &plan.passed_over[0].reason;
    assert!(reason.contains("a newer one was known"), "{reason}");
}

#[test]
fn a_step_that_somebody_else_wrote_is_not_offered() {
    let mut cluster = saved(2);
    let newest = cluster.tier.published.values_mut().next_back();
    newest.expect("it was saved").authorship.keys = Some(JobKeys::of_token(&namespace(), b"guess"));
    for node in 0..6 {
        cluster.kill(node);
    }
    for node in 0..6 {
        cluster.start_after(50, node);
    }
    cluster.run_for(20_000);
    let Reply::Plan(plan) = planned(&mut cluster, 3) else {
        panic!("the one before is there");
    };
    assert_eq!(plan.step, Step::new(1));
    let passed_over = plan.passed_over.iter().find(|one| one.step == Step::new(2));
    let copy = passed_over.and_then(|one| one.copy);
    assert_eq!(copy, Some(CopyFault::Forged), "{plan:?}");
}
