//! What unit tests of restores share: a reader on `e`, one of five nodes, and what the others say to what it asks.

use storaged_codec::digest;
use storaged_wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, Holding, Lane, PeerMessage};
use storaged_wire::{
    CheckpointState, EnclosuresHeld, ManifestBytes, Rank, RefusalCode, RunId, Step,
};

use crate::api::{ConnId, FoundSuccessions, Input, Now, Output, RequestId};
use crate::node::Node;
use crate::testkit::{TOKEN, at, hear_from_all, job, owner, unknown_to_peers};

pub(super) const FIVE: [&str; 5] = ["a", "b", "c", "d", "e"];

/// What `a` and `b` save, with parity on `c`.
pub(super) fn manifest(step: u64) -> ManifestBytes {
    let root = digest(b"any");
    let manifest = crate::testkit::manifest(step, &["a", "b"], &["c"], 5, root);
    manifest.seal().expect("a sound manifest")
}

pub(super) fn asks(node: &mut Node, index: u64, request: Request) -> Vec<Output> {
    let id = RequestId {
        conn: ConnId(1),
        index,
    };
    let outputs = node.handle(Now(1_000), Input::Request { id, request });
    unknown_to_peers(node, Now(1_000), outputs)
}

/// The reader whose requests follow says who it is.
pub(super) fn greets(node: &mut Node) {
    let hello = Request::Hello {
        version: LOCAL_VERSION,
        namespace: job(),
        token: TOKEN.to_vec().into(),
        role: Role::Reader,
    };
    for output in asks(node, 0, hello) {
        if let Output::FindSuccessions { query, .. } = output {
            let outcome = Ok(FoundSuccessions::default());
            let found = Input::SuccessionsFound { query, outcome };
            node.handle(Now(1_000), found);
        }
    }
}

/// A reader on `e`, which knows the manifest of step 1, opens rank 0's shard.
pub(super) fn opens(node: &mut Node) -> Vec<Output> {
    let manifest = manifest(1);
    let committed = PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Never,
    };
    hear_from_all(node, 1, &committed);
    greets(node);
    let open = Request::OpenShard {
        manifest: manifest.name(),
        rank: Rank::new(0),
        ranges: vec![],
        timeout_ms: 60_000,
        without: None,
        withheld: None,
        early: None,
    };
    asks(node, 1, open)
}

/// The number of the question to all.
pub(super) fn asked(outputs: &[Output]) -> Option<u64> {
    outputs.iter().find_map(|output| match output {
        Output::Send {
            message: PeerMessage::HoldingsQuery { query, .. },
            ..
        } => Some(*query),
        _ => None,
    })
}

pub(super) fn asked_first(outputs: &[Output]) -> u64 {
    asked(outputs).expect("some are asked")
}

pub(super) fn refused(outputs: &[Output]) -> Option<RefusalCode> {
    outputs.iter().find_map(|output| match output {
        Output::Reply {
            reply: Reply::Refused(refusal),
            ..
        } => Some(refusal.code),
        _ => None,
    })
}

pub(super) fn makes_room(outputs: &[Output]) -> bool {
    let mut outputs = outputs.iter();
    outputs.any(|output| matches!(output, Output::CreateSlot { .. }))
}

/// One rank's shard of a protected step, and that this step was protected.
pub(super) fn holds(query: u64, step: u64, rank: u32) -> PeerMessage {
    let manifest = manifest(step);
    PeerMessage::Holdings {
        query,
        owner: Some(owner()),
        holdings: vec![Holding {
            manifest: manifest.name(),
            key: CheckpointKey {
                namespace: job(),
                run: RunId::new(1),
                step: Step::new(step),
            },
            state: CheckpointState::Protected,
            shards: vec![Rank::new(rank)],
            parity: Vec::new(),
            enclosures: EnclosuresHeld::All,
        }],
        mark: Some(at(step)),
        copied: None,
    }
}

/// Parity of step `step`, which was protected.
pub(super) fn codes(query: u64, step: u64) -> PeerMessage {
    let PeerMessage::Holdings {
        owner,
        mut holdings,
        mark,
        ..
    } = holds(query, step, 0)
    else {
        unreachable!("that is what it makes")
    };
    holdings[0].shards.clear();
    holdings[0].parity = vec![(Lane { group: 0, index: 0 }, 0)];
    PeerMessage::Holdings {
        query,
        owner,
        holdings,
        mark,
        copied: None,
    }
}

/// That nothing of the job is there.
pub(super) fn holds_nothing(query: u64) -> PeerMessage {
    PeerMessage::Holdings {
        query,
        owner: Some(owner()),
        holdings: vec![],
        mark: None,
        copied: None,
    }
}

pub(super) fn known(query: u64, step: u64) -> PeerMessage {
    let manifest = Some(manifest(step).bytes().to_vec().into());
    PeerMessage::ManifestAnswer {
        query: Some(query),
        manifest,
    }
}
