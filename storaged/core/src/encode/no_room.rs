//! Nodes that have no room for their part of a checkpoint, or for what describes it: everybody whom it concerns is told, so that a refused save, the
//! status and the log name the budget that is too small and not the steps that follow one another.

use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{CheckpointState, Digest, NodeName};

use crate::api::Now;
use crate::catalog::{Checkpoint, NoRoomThere, ParityRefused};
use crate::context::Context;
use crate::limits;
use crate::stage::cut;

impl ParityRefused {
    /// Said now, once more if it was so until now.
    fn again(before: Option<Self>, now: Now) -> Self {
        let goes_on = before.filter(|it| it.is_heard(now));
        Self {
            since: goes_on.map_or(now, |it| it.since),
            heard_at: now,
        }
    }

    /// Whether it is so still: a leader asks again within 2 s, and tells the answer every few seconds.
    pub fn is_heard(self, now: Now) -> bool {
        now.since(self.heard_at) < limits::NO_ROOM_HEARD_MS
    }
}

impl Checkpoint {
    /// Whether a node keeps parity of it.
    pub(super) fn is_coded_by(&self, node: &NodeName) -> bool {
        let nodes = self.manifest.as_ref().map(|it| it.nodes());
        let on = nodes.and_then(|nodes| nodes.get(node));
        on.is_some_and(|on| !on.coding.is_empty())
    }
}

impl Context {
    /// A node had room for its part of a checkpoint, or says why not: whoever asks why it is not protected is told.
    pub(crate) fn note_room(&mut self, key: &CheckpointKey, node: NodeName, why: Option<&String>) {
        let now = self.now;
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        match why {
            Some(reason) => {
                let before = checkpoint.no_room.as_ref().map(|it| it.refused);
                // A shard that has no room to come back, and what describes a step, are no parity that others of the job could take.
                let waits = checkpoint.state == CheckpointState::Committed;
                let is_parity = waits && checkpoint.is_coded_by(&node);
                checkpoint.no_room = Some(NoRoomThere {
                    node,
                    reason: reason.clone(),
                    refused: ParityRefused::again(before, now),
                });
                if let Some(table) = self.namespaces.get_mut(&key.namespace)
                    && is_parity
                {
                    let refused = ParityRefused::again(table.parity_refused, now);
                    table.parity_refused = Some(refused);
                }
            }
            None => checkpoint.no_room = checkpoint.no_room.take().filter(|it| it.node != node),
        }
    }

    /// As a leader: whoever has a trainer of the job can say why its steps are not protected.
    pub(super) fn tell_no_room(&mut self, key: &CheckpointKey, node: &NodeName, reason: &str) {
        let manifest = self.checkpoints.get(key).and_then(|c| c.manifest.clone());
        let Some(manifest) = manifest else {
            return;
        };
        for concerned in self.stakeholders(&manifest) {
            let message = PeerMessage::NoRoom {
                manifest: manifest.name(),
                node: node.clone(),
                reason: cut(reason).into(),
            };
            self.send(&concerned, message);
        }
    }

    /// Of a step that has not committed, of which this node has told the description of this name: it has no other name yet.
    fn described_here(&self, name: Digest) -> Option<CheckpointKey> {
        let told = |c: &&Checkpoint| c.description_here.is_some_and(|it| it.name == name);
        let newest = self.checkpoints.values().rev().find(told);
        newest.map(|c| c.key.clone())
    }

    /// Only who has a part in a step leads it or takes part in it.
    pub(crate) fn no_room_told(
        &mut self,
        from: &NodeName,
        name: Digest,
        node: NodeName,
        reason: &str,
    ) {
        let key = self.by_name.get(&name).cloned();
        let known = key.as_ref().and_then(|key| self.checkpoints.get(key));
        if let Some(manifest) = known.and_then(|c| c.manifest.clone()) {
            let concerned = self.stakeholders(&manifest);
            if !(concerned.contains(from) && concerned.contains(&node)) {
                return;
            }
        }
        if let Some(key) = key.or_else(|| self.described_here(name)) {
            self.note_room(&key, node, Some(&cut(reason).to_owned()));
            // Older steps that are kept for comfort go first.
            self.retire_older(&key.namespace);
        }
    }
}
