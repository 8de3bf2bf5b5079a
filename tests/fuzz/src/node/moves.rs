//! What an input's bytes do, six at a time: time passes, honest jobs save and restore, and everything else happens to them.

use storaged_codec::digest;
use storaged_core::{ConnId, DurableFault, EpochMembers, Input, TierNews, Viewer};
use storaged_plan::Cordon;
use storaged_wire::local::Role;
use storaged_wire::{Generation, TenantName};

use super::scene::{Cluster, TierWeather, tally, tier_fault};
use crate::testkit::{Event, Key, Pid, members, name};
use crate::twist::Twist;

/// Bytes of a move: what, where, and a twist.
pub const MOVE_BYTES: usize = 6;
/// Moves of one input that are played: more would only be slow.
const MOVES_MAX: usize = 150;
/// Simulated time of one input's moves.
const PLAYED_MS_MAX: u64 = 400_000;

/// How long time passes in one move.
const PASSES_MS: [u64; 8] = [1, 10, 100, 500, 1_000, 3_000, 10_000, 30_000];

/// What a move does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Pass,
    Save,
    Plan,
    OpenPlanned,
    Wait,
    Ask,
    AskAgain,
    SayAgain,
    SayAnything,
    Restart,
    Pause,
    Links,
    Clock,
    Members,
    Tier,
    TierSaysAgain,
    Rot,
    HangUp,
    Registry,
    Sessions,
    Progress,
    OpenRun,
    Effects,
    Look,
}

const KINDS: [Kind; 24] = [
    Kind::Pass,
    Kind::Save,
    Kind::Plan,
    Kind::OpenPlanned,
    Kind::Wait,
    Kind::Ask,
    Kind::AskAgain,
    Kind::SayAgain,
    Kind::SayAnything,
    Kind::Restart,
    Kind::Pause,
    Kind::Links,
    Kind::Clock,
    Kind::Members,
    Kind::Tier,
    Kind::TierSaysAgain,
    Kind::Rot,
    Kind::HangUp,
    Kind::Registry,
    Kind::Sessions,
    Kind::Progress,
    Kind::OpenRun,
    Kind::Effects,
    Kind::Look,
];

/// A move as bytes, for seeds.
pub fn move_bytes(kind: Kind, who: u8, twist: [u8; 4]) -> [u8; MOVE_BYTES] {
    let kind = KINDS.iter().position(|one| *one == kind).unwrap_or(0) as u8;
    let [a, b, c, d] = twist;
    [kind, who, a, b, c, d]
}

impl Cluster {
    /// All moves of an input, and what must hold at its end.
    pub fn play_all(&mut self, moves: &[u8]) {
        let (moves, _) = moves.as_chunks::<MOVE_BYTES>();
        for [kind, who, twist @ ..] in moves.iter().take(MOVES_MAX) {
            let kind = KINDS[usize::from(*kind) % KINDS.len()];
            self.play(kind, *who, Twist::of(*twist));
            if self.now > PLAYED_MS_MAX {
                break;
            }
        }
        self.comes_to_rest();
    }

    fn play(&mut self, kind: Kind, who: u8, twist: Twist) {
        let node = usize::from(who) % self.processes.len();
        let job = usize::from(who / 16) % self.scene.jobs.len();
        match kind {
            Kind::Pass => {
                self.run_for(PASSES_MS[usize::from(who) % PASSES_MS.len()] + twist.with())
            }
            Kind::Save => self.save(job, twist),
            Kind::Plan => self.plan(job, node, twist),
            Kind::OpenPlanned => self.open_planned(job, node, twist),
            Kind::Wait => self.wait_for(job, node, twist),
            Kind::Ask => self.ask_anything(job, node, twist),
            Kind::AskAgain => self.ask_again(twist),
            Kind::SayAgain => self.say_again(twist),
            Kind::SayAnything => self.say_anything(node, who, twist),
            Kind::Restart => self.restart(node, twist),
            Kind::Pause => self.pause(node, twist),
            Kind::Links => self.links_change(node, twist),
            Kind::Clock => self.clock_jumps(node, twist),
            Kind::Members => self.members_change(node, twist),
            Kind::Tier => self.tier_changes(node, twist),
            Kind::TierSaysAgain => self.tier_says_again(twist),
            Kind::Rot => self.rots(node, twist),
            Kind::HangUp => self.somebody_hangs_up(twist),
            Kind::Registry => {
                self.scene.weather.registry = who;
                if twist.how() == u8::MAX {
                    self.run_registry.forget_above(twist.with());
                }
            }
            Kind::Sessions => self.scene.weather.breaks = (!who.is_multiple_of(4)).then_some(twist),
            Kind::Progress => self.sessions_progress(who, twist),
            Kind::OpenRun => self.open_run(job, node),
            Kind::Effects => self.effects_fail(node, twist),
            Kind::Look => self.looks(node, twist),
        }
    }

    /// A node dies, or its daemon alone, whose memory the next one takes over.
    fn restart(&mut self, node: usize, twist: Twist) {
        let (keeps, after) = (twist.how() % 3, 1 + twist.at() % 6_000);
        if !self.is_up(node) {
            return self.start_process(node);
        }
        self.continue_if_paused(node);
        if keeps == 0 {
            self.end_process(node);
        } else {
            self.end_daemon(node);
            self.left_by(node).rots = keeps == 2 && twist.with() % 2 == 1;
        }
        self.forget_clients_of(node);
        self.start_after(after, node);
    }

    fn continue_if_paused(&mut self, node: usize) {
        if self.is_paused(node) {
            self.scene.oracle.goes_on(node, self.now);
            self.continue_process(node);
        }
    }

    fn pause(&mut self, node: usize, twist: Twist) {
        if self.is_paused(node) {
            return self.continue_if_paused(node);
        }
        if self.is_up(node) {
            self.scene.oracle.pauses(node, self.now);
            self.stop_process(node);
            self.run_for(twist.at() % 8_000);
            self.continue_if_paused(node);
        }
    }

    fn links_change(&mut self, node: usize, twist: Twist) {
        let other = (node + 1 + twist.choose(self.processes.len())) % self.processes.len();
        if other == node {
            return self.dial_all(node);
        }
        match twist.how() % 5 {
            0 => self.part(node, other),
            1 => {
                self.part(node, other);
                self.part(other, node);
            }
            2 => self.join(node, other),
            3 => {
                let until = self.now + twist.at() % 5_000;
                for (from, to) in [(node, other), (other, node)] {
                    let link = self.link_of(from, to);
                    (link.cut_until, link.lossy) = (until, twist.with() % 2 == 1);
                }
            }
            _ => {
                let generation = Generation::new(twist.number());
                let up = Input::PeerUp {
                    node: name(other),
                    generation,
                };
                self.tell(node, up);
            }
        }
    }

    fn clock_jumps(&mut self, node: usize, twist: Twist) {
        if let Some(process) = &mut self.processes[node] {
            let far = [twist.at(), twist.at() * 100, twist.at() * 10_000];
            process.ahead += far[usize::from(twist.how()) % far.len()];
            self.tell(node, Input::Tick);
        }
    }

    /// Another epoch: a node is cordoned or not, or has a place or none.
    fn members_change(&mut self, node: usize, twist: Twist) {
        let all = members(self.processes.len());
        let mut list = self.scene.members.clone();
        let at = list.iter().position(|member| member.name == name(node));
        match (twist.how() % 3, at) {
            (0, Some(at)) => {
                list[at].cordon = match list[at].cordon {
                    Cordon::Open => Cordon::Cordoned,
                    Cordon::Cordoned => Cordon::Open,
                }
            }
            (1, Some(at)) => drop(list.remove(at)),
            (_, None) => list.push(all[node].clone()),
            (_, Some(at)) => list[at].failure_domain = format!("rack {}", twist.with() % 3),
        }
        let mut setup = crate::testkit::setup(name(node), list.clone());
        self.scene.shape.set_up(&mut setup);
        // A list that cannot be grouped never comes to a node.
        let is_sound =
            (setup.geometry).is_none_or(|geometry| storaged_plan::groups(&list, geometry).is_ok());
        if !is_sound || list.is_empty() {
            return;
        }
        self.scene.epoch += 1 + twist.with() % 2;
        self.scene.members = list;
        self.all_hear_of_members(twist);
    }

    fn all_hear_of_members(&mut self, twist: Twist) {
        let (epoch, members) = (self.scene.epoch, self.scene.members.clone());
        for node in 0..self.processes.len() {
            let has_place = members.iter().any(|member| member.name == name(node));
            let skips = node == twist.pick(self.processes.len()) && twist.with() >= 128;
            if has_place && !skips {
                let members = members.clone();
                let passed = Vec::new();
                let heard = Input::Members {
                    newest: EpochMembers { epoch, members },
                    passed,
                };
                self.tell(node, heard);
            } else if !has_place && self.is_up(node) {
                self.continue_if_paused(node);
                self.end_process(node);
                self.forget_clients_of(node);
            }
        }
    }

    fn tier_changes(&mut self, node: usize, twist: Twist) {
        self.scene.weather.tier = match twist.how() % 6 {
            0 | 1 => TierWeather::Well,
            2 => TierWeather::Slow,
            3 => TierWeather::Fails(twist.choose(256) as u8),
            4 => TierWeather::Hangs,
            _ => TierWeather::Stale(self.now),
        };
        if twist.at() % 2 == 1 {
            let state: Result<(), DurableFault> = match self.scene.weather.tier {
                TierWeather::Fails(which) => Err(tier_fault(which)),
                _ => Ok(()),
            };
            self.tell(node, Input::DurableState(TierNews::Opened(state)));
        }
    }

    /// Chunks in a node's RAM change.
    fn rots(&mut self, node: usize, twist: Twist) {
        let Some(process) = &mut self.processes[node] else {
            return;
        };
        let shown = process.node.shown();
        let slots = shown
            .iter()
            .flat_map(|it| it.shards.iter().map(|shard| shard.1));
        let slots: Vec<_> = slots.collect();
        let sets = shown
            .iter()
            .flat_map(|it| it.parity.iter().map(|one| one.2));
        let sets: Vec<_> = sets.collect();
        if twist.how().is_multiple_of(2) && !sets.is_empty() {
            let set = sets[twist.pick(sets.len())];
            process.rotten_parity.insert((set, twist.with() % 4));
        } else if !slots.is_empty() {
            let slot = slots[twist.pick(slots.len())];
            if let Some(leaves) = process.leaves.get_mut(&slot).filter(|it| !it.is_empty()) {
                let mut rotten = leaves.to_vec();
                let at = twist.choose(rotten.len());
                rotten[at] = digest(b"rot");
                *leaves = rotten.into();
            }
        }
    }

    fn somebody_hangs_up(&mut self, twist: Twist) {
        let all: Vec<ConnId> = self.scene.clients.keys().copied().collect();
        if let Some(conn) = all.get(twist.pick(all.len())) {
            self.hang_up(*conn);
            self.scene.jobs.iter_mut().for_each(|job| {
                job.trainers.retain(|_, (_, of)| of != conn);
            });
        }
    }

    /// Executors say how far running sessions are, and what they saw of their links.
    fn sessions_progress(&mut self, who: u8, twist: Twist) {
        self.scene.weather.tally = (!who.is_multiple_of(8)).then_some(twist);
        let running = self.sessions.begun.iter();
        let told: Vec<(Pid, Input)> = running
            .filter(|(_, session)| session.ends_at.is_some())
            .flat_map(|(Key { leader, session }, running)| {
                let members = &running.members;
                members.iter().map(move |(member, it)| {
                    let progress = Input::SessionProgress {
                        leader: leader.clone(),
                        session: *session,
                        tally: tally(Some(twist), members, *member),
                    };
                    (it.pid, progress)
                })
            })
            .collect();
        told.into_iter()
            .for_each(|(pid, input)| self.feed(pid, input));
    }

    /// What was to succeed on a node fails.
    fn effects_fail(&mut self, node: usize, twist: Twist) {
        let slots: Vec<_> = match &self.processes[node] {
            Some(process) => process.leaves.keys().copied().collect(),
            None => return,
        };
        let Some(slot) = slots.get(twist.pick(slots.len())) else {
            return;
        };
        let reason = "made to fail".to_owned();
        let input = match twist.how() % 2 {
            0 => Input::DigestFailed {
                slot: *slot,
                reason,
            },
            _ => Input::SlotFailed {
                slot: *slot,
                reason,
            },
        };
        self.tell(node, input);
    }

    /// What operators, tenants and strangers are shown can be made at any moment.
    fn looks(&mut self, node: usize, twist: Twist) {
        let viewer = match twist.how() % 4 {
            0 => Viewer::Operator,
            1 => Viewer::Public,
            2 => Viewer::Tenant(TenantName::new("blue").ok()),
            _ => Viewer::Tenant(None),
        };
        let bears = twist
            .with()
            .is_multiple_of(2)
            .then_some(twist.with() as u32);
        if let Some(process) = &self.processes[node] {
            let node = &process.node;
            let json = node.status_json(&viewer);
            assert!(json.starts_with('{') && json.ends_with('}'), "{json}");
            if viewer == Viewer::Public {
                assert!(
                    !json.contains("blue") && !json.contains("\"job\""),
                    "{json}"
                );
            }
            let _ = node.restart_objections(bears, &viewer);
            let _ = (node.standings(), node.measured_rates(), node.unfinished());
            let _ = (node.tier_fault(), node.awaits_copies(), node.filling());
            let _ = (node.scrub_state(), node.audit(), node.budget_free());
        }
        if twist.how() > 127 {
            let conn = self.open(node, viewer);
            let job = twist.choose(self.scene.jobs.len());
            let hello = crate::testkit::hello(self.scene.jobs[job].namespace.clone(), Role::Reader);
            self.request(conn, hello);
        }
    }

    /// What was asked is answered once time has passed, whatever happened before; requests that wait longer are given up.
    pub fn comes_to_rest(&mut self) {
        (0..self.processes.len()).for_each(|node| self.continue_if_paused(node));
        let soon = self.now + super::REST_MS;
        let hurry = self.scene.oracle.open().filter_map(|(_, open)| open.by());
        let last = hurry.filter(|by| *by <= soon).max();
        if let Some(last) = last {
            // One that was paused up to now has not looked at the time yet.
            self.run_to(last.max(self.now + 1_500));
        }
        let late = self.scene.oracle.open().find(|(id, open)| {
            let waits = self.scene.clients.contains_key(&id.conn) && self.lives(open.pid);
            waits && open.by().is_some_and(|by| by < self.now)
        });
        assert!(late.is_none(), "at {} not answered: {late:?}", self.now);
    }

    /// A process hears something a moment later, as from its driver.
    pub fn soon(&mut self, node: usize, input: Input) {
        if let Some(pid) = self.pid(node) {
            self.after(1, Event::Input(pid, Box::new(input)));
        }
    }
}
