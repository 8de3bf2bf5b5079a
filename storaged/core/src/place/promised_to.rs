//! To whom a node has promised runs of a job, so that each of them alone can take its own back.

use std::collections::BTreeMap;

use storaged_wire::{NodeName, RunId};

use crate::limits;

/// To whom this node has promised runs of a job that are not open, by the runs' identities, which stay when a proposer takes a higher number.
#[derive(Debug, Clone)]
pub(crate) enum PromisedTo {
    Proposers(BTreeMap<u64, Promised>),
    /// It does not know of all: none of them can be awaited.
    NotAllKnown,
}

/// The last that was promised to one proposer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Promised {
    to: NodeName,
    run: RunId,
}

impl Default for PromisedTo {
    fn default() -> Self {
        Self::Proposers(BTreeMap::new())
    }
}

impl PromisedTo {
    /// After a restart of the daemon, which keeps what was promised and not to whom.
    pub fn since_recovered(granted: RunId, fence: RunId) -> Self {
        if granted <= fence {
            Self::default()
        } else {
            Self::NotAllKnown
        }
    }

    pub fn note(&mut self, from: &NodeName, run: RunId) {
        let Self::Proposers(of) = self else { return };
        let to = from.clone();
        let before = of.insert(run.identity(), Promised { to, run });
        // Two nodes that ask for one run: one of them has guessed the other's, and must not withdraw it.
        let is_anothers = before.is_some_and(|before| before.to != *from);
        if is_anothers || of.len() > limits::PROMISES_KEPT {
            *self = Self::NotAllKnown;
        }
    }

    /// Whether this very run was promised, and not withdrawn. A number that goes with another run's identity is anybody's to make up.
    pub fn has(&self, run: RunId) -> bool {
        let Self::Proposers(of) = self else {
            return false;
        };
        let promised = of.get(&run.identity());
        promised.is_some_and(|it| it.run == run || planted!("identities_are_proof"))
    }

    /// What is open, or fenced off, nobody waits for any more.
    pub fn forget_up_to(&mut self, fence: RunId) {
        if let Self::Proposers(of) = self {
            of.retain(|_, it| it.run > fence);
        }
    }

    /// Whether that was the last one.
    pub fn withdraw(&mut self, from: &NodeName, identity: u64) -> bool {
        let Self::Proposers(of) = self else {
            return false;
        };
        let is_its = of.get(&identity).is_some_and(|it| it.to == *from);
        if !is_its && !planted!("anybody_withdraws_promises") {
            return false;
        }
        of.remove(&identity).is_some() && (of.is_empty() || planted!("one_withdrawal_frees_a_name"))
    }
}
