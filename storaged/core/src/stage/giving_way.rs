//! Committed checkpoints that go for a newer one before they are protected. A home node that hears of the last block of a step calls
//! it protected, and what is older goes everywhere; were blocks let go at that moment, because a trainer waits for their slot and the
//! word has not come yet, neither would be whole.
//!
//! So they go in two moves, as parity does that makes way (`encode/yielding.rs`): what is here is first said not to be held, and goes
//! once the home nodes that are up know that and none of them calls the step protected. The messages of one node come in the order in
//! which they were said: one that had protected it has said so before it notes that.

use storaged_wire::peer::CheckpointKey;
use storaged_wire::{CheckpointState, NodeName};

use crate::api::Now;
use crate::catalog::{Checkpoint, GivingWay, GivingWayFor, Told, Waiter, WaiterWish};
use crate::context::Context;
use crate::event::Event;
use crate::limits;

impl Context {
    /// Gives up a committed checkpoint for a newer one, as soon as nobody may count on what is here.
    pub(super) fn give_way(&mut self, key: &CheckpointKey, reason: &str, whom: GivingWayFor) {
        let now = self.now;
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        if !self.is_still_to_go(checkpoint, &whom) {
            return;
        }
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let giving_way = checkpoint.giving_way.get_or_insert_with(|| GivingWay {
            reason: reason.into(),
            whom: whom.clone(),
            since: now,
        });
        giving_way.whom.also(whom);
        self.report_held(key);
        self.go_on_giving_way(key);
    }

    /// What gives way goes, or stays after all.
    pub(crate) fn advance_giving_way(&mut self) {
        let all = self.checkpoints.values();
        let leaving = all.filter(|c| c.giving_way.is_some());
        for key in leaving.map(|c| c.key.clone()).collect::<Vec<_>>() {
            self.go_on_giving_way(&key);
        }
    }

    pub(crate) fn go_on_giving_way(&mut self, key: &CheckpointKey) {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return;
        };
        let Some(giving_way) = checkpoint.giving_way.clone() else {
            return;
        };
        if self.is_called_safe(checkpoint) || !self.is_still_to_go(checkpoint, &giving_way.whom) {
            return self.stay(key);
        }
        let is_free = self.nobody_counts_on(checkpoint, &giving_way);
        if !is_free && !planted!("given_way_at_once") {
            return;
        }
        match giving_way.whom {
            GivingWayFor::Trainer => self.supersede_everywhere(key, &giving_way.reason),
            GivingWayFor::Peers(_) => self.abandon_as_told(key, &giving_way.reason),
        }
        self.emit(Event::RoomMade);
    }

    /// Whether what was decided holds still: the trainer may have gone or been given another slot, and what it goes for may be lost.
    fn is_still_to_go(&self, checkpoint: &Checkpoint, whom: &GivingWayFor) -> bool {
        match whom {
            GivingWayFor::Trainer => self.is_waited_for(checkpoint),
            GivingWayFor::Peers(_) => {
                !self.is_pinned(&checkpoint.key) && self.is_needless(checkpoint)
            }
        }
    }

    fn stay(&mut self, key: &CheckpointKey) {
        if let Some(checkpoint) = self.checkpoints.get_mut(key) {
            checkpoint.giving_way = None;
        }
        self.report_held(key);
    }

    /// Whether all home nodes that may count what is here know that it does not count. Those that have let it go say nothing of it; one that
    /// does not answer does not know the step, or is about to be found down.
    fn nobody_counts_on(&self, checkpoint: &Checkpoint, giving_way: &GivingWay) -> bool {
        // While this node was stopped nobody was heard.
        let has_waited = self.now.since(giving_way.since) >= limits::GIVING_WAY_HEARD_MS
            && !self.has_yet_to_listen();
        if !checkpoint.has_blocks() || has_waited {
            return true;
        }
        let has_let_go = |home: &NodeName| {
            checkpoint.standing.has_let_go(home) || giving_way.whom.has_let_go(home)
        };
        let counts =
            |home: &&NodeName| *home != self.me() && !self.is_gone(home) && !has_let_go(home);
        let mut homes = checkpoint.homes.iter().filter(counts);
        // One that knows it, and calls the step protected all the same, counts what this node has not heard of.
        let knows = |home: &NodeName| {
            let calls_it_safe = checkpoint.standing.told_by(home) > 0;
            self.knows_what_is_held(checkpoint, home) && !calls_it_safe
        };
        homes.all(knows)
    }

    /// Until when a trainer that would be refused waits for a step that makes way for it: were it refused before, the step would stay after
    /// all, and the next one that asks would begin anew.
    pub(super) fn room_comes_by(&self, waiter: &Waiter) -> Option<Now> {
        let WaiterWish::Slot { until, .. } = waiter.wish else {
            return None;
        };
        let (attached, _, rank, _) = self.trainer(waiter.id).ok()?;
        let its = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == attached.namespace && c.shards.contains_key(&rank));
        let since = its.filter_map(|c| Some(c.giving_way.as_ref()?.since));
        let most_ms = limits::GIVING_WAY_HEARD_MS + limits::REPEAT_MS;
        let by = since.max()?.plus(most_ms).min(until);
        (by > self.now && !planted!("room_to_come_is_refused")).then_some(by)
    }

    /// As a home node: whether a node says that it holds nothing of a step because it has not heard yet that it is protected. It is told
    /// that, and says again then what it has. Were its blocks counted as gone, others could let the step go for one that is less safe.
    pub(crate) fn has_not_heard_that_it_is_protected(
        &self,
        from: &NodeName,
        key: &CheckpointKey,
    ) -> bool {
        let checkpoint = self.checkpoints.get(key);
        checkpoint.is_some_and(|c| {
            // Whoever does not believe it, on one word, has heard it.
            let has_heard =
                |told: &Told| told.state >= CheckpointState::Protected || told.bears > 0;
            // What bears nothing cannot bear less, and a node that does not believe that it is protected would never be counted.
            c.state >= CheckpointState::Protected
                && self.bears(c).is_some_and(|bears| bears.losses > 0)
                && !c.told.get(from).is_some_and(has_heard)
                && self.counts_blocks_of(c, from)
        })
    }
}

#[cfg(test)]
mod tests {
    use storaged_codec::digest;
    use storaged_wire::peer::{PeerMessage, UnowedCause};
    use storaged_wire::{EnclosuresHeld, ManifestBytes};

    use super::*;
    use crate::testkit::{committed, hear, hear_from_all, last_of, manifest, sent};

    fn sealed(step: u64) -> ManifestBytes {
        let manifest = manifest(step, &["a", "b"], &["c", "d"], 5, digest(b"any"));
        manifest.seal().expect("a sound manifest")
    }

    /// Who makes way waits for its home nodes: one that has let the step go as well has nothing to note.
    #[test]
    fn a_home_node_says_that_it_has_let_go_what_it_is_told_of() {
        let at = limits::JOIN_GRACE_MS + 10_000;
        let mut node = last_of(&["a", "b", "c", "d", "e"], 2, 2);
        for step in 1..9 {
            hear_from_all(&mut node, at, &committed(&sealed(step)));
        }
        let me = node.context().me().clone();
        let is_home = |step: &u64| {
            let key = CheckpointKey::of(sealed(*step).manifest());
            node.context().homes_of(&key).contains(&me)
        };
        let step = (1..8).find(is_home).expect("it is a home of some step");
        let manifest = sealed(step);
        let key = CheckpointKey::of(manifest.manifest());
        let reason = "a newer step needs its slot".into();
        hear(
            &mut node,
            at + 1,
            "a",
            PeerMessage::Superseded { key, reason },
        );
        let held = PeerMessage::Held {
            manifest: manifest.name(),
            version: 2,
            shards: Vec::new(),
            parity: Vec::new(),
            enclosures: EnclosuresHeld::All,
        };
        let said = sent(hear(&mut node, at + 2, "b", held));
        let has_let_go = said.iter().any(|message| {
            let cause = UnowedCause::Retired;
            let manifest = manifest.name();
            *message == PeerMessage::Unowed { manifest, cause }
        });
        assert!(has_let_go, "{said:?}");
    }
}
