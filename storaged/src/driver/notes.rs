//! What the decisions tell people: each note is counted, and said in the log as often as it helps.

use storaged_core::{FalseStatement, Note};
use storaged_wire::NodeName;
use storaged_wire::peer::{CheckpointKey, SessionFault};

use super::Daemon;
use crate::repeats::numberless;

impl Daemon {
    pub(super) fn note(&mut self, note: &Note) {
        let metrics = &self.ops.metrics;
        match note {
            Note::State { key, state } => {
                metrics.observe_state(state.as_str());
                tracing::info!(namespace = %key.namespace, run = %key.run, step = key.step.get(), "{state}");
            }
            Note::Bears { key, bears } => {
                let (losses, of) = (bears.losses, bears.of);
                let full = bears.is_full();
                tracing::info!(namespace = %key.namespace, run = %key.run, step = key.step.get(), losses, of, full, "bears so many more losses of nodes");
            }
            Note::DurableGivenUp { key, reason } => self.durable_given_up(key, reason),
            Note::Abandoned { key, reason } => self.abandoned(key, reason),
            Note::ParityYields { key } => self.parity_yields(key),
            Note::NotDescribed { key, reason } => self.not_described(key, reason),
            Note::LaneProtected {
                key,
                lane,
                elapsed_ms,
            } => {
                metrics.observe_lane(*elapsed_ms);
                tracing::debug!(namespace = %key.namespace, run = %key.run, step = key.step.get(), group = lane.group, lane = lane.index, elapsed_ms, "lane protected");
            }
            Note::ShapeChosen { key, lane, reason } => {
                tracing::debug!(namespace = %key.namespace, run = %key.run, step = key.step.get(), group = lane.group, lane = lane.index, reason, "encode planned");
            }
            Note::SessionFailed { key, node, fault } => self.session_failed(key, node, fault),
            Note::Replanned {
                key,
                lane,
                node,
                reason,
            } => {
                metrics.observe_replan();
                tracing::info!(namespace = %key.namespace, run = %key.run, step = key.step.get(), group = lane.group, lane = lane.index, %node, reason, "a slow node is gone around");
            }
            Note::Healed { key, lane, node } => {
                metrics.observe_healed();
                tracing::info!(namespace = %key.namespace, run = %key.run, step = key.step.get(), group = lane.group, lane = lane.index, %node, "healed");
            }
            Note::Rotten { key, block, chunks } => self.rotten(key, *block, *chunks),
            Note::DurableFailed { key, reason } => self.durable_failed(key, reason),
            Note::DurableState { fault: None } => {
                tracing::info!("the durable tier answers");
            }
            Note::DurableState { fault: Some(fault) } => {
                tracing::error!(reason = %fault, "the durable tier does not answer; RAM goes on, nothing new becomes durable");
            }
            Note::Quarantined { key, reason } => {
                metrics.observe_quarantine();
                tracing::warn!(namespace = %key.namespace, run = %key.run, step = %key.step, reason, "quarantined in the durable tier");
            }
            Note::Evicted { namespace, bytes } => {
                tracing::info!(%namespace, bytes, "a job that has ended left RAM: another one needed the room");
            }
            Note::Stopped { ms } => self.stopped(*ms),
            Note::FalseStatement { node, statement } => self.false_statement(node, *statement),
            Note::Disbelieved { node } => {
                tracing::error!(%node, "nothing is believed any more that this peer alone says, until its daemon is restarted: it has said again and again what cannot be so");
            }
            Note::PeerFault { node, reason } => {
                metrics.observe_peer_fault();
                let line = format!("{node} cannot be {reason}");
                if let Some(silent) = self.repeats.tell(&line, self.clock.now()) {
                    tracing::warn!(%node, reason, silent, "a peer sent something that cannot be");
                }
            }
        }
    }

    fn stopped(&mut self, ms: u64) {
        self.ops.metrics.observe_stop();
        if let Some(silent) = self.repeats.tell("stopped", self.clock.now()) {
            tracing::warn!(
                ms,
                silent,
                "this process did not run for so long; by its own count nothing is called protected before it has found out what became of its peers"
            );
        }
    }

    fn false_statement(&mut self, node: &NodeName, statement: FalseStatement) {
        self.ops.metrics.observe_false_statement(node);
        let line = format!("{node} says {}", statement.name());
        if let Some(silent) = self.repeats.tell(&line, self.clock.now()) {
            let kind = statement.name();
            tracing::warn!(%node, kind, said = %statement, silent, "a peer said what cannot be so; it is ignored");
        }
    }

    fn abandoned(&mut self, key: &CheckpointKey, reason: &str) {
        self.ops.metrics.observe_abandoned();
        let line = format!("{} given up {}", key.namespace, numberless(reason));
        if let Some(silent) = self.repeats.tell(&line, self.clock.now()) {
            tracing::warn!(namespace = %key.namespace, run = %key.run, step = key.step.get(), reason, silent, "given up");
        }
    }

    fn parity_yields(&self, key: &CheckpointKey) {
        tracing::info!(namespace = %key.namespace, run = %key.run, step = key.step.get(),
            "parity makes way: other nodes have no room for this step, and this one has none for another; raise memory.budget");
    }

    fn not_described(&mut self, key: &CheckpointKey, reason: &str) {
        let line = format!("{} not described {}", key.namespace, numberless(reason));
        if let Some(silent) = self.repeats.tell(&line, self.clock.now()) {
            tracing::warn!(namespace = %key.namespace, run = %key.run, step = key.step.get(), reason, silent,
                "a step cannot commit: this node has no room for what describes it");
        }
    }

    fn durable_given_up(&mut self, key: &CheckpointKey, reason: &str) {
        self.ops.metrics.observe_durable_given_up();
        let line = format!("{} copy given up {}", key.namespace, numberless(reason));
        if let Some(silent) = self.repeats.tell(&line, self.clock.now()) {
            tracing::warn!(namespace = %key.namespace, run = %key.run, step = key.step.get(), reason, silent, "the durable copy was given up");
        }
    }

    fn durable_failed(&mut self, key: &CheckpointKey, reason: &str) {
        let line = format!("{key:?} durable {reason}");
        if let Some(silent) = self.repeats.tell(&line, self.clock.now()) {
            tracing::warn!(namespace = %key.namespace, run = %key.run, step = key.step.get(), reason, silent,
                "the durable tier failed; trying again");
        }
    }

    fn session_failed(&mut self, key: &CheckpointKey, node: &NodeName, fault: &SessionFault) {
        self.ops.metrics.observe_session_failure();
        if let SessionFault::WrongBytes { node: blamed, .. } = fault {
            self.ops.metrics.observe_wrong_bytes(blamed);
            tracing::warn!(namespace = %key.namespace, run = %key.run, step = key.step.get(), %node, %blamed, ?fault, "a node sent wrong bytes; its memory or processor may be failing");
            return;
        }
        if let SessionFault::NoRoom(reason) = fault {
            let line = format!("{node} no room {}", numberless(reason));
            if let Some(silent) = self.repeats.tell(&line, self.clock.now()) {
                tracing::warn!(namespace = %key.namespace, run = %key.run, step = key.step.get(), %node, reason, silent,
                    "a step cannot be protected: a node has no room for its part");
            }
            return;
        }
        let line = format!("{key:?} {node} {fault:?}");
        if let Some(silent) = self.repeats.tell(&line, self.clock.now()) {
            tracing::info!(namespace = %key.namespace, run = %key.run, step = key.step.get(), %node, ?fault, silent,
                "a session failed and will be tried again");
        }
    }
}
