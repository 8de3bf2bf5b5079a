//! Boards: what a trainer writes there stays when it dies, for whoever comes next, and goes with its job.

use crate::cluster::Cluster;
use crate::cluster::tokens::code;
use crate::testkit::{TOKEN, hello_by};
use storaged_core::{ConnId, Input, Viewer};
use storaged_wire::local::{BoardKind, Reply, Request, Role};
use storaged_wire::{
    CheckpointState, Namespace, Rank, RefusalCode, RunId, SlotId, Step, WorldSize,
};

const BYTES: u64 = 3 << 20;

fn board(cluster: &mut Cluster, conn: ConnId, rank: u32, kind: BoardKind, bytes: u64) -> Reply {
    let rank = Rank::new(rank);
    cluster.ask(0, conn, Request::Board { rank, kind, bytes })
}

fn granted(reply: &Reply) -> (SlotId, u64) {
    match reply {
        Reply::SlotGranted {
            slot,
            capacity,
            descriptor,
        } if *descriptor => (*slot, *capacity),
        other => panic!("no board: {other:?}"),
    }
}

#[test]
fn a_board_outlives_its_writer_and_is_one_per_rank_and_kind() {
    let mut cluster = Cluster::start(4, 2, 10);
    let first = cluster.connect(0, Role::Reader);
    let (slot, capacity) = granted(&board(&mut cluster, first, 0, BoardKind::Batches, BYTES));
    assert_eq!(capacity, 4 << 20);
    cluster.disconnect(0, first);
    let second = cluster.connect(0, Role::Reader);
    let again = board(&mut cluster, second, 0, BoardKind::Batches, BYTES);
    assert_eq!(granted(&again), (slot, capacity));
    // Without a size it is the one that is there, or none.
    let there = board(&mut cluster, second, 0, BoardKind::Batches, 0);
    assert_eq!(granted(&there), (slot, capacity));
    let none = board(&mut cluster, second, 0, BoardKind::Steps, 0);
    assert!(
        matches!(&none, Reply::Refused(refusal) if refusal.code == RefusalCode::NoCheckpoint),
        "{none:?}"
    );
    let (other, _) = granted(&board(&mut cluster, second, 0, BoardKind::Steps, 1));
    let (of_next, _) = granted(&board(&mut cluster, second, 1, BoardKind::Batches, BYTES));
    assert!(other != slot && of_next != slot && of_next != other);
}

#[test]
fn a_larger_board_takes_the_place_of_a_smaller_one_and_gives_its_room_back() {
    let mut cluster = Cluster::start(4, 2, 10);
    let used = cluster.ledger(0).used;
    let conn = cluster.connect(0, Role::Reader);
    let (small, _) = granted(&board(&mut cluster, conn, 0, BoardKind::Batches, BYTES));
    let (large, capacity) = granted(&board(&mut cluster, conn, 0, BoardKind::Batches, 2 * BYTES));
    assert_ne!(small, large);
    assert_eq!(cluster.ledger(0).used, used + capacity);
    let total = cluster.ledger(0).total;
    let refused = board(&mut cluster, conn, 0, BoardKind::Batches, total + 1);
    assert!(matches!(refused, Reply::Refused(refusal) if refusal.code == RefusalCode::BudgetFull));
    let there = board(&mut cluster, conn, 0, BoardKind::Batches, 0);
    assert_eq!(
        granted(&there),
        (large, capacity),
        "a refusal takes nothing away"
    );
}

/// A rank has three slots to save in, and its boards are none of them.
#[test]
fn boards_do_not_count_against_the_slots_of_their_rank_and_saves_leave_them_alone() {
    let mut cluster = Cluster::start(4, 2, 10);
    let conn = cluster.connect(0, Role::Reader);
    let made = [BoardKind::Steps, BoardKind::Batches]
        .map(|kind| granted(&board(&mut cluster, conn, 0, kind, BYTES)));
    for _ in 0..6 {
        cluster.save_and_wait(storaged_wire::local::DurableWish::Never);
    }
    let there = [BoardKind::Steps, BoardKind::Batches]
        .map(|kind| granted(&board(&mut cluster, conn, 0, kind, 0)));
    assert_eq!(made, there);
}

#[test]
fn boards_go_when_their_job_is_dropped() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(storaged_wire::local::DurableWish::Never);
    let conn = cluster.connect(0, Role::Reader);
    granted(&board(&mut cluster, conn, 0, BoardKind::Batches, BYTES));
    cluster.end_job();
    cluster.run_for(2_000);
    let (force, timeout_ms) = (false, 5_000);
    let reply = cluster.ask(0, conn, Request::Drop { force, timeout_ms });
    assert!(matches!(reply, Reply::Dropped(_)), "{reply:?}");
    cluster.run_for(2_000);
    assert_eq!(cluster.ledger(0).used, 0);
    let none = board(&mut cluster, conn, 0, BoardKind::Batches, 0);
    assert!(matches!(none, Reply::Refused(_)), "{none:?}");
}

const OTHER: &[u8] = b"the token of somebody else";

/// A reader of the job that says another token than its owner.
fn stranger(cluster: &mut Cluster, job: &str) -> (ConnId, Reply) {
    let conn = cluster.fresh_conn();
    let reply = cluster.ask(0, conn, hello(job, OTHER, Role::Reader));
    (conn, reply)
}

/// Nobody has asked the durable tier whose the name is, which opening a run does.
#[test]
fn a_board_claims_no_name_and_goes_when_the_owner_of_its_job_comes() {
    let mut cluster = Cluster::start(4, 2, 10);
    let (thief, welcome) = stranger(&mut cluster, "fresh");
    assert!(matches!(welcome, Reply::Welcome { .. }), "{welcome:?}");
    let used = cluster.ledger(0).used;
    granted(&board(&mut cluster, thief, 0, BoardKind::Steps, BYTES));
    cluster.begin_job("fresh");
    assert_eq!(cluster.ledger(0).used, used, "what was the other one's");
    let owner = cluster.connect(0, Role::Reader);
    granted(&board(&mut cluster, owner, 0, BoardKind::Steps, BYTES));
    // Neither by the connection from before nor by a new one.
    for bytes in [0, BYTES, 2 * BYTES] {
        let reply = board(&mut cluster, thief, 0, BoardKind::Steps, bytes);
        assert_eq!(code(&reply), Some(RefusalCode::WrongToken), "{reply:?}");
    }
    let (_, refused) = stranger(&mut cluster, "fresh");
    assert_eq!(code(&refused), Some(RefusalCode::WrongToken));
}

/// Who said hello before anybody had opened the job may ask for nothing of it after that.
#[test]
fn whoever_came_before_the_owner_asks_for_nothing_of_the_job() {
    let mut cluster = Cluster::start(4, 2, 10);
    let (thief, _) = stranger(&mut cluster, "fresh");
    cluster.begin_job("fresh");
    cluster.save_and_wait(storaged_wire::local::DurableWish::Never);
    let run = cluster.run();
    let wait = Request::Wait {
        run,
        step: Step::new(1),
        state: CheckpointState::Committed,
        timeout_ms: 1_000,
    };
    let plan = Request::Plan {
        step: None,
        timeout_ms: 1_000,
        allow_older: false,
    };
    for request in [wait, plan, Request::OpenRun { timeout_ms: 1_000 }] {
        let reply = cluster.ask(0, thief, request);
        assert_eq!(code(&reply), Some(RefusalCode::WrongToken), "{reply:?}");
    }
}

#[test]
fn boards_of_a_job_that_nobody_has_opened_are_the_later_tokens() {
    let mut cluster = Cluster::start(4, 2, 10);
    let (other, _) = stranger(&mut cluster, "fresh");
    cluster.ask_of("fresh");
    let own = cluster.connect(0, Role::Reader);
    let (first, _) = granted(&board(&mut cluster, other, 0, BoardKind::Steps, BYTES));
    let none = board(&mut cluster, own, 0, BoardKind::Steps, 0);
    assert_eq!(code(&none), Some(RefusalCode::NoCheckpoint), "{none:?}");
    let (second, _) = granted(&board(&mut cluster, own, 0, BoardKind::Steps, BYTES));
    assert_ne!(first, second);
    let none = board(&mut cluster, other, 0, BoardKind::Steps, 0);
    assert_eq!(code(&none), Some(RefusalCode::NoCheckpoint), "{none:?}");
    // It stays the job's when its run is opened.
    cluster.begin_job("fresh");
    let again = board(&mut cluster, own, 0, BoardKind::Steps, 0);
    assert_eq!(granted(&again).0, second);
}

fn hello(job: &str, token: &[u8], role: Role) -> Request {
    hello_by(Namespace::new(job).unwrap(), token, role)
}

fn trainer_of(run: RunId, world: u32) -> Role {
    Role::Trainer {
        run,
        rank: Rank::new(0),
        world_size: WorldSize::new(world).unwrap(),
    }
}

/// Peers are asked whose a job is that a node does not know, by its owner and by whoever makes up a run of it.
#[test]
fn a_board_claims_no_name_at_peers() {
    let mut cluster = Cluster::start(4, 2, 10);
    let (thief, _) = stranger(&mut cluster, "fresh");
    granted(&board(&mut cluster, thief, 0, BoardKind::Steps, BYTES));
    for node in 0..6 {
        let conn = cluster.fresh_conn();
        let made_up = hello("fresh", OTHER, trainer_of(RunId::new(77), 1));
        let reply = cluster.ask(node, conn, made_up);
        assert_eq!(code(&reply), Some(RefusalCode::UnknownRun), "n{node}");
    }
    cluster.kill(1);
    cluster.run_for(4_000);
    cluster.start_after(0, 1);
    cluster.run_for(1);
    for node in [1, 0, 2, 3, 4, 5] {
        let conn = cluster.fresh_conn();
        let reply = cluster.ask(node, conn, hello("fresh", TOKEN, Role::Reader));
        assert!(matches!(reply, Reply::Welcome { .. }), "n{node}: {reply:?}");
    }
    cluster.begin_job("fresh");
}

#[test]
fn a_board_that_is_refused_takes_no_other_away() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.ask_of("fresh");
    let own = cluster.connect(0, Role::Reader);
    let made = granted(&board(&mut cluster, own, 0, BoardKind::Steps, BYTES));
    let (thief, _) = stranger(&mut cluster, "fresh");
    let refused = board(&mut cluster, thief, 0, BoardKind::Steps, 1 << 60);
    assert_eq!(code(&refused), Some(RefusalCode::BudgetFull));
    let there = board(&mut cluster, own, 0, BoardKind::Steps, 0);
    assert_eq!(granted(&there), made);
}

#[test]
fn a_board_whose_asker_has_gone_is_nobodys() {
    let mut cluster = Cluster::start(4, 2, 10);
    let used = cluster.ledger(0).used;
    let (thief, _) = stranger(&mut cluster, "fresh");
    let wish = Request::Board {
        rank: Rank::new(0),
        kind: BoardKind::Steps,
        bytes: 64 << 20,
    };
    cluster.send(0, thief, wish);
    cluster.disconnect(0, thief);
    cluster.begin_job("fresh");
    cluster.run_for(2_000);
    assert_eq!(cluster.ledger(0).used, used);
    let own = cluster.connect(0, Role::Reader);
    let none = board(&mut cluster, own, 0, BoardKind::Steps, 0);
    assert_eq!(code(&none), Some(RefusalCode::NoCheckpoint), "{none:?}");
}

/// No job can be opened while too many are new.
#[test]
fn boards_that_are_refused_leave_no_names() {
    let mut cluster = Cluster::start(4, 2, 10);
    let jobs = cluster.ledger(0).jobs;
    for at in 0..300 {
        let (conn, _) = stranger(&mut cluster, &format!("name{at}"));
        board(&mut cluster, conn, 0, BoardKind::Steps, 1 << 60);
        cluster.disconnect(0, conn);
    }
    assert_eq!(cluster.ledger(0).jobs, jobs);
    cluster.begin_job("fresh");
}

/// Its node has heard of no run and no owner when it says hello.
#[test]
fn a_trainer_that_has_waited_for_its_run_is_asked_whose_the_job_is() {
    let mut cluster = Cluster::start(4, 2, 10);
    let others = [0, 2, 3, 4, 5];
    let until = cluster.now + 20_000;
    for other in others {
        for (from, to) in [(1, other), (other, 1)] {
            cluster.part(from, to);
            cluster.link_of(from, to).cut_until = until;
        }
    }
    cluster.ask_of("fresh");
    let reader = cluster.connect(0, Role::Reader);
    let opened = cluster.ask(0, reader, Request::OpenRun { timeout_ms: 10_000 });
    let Reply::RunOpened { run } = opened else {
        panic!("no run: {opened:?}");
    };
    cluster.run_for(14_000);
    // `storaged status` has told of the run.
    let conn = cluster.fresh_conn();
    let id = cluster.send(1, conn, hello("fresh", OTHER, trainer_of(run, 7)));
    cluster.run_for(1_000);
    assert!(cluster.answer(id).is_none(), "it waits");
    for other in others {
        for (from, to) in [(1, other), (other, 1)] {
            cluster.link_of(from, to).cut_until = 0;
            cluster.join(from, to);
        }
    }
    cluster.run_for(1_500);
    let refused = cluster.answer(id).expect("an answer");
    assert_eq!(code(refused), Some(RefusalCode::WrongToken), "{refused:?}");
    let conn = cluster.fresh_conn();
    let own = cluster.ask(1, conn, hello("fresh", TOKEN, trainer_of(run, 4)));
    assert!(matches!(own, Reply::Welcome { .. }), "{own:?}");
}

/// As many as there may be.
fn with_boards_of_names_that_nobody_opens() -> Cluster {
    let mut cluster = Cluster::start(4, 2, 10);
    for at in 0..256 {
        let (conn, _) = stranger(&mut cluster, &format!("name{at}"));
        board(&mut cluster, conn, 0, BoardKind::Steps, 1);
        cluster.disconnect(0, conn);
    }
    cluster
}

/// Of all tenants' jobs.
#[test]
fn boards_of_names_that_nobody_opens_do_not_use_up_all_boards() {
    let mut cluster = with_boards_of_names_that_nobody_opens();
    cluster.run_for(600_000);
    let conn = cluster.connect(0, Role::Reader);
    let reply = board(&mut cluster, conn, 0, BoardKind::Steps, 1);
    assert_eq!(code(&reply), None, "{reply:?}");
}

/// Peers remember so many jobs of one node, and another tenant's is opened there all the same.
#[test]
fn a_tenant_that_makes_boards_keeps_no_other_tenant_from_opening_a_job() {
    let mut cluster = Cluster::start(4, 2, 10);
    for at in 0..2_100 {
        let (conn, _) = stranger(&mut cluster, &format!("name{at}"));
        board(&mut cluster, conn, 0, BoardKind::Steps, 1);
        cluster.ask(0, conn, Request::OpenRun { timeout_ms: 1_000 });
        let (force, timeout_ms) = (true, 1_000);
        cluster.ask(0, conn, Request::Drop { force, timeout_ms });
        cluster.disconnect(0, conn);
    }
    cluster.ask_of("blue~train");
    let reader = cluster.connect(0, Role::Reader);
    let reply = cluster.ask(0, reader, Request::OpenRun { timeout_ms: 10_000 });
    assert!(
        matches!(reply, Reply::RunOpened { .. }),
        "{} ms: {reply:?}",
        cluster.now
    );
}

/// A board makes no name known: it counts among those that a tenant may open within a minute.
#[test]
fn boards_are_no_way_around_the_bound_on_new_jobs() {
    let mut cluster = Cluster::start(4, 2, 10);
    let mut opened = 0;
    for at in 0..600 {
        let (conn, _) = stranger(&mut cluster, &format!("name{at}"));
        board(&mut cluster, conn, 0, BoardKind::Steps, 1);
        let reply = cluster.ask(0, conn, Request::OpenRun { timeout_ms: 1_000 });
        opened += u32::from(matches!(reply, Reply::RunOpened { .. }));
        let (force, timeout_ms) = (true, 1_000);
        cluster.ask(0, conn, Request::Drop { force, timeout_ms });
        cluster.disconnect(0, conn);
    }
    assert!(cluster.now < 60_000, "{}", cluster.now);
    assert!((200..=256).contains(&opened), "{opened} names");
}

/// He sees and reads all jobs by whichever token he says, and writes in none.
#[test]
fn an_operator_without_the_jobs_token_gets_no_board() {
    let mut cluster = Cluster::start(4, 2, 10);
    let operator = |cluster: &mut Cluster, token: &[u8]| {
        let conn = cluster.fresh_conn();
        let viewer = Viewer::Operator;
        cluster.tell(0, Input::Connected { conn, viewer });
        let reply = cluster.ask(0, conn, hello("fresh", token, Role::Reader));
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        conn
    };
    let early = operator(&mut cluster, OTHER);
    cluster.begin_job("fresh");
    let owner = cluster.connect(0, Role::Reader);
    granted(&board(&mut cluster, owner, 0, BoardKind::Steps, BYTES));
    let late = operator(&mut cluster, OTHER);
    for conn in [early, late] {
        for bytes in [0, BYTES] {
            let reply = board(&mut cluster, conn, 0, BoardKind::Steps, bytes);
            assert_eq!(code(&reply), Some(RefusalCode::WrongToken), "{reply:?}");
        }
    }
    let by_token = operator(&mut cluster, TOKEN);
    granted(&board(&mut cluster, by_token, 0, BoardKind::Steps, 0));
}

/// Names whose asker has gone before its board was made have none that could make room.
#[test]
fn there_are_no_more_boards_than_there_may_be() {
    let mut cluster = Cluster::start(4, 2, 10);
    for at in 0..20 {
        let (conn, _) = stranger(&mut cluster, &format!("gone{at}"));
        let (rank, kind) = (Rank::new(0), BoardKind::Steps);
        cluster.send(
            0,
            conn,
            Request::Board {
                rank,
                kind,
                bytes: 1,
            },
        );
        cluster.disconnect(0, conn);
    }
    cluster.run_for(120_000);
    let owner = cluster.connect(0, Role::Reader);
    let made = (0..300).filter(|rank| {
        let reply = board(&mut cluster, owner, *rank, BoardKind::Steps, 1);
        code(&reply).is_none()
    });
    assert_eq!(made.count(), 256);
}

#[test]
fn a_board_that_finds_no_room_takes_no_other_jobs_boards_away() {
    let mut cluster = with_boards_of_names_that_nobody_opens();
    cluster.run_for(120_000);
    let owner = cluster.connect(0, Role::Reader);
    for _ in 0..3 {
        let reply = board(&mut cluster, owner, 0, BoardKind::Steps, 1 << 60);
        assert_eq!(code(&reply), Some(RefusalCode::BudgetFull), "{reply:?}");
    }
    assert_eq!(cluster.ram(0).node.audit().boards, 256);
}
