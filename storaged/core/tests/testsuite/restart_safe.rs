//! Whether a node may be restarted: what is asked of a rolling restart's next node, also where a durable tier has a copy.

use crate::cluster::{self, Cluster, Conduct, Listing, Uploads};
use crate::testkit::plan_newest;
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{CheckpointState, RefusalCode, Step};

const NODES: usize = 3;

/// What the nodes that stay say, which is the same: a home node counts for itself, the other one is told.
fn objections(cluster: &mut Cluster, bears: Option<u32>) -> Vec<String> {
    let mut ask = |node| {
        let reader = cluster.connect(node, Role::Reader);
        let reply = cluster.ask(node, reader, Request::RestartSafe { bears });
        cluster.disconnect(node, reader);
        match reply {
            Reply::RestartSafe(objections) => objections,
            other => panic!("{other:?}"),
        }
    };
    let (one, other) = (ask(0), ask(1));
    assert_eq!(one.len(), other.len(), "{one:?} {other:?}");
    one
}

/// A plan of the nodes that stay: each finds out for itself how the tier is.
fn planned(cluster: &mut Cluster) -> RestorePlan {
    let mut ask = |node| {
        let reader = cluster.connect(node, Role::Reader);
        match cluster.ask(node, reader, plan_newest(10_000)) {
            Reply::Plan(plan) => plan,
            other => panic!("{other:?}"),
        }
    };
    ask(0);
    ask(1)
}

/// A step that is in the durable tier, and in the RAM of three nodes.
fn durable() -> Cluster {
    let mut cluster = Cluster::start_with_tier(2, 1, 10);
    cluster.save_as(DurableWish::Required);
    cluster.run_until(60_000, "durability", |cluster| {
        !cluster.tier.published.is_empty() && (0..NODES).all(|node| cluster.is_protected(node))
    });
    cluster.run_for(6_000);
    cluster
}

#[test]
fn what_is_durable_must_bear_losses_too_or_all_nodes_could_go_at_once() {
    let mut cluster = durable();
    assert_eq!(objections(&mut cluster, None), [""; 0]);
    cluster.kill(2);
    cluster.run_for(4_000);
    let said = objections(&mut cluster, None);
    assert!(
        said[0].contains("bears 0 of 1 losses, expected 1"),
        "{said:?}"
    );
    assert!(
        said[0].contains("bears 0 goes by the durable tier alone"),
        "it says how to go by the tier alone: {said:?}"
    );
}

#[test]
fn the_durable_tier_alone_is_enough_if_that_is_asked_for_and_it_answers() {
    let mut cluster = durable();
    cluster.kill(2);
    cluster.run_for(4_000);
    assert_eq!(objections(&mut cluster, Some(0)), [""; 0]);
    // The next thing that is asked of the tier finds out that it is away.
    cluster.scene.tier.as_mut().expect("a tier").listing = Listing::FailsAfter(20);
    planned(&mut cluster);
    cluster.run_for(1_000);
    let said = objections(&mut cluster, Some(0));
    assert!(said[0].contains("503 slow down"), "{said:?}");
}

#[test]
fn without_a_copy_in_the_tier_no_loss_is_borne_at_zero_either() {
    let mut cluster = Cluster::start_with_tier(2, 1, 10);
    cluster.save();
    let everywhere = |cluster: &Cluster| (0..NODES).all(|node| cluster.is_protected(node));
    cluster.run_until(60_000, "protection", everywhere);
    cluster.kill(2);
    cluster.run_for(4_000);
    assert_eq!(objections(&mut cluster, Some(0)).len(), 1);
}

#[test]
fn whoever_waits_for_a_copy_that_the_tier_refuses_hears_why() {
    let tier = Conduct {
        uploads: Uploads::Refused,
        ..Conduct::default()
    };
    let room = cluster::Room::default();
    let mut cluster = Cluster::start_with(2, 1, 10, Some(tier), room);
    cluster.save_as(DurableWish::Required);
    cluster.run_for(2_000);
    let run = planned(&mut cluster).run;
    let reader = cluster.connect(0, Role::Reader);
    let wait = Request::Wait {
        run,
        step: Step::new(1),
        state: CheckpointState::Durable,
        timeout_ms: 3_000,
    };
    match cluster.ask(0, reader, wait) {
        Reply::Refused(refusal) => {
            assert_eq!(refusal.code, RefusalCode::TimedOut);
            assert!(
                refusal.message.contains("read-only file system"),
                "{refusal:?}"
            );
        }
        other => panic!("{other:?}"),
    }
}

/// That a step is protected and which blocks nodes hold come by different messages. Whoever waits in between is not told that
/// it bears nothing: nobody knows that.
#[test]
fn whoever_waits_for_protection_is_not_told_of_losses_that_no_node_has_seen() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save();
    let everywhere = |cluster: &Cluster| (0..6).all(|node| cluster.is_protected(node));
    cluster.run_until(60_000, "protection", everywhere);
    let run = planned(&mut cluster).run;
    for step in 2..20 {
        cluster.save();
        let wait = Request::Wait {
            run,
            step: Step::new(step),
            state: CheckpointState::Protected,
            timeout_ms: 10_000,
        };
        let ask = |node| {
            let reader = cluster.connect(node, Role::Reader);
            (node, cluster.send(node, reader, wait.clone()))
        };
        let asked: Vec<_> = (0..6).map(ask).collect();
        cluster.run_for(4_000);
        for (node, id) in asked {
            let Some(Reply::Reached { bears, .. }) = cluster.answer(id) else {
                panic!("n{node}, step {step}: {:?}", cluster.answer(id));
            };
            let wrong = bears.is_some_and(|bears| bears.losses < bears.of);
            assert!(
                !wrong,
                "n{node}, step {step}: {bears:?}, and all nodes are up"
            );
        }
    }
}

/// Of five nodes that bear two losses three lose their memory. Who waits for the step to become whole must hear that it never will.
#[test]
fn a_step_that_more_than_m_losses_took_is_said_to_be_lost_until_a_newer_one_is_protected() {
    let mut cluster = Cluster::start(3, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    let (homes, _) = cluster.homes_of(1);
    let lost: Vec<usize> = (0..5).filter(|node| *node != homes[0]).take(3).collect();
    let said = |cluster: &mut Cluster| {
        let reader = cluster.connect(homes[0], Role::Reader);
        let reply = cluster.ask(homes[0], reader, Request::RestartSafe { bears: None });
        cluster.disconnect(homes[0], reader);
        match reply {
            Reply::RestartSafe(objections) => objections.join(", "),
            other => panic!("{other:?}"),
        }
    };
    lost[..2].iter().for_each(|node| cluster.kill(*node));
    cluster.run_for(10_000);
    let borne = said(&mut cluster);
    assert!(borne.contains("bears 0 of 2"), "{borne}");
    assert!(!borne.contains("it is lost"), "{borne}");
    cluster.kill(lost[2]);
    cluster.run_for(10_000);
    let away = said(&mut cluster);
    assert!(!away.contains("it is lost"), "they may come back: {away}");
    lost.iter().for_each(|node| cluster.start_after(0, *node));
    cluster.run_for(30_000);
    let gone = said(&mut cluster);
    assert!(gone.contains("it is lost: the shard of rank"), "{gone}");
}
