//! Policy of the verb *place*: which run of a namespace is the newest, and healing.

mod ask_first;
mod disowned;
mod drain;
mod drains;
mod enclosed;
mod fence;
mod hear;
mod lacking;
mod left;
mod lost;
mod members;
mod missing;
mod open_run;
mod promised_to;
mod proposal;
mod restart;
mod run_registry;
mod standing;
mod unknown_run;
mod withdraw;
mod words;

pub(crate) use drains::Drains;
pub(crate) use fence::{RunStanding, wrong_token};
pub(crate) use lacking::Lacking;
pub(crate) use promised_to::PromisedTo;
pub use restart::Standings;
pub(crate) use standing::{Blocks, Standing};

use std::collections::{BTreeMap, VecDeque};

use storaged_wire::Namespace;
use storaged_wire::peer::NamedRun;

use proposal::RunProposal;
use unknown_run::WaitingHello;

use crate::api::{Now, QueryId};

/// Runs that are being opened here, and trainers whose run nobody here has heard of yet.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    proposals: BTreeMap<QueryId, RunProposal>,
    hellos: BTreeMap<QueryId, WaitingHello>,
    /// The last that were not opened after all.
    withdrawn: VecDeque<NamedRun>,
}

impl Runs {
    /// When one of them must be looked at again.
    pub fn deadlines(&self, now: Now) -> impl Iterator<Item = Now> {
        let proposals = self.proposals.values();
        let hellos = self.hellos.values().map(|waiting| waiting.deadline);
        proposals
            .map(move |proposal| proposal.wakes(now))
            .chain(hellos)
    }

    /// Jobs whose next run is being opened.
    pub fn namespaces(&self) -> impl Iterator<Item = &Namespace> {
        self.proposals.values().map(|proposal| &proposal.namespace)
    }

    /// Requests that have not been answered.
    pub fn unanswered(&self) -> usize {
        self.proposals.len() + self.hellos.len()
    }
}
