//! Which repairs somebody waits for. Beside a save a node holds back what it sends to put lost blocks back, and never what a reader
//! waits for: its job stands still. A shard that is opened is brought by a session of the reader's own node, which all members see by
//! its record. Where a heal brings it the members cannot know: the reader's node tells them.

use storaged_plan::Derived;
use storaged_wire::peer::PeerMessage;
use storaged_wire::{Digest, NodeName, Rank, SessionId};

use super::Sessions;
use super::session::{JoinedSession, SessionPlace};
use crate::api::{Output, Urgency};
use crate::context::Context;

impl Urgency {
    /// Of a session by its record alone. Lanes are healed by their coding nodes, which hold no shard of them: a leader that brings one
    /// to itself does so for a reader.
    pub(super) fn of(leader: &NodeName, derived: &Derived) -> Self {
        if brings_shard_to(leader, derived) {
            Self::Awaited
        } else {
            Self::Background
        }
    }
}

impl Sessions {
    /// A trainer waits for this shard, which a session puts into this node's RAM: nobody holds that session back any more.
    /// Its members are told once it runs here, for then all of them have joined.
    pub(crate) fn hasten_heal(&mut self, manifest: Digest, rank: Rank, cx: &mut Context) {
        let Some(key) = cx.by_name.get(&manifest) else {
            return;
        };
        let is_it = |joined: &JoinedSession| {
            joined.key == *key && joined.heals(rank) && joined.is_running()
        };
        let mut heals = self.joined.iter_mut().filter(|(_, it)| is_it(it));
        let Some((place, joined)) = heals.find(|(_, it)| it.urgency == Urgency::Background) else {
            return;
        };
        hasten(place, joined, cx);
        let others = joined.derived.members.iter().filter(|it| *it != cx.me());
        let others: Vec<NodeName> = others.cloned().collect();
        let SessionPlace { leader, session } = place.clone();
        for member in others {
            let leader = leader.clone();
            cx.send(&member, PeerMessage::RepairAwaited { leader, session });
        }
    }

    /// A member says that a reader there waits for what a session brings it.
    pub(super) fn repair_awaited(
        &mut self,
        from: &NodeName,
        leader: &NodeName,
        session: SessionId,
        cx: &mut Context,
    ) {
        let place = SessionPlace::of(leader, session);
        let Some(joined) = self.joined.get_mut(&place) else {
            return;
        };
        // Whoever gets no shard has no reader that waits: it could have others' saves wait for its links.
        if brings_shard_to(from, &joined.derived) {
            hasten(&place, joined, cx);
        }
    }
}

/// Once, however often a peer says it.
fn hasten(place: &SessionPlace, joined: &mut JoinedSession, cx: &mut Context) {
    if joined.urgency == Urgency::Awaited {
        return;
    }
    joined.urgency = Urgency::Awaited;
    if joined.is_running() {
        let SessionPlace { leader, session } = place.clone();
        cx.out.push(Output::Hasten { leader, session });
    }
}

/// Whether a session puts a shard, no parity, into this node's RAM.
fn brings_shard_to(node: &NodeName, derived: &Derived) -> bool {
    let k = derived.blocks.data.len();
    let mut sinks = derived.sinks.iter().zip(&derived.sink_members);
    sinks.any(|(block, at)| *block < k && derived.members.get(*at) == Some(node))
}
