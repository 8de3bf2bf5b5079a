//! What of a checkpoint goes from this node for another one, in two moves.

use std::collections::BTreeSet;

use storaged_wire::NodeName;
use storaged_wire::peer::{CheckpointKey, Lane};

use crate::api::Now;

/// Parity of a checkpoint that makes way on this node.
#[derive(Debug, Clone, Default)]
pub(crate) struct Yielding {
    /// What is not said to be held any more.
    pub withdrawn: BTreeSet<(Lane, u32)>,
    /// Its leader would take the room back before the other one asks again.
    pub held_off: Option<HeldOff>,
    /// How often it made way, and when it did last.
    pub times: u32,
    pub last_at: Option<Now>,
}

/// A committed checkpoint that is not protected, and goes for a newer one once no home node counts on what is here.
#[derive(Debug, Clone)]
pub(crate) struct GivingWay {
    pub reason: String,
    pub whom: GivingWayFor,
    pub since: Now,
}

/// Who needs a checkpoint's slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GivingWayFor {
    /// A trainer here.
    Trainer,
    /// These have let it go, and said so.
    Peers(BTreeSet<NodeName>),
}

impl GivingWayFor {
    /// What somebody else has let go will not be whole, whoever waits for it here.
    pub fn also(&mut self, other: Self) {
        match (self, other) {
            (Self::Peers(before), Self::Peers(others)) => before.extend(others),
            (it @ Self::Trainer, other) => *it = other,
            (Self::Peers(_), Self::Trainer) => {}
        }
    }

    pub fn has_let_go(&self, node: &NodeName) -> bool {
        matches!(self, Self::Peers(nodes) if nodes.contains(node))
    }
}

/// What a checkpoint makes way for, and until when it is not coded here.
#[derive(Debug, Clone)]
pub(crate) struct HeldOff {
    pub by: CheckpointKey,
    pub until: Now,
}

impl Yielding {
    /// Whether a set of this place is on its way out.
    pub fn is_withdrawn(&self, lane: Lane, index: u32) -> bool {
        self.withdrawn.contains(&(lane, index))
    }
}
