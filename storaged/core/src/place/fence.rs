//! Fencing by run. A run is opened by a majority of the configured nodes, each of which accepts it only if it is
//! above every run that it knows; so two incarnations of a job never get the same run, and the older one is
//! refused by whoever has heard of the newer. Nothing is ordered by a clock.

use std::collections::BTreeSet;

use storaged_codec::digest;
use storaged_wire::local::Reply;
use storaged_wire::peer::{Fence, PeerMessage};
use storaged_wire::{Namespace, NodeName, Owner, Refusal, RefusalCode, RunId};

use crate::io::{ConnId, Now, Output, QueryId, RequestId};
use crate::limits;
use crate::node::{DurablePolicy, Node};
use crate::trickle::{DurableFault, DurableListing, durable_unavailable};

/// A run that this node is opening for a trainer.
#[derive(Debug, Clone)]
pub(crate) struct RunProposal {
    pub id: RequestId,
    pub namespace: Namespace,
    pub owner: Owner,
    pub run: RunId,
    pub accepted: BTreeSet<NodeName>,
    pub asked: BTreeSet<NodeName>,
    /// The durable tier has been asked for the runs it knows.
    pub durable_known: bool,
    /// It did not say.
    pub durable_fault: Option<DurableFault>,
    pub durable_deadline: Now,
    pub deadline: Now,
}

impl Node {
    pub(crate) fn open_run(&mut self, id: RequestId, timeout_ms: u32) -> Result<(), Refusal> {
        let attached = self.attached(id)?.clone();
        let query = QueryId(self.fresh());
        let fence = self.fence_of(&attached.namespace);
        let identity = self.identity(query);
        let listed = self.setup.durable == DurablePolicy::Absent;
        let wait = u64::from(timeout_ms).min(limits::REQUEST_MAX_MS);
        self.proposals.insert(
            query,
            RunProposal {
                id,
                namespace: attached.namespace.clone(),
                owner: attached.owner,
                run: above(fence, identity),
                accepted: BTreeSet::new(),
                asked: BTreeSet::new(),
                durable_known: listed,
                durable_fault: None,
                durable_deadline: self.now.plus(limits::DURABLE_LIST_MAX_MS),
                deadline: self.now.plus(wait),
            },
        );
        if !listed {
            let namespace = attached.namespace;
            self.out.push(Output::ListDurable {
                query,
                namespace,
                step: None,
            });
        }
        self.advance_proposal(query);
        Ok(())
    }

    /// Of one proposal: generations are random, and a query's number is used once in a generation.
    fn identity(&self, query: QueryId) -> u64 {
        let name = format!("run {} {} {}", self.me(), self.setup.generation, query.0);
        let digest = digest(name.as_bytes());
        let (first, _) = digest
            .as_bytes()
            .split_first_chunk::<8>()
            .expect("32 bytes");
        u64::from_le_bytes(*first).max(1)
    }

    fn fence_of(&self, namespace: &Namespace) -> RunId {
        self.namespaces
            .get(namespace)
            .map_or(RunId::new(0), |table| table.fence)
    }

    /// What the durable tier says of the runs it knows.
    pub(crate) fn proposal_learns(
        &mut self,
        query: QueryId,
        outcome: Result<DurableListing, DurableFault>,
    ) {
        self.tier_answered(outcome.as_ref().err());
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        match outcome {
            Ok(listing) => {
                let mut manifests = listing.manifests.iter();
                if manifests.any(|m| m.manifest().owner != proposal.owner) {
                    let (id, namespace) = (proposal.id, proposal.namespace.clone());
                    self.proposals.remove(&query);
                    return self.reply(id, Reply::Refused(wrong_token(&namespace)));
                }
                proposal.durable_known = true;
                proposal.durable_fault = None;
                if let Some(run) = listing.newest_run.filter(|run| *run >= proposal.run) {
                    proposal.run = above(run, proposal.run.identity());
                    proposal.accepted.clear();
                    proposal.asked.clear();
                }
            }
            Err(fault) => proposal.durable_fault = Some(fault),
        }
        self.advance_proposal(query);
    }

    /// Without the durable tier's word a run is opened only where a node remembers the namespace: the fence that it
    /// remembers is above whatever the tier holds.
    fn without_the_tier(&mut self, query: QueryId) -> Result<(), Refusal> {
        let settled = self.settled();
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return Ok(());
        };
        if proposal.durable_known {
            return Ok(());
        }
        let late = DurableFault::TimedOut("no listing in time".into());
        if proposal.durable_fault.is_none() && proposal.durable_deadline <= self.now {
            proposal.durable_fault = Some(late);
        }
        let Some(fault) = &proposal.durable_fault else {
            return Ok(());
        };
        if self.namespaces.contains_key(&proposal.namespace) {
            proposal.durable_known = true;
        } else if settled {
            return Err(durable_unavailable(&proposal.namespace, fault));
        }
        Ok(())
    }

    /// Asks whom it has not asked, and finishes once a majority has accepted and nobody is left to ask.
    fn advance_proposal(&mut self, query: QueryId) {
        if let Err(refusal) = self.without_the_tier(query)
            && let Some(proposal) = self.proposals.remove(&query)
        {
            return self.reply(proposal.id, Reply::Refused(refusal));
        }
        let Some(proposal) = self.proposals.get(&query).cloned() else {
            return;
        };
        if !proposal.durable_known {
            return;
        }
        let fence = Fence {
            namespace: proposal.namespace.clone(),
            owner: proposal.owner,
            run: proposal.run,
        };
        let mut everyone: Vec<NodeName> = self.peers.keys().cloned().collect();
        everyone.push(self.me().clone());
        for node in everyone
            .iter()
            .filter(|node| !proposal.asked.contains(*node))
        {
            if let Some(entry) = self.proposals.get_mut(&query) {
                entry.asked.insert(node.clone());
            }
            let fence = fence.clone();
            self.send(
                node,
                PeerMessage::FenceProposal {
                    query: query.0,
                    fence,
                },
            );
        }
        self.finish_proposal(query, &everyone);
    }

    fn finish_proposal(&mut self, query: QueryId, everyone: &[NodeName]) {
        let Some(proposal) = self.proposals.get(&query) else {
            return;
        };
        let majority = self.setup.members.len() / 2 + 1;
        let all_up = everyone.iter().all(|node| proposal.accepted.contains(node));
        if proposal.accepted.len() < majority || !all_up || !self.settled() {
            return;
        }
        let (id, run) = (proposal.id, proposal.run);
        self.proposals.remove(&query);
        self.reply(id, Reply::RunOpened { run });
    }

    pub(crate) fn fence_proposed(&mut self, from: &NodeName, query: u64, fence: Fence) {
        let owned = self.check_owner(&fence.namespace, fence.owner).is_ok();
        let known = self.fence_of(&fence.namespace);
        let accepted = owned && fence.run > known;
        if accepted {
            self.raise_fence(&fence.namespace, fence.owner, fence.run);
        }
        let answer = Fence {
            run: self.fence_of(&fence.namespace),
            owner: self.owner_of(&fence.namespace).unwrap_or(fence.owner),
            namespace: fence.namespace,
        };
        self.send(
            from,
            PeerMessage::FenceAnswer {
                query,
                accepted,
                fence: answer,
            },
        );
    }

    pub(crate) fn fence_answered(
        &mut self,
        from: &NodeName,
        query: QueryId,
        accepted: bool,
        fence: Fence,
    ) {
        let Some(proposal) = self.proposals.get_mut(&query) else {
            return;
        };
        if fence.owner != proposal.owner {
            let (id, namespace) = (proposal.id, proposal.namespace.clone());
            self.proposals.remove(&query);
            return self.reply(id, Reply::Refused(wrong_token(&namespace)));
        }
        // A peer that heard of this very proposal through another peer's fences holds it too.
        if accepted || fence.run == proposal.run {
            proposal.accepted.insert(from.clone());
        } else if fence.run > proposal.run {
            proposal.run = above(fence.run, proposal.run.identity());
            proposal.accepted.clear();
            proposal.asked.clear();
        }
        self.advance_proposal(query);
    }

    /// Answers may be lost while links come up: whoever has not accepted is asked again.
    pub(crate) fn repeat_proposals(&mut self) {
        for query in self.proposals.keys().copied().collect::<Vec<_>>() {
            if let Some(proposal) = self.proposals.get_mut(&query) {
                proposal.asked = proposal.accepted.clone();
            }
            self.advance_proposal(query);
        }
    }

    pub(crate) fn expire_proposals(&mut self) {
        for query in self.proposals.keys().copied().collect::<Vec<_>>() {
            self.advance_proposal(query);
        }
        let now = self.now;
        let late: Vec<(QueryId, RunProposal)> = self
            .proposals
            .iter()
            .filter(|(_, proposal)| proposal.deadline <= now)
            .map(|(query, proposal)| (*query, proposal.clone()))
            .collect();
        for (query, proposal) in late {
            self.proposals.remove(&query);
            let majority = self.setup.members.len() / 2 + 1;
            let text = format!(
                "expected {majority} of {} nodes to accept run {} of {}, got {}: check `storaged status` for nodes that are down",
                self.setup.members.len(),
                proposal.run,
                proposal.namespace,
                proposal.accepted.len()
            );
            self.reply(
                proposal.id,
                Reply::Refused(Refusal::new(RefusalCode::TimedOut, text)),
            );
        }
    }

    /// What a peer that has just come up may not know.
    pub(crate) fn greet(&mut self, node: &NodeName) {
        let fences: Vec<Fence> = self
            .namespaces
            .iter()
            .map(|(namespace, table)| Fence {
                namespace: namespace.clone(),
                owner: table.owner,
                run: table.fence,
            })
            .collect();
        if !fences.is_empty() {
            self.send(node, PeerMessage::Fences(fences));
        }
        for query in self.proposals.keys().copied().collect::<Vec<_>>() {
            self.advance_proposal(query);
        }
        self.plans_ask(node);
    }

    pub(crate) fn learn_fences(&mut self, from: &NodeName, fences: Vec<Fence>) {
        for fence in fences {
            if self.check_owner(&fence.namespace, fence.owner).is_ok() {
                self.raise_fence(&fence.namespace, fence.owner, fence.run);
            }
        }
        // Whoever greets has just come up, or sees us anew: it may have missed or forgotten what we proposed.
        self.propose_again(Some(from));
    }

    pub(crate) fn forget_proposals(&mut self, conn: ConnId) {
        self.proposals
            .retain(|_, proposal| proposal.id.conn != conn);
    }
}

/// A run above `highest`, told by its proposal's identity from another of the same number.
fn above(highest: RunId, identity: u64) -> RunId {
    RunId::with_identity(highest.number().saturating_add(1), identity)
}

fn wrong_token(namespace: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::WrongToken,
        format!(
            "namespace {namespace} belongs to another job token: set STORAGED_TOKEN to the token it was created with"
        ),
    )
}
