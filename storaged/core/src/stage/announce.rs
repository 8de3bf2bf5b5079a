//! What nodes tell the home nodes of a checkpoint before it commits: which shards they have sealed, in one message, until
//! that is noted, and then from time to time that they still wait. A checkpoint has no time within which it must commit. It
//! is given up when nothing new has been heard of it for long: of 160 GB on one rank the digest alone takes minutes.

use storaged_codec::digest;
use storaged_wire::peer::{CheckpointKey, PeerMessage, SealedShard};
use storaged_wire::{Digest, Manifest, NodeName, Owner, ShardEntry, WorldSize, encode};

use crate::api::{Note, Now};
use crate::catalog::{Announced, AnnouncedBy, Checkpoint, Description, LocalShard, Noted};
use crate::context::Context;
use crate::limits;
use crate::place::RunStanding;

/// What a node tells of its shards.
#[derive(Debug, Clone)]
pub(crate) struct Announcement {
    pub key: CheckpointKey,
    pub owner: Owner,
    pub world_size: WorldSize,
    pub shards: Vec<SealedShard>,
    pub digesting: u32,
}

impl Checkpoint {
    /// Nothing has been heard of it for so long that home nodes do not commit it any more: another one may be about to
    /// give it up.
    pub fn is_overdue(&self, now: Now) -> bool {
        now.since(self.news_at) >= limits::COMMIT_MAX_MS
    }

    /// Something new is heard of it. Late news is none: other home nodes may be giving it up.
    pub fn take_news(&mut self, now: Now) {
        if !self.is_overdue(now) {
            self.news_at = now;
        }
    }

    fn sealed_shards(&self) -> Vec<SealedShard> {
        let sealed = self.shards.iter().filter_map(|(rank, shard)| {
            let (_, root) = shard.digests.as_ref()?;
            Some(SealedShard {
                rank: *rank,
                length: shard.length,
                root: *root,
            })
        });
        sealed.collect()
    }

    /// Shards here whose digests are being made, and no longer than that can take.
    fn digesting(&self, now: Now) -> u32 {
        let is_digesting = |shard: &&LocalShard| {
            let most = limits::COMMIT_MAX_MS + shard.length / limits::DIGEST_BYTES_PER_MS_MIN;
            shard.digests.is_none() && now.since(shard.sealed_at) < most
        };
        let count = self.shards.values().filter(is_digesting).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// As a home node: these are all the shards that a node has sealed. Whether that was not known.
    fn set_announced(&mut self, from: &NodeName, shards: &[SealedShard]) -> bool {
        let name = name_of(shards);
        let before = self.announced_by.get(from);
        if before.is_some_and(|before| before.name == name) {
            return false;
        }
        // What a node that was restarted does not name it has lost.
        self.forget_announced(from);
        for shard in shards {
            let announced = Announced {
                node: from.clone(),
                length: shard.length,
                root: shard.root,
            };
            self.announced.insert(shard.rank, announced);
        }
        let ranks = shards.iter().map(|shard| shard.rank).collect();
        let announced = AnnouncedBy { ranks, name };
        self.announced_by.insert(from.clone(), announced);
        true
    }

    fn forget_announced(&mut self, node: &NodeName) {
        let before = self.announced_by.remove(node);
        for rank in before.into_iter().flat_map(|before| before.ranks) {
            // Another node may have taken the rank over.
            if self.announced.get(&rank).is_some_and(|it| it.node == *node) {
                self.announced.remove(&rank);
            }
        }
    }

    /// Whether all of this is announced still.
    pub fn is_as_announced(&self, manifest: &Manifest) -> bool {
        let is_announced = |shard: &ShardEntry| {
            let announced = self.announced.get(&shard.rank);
            announced.is_some_and(|it| {
                it.node == shard.node && it.length == shard.length && it.root == shard.root
            })
        };
        manifest.shards.iter().all(is_announced) || planted!("sealed_as_it_was_announced")
    }

    /// It has a manifest.
    pub fn forget_collected(&mut self) {
        self.announced.clear();
        self.announced_by.clear();
        self.noted_by.clear();
        self.description = None;
        self.description_here = None;
    }
}

/// The name of a list of shards. A count would not do: a node that was restarted may have as many others.
fn name_of(shards: &[SealedShard]) -> Digest {
    digest(&encode(&shards.to_vec()))
}

impl Context {
    /// Tells the home nodes what this node has of a checkpoint that has not committed, as far as they have not noted it.
    pub(crate) fn announce(&mut self, key: &CheckpointKey) {
        let now = self.now;
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        if checkpoint.manifest.is_some() {
            return;
        }
        let (shards, digesting) = (checkpoint.sealed_shards(), checkpoint.digesting(now));
        if digesting > 0 {
            checkpoint.take_news(now);
        }
        let description = checkpoint.description_here.as_ref().map(|it| it.name);
        let name = Some(name_of(&shards)).filter(|_| !shards.is_empty());
        // To all m+1 home nodes: were it one, losing that one between the last seal and the commit would lose the step though every
        // shard is there.
        for home in self.homes_of(key) {
            let noted = self
                .checkpoints
                .get(key)
                .and_then(|c| c.noted_by.get(&home));
            let noted = noted.copied().unwrap_or_default();
            let is_known = name.is_none() || noted.shards == name;
            let is_quiet = now.since(noted.at) < limits::ANNOUNCE_AGAIN_MS;
            if description.is_some() && noted.description != description {
                self.describe(key, &home);
            }
            if !(is_known && is_quiet) {
                let shards = if is_known { Vec::new() } else { shards.clone() };
                self.announce_to(key, &home, shards, digesting);
            }
        }
    }

    fn announce_to(
        &mut self,
        key: &CheckpointKey,
        home: &NodeName,
        shards: Vec<SealedShard>,
        digesting: u32,
    ) {
        if let Some(checkpoint) = self.checkpoints.get(key) {
            let message = PeerMessage::ShardsSealed {
                key: key.clone(),
                owner: checkpoint.owner,
                world_size: checkpoint.world_size,
                shards,
                digesting,
            };
            self.send(home, message);
        }
    }

    fn describe(&mut self, key: &CheckpointKey, home: &NodeName) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let (owner, world_size) = (checkpoint.owner, checkpoint.world_size);
        let Some(description) = checkpoint.description_here else {
            return;
        };
        let message = PeerMessage::Description {
            key: key.clone(),
            owner,
            world_size,
            schema: description.schema,
            torch_metadata: description.torch_metadata,
            durable: description.durable,
            epoch: description.epoch,
        };
        self.send(home, message);
    }

    pub(crate) fn announce_all(&mut self) {
        let uncommitted = self.checkpoints.values().filter(|c| c.manifest.is_none());
        let waiting: Vec<CheckpointKey> = uncommitted
            .filter(|c| !(c.shards.is_empty() && c.description_here.is_none()))
            .map(|c| c.key.clone())
            .collect();
        for key in waiting {
            self.announce(&key);
        }
        self.share_news();
    }

    /// Home nodes that wait for a checkpoint for long tell one another when they last heard of it: one that is cut off from a
    /// node must not give up what another one still collects.
    fn share_news(&mut self) {
        let (now, me) = (self.now, self.me().clone());
        let collected = self.checkpoints.values_mut().filter(|c| {
            let waits_long = now.since(c.first_seen) >= limits::NEWS_SHARED_AFTER_MS;
            let is_due = now.since(c.news_shared_at) >= limits::ANNOUNCE_AGAIN_MS;
            c.manifest.is_none() && waits_long && is_due && !c.announced_by.is_empty()
        });
        let mut shared = Vec::new();
        for checkpoint in collected {
            checkpoint.news_shared_at = now;
            let others = checkpoint.homes.iter().filter(|home| **home != me);
            shared.extend(others.map(|home| (home.clone(), checkpoint.key.clone())));
        }
        for (home, key) in shared {
            self.say_noted(&home, &key);
        }
    }

    /// A node announces what it has sealed to this home node.
    pub(crate) fn shards_announced(&mut self, from: &NodeName, announcement: Announcement) {
        let Announcement {
            mut key,
            owner,
            world_size,
            shards,
            digesting,
        } = announcement;
        if planted!("incarnations_mixed") {
            key.run = self.fence_of(&key.namespace);
        }
        if !self.may_collect(from, &key, owner, world_size) {
            return;
        }
        let shards = self.may_be_its_own(from, &key, world_size, shards);
        // Whoever has nothing new to say of what is not known here will say all of it: it sees that this home node was restarted.
        if shards.is_empty() && !self.checkpoints.contains_key(&key) {
            return;
        }
        let now = self.now;
        let checkpoint = self.home_entry(&key, owner, world_size);
        if checkpoint.is_overdue(now) {
            return;
        }
        let is_new = !shards.is_empty() && checkpoint.set_announced(from, &shards);
        if (is_new || digesting > 0) && !planted!("news_ignored") {
            checkpoint.news_at = now;
        }
        self.try_commit(&key);
        self.say_noted(from, &key);
    }

    pub(crate) fn described(
        &mut self,
        from: &NodeName,
        key: CheckpointKey,
        owner: Owner,
        world_size: WorldSize,
        description: Description,
    ) {
        if !self.may_collect(from, &key, owner, world_size) {
            return;
        }
        let now = self.now;
        let checkpoint = self.home_entry(&key, owner, world_size);
        if checkpoint.is_overdue(now) {
            return;
        }
        let known = checkpoint.description.as_ref().map(|it| it.name);
        if known != Some(description.name) {
            // Two that differ take turns, and are no news each time.
            if known.is_none() {
                checkpoint.news_at = now;
            }
        }
        let before = checkpoint.description.take().map(|it| it.durable);
        let durable = before.map_or(description.durable, |it| it.or_more(description.durable));
        checkpoint.description = Some(Description {
            durable,
            ..description
        });
        // Said again each second till all of it is here, and so is who has it; and till there is room for it.
        match self.room_for_description(&description.named(), &key.namespace) {
            Ok(()) => {
                self.note_room(&key, self.me().clone(), None);
                self.want_enclosures(&description.named(), std::slice::from_ref(from));
            }
            Err(refusal) => self.say_no_room(from, &key, description.name, refusal.message),
        }
        self.try_commit(&key);
        self.say_noted(from, &key);
    }

    /// Whoever described a step is told that there is no room for that here; the log once.
    fn say_no_room(&mut self, to: &NodeName, key: &CheckpointKey, named: Digest, reason: String) {
        let me = self.me().clone();
        let known = self.checkpoints.get(key).and_then(|c| c.no_room.as_ref());
        if known.is_none_or(|it| it.node != me) {
            let (key, reason) = (key.clone(), reason.clone());
            self.note(Note::NotDescribed { key, reason });
        }
        self.note_room(key, me.clone(), Some(&reason));
        let message = PeerMessage::NoRoom {
            manifest: named,
            node: me,
            reason,
        };
        self.send(to, message);
    }

    /// Answers a node with what has been noted of what it said, unless it hears of the commit.
    fn say_noted(&mut self, to: &NodeName, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        if checkpoint.manifest.is_some() {
            return;
        }
        let quiet = self.now.since(checkpoint.news_at);
        let described = checkpoint.description.as_ref();
        let described = described.filter(|it| self.has_enclosures(&it.named()));
        let message = PeerMessage::SealedNoted {
            key: key.clone(),
            shards: checkpoint.announced_by.get(to).map(|it| it.name),
            description: described.map(|it| it.name),
            quiet_ms: u32::try_from(quiet).unwrap_or(u32::MAX),
        };
        self.send(to, message);
    }

    /// A home node has noted what this node said; or it tells this home node when it last heard of a checkpoint.
    pub(crate) fn noted(&mut self, from: &NodeName, key: &CheckpointKey, noted: Noted, quiet: u64) {
        let now = self.now;
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        if !checkpoint.homes.contains(from) {
            return;
        }
        let heard_at = Now(now.0.saturating_sub(quiet));
        checkpoint.news_at = checkpoint.news_at.max(heard_at);
        let noted = Noted { at: now, ..noted };
        checkpoint.noted_by.insert(from.clone(), noted);
        if noted.description.is_some() {
            self.note_room(key, from.clone(), None);
        }
    }

    /// A node was restarted: it has lost what it announced.
    pub(crate) fn forget_announced(&mut self, node: &NodeName) {
        let collected = self.checkpoints.values_mut();
        for checkpoint in collected.filter(|c| c.manifest.is_none()) {
            checkpoint.forget_announced(node);
        }
    }

    /// Whether this node, as a home, collects what is announced of a checkpoint. Whoever announces is told why not.
    fn may_collect(
        &mut self,
        from: &NodeName,
        key: &CheckpointKey,
        owner: Owner,
        world_size: WorldSize,
    ) -> bool {
        let refusal = self
            .check_owner(&key.namespace, owner)
            .and_then(|()| self.check_fence(&key.namespace, key.run))
            .err()
            .map(|refusal| refusal.message);
        let known = self.checkpoints.get(key);
        let disagrees = known.filter(|c| c.world_size != world_size).map(|c| {
            format!(
                "ranks disagree on the world size: expected {}, got {world_size} from {from}",
                c.world_size
            )
        });
        let is_committed = known.is_some_and(|c| c.manifest.is_some());
        let table = self.namespaces.get(&key.namespace);
        let given_up = table.and_then(|table| table.abandoned.get(&(key.run, key.step)).cloned());
        if let Some(reason) = refusal.or(given_up) {
            let key = key.clone();
            self.send(from, PeerMessage::Abandoned { key, reason });
            return false;
        }
        if self.contradicts_world(from, key, world_size) {
            return false;
        }
        // Nobody can tell who is right, and a step that waits for ranks that do not exist would hold a slot of each rank.
        if let Some(reason) = disagrees {
            self.abandon_everywhere(key, &reason);
            return false;
        }
        if is_committed {
            // It asks because it has not heard: the commit was lost, or it was down.
            self.tell(key, from);
            return false;
        }
        // Whoever knows the run has told of it before, and says this again.
        self.standing(&key.namespace, key.run) != RunStanding::Unknown
    }

    fn home_entry(
        &mut self,
        key: &CheckpointKey,
        owner: Owner,
        world_size: WorldSize,
    ) -> &mut Checkpoint {
        self.namespace_table(&key.namespace, owner);
        self.checkpoint_entry(key, owner, world_size)
    }
}

#[cfg(test)]
mod tests;
