//! Who does not open a run after all takes back what was promised: the job's name is free again, and never two owners' at once.

use storaged_core::Viewer;
use storaged_wire::local::{BoardKind, Request};
use storaged_wire::peer::{NamedRun, PeerMessage, PromiseOutcome};
use storaged_wire::{Namespace, Owner, Rank, RefusalCode, RunId};

use super::one_word::among_five;
use super::{OPEN, fresh, shut_to};
use crate::cluster::Cluster;
use crate::cluster::tokens::{OTHER, code, is_opened};
use crate::testkit::{Alone, TOKEN, name, plan_newest};

/// Why somebody who has been promised a run does not open it.
#[derive(Debug, Clone, Copy)]
enum GivesUp {
    Leaves,
    /// The link to one of a majority is lost before the silent ones have been waited for. That one hears of it later.
    HasNoMajority,
}

/// A stranger has asked for a run of a new job while two of six nodes were silent, and has given up.
fn begun_and_given_up(why: GivesUp) -> Cluster {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    [4, 5].iter().for_each(|node| cluster.stop_process(*node));
    let stranger = cluster.comes_by(1, &fresh(), OTHER);
    let id = cluster.send(1, stranger, Request::OpenRun { timeout_ms: 2_000 });
    cluster.run_for(1_500);
    assert!(tells_of(&mut cluster, 2, &fresh()), "nothing was promised");
    if matches!(why, GivesUp::HasNoMajority) {
        let until = cluster.now + 1_000;
        let both = [(1, 3), (3, 1)];
        for (from, to) in both {
            cluster.link_of(from, to).cut_until = until;
            cluster.part(from, to);
        }
        cluster.run_until_answered(&[id]);
        cluster.run_for(1_000);
        both.into_iter()
            .for_each(|(from, to)| cluster.join(from, to));
    }
    assert!(!cluster.answer(id).is_some_and(is_opened));
    cluster.disconnect(1, stranger);
    [4, 5]
        .iter()
        .for_each(|node| cluster.continue_process(*node));
    cluster.run_for(1_000);
    cluster
}

pub fn tells_of(cluster: &mut Cluster, node: usize, job: &Namespace) -> bool {
    let status = cluster.ram(node).node.status_json(&Viewer::Operator);
    status.contains(&format!("\"{job}\""))
}

#[test]
fn who_breaks_off_by_a_wrong_token_keeps_no_new_name() {
    for why in [GivesUp::Leaves, GivesUp::HasNoMajority] {
        let mut cluster = begun_and_given_up(why);
        // The stranger's own node may have heard from one that had not been told yet: one word, which claims nothing.
        let mut told = vec![0, 2, 3, 4, 5];
        told.retain(|node| tells_of(&mut cluster, *node, &fresh()));
        assert!(told.is_empty(), "{why:?}: n{told:?} remember it");
        let reply = cluster.asks_for_run(2, &fresh(), TOKEN);
        assert!(is_opened(&reply), "{why:?}: {reply:?}");
        assert_eq!(shut_to(&mut cluster, &fresh(), TOKEN), [0; 0], "{why:?}");
        let stranger = cluster.asks_for_run(1, &fresh(), OTHER);
        assert!(code(&stranger).is_some(), "{why:?}: {stranger:?}");
    }
}

/// One of six is silent; the time is over as the others are to be asked.
#[test]
fn who_has_half_a_second_leaves_no_promise_of_his_own_node() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    cluster.stop_process(5);
    let stranger = cluster.comes_by(1, &fresh(), OTHER);
    let reply = cluster.ask(1, stranger, Request::OpenRun { timeout_ms: 500 });
    assert_eq!(code(&reply), Some(RefusalCode::TimedOut), "{reply:?}");
    cluster.disconnect(1, stranger);
    cluster.continue_process(5);
    cluster.run_for(1_000);
    assert!(!tells_of(&mut cluster, 1, &fresh()));
    let reply = cluster.asks_for_run(1, &fresh(), TOKEN);
    assert!(is_opened(&reply), "{reply:?}");
}

/// The owner asks for something while a stranger's run is promised: the nodes that were asked know of the promise by others' words.
#[test]
fn what_nodes_were_told_of_a_promise_keeps_no_name() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    let owners = [2, 3].map(|node| (node, cluster.comes_by(node, &fresh(), TOKEN)));
    [4, 5].iter().for_each(|node| cluster.stop_process(*node));
    let stranger = cluster.comes_by(1, &fresh(), OTHER);
    cluster.send(1, stranger, Request::OpenRun { timeout_ms: 3_000 });
    cluster.run_for(1_000);
    for (node, conn) in owners {
        cluster.send(node, conn, plan_newest(500));
    }
    cluster.run_for(1_000);
    cluster.disconnect(1, stranger);
    [4, 5]
        .iter()
        .for_each(|node| cluster.continue_process(*node));
    cluster.run_for(2_000);
    assert_eq!(shut_to(&mut cluster, &fresh(), TOKEN), [0; 0]);
}

/// The board is its owner's as it was before he asked for a run.
#[test]
fn boards_stay_of_who_breaks_off() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    let owner = cluster.comes_by(1, &fresh(), TOKEN);
    let board = Request::Board {
        rank: Rank::new(0),
        kind: BoardKind::Steps,
        bytes: 4_096,
    };
    let made = cluster.ask(1, owner, board.clone());
    let id = cluster.send(1, owner, Request::OpenRun { timeout_ms: 0 });
    cluster.run_until_answered(&[id]);
    assert!(code(cluster.answer(id).expect("an answer")).is_some());
    cluster.run_for(1_000);
    let again = cluster.ask(1, owner, board);
    assert_eq!(made, again);
}

pub fn run(number: u64, identity: u64, token: &[u8]) -> NamedRun {
    NamedRun {
        namespace: fresh(),
        owner: Owner::of_token(token),
        run: RunId::with_identity(number, identity),
    }
}

/// What a node answers to a peer who wants a run.
pub fn promises(alone: &mut Alone, peer: usize, run: NamedRun) -> PromiseOutcome {
    let wanted = alone.hear(&name(peer), PeerMessage::PromiseRun { query: 1, run });
    let mut sent = wanted.sent();
    let outcome = sent.find_map(|(_, message)| match message {
        PeerMessage::RunPromised { outcome, .. } => Some(*outcome),
        _ => None,
    });
    outcome.expect("an answer")
}

fn withdraws(alone: &mut Alone, peer: usize, run: NamedRun) {
    alone.hear(&name(peer), PeerMessage::WithdrawRun(run));
}

#[test]
fn what_one_proposer_takes_back_frees_no_name_that_was_promised_to_another() {
    let mut alone = among_five(0);
    let (first, second) = (run(1, 71, TOKEN), run(2, 72, TOKEN));
    let stranger = || run(9, 99, OTHER);
    promises(&mut alone, 1, first.clone());
    promises(&mut alone, 2, second.clone());
    withdraws(&mut alone, 2, second);
    let outcome = promises(&mut alone, 3, stranger());
    assert_eq!(outcome, PromiseOutcome::WrongOwner);
    withdraws(&mut alone, 1, first);
    let outcome = promises(&mut alone, 3, stranger());
    assert_eq!(outcome, PromiseOutcome::Promised);
}

/// A proposer takes a higher number where one is taken, and is the same one.
#[test]
fn a_number_that_was_raised_meanwhile_is_taken_back_with_the_one_before() {
    let mut alone = among_five(0);
    promises(&mut alone, 1, run(1, 71, TOKEN));
    withdraws(&mut alone, 1, run(5, 71, TOKEN));
    let outcome = promises(&mut alone, 3, run(1, 99, OTHER));
    assert_eq!(outcome, PromiseOutcome::Promised);
}

/// Another owner would be promised a run that is about to be opened.
#[test]
fn nobody_takes_back_what_was_promised_to_another_node() {
    let mut alone = among_five(0);
    promises(&mut alone, 1, run(1, 71, TOKEN));
    withdraws(&mut alone, 5, run(1, 71, TOKEN));
    let outcome = promises(&mut alone, 3, run(9, 99, OTHER));
    assert_eq!(outcome, PromiseOutcome::WrongOwner);
}

/// The identity of a run can be foreseen by who knows its node's generation.
#[test]
fn a_liar_that_asks_first_for_the_same_run_takes_it_back_from_nobody() {
    for order in [[5, 1], [1, 5]] {
        let mut alone = among_five(0);
        for peer in order {
            let outcome = promises(&mut alone, peer, run(1, 71, TOKEN));
            assert_eq!(outcome, PromiseOutcome::Promised);
        }
        withdraws(&mut alone, 5, run(1, 71, TOKEN));
        let outcome = promises(&mut alone, 3, run(9, 99, OTHER));
        assert_eq!(outcome, PromiseOutcome::WrongOwner, "{order:?}");
    }
}

/// What was opened is not taken back.
#[test]
fn a_run_that_is_open_stays() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    let owner = cluster.comes_by(1, &fresh(), TOKEN);
    let opened = cluster.ask(1, owner, OPEN);
    assert!(is_opened(&opened), "{opened:?}");
    cluster.stop_process(5);
    let id = cluster.send(1, owner, OPEN);
    cluster.run_for(1_000);
    cluster.disconnect(1, owner);
    cluster.continue_process(5);
    cluster.run_for(1_000);
    assert!(cluster.answer(id).is_none());
    let stranger = cluster.asks_for_run(2, &fresh(), OTHER);
    assert!(code(&stranger).is_some(), "{stranger:?}");
    let reply = cluster.asks_for_run(2, &fresh(), TOKEN);
    assert!(is_opened(&reply), "{reply:?}");
}
