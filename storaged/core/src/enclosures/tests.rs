//! A home node that is told of a step: what it fetches, what it believes, and when it commits.

use storaged_codec::{digest, root_digest};
use storaged_wire::local::DurableWish;
use storaged_wire::peer::{ParcelPlace, PeerMessage, SealedShard};
use storaged_wire::{Rank, RunId, Step, WorldSize};

use super::*;
use crate::api::{Input, Output};
use crate::node::Node;
use crate::testkit::{chunk, hear, job, last_of, name, owner, sent};

const MEMBERS: [&str; 4] = ["a", "b", "c", "d"];

/// `d`, which is a home node of a step of two ranks on `a` and `b`.
struct Home {
    node: Node,
    key: CheckpointKey,
    schema: Vec<u8>,
}

impl Home {
    fn new() -> Self {
        let node = last_of(&MEMBERS, 2, 2);
        let key = |step| CheckpointKey {
            namespace: job(),
            run: RunId::new(1),
            step: Step::new(step),
        };
        let is_home = |step: &u64| {
            let cx = node.context();
            cx.homes_of(&key(*step)).contains(cx.me())
        };
        let step = (1..).find(is_home).expect("a step of which it is a home");
        let mut home = Self {
            key: key(step),
            node,
            schema: vec![7; 700_000],
        };
        let fence = storaged_wire::peer::Fence {
            namespace: job(),
            owner: owner(),
            run: RunId::new(1),
            promised: RunId::new(1),
        };
        home.hear(0, "a", PeerMessage::Fences(vec![fence]));
        home
    }

    fn hear(&mut self, at: u64, from: &str, message: PeerMessage) -> Vec<PeerMessage> {
        sent(hear(&mut self.node, at, from, message))
    }

    fn world_size() -> WorldSize {
        WorldSize::new(2).expect("ranks")
    }

    fn described(&self) -> PeerMessage {
        PeerMessage::Description {
            key: self.key.clone(),
            owner: owner(),
            world_size: Self::world_size(),
            schema: Enclosure::of(&self.schema),
            torch_metadata: Enclosure::of(&[]),
            durable: DurableWish::Never,
            epoch: 1,
        }
    }

    fn sealed(&self, rank: u32) -> PeerMessage {
        PeerMessage::ShardsSealed {
            key: self.key.clone(),
            owner: owner(),
            world_size: Self::world_size(),
            shards: vec![SealedShard {
                rank: Rank::new(rank),
                length: 5,
                root: root_digest(&[digest(b"hello")], 5, chunk()),
            }],
            digesting: 0,
        }
    }

    /// Answers with these bytes for as long as it asks for pages; what it says at last.
    fn give(&mut self, from: &str, mut said: Vec<PeerMessage>, bytes: &[u8]) -> Vec<PeerMessage> {
        while let Some(place) = query(&said) {
            let first = place.offset as usize;
            let end = bytes.len().min(first + limits::PARCEL_PAGE_BYTES);
            let page = PeerMessage::ParcelPage {
                place,
                bytes: bytes[first..end].to_vec().into(),
            };
            said = self.hear(10, from, page);
        }
        said
    }

    fn is_committed(&self) -> bool {
        let checkpoint = self.node.context().checkpoints.get(&self.key);
        checkpoint.is_some_and(|c| c.manifest.is_some())
    }
}

fn query(said: &[PeerMessage]) -> Option<ParcelPlace> {
    said.iter().find_map(|message| match message {
        PeerMessage::ParcelQuery(place) => Some(*place),
        _ => None,
    })
}

/// The description that it says it has noted.
fn noted(said: &[PeerMessage]) -> Option<Digest> {
    said.iter().find_map(|message| match message {
        PeerMessage::SealedNoted { description, .. } => *description,
        _ => None,
    })
}

/// Another node describes the same step by the same digest, of bytes that nobody has.
#[test]
fn a_forged_length_does_not_keep_what_describes_a_step_from_coming() {
    let mut home = Home::new();
    let length = home.schema.len() as u64;
    for told in [length - 1, length + 1] {
        let mut forged = home.described();
        if let PeerMessage::Description { schema, .. } = &mut forged {
            assert_eq!(schema.length, length);
            schema.length = told;
        }
        home.hear(1, "b", forged);
    }
    home.hear(1, "a", home.sealed(0));
    home.hear(1, "b", home.sealed(1));
    let described = home.described();
    let asked = home.hear(2, "a", described);
    assert!(query(&asked).is_some(), "{asked:?}");
    let schema = home.schema.clone();
    home.give("a", asked, &schema);
    assert!(home.is_committed());
}

#[test]
fn a_step_commits_when_its_home_node_has_what_the_manifest_names() {
    let mut home = Home::new();
    home.hear(1, "a", home.sealed(0));
    home.hear(2, "b", home.sealed(1));
    let said = home.hear(3, "a", home.described());
    assert_eq!(noted(&said), None, "it has only the names");
    assert!(!home.is_committed());
    let schema = home.schema.clone();
    home.give("a", said, &schema);
    assert!(home.is_committed());
}

#[test]
fn bytes_of_another_digest_are_refused_and_asked_for_again() {
    let mut home = Home::new();
    home.hear(1, "a", home.sealed(0));
    home.hear(2, "b", home.sealed(1));
    let said = home.hear(3, "a", home.described());
    let schema = home.schema.clone();
    let mut wrong = schema.clone();
    wrong[600_000] ^= 1;
    let said = home.give("a", said, &wrong);
    assert!(!home.is_committed());
    assert_eq!(noted(&said), None);
    // `a` says it again, and so does `b`, which has committed the step too.
    let said = home.hear(1_000, "a", home.described());
    home.give("a", said, &schema);
    assert!(home.is_committed());
}

#[test]
fn bytes_of_another_digest_are_asked_for_elsewhere() {
    let mut home = Home::new();
    let named = [Enclosure::of(&home.schema)];
    let cx = home.node.context_mut();
    cx.want_enclosures(&named, &[name("a"), name("b")]);
    let asked = home.node.handle(Now(1), Input::Tick);
    assert!(asked_of(&asked).contains(&"a"));
    let mut wrong = home.schema.clone();
    wrong[0] ^= 1;
    let mut said = sent(asked);
    let mut next = Vec::new();
    while let Some(place) = query(&said) {
        let first = place.offset as usize;
        let end = wrong.len().min(first + limits::PARCEL_PAGE_BYTES);
        let page = PeerMessage::ParcelPage {
            place,
            bytes: wrong[first..end].to_vec().into(),
        };
        let outputs = hear(&mut home.node, 2, "a", page);
        next = asked_of(&outputs)
            .iter()
            .map(|it| (*it).to_owned())
            .collect();
        if next.contains(&"b".to_owned()) {
            break;
        }
        said = sent(outputs);
    }
    assert_eq!(next, ["b"]);
    assert!(!home.node.context().enclosures.has(named[0].digest));
}

/// Whom it asks for a page.
fn asked_of(outputs: &[Output]) -> Vec<&str> {
    let asked = outputs.iter().filter_map(|output| match output {
        Output::Send {
            to,
            message: PeerMessage::ParcelQuery(_),
        } => Some(to.as_str()),
        _ => None,
    });
    asked.collect()
}

#[test]
fn what_is_here_is_not_fetched_again_for_another_step() {
    let mut home = Home::new();
    let said = home.hear(1, "a", home.described());
    let schema = home.schema.clone();
    home.give("a", said, &schema);
    home.key.step = Step::new(home.key.step.get() + 1);
    let said = home.hear(2, "a", home.described());
    assert_eq!(query(&said), None);
    assert!(noted(&said).is_some());
}

/// A liar may name bytes that are here with another length: whoever published that would publish what nobody can read.
#[test]
fn bytes_of_another_length_are_not_what_is_named() {
    let mut store = EnclosureStore::default();
    let bytes = SharedBytes::from(vec![7; 170]);
    let named = Enclosure::of(&bytes);
    store.put(named.digest, bytes.clone(), None, Now(1));
    let forged = Enclosure {
        length: u64::MAX - 1,
        ..named
    };
    assert_eq!(store.bytes_of(&Enclosed::Named(named)), Some(bytes));
    assert_eq!(store.bytes_of(&Enclosed::Named(forged)), None);
    assert!(store.holds(&named) && !store.holds(&forged));
}
