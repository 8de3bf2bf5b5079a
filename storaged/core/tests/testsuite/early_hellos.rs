//! Who says hello to a job that the node does not know yet, while its token may have been changed: once the job is known, strangers are
//! out and its newest token is in.

use crate::cluster::tokens::{NEW, OTHER, code, is_opened};
use crate::cluster::{Cluster, Conduct, Listing, Room};
use crate::testkit::{
    CHUNK_BYTES, TOKEN, acquire_slot, commit_step, hello_by, namespace, plan_newest,
};
use storaged_core::{ConnId, Input, Viewer};
use storaged_wire::local::{BoardKind, DurableWish, Reply, Request, Role};
use storaged_wire::{CheckpointState, Namespace, Rank, RefusalCode, RunId, Step, WorldSize};

fn trainer_of(run: RunId, world: u32) -> Role {
    Role::Trainer {
        run,
        rank: Rank::new(1),
        world_size: WorldSize::new(world).unwrap(),
    }
}

const OTHERS: [usize; 5] = [0, 2, 3, 4, 5];

fn cut_off(cluster: &mut Cluster) {
    let until = cluster.now + 60_000;
    for other in OTHERS {
        for (from, to) in [(1, other), (other, 1)] {
            cluster.part(from, to);
            cluster.link_of(from, to).cut_until = until;
        }
    }
}

fn joined_again(cluster: &mut Cluster) {
    for other in OTHERS {
        for (from, to) in [(1, other), (other, 1)] {
            cluster.link_of(from, to).cut_until = 0;
            cluster.join(from, to);
        }
    }
}

/// A job that all nodes but n1 know, whose token was changed.
fn changed_behind_the_back() -> (Cluster, Namespace, RunId) {
    let mut cluster = Cluster::start(4, 2, 10);
    cut_off(&mut cluster);
    cluster.ask_of("fresh");
    let job = Namespace::new("fresh").unwrap();
    let reader = cluster.connect(0, Role::Reader);
    let opened = cluster.ask(0, reader, Request::OpenRun { timeout_ms: 10_000 });
    let Reply::RunOpened { run } = opened else {
        panic!("no run: {opened:?}");
    };
    cluster.rotate(0, &job);
    cluster.run_for(14_000);
    (cluster, job, run)
}

/// Peers tell of the run before they tell of the change.
#[test]
fn a_trainer_by_the_newest_token_that_has_waited_for_its_run_is_let_in() {
    let (mut cluster, job, run) = changed_behind_the_back();
    let conn = cluster.fresh_conn();
    let id = cluster.send(1, conn, hello_by(job.clone(), NEW, trainer_of(run, 4)));
    cluster.run_for(1_000);
    assert!(cluster.answer(id).is_none(), "it waits");
    joined_again(&mut cluster);
    cluster.run_for(2_000);
    let reply = cluster.answer(id).expect("an answer").clone();
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
}

/// It came before the node knew the job.
#[test]
fn a_reader_by_the_newest_token_goes_on_once_peers_tell_of_the_change() {
    let (mut cluster, job, _) = changed_behind_the_back();
    let conn = cluster.fresh_conn();
    let reply = cluster.ask(1, conn, hello_by(job.clone(), NEW, Role::Reader));
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
    joined_again(&mut cluster);
    cluster.run_for(30_000);
    let reply = cluster.ask(1, conn, Request::OpenRun { timeout_ms: 10_000 });
    assert!(matches!(reply, Reply::RunOpened { .. }), "{reply:?}");
}

/// An operator reads all jobs by any token, also if he came first.
#[test]
fn an_operator_who_came_before_the_owner_reads_on() {
    let mut cluster = Cluster::start(4, 2, 10);
    let conn = cluster.fresh_conn();
    let viewer = Viewer::Operator;
    cluster.tell(0, Input::Connected { conn, viewer });
    let job = Namespace::new("fresh").unwrap();
    let reply = cluster.ask(0, conn, hello_by(job.clone(), OTHER, Role::Reader));
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
    cluster.begin_job("fresh");
    cluster.save_and_wait(DurableWish::Never);
    let late = cluster.fresh_conn();
    cluster.tell(
        0,
        Input::Connected {
            conn: late,
            viewer: Viewer::Operator,
        },
    );
    cluster.ask(0, late, hello_by(job.clone(), OTHER, Role::Reader));
    let reply = cluster.ask(0, late, plan_newest(5_000));
    assert!(matches!(reply, Reply::Plan(_)), "who came late: {reply:?}");
    let reply = cluster.ask(0, conn, plan_newest(5_000));
    assert!(matches!(reply, Reply::Plan(_)), "who came early: {reply:?}");
}

/// He begins to wait for a step before his node knows whose the job is.
#[test]
fn a_stranger_who_waits_hears_nothing_of_the_job() {
    let mut cluster = Cluster::start(4, 2, 10);
    cut_off(&mut cluster);
    cluster.ask_of("fresh");
    let job = Namespace::new("fresh").unwrap();
    let reader = cluster.connect(0, Role::Reader);
    let opened = cluster.ask(0, reader, Request::OpenRun { timeout_ms: 10_000 });
    let Reply::RunOpened { run } = opened else {
        panic!("no run: {opened:?}");
    };
    cluster.run_for(14_000);
    let thief = cluster.fresh_conn();
    let reply = cluster.ask(1, thief, hello_by(job.clone(), OTHER, Role::Reader));
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
    let wait = Request::Wait {
        run,
        step: Step::new(1),
        state: CheckpointState::Committed,
        timeout_ms: 120_000,
    };
    let waiting = cluster.send(1, thief, wait);
    joined_again(&mut cluster);
    cluster.run_for(2_000);
    for node in 0..4 {
        let role = Role::Trainer {
            run,
            rank: Rank::new(node as u32),
            world_size: WorldSize::new(4).unwrap(),
        };
        let conn = cluster.connect(node, role);
        let length = 10 * u64::from(CHUNK_BYTES);
        let reply = cluster.ask(node, conn, acquire_slot(length, 10_000));
        let Reply::SlotGranted { slot, .. } = reply else {
            panic!("no slot: {reply:?}");
        };
        let step = Step::new(1);
        cluster.ask(node, conn, Request::SealSlot { slot, step, length });
        if node == 3 {
            cluster.send(node, conn, commit_step(step, DurableWish::Never));
        }
    }
    cluster.run_for(20_000);
    let heard = cluster.answer(waiting).cloned();
    assert!(
        heard
            .as_ref()
            .is_none_or(|it| matches!(it, Reply::Refused(_))),
        "{heard:?}"
    );
}

/// What was durable before the change is there for who came early too.
#[test]
fn a_reader_by_the_newest_token_that_came_early_finds_what_was_durable_before_the_change() {
    let (mut cluster, job, _) = known_to_a_tier_that_hangs();
    let come = |cluster: &mut Cluster| -> ConnId {
        let conn = cluster.fresh_conn();
        let reply = cluster.ask(0, conn, hello_by(job.clone(), NEW, Role::Reader));
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        conn
    };
    let early = come(&mut cluster);
    cluster.scene.tier.as_mut().unwrap().listing = Listing::After(20);
    let late = come(&mut cluster);
    let opened = cluster.ask(0, late, Request::OpenRun { timeout_ms: 10_000 });
    assert!(matches!(opened, Reply::RunOpened { .. }), "{opened:?}");
    for (who, conn) in [("late", late), ("early", early)] {
        let plan = Request::Plan {
            step: None,
            timeout_ms: 5_000,
            allow_older: true,
        };
        let planned = cluster.ask(0, conn, plan);
        assert!(matches!(planned, Reply::Plan(_)), "{who}: {planned:?}");
    }
}

/// A job whose token was changed, and a step saved after it, and of which the tier alone knows; what it says of changes is not to be had.
fn known_to_a_tier_that_hangs() -> (Cluster, Namespace, RunId) {
    let mut cluster = Cluster::start_with(2, 1, 4, Some(Conduct::default()), Room::default());
    cluster.save_and_wait(DurableWish::Required);
    let job = namespace();
    cluster.rotate(0, &job);
    let run = cluster.run();
    (0..3).for_each(|node| cluster.kill(node));
    (0..3).for_each(|node| cluster.start_after(50, node));
    cluster.run_for(20_000);
    cluster.scene.tier.as_mut().unwrap().listing = Listing::FailsAfter(50);
    (cluster, job, run)
}

/// A trainer that comes back by the newest token while the tier does not tell of changes is not called a stranger.
#[test]
fn a_trainer_by_the_newest_token_is_no_stranger_where_the_tier_tells_of_its_run_alone() {
    let (mut cluster, job, run) = known_to_a_tier_that_hangs();
    let conn = cluster.fresh_conn();
    let reply = cluster.ask(0, conn, hello_by(job.clone(), NEW, trainer_of(run, 2)));
    assert_ne!(code(&reply), Some(RefusalCode::WrongToken), "{reply:?}");
}

/// A retired token's trainer that comes while the tier does not tell of changes does not bring that token back.
#[test]
fn a_retired_token_does_not_come_back_while_the_tier_tells_of_its_run_alone() {
    let (mut cluster, job, run) = known_to_a_tier_that_hangs();
    let old = cluster.fresh_conn();
    let let_in = cluster.ask(0, old, hello_by(job.clone(), TOKEN, trainer_of(run, 2)));
    eprintln!("the retired token while the tier is away: {let_in:?}");
    cluster.scene.tier.as_mut().unwrap().listing = Listing::After(20);
    cluster.run_for(120_000);
    let mut wrong = Vec::new();
    // n1 and n2 hear the new token first: n0 might hear of it from them.
    for (round, node) in [(1, 1), (1, 2), (1, 0), (2, 0)] {
        for (token, opens) in [(NEW, true), (TOKEN, false)] {
            let conn = cluster.fresh_conn();
            let reply = cluster.ask(node, conn, hello_by(job.clone(), token, Role::Reader));
            if matches!(reply, Reply::Welcome { .. }) != opens {
                let which = if opens {
                    "the new token"
                } else {
                    "the old token"
                };
                wrong.push(format!("{round}: n{node}, {which}: {reply:?}"));
            }
            if matches!(reply, Reply::Welcome { .. }) && !opens {
                let plan = cluster.ask(node, conn, plan_newest(5_000));
                wrong.push(format!("{round}: n{node}, the old token plans: {plan:?}"));
            }
            cluster.disconnect(node, conn);
        }
        cluster.run_for(60_000);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Nor does one that waits for a tier that has the job of somebody else.
#[test]
fn a_run_that_waits_for_the_tier_claims_no_name_that_is_durable() {
    for listing in [Listing::Hangs, Listing::FailsAfter(50)] {
        let mut cluster = Cluster::start_with(2, 1, 4, Some(Conduct::default()), Room::default());
        cluster.save_and_wait(DurableWish::Required);
        let job = namespace();
        (0..3).for_each(|node| cluster.kill(node));
        (0..3).for_each(|node| cluster.start_after(50, node));
        cluster.run_for(20_000);
        cluster.scene.tier.as_mut().unwrap().listing = listing;
        let thief = cluster.fresh_conn();
        cluster.ask(0, thief, hello_by(job.clone(), OTHER, Role::Reader));
        let reply = cluster.ask(0, thief, Request::OpenRun { timeout_ms: 30_000 });
        assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
        cluster.disconnect(0, thief);
        cluster.scene.tier.as_mut().unwrap().listing = Listing::After(20);
        for node in 0..3 {
            let conn = cluster.fresh_conn();
            let reply = cluster.ask(node, conn, hello_by(job.clone(), TOKEN, Role::Reader));
            assert!(matches!(reply, Reply::Welcome { .. }), "n{node}: {reply:?}");
            let reply = cluster.ask(node, conn, Request::OpenRun { timeout_ms: 30_000 });
            assert!(
                matches!(reply, Reply::RunOpened { .. }),
                "n{node}: {reply:?}"
            );
        }
    }
}

/// A stranger's trainer that names a run of the job while the tier does not tell of changes: he may have the newest token, as far as
/// anybody can tell.
#[test]
fn a_strangers_trainer_is_no_owner_while_the_tier_tells_of_runs_alone() {
    let (mut cluster, job, run) = known_to_a_tier_that_hangs();
    let conn = cluster.fresh_conn();
    let reply = cluster.ask(0, conn, hello_by(job.clone(), OTHER, trainer_of(run, 2)));
    assert_eq!(
        code(&reply),
        Some(RefusalCode::DurableUnavailable),
        "{reply:?}"
    );
    cluster.scene.tier.as_mut().unwrap().listing = Listing::After(20);
    let conn = cluster.fresh_conn();
    let reply = cluster.ask(0, conn, hello_by(job.clone(), NEW, Role::Reader));
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
}

/// What the newest token's trainer has written on its board before the tier answered is its own when the job is known.
#[test]
fn a_board_made_by_the_newest_token_stays_when_the_job_becomes_known() {
    let (mut cluster, job, _) = known_to_a_tier_that_hangs();
    let board = |bytes| Request::Board {
        rank: Rank::new(0),
        kind: BoardKind::Steps,
        bytes,
    };
    let slot_of = |reply: &Reply| match reply {
        Reply::SlotGranted { slot, .. } => *slot,
        other => panic!("no board: {other:?}"),
    };
    let early = cluster.fresh_conn();
    cluster.ask(0, early, hello_by(job.clone(), NEW, Role::Reader));
    let made = slot_of(&cluster.ask(0, early, board(1)));
    cluster.scene.tier.as_mut().unwrap().listing = Listing::After(20);
    let late = cluster.fresh_conn();
    cluster.ask(0, late, hello_by(job.clone(), NEW, Role::Reader));
    let opened = cluster.ask(0, late, Request::OpenRun { timeout_ms: 10_000 });
    assert!(matches!(opened, Reply::RunOpened { .. }), "{opened:?}");
    assert_eq!(slot_of(&cluster.ask(0, early, board(0))), made);
    assert_eq!(slot_of(&cluster.ask(0, late, board(0))), made);
}

/// A run of the job, opened by a token at a node.
fn open_run(cluster: &mut Cluster, node: usize, job: &Namespace, token: &[u8]) -> RunId {
    let conn = cluster.fresh_conn();
    cluster.ask(node, conn, hello_by(job.clone(), token, Role::Reader));
    match cluster.ask(node, conn, Request::OpenRun { timeout_ms: 10_000 }) {
        Reply::RunOpened { run } => run,
        other => panic!("no run: {other:?}"),
    }
}

/// Which tokens do not open the job at a node as they should: the new one does, the one that was let go does not.
fn wrong_tokens_at(cluster: &mut Cluster, node: usize) -> Vec<String> {
    let mut wrong = Vec::new();
    for (token, opens) in [(NEW, true), (TOKEN, false)] {
        let conn = cluster.fresh_conn();
        let reply = cluster.ask(node, conn, hello_by(namespace(), token, Role::Reader));
        if matches!(reply, Reply::Welcome { .. }) != opens {
            wrong.push(format!("n{node} opens by new {opens}: {reply:?}"));
        }
        cluster.disconnect(node, conn);
    }
    wrong
}

/// Peers that were told of a change, and that nobody has proved it to, tell of it all the same: one restart of the node at which the token
/// was changed would have brought the old one back there, and a restart of all in turn everywhere.
#[test]
fn a_retired_token_stays_retired_when_nodes_lose_their_memory_one_after_the_other() {
    for tier in [None, Some(Conduct::default())] {
        let mut cluster = Cluster::start_with(2, 1, 4, tier, Room::default());
        cluster.save_and_wait(DurableWish::Never);
        cluster.end_job();
        cluster.rotate(0, &namespace());
        for node in 0..3 {
            cluster.kill(node);
            cluster.run_for(5_000);
            cluster.start_after(0, node);
            cluster.run_for(30_000);
            let wrong = wrong_tokens_at(&mut cluster, node);
            assert!(wrong.is_empty(), "{wrong:#?}");
        }
        let wrong: Vec<String> = (0..3)
            .flat_map(|node| wrong_tokens_at(&mut cluster, node))
            .collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

/// A trainer by a retired token waits at a node that was away for a run that was opened by the new one: peers tell of runs before they tell
/// of changes.
#[test]
fn a_retired_token_gets_into_no_run_that_the_new_one_has_opened() {
    let mut cluster = Cluster::start(4, 2, 10);
    let job = namespace();
    cluster.save_and_wait(DurableWish::Never);
    cluster.end_job();
    cut_off(&mut cluster);
    cluster.run_for(6_000);
    cluster.rotate(0, &job);
    let run = open_run(&mut cluster, 0, &job, NEW);
    cluster.run_for(5_000);
    let thief = cluster.fresh_conn();
    let id = cluster.send(1, thief, hello_by(job.clone(), TOKEN, trainer_of(run, 4)));
    let own = cluster.fresh_conn();
    let own_id = cluster.send(1, own, hello_by(job.clone(), NEW, trainer_of(run, 4)));
    cluster.run_for(1_000);
    joined_again(&mut cluster);
    cluster.run_for(3_000);
    let reply = cluster.answer(id).expect("an answer");
    assert_eq!(code(reply), Some(RefusalCode::WrongToken), "{reply:?}");
    let slot = cluster.ask(1, thief, acquire_slot(u64::from(CHUNK_BYTES), 1_000));
    assert_eq!(code(&slot), Some(RefusalCode::NotAttached), "{slot:?}");
    // The new one was a stranger's at a node that knew the job and not the change.
    let reply = cluster.answer(own_id).expect("an answer");
    assert_eq!(code(reply), Some(RefusalCode::WrongToken), "{reply:?}");
    let reply = cluster.ask(1, own, hello_by(job, NEW, trainer_of(run, 4)));
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
}

/// The node is cut off, the tier tells of runs alone, and peers are back before the trainer has waited for its five seconds.
#[test]
fn a_trainer_waits_for_peers_where_the_tier_tells_of_its_run_alone() {
    for delay in [100, 500, 1_000, 2_000] {
        let mut cluster = Cluster::start_with(4, 2, 10, Some(Conduct::default()), Room::default());
        cut_off(&mut cluster);
        cluster.run_for(6_000);
        let job = Namespace::new("fresh").unwrap();
        let run = open_run(&mut cluster, 0, &job, TOKEN);
        cluster.run_for(14_000);
        cluster.scene.tier.as_mut().unwrap().listing = Listing::FailsAfter(50);
        let conn = cluster.fresh_conn();
        let id = cluster.send(1, conn, hello_by(job, TOKEN, trainer_of(run, 4)));
        cluster.run_for(delay);
        joined_again(&mut cluster);
        cluster.run_for(8_000);
        let reply = cluster.answer(id).expect("an answer");
        assert!(matches!(reply, Reply::Welcome { .. }), "{delay}: {reply:?}");
    }
}

/// The node at which the token was changed is the last one whose link comes back.
#[test]
fn the_newest_token_is_no_stranger_where_those_come_first_that_were_only_told() {
    for late in [100, 600, 2_000] {
        let (mut cluster, job, run) = changed_behind_the_back();
        let conn = cluster.fresh_conn();
        let id = cluster.send(1, conn, hello_by(job, NEW, trainer_of(run, 4)));
        cluster.run_for(500);
        for other in [2, 3, 4, 5, 0] {
            if other == 0 {
                cluster.run_for(late);
            }
            for (from, to) in [(1, other), (other, 1)] {
                cluster.link_of(from, to).cut_until = 0;
                cluster.join(from, to);
            }
        }
        cluster.run_for(6_000);
        let reply = cluster.answer(id).expect("an answer");
        assert!(matches!(reply, Reply::Welcome { .. }), "{late}: {reply:?}");
    }
}

/// It takes longer than a reader waits for its word, and answers.
#[test]
fn trainers_come_back_where_the_tier_is_slow() {
    let mut cluster = Cluster::start_with(2, 1, 4, Some(Conduct::default()), Room::default());
    cluster.save_and_wait(DurableWish::Required);
    let run = cluster.run();
    (0..3).for_each(|node| cluster.kill(node));
    (0..3).for_each(|node| cluster.start_after(50, node));
    cluster.run_for(20_000);
    cluster.scene.tier.as_mut().unwrap().listing = Listing::After(3_500);
    let conn = cluster.fresh_conn();
    let reply = cluster.ask(0, conn, hello_by(namespace(), TOKEN, trainer_of(run, 2)));
    assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
}

/// Asked for by the newest token, or by a stranger, at a node whose links come back meanwhile.
#[test]
fn a_run_that_is_asked_for_before_links_are_back_is_its_owners() {
    for token in [NEW, OTHER] {
        let (mut cluster, job, _) = changed_behind_the_back();
        let conn = cluster.fresh_conn();
        cluster.ask(1, conn, hello_by(job.clone(), token, Role::Reader));
        let id = cluster.send(1, conn, Request::OpenRun { timeout_ms: 30_000 });
        cluster.run_for(1_000);
        assert!(cluster.answer(id).is_none(), "{:?}", cluster.answer(id));
        joined_again(&mut cluster);
        cluster.run_until_answered(&[id]);
        let reply = cluster.answer(id).expect("an answer");
        let is_right = match reply {
            Reply::RunOpened { .. } => token == NEW,
            other => token != NEW && code(other) == Some(RefusalCode::WrongToken),
        };
        assert!(is_right, "{reply:?}");
        cluster.disconnect(1, conn);
        cluster.run_for(30_000);
        let reply = cluster.asks_for_run(1, &job, NEW);
        assert!(matches!(reply, Reply::RunOpened { .. }), "{reply:?}");
    }
}

#[test]
fn a_run_that_is_given_up_at_once_claims_no_name() {
    let mut cluster = Cluster::start(4, 2, 10);
    let job = Namespace::new("fresh").unwrap();
    let conn = cluster.fresh_conn();
    cluster.ask(1, conn, hello_by(job.clone(), OTHER, Role::Reader));
    let reply = cluster.ask(1, conn, Request::OpenRun { timeout_ms: 0 });
    assert_eq!(code(&reply), Some(RefusalCode::TimedOut));
    cluster.disconnect(1, conn);
    cluster.run_for(5_000);
    for node in [1, 2, 0] {
        let reply = cluster.asks_for_run(node, &job, TOKEN);
        assert!(
            matches!(reply, Reply::RunOpened { .. }),
            "n{node}: {reply:?}"
        );
    }
}

/// The tier failed when they said hello, and answers now.
#[test]
fn who_came_while_the_tier_was_away_is_asked_for_the_token_again_with_the_next_request() {
    let (mut cluster, job, _) = known_to_a_tier_that_hangs();
    let [new, old] = [NEW, TOKEN].map(|token| {
        let conn = cluster.fresh_conn();
        let reply = cluster.ask(0, conn, hello_by(job.clone(), token, Role::Reader));
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        conn
    });
    cluster.scene.tier.as_mut().unwrap().listing = Listing::After(20);
    let planned = cluster.ask(0, old, plan_newest(5_000));
    assert_eq!(code(&planned), Some(RefusalCode::WrongToken), "{planned:?}");
    let planned = cluster.ask(0, new, plan_newest(5_000));
    assert!(matches!(planned, Reply::Plan(_)), "{planned:?}");
    let opened = cluster.ask(0, old, Request::OpenRun { timeout_ms: 10_000 });
    assert_eq!(code(&opened), Some(RefusalCode::WrongToken), "{opened:?}");
    let opened = cluster.ask(0, new, Request::OpenRun { timeout_ms: 10_000 });
    assert!(matches!(opened, Reply::RunOpened { .. }), "{opened:?}");
}

/// It would be told that there is nothing to restart from, or be shown what a retired token must not see.
#[test]
fn who_came_while_the_tier_was_away_reads_nothing_as_long_as_it_is() {
    for listing in [Listing::FailsAfter(50), Listing::Hangs] {
        let (mut cluster, job, _) = known_to_a_tier_that_hangs();
        let conn = cluster.fresh_conn();
        cluster.ask(0, conn, hello_by(job.clone(), TOKEN, Role::Reader));
        cluster.scene.tier.as_mut().unwrap().listing = listing;
        for request in [plan_newest(5_000), Request::Succession] {
            let reply = cluster.ask(0, conn, request);
            let code = code(&reply);
            assert_eq!(code, Some(RefusalCode::DurableUnavailable), "{reply:?}");
        }
    }
}

/// Peers are asked in vain, the tier is waited for, and only then the links come back.
#[test]
fn the_newest_token_is_no_stranger_where_links_come_back_while_the_tier_is_waited_for() {
    for listing in [Listing::Hangs, Listing::FailsAfter(50)] {
        let with_tier = Some(Conduct::default());
        let mut cluster = Cluster::start_with(4, 2, 10, with_tier, Room::default());
        cut_off(&mut cluster);
        cluster.run_for(6_000);
        let job = Namespace::new("fresh").unwrap();
        let opened = cluster.asks_for_run(0, &job, TOKEN);
        assert!(is_opened(&opened), "{opened:?}");
        cluster.rotate(0, &job);
        cluster.run_for(14_000);
        cluster.scene.tier.as_mut().unwrap().listing = listing;
        let conn = cluster.comes_by(1, &job, NEW);
        let id = cluster.send(1, conn, Request::OpenRun { timeout_ms: 30_000 });
        cluster.run_for(1_000);
        joined_again(&mut cluster);
        cluster.run_until_answered(&[id]);
        let reply = cluster.answer(id).expect("an answer");
        assert!(is_opened(reply), "{listing:?}: {reply:?}");
    }
}
