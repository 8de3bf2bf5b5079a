//! The registry of runs: one record per number of a namespace, created by whoever comes first. How it answers a scene says; a registry that
//! hangs may have taken what it was asked for.

use std::collections::BTreeMap;

use storaged_core::{Input, QueryId, Registration, RegistryFault};
use storaged_wire::{Namespace, RunId};

use super::process::Pid;
use super::scene::Scene;
use super::world::{Event, World};

/// How it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It has decided after half of so many milliseconds, and its answer is there after all of them.
    After(u64),
    /// It takes the request and its answer is lost.
    Lost,
    /// It says after so many milliseconds that it cannot be used.
    Fails(u64),
    /// Nothing reaches it.
    Away,
}

/// A run that asks for its number.
#[derive(Debug, Clone)]
pub struct Asked {
    pub query: QueryId,
    pub namespace: Namespace,
    pub run: RunId,
}

#[derive(Debug, Default)]
pub struct RunRegistry {
    runs: BTreeMap<(Namespace, u64), RunId>,
}

impl RunRegistry {
    /// The newest of a namespace.
    pub fn newest(&self, namespace: &Namespace) -> Option<RunId> {
        let of_it = self.runs.iter().filter(|((of, _), _)| of == namespace);
        of_it.map(|(_, run)| *run).next_back()
    }

    /// Whether a run has its number here.
    pub fn has(&self, namespace: &Namespace, run: RunId) -> bool {
        let place = (namespace.clone(), run.number());
        self.runs.get(&place) == Some(&run)
    }

    /// Somebody has put an older copy back.
    pub fn forget_above(&mut self, number: u64) {
        self.runs.retain(|(_, of), _| *of <= number);
    }

    fn register(&mut self, asked: &Asked) -> Registration {
        let newest = self.newest(&asked.namespace);
        if newest == Some(asked.run) {
            return Registration::Registered;
        }
        let highest = newest.map_or(0, RunId::number);
        if highest >= asked.run.number() {
            return Registration::Taken { highest };
        }
        let place = (asked.namespace.clone(), asked.run.number());
        self.runs.insert(place, asked.run);
        Registration::Registered
    }
}

impl<S: Scene> World<S> {
    pub(super) fn register(&mut self, pid: Pid, asked: Asked) {
        match S::registry_answers(self, pid.node) {
            Answer::After(ms) => {
                self.after(ms / 2, Event::Registry(pid, asked, ms - ms / 2));
            }
            Answer::Lost => drop(self.run_registry.register(&asked)),
            Answer::Fails(ms) => {
                let fault = Err(RegistryFault("made to fail".into()));
                self.back(pid, ms, answer(asked, fault));
            }
            Answer::Away => {}
        }
    }

    pub(super) fn registry_takes(&mut self, pid: Pid, asked: Asked, ms: u64) {
        let registered = self.run_registry.register(&asked);
        self.back(pid, ms, answer(asked, Ok(registered)));
    }
}

fn answer(asked: Asked, outcome: Result<Registration, RegistryFault>) -> Input {
    let Asked { query, run, .. } = asked;
    Input::RunRegistered {
        query,
        run,
        outcome,
    }
}
