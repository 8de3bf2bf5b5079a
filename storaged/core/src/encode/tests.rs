//! What a member refuses before it takes any memory for it.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_codec::Digest;
use storaged_plan::DirtyMap;
use storaged_wire::local::DurableWish;
use storaged_wire::peer::{Lane, PeerMessage, SessionFault, SessionKind, SessionRecord, SumChecks};
use storaged_wire::shape::RepairShape;
use storaged_wire::{ManifestBytes, Rank, SessionId, SlotId};

use super::Sessions;
use super::resume::{ParityPlace, PartialParity, PartialShard};
use crate::api::{HeldBlock, Output, ParityId};
use crate::catalog::{LocalShard, Slot, SlotUse, Upload};
use crate::limits;
use crate::testkit::{self, chunk, hear, last_of, name, sent};

fn manifest(stripes: u64) -> ManifestBytes {
    let length = stripes * chunk().bytes() as u64;
    let root = Digest::from_bytes(&[0; 32]);
    let manifest = testkit::manifest(1, &["n0"], &["n1"], length, root);
    manifest.seal().expect("a sound manifest")
}

fn encode(session: u64, manifest: &ManifestBytes) -> PeerMessage {
    PeerMessage::Propose(SessionRecord {
        session: SessionId::new(session),
        manifest: manifest.name(),
        kind: SessionKind::Encode {
            lane: Lane { group: 0, index: 0 },
            basis: None,
            checks: SumChecks::Parity,
            parities: vec![0],
        },
    })
}

/// What n1 answers to a session of so many stripes.
fn answer(stripes: u64) -> PeerMessage {
    // Nothing exceeds its budget: the count is refused, not the room.
    let mut node = last_of(&["n0", "n1"], 1, 1);
    let manifest = manifest(stripes);
    let committed = PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Never,
    };
    for message in [committed, encode(7, &manifest)] {
        let answered = sent(hear(&mut node, 10_000, "n0", message)).into_iter();
        let mut answered = answered.filter(|message| {
            matches!(
                message,
                PeerMessage::TableQuery(_) | PeerMessage::Failed { .. }
            )
        });
        if let Some(answered) = answered.next() {
            return answered;
        }
    }
    panic!("no answer");
}

/// A forged manifest may name any length: a member keeps a bit or two for each stripe, and must not try for all.
#[test]
fn more_stripes_than_memory_could_count_are_refused() {
    let most = limits::STRIPES_MAX;
    for stripes in [most + 1, u64::MAX / chunk().bytes() as u64 / 2] {
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
    assert!(matches!(answer(3), PeerMessage::TableQuery(_)));
}

/// A link that drops one way loses the ends of sessions: each of them once kept the room of a whole parity set for ten
/// minutes, until the node had room for nothing.
#[test]
fn sessions_whose_end_was_lost_keep_no_room_beside_the_one_that_replaces_them() {
    let mut node = last_of(&["n0", "n1"], 1, 1);
    let manifest = manifest(3);
    let committed = PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Never,
    };
    hear(&mut node, 1, "n0", committed);
    hear(&mut node, 6, "n0", encode(6, &manifest));
    // Beside it n1 leads a session of its own.
    let of_two_sessions = 2 * 3 * chunk().bytes() as u64;
    assert_eq!(node.ledger().used, of_two_sessions);
    for session in 7..17 {
        hear(&mut node, session, "n0", encode(session, &manifest));
        assert_eq!(node.ledger().used, of_two_sessions);
    }
}

/// A shard of which this node holds a part came back by another way: the part, which may be kept for minutes, holds a slot of the rank.
#[test]
fn a_part_of_a_shard_goes_once_the_shard_is_whole_elsewhere() {
    let (rank, part, whole) = (Rank::new(0), SlotId::new(6), SlotId::new(9));
    let mut node = last_of(&["n0", "n1"], 1, 1);
    let length = 2 * chunk().bytes() as u64;
    let root = Digest::from_bytes(&[0; 32]);
    let manifest = testkit::manifest(1, &["n1"], &["n0"], length, root).seal();
    let manifest = manifest.expect("a sound manifest");
    let committed = PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Never,
    };
    hear(&mut node, 10, "n0", committed);
    let cx = node.context_mut();
    let slot = Slot {
        namespace: testkit::job(),
        rank,
        capacity: length,
        used_for: SlotUse::Repairing,
        readers_before: BTreeSet::new(),
    };
    cx.slots.insert(part, slot);
    let until = cx.now.plus(limits::ROTTEN_KEPT_MS);
    let mut filled = DirtyMap::clean(2);
    filled.mark(0);
    let aside = PartialShard::set_aside(manifest.name(), rank, filled, until);
    let mut sessions = Sessions::default();
    sessions.partial_shards.insert(part, aside);
    sessions.expire_part_filled(cx);
    assert!(cx.slots.contains_key(&part), "a repair goes on with it");
    let shard = LocalShard {
        slot: whole,
        length,
        chunk: chunk(),
        digests: None,
        prints: Arc::from([]),
        readers: BTreeSet::new(),
        upload: Upload::Idle,
        sealed_at: cx.now,
    };
    let checkpoint = cx.checkpoint_named(manifest.name()).expect("it is known");
    checkpoint.shards.insert(rank, shard);
    sessions.expire_part_filled(cx);
    assert!(sessions.partial_shards.is_empty() && !cx.slots.contains_key(&part));
}

/// A repair of this block broke off, another one made it, and now that has rotted: what was made first is nobody's.
#[test]
fn parity_that_was_made_in_part_goes_when_what_took_its_place_has_rotted() {
    let (lane, first, second) = (Lane { group: 0, index: 0 }, ParityId(5), ParityId(7));
    let mut node = last_of(&["n0", "n1"], 1, 1);
    let manifest = manifest(2);
    let committed = PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Never,
    };
    hear(&mut node, 10, "n0", committed);
    let cx = node.context_mut();
    let checkpoint = cx.checkpoint_named(manifest.name()).expect("it is known");
    checkpoint.parity.insert((lane, 0), second);
    let key = checkpoint.key.clone();
    let place = ParityPlace {
        manifest: manifest.name(),
        lane,
        index: 0,
    };
    let until = cx.now.plus(limits::PART_FILLED_MAX_MS);
    let part = PartialParity::set_aside(first, DirtyMap::clean(2), until);
    let mut sessions = Sessions::default();
    sessions.partial_parity.insert(place, part);
    sessions.block_rotted(&key, HeldBlock::Parity(lane, 0, second), &[1], cx);
    assert_eq!(sessions.part_made_of(place), Some(second));
    let dropped = cx.out.iter().filter_map(|output| match output {
        Output::DropParity { set } => Some(*set),
        _ => None,
    });
    assert_eq!(dropped.collect::<Vec<_>>(), [first]);
}

/// Of a repair for somebody else a node that only reads keeps nothing, and no session takes the place of another one.
#[test]
fn one_leader_has_only_so_many_sessions_at_a_member() {
    let lane = Lane { group: 0, index: 0 };
    let mut node = last_of(&["n2", "n0", "n1"], 1, 1);
    let manifest = manifest(2);
    let committed = PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Never,
    };
    hear(&mut node, 10, "n0", committed);
    let checkpoint = node.context_mut().checkpoint_named(manifest.name());
    let checkpoint = checkpoint.expect("it is known");
    checkpoint.parity.insert((lane, 0), ParityId(5));
    let (most, of_its_own) = (limits::SESSIONS_PER_LEADER_MAX, node.audit().sessions);
    for session in 0..most as u64 + 100 {
        let record = SessionRecord {
            session: SessionId::new(session),
            manifest: manifest.name(),
            kind: SessionKind::Repair {
                lane,
                survivors: vec![1],
                wanted: vec![(0, name("n2"))],
                stripes: Vec::new(),
                shape: RepairShape::Chain,
            },
        };
        hear(&mut node, 10, "n2", PeerMessage::Propose(record));
    }
    assert_eq!(node.audit().sessions, most + of_its_own);
}
