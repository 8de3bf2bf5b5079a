//! A step that all ranks have sealed commits while nothing is in its way: whoever waits for a commit that never comes has lost the step,
//! though no byte of it is lost.

use std::collections::BTreeMap;

use storaged_plan::homes;
use storaged_wire::peer::CheckpointKey;

use super::super::world::World;
use super::Unequal;
use super::jobs::IncarnationId;
use crate::testkit::{Pid, name};

/// Of links that are up, processes that run and rosters that are known.
const IN_TIME_MS: u64 = 10_000;

/// A step that all ranks have sealed and one has described.
#[derive(Debug)]
struct Uncommitted {
    whose: IncarnationId,
    ranks: Vec<Pid>,
    described_at: u64,
    /// Since when nothing is in its way.
    clear_since: Option<u64>,
}

/// Steps that are to commit.
#[derive(Debug, Default)]
pub struct Commits {
    waiting: BTreeMap<CheckpointKey, Uncommitted>,
}

impl Commits {
    /// It has committed, be it on a node that nobody hears.
    pub fn has_come(&mut self, key: &CheckpointKey) {
        self.waiting.remove(key);
    }
}

impl World {
    pub(super) fn is_to_commit(&mut self, key: CheckpointKey, whose: IncarnationId) {
        let now = self.now;
        let scenario = self.month().scenario;
        // Of nodes that differ, or that have no room, it is not clear what they make of a step.
        if scenario.unequal != Unequal::Nothing || scenario.is_little_room() {
            return;
        }
        let Some(it) = self.month().jobs.incarnation(whose.job, whose.id) else {
            return;
        };
        let uncommitted = Uncommitted {
            whose,
            ranks: it.conns.values().map(|place| place.pid).collect(),
            described_at: now,
            clear_since: None,
        };
        self.month().commits.waiting.insert(key, uncommitted);
    }

    pub(super) fn steps_commit(&mut self) {
        let now = self.now;
        let mut waiting = std::mem::take(&mut self.month().commits.waiting);
        waiting.retain(|key, step| self.still_is_to_commit(key, step));
        for (key, step) in &mut waiting {
            let is_clear = self.is_clear(key, step);
            step.clear_since = step.clear_since.or(Some(now)).filter(|_| is_clear);
            let clear_for = step.clear_since.map_or(0, |since| now - since);
            assert!(
                clear_for < IN_TIME_MS,
                "a step that all ranks have sealed commits: step {} of run {} waits for it at {now} ms: {step:?}",
                key.step,
                key.run
            );
        }
        self.month().commits.waiting = waiting;
    }

    /// Not any more if it has committed, a newer one has, or its job does not wait for it.
    fn still_is_to_commit(&mut self, key: &CheckpointKey, step: &Uncommitted) -> bool {
        let IncarnationId { job, id } = step.whose;
        let is_newest = self.newest_run(job) == Some(key.run);
        let month = self.month();
        let goes_on = is_newest && month.jobs.incarnation(job, id).is_some();
        // A clock that jumps has a step given up.
        let resumed = |pid: &Pid| month.resumed_at.get(&pid.node).copied().unwrap_or(0);
        let is_whole = (step.ranks.iter()).all(|pid| resumed(pid) < step.described_at);
        goes_on && is_whole && !month.promises.has_committed(key)
    }

    /// Whether its ranks' nodes are there and linked with one another and with one that builds its manifest, and know the same roster.
    fn is_clear(&mut self, key: &CheckpointKey, step: &Uncommitted) -> bool {
        let count = self.scene.limits.m + 1;
        let newest = self.month().registry.newest().clone();
        let epoch = newest.epoch;
        let places = homes(&newest.members(), key, count);
        let builders: Vec<usize> = (0..self.processes.len())
            .filter(|place| places.contains(&name(*place)))
            .filter_map(|place| newest.machine_in(place))
            .collect();
        let ranks: Vec<usize> = step.ranks.iter().map(|pid| pid.node).collect();
        let are_there = step.ranks.iter().all(|pid| self.lives(*pid));
        let knows = |world: &mut Self, it: usize| {
            world.is_awake(it) && world.month().registry.epoch_of(it) == epoch
        };
        let joined = |world: &Self, a: usize, b: usize| {
            a == b || (world.gets_through(a, b) && world.gets_through(b, a))
        };
        let all_know = ranks.iter().all(|it| knows(self, *it));
        let is_joined = |world: &Self, one: usize| ranks.iter().all(|it| joined(world, one, *it));
        are_there
            && all_know
            && ranks.iter().all(|it| is_joined(self, *it))
            && builders
                .iter()
                .any(|it| knows(self, *it) && is_joined(self, *it))
    }

    fn gets_through(&self, from: usize, to: usize) -> bool {
        let link = self.links.get(&(from, to));
        link.is_some_and(|link| link.up && link.alive && link.cut_until <= self.now)
    }
}
