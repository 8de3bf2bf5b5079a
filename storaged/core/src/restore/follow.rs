//! Shards that are given while they come (`early`): who asks for one so, who follows it, to whom a session that begins is news, and what becomes of one that its reader gives up before it has come.

use storaged_wire::local::{Reply, Request};
use storaged_wire::{Digest, Rank, Refusal, RefusalCode};

use super::early::{Answer, OpenedEarly};
use super::opening::OpenRequest;
use super::plan::SurveyPurpose;
use crate::api::{ConnId, RequestId};
use crate::context::Context;
use crate::encode::Sessions;
use crate::restore::Restores;

impl Context {
    /// Whoever opened a shard early waits until it is there.
    pub(crate) fn follow_shard(
        &mut self,
        id: RequestId,
        of: OpenedEarly,
        timeout_ms: u32,
    ) -> Result<(), Refusal> {
        self.attached(id)?;
        let until = self.answer_by(timeout_ms);
        let slots = &self.slots;
        let is_there = |slot| slots.contains_key(&slot);
        let Some(said) = self.early.follows(id, of, until, is_there) else {
            let text = format!(
                "expected a shard that comes to this connection, got rank {}, of which it knows none: open it",
                of.rank
            );
            return Err(Refusal::new(RefusalCode::WrongSlot, text));
        };
        for (id, answer) in said {
            self.push_answer(id, self.if_still_there(answer));
        }
        // Whoever only looks is answered at once, and not by the next tick.
        if timeout_ms == 0 {
            self.expire_followers();
        }
        Ok(())
    }

    /// A shard whose memory went before its reader asked has gone.
    fn if_still_there(&self, answer: Answer) -> Answer {
        let is_gone = |slot| !self.slots.contains_key(&slot);
        if !answer.descriptor.is_some_and(is_gone) {
            return answer;
        }
        let text = "the shard came, and was let go before its reader asked: ask for another plan";
        Answer::plain(Reply::Refused(Refusal::new(
            RefusalCode::NoCheckpoint,
            text,
        )))
    }

    /// Those who have followed for as long as they wanted hear that it still comes.
    pub(crate) fn expire_followers(&mut self) {
        for id in self.early.late(self.now) {
            self.push_answer(id, Answer::plain(Reply::StillComing));
        }
    }
}

impl Restores {
    /// Somebody asks for a shard.
    pub(crate) fn open_requested(
        &mut self,
        id: RequestId,
        open: Request,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        let Request::OpenShard {
            manifest,
            rank,
            ranges,
            timeout_ms,
            without,
            withheld,
            early,
        } = open
        else {
            return Ok(());
        };
        if early == Some(true) {
            cx.early.wants(id, OpenedEarly { manifest, rank });
        }
        let by = cx.answer_by(timeout_ms);
        let wish = OpenRequest::new(manifest, rank, ranges, without, by);
        let wish = wish.withholding(withheld);
        self.open_shard(id, wish, timeout_ms, cx)
    }

    /// A reader gives up a shard that came, and that all are asked for once more: it is not brought here for nobody.
    pub(super) fn leave_surveyed(&mut self, conn: ConnId, of: OpenedEarly, cx: &mut Context) {
        self.plans.retain(|_, plan| {
            let SurveyPurpose::Open(wish) = &plan.then else {
                return true;
            };
            let (manifest, rank) = (wish.manifest, wish.rank);
            let is_it = plan.id.conn == conn && of == OpenedEarly { manifest, rank };
            let leaves = is_it && cx.early.is_told(plan.id);
            if leaves {
                cx.note_opening(wish);
                cx.early.forget(plan.id);
            }
            !leaves
        });
    }

    /// A reader gives a whole shard of this node up that it took early and that still comes: what has come is not thrown away, or the
    /// node would have to be healed of it again.
    pub(super) fn release_own(&mut self, conn: ConnId, of: OpenedEarly, cx: &mut Context) {
        for opening in self.openings.values_mut() {
            let (manifest, rank) = (opening.manifest.name(), opening.rank);
            let is_it = opening.id.conn == conn && of == OpenedEarly { manifest, rank };
            let entry = opening.manifest.manifest().shard(rank);
            let is_own = entry.is_some_and(|entry| entry.node == *cx.me());
            let comes = !opening.open && !opening.is_drill && opening.ranges.is_empty();
            let is_told = cx.early.is_told(opening.id);
            if is_it && is_told && !opening.open {
                // What it needs it has copied.
                opening.note_opened(cx);
            }
            if is_it && comes && is_own && is_told && !planted!("closed_early_is_lost") {
                opening.is_released = true;
                cx.early.close(opening.id);
            }
        }
    }

    /// A session fills memory with this shard, or somebody has begun to wait for it: those who take it early are told where it comes.
    pub(crate) fn shard_comes(
        &mut self,
        manifest: Digest,
        rank: Rank,
        sessions: &Sessions,
        cx: &mut Context,
    ) {
        for coming in sessions.coming(manifest, rank, cx) {
            let of_opening = self.openings.get(&coming.slot).map(|opening| opening.id);
            let waiting = (!coming.is_of_opening).then(|| self.awaiting(manifest, rank));
            for id in of_opening.into_iter().chain(waiting.into_iter().flatten()) {
                if let Some((id, answer)) = cx.early.comes(id, &coming) {
                    cx.push_answer(id, answer);
                }
            }
        }
    }
}
