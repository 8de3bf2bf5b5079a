//! What a promise is worth: it lets nobody in, it is kept for as long as somebody may count on it, and nobody counts on one that may have
//! been forgotten. Otherwise a job has two owners.

use storaged_core::{ConnId, Input, Viewer};
use storaged_wire::RunId;
use storaged_wire::local::{Reply, Request, Role};
use storaged_wire::peer::{NamedRun, PeerMessage, PromiseOutcome};
use storaged_wire::{Namespace, Owner, Rank, WorldSize};

use super::one_word::among_five;
use super::withdrawn::{promises, run};
use super::{OPEN, fresh};
use crate::cluster::Cluster;
use crate::cluster::tokens::{OTHER, is_opened};
use crate::testkit::{TOKEN, hello_by, name};

/// Who was refused would open the run by saying that he is one of its trainers.
#[test]
fn a_promise_lets_no_trainer_in() {
    let mut alone = among_five(0);
    let promised = run(1, 71, OTHER);
    promises(&mut alone, 1, promised.clone());
    let role = Role::Trainer {
        run: promised.run,
        rank: Rank::new(0),
        world_size: WorldSize::new(1).unwrap(),
    };
    let wanted = alone.ask(ConnId(1), hello_by(fresh(), OTHER, role));
    assert!(wanted.reply().is_none(), "{:?}", wanted.reply());
    let mut sent = wanted.sent();
    assert!(!sent.any(|(_, message)| matches!(message, PeerMessage::Fences(_))));
}

/// Names that hold nothing go after a minute where there are very many of them.
#[test]
fn a_promise_is_kept_for_as_long_as_a_request_may_wait() {
    let mut alone = among_five(0);
    let of_name = |number: u64| NamedRun {
        namespace: Namespace::new(format!("sweep-{number}")).unwrap(),
        owner: Owner::of_token(TOKEN),
        run: RunId::with_identity(1, number),
    };
    promises(&mut alone, 1, run(1, 71, OTHER));
    alone.now += 1_000;
    alone.handle(Input::Tick);
    for number in 0..1_100 {
        promises(&mut alone, 2 + number as usize % 4, of_name(number));
    }
    for _ in 0..62 {
        alone.now += 1_000;
        alone.handle(Input::Tick);
    }
    let outcome = promises(&mut alone, 3, run(1, 99, TOKEN));
    assert_eq!(outcome, PromiseOutcome::WrongOwner);
}

/// Two of five are cut off from the proposer, which is stopped for 20 s. One of the majority that has promised loses its memory meanwhile, and
/// promises the owner a run with the other two.
#[test]
fn a_proposer_that_was_stopped_does_not_count_what_was_promised_before() {
    let mut cluster = Cluster::start(3, 2, 10);
    cluster.end_job();
    cluster.run_for(5_000);
    let stranger = cluster.comes_by(0, &fresh(), OTHER);
    let until = cluster.now + 15_000;
    [3, 4]
        .into_iter()
        .for_each(|node| cluster.link_of(0, node).cut_until = until);
    let id = cluster.send(0, stranger, Request::OpenRun { timeout_ms: 60_000 });
    cluster.run_for(1_500);
    assert!(cluster.answer(id).is_none());
    cluster.pause(0, 20_000);
    cluster.kill(1);
    cluster.start_after(100, 1);
    cluster.run_for(10_000);
    let of_owner = cluster.asks_for_run(3, &fresh(), TOKEN);
    assert!(is_opened(&of_owner), "{of_owner:?}");
    cluster.run_for(30_000);
    let of_stranger = cluster.answer(id);
    assert!(!of_stranger.is_some_and(is_opened), "{of_stranger:?}");
}

/// One owner asks at two nodes, and breaks off at the second, whose number was higher.
#[test]
fn a_run_that_is_opened_below_another_promise_is_known_to_all() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.end_job();
    cluster.run_for(5_000);
    cluster.stop_process(5);
    let [first, second] = [1, 2].map(|node| cluster.comes_by(node, &fresh(), TOKEN));
    let id = cluster.send(1, first, OPEN);
    cluster.run_for(800);
    cluster.send(2, second, OPEN);
    cluster.run_for(800);
    cluster.disconnect(2, second);
    cluster.run_until_answered(&[id]);
    let Some(Reply::RunOpened { run }) = cluster.answer(id).cloned() else {
        panic!("{:?}", cluster.answer(id));
    };
    cluster.continue_process(5);
    cluster.run_for(5_000);
    for node in 0..6 {
        let status = cluster.ram(node).node.status_json(&Viewer::Operator);
        let known = format!("\"namespace\":\"fresh\",\"run\":\"{run}\"");
        assert!(status.contains(&known), "n{node}: {status}");
    }
}

/// The node whose client had asked for it is gone for good.
#[test]
fn a_name_that_was_only_promised_is_free_once_no_request_can_count_on_it() {
    let mut alone = among_five(0);
    promises(&mut alone, 1, run(1, 71, OTHER));
    let outcome_after = |alone: &mut crate::testkit::Alone, minutes: u64| {
        for _ in 0..60 * minutes {
            alone.now += 1_000;
            alone.handle(Input::Tick);
        }
        promises(alone, 3, run(2, 99, TOKEN))
    };
    let outcome = outcome_after(&mut alone, 10);
    assert_eq!(outcome, PromiseOutcome::WrongOwner);
    let outcome = outcome_after(&mut alone, 2);
    assert_eq!(outcome, PromiseOutcome::Promised);
}

/// Who lies knows the run of a job and whose it is.
#[test]
fn a_promise_is_no_proof_of_another_number_of_its_proposer() {
    let mut alone = among_five(0);
    let [first, second] = [run(5, 71, TOKEN), run(6, 72, TOKEN)];
    promises(&mut alone, 1, first.clone());
    promises(&mut alone, 2, second.clone());
    let fence_of = |alone: &crate::testkit::Alone, number: &str| {
        let status = alone.node.status_json(&Viewer::Operator);
        status.contains(&format!("\"namespace\":\"fresh\",\"run\":\"{number}"))
    };
    let says = |number, identity| {
        let run = run(number, identity, TOKEN);
        PeerMessage::RaiseFence { query: 9, run }
    };
    alone.hear(&name(5), says(900, 71));
    assert!(!fence_of(&alone, "900-"));
    alone.hear(&name(1), says(5, 71));
    assert!(fence_of(&alone, "5-"), "it was promised, and is open");
    alone.hear(&name(5), says(901, 71));
    assert!(fence_of(&alone, "5-"));
}
