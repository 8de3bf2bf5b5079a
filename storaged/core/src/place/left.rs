//! Nodes that have left the cluster for good, by a newer epoch. Whoever is only down may be back with its memory, and is waited for; who was
//! removed is not: a step that it should have coded and has not is never protected, and whoever waits for that is told so.

use std::collections::BTreeSet;

use storaged_wire::peer::CheckpointKey;
use storaged_wire::{CheckpointState, ManifestBytes, NodeName, Refusal, RefusalCode};

use crate::catalog::{Checkpoint, WaiterWish};
use crate::context::Context;

impl Context {
    /// Whether a node is a member no more, and not linked to any more either.
    pub(crate) fn has_left(&self, node: &NodeName) -> bool {
        let members = || self.setup.members.iter();
        !self.is_up(node) && !members().any(|member| member.name == *node)
    }

    /// The coding nodes of a group that all have left, if there is such a group: what its data nodes hold is coded by nobody.
    fn coders_left<'a>(&self, manifest: &'a ManifestBytes) -> Option<&'a [NodeName]> {
        let groups = manifest.manifest().groups.iter();
        let mut coding = groups.map(|group| group.coding.as_slice());
        coding.find(|coding| !coding.is_empty() && coding.iter().all(|it| self.has_left(it)))
    }

    /// Why a committed checkpoint will not be protected, if it will not. One that becomes durable is as good.
    pub(crate) fn never_protected(
        &self,
        checkpoint: &Checkpoint,
        wanted: CheckpointState,
    ) -> Option<Refusal> {
        let manifest = checkpoint.manifest.as_ref()?;
        let will_be_durable = self.wants_durable(checkpoint) && checkpoint.owing.given_up.is_none();
        if wanted != CheckpointState::Protected
            || checkpoint.state >= wanted
            || will_be_durable
            || planted!("the_removed_awaited")
        {
            return None;
        }
        let left: Vec<&str> = (self.coders_left(manifest)?.iter())
            .map(NodeName::as_str)
            .collect();
        let (run, step) = (checkpoint.key.run, checkpoint.key.step);
        let text = format!(
            "step {step} of run {run} will not be protected: {} should have coded it, and left the cluster before (epoch {}); it is \
             whole as long as the nodes that sealed it are there, and goes when a newer step is protected: save again",
            left.join(", "),
            self.setup.epoch
        );
        Some(Refusal::new(RefusalCode::Abandoned, text))
    }

    /// Who waits for a protection that will not come is told.
    pub(crate) fn wake_for_the_left(&mut self) {
        let mut keys = BTreeSet::new();
        for waiter in self.waiters.for_steps() {
            if let WaiterWish::State { key, state } = &waiter.wish {
                let checkpoint = self.checkpoints.get(key);
                let never = checkpoint.and_then(|it| self.never_protected(it, *state));
                keys.extend(never.map(|_| key.clone()));
            }
        }
        keys.iter().for_each(|key: &CheckpointKey| self.wake(key));
    }
}
