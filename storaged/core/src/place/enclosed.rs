//! Which nodes hold what a manifest names beside its shards, as its home nodes count it.

use storaged_wire::{EnclosuresHeld, Manifest, ManifestBytes, NodeName};

use crate::catalog::Checkpoint;
use crate::context::Context;

impl Context {
    /// How many nodes may be lost before nobody has what the manifest names: one less than hold it. Counted until it is enough:
    /// all of 12,500 nodes hold it, and each of them says so in a message of its own.
    pub(super) fn enclosures_bear(
        &self,
        checkpoint: &Checkpoint,
        manifest: &ManifestBytes,
        enough: usize,
    ) -> usize {
        if manifest.manifest().enclosures().next().is_none() || planted!("enclosures_not_counted") {
            return usize::MAX;
        }
        let others = checkpoint.standing.enclosing.keys();
        let others = others
            .filter(|node| self.encloses(checkpoint, node))
            .take(enough + 1)
            .count();
        match self.enclosures_held(manifest.manifest()) {
            EnclosuresHeld::All => others,
            EnclosuresHeld::NotAll => others.saturating_sub(1),
        }
    }

    /// As a home node: whether no node that is up has what the manifest names.
    pub(crate) fn is_undescribed(&self, checkpoint: &Checkpoint) -> bool {
        let is_home = checkpoint.homes.contains(self.me());
        let manifest = checkpoint.manifest.as_ref();
        let lacks = |it: &Manifest| self.enclosures_held(it) == EnclosuresHeld::NotAll;
        let mut said = checkpoint.standing.enclosing();
        is_home
            && manifest.is_some_and(|it| lacks(it.manifest()))
            && self.settled()
            && !said.any(|node| self.encloses(checkpoint, node))
    }

    /// Whether another node that is up said that it holds what the manifest names, and is still who said so.
    fn encloses(&self, checkpoint: &Checkpoint, node: &NodeName) -> bool {
        let said = checkpoint.standing.enclosing.get(node);
        let peer = self.peers.get(node);
        peer.is_some_and(|peer| said == Some(&peer.generation))
    }

    /// Whether every home node has what the manifest names, or is gone.
    pub(super) fn enclosures_settled(
        &self,
        checkpoint: &Checkpoint,
        manifest: &ManifestBytes,
    ) -> bool {
        if manifest.manifest().enclosures().next().is_none() {
            return true;
        }
        let has = |home: &NodeName| {
            let is_me = home == self.me();
            let held = || self.enclosures_held(manifest.manifest()) == EnclosuresHeld::All;
            is_me && held() || self.encloses(checkpoint, home)
        };
        let mut homes = checkpoint.homes.iter();
        homes.all(|home| has(home) || self.is_gone(home))
    }
}
