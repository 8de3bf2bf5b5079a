//! The training job: ranks that save step after step, are killed with their nodes, and restart from the newest
//! restorable checkpoint. The promises of docs/SEMANTICS.md are checked here, each by a function of its name.

use std::collections::{BTreeMap, BTreeSet};

use storaged_codec::digest;
use storaged_core::{ConnId, Input, RequestId};
use storaged_wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::plan::RestorePlan;
use storaged_wire::{CheckpointState, Namespace, Rank, RunId, SlotId, Step, WorldSize};

use super::world::{Event, World};

const TOKEN: &[u8] = b"token";

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
    sealed_whole: BTreeMap<(RunId, Step), BTreeSet<Rank>>,
    next_conn: u64,
    next_request: u64,
    crash_next_at: u64,
    save_next_at: u64,
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
            sealed_whole: BTreeMap::new(),
            next_conn: 0,
            next_request: 0,
            crash_next_at: 5_000,
            save_next_at: 0,
        }
    }
}

fn namespace() -> Namespace {
    Namespace::new("job").unwrap()
}

impl Job {
    /// Promise 1: nobody may call a checkpoint committed before every rank has sealed its shard.
    pub fn was_sealed_whole(&self, key: &CheckpointKey) {
        let sealed = self.sealed_whole.get(&(key.run, key.step));
        let whole = sealed.is_some_and(|ranks| {
            !ranks.is_empty()
                && ranks
                    .iter()
                    .enumerate()
                    .all(|(i, rank)| rank.get() as usize == i)
        });
        assert!(
            whole,
            "all or nothing: {key:?} is called committed, sealed were {sealed:?}"
        );
    }
}

impl World {
    fn rank_node(&self, rank: Rank) -> usize {
        rank.get() as usize % self.limits.nodes
    }

    fn all_ranks(&self) -> Vec<Rank> {
        (0..self.limits.ranks).map(Rank::new).collect()
    }

    fn connect(&mut self, node: usize, role: Role) -> ConnId {
        self.job.next_conn += 1;
        let conn = ConnId(self.job.next_conn);
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace: namespace(),
            token: TOKEN.to_vec().into(),
            role,
        };
        self.ask(node, conn, hello, Expect::Hello);
        conn
    }

    fn ask(&mut self, node: usize, conn: ConnId, request: Request, expect: Expect) {
        self.job.next_request += 1;
        let id = RequestId {
            conn,
            index: self.job.next_request,
        };
        self.job
            .expects
            .insert(id, (self.job.incarnation, node, expect));
        let generation = self.processes[node]
            .as_ref()
            .map_or(0, |process| process.generation);
        let input = Box::new(Input::Request { id, request });
        self.after(
            1,
            Event::Input {
                node,
                generation,
                input,
            },
        );
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
        for (rank, conn) in std::mem::take(&mut self.job.conns) {
            let node = self.rank_node(rank);
            if let Some(process) = &self.processes[node] {
                let generation = process.generation;
                self.after(
                    1,
                    Event::Input {
                        node,
                        generation,
                        input: Box::new(Input::Disconnected { conn }),
                    },
                );
            }
        }
        self.job.incarnation += 1;
        self.job.phase = Phase::Down;
        self.job.restored.clear();
        self.job.sealed.clear();
    }

    /// Every 50 ms: begin what can begin, and let the adversary strike.
    pub fn advance_job(&mut self) {
        self.after(50, Event::Job);
        self.strike();
        let ranks_up = self
            .all_ranks()
            .iter()
            .all(|rank| self.is_up(self.rank_node(*rank)));
        match self.job.phase {
            Phase::Down if ranks_up => {
                self.job.phase = Phase::Planning;
                let conn = self.connect(0, Role::Reader);
                self.job.conns.insert(Rank::new(u32::MAX), conn);
                self.ask(
                    0,
                    conn,
                    Request::Plan {
                        step: None,
                        timeout_ms: 60_000,
                        allow_older: false,
                    },
                    Expect::Plan,
                );
            }
            Phase::Training if self.job.sealed.is_empty() && self.now >= self.job.save_next_at => {
                self.save();
            }
            _ => {}
        }
    }

    /// The adversary: up to m nodes at once, or all of them once the newest checkpoint is durable, or just the
    /// trainers; then quiet until the cluster has had time to heal.
    fn strike(&mut self) {
        if self.now < self.job.crash_next_at {
            return;
        }
        let whole = (0..self.limits.nodes).all(|node| self.is_up(node));
        // What m lost nodes and one that lies have taken cannot be healed while the liar's block is needed; that is said.
        let healed = self.limits.liar.is_none() || self.newest_bears_all();
        if !whole || !healed || self.job.phase != Phase::Training {
            self.job.crash_next_at = self.now + 500;
            return;
        }
        match self.random(6) {
            0 => self.job_down(),
            1 if self.newest.contains_key(&CheckpointState::Durable) => {
                (0..self.limits.nodes).for_each(|node| self.crash(node));
                let durable = self.newest[&CheckpointState::Durable].clone();
                // What was only in RAM is gone, as it may be.
                self.newest.insert(CheckpointState::Protected, durable);
            }
            _ => {
                let count = 1 + self.random(self.limits.m as u64);
                for _ in 0..count {
                    let node = self.random(self.limits.nodes as u64) as usize;
                    self.crash(node);
                }
            }
        }
        self.job.crash_next_at = self.now + 30_000 + self.random(10_000);
    }

    /// Whether some node shows the newest protected checkpoint as bearing every m losses; what is durable bears more.
    fn newest_bears_all(&self) -> bool {
        let Some(key) = self.newest.get(&CheckpointState::Protected) else {
            return true;
        };
        let m = self.limits.m as u32;
        let shown = self.processes.iter().flatten();
        let shown = shown.flat_map(|process| process.node.shown());
        let is_safe = self.newest.get(&CheckpointState::Durable) >= Some(key);
        is_safe
            || shown
                .into_iter()
                .any(|it| it.key == *key && it.bears == Some(m))
    }

    /// Half of the steps follow as fast as slots are there, the others take some time to train.
    fn save(&mut self) {
        let trains_for = self.random(2) * self.random(800);
        self.job.save_next_at = self.now + trains_for;
        self.job.step += 1;
        let step = Step::new(self.job.step);
        for rank in self.all_ranks() {
            let (conn, node) = (self.job.conns[&rank], self.rank_node(rank));
            let bytes = content(self.job.run, step, rank, self.limits.shard_scale).len() as u64;
            self.ask(
                node,
                conn,
                Request::AcquireSlot {
                    bytes,
                    timeout_ms: 60_000,
                },
                Expect::Slot(rank, step),
            );
        }
        self.job.sealed.insert(Rank::new(u32::MAX));
    }

    pub fn answered(&mut self, id: RequestId, reply: Reply, slot: Option<SlotId>) {
        let Some((incarnation, node, expect)) = self.job.expects.remove(&id) else {
            return;
        };
        if incarnation != self.job.incarnation || !self.is_up(node) {
            return;
        }
        match (expect, reply) {
            (Expect::Hello, Reply::Welcome { .. }) | (Expect::Nothing, _) => {}
            (Expect::Plan, Reply::Plan(plan)) => {
                self.a_protected_checkpoint_is_not_lost_or_hidden(Some(&plan));
                self.job.plan = Some(plan);
                self.open_run();
            }
            (Expect::Plan, Reply::Refused(_)) => {
                self.a_protected_checkpoint_is_not_lost_or_hidden(None);
                self.job.plan = None;
                self.open_run();
            }
            (Expect::Run, Reply::RunOpened { run }) => {
                assert!(run > self.job.run, "a new run is above every older one");
                self.job.run = run;
                self.restore();
            }
            (Expect::Shard(rank), Reply::ShardOpened { length, .. }) => {
                let plan = self.job.plan.clone().unwrap();
                let got = self.ram(node).mapped(slot.unwrap())[..length as usize].to_vec();
                assert_eq!(
                    got,
                    content(plan.run, plan.step, rank, self.limits.shard_scale),
                    "wrong bytes are never returned"
                );
                self.restores += 1;
                self.job.restored.insert(rank);
                if self.job.restored.len() == self.limits.ranks as usize {
                    self.train();
                }
            }
            (Expect::Slot(rank, step), Reply::SlotGranted { slot, .. }) => {
                self.stage(node, rank, step, slot)
            }
            (Expect::Sealed(rank), Reply::Done) => {
                self.job.sealed.insert(rank);
                if self.job.sealed.len() == self.limits.ranks as usize + 1 {
                    let step = Step::new(self.job.step);
                    let conn = self.job.conns[&Rank::new(0)];
                    let commit = Request::Commit {
                        step,
                        schema: vec![].into(),
                        torch_metadata: vec![].into(),
                        durable: DurableWish::Policy,
                    };
                    self.ask(0, conn, commit, Expect::Nothing);
                    self.job.sealed.clear();
                }
            }
            // A rank that is refused brings its job down, which restarts.
            (_, Reply::Refused(_)) => self.job_down(),
            (expect, reply) => panic!("unexpected answer to {expect:?}: {reply:?}"),
        }
    }

    /// Promises 2, 3 and 5: what was protected (and at most m nodes lost since) or durable is what a plan offers,
    /// or something newer.
    fn a_protected_checkpoint_is_not_lost_or_hidden(&self, plan: Option<&RestorePlan>) {
        let offered = plan.map(|plan| (plan.run, plan.step));
        for state in [CheckpointState::Protected, CheckpointState::Durable] {
            if let Some(key) = self.newest.get(&state) {
                assert!(
                    offered >= Some((key.run, key.step)),
                    "a {state} checkpoint is not lost or hidden at {} ms: {key:?}, offered {offered:?}",
                    self.now
                );
            }
        }
    }

    fn open_run(&mut self) {
        self.job.phase = Phase::Opening;
        let conn = self.job.conns[&Rank::new(u32::MAX)];
        self.ask(
            0,
            conn,
            Request::OpenRun { timeout_ms: 60_000 },
            Expect::Run,
        );
    }

    fn restore(&mut self) {
        let Some(plan) = self.job.plan.clone() else {
            return self.train();
        };
        self.job.phase = Phase::Restoring;
        for rank in self.all_ranks() {
            let node = self.rank_node(rank);
            let conn = self.connect(node, Role::Reader);
            let open = Request::OpenShard {
                manifest: plan.manifest,
                rank,
                ranges: vec![],
                timeout_ms: 120_000,
                without: None,
            };
            self.job.conns.insert(rank, conn);
            self.ask(node, conn, open, Expect::Shard(rank));
        }
    }

    fn train(&mut self) {
        self.job.phase = Phase::Training;
        self.job.step = self.job.plan.as_ref().map_or(0, |plan| plan.step.get());
        let world_size = WorldSize::new(self.limits.ranks).unwrap();
        for rank in self.all_ranks() {
            let node = self.rank_node(rank);
            if let Some(conn) = self.job.conns.remove(&rank) {
                let generation = self.ram(node).generation;
                self.after(
                    1,
                    Event::Input {
                        node,
                        generation,
                        input: Box::new(Input::Disconnected { conn }),
                    },
                );
            }
            let conn = self.connect(
                node,
                Role::Trainer {
                    run: self.job.run,
                    rank,
                    world_size,
                },
            );
            self.job.conns.insert(rank, conn);
        }
    }

    fn stage(&mut self, node: usize, rank: Rank, step: Step, slot: SlotId) {
        let bytes = content(self.job.run, step, rank, self.limits.shard_scale);
        let length = bytes.len() as u64;
        self.ram(node).mapped(slot)[..bytes.len()].copy_from_slice(&bytes);
        self.job
            .sealed_whole
            .entry((self.job.run, step))
            .or_default()
            .insert(rank);
        let conn = self.job.conns[&rank];
        self.ask(
            node,
            conn,
            Request::SealSlot { slot, step, length },
            Expect::Sealed(rank),
        );
    }
}

/// The bytes of a rank at a step of a run: what every restore is compared with.
fn content(run: RunId, step: Step, rank: Rank, scale: usize) -> Vec<u8> {
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
