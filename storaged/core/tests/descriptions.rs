//! What a trainer says of a step: once, and within the memory that its tenant may have, on its own node and on the home nodes.

mod cluster;
mod testkit;

use std::collections::BTreeMap;

use cluster::{Cluster, Room};
use storaged_core::{ConnId, MemoryShare};
use storaged_wire::local::{DurableWish, Reply, Request};
use storaged_wire::{RefusalCode, Step, TenantName};
use testkit::{acquire_slot, commit_step};

const MIB: usize = 1 << 20;

/// A trainer on the first node that has sealed a step which no other rank seals, after so many of its own.
fn seal(cluster: &mut Cluster, step: u64) -> ConnId {
    let trainer = cluster.trainer(0);
    let Reply::SlotGranted { slot, .. } = cluster.ask(0, trainer, acquire_slot(1 << 16, 1_000))
    else {
        panic!("no slot");
    };
    let step = Step::new(step);
    let seal = Request::SealSlot {
        slot,
        step,
        length: 100,
    };
    assert_eq!(cluster.ask(0, trainer, seal), Reply::Done);
    trainer
}

fn described(step: u64, schema: Vec<u8>) -> Request {
    Request::Commit {
        step: Step::new(step),
        schema: schema.into(),
        torch_metadata: vec![].into(),
        durable: DurableWish::Never,
    }
}

#[track_caller]
fn code(reply: Reply) -> RefusalCode {
    match reply {
        Reply::Refused(refusal) => refusal.code,
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn a_step_is_described_once() {
    // Digested where decisions are made, and beside them.
    for length in [500, 5_000] {
        let mut cluster = Cluster::start(4, 2, 10);
        let trainer = seal(&mut cluster, 1);
        let first = described(1, vec![7; length]);
        for _ in 0..3 {
            // A trainer that has not heard the answer says it again.
            assert_eq!(cluster.ask(0, trainer, first.clone()), Reply::Done);
        }
        let other = described(1, vec![8; length]);
        let refused = code(cluster.ask(0, trainer, other));
        assert_eq!(refused, RefusalCode::StepNotNewer);
        assert_eq!(cluster.ask(0, trainer, first), Reply::Done);
    }
}

#[test]
fn descriptions_that_are_said_again_and_again_take_no_memory() {
    let mut cluster = Cluster::start(4, 2, 10);
    let trainer = seal(&mut cluster, 1);
    for number in 0..40 {
        cluster.ask(0, trainer, described(1, vec![number; MIB]));
    }
    cluster.run_for(2_000);
    for node in 0..6 {
        let records = cluster.ledger(node).records;
        assert!(records < 2 * MIB as u64, "{records} bytes on n{node}");
    }
}

#[test]
fn a_checkpoint_that_has_committed_takes_its_description_again() {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.save_and_wait(DurableWish::Never);
    let again = commit_step(Step::new(1), DurableWish::Never);
    let trainer = cluster.trainer(0);
    assert_eq!(cluster.ask(0, trainer, again), Reply::Done);
}

/// Red may have so many bytes of each node; blue is sure of some.
fn red_may_have(most: u64) -> Cluster {
    let share = |guaranteed, most| MemoryShare { guaranteed, most };
    let tenant = |name| Some(TenantName::new(name).expect("a tenant"));
    let shares = BTreeMap::from([
        (tenant("red"), share(0, Some(most))),
        (tenant("blue"), share(1 << 20, None)),
    ]);
    let room = Room {
        shares,
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    cluster.end_job();
    cluster.begin_job("red~llama");
    cluster
}

#[test]
fn a_description_beyond_what_the_tenant_may_have_is_refused() {
    let mut cluster = red_may_have(8 << 20);
    let trainer = seal(&mut cluster, 1);
    let reply = cluster.ask(0, trainer, described(1, vec![7; 60 * MIB]));
    assert_eq!(code(reply), RefusalCode::BudgetFull);
    cluster.run_for(2_000);
    assert!(cluster.ledger(0).records < MIB as u64);
    let short = described(1, vec![7; MIB]);
    assert_eq!(cluster.ask(0, trainer, short), Reply::Done);
}

/// What nobody names any more stays for readers that come late, but in nobody's way.
#[test]
fn what_described_a_job_that_was_dropped_makes_room_at_once() {
    let mut cluster = red_may_have(8 << 20);
    for number in 0..3 {
        cluster.end_job();
        cluster.begin_job(&format!("red~{number}"));
        let trainer = seal(&mut cluster, 1);
        let reply = cluster.ask(0, trainer, described(1, vec![number; 24 * MIB]));
        assert_eq!(reply, Reply::Done, "job {number}");
        let drop = Request::Drop {
            force: true,
            timeout_ms: 5_000,
        };
        let reply = cluster.ask(0, trainer, drop);
        assert!(!matches!(reply, Reply::Refused(_)), "{reply:?}");
    }
}
