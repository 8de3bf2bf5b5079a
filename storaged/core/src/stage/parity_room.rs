//! Room for the parity of steps that are not safe yet. A rank may have more slots than the two that it needs where there is room: a further
//! one that took what the parity of the step before needs would leave that step unprotected, and all newer ones behind it, and then no
//! slot would ever come back.

use std::collections::BTreeMap;

use storaged_plan::{LaneBlocks, lanes_coded_by};
use storaged_wire::peer::Lane;
use storaged_wire::{ManifestBytes, Namespace, Rank, Refusal, RefusalCode};

use super::slots::slot_capacity;
use crate::budget::Reservation;
use crate::catalog::{Checkpoint, Slot, SlotUse};
use crate::context::Context;
use crate::limits;

/// Slots that a rank needs: of the step that is safe, and of the next one.
const SLOTS_NEEDED: usize = 2;

impl Context {
    /// Whether a further slot leaves room for parity that is to come; what is needed less than a save gives way first. Where not
    /// even the slot finds room it is refused for that.
    pub(super) fn leaves_parity_its_room(
        &mut self,
        job: &Namespace,
        bytes: u64,
        to_come: u64,
    ) -> bool {
        let slot = slot_capacity(bytes);
        let both = slot.saturating_add(to_come);
        if to_come == 0 || self.budget.room_of(job) >= both {
            return true;
        }
        if both <= self.budget.total().min(self.budget.share_left(job)) {
            self.make_budget_room(both, job);
        }
        let room = self.budget.room_of(job);
        room >= both || room < slot
    }

    /// Where parity finds no room the free slots of ranks that have two in use give it theirs: taken for the next step they would be in its
    /// way as a further one would.
    pub(super) fn give_free_slots_to_parity(&mut self, job: &Namespace, to_come: u64) {
        if to_come > self.budget.room_of(job) {
            self.drop_free_slots_beside_two(job);
        }
    }

    /// Whether there were any.
    pub(crate) fn drop_free_slots_beside_two(&mut self, job: &Namespace) -> bool {
        if planted!("slots_take_paritys_room") {
            return false;
        }
        let of_job = |slot: &&Slot| slot.namespace == *job && slot.used_for.is_for_saves();
        let mut in_use: BTreeMap<Rank, usize> = BTreeMap::new();
        for slot in self.slots.values().filter(of_job) {
            let count = in_use.entry(slot.rank).or_default();
            *count += usize::from(slot.used_for != SlotUse::Free);
        }
        let is_beside_two = |slot: &Slot| {
            let count = in_use.get(&slot.rank);
            slot.namespace == *job && count.is_some_and(|count| *count >= SLOTS_NEEDED)
        };
        self.drop_free_slots(is_beside_two)
    }

    /// Why a further slot was not made, if it was for parity.
    pub(super) fn kept_for_parity(
        &self,
        job: &Namespace,
        rank: Rank,
        slot: u64,
    ) -> Option<Refusal> {
        let to_come = Some(self.parity_to_come(job, rank)).filter(|it| *it > 0)?;
        let text = format!(
            "expected room for a further slot of rank {rank} in time, but {slot} bytes beside the {to_come} of parity that this node has yet to keep \
             of a step before do not fit the memory budget; save less often, or raise memory.budget or tenants.memory_max"
        );
        Some(Refusal::new(RefusalCode::Busy, text))
    }

    /// Parity that this node has yet to reserve for a step of which this rank has a shard here. Once one of them is coded all that is older
    /// goes, so it is that of the largest.
    pub(super) fn parity_to_come(&self, job: &Namespace, rank: Rank) -> u64 {
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
        let waiting = unsafe_steps.filter(|c| c.shards.contains_key(&rank) && self.is_coming(c));
        let begun = self.parity_of_unsafe_steps(job);
        let more = waiting.filter_map(|c| {
            let parity = match c.manifest.as_ref().or(known) {
                Some(manifest) => self.parity_here(manifest),
                None => self.parity_of_groups(c),
            };
            // Last, because all nodes of the step are looked at for it, and each save asks.
            (parity > begun && !self.is_stuck(c)).then(|| parity - begun)
        });
        more.max().unwrap_or(0)
    }

    /// Whether it is worth to wait for that. One of which nothing is heard any more may wait for a rank that hangs, and would give way to a
    /// newer one if there were a slot for that.
    fn is_coming(&self, checkpoint: &Checkpoint) -> bool {
        let is_heard_of = checkpoint.manifest.is_some()
            || self.now.since(checkpoint.news_at) < limits::UPLOAD_YIELDS_AFTER_MS;
        is_heard_of && !self.is_of_older_run(checkpoint)
    }

    /// Of a job's first step, about which only the shards that are here are known.
    fn parity_of_groups(&self, checkpoint: &Checkpoint) -> u64 {
        let longest = checkpoint.shards.values().map(|shard| shard.length).max();
        let coded = self
            .groups
            .iter()
            .filter(|it| it.coding.contains(self.me()));
        longest.unwrap_or(0).saturating_mul(coded.count() as u64)
    }

    /// What this node has yet to keep of a checkpoint's parity.
    pub(crate) fn parity_lacking(&self, checkpoint: &Checkpoint) -> u64 {
        let Some(manifest) = checkpoint.manifest.as_ref() else {
            return 0;
        };
        let has = |lane: Lane| checkpoint.parity.keys().any(|(of, _)| *of == lane);
        let lanes = lanes_coded_by(manifest, self.me());
        parity_of_lanes(manifest, lanes.filter(|lane| !has(*lane)))
    }

    /// What this node is to keep of a checkpoint's parity.
    fn parity_here(&self, manifest: &ManifestBytes) -> u64 {
        parity_of_lanes(manifest, lanes_coded_by(manifest, self.me()))
    }

    /// What it keeps of it.
    pub(crate) fn parity_kept(&self, checkpoint: &Checkpoint) -> u64 {
        let sets = checkpoint.parity.values();
        sets.map(|set| self.budget.reserved(Reservation::Parity(*set)))
            .sum()
    }

    /// What sessions have reserved and steps keep that are not safe yet.
    fn parity_of_unsafe_steps(&self, job: &Namespace) -> u64 {
        let safe_state = self.safe_state();
        let checkpoints = self.checkpoints.values();
        let safe = checkpoints.filter(|c| c.key.namespace == *job && c.state >= safe_state);
        let of_safe: u64 = safe.map(|c| self.parity_kept(c)).sum();
        self.budget.parity_of(job).saturating_sub(of_safe)
    }
}

/// As long as the longest block of each.
fn parity_of_lanes(manifest: &ManifestBytes, lanes: impl Iterator<Item = Lane>) -> u64 {
    let blocks = lanes.filter_map(|lane| LaneBlocks::of(manifest, lane));
    blocks.map(|blocks| blocks.length).sum()
}
