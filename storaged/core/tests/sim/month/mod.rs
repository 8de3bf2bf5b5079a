//! An ordinary month: what happens in any cluster, mostly without a node lost. Links go down, processes pause, clocks
//! jump, nodes restart in turn, the durable tier is slow or gone, two jobs share the nodes and two incarnations of one
//! job meet, trainers hang, skip and lie. Faults stop at some time; then what must go on goes on (`invariants`), and
//! once the jobs have ended nothing is left without an owner.
//!
//! `faults` strikes, `holders` loses what is held for daemons, `places` changes the cluster's places and `cordons` who is expected to fail, which `registry` agrees on, `rot` changes bytes, `links` cuts and dials, `tier` is the weather of the durable tier, `jobs`, `trainers` and `asks` are the training
//! jobs, `promises`, `blocks`, `kept` and `pins` say what must never happen, `invariants` what must happen in time.

mod asks;
mod blocks;
mod commits;
mod cordons;
mod early;
mod failures;
mod faults;
mod holders;
mod invariants;
mod jobs;
mod kept;
mod links;
mod pins;
mod places;
mod promises;
mod registry;
mod rot;
mod tier;
mod trainers;

use std::collections::{BTreeMap, BTreeSet};

use storaged_codec::{ChunkSize, Geometry};
use storaged_core::{DurableForm, DurablePolicy, RunAuthority, Setup};

use super::world::{Limits, Scripted, World};
use crate::testkit::{CHUNK_BYTES, Event};

pub use asks::is_of_month;
pub use commits::Commits;
pub use holders::{Departure, HeldMemory};
pub use jobs::Jobs;
pub use places::PlaceEvent;
pub use promises::Promises;
pub use registry::{Registry, RegistryKind};
pub use rot::Rotten;
pub use tier::{TierKind, Weather};

/// When faults stop, when what they did must be over, when the jobs end, and when all ends; milliseconds.
pub const FAULTS_END_MS: u64 = 60_000;
pub const SETTLED_MS: u64 = FAULTS_END_MS + 25_000;
pub const JOBS_END_MS: u64 = SETTLED_MS + 20_000;
pub const END_MS: u64 = JOBS_END_MS + 25_000;

/// Rules whose fix has not landed; `STORAGED_SIM_RULES=1` checks them all the same.
const PENDING_RULES: &[&str] = &[];

/// Whether a rule is checked.
fn is_on(rule: &str) -> bool {
    !PENDING_RULES.contains(&rule) || std::env::var_os("STORAGED_SIM_RULES").is_some()
}

/// How nodes are restarted or lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crashes {
    Never,
    /// Up to m at once, and no more until what they held is healed.
    UpToM,
    /// A node without ranks, once, until faults end.
    OneForLong,
    /// All in turn, with nothing waited for.
    AllInTurn,
    /// All in turn, each once what is shown as protected bears m losses again.
    AllInTurnWaiting,
    /// All at once, now and then: a power cut.
    AllAtOnce,
    /// Any number of daemons at once, whose nodes' memory stays.
    DaemonsAlone,
}

/// Whom the trainers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trainers {
    Honest,
    /// They hang, skip a save, roll back, and stay connected when their job has ended.
    Ill,
    /// They say hello with runs that nobody opened.
    Lying,
    /// After some time they save no more, and wait.
    Quiet,
    /// Each job ends soon, and another one takes its place.
    Brief,
}

/// How the list of the cluster's nodes changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    Never,
    /// Places are filled by other machines.
    Machines,
    /// Places are added and removed.
    Sizes,
    Both,
    /// Nodes are cordoned and uncordoned, as they are in all months whose places change.
    Cordons,
}

/// What one node is configured with otherwise than all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unequal {
    Nothing,
    Chunk,
    Parity,
}

/// One class of months.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scenario {
    pub name: &'static str,
    /// Links go down, one way too.
    pub links: bool,
    pub pauses: bool,
    /// Monotonic clocks jump ahead, generations of restarted nodes go down.
    pub clocks: bool,
    pub crashes: Crashes,
    pub tier: TierKind,
    pub jobs: usize,
    /// Two incarnations of a job at once.
    pub twins: bool,
    /// The cluster's places are filled by other machines, or there are more or fewer of them.
    pub places: Changes,
    pub registry: RegistryKind,
    /// Keepers die: their daemons leave in order, and what they held is gone.
    pub keepers: bool,
    /// What of the memory of daemons that are killed there is for the next ones.
    pub held: HeldMemory,
    /// Chunks in RAM rot.
    pub rot: bool,
    /// Restarts fail, and launchers say so.
    pub failures: bool,
    pub trainers: Trainers,
    /// Bytes of RAM per node, in slots.
    pub budget_slots: u64,
    pub unequal: Unequal,
    /// Protected steps that stay in RAM.
    pub keep_steps: usize,
    /// Jobs pin steps.
    pub pins: bool,
    /// Who says whose a run's number is.
    pub runs: RunAuthority,
}

pub const CALM: Scenario = Scenario {
    name: "calm",
    links: false,
    pauses: false,
    clocks: false,
    crashes: Crashes::Never,
    tier: TierKind::Absent,
    jobs: 1,
    twins: false,
    places: Changes::Never,
    registry: RegistryKind::Well,
    keepers: false,
    held: HeldMemory::Whole,
    rot: false,
    failures: false,
    trainers: Trainers::Honest,
    budget_slots: 64,
    unequal: Unequal::Nothing,
    keep_steps: 1,
    pins: false,
    runs: RunAuthority::Members,
};

impl Scenario {
    /// Whether the budget is no more than what is needed.
    pub fn is_little_room(&self) -> bool {
        self.budget_slots < 16
    }
}

/// What happens in a month.
#[derive(Debug, Clone)]
pub enum Happening {
    /// The jobs go on, faults strike, promises are checked.
    Beat,
    /// A node handles what came while it was paused.
    Resume(usize),
    /// The places of the cluster change.
    Place(PlaceEvent),
}

/// A process that handles nothing for a while.
#[derive(Debug, Default, Clone, Copy)]
pub struct Pause {
    pub began: u64,
    pub until: u64,
}

/// All that a month has beside nodes, RAM and sessions.
pub struct Month {
    pub scenario: Scenario,
    pub pauses: BTreeMap<usize, Pause>,
    /// When each node last went on after a pause or a start.
    pub resumed_at: BTreeMap<usize, u64>,
    /// Nodes that stay down until faults end.
    pub kept_down: BTreeSet<usize>,
    /// Daemons whose keepers have died.
    pub departures: BTreeMap<usize, Departure>,
    /// The next node of a restart in turn, and when.
    pub in_turn: (usize, u64),
    pub weather: Weather,
    pub registry: Registry,
    /// Steps that are to commit.
    pub commits: Commits,
    /// Chunks that have rotted.
    pub rotten: Vec<Rotten>,
    pub jobs: Jobs,
    pub promises: Promises,
    /// How often each fault struck: a scenario that does nothing proves nothing.
    pub struck: BTreeMap<&'static str, u64>,
}

impl World {
    /// A month of a class, on a cluster whose shape and all that happens follow from the seed.
    pub fn of_month(seed: u64, scenario: Scenario) -> Self {
        let limits = shape(seed, scenario);
        let mut world = Self::new(seed ^ 0x0d1a_ce50, limits);
        world.scene.month = Some(Box::new(Month {
            scenario,
            pauses: BTreeMap::new(),
            resumed_at: BTreeMap::new(),
            kept_down: BTreeSet::new(),
            departures: BTreeMap::new(),
            in_turn: (0, 15_000),
            weather: Weather::of(scenario.tier),
            registry: Registry::new(limits.nodes),
            commits: Commits::default(),
            rotten: Vec::new(),
            jobs: Jobs::new(scenario.jobs, limits),
            promises: Promises::default(),
            struck: BTreeMap::new(),
        }));
        world.happens_after(100, Happening::Beat);
        world
    }

    pub fn month(&mut self) -> &mut Month {
        self.scene.month.as_deref_mut().expect("it is a month")
    }

    pub fn happens_after(&mut self, ms: u64, happening: Happening) {
        self.after(ms, Event::Scene(Scripted::Month(happening)));
    }

    pub fn happen_in_month(&mut self, happening: Happening) {
        match happening {
            Happening::Beat => self.beat(),
            Happening::Resume(node) => self.resume(node),
            Happening::Place(event) => self.place_event(event),
        }
    }

    fn beat(&mut self) {
        self.happens_after(50, Happening::Beat);
        self.strike_in_month();
        self.departures_go_on();
        self.advance_jobs();
        self.ask_for_kept_steps();
        self.jobs_pin();
        if self.now % 250 < 50 {
            self.keep_promises();
        }
        self.requests_are_answered_in_time();
        self.steps_commit();
    }

    /// Whether faults have ended and their effects had their time.
    pub(super) fn is_settled(&self) -> bool {
        (SETTLED_MS..JOBS_END_MS).contains(&self.now)
    }

    /// Whether at most the durable tier is not well, and never anything else: that is no excuse for what RAM can do.
    pub(super) fn is_undisturbed(&mut self) -> bool {
        let scenario = self.month().scenario;
        let Scenario {
            name,
            tier,
            keep_steps,
            pins,
            ..
        } = scenario;
        let calm = Scenario {
            name,
            tier,
            keep_steps,
            pins,
            ..CALM
        };
        scenario == calm
    }

    pub(super) fn struck(&mut self, what: &'static str) {
        *self.month().struck.entry(what).or_default() += 1;
    }
}

fn shape(seed: u64, scenario: Scenario) -> Limits {
    let shapes = match scenario.places {
        Changes::Never | Changes::Machines => [(4, 2, 2), (6, 4, 2), (5, 3, 1), (3, 2, 1)],
        // Nodes that code for a group beside those that it needs.
        Changes::Cordons => [(5, 2, 2), (8, 4, 2), (6, 3, 1), (4, 2, 1)],
        Changes::Sizes | Changes::Both => [(5, 2, 2), (7, 4, 2), (5, 3, 1), (4, 2, 1)],
    };
    let (nodes, k, m) = shapes[(seed % 4) as usize];
    // A node without ranks leaves the job whole when it goes for long.
    let spare = usize::from(scenario.crashes == Crashes::OneForLong);
    let durable_form = match seed / 4 % 2 {
        0 => DurableForm::Full,
        _ => DurableForm::Increments,
    };
    Limits {
        nodes,
        k,
        m,
        ranks: (nodes - spare) as u32,
        loss_one_in: 0,
        durable_every: 3,
        durable_form,
        duration_ms: END_MS,
        liar: None,
        slow: None,
        link_rate: None,
        slow_link: None,
        fibber: None,
        byzantine: None,
        shard_scale: 1,
    }
}

impl Month {
    /// What a scenario changes of a node's configuration.
    pub fn sets_up(&self, node: usize, setup: &mut Setup) {
        let roster = self.registry.remembered_by(node);
        (setup.epoch, setup.members) = (roster.epoch, roster.members());
        setup.budget = self.scenario.budget_slots << 21;
        setup.slots_per_rank += self.scenario.keep_steps - setup.keep_steps;
        setup.keep_steps = self.scenario.keep_steps;
        if self.scenario.trainers == Trainers::Brief {
            setup.idle_job_ms = 1_000;
        }
        setup.run_authority = self.scenario.runs;
        if self.scenario.tier == TierKind::Absent {
            setup.durable = DurablePolicy::Absent;
        }
        match (self.scenario.unequal, setup.geometry) {
            (Unequal::Chunk, _) if node == 1 => {
                setup.chunk = ChunkSize::new(2 * CHUNK_BYTES).unwrap();
            }
            (Unequal::Parity, Some(geometry)) if node == 1 => {
                let (k, m) = match (geometry.m(), setup.members.len()) {
                    (1, 5..) => (geometry.k(), 2),
                    (1, _) => (1, 1),
                    _ => (geometry.k(), 1),
                };
                setup.geometry = Geometry::new(k, m).ok();
            }
            _ => {}
        }
    }
}
