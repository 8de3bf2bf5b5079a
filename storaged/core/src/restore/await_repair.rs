//! Openings that a heal serves. A node that came back with empty RAM gets its shards from the leaders of their lanes,
//! asked or not, by one session with the other nodes that were lost (`encode/repair.rs`). A trainer that opens its own
//! node's shard meanwhile waits for that. A session of its own would read every survivor a second time over the same
//! links, and two such openings a third.

use storaged_plan::LaneBlocks;
use storaged_wire::local::Reply;
use storaged_wire::{CheckpointState, Digest, ManifestBytes, Rank, Refusal, RefusalCode};

use super::cluster_view::ClusterView;
use super::opening::OpenRequest;
use super::plan::SurveyPurpose;
use crate::api::{ConnId, Now, RequestId};
use crate::context::Context;
use crate::encode::Sessions;
use crate::event::Event;
use crate::limits;
use crate::restore::{OpenedEarly, Restores};

/// An opening that waits for a heal.
#[derive(Debug, Clone)]
pub(crate) struct AwaitedRepair {
    id: RequestId,
    wish: OpenRequest,
    /// If nothing heals the shard by then, the opening brings it back itself.
    alone_at: Now,
}

impl Context {
    /// Whether the shard is this node's own and can be expected to be healed soon.
    pub(super) fn will_be_repaired(
        &self,
        wish: &OpenRequest,
        survey: &ClusterView,
        manifest: &ManifestBytes,
    ) -> bool {
        let is_own = |rank| {
            manifest
                .manifest()
                .shard(rank)
                .is_some_and(|shard| shard.node == *self.me())
        };
        let whole = wish.ranges.is_empty() && wish.without.is_none() && !wish.is_drill();
        let state = survey.states.get(&wish.manifest);
        let healable = || {
            let (lane, _) = LaneBlocks::find(manifest, wish.rank)?;
            let blocks = LaneBlocks::of(manifest, lane)?;
            blocks.enough(&survey.sources(manifest).available(lane, &blocks))
        };
        whole
            && !wish.healed_in_vain
            && is_own(wish.rank)
            && state.is_some_and(|state| *state >= CheckpointState::Protected)
            && healable().is_some()
    }
}

impl Restores {
    pub(super) fn await_repair(&mut self, id: RequestId, wish: OpenRequest, cx: &mut Context) {
        let alone_at = cx.now.plus(limits::HEAL_FIRST_MS);
        // The heal may have begun long before.
        if !planted!("who_comes_late_waits_for_all") {
            cx.emit(Event::ShardComes(wish.manifest, wish.rank));
        }
        let waiting = AwaitedRepair { id, wish, alone_at };
        self.awaited_repairs.push(waiting);
    }

    /// Requests that wait for a heal of this shard.
    pub(super) fn awaiting(&self, manifest: Digest, rank: Rank) -> Vec<RequestId> {
        let is_it = |it: &&AwaitedRepair| it.wish.manifest == manifest && it.wish.rank == rank;
        let waiting = self.awaited_repairs.iter().filter(is_it);
        waiting.map(|it| it.id).collect()
    }

    /// A reader has given a shard up that a heal brings: the heal goes on.
    pub(super) fn leave_awaited_repair(&mut self, conn: ConnId, of: OpenedEarly, cx: &mut Context) {
        let OpenedEarly { manifest, rank } = of;
        self.awaited_repairs.retain(|it| {
            let is_it = it.id.conn == conn && it.wish.manifest == manifest && it.wish.rank == rank;
            let leaves = is_it && cx.early.is_told(it.id);
            if leaves {
                cx.note_opening(&it.wish);
                cx.early.forget(it.id);
            }
            !leaves
        });
    }

    /// A whole shard is in this node's RAM: whoever waited for it has it.
    pub(crate) fn shard_is_back(&mut self, rank: Rank, cx: &mut Context) {
        let all = std::mem::take(&mut self.awaited_repairs);
        for waiting in all {
            let is_it = waiting.wish.rank == rank;
            if !is_it || !cx.open_own(waiting.id, &waiting.wish) {
                self.awaited_repairs.push(waiting);
            }
        }
    }

    /// Openings whose heal goes on wait on; those without one go their own way after a while.
    pub(crate) fn advance_awaited_repairs(&mut self, sessions: &mut Sessions, cx: &mut Context) {
        let now = cx.now;
        for mut waiting in std::mem::take(&mut self.awaited_repairs) {
            if waiting.wish.deadline <= now {
                let text = format!(
                    "expected the shard of rank {} in time, its heal has not ended yet; ask again",
                    waiting.wish.rank
                );
                let refusal = Refusal::new(RefusalCode::TimedOut, text);
                cx.reply(waiting.id, Reply::Refused(refusal));
                continue;
            }
            if sessions.heals(waiting.wish.manifest, waiting.wish.rank, cx) {
                waiting.alone_at = now.plus(limits::HEAL_FIRST_MS);
                sessions.hasten_heal(waiting.wish.manifest, waiting.wish.rank, cx);
            }
            if waiting.alone_at <= now {
                self.open_alone(waiting.id, waiting.wish, cx)
            } else {
                self.awaited_repairs.push(waiting)
            }
        }
    }

    /// Looks anew who holds what, and brings the shard here by a session of its own.
    fn open_alone(&mut self, id: RequestId, wish: OpenRequest, cx: &mut Context) {
        let wish = OpenRequest {
            healed_in_vain: true,
            ..wish
        };
        let Ok(surveyor) = cx.surveyor(id) else {
            return;
        };
        let left_ms = u32::try_from(wish.deadline.since(cx.now)).unwrap_or(u32::MAX);
        let step = self.step_of(wish.manifest, cx);
        self.survey(surveyor, step, left_ms, SurveyPurpose::Open(wish), cx);
    }

    /// When an opening that waits for a heal must be looked at again.
    pub(crate) fn awaited_repairs_deadlines(&self) -> impl Iterator<Item = Now> {
        let waiting = self.awaited_repairs.iter();
        waiting.map(|waiting| waiting.alone_at.min(waiting.wish.deadline))
    }

    pub(super) fn forget_awaited_repairs(&mut self, conn: ConnId) {
        self.awaited_repairs
            .retain(|waiting| waiting.id.conn != conn);
    }
}
