//! Tables come page by page, are proved, and are asked for elsewhere if need be.

use std::sync::Arc;

use storaged_codec::{digest, fingerprint};
use storaged_wire::local::DurableWish;
use storaged_wire::peer::{Lane, SessionRecord};
use storaged_wire::{Generation, ManifestBytes};

use super::*;
use crate::api::{Input, Output};
use crate::node::Node;
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
    let manifest = testkit::manifest(1, &["a"], &["b", "c"], length, root);
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
    let (mut node, manifest) = (last_of(&["a", "b", "c"], 1, 2), manifest());
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
    let (mut node, manifest) = (last_of(&["b", "c", "a"], 1, 2), manifest());
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

/// Two coding nodes, one of them cut off from the shard's node: what the other one fetches takes longer than the five
/// seconds that the first one waits for an answer, and there is none until all is there.
#[test]
fn whoever_asks_while_a_table_comes_hears_something_before_it_gives_up() {
    // As the one that fetches.
    let (mut node, manifest, _) = member();
    let query = PeerMessage::TableQuery(place(&manifest, 0));
    let mut heard_something = false;
    for second in 1..=limits::PROPOSE_MAX_MS / 1_000 {
        let at = 3 + second * 1_000;
        if second == 2 {
            hear(&mut node, at, "a", page(place(&manifest, 0)));
        }
        let said = sent(hear(&mut node, at, "b", query.clone()));
        heard_something |= said
            .iter()
            .any(|m| matches!(m, PeerMessage::TablePage { .. }));
    }
    assert!(
        heard_something,
        "a table that is on its way, with headway, is silence to whoever waits for it: it gives up after 5 s, fails the \
         session, and the next one begins from nothing"
    );
}

/// The close of a session is lost with its leader's link, and others say that the step is protected: the parity counts.
/// Without the digests of the shards that it covers nobody can get a shard back from it.
#[test]
fn parity_that_counts_though_its_close_was_lost_has_its_tables() {
    let (mut node, manifest, _) = member();
    let mut next = place(&manifest, 0);
    loop {
        let said = sent(hear(&mut node, 3, "a", page(next)));
        match said.iter().find_map(asked_for) {
            Some(place) => next = place,
            None => break assert!(ready(&said), "{said:?}"),
        }
    }
    let begin = PeerMessage::Begin {
        session: SessionId::new(7),
        stripes: None,
        shape: None,
    };
    hear(&mut node, 4, "b", begin);
    let ended = Input::SessionEnded {
        leader: name("b"),
        session: SessionId::new(7),
        outcome: Ok(crate::api::SessionTally::default()),
        kept: std::iter::once(0..CHUNKS).collect(),
    };
    let finished = sent(node.handle(Now(5), ended));
    assert!(
        finished
            .iter()
            .any(|m| matches!(m, PeerMessage::Finished { .. })),
        "{finished:?}"
    );
    let protected = PeerMessage::Protected {
        manifest: manifest.name(),
        bears: 2,
    };
    testkit::hear_from_all(&mut node, 6, &protected);
    node.handle(Now(7), Input::PeerDown { node: name("b") });
    let holding: Vec<_> = node
        .context()
        .checkpoints
        .values()
        .map(|c| c.parity.len())
        .collect();
    assert_eq!(holding, [1], "the parity counts");
    // The node of the shard has lost it, and asks who keeps parity for its digests.
    let said = sent(hear(
        &mut node,
        8,
        "a",
        PeerMessage::TableQuery(place(&manifest, 0)),
    ));
    assert!(
        said.contains(&page(place(&manifest, 0))),
        "parity without the digests of what it covers: no heal from it can be proved ({} messages, first has {:?} digests)",
        said.len(),
        said.first().map(|m| match m {
            PeerMessage::TablePage { page, .. } => page.leaves.len(),
            _ => usize::MAX,
        })
    );
}

/// Whoever says that it is ready for a session that is over is told so. Whoever prepares for one is not, fetches all its
/// tables for nothing and keeps the room of its block meanwhile.
#[test]
fn whoever_prepares_for_a_session_that_is_over_is_told_so() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let session = SessionId::new(99);
    let ready = PeerMessage::Ready {
        session,
        stripes: None,
    };
    let close = PeerMessage::Close {
        session,
        kept: false,
    };
    assert_eq!(
        sent(hear(&mut node, 1, "a", ready)),
        std::slice::from_ref(&close)
    );
    let preparing = PeerMessage::Preparing { session };
    assert_eq!(sent(hear(&mut node, 2, "a", preparing)), [close]);
}

/// `c`, which leads the lane because the other coding node has gone, has proposed a session to `a`.
fn leader() -> (Node, SessionId) {
    let (mut node, manifest) = (last_of(&["a", "b", "c"], 1, 2), manifest());
    node.handle(Now(0), Input::PeerDown { node: name("b") });
    hear(&mut node, 1, "a", commit(&manifest));
    let said = sent(node.handle(Now(limits::DEGRADE_AFTER_MS + 1_000), Input::Tick));
    let proposed = said.iter().find_map(|message| match message {
        PeerMessage::Propose(record) => Some(record.session),
        _ => None,
    });
    (node, proposed.expect("a session"))
}

/// Seconds until the leader gives a session up of which a member says for so long that it is at it.
fn given_up_after(seconds: u64) -> u64 {
    let (mut node, session) = leader();
    let begun = limits::DEGRADE_AFTER_MS + 1_000;
    for second in 1..1_000 {
        let at = begun + second * 1_000;
        let mut outputs = node.handle(Now(at), Input::Tick);
        if second <= seconds {
            outputs.extend(hear(&mut node, at, "a", PeerMessage::Preparing { session }));
        }
        let close = PeerMessage::Close {
            session,
            kept: false,
        };
        if sent(outputs).contains(&close) {
            return second;
        }
    }
    panic!("never")
}

#[test]
fn a_leader_waits_as_long_as_its_members_say_that_they_are_at_it_but_not_for_ever() {
    let patience = limits::PROPOSE_MAX_MS / 1_000;
    // It is a member too, and asks in vain for the table itself until then.
    let own = patience - 1;
    assert_eq!(given_up_after(0), own + patience);
    assert_eq!(given_up_after(60), 60 + patience);
    assert_eq!(given_up_after(1_000), limits::SESSION_STALL_MAX_MS / 1_000);
}
