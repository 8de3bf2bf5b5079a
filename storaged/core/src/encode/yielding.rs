//! Parity that makes way. Lanes are coded one by one, and each node finds room for its part by itself: in little room two steps may
//! each hold what the other needs, on one node or on two. Neither would be protected before somebody drops a job by hand.
//!
//! So parity of a step that finds no room for the rest of it goes, where another step can be coded in its place. All nodes prefer the
//! same one of two steps without a message: the newer one of a job, else the one with the smaller name, which differs from step to step.
//! That one may not fit even so, and after a longer while it makes way for the other; where neither fits they do so ever more seldom.
//!
//! It goes in two moves. A home node that hears of the last block of a step calls it protected, and what is older goes everywhere; were
//! a block let go at that moment, neither would be whole. So a set is first said not to be held, and goes once all home nodes
//! know that and none of them calls the step protected.

use storaged_plan::LaneBlocks;
use storaged_wire::CheckpointState;
use storaged_wire::peer::CheckpointKey;

use super::session::{JoinedSession, SinkState};
use crate::api::{HeldBlock, Note, ParityId, Source};
use crate::catalog::{Checkpoint, HeldOff, NoRoomThere, Yielding};
use crate::context::Context;
use crate::encode::Sessions;
use crate::event::Event;
use crate::limits;

impl Context {
    /// Parity of a step finds no room: that of others makes way, if there is enough of it for all that the step lacks here. Its leader asks
    /// again.
    pub(super) fn have_parity_yield(&mut self, to: &CheckpointKey) {
        let Some(wanted) = self.checkpoints.get(to) else {
            return;
        };
        let bytes = self.parity_lacking(wanted);
        let missing = self.budget.missing(bytes, &to.namespace);
        if missing == 0 || planted!("parity_never_yields") {
            return;
        }
        let all = self.checkpoints.values();
        let mut yielding: Vec<&Checkpoint> = all
            .filter(|c| self.makes_way(c) || self.may_make_way(c) && self.yields_to(c, wanted))
            .filter(|c| self.may_take_from(&c.key.namespace, bytes, &to.namespace))
            .collect();
        yielding.sort_by_key(|c| (!self.makes_way(c), std::cmp::Reverse(self.parity_kept(c))));
        let (mut gained, mut chosen) = (0_u64, Vec::new());
        for checkpoint in yielding {
            if gained < missing {
                gained = gained.saturating_add(self.parity_kept(checkpoint));
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
    pub(super) fn is_held_off(&self, key: &CheckpointKey) -> Option<String> {
        let checkpoint = self.checkpoints.get(key)?;
        self.holds_off(checkpoint).then(|| {
            "parity that it keeps for others makes way for what could not be kept either, and is coded again later: raise memory.budget there"
                .into()
        })
    }

    /// Whether what a step makes way for still needs the room.
    fn holds_off(&self, checkpoint: &Checkpoint) -> bool {
        let held_off = checkpoint.yielding.held_off.as_ref();
        held_off.is_some_and(|it| {
            let other = self.checkpoints.get(&it.by);
            self.now < it.until && other.is_some_and(|other| !self.is_called_safe(other))
        })
    }

    fn makes_way(&self, checkpoint: &Checkpoint) -> bool {
        !checkpoint.yielding.withdrawn.is_empty() && self.holds_off(checkpoint)
    }

    fn withdraw_parity(&mut self, key: &CheckpointKey, by: &CheckpointKey) {
        let now = self.now;
        let known = self.checkpoints.get_mut(key);
        let Some(checkpoint) = known.filter(|c| c.yielding.withdrawn.is_empty()) else {
            return;
        };
        checkpoint.yielding = Yielding {
            withdrawn: checkpoint.parity.keys().copied().collect(),
            held_off: Some(HeldOff {
                by: by.clone(),
                until: now.plus(limits::HELD_OFF_MS),
            }),
            times: checkpoint.yielding.times.saturating_add(1),
            last_at: Some(now),
        };
        self.note(Note::ParityYields { key: key.clone() });
        self.report_held(key);
    }

    /// Whether the parity of a step here protects nothing, and nothing of the step is lost that it would bring back.
    fn may_make_way(&self, checkpoint: &Checkpoint) -> bool {
        let no_room = checkpoint.no_room.as_ref();
        checkpoint.state == CheckpointState::Committed
            && !checkpoint.parity.is_empty()
            && !checkpoint.standing.was_called_protected()
            && !self.is_pinned(&checkpoint.key)
            && no_room.is_some_and(|it| self.is_lane_refused(checkpoint, it))
            && self.has_all_shards(checkpoint)
    }

    /// Whether a lane finds no room, now: a shard that finds none has been lost, and needs the parity.
    fn is_lane_refused(&self, checkpoint: &Checkpoint, no_room: &NoRoomThere) -> bool {
        no_room.refused.is_heard(self.now) && checkpoint.is_coded_by(&no_room.node)
    }

    /// Whether every shard is where it was sealed, as far as can be known here: whoever was started again since may have lost its own.
    fn has_all_shards(&self, checkpoint: &Checkpoint) -> bool {
        let Some(manifest) = checkpoint.manifest.as_ref() else {
            return false;
        };
        // Links come up after this node's own start.
        let joined = self.started.map(|at| at.plus(limits::JOIN_GRACE_MS));
        let since = checkpoint.committed_at.max(joined);
        let stayed = |node| {
            let peer = self.peers.get(node);
            peer.is_some_and(|peer| Some(peer.known_since) <= since)
        };
        let mut on_nodes = manifest.nodes().iter();
        on_nodes.all(|(node, on)| {
            let is_here = |rank| checkpoint.shards.contains_key(rank);
            on.ranks.is_empty() || stayed(node) || node == self.me() && on.ranks.iter().all(is_here)
        })
    }

    /// Whether a newer step of the same job may take the room. It is worth more, and where each step gives way to a newer one before it is
    /// protected, none would wait as long as other jobs' do: the job's steps wait together.
    fn is_ahead_of(&self, wanted: &Checkpoint, checkpoint: &Checkpoint) -> bool {
        let is_newer =
            wanted.key.namespace == checkpoint.key.namespace && wanted.key > checkpoint.key;
        let table = self.namespaces.get(&wanted.key.namespace);
        let refused = table.and_then(|table| table.parity_refused);
        let waited_ms = refused.map_or(0, |it| self.now.since(it.since));
        is_newer
            && waited_ms >= limits::PARITY_YIELDS_IN_JOB_MS
            && !planted!("newer_steps_wait_as_others")
    }

    /// Whether both have waited long enough. Both nodes count from when the later of the two began to, so that they do not swap roles.
    fn yields_to(&self, checkpoint: &Checkpoint, wanted: &Checkpoint) -> bool {
        if self.is_ahead_of(wanted, checkpoint) {
            return true;
        }
        let began = |c: &Checkpoint| c.no_room.as_ref().map(|it| it.refused.since);
        let (Some(holds), Some(waits)) = (began(checkpoint), began(wanted)) else {
            return false;
        };
        if wanted.key == checkpoint.key {
            return false;
        }
        let last_at = checkpoint.yielding.last_at;
        let since = holds.max(waits).max(last_at.unwrap_or(holds));
        let patience_ms = if is_preferred(wanted, checkpoint) {
            limits::PARITY_YIELDS_AFTER_MS
        } else {
            limits::PARITY_YIELDS_AT_LAST_MS
        };
        let doublings = checkpoint.yielding.times.min(limits::YIELD_DOUBLINGS);
        self.now.since(since) >= patience_ms << doublings
    }

    fn withdrawn_of(&self, key: &CheckpointKey) -> Vec<HeldBlock> {
        let Some(checkpoint) = self.checkpoints.get(key) else {
            return Vec::new();
        };
        let sets = checkpoint.parity.iter();
        let gone = sets.filter(|(place, _)| checkpoint.yielding.is_withdrawn(place.0, place.1));
        gone.map(|((lane, index), set)| HeldBlock::Parity(*lane, *index, *set))
            .collect()
    }

    /// The step is protected after all, its parity is needed, or the other one does not need the room any more: it counts again.
    fn keep_withdrawn(&mut self, key: &CheckpointKey) {
        if let Some(checkpoint) = self.checkpoints.get_mut(key) {
            checkpoint.yielding.withdrawn.clear();
            checkpoint.yielding.held_off = None;
        }
        self.report_held(key);
    }
}

fn is_preferred(wanted: &Checkpoint, to: &Checkpoint) -> bool {
    if wanted.key.namespace == to.key.namespace {
        return wanted.key > to.key;
    }
    wanted.name() < to.name()
}

impl Sessions {
    /// Parity goes that home nodes do not count any more.
    pub(crate) fn free_withdrawn(&mut self, cx: &mut Context) {
        let all = cx.checkpoints.values();
        let withdrawn = all.filter(|c| !c.yielding.withdrawn.is_empty());
        for key in withdrawn.map(|c| c.key.clone()).collect::<Vec<_>>() {
            let checkpoint = &cx.checkpoints[&key];
            let is_read = checkpoint.parity.values().any(|set| self.is_read(*set));
            if is_read || !cx.may_make_way(checkpoint) || !cx.holds_off(checkpoint) {
                cx.keep_withdrawn(&key);
                continue;
            }
            if !cx.homes_know_what_is_held(checkpoint) && !planted!("yielded_before_homes_know") {
                continue;
            }
            for block in cx.withdrawn_of(&key) {
                cx.take_away(&key, block);
                self.is_not_coded(&key, block, cx);
            }
            if let Some(checkpoint) = cx.checkpoints.get_mut(&key) {
                checkpoint.yielding.withdrawn.clear();
            }
            cx.keeping.touch(&key);
            cx.emit(Event::RoomMade);
        }
    }

    /// A lane of one parity is coded anew, and one of several gets the one back that has gone.
    fn is_not_coded(&mut self, key: &CheckpointKey, block: HeldBlock, cx: &mut Context) {
        let HeldBlock::Parity(lane, ..) = block else {
            return;
        };
        let Some(checkpoint) = cx.checkpoints.get_mut(key) else {
            return;
        };
        let Some(manifest) = checkpoint.manifest.clone() else {
            return;
        };
        let blocks = LaneBlocks::of(&manifest, lane);
        if blocks.is_some_and(|blocks| blocks.coding.len() == 1) {
            checkpoint.lanes_led.remove(&lane);
        } else {
            self.block_lost(key, block, cx);
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
