//! What it takes until a node believes of a checkpoint what only home nodes say. A home node counts for itself. Everybody else
//! needs two of them, of which one is sound; of home nodes that differ, or of which one is silent, it counts for itself too, by
//! asking all nodes of the checkpoint what they hold. That a checkpoint is durable a node looks up in the tier if too few say so.

use storaged_wire::peer::{CheckpointKey, Holding, PeerMessage};
use storaged_wire::{CheckpointState, Digest, NodeName};

use super::{Blocks, Standing};
use crate::api::{
    DurableFault, DurableListing, DurablePolicy, FalseStatement, Now, Output, QueryId, Trust,
};
use crate::catalog::{Checkpoint, TierQuestion};
use crate::context::Context;
use crate::limits;

impl Standing {
    fn says_durable(&mut self, home: &NodeName, now: Now) {
        self.durable.entry(home.clone()).or_insert(now);
    }

    fn is_durable_by(&self, home: &NodeName) -> bool {
        self.durable.contains_key(home)
    }

    fn durable_said_at(&self) -> Option<Now> {
        self.durable.values().min().copied()
    }
}

impl Context {
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
        let Some(key) = self.by_name.get(&name).cloned() else {
            return;
        };
        if state == CheckpointState::Durable {
            self.heed_owner(from, &key);
        }
        if !self.may_say(from, &key, state, bears) {
            return;
        }
        match bears {
            Some(bears) => {
                self.is_taken_up_again(from, name);
                self.bears_told(from, name, bears);
            }
            None => self.durable_told(from, name),
        }
        self.judge_words(&key);
        self.say_known(from, name);
    }

    /// Whether a state is the sender's to say, and can be.
    fn may_say(
        &mut self,
        from: &NodeName,
        key: &CheckpointKey,
        state: CheckpointState,
        bears: Option<u32>,
    ) -> bool {
        if planted!("anybody_says_states") {
            return true;
        }
        let is_absent = self.setup.durable == DurablePolicy::Absent;
        let is_home = self.homes_of(key).contains(from);
        let most = self.checkpoints.get(key).and_then(Checkpoint::parity_count);
        let too_many = bears.zip(most).filter(|(said, most)| said > most);
        let wrong = if state == CheckpointState::Durable && is_absent {
            Some(FalseStatement::NoDurableTier)
        } else {
            too_many.map(|(said, most)| FalseStatement::BearsTooMany { said, most })
        };
        if let Some(statement) = wrong {
            self.is_false(from, statement);
        }
        // Others bring up to date whoever comes up. That is no lie, and it counts from home nodes alone.
        wrong.is_none() && is_home
    }

    /// A node whose shard a home node waits for says that the checkpoint is durable. Those that saw to that may all have lost their
    /// memory, and the one that let its shard go would never copy it: nothing newer would have its turn.
    fn heed_owner(&mut self, from: &NodeName, key: &CheckpointKey) {
        let is_waited_for = self.setup.durable != DurablePolicy::Absent
            && self.is_believed(from)
            && self.not_copied(key).contains(from)
            && !planted!("owners_say_nothing");
        let now = self.now;
        let is_due = |c: &Checkpoint| self.is_due(c) && c.standing.counts();
        let is_due = self.checkpoints.get(key).is_some_and(is_due);
        let checkpoint = self.checkpoints.get_mut(key);
        let Some(checkpoint) = checkpoint.filter(|_| is_waited_for && is_due) else {
            return;
        };
        checkpoint.owing.is_said_durable(from, now);
        let is_answered = checkpoint.owing.will_not_be_copied_by(from);
        if let Some(manifest) = checkpoint.name().filter(|_| !is_answered) {
            self.ask_tier(key, manifest);
        }
    }

    fn say_known(&mut self, to: &NodeName, name: Digest) {
        let Some(checkpoint) = self.checkpoint_named(name) else {
            return;
        };
        let stored = PeerMessage::ManifestStored {
            manifest: name,
            state: checkpoint.state,
            bears: checkpoint.standing.told_by(to),
        };
        self.send(to, stored);
    }

    /// A node tells of a checkpoint as one that it has: if it had let it go, it is told again what is held here.
    pub(crate) fn is_taken_up_again(&mut self, by: &NodeName, name: Digest) {
        if let Some(checkpoint) = self.checkpoint_named(name) {
            checkpoint.standing.takes_up_again(by);
        }
    }

    fn durable_told(&mut self, from: &NodeName, name: Digest) {
        let now = self.now;
        if let Some(checkpoint) = self.checkpoint_named(name) {
            checkpoint.standing.says_durable(from, now);
        }
    }

    /// Believes of a checkpoint what enough home nodes say.
    fn judge_words(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let homes = checkpoint.homes.iter();
        let counts =
            |home: &&NodeName| *home != self.me() && self.is_up(home) && self.is_believed(home);
        let homes: Vec<&NodeName> = homes.filter(counts).collect();
        let standing = &checkpoint.standing;
        let protected = homes.iter().filter(|home| standing.word_of(home).is_some());
        let durable = homes.iter().filter(|home| standing.is_durable_by(home));
        let (protected, durable) = (protected.count(), durable.count());
        let needed = self.home_words_needed(checkpoint, homes.len());
        let enough = if self.lacks_only_of_the_unseen(checkpoint) {
            self.words_of(homes.len())
        } else {
            needed
        };
        if durable >= needed {
            self.reach(key, CheckpointState::Durable);
        } else if durable > 0 {
            self.look_in_tier(key);
        }
        // Also after a stop, when a word may be long past: a step that this node does not take for protected makes way here for a newer one.
        if protected >= enough {
            self.reach(key, CheckpointState::Protected);
        }
    }

    /// Whether this node counts, and nothing is missing but what lies on nodes that it does not see. Then a home node may see more: whoever is
    /// cut off from one other would give up its part of what is protected.
    fn lacks_only_of_the_unseen(&self, checkpoint: &Checkpoint) -> bool {
        let is_unseen = |node: &NodeName| !self.is_up(node) || !self.is_believed(node);
        self.counts_itself(checkpoint)
            && !planted!("cut_off_nodes_hear_nobody")
            && self.lacks_only_of(checkpoint, is_unseen)
    }

    /// So many other home nodes must say the same. A home node that is itself one needs no other to say what it can count.
    fn home_words_needed(&self, checkpoint: &Checkpoint, others: usize) -> usize {
        let is_home = checkpoint.homes.contains(self.me());
        if planted!("one_home_is_enough") {
            1
        } else if is_home {
            limits::WORDS_NEEDED
        } else {
            self.words_of(others)
        }
    }

    /// The word of the only home node that is up is enough. A node that has just started may see one first that errs, and would let go
    /// what its memory still holds: it waits for the others.
    fn words_of(&self, homes_up: usize) -> usize {
        if self.settled() || planted!("the_first_seen_is_believed") {
            homes_up.clamp(1, limits::WORDS_NEEDED)
        } else {
            limits::WORDS_NEEDED
        }
    }

    /// Asks the tier whether it has a checkpoint that a home node calls durable: other home nodes at once, the others only if
    /// no second one says so for long.
    fn look_in_tier(&mut self, key: &CheckpointKey) {
        let now = self.now;
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let is_home = checkpoint.homes.contains(self.me());
        let said_at = checkpoint.standing.durable_said_at();
        let patience = if is_home { 0 } else { limits::TIER_DOUBT_MS };
        let is_due = said_at.is_some_and(|at| now.since(at) >= patience);
        let Some(manifest) = checkpoint.name().filter(|_| is_due) else {
            return;
        };
        if checkpoint.state < CheckpointState::Durable {
            self.ask_tier(key, manifest);
        }
    }

    /// Asks the tier whether it has a checkpoint, unless it was asked just now.
    pub(crate) fn ask_tier(&mut self, key: &CheckpointKey, manifest: Digest) {
        let now = self.now;
        let mut asked = self.tier_questions.values();
        let is_asked = |it: &TierQuestion| {
            it.manifest == manifest && now.since(it.asked_at) < limits::TIER_QUESTION_MS
        };
        if asked.any(is_asked) {
            return;
        }
        let query = QueryId(self.fresh());
        let question = TierQuestion {
            manifest,
            asked_at: now,
        };
        self.tier_questions.insert(query, question);
        self.out.push(Output::ListDurable {
            query,
            // What is found has to have the digest that is known here: that proves more than a MAC.
            trust: Trust::Anything,
            namespace: key.namespace.clone(),
            step: Some(key.step),
        });
    }

    /// The tier has been looked into for this; false if another machine asked.
    pub(crate) fn tier_looked_into(
        &mut self,
        query: QueryId,
        outcome: &Result<DurableListing, DurableFault>,
    ) -> bool {
        let Some(question) = self.tier_questions.remove(&query) else {
            return false;
        };
        self.tier_answered(outcome.as_ref().err());
        let is_there = outcome.as_ref().is_ok_and(|listing| {
            let mut found = listing.manifests.iter();
            found.any(|it| it.name() == question.manifest)
        });
        if is_there && let Some(key) = self.by_name.get(&question.manifest).cloned() {
            self.reach(&key, CheckpointState::Durable);
            self.tell_durable_if_home(&key);
        } else {
            let manifest = question.manifest;
            if let Some(checkpoint) = self.checkpoint_named(manifest).filter(|_| outcome.is_ok()) {
                checkpoint.owing.is_missed_in_tier(question.asked_at);
            }
            // Asked again, and not at once: a listing may lag behind.
            self.tier_questions.insert(query, question);
        }
        true
    }

    fn tell_durable_if_home(&mut self, key: &CheckpointKey) {
        if self.homes_of(key).contains(self.me()) {
            self.tell_everyone(key);
        }
    }

    /// Where home nodes differ for long, or one of them is silent, this node counts for itself.
    pub(crate) fn advance_doubts(&mut self) {
        let now = self.now;
        self.tier_questions
            .retain(|_, it| now.since(it.asked_at) < limits::DURABLE_LIST_MAX_MS);
        for key in self.checkpoints.keys().cloned().collect::<Vec<_>>() {
            self.judge_words(&key);
            self.advance_doubt(&key);
        }
    }

    fn advance_doubt(&mut self, key: &CheckpointKey) {
        let (now, me) = (self.now, self.me().clone());
        let is_open = self.is_doubted(key);
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        if !is_open {
            // When they differ once more all are asked anew. An epoch may have made this node a home, which counts always.
            let was_open = checkpoint.standing.doubted_since.take().is_some();
            if was_open && !checkpoint.homes.contains(&me) {
                checkpoint.standing.count_no_more();
            }
            return;
        }
        let since = *checkpoint.standing.doubted_since.get_or_insert(now);
        let Some(manifest) = checkpoint.manifest.clone() else {
            return;
        };
        if now.since(since) < limits::DOUBT_MS || planted!("doubts_stay") {
            return;
        }
        if !checkpoint.standing.counts() {
            checkpoint.standing.begin_to_count(&me, &manifest, now);
            for node in checkpoint.standing.heard_of() {
                self.recount(key, &node);
            }
        }
        for node in self.stakeholders(&manifest) {
            if node != me {
                let (query, namespace) = (limits::REPAIR_QUERY, key.namespace.clone());
                self.send(&node, PeerMessage::HoldingsQuery { query, namespace });
            }
        }
    }

    /// Whether some home node says of a checkpoint what others do not.
    fn is_doubted(&self, key: &CheckpointKey) -> bool {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return false;
        };
        if checkpoint.homes.contains(self.me()) || checkpoint.manifest.is_none() {
            return false;
        }
        let up = |home: &&NodeName| self.is_up(home) && self.is_believed(home);
        let homes = checkpoint.homes.iter().filter(up);
        let mut said = homes.map(|home| checkpoint.standing.word_of(home));
        let first = said.next();
        let is_claimed = checkpoint.standing.is_called_protected();
        is_claimed && said.any(|other| Some(other) != first)
    }

    /// Whether this node has counted a checkpoint, and found that it bears nothing.
    pub(crate) fn is_found_bare(&self, checkpoint: &Checkpoint) -> bool {
        let counted = self.count_losses(checkpoint);
        self.counts_itself(checkpoint)
            && self.settled()
            && (self.has_heard_of_blocks(checkpoint) || planted!("what_is_not_heard_is_not_there"))
            && counted.is_none_or(|counted| counted.losses == 0)
    }

    /// Whether what nodes hold of a checkpoint had the time to be said since this node counts. Before that it finds nothing of what is all
    /// there, and would let go its part of it. Home nodes hear it from all; others ask, and hear what some have said before.
    fn has_heard_of_blocks(&self, checkpoint: &Checkpoint) -> bool {
        let standing = &checkpoint.standing;
        let has_said = |node: &NodeName| self.counts_blocks_of(checkpoint, node);
        let others = checkpoint.manifest.iter();
        let mut others = others.flat_map(|manifest| self.stakeholders(manifest));
        let is_home = checkpoint.homes.contains(self.me());
        self.now.since(standing.counts_since) >= limits::DOUBT_MS
            || is_home
                && others.all(|node| node == *self.me() || !self.is_up(&node) || has_said(&node))
    }

    /// A node that was asked because home nodes differ says what it holds.
    pub(crate) fn hear_of_holdings(&mut self, from: &NodeName, holdings: &[Holding]) {
        let me = self.me().clone();
        let asked = self.checkpoints.values();
        let asked = asked.filter(|c| c.standing.counts() && !c.homes.contains(&me));
        let asked: Vec<CheckpointKey> = asked.map(|c| c.key.clone()).collect();
        for key in asked {
            let name = self.checkpoints.get(&key).and_then(Checkpoint::name);
            let found = holdings.iter().find(|it| Some(it.manifest) == name);
            let blocks = found.map_or_else(Blocks::default, |it| Blocks {
                shards: it.shards.iter().copied().collect(),
                parity: it.parity.iter().copied().collect(),
                enclosures: it.enclosures,
            });
            self.note_held(from, &key, blocks);
            self.weigh(&key);
        }
    }
}

#[cfg(test)]
mod tests;
