//! Somebody has wanted a run of a job and opened none: by another token, by one peer's lie, from a node that died. The job is its owner's at once
//! where anybody knows of its runs.

use storaged_core::Viewer;
use storaged_wire::local::{DurableWish, Reply, Request};
use storaged_wire::peer::{Fence, NamedRun, PeerMessage};
use storaged_wire::{Namespace, Owner, RefusalCode, RunId};

use super::{OPEN, changed_and_forgotten, forgotten, fresh, idle_since, says};
use crate::cluster::Cluster;
use crate::cluster::tokens::{NEW, OTHER, code, is_opened};
use crate::testkit::{TOKEN, namespace, plan_newest};

fn promise(job: &Namespace) -> PeerMessage {
    let run = NamedRun {
        namespace: job.clone(),
        owner: Owner::of_token(OTHER),
        run: RunId::with_identity(900, 7),
    };
    PeerMessage::PromiseRun { query: 1, run }
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

/// A majority has promised while one node is silent; the links of who asked end before it goes on without that one.
#[test]
fn who_is_cut_off_opens_no_run_on_what_was_promised_before() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    cluster.stop_process(5);
    let conn = cluster.comes_by(1, &fresh(), TOKEN);
    let id = cluster.send(1, conn, OPEN);
    cluster.run_for(1_000);
    for other in [0, 2, 3, 4, 5] {
        for (from, to) in [(1, other), (other, 1)] {
            cluster.link_of(from, to).cut_until = u64::MAX;
            cluster.part(from, to);
        }
    }
    cluster.run_until_answered(&[id]);
    let alone = cluster.answer(id).expect("an answer");
    assert_eq!(code(alone), Some(RefusalCode::TimedOut), "{alone:?}");
}

/// Those that had promised a stranger say so to the owner, and die before they hear that it is his.
#[test]
fn an_owner_is_told_that_nodes_are_down_and_not_that_he_is_a_stranger() {
    let (mut cluster, job) = forgotten();
    for node in [6, 7, 8, 9] {
        says(&mut cluster, 11, node, promise(&job));
    }
    let conn = cluster.comes_by(0, &job, TOKEN);
    [2, 3, 4, 5, 11]
        .into_iter()
        .for_each(|node| cluster.kill(node));
    cluster.run_for(5_000);
    let id = cluster.send(0, conn, OPEN);
    cluster.run_for(2);
    [6, 7, 8, 9].into_iter().for_each(|node| cluster.kill(node));
    cluster.run_until_answered(&[id]);
    let answer = cluster.answer(id).expect("an answer");
    assert_eq!(code(answer), Some(RefusalCode::TimedOut), "{answer:?}");
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
