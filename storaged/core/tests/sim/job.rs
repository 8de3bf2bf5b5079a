//! The training job: ranks that save step after step, are killed with their nodes, and restart from the newest
//! restorable checkpoint. The promises of docs/SEMANTICS.md are checked here, each by a function of its name.

use std::collections::{BTreeMap, BTreeSet};

use storaged_codec::digest;
use storaged_core::{ConnId, Input, RequestId};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::plan::RestorePlan;
use storaged_wire::{CheckpointState, Rank, RunId, SlotId, Step, WorldSize};

use super::world::{MESSAGE_MS, Scripted, World};
use crate::testkit::{
    Event, TORCH_METADATA, acquire_slot, commit_step, hello, namespace, open_shard, plan_newest,
    schema_of,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waiting to ask for a plan.
    Down,
    Planning,
    Opening,
    Restoring,
    Training,
}

#[derive(Debug, Clone)]
enum Expect {
    Hello,
    Plan,
    Run,
    Manifest(Rank),
    Shard(Rank),
    Slot(Rank, Step),
    Sealed(Rank),
    Nothing,
}

pub struct Job {
    phase: Phase,
    incarnation: u64,
    run: RunId,
    step: u64,
    plan: Option<RestorePlan>,
    conns: BTreeMap<Rank, ConnId>,
    restored: BTreeSet<Rank>,
    sealed: BTreeSet<Rank>,
    expects: BTreeMap<RequestId, (u64, usize, Expect)>,
    /// What is asked on a connection once its hello is answered: one request at a time.
    held: BTreeMap<ConnId, Vec<(Request, Expect)>>,
    sealed_whole: BTreeMap<(RunId, Step), BTreeSet<Rank>>,
    next_conn: u64,
    next_request: u64,
    crash_next_at: u64,
    save_next_at: u64,
    is_over: bool,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            phase: Phase::Down,
            incarnation: 0,
            run: RunId::new(0),
            step: 0,
            plan: None,
            conns: BTreeMap::new(),
            restored: BTreeSet::new(),
            sealed: BTreeSet::new(),
            expects: BTreeMap::new(),
            held: BTreeMap::new(),
            sealed_whole: BTreeMap::new(),
            next_conn: 0,
            next_request: 0,
            crash_next_at: 5_000,
            save_next_at: 0,
            is_over: false,
        }
    }
}

impl Job {
    /// Promise 1: nobody may call a checkpoint committed before every rank has sealed its shard.
    pub fn was_sealed_whole(&self, key: &CheckpointKey) {
        let sealed = self.sealed_whole.get(&(key.run, key.step));
        assert!(
            self.is_sealed_whole(key),
            "all or nothing: {key:?} is called committed, sealed were {sealed:?}"
        );
    }

    /// Of this job: a liar gives one's run and step to another.
    pub fn is_sealed_whole(&self, key: &CheckpointKey) -> bool {
        let sealed = self.sealed_whole.get(&(key.run, key.step));
        let is_whole = sealed.is_some_and(|ranks| {
            let mut ranks = ranks.iter().enumerate();
            ranks.len() > 0 && ranks.all(|(i, rank)| rank.get() as usize == i)
        });
        is_whole && key.namespace == namespace()
    }
}

impl World {
    fn rank_node(&self, rank: Rank) -> usize {
        let honest = self.honest();
        honest[rank.get() as usize % honest.len()]
    }

    fn all_ranks(&self) -> Vec<Rank> {
        (0..self.scene.limits.ranks).map(Rank::new).collect()
    }

    fn connect(&mut self, node: usize, role: Role) -> ConnId {
        self.scene.job.next_conn += 1;
        let conn = ConnId(self.scene.job.next_conn);
        self.expect(node, conn, hello(namespace(), role), Expect::Hello);
        self.scene.job.held.insert(conn, Vec::new());
        conn
    }

    fn tell_soon(&mut self, node: usize, input: Input) {
        if let Some(pid) = self.pid(node) {
            self.back(pid, 1, input);
        }
    }

    fn expect(&mut self, node: usize, conn: ConnId, request: Request, expect: Expect) {
        if let Some(held) = self.scene.job.held.get_mut(&conn) {
            return held.push((request, expect));
        }
        self.scene.job.next_request += 1;
        let id = RequestId {
            conn,
            index: self.scene.job.next_request,
        };
        self.scene
            .job
            .expects
            .insert(id, (self.scene.job.incarnation, node, expect));
        self.tell_soon(node, Input::Request { id, request });
    }

    /// A node with ranks on it died: the job goes down and comes back as a new run.
    pub fn job_lost_node(&mut self, node: usize) {
        if self
            .all_ranks()
            .iter()
            .any(|rank| self.rank_node(*rank) == node)
        {
            self.job_down();
        }
    }

    fn job_down(&mut self) {
        for (rank, conn) in std::mem::take(&mut self.scene.job.conns) {
            let node = self.rank_node(rank);
            self.tell_soon(node, Input::Disconnected { conn });
        }
        self.scene.job.incarnation += 1;
        self.scene.job.phase = Phase::Down;
        self.scene.job.held.clear();
        self.scene.job.restored.clear();
        self.scene.job.sealed.clear();
    }

    /// The job ends, and does not begin again.
    pub fn job_ends(&mut self) {
        self.job_down();
        self.scene.job.is_over = true;
    }

    /// Every 50 ms: begin what can begin, and let the adversary strike.
    pub fn advance_job(&mut self) {
        self.after(50, Event::Scene(Scripted::Job));
        if self.scene.job.is_over {
            return;
        }
        self.strike();
        let ranks_up = self
            .all_ranks()
            .iter()
            .all(|rank| self.is_up(self.rank_node(*rank)));
        match self.scene.job.phase {
            Phase::Down if ranks_up => {
                self.scene.job.phase = Phase::Planning;
                let conn = self.connect(0, Role::Reader);
                self.scene.job.conns.insert(Rank::new(u32::MAX), conn);
                self.expect(0, conn, plan_newest(60_000), Expect::Plan);
            }
            Phase::Training
                if self.scene.job.sealed.is_empty() && self.now >= self.scene.job.save_next_at =>
            {
                self.save();
            }
            _ => {}
        }
    }

    /// The adversary: up to m nodes at once, or all of them once the newest checkpoint is durable, or just the
    /// trainers; then quiet until the cluster has had time to heal.
    fn strike(&mut self) {
        if self.now < self.scene.job.crash_next_at {
            return;
        }
        let whole = (0..self.scene.limits.nodes).all(|node| self.is_up(node));
        // What m lost nodes and one that lies have taken cannot be healed while the liar's block is needed; that is said.
        let healed = self.scene.limits.liar.is_none() || self.newest_bears_all();
        if !whole || !healed || self.scene.job.phase != Phase::Training {
            self.scene.job.crash_next_at = self.now + 500;
            return;
        }
        match self.random(6) {
            0 => self.job_down(),
            _ if self.scene.limits.byzantine.is_some() => self.strike_beside_byzantine(),
            1 if self.scene.newest.contains_key(&CheckpointState::Durable) => {
                (0..self.scene.limits.nodes).for_each(|node| self.crash(node));
                let durable = self.scene.newest[&CheckpointState::Durable].clone();
                // What was only in RAM is gone, as it may be.
                self.scene
                    .newest
                    .insert(CheckpointState::Protected, durable);
            }
            _ => {
                let count = 1 + self.random(self.scene.limits.m as u64);
                for _ in 0..count {
                    let node = self.random(self.scene.limits.nodes as u64) as usize;
                    self.crash(node);
                }
            }
        }
        self.scene.job.crash_next_at = self.now + 30_000 + self.random(10_000);
    }

    /// The one that says anything, as often as not, and with it m-1 others at most.
    fn strike_beside_byzantine(&mut self) {
        if self.random(2) == 0 {
            let liar = self.scene.limits.byzantine.into_iter();
            liar.for_each(|liar| self.crash(liar));
        }
        let honest = self.honest();
        for _ in 1..self.scene.limits.m {
            let node = honest[self.random(honest.len() as u64) as usize];
            self.crash(node);
        }
    }

    /// Whether some node shows the newest protected checkpoint as bearing every m losses; what is durable bears more.
    fn newest_bears_all(&self) -> bool {
        let Some(key) = self.scene.newest.get(&CheckpointState::Protected) else {
            return true;
        };
        let m = self.scene.limits.m as u32;
        let shown = self.processes.iter().flatten();
        let shown = shown.flat_map(|process| process.node.shown());
        let is_safe = self.scene.newest.get(&CheckpointState::Durable) >= Some(key);
        is_safe
            || shown
                .into_iter()
                .any(|it| it.key == *key && it.bears == Some(m))
    }

    /// Half of the steps follow as fast as slots are there, the others take some time to train.
    fn save(&mut self) {
        let trains_for = self.random(2) * self.random(800);
        self.scene.job.save_next_at = self.now + trains_for;
        self.scene.job.step += 1;
        let step = Step::new(self.scene.job.step);
        for rank in self.all_ranks() {
            let (conn, node) = (self.scene.job.conns[&rank], self.rank_node(rank));
            let bytes = content(
                self.scene.job.run,
                step,
                rank,
                self.scene.limits.shard_scale,
            )
            .len() as u64;
            self.expect(
                node,
                conn,
                acquire_slot(bytes, 60_000),
                Expect::Slot(rank, step),
            );
        }
        self.scene.job.sealed.insert(Rank::new(u32::MAX));
    }

    /// A node answers: a plan is held to what was protected by then. What is protected while the answer is on its way it
    /// cannot know of.
    pub fn replies(&self, id: RequestId, reply: &Reply) {
        let job = &self.scene.job;
        let asked = job.expects.get(&id);
        if !asked
            .is_some_and(|(of, _, what)| *of == job.incarnation && matches!(what, Expect::Plan))
        {
            return;
        }
        match reply {
            Reply::Plan(plan) => self.a_protected_checkpoint_is_not_lost_or_hidden(Some(plan)),
            _ => self.a_protected_checkpoint_is_not_lost_or_hidden(None),
        }
    }

    pub fn answered(&mut self, id: RequestId, reply: Reply, slot: Option<SlotId>) {
        let Some((incarnation, node, expect)) = self.scene.job.expects.remove(&id) else {
            return;
        };
        if incarnation != self.scene.job.incarnation || !self.is_up(node) {
            return;
        }
        match (expect, reply) {
            (Expect::Hello, Reply::Welcome { .. }) => self.goes_on(node, id.conn),
            (Expect::Nothing, _) => {}
            (Expect::Plan, Reply::Plan(plan)) => {
                self.scene.job.plan = Some(plan);
                self.open_run();
            }
            (Expect::Plan, Reply::Refused(_)) => {
                self.scene.job.plan = None;
                self.open_run();
            }
            (Expect::Run, Reply::RunOpened { run }) => {
                assert!(
                    run > self.scene.job.run,
                    "a new run is above every older one"
                );
                self.scene.job.run = run;
                self.restore();
            }
            (
                Expect::Manifest(rank),
                Reply::Manifest {
                    schema,
                    torch_metadata,
                    ..
                },
            ) => {
                let plan = self.scene.job.plan.clone().unwrap();
                assert_eq!(schema[..], schema_of(plan.step), "what was committed");
                assert_eq!(torch_metadata[..], *TORCH_METADATA);
                let conn = self.scene.job.conns[&rank];
                let open = open_shard(plan.manifest, rank, 120_000);
                self.expect(node, conn, open, Expect::Shard(rank));
            }
            (Expect::Shard(rank), Reply::ShardOpened { length, .. }) => {
                let plan = self.scene.job.plan.clone().unwrap();
                let got = self.ram(node).mapped(slot.unwrap())[..length as usize].to_vec();
                assert_eq!(
                    got,
                    content(plan.run, plan.step, rank, self.scene.limits.shard_scale),
                    "wrong bytes are never returned"
                );
                self.scene.restores += 1;
                self.scene.job.restored.insert(rank);
                if self.scene.job.restored.len() == self.scene.limits.ranks as usize {
                    self.train();
                }
            }
            (Expect::Slot(rank, step), Reply::SlotGranted { slot, .. }) => {
                self.stage(node, rank, step, slot)
            }
            (Expect::Sealed(rank), Reply::Done) => {
                self.scene.job.sealed.insert(rank);
                if self.scene.job.sealed.len() == self.scene.limits.ranks as usize + 1 {
                    let step = Step::new(self.scene.job.step);
                    let conn = self.scene.job.conns[&Rank::new(0)];
                    let commit = commit_step(step, DurableWish::Policy);
                    self.expect(0, conn, commit, Expect::Nothing);
                    self.scene.job.sealed.clear();
                }
            }
            // A rank that is refused brings its job down, which restarts.
            (_, Reply::Refused(_)) => self.job_down(),
            (expect, reply) => panic!("unexpected answer to {expect:?}: {reply:?}"),
        }
    }

    /// A connection's hello is answered.
    fn goes_on(&mut self, node: usize, conn: ConnId) {
        let held = self.scene.job.held.remove(&conn).unwrap_or_default();
        for (request, expect) in held {
            self.expect(node, conn, request, expect);
        }
    }

    /// Promises 2, 3 and 5: what was protected (and at most m nodes lost since) or durable is what a plan offers,
    /// or something newer.
    fn a_protected_checkpoint_is_not_lost_or_hidden(&self, plan: Option<&RestorePlan>) {
        let offered = plan.map(|plan| (plan.run, plan.step));
        for state in [CheckpointState::Protected, CheckpointState::Durable] {
            if let Some(key) = self.newest_heard(state) {
                assert!(
                    offered >= Some((key.run, key.step)),
                    "a {state} checkpoint is not lost or hidden at {} ms: {key:?}, offered {offered:?}",
                    self.now
                );
            }
        }
    }

    /// The newest checkpoint in a state that a plan which is answered now can have heard of. A job that restarts while its nodes live asks
    /// while its last step is being coded: what another node finds protected in the same moment, no message has told of.
    fn newest_heard(&self, state: CheckpointState) -> Option<&CheckpointKey> {
        let newest = self.scene.newest.get(&state)?;
        let newest_first = self.scene.found_protected.iter().rev();
        let unheard = newest_first.take_while(|(_, at)| at + MESSAGE_MS > self.now);
        match (state, unheard.last()) {
            (CheckpointState::Protected, Some((before, _))) => before.as_ref(),
            _ => Some(newest),
        }
    }

    fn open_run(&mut self) {
        self.scene.job.phase = Phase::Opening;
        let conn = self.scene.job.conns[&Rank::new(u32::MAX)];
        self.expect(
            0,
            conn,
            Request::OpenRun { timeout_ms: 60_000 },
            Expect::Run,
        );
    }

    fn restore(&mut self) {
        let Some(plan) = self.scene.job.plan.clone() else {
            return self.train();
        };
        self.scene.job.phase = Phase::Restoring;
        for rank in self.all_ranks() {
            let node = self.rank_node(rank);
            let conn = self.connect(node, Role::Reader);
            self.scene.job.conns.insert(rank, conn);
            let manifest = plan.manifest;
            let read = Request::GetManifest { manifest };
            self.expect(node, conn, read, Expect::Manifest(rank));
        }
    }

    fn train(&mut self) {
        self.scene.job.phase = Phase::Training;
        self.scene.job.step = self
            .scene
            .job
            .plan
            .as_ref()
            .map_or(0, |plan| plan.step.get());
        let world_size = WorldSize::new(self.scene.limits.ranks).unwrap();
        for rank in self.all_ranks() {
            let node = self.rank_node(rank);
            if let Some(conn) = self.scene.job.conns.remove(&rank) {
                self.tell_soon(node, Input::Disconnected { conn });
            }
            let conn = self.connect(
                node,
                Role::Trainer {
                    run: self.scene.job.run,
                    rank,
                    world_size,
                },
            );
            self.scene.job.conns.insert(rank, conn);
        }
    }

    fn stage(&mut self, node: usize, rank: Rank, step: Step, slot: SlotId) {
        let bytes = content(
            self.scene.job.run,
            step,
            rank,
            self.scene.limits.shard_scale,
        );
        let length = bytes.len() as u64;
        self.ram(node).mapped(slot)[..bytes.len()].copy_from_slice(&bytes);
        self.scene
            .job
            .sealed_whole
            .entry((self.scene.job.run, step))
            .or_default()
            .insert(rank);
        let conn = self.scene.job.conns[&rank];
        self.expect(
            node,
            conn,
            Request::SealSlot { slot, step, length },
            Expect::Sealed(rank),
        );
    }
}

/// The bytes of a rank at a step of a run: what every restore is compared with.
pub(super) fn content(run: RunId, step: Step, rank: Rank, scale: usize) -> Vec<u8> {
    let seed = digest(format!("{run} {step} {rank}").as_bytes());
    // Mostly the same from step to step, so that increments have clean chunks; lengths differ by rank.
    let length = (3000 + 2500 * rank.get() as usize) * scale;
    let mut bytes: Vec<u8> = (0..length)
        .map(|at| (at as u64 * 31 + u64::from(rank.get())) as u8)
        .collect();
    let at = seed.as_bytes()[0] as usize * 8;
    bytes[at..at + 32].copy_from_slice(seed.as_bytes());
    bytes
}
