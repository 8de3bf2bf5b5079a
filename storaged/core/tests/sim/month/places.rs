//! How the places of a month's cluster change: machines die and others take their places, an operator gives one up that lives, a
//! machine that was thought lost takes its place again, places are added and removed. Each machine hears of an epoch at a time of its
//! own, some of them late, and one that is restarted goes by what it remembers until it hears more.

use std::collections::{BTreeMap, BTreeSet};

use storaged_core::{EpochMembers, Input};

use super::super::world::World;
use super::links::IDLE_MS;
use super::registry::Roster;
use super::{Changes, FAULTS_END_MS, Happening, TierKind};
use crate::testkit::{Pid, geometry};

/// Of the beats, a change begins at one in so many.
const CHANGE_ONE_IN: u64 = 90;
/// Places are added up to so many more than there were at first.
const MORE_PLACES: usize = 2;
/// Machines that there are, those included that have no place any more.
const MACHINES_MAX: usize = 24;
/// No machine is away from the registry for longer.
const AWAY_MS: u64 = 10_000;

/// What happens to places.
#[derive(Debug, Clone, Copy)]
pub enum PlaceEvent {
    /// A machine hears of an epoch.
    Hears(usize, u64),
    /// A place is given up.
    Vacate(usize),
    /// Some machine takes a place, if it is vacant.
    Fill(usize),
    /// A machine that has lost its place ends.
    Leaves(Pid),
}

impl World {
    /// Which place's name a machine has.
    pub fn place_of(&self, machine: usize) -> usize {
        let month = self.scene.month.as_deref();
        month.map_or(machine, |month| month.registry.place_of(machine))
    }

    /// Which machine another one takes for the node of a place.
    pub fn node_in_place(&self, by: usize, place: usize) -> Option<usize> {
        match self.scene.month.as_deref() {
            Some(month) => month.registry.remembered_by(by).machine_in(place),
            None => Some(place).filter(|node| *node < self.processes.len()),
        }
    }

    /// Whether both of two machines take the other one for the node of its place: else they have no connection.
    pub(super) fn list_each_other(&mut self, a: usize, b: usize) -> bool {
        let registry = &self.month().registry;
        registry.lists(a, b) && registry.lists(b, a)
    }

    /// The machines that fill the places of the newest epoch.
    pub(super) fn machines(&mut self) -> Vec<usize> {
        self.month().registry.newest().machines().collect()
    }

    fn place_happens_after(&mut self, ms: u64, event: PlaceEvent) {
        self.happens_after(ms, Happening::Place(event));
    }

    pub(super) fn place_event(&mut self, event: PlaceEvent) {
        let asks = !matches!(event, PlaceEvent::Leaves(_));
        if let Some(ms) = self.registry_is_away_for().filter(|_| asks) {
            // Each asks again in its own time.
            let after = ms + 1 + self.random(2_500);
            return self.place_happens_after(after, event);
        }
        match event {
            PlaceEvent::Hears(machine, epoch) => self.hears_of_epoch(machine, epoch),
            PlaceEvent::Vacate(place) => self.vacate(place),
            PlaceEvent::Fill(place) => self.fill_place(place),
            PlaceEvent::Leaves(pid) => self.leaves(pid),
        }
    }

    pub(super) fn strike_places(&mut self) {
        let changes = self.month().scenario.places;
        let all_used = self.processes.len() >= MACHINES_MAX;
        let stay = matches!(changes, Changes::Never | Changes::Cordons)
            || self.registry_is_away_for().is_some();
        if stay || all_used || self.random(CHANGE_ONE_IN) != 0 {
            return;
        }
        let sizes = match changes {
            Changes::Sizes => true,
            Changes::Both => self.random(2) == 0,
            Changes::Never | Changes::Machines | Changes::Cordons => false,
        };
        if sizes {
            self.resize();
        } else if self.may_lose_one() {
            self.give_a_place_up();
        }
    }

    /// No more than m are lost at once, and none before those that came last have linked up with all: a majority that has no memory
    /// knows of no checkpoint.
    pub(super) fn may_lose_one(&mut self) -> bool {
        let m = self.scene.limits.m;
        let machines = self.machines();
        let awake = machines.iter().filter(|it| self.is_awake(**it));
        let awake: Vec<usize> = awake.copied().collect();
        let places = self.month().registry.newest().places.len();
        let is_in = |it: &&usize| {
            awake
                .iter()
                .all(|by| by == *it || self.is_linked(*by, **it))
        };
        let out = places - awake.iter().filter(is_in).count();
        if self.month().scenario.tier == TierKind::Absent && out >= m {
            return false;
        }
        let jobs = self.month().jobs.all.len();
        self.month().promises.floors.len() >= jobs && self.may_lose_memory()
    }

    /// A machine dies and its place is given up some time later; or it lives, and hears of it as late as the others do.
    fn give_a_place_up(&mut self) {
        let machines = self.machines();
        let machine = machines[self.random(machines.len() as u64) as usize];
        let place = self.place_of(machine);
        self.lose_machine(machine);
        if self.is_awake(machine) && self.random(2) == 0 {
            self.kill(machine, None);
            let after = 1_000 + self.random(4_000);
            self.place_happens_after(after, PlaceEvent::Vacate(place));
        } else {
            self.struck("places given up that are filled");
            self.vacate(place);
        }
    }

    fn vacate(&mut self, place: usize) {
        let mut places = self.month().registry.newest().places.clone();
        if places.get(&place).copied().flatten().is_none() {
            return;
        }
        places.insert(place, None);
        self.agree(places);
        let filled = 200 + self.random(4_000);
        self.place_happens_after(filled, PlaceEvent::Fill(place));
    }

    /// The machine that was there takes it again, if it lives and is the first; else a spare does.
    fn fill_place(&mut self, place: usize) {
        let newest = self.month().registry.newest();
        if newest.machine_in(place).is_some() || !newest.places.contains_key(&place) {
            return;
        }
        let was_there = |world: &mut Self, machine: &usize| {
            let registry = &world.month().registry;
            registry.place_of(*machine) == place && !registry.leaving.contains(machine)
        };
        let awake: Vec<usize> = (0..self.processes.len())
            .filter(|it| self.is_awake(*it))
            .collect();
        let returns = awake.into_iter().find(|it| was_there(self, it));
        let machine = match returns.filter(|_| self.random(2) == 0) {
            Some(machine) => {
                self.struck("machines that take their place again");
                machine
            }
            None => {
                self.struck("places filled by others");
                self.spare_machine()
            }
        };
        let mut places = self.month().registry.newest().places.clone();
        places.insert(place, Some(machine));
        let epoch = self.agree(places);
        if !self.is_up(machine) {
            self.machine_begins(machine, place, epoch);
        }
    }

    /// A machine that has never had a place: one that has lost its own begins as anew, and is to the others as if it were another.
    fn spare_machine(&mut self) -> usize {
        self.processes.push(None);
        self.processes.len() - 1
    }

    fn machine_begins(&mut self, machine: usize, place: usize, epoch: u64) {
        self.month().registry.settles(machine, place, epoch);
        let after = 100 + self.random(1_500);
        self.start_after(after, machine);
    }

    /// One or two more places, or one less.
    fn resize(&mut self) {
        let (before, most) = (self.month().registry.newest().clone(), self.places_most());
        let count = before.places.len();
        if count < most && self.random(2) == 0 {
            let more = 1 + self.random((most - count) as u64) as usize;
            return self.add_places(more);
        }
        let machines: Vec<usize> = before.machines().collect();
        let machine = machines[self.random(machines.len() as u64) as usize];
        let mut places = before.places;
        places.remove(&self.place_of(machine));
        let limits = self.scene.limits;
        let is_enough = places.len() >= limits.k + limits.m;
        if is_enough && self.may_lose_one() {
            self.struck("places removed");
            self.lose_machine(machine);
            self.agree(places);
        }
    }

    fn places_most(&self) -> usize {
        self.scene.limits.nodes + MORE_PLACES
    }

    fn add_places(&mut self, more: usize) {
        self.struck("places added");
        let mut places = self.month().registry.newest().places.clone();
        let mut added = Vec::new();
        for _ in 0..more {
            let place = (0..).find(|it| !places.contains_key(it)).unwrap_or(0);
            let machine = self.spare_machine();
            places.insert(place, Some(machine));
            added.push((machine, place));
        }
        let epoch = self.agree(places);
        for (machine, place) in added {
            self.machine_begins(machine, place, epoch);
        }
    }

    fn agree(&mut self, places: BTreeMap<usize, Option<usize>>) -> u64 {
        let cordoned = self.month().registry.newest().cordoned.clone();
        self.agree_on(places, cordoned)
    }

    /// There is another epoch, of which each machine hears in its own time.
    pub(super) fn agree_on(
        &mut self,
        places: BTreeMap<usize, Option<usize>>,
        cordoned: BTreeSet<usize>,
    ) -> u64 {
        let groups = geometry(self.scene.limits.k, self.scene.limits.m);
        let epoch = self.month().registry.agree(places, cordoned, groups);
        let coded = self.month().registry.newest().groups(groups);
        assert!(coded.is_some(), "what is agreed can be coded");
        for machine in 0..self.processes.len() {
            let after = self.hears_after();
            self.place_happens_after(after, PlaceEvent::Hears(machine, epoch));
        }
        epoch
    }

    /// Most poll it, some cannot reach it for a while.
    fn hears_after(&mut self) -> u64 {
        let ms = match self.random(6) {
            0 => self.random(AWAY_MS),
            _ => 20 + self.random(2_500),
        };
        ms.min((FAULTS_END_MS + 2_000).saturating_sub(self.now))
            .max(1)
    }

    /// A machine that starts goes by what it remembers until it hears more.
    pub fn looks_at_the_registry(&mut self, machine: usize) {
        self.month().registry.leaving.remove(&machine);
        let newest = self.month().registry.newest().epoch;
        if self.month().registry.epoch_of(machine) < newest {
            self.struck("starts with an older roster");
            let after = self.hears_after();
            self.place_happens_after(after, PlaceEvent::Hears(machine, newest));
        }
    }

    fn hears_of_epoch(&mut self, machine: usize, epoch: u64) {
        let Some(pid) = self.pid(machine) else {
            return;
        };
        if self.is_paused(machine) {
            return self.place_happens_after(300, PlaceEvent::Hears(machine, epoch));
        }
        if self.month().registry.leaving.contains(&machine) {
            return;
        }
        let place = self.place_of(machine);
        let registry = &mut self.month().registry;
        if epoch <= registry.epoch_of(machine) {
            return;
        }
        let is_filled = |of: &Roster| of.machine_in(place) == Some(machine);
        if registry.of(epoch).is_some_and(is_filled) {
            let before = registry.epoch_of(machine);
            registry.hears(machine, epoch);
            let passed = registry.passed(before, epoch);
            return self.takes_roster(machine, passed);
        }
        // It takes a vacant place again, if it is the first, and hears what became of that.
        let newest = registry.newest();
        if is_filled(newest) || newest.places.get(&place) == Some(&None) {
            return;
        }
        registry.leaving.insert(machine);
        self.struck("places lost");
        let after = 50 + self.random(3_000);
        self.place_happens_after(after, PlaceEvent::Leaves(pid));
    }

    fn leaves(&mut self, pid: Pid) {
        if !self.lives(pid) {
            return;
        }
        if self.is_paused(pid.node) {
            return self.place_happens_after(500, PlaceEvent::Leaves(pid));
        }
        self.lose_machine(pid.node);
        self.end_process(pid.node);
        self.jobs_lose_node(pid.node);
    }

    /// A machine goes by another roster: links to whoever has lost its place end, and begin with whoever has one.
    fn takes_roster(&mut self, machine: usize, passed: Vec<EpochMembers>) {
        let roster = self.month().registry.remembered_by(machine);
        let (epoch, members) = (roster.epoch, roster.members());
        let heard = Input::Members {
            newest: EpochMembers { epoch, members },
            passed,
        };
        self.tell(machine, heard);
        for other in self.others(machine) {
            if !self.month().registry.lists(machine, other) {
                self.unlink(machine, other);
            } else if !self.is_linked(machine, other) {
                let soon = 50 + self.random(500);
                self.will_dial(machine, other, soon);
            }
        }
    }

    /// Both have lost their connections, and what went over them.
    fn unlink(&mut self, a: usize, b: usize) {
        for (from, to) in [(a, b), (b, a)] {
            if self.is_linked(from, to) {
                self.link_of(from, to).alive = false;
                let ms = 1 + self.random(20);
                self.part_after(ms, from, to);
            }
        }
        for key in self.sessions.of(a) {
            if self.sessions.of(b).contains(&key) {
                self.cut_session(&key, b, IDLE_MS);
            }
        }
    }

    /// Faults have ended: places that are vacant are filled.
    pub(super) fn places_are_filled(&mut self) {
        for place in self.month().registry.newest().vacant().collect::<Vec<_>>() {
            self.fill_place(place);
        }
    }
}
