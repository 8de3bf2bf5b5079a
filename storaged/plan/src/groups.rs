//! Groups: who shares stripes with whom. A pure function of the member list, so every node finds the same groups. Members that had
//! seats in the groups before keep them as far as they can (`regroup`).

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::{Geometry, NodeName};
use thiserror::Error;

use super::domains::{Blocks, Coders, interleaved};
use super::regroup::follow;

/// A configured node.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Member {
    /// Its name.
    pub name: NodeName,
    /// What fails together with it: a rack, a power feed. By default the node itself. With what it lies in before it, as in `zone/rack`.
    pub failure_domain: String,
    /// Whether it codes for others.
    pub cordon: Cordon,
    /// Where it was in the groups before these; none of a new one, and of all where nothing is remembered.
    pub seat: Option<Seat>,
}

/// Where a node sits in the groups.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub struct Seat {
    /// Among the data nodes of a group.
    pub data: Option<Position>,
    /// Among the coding nodes of others.
    pub coding: Vec<Position>,
}

/// A block of a group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Position {
    /// Which group, from 0.
    pub group: u32,
    /// Which of its data nodes, in coding order, or of its coding nodes, in parity order.
    pub index: u32,
}

/// Whether a node is given parity of new checkpoints.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub enum Cordon {
    /// As any other.
    #[default]
    Open,
    /// Only where the others do not suffice: an operator expects to lose it. Its own shards are coded as before.
    Cordoned,
}

/// k data nodes (fewer in the last group, and where there are fewer than k + m nodes) and m coding nodes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// Data nodes in coding order.
    pub data: Vec<NodeName>,
    /// Coding nodes in parity order.
    pub coding: Vec<NodeName>,
}

/// Why a member list cannot be protected.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum GroupError {
    /// Two members with one name.
    #[error("node {0} is listed twice: give every node a name of its own")]
    Duplicate(NodeName),
    /// Not enough nodes outside a group's data nodes and their failure domains.
    #[error(
        "geometry {geometry} needs {needed} coding nodes outside the failure domains of {data:?}, got {got}: \
         add nodes in other failure domains, lower m, or leave out [coding]"
    )]
    TooFewDomains {
        geometry: Geometry,
        data: Vec<NodeName>,
        needed: usize,
        got: usize,
    },
}

/// Divides the members into groups of k data nodes and gives each m coding nodes from outside.
///
/// Nodes are dealt so that a group's data nodes come from as many failure domains as there are. Coding nodes lie
/// in domains of their own, away from the group's data nodes, and are picked from the nodes that code least so
/// far; cordoned ones come last. So the loss of any m domains costs a stripe at most m blocks if every data node has its own domain.
///
/// Members with seats keep them, and gaps are filled with the others: whatever is coded in another group than before is coded whole.
///
/// Of fewer than k + m nodes all but m are a group's data nodes, coded by the others: they bear m losses at a redundancy of m to the data
/// nodes that are left. Of m + 1 nodes each has the shards of every other one, as mirrors do.
///
/// # Errors
/// [`GroupError`] if a name comes twice or some group finds no m coding nodes.
pub fn groups(members: &[Member], geometry: Geometry) -> Result<Vec<Group>, GroupError> {
    let ordered = interleave_domains(members)?;
    if members.iter().all(|member| member.seat.is_none()) {
        return made_anew(&ordered, geometry);
    }
    follow(&ordered, geometry)
}

/// Groups of members that have no seats, in this order.
pub(crate) fn made_anew(ordered: &[&Member], geometry: Geometry) -> Result<Vec<Group>, GroupError> {
    let most = data_nodes(ordered.len(), geometry);
    let needed = ordered.len().div_ceil(most) * geometry.m();
    let mut coders = Coders::new(ordered, needed);
    ordered
        .chunks(most)
        .map(|data| {
            let coding = coding_nodes(data, geometry, &mut coders)?;
            Ok(Group {
                data: data.iter().map(|member| member.name.clone()).collect(),
                coding,
            })
        })
        .collect()
}

/// Everybody's seat in these groups.
pub fn seats(groups: &[Group]) -> BTreeMap<NodeName, Seat> {
    let mut seats: BTreeMap<NodeName, Seat> = BTreeMap::new();
    for (group, members) in (0..).zip(groups) {
        for (index, node) in (0..).zip(&members.data) {
            let seat = seats.entry(node.clone()).or_default();
            seat.data = Some(Position { group, index });
        }
        for (index, node) in (0..).zip(&members.coding) {
            let seat = seats.entry(node.clone()).or_default();
            seat.coding.push(Position { group, index });
        }
    }
    seats
}

/// How many nodes are coded in another group than before, whose next checkpoints are coded whole. New nodes do not count.
pub fn regrouped(before: &[Group], now: &[Group]) -> usize {
    let of_each = |groups: &[Group]| -> BTreeMap<NodeName, usize> {
        let numbered = groups.iter().enumerate();
        let each =
            numbered.flat_map(|(at, group)| group.data.iter().map(move |it| (it.clone(), at)));
        each.collect()
    };
    let old = of_each(before);
    let moved = of_each(now).into_iter().filter(|(node, at)| {
        let was = old.get(node).and_then(|at| before.get(*at));
        was.is_some_and(|was| *was != now[*at])
    });
    moved.count()
}

/// Data nodes of a group among so many members. Domains do not count: one that is mistyped would make all groups anew.
pub(crate) fn data_nodes(members: usize, geometry: Geometry) -> usize {
    let beside_coding = members.saturating_sub(geometry.m());
    geometry.k().min(beside_coding).max(1)
}

/// Members in an order that mixes failure domains.
fn interleave_domains(members: &[Member]) -> Result<Vec<&Member>, GroupError> {
    let mut names = BTreeSet::new();
    match members.iter().find(|member| !names.insert(&member.name)) {
        Some(twice) => Err(GroupError::Duplicate(twice.name.clone())),
        None => Ok(interleaved(members.iter().collect())),
    }
}

fn coding_nodes<'a>(
    data: &[&'a Member],
    geometry: Geometry,
    coders: &mut Coders<'a>,
) -> Result<Vec<NodeName>, GroupError> {
    let mut blocks = Blocks::of(data.iter().map(|it| it.failure_domain.as_str()));
    let mut coding = Vec::with_capacity(geometry.m());
    while coding.len() < geometry.m() {
        let Some(member) = coders.best(&blocks) else {
            return Err(GroupError::TooFewDomains {
                geometry,
                data: data.iter().map(|member| member.name.clone()).collect(),
                needed: geometry.m(),
                got: coding.len(),
            });
        };
        coders.take_on(member);
        blocks.add(&member.failure_domain);
        coding.push(member.name.clone());
    }
    Ok(coding)
}

/// The nodes that share a group with this one: those whose loss it must notice soonest.
pub fn group_peers(groups: &[Group], node: &NodeName) -> BTreeSet<NodeName> {
    let members = |group: &Group| -> Vec<NodeName> {
        let all = group.data.iter().chain(&group.coding);
        all.cloned().collect()
    };
    let all = groups.iter().map(members);
    let own = all.filter(|members| members.contains(node));
    own.flatten().filter(|peer| peer != node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(names_and_domains: &[(&str, &str)]) -> Vec<Member> {
        names_and_domains
            .iter()
            .map(|(name, domain)| Member {
                name: NodeName::new(*name).unwrap(),
                failure_domain: (*domain).into(),
                cordon: Cordon::Open,
                seat: None,
            })
            .collect()
    }

    fn own_domains(count: usize) -> Vec<Member> {
        let names: Vec<String> = (0..count).map(|i| format!("n{i:02}")).collect();
        let pairs: Vec<(&str, &str)> = names.iter().map(|n| (n.as_str(), n.as_str())).collect();
        members(&pairs)
    }

    #[test]
    fn six_nodes_make_one_full_and_one_short_group() {
        let found = groups(&own_domains(6), Geometry::new(4, 2).unwrap()).unwrap();
        let text = |names: &[NodeName]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(text(&found[0].data), ["n00", "n01", "n02", "n03"]);
        assert_eq!(text(&found[0].coding), ["n04", "n05"]);
        assert_eq!(text(&found[1].data), ["n04", "n05"]);
        assert_eq!(text(&found[1].coding), ["n00", "n01"]);
    }

    #[test]
    fn fewer_nodes_than_a_group_code_for_one_another() {
        for (count, k, m, data) in [
            (2, 4, 1, 1),
            (3, 4, 2, 1),
            (4, 4, 2, 2),
            (5, 4, 2, 3),
            (4, 8, 3, 1),
            (9, 8, 3, 6),
        ] {
            let members = own_domains(count);
            let found = groups(&members, Geometry::new(k, m).unwrap()).unwrap();
            let all: Vec<&NodeName> = found.iter().flat_map(|group| &group.data).collect();
            assert_eq!(all.len(), count, "each is a data node once: {found:?}");
            for group in &found {
                assert!(group.data.len() <= data, "{found:?}");
                let others: BTreeSet<&NodeName> = group.coding.iter().collect();
                assert_eq!(others.len(), m);
                assert!(group.data.iter().all(|node| !others.contains(node)));
            }
        }
        let too_few = groups(&own_domains(2), Geometry::new(4, 2).unwrap());
        assert!(matches!(
            too_few,
            Err(GroupError::TooFewDomains { got: 1, .. })
        ));
    }

    fn cordon(list: &mut [Member], names: &[&str]) {
        for member in list.iter_mut() {
            if names.contains(&member.name.as_str()) {
                member.cordon = Cordon::Cordoned;
            }
        }
    }

    #[test]
    fn a_cordoned_node_codes_only_where_the_others_do_not_suffice() {
        let geometry = Geometry::new(4, 2).unwrap();
        let mut list = own_domains(8);
        let before = groups(&list, geometry).unwrap();
        cordon(&mut list, &["n04", "n00"]);
        let found = groups(&list, geometry).unwrap();
        for (old, new) in before.iter().zip(&found) {
            assert_eq!(old.data, new.data, "what it trains stays coded as it was");
        }
        let coding: Vec<&str> = (found.iter())
            .flat_map(|group| group.coding.iter().map(NodeName::as_str))
            .collect();
        assert_eq!(coding, ["n05", "n06", "n01", "n02"]);
        // Of three nodes with two coding nodes for each, all must code.
        let mut three = own_domains(3);
        let before = groups(&three, geometry).unwrap();
        cordon(&mut three, &["n01"]);
        let found = groups(&three, geometry).unwrap();
        let of = |groups: &[Group]| -> Vec<BTreeSet<NodeName>> {
            let coding = groups.iter().map(|it| it.coding.iter().cloned().collect());
            coding.collect()
        };
        assert_eq!(of(&found), of(&before));
    }

    #[test]
    fn a_node_shares_groups_with_those_it_codes_with_and_for() {
        let found = groups(&own_domains(12), Geometry::new(4, 1).unwrap()).unwrap();
        let peers_of = |node: &str| {
            let peers = group_peers(&found, &NodeName::new(node).unwrap());
            peers.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(found[0].coding, [NodeName::new("n04").unwrap()]);
        assert_eq!(peers_of("n02"), ["n00", "n01", "n03", "n04"]);
        let of_both = peers_of("n04");
        for peer in ["n00", "n01", "n02", "n03", "n05", "n06", "n07"] {
            assert!(of_both.iter().any(|it| it == peer), "{peer}");
        }
        assert!(peers_of("n99").is_empty());
    }

    #[test]
    fn coding_nodes_lie_outside_their_data_nodes_and_domains_and_load_is_even() {
        for (count, k, m) in [(16, 8, 2), (12, 4, 2), (9, 4, 3), (34, 8, 4)] {
            let members = own_domains(count);
            let found = groups(&members, Geometry::new(k, m).unwrap()).unwrap();
            let mut load: BTreeMap<&NodeName, usize> = BTreeMap::new();
            for group in &found {
                assert!(group.coding.iter().all(|node| !group.data.contains(node)));
                assert_eq!(group.coding.iter().collect::<BTreeSet<_>>().len(), m);
                group
                    .coding
                    .iter()
                    .for_each(|node| *load.entry(node).or_default() += 1);
            }
            let most = load.values().max().unwrap();
            assert!(
                *most <= (found.len() * m).div_ceil(count) + 1,
                "{count} nodes, load {most}"
            );
        }
    }

    #[test]
    fn a_coding_node_is_the_one_that_codes_least_of_those_in_other_domains() {
        for (nodes, domains) in [(7, 7), (12, 5), (40, 9), (61, 61), (64, 8)] {
            let names: Vec<String> = (0..nodes).map(|i| format!("n{:02}", i * 37 % 97)).collect();
            let domain = |i: usize| format!("rack-{}", i * i % domains);
            let listed: Vec<(String, String)> = (names.into_iter().enumerate())
                .map(|(i, name)| (name, domain(i)))
                .collect();
            let pairs: Vec<(&str, &str)> = (listed.iter())
                .map(|(name, domain)| (name.as_str(), domain.as_str()))
                .collect();
            let members = members(&pairs);
            let found = groups(&members, Geometry::new(2, 1).unwrap()).unwrap();
            let mut load: BTreeMap<&NodeName, usize> = BTreeMap::new();
            for group in &found {
                let own = members.iter().filter(|it| group.data.contains(&it.name));
                let taken: BTreeSet<&str> = own.map(|it| it.failure_domain.as_str()).collect();
                let others = members.iter().map(|it| (it, &it.name));
                let others = others.filter(|(it, _)| !taken.contains(it.failure_domain.as_str()));
                let least = others.min_by_key(|(_, name)| (load.get(name).copied(), *name));
                let (_, least) = least.unwrap();
                assert_eq!(
                    group.coding.iter().collect::<Vec<_>>(),
                    [least],
                    "{nodes} nodes in {domains}"
                );
                *load.entry(least).or_default() += 1;
            }
        }
    }

    #[test]
    fn the_order_of_the_list_does_not_matter() {
        let mut list = own_domains(10);
        let geometry = Geometry::new(4, 2).unwrap();
        let expected = groups(&list, geometry).unwrap();
        list.reverse();
        assert_eq!(groups(&list, geometry).unwrap(), expected);
    }

    #[test]
    fn too_few_domains_and_duplicates_are_refused() {
        let geometry = Geometry::new(2, 1).unwrap();
        let one_rack = members(&[("a", "r1"), ("b", "r1"), ("c", "r1")]);
        assert!(matches!(
            groups(&one_rack, geometry),
            Err(GroupError::TooFewDomains { .. })
        ));
        let twice = members(&[("a", "a"), ("a", "b"), ("c", "c")]);
        assert!(matches!(
            groups(&twice, geometry),
            Err(GroupError::Duplicate(_))
        ));
    }
}
