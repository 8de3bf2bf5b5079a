//! Plans asked while links are down, nodes are paused or the durable tier hangs: never an older step than the one that
//! was protected, unless the caller allows it.

use crate::cluster::{Cluster, Listing, STRIPE_MS};
use crate::testkit::open_shard;
use storaged_core::{ConnId, RequestId};
use storaged_wire::local::{DurableWish, Keep, Reply, Request, Role, VerifiedPart};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{Rank, RefusalCode, Step};

const NODES: usize = 6;

/// Step 1 is durable, step 2 was protected after it.
fn two_steps() -> Cluster {
    let mut cluster = Cluster::start_with_tier(4, 2, 10);
    cluster.save_as(DurableWish::Required);
    cluster.run_until(60_000, "a durable step", |cluster| {
        !cluster.tier.published.is_empty()
    });
    cluster.run_for(2_000);
    cluster.save();
    let everywhere = |cluster: &Cluster| (0..NODES).all(|node| cluster.is_protected(node));
    cluster.run_until(60_000 + STRIPE_MS, "protection", everywhere);
    cluster.run_for(2_000);
    cluster
}

/// Whether a reader takes less than what was protected.
#[derive(Clone, Copy, PartialEq)]
enum Older {
    Refused,
    Allowed,
}

fn plan(cluster: &mut Cluster, node: usize, timeout_ms: u32, older: Older) -> RequestId {
    let reader = cluster.connect(node, Role::Reader);
    ask_again(cluster, node, reader, timeout_ms, older)
}

fn ask_again(
    cluster: &mut Cluster,
    node: usize,
    reader: ConnId,
    timeout_ms: u32,
    older: Older,
) -> RequestId {
    let plan = Request::Plan {
        step: None,
        timeout_ms,
        allow_older: older == Older::Allowed,
    };
    cluster.send(node, reader, plan)
}

/// The step offered, or the code and text of the refusal; and how long it took.
fn answer(cluster: &mut Cluster, id: RequestId) -> (Result<u64, (RefusalCode, String)>, u64) {
    let took = cluster.run_until(100_000, "an answer", |cluster| cluster.answer(id).is_some());
    let answer = match cluster.answer(id) {
        Some(Reply::Plan(plan)) => Ok(plan.step.get()),
        Some(Reply::Refused(refusal)) => Err((refusal.code, refusal.message.clone())),
        other => panic!("{other:?}"),
    };
    (answer, took)
}

#[test]
fn a_plan_waits_for_nodes_that_are_paused() {
    for pause_ms in [500, 1_900, 2_100, 3_500, 20_000] {
        let mut cluster = two_steps();
        let reader = cluster.connect(0, Role::Reader);
        (1..NODES).for_each(|node| cluster.pause(node, pause_ms));
        for asked_after_ms in [0, 1_000, 3_000] {
            cluster.run_for(asked_after_ms);
            let id = ask_again(&mut cluster, 0, reader, 60_000, Older::Refused);
            let (offered, took) = answer(&mut cluster, id);
            assert_eq!(offered, Ok(2), "{pause_ms}, {asked_after_ms} ms");
            assert!(took <= pause_ms + 1_500, "{took} of {pause_ms} ms");
        }
    }
}

#[test]
fn a_plan_asked_while_the_own_node_is_paused_waits_for_its_links() {
    for pause_ms in [500, 3_000, 40_000] {
        let mut cluster = two_steps();
        let reader = cluster.connect(0, Role::Reader);
        cluster.pause(0, pause_ms);
        cluster.run_for(pause_ms / 2);
        let id = ask_again(&mut cluster, 0, reader, 60_000, Older::Refused);
        let (offered, _) = answer(&mut cluster, id);
        assert_eq!(offered, Ok(2), "{pause_ms} ms");
    }
}

#[test]
fn so_does_one_of_a_node_that_was_restarted_empty_while_the_others_are_paused() {
    let mut cluster = two_steps();
    cluster.kill(0);
    (1..NODES).for_each(|node| cluster.pause(node, 6_000));
    cluster.start_after(100, 0);
    cluster.run_for(1_000);
    let id = plan(&mut cluster, 0, 60_000, Older::Refused);
    let (offered, _) = answer(&mut cluster, id);
    assert_eq!(offered, Ok(2));
}

#[test]
fn at_the_end_of_its_time_a_plan_names_what_it_cannot_reach_and_whom_it_did_not_hear() {
    let mut cluster = two_steps();
    let reader = cluster.connect(0, Role::Reader);
    (3..NODES).for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    let id = ask_again(&mut cluster, 0, reader, 5_000, Older::Refused);
    let (refused, took) = answer(&mut cluster, id);
    let (code, text) = refused.unwrap_err();
    assert_eq!(code, RefusalCode::NewerUnreachable, "{text}");
    for named in [" step 2 of job was protected", "n3, n4, n5", " step 1;"] {
        assert!(text.contains(named), "{named}: {text}");
    }
    assert!((4_900..=5_100).contains(&took), "{took}");
    let id = ask_again(&mut cluster, 0, reader, 5_000, Older::Allowed);
    assert_eq!(answer(&mut cluster, id).0, Ok(1), "what was allowed");
}

/// With nothing older to offer either, it is not said that all is lost while those who may hold it are silent.
#[test]
fn what_silent_nodes_may_hold_is_not_said_to_be_lost() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save();
    let everywhere = |cluster: &Cluster| (0..NODES).all(|node| cluster.is_protected(node));
    cluster.run_until(60_000 + STRIPE_MS, "protection", everywhere);
    cluster.run_for(2_000);
    let reader = cluster.connect(0, Role::Reader);
    (3..NODES).for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    for (older, expected) in [
        (Older::Refused, RefusalCode::NewerUnreachable),
        (Older::Allowed, RefusalCode::TooManyLost),
    ] {
        let id = ask_again(&mut cluster, 0, reader, 5_000, older);
        let (code, text) = answer(&mut cluster, id).0.unwrap_err();
        assert_eq!(code, expected, "{text}");
        assert!(text.contains("n3, n4, n5"), "{text}");
        assert!(text.contains("cannot be decoded"), "{text}");
    }
}

/// Somebody saves while a reader follows its plan: what was planned is not lost, there is a newer one in its place.
#[test]
fn a_step_that_was_retired_since_it_was_planned_is_no_checkpoint_and_not_a_lost_one() {
    let mut cluster = Cluster::start(4, 2, 10);
    let everywhere = |cluster: &Cluster| (0..NODES).all(|node| cluster.is_protected(node));
    cluster.save();
    cluster.run_until(60_000 + STRIPE_MS, "protection", everywhere);
    let reader = cluster.connect(0, Role::Reader);
    let id = ask_again(&mut cluster, 0, reader, 60_000, Older::Refused);
    cluster.run_until_answered(&[id]);
    let Some(Reply::Plan(planned)) = cluster.answer(id).cloned() else {
        panic!("no plan");
    };
    for _ in 0..2 {
        cluster.save();
        cluster.run_until(60_000 + STRIPE_MS, "protection", everywhere);
        cluster.run_for(5_000);
    }
    let open = open_shard(planned.manifest, Rank::new(1), 60_000);
    let silent = open_shard(planned.manifest, Rank::new(1), 5_000);
    match cluster.ask(0, reader, open) {
        Reply::Refused(refusal) => {
            assert_eq!(refusal.code, RefusalCode::NoCheckpoint);
            assert!(refusal.message.contains("step 1 was let go"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
    // Nodes that are down may hold it still: they are waited for.
    (3..NODES).for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    match cluster.ask(0, reader, silent) {
        Reply::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::TimedOut),
        other => panic!("{other:?}"),
    }
}

/// What a reader plans with.
fn planned(cluster: &mut Cluster, node: usize, reader: ConnId, step: Option<Step>) -> RestorePlan {
    let plan = Request::Plan {
        step,
        timeout_ms: 60_000,
        allow_older: false,
    };
    match cluster.ask(node, reader, plan) {
        Reply::Plan(plan) => plan,
        other => panic!("no plan on n{node}: {other:?}"),
    }
}

/// The code that the opening of a planned shard is refused with, and the text.
fn not_opened(
    cluster: &mut Cluster,
    node: usize,
    reader: ConnId,
    plan: &RestorePlan,
    rank: u32,
) -> (RefusalCode, String) {
    let open = open_shard(plan.manifest, Rank::new(rank), 60_000);
    match cluster.ask(node, reader, open) {
        Reply::Refused(refusal) => (refusal.code, refusal.message),
        other => panic!("rank {rank} at n{node}: {other:?}"),
    }
}

/// They lose what is in their RAM, and are there again at once.
fn emptied(cluster: &mut Cluster, nodes: impl IntoIterator<Item = usize> + Clone) {
    nodes
        .clone()
        .into_iter()
        .for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    nodes
        .into_iter()
        .for_each(|node| cluster.start_after(0, node));
    cluster.run_for(5_000);
}

/// All but one let it go for the newer one; what this one keeps for its reader does not suffice for others.
#[test]
fn a_step_that_one_reader_still_holds_is_no_lost_one_for_others() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    let planner = cluster.connect(3, Role::Reader);
    let plan = planned(&mut cluster, 3, planner, None);
    let holder = cluster.connect(0, Role::Reader);
    let own = open_shard(plan.manifest, Rank::new(0), 60_000);
    let opened = cluster.ask(0, holder, own);
    assert!(matches!(opened, Reply::ShardOpened { .. }), "{opened:?}");
    for _ in 0..2 {
        cluster.save_and_wait(DurableWish::Never);
    }
    for rank in [0, 1] {
        let (code, text) = not_opened(&mut cluster, 3, planner, &plan, rank);
        assert_eq!(code, RefusalCode::NoCheckpoint, "rank {rank}: {text}");
        assert!(
            text.contains("step 1 ") && text.contains("another plan"),
            "{text}"
        );
    }
}

#[test]
fn a_step_that_was_lost_since_it_was_planned_is_a_lost_one() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    let reader = cluster.connect(0, Role::Reader);
    let plan = planned(&mut cluster, 0, reader, None);
    emptied(&mut cluster, 3..NODES);
    let (code, text) = not_opened(&mut cluster, 0, reader, &plan, 3);
    assert_eq!(code, RefusalCode::TooManyLost, "{text}");
}

/// Nobody who is asked has heard of it: they were all restarted, and nothing is newer.
#[test]
fn a_step_that_all_who_held_it_have_lost_is_a_lost_one() {
    let mut cluster = Cluster::start_of(NODES + 1, 4, 2, 10);
    cluster.save_on_all(NODES, DurableWish::Never);
    let reader = cluster.connect(NODES, Role::Reader);
    let plan = planned(&mut cluster, NODES, reader, None);
    emptied(&mut cluster, 0..NODES);
    let (code, text) = not_opened(&mut cluster, NODES, reader, &plan, 1);
    assert_eq!(code, RefusalCode::TooManyLost, "{text}");
    let process = cluster.processes[NODES].as_ref().expect("it is up");
    assert!(process.node.shown().is_empty(), "nobody has any of it");
}

/// It was to stay beside the newer one: that there is one is no reason for what is lost of it.
#[test]
fn a_pinned_step_that_is_lost_is_a_lost_one_though_a_newer_one_was_protected() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    let reader = cluster.connect(0, Role::Reader);
    let pin = Request::Keep {
        run: None,
        step: Step::new(1),
        keep: Keep::Pin,
    };
    let pinned = cluster.ask(0, reader, pin);
    assert!(matches!(pinned, Reply::Removed { .. }), "{pinned:?}");
    cluster.save_and_wait(DurableWish::Never);
    cluster.assert_all_hold([1, 2]);
    let plan = planned(&mut cluster, 0, reader, Some(Step::new(1)));
    emptied(&mut cluster, 3..NODES);
    let (code, text) = not_opened(&mut cluster, 0, reader, &plan, 3);
    assert_eq!(code, RefusalCode::TooManyLost, "{text}");
}

#[test]
fn a_node_that_knows_nothing_and_hears_too_few_does_not_say_what_is_newest() {
    let mut cluster = two_steps();
    (0..NODES).for_each(|node| cluster.kill(node));
    cluster.start_after(5_000, 0);
    cluster.start_after(5_000, 1);
    cluster.run_for(6_000);
    let id = plan(&mut cluster, 0, 10_000, Older::Refused);
    let (refused, took) = answer(&mut cluster, id);
    let (code, text) = refused.unwrap_err();
    assert_eq!(code, RefusalCode::NewerUnreachable, "{text}");
    assert!(text.contains("majority of the 6 nodes"), "{text}");
    assert!(took <= 10_100, "{took}");
    (2..NODES).for_each(|node| cluster.start_after(0, node));
    let id = plan(&mut cluster, 0, 10_000, Older::Refused);
    let (offered, took) = answer(&mut cluster, id);
    assert_eq!(
        (offered, took < 100),
        (Ok(1), true),
        "all have answered: {took}"
    );
}

#[test]
fn what_is_really_lost_is_passed_over_once_all_have_answered() {
    let mut cluster = two_steps();
    (3..NODES).for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    (3..NODES).for_each(|node| cluster.start_after(0, node));
    cluster.run_for(100);
    let id = plan(&mut cluster, 0, 60_000, Older::Refused);
    let (offered, took) = answer(&mut cluster, id);
    assert_eq!(offered, Ok(1));
    assert!(took < 1_000, "{took}");
    let Some(Reply::Plan(plan)) = cluster.answer(id) else {
        unreachable!("it was offered");
    };
    assert_eq!(plan.passed_over.len(), 1, "{plan:?}");
}

#[test]
fn with_one_node_down_a_plan_answers_at_once() {
    let mut cluster = two_steps();
    cluster.kill(5);
    cluster.run_for(5_000);
    let id = plan(&mut cluster, 0, 60_000, Older::Refused);
    let (offered, took) = answer(&mut cluster, id);
    assert_eq!((offered, took < 100), (Ok(2), true), "{took}");
}

#[test]
fn what_is_whole_in_ram_does_not_wait_for_the_durable_tier() {
    for listing in [
        Listing::Hangs,
        Listing::After(20_000),
        Listing::FailsAfter(3),
    ] {
        let mut cluster = two_steps();
        cluster.scene.tier.as_mut().unwrap().listing = listing;
        let id = plan(&mut cluster, 0, 60_000, Older::Refused);
        let (offered, took) = answer(&mut cluster, id);
        assert_eq!((offered, took < 100), (Ok(2), true), "{took}");
    }
}

#[test]
fn nothing_found_and_a_tier_that_cannot_be_read_is_not_nothing_saved() {
    for (listing, within) in [(Listing::FailsAfter(300), 1_000), (Listing::Hangs, 5_000)] {
        let mut cluster = two_steps();
        (0..NODES).for_each(|node| cluster.kill(node));
        (0..NODES).for_each(|node| cluster.start_after(1_000, node));
        cluster.scene.tier.as_mut().unwrap().listing = listing;
        cluster.run_for(2_000);
        let id = plan(&mut cluster, 0, 5_000, Older::Refused);
        let (refused, took) = answer(&mut cluster, id);
        let (code, text) = refused.unwrap_err();
        assert_eq!(code, RefusalCode::DurableUnavailable, "{text}");
        assert!(took <= within, "{took}");
    }
}

#[test]
fn the_first_start_of_a_job_with_a_node_down_is_told_at_once_that_there_is_nothing() {
    let mut cluster = Cluster::start_with_tier(4, 2, 10);
    cluster.kill(5);
    cluster.run_for(5_000);
    let id = plan(&mut cluster, 0, 60_000, Older::Refused);
    let (refused, took) = answer(&mut cluster, id);
    let (code, text) = refused.unwrap_err();
    assert_eq!(code, RefusalCode::NoCheckpoint, "{text}");
    assert!(took < 100, "{took}");

    cluster.ask_of("another");
    let id = plan(&mut cluster, 0, 60_000, Older::Refused);
    let (code, text) = answer(&mut cluster, id).0.unwrap_err();
    assert_eq!(code, RefusalCode::UnknownNamespace, "{text}");
    assert!(text.contains("not answered: n5"), "{text}");
}

/// The listing of one step names no other: the namespace is known all the same, by the runs that the tier has of it.
#[test]
fn a_step_that_is_not_there_is_no_unknown_namespace_after_a_restart_of_all() {
    let mut cluster = two_steps();
    (0..NODES).for_each(|node| cluster.kill(node));
    (0..NODES).for_each(|node| cluster.start_after(1_000, node));
    cluster.run_for(2_000);
    let reader = cluster.connect(0, Role::Reader);
    let asked = Request::Plan {
        step: Some(Step::new(9)),
        timeout_ms: 5_000,
        allow_older: false,
    };
    let id = cluster.send(0, reader, asked);
    let (code, text) = answer(&mut cluster, id).0.unwrap_err();
    assert_eq!(code, RefusalCode::NoCheckpoint, "{text}");
    assert!(text.contains("checkpoint of step 9"), "{text}");
}

#[test]
fn what_may_be_older_is_opened_from_the_durable_tier_though_most_nodes_are_silent() {
    let mut cluster = two_steps();
    let reader = cluster.connect(0, Role::Reader);
    (2..NODES).for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    let id = ask_again(&mut cluster, 0, reader, 5_000, Older::Allowed);
    assert_eq!(answer(&mut cluster, id).0, Ok(1), "what was allowed");
    let Some(Reply::Plan(plan)) = cluster.answer(id) else {
        unreachable!("it was offered");
    };
    let open = open_shard(plan.manifest, plan.shards[0].rank, 30_000);
    let id = cluster.send(0, reader, open);
    let took = cluster.run_until(60_000, "an answer", |cluster| cluster.answer(id).is_some());
    let Some(Reply::Refused(refusal)) = cluster.answer(id) else {
        panic!("the tier of this cluster gives no shard back");
    };
    assert!(refusal.message.contains("503 slow down"), "{refusal:?}");
    assert!(took < 10_000, "{took}");
}

/// Reading a checkpoint takes longer here than anybody waits.
#[test]
fn a_verification_that_takes_too_long_ends_at_the_callers_limit_and_says_what_was_not_read() {
    let mut cluster = two_steps();
    let reader = cluster.connect(0, Role::Reader);
    let (began, timeout_ms) = (cluster.now, 5_000);
    let step = None;
    let reply = cluster.ask(0, reader, Request::Verify { step, timeout_ms });
    let Reply::Verified(report) = reply else {
        panic!("{reply:?}");
    };
    let took = cluster.now - began;
    assert!((5_000..5_100).contains(&took), "{took} ms");
    let unread = |part: &&VerifiedPart| {
        let fault = part.fault.as_deref().unwrap_or_default();
        fault.starts_with("not read within the time given")
    };
    assert_eq!(
        report.parts.iter().filter(unread).count(),
        NODES,
        "{report:?}"
    );
    assert_eq!(report.parts.len(), NODES, "{report:?}");
}

/// Going back far: the step asked for by its number is in the durable tier alone, and not among its newest. What was planned on
/// one node is described and opened on all, whose ranks know only the manifest's digest.
#[test]
fn a_durable_step_that_is_not_among_the_newest_is_opened_on_every_node() {
    let mut cluster = Cluster::start_with_tier(4, 2, 10);
    for saved in 1..=6 {
        cluster.save_as(DurableWish::Required);
        let is_there = |cluster: &Cluster| cluster.tier.published.len() == saved;
        cluster.run_until(60_000, "a durable step", is_there);
        cluster.run_for(2_000);
    }
    let planner = cluster.connect(0, Role::Reader);
    let asked = Request::Plan {
        step: Some(Step::new(1)),
        timeout_ms: 5_000,
        allow_older: false,
    };
    let Reply::Plan(plan) = cluster.ask(0, planner, asked) else {
        panic!("expected a plan");
    };
    assert_eq!(plan.step, Step::new(1));
    for node in 0..NODES {
        let reader = cluster.connect(node, Role::Reader);
        let manifest = plan.manifest;
        let described = cluster.ask(node, reader, Request::GetManifest { manifest });
        assert!(
            matches!(described, Reply::Manifest { .. }),
            "n{node}: {described:?}"
        );
        let open = open_shard(manifest, Rank::new(1), 5_000);
        // This tier gives no bytes; that it was asked for them is what matters.
        let Reply::Refused(refusal) = cluster.ask(node, reader, open) else {
            panic!("n{node}: expected the tier's refusal");
        };
        assert_eq!(
            refusal.code,
            RefusalCode::DurableUnavailable,
            "n{node}: {refusal}"
        );
    }
}

/// The coding nodes are away, so step 2 goes to the tier unprotected. The node that makes it durable is lost with its RAM before
/// anybody hears of that, and another machine is in its place.
fn durable_and_nobody_heard() -> Cluster {
    let mut cluster = Cluster::start_with_tier(4, 2, 10);
    cluster.save_on_all(NODES, DurableWish::Never);
    for coding in [4, 5] {
        cluster.pause(coding, 15_000);
    }
    cluster.run_for(3_000);
    cluster.save_as(DurableWish::Required);
    cluster.run_until(10_000, "a durable step", |cluster| {
        !cluster.tier.published.is_empty()
    });
    cluster.scene.unheard = (0..NODES).collect();
    let durable = |cluster: &Cluster| (0..NODES).find(|node| cluster.is_durable(*node));
    cluster.run_until(1_000, "its word", |cluster| durable(cluster).is_some());
    let publisher = durable(&cluster).expect("it was published");
    cluster.kill(publisher);
    cluster.scene.unheard.clear();
    cluster.start_after(1_000, publisher);
    cluster.run_for(2_000);
    cluster
}

#[test]
fn a_step_that_may_be_durable_is_looked_for_in_the_tier() {
    let mut cluster = durable_and_nobody_heard();
    // While it is known as committed, and when it was given up: its shard was lost with that node.
    for later_ms in [0, 30_000] {
        cluster.run_for(later_ms);
        for node in 0..4 {
            let id = plan(&mut cluster, node, 10_000, Older::Refused);
            let (answer, _) = answer(&mut cluster, id);
            assert_eq!(answer, Ok(2), "n{node} is asked at {} ms", cluster.now);
        }
    }
}
