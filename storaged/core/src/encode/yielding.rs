//! Parity that makes way. Lanes are coded one by one, and each node finds room for its part by itself: in little room two steps may
//! each hold on one node what the other needs on another. Neither would be protected before somebody drops a job by hand.
//!
//! So parity of a step that no other node could protect either goes, where another step can be coded in its place. All nodes prefer the
//! same one of two steps without a message: the newer one of a job, else the one with the smaller name, which differs from step to step.
//! That one may not fit even so, and after a longer while it makes way for the other.
//!
//! It goes in two moves. A home node that hears of the last block of a step calls it protected, and what is older goes everywhere; were
//! a block let go at that moment, neither would be whole. So a set is first said not to be held, and goes once all home nodes
//! know that and none of them calls the step protected.

use std::collections::BTreeSet;

use storaged_wire::CheckpointState;
use storaged_wire::peer::{CheckpointKey, Lane};

use super::session::{JoinedSession, SinkState};
use crate::api::{HeldBlock, Note, Now, ParityId, Source};
use crate::budget::Reservation;
use crate::catalog::Checkpoint;
use crate::context::Context;
use crate::encode::Sessions;
use crate::event::Event;
use crate::limits;

/// Parity of a checkpoint that makes way on this node.
#[derive(Debug, Clone, Default)]
pub(crate) struct Yielding {
    /// What is not said to be held any more.
    withdrawn: BTreeSet<(Lane, u32)>,
    /// Its leader would take the room back before the other one asks again.
    held_off: Option<HeldOff>,
}

/// What a checkpoint makes way for, and until when it is not coded here.
#[derive(Debug, Clone)]
struct HeldOff {
    by: CheckpointKey,
    until: Now,
}

impl Yielding {
    /// Whether a set of this place is on its way out.
    pub fn is_withdrawn(&self, place: (Lane, u32)) -> bool {
        self.withdrawn.contains(&place)
    }
}

impl Context {
    /// Parity of a step finds no room: that of others makes way, if there is enough of it. The step's leader asks again.
    pub(super) fn have_parity_yield(&mut self, to: &CheckpointKey, bytes: u64) {
        let missing = self.budget.missing(bytes, &to.namespace);
        if missing == 0 || planted!("parity_never_yields") {
            return;
        }
        let all = self.checkpoints.values();
        let mut yielding: Vec<&Checkpoint> = all
            .filter(|c| self.may_make_way(c) && self.yields_to(c, to))
            .filter(|c| self.may_take_from(&c.key.namespace, bytes, &to.namespace))
            .collect();
        yielding.sort_by_key(|c| std::cmp::Reverse(self.parity_bytes(c)));
        let (mut gained, mut chosen) = (0_u64, Vec::new());
        for checkpoint in yielding {
            if gained < missing {
                gained = gained.saturating_add(self.parity_bytes(checkpoint));
                chosen.push(checkpoint.key.clone());
            }
        }
        // Nothing goes in vain.
        if gained < missing && !planted!("yielded_in_vain") {
            return;
        }
        for key in chosen {
            self.withdraw_parity(&key, to);
        }
    }

    /// Why a step may not have parity here now.
    pub(super) fn is_held_off(&mut self, key: &CheckpointKey) -> Option<String> {
        let held_off = self.checkpoints.get(key)?.yielding.held_off.clone()?;
        let other = self.checkpoints.get(&held_off.by);
        let is_open = other.is_some_and(|other| !self.is_called_safe(other));
        if is_open && self.now < held_off.until {
            let text = "parity that it keeps for others makes way for what could not be kept either, and is coded again later: raise \
                        memory.budget there";
            return Some(text.into());
        }
        if let Some(checkpoint) = self.checkpoints.get_mut(key) {
            checkpoint.yielding.held_off = None;
        }
        None
    }

    fn withdraw_parity(&mut self, key: &CheckpointKey, by: &CheckpointKey) {
        let until = self.now.plus(limits::HELD_OFF_MS);
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        let is_new = checkpoint.yielding.withdrawn.is_empty();
        let by = by.clone();
        checkpoint.yielding = Yielding {
            withdrawn: checkpoint.parity.keys().copied().collect(),
            held_off: Some(HeldOff { by, until }),
        };
        if is_new {
            self.note(Note::ParityYields { key: key.clone() });
            self.report_held(key);
        }
    }

    /// Whether the parity of a step here protects nothing, and its shards are all where they were sealed.
    fn may_make_way(&self, checkpoint: &Checkpoint) -> bool {
        let Some(manifest) = checkpoint.manifest.as_ref() else {
            return false;
        };
        let is_elsewhere = |node| node != self.me();
        let lacks_room_elsewhere = checkpoint.no_room.as_ref();
        checkpoint.state == CheckpointState::Committed
            && !checkpoint.parity.is_empty()
            && !checkpoint.standing.was_called_protected()
            && !self.is_pinned(&checkpoint.key)
            && lacks_room_elsewhere.is_some_and(|it| is_elsewhere(&it.node))
            && (manifest.nodes().keys()).all(|node| !is_elsewhere(node) || self.is_up(node))
    }

    /// Whether it is time for it to.
    fn yields_to(&self, checkpoint: &Checkpoint, wanted: &CheckpointKey) -> bool {
        if *wanted == checkpoint.key {
            return false;
        }
        let waits_since = checkpoint.no_room.as_ref().map(|it| it.since);
        let waited_ms = waits_since.map_or(0, |since| self.now.since(since));
        let patience_ms = if self.is_preferred(wanted, checkpoint) {
            limits::PARITY_YIELDS_AFTER_MS
        } else {
            limits::PARITY_YIELDS_AT_LAST_MS
        };
        waited_ms >= patience_ms
    }

    fn is_preferred(&self, wanted: &CheckpointKey, to: &Checkpoint) -> bool {
        if wanted.namespace == to.key.namespace {
            return *wanted > to.key;
        }
        let name = self.checkpoints.get(wanted).and_then(Checkpoint::name);
        name < to.name()
    }

    fn parity_bytes(&self, checkpoint: &Checkpoint) -> u64 {
        let sets = checkpoint.parity.values();
        sets.map(|set| self.budget.reserved(Reservation::Parity(*set)))
            .sum()
    }

    fn withdrawn_of(&self, key: &CheckpointKey) -> Vec<HeldBlock> {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return Vec::new();
        };
        let sets = checkpoint.parity.iter();
        let gone = sets.filter(|(place, _)| checkpoint.yielding.is_withdrawn(**place));
        gone.map(|((lane, index), set)| HeldBlock::Parity(*lane, *index, *set))
            .collect()
    }

    /// The step is protected after all, or its parity is needed: it counts again.
    fn keep_withdrawn(&mut self, key: &CheckpointKey) {
        if let Some(checkpoint) = self.checkpoints.get_mut(key) {
            checkpoint.yielding = Yielding::default();
        }
        self.report_held(key);
    }
}

impl Sessions {
    /// Parity goes that home nodes do not count any more.
    pub(crate) fn free_withdrawn(&mut self, cx: &mut Context) {
        let all = cx.checkpoints.values();
        let withdrawn = all.filter(|c| !c.yielding.withdrawn.is_empty());
        for key in withdrawn.map(|c| c.key.clone()).collect::<Vec<_>>() {
            let checkpoint = &cx.checkpoints[&key];
            let reads = |set: &ParityId| self.is_read(*set);
            if !cx.may_make_way(checkpoint) || checkpoint.parity.values().any(reads) {
                cx.keep_withdrawn(&key);
                continue;
            }
            if !cx.homes_know_what_is_held(checkpoint) && !planted!("yielded_before_homes_know") {
                continue;
            }
            for block in cx.withdrawn_of(&key) {
                cx.take_away(&key, block);
                self.block_lost(&key, block, cx);
            }
            if let Some(checkpoint) = cx.checkpoints.get_mut(&key) {
                checkpoint.yielding.withdrawn.clear();
            }
            cx.keeping.touch(&key);
            cx.emit(Event::RoomMade);
        }
    }

    /// Whether a session here reads a set, or codes what has changed since it.
    fn is_read(&self, set: ParityId) -> bool {
        let reads = |joined: &JoinedSession| {
            let source = matches!(joined.source, Some(Source::Parity { set: read }) if read == set);
            source || matches!(joined.kept, SinkState::Parity { basis, .. } if basis == Some(set))
        };
        self.joined.values().any(reads)
    }
}
