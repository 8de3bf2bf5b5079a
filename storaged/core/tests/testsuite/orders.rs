//! Orders to let a job go: who may give them, and what one node that has no token can do by them.

use crate::cluster::Cluster;
use crate::cluster::tokens::{NEW, OTHER, code};
use crate::testkit::{TOKEN, drop_order, given_at, hello_by, name, namespace, plan_newest};
use storaged_core::{ConnId, Input, Viewer};
use storaged_wire::local::{BoardKind, DurableWish, Reply, Request, Role};
use storaged_wire::peer::{DropAnswer, DropOrder, PeerMessage};
use storaged_wire::{Namespace, Rank, RefusalCode};

/// It codes for the job and has none of its trainers.
const LIAR: usize = 5;
const NODES: usize = 6;

fn order(query: u64) -> DropOrder {
    drop_order(namespace(), query)
}

/// The liar says it to all others.
fn says(cluster: &mut Cluster, order: &DropOrder) {
    for node in (0..NODES).filter(|node| *node != LIAR) {
        cluster.post(LIAR, node, PeerMessage::Drop(order.clone()));
    }
    cluster.run_for(10_000);
}

/// Somebody with the token gives the order at this node, and all follow it.
fn all_free(cluster: &mut Cluster, node: usize) {
    let reader = cluster.connect(node, Role::Reader);
    freed_by(cluster, node, reader);
}

fn freed_by(cluster: &mut Cluster, node: usize, reader: ConnId) {
    let (force, timeout_ms) = (false, 5_000);
    let reply = cluster.ask(node, reader, Request::Drop { force, timeout_ms });
    let Reply::Dropped(report) = reply else {
        panic!("{reply:?}");
    };
    for node in &report.nodes {
        assert!(
            matches!(node.answer, DropAnswer::Freed { bytes: 1.., .. }),
            "{node:?}"
        );
    }
    assert_eq!(report.nodes.len(), NODES);
}

fn saved() -> Cluster {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(2_000);
    cluster.assert_all_hold([1]);
    cluster
}

/// The owner stands in every manifest. A proof by another token is none, and what it has overheard counts from who gave it alone.
#[test]
fn one_node_without_the_token_has_no_job_let_go() {
    let mut cluster = saved();
    let lies = || {
        let other = given_at(LIAR, b"a token of another job", order(7));
        [order(1), other, given_at(0, TOKEN, order(7))]
    };
    for order in lies() {
        says(&mut cluster, &order);
        cluster.assert_all_hold([1]);
    }
    // Between two starts of the trainers there is nobody in whose way it would be.
    cluster.end_job();
    cluster.run_for(2_000);
    for order in lies() {
        says(&mut cluster, &order);
        cluster.assert_all_hold([1]);
    }
}

/// Also where its trainers are, if it has the token: as somebody who says it there.
#[test]
fn an_order_by_the_token_is_followed_by_all() {
    let mut cluster = saved();
    says(&mut cluster, &given_at(LIAR, TOKEN, order(7)));
    for node in (0..NODES).filter(|node| *node != LIAR) {
        assert_eq!(cluster.held(node), [], "n{node}");
    }
}

/// Those that only code for the job have never heard its token, and ask those that have.
#[test]
fn a_job_goes_from_nodes_that_never_heard_its_token() {
    let mut cluster = saved();
    cluster.end_job();
    cluster.run_for(2_000);
    all_free(&mut cluster, 0);
}

/// Nor has anybody said it since all daemons were started again with their memory.
#[test]
fn daemons_that_take_over_memory_know_whose_orders_count() {
    let mut cluster = saved();
    cluster.end_job();
    (0..NODES).for_each(|node| cluster.end_daemon(node));
    cluster.run_for(500);
    (0..NODES).for_each(|node| cluster.start_after(0, node));
    cluster.run_for(10_000);
    cluster.assert_all_hold([1]);
    all_free(&mut cluster, 4);
}

/// The token was changed at one node, and said there alone since; before that it was said where the trainers were.
#[test]
fn a_job_goes_for_its_newest_token_where_the_first_one_was_said() {
    let mut cluster = saved();
    cluster.end_job();
    cluster.run_for(2_000);
    cluster.rotate(4, &namespace());
    cluster.run_for(2_000);
    let reader = cluster.comes_by(4, &namespace(), NEW);
    freed_by(&mut cluster, 4, reader);
}

/// A job that has made boards and opened no run yet.
#[test]
fn boards_go_for_the_token_that_they_were_made_by_alone() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.ask_of("boards");
    let job = Namespace::new("boards").expect("a name");
    let conn = cluster.comes_by(0, &job, TOKEN);
    let (rank, kind, bytes) = (Rank::new(0), BoardKind::Batches, 100);
    let board = Request::Board { rank, kind, bytes };
    let made = cluster.ask(0, conn, board);
    assert!(!matches!(made, Reply::Refused(_)), "{made:?}");
    let boards = |cluster: &mut Cluster| cluster.ram(0).node.audit().boards;
    let mut proven = |token: &[u8]| {
        let order = given_at(LIAR, token, drop_order(job.clone(), 1));
        says(&mut cluster, &order);
        boards(&mut cluster)
    };
    assert_eq!(proven(b"a token of another job"), 1);
    assert_eq!(proven(TOKEN), 0);
}

/// A node that has nothing of the job and has never heard its token would tell again how far it got: a plan would wait for that.
#[test]
fn nodes_without_blocks_forget_how_far_a_job_got_that_was_dropped() {
    let mut cluster = Cluster::start_of(9, 4, 2, 10);
    cluster.save_on_all(2, DurableWish::Never);
    cluster.run_for(2_000);
    let bystander = (0..9).rev().find(|node| cluster.held(*node).is_empty());
    let bystander = bystander.expect("few nodes have a part of it");
    cluster.end_job();
    cluster.run_for(2_000);
    let reader = cluster.connect(0, Role::Reader);
    let (force, timeout_ms) = (false, 5_000);
    let reply = cluster.ask(0, reader, Request::Drop { force, timeout_ms });
    assert!(matches!(reply, Reply::Dropped(_)), "{reply:?}");
    cluster.pause(1, 20_000);
    let reader = cluster.connect(bystander, Role::Reader);
    let reply = cluster.ask(bystander, reader, plan_newest(5_000));
    assert_ne!(
        code(&reply),
        Some(RefusalCode::NewerUnreachable),
        "{reply:?}"
    );
    assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
}

/// Those that have heard the token are away: nobody can say whether the order is right, and what is left may be all that there is of the
/// job.
#[test]
fn without_anybody_who_heard_the_token_a_job_stays_and_the_answer_says_why() {
    let mut cluster = saved();
    cluster.end_job();
    cluster.run_for(2_000);
    for node in 0..4 {
        cluster.kill(node);
    }
    cluster.run_for(10_000);
    let reader = cluster.connect(LIAR, Role::Reader);
    let (force, timeout_ms) = (false, 5_000);
    let reply = cluster.ask(LIAR, reader, Request::Drop { force, timeout_ms });
    let Reply::Dropped(report) = reply else {
        panic!("{reply:?}");
    };
    let of_other = report.nodes.iter().find(|it| it.node == name(4));
    let why = match of_other.map(|it| &it.answer) {
        Some(DropAnswer::Refused(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(why.contains("no other node is up"), "{why}");
    assert_eq!(cluster.held(4).len(), 1);
}

/// Who is asked is stopped and answers nobody.
#[test]
fn orders_that_nobody_checks_end_in_time() {
    let mut cluster = saved();
    let order = given_at(LIAR, b"a token of another job", order(7));
    for node in 0..4 {
        cluster.pause(node, 4_500);
    }
    for _ in 0..400 {
        cluster.post(LIAR, 4, PeerMessage::Drop(order.clone()));
    }
    let unanswered = |cluster: &Cluster| {
        let process = cluster.processes[4].as_ref();
        process.map_or(0, |it| it.node.audit().requests)
    };
    cluster.run_for(1_000);
    assert_eq!(unanswered(&cluster), 256, "so many of one peer wait");
    cluster.run_for(3_000);
    assert_eq!(unanswered(&cluster), 0);
    cluster.run_for(10_000);
    cluster.assert_all_hold([1]);
}

/// An operator reads all jobs and has no token: were the job let go here alone, it would bear less and be there all the same.
#[test]
fn an_operator_without_the_token_drops_nothing_by_halves() {
    let mut cluster = saved();
    cluster.end_job();
    cluster.run_for(2_000);
    let drops = |cluster: &mut Cluster, node| {
        let (conn, viewer) = (cluster.fresh_conn(), Viewer::Operator);
        cluster.tell(node, Input::Connected { conn, viewer });
        cluster.ask(node, conn, hello_by(namespace(), OTHER, Role::Reader));
        let (force, timeout_ms) = (false, 5_000);
        cluster.ask(node, conn, Request::Drop { force, timeout_ms })
    };
    let refused = drops(&mut cluster, 4);
    assert_eq!(code(&refused), Some(RefusalCode::WrongToken), "{refused:?}");
    cluster.assert_all_hold([1]);
    let followed = drops(&mut cluster, 0);
    assert!(
        matches!(followed, Reply::Dropped(_)),
        "it was said at n0: {followed:?}"
    );
    assert_eq!((cluster.held(3), cluster.held(4)), (vec![], vec![]));
}
