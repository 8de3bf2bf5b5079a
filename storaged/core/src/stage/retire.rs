//! When a checkpoint leaves RAM: once a newer one is as safe as this node can make it, or when it is given up.

use std::collections::BTreeMap;

use storaged_wire::peer::{CheckpointKey, PeerMessage, UnowedCause};
use storaged_wire::{CheckpointState, Digest, Namespace, NodeName, Rank};

use crate::api::{ConnId, Note, Now, Output};
use crate::budget::Reservation;
use crate::catalog::{Checkpoint, End, GivenUpCause, GivingWayFor, LocalShard, SlotUse, Upload};
use crate::context::Context;
use crate::event::Event;
use crate::limits;

/// Reasons kept for those who ask late, per namespace.
const ABANDONED_KEPT: usize = 64;

impl Context {
    /// The state from which a newer checkpoint makes older ones needless.
    pub(crate) fn safe_state(&self) -> CheckpointState {
        match self.setup.geometry {
            Some(_) if planted!("committed_is_safe_enough") => CheckpointState::Committed,
            Some(_) => CheckpointState::Protected,
            None => CheckpointState::Committed,
        }
    }

    /// The newest checkpoint of a namespace that is as safe as this node can make one.
    pub(crate) fn newest_safe(&self, namespace: &Namespace) -> Option<CheckpointKey> {
        let safe = self.safe_state();
        let mut of_it = self.checkpoints.values().rev();
        let newest = of_it.find(|c| c.key.namespace == *namespace && c.state >= safe)?;
        Some(newest.key.clone())
    }

    /// Retires what the newest safe checkpoint of the namespace makes needless.
    pub(crate) fn retire_older(&mut self, namespace: &Namespace) {
        let Some(newest) = self.newest_safe(namespace) else {
            return;
        };
        let base = self.base_to_keep(&newest);
        if let Some(base) = base.as_ref().filter(|base| self.is_base_alone(base)) {
            self.make_base(base);
        }
        let kept = self.kept_steps(namespace);
        let older: Vec<CheckpointKey> = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == *namespace && c.key < newest && !self.is_due(c))
            .filter(|c| !kept.contains(&c.key))
            .filter(|c| Some(&c.key) != base.as_ref())
            .filter(|c| self.is_as_safe(&newest, c))
            .map(|c| c.key.clone())
            .collect();
        let (read, older): (Vec<_>, Vec<_>) = older
            .into_iter()
            .partition(|key| Self::is_read(&self.checkpoints[key]));
        for key in read {
            self.keep_for_readers(&key);
        }
        for key in older {
            if self.checkpoints[&key].manifest.is_none() {
                self.abandon(
                    &key,
                    &format!(
                        "step {} of run {} was protected first",
                        newest.step, newest.run
                    ),
                );
            } else {
                self.retire(&key);
            }
        }
    }

    /// Whether a newer checkpoint bears at least as many losses as an older one does now. While a node is away a step may
    /// be protected without it; the one before must not go before it has no more to offer.
    pub(crate) fn is_as_safe(&self, newer: &CheckpointKey, older: &Checkpoint) -> bool {
        let losses = |c: &Checkpoint| self.bears(c).map_or(0, |bears| bears.losses);
        let newer = self.checkpoints.get(newer);
        newer.is_some_and(|newer| {
            newer.state == CheckpointState::Durable || losses(newer) >= losses(older)
        })
    }

    /// Whether this node can tell what a checkpoint bears: without a home node that is up it cannot.
    pub(crate) fn knows_bears(&self, key: &CheckpointKey) -> bool {
        self.homes_of(key).iter().any(|home| self.is_up(home))
    }

    /// Whether a newer checkpoint has made this one needless, and the durable tier does not need it either.
    pub(super) fn is_needless_but_for_readers(&self, checkpoint: &Checkpoint) -> bool {
        let namespace = &checkpoint.key.namespace;
        let newest = self.newest_safe(namespace);
        !self.is_due(checkpoint)
            && !self.kept_steps(namespace).contains(&checkpoint.key)
            && newest.is_some_and(|newest| {
                checkpoint.key < newest && self.is_as_safe(&newest, checkpoint)
            })
    }

    /// Frees what of it nobody has open: its parity, and shards of other ranks.
    fn keep_for_readers(&mut self, key: &CheckpointKey) {
        self.make_base(key);
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let shards = std::mem::take(&mut checkpoint.shards);
        let (read, unread): (BTreeMap<_, _>, BTreeMap<_, _>) = shards
            .into_iter()
            .partition(|(_, shard)| !shard.readers.is_empty());
        checkpoint.shards = read;
        let manifest = checkpoint.manifest.clone();
        // Its record names slots that somebody else is given now.
        self.keeping.touch(key);
        if !unread.is_empty() {
            self.emit(Event::BlocksGone(key.clone()));
            // Were it found protected after all, what has gone would be waited for, and nothing newer would have its turn.
            let is_wanted = self
                .checkpoints
                .get(key)
                .is_some_and(|c| self.wants_durable(c));
            // What is in the tier, or is to be copied from elsewhere, is not missed.
            let is_to_copy = |(rank, shard): (&Rank, &LocalShard)| {
                let entry = manifest.as_ref().and_then(|it| it.manifest().shard(*rank));
                entry.is_some_and(|it| it.node == *self.me()) && shard.upload != Upload::Done
            };
            if is_wanted && unread.iter().any(is_to_copy) && !planted!("what_is_read_is_copied") {
                self.note_given_up(
                    key,
                    "a newer step was safe first, and it stays for its readers",
                );
            }
        }
        for shard in unread.into_values() {
            self.free_slot_again(shard.slot);
        }
    }

    /// Whether somebody has a shard of it open here.
    pub(crate) fn is_read(checkpoint: &Checkpoint) -> bool {
        let mut shards = checkpoint.shards.values();
        shards.any(|shard| !shard.readers.is_empty())
    }

    pub(crate) fn retire(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let given_up = checkpoint.owing.given_up.clone();
        let end = End {
            state: checkpoint.state,
            name: checkpoint.name(),
            reason: given_up.unwrap_or_else(|| "a newer one was safe first".into()),
        };
        self.ends.note(key.clone(), end);
        self.remove(key);
        self.wake(key);
        self.note(Note::State {
            key: key.clone(),
            state: CheckpointState::Retired,
        });
    }

    /// Frees all that the checkpoint has here.
    pub(super) fn remove(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.remove(key) else {
            return;
        };
        self.keeping.touch(key);
        // Before the slots: no session reads from one any more when somebody is given it.
        if !planted!("sessions_outlive_blocks") {
            self.emit(Event::BlocksGone(key.clone()));
        }
        if let Some(name) = checkpoint.name() {
            self.by_name.remove(&name);
            let running = |shard: &LocalShard| shard.upload == Upload::Running;
            let shards = checkpoint.shards.iter().filter(|(_, shard)| running(shard));
            let stop = |rank: Rank| Output::StopUpload {
                manifest: name,
                rank,
            };
            self.out.extend(shards.map(|(rank, _)| stop(*rank)));
        }
        for set in checkpoint.parity.into_values() {
            if !planted!("bytes_of_parity_kept") {
                self.budget.release(Reservation::Parity(set));
            }
            self.out.push(Output::DropParity { set });
        }
        for shard in checkpoint.shards.into_values() {
            self.free_slot_again(shard.slot);
        }
    }

    /// The checkpoint will never commit or be whole: free it, and tell those who wait for it.
    pub(crate) fn abandon(&mut self, key: &CheckpointKey, reason: &str) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        if checkpoint.state >= CheckpointState::Protected {
            return;
        }
        let owner = checkpoint.owner;
        self.remove(key);
        let table = self.namespace_table(&key.namespace, owner);
        table.abandoned.insert((key.run, key.step), reason.into());
        while table.abandoned.len() > ABANDONED_KEPT {
            table.abandoned.pop_first();
        }
        self.note(Note::Abandoned {
            key: key.clone(),
            reason: reason.into(),
        });
        self.wake(key);
    }

    /// A peer gave a checkpoint up. A committed one it may give up only if it is to code it or decides of it; one that a home node
    /// calls protected nobody may.
    pub(crate) fn abandoned_told(&mut self, from: &NodeName, key: &CheckpointKey, reason: &str) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let is_concerned = checkpoint
            .manifest
            .as_ref()
            .is_none_or(|manifest| self.stakeholders(manifest).contains(from));
        if is_concerned && self.is_called_safe(checkpoint) {
            return self.has_given_up(from, key);
        }
        if !is_concerned || !self.may_end(from) {
            return;
        }
        self.abandon_as_told(key, cut(reason));
    }

    /// Gives up a checkpoint on a peer's word. Others may not have heard it: home nodes would count what is not here any more.
    pub(super) fn abandon_as_told(&mut self, key: &CheckpointKey, reason: &str) {
        let name = self.checkpoints.get(key).and_then(Checkpoint::name);
        self.abandon(key, reason);
        if let Some(name) = name.filter(|_| !planted!("given_up_in_silence")) {
            let cause = GivenUpCause::Told;
            self.ends.note_given_up(name, key.clone(), self.now, cause);
            self.say_let_go(name, key);
        }
    }

    /// Tells the home nodes of a checkpoint that nothing of it is here any more.
    pub(crate) fn say_let_go(&mut self, manifest: Digest, key: &CheckpointKey) {
        for home in self.homes_of(key) {
            let cause = UnowedCause::Retired;
            self.send(&home, PeerMessage::Unowed { manifest, cause });
        }
    }

    /// Somebody goes on with a checkpoint that was given up here; its home nodes have not heard of that.
    pub(crate) fn says_again_that_it_gave_up(&mut self, manifest: Digest) -> bool {
        let key = self.ends.given_up(manifest).cloned();
        if let Some(key) = &key {
            self.say_let_go(manifest, key);
        }
        key.is_some()
    }

    /// Whether a checkpoint has just been given up, so that others may be about to.
    pub(crate) fn has_just_given_up(&self, manifest: Digest) -> bool {
        self.ends.is_refused(manifest, self.now)
    }

    /// Whether a checkpoint is protected, or a home node calls it so and this node has not found otherwise.
    pub(crate) fn is_called_safe(&self, checkpoint: &Checkpoint) -> bool {
        let is_called = checkpoint.standing.is_called_protected();
        checkpoint.state >= CheckpointState::Protected
            || (is_called && !self.is_found_bare(checkpoint))
    }

    /// Gives up a checkpoint and tells the peers to.
    pub(crate) fn abandon_everywhere(&mut self, key: &CheckpointKey, reason: &str) {
        // Whoever holds parts of it and has not heard that says so, or tells of it again, and hears it then.
        if let Some(name) = self.checkpoints.get(key).and_then(Checkpoint::name) {
            let cause = GivenUpCause::Told;
            self.ends.note_given_up(name, key.clone(), self.now, cause);
        }
        self.send_all(&PeerMessage::Abandoned {
            key: key.clone(),
            reason: reason.into(),
        });
        self.abandon(key, reason);
    }

    /// Gives up a checkpoint for a newer one, and tells the peers to.
    pub(crate) fn supersede_everywhere(&mut self, key: &CheckpointKey, reason: &str) {
        self.send_all(&PeerMessage::Superseded {
            key: key.clone(),
            reason: reason.into(),
        });
        self.abandon(key, reason);
    }

    /// A peer gave a checkpoint up for a newer one. One that is committed here goes only if there is a newer one here to
    /// restart from.
    pub(crate) fn superseded(&mut self, from: &NodeName, key: &CheckpointKey, reason: &str) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        // A newer one is as safe: what one word costs here is a step that was a comfort, and it must go everywhere at once.
        if self.is_kept_step(checkpoint) {
            self.retire(key);
            return;
        }
        if self.is_called_safe(checkpoint) {
            return self.has_given_up(from, key);
        }
        let is_committed = checkpoint.manifest.is_some();
        // Where nodes are gone each save gives up a step, and all say so.
        if !(self.is_stuck(checkpoint) || self.may_end(from)) {
            return;
        }
        if !is_committed {
            self.abandon_as_told(key, cut(reason));
        } else {
            // It has let go what it said that it holds: counted until it says so itself, that could make the step protected once more.
            if let Some(checkpoint) = self.checkpoints.get_mut(key) {
                checkpoint.standing.holds_nothing(from);
            }
            self.recount(key, from);
            let whom = GivingWayFor::Peers([from.clone()].into());
            self.give_way(key, cut(reason), whom);
        }
    }

    /// Whether there is a newer committed checkpoint here to restart from.
    pub(super) fn is_needless(&self, checkpoint: &Checkpoint) -> bool {
        let key = &checkpoint.key;
        // A newer commit that only one node has told of brings nothing back that is here.
        let holds = !checkpoint.shards.is_empty();
        let is_real = |c: &Checkpoint| !holds || !c.shards.is_empty();
        let newer = self.checkpoints.values().rev();
        let mut newer = newer.take_while(|newer| newer.key > *key);
        newer.any(|c| c.key.namespace == key.namespace && c.manifest.is_some() && is_real(c))
    }

    /// A peer has given up a checkpoint that is safe here, as it has not heard. It is told of it again, and says then what it has: its blocks, which it
    /// has let go, would be counted on until it is asked by chance.
    fn has_given_up(&mut self, from: &NodeName, key: &CheckpointKey) {
        let checkpoint = self.checkpoints.get_mut(key);
        let Some(checkpoint) = checkpoint.filter(|_| !planted!("given_up_is_still_held")) else {
            return;
        };
        // Were its blocks counted as gone at once, others could find that the step bears nothing and give it up too, before it is coded again.
        checkpoint.told.remove(from);
    }

    /// Checkpoints that do not commit and of which nothing new is heard are given up: by their home nodes first, once no other home node can
    /// have committed them unheard; by the others when no home node has answered for as long again.
    pub(crate) fn give_up_old_commits(&mut self) {
        let now = self.now;
        let limit = |c: &Checkpoint| {
            let is_home = self.homes_of(&c.key).contains(self.me());
            let turns = if is_home { 1 } else { 2 };
            limits::COMMIT_MAX_MS + turns * limits::COMMIT_SETTLE_MS
        };
        let uncommitted = self.checkpoints.values().filter(|c| c.manifest.is_none());
        let late: Vec<(CheckpointKey, String)> = uncommitted
            .filter(|c| now.since(c.news_at) >= limit(c) && self.has_listened(c))
            .map(|c| {
                let why = self.why_not_yet(&c.key);
                let seconds = limits::COMMIT_MAX_MS / 1000;
                let reason = format!("nothing new was heard of it for {seconds} s{why}");
                (c.key.clone(), reason)
            })
            .collect();
        for (key, reason) in late {
            self.abandon_everywhere(&key, &reason);
        }
    }

    /// Whether this node would know of a commit that the home nodes have made. One that was stopped, or cut off from them, hears of
    /// it only now, and would free shards of a step that all others take for committed.
    fn has_listened(&self, checkpoint: &Checkpoint) -> bool {
        let has_listened = |since: Now| self.now.since(since) >= limits::COMMIT_SETTLE_MS;
        let mut links = checkpoint
            .homes
            .iter()
            .filter_map(|home| self.peers.get(home));
        has_listened(self.awake_since) && links.all(|link| has_listened(link.since))
    }

    /// Time has passed. A gap is one in which this node was stopped and heard nobody.
    pub(crate) fn notice_gap(&mut self) {
        if self.was_stopped() {
            // A daemon may take longer than that until it first looks around.
            if self.looked_at > Now(0) {
                let ms = self.now.since(self.looked_at);
                self.note(Note::Stopped { ms });
            }
            self.awake_since = self.now;
        } else if self.has_yet_to_listen() {
            self.awake_since = self.awake_since.plus(self.late_by());
        }
        self.looked_at = self.now;
    }

    /// Whether it was stopped until now, and has not heard yet what became of its peers.
    pub(crate) fn was_stopped(&self) -> bool {
        self.now.since(self.looked_at) >= limits::GAP_MS
    }

    /// By how much it looks around later than it should.
    fn late_by(&self) -> u64 {
        let unseen = self.now.since(self.looked_at);
        unseen.saturating_sub(limits::REPEAT_MS)
    }

    /// Whether what peers have said may be long past: this node was stopped, and has not had the time to find out whose links have ended
    /// meanwhile.
    pub(crate) fn has_yet_to_listen(&self) -> bool {
        let listens = if self.setup.members.len() > limits::NEAR_NODES_MAX {
            limits::LISTEN_FAR_MS
        } else {
            limits::LISTEN_MS
        };
        // Stopped once more for a moment it has heard nothing in that either.
        let heard = self.now.since(self.awake_since);
        let is_awake = heard.saturating_sub(self.late_by()) >= listens;
        let has_been_stopped = self.was_stopped() || self.awake_since > Now(0) && !is_awake;
        has_been_stopped && !planted!("old_words_protect")
    }

    pub(crate) fn close_readers(&mut self, conn: ConnId) {
        let mut namespaces = Vec::new();
        for slot in self.slots.values_mut() {
            slot.readers_before.remove(&conn);
        }
        for checkpoint in self.checkpoints.values_mut() {
            for shard in checkpoint.shards.values_mut() {
                if !planted!("readers_never_leave") && shard.readers.remove(&conn) {
                    namespaces.push(checkpoint.key.namespace.clone());
                }
            }
        }
        for namespace in namespaces {
            self.retire_older(&namespace);
        }
    }

    /// A reader closes a shard in which chunks had rotted.
    pub(crate) fn reader_closes(&mut self, manifest: Digest, rank: Rank, conn: ConnId) {
        let namespace = self.by_name.get(&manifest).map(|key| key.namespace.clone());
        let slots = self.slots.values_mut();
        let its =
            slots.filter(|slot| slot.rank == rank && Some(&slot.namespace) == namespace.as_ref());
        for slot in its.filter(|slot| slot.used_for == SlotUse::Repairing) {
            slot.readers_before.remove(&conn);
        }
    }

    /// A checkpoint that is of no concern to this node was only known for a reader: nobody tells this node when it retires.
    pub(crate) fn forget_foreign(&mut self, in_use: impl Fn(&Checkpoint) -> bool) {
        let is_foreign = |c: &&Checkpoint| {
            let concerned = c.manifest.as_ref().map(|m| self.stakeholders(m));
            let holds = c.has_blocks() || in_use(c);
            concerned.is_some_and(|nodes| !nodes.contains(self.me())) && !holds
        };
        let foreign = self.checkpoints.values().filter(is_foreign);
        for key in foreign.map(|c| c.key.clone()).collect::<Vec<_>>() {
            self.remove(&key);
        }
    }
}

/// As much of a peer's reason as is kept.
pub(crate) fn cut(reason: &str) -> &str {
    const BYTES_MAX: usize = 1_024;
    &reason[..reason.floor_char_boundary(BYTES_MAX)]
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::peer::{CheckpointKey, Lane, PeerMessage};
    use storaged_wire::{CheckpointState, EnclosuresHeld, Rank};

    use crate::api::{Input, Now};
    use crate::limits;
    use crate::node::Node;
    use crate::testkit::{committed, hear, hear_from_all, last_of, manifest, sent};

    /// `e` is a home node of it. All blocks are there, and all know it; then `c`, which has not heard that it is protected, gives it up.
    #[test]
    fn who_gives_up_what_is_safe_is_told_of_it_again() {
        let mut node = last_of(&["a", "b", "c", "d", "e"], 2, 2);
        let manifest = manifest(2, &["a", "b"], &["c", "d"], 5, digest(b"any"));
        let manifest = manifest.seal().expect("a sound manifest");
        let (name, key) = (manifest.name(), CheckpointKey::of(manifest.manifest()));
        hear_from_all(&mut node, 1, &committed(&manifest));
        let parity = |index| vec![(Lane { group: 0, index: 0 }, index)];
        for (from, shards, parity) in [
            ("a", vec![Rank::new(0)], vec![]),
            ("b", vec![Rank::new(1)], vec![]),
            ("c", vec![], parity(0)),
            ("d", vec![], parity(1)),
        ] {
            let held = PeerMessage::Held {
                manifest: name,
                version: 1,
                shards,
                parity,
                enclosures: EnclosuresHeld::All,
            };
            hear(&mut node, 2, from, held);
        }
        let stored = PeerMessage::ManifestStored {
            manifest: name,
            state: CheckpointState::Protected,
            bears: 2,
        };
        hear_from_all(&mut node, 3, &stored);
        let tells = |node: &mut Node, at| {
            let said = sent(node.handle(Now(at), Input::Tick));
            said.iter()
                .any(|message| matches!(message, PeerMessage::Committed { .. }))
        };
        assert!(!tells(&mut node, 2 * limits::REPEAT_MS), "all know it");
        let reason = "nothing new was heard of it".into();
        let given_up = PeerMessage::Abandoned { key, reason };
        hear(&mut node, 2 * limits::REPEAT_MS, "c", given_up);
        assert!(tells(&mut node, 4 * limits::REPEAT_MS));
    }
}
