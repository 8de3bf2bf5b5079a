//! Tables come page by page, are proved, and are asked for elsewhere if need be.

use std::sync::Arc;

use storaged_codec::{digest, fingerprint};
use storaged_wire::local::DurableWish;
use storaged_wire::peer::{Lane, SessionRecord};
use storaged_wire::{Generation, ManifestBytes};

use super::*;
use crate::api::{Input, Output};
use crate::testkit::{self, chunk, hear, last_of, name, sent};

/// More than fits three pages.
const CHUNKS: u64 = 3 * limits::TABLE_PAGE_CHUNKS as u64 + 5;

fn leaves() -> Vec<Digest> {
    (0..CHUNKS).map(|at| digest(&at.to_le_bytes())).collect()
}

fn prints() -> Vec<Fingerprint> {
    (0..CHUNKS)
        .map(|at| fingerprint(&at.to_le_bytes()))
        .collect()
}

/// The shard of `a`, with parity on `b` and `c`.
fn manifest() -> Arc<ManifestBytes> {
    let length = CHUNKS * chunk().bytes() as u64;
    let root = root_digest(&leaves(), length, chunk());
    let manifest = testkit::manifest(1, &["a"], &["b", "c"], (length, root));
    Arc::new(manifest.seal().expect("a sound manifest"))
}

fn commit(manifest: &ManifestBytes) -> PeerMessage {
    PeerMessage::Committed {
        manifest: manifest.bytes().to_vec().into(),
        durable: DurableWish::Policy,
    }
}

/// Parity of the whole lane.
fn encode(manifest: Digest) -> PeerMessage {
    PeerMessage::Propose(SessionRecord {
        session: SessionId::new(7),
        manifest,
        kind: SessionKind::Encode {
            lane: Lane { group: 0, index: 0 },
            basis: None,
            checks: SumChecks::Parity,
            parities: vec![0, 1],
        },
    })
}

/// The coding node `c`, which has been asked to take part in an encode led by `b`, and what it asked for.
fn member() -> (Node, Arc<ManifestBytes>, Vec<PeerMessage>) {
    let (mut node, manifest) = (last_of(&["a", "b", "c"], (1, 2)), manifest());
    hear(&mut node, 1, "a", commit(&manifest));
    let asked = sent(hear(&mut node, 2, "b", encode(manifest.name())));
    (node, manifest, asked)
}

fn place(manifest: &ManifestBytes, first: u64) -> TablePlace {
    TablePlace {
        manifest: manifest.name(),
        rank: Rank::new(0),
        first,
    }
}

/// The page that `a` answers.
fn page(place: TablePlace) -> PeerMessage {
    let (first, count) = (place.first as usize, limits::TABLE_PAGE_CHUNKS);
    let page = TablePage {
        leaves: part(&leaves(), first, count),
        prints: part(&prints(), first, count),
    };
    PeerMessage::TablePage { place, page }
}

/// What a node answers that has no such table.
fn nothing(manifest: &ManifestBytes) -> PeerMessage {
    PeerMessage::TablePage {
        place: place(manifest, 0),
        page: TablePage::default(),
    }
}

fn ready(messages: &[PeerMessage]) -> bool {
    messages
        .iter()
        .any(|message| matches!(message, PeerMessage::Ready { .. }))
}

#[test]
fn a_table_comes_page_by_page_and_none_is_larger_than_a_message_may_be() {
    let (mut node, manifest, asked) = member();
    assert_eq!(asked, [PeerMessage::TableQuery(place(&manifest, 0))]);
    let mut next = place(&manifest, 0);
    let mut pages = 0;
    loop {
        let page = page(next);
        assert!(storaged_wire::encode(&page).len() < 1 << 20);
        let said = sent(hear(&mut node, 3, "a", page));
        pages += 1;
        match said.iter().find_map(asked_for) {
            Some(place) => next = place,
            None => break assert!(ready(&said), "{said:?}"),
        }
    }
    assert_eq!(pages, 4);
    // What is kept of the table is what the parity must have.
    let begin = PeerMessage::Begin {
        session: SessionId::new(7),
        stripes: None,
        shape: None,
    };
    let outputs = hear(&mut node, 4, "b", begin);
    assert!(
        outputs
            .iter()
            .any(|output| matches!(output, Output::Run(_)))
    );
}

fn asked_for(message: &PeerMessage) -> Option<TablePlace> {
    match message {
        PeerMessage::TableQuery(place) => Some(*place),
        _ => None,
    }
}

#[test]
fn a_page_that_is_lost_is_asked_for_again_and_the_leader_hears_that_this_node_is_at_it() {
    let (mut node, manifest, _) = member();
    let said = sent(hear(&mut node, 3, "a", page(place(&manifest, 0))));
    let next = place(&manifest, limits::TABLE_PAGE_CHUNKS as u64);
    assert_eq!(said, [PeerMessage::TableQuery(next)]);
    let again = sent(hear(&mut node, 500, "b", encode(manifest.name())));
    let preparing = PeerMessage::Preparing {
        session: SessionId::new(7),
    };
    assert_eq!(
        again,
        std::slice::from_ref(&preparing),
        "asked again too early"
    );
    let again = sent(hear(&mut node, 1_500, "b", encode(manifest.name())));
    assert_eq!(again, [preparing, PeerMessage::TableQuery(next)]);
    // The first answer comes late, and the second one is not taken for the page after it.
    let said = sent(hear(&mut node, 1_501, "a", page(next)));
    assert!(said.iter().any(|message| asked_for(message).is_some()));
    assert_eq!(sent(hear(&mut node, 1_502, "a", page(next))), []);
}

#[test]
fn a_table_that_its_root_does_not_prove_is_not_waited_for() {
    let (mut node, manifest, _) = member();
    let mut at = place(&manifest, 0);
    loop {
        let PeerMessage::TablePage { place, mut page } = page(at) else {
            panic!("no page");
        };
        page.leaves[0] = digest(b"another chunk");
        let page = PeerMessage::TablePage { place, page };
        let said = sent(hear(&mut node, 3, "a", page));
        match said.iter().find_map(asked_for) {
            Some(next) if next.first == 0 => break,
            Some(next) => at = next,
            None => panic!("took it, or gave up: {said:?}"),
        }
    }
    // The next one is asked from the beginning on, and has nothing.
    let said = sent(hear(&mut node, 4, "b", nothing(&manifest)));
    // It is ready, and says what is missing when the session begins.
    assert!(ready(&said), "{said:?}");
    let begin = PeerMessage::Begin {
        session: SessionId::new(7),
        stripes: None,
        shape: None,
    };
    let said = sent(hear(&mut node, 4, "b", begin));
    assert!(
        matches!(&said[..], [PeerMessage::Failed { .. }]),
        "{said:?}"
    );
}

#[test]
fn an_owner_that_is_down_or_silent_is_not_waited_for_for_ever() {
    let (mut node, manifest, _) = member();
    node.handle(Now(10), Input::PeerDown { node: name("a") });
    let said = hear(&mut node, 11, "b", encode(manifest.name()));
    // The other node that keeps parity has a link to it, and knows by then.
    let asked = PeerMessage::TableQuery(place(&manifest, 0));
    let asks_b = |output: &Output| matches!(output, Output::Send { to, message } if *to == name("b") && *message == asked);
    assert!(said.iter().any(asks_b), "{said:?}");
    let said = sent(hear(&mut node, 12, "b", nothing(&manifest)));
    assert!(ready(&said), "{said:?}");

    let (mut node, manifest, _) = member();
    let mut at = 3;
    for _ in 0..2 {
        at += limits::PROPOSE_MAX_MS;
        let said = sent(hear(&mut node, at, "b", encode(manifest.name())));
        if ready(&said) {
            return;
        }
    }
    panic!("waits for ever");
}

#[test]
fn a_page_is_told_as_soon_as_its_manifest_is_here() {
    let (mut node, manifest) = (last_of(&["b", "c", "a"], (1, 2)), manifest());
    let query = PeerMessage::TableQuery(place(&manifest, 0));
    assert_eq!(sent(hear(&mut node, 1, "c", query.clone())), []);
    let generation = Generation::new(1);
    node.handle(
        Now(2),
        Input::PeerUp {
            node: name("b"),
            generation,
        },
    );
    let said = sent(hear(&mut node, 3, "b", commit(&manifest)));
    let empty = nothing(&manifest);
    // It has the manifest, and no shard: so it says.
    assert!(said.contains(&empty), "{said:?}");
    assert_eq!(sent(hear(&mut node, 4, "c", query)), [empty]);
}
