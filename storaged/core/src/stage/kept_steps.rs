//! Older steps that stay in RAM beside the newest safe one, as many as [`Setup::keep_steps`](crate::Setup) says: whoever goes back to
//! before a loss spike need not read the durable tier. They are a comfort. No save waits for them, and nothing is refused or left unprotected
//! because of them: the oldest gives way on all nodes at once, since a step whose blocks one node alone gave away would be
//! healed by the others, for ever.

use std::collections::BTreeSet;

use storaged_wire::Namespace;
use storaged_wire::peer::{CheckpointKey, PeerMessage};

use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::limits;

impl Context {
    /// The steps that stay: the newest safe one, and as many before it as are configured. With them those that would be among them and
    /// of which this node has not heard yet that they are protected.
    pub(crate) fn kept_steps(&self, namespace: &Namespace) -> BTreeSet<CheckpointKey> {
        let (safe, most) = (self.safe_state(), self.steps_to_keep(namespace));
        let newest_first = self.checkpoints.values().rev();
        let of_it = newest_first.filter(|c| c.key.namespace == *namespace);
        let mut kept = BTreeSet::new();
        let mut may_follow = Vec::new();
        for checkpoint in of_it {
            if kept.len() == most {
                break;
            } else if checkpoint.state >= safe {
                kept.insert(checkpoint.key.clone());
            } else if most > 1 && self.may_yet_be_kept(checkpoint) {
                may_follow.push(checkpoint.key.clone());
            }
        }
        kept.extend(may_follow);
        kept
    }

    /// How many safe steps stay. By default one, and nothing is looked for.
    fn steps_to_keep(&self, namespace: &Namespace) -> usize {
        match self.setup.keep_steps {
            1 => 1,
            _ if planted!("one_step_kept") => 1,
            _ if self.lacks_room(namespace) => 1,
            most => most,
        }
    }

    /// A node that was restarted, or was cut off, may hear of a newer step first. Were an older one not taken up or given away for that,
    /// nobody could put its blocks back here.
    fn may_yet_be_kept(&self, checkpoint: &Checkpoint) -> bool {
        let heard_at = checkpoint.committed_at;
        let is_recent = |at| self.now.since(at) < limits::KEPT_UNPROTECTED_MS;
        heard_at.is_some_and(is_recent) && !planted!("kept_steps_not_awaited")
    }

    /// Whether so many newer checkpoints of the namespace are as safe as can be that this one is of no use any more.
    pub(super) fn is_outranked(&self, key: &CheckpointKey) -> bool {
        let safe = self.safe_state();
        let newer = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == key.namespace && c.key > *key && c.state >= safe);
        let mut enough = self.steps_to_keep(&key.namespace);
        if planted!("older_steps_not_taken_up") {
            enough = 1;
        }
        newer.take(enough).count() == enough
    }

    /// Gives up what was not protected in time to be kept.
    pub(crate) fn retire_unkept(&mut self) {
        if self.setup.keep_steps == 1 {
            return;
        }
        for namespace in self.namespaces.keys().cloned().collect::<Vec<_>>() {
            self.retire_older(&namespace);
        }
    }

    /// Whether it is here only because older steps are kept: a newer one is as safe, and nothing else needs it.
    pub(super) fn is_kept_step(&self, checkpoint: &Checkpoint) -> bool {
        let key = &checkpoint.key;
        let newest = self.newest_safe(&key.namespace);
        newest.is_some_and(|newest| *key < newest && self.is_as_safe(&newest, checkpoint))
            && self.kept_steps(&key.namespace).contains(key)
            && !self.is_due(checkpoint)
            && !Self::is_read(checkpoint)
    }

    /// Whether a step that would be the newest safe one is not, because a node has no room for its part of it.
    fn lacks_room(&self, namespace: &Namespace) -> bool {
        if planted!("kept_steps_take_the_room") {
            return false;
        }
        let newest = self.newest_safe(namespace);
        let mut newer = self.checkpoints.values().rev();
        newer.any(|c| {
            let is_newer = newest.as_ref().is_none_or(|newest| c.key > *newest);
            c.key.namespace == *namespace && is_newer && self.no_room_of(c).is_some()
        })
    }

    /// Gives up a kept step here and on all peers.
    pub(super) fn give_up_kept_step(&mut self, key: &CheckpointKey) {
        let reason = "a newer step needs the room of this one, which was kept";
        if !planted!("kept_steps_given_up_alone") {
            self.send_all(&PeerMessage::Superseded {
                key: key.clone(),
                reason: reason.into(),
            });
        }
        self.retire(key);
    }
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::CheckpointState;
    use storaged_wire::local::DurableWish;
    use storaged_wire::peer::PeerMessage;

    use crate::api::{Input, Now};
    use crate::limits::KEPT_UNPROTECTED_MS;
    use crate::node::Node;
    use crate::testkit::{hear, last_that_keeps, manifest};

    /// A peer tells of the commit of a step.
    fn told_of(node: &mut Node, at: u64, step: u64) {
        let manifest = manifest(step, &["a", "b"], &["c"], 5, digest(b"any"));
        let committed = PeerMessage::Committed {
            manifest: manifest.seal().expect("a sound manifest").shared(),
            durable: DurableWish::Never,
        };
        hear(node, at, "a", committed);
    }

    /// And that it is protected.
    fn protected(node: &mut Node, at: u64, step: u64) {
        let manifest = manifest(step, &["a", "b"], &["c"], 5, digest(b"any"));
        let manifest = manifest.seal().expect("a sound manifest").name();
        hear(node, at, "a", PeerMessage::Protected { manifest, bears: 1 });
    }

    fn known(node: &Node) -> Vec<(u64, CheckpointState)> {
        let all = node.context().checkpoints.values();
        all.map(|c| (c.key.step.get(), c.state)).collect()
    }

    /// A node that was restarted: were the older step not taken up, nobody could put its blocks back there.
    #[test]
    fn a_node_that_hears_of_the_newer_step_first_keeps_the_older_one_too() {
        use CheckpointState::Protected;
        let mut node = last_that_keeps(2, &["a", "b", "c"], 2, 1);
        told_of(&mut node, 1, 3);
        protected(&mut node, 2, 3);
        told_of(&mut node, 3, 2);
        node.handle(Now(1_500), Input::Tick);
        protected(&mut node, 1_600, 2);
        let late = 2 * KEPT_UNPROTECTED_MS;
        node.handle(Now(late), Input::Tick);
        assert_eq!(known(&node), [(2, Protected), (3, Protected)]);
        // Two are as many as stay.
        told_of(&mut node, late + 1, 1);
        assert_eq!(known(&node).len(), 2);
    }

    #[test]
    fn what_is_not_protected_in_time_goes() {
        let mut node = last_that_keeps(2, &["a", "b", "c"], 2, 1);
        told_of(&mut node, 1, 3);
        protected(&mut node, 2, 3);
        told_of(&mut node, 3, 2);
        node.handle(Now(KEPT_UNPROTECTED_MS), Input::Tick);
        assert_eq!(known(&node).len(), 2);
        node.handle(Now(KEPT_UNPROTECTED_MS + 1_003), Input::Tick);
        assert_eq!(known(&node), [(3, CheckpointState::Protected)]);
    }
}
