//! Nodes of a month that an operator cordons, because they are expected to fail, and uncordons again. A cordon is of a machine, in
//! whatever place it is, and of an epoch: each node hears of it in its own time.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::Manifest;

use super::super::world::World;
use super::{Changes, Trainers};
use crate::testkit::name;

/// Of the beats, a cordon comes or goes at one in so many.
const CORDON_ONE_IN: u64 = 70;

impl World {
    /// A node is cordoned, or one that is cordoned is as any other again; now and then the first go on until nobody is left to code for them.
    pub(super) fn strike_cordons(&mut self) {
        let changes = self.month().scenario.places;
        let is_away = self.registry_is_away_for().is_some();
        if changes == Changes::Never || is_away || self.random(CORDON_ONE_IN) != 0 {
            return;
        }
        let machines = self.machines();
        let machine = machines[self.random(machines.len() as u64) as usize];
        let mut cordoned = self.month().registry.newest().cordoned.clone();
        if cordoned.remove(&machine) {
            self.struck("uncordons");
        } else {
            self.struck("cordons");
            cordoned.insert(machine);
        }
        self.agree_on_cordons(cordoned);
    }

    fn agree_on_cordons(&mut self, cordoned: BTreeSet<usize>) {
        let places = self.month().registry.newest().places.clone();
        self.agree_on(places, cordoned);
    }

    /// Faults have ended: nobody is expected to fail any more. Of a job that saves no more what cordoned nodes have lost is put back there.
    pub(super) fn cordons_are_lifted(&mut self) {
        let quiet = self.month().scenario.trainers == Trainers::Quiet;
        if !quiet && !self.month().registry.newest().cordoned.is_empty() {
            self.agree_on_cordons(BTreeSet::new());
        }
    }

    /// Where a group has a cordoned coding node, all others code for it already or are coded themselves.
    pub(super) fn a_cordoned_node_codes_only_where_it_must(&mut self, manifest: &Manifest) {
        let Some(roster) = self.month().registry.of(manifest.epoch) else {
            return;
        };
        let filled = roster.places.iter();
        let is_cordoned: BTreeMap<_, _> = filled
            .map(|(place, machine)| {
                let cordoned = machine.is_some_and(|it| roster.cordoned.contains(&it));
                (name(*place), cordoned)
            })
            .collect();
        let mut must = 0;
        for group in &manifest.groups {
            let coded_by = |node: &_| group.coding.contains(node);
            if !group.coding.iter().any(|node| is_cordoned[node]) {
                continue;
            }
            must += 1;
            let mut open = is_cordoned.iter().filter(|(_, cordoned)| !**cordoned);
            let free = open.find(|(node, _)| !group.data.contains(node) && !coded_by(node));
            assert!(
                free.is_none(),
                "a cordoned node is given no new parity where others can code: step {} of epoch {} is coded by {:?}, and {free:?} is there",
                manifest.step,
                manifest.epoch,
                group.coding
            );
        }
        if must > 0 {
            self.struck("steps coded by cordoned nodes");
        } else if is_cordoned.values().any(|cordoned| *cordoned) {
            self.struck("steps coded past cordoned nodes");
        }
    }
}
