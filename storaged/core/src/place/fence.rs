//! What a node knows of the runs of a namespace. A *promise* keeps a number for whoever wants to open it and fences
//! nothing; a *fence* is a run that was opened, and refuses every lower one. Nothing is ordered by a clock.
//! How a run is opened is in `open_run`; what becomes of a trainer whose run is unknown here in `unknown_run`.

use storaged_wire::peer::{Fence, NamedRun, PeerMessage, PromiseOutcome};
use storaged_wire::{Namespace, NodeName, Owner, Refusal, RefusalCode, RunId};

use crate::context::Context;
use crate::limits;
use crate::place::Runs;

/// What a run is to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunStanding {
    /// A newer one was opened.
    Fenced,
    /// It was opened, or is being opened.
    Known,
    /// Nobody has told of it.
    Unknown,
}

impl Context {
    pub(crate) fn fence_of(&self, namespace: &Namespace) -> RunId {
        self.namespaces
            .get(namespace)
            .map_or(RunId::ZERO, |table| table.fence)
    }

    fn promise_of(&self, namespace: &Namespace) -> RunId {
        self.namespaces
            .get(namespace)
            .map_or(RunId::ZERO, |table| table.promised)
    }

    /// What this node knows of a run. Below a promise that is not a fence yet a run still counts.
    pub(crate) fn standing(&self, namespace: &Namespace, run: RunId) -> RunStanding {
        let fence = self.fence_of(namespace);
        if run < fence {
            RunStanding::Fenced
        } else if run > RunId::ZERO && (run == fence || run == self.promise_of(namespace)) {
            RunStanding::Known
        } else {
            RunStanding::Unknown
        }
    }

    /// The highest number that a run of this namespace is known to have, opened, promised or of a checkpoint here.
    pub(crate) fn highest_number(&self, namespace: &Namespace) -> u64 {
        let of_checkpoints = self
            .checkpoints
            .keys()
            .filter(|key| key.namespace == *namespace)
            .map(|key| key.run)
            .next_back();
        let known = self.fence_of(namespace).max(self.promise_of(namespace));
        known.max(of_checkpoints.unwrap_or(RunId::ZERO)).number()
    }

    pub(crate) fn check_fence(&self, namespace: &Namespace, run: RunId) -> Result<(), Refusal> {
        let fence = self.fence_of(namespace);
        if run >= fence || planted!("older_run_let_in") {
            return Ok(());
        }
        Err(Refusal::new(
            RefusalCode::OlderRun,
            format!(
                "expected run {fence} or newer of {namespace}, got run {run}: a newer run of the job has started, this one must end"
            ),
        ))
    }

    fn fence_record(&self, namespace: &Namespace) -> Option<Fence> {
        let table = self.namespaces.get(namespace)?;
        Some(Fence {
            namespace: namespace.clone(),
            owner: table.owner,
            run: table.fence,
            promised: table.promised,
        })
    }

    /// Fences off runs below `run`, and lets the peers know.
    pub(crate) fn raise_fence(&mut self, namespace: &Namespace, owner: Owner, run: RunId) {
        let table = self.namespace_table(namespace, owner);
        if run <= table.fence {
            return;
        }
        table.fence = run;
        let Some(fence) = self.fence_record(namespace) else {
            return;
        };
        self.send_all(&PeerMessage::Fences(vec![fence]));
        self.end_fenced_trainers(namespace);
    }

    /// Somebody wants to open a run. A node that has just started has not heard yet what its peers know: it says
    /// nothing, and is asked again.
    pub(crate) fn promise_asked(&mut self, from: &NodeName, query: u64, asked: NamedRun) {
        if !self.settled() {
            return;
        }
        let outcome = self.promise(&asked);
        let message = PeerMessage::RunPromised {
            query,
            run: asked.run,
            outcome,
        };
        self.send(from, message);
    }

    /// Keeps a number for one proposer: it is above every number known here, or kept for this very run already.
    fn promise(&mut self, asked: &NamedRun) -> PromiseOutcome {
        if self.check_owner(&asked.namespace, asked.owner).is_err() {
            return PromiseOutcome::WrongOwner;
        }
        if self.is_promised_here(asked) {
            return PromiseOutcome::Promised;
        }
        let highest = self.highest_number(&asked.namespace);
        let is_equal = asked.run.number() == highest;
        if asked.run.number() <= highest && !(is_equal && planted!("equal_run_promised")) {
            return PromiseOutcome::Taken { highest };
        }
        if planted!("promising_fences") {
            self.raise_fence(&asked.namespace, asked.owner, asked.run);
        }
        if !planted!("promises_forgotten") {
            let table = self.namespace_table(&asked.namespace, asked.owner);
            (table.promised, table.granted) = (asked.run, asked.run);
        }
        PromiseOutcome::Promised
    }

    /// Whether this node itself has promised a run, or it is open. What a peer has promised only keeps its number from
    /// everybody: were it consent, then of two runs of one number a node could be in the majority of both.
    fn is_promised_here(&self, asked: &NamedRun) -> bool {
        if planted!("peers_promise_is_consent") {
            return self.standing(&asked.namespace, asked.run) == RunStanding::Known;
        }
        let table = self.namespaces.get(&asked.namespace);
        table.is_some_and(|table| asked.run == table.fence || asked.run == table.granted)
    }

    /// A peer's promise binds this node too, which may have forgotten its own.
    pub(crate) fn learn_fence(&mut self, fence: Fence) {
        if self.check_owner(&fence.namespace, fence.owner).is_err() {
            return;
        }
        self.raise_fence(&fence.namespace, fence.owner, fence.run);
        let table = self.namespace_table(&fence.namespace, fence.owner);
        table.promised = table.promised.max(fence.promised);
    }

    pub(crate) fn fence_asked(&mut self, from: &NodeName, query: u64, namespace: &Namespace) {
        let fence = self.fence_record(namespace);
        self.send(from, PeerMessage::RunAnswer { query, fence });
    }
}

impl Runs {
    /// A run was opened.
    pub(crate) fn fence_rises(
        &mut self,
        from: &NodeName,
        query: u64,
        opened: &NamedRun,
        cx: &mut Context,
    ) {
        if cx.check_owner(&opened.namespace, opened.owner).is_err() {
            return;
        }
        cx.raise_fence(&opened.namespace, opened.owner, opened.run);
        cx.send(from, PeerMessage::FenceRaised { query });
        self.advance_hellos(cx);
    }

    /// What a peer that has just come up may not know.
    pub(crate) fn greet(&mut self, node: &NodeName, cx: &mut Context) {
        let namespaces: Vec<Namespace> = cx.namespaces.keys().cloned().collect();
        let fences: Vec<Fence> = namespaces
            .iter()
            .filter_map(|namespace| cx.fence_record(namespace))
            .collect();
        for fences in fences.chunks(limits::FENCES_MAX) {
            cx.send(node, PeerMessage::Fences(fences.to_vec()));
        }
        self.advance_proposals(cx);
        self.hellos_ask(node, cx);
    }

    pub(crate) fn learn_fences(&mut self, fences: Vec<Fence>, cx: &mut Context) {
        for fence in fences {
            cx.learn_fence(fence);
        }
        self.advance_hellos(cx);
    }
}

pub(crate) fn wrong_token(namespace: &Namespace) -> Refusal {
    Refusal::new(
        RefusalCode::WrongToken,
        format!(
            "namespace {namespace} belongs to another job token: set STORAGED_TOKEN to the token it was created with"
        ),
    )
}
