//! Boards: what a trainer writes there stays when it dies, for whoever comes next, and goes with its job.

mod cluster;
mod testkit;

use cluster::Cluster;
use storaged_core::ConnId;
use storaged_wire::local::{BoardKind, LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::{CheckpointState, Namespace, Rank, RefusalCode, SlotId, Step};

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
    let hello = Request::Hello {
        version: LOCAL_VERSION,
        namespace: Namespace::new(job).unwrap(),
        token: OTHER.to_vec().into(),
        role: Role::Reader,
    };
    let reply = cluster.ask(0, conn, hello);
    (conn, reply)
}

fn code(reply: &Reply) -> Option<RefusalCode> {
    match reply {
        Reply::Refused(refusal) => Some(refusal.code),
        _ => None,
    }
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
