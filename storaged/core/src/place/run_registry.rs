//! Runs of a cluster with a registry, which settles whose a number is: it takes the place of a majority of the members. So a cluster
//! whose majority has died goes on, and of two halves that do not see each other none gives out the other's number. Nodes that are up are asked
//! for promises first as ever: they may know of higher runs than a registry that was put back from an older copy, and whose a job is the
//! registry does not know. So what it answers opens a run only while the promises hold.

use std::collections::BTreeSet;

use storaged_wire::{Namespace, NodeName, Refusal, RefusalCode, RunId};

use super::proposal::{Phase, RunProposal};
use crate::api::{Now, Output, QueryId, Registration, RegistryFault};
use crate::context::Context;
use crate::limits;
use crate::place::Runs;

/// A run that is being registered.
#[derive(Debug, Clone)]
pub(crate) struct Registering {
    promises: Promises,
    /// When it is asked again: an answer may be lost, and an outage pass.
    again_at: Now,
    /// What it said last that cannot be used.
    fault: Option<RegistryFault>,
}

/// Whether what was promised before the registry was asked still is.
#[derive(Debug, Clone)]
enum Promises {
    Of(BTreeSet<NodeName>),
    /// Who promised it may have forgotten that, and have promised the job to another owner since.
    Lapsed,
}

impl Registering {
    pub const fn wakes(&self) -> Now {
        self.again_at
    }

    /// A peer is gone, with what it has promised.
    pub fn forget_peer(&mut self, node: &NodeName) {
        let has_promised = matches!(&self.promises, Promises::Of(nodes) if nodes.contains(node));
        if has_promised {
            self.lapse();
        }
    }

    pub fn lapse(&mut self) {
        if !planted!("registered_on_promises_that_are_gone") {
            self.promises = Promises::Lapsed;
        }
    }
}

impl Runs {
    /// Nodes have promised the run: asks the registry for its number.
    pub(super) fn register(&mut self, query: QueryId, cx: &mut Context) {
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        let again_at = cx.now.plus(limits::RUN_REGISTER_AGAIN_MS);
        match &mut proposal.phase {
            Phase::Registering(before) => before.again_at = again_at,
            Phase::Promising { promised, .. } => {
                let promises = Promises::Of(std::mem::take(promised));
                proposal.phase = Phase::Registering(Registering {
                    promises,
                    again_at,
                    fault: None,
                });
            }
            Phase::Asking(_) | Phase::Waiting { .. } | Phase::Raising { .. } => return,
        }
        cx.out.push(Output::RegisterRun {
            query,
            namespace: proposal.namespace.clone(),
            run: proposal.run(),
        });
    }

    /// Asks again whoever has not answered, or could not.
    pub(super) fn register_again(&mut self, query: QueryId, cx: &mut Context) {
        if let Some(proposal) = self.proposals.get(&query)
            && let Phase::Registering(registering) = &proposal.phase
            && registering.again_at <= cx.now
        {
            self.register(query, cx);
        }
    }

    /// The registry has answered of this run.
    pub(crate) fn run_registered(
        &mut self,
        query: QueryId,
        run: RunId,
        outcome: Result<Registration, RegistryFault>,
        cx: &mut Context,
    ) {
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        // An answer for the number before opens nothing: the run that is proposed now may be somebody else's.
        let is_this = proposal.run() == run || planted!("registered_as_another_run");
        let Phase::Registering(registering) = &mut proposal.phase else {
            return;
        };
        if !is_this {
            return;
        }
        // The answer may be heard before this node looks at the time.
        let was_stopped = cx.was_stopped() && !planted!("registered_after_a_stop");
        let has_lapsed = was_stopped || matches!(registering.promises, Promises::Lapsed);
        match outcome {
            // Promised anew by all who are up, it is registered again, which changes nothing there.
            Ok(Registration::Registered) if has_lapsed => {
                self.begin_promising(query, cx);
                self.advance_proposal(query, cx);
            }
            Ok(Registration::Registered) => self.raise(query, cx),
            Ok(Registration::Taken { .. }) if planted!("taken_in_the_registry_opened") => {
                self.raise(query, cx);
            }
            Ok(Registration::Taken { highest }) => self.go_above(query, highest, cx),
            Err(fault) if planted!("registry_away_is_no_matter") => {
                drop(fault);
                self.raise(query, cx);
            }
            // It may pass, or be put right, before the client's time is over.
            Err(fault) => registering.fault = Some(fault),
        }
    }
}

/// The client's time is over, and the registry has not said whose the number is.
pub(super) fn unregistered(proposal: &RunProposal, registering: &Registering) -> Refusal {
    let (namespace, run): (&Namespace, RunId) = (&proposal.namespace, proposal.run());
    let fault = registering.fault.as_ref();
    let said = fault.map_or_else(|| "no answer in time".into(), ToString::to_string);
    let text = format!(
        "expected the registry (membership.registry) to give run {run} of {namespace} its number, got: {said}; \
         no run was opened and none has ended: try again when it answers (`storaged node ls`)"
    );
    Refusal::new(RefusalCode::TimedOut, text)
}
