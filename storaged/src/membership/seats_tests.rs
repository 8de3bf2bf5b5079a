//! Which groups an epoch has, and what of it the record says.

use storaged_plan::{Group, groups};
use storaged_wire::Geometry;

use super::tests::{arrival, full, lost, name};
use super::*;

fn geometry() -> Geometry {
    Geometry::new(4, 2).unwrap()
}

fn groups_of(roster: &Roster) -> Vec<Group> {
    groups(&roster.members(), geometry()).unwrap()
}

fn version(roster: &Roster) -> u64 {
    let record: serde_json::Value = serde_json::from_slice(&roster.bytes()).unwrap();
    record["version"].as_u64().unwrap()
}

fn twelve() -> Roster {
    full(&["b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m"])
}

/// As a node does it that comes, and proposes what gives it a place.
fn with(roster: &Roster, arrival: &Arrival) -> Roster {
    match roster.arrive(arrival) {
        Arrived::Propose(next) => next.seated_after(roster, Some(geometry())),
        other => panic!("{other:?}"),
    }
}

fn seated(next: Roster, before: &Roster) -> Roster {
    next.seated_after(before, Some(geometry()))
}

#[test]
fn a_place_whose_name_comes_first_changes_no_group() {
    let before = twelve();
    let more = seated(before.resized(13).unwrap(), &before);
    assert_eq!((version(&more), more.regrouped), (1, 0), "as it was before");
    let now = with(&more, &arrival("a"));
    let (old, new) = (groups_of(&before), groups_of(&now));
    assert_eq!(old[..], new[..3]);
    assert_eq!(new[3].data, [name("a")]);
    assert_eq!(now.regrouped, 0);
    // Whoever reads the record finds the same groups.
    let read = Roster::parse(&now.bytes()).unwrap();
    assert_eq!((&read, groups_of(&read)), (&now, new));
}

/// It would make other groups of the same epoch.
#[test]
fn a_release_that_knows_no_seats_does_not_read_a_record_with_some() {
    let before = twelve();
    let more = seated(before.resized(13).unwrap(), &before);
    let now = with(&more, &arrival("a"));
    assert_eq!(version(&now), 3);
    // Of a name that comes last the groups follow from the places alone, and every release finds them.
    let last = with(&more, &arrival("z"));
    assert_eq!(version(&last), 1);
    let text = String::from_utf8(last.bytes()).unwrap();
    assert!(!text.contains("seat"), "{text}");
}

#[test]
fn a_record_of_the_release_before_is_read_and_its_groups_stay() {
    let before = twelve();
    let mut record: serde_json::Value = serde_json::from_slice(&before.bytes()).unwrap();
    record.as_object_mut().unwrap().remove("regrouped");
    let read = Roster::parse(&serde_json::to_vec(&record).unwrap()).unwrap();
    assert_eq!(read, before);
    let removed = seated(read.removed(&name("c")).unwrap(), &read);
    let (old, new) = (groups_of(&before), groups_of(&removed));
    assert_eq!(new.len(), 3);
    assert_eq!(old[1].data, new[1].data);
    assert_eq!(old[2], new[2]);
    assert!(
        removed
            .change
            .ends_with("places are coded in other groups than before")
    );
    assert!((1..=7).contains(&removed.regrouped), "{}", removed.change);
    // The next epoch begins to count anew, and a place that is given up and filled changes nothing.
    let vacant = seated(lost(&removed, "d"), &removed);
    let filled = with(&vacant, &arrival("s"));
    for later in [&vacant, &filled] {
        assert_eq!((groups_of(later), later.regrouped), (new.clone(), 0));
    }
}

#[test]
fn a_node_of_another_failure_domain_changes_seats_where_it_must() {
    let in_rack = |node: &str, rack: &str| Arrival {
        failure_domain: Some(rack.into()),
        ..arrival(node)
    };
    let nodes: Vec<(String, String)> = (0..16)
        .map(|at| (format!("n{at:02}"), format!("rack-{}", at % 8)))
        .collect();
    let empty = Roster::empty("c".into(), nodes.len());
    let before = (nodes.iter()).fold(empty, |roster, (node, rack)| {
        with(&roster, &in_rack(node, rack))
    });
    let old = groups_of(&before);
    let own = old
        .iter()
        .find(|it| it.data.contains(&name("n02")))
        .unwrap();
    assert!(own.data.contains(&name("n03")));
    let vacant = seated(lost(&before, "n02"), &before);
    let alone = with(&vacant, &in_rack("s", "rack-9"));
    assert_eq!(alone.regrouped, 0, "nobody else is there");
    let beside = with(&vacant, &in_rack("s", "rack-3"));
    let new = groups_of(&beside);
    let apart = new
        .iter()
        .find(|it| it.data.contains(&name("n02")))
        .unwrap();
    let domain = |node| beside.place(node).unwrap().failure_domain.clone().unwrap();
    let alike = apart.data.iter().filter(|it| domain(it) == "rack-3");
    assert_eq!(alike.count(), 1, "{apart:?}");
}

#[test]
fn an_operator_hears_what_nodes_that_come_will_change() {
    let roster = twelve();
    assert_eq!(roster.regrouped_by(1, geometry()), Some(0));
    let one_less = seated(roster.removed(&name("c")).unwrap(), &roster);
    let moved = one_less.regrouped_by(1, geometry());
    assert_eq!(moved, Some(3), "the group that has a gap");
}

/// Seats are kept when nodes say in which zones they are: an operator has the groups made anew by them.
#[test]
fn groups_are_made_anew_by_zones_when_the_operator_says_so() {
    let geometry = Geometry::new(2, 1).unwrap();
    let mut roster = full(&["a", "b", "c", "d", "e", "f"]);
    for (number, node) in ["a", "b", "c", "d", "e", "f"].into_iter().enumerate() {
        let moved = Arrival {
            failure_domain: Some(format!("z{}/{node}", number / 2)),
            ..arrival(node)
        };
        let Arrived::Propose(next) = roster.arrive(&moved) else {
            panic!("it is elsewhere now");
        };
        roster = next.seated_after(&roster, Some(geometry));
    }
    let blocks = |roster: &Roster| {
        let members = roster.members();
        let groups = storaged_plan::groups(&members, geometry).unwrap();
        storaged_plan::lost_by_level(&members, &groups)[0].blocks
    };
    assert_eq!(blocks(&roster), 2);
    let Cordoning::Propose(next) = roster.grouped_anew(geometry) else {
        panic!("they would be others");
    };
    let next = next.seated_after(&roster, Some(geometry));
    assert_eq!(blocks(&next), 1);
    assert!(
        next.regrouped > 0 && next.change.contains("made anew; "),
        "{}",
        next.change
    );
    assert_eq!(next.grouped_anew(geometry), Cordoning::Already);
}
