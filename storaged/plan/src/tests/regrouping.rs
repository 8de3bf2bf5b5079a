//! Groups from epoch to epoch: who changes, and what must hold whatever changes.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use storaged_wire::{Geometry, NodeName};

use crate::{Cordon, Group, Member, groups, regrouped, seats};

/// What happens to a cluster.
#[derive(Clone, Debug)]
enum Step {
    /// So many more, which may all be of one failure domain that is new.
    Add(usize, Option<u8>),
    /// Those of these numbers, modulo what there is.
    Remove(Vec<usize>),
    /// Cordoned, or not any more.
    Cordon(usize),
}

struct Cluster {
    members: Vec<Member>,
    geometry: Geometry,
    racks: Option<u8>,
    made: usize,
}

impl Cluster {
    fn new(nodes: usize, geometry: Geometry, racks: Option<u8>) -> Self {
        let mut cluster = Self {
            members: Vec::new(),
            geometry,
            racks,
            made: 0,
        };
        cluster.add(nodes, None);
        cluster
    }

    /// Names in no order: new ones come before, between and after those that are there.
    fn add(&mut self, nodes: usize, rack: Option<u8>) {
        for _ in 0..nodes {
            self.made += 1;
            let number = self.made * 7919 % 10_007;
            let name = NodeName::new(format!("n{number:05}")).unwrap();
            let failure_domain = match (rack, self.racks) {
                (Some(rack), Some(_)) => format!("new-{rack}"),
                (_, Some(racks)) => format!("rack-{}", number % usize::from(racks)),
                (_, None) => name.to_string(),
            };
            self.members.push(Member {
                name,
                failure_domain,
                cordon: Cordon::Open,
                seat: None,
            });
        }
    }

    fn changed_by(&mut self, step: &Step) -> usize {
        match step {
            Step::Add(nodes, rack) => {
                self.add(*nodes, *rack);
                *nodes
            }
            Step::Remove(numbers) => {
                for number in numbers {
                    let at = number % self.members.len();
                    if self.members.len() > 2 {
                        self.members.remove(at);
                    }
                }
                numbers.len()
            }
            Step::Cordon(number) => {
                let at = number % self.members.len();
                let member = &mut self.members[at];
                member.cordon = match member.cordon {
                    Cordon::Open => Cordon::Cordoned,
                    Cordon::Cordoned => Cordon::Open,
                };
                1
            }
        }
    }

    fn groups(&self) -> Option<Vec<Group>> {
        groups(&self.members, self.geometry).ok()
    }

    fn without_seats(&self) -> Option<Vec<Group>> {
        let mut members = self.members.clone();
        members.iter_mut().for_each(|member| member.seat = None);
        groups(&members, self.geometry).ok()
    }

    fn remember(&mut self, groups: &[Group]) {
        let mut seats = seats(groups);
        for member in &mut self.members {
            member.seat = seats.remove(&member.name);
        }
    }

    fn domain(&self, node: &NodeName) -> &str {
        let member = self.members.iter().find(|it| it.name == *node);
        &member.expect("a member").failure_domain
    }

    /// Blocks that the loss of m failure domains may cost.
    fn blocks_lost_max(&self, groups: &[Group]) -> usize {
        let lost = groups.iter().map(|group| {
            let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
            for node in group.data.iter().chain(&group.coding) {
                *counts.entry(self.domain(node)).or_default() += 1;
            }
            let mut counts: Vec<usize> = counts.into_values().collect();
            counts.sort_unstable_by(|one, other| other.cmp(one));
            counts.iter().take(self.geometry.m()).sum::<usize>()
        });
        lost.max().unwrap_or(0)
    }

    fn all_are_coded(&self, groups: &[Group]) {
        let (k, m, nodes) = (self.geometry.k(), self.geometry.m(), self.members.len());
        let most = k.min(nodes.saturating_sub(m)).max(1);
        let all: Vec<&NodeName> = groups.iter().flat_map(|group| &group.data).collect();
        let once: BTreeSet<&NodeName> = all.iter().copied().collect();
        assert_eq!(
            (all.len(), once.len()),
            (nodes, nodes),
            "each once: {groups:?}"
        );
        assert_eq!(groups.len(), nodes.div_ceil(most), "no more than it takes");
        for group in groups {
            assert!((1..=most).contains(&group.data.len()), "{group:?}");
            let of_data: BTreeSet<&str> = group.data.iter().map(|it| self.domain(it)).collect();
            let of_coding: BTreeSet<&str> = group.coding.iter().map(|it| self.domain(it)).collect();
            assert_eq!((group.coding.len(), of_coding.len()), (m, m), "{group:?}");
            assert!(of_data.is_disjoint(&of_coding), "{group:?}");
            self.cordoned_code_only_where_they_must(group);
        }
    }

    fn cordoned_code_only_where_they_must(&self, group: &Group) {
        let is_cordoned = |node: &NodeName| {
            let mut members = self.members.iter();
            members.any(|it| it.name == *node && it.cordon == Cordon::Cordoned)
        };
        for cordoned in group.coding.iter().filter(|node| is_cordoned(node)) {
            let others = group.data.iter().chain(&group.coding);
            let taken: BTreeSet<&str> = others
                .filter(|node| *node != cordoned)
                .map(|node| self.domain(node))
                .collect();
            let open = self.members.iter().filter(|it| it.cordon == Cordon::Open);
            let mut free = open.filter(|it| !taken.contains(it.failure_domain.as_str()));
            assert!(free.next().is_none(), "{cordoned} codes in {group:?}");
        }
    }
}

fn geometry(k: usize, m: usize) -> Geometry {
    Geometry::new(k, m).unwrap()
}

/// How many nodes are in other groups once this has happened to such a cluster.
fn moved(nodes: usize, k: usize, m: usize, racks: Option<u8>, step: &Step) -> usize {
    let mut cluster = Cluster::new(nodes, geometry(k, m), racks);
    let before = cluster.groups().expect("coded");
    cluster.remember(&before);
    cluster.changed_by(step);
    let now = cluster.groups().expect("coded");
    cluster.all_are_coded(&now);
    regrouped(&before, &now)
}

#[test]
fn one_node_more_changes_no_full_group() {
    for (nodes, k, m) in [(64, 8, 2), (12, 4, 2), (40, 4, 1)] {
        assert_eq!(moved(nodes, k, m, None, &Step::Add(1, None)), 0, "{nodes}");
    }
}

#[test]
fn a_gap_is_filled_and_the_other_groups_stay() {
    assert_eq!(
        moved(62, 8, 2, None, &Step::Add(1, None)),
        6,
        "the last one"
    );
    assert_eq!(moved(62, 8, 2, None, &Step::Add(2, None)), 6);
    // Three need a new group anyhow: all go there.
    assert_eq!(moved(62, 8, 2, None, &Step::Add(3, None)), 0);
}

#[test]
fn a_node_less_changes_its_groups() {
    for number in 0..64 {
        let moved = moved(64, 8, 2, None, &Step::Remove(vec![number]));
        assert!(
            (7..=7 + 2 * 8).contains(&moved),
            "its own, and those that it codes: {moved}"
        );
    }
}

#[test]
fn a_new_rack_is_dealt_to_several_groups_and_no_more_change() {
    let step = Step::Add(4, Some(0));
    let moved = moved(64, 4, 2, Some(8), &step);
    assert!(moved <= 4 * (4 + 2), "{moved}");
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rack = prop::option::of(0..3_u8);
    let step = prop_oneof![
        (1..6_usize, rack).prop_map(|(nodes, rack)| Step::Add(nodes, rack)),
        prop::collection::vec(any::<usize>(), 1..5).prop_map(Step::Remove),
        any::<usize>().prop_map(Step::Cordon),
    ];
    prop::collection::vec(step, 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn groups_hold_through_any_changes_and_little_moves(
        nodes in 1..60_usize,
        k in 1..9_usize,
        m in 1..4_usize,
        racks in prop::option::of(4..12_u8),
        steps in steps(),
    ) {
        let mut cluster = Cluster::new(nodes, geometry(k, m), racks);
        let mut before = cluster.groups();
        let (mut changes, mut moved) = (0, 0);
        for step in steps {
            if let Some(before) = &before {
                cluster.remember(before);
            }
            changes += cluster.changed_by(&step);
            let anew = cluster.without_seats();
            let now = cluster.groups();
            prop_assert!(now.is_some() || anew.is_none(), "what can be coded is");
            let Some(now) = now else { break };
            cluster.all_are_coded(&now);
            if let (Some(before), Some(anew)) = (&before, &anew) {
                let known: Vec<Group> = before.iter().map(|group| cluster.still_there(group)).collect();
                let worst = cluster.blocks_lost_max(&known).max(cluster.blocks_lost_max(anew));
                prop_assert!(cluster.blocks_lost_max(&now) <= worst.max(m));
                moved += regrouped(before, &now);
                // One change may be the one that a group has gone short of others for, until there was one group too many.
                let few = 2 * changes * (k + m);
                let is_small = cluster.members.len() < k + m;
                prop_assert!(racks.is_some() || is_small || moved <= few, "{} changes moved {}", changes, moved);
            }
            cluster.remember(&now);
            if before.is_some() {
                prop_assert_eq!(cluster.groups(), Some(now.clone()), "what has not changed stays");
                cluster.members.reverse();
                prop_assert_eq!(cluster.groups(), Some(now.clone()), "in whatever order they are listed");
            }
            before = Some(now);
        }
    }
}

impl Cluster {
    fn still_there(&self, group: &Group) -> Group {
        let is_there = |node: &&NodeName| self.members.iter().any(|it| it.name == **node);
        let of = |nodes: &[NodeName]| nodes.iter().filter(is_there).cloned().collect();
        Group {
            data: of(&group.data),
            coding: of(&group.coding),
        }
    }
}
