//! What a member refuses before it takes any memory for it.

use storaged_codec::{ChunkSize, Digest, Geometry};
use storaged_wire::local::DurableWish;
use storaged_wire::manifest::GroupEntry;
use storaged_wire::peer::{Lane, PeerMessage, SessionFault, SessionKind, SessionRecord, SumChecks};
use storaged_wire::{
    Generation, Manifest, ManifestBytes, Namespace, NodeName, Owner, Rank, RunId, SessionId,
    ShardEntry, Step, WorldSize,
};

use super::LinkRates;
use crate::place::Member;
use crate::{DurableForm, DurablePolicy, Input, Node, Now, Output, RunsWithoutTier, Setup, limits};

const CHUNK: u64 = 4096;

fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

/// The node that codes what n0 has.
fn coder() -> Node {
    let member = |text: &str| Member {
        name: name(text),
        failure_domain: text.into(),
    };
    Node::new(Setup {
        name: name("n1"),
        generation: Generation::new(1),
        members: vec![member("n0"), member("n1")],
        geometry: Some(Geometry::new(1, 1).unwrap()),
        chunk: ChunkSize::new(CHUNK as u32).unwrap(),
        slots_per_rank: 3,
        // The count is refused, not the room.
        budget: u64::MAX,
        idle_job_ms: 3_600_000,
        link_rates: LinkRates::default(),
        durable: DurablePolicy::Absent,
        runs_without_tier: RunsWithoutTier::Refused,
        durable_form: DurableForm::Full,
    })
    .unwrap()
}

fn manifest(stripes: u64) -> ManifestBytes {
    Manifest {
        version: Manifest::VERSION,
        namespace: Namespace::new("job").unwrap(),
        owner: Owner::of_token(b"token"),
        run: RunId::new(1),
        step: Step::new(1),
        world_size: WorldSize::new(1).unwrap(),
        epoch: 1,
        geometry: Geometry::new(1, 1).unwrap(),
        chunk: ChunkSize::new(CHUNK as u32).unwrap(),
        shards: vec![ShardEntry {
            rank: Rank::new(0),
            node: name("n0"),
            length: stripes * CHUNK,
            root: Digest::from_bytes(&[0; 32]),
        }],
        groups: vec![GroupEntry {
            data: vec![name("n0")],
            coding: vec![name("n1")],
        }],
        schema: vec![].into(),
        torch_metadata: vec![].into(),
    }
    .seal()
    .unwrap()
}

/// What n1 answers to a session of so many stripes.
fn answer(stripes: u64) -> PeerMessage {
    let mut node = coder();
    let (from, now) = (name("n0"), Now(10_000));
    let up = Input::PeerUp {
        node: from.clone(),
        generation: Generation::new(2),
    };
    let manifest = manifest(stripes);
    let record = SessionRecord {
        session: SessionId::new(7),
        manifest: manifest.name(),
        kind: SessionKind::Encode {
            lane: Lane { group: 0, index: 0 },
            basis: None,
            checks: SumChecks::Parity,
            parities: vec![0],
        },
    };
    let committed = PeerMessage::Committed {
        manifest: manifest.bytes().to_vec().into(),
        durable: DurableWish::Never,
    };
    node.handle(now, up);
    for message in [committed, PeerMessage::Propose(record)] {
        let from = from.clone();
        let outputs = node.handle(now, Input::Message { from, message });
        let answered = outputs.into_iter().find_map(|output| match output {
            Output::Send { message, .. } => match message {
                PeerMessage::Ready { .. } | PeerMessage::Failed { .. } => Some(message),
                _ => None,
            },
            _ => None,
        });
        if let Some(answered) = answered {
            return answered;
        }
    }
    panic!("no answer");
}

/// A forged manifest may name any length: a member keeps a bit or two for each stripe, and must not try for all.
#[test]
fn more_stripes_than_memory_could_count_are_refused() {
    let most = limits::STRIPES_MAX;
    for stripes in [most + 1, u64::MAX / CHUNK / 2] {
        let PeerMessage::Failed { fault, .. } = answer(stripes) else {
            panic!("{stripes} stripes are taken");
        };
        let SessionFault::Neighbour { node, reason } = fault else {
            panic!("{fault:?}");
        };
        assert_eq!(node, name("n0"));
        assert_eq!(
            reason,
            format!("expected at most {most} stripes, got {stripes}")
        );
    }
    assert!(matches!(answer(3), PeerMessage::Ready { .. }));
}
