//! Readers that take a shard while it comes: half the ranks of each restart.

use storaged_wire::local::Request;
use storaged_wire::{Rank, SlotId};

use super::super::world::World;
use super::asks::What;
use super::jobs::IncarnationId;

/// For how long whoever follows a shard waits each time.
const FOLLOW_MS: u32 = 1_500;

/// Where a shard comes.
#[derive(Clone, Copy, Debug)]
pub struct ComingMemory {
    pub slot: SlotId,
    pub length: u64,
}

impl World {
    pub(super) fn shard_comes_in_month(
        &mut self,
        whose: IncarnationId,
        rank: Rank,
        memory: ComingMemory,
    ) {
        self.struck("a shard that is given while it comes");
        if let Some(it) = self.month().jobs.incarnation(whose.job, whose.id) {
            it.coming.insert(rank, memory);
        }
        self.follows_in_month(whose, rank);
    }

    pub(super) fn follows_in_month(&mut self, whose: IncarnationId, rank: Rank) {
        let Some(it) = self.month().jobs.incarnation(whose.job, whose.id) else {
            return;
        };
        let (Some(plan), Some(place)) = (it.plan.as_ref(), it.conns.get(&rank).copied()) else {
            return;
        };
        let follow = Request::FollowShard {
            manifest: plan.manifest,
            rank,
            timeout_ms: FOLLOW_MS,
        };
        let limit = u64::from(FOLLOW_MS);
        self.ask_in_month(whose, place, follow, limit, What::Shard(rank));
    }

    pub(super) fn shard_came_in_month(&mut self, whose: IncarnationId, rank: Rank) {
        let Some(it) = self.month().jobs.incarnation(whose.job, whose.id) else {
            return;
        };
        let memory = it.coming.remove(&rank).expect("it was told where it comes");
        let place = it.conns[&rank];
        let bytes = self.ram(place.pid.node).mapped(memory.slot)[..memory.length as usize].to_vec();
        self.shard_is_back_in_month(whose, rank, &bytes);
    }
}
