//! Parcels are fetched once, answered to all, and handed on.

use storaged_codec::{digest, root_digest};
use storaged_wire::local::DurableWish;
use storaged_wire::peer::PeerMessage;
use storaged_wire::{Enclosed, Generation, ManifestBytes, decode, encode};

use super::*;
use crate::api::{Input, Note, Output};
use crate::node::Node;
use crate::testkit::{self, chunk, hear, last_of, name};

/// A manifest with a schema of megabytes, as releases before version 3 wrote it.
fn manifest() -> ManifestBytes {
    let root = root_digest(&[digest(b"hello")], 5, chunk());
    let mut manifest = testkit::manifest(1, &["a"], &["b", "c"], 5, root);
    manifest.version = 2;
    manifest.schema = Enclosed::Inline(vec![7; 3 << 20].into());
    manifest.torch_metadata = Enclosed::Inline(SharedBytes::default());
    manifest.seal().expect("a sound manifest")
}

fn committed(manifest: &ManifestBytes) -> PeerMessage {
    PeerMessage::Committed {
        manifest: manifest.shared(),
        durable: DurableWish::Policy,
    }
}

/// What a node that wants to say this says instead, and the parcel.
fn parcel(message: &PeerMessage) -> (PeerMessage, Vec<u8>) {
    let bytes = encode(message);
    let (parcel, length) = (digest(&bytes), bytes.len() as u64);
    let told = PeerMessage::Parcel {
        parcel,
        length,
        relay: None,
    };
    (told, bytes)
}

fn sends(outputs: Vec<Output>) -> Vec<(NodeName, PeerMessage)> {
    let sends = outputs.into_iter().filter_map(|output| match output {
        Output::Send { to, message } => Some((to, message)),
        _ => None,
    });
    sends.collect()
}

fn query(said: &[(NodeName, PeerMessage)]) -> Option<(NodeName, ParcelPlace)> {
    said.iter().find_map(|(to, message)| match message {
        PeerMessage::ParcelQuery(place) => Some((to.clone(), *place)),
        _ => None,
    })
}

fn page(bytes: &[u8], place: ParcelPlace) -> PeerMessage {
    let first = place.offset as usize;
    let end = bytes.len().min(first + limits::PARCEL_PAGE_BYTES);
    let bytes = bytes[first..end].to_vec().into();
    PeerMessage::ParcelPage { place, bytes }
}

/// Whom it has told that it has the manifest.
fn answered(said: &[(NodeName, PeerMessage)]) -> Vec<&str> {
    let stored = said
        .iter()
        .filter(|(_, message)| matches!(message, PeerMessage::ManifestStored { .. }));
    stored.map(|(to, _)| to.as_str()).collect()
}

/// Lets a node fetch what it has asked for, from whoever it asks; what it said in the end.
fn fetch(
    node: &mut Node,
    mut said: Vec<(NodeName, PeerMessage)>,
    bytes: &[u8],
) -> Vec<(NodeName, PeerMessage)> {
    while let Some((to, place)) = query(&said) {
        let message = page(bytes, place);
        assert!(encode(&message).len() <= storaged_wire::peer::CONTROL_FRAME_BYTES_MAX);
        said = sends(hear(node, 10, to.as_str(), message));
    }
    said
}

#[test]
fn a_manifest_of_megabytes_is_fetched_once_and_every_home_node_is_answered() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let manifest = manifest();
    let (told, bytes) = parcel(&committed(&manifest));
    let first = sends(hear(&mut node, 1, "a", told.clone()));
    assert_eq!(query(&first).map(|(to, _)| to), Some(name("a")));
    // Another home node tells of it meanwhile: nothing is fetched twice.
    assert_eq!(query(&sends(hear(&mut node, 2, "b", told.clone()))), None);
    let said = fetch(&mut node, first, &bytes);
    assert_eq!(answered(&said), ["a", "b"]);
    // One that says so later is answered from what is here.
    let said = sends(hear(&mut node, 11, "b", told));
    assert_eq!((query(&said), answered(&said)), (None, vec!["b"]));
}

#[test]
fn whoever_tells_and_goes_down_is_replaced_by_the_next() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let (told, bytes) = parcel(&committed(&manifest()));
    let asked = sends(hear(&mut node, 1, "a", told.clone()));
    let (to, place) = query(&asked).expect("a query");
    hear(&mut node, 2, to.as_str(), page(&bytes, place));
    hear(&mut node, 3, "b", told);
    node.handle(Now(4), Input::PeerDown { node: name("a") });
    let asked = sends(node.handle(Now(1_500), Input::Tick));
    let (to, place) = query(&asked).expect("a query");
    assert_eq!((to.as_str(), place.offset), ("b", 0));
    let said = fetch(&mut node, asked, &bytes);
    assert!(answered(&said).contains(&"b"), "{said:?}");
}

#[test]
fn bytes_of_another_digest_are_not_believed() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let (told, mut bytes) = parcel(&committed(&manifest()));
    bytes[1_000] ^= 1;
    let asked = sends(hear(&mut node, 1, "a", told.clone()));
    let said = fetch(&mut node, asked, &bytes);
    assert_eq!(answered(&said), Vec::<&str>::new());
    // The sender says it again, and is asked again.
    bytes[1_000] ^= 1;
    let asked = sends(hear(&mut node, 1_000, "a", told));
    let said = fetch(&mut node, asked, &bytes);
    assert_eq!(answered(&said), ["a"]);
}

#[test]
fn what_does_not_fit_a_message_is_told_as_a_parcel_and_served_page_by_page() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let manifest = manifest();
    let (told, bytes) = parcel(&committed(&manifest));
    let asked = sends(hear(&mut node, 1, "a", told));
    fetch(&mut node, asked, &bytes);
    // "c" is a home node too: it tells whoever has not answered it.
    let generation = Generation::new(2);
    node.handle(Now(20), Input::PeerDown { node: name("b") });
    node.handle(
        Now(21),
        Input::PeerUp {
            node: name("b"),
            generation,
        },
    );
    let said = sends(node.handle(Now(2_000), Input::Tick));
    let to_b = said.iter().find_map(|(to, message)| match message {
        PeerMessage::Parcel { parcel, length, .. } if to.as_str() == "b" => {
            Some((*parcel, *length))
        }
        _ => None,
    });
    let (parcel, length) = to_b.expect("told as a parcel");
    let mut got = Vec::new();
    while (got.len() as u64) < length {
        let place = ParcelPlace {
            parcel,
            offset: got.len() as u64,
        };
        let answer = sends(hear(&mut node, 2_001, "b", PeerMessage::ParcelQuery(place)));
        let [(_, PeerMessage::ParcelPage { bytes, .. })] = &answer[..] else {
            panic!("{answer:?}");
        };
        assert!(!bytes.is_empty());
        got.extend_from_slice(bytes);
    }
    assert_eq!(
        decode::<PeerMessage>("message", &got).expect("a message"),
        committed(&manifest)
    );
    // Beyond its end, and of what it has not, it says that there is nothing.
    for place in [
        ParcelPlace {
            parcel,
            offset: length,
        },
        ParcelPlace {
            parcel: digest(b"other"),
            offset: 0,
        },
    ] {
        let answer = sends(hear(&mut node, 2_002, "b", PeerMessage::ParcelQuery(place)));
        let nothing = PeerMessage::ParcelPage {
            place,
            bytes: Vec::new().into(),
        };
        assert_eq!(answer, [(name("b"), nothing)]);
    }
}

#[test]
fn a_parcel_within_a_parcel_is_a_fault_of_its_sender() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let (inner, _) = parcel(&committed(&manifest()));
    let (outer, bytes) = parcel(&inner);
    let asked = sends(hear(&mut node, 1, "a", outer));
    let (to, place) = query(&asked).expect("a query");
    let outputs = hear(&mut node, 2, to.as_str(), page(&bytes, place));
    let fault = |output: &Output| matches!(output, Output::Note(Note::PeerFault { .. }));
    assert!(outputs.iter().any(fault), "{outputs:?}");
}

#[test]
fn lengths_that_nobody_can_mean_take_no_memory() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let parcel = digest(b"any");
    for length in [limits::PARCELS_BYTES_MAX + 1, u64::MAX] {
        let said = sends(hear(
            &mut node,
            1,
            "a",
            PeerMessage::Parcel {
                parcel,
                length,
                relay: None,
            },
        ));
        assert_eq!(query(&said), None, "{length}");
    }
}

/// A commit that is to be told to others in the name of a home node.
fn relayed(of: &NodeName, told: PeerMessage, to: &[&str]) -> PeerMessage {
    let PeerMessage::Parcel { parcel, length, .. } = told else {
        panic!("a parcel");
    };
    let (of, to) = (of.clone(), to.iter().map(|node| name(node)).collect());
    PeerMessage::Parcel {
        parcel,
        length,
        relay: Some(Relay { of, to }),
    }
}

/// Whom a node tells of a parcel, and whom they are to tell.
fn handed_on(said: &[(NodeName, PeerMessage)]) -> Vec<(&str, Vec<&str>)> {
    let told = said.iter().filter_map(|(to, message)| match message {
        PeerMessage::Parcel {
            relay: Some(relay), ..
        } => Some((to.as_str(), relay.to.iter().map(NodeName::as_str).collect())),
        _ => None,
    });
    told.collect()
}

#[test]
fn a_commit_is_handed_on_once_it_is_here_and_the_home_node_is_answered() {
    let mut node = last_of(&["a", "b", "c", "d", "e", "f"], 1, 2);
    let (told, bytes) = parcel(&committed(&manifest()));
    let key = storaged_wire::peer::CheckpointKey::of(manifest().manifest());
    let homes = node.context().homes_of(&key);
    let home = homes
        .iter()
        .find(|home| **home != name("f"))
        .expect("three of six");
    let told = relayed(home, told, &["c", "d", "e"]);
    let asked = sends(hear(&mut node, 1, "b", told.clone()));
    // Before it is here there is nothing to hand on. It is fetched from whoever told of it.
    assert_eq!(handed_on(&asked), []);
    assert_eq!(query(&asked).map(|(to, _)| to), Some(name("b")));
    let said = fetch(&mut node, asked, &bytes);
    assert_eq!(handed_on(&said), [("c", vec!["d"]), ("e", vec![])]);
    assert_eq!(answered(&said), [home.as_str()]);
    // The first of a share that is up hears of it.
    node.handle(Now(20), Input::PeerDown { node: name("c") });
    let said = sends(hear(&mut node, 21, "b", told));
    assert_eq!(handed_on(&said), [("d", vec!["c"]), ("e", vec![])]);
}

#[test]
fn nothing_but_commits_is_handed_on() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let many = PeerMessage::Attached(vec![testkit::job(); 20_000]);
    let (told, bytes) = parcel(&many);
    let asked = sends(hear(&mut node, 1, "a", relayed(&name("a"), told, &["b"])));
    let said = fetch(&mut node, asked, &bytes);
    assert_eq!(handed_on(&said), []);
}

#[test]
fn in_another_ones_name_a_commit_alone_is_believed() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let asks = PeerMessage::RunQuery {
        query: 7,
        namespace: testkit::job(),
    };
    let (told, bytes) = parcel(&asks);
    let asked = sends(hear(&mut node, 1, "b", relayed(&name("a"), told, &[])));
    let said = fetch(&mut node, asked, &bytes);
    assert_eq!(said, [], "answered a question that `a` did not ask");
}

/// It would believe itself, though it is no home node of the step or has other shards.
#[test]
fn in_its_own_name_a_node_believes_nothing() {
    let mut node = last_of(&["a", "b", "c", "d", "e", "f"], 1, 2);
    let (told, bytes) = parcel(&committed(&manifest()));
    let told = relayed(&name("f"), told, &["c"]);
    let asked = sends(hear(&mut node, 1, "b", told));
    let said = fetch(&mut node, asked, &bytes);
    assert_eq!(said, [], "it took a commit that nobody told it of");
    assert!(node.context().checkpoints.is_empty());
}

/// `c`, which has a manifest of 3 MiB.
fn knows_a_long_manifest() -> (Node, ManifestBytes) {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let manifest = manifest();
    let (told, bytes) = parcel(&committed(&manifest));
    let asked = sends(hear(&mut node, 1, "a", told));
    fetch(&mut node, asked, &bytes);
    (node, manifest)
}

/// A hundred nodes come back and plan. Were the number of its question in what each of them fetches, each would get a parcel
/// of its own, and they would push each other out.
#[test]
fn many_who_ask_for_one_manifest_are_all_served() {
    let (mut node, manifest) = knows_a_long_manifest();
    let mut told = Vec::new();
    for query in 1..=100 {
        let manifest = manifest.name();
        let question = PeerMessage::ManifestQuery { query, manifest };
        let said = sends(hear(&mut node, 100 + query, "a", question));
        told.extend(said.iter().find_map(|(_, message)| match message {
            PeerMessage::Parcel { parcel, .. } => Some(*parcel),
            _ => None,
        }));
    }
    assert_eq!(told.len(), 100);
    let mut unserved = 0;
    for parcel in told {
        let place = ParcelPlace { parcel, offset: 0 };
        let said = sends(hear(&mut node, 250, "a", PeerMessage::ParcelQuery(place)));
        unserved += said
            .iter()
            .filter(|(_, m)| matches!(m, PeerMessage::ParcelPage { bytes, .. } if bytes.is_empty()))
            .count();
    }
    assert_eq!(
        unserved, 0,
        "of 100 that were told where to fetch it within 0.2 s"
    );
}

fn said_falsely(outputs: &[Output]) -> Vec<(&str, &'static str)> {
    let said = outputs.iter().filter_map(|output| match output {
        Output::Note(Note::FalseStatement { node, statement }) => {
            Some((node.as_str(), statement.name()))
        }
        _ => None,
    });
    said.collect()
}

fn asks_for_pages_of(said: &[(NodeName, PeerMessage)], node: &str) -> bool {
    said.iter()
        .any(|(to, message)| to.as_str() == node && matches!(message, PeerMessage::ParcelQuery(_)))
}

/// One node says that it has something huge and never gives it: what others have is fetched all the same, and at once.
#[test]
fn one_that_tells_of_something_huge_does_not_keep_others_from_being_heard() {
    for each in [1, 4, 64] {
        let mut node = last_of(&["a", "b", "c"], 1, 2);
        let mut named = Vec::new();
        for number in 0..each + 1 {
            let huge = PeerMessage::Parcel {
                parcel: digest(&u64::to_le_bytes(number)),
                length: limits::PARCELS_BYTES_MAX / each,
                relay: None,
            };
            let outputs = hear(&mut node, 1, "a", huge);
            named.extend(said_falsely(&outputs).into_iter().map(|(_, what)| what));
        }
        let (told, _) = parcel(&committed(&manifest()));
        let said = sends(hear(&mut node, 2, "b", told));
        assert!(asks_for_pages_of(&said, "b"), "{each} took all room");
        assert!(named.contains(&"too_much"), "{each} parcels: {named:?}");
    }
}

/// The digest is true, so that an honest node's parcel is meant, and the length is not.
#[test]
fn a_forged_length_spoils_no_other_ones_parcel() {
    let (told, bytes) = parcel(&committed(&manifest()));
    let PeerMessage::Parcel { parcel, length, .. } = told else {
        panic!("a parcel");
    };
    for forged in [length - 1, length + 1, 1, limits::PARCELS_BYTES_MAX / 2] {
        let mut node = last_of(&["a", "b", "c"], 1, 2);
        let lie = PeerMessage::Parcel {
            parcel,
            length: forged,
            relay: None,
        };
        hear(&mut node, 1, "a", lie);
        let asked = sends(hear(&mut node, 2, "b", told.clone()));
        assert!(asks_for_pages_of(&asked, "b"), "length {forged}");
        let said = fetch(&mut node, asked, &bytes);
        assert_eq!(answered(&said), ["b"], "length {forged}");
    }
}

#[test]
fn who_tells_of_another_length_than_he_sends_or_than_is_here_is_named() {
    let mut node = last_of(&["a", "b", "c"], 1, 2);
    let (told, bytes) = parcel(&committed(&manifest()));
    let PeerMessage::Parcel { parcel, length, .. } = told else {
        panic!("a parcel");
    };
    let of_length = |length| PeerMessage::Parcel {
        parcel,
        length,
        relay: None,
    };
    let asked = sends(hear(&mut node, 1, "a", of_length(1_000)));
    let (to, place) = query(&asked).expect("a query");
    let outputs = hear(&mut node, 2, to.as_str(), page(&bytes, place));
    let fault = |output: &Output| match output {
        Output::Note(Note::PeerFault { node, .. }) => node.as_str() == "a",
        _ => false,
    };
    assert!(outputs.iter().any(fault), "{outputs:?}");
    let asked = sends(hear(&mut node, 3, "a", of_length(length)));
    fetch(&mut node, asked, &bytes);
    let lie = relayed(&name("a"), of_length(length + 1), &["a"]);
    let outputs = hear(&mut node, 20, "b", lie);
    assert_eq!(said_falsely(&outputs), [("b", "other_length")]);
    assert_eq!(handed_on(&sends(outputs)), [], "the lie goes no further");
}

/// Nobody who could fetch it is up.
#[test]
fn what_only_nodes_that_are_down_lack_is_not_kept_encoded_for_ever() {
    let (mut node, manifest) = knows_a_long_manifest();
    let stored = PeerMessage::ManifestStored {
        manifest: manifest.name(),
        state: storaged_wire::CheckpointState::Committed,
        bears: 0,
    };
    hear(&mut node, 20, "a", stored);
    node.handle(Now(21), Input::PeerDown { node: name("b") });
    for second in 1..120 {
        node.handle(Now(second * 1_000), Input::Tick);
    }
    let kept = node.context().parcels.kept.len();
    assert_eq!(
        kept, 0,
        "parcels kept after two minutes in which nobody asked"
    );
}
