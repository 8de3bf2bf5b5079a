//! What a trainer says of a step: once, and within the memory that its tenant may have, on its own node and on the home nodes.

use std::collections::BTreeMap;

use crate::cluster::{Cluster, Room};
use crate::testkit::{
    Alone, CHUNK_BYTES, Wanted, acquire_slot, commit_step, hello, members, name, namespace, setup,
};
use storaged_codec::{digest, fingerprint};
use storaged_core::limits::RECORDS_FREE_BYTES;
use storaged_core::{ConnId, DigestTally, Input, Note, Setup, TenantShare};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::{CheckpointState, Rank, RefusalCode, Step, TenantName, WorldSize};

const MIB: usize = 1 << 20;

/// A trainer on the first node that has sealed a step which no other rank seals, after so many of its own.
fn seal(cluster: &mut Cluster, step: u64) -> ConnId {
    seal_on(cluster, 0, step)
}

fn seal_on(cluster: &mut Cluster, node: usize, step: u64) -> ConnId {
    let trainer = cluster.trainer(node);
    let acquire = acquire_slot(CHUNK_BYTES.into(), 1_000);
    let Reply::SlotGranted { slot, .. } = cluster.ask(node, trainer, acquire) else {
        panic!("no slot");
    };
    let step = Step::new(step);
    let seal = Request::SealSlot {
        slot,
        step,
        length: 100,
    };
    assert_eq!(cluster.ask(node, trainer, seal), Reply::Done);
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
    let share = |guaranteed, most| TenantShare {
        guaranteed,
        most,
        new_jobs: None,
    };
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

/// Does what a node wants to have prepared.
fn prepared(alone: &mut Alone, mut wanted: Wanted) -> Option<Reply> {
    for work in wanted.take_preparations() {
        let done = alone.handle(Input::Prepared(work.run()));
        wanted.and(done);
    }
    wanted.reply()
}

/// The slot is as large as the budget, and its tables take more than there is beside that.
#[test]
fn a_save_that_fills_the_budget_has_room_for_what_describes_it() {
    const CHUNKS: usize = 1_600_000;
    let length = CHUNKS as u64 * u64::from(CHUNK_BYTES);
    let budget = length.next_multiple_of(2 << 20);
    let mut alone = Alone::new(Setup {
        budget,
        ..setup(name(0), members(1))
    });
    let (reader, trainer) = (ConnId(1), ConnId(2));
    alone.greet(reader, hello(namespace(), Role::Reader));
    let opened = alone.ask(reader, Request::OpenRun { timeout_ms: 1_000 });
    let Some(Reply::RunOpened { run }) = opened.reply() else {
        panic!("expected a run, got {opened:?}");
    };
    let (rank, world_size) = (Rank::new(0), WorldSize::new(2).unwrap());
    let role = Role::Trainer {
        run,
        rank,
        world_size,
    };
    alone.greet(trainer, hello(namespace(), role));
    let acquired = alone.ask(trainer, acquire_slot(budget, 1_000));
    let slot = acquired.created().expect("it fits the budget");
    alone.handle(Input::SlotCreated { slot });
    let step = Step::new(1);
    alone.ask(trainer, Request::SealSlot { slot, step, length });
    alone.handle(Input::Digested {
        slot,
        leaves: vec![digest(b"chunk"); CHUNKS].into(),
        prints: vec![fingerprint(b"chunk"); CHUNKS].into(),
        root: digest(b"root"),
        tally: DigestTally::default(),
    });
    // What is kept about blocks is counted each second.
    alone.now = 2_000;
    alone.handle(Input::Tick);
    assert!(
        alone.node.ledger().used > budget,
        "{:?}",
        alone.node.ledger()
    );
    let commit = alone.ask(trainer, described(1, vec![7; 4 * MIB]));
    assert_eq!(prepared(&mut alone, commit), Some(Reply::Done));
    let again = alone.ask(trainer, described(1, vec![7; 4 * MIB]));
    assert_eq!(prepared(&mut alone, again), Some(Reply::Done));
}

/// Whoever sends something long has that much less for as long as it comes.
#[test]
fn a_request_on_its_way_is_charged_until_it_is_here_or_comes_no_more() {
    let mut alone = Alone::new(setup(name(0), members(1)));
    let conn = ConnId(1);
    alone.greet(conn, hello(namespace(), Role::Reader));
    let charged = |alone: &Alone| alone.node.ledger().records_charged;
    let bytes = RECORDS_FREE_BYTES + 5;
    alone.handle(Input::RequestComes { conn, bytes });
    assert_eq!(charged(&alone), 5);
    alone.ask(conn, Request::Status);
    assert_eq!(charged(&alone), 0);
    for gone in [
        Input::RequestComes { conn, bytes: 0 },
        Input::Disconnected { conn },
    ] {
        alone.handle(Input::RequestComes { conn, bytes });
        assert_eq!(charged(&alone), 5);
        alone.handle(gone);
        assert_eq!(charged(&alone), 0);
    }
    // Nobody is attached any more whom it could be charged to.
    alone.handle(Input::RequestComes { conn, bytes });
    assert_eq!(charged(&alone), 0);
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

/// The trainer that waits, the log and the status name the node whose memory is too small, until it has room.
#[test]
fn a_home_node_without_room_for_a_description_says_so() {
    let tight = 2 << 20;
    let room = Room {
        budgets: (1..6).map(|node| (node, tight)).collect(),
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 1, None, room);
    for node in 1..4 {
        seal_on(&mut cluster, node, 1);
    }
    let trainer = seal(&mut cluster, 1);
    let told = cluster.ask(0, trainer, described(1, vec![7; 80 * MIB]));
    assert_eq!(told, Reply::Done);
    cluster.run_for(5_000);
    let refused = |note: &Note| matches!(note, Note::NotDescribed { .. });
    let notes = cluster.notes.iter().filter(|(_, _, note)| refused(note));
    let mut nodes: Vec<usize> = notes.map(|(_, node, _)| *node).collect();
    nodes.sort_unstable();
    assert!(!nodes.is_empty(), "a home node says it");
    assert!(
        nodes.windows(2).all(|two| two[0] < two[1]),
        "once: {nodes:?}"
    );
    let wait = Request::Wait {
        run: cluster.run(),
        step: Step::new(1),
        state: CheckpointState::Committed,
        timeout_ms: 2_000,
    };
    let Reply::Refused(refusal) = cluster.ask(0, trainer, wait) else {
        panic!("it has not committed");
    };
    let said = |node: &usize| format!("n{node} has no room: a description");
    let is_named = nodes.iter().any(|it| refusal.message.contains(&said(it)));
    assert!(is_named, "{nodes:?}: {refusal}");
}

/// Ranks of one step that wish for a copy and do not: whoever wishes for it gets it, in whichever order they speak.
#[test]
fn no_rank_takes_back_what_another_wished_of_the_durable_tier() {
    use DurableWish::{Never, Required};
    let orders = [[Required, Never], [Never, Required]];
    let both = orders
        .into_iter()
        .flat_map(|it| [([0, 0], it), ([0, 1], it)]);
    for (by, wishes) in both {
        let mut cluster = Cluster::start_with_tier(4, 2, 1);
        for node in 0..3 {
            seal_on(&mut cluster, node, 1);
        }
        for (by, durable) in by.into_iter().zip(wishes) {
            let commit = commit_step(Step::new(1), durable);
            let trainer = cluster.trainer(by);
            assert_eq!(cluster.ask(by, trainer, commit), Reply::Done);
            cluster.run_for(2_000);
        }
        seal_on(&mut cluster, 3, 1);
        cluster.run_until(30_000, "a durable step", |cluster| {
            !cluster.tier.published.is_empty()
        });
    }
}
