//! What one peer alone says: of a new job nobody's claim, whichever message it is in; of a forgotten one its owner's, as far as one word goes.

use storaged_core::{ConnId, Input};
use storaged_wire::failed::NamespaceFailures;
use storaged_wire::local::{BoardKind, Reply, Request, Role};
use storaged_wire::peer::{Fence, HighMark, NamedRun, NamespaceMark, PeerMessage};
use storaged_wire::pins::{NamespacePins, Pin};
use storaged_wire::{Generation, Namespace, Owner, Rank, RefusalCode, RunId, Step, WorldSize};

use super::{FORGETFUL, OPEN, STALL_MS, fresh, idle_since, says};
use crate::cluster::Cluster;
use crate::cluster::tokens::{NEW, OTHER, code, is_opened};
use crate::testkit::{Alone, TOKEN, hello_by, members, name, namespace, plan_newest, setup};

const LIAR: usize = 5;

fn liar() -> Owner {
    Owner::of_token(OTHER)
}

fn fences(job: &Namespace, run: u64) -> PeerMessage {
    PeerMessage::Fences(vec![Fence {
        namespace: job.clone(),
        owner: liar(),
        run: RunId::new(run),
        promised: RunId::new(run),
    }])
}

fn all_tell(cluster: &mut Cluster, messages: &[PeerMessage]) {
    for node in 0..LIAR {
        for message in messages {
            says(cluster, LIAR, node, message.clone());
        }
    }
    cluster.run_for(1_000);
}

fn all_open(cluster: &mut Cluster) {
    for node in 0..LIAR {
        let reply = cluster.asks_for_run(node, &fresh(), TOKEN);
        assert!(is_opened(&reply), "n{node}: {reply:?}");
    }
}

/// What one peer may say of a new job's owner.
fn words() -> [Vec<PeerMessage>; 4] {
    let mark = HighMark {
        run: RunId::new(1),
        step: Step::new(1),
    };
    let marks = PeerMessage::Marks(vec![NamespaceMark {
        namespace: fresh(),
        owner: liar(),
        mark,
    }]);
    let failures = PeerMessage::FailedRestarts(vec![NamespaceFailures {
        namespace: fresh(),
        owner: liar(),
        failed: Vec::new(),
    }]);
    let pin = Pin {
        run: mark.run,
        step: mark.step,
        pinned: false,
        changes: 1,
        doubt: None,
    };
    let of = NamespacePins {
        namespace: fresh(),
        owner: liar(),
        pins: vec![pin],
    };
    // Nine of what no sound node says: what it has said before counts no more, and is no claim of this node's either.
    let cannot_be = fences(&Namespace::new("x").unwrap(), u64::MAX >> 1);
    let mut found_out = vec![fences(&fresh(), 1)];
    found_out.extend(std::iter::repeat_n(cannot_be, 9));
    [
        vec![marks],
        vec![failures],
        vec![PeerMessage::Pins(None, of)],
        found_out,
    ]
}

#[test]
fn of_a_new_job_it_is_nobodys_claim() {
    for messages in words() {
        let mut cluster = Cluster::start(4, 2, 10);
        cluster.run_for(5_000);
        all_tell(&mut cluster, &messages);
        all_open(&mut cluster);
    }
}

fn board(bytes: u64) -> Request {
    Request::Board {
        rank: Rank::new(0),
        kind: BoardKind::Steps,
        bytes,
    }
}

#[test]
fn of_a_new_job_it_takes_no_boards_away() {
    for messages in words() {
        let mut cluster = Cluster::start(4, 2, 10);
        cluster.run_for(5_000);
        let conn = cluster.comes_by(1, &fresh(), TOKEN);
        let Reply::SlotGranted { slot, .. } = cluster.ask(1, conn, board(100)) else {
            panic!("no board");
        };
        all_tell(&mut cluster, &messages);
        let again = cluster.ask(1, conn, board(0));
        let is_same = matches!(again, Reply::SlotGranted { slot: same, .. } if same == slot);
        assert!(is_same, "{again:?} after {messages:?}");
        all_open(&mut cluster);
    }
}

#[test]
fn of_a_new_job_it_keeps_nobody_from_a_board() {
    for messages in words() {
        let mut cluster = Cluster::start(4, 2, 10);
        cluster.run_for(5_000);
        all_tell(&mut cluster, &messages);
        let conn = cluster.comes_by(1, &fresh(), TOKEN);
        let made = cluster.ask(1, conn, board(100));
        let is_made = matches!(made, Reply::SlotGranted { .. });
        assert!(is_made, "{made:?} after {messages:?}");
        all_open(&mut cluster);
        let again = cluster.ask(1, conn, board(0));
        assert!(matches!(again, Reply::SlotGranted { .. }), "{again:?}");
    }
}

#[test]
fn it_does_not_become_a_claim_by_a_restart() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.end_job();
    cluster.run_for(5_000);
    all_tell(&mut cluster, &[fences(&fresh(), 1)]);
    for node in 0..LIAR {
        cluster.end_daemon(node);
        cluster.start_after(100, node);
        cluster.run_for(15_000);
    }
    cluster.run_for(40_000);
    all_open(&mut cluster);
}

/// Of three nodes two have lost their memory at once: the third one's word lets the owner's trainer in.
#[test]
fn a_strangers_trainer_is_not_let_in_by_it() {
    let mut cluster = Cluster::start(2, 1, 10);
    cluster.end_job();
    cluster.run_for(5_000);
    for node in [0, 1] {
        cluster.kill(node);
        cluster.start_after(100, node);
    }
    cluster.run_for(60_000);
    let role = Role::Trainer {
        run: cluster.run(),
        rank: Rank::new(0),
        world_size: WorldSize::new(2).unwrap(),
    };
    let mut comes = |token| {
        let conn = cluster.fresh_conn();
        cluster.ask(0, conn, hello_by(namespace(), token, role.clone()))
    };
    let stranger = comes(OTHER);
    assert_eq!(
        code(&stranger),
        Some(RefusalCode::WrongToken),
        "{stranger:?}"
    );
    let owner = comes(TOKEN);
    assert!(matches!(owner, Reply::Welcome { .. }), "{owner:?}");
}

/// Nodes of twelve that have a board of a job remember it; the others have forgotten it.
fn remembered_at(nodes: &[usize], by: &[u8], cluster: &mut Cluster) {
    for node in nodes {
        let conn = cluster.comes_by(*node, &fresh(), by);
        let made = cluster.ask(*node, conn, board(100));
        assert!(matches!(made, Reply::SlotGranted { .. }), "{made:?}");
        cluster.disconnect(*node, conn);
    }
    cluster.end_job();
    idle_since(cluster);
}

fn opened_among_twelve() -> Cluster {
    let mut cluster = Cluster::start_of(12, 4, 2, 10);
    let opened = cluster.asks_for_run(0, &fresh(), TOKEN);
    assert!(is_opened(&opened), "{opened:?}");
    cluster
}

/// That its token was changed the token itself proves, whoever says so.
#[test]
fn it_is_enough_to_keep_a_retired_token_out() {
    let mut cluster = opened_among_twelve();
    cluster.rotate(0, &fresh());
    remembered_at(&[0], NEW, &mut cluster);
    let retired = cluster.asks_for_run(FORGETFUL, &fresh(), TOKEN);
    assert_eq!(code(&retired), Some(RefusalCode::WrongToken), "{retired:?}");
    let newest = cluster.asks_for_run(FORGETFUL, &fresh(), NEW);
    assert!(is_opened(&newest), "{newest:?}");
}

/// The stranger may still have it mapped.
#[test]
fn the_owner_gets_no_board_of_a_strangers_when_the_name_is_his_again() {
    let mut cluster = opened_among_twelve();
    remembered_at(&[0, 1], TOKEN, &mut cluster);
    let stranger = cluster.comes_by(FORGETFUL, &fresh(), OTHER);
    [0, 1].iter().for_each(|node| cluster.stop_process(*node));
    let made = cluster.ask(FORGETFUL, stranger, board(100));
    let Reply::SlotGranted { slot: theirs, .. } = made else {
        panic!("{made:?}");
    };
    let id = cluster.send(FORGETFUL, stranger, OPEN);
    cluster.run_for(STALL_MS);
    [0, 1]
        .iter()
        .for_each(|node| cluster.continue_process(*node));
    cluster.run_until_answered(&[id]);
    cluster.run_for(10_000);
    let owner = cluster.comes_by(FORGETFUL, &fresh(), TOKEN);
    let got = cluster.ask(FORGETFUL, owner, board(0));
    let is_theirs = matches!(&got, Reply::SlotGranted { slot, .. } if *slot == theirs);
    assert!(!is_theirs, "{got:?}");
}

#[test]
fn a_request_that_waits_for_it_ends_in_its_time() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.run_for(5_000);
    cluster.scene.unheard.insert(5);
    let conn = cluster.comes_by(1, &fresh(), TOKEN);
    let id = cluster.send(1, conn, plan_newest(100));
    cluster.run_for(200);
    assert!(cluster.answer(id).is_some());
}

/// A node whose five peers are up, with these connections of readers.
pub fn among_five(readers: u64) -> Alone {
    let mut alone = Alone::new(setup(name(0), members(6)));
    for peer in 1..6 {
        let generation = Generation::new(7);
        let node = name(peer);
        alone.handle(Input::PeerUp { node, generation });
    }
    alone.now = 60_000;
    alone.handle(Input::Tick);
    for conn in (1..=readers).map(ConnId) {
        let reply = alone.greet(conn, hello_by(fresh(), TOKEN, Role::Reader));
        assert!(matches!(reply, Some(Reply::Welcome { .. })), "{reply:?}");
    }
    alone
}

/// One of them is silent, so that all requests wait at once.
#[test]
fn each_request_asks_each_peer_once() {
    const REQUESTS: u64 = 200;
    let mut alone = among_five(REQUESTS);
    let mut asked = 0;
    for conn in (1..=REQUESTS).map(ConnId) {
        let wanted = alone.ask(conn, plan_newest(5_000));
        let questions = wanted.sent().filter_map(|(to, message)| match message {
            PeerMessage::RunQuery { query, .. } => Some((to.clone(), *query)),
            _ => None,
        });
        let questions: Vec<_> = questions.collect();
        asked += questions.len();
        for (from, query) in questions {
            if from != name(LIAR) {
                alone.hear(&from, PeerMessage::RunAnswer { query, fence: None });
            }
        }
        alone.now += 2;
    }
    assert_eq!(asked, 5 * REQUESTS as usize);
}

#[test]
fn a_request_that_waits_is_answered_once_and_goes_with_its_client() {
    for leaves in [false, true] {
        let mut alone = among_five(1);
        let conn = ConnId(1);
        let mut replies = usize::from(alone.ask(conn, plan_newest(1_000)).reply().is_some());
        if leaves {
            alone.handle(Input::Disconnected { conn });
        }
        for _ in 0..200 {
            alone.now += 50;
            let wanted = alone.handle(Input::Tick);
            replies += usize::from(wanted.reply().is_some());
            let mut sent = wanted.sent();
            let asks = sent.any(|(_, it)| matches!(it, PeerMessage::RunQuery { .. }));
            assert!(
                !leaves || !asks,
                "it is asked for without anybody who waits"
            );
        }
        assert_eq!(replies, usize::from(!leaves));
    }
}

/// Said without end, of a job that was promised to somebody else.
#[test]
fn it_has_few_questions_asked() {
    let mut alone = among_five(0);
    let run = NamedRun {
        namespace: fresh(),
        owner: Owner::of_token(TOKEN),
        run: RunId::with_identity(3, 77),
    };
    alone.hear(&name(1), PeerMessage::PromiseRun { query: 1, run });
    let mut asked = 0;
    for _ in 0..3_000 {
        alone.now += 1;
        let wanted = alone.hear(&name(LIAR), fences(&fresh(), 1));
        asked += wanted.sent().count();
    }
    assert!(asked <= 10, "{asked}");
}
