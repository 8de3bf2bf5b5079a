//! The world: events in order of time, nodes, network, RAM, durable tier.

mod durable;
mod notes;
mod trace;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::{ChunkSize, Digest, Geometry, fingerprint, leaf_digest, root_digest};
use storaged_core::{
    CheckPart, ClaimedRun, DurableFault, DurableForm, DurableListing, DurablePolicy, Input,
    LinkRates, Node, Note, Now, Output, ParityId, RequestId, RunsWithoutTier, Setup, SlotShard,
    UploadBase,
};
use storaged_plan::Member;
use storaged_wire::local::Reply;
use storaged_wire::peer::{CheckpointKey, PeerMessage, SessionFault};
use storaged_wire::{
    CheckpointState, Generation, ManifestBytes, NodeName, Owner, Rank, RunId, SlotId, Step,
};

use super::executor::{Key, STALL_MS, Sessions};
use super::job::Job;
use super::month::{Happening, Month, is_of_month, is_queued};

pub use notes::digests;

/// What a scenario allows.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub nodes: usize,
    pub k: usize,
    pub m: usize,
    pub ranks: u32,
    /// One control message in this many is lost; 0 for none.
    pub loss_one_in: u64,
    /// Steps that go to the durable tier.
    pub durable_every: u64,
    /// What copies there hold.
    pub durable_form: DurableForm,
    /// Simulated milliseconds.
    pub duration_ms: u64,
    /// A node that sends wrong bytes in every second frame of a repair.
    pub liar: Option<usize>,
    /// A node whose hops take long, and whose control messages do.
    pub slow: Option<usize>,
    /// What all nodes are told of their links.
    pub link_rate: Option<u64>,
    /// A node on a link that is a tenth of the others'; with one, sessions take their time.
    pub slow_link: Option<usize>,
    /// A node that tells nonsense of how sessions go.
    pub fibber: Option<usize>,
    /// Shards are so many times as long.
    pub shard_scale: usize,
}

/// One node's process: its decisions and its RAM. A crash loses all of it.
pub struct Process {
    pub node: Node,
    pub generation: u64,
    pub slots: BTreeMap<SlotId, Vec<u8>>,
    /// The last slots that were dropped: readers and trainers that have them mapped still see them.
    dropped: BTreeMap<SlotId, Vec<u8>>,
    pub parity: BTreeMap<ParityId, Vec<Vec<u8>>>,
    pub started: u64,
    /// How far its clock has jumped ahead.
    pub ahead: u64,
    /// When it wakes by itself, as the driver that sleeps to the deadline does.
    wakes_at: Option<u64>,
}

/// Dropped slots whose memory is kept for whoever has it mapped: more than are dropped while an answer is on its way.
const DROPPED_KEPT: usize = 64;

impl Process {
    fn drop_slot(&mut self, slot: SlotId) {
        self.dropped
            .extend(self.slots.remove(&slot).map(|bytes| (slot, bytes)));
        while self.dropped.len() > DROPPED_KEPT {
            self.dropped.pop_first();
        }
    }

    /// A slot's memory as a process sees it that has its descriptor.
    pub fn mapped(&mut self, slot: SlotId) -> &mut Vec<u8> {
        let there = self.slots.get_mut(&slot);
        there
            .or_else(|| self.dropped.get_mut(&slot))
            .expect("whoever has it mapped got it from here")
    }
}

#[derive(Debug, Clone)]
pub enum Event {
    Input {
        node: usize,
        generation: u64,
        input: Box<Input>,
    },
    Reply {
        id: RequestId,
        reply: Box<Reply>,
        slot: Option<SlotId>,
    },
    Tick {
        node: usize,
        generation: u64,
    },
    Start {
        node: usize,
    },
    Links {
        a: usize,
        b: usize,
    },
    Sessions,
    Progress(Key),
    /// Members that have begun a session have waited for the others for as long as they would.
    Stalled(Key),
    Job,
    Month(Happening),
}

pub struct World {
    pub limits: Limits,
    pub now: u64,
    pub processes: Vec<Option<Process>>,
    pub sessions: Sessions,
    pub job: Job,
    pub durable: BTreeMap<(RunId, Step), Arc<ManifestBytes>>,
    pub durable_shards: BTreeMap<(Digest, Rank), Vec<u8>>,
    /// Runs that were claimed in the durable tier, by number.
    pub claims: BTreeMap<u64, (RunId, Owner)>,
    /// The newest checkpoint that some node knew to be in a state.
    pub newest: BTreeMap<CheckpointState, CheckpointKey>,
    pub crashes: u64,
    pub restores: u64,
    /// Repairs that had less than all of a lane to do, and encodes that had.
    pub resumed: u64,
    /// Parity sets that a session found made in part.
    pub carried: u64,
    pub incremental: u64,
    /// Wrong frames sent, and how often the liar was named.
    pub lies: u64,
    pub lies_in_encodes: u64,
    pub liar_named: u64,
    /// Encodes whose shape was chosen.
    pub shapes: u64,
    /// Sessions that a member's end cut short, and that a slow hop stalled.
    pub cut: u64,
    pub stalls: u64,
    /// Slow nodes that sessions were ended to go around, by node, and reports that were refused.
    pub replans: BTreeMap<usize, u64>,
    pub refused_reports: u64,
    /// Uploads that could be written against a base.
    pub increments: u64,
    events: BTreeMap<(u64, u64), Event>,
    sequence: u64,
    random: u64,
    generation: u64,
    link_free_at: BTreeMap<(usize, usize), u64>,
    pub up: BTreeSet<(usize, usize)>,
    trace: Option<blake3::Hasher>,
    /// Every event and output is printed.
    pub told: bool,
    /// An ordinary month instead of the one job that is killed again and again.
    pub month: Option<Box<Month>>,
}

pub const CHUNK_BYTES: u32 = 4096;

/// A control message over a slow link takes up to so many milliseconds.
const SLOW_MESSAGE_MS: u64 = 300;

pub fn name(node: usize) -> NodeName {
    NodeName::new(format!("n{node}")).unwrap()
}

pub fn index(name: &NodeName) -> usize {
    name.as_str()[1..].parse().unwrap()
}

impl World {
    pub fn new(seed: u64, limits: Limits) -> Self {
        let mut world = Self {
            limits,
            now: 0,
            processes: (0..limits.nodes).map(|_| None).collect(),
            sessions: Sessions::default(),
            job: Job::default(),
            durable: BTreeMap::new(),
            durable_shards: BTreeMap::new(),
            claims: BTreeMap::new(),
            newest: BTreeMap::new(),
            crashes: 0,
            restores: 0,
            resumed: 0,
            carried: 0,
            incremental: 0,
            lies: 0,
            lies_in_encodes: 0,
            liar_named: 0,
            shapes: 0,
            cut: 0,
            stalls: 0,
            replans: BTreeMap::new(),
            refused_reports: 0,
            increments: 0,
            events: BTreeMap::new(),
            sequence: 0,
            random: seed,
            generation: 0,
            link_free_at: BTreeMap::new(),
            up: BTreeSet::new(),
            trace: None,
            told: false,
            month: None,
        };
        for node in 0..limits.nodes {
            world.at(0, Event::Start { node });
        }
        world.at(100, Event::Job);
        world
    }

    /// Runs to the end.
    pub fn run(&mut self) {
        while let Some(((time, _), event)) = self.events.pop_first() {
            if time > self.limits.duration_ms {
                break;
            }
            self.now = time;
            if self.told {
                eprintln!("{time} {event:?}");
            }
            if let Some(trace) = &mut self.trace {
                trace.update(format!("{time} {event:?}\n").as_bytes());
            }
            self.happen(event);
            self.memory_stays_within_the_budget();
        }
    }

    /// A random number below `bound`.
    pub fn random(&mut self, bound: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ (mixed >> 31)) % bound
    }

    pub fn at(&mut self, time: u64, event: Event) {
        self.sequence += 1;
        self.events.insert((time, self.sequence), event);
    }

    pub fn after(&mut self, ms: u64, event: Event) {
        self.at(self.now + ms, event);
    }

    pub fn is_up(&self, node: usize) -> bool {
        self.processes[node].is_some()
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Input {
                node,
                generation,
                input,
            } => self.feed(node, generation, *input),
            Event::Tick { node, generation } => self.tick(node, generation),
            Event::Reply { id, reply, slot } if is_of_month(id) => {
                self.answered_in_month(id, *reply, slot)
            }
            Event::Reply { id, reply, slot } => self.answered(id, *reply, slot),
            Event::Start { node } => self.start(node),
            Event::Links { a, b } => self.link(a, b),
            Event::Sessions => self.advance_sessions(),
            Event::Progress(key) => self.session_progress(key),
            Event::Stalled(key) => self.end_unbegun_session(&key),
            Event::Job if self.month.is_some() => {}
            Event::Job => self.advance_job(),
            Event::Month(happening) => self.happen_in_month(happening),
        }
    }

    fn start(&mut self, node: usize) {
        if self.is_up(node) {
            return;
        }
        self.generation += 1;
        let generation = self.generation;
        let members = (0..self.limits.nodes)
            .map(|other| Member {
                name: name(other),
                failure_domain: format!("n{other}"),
            })
            .collect();
        let mut setup = Setup {
            name: name(node),
            generation: Generation::new(generation),
            members,
            geometry: Some(Geometry::new(self.limits.k, self.limits.m).unwrap()),
            chunk: ChunkSize::new(CHUNK_BYTES).unwrap(),
            slots_per_rank: match self.limits.durable_form {
                DurableForm::Full => 3,
                DurableForm::Increments => 4,
            },
            budget: 64 << 20,
            idle_job_ms: 3_600_000,
            link_rates: self.link_rates(),
            durable: DurablePolicy::Every(self.limits.durable_every),
            messages: storaged_core::MessageLimits {
                inline: 200,
                page: 150,
                table_chunks: 2,
                fan_out: 2,
            },
            runs_without_tier: RunsWithoutTier::Refused,
            durable_form: self.limits.durable_form,
        };
        if let Some(month) = &self.month {
            month.sets_up(node, &mut setup);
        }
        self.processes[node] = Some(Process {
            node: Node::new(setup).unwrap(),
            generation,
            slots: BTreeMap::new(),
            dropped: BTreeMap::new(),
            parity: BTreeMap::new(),
            started: self.now,
            ahead: 0,
            wakes_at: None,
        });
        self.feed(node, generation, Input::Tick);
        if self.month.is_some() {
            return self.links_begin(node);
        }
        for other in (0..self.limits.nodes).filter(|other| *other != node) {
            for (a, b) in [(node, other), (other, node)] {
                let delay = 20 + self.random(500);
                self.after(delay, Event::Links { a, b });
            }
        }
    }

    /// The last node's link is a tenth of the others'.
    fn link_rates(&self) -> LinkRates {
        let usual = self.limits.link_rate;
        let slow = usual.map(|usual| (name(self.limits.nodes - 1), usual / 10));
        LinkRates {
            usual,
            unusual: slow.into_iter().collect(),
            ..LinkRates::default()
        }
    }

    /// Node a's link to b comes up, if both live.
    fn link(&mut self, a: usize, b: usize) {
        let (Some(from), Some(to)) = (&self.processes[a], &self.processes[b]) else {
            return;
        };
        let (generation, input) = (
            from.generation,
            Input::PeerUp {
                node: name(b),
                generation: Generation::new(to.generation),
            },
        );
        if self.up.insert((a, b)) {
            self.feed(a, generation, input);
        }
    }

    pub fn crash(&mut self, node: usize) {
        if !self.is_up(node) {
            return;
        }
        self.lose_sessions(node);
        self.processes[node] = None;
        self.crashes += 1;
        for other in 0..self.limits.nodes {
            self.up.remove(&(node, other));
            if self.up.remove(&(other, node))
                && let Some(process) = &self.processes[other]
            {
                let generation = process.generation;
                let input = Box::new(Input::PeerDown { node: name(node) });
                let delay = 2000 + self.random(500);
                self.after(
                    delay,
                    Event::Input {
                        node: other,
                        generation,
                        input,
                    },
                );
            }
        }
        let delay = 3000 + self.random(4000);
        self.after(delay, Event::Start { node });
        self.job_lost_node(node);
    }

    pub fn feed(&mut self, node: usize, generation: u64, input: Input) {
        if is_queued(self, node, generation, &input) {
            return;
        }
        let Some(process) = &mut self.processes[node] else {
            return;
        };
        if process.generation != generation {
            return;
        }
        let local = Now(self.now - process.started + process.ahead);
        let outputs = process.node.handle(local, input);
        let due = process.node.deadline().0.min(local.0 + 3_600_000);
        let deadline = (process.started + due).saturating_sub(process.ahead);
        let wakes_at = deadline.max(self.now + 1);
        let is_set = process.wakes_at == Some(wakes_at);
        process.wakes_at = Some(wakes_at);
        for output in outputs {
            if self.told {
                eprintln!("{} n{node} {output:?}", self.now);
            }
            self.perform(node, generation, output);
        }
        if !is_set {
            self.at(wakes_at, Event::Tick { node, generation });
        }
    }

    /// Only the newest deadline counts.
    fn tick(&mut self, node: usize, generation: u64) {
        let now = self.now;
        let process = self.processes[node].as_mut();
        let due = process.filter(|it| it.generation == generation && it.wakes_at == Some(now));
        if let Some(process) = due {
            process.wakes_at = None;
            self.feed(node, generation, Input::Tick);
        }
    }

    fn back(&mut self, node: usize, generation: u64, ms: u64, input: Input) {
        self.after(
            ms,
            Event::Input {
                node,
                generation,
                input: Box::new(input),
            },
        );
    }

    fn perform(&mut self, node: usize, generation: u64, output: Output) {
        let Some(output) = self.tier_performs(node, generation, output) else {
            return;
        };
        let delay = 1 + self.random(10);
        let Some(output) = self.perform_runs(node, (generation, delay), output) else {
            return;
        };
        let Some(output) = self.perform_copies(node, (generation, delay), output) else {
            return;
        };
        let Some(output) = self.perform_reads(node, (generation, delay), output) else {
            return;
        };
        match output {
            Output::Reply {
                id,
                reply,
                descriptor,
            } => {
                self.after(
                    1,
                    Event::Reply {
                        id,
                        reply: Box::new(reply),
                        slot: descriptor,
                    },
                );
            }
            Output::Send { to, message } => self.send(node, index(&to), message),
            Output::CreateSlot { slot, bytes } => {
                let process = self.processes[node].as_mut().unwrap();
                process.slots.insert(slot, vec![0; bytes as usize]);
                self.back(node, generation, delay, Input::SlotCreated { slot });
            }
            Output::DropSlot { slot } => self.ram(node).drop_slot(slot),
            Output::DropParity { set } => drop(self.ram(node).parity.remove(&set)),
            Output::Digest { slot, length, .. } => {
                let bytes = &self.ram(node).slots[&slot][..length as usize];
                let (leaves, root) = digests(bytes);
                let prints = bytes.chunks(CHUNK_BYTES as usize).map(fingerprint);
                let input = Input::Digested {
                    slot,
                    leaves,
                    prints: prints.collect(),
                    root,
                };
                self.back(node, generation, delay, input);
            }
            Output::Run(work) => {
                let key = (work.leader.clone(), work.session);
                self.after(STALL_MS, Event::Stalled(key));
                self.sessions.begin(node, generation, work);
                self.after(delay, Event::Sessions);
            }
            Output::Stop { leader, session } => {
                if let Some(kept) = self.stop_session(node, &leader, session) {
                    let input = Input::SessionEnded {
                        leader,
                        session,
                        outcome: Err(SessionFault::Aborted),
                        kept,
                    };
                    self.back(node, generation, delay, input);
                }
            }
            Output::Check { query, parts } => {
                let outcomes = parts.iter().map(|part| self.check(node, part)).collect();
                self.back(node, generation, delay, Input::Checked { query, outcomes });
            }
            Output::Curate { .. } => panic!("nobody asks for it"),
            Output::Note(note) => self.noted(&note),
            other => panic!("{other:?} is performed above"),
        }
    }

    pub fn ram(&mut self, node: usize) -> &mut Process {
        self.processes[node].as_mut().unwrap()
    }

    /// The control stream keeps order; what is on it when a side crashes is lost.
    fn send(&mut self, from: usize, to: usize, message: PeerMessage) {
        if self.month.is_some() {
            return self.send_in_month(from, to, message);
        }
        let lost = self.limits.loss_one_in > 0 && self.random(self.limits.loss_one_in) == 0;
        let Some(process) = &self.processes[to] else {
            return;
        };
        let generation = process.generation;
        if lost || !self.up.contains(&(from, to)) {
            return;
        }
        let is_slow = self
            .limits
            .slow
            .is_some_and(|slow| slow == from || slow == to);
        let delay = 1 + self.random(if is_slow { SLOW_MESSAGE_MS } else { 8 });
        let free = self.link_free_at.get(&(from, to)).copied().unwrap_or(0);
        let time = (self.now + delay).max(free);
        self.link_free_at.insert((from, to), time);
        let input = Box::new(Input::Message {
            from: name(from),
            message,
        });
        self.at(
            time,
            Event::Input {
                node: to,
                generation,
                input,
            },
        );
    }

    fn memory_stays_within_the_budget(&self) {
        for process in self.processes.iter().flatten() {
            let ledger = process.node.ledger();
            assert!(
                ledger.used <= ledger.total,
                "memory stays within the budget: {ledger:?}"
            );
        }
    }
}
