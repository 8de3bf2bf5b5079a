//! A durable tier that cannot be asked: its silence is never taken for "nothing there".

use std::sync::Arc;

use storaged_codec::{ChunkSize, Geometry, root_digest};
use storaged_core::{
    ConnId, DurableFault, DurableForm, DurableListing, DurablePolicy, Input, LinkRates, Node, Note,
    Now, Output, QueryId, RequestId, RunsWithoutTier, SetAside, SetAsideCause, Setup,
};
use storaged_plan::Member;
use storaged_wire::local::{LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{
    Generation, Manifest, ManifestBytes, Namespace, NodeName, Owner, Rank, RefusalCode, RunId,
    ShardEntry, Step, WorldSize,
};

/// A single node with a durable tier, and a reader attached to a job.
struct Alone {
    node: Node,
    now: u64,
    requests: u64,
}

impl Alone {
    fn start() -> Self {
        let name = NodeName::new("n0").unwrap();
        let member = Member {
            name: name.clone(),
            failure_domain: "n0".into(),
        };
        let setup = Setup {
            name,
            generation: Generation::new(1),
            members: vec![member],
            geometry: None,
            chunk: ChunkSize::new(4096).unwrap(),
            slots_per_rank: 3,
            budget: 1 << 30,
            idle_job_ms: 3_600_000,
            link_rates: LinkRates::default(),
            durable: DurablePolicy::OnRequest,
            messages: storaged_core::MessageLimits::default(),
            runs_without_tier: RunsWithoutTier::Refused,
            durable_form: DurableForm::Full,
        };
        let mut alone = Self {
            node: Node::new(setup).unwrap(),
            now: 10_000,
            requests: 0,
        };
        alone.node.handle(Now(alone.now), Input::Tick);
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace: Namespace::new("job").unwrap(),
            token: b"token".to_vec().into(),
            role: Role::Reader,
        };
        assert!(matches!(
            reply(&alone.ask(hello)),
            Some(Reply::Welcome { .. })
        ));
        alone
    }

    fn ask(&mut self, request: Request) -> Vec<Output> {
        let id = RequestId {
            conn: ConnId(1),
            index: self.requests,
        };
        self.requests += 1;
        self.handle(Input::Request { id, request })
    }

    /// One input, and what it leads to at once.
    fn handle(&mut self, input: Input) -> Vec<Output> {
        self.node.handle(Now(self.now), input)
    }

    /// A peer has found a step's copy damaged.
    fn hear_quarantine(&mut self, step: u64) {
        let damaged = manifest(step);
        let message = PeerMessage::Quarantined {
            manifest: damaged.name(),
            key: CheckpointKey::of(damaged.manifest()),
            reason: "digest mismatch in chunk 1".into(),
        };
        let from = NodeName::new("n1").unwrap();
        self.handle(Input::Message { from, message });
    }

    /// The answer to a request whose listing of the tier ends so.
    fn ask_with(
        &mut self,
        request: Request,
        outcome: Result<DurableListing, DurableFault>,
    ) -> Reply {
        let outputs = self.ask(request);
        let query = listing(&outputs).expect("the tier is asked");
        let outputs = self.handle(Input::DurableListed { query, outcome });
        reply(&outputs).expect("an answer")
    }
}

fn listing(outputs: &[Output]) -> Option<QueryId> {
    outputs.iter().find_map(|output| match output {
        Output::ListDurable { query, .. } => Some(*query),
        _ => None,
    })
}

fn reply(outputs: &[Output]) -> Option<Reply> {
    outputs.iter().find_map(|output| match output {
        Output::Reply { reply, .. } => Some(reply.clone()),
        _ => None,
    })
}

const PLAN: Request = Request::Plan {
    step: None,
    timeout_ms: 5_000,
    allow_older: false,
};

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
    let (code, text) = refused(Alone::start().ask_with(PLAN, Err(down())));
    assert_eq!(code, RefusalCode::DurableUnavailable);
    assert!(text.contains("no answer from s3://bucket"), "{text}");
}

#[test]
fn an_empty_tier_is_nothing_saved() {
    let (code, _) = refused(Alone::start().ask_with(PLAN, Ok(DurableListing::default())));
    assert_eq!(code, RefusalCode::UnknownNamespace);
}

#[test]
fn a_listing_that_takes_too_long_is_no_answer_either() {
    let mut alone = Alone::start();
    assert!(listing(&alone.ask(PLAN)).is_some());
    alone.now += 60_000;
    let (code, _) = refused(reply(&alone.handle(Input::Tick)).expect("an answer"));
    assert_eq!(code, RefusalCode::DurableUnavailable);
}

fn manifest(step: u64) -> Arc<ManifestBytes> {
    let manifest = Manifest {
        version: Manifest::VERSION,
        namespace: Namespace::new("job").unwrap(),
        owner: Owner::of_token(b"token"),
        run: RunId::new(1),
        step: Step::new(step),
        world_size: WorldSize::new(1).unwrap(),
        epoch: 0,
        geometry: Geometry::new(1, 1).unwrap(),
        chunk: ChunkSize::new(4096).unwrap(),
        shards: vec![ShardEntry {
            rank: Rank::new(0),
            node: NodeName::new("n0").unwrap(),
            length: 0,
            root: root_digest(&[], 0, ChunkSize::new(4096).unwrap()),
        }],
        groups: vec![],
        schema: vec![].into(),
        torch_metadata: vec![].into(),
    };
    Arc::new(manifest.seal().unwrap())
}

fn holding(steps: &[u64]) -> DurableListing {
    DurableListing {
        manifests: steps.iter().map(|step| manifest(*step)).collect(),
        newest_run: Some(RunId::new(1)),
        set_aside: Vec::new(),
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
        reason: "digest mismatch in chunk 1".into(),
    });
    let plan = offered(Alone::start().ask_with(PLAN, Ok(listing)));
    assert_eq!(plan.step, Step::new(20));
    assert_eq!(plan.passed_over.len(), 1);
    assert_eq!(plan.passed_over[0].step, Step::new(30));
    let reason = &plan.passed_over[0].reason;
    assert!(reason.contains("quarantined: digest mismatch"), "{reason}");
}

#[test]
fn a_peers_quarantine_counts_unless_the_step_is_asked_for() {
    let mut alone = Alone::start();
    alone.hear_quarantine(30);
    let plan = offered(alone.ask_with(PLAN, Ok(holding(&[30, 20]))));
    assert_eq!(plan.step, Step::new(20));
    assert!(plan.passed_over[0].reason.contains("n1 found"), "{plan:?}");
    let asked = Request::Plan {
        step: Some(Step::new(30)),
        timeout_ms: 5_000,
        allow_older: false,
    };
    let plan = offered(alone.ask_with(asked, Ok(holding(&[30]))));
    assert_eq!(plan.step, Step::new(30));
}

#[test]
fn the_status_says_how_the_tier_is() {
    let mut alone = Alone::start();
    let status = |alone: &Alone| alone.node.status_json();
    assert!(status(&alone).contains(r#""durable":{"state":"ready"}"#));
    let fault = DurableFault::Denied(r#"access denied: "no""#.into());
    let first = alone.handle(Input::DurableState(Err(fault.clone())));
    assert_eq!(notes(&first), 1);
    let again = alone.handle(Input::DurableState(Err(fault)));
    assert_eq!(notes(&again), 0, "said once");
    let said = r#""durable":{"state":"denied","fault":"access denied: 'no'"}"#;
    assert!(status(&alone).contains(said), "{}", status(&alone));
    assert_eq!(notes(&alone.handle(Input::DurableState(Ok(())))), 1);
    assert!(status(&alone).contains(r#""durable":{"state":"ready"}"#));
}

#[test]
fn the_status_shows_what_the_newest_listing_found_quarantined() {
    let mut alone = Alone::start();
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
    alone.ask_with(PLAN, Ok(listing));
    let status = alone.node.status_json();
    assert!(status.contains("fault of 30"), "{status}");
    assert!(
        !status.contains("fault of 20"),
        "nobody has marked it: {status}"
    );
    alone.ask_with(PLAN, Ok(holding(&[10])));
    let status = alone.node.status_json();
    assert!(!status.contains("fault of"), "it was removed: {status}");
}

#[test]
fn every_quarantine_that_peers_tell_of_counts() {
    let mut alone = Alone::start();
    for step in [40, 30, 20] {
        alone.hear_quarantine(step);
    }
    let plan = offered(alone.ask_with(PLAN, Ok(holding(&[40, 30, 20, 10]))));
    assert_eq!((plan.step, plan.passed_over.len()), (Step::new(10), 3));
}

#[test]
fn a_manifest_goes_to_its_own_job_alone() {
    let mut alone = Alone::start();
    let plan = offered(alone.ask_with(PLAN, Ok(holding(&[10]))));
    let manifest = plan.manifest;
    let get = Request::GetManifest { manifest };
    let given = reply(&alone.ask(get.clone())).expect("an answer");
    assert!(matches!(given, Reply::Manifest(_)), "{given:?}");

    let conn = ConnId(2);
    let hello = Request::Hello {
        version: LOCAL_VERSION,
        namespace: Namespace::new("other").unwrap(),
        token: b"token".to_vec().into(),
        role: Role::Reader,
    };
    for (index, request) in [hello, get].into_iter().enumerate() {
        let index = index as u64;
        let id = RequestId { conn, index };
        let outputs = alone.handle(Input::Request { id, request });
        let answer = reply(&outputs).expect("an answer");
        if index == 1 {
            let (code, text) = refused(answer);
            assert_eq!(code, RefusalCode::NoCheckpoint, "{text}");
        }
    }
}

fn notes(outputs: &[Output]) -> usize {
    let note = |output: &&Output| matches!(output, Output::Note(Note::DurableState { .. }));
    outputs.iter().filter(note).count()
}

/// A tier that is read-only takes no marker, and who has just started knows nothing: its peers tell it as soon as their link
/// is up, so its first plan leaves out what they found damaged.
#[test]
fn a_node_that_comes_up_is_told_of_what_was_found_damaged_here() {
    let mut alone = Alone::start();
    let plan = offered(alone.ask_with(PLAN, Ok(holding(&[30, 20]))));
    assert_eq!(plan.step, Step::new(30));
    let open = Request::OpenShard {
        manifest: plan.manifest,
        rank: Rank::new(0),
        ranges: vec![],
        timeout_ms: 5_000,
        without: None,
    };
    let mut waiting = alone.ask(open);
    let mut fetched = None;
    while let Some(output) = (!waiting.is_empty()).then(|| waiting.remove(0)) {
        match output {
            Output::CreateSlot { slot, .. } => {
                waiting.extend(alone.handle(Input::SlotCreated { slot }))
            }
            Output::ListDurable { query, .. } => {
                let outcome = Ok(holding(&[30, 20]));
                waiting.extend(alone.handle(Input::DurableListed { query, outcome }));
            }
            Output::Fetch { slot, .. } => fetched = Some(slot),
            _ => {}
        }
    }
    let slot = fetched.expect("the tier is read");
    let outcome = Err(DurableFault::Damaged("digest mismatch in chunk 1".into()));
    alone.handle(Input::Fetched { slot, outcome });
    let node = NodeName::new("n1").unwrap();
    let up = Input::PeerUp {
        node: node.clone(),
        generation: Generation::new(9),
    };
    let told = alone.handle(up);
    let is_told = |output: &Output| match output {
        Output::Send {
            to,
            message:
                PeerMessage::Quarantined {
                    manifest: name,
                    reason,
                    ..
                },
        } => *to == node && *name == manifest(30).name() && reason.contains("chunk 1"),
        _ => false,
    };
    assert!(told.iter().any(is_told), "{told:?}");
}
