//! Policy of the verb *encode*: sessions, each of which executes a coding plan, and who does what in them.
//!
//! A session is one execution of a plan. Its leader proposes it to all members (`lead`), each member finds its
//! part or says why not (`member`), and once all are ready the leader begins it. What a session keeps counts only
//! when its leader closes it so; until then the last protected step stays whole beside it (copy on write).

mod again;
mod broken;
mod heal;
mod hear;
mod in_full;
mod lacking;
mod lead;
mod member;
mod no_room;
mod prints;
mod rates;
mod session;
mod shapes;
mod start;
mod stripe_maps;
mod survivors;
mod tables;
#[cfg(test)]
mod tests;
mod wary;

pub(crate) use heal::REPAIR_QUERY;
pub use rates::{NodeRate, SideRate};
pub(crate) use session::{Beginning, Restored, SessionGoal};

use std::collections::{BTreeMap, BTreeSet};

use broken::{Ending, ParityPlace, PartFilled, PartMade};
use rates::MeasuredRates;
use session::{Joined, LaneTable, Led};

use storaged_wire::peer::{SessionRecord, TablePlace};
use storaged_wire::{NodeName, SessionId, SlotId};

use crate::api::ParityId;
use crate::audit::Audit;

/// The sessions that this node leads, and those that it takes part in.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    led: BTreeMap<SessionId, Led>,
    joined: BTreeMap<(NodeName, SessionId), Joined>,
    lanes: LaneTable,
    part_filled: BTreeMap<SlotId, PartFilled>,
    part_made: BTreeMap<ParityPlace, PartMade>,
    ending: BTreeMap<(NodeName, SessionId), Ending>,
    waiting_proposals: BTreeMap<(NodeName, SessionId), SessionRecord>,
    deferred_tables: BTreeSet<(NodeName, TablePlace)>,
    measured: MeasuredRates,
}

impl Sessions {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.led.len() + self.joined.len()
    }

    /// Parity sets that no checkpoint has yet.
    pub fn parity_sets(&self) -> BTreeSet<ParityId> {
        let parts = self.part_made.values().map(PartMade::set);
        let joined = self.joined.values().filter_map(Joined::parity_set);
        let ending = self.ending.values().filter_map(Ending::parity_set);
        parts.chain(joined).chain(ending).collect()
    }

    /// Adds what is here to what is elsewhere.
    pub fn audit(&self, elsewhere: Audit) -> Audit {
        Audit {
            sessions: self.count() + self.ending.len() + self.waiting_proposals.len(),
            parts: self.part_filled.len() + self.part_made.len(),
            ..elsewhere
        }
    }
}
