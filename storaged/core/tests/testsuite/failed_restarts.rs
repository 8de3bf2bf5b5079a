//! Restarts that fail from a step: it is passed over for a time that doubles, then for good, by every node and by the next daemon of
//! each; it is tried again earlier only where nothing else is left.

use crate::cluster::{Cluster, Conduct, Listing, Room};
use crate::testkit::{open_shard, plan_newest, verdict_on};
use storaged_wire::failed::{FailedRestart, FailureReport};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::plan::{PassedOverCause, RestorePlan};
use storaged_wire::verdict::{ReasonCode, RestartVerdict, VERDICT_MIN_MS, Verdict};
use storaged_wire::{Rank, Refusal, RefusalCode, Step};

const NODES: usize = 6;
const MINUTE_MS: u64 = 60_000;

fn asked(cluster: &mut Cluster, node: usize, request: Request) -> Reply {
    let launcher = cluster.connect(node, Role::Reader);
    cluster.ask(node, launcher, request)
}

fn said_failed(cluster: &mut Cluster, node: usize, step: u64) -> FailedRestart {
    let request = Request::RestartFailed(FailureReport {
        run: None,
        step: Step::new(step),
        timeout_ms: 5_000,
    });
    match asked(cluster, node, request) {
        Reply::RestartsFailed(all) => all[0],
        other => panic!("{other:?}"),
    }
}

fn planned(cluster: &mut Cluster, node: usize) -> Result<RestorePlan, Refusal> {
    match asked(cluster, node, plan_newest(5_000)) {
        Reply::Plan(plan) => Ok(plan),
        Reply::Refused(refusal) => Err(refusal),
        other => panic!("{other:?}"),
    }
}

fn step_planned(cluster: &mut Cluster, node: usize) -> u64 {
    let plan = planned(cluster, node);
    plan.expect("a plan").step.get()
}

fn verdict(cluster: &mut Cluster, node: usize) -> RestartVerdict {
    match asked(cluster, node, verdict_on(5_000)) {
        Reply::Verdict(verdict) => verdict,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_step_that_failed_is_passed_over_everywhere_and_still_there_for_who_asks_by_its_number() {
    let mut cluster = Cluster::with_two_steps();
    let said = said_failed(&mut cluster, 3, 2);
    assert_eq!((said.times, said.wait_ms), (1, Some(10 * MINUTE_MS)));
    cluster.run_for(10);
    for node in 0..NODES {
        let plan = planned(&mut cluster, node).expect("a plan");
        assert_eq!(plan.step.get(), 1, "n{node}");
        let [passed_over] = plan.passed_over.as_slice() else {
            panic!("{plan:?}");
        };
        assert_eq!(passed_over.cause, Some(PassedOverCause::Quarantined));
        assert_eq!(passed_over.step.get(), 2);
    }
    let judged = verdict(&mut cluster, 0);
    assert_eq!(judged.verdict, Verdict::RestartFromDurable);
    assert!(!judged.has_reason(ReasonCode::GoesBack), "{judged:?}");
    assert_eq!(judged.newest_seen.map(|at| at.step.get()), Some(2));
    let by_number = Request::Plan {
        step: Some(Step::new(2)),
        timeout_ms: 5_000,
        allow_older: false,
    };
    let reply = asked(&mut cluster, 5, by_number);
    let Reply::Plan(plan) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(plan.step.get(), 2);
}

/// Every node of a job may have a launcher that says so.
#[test]
fn one_restart_is_counted_once_whoever_says_so() {
    let mut cluster = Cluster::with_two_steps();
    for node in 0..NODES {
        assert_eq!(said_failed(&mut cluster, node, 2).times, 1, "n{node}");
        cluster.run_for(1_000);
    }
    cluster.run_for(30_000);
    assert_eq!(said_failed(&mut cluster, 0, 2).times, 2, "another restart");
}

#[test]
fn the_back_off_doubles_and_after_three_times_it_takes_an_operator() {
    let mut cluster = Cluster::with_two_steps();
    for (times, minutes) in [(1, 10), (2, 20)] {
        let said = said_failed(&mut cluster, 1, 2);
        let wait_ms = Some(minutes * MINUTE_MS);
        assert_eq!((said.times, said.wait_ms), (times, wait_ms));
        cluster.run_for(minutes * MINUTE_MS - 5_000);
        assert_eq!(step_planned(&mut cluster, 2), 1, "{minutes} minutes");
        cluster.run_for(6_000);
        assert_eq!(step_planned(&mut cluster, 2), 2, "its turn again");
    }
    let said = said_failed(&mut cluster, 1, 2);
    assert_eq!((said.times, said.wait_ms), (3, None));
    cluster.run_for(600 * MINUTE_MS);
    assert_eq!(step_planned(&mut cluster, 2), 1, "not by waiting");
    assert_eq!(said_failed(&mut cluster, 1, 2).times, 3);
    let step = Step::new(2);
    let reply = asked(&mut cluster, 4, Request::LiftQuarantine { step });
    assert!(matches!(reply, Reply::RestartsFailed(_)), "{reply:?}");
    cluster.run_for(10);
    for node in 0..NODES {
        assert_eq!(step_planned(&mut cluster, node), 2, "n{node}");
    }
    let again = asked(&mut cluster, 4, Request::LiftQuarantine { step });
    let Reply::Refused(refusal) = again else {
        panic!("{again:?}");
    };
    assert_eq!(refusal.code, RefusalCode::NoCheckpoint, "{refusal}");
}

#[test]
fn where_nothing_else_is_left_a_step_is_tried_again_but_not_for_ever() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_on_all(NODES, DurableWish::Never);
    for times in 1..=2 {
        assert_eq!(said_failed(&mut cluster, 0, 1).times, times);
        cluster.run_for(31_000);
        assert_eq!(step_planned(&mut cluster, 0), 1, "{times}");
        let judged = verdict(&mut cluster, 5);
        assert_eq!(judged.verdict, Verdict::RecoverInPlace);
        assert!(judged.has_reason(ReasonCode::LastResort), "{judged:?}");
    }
    assert_eq!(said_failed(&mut cluster, 0, 1).times, 3);
    cluster.run_for(10);
    let judged = verdict(&mut cluster, 5);
    assert_eq!(judged.verdict, Verdict::Impossible, "{judged:?}");
    assert!(!judged.has_reason(ReasonCode::NothingSaved), "{judged:?}");
    let causes: Vec<_> = judged.passed_over.iter().map(|one| one.cause).collect();
    assert_eq!(causes, [Some(PassedOverCause::Quarantined)]);
    let refusal = planned(&mut cluster, 5).expect_err("nothing is left");
    // As a load takes `NoCheckpoint` for a first start, it must not be that.
    assert_eq!(refusal.code, RefusalCode::TooManyLost, "{refusal}");
    assert!(refusal.message.contains("quarantined"), "{refusal}");
}

/// The tier may have a good step: launchers wait for it, if they hear of that.
#[test]
fn a_last_resort_says_that_the_tier_has_not_been_heard() {
    for listing in [Listing::Hangs, Listing::FailsAfter(50)] {
        let mut cluster = Cluster::start_with_tier(4, 2, 10);
        cluster.save_on_all(NODES, DurableWish::Never);
        said_failed(&mut cluster, 0, 1);
        cluster.run_for(10);
        cluster.scene.tier.as_mut().unwrap().listing = listing;
        let judged = verdict(&mut cluster, 5);
        for reason in [ReasonCode::LastResort, ReasonCode::DurableUnreadable] {
            assert!(judged.has_reason(reason), "{reason:?}: {judged:?}");
        }
    }
}

/// Step 3 has failed, and step 2 may be whole on the nodes that do not answer: step 1, which the tier has, is below both.
#[test]
fn a_step_that_failed_does_not_let_the_job_go_back_below_the_one_before() {
    let room = Room {
        keep_steps: 2,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 1, 10, Some(Conduct::default()), room);
    cluster.save_on_all(5, DurableWish::Required);
    (0..2).for_each(|_| cluster.save_on_all(5, DurableWish::Never));
    said_failed(&mut cluster, 4, 3);
    cluster.run_for(10);
    assert_eq!(step_planned(&mut cluster, 4), 2);
    cluster.kill(0);
    cluster.kill(1);
    cluster.run_for(5_000);
    let refusal = planned(&mut cluster, 4).expect_err("step 2 may be there");
    assert_eq!(refusal.code, RefusalCode::NewerUnreachable, "{refusal}");
    assert!(refusal.message.contains("step 2 "), "{refusal}");
    let judged = verdict(&mut cluster, 4);
    assert_eq!(judged.verdict, Verdict::RestartFromDurable);
    assert!(judged.has_reason(ReasonCode::GoesBack), "{judged:?}");
}

/// A reader has kept its shard of step 2, which everybody else let go for step 3. That is no step to wait for: nobody can make it whole.
#[test]
fn what_a_reader_has_kept_of_a_step_is_not_waited_for() {
    let mut cluster = Cluster::start_with(4, 1, 10, Some(Conduct::default()), Room::default());
    cluster.save_on_all(5, DurableWish::Required);
    cluster.save_on_all(5, DurableWish::Never);
    let reader = cluster.connect(0, Role::Reader);
    let plan = planned(&mut cluster, 0).expect("a plan");
    assert_eq!(plan.step.get(), 2);
    let opened = cluster.ask(0, reader, open_shard(plan.manifest, Rank::new(0), 60_000));
    assert!(matches!(opened, Reply::ShardOpened { .. }), "{opened:?}");
    cluster.save_on_all(5, DurableWish::Never);
    said_failed(&mut cluster, 1, 3);
    cluster.run_for(10);
    cluster.kill(4);
    cluster.run_for(5_000);
    assert_eq!(step_planned(&mut cluster, 1), 1);
}

/// The next checkpoint of the job, in a newer run, is above all that.
#[test]
fn what_is_saved_after_that_is_offered() {
    let mut cluster = Cluster::with_two_steps();
    said_failed(&mut cluster, 0, 2);
    cluster.begin_again();
    cluster.save_on_all(NODES, DurableWish::Never);
    assert_eq!(step_planned(&mut cluster, 3), 3);
}

#[test]
fn a_node_that_was_away_when_it_was_said_hears_of_it_when_it_is_back() {
    let mut cluster = Cluster::with_two_steps();
    cluster.kill(5);
    cluster.run_for(5_000);
    said_failed(&mut cluster, 0, 2);
    cluster.start_after(0, 5);
    cluster.run_for(500);
    assert_eq!(step_planned(&mut cluster, 5), 1);
}

/// All at once: nobody else could tell them.
#[test]
fn what_was_said_outlives_daemons_whose_memory_does() {
    let mut cluster = Cluster::with_two_steps();
    said_failed(&mut cluster, 0, 2);
    cluster.run_for(1_000);
    (0..NODES).for_each(|node| cluster.end_daemon(node));
    cluster.run_for(500);
    (0..NODES).for_each(|node| cluster.start_after(0, node));
    cluster.run_for(10_000);
    for node in 0..NODES {
        assert_eq!(step_planned(&mut cluster, node), 1, "n{node}");
    }
    cluster.run_for(11 * MINUTE_MS);
    assert_eq!(step_planned(&mut cluster, 0), 2, "and so does its end");
}

#[test]
fn a_step_that_nobody_has_is_not_counted() {
    let mut cluster = Cluster::with_two_steps();
    let request = Request::RestartFailed(FailureReport {
        run: None,
        step: Step::new(7),
        timeout_ms: 2_000,
    });
    let reply = asked(&mut cluster, 0, request);
    let Reply::Refused(refusal) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(refusal.code, RefusalCode::NoCheckpoint, "{refusal}");
    assert_eq!(step_planned(&mut cluster, 0), 2);
}

/// A launcher that gives it no time hears all the same what is restorable: that nobody was heard is not that nothing is there.
#[test]
fn a_verdict_without_time_is_given_once_those_who_can_answer_have() {
    let mut cluster = Cluster::with_two_steps();
    said_failed(&mut cluster, 3, 2);
    cluster.run_for(10);
    for node in 0..NODES {
        let judged = asked(&mut cluster, node, verdict_on(0));
        let Reply::Verdict(judged) = judged else {
            panic!("{judged:?}");
        };
        assert_eq!(judged.verdict, Verdict::RestartFromDurable, "n{node}");
        assert_eq!(judged.plan.map(|plan| plan.step.get()), Some(1));
    }
    // Who does not answer is not waited for any longer than a peer may take.
    cluster.kill(1);
    cluster.kill(2);
    cluster.kill(5);
    cluster.run_for(5_000);
    cluster.scene.tier.as_mut().unwrap().listing = Listing::Hangs;
    let before = cluster.now;
    let judged = asked(&mut cluster, 0, verdict_on(0));
    let took = cluster.now - before;
    assert!(took <= u64::from(VERDICT_MIN_MS) + 100, "{took} ms");
    let Reply::Verdict(judged) = judged else {
        panic!("{judged:?}");
    };
    assert!(judged.has_reason(ReasonCode::DurableUnreadable));
}
