//! Groups and home nodes over failure domains with levels.

use std::collections::BTreeMap;

use proptest::prelude::*;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Geometry, Namespace, NodeName, RunId, Step};

use crate::{Cordon, Group, Member, groups, homes, seats};

fn member(number: usize, domain: String) -> Member {
    Member {
        // Names do not follow the racks.
        name: NodeName::new(format!("n{:05}", number * 7919 % 20_011)).unwrap(),
        failure_domain: domain,
        cordon: Cordon::Open,
        seat: None,
    }
}

/// Racks of these sizes, without levels.
fn racks(sizes: &[usize]) -> Vec<Member> {
    let of_rack = |(rack, size): (usize, &usize)| vec![format!("r{rack}"); *size];
    let domains = sizes.iter().enumerate().flat_map(of_rack);
    domains.enumerate().map(|(at, it)| member(at, it)).collect()
}

/// Releases before levels must make the same groups and homes, or those that an upgrade has reached and the others do not understand one another.
#[test]
fn domains_without_levels_are_grouped_as_they_always_were() {
    let mut all = String::new();
    for (sizes, k, m) in [
        (&[1; 23][..], 4, 2),
        (&[5, 3, 3, 1, 1, 7], 4, 2),
        (&[9, 9, 2, 4, 4, 4, 4], 3, 2),
        (&[2; 40], 8, 3),
    ] {
        let mut members = racks(sizes);
        members[3].cordon = Cordon::Cordoned;
        let geometry = Geometry::new(k, m).unwrap();
        let mut before = groups(&members, geometry).unwrap();
        all.push_str(&format!("{before:?}"));
        for gone in [2, 5, 1, 0] {
            let mut known = seats(&before);
            members.remove(gone);
            for member in &mut members {
                member.seat = known.remove(&member.name);
            }
            members.push(member(1000 + gone, format!("r{gone}")));
            before = groups(&members, geometry).unwrap();
            all.push_str(&format!("{before:?}"));
        }
        for step in 0..20 {
            all.push_str(&format!("{:?}", homes(&members, &key(step), 3)));
        }
    }
    assert_eq!(
        storaged_codec::digest(all.as_bytes()).to_string(),
        "0c22b9dadbd87d58401a766659cb49a5b509f57a93998ba73bb5e29c9351248c"
    );
}

fn key(step: u64) -> CheckpointKey {
    CheckpointKey {
        namespace: Namespace::new("job").unwrap(),
        run: RunId::new(1),
        step: Step::new(step),
    }
}

/// Nodes of zones that have racks of these sizes, each node a domain of its own in its rack.
fn zones(sizes: &[&[usize]]) -> Vec<Member> {
    let mut members = Vec::new();
    for (zone, racks) in sizes.iter().enumerate() {
        for (rack, size) in racks.iter().enumerate() {
            for host in 0..*size {
                let domain = format!("z{zone}/r{rack}/h{host}");
                members.push(member(members.len(), domain));
            }
        }
    }
    members
}

/// How many blocks of a group lie in each domain of a level.
fn shares(group: &Group, members: &[Member], level: usize) -> BTreeMap<String, usize> {
    let mut shares = BTreeMap::new();
    for node in group.data.iter().chain(&group.coding) {
        let member = members.iter().find(|it| it.name == *node).unwrap();
        let parts: Vec<&str> = member.failure_domain.split('/').take(level + 1).collect();
        *shares.entry(parts.join("/")).or_default() += 1;
    }
    shares
}

fn most(group: &Group, members: &[Member], level: usize) -> usize {
    shares(group, members, level).into_values().max().unwrap()
}

#[test]
fn no_group_has_more_than_m_blocks_in_a_zone_or_rack_where_that_can_be() {
    for (of_zones, racks, nodes) in [
        (3, 4, 4),
        (1, 6, 5),
        (2, 2, 8),
        (6, 1, 3),
        (3, 2, 2),
        (5, 3, 7),
    ] {
        let zone = vec![nodes; racks];
        let members = zones(&vec![&zone[..]; of_zones]);
        for (k, m) in [(4, 2), (2, 1), (8, 2), (6, 3), (3, 3)] {
            for group in groups(&members, Geometry::new(k, m).unwrap()).unwrap() {
                let blocks = group.data.len() + m;
                for (level, domains) in [(0, of_zones), (1, of_zones * racks)] {
                    let most = most(&group, &members, level);
                    let can_be = blocks.div_ceil(domains);
                    assert!(
                        most <= can_be.max(m),
                        "({k},{m}): {most} of {group:?} in one of level {level}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_large_zone_is_spread_over_all_groups() {
    for sizes in [&[6, 3, 3][..], &[12, 6, 6], &[40, 20, 20], &[8, 4, 4, 4]] {
        let racks: Vec<[usize; 1]> = sizes.iter().map(|size| [*size]).collect();
        let members = zones(&racks.iter().map(|it| &it[..]).collect::<Vec<_>>());
        for group in groups(&members, Geometry::new(4, 2).unwrap()).unwrap() {
            assert!(most(&group, &members, 0) <= 2, "{sizes:?}: {group:?}");
        }
    }
}

/// Where no zone could be left out, the loads stay even all the same.
#[test]
fn a_small_zone_does_not_code_for_everybody() {
    let members = zones(&[&[30], &[30], &[4]]);
    let found = groups(&members, Geometry::new(4, 2).unwrap()).unwrap();
    let mut loads: BTreeMap<&NodeName, usize> = BTreeMap::new();
    for node in found.iter().flat_map(|group| &group.coding) {
        *loads.entry(node).or_default() += 1;
    }
    let fair = (found.len() * 2).div_ceil(members.len());
    assert!(loads.values().all(|load| *load <= fair), "{loads:?}");
}

#[test]
fn homes_lie_in_different_zones_and_then_in_different_racks() {
    let members = zones(&[&[3, 3], &[3, 3]]);
    let domain = |name: &NodeName| {
        let member = members.iter().find(|it| it.name == *name);
        member.unwrap().failure_domain.rsplit_once('/').unwrap().0
    };
    for step in 0..50 {
        let found = homes(&members, &key(step), 4);
        let racks: std::collections::BTreeSet<&str> = found.iter().map(domain).collect();
        assert_eq!(racks.len(), 4, "{found:?}");
        assert_ne!(domain(&found[0])[..2], domain(&found[1])[..2], "{found:?}");
    }
}

/// New nodes, and those that come for others, take the seats that leave the fewest of a group in one zone.
#[test]
fn a_seat_is_taken_in_the_group_that_has_the_fewest_of_its_zone() {
    let geometry = Geometry::new(4, 2).unwrap();
    let mut members = zones(&[&[8], &[8], &[8]]);
    for round in 0..40 {
        let before = groups(&members, geometry).unwrap();
        let mut known = seats(&before);
        for member in &mut members {
            member.seat = known.remove(&member.name);
        }
        // One of each of two zones goes, and others of these zones come.
        let gone = [round * 7 % 24, (round * 7 + 11) % 23];
        for (turn, at) in gone.into_iter().enumerate() {
            let gone = members.remove(at);
            let zone = gone.failure_domain.split('/').next().unwrap().to_owned();
            let number = 100 + 2 * round + turn;
            members.push(member(number, format!("{zone}/r0/h{number}")));
        }
        for group in groups(&members, geometry).unwrap() {
            assert!(most(&group, &members, 0) <= 3, "round {round}: {group:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A coding node's zone has more blocks of the group than another one only where nobody there was free for it.
    #[test]
    fn a_coding_node_makes_no_zone_too_full_while_another_has_room(
        sizes in prop::collection::vec(1_usize..9, 2..8),
        k in 1_usize..7,
        m in 1_usize..4,
    ) {
        let racks: Vec<[usize; 1]> = sizes.iter().map(|size| [*size]).collect();
        let members = zones(&racks.iter().map(|it| &it[..]).collect::<Vec<_>>());
        prop_assume!(members.len() > m);
        let found = groups(&members, Geometry::new(k, m).unwrap()).unwrap();
        let mut loads: BTreeMap<&NodeName, usize> = BTreeMap::new();
        for node in found.iter().flat_map(|group| &group.coding) {
            *loads.entry(node).or_default() += 1;
        }
        let fair = (found.len() * m).div_ceil(members.len());
        let zone = |node: &NodeName| {
            let member = members.iter().find(|it| it.name == *node);
            member.unwrap().failure_domain.split('/').next().unwrap().to_owned()
        };
        for group in &found {
            let after = shares(group, &members, 0);
            for node in &group.coding {
                for free in &members {
                    let is_of_group = group.data.contains(&free.name) || group.coding.contains(&free.name);
                    let load = loads.get(&free.name).copied().unwrap_or(0);
                    if is_of_group || load >= fair {
                        continue;
                    }
                    let other = after.get(&zone(&free.name)).copied().unwrap_or(0);
                    prop_assert!(other + 1 >= after[&zone(node)], "{:?}: {} and not {}", group, node, free.name);
                }
            }
        }
    }
}

/// What a node that names a zone alone, or one rack more than the others, makes of the hard rule.
fn mixed() -> impl Strategy<Value = Vec<Member>> {
    let domain =
        (0..3_u8, 0..3_u8, 0..4_u8, 0..6_u8).prop_map(|(depth, zone, rack, host)| match depth {
            0 => format!("z{zone}"),
            1 => format!("z{zone}/r{rack}"),
            _ => format!("z{zone}/r{rack}/h{host}"),
        });
    let one = (domain, prop::bool::weighted(0.2));
    prop::collection::vec(one, 3..24).prop_map(|all| {
        let named = all.into_iter().enumerate();
        let members = named.map(|(at, (domain, is_cordoned))| Member {
            cordon: if is_cordoned {
                Cordon::Cordoned
            } else {
                Cordon::Open
            },
            ..member(at, domain)
        });
        members.collect()
    })
}

fn seated(members: &[Member], by: &[Group]) -> Vec<Member> {
    let mut known = seats(by);
    let sit = |member: &Member| Member {
        seat: known.remove(&member.name),
        ..member.clone()
    };
    members.iter().map(sit).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn domains_of_any_depth_are_kept_apart_and_what_has_not_changed_stays(
        members in mixed(),
        k in 1_usize..5,
        m in 1_usize..3,
    ) {
        let geometry = Geometry::new(k, m).unwrap();
        let Ok(anew) = groups(&members, geometry) else { return Ok(()) };
        let once = groups(&seated(&members, &anew), geometry);
        prop_assert!(once.is_ok(), "{:?}: {:?}", anew, once);
        let once = once.unwrap();
        prop_assert_eq!(&groups(&seated(&members, &once), geometry).unwrap(), &once);
        let domain = |node: &NodeName| &members.iter().find(|it| it.name == *node).unwrap().failure_domain;
        let lies_in = |one: &str, other: &str| one == other || one.strip_prefix(other).is_some_and(|rest| rest.starts_with('/'));
        for group in anew.iter().chain(&once) {
            for (at, coding) in group.coding.iter().enumerate() {
                let others = group.data.iter().chain(&group.coding[..at]);
                for other in others {
                    let (one, other) = (domain(coding), domain(other));
                    prop_assert!(!lies_in(one, other) && !lies_in(other, one), "{:?}: {} and {}", group, one, other);
                }
            }
        }
    }
}
