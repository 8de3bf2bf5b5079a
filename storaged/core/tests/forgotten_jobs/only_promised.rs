//! Somebody has wanted a run of a job and opened none: by another token, by one peer's lie, from a node that died. The job is its owner's at once
//! where anybody knows of its runs, and a new name is anybody's again after a minute.

use storaged_core::{Input, Viewer};
use storaged_wire::local::{DurableWish, Reply, Request};
use storaged_wire::peer::{Fence, NamedRun, PeerMessage};
use storaged_wire::{Namespace, Owner, RunId};

use crate::cluster::Cluster;
use crate::cluster::tokens::{NEW, OTHER, code, is_opened};
use crate::testkit::{TOKEN, name, namespace, plan_newest};
use crate::{OPEN, changed_and_forgotten, forgotten, idle_since};

fn fresh() -> Namespace {
    Namespace::new("fresh").unwrap()
}

fn promise(job: &Namespace) -> PeerMessage {
    let run = NamedRun {
        namespace: job.clone(),
        owner: Owner::of_token(OTHER),
        run: RunId::with_identity(900, 7),
    };
    PeerMessage::PromiseRun { query: 1, run }
}

fn says(cluster: &mut Cluster, from: usize, to: usize, message: PeerMessage) {
    let from = name(from);
    cluster.tell(to, Input::Message { from, message });
}

/// What is refused to who plans and opens a run there by this token.
fn refused(cluster: &mut Cluster, at: usize, job: &Namespace, token: &[u8]) -> Vec<Reply> {
    let conn = cluster.comes_by(at, job, token);
    let plan = cluster.ask(at, conn, plan_newest(5_000));
    cluster.disconnect(at, conn);
    let run = cluster.asks_for_run(at, job, token);
    let replies = [plan, run].into_iter();
    replies.filter(|reply| code(reply).is_some()).collect()
}

#[test]
fn one_liars_wish_for_a_run_keeps_no_owner_from_his_checkpoints() {
    for ((mut cluster, job), token) in [(forgotten(), TOKEN), (changed_and_forgotten(), NEW)] {
        for node in [6, 7, 8, 9] {
            says(&mut cluster, 11, node, promise(&job));
        }
        cluster.run_for(1_000);
        let refused = refused(&mut cluster, 0, &job, token);
        assert!(refused.is_empty(), "{refused:?}");
    }
}

#[test]
fn one_liars_wish_for_a_run_of_a_new_job_is_nobodys_claim_for_long() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    (0..5).for_each(|node| says(&mut cluster, 5, node, promise(&fresh())));
    cluster.run_for(61_000);
    let reply = cluster.asks_for_run(1, &fresh(), TOKEN);
    assert!(is_opened(&reply), "{reply:?}");
}

/// Eleven of thirty nodes know the job and pause while a stranger asks for a run of it, and his node dies before they are back.
#[test]
fn a_stranger_whose_node_dies_leaves_the_owner_his_job() {
    let mut cluster = Cluster::start_of(30, 4, 2, 10);
    cluster.save_as(DurableWish::Never);
    cluster.run_for(20_000);
    cluster.end_job();
    idle_since(&mut cluster);
    let (known, others): (Vec<usize>, Vec<usize>) =
        (0..30).partition(|node| knows(&cluster, *node, &namespace()));
    let stranger = cluster.comes_by(others[0], &namespace(), OTHER);
    cluster.send(others[0], stranger, OPEN);
    known.iter().for_each(|node| cluster.stop_process(*node));
    cluster.run_for(650);
    cluster.kill(others[0]);
    known
        .iter()
        .for_each(|node| cluster.continue_process(*node));
    cluster.run_for(1_000);
    for at in &known[..2] {
        let refused = refused(&mut cluster, *at, &namespace(), TOKEN);
        assert!(refused.is_empty(), "n{at}: {refused:?}");
    }
}

/// Somebody begins a job by the wrong token while one node pauses, and breaks off to take the right one.
#[test]
fn a_run_that_was_broken_off_claims_no_name_for_long() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    cluster.stop_process(5);
    let conn = cluster.comes_by(1, &fresh(), OTHER);
    cluster.send(1, conn, OPEN);
    cluster.run_for(2_000);
    cluster.disconnect(1, conn);
    cluster.continue_process(5);
    cluster.run_for(60_000);
    for node in [1, 2] {
        let reply = cluster.asks_for_run(node, &fresh(), TOKEN);
        assert!(is_opened(&reply), "n{node}: {reply:?}");
    }
}

/// A majority has promised by then; one node is silent.
#[test]
fn a_run_is_opened_in_less_time_than_a_silent_node_is_waited_for() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    cluster.stop_process(5);
    let conn = cluster.comes_by(1, &fresh(), TOKEN);
    let timeout_ms = 2_000;
    let reply = cluster.ask(1, conn, Request::OpenRun { timeout_ms });
    assert!(is_opened(&reply), "{reply:?}");
}

fn knows(cluster: &Cluster, node: usize, job: &Namespace) -> bool {
    let process = cluster.processes[node].as_ref().expect("it is up");
    let status = process.node.status_json(&Viewer::Operator);
    status.contains(&format!("\"{job}\""))
}

/// Half of the nodes are down when the owner's run has been promised by the others alone, for longer than a promise counts: these are asked
/// again meanwhile.
#[test]
fn a_run_that_is_waited_for_keeps_its_name() {
    let mut tried = 0;
    for after_ms in 1..60 {
        let mut cluster = Cluster::start(4, 2, 10);
        cluster.run_for(5_000);
        let conn = cluster.comes_by(1, &fresh(), TOKEN);
        let timeout_ms = 600_000;
        let id = cluster.send(1, conn, Request::OpenRun { timeout_ms });
        cluster.run_for(after_ms);
        [3, 4, 5].into_iter().for_each(|node| cluster.kill(node));
        cluster.run_for(1_000);
        let is_promised = knows(&cluster, 0, &fresh()) && cluster.answer(id).is_none();
        if !is_promised {
            continue;
        }
        tried += 1;
        cluster.run_for(150_000);
        // It pauses just when the others are back.
        cluster.stop_process(1);
        for node in [3, 4, 5] {
            cluster.start_after(50, node);
        }
        cluster.run_for(10_000);
        let strangers = cluster.asks_for_run(0, &fresh(), OTHER);
        assert!(!is_opened(&strangers), "{after_ms} ms: {strangers:?}");
    }
    assert!(tried > 0, "half of the nodes have promised");
}

#[test]
fn one_liar_keeps_no_tenant_from_new_jobs_by_names_that_it_makes_up() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    let fences = (0..300).map(|number| Fence {
        namespace: Namespace::new(format!("made-up-{number}")).unwrap(),
        owner: Owner::of_token(OTHER),
        run: RunId::new(1),
        promised: RunId::new(1),
    });
    for node in 0..5 {
        says(
            &mut cluster,
            5,
            node,
            PeerMessage::Fences(fences.clone().collect()),
        );
    }
    cluster.run_for(2_000);
    let reply = cluster.asks_for_run(1, &fresh(), TOKEN);
    assert!(is_opened(&reply), "{reply:?}");
}
