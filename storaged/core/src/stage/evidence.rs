//! What this node knows itself of what peers say before a checkpoint is protected: its own sealed shards, the trainers that it has
//! let in, and what has been committed of the same run.

use storaged_wire::peer::{CheckpointKey, PeerMessage, SealedShard};
use storaged_wire::{
    CheckpointState, Digest, ManifestBytes, NodeName, Rank, ShardEntry, WorldSize,
};

use crate::api::{FalseStatement, Now};
use crate::catalog::{Checkpoint, Told};
use crate::context::Context;
use crate::limits;

impl Context {
    /// Whether a commit that a node tells of may be one: it is the node's to say, and its manifest has the shards that this node has
    /// sealed. A manifest alone proves neither that a run was opened nor that anything is whole.
    pub(super) fn may_be_committed(
        &self,
        from: &NodeName,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
    ) -> bool {
        if from == self.me() || planted!("any_commit_is_believed") {
            return true;
        }
        // Nobody is named: what comes as a parcel may have been told by another one in this node's name.
        key.run.number() <= limits::RUN_NUMBER_MAX
            && self.homes_of(key).contains(from)
            && self.has_these_shards(key, manifest)
            && self.commits_of(from) < limits::COMMITS_PER_PEER_MAX
    }

    /// Whether nodes that have parts of a step tell this home node of it, and so many that one of them is sound. If all home nodes have
    /// lost their memory, or not heard of it before they were cut off, nobody else does: nobody would code or heal it, and it would hold
    /// its slots.
    pub(super) fn is_vouched_for(
        &mut self,
        from: &NodeName,
        key: &CheckpointKey,
        manifest: &ManifestBytes,
    ) -> bool {
        let is_its_to_say = self.homes_of(key).contains(self.me())
            && manifest.nodes().contains_key(from)
            && key.run.number() <= limits::RUN_NUMBER_MAX
            && self.has_these_shards(key, manifest)
            && self.commits_of(from) < limits::COMMITS_PER_PEER_MAX;
        let is_ignored = if self.is_pinned(key) {
            planted!("pins_not_vouched_for")
        } else {
            planted!("orphans_not_vouched_for")
        };
        if !is_its_to_say || is_ignored {
            return false;
        }
        let Some(table) = self.namespaces.get_mut(&key.namespace) else {
            return false;
        };
        // Also where one node alone holds parts of it and is no home node: it could have made up all of it.
        let same = table.vouched.hears(from, key.mark(), manifest.name());
        let is_enough = same >= limits::WORDS_NEEDED;
        if is_enough {
            table.vouched.forget(key.mark());
        }
        is_enough
    }

    /// What a node has said that is gone or not believed any more counts for no step.
    pub(crate) fn forget_vouchers(&mut self, node: &NodeName) {
        for table in self.namespaces.values_mut() {
            table.vouched.forget_teller(node);
        }
    }

    /// As a home node that has taken a step up from those who hold parts of it: whether so many of them take it for protected that one of them
    /// is sound. Coded anew, a lost shard would be waited for.
    pub(super) fn was_protected(&self, key: &CheckpointKey) -> bool {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return false;
        };
        let is_home = |node: &NodeName| checkpoint.homes.contains(node);
        let is_vouched_for = checkpoint.told_by.as_ref().is_some_and(|by| !is_home(by));
        // All nodes of a large job answer of each step.
        if !is_vouched_for || checkpoint.state >= CheckpointState::Protected || !is_home(self.me())
        {
            return false;
        }
        let calls_it_so = |told: &Told| told.state >= CheckpointState::Protected;
        let holders = checkpoint.told.iter().filter(|(node, _)| !is_home(node));
        holders.filter(|(_, told)| calls_it_so(told)).count() >= limits::WORDS_NEEDED
    }

    /// Names a node that itself tells of a commit which nobody can have made.
    pub(super) fn judges_commit(&mut self, from: &NodeName, manifest: &ManifestBytes) {
        let key = CheckpointKey::of(manifest.manifest());
        self.checks_run(from, key.run);
    }

    /// Whether a manifest has all shards that this node has sealed of a checkpoint, as it has sealed them, and no rank here has yet
    /// to seal its own.
    fn has_these_shards(&self, key: &CheckpointKey, manifest: &ManifestBytes) -> bool {
        if self.is_ahead_of_ranks_here(key) {
            return false;
        }
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return true;
        };
        let mut sealed = checkpoint.shards.iter();
        sealed.all(|(rank, shard)| {
            let listed = manifest.manifest().shard(*rank);
            let root = shard.digests.as_ref().map(|(_, root)| *root);
            // A root is that of one length. With another one the shard would be read, coded and offered beyond its end.
            let is_as_long = |it: &ShardEntry| {
                it.length == shard.length || planted!("lengths_of_shards_are_believed")
            };
            listed
                .is_some_and(|it| it.node == *self.me() && Some(it.root) == root && is_as_long(it))
        })
    }

    /// Whether a rank that seals here has not come to this step: nothing of the run can have committed it.
    fn is_ahead_of_ranks_here(&self, key: &CheckpointKey) -> bool {
        let table = self.namespaces.get(&key.namespace);
        let mut last = table.into_iter().flat_map(|table| &table.last_step);
        last.any(|((run, _), step)| *run == key.run && *step < key.step)
    }

    /// Checkpoints that a peer has told of, of which nothing is here and that nobody calls safe.
    fn commits_of(&self, teller: &NodeName) -> usize {
        let all = self.checkpoints.values();
        let told = all.filter(|c| c.told_by.as_ref() == Some(teller));
        told.filter(|c| c.is_bare()).count()
    }

    /// What a node that is not believed any more has told of, and nobody else calls safe, is heard anew from the others.
    pub(crate) fn forget_commits_of(&mut self, teller: &NodeName) {
        let all = self.checkpoints.values();
        let told = all.filter(|c| c.told_by.as_ref() == Some(teller) && c.is_bare());
        for key in told.map(|c| c.key.clone()).collect::<Vec<_>>() {
            self.forget_commit(&key);
        }
    }

    /// What a home node that is gone has told of, of which nothing has come for long, may be known to nobody else: it is forgotten, and heard
    /// again from the other home nodes if they know it. Else it would be led for ever.
    pub(crate) fn forget_commits_of_the_gone(&mut self) {
        let all = self.checkpoints.values();
        let unconfirmed = all.filter(|c| {
            let is_told_by_the_gone = c.told_by.as_ref().is_some_and(|it| self.is_gone(it));
            is_told_by_the_gone
                && self.stays_unconfirmed(c)
                && !planted!("commits_of_the_gone_kept")
        });
        let named = |c: &Checkpoint| Some((c.key.clone(), c.name()?));
        for (key, name) in unconfirmed.filter_map(named).collect::<Vec<_>>() {
            self.forget_commit(&key);
            self.say_let_go(name, &key);
        }
    }

    /// A commit that a home node has passed on in good faith, and has forgotten since, nobody would end: home nodes are asked whether they
    /// know it. What all of them have let go is forgotten (`forget_what_no_home_has`).
    pub(crate) fn ask_for_unconfirmed(&mut self) {
        let all = self.checkpoints.values();
        let unconfirmed = all.filter(|c| self.stays_unconfirmed(c));
        let asked = |c: &Checkpoint| Some((c.homes.clone(), c.name()?));
        for (homes, manifest) in unconfirmed.filter_map(asked).collect::<Vec<_>>() {
            let done = Vec::new();
            for home in homes {
                let done = done.clone();
                self.send(&home, PeerMessage::Owed { manifest, done });
            }
        }
    }

    /// A home node has let a checkpoint go; the last of them that is up takes a commit with it of which nobody else has anything.
    pub(crate) fn forget_what_no_home_has(&mut self, key: &CheckpointKey) {
        let checkpoint = self.checkpoints.get(key);
        let is_let_go = checkpoint.is_some_and(|c| self.is_unconfirmed(c));
        if is_let_go && self.no_home_has(key) && !planted!("commits_that_no_home_has_kept") {
            self.forget_commit(key);
        }
    }

    /// Whether nothing has come of a commit for long.
    fn stays_unconfirmed(&self, checkpoint: &Checkpoint) -> bool {
        let is_old = |at: Now| self.now.since(at) >= limits::UNCONFIRMED_MS;
        checkpoint.committed_at.is_some_and(is_old) && self.is_unconfirmed(checkpoint)
    }

    /// Whether only words tell of a commit: nothing of it is here, nobody calls it protected, and others decide of it.
    fn is_unconfirmed(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.is_bare()
            && checkpoint.told_by.is_some()
            && !checkpoint.standing.is_called_protected()
            && !checkpoint.homes.contains(self.me())
            && checkpoint.homes.iter().any(|home| self.is_up(home))
    }

    /// A restart names this manifest: another one of the same checkpoint, which one peer has told of and nothing is here of, makes
    /// room for it.
    pub(super) fn make_room_for_named(&mut self, key: &CheckpointKey, name: Digest) {
        let known = self.checkpoints.get(key);
        let is_another = |c: &Checkpoint| c.name().is_some_and(|known| known != name);
        let gives_way = |c: &Checkpoint| is_another(c) && c.told_by.is_some() && c.is_bare();
        if known.is_some_and(gives_way) {
            self.forget_commit(key);
        }
    }

    /// Nobody else is told.
    pub(crate) fn forget_commit(&mut self, key: &CheckpointKey) {
        self.remove(key);
        self.wake(key);
    }

    /// The world size of a run, if this node knows it: from its own trainers, or from what has been protected of it.
    fn world_size_of(&self, key: &CheckpointKey) -> Option<WorldSize> {
        let table = self.namespaces.get(&key.namespace);
        let said_here = table.and_then(|table| table.world_sizes.get(&key.run).copied());
        // The manifest's: what was announced first of a checkpoint may have come from anybody.
        said_here.or_else(|| {
            let safe = self.safe_of_run(key)?.manifest.as_ref()?;
            Some(safe.manifest().world_size)
        })
    }

    /// The newest checkpoint of the same run that enough nodes call protected.
    fn safe_of_run(&self, key: &CheckpointKey) -> Option<&Checkpoint> {
        let mut newest_first = self.checkpoints.values().rev();
        newest_first.find(|c| {
            let is_of_run = c.key.namespace == key.namespace && c.key.run == key.run;
            is_of_run && c.state >= CheckpointState::Protected && c.manifest.is_some()
        })
    }

    /// Whether a node gives a run another world size than it is known to have. Taken as a disagreement of ranks, its word would end
    /// every save.
    pub(super) fn contradicts_world(
        &mut self,
        from: &NodeName,
        key: &CheckpointKey,
        world_size: WorldSize,
    ) -> bool {
        let known = self.world_size_of(key).filter(|known| *known != world_size);
        if known.is_none() || from == self.me() {
            return false;
        }
        self.is_false(from, FalseStatement::OtherWorldSize);
        true
    }

    /// Of the shards that a node announces those that may be its own: no rank that is sealed here, and none that another node which is up
    /// had when the run was protected last.
    pub(super) fn may_be_its_own(
        &mut self,
        from: &NodeName,
        key: &CheckpointKey,
        world_size: WorldSize,
        shards: Vec<SealedShard>,
    ) -> Vec<SealedShard> {
        if from == self.me() {
            return shards;
        }
        let mut out = shards.iter().filter(|it| !world_size.holds(it.rank));
        if let Some(rank) = out.next().map(|it| it.rank.get()) {
            let world_size = world_size.get();
            self.is_false(from, FalseStatement::RankOutOfWorld { rank, world_size });
            return Vec::new();
        }
        let is_its_own = |shard: &SealedShard| !self.is_of_another(from, key, shard.rank);
        shards.into_iter().filter(is_its_own).collect()
    }

    fn is_of_another(&self, node: &NodeName, key: &CheckpointKey, rank: Rank) -> bool {
        let here = self.checkpoints.get(key);
        if here.is_some_and(|c| c.shards.contains_key(&rank)) {
            return true;
        }
        let announced = here.and_then(|c| c.announced.get(&rank));
        if announced.is_some_and(|it| it.node != *node && self.has_been_up(&it.node)) {
            let before = self.safe_of_run(key).and_then(|c| c.manifest.as_ref());
            let entry = before.and_then(|manifest| manifest.manifest().shard(rank));
            return entry.is_none_or(|entry| entry.node != *node);
        }
        false
    }

    /// Whether a node is up and believed.
    fn has_been_up(&self, node: &NodeName) -> bool {
        self.is_up(node) && self.is_believed(node)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use storaged_codec::{digest, root_digest};
    use storaged_wire::{Manifest, SlotId};

    use crate::api::Now;
    use crate::catalog::{LocalShard, Upload};
    use crate::testkit::{chunk, committed, hear, last_of, manifest};

    use super::*;

    /// Of a shard that is sealed here all else is as it is.
    #[test]
    fn a_commit_with_another_length_of_a_shard_is_none() {
        let mut node = last_of(&["n0", "n1"], 1, 1);
        let leaves: Arc<[Digest]> = [digest(b"hello")].into();
        let root = root_digest(&leaves, 5, chunk());
        let true_one = manifest(1, &["n1"], &["n0"], 5, root);
        let key = CheckpointKey::of(&true_one);
        let shard = LocalShard {
            slot: SlotId::new(9),
            length: 5,
            chunk: chunk(),
            digests: Some((leaves, root)),
            prints: Arc::from([]),
            readers: BTreeSet::new(),
            upload: Upload::Idle,
            sealed_at: Now(1),
        };
        let checkpoint =
            node.context_mut()
                .checkpoint_entry(&key, true_one.owner, true_one.world_size);
        checkpoint.shards.insert(Rank::new(0), shard);
        let mut is_taken = |length: u64| {
            let mut told: Manifest = true_one.clone();
            told.shards[0].length = length;
            let told = told.seal().expect("a sound manifest");
            hear(&mut node, 2, "n0", committed(&told));
            node.context().checkpoints[&key].manifest.is_some()
        };
        assert!(!is_taken(6) && !is_taken(4) && is_taken(5));
    }
}
