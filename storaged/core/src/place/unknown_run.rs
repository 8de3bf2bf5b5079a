//! A trainer that comes with a run that nobody here has heard of. It may have been opened while this node was away, so
//! the peers and the durable tier are asked, for a bounded time; a run that nobody opened counts for nothing and fences
//! nobody.

use std::collections::BTreeSet;

use storaged_wire::local::Reply;
use storaged_wire::peer::{Fence, PeerMessage};
use storaged_wire::{NodeName, Owner, Refusal, RefusalCode};

use super::fence::{RunStanding, wrong_token};
use crate::api::{
    ClaimedRun, ConnId, DurableFault, DurablePolicy, Now, Output, QueryId, RequestId,
};
use crate::context::Context;
use crate::limits;
use crate::place::Runs;
use crate::stage::TrainerHello;

/// A hello that waits for somebody who knows its run.
#[derive(Debug, Clone)]
pub(crate) struct WaitingHello {
    pub id: RequestId,
    pub hello: TrainerHello,
    waiting_for: BTreeSet<NodeName>,
    tier: TierSearch,
    pub deadline: Now,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TierSearch {
    Running,
    Over,
    /// It has newer runs, up to this number. That counts if no node remembers better: an attempt that has failed may have
    /// left its claim.
    Superseded(u64),
}

impl Runs {
    /// A trainer whose run is unknown here waits, if there is one.
    pub(crate) fn hellos_wait(
        &mut self,
        id: RequestId,
        unknown: Option<TrainerHello>,
        cx: &mut Context,
    ) {
        if let Some(hello) = unknown {
            self.hello_waits(id, hello, cx);
        }
    }

    fn hello_waits(&mut self, id: RequestId, hello: TrainerHello, cx: &mut Context) {
        let query = QueryId(cx.fresh());
        let tier = match cx.setup.durable {
            DurablePolicy::Absent => TierSearch::Over,
            _ => TierSearch::Running,
        };
        if tier == TierSearch::Running {
            let (namespace, run) = (hello.namespace.clone(), hello.run);
            cx.out.push(Output::FindRun {
                query,
                namespace,
                run,
            });
        }
        let waiting = WaitingHello {
            id,
            hello,
            waiting_for: BTreeSet::new(),
            tier,
            deadline: cx.now.plus(limits::RUN_CONFIRM_MS),
        };
        self.hellos.insert(query, waiting);
        for peer in cx.peers.keys().cloned().collect::<Vec<_>>() {
            self.hellos_ask(&peer, cx);
        }
        self.advance_hellos(cx);
    }

    /// Asks a peer for what it knows of the runs that are waited for.
    pub(crate) fn hellos_ask(&mut self, node: &NodeName, cx: &mut Context) {
        let queries: Vec<QueryId> = self.hellos.keys().copied().collect();
        for query in queries {
            let Some(waiting) = self.hellos.get_mut(&query) else {
                continue;
            };
            if waiting.waiting_for.insert(node.clone()) {
                let (query, namespace) = (query.0, waiting.hello.namespace.clone());
                cx.send(node, PeerMessage::RunQuery { query, namespace });
            }
        }
    }

    pub(crate) fn hellos_forget_peer(&mut self, node: &NodeName) {
        for waiting in self.hellos.values_mut() {
            waiting.waiting_for.remove(node);
        }
    }

    pub(crate) fn forget_hellos(&mut self, conn: ConnId) {
        self.hellos.retain(|_, waiting| waiting.id.conn != conn);
    }

    pub(crate) fn fence_told(
        &mut self,
        from: &NodeName,
        query: QueryId,
        fence: Option<Fence>,
        cx: &mut Context,
    ) {
        if let Some(fence) = fence {
            cx.learn_fence(fence);
        }
        if let Some(waiting) = self.hellos.get_mut(&query) {
            waiting.waiting_for.remove(from);
        }
        self.advance_hellos(cx);
    }

    /// The durable tier has looked for a claim of the run.
    pub(crate) fn run_found(
        &mut self,
        query: QueryId,
        outcome: Result<ClaimedRun, DurableFault>,
        cx: &mut Context,
    ) {
        let Some(waiting) = self.hellos.get_mut(&query) else {
            return;
        };
        waiting.tier = match outcome {
            Ok(ClaimedRun::Superseded { newest }) => TierSearch::Superseded(newest),
            _ => TierSearch::Over,
        };
        if let Ok(ClaimedRun::Newest(owner)) = outcome {
            let waiting = self.hellos.remove(&query);
            if let Some(waiting) = waiting {
                cx.hello_confirmed(waiting, owner);
            }
        }
        self.advance_hellos(cx);
    }

    /// Answers the hellos whose run is known by now, or that have waited long enough.
    pub(crate) fn advance_hellos(&mut self, cx: &mut Context) {
        for query in self.hellos.keys().copied().collect::<Vec<_>>() {
            let Some(waiting) = self.hellos.get(&query) else {
                continue;
            };
            let hello = &waiting.hello;
            let asked_all = waiting.waiting_for.is_empty() && waiting.tier != TierSearch::Running;
            let over = (asked_all && cx.settled()) || waiting.deadline <= cx.now;
            let unknown = cx.standing(&hello.namespace, hello.run) == RunStanding::Unknown;
            if unknown && !over {
                continue;
            }
            let Some(waiting) = self.hellos.remove(&query) else {
                continue;
            };
            let outcome = if !unknown {
                cx.admit(waiting.id, waiting.hello)
            } else if let TierSearch::Superseded(newest) = waiting.tier {
                Err(older_run(&waiting.hello, newest))
            } else {
                Err(unknown_run(&waiting.hello))
            };
            if let Err(refusal) = outcome {
                cx.reply(waiting.id, Reply::Refused(refusal));
            }
        }
    }
}

impl Context {
    fn hello_confirmed(&mut self, waiting: WaitingHello, owner: Owner) {
        let outcome = if owner == waiting.hello.owner {
            self.admit(waiting.id, waiting.hello)
        } else {
            Err(wrong_token(&waiting.hello.namespace))
        };
        if let Err(refusal) = outcome {
            self.reply(waiting.id, Reply::Refused(refusal));
        }
    }
}

fn unknown_run(hello: &TrainerHello) -> Refusal {
    Refusal::new(
        RefusalCode::UnknownRun,
        format!(
            "expected a run of {} that was opened, got run {}, of which no node that is up has heard: open a run and use the one that is given",
            hello.namespace, hello.run
        ),
    )
}

fn older_run(hello: &TrainerHello, newest: u64) -> Refusal {
    Refusal::new(
        RefusalCode::OlderRun,
        format!(
            "expected run {newest} or newer of {}, got run {}: the durable tier has newer runs of the job, this one must end",
            hello.namespace, hello.run
        ),
    )
}
