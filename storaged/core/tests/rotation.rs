//! A job's token is changed for another one: who opens the job from then on, on all nodes, after restarts and from the durable tier.

mod cluster;
mod testkit;

use cluster::{Cluster, Conduct, Room};
use storaged_core::{ConnId, Input};
use storaged_wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::peer::PeerMessage;
use storaged_wire::plan::{CopyFault, RestorePlan};
use storaged_wire::succession::{Rotated, SEAL_BYTES, TokenStanding};
use storaged_wire::{JobKeys, Owner, RefusalCode, Rotation, Step};
use testkit::{TOKEN, name, namespace};

const NEW: &[u8] = b"the token that comes next";
const NEWEST: &[u8] = b"the token that comes last";
const SEAL: [u8; SEAL_BYTES] = [3; SEAL_BYTES];

/// A reader that says a token.
fn come(cluster: &mut Cluster, node: usize, token: &[u8]) -> Result<ConnId, RefusalCode> {
    let conn = cluster.fresh_conn();
    let hello = Request::Hello {
        version: LOCAL_VERSION,
        namespace: namespace(),
        token: token.to_vec().into(),
        role: Role::Reader,
    };
    match cluster.ask(node, conn, hello) {
        Reply::Welcome { .. } => Ok(conn),
        Reply::Refused(refusal) => Err(refusal.code),
        other => panic!("expected a welcome, got {other:?}"),
    }
}

fn opens(cluster: &mut Cluster, node: usize, token: &[u8]) -> bool {
    match come(cluster, node, token) {
        Ok(conn) => {
            cluster.disconnect(node, conn);
            true
        }
        Err(code) => {
            assert_eq!(code, RefusalCode::WrongToken);
            false
        }
    }
}

fn standing(cluster: &mut Cluster, node: usize, conn: ConnId) -> TokenStanding {
    match cluster.ask(node, conn, Request::Succession) {
        Reply::Succession(standing) => standing,
        other => panic!("expected what holds now, got {other:?}"),
    }
}

/// Changes the token at a node; the connection by which that was done, and the record.
fn rotate(cluster: &mut Cluster, node: usize, old: &[u8], new: &[u8]) -> (ConnId, Rotation) {
    let conn = come(cluster, node, old).expect("the old token opens it");
    let standing = standing(cluster, node, conn);
    let rotation = Rotation::new(&standing, old, new, SEAL).expect("a new token");
    let reply = cluster.ask(node, conn, Request::Rotate(rotation.clone()));
    assert!(matches!(reply, Reply::Done), "{reply:?}");
    cluster.run_for(100);
    (conn, rotation)
}

fn new_alone_opens(cluster: &mut Cluster, nodes: std::ops::Range<usize>) {
    for node in nodes {
        assert!(!opens(cluster, node, TOKEN), "the old token at n{node}");
        assert!(opens(cluster, node, NEW), "the new token at n{node}");
    }
}

/// Two data nodes and a coding node, which have saved a step.
fn saved() -> Cluster {
    let mut cluster = Cluster::start(2, 1, 4);
    cluster.save_and_wait(DurableWish::Never);
    cluster
}

fn saved_with_tier(steps: u64) -> Cluster {
    let mut cluster = Cluster::start_with(2, 1, 4, Some(Conduct::default()), Room::default());
    (0..steps).for_each(|_| cluster.save_and_wait(DurableWish::Required));
    cluster
}

/// A node that has not heard the new token publishes by the old one first, is told, and does it again.
fn save_durably(cluster: &mut Cluster) {
    cluster.save_as(DurableWish::Required);
    cluster.run_until(60_000, "a durable step", |cluster| {
        (0..3).all(|node| cluster.is_durable(node))
    });
}

fn all_die(cluster: &mut Cluster) {
    (0..3).for_each(|node| cluster.kill(node));
    (0..3).for_each(|node| cluster.start_after(50, node));
    cluster.run_for(20_000);
}

fn planned(cluster: &mut Cluster, node: usize, token: &[u8]) -> RestorePlan {
    let conn = come(cluster, node, token).expect("it opens the job");
    let plan = Request::Plan {
        step: None,
        timeout_ms: 30_000,
        allow_older: true,
    };
    match cluster.ask(node, conn, plan) {
        Reply::Plan(plan) => plan,
        other => panic!("expected a plan, got {other:?}"),
    }
}

#[test]
fn the_new_token_alone_opens_the_job_on_all_nodes_and_trainers_go_on() {
    let mut cluster = saved();
    let (old, _) = rotate(&mut cluster, 0, TOKEN, NEW);
    new_alone_opens(&mut cluster, 0..3);
    cluster.save_and_wait(DurableWish::Never);
    let reply = cluster.ask(0, old, Request::OpenRun { timeout_ms: 1_000 });
    let Reply::Refused(refusal) = reply else {
        panic!("the old token opens a run: {reply:?}");
    };
    assert_eq!(refusal.code, RefusalCode::WrongToken);
    let reader = come(&mut cluster, 1, NEW).expect("the new token opens it");
    let reply = cluster.ask(1, reader, Request::OpenRun { timeout_ms: 10_000 });
    assert!(matches!(reply, Reply::RunOpened { .. }), "{reply:?}");
}

#[test]
fn it_holds_for_daemons_that_take_over_memory_and_for_nodes_that_were_away() {
    let mut cluster = saved();
    cluster.kill(2);
    cluster.run_for(5_000);
    rotate(&mut cluster, 0, TOKEN, NEW);
    cluster.start_after(50, 2);
    cluster.run_for(10_000);
    new_alone_opens(&mut cluster, 0..3);
    // Now it is in the records of each of them.
    (0..3).for_each(|node| cluster.end_daemon(node));
    cluster.run_for(500);
    (0..3).for_each(|node| cluster.start_after(0, node));
    cluster.run_for(10_000);
    new_alone_opens(&mut cluster, 0..3);
}

#[test]
fn a_token_is_changed_again_and_what_held_before_does_not_come_back() {
    let mut cluster = saved();
    let (_, first) = rotate(&mut cluster, 0, TOKEN, NEW);
    let (_, second) = rotate(&mut cluster, 1, NEW, NEWEST);
    assert_eq!(second.succession.number, 2);
    for node in 0..3 {
        let message = PeerMessage::Rotated(Rotated {
            succession: first.succession.clone(),
            keys: None,
        });
        let from = name((node + 1) % 3);
        cluster.tell(node, Input::Message { from, message });
        assert!(!opens(&mut cluster, node, TOKEN) && !opens(&mut cluster, node, NEW));
        assert!(opens(&mut cluster, node, NEWEST));
    }
}

#[test]
fn a_record_that_the_tokens_holder_has_not_made_changes_nothing() {
    let mut cluster = saved();
    let standing = TokenStanding {
        namespace: namespace(),
        succession: None,
        durable: None,
    };
    let mut forged = Rotation::new(&standing, b"a token of somebody else", NEW, SEAL).unwrap();
    forged.succession.owner = Owner::of_token(TOKEN);
    for node in 0..3 {
        let message = PeerMessage::Rotated(Rotated {
            succession: forged.succession.clone(),
            keys: Some(forged.keys.clone()),
        });
        let from = name((node + 1) % 3);
        cluster.tell(node, Input::Message { from, message });
        assert!(opens(&mut cluster, node, TOKEN) && !opens(&mut cluster, node, NEW));
    }
    let conn = come(&mut cluster, 0, TOKEN).expect("it is the job's");
    let reply = cluster.ask(0, conn, Request::Rotate(forged));
    assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
    cluster.save_and_wait(DurableWish::Never);
}

#[test]
fn after_all_nodes_died_the_new_token_alone_has_what_is_durable() {
    let mut cluster = saved_with_tier(2);
    rotate(&mut cluster, 0, TOKEN, NEW);
    save_durably(&mut cluster);
    let newest = cluster.tier.published.values().next_back();
    let by = newest.and_then(|it| it.authorship.keys.clone());
    assert_eq!(
        by.map(|keys| keys.newest),
        Some(JobKeys::of_token(&namespace(), NEW).newest)
    );
    all_die(&mut cluster);
    new_alone_opens(&mut cluster, 0..3);
    let plan = planned(&mut cluster, 0, NEW);
    assert_eq!(plan.step, Step::new(3));
    let reader = come(&mut cluster, 1, NEW).expect("it opens the job");
    let reply = cluster.ask(1, reader, Request::OpenRun { timeout_ms: 10_000 });
    assert!(matches!(reply, Reply::RunOpened { .. }), "{reply:?}");
    new_alone_opens(&mut cluster, 0..3);
}

#[test]
fn what_the_old_token_signs_later_is_forged_and_what_it_signed_before_is_not() {
    let mut cluster = saved_with_tier(2);
    rotate(&mut cluster, 0, TOKEN, NEW);
    save_durably(&mut cluster);
    let newest = cluster.tier.published.values_mut().next_back();
    newest.expect("it was saved").authorship.keys = Some(JobKeys::of_token(&namespace(), TOKEN));
    all_die(&mut cluster);
    let plan = planned(&mut cluster, 2, NEW);
    assert_eq!(plan.step, Step::new(2));
    let passed_over = plan.passed_over.iter().find(|one| one.step == Step::new(3));
    let copy = passed_over.and_then(|one| one.copy);
    assert_eq!(copy, Some(CopyFault::Forged), "{plan:?}");
}

#[test]
fn a_change_of_which_only_the_durable_tier_knows_is_found_there_by_who_publishes() {
    let mut cluster = saved_with_tier(1);
    // Whoever made it died before it told anybody.
    let conn = come(&mut cluster, 0, TOKEN).expect("the old token opens it");
    let standing = standing(&mut cluster, 0, conn);
    let rotation = Rotation::new(&standing, TOKEN, NEW, SEAL).expect("a new token");
    cluster.tier.successions.push(rotation.succession.clone());
    cluster.save_as(DurableWish::Required);
    cluster.run_for(20_000);
    assert!(
        !cluster.is_durable(0) && !cluster.is_durable(1),
        "by a key that counts no more"
    );
    // The same change is gone on with, by who has the old token and the new one.
    let untold = (0..3).find(|node| opens(&mut cluster, *node, TOKEN));
    let node = untold.expect("a node that publishes nothing has not heard of it");
    let conn = come(&mut cluster, node, TOKEN).expect("it opens the job there");
    let reply = cluster.ask(node, conn, Request::Rotate(rotation));
    assert!(matches!(reply, Reply::Done), "{reply:?}");
    cluster.run_for(20_000);
    new_alone_opens(&mut cluster, 0..3);
    assert!(
        (0..3).any(|node| cluster.is_durable(node)),
        "by the new one"
    );
}
