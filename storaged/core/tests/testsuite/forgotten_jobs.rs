//! A job that was idle for so long that nodes which hold nothing of it have forgotten it. Whoever comes to such a node hears what peers know,
//! though they pause, links stall and one peer lies: its newest token opens the job everywhere, and nobody else's does.

mod in_time;
mod one_word;
mod only_promised;
mod promises;
mod withdrawn;

use crate::cluster::Cluster;
use crate::cluster::tokens::{NEW, OTHER, code, is_opened};
use crate::testkit::{TOKEN, hello_by, name, namespace, plan_newest};
use storaged_core::{ConnId, Input, Viewer};
use storaged_wire::local::{BoardKind, DurableWish, Reply, Request, Role};
use storaged_wire::peer::{Fence, PeerMessage};
use storaged_wire::{Namespace, Owner, Rank, RefusalCode, RunId, WorldSize};

/// Of twelve nodes those that know the job: with shards, with parity, and the home nodes.
const WHO_KNOW: [usize; 7] = [0, 1, 2, 3, 4, 5, 10];
/// A node that has forgotten it.
const FORGETFUL: usize = 11;
/// Longer than a silent peer is waited for.
const STALL_MS: u64 = 700;
const OPEN: Request = Request::OpenRun { timeout_ms: 20_000 };

/// A job that nobody has used yet.
fn fresh() -> Namespace {
    Namespace::new("fresh").unwrap()
}

fn says(cluster: &mut Cluster, from: usize, to: usize, message: PeerMessage) {
    let from = name(from);
    cluster.tell(to, Input::Message { from, message });
}

fn idle_since(cluster: &mut Cluster) {
    cluster.run_for(3_800_000);
}

/// A job that has ended, of which everybody knows yet.
fn ended(nodes: usize) -> (Cluster, Namespace) {
    let mut cluster = Cluster::start_of(nodes, 4, 2, 10);
    cluster.save_as(DurableWish::Never);
    cluster.run_for(20_000);
    cluster.end_job();
    (cluster, namespace())
}

/// The same after an hour, its token unchanged.
fn forgotten() -> (Cluster, Namespace) {
    let (mut cluster, job) = ended(12);
    idle_since(&mut cluster);
    (cluster, job)
}

/// The same with another token.
fn changed_and_forgotten() -> (Cluster, Namespace) {
    let (mut cluster, job) = ended(12);
    cluster.rotate(0, &job);
    idle_since(&mut cluster);
    (cluster, job)
}

/// Nodes at which a token does not open the job, two minutes later.
fn shut_to(cluster: &mut Cluster, job: &Namespace, token: &[u8]) -> Vec<usize> {
    cluster.run_for(120_000);
    let nodes = 0..cluster.processes.len();
    let shut = nodes.filter(|node| !is_opened(&cluster.asks_for_run(*node, job, token)));
    shut.collect()
}

fn answer_to(cluster: &mut Cluster, conn: ConnId, meanwhile: impl FnOnce(&mut Cluster)) -> Reply {
    let id = cluster.send(FORGETFUL, conn, OPEN);
    meanwhile(cluster);
    cluster.run_until_answered(&[id]);
    cluster.answer(id).expect("an answer").clone()
}

/// While somebody asks for a run, these nodes pause for longer than they are waited for.
fn asks_in_a_pause(cluster: &mut Cluster, conn: ConnId, paused: &[usize]) -> Reply {
    let reply = answer_to(cluster, conn, |cluster| {
        paused.iter().for_each(|node| cluster.stop_process(*node));
        cluster.run_for(STALL_MS);
        paused
            .iter()
            .for_each(|node| cluster.continue_process(*node));
    });
    cluster.disconnect(FORGETFUL, conn);
    reply
}

fn trainer_of(run: RunId) -> Role {
    Role::Trainer {
        run,
        rank: Rank::new(1),
        world_size: WorldSize::new(4).unwrap(),
    }
}

/// Peers that know the job say of the change when they are asked for its run, and not only when a link comes up.
#[test]
fn a_retired_token_gets_into_no_run_where_the_job_was_forgotten() {
    let (mut cluster, job) = changed_and_forgotten();
    let run = cluster.run();
    let mut trainer_comes = |node, token| {
        let conn = cluster.fresh_conn();
        let reply = cluster.ask(node, conn, hello_by(job.clone(), token, trainer_of(run)));
        cluster.disconnect(node, conn);
        reply
    };
    for node in [11, 9, 8, 7, 6, 5, 4] {
        let retired = trainer_comes(node, TOKEN);
        let code = code(&retired);
        assert_eq!(code, Some(RefusalCode::WrongToken), "n{node}: {retired:?}");
    }
    let newest = trainer_comes(10, NEW);
    assert!(matches!(newest, Reply::Welcome { .. }), "{newest:?}");
}

/// Promised in the name of who asks, the job would be another one's at that node from then on.
#[test]
fn the_newest_token_opens_runs_where_the_job_was_forgotten() {
    let (mut cluster, job) = changed_and_forgotten();
    for node in [11, 10, 9, 8, 7, 6, 5, 4, 0] {
        let reply = cluster.asks_for_run(node, &job, NEW);
        assert!(is_opened(&reply), "n{node}: {reply:?}");
    }
}

/// It came while the job was known there.
#[test]
fn a_retired_token_that_stays_connected_opens_and_reads_nothing() {
    for node in [FORGETFUL, 0] {
        let (mut cluster, job) = ended(12);
        let conn = cluster.comes_by(node, &job, TOKEN);
        cluster.rotate(0, &job);
        idle_since(&mut cluster);
        for request in [plan_newest(5_000), OPEN] {
            let reply = cluster.ask(node, conn, request);
            let code = code(&reply);
            assert_eq!(code, Some(RefusalCode::WrongToken), "n{node}: {reply:?}");
        }
    }
}

#[test]
fn the_newest_token_alone_reads_where_the_job_was_forgotten() {
    for (token, reads) in [(NEW, true), (TOKEN, false), (OTHER, false)] {
        let (mut cluster, job) = changed_and_forgotten();
        let conn = cluster.comes_by(FORGETFUL, &job, token);
        let reply = cluster.ask(FORGETFUL, conn, plan_newest(5_000));
        assert_eq!(matches!(reply, Reply::Plan(_)), reads, "{reply:?}");
    }
}

#[test]
fn a_board_of_the_newest_token_stays_when_peers_tell_of_the_job() {
    let (mut cluster, job) = changed_and_forgotten();
    let board = |bytes| Request::Board {
        rank: Rank::new(0),
        kind: BoardKind::Steps,
        bytes,
    };
    let conn = cluster.comes_by(FORGETFUL, &job, NEW);
    let made = cluster.ask(FORGETFUL, conn, board(1));
    let Reply::SlotGranted { slot, .. } = made else {
        panic!("{made:?}");
    };
    let opened = cluster.ask(FORGETFUL, conn, OPEN);
    assert!(is_opened(&opened), "{opened:?}");
    let again = cluster.ask(FORGETFUL, conn, board(0));
    let is_same = matches!(again, Reply::SlotGranted { slot: same, .. } if same == slot);
    assert!(is_same, "{again:?}");
}

/// Its owner is then asked in the name of the other job.
#[test]
fn a_hello_for_another_job_meanwhile_opens_no_run_by_a_retired_token() {
    let (mut cluster, job) = changed_and_forgotten();
    let conn = cluster.comes_by(FORGETFUL, &job, TOKEN);
    let reply = answer_to(&mut cluster, conn, |cluster| {
        let elsewhere = Namespace::new("elsewhere").unwrap();
        cluster.send(FORGETFUL, conn, hello_by(elsewhere, TOKEN, Role::Reader));
    });
    assert!(!is_opened(&reply), "{reply:?}");
}

/// Whoever knows the job pauses while somebody wants to open it: what the others have promised is nobody's claim.
#[test]
fn a_pause_of_those_who_know_the_job_costs_its_owner_nothing() {
    for (asker, opens) in [(NEW, true), (OTHER, false)] {
        let (mut cluster, job) = changed_and_forgotten();
        let conn = cluster.comes_by(FORGETFUL, &job, asker);
        let reply = asks_in_a_pause(&mut cluster, conn, &WHO_KNOW);
        assert_eq!(is_opened(&reply), opens, "{reply:?}");
        assert_eq!(shut_to(&mut cluster, &job, NEW), [0; 0], "after {reply:?}");
    }
    let (mut cluster, job) = forgotten();
    let conn = cluster.comes_by(FORGETFUL, &job, OTHER);
    let reply = asks_in_a_pause(&mut cluster, conn, &WHO_KNOW);
    assert_eq!(
        shut_to(&mut cluster, &job, TOKEN),
        [0; 0],
        "after {reply:?}"
    );
}

/// Half of the nodes have forgotten it, and those that know it fall silent.
#[test]
fn a_pause_of_half_of_the_nodes_costs_its_owner_nothing() {
    let (mut cluster, job) = ended(24);
    cluster.rotate(0, &job);
    idle_since(&mut cluster);
    let conn = cluster.comes_by(FORGETFUL, &job, NEW);
    let paused = [0, 1, 2, 3, 10, 12, 13, 14, 15, 16, 17, 18];
    let reply = asks_in_a_pause(&mut cluster, conn, &paused);
    assert_eq!(shut_to(&mut cluster, &job, NEW), [0; 0], "after {reply:?}");
}

/// Nothing is lost, and no link goes down; all that is said from and to the node comes late.
#[test]
fn a_stall_of_one_nodes_links_costs_the_owner_nothing() {
    for (asker, opens) in [(NEW, true), (OTHER, false)] {
        let (mut cluster, job) = changed_and_forgotten();
        let conn = cluster.comes_by(FORGETFUL, &job, asker);
        let until = cluster.now + STALL_MS;
        for other in 0..FORGETFUL {
            cluster.link_of(FORGETFUL, other).cut_until = until;
            cluster.link_of(other, FORGETFUL).cut_until = until;
        }
        let reply = answer_to(&mut cluster, conn, |_| ());
        cluster.disconnect(FORGETFUL, conn);
        assert_eq!(is_opened(&reply), opens, "{reply:?}");
        assert_eq!(shut_to(&mut cluster, &job, NEW), [0; 0], "after {reply:?}");
    }
}

/// Those who know nothing are nearer: their answers are the first that it finds when it goes on.
#[test]
fn a_pause_of_the_node_that_is_asked_costs_the_owner_nothing() {
    let (mut cluster, job) = changed_and_forgotten();
    let conn = cluster.comes_by(FORGETFUL, &job, NEW);
    let near = cluster.now + 5;
    for other in WHO_KNOW {
        cluster.link_of(other, FORGETFUL).cut_until = near;
    }
    let reply = asks_in_a_pause(&mut cluster, conn, &[FORGETFUL]);
    assert!(is_opened(&reply), "{reply:?}");
    assert_eq!(shut_to(&mut cluster, &job, NEW), [0; 0]);
}

/// A node says that a job is somebody else's, as soon as it is asked for it or before.
fn lies(cluster: &mut Cluster, liar: usize, to: usize, job: &Namespace) {
    let fence = Fence {
        namespace: job.clone(),
        owner: Owner::of_token(OTHER),
        run: RunId::new(1),
        promised: RunId::new(1),
    };
    let message = PeerMessage::Fences(vec![fence]);
    let from = name(liar);
    cluster.tell(to, Input::Message { from, message });
}

#[test]
fn one_liar_keeps_no_forgotten_job_from_its_owner() {
    let (mut cluster, job) = forgotten();
    let conn = cluster.comes_by(FORGETFUL, &job, TOKEN);
    let reply = answer_to(&mut cluster, conn, |cluster| {
        lies(cluster, 10, FORGETFUL, &job);
    });
    assert!(is_opened(&reply), "{reply:?}");
}

/// Nor does what it has said go on as others' word.
#[test]
fn one_liar_keeps_no_new_job_from_its_run() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    let job = Namespace::new("fresh").unwrap();
    for node in 0..5 {
        lies(&mut cluster, 5, node, &job);
    }
    cluster.run_for(1_000);
    let before: Vec<Reply> = (0..5)
        .map(|node| cluster.asks_for_run(node, &job, TOKEN))
        .collect();
    assert!(before.iter().all(is_opened), "{before:#?}");
    let conn = cluster.comes_by(1, &Namespace::new("another").unwrap(), TOKEN);
    let id = cluster.send(1, conn, OPEN);
    lies(&mut cluster, 5, 1, &Namespace::new("another").unwrap());
    cluster.run_until_answered(&[id]);
    let reply = cluster.answer(id).expect("an answer");
    assert!(is_opened(reply), "while it is asked for: {reply:?}");
}

/// Each time that it comes it is asked anew, and answers nothing.
#[test]
fn a_silent_peer_whose_link_comes_and_goes_keeps_no_job_from_its_run() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    let job = Namespace::new("fresh").unwrap();
    let conn = cluster.comes_by(1, &job, TOKEN);
    cluster.scene.unheard.insert(5);
    let id = cluster.send(1, conn, OPEN);
    while cluster.answer(id).is_none() {
        cluster.run_for(400);
        cluster.part(1, 5);
        cluster.join(1, 5);
    }
    let reply = cluster.answer(id).expect("an answer");
    assert!(is_opened(reply), "{reply:?}");
}

/// He reads all jobs; a run ends the trainers of the one before.
#[test]
fn an_operator_opens_no_run_without_the_jobs_token() {
    for node in [FORGETFUL, 0] {
        let (mut cluster, job) = forgotten();
        let conn = cluster.fresh_conn();
        let viewer = Viewer::Operator;
        cluster.tell(node, Input::Connected { conn, viewer });
        cluster.ask(node, conn, hello_by(job.clone(), OTHER, Role::Reader));
        let reply = cluster.ask(node, conn, OPEN);
        let code = code(&reply);
        assert_eq!(code, Some(RefusalCode::WrongToken), "n{node}: {reply:?}");
    }
}
