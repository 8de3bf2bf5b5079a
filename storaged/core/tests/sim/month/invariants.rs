//! What must happen in time: every request is answered within its own limit, always; and once faults have ended and
//! settled, saves get their slots, steps become protected and durable, what is durable is unpinned, and in the end
//! nothing is led, pinned, reserved or remembered without an owner.

use std::collections::BTreeSet;

use storaged_core::Audit;
use storaged_wire::Namespace;

use super::super::world::World;
use super::jobs::{Phase, Place};
use super::tier::TierKind;
use super::trainers::RankState;
use super::{Changes, Crashes, END_MS, FAULTS_END_MS, JOBS_END_MS, SETTLED_MS, Trainers, Unequal};

const IN_TIME_MS: u64 = 10_000;
/// The last restart of a job after the loss of a node, its plan, its restore and its first steps.
const RESTART_MS: u64 = 15_000;
/// An answer may be so much later than its request's limit.
const SLACK_MS: u64 = 1_000;

impl World {
    pub(super) fn requests_are_answered_in_time(&mut self) {
        let now = self.now;
        let month = self.scene.month.as_deref().expect("it is a month");
        for asked in month.jobs.asked.values() {
            let node = asked.pid.node;
            if !self.lives(asked.pid) || self.is_paused(node) {
                continue;
            }
            let resumed = month.resumed_at.get(&node).copied().unwrap_or(0);
            let due = asked.at.max(resumed) + asked.limit_ms + SLACK_MS;
            assert!(
                now <= due,
                "every request is answered within its limit: {asked:?} at {now} ms"
            );
        }
    }

    pub(super) fn what_must_go_on_goes_on(&mut self, namespace: &Namespace) {
        let scenario = self.month().scenario;
        let little = scenario.is_little_room() && scenario.trainers != Trainers::Brief;
        // Where it suffices for one step, what is kept beside it is in nobody's way.
        let tight = little && scenario.keep_steps == 1 && !scenario.pins;
        if scenario.unequal != Unequal::Nothing {
            return;
        }
        if tight {
            if scenario.places != Changes::Never && scenario.trainers != Trainers::Quiet {
                self.a_step_becomes_safe_at_last(namespace);
            }
            return;
        }
        if self.is_settled() && scenario.trainers == Trainers::Quiet {
            self.what_is_kept_bears_m_again(namespace);
            return self.what_is_kept_beside_bears_m_again(namespace);
        }
        if self.is_settled() {
            self.jobs_train(namespace);
            self.only_who_trains_fills_slots();
            self.steps_become_safe(namespace, SETTLED_MS);
            self.what_is_durable_is_unpinned(namespace);
            self.steps_become_durable(namespace);
        }
        let quiet = scenario.trainers == Trainers::Quiet;
        let down = !quiet && self.month().in_turn.0 == 1 && scenario.crashes == Crashes::OneForLong;
        let since = 15_000 + RESTART_MS;
        // Parity of one block is on the node that is away, and only the tier can take what it would bear.
        let can_be_safe = self.scene.limits.m > 1 || scenario.tier != TierKind::Absent;
        if down && can_be_safe && (since..FAULTS_END_MS).contains(&self.now) {
            self.steps_become_safe(namespace, since);
        }
    }

    /// A save gets its slot within 10 s.
    fn jobs_train(&mut self, namespace: &Namespace) {
        let now = self.now;
        let jobs = &self.month().jobs.all;
        let Some(job) = jobs.iter().find(|job| job.namespace == *namespace) else {
            return;
        };
        let trains = job.alive.iter().any(|it| it.phase == Phase::Training);
        assert!(
            trains,
            "a job that nothing is in the way of trains at {now} ms"
        );
        assert!(
            job.alive.len() <= 1,
            "an older run ends: incarnations {:?} train at {now} ms",
            job.alive
                .iter()
                .map(|it| (it.id, it.run))
                .collect::<Vec<_>>()
        );
        for (id, rank, state) in job.alive.iter().flat_map(|it| {
            let states = it.ranks.states.iter();
            states.map(|(rank, state)| (it.id, *rank, *state))
        }) {
            if let RankState::Acquiring(since) = state {
                assert!(
                    now - since.max(SETTLED_MS - 5_000) < IN_TIME_MS,
                    "a save gets its slot within 10 s: rank {rank} of incarnation {id} waits since {since} ms at {now} ms"
                );
            }
        }
    }

    /// Nodes that were lost are back, and nothing new is saved: what is there is topped up.
    fn what_is_kept_bears_m_again(&mut self, namespace: &Namespace) {
        let (now, m) = (self.now, self.scene.limits.m);
        let floor = self.month().promises.floors.get(namespace);
        // It stays and can be restored, but home nodes believe of a step that they do not know two others, or nobody (`stage/evidence.rs`).
        if floor.is_some_and(|floor| floor.is_without_home) {
            return;
        }
        assert!(
            floor.is_some_and(|floor| floor.gone().is_empty() && floor.bears == m),
            "what nodes that are back have lost is put back: {floor:?} does not bear all losses at {now} ms"
        );
    }

    /// A slot that is being filled belongs to a trainer of the newest run.
    fn only_who_trains_fills_slots(&mut self) {
        let month = self.scene.month.as_deref().expect("it is a month");
        let alive = month.jobs.all.iter().flat_map(|job| &job.alive);
        let trains: BTreeSet<Place> = alive.flat_map(|it| it.conns.values().copied()).collect();
        for pid in (0..self.processes.len()).filter_map(|node| self.pid(node)) {
            let process = self.processes[pid.node].iter();
            for conn in process.flat_map(|process| process.node.filling()) {
                let place = Place { pid, conn };
                assert!(
                    trains.contains(&place),
                    "slots of a fenced run's trainers come back: {conn:?} holds one on {pid:?} at {} ms",
                    self.now
                );
            }
        }
    }

    /// Where saves wait for room and some are refused: once places change no more, something new is protected before the jobs end.
    fn a_step_becomes_safe_at_last(&mut self, namespace: &Namespace) {
        if self.is_settled() && self.now >= JOBS_END_MS - 300 {
            let progress = self.month().promises.progress.get(namespace);
            let last = progress.map_or(0, |(_, at)| *at);
            assert!(
                last >= SETTLED_MS - 5_000,
                "in little room something is protected after the last change of places: the newest is {progress:?}"
            );
        }
    }

    /// Something new is protected every 10 s.
    fn steps_become_safe(&mut self, namespace: &Namespace, since: u64) {
        let now = self.now;
        let progress = self.month().promises.progress.get(namespace);
        let last = progress.map_or(0, |(_, at)| *at).max(since - 5_000);
        assert!(
            now - last < IN_TIME_MS,
            "a committed step becomes protected: nothing new for 10 s at {now} ms, the newest is {progress:?}"
        );
    }

    /// A durable step that a newer one makes needless holds no slot anywhere, but where somebody still reads it: trainers
    /// that hang stay connected with what they opened.
    fn what_is_durable_is_unpinned(&mut self, namespace: &Namespace) {
        let now = self.now;
        let kept = self.kept_step(namespace).filter(|_| self.keeps_two());
        let month = self.scene.month.as_deref().expect("it is a month");
        let newest = self.tier.newest(namespace).cloned();
        let safe = month.promises.floors.get(namespace).map(|floor| &floor.key);
        let long_ago = |at: u64| now - at >= IN_TIME_MS;
        for (key, published) in self.tier.published.iter() {
            let pinned = month.promises.pins.may_have(key);
            let stays = pinned || Some(key) == newest.as_ref() || Some(key) == kept.as_ref();
            // Until then it was the newest, and what the next copy is a difference from.
            let newer = self.tier.published.iter();
            let newer = newer.filter(|(it, _)| it.namespace == *namespace && *it > key);
            let next_at = newer.map(|(_, it)| it.at).min().unwrap_or(now);
            let is_needless = long_ago(published.at.max(next_at));
            if key.namespace != *namespace || stays || !is_needless || safe <= Some(key) {
                continue;
            }
            for (node, process) in self.processes.iter().enumerate() {
                let shown = process.iter().flat_map(|process| process.node.shown());
                let all: Vec<_> = shown
                    .filter(|shown| shown.key.namespace == *namespace)
                    .collect();
                let pins = all
                    .iter()
                    .find(|it| it.key == *key && !it.shards.is_empty() && it.readers == 0);
                assert!(
                    pins.is_none(),
                    "what is durable is unpinned everywhere within 10 s: node {node} keeps {pins:?}, durable since {} ms, at {now} ms; it has {all:#?}, the tier {newest:?}",
                    published.at
                );
            }
        }
    }

    /// With a tier that is well, something new is durable every 15 s.
    fn steps_become_durable(&mut self, namespace: &Namespace) {
        let kind = self.month().scenario.tier;
        if kind == TierKind::Absent {
            return;
        }
        let published = self.tier.published.iter();
        let of_it = published.filter(|(key, _)| key.namespace == *namespace);
        let last = of_it
            .map(|(_, it)| it.at)
            .max()
            .unwrap_or(0)
            .max(SETTLED_MS - 5_000);
        // One upload to a slow tier takes up to 38 s, and a manifest 6.
        let within = match kind {
            TierKind::Slow => 50_000,
            _ => IN_TIME_MS + 5_000,
        };
        assert!(
            self.now - last < within,
            "a step becomes durable again at {} ms, the last one was at {last} ms",
            self.now
        );
    }

    /// When all jobs have ended and all is quiet.
    pub(super) fn nothing_is_left_without_an_owner(&mut self) {
        if self.now < END_MS - 300 {
            return;
        }
        self.no_pin_is_left();
        let equal = self.month().scenario.unequal == Unequal::Nothing;
        let machines = self.machines();
        for (node, process) in self.processes.iter().enumerate() {
            let Some(process) = process else {
                let has_place = machines.contains(&node);
                assert!(!has_place, "node {node} is up again by {} ms", self.now);
                continue;
            };
            assert!(
                machines.contains(&node),
                "a machine that has lost its place ends: {node} goes on at {} ms",
                self.now
            );
            let shown = process.node.shown().into_iter();
            let read: Vec<_> = shown.filter(|it| it.readers > 0).collect();
            assert!(
                read.is_empty(),
                "who has gone reads nothing any more: node {node} keeps {read:?}"
            );
            let audit = process.node.audit();
            let baseline = Audit {
                sealed: audit.sealed,
                free: if super::is_on("free slots") {
                    0
                } else {
                    audit.free
                },
                sessions: if equal { 0 } else { audit.sessions },
                parts: if equal { 0 } else { audit.parts },
                ..Audit::default()
            };
            assert_eq!(
                audit,
                baseline,
                "nothing is left without an owner on node {node}, {} ms after the jobs ended",
                self.now - JOBS_END_MS
            );
        }
        self.nothing_of_older_epochs_is_left();
        let begun = self.sessions.begun.keys().next();
        assert!(
            begun.is_none() || !equal,
            "a session goes on for nobody: {begun:?}"
        );
    }

    /// A job that has trained since the places changed last has nothing in RAM of the epochs before; and what the decisions do not
    /// know of is in nobody's RAM.
    fn nothing_of_older_epochs_is_left(&mut self) {
        let quiet = self.month().scenario.trainers == Trainers::Quiet;
        let newest = self.month().registry.newest().epoch;
        let namespaces: BTreeSet<Namespace> = (self.month().jobs.all.iter())
            .map(|job| job.namespace.clone())
            .collect();
        let month = self.scene.month.as_deref().expect("it is a month");
        for (node, process) in self.processes.iter().enumerate() {
            let Some(process) = process else { continue };
            let shown = process.node.shown();
            let known: BTreeSet<_> = (shown.iter())
                .flat_map(|it| it.parity.iter().map(|(_, _, set)| *set))
                .collect();
            let unknown = process.parity.keys().find(|set| !known.contains(set));
            assert_eq!(unknown, None, "node {node} keeps parity of nothing");
            let of_jobs = shown
                .iter()
                .filter(|it| namespaces.contains(&it.key.namespace));
            for it in of_jobs.filter(|_| !quiet) {
                let manifest = it
                    .manifest
                    .and_then(|name| month.promises.manifests.get(&name));
                let epoch = manifest.map_or(newest, |manifest| manifest.manifest().epoch);
                let holds = !it.shards.is_empty() || !it.parity.is_empty();
                assert!(
                    !holds || epoch == newest,
                    "what is coded by groups of older epochs goes: node {node} keeps {it:?} of epoch {epoch}, the newest is {newest}"
                );
            }
        }
    }
}
