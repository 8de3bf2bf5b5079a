//! Orders to let a job go: who may give them, and what one node that has no token can do by them.

use crate::cluster::{Cluster, Room};
use crate::testkit::{TOKEN, name, namespace};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::{DropAnswer, DropOrder, OrderIssue, OrderKey, PeerMessage};
use storaged_wire::{Generation, Owner, RunId};

/// It codes for the job and has none of its trainers.
const LIAR: usize = 5;
const NODES: usize = 6;

fn order(query: u64) -> DropOrder {
    DropOrder {
        query,
        namespace: namespace(),
        owner: Owner::of_token(TOKEN),
        force: true,
        proof: None,
    }
}

/// As somebody gives it who has this token.
fn given(query: u64, token: &[u8], run: RunId) -> DropOrder {
    let plain = order(query);
    let issue = OrderIssue {
        by: name(LIAR),
        generation: Generation::new(1),
        run,
    };
    let key = OrderKey::of_token(&plain.namespace, token);
    let proof = Some(key.prove(&plain, issue));
    DropOrder { proof, ..plain }
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

/// The owner stands in every manifest. A proof by another token is none.
#[test]
fn one_node_without_the_token_has_no_job_let_go() {
    let mut cluster = saved();
    let run = cluster.run();
    for order in [order(1), given(2, b"a token of another job", run)] {
        says(&mut cluster, &order);
        cluster.assert_all_hold([1]);
    }
    // Between two starts of the trainers there is nobody in whose way it would be.
    cluster.end_job();
    cluster.run_for(2_000);
    for order in [order(3), given(4, b"a token of another job", run)] {
        says(&mut cluster, &order);
        cluster.assert_all_hold([1]);
    }
}

/// It may have overheard the order.
#[test]
fn an_order_that_was_followed_lets_nothing_go_again() {
    let mut cluster = saved();
    let order = given(1, TOKEN, cluster.run());
    says(&mut cluster, &order);
    for node in (0..NODES).filter(|node| *node != LIAR) {
        assert_eq!(cluster.held(node), [], "n{node}");
    }
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(2_000);
    says(&mut cluster, &order);
    cluster.assert_all_hold([2]);
}

/// A node that was away as the order was given hears it from the liar, once the job has begun anew.
#[test]
fn an_order_of_an_earlier_run_lets_nothing_go() {
    let mut cluster = saved();
    let order = given(1, TOKEN, cluster.run());
    cluster.begin_again();
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(2_000);
    let held = cluster.held(0);
    says(&mut cluster, &order);
    cluster.assert_all_hold(held.iter().map(|(step, _)| *step));
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

/// All that have heard the token are gone: nobody can say whether the order is right, and what is left may be all that there is of the job.
#[test]
fn without_anybody_who_heard_the_token_a_job_stays_and_the_answer_says_why() {
    let mut cluster = saved();
    cluster.end_job();
    cluster.run_for(2_000);
    for node in [0, 1] {
        cluster.kill(node);
    }
    cluster.run_for(10_000);
    for away in [2, 3] {
        cluster.pause(away, 60_000);
    }
    cluster.run_for(8_000);
    cluster.post(LIAR, 4, PeerMessage::Drop(order(7)));
    cluster.run_for(5_000);
    assert_eq!(cluster.held(4).len(), 1);
}

/// The job's room is as it was before, whatever was asked.
#[test]
fn orders_that_nobody_can_check_end_in_time() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, Room::default());
    cluster.save_and_wait(DurableWish::Never);
    for query in 0..40 {
        let order = given(query, b"a token of another job", cluster.run());
        cluster.post(LIAR, 4, PeerMessage::Drop(order));
    }
    cluster.run_for(10_000);
    cluster.assert_all_hold([1]);
    let unanswered = cluster.processes[4]
        .as_ref()
        .map(|it| it.node.audit().requests);
    assert_eq!(unanswered, Some(0));
}
