//! Groups that follow from those before: whoever has a seat keeps it unless something is better for it. What a group has kept of its
//! members, their order and its coding nodes is what its next checkpoint is coded as a difference from.
//!
//! In this order: groups that there are too many of are dissolved, the smallest first; groups that are missing are opened, and given the
//! new members; what is left of these fills gaps. A new member that shares its failure domain with another one of its group changes
//! seats with a member of another group. Coding nodes stay where they may, and the ones that code most give way to those that code
//! least. Whoever has no seat at the end has none at the beginning, so what follows from groups that have not changed is the same.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use storaged_wire::{Geometry, NodeName};

use super::domains::{Blocks, Coders};
use super::groups::{Cordon, Group, GroupError, Member, data_nodes, made_anew};

/// A group in the making.
#[derive(Clone, Debug, Default)]
struct Table<'a> {
    data: Vec<&'a Member>,
    /// By parity index; none that has yet to be found.
    coding: Vec<Option<&'a Member>>,
    /// Its data nodes are not those of the group before: it costs nothing more to change it again.
    is_changed: bool,
}

/// Two seats that change members.
#[derive(Clone, Copy, Debug)]
struct Swap {
    table: usize,
    index: usize,
    gain: usize,
}

/// Groups in which members keep their seats as far as they can; these come in an order that mixes failure domains.
pub(crate) fn follow(ordered: &[&Member], geometry: Geometry) -> Result<Vec<Group>, GroupError> {
    let before = Tables::seated(ordered, geometry);
    let mut now = before.clone();
    now.seat_all(ordered);
    // Where the change costs safety that groups made anew would have, it is not worth what it spares.
    if now.blocks_lost_max() > before.blocks_lost_max()
        && let Ok(anew) = made_anew(ordered, geometry)
    {
        let anew = Tables::of(&anew, ordered, geometry);
        if now.blocks_lost_max() > anew.blocks_lost_max() {
            now = anew;
        }
    }
    now.find_coding(ordered)?;
    Ok(now.into_groups())
}

#[derive(Clone, Debug)]
struct Tables<'a> {
    all: Vec<Table<'a>>,
    geometry: Geometry,
}

impl<'a> Tables<'a> {
    /// As the seats say.
    fn seated(members: &[&'a Member], geometry: Geometry) -> Self {
        let mut data: Vec<_> = (members.iter())
            .filter_map(|it| Some((it.seat.as_ref()?.data?, *it)))
            .collect();
        data.sort_by_key(|(at, member)| (*at, &member.name));
        let mut tables: BTreeMap<u32, Table<'a>> = BTreeMap::new();
        for (at, member) in data {
            let table = tables.entry(at.group).or_default();
            table.coding.resize(geometry.m(), None);
            table.is_changed |= table.data.len() as u64 != u64::from(at.index);
            table.data.push(member);
        }
        for member in members {
            for at in member.seat.iter().flat_map(|seat| &seat.coding) {
                let table = tables.get_mut(&at.group);
                let place = table.and_then(|it| it.coding.get_mut(at.index as usize));
                if let Some(place @ None) = place {
                    *place = Some(member);
                }
            }
        }
        let all = tables.into_values().collect();
        Self { all, geometry }
    }

    /// Of groups, without their coding nodes.
    fn of(groups: &[Group], members: &[&'a Member], geometry: Geometry) -> Self {
        let by_name: BTreeMap<&NodeName, &Member> =
            members.iter().map(|it| (&it.name, *it)).collect();
        let table = |group: &Group| Table {
            data: (group.data.iter())
                .filter_map(|name| by_name.get(name).copied())
                .collect(),
            coding: vec![None; geometry.m()],
            is_changed: true,
        };
        let all = groups.iter().map(table).collect();
        Self { all, geometry }
    }

    /// Gives every member a seat.
    fn seat_all(&mut self, members: &[&'a Member]) {
        let most = data_nodes(members.len(), self.geometry);
        let has_seat = |member: &Member| member.seat.as_ref().is_some_and(|it| it.data.is_some());
        let mut without: Vec<&'a Member> = self.make_room(members.len().div_ceil(most), most);
        without.extend(members.iter().filter(|it| !has_seat(it)));
        for member in &without {
            self.take_in(member, most);
        }
        for member in &without {
            self.part_from_its_domain(member);
        }
    }

    /// So many groups of at most so many data nodes each; whoever has lost its seat by that.
    fn make_room(&mut self, count: usize, most: usize) -> Vec<&'a Member> {
        let mut without = Vec::new();
        while self.all.len() > count {
            let sizes = self.all.iter().enumerate();
            let least = sizes.min_by_key(|(at, table)| (table.data.len(), Reverse(*at)));
            let Some((at, _)) = least else { break };
            without.extend(self.all.remove(at).data);
        }
        for table in &mut self.all {
            if table.data.len() > most {
                without.extend(table.data.drain(most..));
                table.is_changed = true;
            }
        }
        let opened = || Table {
            coding: vec![None; self.geometry.m()],
            is_changed: true,
            ..Table::default()
        };
        let missing = count.saturating_sub(self.all.len());
        let opened: Vec<Table<'a>> = std::iter::repeat_with(opened).take(missing).collect();
        self.all.extend(opened);
        without
    }

    /// A seat in a group without others of its failure domain, if there is one, and with as few as there are in what that lies in; rather in
    /// one that has changed already, and of these in the one with the most room.
    fn take_in(&mut self, member: &'a Member, most: usize) {
        let tables = self.all.iter_mut().enumerate();
        let with_room = tables.filter(|(_, table)| table.data.len() < most);
        let best = with_room.min_by_key(|(at, table)| {
            let blocks = table.data_blocks();
            let alike = blocks.lost_with(&member.failure_domain);
            let closeness = blocks.closeness(&member.failure_domain);
            (alike, closeness, !table.is_changed, table.data.len(), *at)
        });
        if let Some((_, table)) = best {
            table.data.push(member);
            table.is_changed = true;
        }
    }

    /// Changes seats with a member of another group, if fewer nodes of a group then share a failure domain.
    fn part_from_its_domain(&mut self, member: &Member) {
        let own = self.all.iter().enumerate().find_map(|(at, table)| {
            let index = table.data.iter().position(|it| it.name == member.name)?;
            Some((at, index))
        });
        let Some((at, index)) = own else { return };
        let Some(swap) = self.best_swap(at, member) else {
            return;
        };
        let other = self.all[swap.table].data[swap.index];
        let own = std::mem::replace(&mut self.all[at].data[index], other);
        self.all[swap.table].data[swap.index] = own;
        for changed in [at, swap.table] {
            self.all[changed].is_changed = true;
        }
    }

    fn best_swap(&self, at: usize, member: &Member) -> Option<Swap> {
        let own = self.all[at].data_blocks();
        let domain = member.failure_domain.as_str();
        let alike = own.lost_with(domain).checked_sub(2)? + 1;
        let others = self.all.iter().enumerate().filter(|(it, _)| *it != at);
        let own = &own;
        let swaps = others.flat_map(|(table, other)| {
            let blocks = other.data_blocks();
            let there = blocks.lost_with(domain);
            other
                .data
                .iter()
                .enumerate()
                .filter_map(move |(index, it)| {
                    let its = it.failure_domain.as_str();
                    let better = alike + blocks.lost_with(its) - 1;
                    let gain = better.checked_sub(there + own.lost_with(its))?;
                    let is_better = its != domain && gain > 0;
                    is_better.then_some(Swap { table, index, gain })
                })
        });
        swaps.min_by_key(|swap| {
            let is_kept = !self.all[swap.table].is_changed;
            (Reverse(swap.gain), is_kept, swap.table, swap.index)
        })
    }

    /// Blocks of a stripe that are lost with the m failure domains that cost most: m where all blocks have domains of their own.
    fn blocks_lost_max(&self) -> usize {
        let m = self.geometry.m();
        let lost = self.all.iter().map(|table| {
            let mut by_domain: BTreeMap<&str, usize> = BTreeMap::new();
            for member in &table.data {
                *by_domain.entry(&member.failure_domain).or_default() += 1;
            }
            let mut counts: Vec<usize> = by_domain.into_values().chain(vec![1; m]).collect();
            counts.sort_unstable_by_key(|count| Reverse(*count));
            counts.iter().take(m).sum()
        });
        lost.max().unwrap_or(m)
    }

    /// Keeps coding nodes that may stay, and finds others for the rest.
    fn find_coding(&mut self, members: &[&'a Member]) -> Result<(), GroupError> {
        for table in &mut self.all {
            table.dismiss_coding();
        }
        let mut coders = Coders::new(members, self.all.len() * self.geometry.m());
        for member in self.all.iter().flat_map(|it| it.coding.iter().flatten()) {
            coders.take_on(member);
        }
        for table in &mut self.all {
            for index in 0..table.coding.len() {
                if table.coding[index].is_none() {
                    let found = coders.best(&table.blocks_beside(index));
                    let found = found.ok_or_else(|| table.too_few(self.geometry))?;
                    table.give(index, found, &mut coders);
                }
            }
        }
        // Each turn takes from a cordoned node what an open one can do, or from one that codes for two more.
        while self.all.iter_mut().any(|table| table.relieve(&mut coders)) {}
        Ok(())
    }

    fn into_groups(self) -> Vec<Group> {
        let name = |member: &Member| member.name.clone();
        let group = |table: Table<'_>| Group {
            data: table.data.into_iter().map(name).collect(),
            coding: table.coding.into_iter().flatten().map(name).collect(),
        };
        self.all.into_iter().map(group).collect()
    }
}

impl<'a> Table<'a> {
    fn data_blocks(&self) -> Blocks<'a> {
        Blocks::of(self.data.iter().map(|it| it.failure_domain.as_str()))
    }

    /// All its blocks but the coding node's of this index.
    fn blocks_beside(&self, index: usize) -> Blocks<'a> {
        let mut blocks = self.data_blocks();
        for (at, other) in self.coding.iter().enumerate() {
            if let Some(other) = other.filter(|_| at != index) {
                blocks.add(&other.failure_domain);
            }
        }
        blocks
    }

    /// Lets go of coding nodes whose failure domain is another block's now.
    fn dismiss_coding(&mut self) {
        for index in 0..self.coding.len() {
            let others = self.blocks_beside(index);
            let held = self.coding[index];
            if held.is_some_and(|it| others.lost_with(&it.failure_domain) > 0) {
                self.coding[index] = None;
            }
        }
    }

    fn too_few(&self, geometry: Geometry) -> GroupError {
        GroupError::TooFewDomains {
            geometry,
            data: self.data.iter().map(|it| it.name.clone()).collect(),
            needed: geometry.m(),
            got: self.coding.iter().flatten().count(),
        }
    }

    fn give(&mut self, index: usize, member: &'a Member, coders: &mut Coders<'a>) {
        if let Some(before) = self.coding[index].replace(member) {
            coders.let_go(before);
        }
        coders.take_on(member);
    }

    /// Gives the work of one coding node to another one that should rather have it; whether there was one.
    fn relieve(&mut self, coders: &mut Coders<'a>) -> bool {
        let least = coders.least_load();
        for index in 0..self.coding.len() {
            let Some(held) = self.coding[index] else {
                continue;
            };
            let load = coders.load(held);
            if held.cordon == Cordon::Open && least.is_none_or(|least| load < least + 2) {
                continue;
            }
            let Some(better) = coders.best(&self.blocks_beside(index)) else {
                continue;
            };
            let is_too_much = match (held.cordon, better.cordon) {
                (Cordon::Cordoned, Cordon::Open) => true,
                (Cordon::Open, Cordon::Open) => load >= coders.load(better) + 2,
                _ => false,
            };
            if is_too_much {
                self.give(index, better, coders);
                return true;
            }
        }
        false
    }
}
