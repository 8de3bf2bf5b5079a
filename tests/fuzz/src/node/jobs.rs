//! Honest jobs: they open runs, save steps on all ranks, and read back what they have saved. What they do reaches the states that the
//! others are to disturb.

use std::collections::BTreeMap;

use storaged_core::{ConnId, RequestId};
use storaged_wire::local::{ByteRange, DurableWish, Reply, Request, Role, Rung};
use storaged_wire::plan::RestorePlan;
use storaged_wire::{CheckpointState, Namespace, Rank, RunId, Step, WorldSize};

use super::scene::Cluster;
use super::shape::Shape;
use crate::testkit::{acquire_slot, commit_step, name, open_shard};
use crate::twist::Twist;

/// What an honest client waits for an answer.
pub const WAIT_MS: u32 = 9_000;

/// A job and its trainers.
#[derive(Debug)]
pub struct Job {
    pub namespace: Namespace,
    ranks: usize,
    length: u64,
    pub run: Option<RunId>,
    pub step: u64,
    wish: Option<DurableWish>,
    /// Connections of the ranks' trainers.
    pub trainers: BTreeMap<u32, (usize, ConnId)>,
    /// Slots that were asked for: by which rank, for which step.
    asked: BTreeMap<RequestId, (u32, u64)>,
    pub plan: Option<RestorePlan>,
    /// A reader that has shards open.
    pub reader: Option<ConnId>,
}

impl Job {
    pub fn all(shape: Shape) -> Vec<Self> {
        let names: &[&str] = if shape.has_tenants() {
            &["job", "blue~job", "red~job"]
        } else {
            &["job", "other"]
        };
        let named = names.iter().filter_map(|name| Namespace::new(*name).ok());
        named.map(|namespace| Self::new(namespace, shape)).collect()
    }

    fn new(namespace: Namespace, shape: Shape) -> Self {
        Self {
            namespace,
            ranks: shape.nodes() * shape.ranks_per_node(),
            length: shape.length(),
            run: None,
            step: 0,
            wish: None,
            trainers: BTreeMap::new(),
            asked: BTreeMap::new(),
            plan: None,
            reader: None,
        }
    }

    pub fn forget_node(&mut self, node: usize) {
        self.trainers.retain(|_, (at, _)| *at != node);
    }

    fn forget_conn(&mut self, conn: ConnId) {
        self.trainers.retain(|_, (_, of)| *of != conn);
    }

    /// Bytes of a rank's shard.
    fn length_of(&self, rank: u32) -> u64 {
        self.length + u64::from(rank) * 100
    }
}

impl Cluster {
    /// A run of a job is opened by a process on some node; its trainers before that are fenced.
    pub fn open_run(&mut self, job: usize, node: usize) {
        let conn = self.connect_as(node, job, Role::Reader);
        self.run_for(20);
        let timeout_ms = WAIT_MS;
        self.request(conn, Request::OpenRun { timeout_ms });
        self.run_for(60);
    }

    /// Every rank saves a step.
    pub fn save(&mut self, job: usize, twist: Twist) {
        if self.scene.jobs[job].run.is_none() {
            self.open_run(job, twist.pick(self.processes.len()));
        }
        let wishes = [
            DurableWish::Policy,
            DurableWish::Required,
            DurableWish::Never,
        ];
        let it = &mut self.scene.jobs[job];
        let Some(run) = it.run else { return };
        it.step += 1 + u64::from(twist.how() % 3);
        it.wish = Some(wishes[twist.choose(wishes.len())]);
        let (step, ranks) = (it.step, it.ranks as u32);
        // A job may lack ranks: its step never commits.
        let some = if twist.how() == u8::MAX {
            ranks / 2
        } else {
            ranks
        };
        for rank in 0..some {
            let Some(conn) = self.trainer(job, rank, run) else {
                continue;
            };
            let bytes = self.scene.jobs[job].length_of(rank);
            let acquire = acquire_slot(bytes, WAIT_MS);
            if let Some(id) = self.request(conn, acquire) {
                self.scene.jobs[job].asked.insert(id, (rank, step));
            }
        }
    }

    fn trainer(&mut self, job: usize, rank: u32, run: RunId) -> Option<ConnId> {
        let it = &self.scene.jobs[job];
        if let Some((_, conn)) = it.trainers.get(&rank) {
            return Some(*conn);
        }
        let nodes = self.processes.len();
        let node = rank as usize % nodes;
        let role = Role::Trainer {
            run,
            rank: Rank::new(rank),
            world_size: WorldSize::new(it.ranks as u32).ok()?,
        };
        self.is_up(node).then_some(())?;
        let conn = self.connect_as(node, job, role);
        let place = (node, conn);
        self.scene.jobs[job].trainers.insert(rank, place);
        Some(conn)
    }

    /// An honest client goes on with what it was answered.
    pub fn answered(&mut self, id: RequestId, asked: &Request, reply: Reply) {
        let jobs = &self.scene.jobs;
        let of_conn = |job: &Job| {
            job.asked.contains_key(&id)
                || self.scene.clients.get(&id.conn).is_some_and(|(_, viewer)| {
                    viewer.sees(&job.namespace) && matches!(reply, Reply::RunOpened { .. })
                })
                || matches!(&reply, Reply::Plan(plan) if plan.namespace == job.namespace)
        };
        let Some(job) = jobs.iter().position(of_conn) else {
            return;
        };
        match reply {
            Reply::RunOpened { run } => self.begins_again(job, run),
            Reply::Plan(plan) => self.scene.jobs[job].plan = Some(plan),
            Reply::SlotGranted { slot, .. } if matches!(asked, Request::AcquireSlot { .. }) => {
                let it = &mut self.scene.jobs[job];
                let Some((rank, step)) = it.asked.remove(&id) else {
                    return;
                };
                let (length, step) = (it.length_of(rank), Step::new(step));
                let wish = it.wish.unwrap_or(DurableWish::Policy);
                let seal = Request::SealSlot { slot, step, length };
                self.request(id.conn, seal);
                if rank == 0 {
                    self.request(id.conn, commit_step(step, wish));
                }
            }
            // A trainer that is refused a slot connects anew for its next save.
            _ => self.scene.jobs[job].forget_conn(id.conn),
        }
    }

    fn begins_again(&mut self, job: usize, run: RunId) {
        let it = &mut self.scene.jobs[job];
        it.run = Some(run);
        // Those of the run before stay connected until a move ends them.
        it.trainers.clear();
        it.asked.clear();
    }

    /// What a launcher asks when a job is to be started again.
    pub fn plan(&mut self, job: usize, node: usize, twist: Twist) {
        let conn = self.connect_as(node, job, Role::Reader);
        let timeout_ms = 1_000 * u32::from(twist.how() % 10);
        let it = &self.scene.jobs[job];
        let some = twist.with() % 2 == 1;
        let step = some.then(|| Step::new(it.step.saturating_sub(twist.at() % 4)));
        let request = match twist.how() % 5 {
            0 => Request::Verdict { timeout_ms },
            1 => Request::PlanDrill { step, timeout_ms },
            2 => Request::Verify { step, timeout_ms },
            _ => Request::Plan {
                step,
                timeout_ms,
                allow_older: twist.how() > 127,
            },
        };
        self.request(conn, request);
    }

    /// A rank opens a shard of what was planned.
    pub fn open_planned(&mut self, job: usize, node: usize, twist: Twist) {
        let Some(plan) = self.scene.jobs[job].plan.clone() else {
            return self.plan(job, node, Twist::of([0, 0, 0, 3]));
        };
        let conn = self.connect_as(node, job, Role::Reader);
        self.scene.jobs[job].reader = Some(conn);
        let manifest = plan.manifest;
        self.request(conn, Request::GetManifest { manifest });
        let rank = Rank::new(twist.pick(plan.shards.len()) as u32);
        let mut open = open_shard(manifest, rank, WAIT_MS);
        if let Request::OpenShard {
            ranges,
            without,
            withheld,
            early,
            ..
        } = &mut open
        {
            let (offset, length) = (twist.with() * 64, 1 + twist.with() * 50);
            if twist.how() & 1 == 1 {
                ranges.push(ByteRange { offset, length });
            }
            if twist.how() & 2 == 2 {
                *without = Some(Rung::OwnRam);
            }
            if twist.how() & 4 == 4 {
                *withheld = Some(vec![name(twist.choose(self.processes.len()))]);
            }
            *early = (twist.how() & 16 == 16).then_some(true);
        }
        self.request(conn, open);
        if twist.how() & 32 == 32 {
            self.run_for(twist.with() * 2);
            let timeout_ms = WAIT_MS * u32::from(twist.how() & 1);
            let follow = Request::FollowShard {
                manifest,
                rank,
                timeout_ms,
            };
            self.request(conn, follow);
        }
        if twist.how() & 8 == 8 {
            self.run_for(twist.with() * 4);
            self.request(conn, Request::CloseShard { manifest, rank });
        }
    }

    /// Somebody waits for a step.
    pub fn wait_for(&mut self, job: usize, node: usize, twist: Twist) {
        let it = &self.scene.jobs[job];
        let Some(run) = it.run else { return };
        let step = Step::new(it.step.saturating_add(twist.at() % 3));
        let states = [
            CheckpointState::Protected,
            CheckpointState::Durable,
            CheckpointState::Committed,
        ];
        let state = states[twist.choose(states.len())];
        let timeout_ms = 100 * u32::from(twist.how());
        let conn = self.connect_as(node, job, Role::Reader);
        let wait = Request::Wait {
            run,
            step,
            state,
            timeout_ms,
        };
        self.request(conn, wait);
    }
}
