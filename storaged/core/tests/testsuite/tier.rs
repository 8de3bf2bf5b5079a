//! A durable tier that cannot be asked: its silence is never taken for "nothing there".

use std::sync::Arc;

use crate::testkit::{
    Alone, CHUNK_BYTES, Wanted, hello, members, name, namespace, open_shard, owner, plan_newest,
    setup,
};
use storaged_codec::{ChunkSize, Geometry, root_digest};
use storaged_core::{
    ConnId, DurableFault, DurableListing, DurablePolicy, Input, Note, SetAside, SetAsideCause,
    Setup, TierNews,
};
use storaged_wire::local::{Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{
    Enclosed, Generation, KeptDamage, KeptNamespace, KeptRecord, Manifest, ManifestBytes,
    Namespace, Rank, RefusalCode, RunId, ShardEntry, Step, WorldSize,
};

/// The connection of a reader that is attached to a job.
const READER: ConnId = ConnId(1);
/// What is wrong with a copy.
const MISMATCH: &str = "digest mismatch in chunk 1";

/// A single node with a durable tier, and a reader attached to a job.
fn start() -> Alone {
    start_with(None)
}

/// The same, where an earlier daemon has kept this of the job.
fn start_with(kept: Option<KeptNamespace>) -> Alone {
    let mut alone = Alone::new(Setup {
        durable: DurablePolicy::OnRequest,
        ..setup(name(0), members(1))
    });
    alone.now = 10_000;
    if let Some(job) = kept {
        let records = vec![KeptRecord::Namespace(Box::new(job))];
        alone.handle(Input::Recovered { records });
    }
    alone.handle(Input::Tick);
    let welcome = alone.greet(READER, hello(namespace(), Role::Reader));
    assert!(matches!(welcome, Some(Reply::Welcome { .. })));
    alone
}

/// A peer has found a step's copy damaged.
fn hear_quarantine(alone: &mut Alone, step: u64) {
    let damaged = manifest(step);
    let message = PeerMessage::Quarantined {
        manifest: damaged.name(),
        key: CheckpointKey::of(damaged.manifest()),
        reason: MISMATCH.into(),
    };
    alone.hear(&name(1), message);
}

/// The answer to a request whose listing of the tier ends so.
fn ask_with(
    alone: &mut Alone,
    request: Request,
    outcome: Result<DurableListing, DurableFault>,
) -> Reply {
    let query = alone.ask(READER, request).listing();
    let query = query.expect("the tier is asked");
    let wanted = alone.handle(Input::DurableListed { query, outcome });
    wanted.reply().expect("an answer")
}

const PLAN: Request = plan_newest(5_000);

fn down() -> DurableFault {
    DurableFault::Unavailable("no answer from s3://bucket".into())
}

#[track_caller]
fn refused(reply: Reply) -> (RefusalCode, String) {
    match reply {
        Reply::Refused(refusal) => (refusal.code, refusal.message),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn a_tier_that_does_not_answer_is_never_nothing_saved() {
    let (code, text) = refused(ask_with(&mut start(), PLAN, Err(down())));
    assert_eq!(code, RefusalCode::DurableUnavailable);
    assert!(text.contains("no answer from s3://bucket"), "{text}");
}

#[test]
fn an_empty_tier_is_nothing_saved() {
    let (code, _) = refused(ask_with(&mut start(), PLAN, Ok(DurableListing::default())));
    assert_eq!(code, RefusalCode::UnknownNamespace);
}

#[test]
fn a_listing_that_takes_too_long_is_no_answer_either() {
    let mut alone = start();
    assert!(alone.ask(READER, PLAN).listing().is_some());
    alone.now += 60_000;
    let (code, _) = refused(alone.handle(Input::Tick).reply().expect("an answer"));
    assert_eq!(code, RefusalCode::DurableUnavailable);
}

fn manifest(step: u64) -> Arc<ManifestBytes> {
    let manifest = Manifest {
        version: Manifest::VERSION,
        namespace: namespace(),
        owner: owner(),
        run: RunId::new(1),
        step: Step::new(step),
        world_size: WorldSize::new(1).unwrap(),
        epoch: 0,
        geometry: Geometry::new(1, 1).unwrap(),
        chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
        shards: vec![ShardEntry {
            rank: Rank::new(0),
            node: name(0),
            length: 0,
            root: root_digest(&[], 0, ChunkSize::new(CHUNK_BYTES).unwrap()),
        }],
        groups: vec![],
        schema: Enclosed::nothing(),
        torch_metadata: Enclosed::nothing(),
    };
    Arc::new(manifest.seal().unwrap())
}

fn holding(steps: &[u64]) -> DurableListing {
    DurableListing {
        manifests: steps.iter().map(|step| manifest(*step)).collect(),
        newest_run: Some(RunId::new(1)),
        ..DurableListing::default()
    }
}

#[track_caller]
fn offered(reply: Reply) -> RestorePlan {
    match reply {
        Reply::Plan(plan) => plan,
        other => panic!("expected a plan, got {other:?}"),
    }
}

#[test]
fn what_the_tier_sets_aside_is_passed_over_and_said() {
    let mut listing = holding(&[20]);
    listing.set_aside.push(SetAside {
        run: RunId::new(1),
        step: Step::new(30),
        cause: SetAsideCause::Quarantined,
        reason: MISMATCH.into(),
    });
    let plan = offered(ask_with(&mut start(), PLAN, Ok(listing)));
    assert_eq!(plan.step, Step::new(20));
    assert_eq!(plan.passed_over.len(), 1);
    assert_eq!(plan.passed_over[0].step, Step::new(30));
    let reason = &plan.passed_over[0].reason;
    assert!(reason.contains("quarantined: digest mismatch"), "{reason}");
}

#[test]
fn a_peers_quarantine_counts_unless_the_step_is_asked_for() {
    let mut alone = start();
    hear_quarantine(&mut alone, 30);
    let plan = offered(ask_with(&mut alone, PLAN, Ok(holding(&[30, 20]))));
    assert_eq!(plan.step, Step::new(20));
    assert!(plan.passed_over[0].reason.contains("n1 found"), "{plan:?}");
    let asked = Request::Plan {
        step: Some(Step::new(30)),
        timeout_ms: 5_000,
        allow_older: false,
    };
    let plan = offered(ask_with(&mut alone, asked, Ok(holding(&[30]))));
    assert_eq!(plan.step, Step::new(30));
}

#[test]
fn the_status_says_how_the_tier_is() {
    let mut alone = start();
    let status = |alone: &Alone| alone.node.status_json(&storaged_core::Viewer::Operator);
    assert!(status(&alone).contains(r#""durable":{"state":"ready"}"#));
    let fault = DurableFault::Denied(r#"access denied: "no""#.into());
    let first = alone.handle(Input::DurableState(TierNews::Opened(Err(fault.clone()))));
    assert_eq!(notes(&first), 1);
    let again = alone.handle(Input::DurableState(TierNews::Opened(Err(fault))));
    assert_eq!(notes(&again), 0, "said once");
    let said = r#""durable":{"state":"denied","fault":"access denied: 'no'"}"#;
    assert!(status(&alone).contains(said), "{}", status(&alone));
    assert_eq!(
        notes(&alone.handle(Input::DurableState(TierNews::Opened(Ok(()))))),
        1
    );
    assert!(status(&alone).contains(r#""durable":{"state":"ready"}"#));
}

/// Its reads go on, and tell of no end.
#[test]
fn a_tier_that_answers_no_writes_is_not_called_ready_because_it_can_be_read() {
    let mut alone = start();
    let state = |alone: &Alone| alone.node.tier_fault().map(DurableFault::name);
    let writes = |outcome| Input::DurableState(TierNews::Writes(outcome));
    let hangs = DurableFault::Unavailable("no write has been answered for 90 s".into());
    assert_eq!(notes(&alone.handle(writes(Err(hangs)))), 1);
    ask_with(&mut alone, PLAN, Ok(holding(&[10])));
    assert_eq!(state(&alone), Some("unavailable"));
    ask_with(&mut alone, PLAN, Err(down()));
    ask_with(&mut alone, PLAN, Ok(holding(&[10])));
    assert_eq!(state(&alone), Some("unavailable"));
    assert_eq!(notes(&alone.handle(writes(Ok(())))), 1);
    assert_eq!(state(&alone), None);
}

#[test]
fn the_status_shows_what_the_newest_listing_found_quarantined() {
    let mut alone = start();
    let mut listing = holding(&[10]);
    for (step, cause) in [
        (30, SetAsideCause::Quarantined),
        (20, SetAsideCause::Unusable),
    ] {
        listing.set_aside.push(SetAside {
            run: RunId::new(1),
            step: Step::new(step),
            cause,
            reason: format!("fault of {step}"),
        });
    }
    ask_with(&mut alone, PLAN, Ok(listing));
    let status = alone.node.status_json(&storaged_core::Viewer::Operator);
    assert!(status.contains("fault of 30"), "{status}");
    assert!(
        !status.contains("fault of 20"),
        "nobody has marked it: {status}"
    );
    ask_with(&mut alone, PLAN, Ok(holding(&[10])));
    let status = alone.node.status_json(&storaged_core::Viewer::Operator);
    assert!(!status.contains("fault of"), "it was removed: {status}");
}

#[test]
fn every_quarantine_that_peers_tell_of_counts() {
    let mut alone = start();
    for step in [40, 30, 20] {
        hear_quarantine(&mut alone, step);
    }
    let plan = offered(ask_with(&mut alone, PLAN, Ok(holding(&[40, 30, 20, 10]))));
    assert_eq!((plan.step, plan.passed_over.len()), (Step::new(10), 3));
}

#[test]
fn a_manifest_goes_to_its_own_job_alone() {
    let mut alone = start();
    let plan = offered(ask_with(&mut alone, PLAN, Ok(holding(&[10]))));
    let manifest = plan.manifest;
    let get = Request::GetManifest { manifest };
    let given = alone.ask(READER, get.clone()).reply().expect("an answer");
    assert!(matches!(given, Reply::Manifest { .. }), "{given:?}");

    let conn = ConnId(2);
    let other = hello(Namespace::new("other").unwrap(), Role::Reader);
    alone.greet(conn, other).expect("a welcome");
    let (code, text) = refused(alone.ask(conn, get).reply().expect("an answer"));
    assert_eq!(code, RefusalCode::NoCheckpoint, "{text}");
}

fn notes(wanted: &Wanted) -> usize {
    let states = wanted.notes();
    states
        .filter(|note| matches!(note, Note::DurableState { .. }))
        .count()
}

/// A node that lacks a key of the tier's reads what one job has there and not what another has: it answers both, again and again.
#[test]
fn what_is_amiss_with_a_configuration_is_told_once_and_its_end_once_it_has_ended() {
    let mut alone = start();
    let mut states = Vec::new();
    let mut list = |alone: &mut Alone, outcome: Result<DurableListing, DurableFault>| {
        let query = alone.ask(READER, PLAN).listing().expect("it is asked");
        let wanted = alone.handle(Input::DurableListed { query, outcome });
        states.extend(wanted.notes().filter_map(|note| match note {
            Note::DurableState { fault } => Some(fault.is_some()),
            _ => None,
        }));
        states.clone()
    };
    let locked = || DurableFault::Misconfigured("encrypted with key 1".into());
    for _ in 0..20 {
        list(&mut alone, Err(locked()));
        alone.now += 3_000;
        assert_eq!(list(&mut alone, Ok(DurableListing::default())), [true]);
        alone.now += 3_000;
    }
    alone.now += 60_000;
    let told = list(&mut alone, Ok(DurableListing::default()));
    assert_eq!(told, [true, false], "the key has come");
    // What passes by itself is over when it has passed.
    list(&mut alone, Err(down()));
    let told = list(&mut alone, Ok(DurableListing::default()));
    assert_eq!(told, [true, false, true, false]);
}

/// A shard of step 30 is opened here, and its copy in the tier proves to be so.
fn finds_damaged(alone: &mut Alone, fault: DurableFault) -> Wanted {
    let plan = offered(ask_with(alone, PLAN, Ok(holding(&[30, 20]))));
    assert_eq!(plan.step, Step::new(30));
    let open = open_shard(plan.manifest, Rank::new(0), 5_000);
    let mut wanted = alone.ask(READER, open);
    while wanted.fetched().is_none() {
        let input = match (wanted.created(), wanted.listing()) {
            (Some(slot), _) => Input::SlotCreated { slot },
            (None, Some(query)) => {
                let outcome = Ok(holding(&[30, 20]));
                Input::DurableListed { query, outcome }
            }
            _ => panic!("expected the tier to be read, got {wanted:?}"),
        };
        wanted = alone.handle(input);
    }
    let slot = wanted.fetched().expect("the tier is read");
    let outcome = Err(fault);
    alone.handle(Input::Fetched { slot, outcome })
}

/// A peer that comes up is told that step 30 is damaged.
fn tells_of_damage(alone: &mut Alone) {
    let node = name(1);
    let up = Input::PeerUp {
        node: node.clone(),
        generation: Generation::new(9),
    };
    let told = alone.handle(up);
    let is_told = |(to, message): (&_, &_)| match message {
        PeerMessage::Quarantined {
            manifest: name,
            reason,
            ..
        } => *to == node && *name == manifest(30).name() && reason.contains("chunk 1"),
        _ => false,
    };
    assert!(told.sent().any(is_told), "{told:?}");
}

/// A tier that is read-only takes no marker, and who has just started knows nothing: its peers tell it as soon as their link
/// is up, so its first plan leaves out what they found damaged.
#[test]
fn a_node_that_comes_up_is_told_of_what_was_found_damaged_here() {
    let faults: [fn(String) -> DurableFault; 2] =
        [DurableFault::Damaged, DurableFault::DamagedUnmarked];
    for fault in faults {
        let mut alone = start();
        finds_damaged(&mut alone, fault(MISMATCH.into()));
        tells_of_damage(&mut alone);
    }
}

/// Steps 20 and 30 are increments on 15, which is damaged: the restore of 30 has found that, and 10 is left.
#[test]
fn what_a_damaged_base_is_read_through_is_passed_over_by_the_next_plan() {
    let mut alone = start();
    for step in [15, 20] {
        let fault = DurableFault::DamagedUnmarked(MISMATCH.into());
        let found = TierNews::Damaged(manifest(step), fault);
        alone.handle(Input::DurableState(found));
    }
    hear_quarantine(&mut alone, 30);
    let plan = offered(ask_with(&mut alone, PLAN, Ok(holding(&[30, 20, 15, 10]))));
    assert_eq!(plan.step, Step::new(10));
    assert_eq!(plan.passed_over.len(), 3, "{plan:?}");
}

/// What the node keeps for its next daemon once a copy has proved to be so.
fn kept_after(fault: DurableFault) -> Option<KeptNamespace> {
    finds_damaged(&mut start(), fault).kept_job().cloned()
}

/// The tier is read-only, and the node's daemon is upgraded: the copy is as damaged as before.
#[test]
fn what_was_found_damaged_outlives_the_daemon_where_the_tier_took_no_mark() {
    let kept = kept_after(DurableFault::DamagedUnmarked(MISMATCH.into()));
    let expected = KeptDamage {
        manifest: manifest(30).name(),
        run: RunId::new(1),
        step: Step::new(30),
        reason: MISMATCH.into(),
    };
    let damaged = kept.as_ref().and_then(|job| job.damaged.clone());
    assert_eq!(damaged, Some(vec![expected]));
    let mut next = start_with(kept);
    let plan = offered(ask_with(&mut next, PLAN, Ok(holding(&[30, 20]))));
    assert_eq!(plan.step, Step::new(20));
    assert!(plan.passed_over[0].reason.contains(MISMATCH), "{plan:?}");
    let status = next.node.status_json(&storaged_core::Viewer::Operator);
    assert!(status.contains(MISMATCH), "{status}");
    tells_of_damage(&mut next);
}

/// Whoever mends the copy deletes the mark, and nobody remembers it.
#[test]
fn what_the_tier_has_a_mark_of_ends_with_the_daemon() {
    let kept = kept_after(DurableFault::Damaged(MISMATCH.into()));
    assert_eq!(kept.and_then(|job| job.damaged), None);
}

/// The copy was mended where nothing marks it: no daemon needs to be restarted, nor would that do.
#[test]
fn an_operator_takes_back_what_is_known_of_a_damaged_copy() {
    let step = Step::new(30);
    let kept = kept_after(DurableFault::DamagedUnmarked(MISMATCH.into()));
    let mut found_here = start_with(kept);
    let mut heard_of = start();
    hear_quarantine(&mut heard_of, 30);
    for alone in [&mut found_here, &mut heard_of] {
        let plan = offered(ask_with(alone, PLAN, Ok(holding(&[30, 20]))));
        assert_eq!(plan.step, Step::new(20));
        let lifted = alone.ask(READER, Request::LiftQuarantine { step });
        let Some(Reply::RestartsFailed(stands)) = lifted.reply() else {
            panic!("{lifted:?}");
        };
        let stands: Vec<_> = stands.iter().map(|it| (it.step, it.times)).collect();
        assert_eq!(stands, [(step, 0)]);
        let kept = lifted.kept_job();
        assert!(kept.is_none_or(|job| job.damaged.is_none()), "{kept:?}");
        let status = alone.node.status_json(&storaged_core::Viewer::Operator);
        assert!(!status.contains(MISMATCH), "{status}");
        let plan = offered(ask_with(alone, PLAN, Ok(holding(&[30, 20]))));
        assert_eq!(plan.step, step);
        let again = alone.ask(READER, Request::LiftQuarantine { step });
        let (code, _) = refused(again.reply().expect("an answer"));
        assert_eq!(code, RefusalCode::NoCheckpoint);
    }
}
