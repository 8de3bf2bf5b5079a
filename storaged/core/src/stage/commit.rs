//! From sealed shards to a committed checkpoint. A home node that has heard of every rank (`announce`) and has the description
//! builds the manifest. The manifest
//! follows from what was announced alone, so all home nodes build the same bytes and no leader is needed.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_plan::{Group, uncoded_node};
use storaged_wire::local::{DurableWish, Reply};
use storaged_wire::manifest::GroupEntry;
use storaged_wire::peer::{CheckpointKey, PeerMessage};
use storaged_wire::{
    CheckpointState, Digest, Enclosed, Enclosure, Geometry, Manifest, ManifestBytes, ManifestError,
    Namespace, NodeName, Owner, Rank, Refusal, RefusalCode, ShardEntry, SharedBytes, Step,
    WorldSize,
};

use crate::api::{
    ConnId, GivenDescription, NamedDescription, Note, Preparation, RequestId, SealedCommit,
};
use crate::catalog::{Checkpoint, Description, Sealing};
use crate::context::Context;
use crate::event::Event;
use crate::limits;
use crate::parcels::Notice;

impl Context {
    pub(crate) fn commit(
        &mut self,
        id: RequestId,
        step: Step,
        schema: SharedBytes,
        torch_metadata: SharedBytes,
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
        self.checkpoint_entry(&key, attached.owner, world_size);
        let description = GivenDescription::new(schema, torch_metadata, durable);
        if description.length() > self.setup.messages.inline {
            self.describing.insert(id);
            self.request_comes(id.conn, description.length() as u64);
            self.prepare(Preparation::Describe {
                id,
                key,
                description,
            });
            return Ok(());
        }
        self.take_description(&key, description.named())?;
        self.reply(id, Reply::Done);
        Ok(())
    }

    /// A request of so many bytes is on its way here, or what it has brought is digested. It is charged as far as there is room, and is let
    /// in all the same: what describes a step may be here already, and the step must not fail because it is said again.
    pub(crate) fn request_comes(&mut self, conn: ConnId, bytes: u64) {
        self.budget.release_request(conn);
        if let Some(attached) = self.conns.get(&conn) {
            self.budget.charge_request(conn, bytes, &attached.namespace);
        }
    }

    /// What a trainer gave has been digested. It is answered only now: as long as it waits, its request's memory is its own.
    pub(crate) fn description_named(
        &mut self,
        id: RequestId,
        key: &CheckpointKey,
        description: NamedDescription,
    ) {
        // What is let in counts from here on, and not twice.
        self.budget.release_request(id.conn);
        let taken = self.take_description(key, description);
        // The trainer may have gone, and the step is whole without it.
        if self.describing.remove(&id) {
            self.reply(id, taken.map_or_else(Reply::Refused, |()| Reply::Done));
        }
    }

    /// Takes what describes a checkpoint, once: were a trainer's next word taken for the last one, it could have the node keep a new
    /// description with every request. `Ok` says that it will be told, not that it has committed: a home node that is away now
    /// hears it when it is said again.
    fn take_description(
        &mut self,
        key: &CheckpointKey,
        description: NamedDescription,
    ) -> Result<(), Refusal> {
        let NamedDescription { given, names } = description;
        let [schema, torch_metadata] = names;
        // Given up or committed meanwhile: whoever waits for it hears that.
        let open = self.checkpoints.get(key).filter(|c| c.manifest.is_none());
        let Some(checkpoint) = open else {
            return Ok(());
        };
        match checkpoint.description_here {
            Some(before) if before.named() != names => return Err(described_otherwise(key)),
            Some(_) => {}
            None => self.room_for_description(&names, &key.namespace)?,
        }
        let now = self.setup.epoch;
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return Ok(());
        };
        // Of the epoch in which it was described first, also if it is again: home nodes might build two manifests.
        let before = checkpoint.description_here.as_ref();
        let mut epoch = before.map_or(now, |before| before.epoch);
        if planted!("described_in_an_old_epoch") {
            epoch = self
                .earlier_groups
                .back()
                .map_or(epoch, |(before, _)| *before);
        }
        let durable = before.map_or(given.durable, |before| {
            before.durable.or_more(given.durable)
        });
        if before.is_some_and(|before| before.durable != durable) {
            // Home nodes have noted the same with less.
            (checkpoint.noted_by.values_mut()).for_each(|noted| noted.description = None);
        }
        let description = Description::new(schema, torch_metadata, durable, epoch);
        checkpoint.description_here = Some(description);
        self.keep_given(schema.digest, given.schema, &key.namespace);
        self.keep_given(torch_metadata.digest, given.torch_metadata, &key.namespace);
        self.keeping.touch(key);
        self.announce(key);
        Ok(())
    }

    pub(super) fn room_for_description(
        &mut self,
        names: &[Enclosure],
        of: &Namespace,
    ) -> Result<(), Refusal> {
        // A peer may say any.
        let lengths = names.iter().map(|it| it.length);
        let bytes = lengths.fold(0, u64::saturating_add);
        self.take_room(names, of).map_err(|why| {
            let text = format!(
                "a description of {bytes} bytes (schema and torch metadata) does not fit the memory budget: it {why}; held by: {}; \
                 raise memory.budget or tenants.memory_max, or save fewer tensors",
                self.holders(of)
            );
            Refusal::new(RefusalCode::BudgetFull, text)
        })
    }

    pub(crate) fn homes_of(&self, key: &CheckpointKey) -> Vec<NodeName> {
        if let Some(checkpoint) = self.checkpoints.get(key) {
            return checkpoint.homes.clone();
        }
        self.new_homes(key)
    }

    /// The entry of a checkpoint; a new one if there is none.
    pub(crate) fn checkpoint_entry(
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

    pub(crate) fn try_commit(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        if checkpoint.manifest.is_some() {
            return;
        }
        // Another home node may be about to give it up: committed here and given up there, it would be shown and could not be
        // restored. From here on nobody commits it; `give_up_old_commits` waits for what is on its way.
        if checkpoint.is_overdue(self.now) {
            return;
        }
        if checkpoint.sealing == Sealing::Running || !self.is_complete(checkpoint) {
            return;
        }
        let Some(manifest) = self.build_manifest(key) else {
            return;
        };
        let (manifest, durable) = manifest;
        if size_hint(&manifest) > self.setup.messages.inline {
            let (key, manifest) = (key.clone(), Box::new(manifest));
            return self.prepare(Preparation::Seal {
                key,
                manifest,
                durable,
            });
        }
        match manifest.seal() {
            Ok(sealed) => self.committed_here(key, Arc::new(sealed), durable),
            Err(error) => self.abandon_everywhere(key, &error.to_string()),
        }
    }

    /// A manifest that was sealed beside the decisions is there.
    pub(crate) fn manifest_sealed(
        &mut self,
        key: &CheckpointKey,
        outcome: Result<SealedCommit, ManifestError>,
    ) {
        let (now, checkpoint) = (self.now, self.checkpoints.get_mut(key));
        let Some(checkpoint) = checkpoint.filter(|c| c.sealing == Sealing::Running) else {
            return;
        };
        checkpoint.sealing = Sealing::Over;
        // Another home node has told of it meanwhile; or it is too late, as in `try_commit`.
        if checkpoint.manifest.is_some() || checkpoint.is_overdue(now) {
            return;
        }
        match outcome {
            // A daemon that announced a part of it has ended meanwhile, and another one has come up without that: committed with it, a shard of
            // the step would be nowhere. While no other daemon is there, what it held may come back.
            Ok(sealed) if !checkpoint.is_as_announced(sealed.manifest.manifest()) => {
                checkpoint.sealing = Sealing::NotYet;
                checkpoint.sealed_anew = checkpoint.sealed_anew.saturating_add(1);
                if checkpoint.sealed_anew > limits::SEALED_ANEW_MAX {
                    let reason =
                        "what its nodes have sealed changed each time while its manifest was made";
                    self.abandon_everywhere(key, reason);
                } else {
                    self.try_commit(key);
                }
            }
            Ok(sealed) => {
                let told = (sealed.notice_name, sealed.notice.len() as u64);
                checkpoint.parcels.insert(Notice::Committed, told);
                self.parcels.keep(told.0, sealed.notice, now);
                self.committed_here(key, sealed.manifest, sealed.durable);
            }
            Err(error) => self.abandon_everywhere(key, &error.to_string()),
        }
    }

    fn committed_here(
        &mut self,
        key: &CheckpointKey,
        manifest: Arc<ManifestBytes>,
        wish: DurableWish,
    ) {
        self.adopt(manifest, wish);
        self.tell_everyone(key);
    }

    /// Whether everything has been heard that a manifest says.
    fn is_complete(&self, checkpoint: &Checkpoint) -> bool {
        let complete = checkpoint.announced.len() == checkpoint.world_size.get() as usize
            && checkpoint
                .announced
                .keys()
                .all(|rank| checkpoint.world_size.holds(*rank));
        let complete = complete || planted!("commit_without_all_ranks");
        let described = checkpoint.description.as_ref();
        let is_here = |it: &Description| {
            self.has_enclosures(&it.named()) && self.groups_at(it.epoch).is_some()
        };
        complete && described.is_some_and(|it| is_here(it) || planted!("enclosures_not_awaited"))
    }

    /// The manifest of what was announced.
    fn build_manifest(&mut self, key: &CheckpointKey) -> Option<(Manifest, DurableWish)> {
        let epoch = self.checkpoints.get(key)?.description.as_ref()?.epoch;
        let groups = self.groups_at(epoch)?.to_vec();
        let checkpoint = self.checkpoints.get_mut(key)?;
        checkpoint.sealing = Sealing::Running;
        let announced = checkpoint.announced.iter();
        let shards: Vec<ShardEntry> = announced
            .map(|(rank, announced)| ShardEntry {
                rank: *rank,
                node: announced.node.clone(),
                length: announced.length,
                root: announced.root,
            })
            .collect();
        let description = checkpoint.description.as_ref()?;
        let manifest = Manifest {
            version: Manifest::VERSION,
            namespace: checkpoint.key.namespace.clone(),
            owner: checkpoint.owner,
            run: checkpoint.key.run,
            step: checkpoint.key.step,
            world_size: checkpoint.world_size,
            epoch: description.epoch,
            geometry: self.setup.geometry.unwrap_or_else(uncoded),
            chunk: self.setup.chunk,
            groups: groups_with(&groups, &shards),
            shards,
            schema: Enclosed::Named(description.schema),
            torch_metadata: Enclosed::Named(description.torch_metadata),
        };
        Some((manifest, description.durable))
    }

    /// Stores a manifest; the checkpoint is committed.
    pub(crate) fn adopt(&mut self, manifest: Arc<ManifestBytes>, wish: DurableWish) {
        let record = manifest.manifest();
        let key = CheckpointKey::of(record);
        self.namespace_table(&key.namespace, record.owner);
        // A manifest is no proof that its run was opened: only a run that is known as such fences others off.
        if self.is_agreed(&key.namespace, key.run) {
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
            checkpoint.standing.begin_to_count(&me, &manifest, now);
        }
        checkpoint.durable_wish = wish;
        // What it was made of is in it.
        checkpoint.forget_collected();
        self.by_name.insert(manifest.name(), key.clone());
        self.keeping.touch(&key);
        self.drop_unlisted_shards(&key);
        self.reach(&key, CheckpointState::Committed);
        self.emit(Event::Adopted);
        self.report_held(&key);
    }

    /// Stores a manifest that a survey found, in the state it is known to be in.
    pub(crate) fn adopt_found(&mut self, manifest: Arc<ManifestBytes>, state: CheckpointState) {
        let name = manifest.name();
        self.make_room_for_named(&CheckpointKey::of(manifest.manifest()), name);
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
        self.keeping.touch(&key);
        if state >= self.safe_state() {
            self.raise_mark(&key);
            if let Some(table) = self.namespaces.get_mut(&key.namespace) {
                table.parity_refused = None;
            }
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

    /// A node tells of a commit whose manifest fits a message.
    pub(crate) fn commit_told(&mut self, from: &NodeName, bytes: SharedBytes, wish: DurableWish) {
        match ManifestBytes::parse(bytes) {
            Ok(manifest) => {
                self.judges_commit(from, &manifest);
                self.committed_elsewhere(from, Arc::new(manifest), wish)
            }
            Err(error) => {
                let node = from.clone();
                let reason = error.to_string();
                self.note(Note::PeerFault { node, reason });
            }
        }
    }

    pub(crate) fn committed_elsewhere(
        &mut self,
        from: &NodeName,
        manifest: Arc<ManifestBytes>,
        wish: DurableWish,
    ) {
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
            if self.has_just_given_up(name) {
                return;
            }
            let is_homes_word = self.may_be_committed(from, &key, &manifest);
            if !is_homes_word && !self.is_vouched_for(from, &key, &manifest) {
                return;
            }
            self.adopt(manifest, wish);
            if let Some(checkpoint) = self.checkpoints.get_mut(&key) {
                checkpoint.told_by = Some(from.clone());
            }
            // Nobody pins what is not. Of other steps those who hold them say it when they hear that it is known here.
            if !is_homes_word && self.is_pinned(&key) {
                self.reach(&key, CheckpointState::Protected);
            }
        }
        if known.is_none_or(|known| known == name) {
            self.is_taken_up_again(from, name);
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

    /// Why a checkpoint has not gone on, as far as this node knows.
    pub(crate) fn why_not_yet(&self, key: &CheckpointKey) -> String {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return String::new();
        };
        let Some(manifest) = &checkpoint.manifest else {
            if let Some(why) = self.no_room_of(checkpoint) {
                return format!(": {why}");
            }
            let heard = checkpoint.announced.len();
            let is_whole = heard == checkpoint.world_size.get() as usize;
            if is_whole && checkpoint.sealing != Sealing::NotYet {
                return ": all ranks have sealed it, and its manifest was not made in time".into();
            }
            if heard == 0 {
                return format!(
                    ": this node has sealed {} shards of it",
                    checkpoint.shards.len()
                );
            }
            let missing: Vec<u32> = (0..checkpoint.world_size.get())
                .filter(|rank| !checkpoint.announced.contains_key(&Rank::new(*rank)))
                .take(5)
                .collect();
            if missing.is_empty() && checkpoint.description.is_none() {
                return format!(
                    ": all {heard} ranks have sealed it, and no description of it has come: the rank that commits it has not"
                );
            }
            let epoch = checkpoint.description.map(|it| it.epoch);
            if let Some(epoch) = epoch.filter(|it| self.groups_at(*it).is_none()) {
                return format!(
                    ": all {heard} ranks have sealed it, and this node has not heard of the members of epoch {epoch}"
                );
            }
            if missing.is_empty() {
                return format!(
                    ": all {heard} ranks have sealed it, and its schema and metadata have not come from the node that has them"
                );
            }
            return format!(
                ": {heard} of {} ranks have sealed it, missing {missing:?}",
                checkpoint.world_size
            );
        };
        self.why_not_protected(checkpoint, manifest)
    }

    /// The same of one that has a manifest.
    fn why_not_protected(&self, checkpoint: &Checkpoint, manifest: &ManifestBytes) -> String {
        let (left, down): (Vec<NodeName>, Vec<NodeName>) = self
            .stakeholders(manifest)
            .into_iter()
            .filter(|node| !self.is_up(node))
            .partition(|node| self.has_left(node));
        let named = |what: &str, nodes: &[NodeName]| {
            let names: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
            (!names.is_empty()).then(|| format!("{what}: {}", names.join(", ")))
        };
        let epoch = manifest.manifest().epoch;
        let uncoded = uncoded_node(manifest).filter(|_| self.setup.geometry.is_some());
        let uncoded = uncoded.map(|node| {
            format!("{node} has shards of it and had no place in epoch {epoch}, whose groups code it: the next step is coded")
        });
        let reasons: Vec<String> = named("nodes down", &down)
            .into_iter()
            .chain(named("nodes that left the cluster", &left))
            .chain(uncoded)
            .chain(self.no_room_of(checkpoint))
            .chain(self.has_yet_to_listen().then(|| {
                "this node did not run for a while, and finds out first whose links have ended"
                    .into()
            }))
            .collect();
        if reasons.is_empty() {
            String::new()
        } else {
            format!(": {}", reasons.join("; "))
        }
    }

    /// Which node has no room for its part of a checkpoint, as far as this node has heard, while that matters.
    pub(crate) fn no_room_of(&self, checkpoint: &Checkpoint) -> Option<String> {
        let is_whole = self.bears(checkpoint).is_some_and(|bears| bears.is_full());
        let there = checkpoint.no_room.as_ref().filter(|_| !is_whole)?;
        Some(format!("{} has no room: {}", there.node, there.reason))
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

fn described_otherwise(key: &CheckpointKey) -> Refusal {
    let text = format!(
        "expected step {} of run {} to be described once, got another schema or other metadata of it: save a newer step",
        key.step, key.run
    );
    Refusal::new(RefusalCode::StepNotNewer, text)
}

/// About how many bytes a manifest takes, never much less than it does.
fn size_hint(manifest: &Manifest) -> usize {
    const ENTRY: usize = 128;
    let entries = manifest.shards.len() + 2 * manifest.groups.len();
    entries * ENTRY
}

/// What a manifest says where nothing is coded; it has no groups then.
fn uncoded() -> Geometry {
    Geometry::new(1, 1).expect("1+1 is a geometry")
}
