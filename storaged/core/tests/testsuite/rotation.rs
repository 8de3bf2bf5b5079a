//! A job's token is changed for another one: who opens the job from then on, on all nodes, after restarts and from the durable tier.

use crate::cluster::{Cluster, Conduct, Listing, Room};
use crate::testkit::{TOKEN, hello_by, name, namespace};
use minicbor::bytes::{ByteArray, ByteVec};
use storaged_core::{ConnId, Input, Viewer};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::PeerMessage;
use storaged_wire::plan::{CopyFault, RestorePlan};
use storaged_wire::succession::{Rotated, SEAL_BYTES, TokenStanding};
use storaged_wire::{
    JobKeys, Namespace, Owner, Rank, RefusalCode, Rotation, RunId, Step, Succession, WorldSize,
    decode, encode,
};

const NEW: &[u8] = b"the token that comes next";
const NEWEST: &[u8] = b"the token that comes last";
const SEAL: [u8; SEAL_BYTES] = [3; SEAL_BYTES];

/// A reader that says a token.
fn come(cluster: &mut Cluster, node: usize, token: &[u8]) -> Result<ConnId, RefusalCode> {
    let conn = cluster.fresh_conn();
    come_on(cluster, node, conn, token)
}

fn come_on(
    cluster: &mut Cluster,
    node: usize,
    conn: ConnId,
    token: &[u8],
) -> Result<ConnId, RefusalCode> {
    let hello = hello_by(namespace(), token, Role::Reader);
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
    let reply = cluster.ask(node, conn, Request::Rotate(Box::new(rotation.clone())));
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
        let message = PeerMessage::Rotated(Box::new(Rotated {
            succession: first.succession.clone(),
            keys: None,
            source: None,
        }));
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
        let message = PeerMessage::Rotated(Box::new(Rotated {
            succession: forged.succession.clone(),
            keys: Some(forged.keys.clone()),
            source: None,
        }));
        let from = name((node + 1) % 3);
        cluster.tell(node, Input::Message { from, message });
        assert!(opens(&mut cluster, node, TOKEN) && !opens(&mut cluster, node, NEW));
    }
    let conn = come(&mut cluster, 0, TOKEN).expect("it is the job's");
    let reply = cluster.ask(0, conn, Request::Rotate(Box::new(forged)));
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

/// Whoever made the change died before it told anybody.
fn known_to_the_tier_alone() -> Cluster {
    let mut cluster = saved_with_tier(1);
    let conn = come(&mut cluster, 0, TOKEN).expect("the old token opens it");
    let standing = standing(&mut cluster, 0, conn);
    let rotation = Rotation::new(&standing, TOKEN, NEW, SEAL).expect("a new token");
    cluster.tier.successions.push(rotation.succession);
    cluster
}

#[test]
fn a_change_of_which_only_the_durable_tier_knows_is_found_there_and_told_by_who_publishes() {
    let mut cluster = known_to_the_tier_alone();
    cluster.save_as(DurableWish::Required);
    cluster.run_for(20_000);
    assert!(
        !cluster.is_durable(0) && !cluster.is_durable(1),
        "by a key that counts no more"
    );
    new_alone_opens(&mut cluster, 0..3);
    cluster.run_for(20_000);
    assert!(
        (0..3).any(|node| cluster.is_durable(node)),
        "by the new one"
    );
}

fn refused(reply: &Reply) -> Option<RefusalCode> {
    match reply {
        Reply::Refused(refusal) => Some(refusal.code),
        _ => None,
    }
}

#[test]
fn a_connection_that_says_another_name_is_still_that_of_the_retired_token() {
    let mut cluster = saved();
    let (old, _) = rotate(&mut cluster, 0, TOKEN, NEW);
    let role = Role::Trainer {
        run: RunId::new(1),
        rank: Rank::new(7),
        world_size: WorldSize::new(1).unwrap(),
    };
    let of_another = hello_by(Namespace::new("another").unwrap(), NEWEST, role);
    let reply = cluster.ask(0, old, of_another);
    assert_eq!(refused(&reply), Some(RefusalCode::WorldSize));
    let reply = cluster.ask(0, old, Request::OpenRun { timeout_ms: 10_000 });
    assert_eq!(refused(&reply), Some(RefusalCode::WrongToken), "{reply:?}");
}

#[test]
fn an_operator_who_reads_by_a_retired_token_does_not_bring_it_back() {
    let mut cluster = saved();
    rotate(&mut cluster, 0, TOKEN, NEW);
    let conn = cluster.fresh_conn();
    let viewer = Viewer::Operator;
    cluster.tell(0, Input::Connected { conn, viewer });
    come_on(&mut cluster, 0, conn, TOKEN).expect("an operator reads all jobs");
    new_alone_opens(&mut cluster, 0..3);
}

/// What a run is worth that was asked for while the node could not hear that the token was changed.
#[test]
fn a_run_that_a_retired_token_waits_for_is_refused_once_that_is_heard() {
    let mut cluster = saved();
    (0..2).for_each(|node| cluster.part(node, 2));
    cluster.run_for(5_000);
    rotate(&mut cluster, 0, TOKEN, NEW);
    let old = come(&mut cluster, 2, TOKEN).expect("the node has not heard of it");
    let asked = cluster.send(2, old, Request::OpenRun { timeout_ms: 60_000 });
    cluster.run_for(1_000);
    assert_eq!(cluster.answer(asked), None);
    (0..2).for_each(|node| cluster.dial_once(node, 2));
    (0..2).for_each(|node| cluster.dial_once(2, node));
    cluster.run_until_answered(&[asked]);
    let reply = cluster.answer(asked).expect("it was answered");
    assert_eq!(refused(reply), Some(RefusalCode::WrongToken), "{reply:?}");
}

type Mac = ByteArray<32>;
type Record = (
    u16,
    Namespace,
    Owner,
    Owner,
    u32,
    ByteVec,
    Mac,
    Vec<Mac>,
    Vec<Mac>,
    Mac,
);

/// A record in which something was changed, by a token's holder, who consents to that.
fn made_by(token: &[u8], change: impl Fn(&mut Record)) -> Rotation {
    let standing = TokenStanding {
        namespace: namespace(),
        succession: None,
        durable: None,
    };
    let mut made = Rotation::new(&standing, token, NEWEST, SEAL).unwrap();
    let mut record: Record = decode("record", &encode(&made.succession)).unwrap();
    change(&mut record);
    let head = (record.1.clone(), record.2, record.3, record.4);
    let mut agreed = b"storaged succession consent".to_vec();
    agreed.extend(encode(&(record.0, head, &record.5, record.6)));
    let material = [namespace().as_str().as_bytes(), &[0], token].concat();
    let mac_under = |context: &str| {
        let mac = blake3::keyed_hash(&blake3::derive_key(context, &material), &agreed);
        vec![ByteArray::from(*mac.as_bytes())]
    };
    record.7 = mac_under("storaged 2026-11 job token consent to successions");
    record.8 = mac_under("storaged 2026-11 job token manifest key");
    made.succession = decode("record", &encode(&record)).unwrap();
    made
}

/// The owner's name is in every manifest: whoever has a token of his own can consent to a record in it.
fn forged_by(token: &[u8], number: u32) -> Succession {
    let of_owner = |record: &mut Record| (record.2, record.4) = (Owner::of_token(TOKEN), number);
    made_by(token, of_owner).succession
}

#[test]
fn a_record_that_a_stranger_consents_to_is_not_the_jobs() {
    let stranger = b"a token of somebody else";
    let mut cluster = saved();
    rotate(&mut cluster, 0, TOKEN, NEW);
    cluster.kill(2);
    cluster.start_after(50, 2);
    cluster.run_for(10_000);
    let succession = forged_by(stranger, 9);
    let message = PeerMessage::Rotated(Box::new(Rotated {
        succession,
        keys: None,
        source: None,
    }));
    let from = name(1);
    cluster.tell(2, Input::Message { from, message });
    assert!(!opens(&mut cluster, 2, stranger));
    assert!(opens(&mut cluster, 2, NEW), "the job's own token");
}

#[test]
fn no_step_is_durable_without_a_mac_while_nobody_has_the_newest_key() {
    let mut cluster = known_to_the_tier_alone();
    cluster.save_as(DurableWish::Required);
    cluster.run_for(300_000);
    let is_durable = (0..3).any(|node| cluster.is_durable(node));
    assert!(!is_durable, "it would not be offered");
    new_alone_opens(&mut cluster, 0..3);
    cluster.run_for(20_000);
    assert!((0..3).any(|node| cluster.is_durable(node)));
    all_die(&mut cluster);
    assert_eq!(planned(&mut cluster, 0, NEW).step, Step::new(2));
}

#[test]
fn a_node_that_lost_its_memory_lets_nobody_in_before_its_peers_have_told_it() {
    let mut cluster = saved();
    rotate(&mut cluster, 0, TOKEN, NEW);
    for token in [TOKEN, NEW] {
        cluster.kill(2);
        cluster.run_for(5_000);
        cluster.start_process(2);
        let came = come(&mut cluster, 2, token);
        assert_eq!(came.is_ok(), token == NEW, "{came:?}");
        let Ok(reader) = came else {
            continue;
        };
        let reply = cluster.ask(2, reader, Request::OpenRun { timeout_ms: 30_000 });
        assert!(matches!(reply, Reply::RunOpened { .. }), "{reply:?}");
    }
}

#[test]
fn a_node_whose_peers_stay_away_lets_a_new_job_in_after_a_while() {
    let mut cluster = Cluster::start(2, 1, 4);
    (0..3).for_each(|node| cluster.kill(node));
    cluster.start_process(2);
    let conn = come(&mut cluster, 2, TOKEN).expect("nobody has another word of it");
    cluster.disconnect(2, conn);
}

#[test]
fn a_job_keeps_one_change_that_the_tier_has_not_taken_and_no_long_ones() {
    let mut cluster = saved_with_tier(1);
    let conn = come(&mut cluster, 0, TOKEN).expect("the old token opens it");
    let standing = standing(&mut cluster, 0, conn);
    let long = made_by(TOKEN, |record| record.5 = vec![7; 1 << 20].into());
    let reply = cluster.ask(0, conn, Request::Rotate(Box::new(long)));
    assert_eq!(refused(&reply), Some(RefusalCode::Malformed), "{reply:?}");
    let rotation = Rotation::new(&standing, TOKEN, NEW, SEAL).expect("a new token");
    let gone = come(&mut cluster, 0, TOKEN).expect("it is not changed yet");
    cluster.send(0, gone, Request::Rotate(Box::new(rotation.clone())));
    cluster.disconnect(0, gone);
    let reply = cluster.ask(0, conn, Request::Rotate(Box::new(rotation)));
    assert_eq!(refused(&reply), Some(RefusalCode::Busy), "{reply:?}");
    cluster.run_for(20_000);
    new_alone_opens(&mut cluster, 0..3);
}

/// It said hello while nobody could tell of the change, and is taken for somebody else until the job is known.
#[test]
fn a_reader_by_the_newest_token_goes_on_once_the_tier_tells_of_the_change() {
    let mut cluster = saved_with_tier(1);
    rotate(&mut cluster, 0, TOKEN, NEW);
    save_durably(&mut cluster);
    all_die(&mut cluster);
    cluster.scene.tier.as_mut().unwrap().listing = Listing::FailsAfter(50);
    let early = come(&mut cluster, 0, NEW).expect("it is let in while the tier is away");
    cluster.scene.tier.as_mut().unwrap().listing = Listing::After(20);
    let late = come(&mut cluster, 0, NEW).expect("it opens the job");
    let opened = cluster.ask(0, late, Request::OpenRun { timeout_ms: 10_000 });
    assert!(matches!(opened, Reply::RunOpened { .. }), "{opened:?}");
    let plan = Request::Plan {
        step: None,
        timeout_ms: 5_000,
        allow_older: true,
    };
    let planned = cluster.ask(0, early, plan);
    assert!(matches!(planned, Reply::Plan(_)), "{planned:?}");
}

/// Nodes pass on what they were told: the newest record must be among that, however many came before it.
#[test]
fn the_last_of_many_changes_is_told_by_who_was_only_told() {
    let mut cluster = saved();
    cluster.end_job();
    let token = |number: usize| match number {
        0 => TOKEN.to_vec(),
        _ => format!("token number {number:04}").into_bytes(),
    };
    for number in 0..6 {
        // The last one at another node than those before it.
        let node = if number == 5 { 2 } else { 1 };
        let (conn, _) = rotate(&mut cluster, node, &token(number), &token(number + 1));
        cluster.disconnect(node, conn);
    }
    assert!(
        opens(&mut cluster, 0, &token(6)),
        "the record is proved at n0"
    );
    cluster.kill(2);
    cluster.kill(1);
    cluster.run_for(5_000);
    cluster.start_after(0, 1);
    cluster.run_for(30_000);
    assert!(opens(&mut cluster, 1, &token(6)));
    assert!(!opens(&mut cluster, 1, &token(5)));
}
