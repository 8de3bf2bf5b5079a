//! Promises that are taken back. Who does not open a run after all says so, and its job's name is nobody's again where nothing else has
//! made it somebody's. Without that, who begins a name by the wrong token and breaks off would keep it for as long as promises are remembered.
//!
//! It is safe because whoever gave up never opens that run, and because a node lets go of a name only when *all* that it has
//! promised is withdrawn, each by the node that it was promised to: with one promise outstanding another owner could be promised the
//! same name, and a majority of each would open it.

use storaged_wire::peer::{NamedRun, PeerMessage};
use storaged_wire::{Namespace, NodeName, RunId};

use super::proposal::RunProposal;
use crate::catalog::Claim;
use crate::context::Context;
use crate::limits;
use crate::place::Runs;
use crate::testimony::words_of_opened;

impl Runs {
    /// Tells all that this node does not open a run after all: those whose link is up at once, and the others once it is.
    pub(super) fn withdraw(&mut self, proposal: &RunProposal, cx: &mut Context) {
        if !proposal.may_be_withdrawn() || planted!("promises_are_not_withdrawn") {
            return;
        }
        let run = proposal.named();
        cx.send_all(&PeerMessage::WithdrawRun(run.clone()));
        // Behind its own wish, which may not have been heard yet: it would promise what nobody takes back.
        let me = cx.me().clone();
        if planted!("own_promises_come_late") {
            cx.run_withdrawn(&me, &run);
        } else {
            cx.send(&me, PeerMessage::WithdrawRun(run.clone()));
        }
        if self.withdrawn.len() >= limits::WITHDRAWN_KEPT {
            self.withdrawn.pop_front();
        }
        self.withdrawn.push_back(run);
    }

    /// What a peer that has just come up may have promised, and may not have heard that nobody opens it.
    pub(super) fn withdraw_at(&self, node: &NodeName, cx: &mut Context) {
        for run in &self.withdrawn {
            if !planted!("withdrawals_are_said_once") {
                cx.send(node, PeerMessage::WithdrawRun(run.clone()));
            }
        }
    }
}

impl Context {
    pub(super) fn note_promise(&mut self, to: &NodeName, run: &NamedRun) {
        let now = self.now;
        if let Some(table) = self.namespaces.get_mut(&run.namespace)
            && run.run > table.fence
        {
            table.promised_to.note(to, run.run);
            table.granted_at = now;
        }
    }

    /// A proposer has given up. Of a job of which nothing else is known nobody is the owner any more.
    pub(crate) fn run_withdrawn(&mut self, from: &NodeName, run: &NamedRun) {
        let Some(table) = self.namespaces.get_mut(&run.namespace) else {
            return;
        };
        if !table.promised_to.withdraw(from, run.run.identity()) {
            return;
        }
        table.granted = table.fence;
        let is_opened = table.fence > RunId::ZERO || words_of_opened(table) > 0;
        self.keeping.touch_job(&run.namespace);
        if !is_opened && !self.has_checkpoints(&run.namespace) {
            self.unclaim(&run.namespace);
        }
    }

    /// Nothing but boards is left of a job.
    fn unclaim(&mut self, namespace: &Namespace) {
        let is_changed = self.successions.proven(namespace).is_some();
        if !self.has_boards(namespace) && !is_changed {
            return self.forget_job(namespace);
        }
        if let Some(table) = self.namespaces.get_mut(namespace) {
            table.claim = Claim::Boards;
        }
    }
}
