//! A request about a job that its node does not know waits for what others say, and for no longer than its caller and no later than it must.

use storaged_core::{ConnId, Input};
use storaged_wire::failed::FailureReport;
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::{Fence, PeerMessage};
use storaged_wire::{Generation, Namespace, Owner, RefusalCode, RunId, Step};

use super::{FORGETFUL, OPEN, changed_and_forgotten, says};
use crate::cluster::tokens::{NEW, OTHER, code, is_opened};
use crate::cluster::{Cluster, Conduct, Listing, Room};
use crate::testkit::{Alone, TOKEN, hello_by, members, name, namespace, plan_newest, setup};

/// The tier has the job, all nodes have lost their memory, and the tier fails.
fn known_to_a_tier_that_fails() -> (Cluster, Namespace) {
    let mut cluster = Cluster::start_with(2, 1, 4, Some(Conduct::default()), Room::default());
    cluster.save_and_wait(DurableWish::Required);
    cluster.rotate(0, &namespace());
    (0..3).for_each(|node| cluster.kill(node));
    (0..3).for_each(|node| cluster.start_after(50, node));
    cluster.run_for(20_000);
    lists(&mut cluster, Listing::FailsAfter(50));
    (cluster, namespace())
}

fn lists(cluster: &mut Cluster, listing: Listing) {
    cluster.scene.tier.as_mut().unwrap().listing = listing;
}

#[test]
fn a_retired_token_drops_nothing_by_being_in_a_hurry() {
    for timeout_ms in [0, 1, 5_000] {
        let (mut cluster, job) = changed_and_forgotten();
        let old = cluster.comes_by(FORGETFUL, &job, TOKEN);
        let force = true;
        let dropped = cluster.ask(FORGETFUL, old, Request::Drop { force, timeout_ms });
        assert!(code(&dropped).is_some(), "{timeout_ms}: {dropped:?}");
        cluster.run_for(5_000);
        let own = cluster.comes_by(0, &job, NEW);
        let plan = cluster.ask(0, own, plan_newest(5_000));
        assert!(matches!(plan, Reply::Plan(_)), "{timeout_ms}: {plan:?}");
    }
}

#[test]
fn a_hurried_verdict_is_the_newest_tokens_alone() {
    for timeout_ms in [0, 1, 5_000] {
        let mut verdict_of = |token| {
            let (mut cluster, job) = changed_and_forgotten();
            let conn = cluster.comes_by(FORGETFUL, &job, token);
            code(&cluster.ask(FORGETFUL, conn, Request::Verdict { timeout_ms }))
        };
        let both = [TOKEN, NEW].map(&mut verdict_of);
        assert_eq!(both, [Some(RefusalCode::WrongToken), None], "{timeout_ms}");
    }
}

/// The tier failed at the hello, and answers in 20 ms now: a verdict is given in three seconds, however little time is said.
#[test]
fn a_hurried_verdict_waits_for_a_tier_that_answers_at_once() {
    let (mut cluster, job) = known_to_a_tier_that_fails();
    let own = cluster.comes_by(0, &job, NEW);
    lists(&mut cluster, Listing::After(20));
    let verdict = cluster.ask(0, own, Request::Verdict { timeout_ms: 0 });
    assert_eq!(code(&verdict), None, "{verdict:?}");
}

/// The tier is slow while the request is held, and hangs then.
#[test]
fn the_time_for_which_a_request_was_held_is_the_callers() {
    let (mut cluster, job) = known_to_a_tier_that_fails();
    let own = cluster.comes_by(0, &job, NEW);
    lists(&mut cluster, Listing::After(8_000));
    let began = cluster.now;
    let id = cluster.send(0, own, plan_newest(9_000));
    cluster.run_for(8_010);
    lists(&mut cluster, Listing::Hangs);
    cluster.run_until_answered(&[id]);
    let took_ms = cluster.now - began;
    assert!(took_ms <= 9_100, "{took_ms} ms");
}

#[test]
fn a_held_request_that_is_refused_gives_its_memory_back() {
    let mut alone = Alone::new(setup(name(0), members(6)));
    for peer in 1..6 {
        let (node, generation) = (name(peer), Generation::new(7));
        alone.handle(Input::PeerUp { node, generation });
    }
    alone.now = 60_000;
    alone.handle(Input::Tick);
    let conn = ConnId(1);
    let hello = hello_by(namespace(), TOKEN, Role::Reader);
    let welcomed = alone.ask(conn, hello).reply();
    assert!(
        matches!(welcomed, Some(Reply::Welcome { .. })),
        "{welcomed:?}"
    );
    let before = alone.node.ledger().records;
    let bytes = 64 << 20;
    alone.handle(Input::RequestComes { conn, bytes });
    assert!(alone.node.ledger().records > before);
    let report = FailureReport {
        run: None,
        step: Step::new(1),
        timeout_ms: 1_000,
    };
    let mut reply = alone.ask(conn, Request::RestartFailed(report)).reply();
    for _ in 0..50 {
        alone.now += 100;
        reply = reply.or(alone.handle(Input::Tick).reply());
    }
    assert!(reply.is_some());
    assert_eq!(alone.node.ledger().records, before, "{reply:?}");
}

/// Nothing that it says counts; nor is it waited for.
#[test]
fn a_member_that_is_not_believed_any_more_holds_up_no_request() {
    let (mut cluster, job) = known_to_a_tier_that_fails();
    lists(&mut cluster, Listing::After(20));
    for number in 0..9 {
        let run = RunId::new((u64::MAX >> 1) - number);
        let cannot_be = Fence {
            namespace: Namespace::new("x").unwrap(),
            owner: Owner::of_token(OTHER),
            run,
            promised: run,
        };
        says(&mut cluster, 2, 0, PeerMessage::Fences(vec![cannot_be]));
    }
    cluster.run_for(1_000);
    let own = cluster.comes_by(0, &job, NEW);
    let planned = cluster.ask(0, own, plan_newest(20_000));
    let Reply::Plan(plan) = planned else {
        panic!("{planned:?}");
    };
    let mut began = cluster.now;
    let manifest = plan.manifest;
    cluster.ask(0, own, Request::GetManifest { manifest });
    let manifest_ms = cluster.now - began;
    began = cluster.now;
    let opened = cluster.ask(0, own, OPEN);
    assert!(is_opened(&opened), "{opened:?}");
    let took = (manifest_ms, cluster.now - began);
    assert!(took.0 < 100 && took.1 < 500, "{took:?} ms");
}
