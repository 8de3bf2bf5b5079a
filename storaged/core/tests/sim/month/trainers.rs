//! The ranks of an incarnation: each asks for a slot, fills it, seals it, and the first one commits. Ill ones hang with
//! a slot in their hands, skip a save or go back to an older step; lying ones say hello with runs that nobody opened.

use std::collections::BTreeMap;

use storaged_codec::digest;
use storaged_wire::local::{DurableWish, Request, Role};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{CheckpointState, Rank, RunId, SlotId, Step, WorldSize};

use super::super::world::World;
use super::asks::What;
use super::jobs::{IncarnationId, Phase, Place};
use super::{FAULTS_END_MS, Trainers};
use crate::testkit::{acquire_slot, commit_step, digests};

/// How long a save waits for its slot.
const SLOT_MS: u32 = 10_000;
const WAIT_MS: u32 = 20_000;
/// Quiet ones save no more from then on.
const QUIET_FROM_MS: u64 = 14_000;
/// A watchdog ends a job of which a rank hangs.
const WATCHDOG_MS: u64 = 6_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankState {
    Ready,
    /// Waits for a slot since then.
    Acquiring(u64),
    Sealing,
    Sealed,
    /// Holds a slot and does nothing, since then.
    Hangs(u64),
}

/// How far the ranks are.
#[derive(Debug, Default)]
pub struct Ranks {
    pub step: u64,
    pub saves_at: u64,
    pub states: BTreeMap<Rank, RankState>,
    /// The last step that each has sealed.
    pub sealed: BTreeMap<Rank, Step>,
    /// Some rank skips this step: it will never commit.
    pub skipped: bool,
}

impl World {
    pub(super) fn rank_is(
        &mut self,
        IncarnationId { job, id }: IncarnationId,
        rank: Rank,
        state: RankState,
    ) {
        if let Some(it) = self.month().jobs.incarnation(job, id) {
            it.ranks.states.insert(rank, state);
        }
    }

    pub(super) fn begin_training(&mut self, IncarnationId { job, id }: IncarnationId) {
        let world_size = WorldSize::new(self.scene.limits.ranks).unwrap();
        let now = self.now;
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        it.phase = Phase::Training;
        it.ranks.step = it.plan.as_ref().map_or(0, |plan| plan.step.get());
        it.ranks.saves_at = now + 100;
        let (run, nodes) = (it.run.expect("it was opened"), it.nodes.clone());
        for place in std::mem::take(&mut it.conns).into_values() {
            self.leave(place);
        }
        for rank in self.month().jobs.ranks() {
            let node = nodes[rank.get() as usize];
            if !self.is_up(node) {
                return self.end_incarnation(IncarnationId { job, id });
            }
            let role = Role::Trainer {
                run,
                rank,
                world_size,
            };
            let place = self.connect_in_month(IncarnationId { job, id }, node, role, What::Hello);
            if let Some(it) = self.month().jobs.incarnation(job, id) {
                it.conns.insert(rank, place);
            }
            self.rank_is(IncarnationId { job, id }, rank, RankState::Ready);
        }
    }

    pub(super) fn train_on(&mut self, job: usize, id: u64) {
        let now = self.now;
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        if it.phase != Phase::Training {
            return;
        }
        let hangs = it.ranks.states.values().find_map(|state| match state {
            RankState::Hangs(since) => Some(*since),
            _ => None,
        });
        if let Some(since) = hangs {
            if now >= since + WATCHDOG_MS {
                self.end_incarnation(IncarnationId { job, id });
            }
            return;
        }
        let idle = |state: &RankState| matches!(state, RankState::Ready | RankState::Sealed);
        if self.month().scenario.trainers == Trainers::Quiet && now >= QUIET_FROM_MS {
            return;
        }
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        if it.ranks.states.values().all(idle) && it.ranks.saves_at <= now {
            self.save_in_month(IncarnationId { job, id });
        }
    }

    /// All ranks save; half of the steps follow as fast as slots are there.
    fn save_in_month(&mut self, IncarnationId { job, id }: IncarnationId) {
        let trains_for = 150 + self.random(2) * self.random(900);
        let ill = self.month().scenario.trainers == Trainers::Ill && self.now < FAULTS_END_MS;
        let now = self.now;
        let all = self.month().jobs.ranks();
        let skips = all[self.random(all.len() as u64) as usize];
        let skips = Some(skips).filter(|_| ill && self.random(12) == 0);
        let brief = self.month().scenario.trainers == Trainers::Brief;
        let ends_one_in = if brief { 8 } else { 40 };
        if self.now < FAULTS_END_MS && self.random(ends_one_in) == 0 {
            self.struck("jobs that end");
            self.end_incarnation(IncarnationId { job, id });
            if brief {
                self.another_job(job);
            }
            return;
        }
        if ill && self.random(30) == 0 {
            return self.roll_back(IncarnationId { job, id });
        }
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        it.ranks.saves_at = now + trains_for;
        it.ranks.step += 1;
        it.ranks.skipped = skips.is_some();
        let (step, conns) = (Step::new(it.ranks.step), it.conns.clone());
        for (rank, place) in conns.into_iter().filter(|(rank, _)| Some(*rank) != skips) {
            self.rank_is(IncarnationId { job, id }, rank, RankState::Acquiring(now));
            let bytes = bytes_of(IncarnationId { job, id }, step, rank).len() as u64;
            let acquire = acquire_slot(bytes, SLOT_MS);
            let limit = u64::from(SLOT_MS);
            self.ask_in_month(
                IncarnationId { job, id },
                place,
                acquire,
                limit,
                What::Slot(rank, step),
            );
        }
    }

    pub(super) fn fill(
        &mut self,
        IncarnationId { job, id }: IncarnationId,
        rank: Rank,
        step: Step,
        slot: SlotId,
    ) {
        let (now, ill) = (self.now, self.month().scenario.trainers == Trainers::Ill);
        let hangs = ill && now < FAULTS_END_MS && self.random(60) == 0;
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        let (place, run): (Place, RunId) = (it.conns[&rank], it.run.expect("it trains"));
        let last = it.ranks.sealed.get(&rank).copied();
        let state = if hangs {
            RankState::Hangs(now)
        } else {
            RankState::Sealing
        };
        self.rank_is(IncarnationId { job, id }, rank, state);
        if hangs {
            return self.struck("ranks that hang");
        }
        let bytes = bytes_of(IncarnationId { job, id }, step, rank);
        let length = bytes.len() as u64;
        self.ram(place.pid.node).mapped(slot)[..bytes.len()].copy_from_slice(&bytes);
        self.will_be_sealed(
            IncarnationId { job, id },
            run,
            step,
            rank,
            digests(&bytes).1,
        );
        if let Some(step) = last.filter(|_| ill && self.random(10) == 0) {
            let seal = Request::SealSlot { slot, step, length };
            self.ask_in_month(
                IncarnationId { job, id },
                place,
                seal,
                1_000,
                What::SealBack,
            );
        }
        let seal = Request::SealSlot { slot, step, length };
        self.ask_in_month(
            IncarnationId { job, id },
            place,
            seal,
            1_000,
            What::Seal(rank, step),
        );
    }

    pub(super) fn sealed(
        &mut self,
        IncarnationId { job, id }: IncarnationId,
        rank: Rank,
        step: Step,
    ) {
        self.rank_is(IncarnationId { job, id }, rank, RankState::Sealed);
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        it.ranks.sealed.insert(rank, step);
        let whole = it.ranks.states.values().all(|it| *it == RankState::Sealed);
        if it.ranks.step != step.get() || it.ranks.skipped || !whole {
            return;
        }
        let (place, run) = (it.conns[&Rank::new(0)], it.run.expect("it trains"));
        for state in it.ranks.states.values_mut() {
            *state = RankState::Ready;
        }
        let key = CheckpointKey {
            namespace: self.month().jobs.all[job].namespace.clone(),
            run,
            step,
        };
        self.is_described(key.clone(), place.pid.node);
        self.is_to_commit(key, IncarnationId { job, id });
        let commit = commit_step(step, DurableWish::Policy);
        self.ask_in_month(
            IncarnationId { job, id },
            place,
            commit,
            1_000,
            What::Commit,
        );
        if self.random(3) == 0 {
            let wait = Request::Wait {
                run,
                step,
                state: CheckpointState::Protected,
                timeout_ms: WAIT_MS,
            };
            let limit = u64::from(WAIT_MS);
            self.ask_in_month(IncarnationId { job, id }, place, wait, limit, What::Wait);
        }
    }

    /// A rank saves an older step in the same run, which is refused, and then the job goes back as it should.
    fn roll_back(&mut self, IncarnationId { job, id }: IncarnationId) {
        self.struck("jobs that roll back");
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        let back = Step::new(it.ranks.step.saturating_sub(1));
        self.month().jobs.all[job].rolls_back = Some(back);
        self.end_incarnation(IncarnationId { job, id });
        self.month().jobs.all[job].starts_at = self.now;
    }

    /// Somebody says hello as a trainer of a run that OpenRun never gave.
    pub(super) fn lie(&mut self, job: usize) {
        let node = self.random(self.scene.limits.nodes as u64) as usize;
        if !self.is_awake(node) {
            return;
        }
        let newest = self.newest_run(job).unwrap_or(RunId::new(0)).number();
        let run = match self.random(3) {
            0 => u64::MAX,
            1 => newest + 1 + self.random(5),
            _ => newest.saturating_sub(1),
        };
        self.struck("lies about runs");
        let run = RunId::new(run);
        let rank = Rank::new(self.random(u64::from(self.scene.limits.ranks)) as u32);
        let world_size = WorldSize::new(self.scene.limits.ranks).unwrap();
        let role = Role::Trainer {
            run,
            rank,
            world_size,
        };
        let place = self.connect_in_month(IncarnationId { job, id: 0 }, node, role, What::Lie(run));
        self.month().jobs.left.push(place);
    }
}

/// The bytes of a rank at a step of an incarnation. Mostly the same from step to step, so that increments have clean
/// chunks; lengths differ by rank.
pub fn bytes_of(
    IncarnationId {
        job,
        id: incarnation,
    }: IncarnationId,
    step: Step,
    rank: Rank,
) -> Vec<u8> {
    let seed = digest(format!("{job} {incarnation} {step} {rank}").as_bytes());
    let length = 3000 + 2500 * rank.get() as usize;
    let mut bytes: Vec<u8> = (0..length)
        .map(|at| (at as u64 * 31 + u64::from(rank.get())) as u8)
        .collect();
    let at = seed.as_bytes()[0] as usize * 8;
    bytes[at..at + 32].copy_from_slice(seed.as_bytes());
    bytes
}
