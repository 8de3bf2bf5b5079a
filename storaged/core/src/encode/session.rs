//! What is known of a session: by the node that leads it, and by one that takes part in it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use storaged_plan::{Derived, DirtyMap};
use storaged_wire::peer::{CheckpointKey, Lane, MemberTally, SessionFault, SessionRecord};
use storaged_wire::shape::{EncodeShape, StripeMap};
use storaged_wire::{Digest, ManifestBytes, NodeName, Rank, SessionId, SlotId};

use super::linkstats::SessionProgress;
use super::missing_stripes::MissingStripes;
use super::tables::TableFetch;
use super::topology::StripeDemand;
use crate::api::{Now, ParityId, Source, Urgency};
use crate::limits;

/// What a leader knows of its lanes.
pub(crate) type LaneTable = BTreeMap<LanePlace, LaneProgress>;

/// Which lane of which checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LanePlace {
    pub manifest: Digest,
    pub lane: Lane,
}

impl LanePlace {
    pub fn of(manifest: &ManifestBytes, lane: Lane) -> Self {
        Self {
            manifest: manifest.name(),
            lane,
        }
    }
}

/// A session as its members name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionPlace {
    pub leader: NodeName,
    pub session: SessionId,
}

impl SessionPlace {
    pub fn of(leader: &NodeName, session: SessionId) -> Self {
        Self {
            leader: leader.clone(),
            session,
        }
    }
}

/// How far one lane is.
#[derive(Debug, Clone, Default)]
pub(crate) struct LaneProgress {
    pub session: Option<SessionId>,
    /// After a failure, not again before this time.
    pub retry_at: Now,
    /// Some member has no basis: encode in full.
    pub in_full: bool,
    pub first_try: Option<Now>,
    /// What the members hold, as far as they have said since they came up.
    pub held: BTreeMap<NodeName, BTreeSet<usize>>,
    pub asked_at: BTreeMap<NodeName, Now>,
    /// Nodes that were blamed for a repair that failed: others are asked first.
    pub suspects: BTreeSet<NodeName>,
    /// A block came out wrong: every block and every sum is checked by the one who gets it.
    pub wary: bool,
    /// Sessions that were ended because of a slow member.
    pub replans: u32,
    /// Failures in a row: what fails again and again is tried less often.
    pub failures: u32,
    /// When all that it concerns were last told that a member has no room.
    pub no_room_told_at: Option<Now>,
}

impl LaneProgress {
    /// Whether a refusal is to be told now. Each goes to every node that the step concerns, and is news to them for longer than this.
    pub fn tells_no_room(&mut self, now: Now) -> bool {
        let told = self.no_room_told_at;
        let is_due = told.is_none_or(|at| now.since(at) >= limits::NO_ROOM_TOLD_EVERY_MS);
        if is_due {
            self.no_room_told_at = Some(now);
        }
        is_due
    }
}

/// Why a session is led.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionGoal {
    Encode,
    Heal(Vec<NodeName>),
    Open(SlotId),
}

/// A session that this node leads.
#[derive(Debug, Clone)]
pub(crate) struct LedSession {
    pub record: SessionRecord,
    pub key: CheckpointKey,
    pub lane: Lane,
    pub members: Vec<NodeName>,
    /// How many of them, from the first, read blocks.
    pub sources: usize,
    /// Those that keep what is computed.
    pub keepers: BTreeSet<NodeName>,
    /// Stripes of the lane.
    pub stripe_count: u64,
    pub ready: BTreeSet<NodeName>,
    pub finished: BTreeSet<NodeName>,
    /// Which stripes the members need.
    pub needs: StripeDemand,
    /// Which of them the newcomers of a heal lack.
    pub lacking: MissingStripes,
    /// What members hear when it begins; none before.
    pub begun: Option<Beginning>,
    /// What members that failed said.
    pub faults: BTreeMap<NodeName, SessionFault>,
    pub deadline: Now,
    /// The members' preparations may take until then, however busy they say they are.
    pub prepare_by: Now,
    pub purpose: SessionGoal,
    /// What its members say of it while it runs.
    pub pace: SessionProgress,
}

impl LedSession {
    /// Which lane it is of.
    pub fn place(&self) -> LanePlace {
        LanePlace {
            manifest: self.record.manifest,
            lane: self.lane,
        }
    }
}

impl SessionGoal {
    pub(super) fn is_lane_work(&self) -> bool {
        !matches!(self, Self::Open(_))
    }
}

/// A shard that lies whole in a slot of this node.
#[derive(Debug)]
pub(crate) struct Restored {
    pub rank: Rank,
    pub slot: SlotId,
    pub length: u64,
    /// The digests of its chunks.
    pub leaves: Arc<[Digest]>,
}

/// Who decides what becomes of a slot that a session fills.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotOwner {
    /// An opening of this node.
    Opening,
    /// The session.
    Session,
}

/// What became of a session that this node took part in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Closing {
    /// What was kept counts.
    Done,
    BrokenOff,
}

/// What this member keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SinkState {
    Nothing,
    Parity {
        index: u32,
        set: ParityId,
        basis: Option<ParityId>,
    },
    Shard {
        rank: Rank,
        slot: SlotId,
        length: u64,
        belongs_to: SlotOwner,
    },
}

/// A session that this node takes part in.
#[derive(Debug, Clone)]
pub(crate) struct JoinedSession {
    pub key: CheckpointKey,
    pub derived: Derived,
    pub member: usize,
    pub source: Option<Source>,
    pub kept: SinkState,
    pub phase: MemberPhase,
    /// Whether a reader waits for what it brings.
    pub urgency: Urgency,
    /// The tables of chunk digests and fingerprints that its part needs.
    pub fetch: TableFetch,
    pub deadline: Now,
    /// Stripes of the lane.
    pub stripe_count: u64,
    /// Stripes that the executor has put in place.
    pub kept_stripes: Vec<Range<u64>>,
    /// Stripes of the parity set to keep that an earlier session has made.
    pub made: DirtyMap,
    /// What this member needs to move, if it makes a difference.
    pub needs: Option<DirtyMap>,
}

/// How far a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemberPhase {
    /// Tables are fetched, and room may still be made.
    Preparing { needs_slot: bool },
    /// The leader has been told, and has not begun.
    Ready,
    /// The executor is at it.
    Running,
    /// The executor has done all of this member's part: how it went.
    Finished(MemberTally),
}

impl JoinedSession {
    /// Whether this is a heal of that shard here.
    pub fn heals(&self, of: Rank) -> bool {
        matches!(self.kept, SinkState::Shard { rank, belongs_to: SlotOwner::Session, .. } if rank == of)
    }

    /// Whether the executor is at it.
    pub fn is_running(&self) -> bool {
        self.phase == MemberPhase::Running
    }

    /// Whether the executor has done all of it.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, MemberPhase::Finished(_))
    }

    /// Whether its slot is still being made.
    pub(super) fn needs_slot(&self) -> bool {
        self.phase == MemberPhase::Preparing { needs_slot: true }
    }

    /// The parity set that it makes.
    pub fn parity_set(&self) -> Option<ParityId> {
        match &self.kept {
            SinkState::Parity { set, .. } => Some(*set),
            SinkState::Nothing | SinkState::Shard { .. } => None,
        }
    }
}

/// What a leader says when a session begins.
#[derive(Debug, Clone)]
pub(crate) struct Beginning {
    pub stripes: Option<StripeMap>,
    pub shape: Option<EncodeShape>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counted from when it was told last, not from when it was asked: a lane that is tried each second would never tell it again.
    #[test]
    fn a_refusal_is_told_at_once_and_then_once_in_a_while() {
        let every = limits::NO_ROOM_TOLD_EVERY_MS;
        let mut lane = LaneProgress::default();
        let mut told = Vec::new();
        for at in (7..=7 + 2 * every).step_by(500) {
            if lane.tells_no_room(Now(at)) {
                told.push(at);
            }
        }
        assert_eq!(told, [7, 7 + every, 7 + 2 * every]);
        assert!(!lane.tells_no_room(Now(7 + 3 * every - 1)));
        assert!(LaneProgress::default().tells_no_room(Now(7 + 3 * every - 1)));
    }
}
