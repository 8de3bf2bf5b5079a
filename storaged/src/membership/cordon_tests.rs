//! What cordoned nodes are given and what they keep, in rosters, and as the record goes to older releases.

use storaged_plan::{Cordon, groups};
use storaged_wire::Geometry;

use super::tests::{arrival, full, lost, name};
use super::*;

/// As by the configuration file of that node itself.
fn cordoned(roster: &Roster, node: &str) -> Roster {
    match roster.cordon(&name(node), &name(node)).unwrap() {
        Cordoning::Propose(next) => *next,
        Cordoning::Already => panic!("{node} was cordoned"),
    }
}

fn takes(roster: &Roster, node: &str) -> Option<String> {
    match roster.arrive(&arrival(node)) {
        Arrived::Propose(next) => Some(next.filled_by(&name(node))?.name.to_string()),
        _ => None,
    }
}

#[test]
fn a_cordoned_node_keeps_its_place_and_codes_for_nobody() {
    let before = full(&["a", "b", "c", "d"]);
    let roster = cordoned(&before, "c");
    assert_eq!(
        roster.arrive(&arrival("c")),
        Arrived::Placed(name("c")),
        "also after a restart"
    );
    assert_eq!(roster.places, before.places);
    let geometry = Geometry::new(2, 1).unwrap();
    let coding = |roster: &Roster| -> Vec<String> {
        let found = groups(&roster.members(), geometry).unwrap();
        let coding = found.iter().flat_map(|group| &group.coding);
        coding.map(ToString::to_string).collect()
    };
    assert_eq!(coding(&before), ["c", "a"]);
    assert_eq!(coding(&roster), ["d", "a"]);
    let again = roster.uncordon(&name("c"), &name("nobody")).unwrap();
    let Cordoning::Propose(again) = again else {
        panic!("it was cordoned");
    };
    assert_eq!(again.members(), before.members());
}

#[test]
fn a_cordoned_node_takes_no_place_but_the_one_that_it_had() {
    let roster = lost(&lost(&full(&["a", "b", "c"]), "a"), "b");
    let with_spare = cordoned(&roster, "s");
    assert_eq!(with_spare.arrive(&arrival("s")), Arrived::Cordoned);
    assert_eq!(takes(&with_spare, "other"), Some("a".into()));
    // What was thought lost comes back with its memory, cordoned or not.
    assert_eq!(takes(&cordoned(&roster, "b"), "b"), Some("b".into()));
    // The place that it had is another's: the vacant one is not for it.
    let Arrived::Propose(filled) = roster.arrive(&arrival("d")) else {
        panic!("a place is vacant");
    };
    let filled = cordoned(&filled, "a");
    assert_eq!(filled.arrive(&arrival("a")), Arrived::Cordoned);
    // One that waits while a cluster begins waits no more.
    let first = match Roster::empty("c".into(), 2).arrive(&arrival("e")) {
        Arrived::Propose(next) => *next,
        other => panic!("{other:?}"),
    };
    let first = cordoned(&first, "e");
    assert!(first.arriving.is_empty());
    assert_eq!(first.arrive(&arrival("e")), Arrived::Cordoned);
}

#[test]
fn a_vacant_place_of_a_cordoned_node_is_any_spares() {
    let roster = lost(&cordoned(&full(&["a", "b", "c"]), "b"), "b");
    let Arrived::Propose(next) = roster.arrive(&arrival("d")) else {
        panic!("a place is vacant");
    };
    let place = next.place(&name("b")).unwrap();
    assert_eq!(place.node, Some(name("d")));
    assert_eq!(next.cordon_of(place), Cordon::Open, "it is the node's");
    assert_eq!(next.cordoned, [name("b")]);
}

#[test]
fn to_cordon_twice_changes_nothing_and_unknown_nodes_are_named() {
    let roster = full(&["a", "b"]);
    let (own, unknown) = (name("op"), name("x"));
    assert_eq!(
        roster.uncordon(&name("a"), &own),
        Ok(Cordoning::Already),
        "it never was"
    );
    let there = cordoned(&roster, "a");
    assert_eq!(there.cordon(&name("a"), &own), Ok(Cordoning::Already));
    for refused in [
        roster.cordon(&unknown, &own),
        roster.uncordon(&unknown, &own),
    ] {
        let Err(ChangeError::UnknownNode { got, known }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!((got.as_str(), known.as_str()), ("x", "a, b"));
    }
}

/// It would pass over what it does not know, and make other groups of the same epoch.
#[test]
fn a_release_that_knows_no_cordons_does_not_read_a_record_with_one() {
    let version = |roster: &Roster| -> u64 {
        let record: serde_json::Value = serde_json::from_slice(&roster.bytes()).unwrap();
        record["version"].as_u64().unwrap()
    };
    let roster = full(&["a", "b"]);
    assert_eq!(version(&roster), 1);
    let text = String::from_utf8(roster.bytes()).unwrap();
    assert!(!text.contains("cordoned"), "as it was before: {text}");
    let there = cordoned(&roster, "a");
    assert_eq!(version(&there), 2);
    assert_eq!(Roster::parse(&there.bytes()).unwrap(), there);
}
