//! Opening runs: numbers are unique, two incarnations are never mixed, and an attempt that fails fences nobody. Any two
//! nodes at any distance in time, links that are slow or cut, and a durable tier that is fast, slow, hanging or broken.

mod registry;
mod strangers;
mod world;

use storaged_core::{DurableFault, RunsWithoutTier};
use storaged_wire::local::Reply;
use storaged_wire::peer::{Fence, PeerMessage};
use storaged_wire::{Owner, RefusalCode, RunId};
use world::{Mood, World, name};

const TRIES: u64 = 400;
/// Higher numbers are given to no run.
const LAST_RUN: u64 = storaged_core::limits::RUN_NUMBER_MAX;

fn opened(reply: Option<&Reply>) -> RunId {
    match reply {
        Some(Reply::RunOpened { run }) => *run,
        other => panic!("expected a run, got {other:?}"),
    }
}

fn code(reply: Option<&Reply>) -> RefusalCode {
    match reply {
        Some(Reply::Refused(refusal)) => refusal.code,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

/// Two clients ask for a run at (almost) the same time, at any two of the nodes.
fn two_at_once(seed: u64, tier: Mood) {
    let mut world = World::new(3 + (seed % 4) as usize, tier, seed);
    let nodes = world.nodes() as u64;
    let (first, second) = (world.random(nodes) as usize, world.random(nodes) as usize);
    let apart = world.random(4) * world.random(8);
    let a = world.open_run(first, 60_000);
    world.run_for(apart);
    let b = world.open_run(second, 60_000);
    world.run_until_answered(&[a, b]);
    let (run_a, run_b) = (opened(world.answer(a)), opened(world.answer(b)));
    assert_ne!(
        run_a.number(),
        run_b.number(),
        "seed {seed}: nodes {first} and {second}, {apart} ms apart: {run_a} and {run_b}"
    );
    assert!(world.now < 50_000, "seed {seed}: {} ms", world.now);
    world.run_for(2_000);
    let newest = run_a.max(run_b);
    for node in 0..world.nodes() {
        assert_eq!(world.fence(node), newest, "seed {seed}: node {node}");
    }
}

#[test]
fn two_at_once_get_different_numbers_without_a_tier() {
    (0..TRIES).for_each(|seed| two_at_once(seed, Mood::Absent));
}

#[test]
fn two_at_once_get_different_numbers_with_any_tier() {
    for latency in [1, 20, 500, 2_900, 3_100, 20_000] {
        (0..TRIES / 4).for_each(|seed| two_at_once(seed, Mood::Answers(latency)));
    }
}

#[test]
fn four_at_once_all_end_and_differ() {
    for seed in 0..TRIES / 4 {
        let mut world = World::new(5, Mood::Absent, seed);
        let asked: Vec<_> = (0..4).map(|node| world.open_run(node, 60_000)).collect();
        world.run_until_answered(&asked);
        let mut numbers: Vec<u64> = asked
            .iter()
            .map(|id| opened(world.answer(*id)).number())
            .collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 4, "seed {seed}");
    }
}

#[test]
fn an_attempt_without_a_majority_ends_no_job() {
    let mut world = World::new(5, Mood::Absent, 1);
    let run = world.opened(0);
    let trainer = world.hello(3, run, 0).expect("a trainer of that run");
    world.cut(&[3, 4], &[0, 1, 2]);
    world.run_for(5_000);
    let stray = world.open_run(4, 5_000);
    world.run_until_answered(&[stray]);
    assert_eq!(code(world.answer(stray)), RefusalCode::TimedOut);
    world.run_for(5_000);
    assert_eq!(world.fence(3), run, "nothing was fenced off");
    assert!(world.may_save(3, trainer), "the job goes on");
    world.mend();
    world.run_for(5_000);
    assert!((0..5).all(|node| world.fence(node) == run));
    assert!(world.opened(1) > run);
}

/// One proposer is cut off while another gets its number from a majority; then it is heard. Of a job that it knows it has promised itself a run
/// by then, and says so; of another it asks first.
fn one_cut_off(seed: u64) {
    let mut world = World::new(4 + (seed % 3) as usize, Mood::Absent, seed);
    if seed.is_multiple_of(2) {
        world.opened(1);
    }
    let others: Vec<usize> = (1..world.nodes()).collect();
    world.cut(&[0], &others);
    let early = world.open_run(0, 60_000);
    let apart = world.random(4_000);
    world.run_for(apart);
    let late = world.open_run(1, 60_000);
    world.run_until_answered(&[late]);
    world.mend();
    world.run_until_answered(&[early]);
    let (early, late) = (opened(world.answer(early)), opened(world.answer(late)));
    assert_ne!(
        early.number(),
        late.number(),
        "seed {seed}: {early}, {late}"
    );
}

#[test]
fn a_promise_that_a_peer_tells_of_is_nobodys_consent() {
    (0..TRIES / 4).for_each(one_cut_off);
}

#[test]
fn a_client_that_goes_away_fences_nobody() {
    let mut world = World::new(3, Mood::Answers(500), 1);
    let run = world.opened(0);
    let gone = world.open_run(1, 60_000);
    world.disconnect(1, gone.conn);
    world.run_for(10_000);
    assert!((0..3).all(|node| world.fence(node) == run));
}

#[test]
fn a_silent_node_does_not_hold_a_run_up_for_long() {
    let mut world = World::new(5, Mood::Absent, 3);
    world.silence(4);
    let began = world.now;
    world.opened(0);
    assert!(world.now - began <= 5_000, "{} ms", world.now - began);
}

#[test]
fn with_claims_a_run_is_opened_on_fewer_than_half_of_the_nodes() {
    let mut world = World::new(6, Mood::Answers(50), 4);
    let before = world.opened(0);
    (0..6).for_each(|node| world.kill(node));
    world.start(2);
    world.run_for(10_000);
    let after = world.opened(2);
    assert!(after.number() > before.number(), "{before} then {after}");
    world.hello(2, after, 0).expect("it can save");
}

#[test]
fn a_tier_that_hangs_or_fails_does_not_hold_up_a_job_that_nodes_remember() {
    for tier in [Mood::Hangs, Mood::Fails] {
        let mut world = World::new(3, Mood::Answers(50), 5);
        let before = world.opened(0);
        world.scene.tier = tier;
        let began = world.now;
        let after = world.opened(1);
        assert!(world.now - began <= 5_000, "{} ms", world.now - began);
        assert!(after.number() > before.number());
        let claim = |world: &World| world.tier.claim_of(&world::namespace(), after.number());
        assert_eq!(claim(&world), None);
        world.scene.tier = Mood::Answers(50);
        world.run_for(10_000);
        assert_eq!(claim(&world), Some(after), "the tier hears of it later");
        assert!(world.opened(2).number() > after.number());
    }
}

#[test]
fn where_nobody_remembers_and_the_tier_cannot_be_read_no_run_is_given() {
    let mut world = World::new(3, Mood::Fails, 6);
    let refused = world.open_run(0, 60_000);
    world.run_until_answered(&[refused]);
    let refusal = code(world.answer(refused));
    assert_eq!(refusal, RefusalCode::DurableUnavailable);

    world.scene.tier = Mood::Hangs;
    let late = world.open_run(0, 8_000);
    world.run_until_answered(&[late]);
    assert_eq!(code(world.answer(late)), RefusalCode::DurableUnavailable);

    // A new job waits for a tier that is only slow.
    world.scene.tier = Mood::Answers(9_000);
    world.opened(1);

    let mut allowed = World::with(3, Mood::Fails, 7, RunsWithoutTier::Allowed);
    allowed.opened(0);
}

#[test]
fn a_namespace_of_another_owner_is_refused_by_the_tier() {
    let mut world = World::new(1, Mood::Answers(10), 8);
    let other = Owner::of_token(b"somebody else");
    world.tier.record(world::namespace(), other, RunId::new(1));
    let refused = world.open_run(0, 60_000);
    world.run_until_answered(&[refused]);
    assert_eq!(code(world.answer(refused)), RefusalCode::WrongToken);
}

#[test]
fn a_run_that_nobody_opened_counts_for_nothing() {
    for tier in [Mood::Absent, Mood::Answers(10), Mood::Hangs] {
        let mut world = World::new(3, Mood::Absent, 9);
        let run = world.opened(0);
        world.scene.tier = tier;
        for made_up in [
            RunId::with_identity(run.number(), run.identity().wrapping_add(1)),
            RunId::new(run.number() + 1),
            RunId::new(u64::MAX),
            RunId::with_identity(u64::MAX, u64::MAX),
        ] {
            let refusal = world.hello(1, made_up, 0).unwrap_err();
            let fits = [RefusalCode::UnknownRun, RefusalCode::OlderRun].contains(&refusal.code);
            assert!(fits, "{refusal:?}");
        }
        assert!((0..3).all(|node| world.fence(node) == run));
        let numbers: Vec<u64> = (0..10).map(|at| world.opened(at % 3).number()).collect();
        assert!(numbers.windows(2).all(|two| two[0] < two[1]), "{numbers:?}");
    }
}

#[test]
fn a_node_that_was_away_learns_of_a_run_before_it_judges_a_trainer() {
    let mut world = World::new(3, Mood::Absent, 10);
    world.opened(0);
    world.kill(2);
    let newer = world.opened(0);
    world.start(2);
    // At once, before its links are up.
    world.hello(2, newer, 0).expect("a run that its peers know");
    assert_eq!(world.fence(2), newer);
}

#[test]
fn trainers_outlive_all_daemons_where_the_tier_has_their_run() {
    let mut world = World::new(1, Mood::Answers(10), 11);
    let run = world.opened(0);
    world.kill(0);
    world.start(0);
    world.hello(0, run, 0).expect("the run was claimed");

    let mut without = World::new(1, Mood::Absent, 12);
    let run = without.opened(0);
    without.kill(0);
    without.start(0);
    let refusal = without.hello(0, run, 0).unwrap_err();
    assert_eq!(refusal.code, RefusalCode::UnknownRun);
}

/// It is told to try again: a job whose run is called unknown opens another one.
#[test]
fn a_trainer_whose_run_the_tier_alone_may_know_hears_in_seconds_that_it_does_not_answer() {
    for tier in [Mood::Hangs, Mood::Fails] {
        let mut world = World::new(1, Mood::Answers(10), 11);
        let run = world.opened(0);
        world.kill(0);
        world.scene.tier = tier;
        world.start(0);
        let began = world.now;
        let refusal = world.hello(0, run, 0).unwrap_err();
        assert_eq!(refusal.code, RefusalCode::DurableUnavailable, "{refusal:?}");
        let took_ms = world.now - began;
        assert!(took_ms <= 5_100, "{tier:?}: {took_ms} ms");
        world.scene.tier = Mood::Answers(10);
        world.hello(0, run, 0).expect("the tier answers again");
    }
}

#[test]
fn who_comes_for_a_job_that_peers_know_waits_for_no_tier() {
    for seed in 0..TRIES / 8 {
        peers_know(seed);
    }
}

fn peers_know(seed: u64) {
    let mut world = World::new(3, Mood::Answers(10), seed);
    let run = world.opened(0);
    world.scene.tier = Mood::Hangs;
    world.kill(2);
    world.start(2);
    let began = world.now;
    world.hello(2, run, 0).expect("a run that its peers know");
    let took_ms = world.now - began;
    // A question that came before the link was up at its other end is asked again after a second.
    assert!(took_ms <= 1_200, "seed {seed}: {took_ms} ms");
}

/// A process of an older run that hung while its job was restarted, and while all who knew of the newer run have forgotten
/// it: because they were restarted, or because nobody had used the job for long.
#[test]
fn an_old_run_is_not_let_in_again_when_all_have_forgotten_the_newer_one() {
    let mut world = World::new(1, Mood::Answers(10), 11);
    let old = world.opened(0);
    let newer = world.opened(0);
    world.kill(0);
    world.start(0);
    let refusal = world.hello(0, old, 0).unwrap_err();
    assert_eq!(refusal.code, RefusalCode::OlderRun, "{refusal:?}");
    world.hello(0, newer, 0).expect("the newest claim counts");

    // A claim that an attempt has left which failed ends no job that nodes remember.
    let mut world = World::new(3, Mood::Answers(2), 13);
    let run = world.opened(0);
    let left = RunId::with_identity(run.number() + 1, 7);
    world.tier.record(world::namespace(), world::owner(), left);
    world.kill(2);
    world.start(2);
    world.hello(2, run, 0).expect("its peers know the run");
}

#[test]
fn a_claim_that_fails_once_is_tried_again_within_the_callers_time() {
    let mut world = World::new(3, Mood::Answers(10), 6);
    world.scene.failing_claims = 2;
    let asked = world.open_run(0, 60_000);
    world.run_until_answered(&[asked]);
    opened(world.answer(asked));

    let mut short = World::new(3, Mood::Answers(10), 6);
    short.scene.failing_claims = 2;
    let (asked, began) = (short.open_run(0, 500), short.now);
    short.run_until_answered(&[asked]);
    assert_eq!(code(short.answer(asked)), RefusalCode::DurableUnavailable);
    assert!(short.now - began <= 1_500, "{} ms", short.now - began);
}

#[test]
fn the_last_number_is_the_last_and_nothing_breaks() {
    let mut world = World::new(3, Mood::Absent, 13);
    let run = world.opened(0);
    let fence = |number| {
        PeerMessage::Fences(vec![Fence {
            namespace: world::namespace(),
            owner: world::owner(),
            run: RunId::new(number),
            promised: RunId::ZERO,
        }])
    };
    // One peer's word, or a number that nobody gives out, ends nothing.
    for from in [1, 2] {
        world.message(0, &name(from), fence(u64::MAX));
        world.message(0, &name(1), fence(LAST_RUN));
    }
    assert_eq!(world.fence(0), run);
    for to in 0..3 {
        let others = (0..3).filter(|from| *from != to);
        others.for_each(|from| world.message(to, &name(from), fence(LAST_RUN)));
        assert_eq!(world.fence(to), RunId::new(LAST_RUN));
    }
    let refused = world.open_run(0, 10_000);
    let elsewhere = world.open_run(2, 10_000);
    world.run_until_answered(&[refused, elsewhere]);
    assert_eq!(code(world.answer(refused)), RefusalCode::NoRunLeft);
    assert_eq!(code(world.answer(elsewhere)), RefusalCode::NoRunLeft);
    assert!(run < RunId::new(LAST_RUN));
}

#[test]
fn a_forged_manifest_raises_no_fence() {
    let mut world = World::new(3, Mood::Absent, 14);
    let run = world.opened(0);
    let forged = world.manifest_of_homes(RunId::new(run.number() + 5), [0, 1]);
    world.message(0, &name(1), world::committed(&forged));
    world.run_for(3_000);
    assert!((0..3).all(|node| world.fence(node) == run));
    assert!(
        world.opened(0).number() > run.number() + 5,
        "it stays above"
    );
}

/// The first of two runs opened at once has rank 0, the second rank 1; both save step 5, and one of them commits it.
#[test]
fn a_commit_never_lists_shards_of_two_incarnations() {
    for seed in 0..TRIES / 8 {
        let mut world = World::new(4, Mood::Absent, seed);
        let (first, second) = (seed as usize % 4, (seed / 4) as usize % 4);
        let (a, b) = (
            world.open_run(first, 60_000),
            world.open_run(second, 60_000),
        );
        world.run_until_answered(&[a, b]);
        let (a, b) = (opened(world.answer(a)), opened(world.answer(b)));
        let (older, newer) = (a.min(b), a.max(b));
        let old = world.hello_in_world_of(0, older, 0, 2);
        let new = world
            .hello_in_world_of(1, newer, 1, 2)
            .expect("the newest run");
        let old_sealed = old.is_ok_and(|conn| world.stage(0, conn, 5));
        world.stage(1, new, 5);
        world.commit(1, new, 5);
        world.run_for(10_000);
        assert!(
            world.committed().is_empty(),
            "seed {seed}: {older} and {newer}, the older one sealed: {old_sealed}"
        );
        let whole = world
            .hello_in_world_of(0, newer, 0, 2)
            .expect("rank 0 of it");
        world.stage(0, whole, 5);
        world.run_for(10_000);
        let committed = world.committed();
        assert!(!committed.is_empty(), "seed {seed}");
        assert!(committed.iter().all(|key| key.run == newer));
    }
}

#[test]
fn what_broke_is_said() {
    let mut world = World::new(1, Mood::Fails, 15);
    let refused = world.open_run(0, 1_000);
    world.run_until_answered(&[refused]);
    let Some(Reply::Refused(refusal)) = world.answer(refused) else {
        panic!("expected a refusal");
    };
    let fault = DurableFault::Unavailable("made to fail".into()).to_string();
    assert!(refusal.message.contains(&fault), "{refusal}");
    assert!(refusal.message.contains("trickle.runs_without_tier"));
}
