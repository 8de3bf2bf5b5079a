//! Training jobs of a month: each restarts from the newest checkpoint whenever it is ended, sometimes while an older
//! incarnation of it is still there. What the daemons answer is judged by `promises`.

use std::collections::{BTreeMap, BTreeSet};

use storaged_core::{ConnId, Input, RequestId};
use storaged_wire::local::{Request, Role, Rung};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{Namespace, Rank, Refusal, RefusalCode, RunId, Step};

use super::super::world::{Limits, World};
use super::asks::{Asked, Held, What};
use super::early::ComingMemory;
use super::trainers::{RankState, Ranks};
use super::{Changes, FAULTS_END_MS, JOBS_END_MS, Trainers};
use crate::testkit::{Pid, open_early, open_shard};

/// What requests may take, each; those that name no limit are answered at once.
const PLAN_MS: u32 = 20_000;
const RUN_MS: u32 = 20_000;
const SHARD_MS: u32 = 40_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Planning,
    Opening,
    Restoring,
    Training,
    /// Somebody opens a run and does nothing with it.
    Stray,
}

/// A connection of a trainer or reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub pid: Pid,
    pub conn: ConnId,
}

/// An incarnation of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IncarnationId {
    pub job: usize,
    pub id: u64,
}

/// One incarnation of a job.
#[derive(Debug)]
pub struct Incarnation {
    pub id: u64,
    pub phase: Phase,
    /// Each rank's node.
    pub nodes: Vec<usize>,
    pub coordinator: Place,
    pub run: Option<RunId>,
    pub plan: Option<RestorePlan>,
    pub conns: BTreeMap<Rank, Place>,
    pub restored: BTreeSet<Rank>,
    /// Shards that were given while they come.
    pub coming: BTreeMap<Rank, ComingMemory>,
    pub ranks: Ranks,
}

#[derive(Debug)]
pub struct Job {
    pub namespace: Namespace,
    pub starts_at: u64,
    pub alive: Vec<Incarnation>,
    /// The next incarnation asks for a step before the newest.
    pub rolls_back: Option<Step>,
}

pub struct Jobs {
    pub all: Vec<Job>,
    pub asked: BTreeMap<RequestId, Asked>,
    pub held: BTreeMap<ConnId, Vec<Held>>,
    /// Connections that outlive their incarnation.
    pub left: Vec<Place>,
    limits: Limits,
    next: u64,
}

impl Jobs {
    pub fn new(count: usize, limits: Limits) -> Self {
        let job = |index: usize| Job {
            namespace: Namespace::new(format!("job{index}")).unwrap(),
            starts_at: 500 + 700 * index as u64,
            alive: Vec::new(),
            rolls_back: None,
        };
        Self {
            all: (0..count).map(job).collect(),
            asked: BTreeMap::new(),
            held: BTreeMap::new(),
            left: Vec::new(),
            limits,
            next: 0,
        }
    }

    pub fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn ranks(&self) -> Vec<Rank> {
        (0..self.limits.ranks).map(Rank::new).collect()
    }

    pub fn incarnation(&mut self, job: usize, id: u64) -> Option<&mut Incarnation> {
        self.all[job].alive.iter_mut().find(|it| it.id == id)
    }
}

impl World {
    pub(super) fn advance_jobs(&mut self) {
        if self.now >= JOBS_END_MS {
            return self.end_all_jobs();
        }
        let scenario = self.month().scenario;
        for job in 0..self.month().jobs.all.len() {
            let now = self.now;
            let it = &self.month().jobs.all[job];
            let starts = it.alive.iter().all(|it| it.phase == Phase::Stray) && it.starts_at <= now;
            let twin = scenario.twins && now < FAULTS_END_MS && self.random(200) == 0;
            if starts || twin {
                self.start_incarnation(job);
            }
            // Both at once is where two of them meet.
            if (starts || twin) && scenario.twins && now < FAULTS_END_MS && self.random(2) == 0 {
                self.start_incarnation(job);
            }
            let strays = scenario.twins && scenario.links && !scenario.pauses;
            if strays && now < FAULTS_END_MS && self.random(100) == 0 {
                self.stray(job);
            }
            let ids: Vec<u64> = self.month().jobs.all[job]
                .alive
                .iter()
                .map(|it| it.id)
                .collect();
            for id in ids {
                self.train_on(job, id);
            }
            if scenario.trainers == Trainers::Lying && now < FAULTS_END_MS && self.random(60) == 0 {
                self.lie(job);
            }
        }
    }

    /// Each rank on its own node if that is awake, else on another one.
    fn placement(&mut self) -> Option<Vec<usize>> {
        let spare = self.spare_node();
        let mut usable = self.machines();
        usable.retain(|node| Some(*node) != spare);
        // Nodes that have come later get ranks too.
        if self.month().scenario.places != Changes::Never {
            let by = self.random(usable.len() as u64) as usize;
            usable.rotate_left(by);
        }
        let is_awake = |node: &usize| self.is_awake(*node);
        let awake: Vec<usize> = usable.iter().copied().filter(is_awake).collect();
        if awake.is_empty() {
            return None;
        }
        let ranks = 0..self.scene.limits.ranks as usize;
        let place = |rank: usize| {
            let own = usable[rank % usable.len()];
            if awake.contains(&own) {
                own
            } else {
                awake[rank % awake.len()]
            }
        };
        Some(ranks.map(place).collect())
    }

    fn start_incarnation(&mut self, job: usize) {
        if let Some(id) = self.add_incarnation(job, Phase::Planning) {
            let step = self.month().jobs.all[job].rolls_back.take();
            self.plan_in_month(IncarnationId { job, id }, step);
        }
    }

    /// An open_run out of nowhere, on whichever side of a cut: it may fail, and then it has done nothing.
    fn stray(&mut self, job: usize) {
        if let Some(id) = self.add_incarnation(job, Phase::Stray) {
            self.struck("stray runs");
            self.ask_for_run(IncarnationId { job, id });
        }
    }

    fn add_incarnation(&mut self, job: usize, phase: Phase) -> Option<u64> {
        let nodes = self.placement()?;
        let id = self.month().jobs.fresh();
        let node = nodes[self.random(nodes.len() as u64) as usize];
        let coordinator =
            self.connect_in_month(IncarnationId { job, id }, node, Role::Reader, What::Hello);
        let incarnation = Incarnation {
            id,
            phase,
            nodes,
            coordinator,
            run: None,
            plan: None,
            conns: BTreeMap::new(),
            restored: BTreeSet::new(),
            coming: BTreeMap::new(),
            ranks: Ranks::default(),
        };
        self.month().jobs.all[job].alive.push(incarnation);
        Some(id)
    }

    fn plan_in_month(&mut self, IncarnationId { job, id }: IncarnationId, step: Option<Step>) {
        let Some(place) = self
            .month()
            .jobs
            .incarnation(job, id)
            .map(|it| it.coordinator)
        else {
            return;
        };
        let plan = Request::Plan {
            step,
            timeout_ms: PLAN_MS,
            allow_older: false,
        };
        let limit = u64::from(PLAN_MS);
        self.ask_in_month(
            IncarnationId { job, id },
            place,
            plan,
            limit,
            What::Plan(step),
        );
        // A node that is stopped at the very moment of the plan.
        if self.month().scenario.pauses && self.now < FAULTS_END_MS && self.random(4) == 0 {
            let ms = (500 << self.random(6)).min(FAULTS_END_MS - self.now);
            self.pause(place.pid.node, ms);
        }
    }

    /// What a refusal means for a job, once it has been judged.
    pub(super) fn refused(&mut self, asked: &Asked, refusal: &Refusal) {
        self.judge(asked, refusal);
        let whose = IncarnationId {
            job: asked.job,
            id: asked.incarnation,
        };
        match (&asked.what, refusal.code) {
            (
                What::Plan(_),
                RefusalCode::NoCheckpoint
                | RefusalCode::UnknownNamespace
                | RefusalCode::TooManyLost,
            ) => self.open_run_in_month(whose, None),
            (What::Slot(rank, _), RefusalCode::Busy | RefusalCode::BudgetFull) => {
                self.rank_is(whose, *rank, RankState::Ready);
            }
            (What::Keep(keep, key), code) => self.is_not_kept(*keep, key, code),
            (What::SealBack | What::Wait | What::KeptStep(_), _) => {}
            _ => self.end_incarnation(whose),
        }
    }

    pub(super) fn open_run_in_month(
        &mut self,
        IncarnationId { job, id }: IncarnationId,
        plan: Option<RestorePlan>,
    ) {
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        it.phase = Phase::Opening;
        it.plan = plan;
        self.ask_for_run(IncarnationId { job, id });
    }

    fn ask_for_run(&mut self, IncarnationId { job, id }: IncarnationId) {
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        let place = it.coordinator;
        let open = Request::OpenRun { timeout_ms: RUN_MS };
        let limit = u64::from(RUN_MS);
        self.ask_in_month(IncarnationId { job, id }, place, open, limit, What::Run);
    }

    pub(super) fn restore_in_month(
        &mut self,
        IncarnationId { job, id }: IncarnationId,
        run: RunId,
    ) {
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        it.run = Some(run);
        if it.phase == Phase::Stray {
            return self.end_incarnation(IncarnationId { job, id });
        }
        it.phase = Phase::Restoring;
        let (plan, nodes) = (it.plan.clone(), it.nodes.clone());
        let Some(plan) = plan else {
            return self.begin_training(IncarnationId { job, id });
        };
        for rank in self.month().jobs.ranks() {
            let node = nodes[rank.get() as usize];
            if !self.is_up(node) {
                return self.end_incarnation(IncarnationId { job, id });
            }
            let place =
                self.connect_in_month(IncarnationId { job, id }, node, Role::Reader, What::Hello);
            let open = match (id + u64::from(rank.get())) % 2 {
                0 => open_early(plan.manifest, rank, SHARD_MS),
                _ => open_shard(plan.manifest, rank, SHARD_MS),
            };
            if let Some(it) = self.month().jobs.incarnation(job, id) {
                it.conns.insert(rank, place);
            }
            let limit = u64::from(SHARD_MS);
            self.ask_in_month(
                IncarnationId { job, id },
                place,
                open,
                limit,
                What::Shard(rank),
            );
        }
    }

    pub(super) fn shard_is_back_in_month(
        &mut self,
        IncarnationId { job, id }: IncarnationId,
        rank: Rank,
        bytes: &[u8],
    ) {
        let whose = IncarnationId { job, id };
        if self.has_rot() && !self.are_sealed(whose, rank, bytes) {
            return self.reads_elsewhere(whose, rank);
        }
        self.bytes_are_what_was_sealed(whose, rank, bytes);
        self.scene.restores += 1;
        let all = self.month().jobs.ranks().len();
        let Some(it) = self.month().jobs.incarnation(job, id) else {
            return;
        };
        it.restored.insert(rank);
        if it.restored.len() == all && !self.restart_fails(whose) {
            self.begin_training(IncarnationId { job, id });
        }
    }

    /// A reader has compared what it was given of its own RAM with the digests, and does without that.
    fn reads_elsewhere(&mut self, whose: IncarnationId, rank: Rank) {
        self.struck("rot that a reader finds");
        let Some(it) = self.month().jobs.incarnation(whose.job, whose.id) else {
            return;
        };
        let (Some(plan), Some(place)) = (it.plan.clone(), it.conns.get(&rank).copied()) else {
            return;
        };
        let manifest = plan.manifest;
        let close = Request::CloseShard { manifest, rank };
        self.ask_in_month(whose, place, close, 1_000, What::Close);
        let open = Request::OpenShard {
            manifest,
            rank,
            ranges: Vec::new(),
            timeout_ms: SHARD_MS,
            without: Some(Rung::OwnRam),
            withheld: None,
            early: None,
        };
        let limit = u64::from(SHARD_MS);
        self.ask_in_month(whose, place, open, limit, What::ShardElsewhere(rank));
    }

    /// A process of the job is gone: all of the job ends.
    pub(super) fn jobs_lose_node(&mut self, node: usize) {
        let mut hit = Vec::new();
        for (job, it) in self.month().jobs.all.iter().enumerate() {
            let of_node =
                |it: &&Incarnation| it.coordinator.pid.node == node || it.nodes.contains(&node);
            hit.extend(
                it.alive
                    .iter()
                    .filter(of_node)
                    .map(|it| IncarnationId { job, id: it.id }),
            );
        }
        for whose in hit {
            self.end_incarnation(whose);
        }
        self.month()
            .jobs
            .asked
            .retain(|_, asked| asked.pid.node != node);
    }

    pub(super) fn end_incarnation(&mut self, IncarnationId { job, id }: IncarnationId) {
        let again = self.now + 300 + self.random(2_000);
        self.breaks_off(IncarnationId { job, id });
        let it = &mut self.month().jobs.all[job];
        let Some(at) = it.alive.iter().position(|it| it.id == id) else {
            return;
        };
        let gone = it.alive.remove(at);
        it.starts_at = it.starts_at.max(again);
        let jobs = &mut self.month().jobs;
        jobs.asked.retain(|_, asked| asked.incarnation != id);
        let ill = self.month().scenario.trainers == Trainers::Ill && self.now < FAULTS_END_MS;
        let places = gone.conns.into_values().chain([gone.coordinator]);
        for place in places.collect::<Vec<_>>() {
            if ill && self.random(2) == 0 {
                self.month().jobs.left.push(place)
            } else {
                self.leave(place)
            }
        }
    }

    /// The job is over for good, and its place goes to one that has never saved.
    pub(super) fn another_job(&mut self, job: usize) {
        let number = self.month().jobs.fresh();
        let namespace = Namespace::new(format!("job{job}-{number}")).unwrap();
        self.month().jobs.all[job].namespace = namespace;
    }

    pub(super) fn leave(&mut self, Place { pid, conn }: Place) {
        self.month().jobs.held.remove(&conn);
        self.back(pid, 2, Input::Disconnected { conn });
    }

    fn end_all_jobs(&mut self) {
        for job in 0..self.month().jobs.all.len() {
            let ids: Vec<u64> = self.month().jobs.all[job]
                .alive
                .iter()
                .map(|it| it.id)
                .collect();
            for id in ids {
                self.end_incarnation(IncarnationId { job, id });
            }
            self.month().jobs.all[job].starts_at = u64::MAX;
        }
        for place in std::mem::take(&mut self.month().jobs.left) {
            self.leave(place);
        }
    }
}
