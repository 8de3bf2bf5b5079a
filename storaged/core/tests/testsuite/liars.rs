//! What one node can do to what others hold, by sessions that it says it leads, and to what is said of it.

use crate::cluster::{Cluster, Conduct, Room, Uploads};
use crate::testkit::{name, namespace};
use storaged_codec::digest;
use storaged_core::{Input, ParityId, Viewer};
use storaged_wire::local::{DurableWish, Reply, Request, Role, VerifiedPart};
use storaged_wire::peer::{
    CheckpointKey, Lane, PeerMessage, SessionKind, SessionRecord, SumChecks,
};
use storaged_wire::shape::StripeMap;
use storaged_wire::{CheckpointState, Digest, SessionId, Step};

const STRIPES: u64 = 10;
/// Both code for the job.
const HONEST: usize = 4;
const LIAR: usize = 5;

const SESSION: SessionId = SessionId::new(7);

/// A step is protected, and nothing is heard of what the liar's own decisions say.
fn saved() -> Cluster {
    let mut cluster = Cluster::start(4, 2, STRIPES);
    cluster.save_and_wait(DurableWish::Never);
    cluster.run_for(2_000);
    cluster.assert_all_hold([1]);
    cluster.scene.unheard.insert(LIAR);
    cluster
}

fn says(cluster: &mut Cluster, node: usize, message: PeerMessage) {
    let from = name(LIAR);
    cluster.tell(node, Input::Message { from, message });
}

/// The honest coding node's parity of the step.
fn parity(cluster: &mut Cluster) -> (Digest, Lane, u32, ParityId) {
    let shown = cluster.ram(HONEST).node.shown();
    let [step] = &shown[..] else {
        panic!("one step: {shown:?}");
    };
    let [(lane, index, set)] = step.parity[..] else {
        panic!("one parity set: {step:?}");
    };
    (step.manifest.expect("it is committed"), lane, index, set)
}

/// That parity is to be made once more, in full or from what it is now.
fn proposal(cluster: &mut Cluster, basis: Option<Digest>) -> PeerMessage {
    let (manifest, lane, index, _) = parity(cluster);
    PeerMessage::Propose(SessionRecord {
        session: SESSION,
        manifest,
        kind: SessionKind::Encode {
            lane,
            basis,
            checks: SumChecks::Parity,
            parities: vec![index],
        },
    })
}

const fn closed() -> PeerMessage {
    PeerMessage::Close {
        session: SESSION,
        kept: true,
    }
}

/// It is over, and what was made may be told of later.
const fn broken_off() -> PeerMessage {
    PeerMessage::Close {
        session: SESSION,
        kept: false,
    }
}

/// It proposes a session and says at once that what it has made counts.
#[test]
fn what_a_session_has_not_made_takes_nobodys_place() {
    let mut cluster = saved();
    let before = parity(&mut cluster);
    for basis in [None, Some(before.0)] {
        let proposal = proposal(&mut cluster, basis);
        says(&mut cluster, HONEST, proposal);
        says(&mut cluster, HONEST, closed());
        cluster.run_for(1_000);
        assert_eq!(parity(&mut cluster), before);
    }
    cluster.assert_all_hold([1]);
}

/// It has all others begin a session in which no stripe moves. All have finished at once.
#[test]
fn a_session_that_moves_nothing_makes_nothing() {
    let mut cluster = saved();
    moves_nothing(&mut cluster, closed());
    cluster.assert_all_hold([1]);
}

/// Parts that were made outlive their session, and count when the step is known to be safe: it is durable after that.
#[test]
fn nor_does_one_that_ends_before_the_step_is_durable() {
    let refuses = Conduct {
        uploads: Uploads::Refused,
        ..Conduct::default()
    };
    let mut cluster = Cluster::start_with(4, 2, STRIPES, Some(refuses), Room::default());
    cluster.save_as(DurableWish::Required);
    cluster.run_for(5_000);
    cluster.assert_all_hold([1]);
    cluster.scene.unheard.insert(LIAR);
    let before = parity(&mut cluster);
    moves_nothing(&mut cluster, broken_off());
    cluster.scene.tier = Some(Conduct::default());
    cluster.run_until(200_000, "publication", |cluster| {
        !cluster.tier.published.is_empty()
    });
    cluster.run_for(1_000);
    let shown = cluster.ram(HONEST).node.shown();
    assert_eq!(shown[0].state, CheckpointState::Durable);
    assert_eq!(parity(&mut cluster), before);
}

fn moves_nothing(cluster: &mut Cluster, end: PeerMessage) {
    let before = parity(cluster);
    let proposal = proposal(cluster, None);
    let begin = PeerMessage::Begin {
        session: SESSION,
        stripes: Some(StripeMap {
            stripes: STRIPES,
            bits: vec![0; STRIPES.div_ceil(8) as usize].into(),
        }),
        shape: None,
    };
    for message in [proposal, begin, end] {
        for node in 0..LIAR {
            says(cluster, node, message.clone());
        }
        cluster.run_for(500);
    }
    assert_eq!(parity(cluster), before);
}

/// Somebody has the step read and checked, and it says what is wrong with the shards of all others.
#[test]
fn nobody_says_what_is_wrong_with_what_others_hold() {
    let mut cluster = saved();
    let reader = cluster.connect(0, Role::Reader);
    let (step, timeout_ms) = (None, 10_000);
    let asked = cluster.send(0, reader, Request::Verify { step, timeout_ms });
    cluster.run_for(5_000);
    let part = |rank: usize| VerifiedPart {
        node: name(rank),
        what: format!("shard of rank {rank}"),
        bytes: 1,
        fault: Some("made up".into()),
    };
    let parts: Vec<VerifiedPart> = (0..4).map(part).collect();
    for query in 0..1_000 {
        let parts = parts.clone();
        says(&mut cluster, 0, PeerMessage::VerifyAnswer { query, parts });
    }
    cluster.run_until_answered(&[asked]);
    let Some(Reply::Verified(report)) = cluster.answer(asked) else {
        panic!("{:?}", cluster.answer(asked));
    };
    let shards = (report.parts.iter()).filter(|it| it.what.starts_with("shard"));
    let faults: Vec<_> = shards.filter_map(|it| it.fault.as_deref()).collect();
    assert!(
        faults.len() == 4 && faults.iter().all(|it| it.starts_with("not read")),
        "{faults:?}"
    );
}

/// It tells of damaged copies without end and at length. What another one has found stays known.
#[test]
fn what_one_node_calls_damaged_is_little_and_takes_no_others_place() {
    let mut cluster = saved();
    let key = |step: u64| CheckpointKey {
        namespace: namespace(),
        run: cluster.run(),
        step: Step::new(step),
    };
    let of = |step: u64, reason: String| PeerMessage::Quarantined {
        manifest: digest(&step.to_le_bytes()),
        key: key(step),
        reason,
    };
    let lies: Vec<_> = (0..1_000).map(|step| of(step, "x".repeat(5_000))).collect();
    let from = name(HONEST);
    let message = of(0, "found by another one".into());
    cluster.tell(0, Input::Message { from, message });
    for lie in lies {
        says(&mut cluster, 0, lie);
    }
    cluster.run_for(100);
    let status = cluster.ram(0).node.status_json(&Viewer::Operator);
    assert!(status.contains("n4 found: found by another one"));
    assert!(status.len() < 50_000, "{} bytes", status.len());
}
