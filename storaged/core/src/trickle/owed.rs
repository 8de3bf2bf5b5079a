//! What is owed to the durable tier, and how every node learns that it is not any more. A node keeps its shards of a
//! checkpoint until that is durable or given up; should it miss the word, it asks the home nodes each second, and those
//! answer also of what they have retired themselves. So nothing stays pinned for a message that was lost.

use std::collections::BTreeSet;

use storaged_wire::local::DurableWish;
use storaged_wire::peer::{CheckpointKey, PeerMessage, UnowedCause};
use storaged_wire::{CheckpointState, Digest, NodeName, Rank};

use crate::api::{DurablePolicy, Note, Output};
use crate::catalog::{Checkpoint, Upload};
use crate::context::Context;
use crate::stage::cut;

/// Longest text of the tier's error that is told to peers.
const REASON_BYTES_MAX: usize = 1_024;

impl Context {
    /// Tells the home nodes what this node has done for a checkpoint that is owed, and asks whether it still is.
    pub(crate) fn report_owed(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get(key).filter(|c| self.is_due(c)) else {
            return;
        };
        let Some(manifest) = checkpoint.name() else {
            return;
        };
        let shards = checkpoint.shards.iter();
        let done = shards.filter(|(_, shard)| shard.upload == Upload::Done);
        let done: Vec<Rank> = done.map(|(rank, _)| *rank).collect();
        let homes = self.homes_of(key);
        // A node that let it go before it heard that it is owed says so when it is asked. Unasked, this one would wait for
        // its shard for ever, and no newer step would have its turn.
        let mut asked = if homes.contains(self.me()) && !planted!("retired_shards_awaited") {
            self.not_copied(key)
        } else {
            BTreeSet::new()
        };
        asked.extend(homes);
        for node in asked {
            let done = done.clone();
            self.send(&node, PeerMessage::Owed { manifest, done });
        }
    }

    /// Nodes whose shards are not in the tier.
    pub(crate) fn not_copied(&self, key: &CheckpointKey) -> BTreeSet<NodeName> {
        let checkpoint = self.checkpoints.get(key);
        let manifest = checkpoint.and_then(|c| Some((c, c.manifest.as_ref()?)));
        let Some((checkpoint, manifest)) = manifest else {
            return BTreeSet::new();
        };
        let shards = manifest.manifest().shards.iter();
        let not_copied = shards.filter(|shard| !checkpoint.shards_durable.contains(&shard.rank));
        not_copied.map(|shard| shard.node.clone()).collect()
    }

    /// A node says which of its shards are in the tier.
    pub(crate) fn owed(&mut self, from: &NodeName, name: Digest, done: Vec<Rank>) {
        let Some(manifest) = self.manifest_named(name) else {
            return self.answer_owed(from, name);
        };
        let is_its_own = |rank: &Rank| {
            let shard = manifest.manifest().shard(*rank);
            shard.is_some_and(|shard| shard.node == *from)
        };
        let now = self.now;
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let done = done.into_iter().filter(is_its_own);
        if checkpoint.owing.given_up.is_none() {
            checkpoint.shards_durable.extend(done);
        }
        let is_copied = checkpoint.shards_durable.len() == checkpoint.world_size.get() as usize;
        if is_copied || planted!("manifest_before_shards") {
            checkpoint.owing.copied_at.get_or_insert(now);
        }
        let given_up = checkpoint.owing.given_up.clone();
        if checkpoint.state >= CheckpointState::Durable {
            self.send(from, PeerMessage::Durable { manifest: name });
        } else if let Some(reason) = given_up {
            self.say_given_up(from, name, reason);
        } else {
            self.start_publishing();
        }
    }

    fn say_given_up(&mut self, to: &NodeName, manifest: Digest, reason: String) {
        let cause = UnowedCause::GivenUp(reason);
        self.send(to, PeerMessage::Unowed { manifest, cause });
    }

    /// Of a checkpoint that this home node does not have any more.
    pub(crate) fn answer_owed(&mut self, from: &NodeName, manifest: Digest) {
        if planted!("retired_before_told") {
            return;
        }
        let ended = self.ends.named(manifest).map(|end| end.state);
        match ended {
            Some(CheckpointState::Durable) => {
                self.send(from, PeerMessage::Durable { manifest });
            }
            // Just started, it may be told of it any moment.
            None if !self.settled() => {}
            _ => {
                let cause = UnowedCause::Retired;
                self.send(from, PeerMessage::Unowed { manifest, cause });
            }
        }
    }

    /// A node says that a checkpoint is not owed any more.
    pub(crate) fn unowed(&mut self, from: &NodeName, name: Digest, cause: UnowedCause) {
        // Whoever holds nothing of it and decides nothing has no say.
        let given_up = matches!(cause, UnowedCause::GivenUp(_));
        if !self.concerns(from, name) || (given_up && !self.may_end(from)) {
            return;
        }
        let Some(key) = self.by_name.get(&name).cloned() else {
            return;
        };
        let (now, is_wanted_again) = (self.now, self.is_pinned(&key));
        let Some(checkpoint) = self.checkpoints.get_mut(&key) else {
            return;
        };
        match cause {
            UnowedCause::GivenUp(reason) => self.note_given_up(&key, cut(&reason)),
            UnowedCause::Retired => {
                checkpoint.owing.retired_at.insert(from.clone());
                checkpoint.standing.let_go(from);
                if is_wanted_again {
                    // What it was told of it, it has forgotten.
                    checkpoint.standing.forget(from, now);
                }
                // If it let go what is still wanted of it, it is told of it again, and says then what it has.
                checkpoint.told.remove(from);
                self.recount(&key, from);
                // A home node that has it can write its manifest: were it given up there, one node that lies would do it.
                let is_home = self.homes_of(&key).contains(self.me())
                    && !planted!("homes_give_up_for_others");
                if !is_home && self.no_home_has(&key) {
                    self.note_given_up(&key, "its home nodes have retired it");
                }
                self.give_up_stuck_uploads();
                self.forget_what_no_home_has(&key);
                self.go_on_giving_way(&key);
            }
        }
        self.retire_older(&key.namespace);
    }

    /// Whether a node has to do with a checkpoint.
    fn concerns(&self, node: &NodeName, name: Digest) -> bool {
        let manifest = self.manifest_named(name);
        manifest.is_some_and(|manifest| self.stakeholders(&manifest).contains(node))
    }

    /// Whether every other home node that is up has retired a checkpoint.
    pub(crate) fn no_home_has(&self, key: &CheckpointKey) -> bool {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return false;
        };
        let retired = &checkpoint.owing.retired_at;
        let homes = self.homes_of(key).into_iter();
        let mut others = homes.filter(|home| home != self.me() && self.is_up(home));
        others.all(|home| retired.contains(&home))
    }

    /// Gives up the copy of a checkpoint in the durable tier, and tells everyone who keeps it for that.
    pub(crate) fn give_up_durable(&mut self, key: &CheckpointKey, reason: &str) {
        let Some(manifest) = self.checkpoints.get(key).and_then(|c| c.manifest.clone()) else {
            return;
        };
        for node in self.stakeholders(&manifest) {
            if node != *self.me() {
                self.say_given_up(&node, manifest.name(), reason.into());
            }
        }
        self.note_given_up(key, reason);
    }

    pub(crate) fn note_given_up(&mut self, key: &CheckpointKey, reason: &str) {
        // Where nobody wanted a copy there is nothing to tell.
        let known = self.checkpoints.get(key);
        let is_wanted = known.is_some_and(|c| self.wants_durable(c));
        let me = self.me().clone();
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let over =
            checkpoint.owing.given_up.is_some() || checkpoint.state >= CheckpointState::Durable;
        let (Some(manifest), false) = (checkpoint.manifest.clone(), over) else {
            return;
        };
        checkpoint.owing.given_up = Some(reason.into());
        checkpoint.forget_copied();
        for (rank, shard) in &mut checkpoint.shards {
            let rank = *rank;
            let is_running = shard.upload == Upload::Running;
            // Of a rank that two processes claim, the objects are those of the node that the manifest names.
            let is_named = manifest.manifest().shard(rank).map(|it| &it.node) == Some(&me);
            if is_named && shard.upload != Upload::Fresh {
                let manifest = manifest.clone();
                self.out.push(Output::Withdraw { manifest, rank });
            } else if is_running {
                let manifest = manifest.name();
                self.out.push(Output::StopUpload { manifest, rank });
            }
            // What was copied is not there any more either.
            if shard.upload != Upload::Fresh {
                shard.upload = Upload::Idle;
            }
        }
        if is_wanted {
            let (key, reason) = (key.clone(), reason.into());
            self.note(Note::DurableGivenUp { key, reason });
        }
        self.wake(key);
    }

    /// As a home node: what cannot be copied whole any more, because a shard's node is gone or has lost it, does not hold up
    /// the copies of newer checkpoints.
    pub(crate) fn give_up_stuck_uploads(&mut self) {
        let stuck = |c: &Checkpoint| {
            let newer = self.newest_safe(&c.key.namespace);
            let manifest = c.manifest.as_ref()?;
            if self.is_undescribed(c) && newer.as_ref().is_some_and(|it| *it > c.key) {
                return Some("nobody has its schema and metadata, and a newer step is safe".into());
            }
            let mut owing = manifest.manifest().shards.iter();
            let lost = owing.find(|shard| {
                !c.shards_durable.contains(&shard.rank) && self.cannot_come(c, shard)
            })?;
            let is_home = self.homes_of(&c.key).contains(self.me());
            (is_home && newer.is_some_and(|newer| newer > c.key)).then(|| {
                let (rank, node) = (lost.rank, &lost.node);
                format!("the shard of rank {rank} is not to be had from {node}, and a newer step is safe")
            })
        };
        let due = self.checkpoints.values().filter(|c| self.is_due(c));
        let stuck: Vec<(CheckpointKey, String)> = due
            .filter_map(|c| Some((c.key.clone(), stuck(c)?)))
            .collect();
        for (key, reason) in stuck {
            self.give_up_durable(&key, &reason);
            self.retire_older(&key.namespace);
        }
    }

    /// The manifest is in the tier: whoever keeps the checkpoint hears it now, because this node may retire it at once.
    pub(super) fn tell_durable(&mut self, key: &CheckpointKey) {
        let Some(manifest) = self.checkpoints.get(key).and_then(|c| c.manifest.clone()) else {
            return;
        };
        for node in self.stakeholders(&manifest) {
            if node != *self.me() {
                let manifest = manifest.name();
                self.send(&node, PeerMessage::Durable { manifest });
            }
        }
    }

    /// The tier did not take something: whoever waits for the checkpoint is told, on whichever node.
    pub(super) fn tell_durable_failed(&mut self, key: &CheckpointKey, reason: String) {
        let Some(manifest) = self.checkpoints.get(key).and_then(|c| c.manifest.clone()) else {
            return;
        };
        let mut told = reason.clone();
        told.truncate(told.floor_char_boundary(REASON_BYTES_MAX));
        for node in self.stakeholders(&manifest) {
            let (manifest, reason) = (manifest.name(), told.clone());
            self.send(&node, PeerMessage::DurableFailed { manifest, reason });
        }
        let key = key.clone();
        self.note(Note::DurableFailed { key, reason });
    }

    pub(crate) fn durable_failed(&mut self, from: &NodeName, name: Digest, reason: String) {
        if self.concerns(from, name)
            && let Some(checkpoint) = self.checkpoint_named(name)
        {
            let owing = &mut checkpoint.owing;
            owing.failed = Some(cut(&reason).into());
            // Nothing but the manifest can have failed.
            if owing.copied_at.is_some() && owing.unpublished_by.insert(from.clone()) {
                self.start_publishing();
            }
        }
    }

    /// Why a checkpoint's copy does not come to its end, for whoever hears that it was given up.
    pub(crate) fn why_not_durable(&self, key: &CheckpointKey) -> String {
        let failed = self
            .checkpoints
            .get(key)
            .and_then(|c| c.owing.failed.as_ref());
        match failed {
            Some(reason) => format!("a newer step needs its slot; the durable tier: {reason}"),
            None => "a newer step needs its slot: the durable tier is slower than the steps, \
                     so copy fewer of them (trickle.every) or raise trickle.rate"
                .into(),
        }
    }

    /// Why a checkpoint is not to be copied at all.
    pub(crate) fn why_not_wanted(&self, checkpoint: &Checkpoint) -> String {
        match (self.setup.durable, checkpoint.durable_wish) {
            (DurablePolicy::Absent, _) => "no durable tier is configured ([durable])".into(),
            (_, DurableWish::Never) => "it was committed with durable=\"never\"".into(),
            (DurablePolicy::Every(steps), _) => format!(
                "trickle.every is {steps}, which does not divide it; commit with durable=\"required\""
            ),
            (DurablePolicy::OnRequest, _) => {
                "only steps committed with durable=\"required\" are copied".into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use storaged_codec::digest;
    use storaged_wire::peer::PeerMessage;

    use super::*;
    use crate::api::{DurableListing, Input, Now, QueryId};
    use crate::node::Node;
    use crate::testkit::{hear, hear_from_all, last_with_tier, manifest, name};
    use storaged_wire::ManifestBytes;

    /// The nodes that a coding node asks for their shards of a protected step that is owed; none if it is no home of it.
    fn asked_by_home(step: u64) -> Option<Vec<NodeName>> {
        let members = ["a", "b", "c", "d", "e"];
        let sealed = manifest(step, &["a", "b"], &["d", "e"], 4096, digest(b"shard"));
        let sealed = Arc::new(sealed.seal().expect("a sound manifest"));
        let mut node = last_with_tier(&members, 2, 2, DurablePolicy::Every(1));
        let committed = PeerMessage::Committed {
            manifest: sealed.bytes().to_vec().into(),
            durable: DurableWish::Policy,
        };
        hear_from_all(&mut node, 1, &committed);
        let (manifest, bears) = (sealed.name(), 1);
        let protected = PeerMessage::Protected { manifest, bears };
        hear_from_all(&mut node, 2, &protected);
        let homes = node
            .context()
            .homes_of(&CheckpointKey::of(sealed.manifest()));
        let is_home = homes.contains(&name("e")) && !homes.contains(&name("a"));
        let outputs = node.handle(Now(2_000), Input::Tick);
        let asked = outputs.into_iter().filter_map(|output| match output {
            Output::Send { to, message } => {
                matches!(message, PeerMessage::Owed { .. }).then_some(to)
            }
            _ => None,
        });
        let asked: Vec<NodeName> = asked.collect();
        is_home.then_some(asked)
    }

    /// A home node of a protected step that is owed, of which `a`, which is none, has a shard; and the step.
    fn home_that_waits() -> (Node, Arc<ManifestBytes>) {
        let members = ["a", "b", "c", "d", "e"];
        let found = (1..30).find_map(|step| {
            asked_by_home(step)?;
            let sealed = manifest(step, &["a", "b"], &["d", "e"], 4096, digest(b"shard"));
            let sealed = Arc::new(sealed.seal().expect("a sound manifest"));
            let mut node = last_with_tier(&members, 2, 2, DurablePolicy::Every(1));
            let committed = PeerMessage::Committed {
                manifest: sealed.bytes().to_vec().into(),
                durable: DurableWish::Policy,
            };
            hear_from_all(&mut node, 1, &committed);
            let (manifest, bears) = (sealed.name(), 1);
            hear_from_all(&mut node, 2, &PeerMessage::Protected { manifest, bears });
            Some((node, sealed))
        });
        found.expect("e is a home node of some step")
    }

    /// One of them may lie, and this one has what it takes.
    #[test]
    fn a_home_node_gives_no_copy_up_because_others_have_let_the_step_go() {
        let (mut node, sealed) = home_that_waits();
        let key = CheckpointKey::of(sealed.manifest());
        let homes = node.context().homes_of(&key);
        for home in homes.iter().filter(|home| **home != name("e")) {
            let (manifest, cause) = (sealed.name(), UnowedCause::Retired);
            let message = PeerMessage::Unowed { manifest, cause };
            hear(&mut node, 3, home.as_str(), message);
        }
        let checkpoint = &node.context().checkpoints[&key];
        assert_eq!(checkpoint.owing.given_up, None);
    }

    fn looks_in_tier(outputs: &[Output]) -> Option<QueryId> {
        let mut found = outputs.iter().filter_map(|output| match output {
            Output::ListDurable { query, .. } => Some(*query),
            _ => None,
        });
        found.next()
    }

    /// Whether a home node waits for the first shard of a step.
    fn is_awaited(node: &Node, key: &CheckpointKey) -> bool {
        let checkpoint = &node.context().checkpoints[key];
        let manifest = checkpoint.manifest.as_ref().expect("it committed");
        let shard = &manifest.manifest().shards[0];
        !node.context().cannot_come(checkpoint, shard)
    }

    /// All home nodes that have seen to it may have lost their memory since.
    #[test]
    fn an_owner_that_takes_a_step_for_durable_has_its_home_node_look_in_the_tier() {
        for is_there in [true, false] {
            let (mut node, sealed) = home_that_waits();
            let manifest = sealed.name();
            let key = CheckpointKey::of(sealed.manifest());
            let outputs = hear(&mut node, 2_000, "a", PeerMessage::Durable { manifest });
            let query = looks_in_tier(&outputs).expect("it looks in the tier");
            let again = hear(&mut node, 2_001, "a", PeerMessage::Durable { manifest });
            assert_eq!(looks_in_tier(&again), None, "not as often as it is said");
            let manifests = if is_there {
                vec![sealed.clone()]
            } else {
                Vec::new()
            };
            let listed = || DurableListing {
                manifests: manifests.clone(),
                ..DurableListing::default()
            };
            let outcome = Ok(listed());
            node.handle(Now(2_010), Input::DurableListed { query, outcome });
            if !is_there {
                assert!(is_awaited(&node, &key), "one listing may lag behind");
                let at = 2_000 + crate::limits::LISTINGS_LAG_MS;
                let again = hear(&mut node, at, "a", PeerMessage::Durable { manifest });
                let query = looks_in_tier(&again).expect("it looks once more");
                let outcome = Ok(listed());
                node.handle(Now(at + 10), Input::DurableListed { query, outcome });
                let again = hear(&mut node, 2 * at, "a", PeerMessage::Durable { manifest });
                assert_eq!(looks_in_tier(&again), None, "it knows the answer");
            }
            let checkpoint = &node.context().checkpoints[&key];
            assert_eq!(checkpoint.state == CheckpointState::Durable, is_there);
            let is_awaited = is_awaited(&node, &key);
            assert_eq!(is_awaited, is_there, "what is not there will not be copied");
        }
    }

    #[test]
    fn others_that_take_it_for_durable_say_nothing() {
        let (mut node, sealed) = home_that_waits();
        let durable = PeerMessage::Durable {
            manifest: sealed.name(),
        };
        let homes = node
            .context()
            .homes_of(&CheckpointKey::of(sealed.manifest()));
        let strangers = ["b", "c", "d"].map(name);
        let owner = |node: &NodeName| *node == name("b") || homes.contains(node);
        for stranger in strangers.iter().filter(|it| !owner(it)) {
            let outputs = hear(&mut node, 2_000, stranger.as_str(), durable.clone());
            assert_eq!(looks_in_tier(&outputs), None, "{stranger}");
        }
    }

    /// It may have let the step go before it heard that it is owed, and will not say so unasked.
    #[test]
    fn a_home_node_asks_whoever_has_not_copied_its_shard() {
        let of_homes: Vec<_> = (1..30).filter_map(asked_by_home).collect();
        assert!(of_homes.len() > 2, "{}", of_homes.len());
        for asked in of_homes {
            assert!(asked.contains(&name("a")), "{asked:?}");
        }
    }
}
