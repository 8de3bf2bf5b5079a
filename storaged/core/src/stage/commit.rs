//! From sealed shards to a committed checkpoint. Every node announces what it has sealed to the checkpoint's home
//! nodes; a home node that has heard of every rank and has the description builds the manifest. The manifest
//! follows from what was announced alone, so all home nodes build the same bytes and no leader is needed.

use std::collections::BTreeSet;
use std::sync::Arc;

use minicbor::bytes::ByteVec;
use storaged_plan::{Group, homes};
use storaged_wire::local::{DurableWish, Reply};
use storaged_wire::manifest::GroupEntry;
use storaged_wire::peer::{CheckpointKey, PeerMessage, Relay};
use storaged_wire::{
    CheckpointState, Digest, Geometry, Manifest, ManifestBytes, NodeName, Owner, Rank, Refusal,
    RefusalCode, ShardEntry, SharedBytes, Step, WorldSize,
};

use crate::api::{Note, RequestId};
use crate::catalog::{Announced, Checkpoint, Description, Told};
use crate::context::Context;
use crate::event::Event;
use crate::limits;
use crate::parcels::Notice;
use crate::place::RunStanding;

/// The membership is the configured list, which does not change while daemons run.
const EPOCH: u64 = 1;

impl Context {
    pub(crate) fn commit(
        &mut self,
        id: RequestId,
        step: Step,
        schema: ByteVec,
        torch_metadata: ByteVec,
        durable: DurableWish,
    ) -> Result<(), Refusal> {
        let (attached, run, rank, world_size) = self.trainer(id)?;
        let key = CheckpointKey {
            namespace: attached.namespace,
            run,
            step,
        };
        let sealed = self
            .checkpoints
            .get(&key)
            .is_some_and(|c| c.shards.contains_key(&rank));
        if !sealed {
            return Err(Refusal::new(
                RefusalCode::WrongSlot,
                format!(
                    "expected rank {rank} to seal step {step} before it commits it, got a commit without a sealed shard"
                ),
            ));
        }
        let checkpoint = self.checkpoint_entry(&key, attached.owner, world_size);
        checkpoint.description_here = Some(Description {
            schema,
            torch_metadata,
            durable,
        });
        // "Done" says that it will be told, not that it has committed: a home node that is away now hears it when it is said again.
        self.reply(id, Reply::Done);
        self.announce(&key);
        Ok(())
    }

    pub(crate) fn homes_of(&self, key: &CheckpointKey) -> Vec<NodeName> {
        if let Some(checkpoint) = self.checkpoints.get(key) {
            return checkpoint.homes.clone();
        }
        let count = self.setup.geometry.map_or(1, |geometry| geometry.m() + 1);
        homes(&self.setup.members, key, count)
    }

    /// Tells the home nodes what this node has of a checkpoint that has not committed.
    pub(crate) fn announce(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        if checkpoint.manifest.is_some() {
            return;
        }
        let mut messages: Vec<PeerMessage> = checkpoint
            .shards
            .iter()
            .filter_map(|(rank, shard)| {
                let (_, root) = shard.digests.as_ref()?;
                Some(PeerMessage::ShardSealed {
                    key: key.clone(),
                    owner: checkpoint.owner,
                    world_size: checkpoint.world_size,
                    rank: *rank,
                    length: shard.length,
                    root: *root,
                })
            })
            .collect();
        let (owner, world_size) = (checkpoint.owner, checkpoint.world_size);
        if let Some(description) = checkpoint.description_here.clone() {
            let message = || PeerMessage::Description {
                key: key.clone(),
                owner,
                world_size,
                schema: description.schema.clone(),
                torch_metadata: description.torch_metadata.clone(),
                durable: description.durable,
            };
            messages.push(self.wrap_again(key, Notice::Description, message));
        }
        // To all m+1 home nodes: were it one, losing that one between the last seal and the commit would lose the step though every
        // shard is there.
        for home in self.homes_of(key) {
            for message in &messages {
                self.send(&home, message.clone());
            }
        }
    }

    pub(crate) fn announce_all(&mut self) {
        let waiting: Vec<CheckpointKey> = self
            .checkpoints
            .values()
            .filter(|c| {
                c.manifest.is_none() && !(c.shards.is_empty() && c.description_here.is_none())
            })
            .map(|c| c.key.clone())
            .collect();
        for key in waiting {
            self.announce(&key);
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one parameter per field of the message"
    )]
    pub(crate) fn shard_announced(
        &mut self,
        from: &NodeName,
        mut key: CheckpointKey,
        owner: Owner,
        world_size: WorldSize,
        rank: Rank,
        length: u64,
        root: Digest,
    ) {
        if planted!("incarnations_mixed") {
            key.run = self.fence_of(&key.namespace);
        }
        let announced = Announced {
            node: from.clone(),
            length,
            root,
        };
        let Some(checkpoint) = self.home_entry(from, &key, owner, world_size) else {
            return;
        };
        checkpoint.announced.insert(rank, announced);
        self.try_commit(&key);
    }

    pub(crate) fn described(
        &mut self,
        from: &NodeName,
        key: CheckpointKey,
        owner: Owner,
        world_size: WorldSize,
        description: Description,
    ) {
        let Some(checkpoint) = self.home_entry(from, &key, owner, world_size) else {
            return;
        };
        checkpoint.description = Some(description);
        self.try_commit(&key);
    }

    /// The entry of a checkpoint that this node is a home of, if the announcement can be.
    fn home_entry(
        &mut self,
        from: &NodeName,
        key: &CheckpointKey,
        owner: Owner,
        world_size: WorldSize,
    ) -> Option<&mut Checkpoint> {
        let refusal = self
            .check_owner(&key.namespace, owner)
            .and_then(|()| self.check_fence(&key.namespace, key.run))
            .err()
            .map(|refusal| refusal.message);
        let disagrees = self
            .checkpoints
            .get(key)
            .filter(|c| c.world_size != world_size)
            .map(|c| {
                format!(
                    "ranks disagree on the world size: expected {}, got {world_size} from {from}",
                    c.world_size
                )
            });
        let given_up = self
            .namespaces
            .get(&key.namespace)
            .and_then(|table| table.abandoned.get(&(key.run, key.step)).cloned());
        if let Some(reason) = refusal.or(given_up) {
            self.send(
                from,
                PeerMessage::Abandoned {
                    key: key.clone(),
                    reason,
                },
            );
            return None;
        }
        // Nobody can tell who is right, and a step that waits for ranks that do not exist would hold a slot of each rank.
        if let Some(reason) = disagrees {
            self.abandon_everywhere(key, &reason);
            return None;
        }
        if self
            .checkpoints
            .get(key)
            .is_some_and(|c| c.manifest.is_some())
        {
            // It asks because it has not heard: the commit was lost, or it was down.
            self.tell(key, from);
            return None;
        }
        // Whoever knows the run has told of it before, and says this again.
        if self.standing(&key.namespace, key.run) == RunStanding::Unknown {
            return None;
        }
        self.namespace_table(&key.namespace, owner);
        Some(self.checkpoint_entry(key, owner, world_size))
    }

    /// The entry of a checkpoint; a new one if there is none.
    pub(super) fn checkpoint_entry(
        &mut self,
        key: &CheckpointKey,
        owner: Owner,
        world_size: WorldSize,
    ) -> &mut Checkpoint {
        let (homes, now) = (self.homes_of(key), self.now);
        let fresh = || Checkpoint {
            homes,
            ..Checkpoint::new(key.clone(), owner, world_size, now)
        };
        self.checkpoints.entry(key.clone()).or_insert_with(fresh)
    }

    fn try_commit(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        if checkpoint.manifest.is_some() {
            return;
        }
        // Another home node may be about to give it up: committed here and given up there, it would be shown and could not be
        // restored. From here on nobody commits it; `give_up_old_commits` waits for what is on its way.
        if self.now.since(checkpoint.first_seen) >= limits::COMMIT_MAX_MS {
            return;
        }
        let Some(manifest) = self.build_manifest(checkpoint) else {
            return;
        };
        let wish = checkpoint
            .description
            .as_ref()
            .map_or(DurableWish::Policy, |d| d.durable);
        match manifest.seal() {
            Ok(sealed) => {
                self.adopt(Arc::new(sealed), wish);
                self.tell_everyone(key);
            }
            Err(error) => self.abandon_everywhere(key, &error.to_string()),
        }
    }

    fn build_manifest(&self, checkpoint: &Checkpoint) -> Option<Manifest> {
        let description = checkpoint.description.as_ref()?;
        let complete = checkpoint.announced.len() == checkpoint.world_size.get() as usize
            && checkpoint
                .announced
                .keys()
                .all(|rank| checkpoint.world_size.holds(*rank));
        if !complete && !planted!("commit_without_all_ranks") {
            return None;
        }
        let shards: Vec<ShardEntry> = checkpoint
            .announced
            .iter()
            .map(|(rank, announced)| ShardEntry {
                rank: *rank,
                node: announced.node.clone(),
                length: announced.length,
                root: announced.root,
            })
            .collect();
        Some(Manifest {
            version: Manifest::VERSION,
            namespace: checkpoint.key.namespace.clone(),
            owner: checkpoint.owner,
            run: checkpoint.key.run,
            step: checkpoint.key.step,
            world_size: checkpoint.world_size,
            epoch: EPOCH,
            geometry: self.setup.geometry.unwrap_or_else(uncoded),
            chunk: self.setup.chunk,
            groups: groups_with(&self.groups, &shards),
            shards,
            schema: description.schema.clone(),
            torch_metadata: description.torch_metadata.clone(),
        })
    }

    /// Stores a manifest; the checkpoint is committed.
    pub(crate) fn adopt(&mut self, manifest: Arc<ManifestBytes>, wish: DurableWish) {
        let record = manifest.manifest();
        let key = CheckpointKey::of(record);
        self.namespace_table(&key.namespace, record.owner);
        // A manifest is no proof that its run was opened: only a run that is known as such fences others off.
        if self.standing(&key.namespace, key.run) == RunStanding::Known {
            self.raise_fence(&key.namespace, record.owner, key.run);
        }
        let (now, me) = (self.now, self.me().clone());
        let checkpoint = self.checkpoint_entry(&key, record.owner, record.world_size);
        if checkpoint.manifest.is_some() {
            return;
        }
        checkpoint.manifest = Some(manifest.clone());
        checkpoint.committed_at = Some(now);
        if checkpoint.homes.contains(&me) {
            checkpoint.standing.begin_to_count(&me, &manifest);
        }
        checkpoint.durable_wish = wish;
        self.by_name.insert(manifest.name(), key.clone());
        self.drop_unlisted_shards(&key);
        self.reach(&key, CheckpointState::Committed);
        self.emit(Event::Adopted);
        self.report_held(&key);
    }

    /// Stores a manifest that a survey found, in the state it is known to be in.
    pub(crate) fn adopt_found(&mut self, manifest: Arc<ManifestBytes>, state: CheckpointState) {
        let name = manifest.name();
        self.adopt(manifest, DurableWish::Policy);
        if let Some(key) = self.by_name.get(&name).cloned() {
            self.reach(&key, state);
        }
    }

    /// A shard here that the manifest does not list with the same root belongs to something else.
    fn drop_unlisted_shards(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let Some(manifest) = checkpoint.manifest.clone() else {
            return;
        };
        let listed = |rank: Rank, root: &Digest| {
            manifest
                .manifest()
                .shard(rank)
                .is_some_and(|entry| entry.root == *root)
        };
        let strays: Vec<Rank> = checkpoint
            .shards
            .iter()
            .filter(|(rank, shard)| {
                !shard
                    .digests
                    .as_ref()
                    .is_some_and(|(_, root)| listed(**rank, root))
            })
            .map(|(rank, _)| *rank)
            .collect();
        let slots: Vec<_> = strays
            .iter()
            .filter_map(|rank| checkpoint.shards.remove(rank))
            .map(|shard| shard.slot)
            .collect();
        for slot in slots {
            self.free_slot_again(slot);
        }
    }

    /// Raises the state of a checkpoint, never lowers it.
    pub(crate) fn reach(&mut self, key: &CheckpointKey, state: CheckpointState) {
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        if checkpoint.state >= state {
            return;
        }
        checkpoint.state = state;
        checkpoint.no_room = None;
        let key = key.clone();
        if state >= self.safe_state() {
            self.raise_mark(&key);
        }
        self.note(Note::State {
            key: key.clone(),
            state,
        });
        self.wake(&key);
        self.retire_older(&key.namespace);
        self.emit(Event::Reached(key, state));
        self.start_uploads();
    }

    pub(crate) fn committed_elsewhere(
        &mut self,
        from: &NodeName,
        bytes: SharedBytes,
        wish: DurableWish,
    ) {
        let manifest = match ManifestBytes::parse(bytes) {
            Ok(manifest) => manifest,
            Err(error) => {
                let node = from.clone();
                let reason = error.to_string();
                return self.note(Note::PeerFault { node, reason });
            }
        };
        let owner = manifest.manifest().owner;
        let key = CheckpointKey::of(manifest.manifest());
        let name = manifest.name();
        if self.check_owner(&key.namespace, owner).is_err()
            || self.is_outranked(&key)
            || self.was_evicted(from, &key)
        {
            return;
        }
        let known = self.checkpoints.get(&key).and_then(Checkpoint::name);
        if known.is_none() {
            self.adopt(Arc::new(manifest), wish);
        }
        if known.is_none_or(|known| known == name) {
            self.say_stored(from, &key, name);
        }
    }

    /// Answers a home node that it need not tell this one of a commit any more.
    pub(crate) fn say_stored(&mut self, home: &NodeName, key: &CheckpointKey, name: Digest) {
        let checkpoint = self.checkpoints.get(key);
        let state = checkpoint.map_or(CheckpointState::Committed, |c| c.state);
        let bears = checkpoint.map_or(0, |c| c.standing.told_by(home));
        let manifest = name;
        self.send(
            home,
            PeerMessage::ManifestStored {
                manifest,
                state,
                bears,
            },
        );
    }

    /// A newer checkpoint of the namespace is already as safe as can be: this one is of no use any more.
    fn is_outranked(&self, key: &CheckpointKey) -> bool {
        let safe = self.safe_state();
        self.checkpoints
            .values()
            .any(|c| c.key.namespace == key.namespace && c.key > *key && c.state >= safe)
    }

    /// Everyone who has to do with a checkpoint.
    pub(crate) fn stakeholders(&self, manifest: &ManifestBytes) -> BTreeSet<NodeName> {
        let record = manifest.manifest();
        let key = CheckpointKey::of(record);
        let nodes = manifest.nodes().iter();
        // A data node of a group that no rank is on has nothing to do with it.
        let concerned = nodes.filter(|(_, on)| !(on.ranks.is_empty() && on.coding.is_empty()));
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
        // A durable one that is not protected yet bears nothing that would be worth a word.
        let bears = counted.map_or(0, |bears| bears.losses);
        let is_protected = state == CheckpointState::Protected || (counted.is_some() && bears > 0);
        let is_protected = is_protected && state >= CheckpointState::Protected;
        let told = checkpoint.told.get(node).copied();
        let name = manifest.name();
        if told.is_none()
            && let Some(message) = self.commit_notice(key)
        {
            self.send(node, message);
        }
        let knows = |known: CheckpointState| told.is_some_and(|told| told.state >= known);
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
        let committed: Vec<(CheckpointKey, Arc<ManifestBytes>)> = self
            .checkpoints
            .values()
            .filter_map(|c| Some((c.key.clone(), c.manifest.clone()?)))
            .collect();
        for (key, manifest) in committed {
            if self.homes_of(&key).contains(&me) {
                self.tell_unaware(&key, &manifest);
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

    pub(crate) fn manifest_stored(&mut self, from: &NodeName, name: Digest, told: Told) {
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let known = checkpoint.told.entry(from.clone()).or_insert(told);
        known.state = known.state.max(told.state);
        known.bears = told.bears;
        let key = checkpoint.key.clone();
        self.weigh(&key);
    }

    /// A home node says that a checkpoint reached a state.
    pub(crate) fn told_state(
        &mut self,
        from: &NodeName,
        name: Digest,
        state: CheckpointState,
        bears: Option<u32>,
    ) {
        if state == CheckpointState::Durable && planted!("pins_never_end") {
            return;
        }
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let key = checkpoint.key.clone();
        if let Some(bears) = bears {
            self.bears_told(from, name, bears);
        }
        self.reach(&key, state);
        if let Some(checkpoint) = self.checkpoint_named(name) {
            let bears = checkpoint.standing.told_by(from);
            let state = checkpoint.state;
            let stored = PeerMessage::ManifestStored {
                manifest: name,
                state,
                bears,
            };
            self.send(from, stored);
        }
    }

    /// Why a checkpoint has not gone on, as far as this node knows.
    pub(crate) fn why_not_yet(&self, key: &CheckpointKey) -> String {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return String::new();
        };
        let Some(manifest) = &checkpoint.manifest else {
            let heard = checkpoint.announced.len();
            if heard == 0 {
                return format!(
                    ": this node has sealed {} shards of it",
                    checkpoint.shards.len()
                );
            }
            let missing: Vec<String> = (0..checkpoint.world_size.get())
                .filter(|rank| !checkpoint.announced.contains_key(&Rank::new(*rank)))
                .take(5)
                .map(|rank| rank.to_string())
                .collect();
            if missing.is_empty() && checkpoint.description.is_none() {
                return format!(
                    ": all {heard} ranks have sealed it, and no description of it has come: the rank that commits it has not"
                );
            }
            return format!(
                ": {heard} of {} ranks have sealed it, missing {missing:?}",
                checkpoint.world_size
            );
        };
        let down: Vec<String> = self
            .stakeholders(manifest)
            .into_iter()
            .filter(|node| !self.is_up(node))
            .map(|node| node.to_string())
            .collect();
        let down = match down.is_empty() {
            true => None,
            false => Some(format!("nodes down: {}", down.join(", "))),
        };
        let reasons: Vec<String> = down
            .into_iter()
            .chain(self.no_room_of(checkpoint))
            .collect();
        match reasons.is_empty() {
            true => String::new(),
            false => format!(": {}", reasons.join("; ")),
        }
    }

    /// Which node has no room for its part of a checkpoint, as far as this node has heard, while that matters.
    pub(crate) fn no_room_of(&self, checkpoint: &Checkpoint) -> Option<String> {
        let is_whole = self.bears(checkpoint).is_some_and(|bears| bears.is_full());
        let (node, reason) = checkpoint.no_room.as_ref().filter(|_| !is_whole)?;
        Some(format!("{node} has no room: {reason}"))
    }
}

/// Groups of which some data node has a shard.
fn groups_with(groups: &[Group], shards: &[ShardEntry]) -> Vec<GroupEntry> {
    let holders: BTreeSet<&NodeName> = shards.iter().map(|shard| &shard.node).collect();
    groups
        .iter()
        .filter(|group| group.data.iter().any(|node| holders.contains(node)))
        .map(|group| GroupEntry {
            data: group.data.clone(),
            coding: group.coding.clone(),
        })
        .collect()
}

/// What a manifest says where nothing is coded; it has no groups then.
fn uncoded() -> Geometry {
    Geometry::new(1, 1).expect("1+1 is a geometry")
}
