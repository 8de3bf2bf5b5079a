//! A small cluster whose links, deaths and restarts a test sets to the millisecond, and which counts what sessions send
//! and where they put it. Sessions take their time, stripe by stripe, and share it; no payload bytes exist.
#![allow(dead_code, reason = "each test file uses a part of it")]

mod pauses;
mod sessions;
mod tier;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pauses::Pauses;
use sessions::Sessions;
#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use sessions::{Block, STRIPE_MS};
use storaged_codec::{ChunkSize, Digest, Fingerprint, Geometry, digest, root_digest};
use storaged_core::{
    ConnId, DurableForm, DurablePolicy, Input, LinkRates, Node, Note, Now, Output, RequestId,
    RunsWithoutTier, Setup,
};
use storaged_plan::Member;
use storaged_wire::local::{DurableWish, LOCAL_VERSION, Reply, Request, Role};
use storaged_wire::{
    CheckpointState, Generation, Namespace, NodeName, Rank, RefusalCode, RunId, Step, WorldSize,
};
#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use tier::{Listing, Tier, Uploads};

pub const CHUNK: u64 = 4096;
/// A message's way.
const WAY_MS: u64 = 1;

pub fn name(node: usize) -> NodeName {
    NodeName::new(format!("n{node:02}")).unwrap()
}

pub fn index(name: &NodeName) -> usize {
    name.as_str()[1..].parse().unwrap()
}

struct Process {
    node: Node,
    generation: u64,
    began: u64,
}

enum Event {
    Input(usize, u64, Input),
    Start(usize),
    Link(usize, usize),
    Unlink(usize, usize, u64),
    Stripe(sessions::Key),
    /// A node has been silent to another one for as long as its transport bears.
    Silent(usize, usize),
    Resume(usize),
}

/// What nodes may keep, and for how long.
pub struct Room {
    pub budget: u64,
    /// Of single nodes, where it is another one.
    pub budgets: BTreeMap<usize, u64>,
    pub idle_job_ms: u64,
    /// What copies in the durable tier hold.
    pub durable_form: DurableForm,
}

impl Default for Room {
    fn default() -> Self {
        Self {
            budget: 1 << 30,
            budgets: BTreeMap::new(),
            idle_job_ms: 3_600_000,
            durable_form: DurableForm::Full,
        }
    }
}

/// What a test sees.
pub struct Cluster {
    pub geometry: Geometry,
    pub stripes: u64,
    pub now: u64,
    /// Blocks sent by each node in sessions.
    pub sent: BTreeMap<usize, u64>,
    /// How often each stripe of a block was put in place, by node.
    pub put: BTreeMap<(usize, Block), BTreeMap<u64, u32>>,
    /// Sessions that some member's executor was given.
    pub begun: BTreeSet<sessions::Key>,
    /// Sessions that have moved something.
    pub moved: BTreeSet<sessions::Key>,
    /// How often a node asked the durable tier for a shard.
    pub fetches: u32,
    /// What nodes told, with the time.
    pub notes: Vec<(u64, usize, Note)>,
    nodes: Vec<Option<Process>>,
    events: BTreeMap<(u64, u64), Event>,
    sequence: u64,
    generation: u64,
    /// Links that are up, with the generation of their far end.
    links: BTreeMap<(usize, usize), u64>,
    sessions: Sessions,
    replies: BTreeMap<RequestId, Reply>,
    next_request: u64,
    pauses: Pauses,
    /// Bytes of every node's budget, unless another one is set for it.
    pub budget: u64,
    pub budgets: BTreeMap<usize, u64>,
    /// For how long a job may be idle.
    pub idle_job_ms: u64,
    durable_form: DurableForm,
    job: Namespace,
    /// The durable tier, if there is one.
    pub tier: Option<Tier>,
    /// Connections of the ranks' trainers.
    trainers: BTreeMap<usize, ConnId>,
    run: Option<RunId>,
    step: u64,
}

impl Cluster {
    /// All nodes are up, and each of the k data nodes has a trainer whose shards have so many stripes.
    pub fn start(k: usize, m: usize, stripes: u64) -> Self {
        Self::start_with((k, m), stripes, None, Room::default())
    }

    /// The same with a durable tier.
    pub fn start_with_tier(k: usize, m: usize, stripes: u64) -> Self {
        Self::start_with((k, m), stripes, Some(Tier::default()), Room::default())
    }

    /// The same with a room, and a durable tier if there is one.
    pub fn start_with(
        (k, m): (usize, usize),
        stripes: u64,
        tier: Option<Tier>,
        room: Room,
    ) -> Self {
        let mut cluster = Self {
            geometry: Geometry::new(k, m).unwrap(),
            stripes,
            now: 0,
            sent: BTreeMap::new(),
            put: BTreeMap::new(),
            begun: BTreeSet::new(),
            moved: BTreeSet::new(),
            fetches: 0,
            notes: Vec::new(),
            nodes: (0..k + m).map(|_| None).collect(),
            events: BTreeMap::new(),
            sequence: 0,
            generation: 0,
            links: BTreeMap::new(),
            sessions: Sessions::default(),
            replies: BTreeMap::new(),
            next_request: 0,
            pauses: Pauses::default(),
            budget: room.budget,
            budgets: room.budgets,
            idle_job_ms: room.idle_job_ms,
            durable_form: room.durable_form,
            job: Namespace::new("job").unwrap(),
            tier,
            trainers: BTreeMap::new(),
            run: None,
            step: 0,
        };
        (0..k + m).for_each(|node| cluster.at(0, Event::Start(node)));
        cluster.run_for(50);
        cluster.open_run();
        cluster
    }

    fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.events
            .insert((time.max(self.now), self.sequence), event);
    }

    /// Runs for so many milliseconds.
    pub fn run_for(&mut self, ms: u64) {
        let end = self.now + ms;
        while self
            .events
            .first_key_value()
            .is_some_and(|((time, _), _)| *time <= end)
        {
            self.happen_next();
        }
        self.now = end;
    }

    /// Runs until something holds; gives the milliseconds that it took.
    pub fn run_until(&mut self, limit_ms: u64, what: &str, holds: impl Fn(&Self) -> bool) -> u64 {
        let began = self.now;
        while !holds(self) {
            assert!(
                self.now < began + limit_ms,
                "{what} within {limit_ms} ms: {:?}",
                self.notes
            );
            self.happen_next();
        }
        self.now - began
    }

    fn happen_next(&mut self) {
        let Some(((time, _), event)) = self.events.pop_first() else {
            panic!("nothing will ever happen again");
        };
        self.now = time;
        match event {
            Event::Input(node, generation, input) => self.feed(node, generation, input),
            Event::Start(node) => self.begin_process(node),
            Event::Link(from, to) => self.link_up(from, to),
            Event::Unlink(from, to, generation) => self.link_down(from, to, generation),
            Event::Stripe(key) => self.stripe(&key),
            Event::Silent(node, to) => self.is_silent(node, to),
            Event::Resume(node) => self.resume(node),
        }
    }

    fn begin_process(&mut self, node: usize) {
        self.generation += 1;
        let generation = self.generation;
        let members = (0..self.nodes.len()).map(|other| Member {
            name: name(other),
            failure_domain: format!("n{other}"),
        });
        let setup = Setup {
            name: name(node),
            generation: Generation::new(generation),
            members: members.collect(),
            geometry: Some(self.geometry),
            chunk: ChunkSize::new(CHUNK as u32).unwrap(),
            slots_per_rank: 3,
            budget: self.budgets.get(&node).copied().unwrap_or(self.budget),
            idle_job_ms: self.idle_job_ms,
            link_rates: LinkRates::default(),
            durable: match self.tier {
                Some(_) => DurablePolicy::OnRequest,
                None => DurablePolicy::Absent,
            },
            messages: storaged_core::MessageLimits {
                inline: 1_000,
                page: 1_000,
                table_chunks: 256,
                fan_out: 2,
            },
            runs_without_tier: RunsWithoutTier::Refused,
            durable_form: self.durable_form,
        };
        self.nodes[node] = Some(Process {
            node: Node::new(setup).unwrap(),
            generation,
            began: self.now,
        });
        self.feed(node, generation, Input::Tick);
        for other in (0..self.nodes.len()).filter(|other| *other != node) {
            self.at(self.now + 2 * WAY_MS, Event::Link(node, other));
            self.at(self.now + 3 * WAY_MS, Event::Link(other, node));
        }
    }

    fn link_up(&mut self, from: usize, to: usize) {
        let (Some(_), Some(far)) = (&self.nodes[from], &self.nodes[to]) else {
            return;
        };
        let generation = far.generation;
        match self.links.get(&(from, to)) {
            Some(known) if *known == generation => return,
            // As the transport does it: the peer is another one, so the connection that was is gone.
            Some(known) => self.link_down(from, to, *known),
            None => {}
        }
        self.links.insert((from, to), generation);
        self.is_joined(from, to);
        let node = name(to);
        let generation = Generation::new(generation);
        self.tell(from, Input::PeerUp { node, generation });
    }

    fn link_down(&mut self, from: usize, to: usize, generation: u64) {
        if self.links.get(&(from, to)) == Some(&generation) {
            self.links.remove(&(from, to));
            self.tell(from, Input::PeerDown { node: name(to) });
        }
    }

    fn tell(&mut self, node: usize, input: Input) {
        if let Some(process) = &self.nodes[node] {
            self.feed(node, process.generation, input);
        }
    }

    /// Kills a node; the others notice by its silence.
    pub fn kill(&mut self, node: usize) {
        self.nodes[node] = None;
        self.sessions_lose(node);
        for other in 0..self.nodes.len() {
            self.links.remove(&(node, other));
            if let Some(generation) = self.links.get(&(other, node)) {
                let silent_for = 2000 + 50 * other as u64;
                self.at(
                    self.now + silent_for,
                    Event::Unlink(other, node, *generation),
                );
            }
        }
    }

    /// Starts a node after so many milliseconds, with nothing in its RAM.
    pub fn start_after(&mut self, ms: u64, node: usize) {
        self.at(self.now + ms, Event::Start(node));
    }

    /// As of a transport that does not see that a peer was restarted before its silence ends the connection.
    pub fn links_notice_late(&mut self, node: usize, ms: u64) {
        let late = |event: &Event| matches!(event, Event::Link(_, to) if *to == node);
        let moved: Vec<_> = self
            .events
            .iter()
            .filter(|(_, e)| late(e))
            .map(|(at, _)| *at)
            .collect();
        for at in moved {
            let event = self.events.remove(&at).unwrap();
            self.at(at.0 + ms, event);
        }
    }

    fn feed(&mut self, node: usize, generation: u64, input: Input) {
        let Some(process) = &mut self.nodes[node] else {
            return;
        };
        if process.generation != generation {
            return;
        }
        let Some(input) = self.pauses.let_through(node, input) else {
            return;
        };
        self.sessions.hears(node, generation, &input);
        let local = Now(self.now - process.began);
        let outputs = process.node.handle(local, input);
        let deadline = process.began + process.node.deadline().0.min(local.0 + 3_600_000);
        for output in outputs {
            self.perform(node, generation, output);
        }
        let deadline = deadline.max(self.now + 1);
        self.at(deadline, Event::Input(node, generation, Input::Tick));
    }

    fn perform(&mut self, node: usize, generation: u64, output: Output) {
        let soon = self.now + 1;
        self.sessions.check(node, generation, &output);
        match output {
            Output::Reply { id, reply, .. } => {
                self.replies.insert(id, reply);
            }
            Output::Send { to, message } => {
                let to = index(&to);
                // On a connection to an incarnation that is gone everything is lost.
                let alive = self.nodes[to].as_ref().map(|process| process.generation);
                if let Some(alive) = alive
                    && self.links.get(&(node, to)) == Some(&alive)
                    && !self.pauses.is_severed(node, to)
                {
                    let from = name(node);
                    let input = Input::Message { from, message };
                    self.at(self.now + WAY_MS, Event::Input(to, alive, input));
                }
            }
            Output::CreateSlot { slot, .. } => {
                self.at(
                    soon,
                    Event::Input(node, generation, Input::SlotCreated { slot }),
                );
            }
            Output::Digest { slot, length, .. } => {
                let (leaves, root) = digests(node, self.step, length);
                // Nothing is computed here, so that any fingerprint will do.
                let prints = leaves.iter().map(|_| Fingerprint::ZERO).collect();
                let input = Input::Digested {
                    slot,
                    leaves,
                    prints,
                    root,
                };
                self.at(soon, Event::Input(node, generation, input));
            }
            Output::Run(work) => self.begin_session(node, generation, work),
            Output::Stop { leader, session } => self.stop_session(node, (leader, session)),
            Output::Note(note) => self.notes.push((self.now, node, note)),
            // Reading a checkpoint takes longer than any test waits for it.
            Output::DropSlot { .. } | Output::DropParity { .. } | Output::Check { .. } => {}
            other => self.perform_durable(node, generation, other),
        }
    }

    /// Asks a node and waits for its answer.
    pub fn ask(&mut self, node: usize, conn: ConnId, request: Request) -> Reply {
        let id = self.send(node, conn, request);
        self.run_until(600_000, "an answer", |cluster| {
            cluster.replies.contains_key(&id)
        });
        self.replies.remove(&id).unwrap()
    }

    /// Asks a node; the answer comes to `answer`.
    pub fn send(&mut self, node: usize, conn: ConnId, request: Request) -> RequestId {
        self.next_request += 1;
        let id = RequestId {
            conn,
            index: self.next_request,
        };
        self.tell(node, Input::Request { id, request });
        id
    }

    /// What was answered.
    pub fn answer(&self, id: RequestId) -> Option<&Reply> {
        self.replies.get(&id)
    }

    /// A connection to a node's daemon.
    pub fn connect(&mut self, node: usize, role: Role) -> ConnId {
        let conn = ConnId(1_000_000 * (node as u64 + 1) + self.next_request);
        let hello = Request::Hello {
            version: LOCAL_VERSION,
            namespace: self.job.clone(),
            token: Vec::new().into(),
            role,
        };
        let reply = self.ask(node, conn, hello);
        assert!(matches!(reply, Reply::Welcome { .. }), "{reply:?}");
        conn
    }

    fn open_run(&mut self) {
        let reader = self.connect(0, Role::Reader);
        let reply = self.ask(0, reader, Request::OpenRun { timeout_ms: 10_000 });
        let Reply::RunOpened { run } = reply else {
            panic!("no run: {reply:?}");
        };
        assert_eq!(run.number(), 1);
        self.run = Some(run);
        (0..self.geometry.k()).for_each(|node| self.attach(node));
    }

    /// A trainer of the job's run connects, also again after its daemon was restarted.
    pub fn attach(&mut self, node: usize) {
        let role = Role::Trainer {
            run: self.run.expect("the job has opened a run"),
            rank: Rank::new(node as u32),
            world_size: WorldSize::new(self.geometry.k() as u32).unwrap(),
        };
        let conn = self.connect(node, role);
        self.trainers.insert(node, conn);
    }

    /// Another job begins; the one before goes on as it is.
    pub fn begin_job(&mut self, name: &str) {
        self.ask_of(name);
        self.open_run();
    }

    /// What is connected from now on is of this job.
    pub fn ask_of(&mut self, name: &str) {
        self.job = Namespace::new(name).unwrap();
        self.trainers.clear();
        self.step = 0;
    }

    /// The job's trainers go.
    pub fn end_job(&mut self) {
        for (node, conn) in std::mem::take(&mut self.trainers) {
            self.disconnect(node, conn);
        }
    }

    /// A connection ends.
    pub fn disconnect(&mut self, node: usize, conn: ConnId) {
        self.tell(node, Input::Disconnected { conn });
    }

    /// The connection of a node's trainer.
    pub fn trainer(&self, node: usize) -> ConnId {
        self.trainers[&node]
    }

    /// The run that the ranks save for.
    pub fn run(&self) -> RunId {
        self.run.expect("a job has begun")
    }

    /// What a node's memory is used for.
    pub fn ledger(&self, node: usize) -> storaged_core::Ledger {
        self.nodes[node].as_ref().expect("it is up").node.ledger()
    }

    /// Stages a step on every rank and commits it.
    pub fn save(&mut self) {
        self.save_as(DurableWish::Never);
    }

    /// The same, with a wish for the durable tier.
    pub fn save_as(&mut self, durable: DurableWish) {
        self.step += 1;
        let (step, length) = (Step::new(self.step), self.stripes * CHUNK);
        for (node, conn) in self.trainers.clone() {
            let acquire = Request::AcquireSlot {
                bytes: length,
                timeout_ms: 10_000,
            };
            let Reply::SlotGranted { slot, .. } = self.ask(node, conn, acquire) else {
                panic!("no slot");
            };
            let reply = self.ask(node, conn, Request::SealSlot { slot, step, length });
            assert!(matches!(reply, Reply::Done), "{reply:?}");
        }
        let commit = Request::Commit {
            step,
            schema: vec![].into(),
            torch_metadata: vec![].into(),
            durable,
        };
        let conn = self.trainers[&0];
        self.send(0, conn, commit);
    }

    /// Saves a step and waits until all nodes know it to be protected, and to be durable if that was wished.
    pub fn save_and_wait(&mut self, durable: DurableWish) {
        let published = |cluster: &Self| cluster.tier.as_ref().map_or(0, |it| it.manifests.len());
        let before = published(self);
        self.save_as(durable);
        let nodes = self.nodes.len();
        self.run_until(60_000, "protection", |cluster| {
            (0..nodes).all(|node| cluster.is_protected(node))
        });
        if durable == DurableWish::Required {
            self.run_until(60_000, "durability", |cluster| published(cluster) > before);
        }
        self.run_for(1_000);
    }

    /// What a data node's trainer is refused a slot with.
    pub fn refused_slot(&mut self, node: usize, bytes: u64) -> (RefusalCode, String) {
        let acquire = Request::AcquireSlot {
            bytes,
            timeout_ms: 1_000,
        };
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

    fn was(&self, node: usize, wanted: CheckpointState) -> bool {
        self.notes.iter().any(|(_, at, note)| {
            let Note::State { key, state } = note else {
                return false;
            };
            *at == node
                && key.namespace == self.job
                && key.step == Step::new(self.step)
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
        self.sent.clear();
        self.put.clear();
        self.moved.clear();
    }
}

/// Digests of a shard that nobody has ever seen.
fn digests(node: usize, step: u64, length: u64) -> (Arc<[Digest]>, Digest) {
    let chunk = ChunkSize::new(CHUNK as u32).unwrap();
    let leaf = |stripe| digest(format!("{node} {step} {stripe}").as_bytes());
    let leaves: Vec<Digest> = (0..chunk.count(length)).map(leaf).collect();
    let root = root_digest(&leaves, length, chunk);
    (leaves.into(), root)
}
