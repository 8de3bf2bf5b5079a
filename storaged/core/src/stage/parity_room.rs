//! Room for the parity of steps that are not safe yet. A rank may have more slots than the two that it needs where there is room: a further
//! one that took what the parity of the step before needs would leave that step unprotected, and all newer ones behind it, and then no
//! slot would ever come back.

use storaged_plan::{LaneBlocks, lanes_coded_by};
use storaged_wire::{ManifestBytes, Namespace, Rank};

use super::slots::slot_capacity;
use crate::budget::Reservation;
use crate::context::Context;

impl Context {
    /// Whether a further slot of a rank leaves room for parity that is to come; what is needed less than a save gives way first. Where not
    /// even the slot finds room it is refused for that.
    pub(super) fn leaves_parity_its_room(
        &mut self,
        job: &Namespace,
        rank: Rank,
        bytes: u64,
    ) -> bool {
        let to_come = self.parity_to_come(job, rank);
        let slot = slot_capacity(bytes);
        let both = slot.saturating_add(to_come);
        if to_come == 0 || self.budget.room_of(job) >= both {
            return true;
        }
        self.make_budget_room(both, job);
        let room = self.budget.room_of(job);
        room >= both || room < slot
    }

    /// Parity that this node has yet to reserve for a step of which this rank has a shard here. Once one of them is coded all that is older
    /// goes, so it is that of the largest.
    fn parity_to_come(&self, job: &Namespace, rank: Rank) -> u64 {
        if self.setup.geometry.is_none() || planted!("slots_take_paritys_room") {
            return 0;
        }
        let safe = self.newest_safe(job);
        let newest_first = || {
            let all = self.checkpoints.values().rev();
            all.filter(|c| c.key.namespace == *job)
        };
        // One that has not committed takes as much as the newest that has.
        let known = newest_first().find_map(|c| c.manifest.as_ref());
        let unsafe_steps =
            newest_first().take_while(|c| safe.as_ref().is_none_or(|safe| c.key > *safe));
        // Nobody waits for one that cannot be coded.
        let waiting = unsafe_steps.filter(|c| c.shards.contains_key(&rank) && !self.is_stuck(c));
        let parity = waiting.filter_map(|c| c.manifest.as_ref().or(known));
        let most = parity.map(|manifest| self.parity_here(manifest)).max();
        let begun = self.parity_of_unsafe_steps(job);
        most.unwrap_or(0).saturating_sub(begun)
    }

    /// What this node keeps of a checkpoint's parity.
    fn parity_here(&self, manifest: &ManifestBytes) -> u64 {
        let lanes = lanes_coded_by(manifest, self.me());
        let blocks = lanes.filter_map(|lane| LaneBlocks::of(manifest, lane));
        blocks.map(|blocks| blocks.length).sum()
    }

    /// What sessions have reserved and steps keep that are not safe yet.
    fn parity_of_unsafe_steps(&self, job: &Namespace) -> u64 {
        let safe_state = self.safe_state();
        let checkpoints = self.checkpoints.values();
        let safe = checkpoints.filter(|c| c.key.namespace == *job && c.state >= safe_state);
        let sets = safe.flat_map(|c| c.parity.values());
        let of_safe: u64 = sets
            .map(|set| self.budget.reserved(Reservation::Parity(*set)))
            .sum();
        self.budget.parity_of(job).saturating_sub(of_safe)
    }
}
