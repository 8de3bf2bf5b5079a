//! What a launcher is told of a restart, by what was lost: each verdict, what speaks against it, and what waiting would gain.

use crate::cluster::{self, Cluster, Listing};
use crate::testkit::{name, open_shard, plan_newest, verdict_on};
use storaged_wire::local::{DurableWish, Reply, Role};
use storaged_wire::plan::{PassedOverCause, Source};
use storaged_wire::verdict::{
    HeldBasis, RateSource, ReasonCode, RestartVerdict, Returning, Stretch, Verdict, WaitingGain,
};
use storaged_wire::{NodeName, Rank, RefusalCode};

/// Four data nodes and two coding nodes.
const NODES: usize = 6;

/// Without a durable tier: one step, protected.
fn one_step() -> Cluster {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_on_all(NODES, DurableWish::Never);
    cluster
}

fn kill(cluster: &mut Cluster, nodes: &[usize]) {
    nodes.iter().for_each(|node| cluster.kill(*node));
    cluster.run_for(5_000);
}

/// What a node says, with five seconds to find out.
fn verdict(cluster: &mut Cluster, node: usize) -> RestartVerdict {
    let launcher = cluster.connect(node, Role::Reader);
    let id = cluster.send(node, launcher, verdict_on(5_000));
    cluster.run_until(100_000, "an answer", |cluster| cluster.answer(id).is_some());
    match cluster.answer(id) {
        Some(Reply::Verdict(verdict)) => verdict.clone(),
        other => panic!("{other:?}"),
    }
}

fn step(verdict: &RestartVerdict) -> Option<u64> {
    verdict.plan.as_ref().map(|plan| plan.step.get())
}

fn codes(verdict: &RestartVerdict) -> Vec<ReasonCode> {
    verdict.reasons.iter().map(|reason| reason.code).collect()
}

fn names(nodes: &[usize]) -> Vec<NodeName> {
    nodes.iter().map(|node| name(*node)).collect()
}

/// Steps, verdicts and conditions of what waiting would gain.
fn gains(verdict: &RestartVerdict) -> Vec<(u64, Verdict, Vec<Returning>)> {
    let gain = |gain: &WaitingGain| (gain.at.step.get(), gain.verdict, gain.returning.clone());
    verdict.waiting.iter().map(gain).collect()
}

fn some_of(any: u32, of: &[usize], basis: HeldBasis) -> Vec<Returning> {
    vec![Returning {
        any,
        of: names(of),
        basis,
    }]
}

#[test]
fn a_job_of_which_only_processes_died_recovers_in_place() {
    let mut cluster = one_step();
    cluster.end_job();
    let verdict = verdict(&mut cluster, 3);
    assert_eq!(verdict.verdict, Verdict::RecoverInPlace, "{verdict:?}");
    assert_eq!(codes(&verdict), [ReasonCode::AllInPlace]);
    assert_eq!((step(&verdict), gains(&verdict)), (Some(1), vec![]));
    let plan = verdict.plan.expect("a step");
    for shard in &plan.shards {
        assert_eq!(shard.source, Source::Ram(name(shard.rank.get() as usize)));
        assert_eq!(shard.length, 10 * cluster::CHUNK);
    }
}

#[test]
fn a_lost_coding_node_leaves_every_shard_in_place() {
    let mut cluster = one_step();
    kill(&mut cluster, &[5]);
    let verdict = verdict(&mut cluster, 0);
    assert_eq!(verdict.verdict, Verdict::RecoverInPlace, "{verdict:?}");
    let expected = [ReasonCode::AllInPlace, ReasonCode::NodesSilent];
    assert_eq!(codes(&verdict), expected);
    assert_eq!(gains(&verdict), [], "nothing is better");
}

#[test]
fn lost_nodes_are_decoded_and_waiting_for_them_would_save_the_decoding() {
    let mut cluster = Cluster::with_two_steps();
    kill(&mut cluster, &[1, 2]);
    let verdict = verdict(&mut cluster, 0);
    assert_eq!(verdict.verdict, Verdict::Recover, "{verdict:?}");
    let expected = [ReasonCode::ShardsDecoded, ReasonCode::NodesSilent];
    assert_eq!(
        (step(&verdict), codes(&verdict)),
        (Some(2), expected.into())
    );
    let both = some_of(2, &[1, 2], HeldBasis::Sealed);
    assert_eq!(gains(&verdict), [(2, Verdict::RecoverInPlace, both)]);
    let parts: Vec<Stretch> = verdict.expected.iter().map(|part| part.stretch).collect();
    assert_eq!(parts, [Stretch::Ram, Stretch::Network]);
    let plan = verdict.plan.expect("a step");
    let all: u64 = verdict.expected.iter().map(|part| part.ms).sum();
    assert_eq!(plan.expected_ms, all);
}

#[test]
fn with_more_than_m_lost_the_durable_step_is_had_and_any_of_them_would_bring_the_newer_one() {
    let mut cluster = Cluster::with_two_steps();
    kill(&mut cluster, &[1, 2, 5]);
    let verdict = verdict(&mut cluster, 0);
    assert_eq!(verdict.verdict, Verdict::RestartFromDurable, "{verdict:?}");
    assert_eq!(step(&verdict), Some(1));
    let expected = [
        ReasonCode::ShardsDurable,
        ReasonCode::GoesBack,
        ReasonCode::NodesSilent,
    ];
    assert_eq!(codes(&verdict), expected);
    let newest = verdict.newest_seen.expect("it was protected");
    assert_eq!(newest.step.get(), 2);
    let [passed_over] = verdict.passed_over.as_slice() else {
        panic!("{verdict:?}");
    };
    assert_eq!(passed_over.cause, Some(PassedOverCause::ShardsLost));
    let any = some_of(1, &[1, 2, 5], HeldBasis::Coded);
    let all = some_of(2, &[1, 2], HeldBasis::Sealed);
    let expected = [
        (2, Verdict::Recover, any),
        (2, Verdict::RecoverInPlace, all),
    ];
    assert_eq!(gains(&verdict)[..2], expected);
    let durable = verdict.expected.last().expect("parts");
    let guessed = (Stretch::Durable, RateSource::FirstGuess);
    assert_eq!((durable.stretch, durable.rate), guessed);
}

/// What is said of a node that is only stopped comes true when it goes on, and it is true of every one that was named.
#[test]
fn a_step_is_restorable_once_one_of_the_nodes_returns_that_were_named() {
    for returns in [1, 2, 5] {
        let mut cluster = Cluster::with_two_steps();
        for node in [1, 2, 5] {
            let far = if node == returns { 20_000 } else { 900_000 };
            cluster.pause(node, far);
        }
        cluster.run_for(5_000);
        let before = verdict(&mut cluster, 0);
        assert_eq!(before.verdict, Verdict::RestartFromDurable, "{before:?}");
        let named = gains(&before)
            .into_iter()
            .find(|gain| gain.1 == Verdict::Recover);
        let (promised, _, returning) = named.expect("a gain");
        assert_eq!((promised, returning[0].any), (2, 1));
        assert!(returning[0].of.contains(&name(returns)));
        cluster.run_for(15_000);
        let after = verdict(&mut cluster, 0);
        assert_eq!((after.verdict, step(&after)), (Verdict::Recover, Some(2)));
    }
}

#[test]
fn two_beyond_m_means_that_two_must_return() {
    let mut cluster = Cluster::with_two_steps();
    kill(&mut cluster, &[1, 2, 4, 5]);
    let verdict = verdict(&mut cluster, 0);
    assert_eq!(verdict.verdict, Verdict::RestartFromDurable, "{verdict:?}");
    assert!(verdict.has_reason(ReasonCode::GoesBack), "{verdict:?}");
    let two = some_of(2, &[1, 2, 4, 5], HeldBasis::Coded);
    assert_eq!(gains(&verdict)[0], (2, Verdict::Recover, two));
}

#[test]
fn a_node_that_was_restarted_without_its_ram_gains_nothing() {
    let mut cluster = Cluster::with_two_steps();
    kill(&mut cluster, &[1, 2, 5]);
    cluster.start_after(0, 5);
    cluster.run_for(1_000);
    let one_back = verdict(&mut cluster, 0);
    assert_eq!(one_back.verdict, Verdict::RestartFromDurable);
    let others = some_of(1, &[1, 2], HeldBasis::Sealed);
    assert_eq!(gains(&one_back)[0], (2, Verdict::Recover, others));
    [1, 2]
        .into_iter()
        .for_each(|node| cluster.start_after(0, node));
    cluster.run_for(1_000);
    let all_back = verdict(&mut cluster, 0);
    assert_eq!(all_back.verdict, Verdict::RestartFromDurable);
    assert_eq!(gains(&all_back), [], "nobody is waited for");
    let expected = [ReasonCode::ShardsDurable];
    assert_eq!(codes(&all_back), expected, "what is lost is lost");
}

#[test]
fn without_a_durable_tier_nothing_is_left_and_waiting_is_all_there_is() {
    let mut cluster = one_step();
    kill(&mut cluster, &[1, 2, 5]);
    let verdict = verdict(&mut cluster, 0);
    assert_eq!(verdict.verdict, Verdict::Impossible, "{verdict:?}");
    assert_eq!((step(&verdict), verdict.plan.is_none()), (None, true));
    assert_eq!(codes(&verdict)[0], ReasonCode::NothingRestorable);
    let any = some_of(1, &[1, 2, 5], HeldBasis::Coded);
    assert_eq!(gains(&verdict)[0], (1, Verdict::Recover, any));
}

#[test]
fn a_first_start_is_told_from_a_loss() {
    let mut cluster = Cluster::start_with_tier(4, 2, 10);
    let first = verdict(&mut cluster, 0);
    assert_eq!(first.verdict, Verdict::Impossible);
    assert_eq!(codes(&first), [ReasonCode::NothingSaved], "{first:?}");
    cluster.scene.tier.as_mut().unwrap().listing = Listing::FailsAfter(10);
    let unread = verdict(&mut cluster, 0);
    assert_eq!(unread.verdict, Verdict::Impossible);
    let expected = [ReasonCode::NothingRestorable, ReasonCode::DurableUnreadable];
    assert_eq!(codes(&unread), expected, "{unread:?}");

    let mut cluster = one_step();
    kill(&mut cluster, &[1, 2, 5]);
    [1, 2, 5]
        .into_iter()
        .for_each(|node| cluster.start_after(0, node));
    cluster.run_for(1_000);
    let lost = verdict(&mut cluster, 0);
    assert_eq!(codes(&lost), [ReasonCode::NothingRestorable], "{lost:?}");
}

/// Where a majority is away nobody knows what is the newest: it is said, and what can be had is said all the same.
#[test]
fn too_few_that_answered_are_named() {
    let mut cluster = Cluster::with_two_steps();
    (0..NODES).for_each(|node| cluster.kill(node));
    [0, 1]
        .into_iter()
        .for_each(|node| cluster.start_after(5_000, node));
    cluster.run_for(6_000);
    let verdict = verdict(&mut cluster, 0);
    assert_eq!(verdict.verdict, Verdict::RestartFromDurable);
    assert!(
        verdict.has_reason(ReasonCode::TooFewAnswered),
        "{verdict:?}"
    );
    assert_eq!(
        gains(&verdict),
        [],
        "nobody has the manifest of a newer step"
    );
}

/// Where m losses leave no majority the step is whole, in place and in the durable tier, and a plan refuses it: what was protected after it, nobody
/// who answered would know.
#[test]
fn too_few_that_answered_in_place_are_named() {
    let mut cluster = Cluster::start_with_tier(1, 1, 10);
    cluster.save_on_all(2, DurableWish::Required);
    kill(&mut cluster, &[1]);
    let judged = verdict(&mut cluster, 0);
    assert_eq!(judged.verdict, Verdict::RecoverInPlace, "{judged:?}");
    assert!(judged.has_reason(ReasonCode::TooFewAnswered), "{judged:?}");
    let reader = cluster.connect(0, Role::Reader);
    let reply = cluster.ask(0, reader, plan_newest(5_000));
    let Reply::Refused(refusal) = reply else {
        panic!("{reply:?}");
    };
    assert_eq!(refusal.code, RefusalCode::NewerUnreachable);
    for part in ["a majority of the 2 nodes", "got 1", "allow_older"] {
        assert!(refusal.message.contains(part), "{}", refusal.message);
    }
}

/// A verdict where a plan says the same: what it offers is what a restart gets.
#[test]
fn a_plan_offers_what_the_verdict_says() {
    let mut cluster = Cluster::with_two_steps();
    kill(&mut cluster, &[1, 4]);
    let judged = verdict(&mut cluster, 0);
    let reader = cluster.connect(0, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(0, reader, plan_newest(5_000)) else {
        panic!("expected a plan");
    };
    assert_eq!(judged.plan, Some(plan.clone()));
    let shard = open_shard(plan.manifest, Rank::new(1), 60_000);
    let opened = cluster.ask(0, reader, shard);
    assert!(matches!(opened, Reply::ShardOpened { .. }), "{opened:?}");
    let again = verdict(&mut cluster, 0);
    assert_eq!((again.verdict, step(&again)), (Verdict::Recover, Some(2)));
}
