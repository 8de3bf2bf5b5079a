//! Nodes that operators drain at the same time. Each loses nothing if it goes alone; of two that go at the same moment, each would count
//! on the other. So whoever is drained says so, and of two the one with the later turn stays until what is left bears its loss too.

use std::fmt;

use storaged_wire::peer::PeerMessage;
use storaged_wire::{ManifestBytes, NodeName};

use crate::context::Context;

/// Nodes whose loss comes before this one's.
#[derive(Debug, Default)]
pub(super) struct GoneFirst {
    /// They are drained.
    drained: Vec<NodeName>,
    /// They have not said yet whether they are.
    silent: Vec<NodeName>,
}

impl GoneFirst {
    pub fn count(&self) -> u32 {
        let nodes = self.drained.len() + self.silent.len();
        u32::try_from(nodes).unwrap_or(u32::MAX)
    }
}

impl fmt::Display for GoneFirst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |nodes: &[NodeName]| {
            let names: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
            names.join(", ")
        };
        if !self.drained.is_empty() {
            write!(f, "; drained before this node: {}", names(&self.drained))?;
        }
        if !self.silent.is_empty() {
            let silent = names(&self.silent);
            write!(f, "; not heard yet whether they are drained: {silent}")?;
        }
        Ok(())
    }
}

impl Context {
    /// An operator drains this node.
    pub(crate) fn begin_drain(&mut self) {
        if self.drains.turn().is_none() {
            self.drains.begin(self.now);
            self.tell_drain();
        }
    }

    /// Tells peers that have not heard of it that this node is drained.
    pub(crate) fn tell_drain(&mut self) {
        self.drains.forget_gone(self.now);
        let Some(turn) = self.drains.turn() else {
            return;
        };
        let unaware: Vec<NodeName> = self.drains.unaware(self.peers.keys()).cloned().collect();
        for peer in unaware {
            self.send(&peer, PeerMessage::Draining { turn });
        }
    }

    fn note_drain(&mut self, node: &NodeName, turn: u64) {
        if let Some(peer) = self.peers.get(node) {
            self.drains.note(node, peer.generation, turn);
        }
    }

    /// Hears who is drained; any other message comes back.
    pub(crate) fn hear_of_drains(
        &mut self,
        from: &NodeName,
        message: PeerMessage,
    ) -> Option<PeerMessage> {
        match message {
            PeerMessage::Draining { turn } => {
                self.note_drain(from, turn);
                let turn = self.drains.turn();
                self.send(from, PeerMessage::DrainNoted { turn });
            }
            PeerMessage::DrainNoted { turn } => {
                self.drains.heard_by(from);
                if let Some(turn) = turn {
                    self.note_drain(from, turn);
                }
            }
            other => return Some(other),
        }
        None
    }

    /// Of the nodes that a checkpoint concerns, those that go before this one, or may.
    pub(super) fn gone_first(&self, manifest: &ManifestBytes) -> GoneFirst {
        if planted!("drains_count_on_each_other") {
            return GoneFirst::default();
        }
        let concerned = self.stakeholders(manifest);
        let drained = self.drains.before(self.me());
        let silent = self.drains.silent(self.peers.keys(), self.now);
        let is_concerned = |node: &&NodeName| concerned.contains(*node);
        GoneFirst {
            drained: drained.filter(is_concerned).cloned().collect(),
            silent: silent.filter(is_concerned).cloned().collect(),
        }
    }
}
