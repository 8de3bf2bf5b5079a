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

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::peer::PeerMessage;
    use storaged_wire::{Enclosed, EnclosuresHeld};

    use crate::testkit::{committed, hear, hear_from_all, last_of, manifest};

    /// Everything is coded, and only two nodes say that they have what describes the step.
    #[test]
    fn a_step_bears_no_more_losses_than_leave_somebody_who_has_its_schema() {
        let mut node = last_of(&["a", "b", "c", "d"], 2, 2);
        let mut manifest = manifest(1, &["a", "b"], &["c", "d"], 4096, digest(b"shard"));
        manifest.schema = Enclosed::naming(b"schema");
        let manifest = manifest.seal().expect("a sound manifest");
        let name = manifest.name();
        hear_from_all(&mut node, 1, &committed(&manifest));
        let (all, not_all) = (EnclosuresHeld::All, EnclosuresHeld::NotAll);
        for (from, enclosures) in [("a", all), ("b", all), ("c", not_all)] {
            let held = PeerMessage::Held {
                manifest: name,
                version: 1,
                shards: Vec::new(),
                parity: Vec::new(),
                enclosures,
            };
            hear(&mut node, 2, from, held);
        }
        let cx = node.context();
        let checkpoint = &cx.checkpoints[&cx.by_name[&name]];
        assert_eq!(cx.enclosures_bear(checkpoint, &manifest, 3), 1);
    }
}
