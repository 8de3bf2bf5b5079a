//! Tenants of one cluster: none of them reaches, or hears of, another one's jobs, and each has its share of RAM.

use std::collections::BTreeMap;

use crate::cluster::{Cluster, Conduct, Room, SLOT, STRIPE_MS};
use crate::testkit::{self, acquire_slot, plan_newest};
use storaged_core::{Input, Note, TenantShare, Viewer};
use storaged_wire::local::{BoardKind, DurableWish, Reply, Request, Role};
use storaged_wire::{CheckpointState, Namespace, Rank, RefusalCode, TenantName};

fn tenant(name: &str) -> TenantName {
    TenantName::new(name).expect("a tenant")
}

fn job(name: &str) -> Namespace {
    Namespace::new(name).expect("a namespace")
}

/// Blue and red have a job of the same name each, with the same token, and blue has saved two steps where red has one.
fn blue_and_red() -> Cluster {
    let mut cluster = Cluster::start(4, 2, 10);
    cluster.end_job();
    for (name, steps) in [("red~llama", 1), ("blue~llama", 2)] {
        cluster.begin_job(name);
        for _ in 0..steps {
            cluster.save_and_wait(DurableWish::Never);
        }
    }
    cluster
}

#[test]
fn jobs_of_one_name_are_each_tenants_own() {
    let mut cluster = blue_and_red();
    for (name, newest) in [("blue~llama", 2), ("red~llama", 1)] {
        cluster.ask_of(name);
        let reader = cluster.connect(5, Role::Reader);
        let Reply::Plan(plan) = cluster.ask(5, reader, plan_newest(10_000)) else {
            panic!("no plan");
        };
        assert_eq!((plan.namespace, plan.step.get()), (job(name), newest));
    }
}

#[test]
fn another_tenants_job_is_not_reached_by_its_name() {
    let mut cluster = blue_and_red();
    let (blue, viewer) = (cluster.fresh_conn(), Viewer::Tenant(Some(tenant("blue"))));
    cluster.tell(0, Input::Connected { conn: blue, viewer });
    let said = [job("red~llama"), job("llama")];
    let of_red = Request::List {
        namespace: Some(said[0].clone()),
    };
    for request in [testkit::hello(said[0].clone(), Role::Reader), of_red] {
        match cluster.ask(0, blue, request) {
            Reply::Refused(refusal) => assert_eq!(refusal.code, RefusalCode::WrongUser),
            other => panic!("{other:?}"),
        }
    }
    let unnamed = cluster.fresh_conn();
    let reply = cluster.ask(0, unnamed, testkit::hello(said[0].clone(), Role::Reader));
    assert!(matches!(reply, Reply::Refused(_)), "{reply:?}");
}

/// A cluster without jobs, in which a tenant opens so many new ones at most.
fn blue_with_new_jobs(most: usize) -> Cluster {
    let share = TenantShare {
        new_jobs: Some(most),
        ..TenantShare::default()
    };
    let room = Room {
        shares: BTreeMap::from([(Some(tenant("blue")), share)]),
        ..Room::default()
    };
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    cluster.end_job();
    cluster
}

/// How many of so many jobs a tenant can open a run of, one after the other.
fn opened(cluster: &mut Cluster, tenant: &str, jobs: usize) -> usize {
    let mut open = |which: &usize| {
        cluster.ask_of(&format!("{tenant}~job-{which}"));
        let conn = cluster.connect(0, Role::Reader);
        let reply = cluster.ask(0, conn, Request::OpenRun { timeout_ms: 5_000 });
        match reply {
            Reply::RunOpened { .. } => true,
            Reply::Refused(refusal) if refusal.code == RefusalCode::Busy => false,
            other => panic!("{other:?}"),
        }
    };
    (0..jobs).filter(|which| open(which)).count()
}

/// Names cost every node memory for as long as they are remembered.
#[test]
fn a_tenant_opens_only_so_many_jobs_that_save_nothing() {
    let mut cluster = blue_and_red();
    assert_eq!(opened(&mut cluster, "red", 300), 256);
    // It is that tenant's own affair, and over in a minute.
    assert_eq!(opened(&mut cluster, "blue", 20), 20);
    cluster.run_for(65_000);
    assert!(opened(&mut cluster, "red", 300) > 280);
}

#[test]
fn an_operator_says_how_many_new_jobs_a_tenant_opens() {
    let mut cluster = blue_with_new_jobs(2);
    assert_eq!(opened(&mut cluster, "blue", 5), 2);
    assert_eq!(opened(&mut cluster, "red", 5), 5);
    // Who saves is not counted.
    cluster.run_for(65_000);
    cluster.begin_job("blue~llama");
    cluster.save_and_wait(DurableWish::Never);
    assert_eq!(opened(&mut cluster, "blue", 5), 4, "two were known");
}

/// One that has saved is none of those that have saved nothing, also once its trainers have gone and while somebody asks for plans of it.
#[test]
fn a_job_that_has_saved_keeps_its_tenant_from_no_new_one() {
    let mut cluster = blue_with_new_jobs(1);
    cluster.begin_job("blue~llama");
    cluster.save_and_wait(DurableWish::Never);
    cluster.end_job();
    cluster.run_for(1_000);
    assert_eq!(opened(&mut cluster, "blue", 3), 1);
}

/// As if nothing were to be said of memory that costs a byte.
#[test]
fn a_job_that_has_no_more_than_a_board_has_saved_nothing() {
    let mut cluster = blue_with_new_jobs(1);
    let mut known = 0;
    for number in 0..4 {
        cluster.ask_of(&format!("blue~board{number}"));
        let conn = cluster.connect(0, Role::Reader);
        let board = Request::Board {
            rank: Rank::new(0),
            kind: BoardKind::Steps,
            bytes: 1,
        };
        cluster.ask(0, conn, board);
        let reply = cluster.ask(0, conn, Request::OpenRun { timeout_ms: 10_000 });
        known += usize::from(matches!(reply, Reply::RunOpened { .. }));
        cluster.disconnect(0, conn);
    }
    assert_eq!(known, 1);
}

#[test]
fn a_token_that_can_be_guessed_is_refused() {
    let mut cluster = Cluster::start(4, 2, 10);
    for (bytes, good) in [
        (0, true),
        (1, false),
        (15, false),
        (16, true),
        (1024, true),
        (1025, false),
    ] {
        let conn = cluster.fresh_conn();
        let mut hello = testkit::hello(job(&format!("of-{bytes}")), Role::Reader);
        if let Request::Hello { token, .. } = &mut hello {
            *token = vec![7; bytes].into();
        }
        let reply = cluster.ask(0, conn, hello);
        assert_eq!(
            matches!(reply, Reply::Welcome { .. }),
            good,
            "{bytes}: {reply:?}"
        );
    }
}

/// Names of manifests stand in logs and on the operator's pages.
#[test]
fn the_name_of_its_manifest_opens_no_other_tenants_checkpoint() {
    let mut cluster = blue_and_red();
    cluster.ask_of("red~llama");
    let red = cluster.connect(0, Role::Reader);
    let Reply::Plan(plan) = cluster.ask(0, red, plan_newest(10_000)) else {
        panic!("no plan");
    };
    cluster.ask_of("blue~llama");
    let blue = cluster.connect(0, Role::Reader);
    let open = testkit::open_shard(plan.manifest, Rank::new(0), 10_000);
    for request in [
        open,
        Request::GetManifest {
            manifest: plan.manifest,
        },
    ] {
        match cluster.ask(0, blue, request) {
            Reply::Refused(refusal) => {
                assert_eq!(refusal.code, RefusalCode::NoCheckpoint);
                assert!(!refusal.message.contains("red"), "{}", refusal.message);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn no_answer_tells_a_tenant_of_another_ones_jobs() {
    let mut cluster = blue_and_red();
    cluster.ask_of("blue~llama");
    let blue = cluster.connect(0, Role::Reader);
    let Reply::Checkpoints(infos) = cluster.ask(0, blue, Request::List { namespace: None }) else {
        panic!("no list");
    };
    assert!(!infos.is_empty() && infos.iter().all(|info| info.namespace == job("blue~llama")));
    let Reply::Status(status) = cluster.ask(0, blue, Request::Status) else {
        panic!("no status");
    };
    assert!(
        status.contains("blue~llama") && !status.contains("red~"),
        "{status}"
    );
    cluster.kill(5);
    cluster.run_for(5_000);
    let Reply::RestartSafe(why) = cluster.ask(0, blue, Request::RestartSafe { bears: None }) else {
        panic!("no answer");
    };
    assert_eq!(why.len(), 2, "{why:?}");
    assert!(!why.concat().contains("red"), "{why:?}");
    let shown = cluster.ram(0).node.status_json(&Viewer::Public);
    assert!(
        !shown.contains("llama") && shown.contains("job-"),
        "{shown}"
    );
}

#[test]
fn a_refusal_names_no_other_tenants_job() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, small(BTreeMap::new()));
    cluster.end_job();
    cluster.begin_job("red~llama");
    cluster.save_and_wait(DurableWish::Never);
    cluster.begin_job("blue~llama");
    let (code, text) = cluster.refused_slot(0, 3 * SLOT);
    assert_eq!(code, RefusalCode::BudgetFull);
    assert!(text.contains("other tenants 2097152 bytes"), "{text}");
    assert!(!text.contains("red"), "{text}");
}

/// Nodes with room for three shards.
fn small(shares: BTreeMap<Option<TenantName>, TenantShare>) -> Room {
    Room {
        budget: 3 * SLOT,
        shares,
        ..Room::default()
    }
}

fn shares(
    of: &str,
    guaranteed: u64,
    most: Option<u64>,
) -> BTreeMap<Option<TenantName>, TenantShare> {
    let share = TenantShare {
        guaranteed,
        most,
        new_jobs: None,
    };
    BTreeMap::from([(Some(tenant(of)), share)])
}

#[test]
fn what_a_tenant_is_sure_of_is_there_when_it_comes() {
    let room = small(shares("blue", 2 * SLOT, None));
    let mut cluster = Cluster::start_with(4, 2, 10, None, room);
    cluster.end_job();
    cluster.begin_job("red~llama");
    let red = cluster.trainer(0);
    let reply = cluster.ask(0, red, acquire_slot(SLOT, 1_000));
    assert!(matches!(reply, Reply::SlotGranted { .. }), "{reply:?}");
    let (code, text) = cluster.refused_slot(0, SLOT);
    assert_eq!(code, RefusalCode::BudgetFull);
    assert!(
        text.contains("4194304 are kept for other tenants"),
        "{text}"
    );
    cluster.begin_job("blue~llama");
    for _ in 0..2 {
        let blue = cluster.trainer(0);
        let reply = cluster.ask(0, blue, acquire_slot(SLOT, 1_000));
        assert!(matches!(reply, Reply::SlotGranted { .. }), "{reply:?}");
    }
}

#[test]
fn a_tenant_has_no_more_than_it_may_and_takes_it_from_no_other() {
    let room = small(shares("blue", 0, Some(SLOT)));
    let tier = Some(Conduct::default());
    let mut cluster = Cluster::start_with(4, 2, 10, tier, room);
    cluster.end_job();
    // It has ended and is durable: it would give way to a job that lacks room.
    cluster.begin_job("red~llama");
    cluster.save_and_wait(DurableWish::Required);
    cluster.end_job();
    cluster.run_for(60_000);
    cluster.begin_job("blue~llama");
    let blue = cluster.trainer(0);
    let granted = cluster.ask(0, blue, acquire_slot(SLOT, 1_000));
    assert!(matches!(granted, Reply::SlotGranted { .. }), "{granted:?}");
    let (code, text) = cluster.refused_slot(0, SLOT);
    assert_eq!(code, RefusalCode::BudgetFull);
    let why = "uses 2097152 of the 2097152 that it may have";
    assert!(text.contains(why), "{text}");
    assert_eq!(cluster.ledger(0).used, 2 * SLOT, "red's is still there");
}

#[test]
fn what_a_tenant_is_sure_of_is_not_taken_from_it_while_it_rests() {
    let room = small(shares("blue", SLOT, None));
    let tier = Some(Conduct::default());
    let mut cluster = Cluster::start_with(4, 2, 10, tier, room);
    cluster.end_job();
    // Durable and without trainers: of a tenant without a guarantee it would give way.
    cluster.begin_job("blue~llama");
    cluster.save_and_wait(DurableWish::Required);
    cluster.end_job();
    cluster.run_for(60_000);
    cluster.begin_job("red~llama");
    for _ in 0..2 {
        let red = cluster.trainer(0);
        let granted = cluster.ask(0, red, acquire_slot(SLOT, 1_000));
        assert!(matches!(granted, Reply::SlotGranted { .. }), "{granted:?}");
    }
    assert_eq!(cluster.refused_slot(0, SLOT).0, RefusalCode::BudgetFull);
    assert_eq!(cluster.ledger(0).used, 3 * SLOT, "blue's is still there");
}

#[test]
fn free_slots_of_trainers_that_have_left_are_another_jobs_at_once() {
    let mut cluster = Cluster::start_with(4, 2, 10, None, small(BTreeMap::new()));
    cluster.end_job();
    cluster.begin_job("red~llama");
    let red = cluster.trainer(0);
    for _ in 0..3 {
        let granted = cluster.ask(0, red, acquire_slot(SLOT, 1_000));
        assert!(matches!(granted, Reply::SlotGranted { .. }), "{granted:?}");
    }
    cluster.begin_job("blue~llama");
    assert_eq!(cluster.refused_slot(0, SLOT).0, RefusalCode::BudgetFull);
    cluster.disconnect(0, red);
    let granted = cluster.ask(0, cluster.trainer(0), acquire_slot(SLOT, 1_000));
    assert!(matches!(granted, Reply::SlotGranted { .. }), "{granted:?}");
}

/// A step of each of these jobs is being coded, or waits for its turn.
fn all_save(cluster: &mut Cluster, jobs: &[String]) {
    cluster.end_job();
    for name in jobs {
        cluster.begin_job(name);
        cluster.save();
    }
}

/// How many of these jobs have a step that is protected.
fn protected(cluster: &Cluster, jobs: &[String]) -> usize {
    let of = |name: &&String| {
        let is_of = |note: &Note| matches!(note, Note::State { key, state: CheckpointState::Protected } if key.namespace == job(name));
        cluster.notes.iter().any(|(_, _, note)| is_of(note))
    };
    jobs.iter().filter(of).count()
}

#[test]
fn a_tenant_with_many_jobs_holds_up_no_other_ones_coding() {
    let mut cluster = Cluster::start(2, 2, 400);
    let red: Vec<String> = (0..12).map(|number| format!("red~{number}")).collect();
    all_save(&mut cluster, &red);
    cluster.begin_job("blue~llama");
    cluster.save();
    let took = cluster.run_until(600_000, "protection", |it| it.is_protected(0));
    let before = protected(&cluster, &red);
    assert!(before <= 4, "{before} of red's steps came first");
    // Four of red's sessions share the links when it comes: with a fifth of them it needs five times its own time, and no more.
    let alone = 400 * STRIPE_MS;
    assert!(took < 6 * alone, "{took} ms: it waited for one of red's");
    cluster.run_until(600_000, "red's", |it| protected(it, &red) == red.len());
}

#[test]
fn jobs_of_one_tenant_are_coded_in_turn() {
    let mut cluster = Cluster::start(2, 2, 400);
    let many: Vec<String> = (0..12).map(|number| format!("z{number}")).collect();
    all_save(&mut cluster, &many);
    cluster.begin_job("a");
    cluster.save();
    cluster.run_until(600_000, "protection", |it| it.is_protected(0));
    let before = protected(&cluster, &many);
    assert!(before <= 8, "{before} steps of others came first");
}
