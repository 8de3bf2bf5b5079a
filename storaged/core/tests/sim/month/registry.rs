//! The registry of a month: which machine fills which place of the cluster, epoch by epoch, and which epoch each machine goes by. Of
//! each epoch there is one roster. Machines have the numbers of the world's processes; a place's name is what the decisions know.

use std::collections::{BTreeMap, BTreeSet};

use storaged_codec::Geometry;
use storaged_core::EpochMembers;
use storaged_plan::{Cordon, Group, Member, Seat, groups, seats};
use storaged_wire::NodeName;

use super::super::world::World;
use super::{FAULTS_END_MS, TierKind};
use crate::testkit::{Answer, name};

/// Of the beats, the registry goes at one in so many.
const OUTAGE_ONE_IN: u64 = 200;

/// How the registry fares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegistryKind {
    Well,
    /// Nobody reads or writes it, for up to half of the month.
    GoneAtTimes,
}

/// What is agreed for one epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roster {
    pub epoch: u64,
    /// The machine in each place; none in one that is vacant.
    pub places: BTreeMap<usize, Option<usize>>,
    /// Machines that are expected to fail.
    pub cordoned: BTreeSet<usize>,
    /// Who is in which group, by the names of the places.
    pub seats: BTreeMap<NodeName, Seat>,
}

impl Roster {
    /// As the decisions hear of it.
    pub fn members(&self) -> Vec<Member> {
        let cordon = |machine: &Option<usize>| match machine {
            Some(machine) if self.cordoned.contains(machine) => Cordon::Cordoned,
            _ => Cordon::Open,
        };
        let member = |(place, machine): (&usize, &Option<usize>)| Member {
            name: name(*place),
            failure_domain: format!("n{place}"),
            cordon: cordon(machine),
            seat: self.seats.get(&name(*place)).cloned(),
        };
        self.places.iter().map(member).collect()
    }

    pub fn machine_in(&self, place: usize) -> Option<usize> {
        self.places.get(&place).copied().flatten()
    }

    /// Every machine that has a place.
    pub fn machines(&self) -> impl Iterator<Item = usize> + '_ {
        self.places.values().copied().flatten()
    }

    pub fn vacant(&self) -> impl Iterator<Item = usize> + '_ {
        let vacant = self.places.iter().filter(|(_, machine)| machine.is_none());
        vacant.map(|(place, _)| *place)
    }

    /// The groups that code the steps of this epoch; none if there are too few places.
    pub fn groups(&self, geometry: Geometry) -> Option<Vec<Group>> {
        groups(&self.members(), geometry).ok()
    }
}

/// All that was agreed.
#[derive(Debug)]
pub struct Registry {
    /// By epoch, from the first one on.
    agreed: Vec<Roster>,
    /// The place that each machine fills, or has filled last.
    place_of: BTreeMap<usize, usize>,
    /// The epoch that it remembers and goes by.
    goes_by: BTreeMap<usize, u64>,
    /// Machines that have heard that their place is another's now.
    pub leaving: BTreeSet<usize>,
    /// Nobody reads or writes it until then.
    away_until: u64,
}

impl Registry {
    /// Each machine in the place of its number.
    pub fn new(machines: usize) -> Self {
        let first = Roster {
            epoch: 1,
            places: (0..machines).map(|it| (it, Some(it))).collect(),
            cordoned: BTreeSet::new(),
            seats: BTreeMap::new(),
        };
        Self {
            agreed: vec![first],
            place_of: (0..machines).map(|it| (it, it)).collect(),
            goes_by: (0..machines).map(|it| (it, 1)).collect(),
            leaving: BTreeSet::new(),
            away_until: 0,
        }
    }

    pub fn newest(&self) -> &Roster {
        self.agreed.last().expect("there is a first one")
    }

    pub fn of(&self, epoch: u64) -> Option<&Roster> {
        let at = usize::try_from(epoch.checked_sub(1)?).ok()?;
        self.agreed.get(at)
    }

    /// Those between two epochs.
    pub fn passed(&self, before: u64, now: u64) -> Vec<EpochMembers> {
        let between = (before + 1..now).filter_map(|epoch| self.of(epoch));
        let passed = between.map(|roster| EpochMembers {
            epoch: roster.epoch,
            members: roster.members(),
        });
        passed.collect()
    }

    /// The next epoch's roster, whose groups follow from those of the last one.
    pub fn agree(
        &mut self,
        places: BTreeMap<usize, Option<usize>>,
        cordoned: BTreeSet<usize>,
        geometry: Geometry,
    ) -> u64 {
        let epoch = self.newest().epoch + 1;
        let before = self.newest().groups(geometry).unwrap_or_default();
        let mut next = Roster {
            epoch,
            places,
            cordoned,
            seats: seats(&before),
        };
        let now = next.groups(geometry).unwrap_or_default();
        next.seats = seats(&now);
        self.agreed.push(next);
        epoch
    }

    pub fn place_of(&self, machine: usize) -> usize {
        self.place_of.get(&machine).copied().unwrap_or(machine)
    }

    /// Which epoch a machine goes by.
    pub fn epoch_of(&self, machine: usize) -> u64 {
        self.goes_by.get(&machine).copied().unwrap_or(1)
    }

    /// What a machine has on its disk of it.
    pub fn remembered_by(&self, machine: usize) -> &Roster {
        let known = self.of(self.epoch_of(machine));
        known.expect("an epoch that was agreed")
    }

    /// A machine that has nothing gets a place.
    pub fn settles(&mut self, machine: usize, place: usize, epoch: u64) {
        self.place_of.insert(machine, place);
        self.goes_by.insert(machine, epoch);
        self.leaving.remove(&machine);
    }

    /// A machine hears of an epoch; whether that is news.
    pub fn hears(&mut self, machine: usize, epoch: u64) -> bool {
        let before = self.epoch_of(machine);
        self.goes_by.insert(machine, before.max(epoch));
        epoch > before
    }

    /// Whether a machine takes another one for the node of its place.
    pub fn lists(&self, machine: usize, other: usize) -> bool {
        let roster = self.remembered_by(machine);
        roster.machine_in(self.place_of(other)) == Some(other)
    }
}

impl World {
    /// The registry is gone for a while, or an older copy of it is put back, until somebody puts the newest one there again: nodes that
    /// know a newer roster take none of it and spares propose nothing (`storaged/src/membership`), so that here both are one outage.
    pub(super) fn strike_registry(&mut self) {
        let is_away = self.registry_is_away_for().is_some();
        let strikes = self.month().scenario.registry == RegistryKind::GoneAtTimes;
        if !strikes || is_away || self.random(OUTAGE_ONE_IN) != 0 {
            return;
        }
        self.struck("the registry is gone");
        let ms = self.any_time(1_000, 30_000);
        self.month().registry.away_until = self.now + ms;
    }

    /// How long nobody reads or writes it yet.
    pub(super) fn registry_is_away_for(&mut self) -> Option<u64> {
        let ms = self.month().registry.away_until;
        let ms = ms.saturating_sub(self.now);
        (ms > 0).then_some(ms)
    }

    /// How the registry answers who opens a run. Now and then somebody puts an older copy of it back, where the durable tier knows better.
    pub fn registry_weather(&mut self) -> Answer {
        let ms = 1 + self.random(300);
        if self.now >= FAULTS_END_MS {
            return Answer::After(ms);
        }
        if self.registry_is_away_for().is_some() {
            return Answer::Away;
        }
        if self.month().scenario.tier == TierKind::Well && self.random(8) == 0 {
            let kept = self.random(6);
            self.run_registry.forget_above(kept);
        }
        match self.random(10) {
            0 => Answer::Lost,
            1 => Answer::Away,
            2 => Answer::Fails(ms),
            3 => Answer::After(3_000 + ms),
            _ => Answer::After(ms),
        }
    }
}
