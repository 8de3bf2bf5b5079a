//! Who holds the memory of daemons. A keeper that dies takes what it held with it: its daemon is told to stop (SIGTERM), leaves in order,
//! and the next one finds nothing. And of a daemon that is killed its holder may have only a part: it had no room, or was not given
//! the rest before.
//!
//! A keeper and a daemon that die at one instant are to everybody else a crash (`faults`): nobody is told, and nothing is left.

use std::collections::BTreeSet;

use storaged_core::{LastWork, ParityId, Unfinished};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Namespace, SlotId};

use super::super::world::World;
use super::promises::Floor;
use super::{FAULTS_END_MS, Trainers};
use crate::testkit::{Pid, Unheld, name};

/// Of the beats, a keeper dies, or a daemon whose holder lacks something, at one in so many.
const STRIKE_ONE_IN: u64 = 240;
/// What a daemon that is told to stop goes by (`storaged/src/driver/leaving.rs`, `node.leave_within`).
const LEAVE_WITHIN_MS: u64 = 20_000;
const LAST_SAVE_MS: u64 = 5_000;
const TOLD_WITHIN_MS: u64 = 1_500;

/// What of the memory of daemons that are killed there is for the next ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeldMemory {
    /// All of it.
    Whole,
    /// Of up to m machines only a part, and of no more until what they lost is healed.
    PartsOfUpToM,
}

/// A daemon that was told to stop, as its driver sees it.
#[derive(Debug)]
pub struct Departure {
    pid: Pid,
    until: u64,
    last_save_at: u64,
    /// It does not go before, so that peers hear what was finished last.
    told_at: Option<u64>,
    last_work: LastWork,
    /// What could be restored of each job when its keeper died; nothing, once something else was wrong.
    there: Vec<(Namespace, CheckpointKey)>,
}

impl Departure {
    /// Whether it has finished what only it can.
    fn has_finished(&mut self, unfinished: Vec<Unfinished>, now: u64) -> bool {
        let waits = if now < self.last_save_at {
            unfinished
        } else {
            self.last_work.of(unfinished)
        };
        if !waits.is_empty() {
            self.told_at = Some(now + TOLD_WITHIN_MS);
        }
        waits.is_empty() && self.told_at.is_none_or(|at| now >= at)
    }
}

/// What a holder lacks.
enum Lack {
    Memory(Unheld),
    Records,
}

impl World {
    pub(super) fn strike_holders(&mut self) {
        let scenario = self.month().scenario;
        let one_in = match scenario.trainers {
            Trainers::Quiet => STRIKE_ONE_IN / 4,
            _ => STRIKE_ONE_IN,
        };
        if scenario.keepers && self.may_lose_what_is_held() && self.random(one_in) == 0 {
            let node = self.any_node();
            self.keeper_dies(node);
        }
        let in_part = scenario.held == HeldMemory::PartsOfUpToM;
        if in_part && self.may_lose_what_is_held() && self.random(one_in) == 0 {
            let node = self.any_node();
            self.kill_daemon_held_in_part(node);
        }
    }

    /// Whether what is protected bears the loss of another machine's memory, with that of those that leave.
    pub(super) fn may_lose_memory(&mut self) -> bool {
        let m = self.scene.limits.m;
        let month = self.month();
        month.promises.lost_since_shown(m) + month.departures.len() < m
    }

    /// The same, by what is there and not only by what was lost: a step that is protected while a node is taken for up that has just
    /// been lost bears less than was said. Home nodes that do not know a step count as lost too, and so do machines that are down, which
    /// may be home nodes of the next step: where none knows it, nobody heals it (docs/TESTING.md has the seeds).
    fn may_lose_what_is_held(&mut self) -> bool {
        let m = self.scene.limits.m;
        let machines = self.machines().into_iter();
        let down = machines.filter(|it| !self.is_up(*it));
        let down: BTreeSet<_> = down.map(|it| name(self.place_of(it))).collect();
        let floors: Vec<Floor> = self.month().promises.floors.values().cloned().collect();
        let missed = |floor: Floor| {
            let mut places = down.clone();
            let gone = floor.gone().into_iter();
            places.extend(gone.map(|machine| name(self.place_of(machine))));
            places.extend(self.unaware_homes(&floor.key));
            places.len() + (m - floor.bears)
        };
        let missed = floors.into_iter().map(missed).max();
        let missed = missed.unwrap_or(down.len());
        let leaving = self.month().departures.len();
        missed + leaving < m && self.may_lose_memory() && self.what_is_shown_bears(leaving + 1)
    }

    /// Whether a daemon was told to stop.
    pub(super) fn is_leaving(&mut self, node: usize) -> bool {
        let pid = self.pid(node);
        let departure = self.month().departures.get(&node);
        departure.is_some_and(|it| Some(it.pid) == pid)
    }

    /// Its daemon hears of it at once, and has as long as it is configured with.
    fn keeper_dies(&mut self, node: usize) {
        let Some(pid) = self.pid(node).filter(|_| self.is_awake(node)) else {
            return;
        };
        if self.is_leaving(node) {
            return;
        }
        self.struck("keepers' deaths");
        let now = self.now;
        let owed = self.ram(node).node.awaits_copies();
        let there = self.all_restorable();
        let departure = Departure {
            pid,
            until: (now + LEAVE_WITHIN_MS).min(FAULTS_END_MS),
            last_save_at: now + LAST_SAVE_MS,
            told_at: owed.then_some(now + TOLD_WITHIN_MS),
            last_work: LastWork::default(),
            there,
        };
        self.month().departures.insert(node, departure);
    }

    fn all_restorable(&mut self) -> Vec<(Namespace, CheckpointKey)> {
        let jobs = self.namespaces().into_iter();
        jobs.filter_map(|job| Some((job.clone(), self.restorable(&job)?)))
            .collect()
    }

    /// Every 50 ms a daemon that leaves looks whether something is left to do.
    pub(super) fn departures_go_on(&mut self) {
        for (node, departure) in std::mem::take(&mut self.month().departures) {
            // One that was killed meanwhile is gone already.
            if self.lives(departure.pid) {
                self.goes_on_leaving(node, departure);
            }
        }
    }

    fn goes_on_leaving(&mut self, node: usize, mut departure: Departure) {
        let now = self.now;
        if !self.sees_all(node) {
            departure.there.clear();
        }
        if self.is_paused(node) {
            self.month().departures.insert(node, departure);
            return;
        }
        let unfinished = self.ram(node).node.unfinished();
        let is_over = now >= departure.until;
        if !is_over && !departure.has_finished(unfinished, now) {
            self.month().departures.insert(node, departure);
            return;
        }
        self.struck(if is_over {
            "daemons whose time to leave was over"
        } else {
            "daemons that left in order"
        });
        self.departs(node);
        if !is_over {
            self.leaving_in_order_loses_nothing(node, &departure);
        }
    }

    /// Whether all machines are up, and a node is linked with each of them, both ways.
    fn sees_all(&mut self, node: usize) -> bool {
        self.machines().into_iter().all(|other| {
            let linked = self.is_linked(node, other) && self.is_linked(other, node);
            other == node || (self.is_awake(other) && linked)
        })
    }

    /// A daemon ends by itself: it closes its connections, so that peers hear of it at once. Whoever supervises it starts another one,
    /// which finds nothing.
    fn departs(&mut self, node: usize) {
        self.lose_machine(node);
        self.end_process(node);
        for other in self.others(node) {
            let soon = 1 + self.random(20);
            self.part_after(soon, other, node);
        }
        self.scene.crashes += 1;
        self.jobs_lose_node(node);
        let back = self.any_time(200, 7_000);
        self.start_after(back, node);
    }

    /// Where nothing else was wrong, what could be restored when it was told to stop can be without it.
    fn leaving_in_order_loses_nothing(&mut self, node: usize, departure: &Departure) {
        for (job, key) in &departure.there {
            let there = self.restorable(job);
            assert!(
                there.as_ref() >= Some(key),
                "a daemon that leaves in order waits for what is lost with it: {key:?} was there, node {node} has gone at {} ms, and there is {there:?}",
                self.now
            );
        }
    }

    /// kill -9 of a daemon of whose memory its holder has only a part: what it lacks is lost, and nothing else.
    fn kill_daemon_held_in_part(&mut self, node: usize) {
        if !self.is_awake(node) || self.is_leaving(node) {
            return;
        }
        let Some(lack) = self.any_lack(node) else {
            return;
        };
        self.lose_machine(node);
        self.kill_daemon(node);
        let left = self.left_by(node);
        match lack {
            Lack::Memory(unheld) => left.unheld = unheld,
            Lack::Records => left.kept.clear(),
        }
    }

    /// Something that the holder of a node's memory may lack, if there is something.
    fn any_lack(&mut self, node: usize) -> Option<Lack> {
        let process = self.ram(node);
        let slots: Vec<SlotId> = process.slots.keys().copied().collect();
        let parity: Vec<ParityId> = process.parity.keys().copied().collect();
        let mut unheld = Unheld::default();
        let what = match self.random(5) {
            0 => {
                self.struck("memory without records");
                return Some(Lack::Records);
            }
            1 => {
                unheld.slots.extend(slots);
                unheld.parity.extend(parity);
                "records without memory"
            }
            2 => {
                unheld.slots = self.some_of(slots);
                "slots without memory"
            }
            3 => {
                unheld.parity = self.some_of(parity);
                "parity without memory"
            }
            _ => {
                let least = self.random_number_of(&slots, &parity)?;
                unheld
                    .slots
                    .extend(slots.into_iter().filter(|it| it.get() >= least));
                unheld
                    .parity
                    .extend(parity.into_iter().filter(|it| it.0 >= least));
                "holders that were full"
            }
        };
        (unheld != Unheld::default()).then(|| {
            self.struck(what);
            Lack::Memory(unheld)
        })
    }

    fn some_of<T: Ord>(&mut self, all: Vec<T>) -> BTreeSet<T> {
        all.into_iter().filter(|_| self.random(2) == 0).collect()
    }

    /// Numbers rise as memory is taken: what was handed over from some time on was not held.
    fn random_number_of(&mut self, slots: &[SlotId], parity: &[ParityId]) -> Option<u64> {
        let slots = slots.iter().map(|it| it.get());
        let numbers: Vec<u64> = slots.chain(parity.iter().map(|it| it.0)).collect();
        let count = numbers.len() as u64;
        (count > 0).then(|| numbers[self.random(count) as usize])
    }
}
