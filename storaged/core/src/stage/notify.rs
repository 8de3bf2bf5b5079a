//! What a home node tells of a committed checkpoint to everyone who has to do with it, until they have answered.

use std::collections::BTreeSet;

use storaged_wire::peer::{CheckpointKey, PeerMessage, Relay};
use storaged_wire::{CheckpointState, Digest, ManifestBytes, NodeName};

use crate::api::Now;
use crate::catalog::Told;
use crate::context::Context;
use crate::limits;
use crate::parcels::Notice;

/// So often the time doubles after which a home node that does not answer is told once more: five minutes at last.
const UNHEARD_OF_DOUBLED_MAX: u32 = 6;

impl Context {
    /// Everyone who has to do with a checkpoint.
    pub(crate) fn stakeholders(&self, manifest: &ManifestBytes) -> BTreeSet<NodeName> {
        let record = manifest.manifest();
        let key = CheckpointKey::of(record);
        let nodes = manifest.nodes().iter();
        // A data node of a group that no rank is on has nothing to do with it.
        let concerned = nodes.filter(|(_, on)| !on.is_bare());
        let names = concerned.map(|(node, _)| node.clone());
        names.chain(self.homes_of(&key)).collect()
    }

    pub(crate) fn tell_everyone(&mut self, key: &CheckpointKey) {
        let Some(manifest) = self.checkpoints.get(key).and_then(|c| c.manifest.clone()) else {
            return;
        };
        let me = self.me().clone();
        let mut nodes = self.stakeholders(&manifest);
        nodes.remove(&me);
        if let Some((parcel, length)) = self.commit_as_parcel(key) {
            let to = nodes.into_iter().collect();
            return self.spread(parcel, length, &Relay { of: me, to });
        }
        for node in nodes {
            self.tell(key, &node);
        }
    }

    /// The parcel in which nodes hear of a commit, if it has just been made and does not fit a message.
    fn commit_as_parcel(&mut self, key: &CheckpointKey) -> Option<(Digest, u64)> {
        let checkpoint = self.checkpoints.get(key)?;
        let is_new = checkpoint.state == CheckpointState::Committed && checkpoint.told.is_empty();
        match self.commit_notice(key).filter(|_| is_new)? {
            PeerMessage::Parcel { parcel, length, .. } => Some((parcel, length)),
            _ => None,
        }
    }

    /// What one node hears that has missed it. One that has just come up has it at once, if it fits a message: it may be asked
    /// for its shards any moment. The others have fetched it, or are at it, and each home node would send it to all of them.
    fn commit_for_one(&mut self, key: &CheckpointKey, node: &NodeName) -> Option<PeerMessage> {
        let peer = self.peers.get(node)?;
        if self.now.since(peer.since) >= limits::REPEAT_MS {
            return self.commit_notice(key);
        }
        let checkpoint = self.checkpoints.get(key)?;
        let (manifest, durable) = (checkpoint.manifest.clone()?, checkpoint.durable_wish);
        if manifest.bytes().len() > self.setup.messages.inline {
            return self.commit_notice(key);
        }
        let manifest = manifest.shared();
        Some(PeerMessage::Committed { manifest, durable })
    }

    /// What nodes hear of a commit.
    fn commit_notice(&mut self, key: &CheckpointKey) -> Option<PeerMessage> {
        let checkpoint = self.checkpoints.get(key)?;
        let (manifest, durable) = (checkpoint.manifest.clone()?, checkpoint.durable_wish);
        let message = || PeerMessage::Committed {
            manifest: manifest.shared(),
            durable,
        };
        Some(self.wrap_again(key, Notice::Committed, message))
    }

    /// Brings one node up to what this node knows of a committed checkpoint.
    pub(crate) fn tell(&mut self, key: &CheckpointKey, node: &NodeName) {
        if !self.is_up(node) {
            return;
        }
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let Some(manifest) = checkpoint.manifest.clone() else {
            return;
        };
        let state = checkpoint.state;
        let counted = self.bears(checkpoint);
        let bears = counted.map_or(0, |bears| bears.losses);
        let told = checkpoint.told.get(node).copied();
        let knows = |known: CheckpointState| told.is_some_and(|told| told.state >= known);
        // A durable one that is not protected yet bears nothing that would be worth a word; one that has lost what it bore does, or
        // whoever was told of that would go by it when the next node is restarted.
        let is_counted = counted.is_some() && (bears > 0 || knows(CheckpointState::Durable));
        let is_protected = state == CheckpointState::Protected || is_counted;
        let is_protected = is_protected && state >= CheckpointState::Protected;
        let name = manifest.name();
        if told.is_none()
            && let Some(message) = self.commit_for_one(key, node)
        {
            self.send(node, message);
        }
        let knows_bears = told.is_some_and(|told| told.bears == bears);
        if is_protected && !(knows(CheckpointState::Protected) && knows_bears) {
            let manifest = name;
            self.send(node, PeerMessage::Protected { manifest, bears });
        }
        if state >= CheckpointState::Durable && !knows(CheckpointState::Durable) {
            self.send(node, PeerMessage::Durable { manifest: name });
        }
    }

    /// Home nodes repeat what a concerned node has not acknowledged.
    pub(crate) fn tell_all(&mut self) {
        let me = self.me().clone();
        for (key, manifest) in self.committed() {
            if self.homes_of(&key).contains(&me) {
                self.tell_unaware(&key, &manifest);
            } else {
                self.tell_homes_again(&key);
            }
            self.report_held(&key);
            self.report_owed(&key);
        }
    }

    fn tell_unaware(&mut self, key: &CheckpointKey, manifest: &ManifestBytes) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let bears = self.bears(checkpoint).map_or(0, |bears| bears.losses);
        let is_current = |told: &Told| told.state >= checkpoint.state && told.bears == bears;
        let knows = |node: &NodeName| checkpoint.told.get(node).is_some_and(is_current);
        let mut unaware = self.stakeholders(manifest);
        unaware.retain(|node| node != self.me() && !knows(node));
        for node in unaware {
            self.tell(key, &node);
        }
    }

    /// As a node with parts of a checkpoint: home nodes tell of it, unless they have all lost their memory or were cut off when it was
    /// committed. What none of them knows nobody codes or gives up.
    fn tell_homes_again(&mut self, key: &CheckpointKey) {
        let now = self.now;
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let is_old = |since: Now| now.since(since) >= limits::UNHEARD_OF_MS;
        // One that refuses it for good is told less and less often.
        let (last, times) = match checkpoint.told_homes {
            Some((at, times)) => (Some(at), times),
            None => (checkpoint.committed_at, 0),
        };
        let wait = limits::UNHEARD_OF_MS << times.min(UNHEARD_OF_DOUBLED_MAX);
        if !checkpoint.has_blocks()
            || checkpoint.giving_way.is_some()
            || last.is_none_or(|at| now.since(at) < wait)
        {
            return;
        }
        let is_silent = |home: &&NodeName| {
            let link = self.peers.get(home);
            link.is_some_and(|link| is_old(link.since))
                && !self.knows_what_is_held(checkpoint, home)
                && !checkpoint.standing.has_let_go(home)
        };
        let silent: Vec<NodeName> = checkpoint.homes.iter().filter(is_silent).cloned().collect();
        if silent.is_empty() || planted!("homes_told_once") {
            return;
        }
        if let Some(checkpoint) = self.checkpoints.get_mut(key) {
            checkpoint.told_homes = Some((now, times + 1));
            checkpoint.told.retain(|node, _| !silent.contains(node));
        }
        for home in silent {
            self.tell(key, &home);
        }
    }

    pub(crate) fn manifest_stored(&mut self, from: &NodeName, name: Digest, told: Told) {
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let known = checkpoint.told.entry(from.clone()).or_insert(told);
        known.state = known.state.max(told.state);
        known.bears = told.bears;
        let key = checkpoint.key.clone();
        if self.was_protected(&key) {
            self.reach(&key, CheckpointState::Protected);
        }
        self.weigh(&key);
    }
}
