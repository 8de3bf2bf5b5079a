//! The world: events in order of time, the processes of the nodes, and what they hear. Everything follows from the scene and
//! one seed.

use std::collections::BTreeMap;

use storaged_core::{Input, Ledger, Node, Note, Now, RequestId, ScrubPiece};
use storaged_wire::Generation;
use storaged_wire::local::Reply;
use storaged_wire::peer::PeerMessage;

use super::names::members;
use super::network::Links;
use super::process::{Pid, Process};
use super::queue::{Queue, Random};
use super::run_registry::{Asked, RunRegistry};
use super::scene::Scene;
use super::sessions::{Key, Sessions};
use super::setup::{NEVER_IDLE_MS, setup};
use super::tier::{Tier, Work};

/// One input may lead to so many outputs: everything that is known, told to everybody, several times over.
const OUTPUTS_MAX: usize = 20_000;

#[derive(Debug)]
pub enum Event<E> {
    Input(Pid, Box<Input>),
    Tick(Pid),
    Start(usize),
    /// A connection is tried.
    Dial(usize, usize),
    /// A node gives its connection of that number up.
    Down(usize, usize, u64),
    /// A control message arrives.
    Deliver(usize, usize, u64, Box<PeerMessage>),
    Sessions,
    Stripe(Key),
    /// Members that have begun a session have waited for the others for as long as they would.
    Stalled(Key),
    Tier(Box<Work>),
    /// The registry takes a request; its answer takes so much longer.
    Registry(Pid, Asked, u64),
    Scene(E),
}

pub struct World<S: Scene> {
    pub scene: S,
    pub now: u64,
    pub processes: Vec<Option<Process>>,
    pub links: Links,
    pub sessions: Sessions,
    pub tier: Tier,
    pub run_registry: RunRegistry,
    /// What nodes told, with the time.
    pub notes: Vec<(u64, usize, Note)>,
    /// Answers that nobody has taken.
    pub replies: BTreeMap<RequestId, Reply>,
    /// What processes have left that ended and whose RAM outlives them.
    left: BTreeMap<usize, Process>,
    /// What has come for nodes that are paused.
    paused: BTreeMap<usize, Vec<(Pid, Input)>>,
    /// Requests and connections, by which they are numbered.
    pub(super) asked: u64,
    /// What each node has read again.
    pub scrubbed: BTreeMap<usize, Vec<ScrubPiece>>,
    /// Shards without bytes that were digested.
    pub(super) digested: u64,
    pub(super) queue: Queue<Event<S::Event>>,
    random: Random,
    /// Processes that were started.
    started: u64,
    pub(super) trace: Option<blake3::Hasher>,
    /// Every event and output is printed.
    pub told: bool,
}

impl<S: Scene> World<S> {
    /// Nodes that all start at once.
    pub fn of(scene: S, nodes: usize, seed: u64) -> Self {
        let mut world = Self {
            scene,
            now: 0,
            processes: (0..nodes).map(|_| None).collect(),
            links: Links::new(),
            sessions: Sessions::default(),
            tier: Tier::default(),
            run_registry: RunRegistry::default(),
            notes: Vec::new(),
            replies: BTreeMap::new(),
            left: BTreeMap::new(),
            paused: BTreeMap::new(),
            asked: 0,
            scrubbed: BTreeMap::new(),
            digested: 0,
            queue: Queue::default(),
            random: Random(seed),
            started: 0,
            trace: None,
            told: false,
        };
        (0..nodes).for_each(|node| world.start_after(0, node));
        world
    }

    /// A random number below `bound`.
    pub fn random(&mut self, bound: u64) -> u64 {
        self.random.below(bound)
    }

    pub fn at(&mut self, time: u64, event: Event<S::Event>) {
        self.queue.plan(time.max(self.now), event);
    }

    pub fn after(&mut self, ms: u64, event: Event<S::Event>) {
        self.at(self.now + ms, event);
    }

    /// How many events are to come.
    pub fn planned(&self) -> usize {
        self.queue.len()
    }

    /// Such events happen so much later.
    pub fn postpone(&mut self, ms: u64, is_late: impl Fn(&Event<S::Event>) -> bool) {
        self.queue.postpone(ms, is_late);
    }

    /// The next event happens; false if there is none.
    pub fn step(&mut self) -> bool {
        let Some((time, event)) = self.queue.pop() else {
            return false;
        };
        self.now = self.now.max(time);
        if self.told {
            eprintln!("{time} {event:?}");
        }
        match event {
            Event::Input(pid, input) => self.feed(pid, *input),
            Event::Tick(pid) => self.tick(pid),
            Event::Start(node) => self.start_process(node),
            Event::Dial(from, to) => S::dial(self, from, to),
            Event::Down(from, to, number) => self.link_down(from, to, number),
            Event::Deliver(from, to, number, message) => self.deliver(from, to, number, *message),
            Event::Sessions => self.advance_sessions(),
            Event::Stripe(key) => self.stripe(&key),
            Event::Stalled(key) => self.end_unbegun_session(&key),
            Event::Registry(pid, asked, ms) => self.registry_takes(pid, asked, ms),
            Event::Tier(work) => self.tier_ends(*work),
            Event::Scene(event) => S::happens(self, event),
        }
        true
    }

    /// Runs to a time.
    pub fn run_to(&mut self, end: u64) {
        while self.queue.next_at().is_some_and(|time| time <= end) {
            self.step();
        }
        self.now = self.now.max(end);
    }

    /// Runs for so many milliseconds.
    pub fn run_for(&mut self, ms: u64) {
        self.run_to(self.now + ms);
    }

    /// Runs until something holds; gives the milliseconds that it took.
    pub fn run_until(&mut self, limit_ms: u64, what: &str, holds: impl Fn(&Self) -> bool) -> u64 {
        let began = self.now;
        while !holds(self) {
            assert!(
                self.now < began + limit_ms && self.step(),
                "{what} within {limit_ms} ms: {:?}",
                self.notes
            );
        }
        self.now - began
    }

    pub fn is_up(&self, node: usize) -> bool {
        self.processes[node].is_some()
    }

    /// Whether a node is up and handles what comes.
    pub fn is_awake(&self, node: usize) -> bool {
        self.is_up(node) && !self.is_paused(node)
    }

    pub fn is_paused(&self, node: usize) -> bool {
        self.paused.contains_key(&node)
    }

    /// What runs on a node.
    pub fn pid(&self, node: usize) -> Option<Pid> {
        let process = self.processes[node].as_ref();
        let generation = process.map(|process| process.generation);
        generation.map(|generation| Pid { node, generation })
    }

    pub fn lives(&self, pid: Pid) -> bool {
        self.pid(pid.node) == Some(pid)
    }

    /// A process that is up.
    pub fn ram(&mut self, node: usize) -> &mut Process {
        self.processes[node].as_mut().expect("it is up")
    }

    /// What a node's memory is used for.
    pub fn ledger(&self, node: usize) -> Ledger {
        self.processes[node]
            .as_ref()
            .expect("it is up")
            .node
            .ledger()
    }

    pub fn start_after(&mut self, ms: u64, node: usize) {
        self.after(ms, Event::Start(node));
    }

    /// A process starts with nothing in its RAM but what an earlier one has left there.
    pub fn start_process(&mut self, node: usize) {
        if self.is_up(node) {
            return;
        }
        self.started += 1;
        let generation = S::generation(self, self.started);
        let mut setup = setup(S::name_of(self, node), members(self.processes.len()));
        setup.generation = Generation::new(generation);
        S::sets_up(self, node, &mut setup);
        let decisions = Node::new(setup).unwrap();
        let mut process = Process::new(decisions, generation, self.now);
        let left = self.left.remove(&node);
        let records = left.map(|left| process.inherit(left));
        self.processes[node] = Some(process);
        // Without a journal the driver says nothing of it.
        if let Some(records) = records.filter(|records| !records.is_empty()) {
            self.tell(node, Input::Recovered { records });
        }
        self.tell(node, Input::Tick);
        S::started(self, node);
    }

    /// kill -9: what the process held is gone, and the others find out.
    pub fn end_process(&mut self, node: usize) {
        self.lose_sessions(node);
        self.processes[node] = None;
        self.paused.remove(&node);
        self.links_lose(node);
    }

    /// kill -9 of the daemon alone: its RAM is kept for the next one.
    pub fn end_daemon(&mut self, node: usize) {
        // What its sessions have made by now is in its memory.
        self.lose_sessions(node);
        let left = self.processes[node].take();
        self.end_process(node);
        self.left.extend(left.map(|left| (node, left)));
    }

    /// Whether a daemon has ended and the next one has not started.
    pub fn is_left_by_any(&self) -> bool {
        !self.left.is_empty()
    }

    /// What a daemon that has ended left.
    pub fn left_by(&mut self, node: usize) -> &mut Process {
        self.left
            .get_mut(&node)
            .expect("its daemon alone has ended")
    }

    /// A process handles nothing until it is resumed; what comes for it waits.
    pub fn stop_process(&mut self, node: usize) {
        self.paused.insert(node, Vec::new());
    }

    pub fn continue_process(&mut self, node: usize) {
        for (pid, input) in self.paused.remove(&node).unwrap_or_default() {
            self.feed(pid, input);
        }
        self.tell(node, Input::Tick);
    }

    /// Whatever runs on a node hears something.
    pub fn tell(&mut self, node: usize, input: Input) {
        if let Some(pid) = self.pid(node) {
            self.feed(pid, input);
        }
    }

    /// A process will hear something.
    pub fn back(&mut self, pid: Pid, ms: u64, input: Input) {
        S::will_hear(self, pid, &input);
        self.after(ms, Event::Input(pid, Box::new(input)));
    }

    /// A process handles an input, and what it wants is done.
    pub fn feed(&mut self, pid: Pid, input: Input) {
        if let Some(waiting) = self.paused.get_mut(&pid.node) {
            return waiting.push((pid, input));
        }
        if !self.lives(pid) {
            return;
        }
        self.sessions.hears(pid, &input);
        let now = self.now;
        let Some(process) = &mut self.processes[pid.node] else {
            return;
        };
        if let Some(trace) = &mut self.trace {
            trace.update(format!("{now} n{} {input:?}\n", pid.node).as_bytes());
        }
        let local = Now(now - process.started + process.ahead);
        let outputs = process.node.handle(local, input);
        assert!(
            outputs.len() <= OUTPUTS_MAX,
            "{} outputs of one input",
            outputs.len()
        );
        let ledger = process.node.ledger();
        assert!(
            ledger.used <= ledger.total,
            "memory stays within the budget: {ledger:?}"
        );
        let due = process.node.deadline().0.min(local.0 + NEVER_IDLE_MS);
        let deadline = (process.started + due).saturating_sub(process.ahead);
        let wakes_at = deadline.max(now + 1);
        let is_set = process.wakes_at == Some(wakes_at);
        process.wakes_at = Some(wakes_at);
        for output in outputs {
            if self.told {
                eprintln!("{now} n{} {output:?}", pid.node);
            }
            if let Some(trace) = &mut self.trace {
                trace.update(format!("{output:?}\n").as_bytes());
            }
            self.perform(pid, output);
        }
        if !is_set {
            self.at(wakes_at, Event::Tick(pid));
        }
    }

    /// Only the newest deadline counts.
    fn tick(&mut self, pid: Pid) {
        let now = self.now;
        let process = self.processes[pid.node].as_mut();
        let due = process.filter(|it| {
            it.generation == pid.generation && it.wakes_at.is_some_and(|at| at <= now)
        });
        if let Some(process) = due {
            process.wakes_at = None;
            self.feed(pid, Input::Tick);
        }
    }
}
