//! The scene that the fuzzer's moves are played in: a cluster with honest trainers, and weather in which nothing goes as it should.

use std::collections::{BTreeMap, VecDeque};

use storaged_core::{
    ConnId, Curation, CurationFault, DurableFault, Input, Note, Removed, RequestId, SessionTally,
    Setup, Viewer,
};
use storaged_plan::Member;
use storaged_wire::local::{Reply, Request, Role};
use storaged_wire::peer::{CheckpointKey, LinkTally, PeerMessage, SessionFault};
use storaged_wire::{NodeName, SlotId, TenantName};

use super::jobs::Job;
use super::oracle::Oracle;
use super::shape::Shape;
use crate::testkit::{
    Answer, Course, End, Event, Failed, Key, Pacing, Participants, Payload, Pid, Scene, Task,
    World, name, silent,
};
use crate::twist::{Seen, Twist};

/// What came by last, so many of each kind, to come again.
const KEPT: usize = 64;
/// While so much is to come no more messages are carried.
const PLANNED_MAX: usize = 3_000;

/// How the durable tier, the registry and sessions behave until a move says otherwise.
#[derive(Debug, Clone, Copy, Default)]
pub struct Weather {
    pub tier: TierWeather,
    pub registry: u8,
    /// Sessions that break, and after how many stripes; none if they go well.
    pub breaks: Option<Twist>,
    /// What members say of their links.
    pub tally: Option<Twist>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TierWeather {
    #[default]
    Well,
    Slow,
    Fails(u8),
    Hangs,
    /// It lists what it had when this began.
    Stale(u64),
}

/// What was sent and asked, to come again.
#[derive(Debug, Default)]
pub struct Past {
    pub messages: Vec<(usize, NodeName, PeerMessage)>,
    pub requests: Vec<(usize, ConnId, Request)>,
    pub answers: Vec<(usize, Input)>,
    pub seen: Seen,
}

/// The state of a cluster under attack.
pub struct Hostile {
    pub shape: Shape,
    pub members: Vec<Member>,
    pub epoch: u64,
    pub jobs: Vec<Job>,
    /// Connections that are open: to which node, and through whose socket.
    pub clients: BTreeMap<ConnId, (usize, Viewer)>,
    /// What clients will ask once they are answered.
    queued: BTreeMap<ConnId, VecDeque<(RequestId, Request)>>,
    pub past: Past,
    pub oracle: Oracle,
    pub weather: Weather,
}

/// A cluster under attack.
pub type Cluster = World<Hostile>;

pub fn remember<T>(all: &mut Vec<T>, one: T) {
    if all.len() >= KEPT {
        all.remove(0);
    }
    all.push(one);
}

/// The faults of a tier.
pub fn tier_fault(which: u8) -> DurableFault {
    let text = "made to fail".to_owned();
    let faults: [fn(String) -> DurableFault; 13] = [
        DurableFault::Unavailable,
        DurableFault::TimedOut,
        DurableFault::Denied,
        DurableFault::NotMounted,
        DurableFault::Full,
        DurableFault::Misconfigured,
        DurableFault::Damaged,
        DurableFault::NotPlain,
        DurableFault::Unproven,
        DurableFault::Conflict,
        DurableFault::Local,
        DurableFault::DamagedUnmarked,
        |text| DurableFault::ShardMissing {
            rank: storaged_wire::Rank::new(0),
            text,
        },
    ];
    faults[usize::from(which) % faults.len()](text)
}

/// Faults that a member of a session may have; `other` is a neighbour.
pub fn session_fault(which: u8, other: NodeName) -> SessionFault {
    let text = || "made to fail".to_owned();
    match which % 8 {
        0 => SessionFault::Neighbour {
            node: other,
            reason: text(),
        },
        1 => SessionFault::NoBasis,
        2 => SessionFault::Corrupt("chunk 0".into()),
        3 => SessionFault::WrongResult(text()),
        4 => SessionFault::WrongBytes {
            node: other,
            reason: text(),
        },
        5 => SessionFault::Unproven {
            node: other,
            reason: text(),
        },
        6 => SessionFault::Aborted,
        _ => SessionFault::Corrupt(text()),
    }
}

impl Scene for Hostile {
    type Event = ();

    const PAYLOAD: Payload = Payload::Digests;

    fn happens(_: &mut Cluster, (): ()) {}

    fn sets_up(world: &mut Cluster, node: usize, setup: &mut Setup) {
        world.scene.shape.set_up(setup);
        setup.members = world.scene.members.clone();
        setup.epoch = world.scene.epoch;
        let own = name(node);
        if setup.members.iter().all(|member| member.name != own) {
            // A machine without a place waits for one; here it has one again that nobody else knows of.
            setup
                .members
                .push(crate::testkit::members(node + 1).remove(node));
        }
    }

    fn will_hear(world: &mut Cluster, pid: Pid, input: &Input) {
        let is_of_tier = matches!(
            input,
            Input::DurableListed { .. }
                | Input::RunClaimed { .. }
                | Input::RunFound { .. }
                | Input::RunRecorded { .. }
                | Input::RunRegistered { .. }
                | Input::Fetched { .. }
                | Input::Uploaded { .. }
                | Input::Published { .. }
        );
        if is_of_tier {
            remember(&mut world.scene.past.answers, (pid.node, input.clone()));
        }
    }

    fn noted(_: &mut Cluster, _: usize, _: Note) {}

    fn replied(world: &mut Cluster, pid: Pid, id: RequestId, reply: Reply, _: Option<SlotId>) {
        let open = world.scene.oracle.replies(pid, id, &reply);
        if let Some(open) = open {
            world.answered(id, &open.request, reply);
        }
        world.ask_next(id.conn);
    }

    fn dials_after(_: &mut Cluster, _: usize, _: usize) -> u64 {
        2
    }

    fn finds_out_after(_: &mut Cluster, _: usize, _: usize) -> u64 {
        500
    }

    fn way(world: &mut Cluster, from: usize, to: usize, message: &PeerMessage) -> Option<u64> {
        let bytes = world.scene.oracle.sends(message);
        world.scene.past.seen.note(&bytes);
        let sent = (to, name(from), message.clone());
        remember(&mut world.scene.past.messages, sent);
        (world.planned() < PLANNED_MAX).then_some(1)
    }

    fn pacing(world: &Cluster) -> Pacing {
        world.scene.shape.pacing()
    }

    fn session_lasts(_: &mut Cluster, _: &Key) -> u64 {
        50
    }

    fn cannot_begin(world: &mut Cluster, members: &Participants) -> Option<Failed> {
        let twist = world.scene.weather.breaks.filter(|it| it.how() % 2 == 1)?;
        Some(failure(twist, members))
    }

    fn session_ends(world: &mut Cluster, _: &Key, members: &Participants) -> End {
        match world.scene.weather.breaks {
            Some(twist) => End::Breaks(twist.with() % 4, failure(twist, members)),
            None => End::Whole,
        }
    }

    fn tally(world: &Cluster, _: &Key, members: &Participants, member: usize) -> SessionTally {
        tally(world.scene.weather.tally, members, member)
    }

    fn registry_answers(world: &mut Cluster, _: usize) -> Answer {
        match world.scene.weather.registry % 5 {
            0 | 1 => Answer::After(2),
            2 => Answer::Lost,
            3 => Answer::Fails(2),
            _ => Answer::Away,
        }
    }

    fn curates(world: &mut Cluster, pid: Pid, id: RequestId, curation: Curation) {
        let outcome = match (world.scene.weather.tier, curation) {
            (TierWeather::Fails(which), _) => Err(curation_fault(which)),
            (_, Curation::Keep { .. }) => Ok(Removed::default()),
            _ => Ok(Removed {
                checkpoints: 1,
                objects: 3,
            }),
        };
        let input = Box::new(Input::Curated { id, outcome });
        world.after(5, Event::Input(pid, input));
    }

    fn tier_course(world: &mut Cluster, _: Pid, _: &Task) -> Course {
        match world.scene.weather.tier {
            TierWeather::Well | TierWeather::Stale(_) => Course::well(2),
            TierWeather::Slow => Course::Open { lasts_ms: 3_000 },
            TierWeather::Fails(which) => Course::fails(2, tier_fault(which)),
            TierWeather::Hangs => Course::Hangs,
        }
    }

    /// A node that is lied to publishes anything.
    fn publishes(_: &mut Cluster, _: &CheckpointKey, _: usize) {}

    fn listed_until(world: &Cluster) -> u64 {
        match world.scene.weather.tier {
            TierWeather::Stale(since) => since,
            _ => world.now,
        }
    }
}

fn curation_fault(which: u8) -> CurationFault {
    let text = || "made to fail".to_owned();
    match which % 6 {
        0 => CurationFault::Durable(tier_fault(which)),
        1 => CurationFault::WrongOwner,
        2 => CurationFault::NoSuch(text()),
        3 => CurationFault::Needed(text()),
        4 => CurationFault::Pinned(text()),
        _ => CurationFault::Live(text()),
    }
}

fn failure(twist: Twist, members: &Participants) -> Failed {
    let all: Vec<usize> = members.keys().copied().collect();
    let member = all[twist.pick(all.len())];
    let work = &members[&member].work;
    let other = twist.choose(work.members.len());
    let fault = match twist.how() % 4 {
        0 => silent(work, other, "sent nothing in time"),
        _ => session_fault(twist.how() / 4, work.members[other].clone()),
    };
    Failed { member, fault }
}

/// What a member says that it saw of its links.
pub fn tally(twist: Option<Twist>, members: &Participants, member: usize) -> SessionTally {
    let work = &members[&member].work;
    let mut tally = SessionTally {
        bytes: work.lane_length,
        elapsed_ms: 5,
        stripes: work.turns().count() as u64,
        links: Vec::new(),
    };
    let Some(twist) = twist else { return tally };
    tally.elapsed_ms = 1_000 + 10 * twist.with();
    tally.stripes = tally.stripes.min(twist.at() % 8);
    let others = work.members.iter().enumerate();
    let links = others.filter(|(at, _)| *at != member).map(|(at, node)| {
        let is_slow = at == twist.pick(work.members.len());
        let share = if is_slow {
            9
        } else {
            1 + u64::from(twist.how() % 8)
        };
        LinkTally {
            node: node.clone(),
            bytes: twist.at() * 100 + 1_000,
            waiting_ms: tally.elapsed_ms * share / 10,
        }
    });
    tally.links = links.collect();
    if twist.how() == u8::MAX {
        tally.elapsed_ms = twist.number();
    }
    tally
}

impl Cluster {
    pub fn begin(shape: Shape) -> Self {
        let members = crate::testkit::members(shape.nodes());
        let hostile = Hostile {
            shape,
            members,
            epoch: 1,
            jobs: Job::all(shape),
            clients: BTreeMap::new(),
            queued: BTreeMap::new(),
            past: Past::default(),
            oracle: Oracle::default(),
            weather: Weather::default(),
        };
        let mut cluster = Self::of(hostile, shape.nodes(), 0);
        cluster.told = std::env::var_os("STORAGED_SIM_TELL").is_some();
        cluster.run_for(10);
        cluster
    }

    /// A connection through the socket of a tenant, or the operator's.
    pub fn open(&mut self, node: usize, viewer: Viewer) -> ConnId {
        let conn = self.fresh_conn();
        self.scene.clients.insert(conn, (node, viewer.clone()));
        self.tell(node, Input::Connected { conn, viewer });
        conn
    }

    /// A connection of a job's client.
    pub fn connect_as(&mut self, node: usize, job: usize, role: Role) -> ConnId {
        let namespace = self.scene.jobs[job].namespace.clone();
        let tenant = namespace.tenant().and_then(|it| TenantName::new(it).ok());
        let conn = self.open(node, Viewer::Tenant(tenant));
        self.request(conn, crate::testkit::hello(namespace, role));
        conn
    }

    /// Asks a node on a connection to it, when what was asked there before is answered, as daemons read requests; nothing if that
    /// is closed or the node is down.
    pub fn request(&mut self, conn: ConnId, request: Request) -> Option<RequestId> {
        let (node, _) = self.scene.clients.get(&conn)?;
        let node = *node;
        self.pid(node)?;
        let id = self.request_on(conn);
        let asked = (node, conn, request.clone());
        remember(&mut self.scene.past.requests, asked);
        if self.scene.oracle.waits(conn) {
            self.scene
                .queued
                .entry(conn)
                .or_default()
                .push_back((id, request));
        } else {
            self.ask_now(id, request);
        }
        Some(id)
    }

    fn ask_now(&mut self, id: RequestId, request: Request) {
        let Some((node, viewer)) = self.scene.clients.get(&id.conn).cloned() else {
            return;
        };
        let Some(pid) = self.pid(node) else { return };
        // What a driver answers, and not the node, is awaited from nobody here.
        if !matches!(request, Request::Drain(_)) {
            let heard_at = (!self.is_paused(node)).then_some(self.now + 1);
            self.scene.oracle.asks(id, pid, heard_at, viewer, &request);
        }
        let input = Box::new(Input::Request { id, request });
        self.after(1, Event::Input(pid, input));
    }

    /// The next request of a connection is read.
    fn ask_next(&mut self, conn: ConnId) {
        while !self.scene.oracle.waits(conn) {
            let queued = self.scene.queued.get_mut(&conn);
            let Some((id, request)) = queued.and_then(VecDeque::pop_front) else {
                return;
            };
            self.ask_now(id, request);
        }
    }

    pub fn hang_up(&mut self, conn: ConnId) {
        if let Some((node, _)) = self.scene.clients.remove(&conn) {
            self.scene.oracle.closes(conn);
            self.scene.queued.remove(&conn);
            self.tell(node, Input::Disconnected { conn });
        }
    }

    /// A node's process has ended, and with it what it was asked.
    pub fn forget_clients_of(&mut self, node: usize) {
        self.scene.oracle.ends(node);
        self.scene.clients.retain(|_, (at, _)| *at != node);
        for job in &mut self.scene.jobs {
            job.forget_node(node);
        }
    }
}
