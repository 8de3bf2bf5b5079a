//! To whom a node has promised runs of a job, so that each of them alone can take its own back.

use std::collections::BTreeMap;

use storaged_wire::{NodeName, RunId};

use crate::limits;

/// To whom this node has promised runs of a job, by the runs' identities, which stay when a proposer takes a higher number.
#[derive(Debug, Clone)]
pub(crate) enum PromisedTo {
    Proposers(BTreeMap<u64, NodeName>),
    /// It does not know of all: none of them can be awaited.
    NotAllKnown,
}

impl Default for PromisedTo {
    fn default() -> Self {
        Self::Proposers(BTreeMap::new())
    }
}

impl PromisedTo {
    /// After a restart of the daemon, which keeps what was promised and not to whom.
    pub fn since_recovered(granted: RunId) -> Self {
        if granted == RunId::ZERO {
            Self::default()
        } else {
            Self::NotAllKnown
        }
    }

    pub fn note(&mut self, from: &NodeName, identity: u64) {
        let Self::Proposers(of) = self else { return };
        let before = of.insert(identity, from.clone());
        // Two nodes that ask for one run: one of them has guessed the other's, and must not withdraw it.
        let is_anothers = before.is_some_and(|before| before != *from);
        if is_anothers || of.len() > limits::PROMISES_KEPT {
            *self = Self::NotAllKnown;
        }
    }

    /// Whether a run of this identity was promised, and not withdrawn.
    pub fn has(&self, identity: u64) -> bool {
        matches!(self, Self::Proposers(of) if of.contains_key(&identity))
    }

    /// Whether that was the last one.
    pub fn withdraw(&mut self, from: &NodeName, identity: u64) -> bool {
        let Self::Proposers(of) = self else {
            return false;
        };
        if of.get(&identity) != Some(from) && !planted!("anybody_withdraws_promises") {
            return false;
        }
        of.remove(&identity).is_some() && (of.is_empty() || planted!("one_withdrawal_frees_a_name"))
    }
}
