//! Policy of the verb *encode*: sessions, each of which executes a coding plan, and who does what in them.
//!
//! A session is one execution of a plan. Its leader proposes it to all members (`leader`), each member finds its
//! part or says why not (`participant`), and once all are ready the leader begins it. What a session keeps counts only
//! when its leader closes it so; until then the last protected step stays whole beside it (copy on write).

mod fingerprints;
mod hear;
mod helpers;
mod leader;
mod linkstats;
mod missing_stripes;
mod no_room;
mod participant;
mod repair;
mod resume;
mod retransmit;
mod rot;
mod session;
mod skip_delta;
mod start;
mod stripe_maps;
mod tables;
#[cfg(test)]
mod tests;
mod topology;
mod turns;
mod urgency;
mod verify_mode;
mod yielding;

pub use linkstats::{NodeRate, SideRate};
pub(crate) use session::{Beginning, Restored, SessionGoal};

use std::collections::{BTreeMap, BTreeSet};

use linkstats::MeasuredRates;
use resume::{Cancelling, ParityPlace, PartialParity, PartialShard};
use retransmit::DeferredProposal;
use rot::LostBlock;
use session::{JoinedSession, LaneTable, LedSession, SessionPlace};
use turns::JobTurns;

use storaged_wire::peer::TablePlace;
use storaged_wire::{NodeName, SessionId, SlotId};

use crate::api::ParityId;
use crate::audit::Audit;

/// The sessions that this node leads, and those that it takes part in.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    led: BTreeMap<SessionId, LedSession>,
    joined: BTreeMap<SessionPlace, JoinedSession>,
    lanes: LaneTable,
    turns: JobTurns,
    partial_shards: BTreeMap<SlotId, PartialShard>,
    partial_parity: BTreeMap<ParityPlace, PartialParity>,
    ending: BTreeMap<SessionPlace, Cancelling>,
    deferred_proposals: BTreeMap<SessionPlace, DeferredProposal>,
    deferred_tables: BTreeSet<(NodeName, TablePlace)>,
    measured: MeasuredRates,
    lost: BTreeSet<LostBlock>,
}

impl Sessions {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.led.len() + self.joined.len()
    }

    /// Parity sets that no checkpoint has yet.
    pub fn parity_sets(&self) -> BTreeSet<ParityId> {
        let parts = self.partial_parity.values().map(PartialParity::set);
        let joined = self.joined.values().filter_map(JoinedSession::parity_set);
        let ending = self.ending.values().filter_map(Cancelling::parity_set);
        parts.chain(joined).chain(ending).collect()
    }

    /// Adds what is here to what is elsewhere.
    pub fn audit(&self, elsewhere: Audit) -> Audit {
        Audit {
            sessions: self.count() + self.ending.len() + self.deferred_proposals.len(),
            parts: self.partial_shards.len() + self.partial_parity.len(),
            ..elsewhere
        }
    }
}
