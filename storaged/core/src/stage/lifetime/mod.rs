//! How long a job's RAM lives. A job whose trainers are gone keeps what it has until somebody needs the room: then it
//! goes, at once if its newest checkpoint is durable, and otherwise once nobody has used the job for
//! `Setup::idle_job_ms`; the one that has not been used for longest goes first (`evict`). An operator or the job itself
//! may drop it before (`drop_job`). What the trainers of a fenced run held goes when the fence rises (`fenced`).
//!
//! Nodes tell each other which jobs have trainers, so that a node that only codes for a quiet job does not take it for
//! one that has ended. A job that holds nothing anywhere is forgotten, tables and all.

mod drop_job;
mod evict;
mod fenced;
mod order_proof;

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::PeerMessage;
use storaged_wire::{Namespace, NodeName, RunId};

pub(crate) use drop_job::{Drops, Trainers};
pub(crate) use evict::Remains;

use crate::api::Now;
use crate::catalog::{Slot, SlotUse};
use crate::context::Context;
use crate::limits;
use crate::testimony::words_of_opened;

/// What a node knows of the use of jobs.
#[derive(Debug, Default)]
pub(crate) struct Lifetimes {
    /// When each job was used last, as seen from here.
    used: BTreeMap<Namespace, Now>,
    /// Jobs with trainers here, as the peers were told last, and when.
    told: BTreeSet<Namespace>,
    told_at: Now,
    /// The same of the peers, as they said.
    elsewhere: BTreeMap<NodeName, AttachedThere>,
}

/// Jobs that have trainers at a peer.
#[derive(Debug)]
struct AttachedThere {
    heard_at: Now,
    namespaces: BTreeSet<Namespace>,
}

impl Context {
    /// Once a second: who is in use, and who is forgotten; not those for whom a request is under way.
    pub(crate) fn look_after_lifetimes(&mut self, asked_for: &BTreeSet<Namespace>) {
        self.tell_attached();
        let now = self.now;
        let all: Vec<Namespace> = self.namespaces.keys().cloned().collect();
        for namespace in all {
            if self.is_in_use(&namespace) {
                self.touch(&namespace);
            } else {
                self.lifetimes.used.entry(namespace).or_insert(now);
            }
        }
        self.forget_unused(asked_for);
    }

    /// Somebody uses the job: what was evicted of it may come back.
    pub(crate) fn touch(&mut self, namespace: &Namespace) {
        if let Some(table) = self.namespaces.get_mut(namespace) {
            if table.evicted.is_some() {
                self.keeping.touch_job(namespace);
            }
            table.evicted = None;
            self.lifetimes.used.insert(namespace.clone(), self.now);
        }
    }

    /// Tells the peers which jobs have trainers here: when that changes, and every now and then.
    fn tell_attached(&mut self) {
        let here = self.attached_here();
        let due = self.now.since(self.lifetimes.told_at) >= limits::ATTACHED_EVERY_MS;
        if here == self.lifetimes.told && (!due || here.is_empty()) {
            return;
        }
        let told = here.iter().cloned().collect();
        self.lifetimes.told = here;
        self.lifetimes.told_at = self.now;
        self.send_all(&PeerMessage::Attached(told));
    }

    /// What a peer that has just come up must know, also if it is nothing: it may have heard otherwise.
    pub(crate) fn tell_attached_to(&mut self, peer: &NodeName) {
        let here = self.attached_here().into_iter().collect();
        self.send(peer, PeerMessage::Attached(here));
    }

    fn attached_here(&self) -> BTreeSet<Namespace> {
        let conns = self.conns.values();
        let trainers = conns.filter(|conn| conn.trainer.is_some());
        trainers.map(|conn| conn.namespace.clone()).collect()
    }

    pub(crate) fn attached_told(&mut self, from: &NodeName, namespaces: Vec<Namespace>) {
        for namespace in &namespaces {
            self.touch(namespace);
        }
        let there = AttachedThere {
            heard_at: self.now,
            namespaces: namespaces.into_iter().collect(),
        };
        self.lifetimes.elsewhere.insert(from.clone(), there);
    }

    /// Nodes on which the job has trainers, as far as this one knows. One that is down is believed for as long as a job
    /// may be idle.
    pub(crate) fn nodes_attached(&self, namespace: &Namespace) -> Vec<NodeName> {
        let here = self.attached_here().contains(namespace);
        let mut nodes: Vec<NodeName> = here.then(|| self.me().clone()).into_iter().collect();
        let counts = |node: &NodeName, there: &AttachedThere| {
            let fresh = self.now.since(there.heard_at) < self.setup.idle_job_ms;
            there.namespaces.contains(namespace) && (self.is_up(node) || fresh)
        };
        let there = self.lifetimes.elsewhere.iter();
        nodes.extend(
            there
                .filter(|(node, there)| counts(node, there))
                .map(|(node, _)| node.clone()),
        );
        nodes
    }

    /// Whether the job has trainers anywhere, or a restart of it is under way here.
    pub(crate) fn is_in_use(&self, namespace: &Namespace) -> bool {
        let opened = |slot: &Slot| matches!(slot.used_for, SlotUse::Opening | SlotUse::Guest);
        let mut slots = self.slots.values();
        slots.any(|slot| slot.namespace == *namespace && opened(slot))
            || !self.nodes_attached(namespace).is_empty()
    }

    /// For how long nobody has used the job.
    pub(crate) fn idle_ms(&self, namespace: &Namespace) -> u64 {
        let used = self.lifetimes.used.get(namespace);
        used.map_or(0, |used| self.now.since(*used))
    }

    /// Jobs that hold nothing here and that nobody uses go wholly: after the time that a job may be idle, because a job
    /// may have opened its run and not saved yet; sooner if they were evicted or dropped, or if there are too many.
    fn forget_unused(&mut self, asked_for: &BTreeSet<Namespace>) {
        let holding = self.namespaces_holding();
        let holding =
            |namespace: &Namespace| holding.contains(namespace) || asked_for.contains(namespace);
        let mut empty: Vec<(u64, Namespace)> = self
            .namespaces
            .keys()
            .filter(|namespace| !holding(namespace) && !self.is_in_use(namespace))
            .filter(|namespace| !self.may_be_counted_on(namespace))
            .map(|namespace| (self.idle_ms(namespace), namespace.clone()))
            .collect();
        empty.sort_by_key(|(idle_ms, _)| std::cmp::Reverse(*idle_ms));
        let excess = empty.len().saturating_sub(limits::EMPTY_JOBS_MAX);
        for (place, (idle_ms, namespace)) in empty.into_iter().enumerate() {
            let evicted = self.namespaces[&namespace].evicted.is_some();
            let goes_early = evicted || self.was_only_promised(&namespace);
            let enough = if place < excess || goes_early {
                limits::EMPTY_JOB_MIN_MS.min(self.setup.idle_job_ms)
            } else {
                self.setup.idle_job_ms
            };
            if idle_ms >= enough {
                self.forget_job(&namespace);
            }
        }
    }

    /// Whether nobody has opened a run of the job, as far as this node knows: it is a name that somebody wanted, whose request is over by
    /// now. It must not keep the name from others for as long as a job may be idle.
    fn was_only_promised(&self, namespace: &Namespace) -> bool {
        let table = self.namespaces.get(namespace);
        table.is_some_and(|it| {
            it.granted > RunId::ZERO && it.fence == RunId::ZERO && words_of_opened(it) == 0
        }) && !planted!("promises_outlive_requests")
    }

    /// Whether a proposer may still count on what was promised here: requests wait for no longer.
    fn may_be_counted_on(&self, namespace: &Namespace) -> bool {
        let most = limits::REQUEST_MAX_MS + limits::EMPTY_JOB_MIN_MS;
        let table = self.namespaces.get(namespace);
        table.is_some_and(|it| it.granted > it.fence && self.now.since(it.granted_at) < most)
            && !planted!("promises_are_forgotten_early")
    }

    /// Nothing of a job is known here any more.
    pub(crate) fn forget_job(&mut self, namespace: &Namespace) {
        self.namespaces.remove(namespace);
        self.lifetimes.used.remove(namespace);
        self.keeping.touch_job(namespace);
        self.keys.forget_job(namespace);
        self.successions.forget_job(namespace);
        self.testimony.forget_job(namespace);
    }

    /// Jobs that came up lately, that nobody here uses, and of which nothing is here: one that has saved, and that launchers or readers ask
    /// for, is not new.
    pub(crate) fn new_jobs(&self) -> impl Iterator<Item = &Namespace> {
        let holding = self.jobs_with_checkpoints();
        let names = self.namespaces.keys();
        names.filter(move |name| {
            self.idle_ms(name) < limits::EMPTY_JOB_MIN_MS
                && !self.is_in_use(name)
                && (!holding.contains(*name) || planted!("saved_jobs_are_new"))
        })
    }

    /// Jobs of which something is here.
    fn namespaces_holding(&self) -> BTreeSet<Namespace> {
        let checkpoints = self.jobs_with_checkpoints().into_iter();
        let slots = self.slots.values().map(|slot| &slot.namespace);
        checkpoints.chain(slots).cloned().collect()
    }

    /// Whether something of one job is here.
    fn holds_something_of(&self, job: &Namespace) -> bool {
        let mut slots = self.slots.values();
        self.checkpoints.keys().any(|key| key.namespace == *job)
            || slots.any(|slot| slot.namespace == *job)
    }
}
