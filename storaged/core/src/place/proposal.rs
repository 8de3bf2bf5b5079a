//! A run that is being opened: its number, what it waits for, and who has promised it.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::NamedRun;
use storaged_wire::{Namespace, NodeName, Owner, Refusal, RefusalCode, RunId};

use super::ask_first::Asking;
use super::run_registry::Registering;
use crate::api::{DurableFault, Now, RequestId};
use crate::context::Context;
use crate::limits;

/// A run that this node is opening for a trainer.
#[derive(Debug, Clone)]
pub(crate) struct RunProposal {
    pub id: RequestId,
    pub namespace: Namespace,
    pub(super) owner: Owner,
    pub(super) run: RunId,
    /// The highest number that anybody has told of.
    pub(super) above: u64,
    pub(super) attempts: u32,
    /// How often the tier was asked for a number.
    pub(super) claims: u32,
    /// How often each node has said that the number is taken, and who calls the namespace another one's.
    pub(super) taken: BTreeMap<NodeName, u32>,
    pub(super) foreign: BTreeSet<NodeName>,
    pub(super) tier: TierClaim,
    pub(super) phase: Phase,
    pub(super) deadline: Now,
}

/// What the durable tier has to say of the number.
#[derive(Debug, Clone)]
pub(super) enum TierClaim {
    Absent,
    Asked,
    /// It has given the number.
    Claimed,
    Failed {
        fault: DurableFault,
        at: Now,
    },
}

#[derive(Debug, Clone)]
pub(super) enum Phase {
    /// For peers that may know the job.
    Asking(Asking),
    /// For the tier's number, or for this proposer's turn.
    Waiting { until: Now },
    Promising {
        since: Now,
        asked: BTreeSet<NodeName>,
        promised: BTreeSet<NodeName>,
    },
    /// Promised, and the registry was asked for its number.
    Registering(Registering),
    /// The run is opened: the others are being told.
    Raising {
        until: Now,
        told: BTreeSet<NodeName>,
    },
}

impl RunProposal {
    /// As it is proposed now.
    pub const fn run(&self) -> RunId {
        self.run
    }

    /// Above all numbers that are known now.
    pub(super) fn set_above(&mut self, highest: u64) -> Result<(), Refusal> {
        self.above = self.above.max(highest);
        self.run = above_all(&self.namespace, self.above, self.run.identity())?;
        Ok(())
    }

    pub(super) fn named(&self) -> NamedRun {
        NamedRun {
            namespace: self.namespace.clone(),
            owner: self.owner,
            run: self.run,
        }
    }

    /// When it goes on without having heard anything.
    pub fn wakes(&self, now: Now) -> Now {
        let phase = match &self.phase {
            Phase::Asking(asking) => asking.wakes(now),
            Phase::Waiting { until } | Phase::Raising { until, .. } => *until,
            Phase::Promising { since, .. } => since.plus(limits::PROMISE_MAX_MS),
            Phase::Registering(registering) => registering.wakes(),
        };
        if phase > now {
            phase.min(self.deadline)
        } else {
            self.deadline
        }
    }

    pub(super) fn promises(&self) -> usize {
        match &self.phase {
            Phase::Promising { promised, .. } => promised.len(),
            Phase::Asking(_)
            | Phase::Waiting { .. }
            | Phase::Registering(_)
            | Phase::Raising { .. } => 0,
        }
    }

    /// Whether nodes may have promised it, and nobody has been told that it is open. What a registry answers later opens nothing.
    pub(super) fn may_be_withdrawn(&self) -> bool {
        match self.phase {
            Phase::Waiting { .. } => self.attempts > 0,
            Phase::Registering(_) => !planted!("registered_promises_stay"),
            Phase::Promising { .. } => true,
            Phase::Asking(_) | Phase::Raising { .. } => false,
        }
    }

    /// Whether so many others call the job another owner's that one of them is sound.
    pub(super) fn is_called_anothers(&self, cx: &Context) -> bool {
        let others = self.foreign.iter().filter(|it| *it != cx.me());
        others.count() >= cx.words_needed()
    }

    /// Whoever has not promised is to be asked again: answers may be lost while links come up.
    pub(super) fn asks_again(&mut self) {
        if let Phase::Promising {
            asked, promised, ..
        } = &mut self.phase
        {
            asked.clone_from(promised);
        }
    }

    /// A peer is gone, with what it has said: it may have forgotten what it promised.
    pub(super) fn forget_peer(&mut self, node: &NodeName) {
        self.foreign.remove(node);
        match &mut self.phase {
            Phase::Asking(asking) => asking.forget_peer(node),
            Phase::Promising {
                asked, promised, ..
            } => {
                asked.remove(node);
                if !planted!("promises_of_the_gone_count") {
                    promised.remove(node);
                }
            }
            Phase::Registering(registering) => registering.forget_peer(node),
            Phase::Waiting { .. } | Phase::Raising { .. } => {}
        }
    }
}

/// The run of this identity above every number up to `highest`.
pub(super) fn above_all(
    namespace: &Namespace,
    highest: u64,
    identity: u64,
) -> Result<RunId, Refusal> {
    let number = RunId::new(highest).next_number();
    let number = number.filter(|number| *number <= limits::RUN_NUMBER_MAX);
    let run = number.map(|number| RunId::with_identity(number, identity));
    run.ok_or_else(|| {
        let text = format!(
            "expected a run number below {} to be the highest of {namespace}, got {highest}: no higher number is left, use another namespace",
            limits::RUN_NUMBER_MAX
        );
        Refusal::new(RefusalCode::NoRunLeft, text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_last_number_there_is_none() {
        let namespace = Namespace::new("job").unwrap();
        let last = above_all(&namespace, limits::RUN_NUMBER_MAX - 1, 5).unwrap();
        assert_eq!(last, RunId::with_identity(limits::RUN_NUMBER_MAX, 5));
        for highest in [limits::RUN_NUMBER_MAX, u64::MAX] {
            let refused = above_all(&namespace, highest, 5).unwrap_err();
            assert_eq!(refused.code, RefusalCode::NoRunLeft);
        }
    }
}
