//! What a node shows of itself: to operators, to its driver, and to whoever checks after a test that nothing is left.

use storaged_wire::drain::StepAfterDrain;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{Digest, SharedBytes};

use super::Node;
use crate::api::{ConnId, DurableFault, Viewer};
use crate::audit::{Audit, Shown};
use crate::budget::Ledger;
use crate::encode::NodeRate;
use crate::place::Standings;
use crate::scrub::ScrubState;
use crate::status::status_json;
use crate::trickle::Unfinished;

impl Node {
    /// Everything that this node's RAM is used for, for the ledger's check after a stress test.
    pub fn ledger(&self) -> Ledger {
        Ledger {
            sessions: self.sessions.count(),
            waiters: self.cx.waiters.len() + self.restores.waiters(),
            ..self.cx.ledger()
        }
    }

    /// Bytes of the budget that nothing has reserved.
    pub fn budget_free(&self) -> u64 {
        self.cx.budget_free()
    }

    /// The state as JSON.
    pub fn status_json(&self, viewer: &Viewer) -> String {
        let (scrub, ledger) = (self.scrub_state(), self.ledger());
        status_json(&self.cx, &self.sessions, &scrub, &ledger, viewer)
    }

    /// How reading RAM again goes.
    pub fn scrub_state(&self) -> ScrubState {
        self.scrub.state(&self.cx)
    }

    /// The rates of the other nodes' links, as measured in sessions that this node led.
    pub fn measured_rates(&self) -> Vec<NodeRate> {
        self.sessions.measured_rates(self.cx.now)
    }

    /// What is lost or left half done if this node stops now.
    pub fn unfinished(&self) -> Vec<Unfinished> {
        self.cx.unfinished()
    }

    /// Whether a checkpoint of which blocks are here is on its way to the durable tier: others may wait for word from here.
    pub fn awaits_copies(&self) -> bool {
        self.cx.awaits_copies()
    }

    /// What speaks against a restart of this node now, a line per namespace; see `Request::RestartSafe` for `bears`.
    pub fn restart_objections(&self, bears: Option<u32>, viewer: &Viewer) -> Vec<String> {
        self.cx.restart_objections(bears, viewer)
    }

    /// Of each job what speaks against the end of this node for good, where it holds something of that step; see
    /// `Request::RestartSafe` for `bears`.
    pub fn ends_with_this_node(&self, bears: Option<u32>) -> Vec<String> {
        self.cx.ends_with_this_node(bears)
    }

    /// Of each job's newest step, where it is coded, what it bears once this node has gone.
    pub fn after_drain(&self) -> Vec<StepAfterDrain> {
        self.cx.after_drain()
    }

    /// What the operator's metrics show of each committed checkpoint.
    pub fn standings(&self) -> Vec<Standings> {
        self.cx.standings()
    }

    /// Why the durable tier did not do what was asked last; none while it does.
    pub fn tier_fault(&self) -> Option<&DurableFault> {
        self.cx.tier_fault()
    }

    /// Counts what is there.
    pub fn audit(&self) -> Audit {
        let others = self.restores.unanswered() + self.runs.unanswered() + self.drops.unanswered();
        let others = others + self.pins.unanswered() + self.cx.successions.unanswered();
        let others = others + self.cx.early.count();
        let audit = self
            .sessions
            .audit(self.cx.audit(&self.sessions.parity_sets()));
        Audit {
            requests: audit.requests + others,
            ..audit
        }
    }

    /// Every checkpoint that this node knows.
    pub fn shown(&self) -> Vec<Shown> {
        self.cx.shown()
    }

    /// Whether it has heard that a checkpoint of a job, or a newer one, was protected.
    pub fn has_mark(&self, key: &CheckpointKey) -> bool {
        self.cx.mark_of(&key.namespace) >= Some(key.mark())
    }

    /// Connections that fill slots.
    pub fn filling(&self) -> Vec<ConnId> {
        self.cx.filling()
    }

    /// What it says in a parcel, while it keeps that for others.
    pub fn parcel(&self, name: Digest) -> Option<SharedBytes> {
        self.cx.parcels.shown(name)
    }
}
