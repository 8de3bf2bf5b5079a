//! What is simulated: nodes that die, hops that are slow, silent or lie, a lossy network, a durable tier that fails now and
//! then, and the job that lives with all that; or an ordinary month.

mod notes;

use std::collections::BTreeMap;

use storaged_core::{
    DurableFault, DurableForm, DurablePolicy, LinkRates, MessageLimits, Note, RequestId,
    SessionTally, Setup,
};
use storaged_wire::local::Reply;
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{CheckpointState, NodeName, SlotId};

use super::byzantine::Byzantine;
use super::job::Job;
use super::month::{Happening, Month, is_of_month};
use super::slow::Pace;
use crate::testkit::{
    self, Answer, Course, End, Event, Failed, Key, Pacing, Participants, Payload, Pid, Scene, Task,
    encodes, geometry, known_index, missed, name, repairs, silent, stripes,
};

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
    /// A node that says anything to anybody at any time; it holds no rank.
    pub byzantine: Option<usize>,
    /// Shards are so many times as long.
    pub shard_scale: usize,
}

/// What happens beside what happens in all worlds.
#[derive(Debug)]
pub enum Scripted {
    Reply {
        id: RequestId,
        reply: Box<Reply>,
        slot: Option<SlotId>,
    },
    /// Members of a session tell how it goes.
    Progress(Key),
    Job,
    /// A node says what is not so.
    Lie,
    Month(Happening),
}

pub struct Simulation {
    pub limits: Limits,
    pub job: Job,
    /// The newest checkpoint that some node knew to be in a state.
    pub newest: BTreeMap<CheckpointState, CheckpointKey>,
    /// What was the newest protected one before a newer one was found to be, and when that was.
    pub found_protected: Vec<(Option<CheckpointKey>, u64)>,
    pub crashes: u64,
    pub restores: u64,
    /// Wrong frames sent, and how often the liar was named.
    pub lies: u64,
    pub lies_in_encodes: u64,
    pub liar_named: u64,
    /// Encodes whose shape was chosen.
    pub shapes: u64,
    /// Sessions that a slow hop stalled.
    pub stalls: u64,
    /// How sessions go over the links, if one of them is slow.
    pub paces: BTreeMap<Key, Pace>,
    /// Slow nodes that sessions were ended to go around, by node, and reports that were refused.
    pub replans: BTreeMap<usize, u64>,
    pub refused_reports: u64,
    /// What the node that says anything has come to.
    pub byzantine: Byzantine,
    /// An ordinary month instead of the one job that is killed again and again.
    pub month: Option<Box<Month>>,
}

pub type World = testkit::World<Simulation>;

/// A control message over a slow link takes up to so many milliseconds.
const SLOW_MESSAGE_MS: u64 = 300;
/// Any other one.
pub const MESSAGE_MS: u64 = 8;
/// Every byte in RAM is read again within this time.
pub const SCRUB_MS: u64 = 20_000;
/// A slow hop makes a session last this long and up to so much longer, in milliseconds; one in so many such sessions
/// stalls for good.
const SLOW_MS: u64 = 500;
const SLOWER_MS: u64 = 4_000;
const STALL_ONE_IN: u64 = 4;

impl World {
    pub fn new(seed: u64, limits: Limits) -> Self {
        let simulation = Simulation {
            limits,
            job: Job::default(),
            newest: BTreeMap::new(),
            found_protected: Vec::new(),
            crashes: 0,
            restores: 0,
            lies: 0,
            lies_in_encodes: 0,
            liar_named: 0,
            shapes: 0,
            stalls: 0,
            paces: BTreeMap::new(),
            replans: BTreeMap::new(),
            refused_reports: 0,
            byzantine: Byzantine::default(),
            month: None,
        };
        let mut world = Self::of(simulation, limits.nodes, seed);
        world.at(100, Event::Scene(Scripted::Job));
        if limits.byzantine.is_some() {
            world.at(1_000, Event::Scene(Scripted::Lie));
        }
        world
    }

    /// Runs to the end.
    pub fn run(&mut self) {
        self.run_to(self.scene.limits.duration_ms);
    }

    /// The same; what came to pass may be said as one digest (`run_named`).
    pub fn run_as(&mut self, name: &str) {
        self.run_named(name, self.scene.limits.duration_ms);
    }

    /// The last node's link is a tenth of the others'.
    fn link_rates(&self) -> LinkRates {
        let usual = self.scene.limits.link_rate;
        let last = self.scene.limits.nodes - 1;
        let slow = usual.map(|usual| (name(last), usual / 10));
        LinkRates {
            usual,
            unusual: slow.into_iter().collect(),
            ..LinkRates::default()
        }
    }

    pub fn crash(&mut self, node: usize) {
        if !self.is_up(node) {
            return;
        }
        self.scene.crashes += 1;
        self.end_process(node);
        let delay = 3000 + self.random(4000);
        self.start_after(delay, node);
        self.job_lost_node(node);
    }

    fn slow_member(&self, members: &Participants) -> Option<usize> {
        let slow = self.scene.limits.slow?;
        let found = members.iter().find(|(_, it)| it.pid.node == slow);
        found.map(|(member, _)| *member)
    }

    /// Some member blames some other one for being silent.
    fn silence(&mut self, members: &Participants) -> Failed {
        let work = &members.values().next().unwrap().work;
        let count = work.members.len() as u64;
        let (member, other) = (self.random(count) as usize, self.random(count) as usize);
        let fault = silent(work, other, "sent nothing whole");
        Failed { member, fault }
    }
}

impl Scene for Simulation {
    type Event = Scripted;

    const PAYLOAD: Payload = Payload::Bytes;

    fn happens(world: &mut World, event: Scripted) {
        match event {
            Scripted::Reply { id, reply, slot } if is_of_month(id) => {
                world.answered_in_month(id, *reply, slot)
            }
            Scripted::Reply { id, reply, slot } => world.answered(id, *reply, slot),
            Scripted::Progress(key) => world.session_progress(key),
            Scripted::Job if world.scene.month.is_some() => {}
            Scripted::Job => world.advance_job(),
            Scripted::Lie => world.byzantine_speaks(),
            Scripted::Month(happening) => world.happen_in_month(happening),
        }
    }

    fn sets_up(world: &mut World, node: usize, setup: &mut Setup) {
        let limits = world.scene.limits;
        setup.geometry = Some(geometry(limits.k, limits.m));
        setup.slots_per_rank = match limits.durable_form {
            DurableForm::Full => 3,
            DurableForm::Increments => 4,
        };
        setup.budget = 64 << 20;
        setup.scrub_period_ms = SCRUB_MS;
        setup.link_rates = world.link_rates();
        setup.durable = DurablePolicy::Every(limits.durable_every);
        setup.messages = MessageLimits {
            inline: 200,
            spread: 200,
            page: 150,
            table_chunks: 2,
            fan_out: 2,
        };
        setup.durable_form = limits.durable_form;
        if let Some(month) = &world.scene.month {
            month.sets_up(node, setup);
        }
    }

    fn name_of(world: &World, node: usize) -> NodeName {
        name(world.place_of(node))
    }

    fn named(world: &World, by: usize, name: &NodeName) -> Option<usize> {
        world.node_in_place(by, known_index(name)?)
    }

    fn started(world: &mut World, node: usize) {
        match world.scene.month {
            Some(_) => {
                world.links_begin(node);
                world.looks_at_the_registry(node);
            }
            None => world.dial_all(node),
        }
    }

    fn noted(world: &mut World, node: usize, note: Note) {
        world.honest_states_are_true(node, &note);
        if world.scene.limits.byzantine != Some(node) {
            world.judge_note(&note);
        }
    }

    fn replied(world: &mut World, _: Pid, id: RequestId, reply: Reply, slot: Option<SlotId>) {
        if !is_of_month(id) {
            world.replies(id, &reply);
        }
        let reply = Box::new(reply);
        world.after(1, Event::Scene(Scripted::Reply { id, reply, slot }));
    }

    fn effect_takes(world: &mut World) -> u64 {
        1 + world.random(10)
    }

    fn registry_answers(world: &mut World, _: usize) -> Answer {
        world.registry_weather()
    }

    fn dials_after(world: &mut World, _: usize, _: usize) -> u64 {
        20 + world.random(500)
    }

    fn finds_out_after(world: &mut World, from: usize, gone: usize) -> u64 {
        let knows = world.is_linked(from, gone) && world.is_up(from);
        if knows || world.scene.month.is_some() {
            2000 + world.random(500)
        } else {
            0
        }
    }

    fn dial(world: &mut World, from: usize, to: usize) {
        match world.scene.month {
            Some(_) => world.dial_in_month(from, to),
            None => world.dial_once(from, to),
        }
    }

    fn parted(world: &mut World, from: usize, to: usize) {
        if world.scene.month.is_some() {
            world.dial_again(from, to);
        }
    }

    fn way(world: &mut World, from: usize, to: usize, message: &PeerMessage) -> Option<u64> {
        if world.scene.month.is_some() {
            world.promise_of_message(from, message);
            return Some(1 + world.random(MESSAGE_MS));
        }
        world.passes_byzantine(from, to, message);
        let Limits {
            loss_one_in, slow, ..
        } = world.scene.limits;
        let lost = loss_one_in > 0 && world.random(loss_one_in) == 0;
        let lost = lost || world.byzantine_swallows(from, message);
        if lost || !world.is_up(to) || !world.is_linked(from, to) {
            return None;
        }
        let is_slow = slow.is_some_and(|slow| slow == from || slow == to);
        Some(1 + world.random(if is_slow { SLOW_MESSAGE_MS } else { MESSAGE_MS }))
    }

    fn pacing(_: &World) -> Pacing {
        Pacing::AtTheEnd
    }

    fn session_lasts(world: &mut World, key: &Key) -> u64 {
        let slow = world.slow_member(&world.sessions.begun[key].members);
        match (world.pace(key), slow) {
            (Some(takes_ms), _) => takes_ms,
            (None, Some(_)) => SLOW_MS + world.random(SLOWER_MS),
            (None, None) => 5 + world.random(20),
        }
    }

    fn cannot_begin(world: &mut World, members: &Participants) -> Option<Failed> {
        world.unreachable_members(members)
    }

    /// Of repairs one in three, of encodes one in ten breaks off half-way, by somebody's silence; and some stall for good.
    fn session_ends(world: &mut World, _: &Key, members: &Participants) -> End {
        let slow = world.slow_member(members);
        let stripes = stripes(members);
        let one_in = if repairs(members) { 3 } else { 10 };
        let may_break = stripes > 1 && world.scene.limits.liar.is_none();
        let stalls = slow.filter(|_| stripes > 1 && world.random(STALL_ONE_IN) == 0);
        if let Some(slow) = stalls {
            world.scene.stalls += 1;
            End::Breaks(1 + world.random(stripes - 1), missed(members, slow))
        } else if may_break && world.random(one_in) == 0 {
            let silence = world.silence(members);
            End::Breaks(1 + world.random(stripes - 1), silence)
        } else {
            End::Whole
        }
    }

    fn stripes_done(world: &mut World, key: &Key, stripes: u64) -> u64 {
        match world.scene.paces.get(key) {
            Some(pace) => pace.stripes(stripes, world.now),
            None => world.random(stripes.max(1)),
        }
    }

    fn told_after(world: &mut World, ms: u64) -> u64 {
        1 + world.random(ms)
    }

    fn tally(world: &World, key: &Key, members: &Participants, member: usize) -> SessionTally {
        match world.scene.paces.get(key) {
            Some(pace) => world.paced_tally(pace, members, member),
            None => SessionTally {
                bytes: members[&member].work.lane_length,
                elapsed_ms: 5,
                ..SessionTally::default()
            },
        }
    }

    fn sends(world: &mut World, node: usize, members: &Participants, sums: &mut [Vec<u8>]) {
        if world.scene.limits.liar == Some(node) && world.random(2) == 0 {
            sums[0][0] ^= 0x5a;
            world.scene.lies += 1;
            world.scene.lies_in_encodes += u64::from(encodes(members));
        }
    }

    fn tier_course(world: &mut World, _: Pid, task: &Task) -> Course {
        if let Some(course) = world.tier_course_in_month(task) {
            return course;
        }
        let delay = 1 + world.random(10);
        let lasts_ms = match task {
            Task::Upload(_) => {
                let fails = world.random(5) == 0;
                let fault = fails.then(|| DurableFault::Unavailable("made to fail".into()));
                let lasts_ms = 50 + delay;
                return Course::Decided { lasts_ms, fault };
            }
            Task::Publish(_) => delay,
            Task::Fetch(..) => 50 + delay,
            Task::List(..)
            | Task::Claim(..)
            | Task::Record(..)
            | Task::Find(..)
            | Task::Successions(..)
            | Task::Succeed(..) => 20 + delay,
        };
        Course::well(lasts_ms)
    }

    fn tier_fault(world: &mut World, task: &Task) -> Option<DurableFault> {
        world.tier_fault_in_month(task)
    }

    fn listed_until(world: &World) -> u64 {
        world.listed_until_in_month()
    }
}
