//! A small cluster whose links, deaths and restarts a test sets to the millisecond, and which counts what sessions send
//! and where they put it. Sessions take their time, stripe by stripe, and share it; no payload bytes exist.
#![allow(dead_code, reason = "each test file uses a part of it")]

mod pauses;
mod steps;
mod tier;
pub mod tokens;

use std::collections::{BTreeMap, BTreeSet};

use storaged_core::{
    ConnId, DurableForm, DurablePolicy, EpochMembers, Input, MessageLimits, Note, Setup,
    TenantShare,
};
use storaged_wire::local::{DurableWish, Reply, Request, Role};
use storaged_wire::peer::PeerMessage;
use storaged_wire::{
    CheckpointState, Digest, Namespace, Rank, RefusalCode, RunId, Step, TenantName, WorldSize,
};

#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use crate::testkit::{Block, acquire_slot, commit_step, name};
use crate::testkit::{
    CHUNK_BYTES, Course, Event, Pacing, Payload, Pid, Scene, Task, World, geometry, index, members,
    namespace,
};
use pauses::PauseEvent;
#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use tier::{Conduct, Listing, Manifests, Uploads};

pub const CHUNK: u64 = CHUNK_BYTES as u64;
/// A slot of a shard of ten stripes, or its parity: slots are whole 2 MiB.
pub const SLOT: u64 = 2 << 20;
/// What a stripe takes while one session runs; those that run side by side share the links.
pub const STRIPE_MS: u64 = 10;
const MESSAGES: MessageLimits = MessageLimits {
    inline: 1_000,
    spread: 1_000,
    page: 1_000,
    table_chunks: 256,
    fan_out: 2,
};

/// What nodes may keep, and for how long.
pub struct Room {
    pub budget: u64,
    /// Of single nodes, where it is another one.
    pub budgets: BTreeMap<usize, u64>,
    /// What tenants have of it.
    pub shares: BTreeMap<Option<TenantName>, TenantShare>,
    pub idle_job_ms: u64,
    /// Within how long RAM is read again; 0: never.
    pub scrub_period_ms: u64,
    /// What copies in the durable tier hold.
    pub durable_form: DurableForm,
    /// Safe steps that stay, and slots that a rank has beside them.
    pub keep_steps: usize,
    /// Of single nodes, whose file has not been changed yet.
    pub keeping: BTreeMap<usize, usize>,
    pub slots_beside: usize,
}

impl Default for Room {
    fn default() -> Self {
        Self {
            budget: 1 << 30,
            budgets: BTreeMap::new(),
            shares: BTreeMap::new(),
            idle_job_ms: 3_600_000,
            scrub_period_ms: 0,
            durable_form: DurableForm::Full,
            keep_steps: 1,
            keeping: BTreeMap::new(),
            slots_beside: 2,
        }
    }
}

/// What a test sets, and its job.
pub struct Stage {
    k: usize,
    m: usize,
    /// Nodes with a trainer, from the first on.
    ranks: usize,
    pub stripes: u64,
    room: Room,
    /// How the durable tier behaves, if there is one.
    pub tier: Option<Conduct>,
    job: Namespace,
    /// Connections of the ranks' trainers.
    trainers: BTreeMap<usize, ConnId>,
    run: Option<RunId>,
    step: u64,
    /// Nodes of which nothing that they say arrives.
    pub unheard: BTreeSet<usize>,
    /// Bytes of long things that were sent: to whom, and of what.
    pub pages: BTreeMap<(usize, Digest), u64>,
}

impl Stage {
    fn new(k: usize, m: usize, stripes: u64, tier: Option<Conduct>, room: Room) -> Self {
        Self {
            k,
            m,
            ranks: k,
            stripes,
            room,
            tier,
            job: namespace(),
            trainers: BTreeMap::new(),
            run: None,
            step: 0,
            unheard: BTreeSet::new(),
            pages: BTreeMap::new(),
        }
    }
}

pub type Cluster = World<Stage>;

impl Scene for Stage {
    type Event = PauseEvent;

    const PAYLOAD: Payload = Payload::Digests;

    fn happens(world: &mut Cluster, event: PauseEvent) {
        world.pause_goes_on(event);
    }

    fn sets_up(world: &mut Cluster, node: usize, setup: &mut Setup) {
        let Self { k, m, room, .. } = &world.scene;
        let budget = room.budgets.get(&node);
        setup.geometry = Some(geometry(*k, *m));
        setup.budget = budget.copied().unwrap_or(room.budget);
        setup.shares = room.shares.clone();
        setup.idle_job_ms = room.idle_job_ms;
        setup.scrub_period_ms = room.scrub_period_ms;
        setup.durable_form = room.durable_form;
        setup.keep_steps = *room.keeping.get(&node).unwrap_or(&room.keep_steps);
        setup.slots_per_rank = setup.keep_steps + room.slots_beside;
        setup.messages = MESSAGES;
        if world.scene.tier.is_some() {
            setup.durable = DurablePolicy::OnRequest;
        }
    }

    /// Longer than any test waits for it.
    fn check_takes(_: &mut Cluster, _: u64) -> Option<u64> {
        None
    }

    fn dials_after(_: &mut Cluster, _: usize, _: usize) -> u64 {
        2
    }

    fn finds_out_after(_: &mut Cluster, from: usize, _: usize) -> u64 {
        2000 + 50 * from as u64
    }

    fn way(world: &mut Cluster, from: usize, to: usize, message: &PeerMessage) -> Option<u64> {
        if world.scene.unheard.contains(&from) {
            return None;
        }
        if let PeerMessage::ParcelPage { place, bytes } = message {
            let sent = world.scene.pages.entry((to, place.parcel)).or_default();
            *sent += bytes.len() as u64;
        }
        Some(1)
    }

    fn pacing(_: &Cluster) -> Pacing {
        Pacing::ByStripe { ms: STRIPE_MS }
    }

    /// The executor waits for jobs that are being done.
    fn told_after(_: &mut Cluster, _: u64) -> u64 {
        5
    }

    fn tier_course(world: &mut Cluster, by: Pid, task: &Task) -> Course {
        let conduct = world.scene.tier.as_ref();
        let conduct = conduct.expect("a tier, since it is asked");
        conduct.course(by.node, task)
    }
}

impl Cluster {
    /// All nodes are up, and each of the k data nodes has a trainer whose shards have so many stripes.
    pub fn start(k: usize, m: usize, stripes: u64) -> Self {
        Self::start_with(k, m, stripes, None, Room::default())
    }

    /// The same with a durable tier.
    pub fn start_with_tier(k: usize, m: usize, stripes: u64) -> Self {
        Self::start_with(k, m, stripes, Some(Conduct::default()), Room::default())
    }

    /// The same with a room, and a durable tier if there is one.
    pub fn start_with(k: usize, m: usize, stripes: u64, tier: Option<Conduct>, room: Room) -> Self {
        let stage = Stage::new(k, m, stripes, tier, room);
        Self::begun(stage, k + m)
    }

    /// The coding nodes have trainers too, and code for one another.
    pub fn start_with_ranks_on_all(k: usize, m: usize, stripes: u64, room: Room) -> Self {
        let mut stage = Stage::new(k, m, stripes, None, room);
        stage.ranks = k + m;
        Self::begun(stage, k + m)
    }

    /// Ranks on the first so many nodes alone.
    pub fn start_with_ranks(
        nodes: usize,
        ranks: usize,
        k: usize,
        m: usize,
        stripes: u64,
        room: Room,
    ) -> Self {
        let mut stage = Stage::new(k, m, stripes, None, room);
        stage.ranks = ranks;
        Self::begun(stage, nodes)
    }

    /// More nodes than one group has.
    pub fn start_of(nodes: usize, k: usize, m: usize, stripes: u64) -> Self {
        let stage = Stage::new(k, m, stripes, None, Room::default());
        Self::begun(stage, nodes)
    }

    fn begun(stage: Stage, nodes: usize) -> Self {
        let mut cluster = Self::of(stage, nodes, 0);
        cluster.run_for(50);
        cluster.open_run();
        cluster
    }

    /// The operator removes a node, which ends; all others hear of the new epoch.
    pub fn remove(&mut self, node: usize, epoch: u64) {
        let mut left = members(self.processes.len());
        left.retain(|member| member.name != name(node));
        self.kill(node);
        for other in 0..self.processes.len() {
            let members = left.clone();
            let passed = Vec::new();
            let heard = Input::Members {
                newest: EpochMembers { epoch, members },
                passed,
            };
            self.tell(other, heard);
        }
    }

    /// As of a transport that does not see that a peer was restarted before its silence ends the connection.
    pub fn links_notice_late(&mut self, node: usize, ms: u64) {
        self.postpone(
            ms,
            |event| matches!(event, Event::Dial(_, to) if *to == node),
        );
    }

    /// Kills a node; the others notice by its silence.
    pub fn kill(&mut self, node: usize) {
        self.end_process(node);
    }

    /// Nodes lose their memory, all at once, and come back after their silence was noticed.
    pub fn restart_empty(&mut self, nodes: &[usize]) {
        nodes.iter().for_each(|node| self.kill(*node));
        self.run_for(10_000);
        nodes.iter().for_each(|node| self.start_after(0, *node));
    }

    /// The next daemon of a node may keep so much.
    pub fn set_budget(&mut self, node: usize, bytes: u64) {
        self.scene.room.budgets.insert(node, bytes);
    }

    /// The job is started again: a newer run.
    pub fn begin_again(&mut self) {
        self.scene.trainers.clear();
        let reader = self.connect(0, Role::Reader);
        let reply = self.ask(0, reader, Request::OpenRun { timeout_ms: 10_000 });
        let Reply::RunOpened { run } = reply else {
            panic!("no run: {reply:?}");
        };
        self.scene.run = Some(run);
        (0..self.scene.ranks).for_each(|node| self.attach(node));
    }

    /// The job's next save is of the step after this one.
    pub fn goes_back_to(&mut self, step: u64) {
        self.scene.step = step;
    }

    /// A connection to a node's daemon.
    pub fn connect(&mut self, node: usize, role: Role) -> ConnId {
        let job = self.scene.job.clone();
        let conn = self.try_connect(node, job, role);
        conn.expect("a welcome")
    }

    fn open_run(&mut self) {
        let reader = self.connect(0, Role::Reader);
        let reply = self.ask(0, reader, Request::OpenRun { timeout_ms: 10_000 });
        let Reply::RunOpened { run } = reply else {
            panic!("no run: {reply:?}");
        };
        assert_eq!(run.number(), 1);
        self.scene.run = Some(run);
        (0..self.scene.ranks).for_each(|node| self.attach(node));
    }

    /// A trainer of the job's run connects, also again after its daemon was restarted.
    pub fn attach(&mut self, node: usize) {
        let role = Role::Trainer {
            run: self.scene.run.expect("the job has opened a run"),
            rank: Rank::new(node as u32),
            world_size: WorldSize::new(self.scene.ranks as u32).unwrap(),
        };
        let conn = self.connect(node, role);
        self.scene.trainers.insert(node, conn);
    }

    /// Another job begins; the one before goes on as it is.
    pub fn begin_job(&mut self, name: &str) {
        self.ask_of(name);
        self.open_run();
    }

    /// What is connected from now on is of this job.
    pub fn ask_of(&mut self, name: &str) {
        self.scene.job = Namespace::new(name).unwrap();
        self.scene.trainers.clear();
        self.scene.step = 0;
    }

    /// Trainers of a job that has begun before connect again, and save after this step.
    pub fn go_on_with(&mut self, name: &str, run: RunId, step: u64) {
        self.ask_of(name);
        (self.scene.run, self.scene.step) = (Some(run), step);
        (0..self.scene.ranks).for_each(|node| self.attach(node));
    }

    /// The job's trainers go.
    pub fn end_job(&mut self) {
        for (node, conn) in std::mem::take(&mut self.scene.trainers) {
            self.disconnect(node, conn);
        }
    }

    /// The connection of a node's trainer.
    pub fn trainer(&self, node: usize) -> ConnId {
        self.scene.trainers[&node]
    }

    /// The run that the ranks save for.
    pub fn run(&self) -> RunId {
        self.scene.run.expect("a job has begun")
    }

    /// Stages a step on every rank and commits it.
    pub fn save(&mut self) {
        self.save_as(DurableWish::Never);
    }

    /// Four data nodes and two coding nodes with a tier. Step 1 is durable, step 2 was protected after it and is in RAM alone.
    pub fn with_two_steps() -> Self {
        let mut cluster = Self::start_with_tier(4, 2, 10);
        cluster.save_on_all(6, DurableWish::Required);
        cluster.save_on_all(6, DurableWish::Never);
        cluster
    }

    /// A step more, which all of so many nodes know to be protected.
    pub fn save_on_all(&mut self, nodes: usize, durable: DurableWish) {
        self.save_as(durable);
        let everywhere = |cluster: &Self| (0..nodes).all(|node| cluster.is_protected(node));
        self.run_until(60_000 + STRIPE_MS, "protection", everywhere);
        if durable == DurableWish::Required {
            let is_there = |cluster: &Self| !cluster.tier.published.is_empty();
            self.run_until(60_000, "a durable step", is_there);
        }
        self.run_for(2_000);
    }

    /// Stages a step on every rank and commits it, with a wish for the durable tier.
    pub fn save_as(&mut self, durable: DurableWish) {
        self.scene.step += 1;
        let (step, length) = (Step::new(self.scene.step), self.scene.stripes * CHUNK);
        for (node, conn) in self.scene.trainers.clone() {
            let acquire = acquire_slot(length, 10_000);
            let Reply::SlotGranted { slot, .. } = self.ask(node, conn, acquire) else {
                panic!("no slot");
            };
            let reply = self.ask(node, conn, Request::SealSlot { slot, step, length });
            assert!(matches!(reply, Reply::Done), "{reply:?}");
        }
        let commit = commit_step(step, durable);
        let conn = self.scene.trainers[&0];
        self.send(0, conn, commit);
    }

    /// Saves a step and waits until all nodes know it to be protected, and to be durable if that was wished.
    pub fn save_and_wait(&mut self, durable: DurableWish) {
        let before = self.tier.published.len();
        self.save_as(durable);
        let nodes = self.processes.len();
        self.run_until(60_000, "protection", |cluster| {
            (0..nodes).all(|node| cluster.is_protected(node))
        });
        if durable == DurableWish::Required {
            self.run_until(60_000, "durability", |cluster| {
                cluster.tier.published.len() > before
            });
        }
        self.run_for(1_000);
    }

    /// What a data node's trainer is refused a slot with.
    pub fn refused_slot(&mut self, node: usize, bytes: u64) -> (RefusalCode, String) {
        let acquire = acquire_slot(bytes, 1_000);
        match self.ask(node, self.trainer(node), acquire) {
            Reply::Refused(refusal) => (refusal.code, refusal.message),
            other => panic!("{other:?}"),
        }
    }

    /// Whether a node knows the newest step to be protected.
    pub fn is_protected(&self, node: usize) -> bool {
        self.was(node, CheckpointState::Protected)
    }

    /// Whether it knows it to be committed.
    pub fn is_committed(&self, node: usize) -> bool {
        self.was(node, CheckpointState::Committed)
    }

    /// Whether it knows it to be durable.
    pub fn is_durable(&self, node: usize) -> bool {
        self.was(node, CheckpointState::Durable)
    }

    fn was(&self, node: usize, wanted: CheckpointState) -> bool {
        self.notes.iter().any(|(_, at, note)| {
            let Note::State { key, state } = note else {
                return false;
            };
            *at == node
                && key.namespace == self.scene.job
                && key.step == Step::new(self.scene.step)
                && *state == wanted
        })
    }

    /// When these nodes were told of as healed; none before all are.
    pub fn healed_at(&self, nodes: &[usize], since: u64) -> Option<u64> {
        let of = |wanted: &usize| {
            let mut healed = self.notes.iter().filter_map(|(at, _, note)| match note {
                Note::Healed { node, .. } if *at >= since && index(node) == *wanted => Some(*at),
                _ => None,
            });
            healed.next()
        };
        nodes
            .iter()
            .map(of)
            .collect::<Option<Vec<_>>>()?
            .into_iter()
            .max()
    }

    /// Faults of sessions that were told since.
    pub fn failures(&self, since: u64) -> Vec<&Note> {
        let failed = self
            .notes
            .iter()
            .filter(|(at, _, note)| *at >= since && matches!(note, Note::SessionFailed { .. }));
        failed.map(|(_, _, note)| note).collect()
    }

    /// Counts anew.
    pub fn reset_counts(&mut self) {
        let counts = &mut self.sessions.counts;
        counts.sent.clear();
        counts.put.clear();
        counts.moved.clear();
    }
}
