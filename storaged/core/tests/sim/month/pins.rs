//! Steps that jobs of a month pin and let go again: a pinned one is there as long as no more than m machines are lost, is healed like the
//! newest, and is in the way of no save.

use std::collections::{BTreeMap, BTreeSet};

use storaged_core::Shown;
use storaged_wire::local::{Keep, Request};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Namespace, NodeName, RefusalCode};

use super::super::world::World;
use super::asks::What;
use super::jobs::{IncarnationId, Phase, Place};
use super::{FAULTS_END_MS, JOBS_END_MS, SETTLED_MS};
use crate::testkit::name;

/// Of the beats, a job pins a step or lets one go at one in so many.
const PIN_ONE_IN: u64 = 50;
/// When all are let go, those are asked for so often of which nobody knows whether they are pinned.
const LET_GO_ONE_IN: u64 = 6;
/// Steps of a job that are pinned at once.
const PINS_MAX: usize = 2;
/// All nodes are asked for so long.
const PIN_MS: u64 = 10_000;
/// A node that was away hears of a pin, and what it lacks is put back.
const HEALED_MS: u64 = 25_000;

/// What jobs have pinned.
#[derive(Debug, Default)]
pub struct PinnedSteps {
    pinned: BTreeMap<CheckpointKey, Pinned>,
    /// Those that may be pinned: they were asked for and not let go since.
    maybe: BTreeSet<CheckpointKey>,
}

#[derive(Debug)]
struct Pinned {
    since: u64,
    /// Machines lost since it bore all losses and all knew of the pin, if that was ever so.
    lost: Option<BTreeSet<usize>>,
}

impl PinnedSteps {
    pub fn lost(&mut self, machine: usize) {
        for lost in self.pinned.values_mut().filter_map(|it| it.lost.as_mut()) {
            lost.insert(machine);
        }
    }

    /// Machines lost since a pinned step bore all losses: of the one that has lost most.
    pub fn most_lost(&self) -> usize {
        let lost = self.pinned.values().filter_map(|it| it.lost.as_ref());
        lost.map(BTreeSet::len).max().unwrap_or(0)
    }

    /// Whether a step may be pinned.
    pub fn may_have(&self, key: &CheckpointKey) -> bool {
        self.maybe.contains(key)
    }
}

fn of_job<'a>(
    all: impl IntoIterator<Item = &'a CheckpointKey>,
    job: &Namespace,
) -> Vec<CheckpointKey> {
    let of_job = all.into_iter().filter(|key| key.namespace == *job);
    of_job.cloned().collect()
}

impl World {
    fn pins(&mut self) -> &mut PinnedSteps {
        &mut self.month().promises.pins
    }

    fn pinned_of(&mut self, job: &Namespace) -> Vec<CheckpointKey> {
        of_job(self.pins().pinned.keys(), job)
    }

    /// A job pins its newest step or lets one go; when faults have ended all are let go, so that nothing is left when the jobs end.
    pub(super) fn jobs_pin(&mut self) {
        if !self.month().scenario.pins || self.now >= JOBS_END_MS {
            return;
        }
        for job in 0..self.month().jobs.all.len() {
            let namespace = self.month().jobs.all[job].namespace.clone();
            if self.now > self.pins_stay_until() {
                self.lets_one_go(job, &namespace);
            } else if self.now < FAULTS_END_MS && self.random(PIN_ONE_IN) == 0 {
                self.pins_one(job, &namespace);
            }
        }
    }

    /// Two jobs have each room for two steps, and not for pinned ones beside them: those go before what must go on is looked at.
    fn pins_stay_until(&mut self) -> u64 {
        let scenario = self.month().scenario;
        if scenario.is_little_room() && scenario.jobs > 1 {
            return FAULTS_END_MS;
        }
        SETTLED_MS + 10_000
    }

    fn pins_one(&mut self, job: usize, namespace: &Namespace) {
        let pinned = self.pinned_of(namespace);
        if pinned.len() >= PINS_MAX {
            let goes = pinned[self.random(pinned.len() as u64) as usize].clone();
            return self.ask_to(Keep::Unpin, job, goes);
        }
        let floor = self.month().promises.floors.get(namespace);
        if let Some(newest) = floor.map(|floor| floor.key.clone()) {
            self.ask_to(Keep::Pin, job, newest);
        }
    }

    fn lets_one_go(&mut self, job: usize, namespace: &Namespace) {
        let maybe = of_job(&self.pins().maybe, namespace);
        if let Some(goes) = maybe.first()
            && self.random(LET_GO_ONE_IN) == 0
        {
            self.ask_to(Keep::Unpin, job, goes.clone());
        }
    }

    fn ask_to(&mut self, keep: Keep, job: usize, key: CheckpointKey) {
        let Some((whose, place)) = self.coordinator_of(job) else {
            return;
        };
        // From now on nobody may count on it: it goes some time before the answer.
        self.pins().pinned.remove(&key);
        self.pins().maybe.insert(key.clone());
        let request = Request::Keep {
            run: Some(key.run),
            step: key.step,
            keep,
        };
        self.ask_in_month(whose, place, request, PIN_MS, What::Keep(keep, key));
    }

    fn coordinator_of(&mut self, job: usize) -> Option<(IncarnationId, Place)> {
        let mut alive = self.month().jobs.all[job].alive.iter();
        let training = alive.find(|it| it.phase == Phase::Training)?;
        let id = training.id;
        Some((IncarnationId { job, id }, training.coordinator))
    }

    pub(super) fn is_kept_as_asked(&mut self, keep: Keep, key: &CheckpointKey) {
        let since = self.now;
        match keep {
            Keep::Pin => {
                self.struck("pins");
                let lost = None;
                self.pins()
                    .pinned
                    .insert(key.clone(), Pinned { since, lost });
            }
            Keep::Unpin => {
                self.struck("pins that are let go");
                // Whoever heard of it may have died since, and the others go by the pin: it is seen there and asked for again.
                if !self.shown_of(key).iter().any(|(_, shown)| shown.pinned) {
                    self.pins().maybe.remove(key);
                }
            }
        }
    }

    pub(super) fn is_not_kept(&mut self, keep: Keep, key: &CheckpointKey, code: RefusalCode) {
        let what = match (keep, code) {
            (Keep::Pin, RefusalCode::BudgetFull) => "pins without room",
            (Keep::Pin, RefusalCode::TooManyLost) => "pins too late",
            (Keep::Pin, _) => "pins of nothing",
            (Keep::Unpin, _) => "pins gone",
        };
        self.struck(what);
        if keep == Keep::Unpin && code == RefusalCode::NoCheckpoint {
            self.pins().maybe.remove(key);
        }
    }

    /// What is pinned is there as long as no more than m machines are lost since it bore so many, and heals once faults have ended.
    pub(super) fn pinned_steps_stay(&mut self, namespace: &Namespace) {
        let (now, m) = (self.now, self.scene.limits.m);
        for key in self.pinned_of(namespace) {
            if self.all_keep(&key) && self.bears_losses(&key, m) {
                self.struck("pinned steps that bear all losses");
                self.pinned_entry(&key).lost = Some(BTreeSet::new());
                continue;
            }
            let Pinned { since, lost } = self.pinned_entry(&key);
            let (since, lost) = (*since, lost.clone());
            let Some(lost) = lost.filter(|lost| lost.len() <= m) else {
                continue;
            };
            assert!(
                self.is_left_by_any() || self.bears_losses(&key, 0),
                "a pinned step stays: {key:?} is gone at {now} ms, lost since it bore all losses: {lost:?}"
            );
            let healed_by = since.max(FAULTS_END_MS) + HEALED_MS;
            assert!(
                now < healed_by,
                "pinned steps are healed: {key:?}, pinned at {since} ms, does not bear {m} losses at {now} ms: {:?}",
                self.shown_of(&key)
            );
        }
    }

    fn pinned_entry(&mut self, key: &CheckpointKey) -> &mut Pinned {
        let pinned = self.pins().pinned.get_mut(key);
        pinned.expect("it is pinned")
    }

    /// Whether all processes that know of a step go by its pin, its home nodes among them: one that does not may let its blocks go at any
    /// moment, and where no home node has its manifest nobody heals it.
    fn all_keep(&self, key: &CheckpointKey) -> bool {
        let shown = self.shown_of(key);
        self.unaware_homes(key).is_empty() && shown.iter().all(|(_, shown)| shown.pinned)
    }

    /// Home nodes of a step that do not know it.
    pub(super) fn unaware_homes(&self, key: &CheckpointKey) -> BTreeSet<NodeName> {
        let shown = self.shown_of(key);
        let mut homes: BTreeSet<NodeName> = BTreeSet::new();
        homes.extend(shown.iter().flat_map(|(_, it)| it.homes.iter().cloned()));
        for (machine, _) in &shown {
            homes.remove(&name(self.place_of(*machine)));
        }
        homes
    }

    /// Whether a machine is the only home node that knows a step.
    pub(super) fn is_last_home(&self, key: &CheckpointKey, machine: usize) -> bool {
        let shown = self.shown_of(key);
        let homes = shown.iter().flat_map(|(_, it)| it.homes.iter().cloned());
        let homes: BTreeSet<NodeName> = homes.collect();
        let machines = shown.iter().map(|(machine, _)| *machine);
        let mut knowing: Vec<usize> = machines.collect();
        knowing.retain(|it| homes.contains(&name(self.place_of(*it))));
        // What a daemon has left is known again when the next one starts.
        knowing == [machine] && !self.is_left_by_any()
    }

    /// What each process has of a step.
    pub(super) fn shown_of(&self, key: &CheckpointKey) -> Vec<(usize, Shown)> {
        let processes = self.processes.iter().enumerate();
        let shown = processes.flat_map(|(node, process)| {
            let shown = process.iter().flat_map(|process| process.node.shown());
            shown.map(move |shown| (node, shown))
        });
        shown.filter(|(_, shown)| shown.key == *key).collect()
    }

    /// The jobs have ended and had their time to let all go.
    pub(super) fn no_pin_is_left(&mut self) {
        let left = &self.pins().maybe;
        assert!(left.is_empty(), "all pins were let go, but {left:?}");
    }
}
