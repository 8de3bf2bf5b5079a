//! Boards: what a trainer writes there stays when it dies, for whoever comes next, and goes with its job.

mod cluster;
mod testkit;

use cluster::Cluster;
use storaged_core::ConnId;
use storaged_wire::local::{BoardKind, Reply, Request, Role};
use storaged_wire::{Rank, RefusalCode, SlotId};

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
