//! Runs of a cluster whose members come from a registry: it gives every number once, whoever sees whom, also while it is slow, cut off from
//! some or was put back from an older copy. Without its word no run is opened.

use std::collections::BTreeSet;

use storaged_core::RequestId;
use storaged_wire::local::Reply;
use storaged_wire::{Namespace, Refusal, RefusalCode, RunId};

use super::world::{Mood, World, namespace};
use crate::testkit::{Answer, OTHER, TOKEN};

const TRIES: u64 = 400;

fn opened(world: &World, id: RequestId) -> RunId {
    match world.answer(id) {
        Some(Reply::RunOpened { run }) => *run,
        other => panic!("expected a run, got {other:?}"),
    }
}

fn refused(world: &World, id: RequestId) -> &Refusal {
    match world.answer(id) {
        Some(Reply::Refused(refusal)) => refusal,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

/// What a majority of promises would refuse.
#[test]
fn a_cluster_whose_majority_has_died_opens_runs() {
    let mut world = World::with_registry(5, Mood::Absent, 1);
    let first = world.opened(0);
    [2, 3, 4].into_iter().for_each(|node| world.kill(node));
    let next = world.opened(1);
    assert_eq!((first.number(), next.number()), (1, 2));
    assert_eq!(world.fence(0), next);
    assert_eq!(world.run_registry.newest(&namespace()), Some(next));
}

#[test]
fn two_halves_that_do_not_see_each_other_get_different_numbers() {
    for seed in 0..TRIES {
        let tier = [Mood::Absent, Mood::Hangs, Mood::Answers(40)][(seed % 3) as usize];
        let mut world = World::with_registry(4, tier, seed);
        let before = (tier == Mood::Hangs).then(|| {
            world.scene.tier = Mood::Answers(10);
            let run = world.opened(0);
            world.scene.tier = Mood::Hangs;
            run
        });
        world.cut(&[0, 1], &[2, 3]);
        let apart = world.random(60);
        let a = world.open_run(0, 60_000);
        world.run_for(apart);
        let b = world.open_run(3, 60_000);
        world.run_until_answered(&[a, b]);
        let runs = [opened(&world, a), opened(&world, b)];
        assert_ne!(runs[0].number(), runs[1].number(), "seed {seed}: {runs:?}");
        assert!(runs.iter().all(|run| Some(*run) > before), "seed {seed}");
        world.mend();
        world.run_for(5_000);
        let newest = runs.into_iter().max().unwrap();
        for node in 0..4 {
            assert_eq!(world.fence(node), newest, "seed {seed}: node {node}");
        }
    }
}

/// Any two nodes, at about the same time; answers of the registry get lost, though what was asked was done.
#[test]
fn numbers_are_given_once_whatever_the_registry_does() {
    for seed in 0..TRIES {
        let mut world = World::with_registry(3 + (seed % 4) as usize, Mood::Absent, seed);
        let nodes = world.nodes();
        let mut numbers = BTreeSet::new();
        let mut last = RunId::ZERO;
        for _ in 0..4 {
            let answers = [
                Answer::Lost,
                Answer::Away,
                Answer::Fails(30),
                Answer::After(7_000),
                Answer::After(50),
            ];
            let ill = answers[world.random(5) as usize];
            let of: Vec<usize> = (0..nodes).filter(|_| world.random(2) == 0).collect();
            world.registry_answers_so(ill, &of);
            let (first, second) = (world.random(nodes as u64), world.random(nodes as u64));
            let a = world.open_run(first as usize, 60_000);
            let apart = world.random(40);
            world.run_for(apart);
            let b = world.open_run(second as usize, 60_000);
            let outage = world.random(12_000);
            world.run_for(outage);
            world.registry_answers_so(Answer::After(20), &[]);
            world.run_until_answered(&[a, b]);
            let runs = [opened(&world, a), opened(&world, b)];
            for run in runs {
                assert!(numbers.insert(run.number()), "seed {seed}: {run} twice");
                assert!(run > last, "seed {seed}: {run} after {last}");
            }
            last = runs.into_iter().max().unwrap();
        }
    }
}

/// The first answer comes when the node has gone above that number, and the one that it asks for now is given to nobody yet.
#[test]
fn an_answer_for_the_number_before_opens_nothing() {
    let mut world = World::with_registry(3, Mood::Absent, 6);
    world.registry_answers_so(Answer::After(11_000), &[0]);
    let late = world.open_run(0, 60_000);
    world.run_for(6_100);
    let mut runs = vec![world.opened(1)];
    let passed = world.now;
    world.registry_answers_so(Answer::After(2_000), &[0]);
    assert!(
        passed < 7_800,
        "the fourth question is answered sooner: {passed}"
    );
    world.run_for(10_400 - passed);
    runs.push(world.opened(1));
    world.run_until_answered(&[late]);
    runs.push(opened(&world, late));
    for run in &runs {
        let is_registered = world.run_registry.has(&namespace(), *run);
        assert!(is_registered, "{run} of {runs:?}");
    }
}

#[test]
fn without_the_registry_a_run_is_refused_in_time_and_ends_no_job() {
    for answer in [Answer::Away, Answer::Lost, Answer::Fails(30)] {
        let mut world = World::with_registry(3, Mood::Answers(10), 7);
        let before = world.opened(0);
        world.registry_answers_so(answer, &[0, 1, 2]);
        let asked_at = world.now;
        let id = world.open_run(1, 9_000);
        world.run_until_answered(&[id]);
        assert!(
            world.now <= asked_at + 10_000,
            "{} ms",
            world.now - asked_at
        );
        let refusal = refused(&world, id);
        assert_eq!(refusal.code, RefusalCode::TimedOut, "{}", refusal.message);
        for part in ["membership.registry", "no run was opened"] {
            assert!(refusal.message.contains(part), "{}", refusal.message);
        }
        for node in 0..3 {
            assert_eq!(world.fence(node), before, "{answer:?}: node {node}");
        }
        world.registry_answers_so(Answer::After(20), &[]);
        let next = world.opened(2);
        assert!(next > before, "{answer:?}: {next} after {before}");
    }
}

/// Somebody has put an older copy back: nodes and the durable tier remember what it has forgotten.
#[test]
fn a_registry_that_has_gone_back_gives_no_number_twice() {
    for tier in [Mood::Absent, Mood::Answers(10)] {
        let mut world = World::with_registry(3, tier, 3);
        let runs = [0, 1, 2].map(|node| world.opened(node));
        world.run_registry.forget_above(1);
        let next = world.opened(0);
        assert!(next.number() > runs[2].number(), "{next} after {runs:?}");
    }
    // All RAM is lost as well: then the tier says it.
    let mut world = World::with_registry(3, Mood::Answers(10), 4);
    let runs = [0, 1, 2].map(|node| world.opened(node));
    [0, 1, 2].into_iter().for_each(|node| world.kill(node));
    world.run_registry.forget_above(0);
    [0, 1, 2].into_iter().for_each(|node| world.start(node));
    let next = world.opened(1);
    assert!(next.number() > runs[2].number(), "{next} after {runs:?}");
}

/// Nobody remembers a run but the registry: all RAM is lost, and there is no durable tier.
#[test]
fn the_registry_remembers_runs_that_no_node_does() {
    let mut world = World::with_registry(3, Mood::Absent, 5);
    let last = [0, 1, 2].map(|node| world.opened(node))[2];
    [0, 1, 2].into_iter().for_each(|node| world.kill(node));
    [0, 1, 2].into_iter().for_each(|node| world.start(node));
    let next = world.opened(1);
    assert!(next.number() > last.number(), "{next} after {last}");
}

#[test]
fn a_wrong_token_that_the_registry_does_not_answer_keeps_no_name() {
    for ill in [Answer::Away, Answer::Fails(20)] {
        let job = fresh();
        let mut world = World::with_registry(3, Mood::Absent, 8);
        world.run_for(10_000);
        world.registry_answers_so(ill, &[0, 1, 2]);
        let stranger = world.asks_for_run_within(3_000, 0, &job, OTHER);
        assert!(matches!(stranger, Reply::Refused(_)), "{stranger:?}");
        world.registry_answers_so(Answer::After(5), &[]);
        world.run_for(5_000);
        for node in [1, 2, 0] {
            let reply = world.asks_for_run_within(10_000, node, &job, TOKEN);
            let is_opened = matches!(reply, Reply::RunOpened { .. });
            assert!(is_opened, "n{node}, {ill:?}: {reply:?}");
        }
    }
}

/// The registry has taken the number and answers late. Meanwhile all that had promised the run are restarted without their memory, and
/// promise one to somebody else.
#[test]
fn an_answer_that_comes_when_the_promises_are_gone_opens_nothing() {
    let mut world = World::with_registry(3, Mood::Absent, 9);
    let stranger = asks_a_slow_registry(&mut world);
    world.run_for(2_000);
    owner_opens_after_a_loss(&mut world);
    world.run_until_answered(&[stranger]);
    let refusal = refused(&world, stranger);
    assert_eq!(refusal.code, RefusalCode::WrongToken, "{refusal}");
}

/// The answer is there before the node hears that its peers are gone.
#[test]
fn an_answer_that_has_waited_for_a_node_that_was_stopped_opens_nothing() {
    let mut world = World::with_registry(3, Mood::Absent, 9);
    let stranger = asks_a_slow_registry(&mut world);
    world.run_for(1_000);
    // One answer is under way, and no other one comes.
    world.registry_answers_so(Answer::Lost, &[0]);
    world.run_for(14_000);
    world.stop_process(0);
    world.run_for(2_000);
    owner_opens_after_a_loss(&mut world);
    world.continue_process(0);
    world.run_until_answered(&[stranger]);
    refused(&world, stranger);
}

/// It answers after sixteen seconds, and knows the number after eight.
fn asks_a_slow_registry(world: &mut World) -> RequestId {
    world.run_for(10_000);
    world.registry_answers_so(Answer::After(16_000), &[0]);
    world.begins_a_run(45_000, 0, &fresh(), OTHER).unwrap()
}

/// The nodes beside the first one lose their memory.
fn owner_opens_after_a_loss(world: &mut World) {
    [1, 2].into_iter().for_each(|node| world.kill(node));
    [1, 2].into_iter().for_each(|node| world.start(node));
    world.run_for(9_000);
    let owner = world.asks_for_run_within(10_000, 1, &fresh(), TOKEN);
    assert!(matches!(owner, Reply::RunOpened { .. }), "{owner:?}");
}

fn fresh() -> Namespace {
    Namespace::new("fresh").unwrap()
}

/// Links that fail for a moment while the registry is slow: nobody else has asked for the job, and it opens.
#[test]
fn a_run_is_promised_anew_when_a_link_has_failed_meanwhile() {
    let mut world = World::with_registry(3, Mood::Absent, 10);
    world.run_for(10_000);
    world.registry_answers_so(Answer::After(6_000), &[0]);
    let id = world.open_run(0, 30_000);
    world.run_for(1_000);
    world.cut(&[1, 2], &[0]);
    world.run_for(4_000);
    world.mend();
    world.run_until_answered(&[id]);
    let run = opened(&world, id);
    world.run_for(2_000);
    for node in 0..3 {
        assert_eq!(world.fence(node), run, "n{node}");
    }
}
