//! The ladder, per shard, one rung at a time and each rung verified: own RAM, the RAM of whoever holds it, decoding
//! from the survivors of its group, the durable tier. A rung that fails is left for the next, and its fault is told
//! if none holds. Only the chunks that cover the ranges asked for move.

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_codec::root_digest;
use storaged_plan::LaneBlocks;
use storaged_wire::local::{Reply, Rung};
use storaged_wire::peer::{CheckpointKey, SessionFault, SessionKind};
use storaged_wire::{Digest, ManifestBytes, NodeName, Rank, Refusal, RefusalCode, SlotId, Step};

use super::cluster_view::ClusterView;
use super::holdings::unknown_manifest;
use super::let_go::let_go;
use super::opening::{OpenRequest, ShardOpen, fingerprints_told};
use super::plan::SurveyPurpose;
use super::source_fault::{SourceFault, is_wrong};
use crate::api::{
    ConnId, DurableFault, DurableListing, HeldBlock, Note, Now, Output, QueryId, RequestId,
};
use crate::catalog::{Checkpoint, SlotUse};
use crate::context::Context;
use crate::encode::Sessions;
use crate::encode::{Restored, SessionGoal};
use crate::event::NoSlot;
use crate::limits;
use crate::restore::{Answer, OpenedEarly, Restores};

/// Failed attempts of one opening before it gives up on sessions: more than any group has survivors to try.
const ATTEMPTS_MAX: usize = 16;

/// Plans whose manifests and sources are kept for the openings that follow.
const PLANNED_KEPT: usize = 8;

impl Restores {
    pub(crate) fn open_shard(
        &mut self,
        id: RequestId,
        mut wish: OpenRequest,
        timeout_ms: u32,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        cx.attached(id)?;
        if let Some(known) = cx.manifest_named(wish.manifest) {
            cx.check_readable(id, &known)?;
            wish.check_ranges(&known)?;
            if cx.open_own(id, &wish) {
                return Ok(());
            }
        }
        let surveyor = cx.surveyor(id)?;
        let step = self.step_of(wish.manifest, cx);
        self.survey(surveyor, step, timeout_ms, SurveyPurpose::Open(wish), cx);
        Ok(())
    }

    /// The step of a manifest that is known here: the durable tier is asked for it by its number, because a listing without
    /// one names only its newest checkpoints.
    pub(super) fn step_of(&self, name: Digest, cx: &Context) -> Option<Step> {
        let known = self.known_manifest(name, cx)?;
        Some(known.manifest().step)
    }

    /// The survey is in: make room, then climb.
    pub(crate) fn open_surveyed(
        &mut self,
        id: RequestId,
        wish: OpenRequest,
        survey: ClusterView,
        cx: &mut Context,
    ) {
        if let Err(refusal) = self.try_open_surveyed(id, wish, survey, cx) {
            cx.reply(id, Reply::Refused(refusal));
        }
    }

    fn try_open_surveyed(
        &mut self,
        id: RequestId,
        mut wish: OpenRequest,
        mut survey: ClusterView,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        let manifest = survey
            .manifests
            .get(&wish.manifest)
            .cloned()
            .ok_or_else(|| unknown_manifest(wish.manifest))?;
        cx.check_readable(id, &manifest)?;
        let length = wish.check_ranges(&manifest)?;
        if cx.open_own(id, &wish) {
            return Ok(());
        }
        // Also on a node that the checkpoint does not concern, where a trainer was moved to: whoever takes part in a session
        // must know the manifest. It goes when the shard is closed (`forget_foreign`). What nobody has needs no session: it would bring
        // a job back that was dropped.
        if cx.manifest_named(wish.manifest).is_none() && !survey.is_unknown(wish.manifest) {
            cx.adopt_surveyed(&manifest, &survey);
        }
        if cx.will_be_repaired(&wish, &survey, &manifest) {
            self.await_repair(id, wish, cx);
            return Ok(());
        }
        if wish.is_drill() {
            cx.has_room_for_drill(length, &manifest.manifest().namespace)?;
            survey.leave_tier_out(wish.manifest);
        }
        let namespace = manifest.manifest().namespace.clone();
        let slot = cx.create_slot(&namespace, wish.rank, length, SlotUse::Opening)?;
        let (is_drill, looked_anew) = (wish.is_drill(), wish.looked_anew);
        let withheld = if planted!("withheld_asked") {
            BTreeSet::new()
        } else {
            wish.withheld
        };
        let (mut excluded, mut faults) = (withheld, Vec::new());
        if let Some(rung) = wish.without {
            faults.push(SourceFault::FoundByReader(rung));
        }
        if wish.without == Some(Rung::OwnRam) {
            excluded.insert(cx.me().clone());
        }
        self.openings.insert(
            slot,
            ShardOpen {
                id,
                manifest,
                rank: wish.rank,
                deadline: wish.deadline,
                ranges: wish.ranges,
                all_by_ranges: wish.all_by_ranges,
                survey,
                excluded,
                faults,
                is_drill,
                looked_anew,
                attempts: 0,
                rung: Rung::Durable,
                wary: false,
                open: false,
                is_released: false,
                fetched_since: None,
            },
        );
        Ok(())
    }

    /// The slot of an opening is there, or cannot be.
    pub(crate) fn opening_hears_of_slot(
        &mut self,
        slot: SlotId,
        made: Result<(), NoSlot>,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        let Err(NoSlot(reason)) = made else {
            return self.try_next_source(slot, sessions, cx);
        };
        if let Some(opening) = self.openings.remove(&slot) {
            let manifest = opening.manifest.manifest();
            let refusal = cx.no_budget(manifest.length(), &reason, &manifest.namespace);
            cx.reply(opening.id, Reply::Refused(refusal));
        }
    }

    /// Tries the best rung that has not failed.
    fn try_next_source(&mut self, slot: SlotId, sessions: &mut Sessions, cx: &mut Context) {
        let Some(opening) = self.openings.get(&slot) else {
            return;
        };
        let (manifest, rank) = (opening.manifest.clone(), opening.rank);
        if opening.attempts < ATTEMPTS_MAX
            && let Some((lane, kind, rung)) = opening.session_for(sessions, cx)
        {
            let key = CheckpointKey {
                namespace: manifest.manifest().namespace.clone(),
                run: manifest.manifest().run,
                step: manifest.manifest().step,
            };
            if let Some(opening) = self.openings.get_mut(&slot) {
                opening.attempts += 1;
                opening.rung = rung;
            }
            if sessions.lead(key, &manifest, lane, kind, SessionGoal::Open(slot), cx) {
                return;
            }
        }
        let Some(opening) = self.openings.get_mut(&slot) else {
            return;
        };
        if opening.is_released {
            // Nobody waits for it: what memory does not give any more is not fetched.
            return self.no_rung_left(slot, cx);
        }
        if opening.survey.take_durable(manifest.name()) {
            // The tier has been asked by this: a listing that names the same copy again would only have it fetched twice.
            opening.survey.is_tier_unasked = false;
            opening.rung = Rung::Durable;
            opening.fetched_since = Some(cx.now);
            let ranges = opening.ranges.clone();
            let trust = cx.trust_of(opening.id.conn, manifest.manifest().owner);
            cx.out.push(Output::Fetch {
                manifest,
                rank,
                slot,
                ranges,
                trust,
            });
            return;
        }
        if std::mem::take(&mut opening.survey.is_tier_unasked) {
            let query = QueryId(cx.fresh());
            let trust = cx.trust_of(opening.id.conn, manifest.manifest().owner);
            cx.out.push(Output::ListDurable {
                query,
                trust,
                namespace: manifest.manifest().namespace.clone(),
                step: Some(manifest.manifest().step),
            });
            self.listed_for.insert(query, slot);
            return;
        }
        if !self.asks_once_more(slot, cx) {
            self.no_rung_left(slot, cx);
        }
    }

    /// Memory did not give the shard after all, and this is what the durable tier has.
    pub(super) fn opening_listed(
        &mut self,
        slot: SlotId,
        outcome: Result<DurableListing, DurableFault>,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        let Some(opening) = self.openings.get_mut(&slot) else {
            return;
        };
        match outcome {
            Ok(listing) => {
                cx.keep_listed(listing.enclosures);
                for manifest in listing.manifests {
                    opening.survey.add_durable(manifest);
                }
                let key = CheckpointKey::of(opening.manifest.manifest());
                opening.survey.set_aside = listing.set_aside;
                let against = opening.survey.reason_against(&key);
                opening.survey.durable_fault = against.map(DurableFault::Damaged);
            }
            Err(fault) => opening.survey.durable_fault = Some(fault),
        }
        self.try_next_source(slot, sessions, cx);
    }

    /// Whether an opening would go on without any of these nodes, and has attempts to spare for it.
    pub(crate) fn opening_goes_around(
        &self,
        slot: SlotId,
        slow: &BTreeSet<NodeName>,
        sessions: &Sessions,
        cx: &Context,
    ) -> bool {
        let Some(opening) = self.openings.get(&slot) else {
            return false;
        };
        let Some((lane, SessionKind::Repair { survivors, .. }, _)) =
            opening.session_for(sessions, cx)
        else {
            return false;
        };
        let blocks = LaneBlocks::of_read(&opening.manifest, lane);
        let may_try = opening.attempts <= limits::REPLANS_MAX as usize;
        may_try
            && blocks.is_some_and(|blocks| {
                let mut nodes = survivors.iter().map(|block| blocks.node(*block as usize));
                nodes.all(|node| node.is_some_and(|node| !slow.contains(node)))
            })
    }

    pub(crate) fn opening_session_failed(
        &mut self,
        slot: SlotId,
        node: &NodeName,
        fault: &SessionFault,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        let Some(opening) = self.openings.get_mut(&slot) else {
            return;
        };
        let failed = SourceFault::Session(node.clone(), fault.clone());
        opening.faults.push(failed);
        let blamed = fault.blamed().unwrap_or(node).clone();
        let manifest = opening.manifest.manifest();
        let failed = Note::SessionFailed {
            key: CheckpointKey::of(manifest),
            node: node.clone(),
            fault: fault.clone(),
        };
        cx.out.push(Output::Note(failed));
        let was_wary = opening.wary;
        opening.wary |= is_wrong(fault);
        // A wrong result names nobody: next every block is checked on its own, which names who sent a wrong one. If
        // that does not tell either, one survivor after the other is left out.
        let blamed = match fault {
            SessionFault::WrongResult(_) if !was_wary => None,
            SessionFault::WrongResult(_) => Some(self.next_suspect(slot).unwrap_or(blamed)),
            _ => Some(blamed),
        };
        if let (Some(blamed), Some(opening)) = (blamed, self.openings.get_mut(&slot)) {
            opening.excluded.insert(blamed);
        }
        self.try_next_source_when_idle(slot, sessions, cx);
    }

    /// Whether a shard of this checkpoint is being opened here.
    pub(crate) fn opens(&self, checkpoint: &Checkpoint) -> bool {
        let name = checkpoint.name();
        let mut openings = self.openings.values();
        openings.any(|opening| Some(opening.manifest.name()) == name)
    }

    /// Climbs on, once no session fills the slot any more: what it has filled till then need not come again.
    pub(crate) fn try_next_source_when_idle(
        &mut self,
        slot: SlotId,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        if !sessions.slot_is_ending(slot) {
            self.try_next_source(slot, sessions, cx);
        }
    }

    fn next_suspect(&self, slot: SlotId) -> Option<NodeName> {
        let opening = self.openings.get(&slot)?;
        let (lane, block) = LaneBlocks::to_read(&opening.manifest, opening.rank)?;
        let blocks = LaneBlocks::of_read(&opening.manifest, lane)?;
        let available = opening
            .survey
            .sources(&opening.manifest)
            .available(lane, &blocks);
        // Parity first: shards have digests that all know.
        let others = available.into_iter().rev().filter(|other| *other != block);
        others
            .filter_map(|other| blocks.node(other).cloned())
            .find(|node| !opening.excluded.contains(node))
    }

    pub(crate) fn fetched(
        &mut self,
        slot: SlotId,
        outcome: Result<Arc<[Digest]>, DurableFault>,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        match outcome {
            Ok(leaves) => {
                self.note_durable_rate(slot, cx);
                self.opening_filled(slot, Some(leaves), sessions, cx);
            }
            Err(fault) => {
                cx.tier_answered(Some(&fault));
                if fault.is_damage()
                    && let Some(opening) = self.openings.get(&slot)
                {
                    let manifest = opening.manifest.clone();
                    cx.quarantine(&manifest, &fault);
                }
                if let Some(opening) = self.openings.get_mut(&slot) {
                    opening.survey.durable_fault = Some(fault);
                    self.try_next_source(slot, sessions, cx);
                }
            }
        }
    }

    fn note_durable_rate(&mut self, slot: SlotId, cx: &mut Context) {
        let Some(opening) = self.openings.get_mut(&slot) else {
            return;
        };
        if let Some(since) = opening.fetched_since.take() {
            let elapsed_ms = cx.now.since(since);
            cx.rates.durable(opening.bytes(), elapsed_ms, cx.now);
        }
    }

    /// Every byte asked for is in the slot and has its digest.
    pub(crate) fn opening_filled(
        &mut self,
        slot: SlotId,
        leaves: Option<Arc<[Digest]>>,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        let Some(opening) = self.openings.get_mut(&slot) else {
            return;
        };
        let Some(leaves) = leaves else {
            opening.faults.push(SourceFault::NoTable);
            return self.try_next_source(slot, sessions, cx);
        };
        let manifest = opening.manifest.manifest();
        let Some(entry) = manifest.shard(opening.rank).cloned() else {
            return;
        };
        let proven = root_digest(&leaves, entry.length, manifest.chunk) == entry.root;
        if !proven {
            opening.faults.push(SourceFault::WrongTable);
            return self.try_next_source(slot, sessions, cx);
        }
        opening.open = true;
        opening.deadline = Now(u64::MAX);
        let (id, rung, chunk) = (opening.id, opening.rung, manifest.chunk);
        let stays = opening.stays();
        let is_released = opening.is_released;
        let name = opening.manifest.name();
        opening.note_opened(cx);
        cx.slot_mut(slot).used_for = SlotUse::Guest;
        sessions.forget_part_filled(slot);
        let reply = Reply::ShardOpened {
            length: entry.length,
            chunk,
            leaves: leaves.clone().into(),
            rung,
            fingerprints: None,
        };
        let descriptor = Some(slot);
        cx.answer(id, Answer { reply, descriptor });
        if stays && entry.node == *cx.me() {
            let restored = Restored {
                rank: entry.rank,
                slot,
                length: entry.length,
                leaves,
            };
            self.keep_opened(name, restored, sessions, cx);
        }
        if is_released && self.openings.remove(&slot).is_some() {
            cx.drop_slot(slot);
        }
    }

    /// A whole shard of this node is its own again: healed by the way. What it holds already stays, unless a reader found it wrong.
    fn keep_opened(
        &mut self,
        name: Digest,
        restored: Restored,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        let Some(key) = cx.by_name.get(&name).cloned() else {
            return;
        };
        let (slot, rank) = (restored.slot, restored.rank);
        let Some(opening) = self.openings.get(&slot) else {
            return;
        };
        let reader = !opening.is_released || planted!("gone_readers_stay");
        let reader = reader.then_some(opening.id.conn);
        let held = cx.sealed_shard(&key, rank);
        let stays = opening.is_drill || held.is_some() && !opening.own_is_wrong();
        if stays && !planted!("drills_replace_shards") {
            return;
        }
        if let Some(held) = held {
            // Not as corrupt: a step that is being coded would be given up for that, by the word of one reader.
            let block = HeldBlock::Shard(rank, held.slot);
            sessions.end_sessions_reading(block, &SessionFault::Aborted, cx);
        }
        self.openings.remove(&slot);
        cx.hold_restored(&key, restored);
        let shard = cx
            .checkpoints
            .get_mut(&key)
            .and_then(|c| c.shards.get_mut(&rank));
        if let Some(shard) = shard {
            shard.readers.extend(reader);
        }
    }

    fn no_rung_left(&mut self, slot: SlotId, cx: &mut Context) {
        let Some(mut opening) = self.openings.remove(&slot) else {
            return;
        };
        cx.drop_slot(slot);
        let record = opening.manifest.manifest();
        let corrupt = opening.faults.iter().any(SourceFault::is_corrupt);
        let durable = opening.survey.durable_fault.take();
        if durable.is_none() && !corrupt && cx.was_let_go_while_opened(&opening) {
            let refusal = let_go(
                &CheckpointKey::of(record),
                opening.rank,
                &said(&opening.faults),
            );
            return cx.reply(opening.id, Reply::Refused(refusal));
        }
        let code = match &durable {
            Some(fault) if !fault.is_damage() => RefusalCode::DurableUnavailable,
            Some(_) => RefusalCode::Corrupt,
            None if corrupt => RefusalCode::Corrupt,
            None => RefusalCode::TooManyLost,
        };
        let durable = durable.map(|fault| SourceFault::Durable(fault.to_string()));
        opening.faults.extend(durable);
        let text = format!(
            "the shard of rank {} at step {} could not be restored on any rung; tried: [{}]; ask for another plan",
            opening.rank,
            record.step,
            said(&opening.faults)
        );
        cx.reply(opening.id, Reply::Refused(Refusal::new(code, text)));
    }

    pub(crate) fn expire_openings(&mut self, sessions: &mut Sessions, cx: &mut Context) {
        let now = cx.now;
        let late: Vec<SlotId> = self
            .openings
            .iter()
            .filter(|(_, opening)| opening.deadline <= now)
            .map(|(slot, _)| *slot)
            .collect();
        for slot in late {
            if let Some(opening) = self.openings.remove(&slot) {
                sessions.end_opening_session(slot, cx);
                cx.drop_slot(slot);
                let text = format!(
                    "expected the shard of rank {} in time, it is not here yet; so far: [{}]",
                    opening.rank,
                    said(&opening.faults)
                );
                cx.reply(
                    opening.id,
                    Reply::Refused(Refusal::new(RefusalCode::TimedOut, text)),
                );
            }
        }
    }

    pub(crate) fn openings_forget(&mut self, node: &NodeName) {
        for opening in self.openings.values_mut() {
            opening.excluded.insert(node.clone());
            // What it let go before it went down counts no more than what it held.
            opening.survey.forget(node);
        }
    }

    pub(crate) fn close_shard(
        &mut self,
        id: RequestId,
        manifest: Digest,
        rank: Rank,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) -> Result<(), Refusal> {
        cx.attached(id)?;
        let of = OpenedEarly { manifest, rank };
        self.leave_awaited_repair(id.conn, of, cx);
        self.leave_surveyed(id.conn, of, cx);
        self.release_own(id.conn, of, cx);
        self.drop_guests(
            |opening| {
                opening.id.conn == id.conn
                    && opening.manifest.name() == manifest
                    && opening.rank == rank
            },
            sessions,
            cx,
        );
        cx.early.forget_ended(id.conn, of);
        cx.reader_closes(manifest, rank, id.conn);
        if let Some(checkpoint) = cx.checkpoint_named(manifest) {
            if let Some(shard) = checkpoint.shards.get_mut(&rank) {
                shard.readers.remove(&id.conn);
            }
            let namespace = checkpoint.key.namespace.clone();
            cx.retire_older(&namespace);
        }
        cx.reply(id, Reply::Done);
        Ok(())
    }

    pub(crate) fn drop_guests_of(
        &mut self,
        conn: ConnId,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        self.drop_guests(|opening| opening.id.conn == conn, sessions, cx);
    }

    fn drop_guests(
        &mut self,
        gone: impl Fn(&ShardOpen) -> bool,
        sessions: &mut Sessions,
        cx: &mut Context,
    ) {
        let slots: Vec<SlotId> = self
            .openings
            .iter()
            .filter(|(_, opening)| gone(opening) && !opening.is_released)
            .map(|(slot, _)| *slot)
            .collect();
        for slot in slots {
            if let Some(opening) = self.openings.remove(&slot) {
                cx.early.forget(opening.id);
            }
            sessions.end_opening_session(slot, cx);
            cx.drop_slot(slot);
        }
    }

    /// Keeps a plan's manifest for the requests that follow it.
    pub(crate) fn remember_planned(&mut self, manifest: Arc<ManifestBytes>) {
        self.planned.retain(|known| known.name() != manifest.name());
        self.planned.push(manifest);
        if self.planned.len() > PLANNED_KEPT {
            self.planned.remove(0);
        }
    }

    /// The manifest of a checkpoint in this node's table, or of one that was planned here: the durable tier may have it alone.
    pub(crate) fn known_manifest(&self, name: Digest, cx: &Context) -> Option<Arc<ManifestBytes>> {
        let mut planned = self.planned.iter();
        cx.manifest_named(name)
            .or_else(|| planned.find(|known| known.name() == name).cloned())
    }
}

impl Context {
    /// The first rung: this node's RAM.
    pub(super) fn open_own(&mut self, id: RequestId, wish: &OpenRequest) -> bool {
        if wish.without == Some(Rung::OwnRam) || wish.withheld.contains(self.me()) {
            return false;
        }
        let Some(checkpoint) = self.checkpoint_named(wish.manifest) else {
            return false;
        };
        let Some(chunk) = checkpoint.manifest.as_ref().map(|m| m.manifest().chunk) else {
            return false;
        };
        let Some(local) = checkpoint.shards.get_mut(&wish.rank) else {
            return false;
        };
        let Some(shard) = local.sealed() else {
            return false;
        };
        local.readers.insert(id.conn);
        let fingerprints = fingerprints_told(&shard.leaves, &local.prints);
        let reply = Reply::ShardOpened {
            length: shard.length,
            chunk,
            leaves: shard.leaves.clone().into(),
            rung: Rung::OwnRam,
            fingerprints,
        };
        let descriptor = Some(shard.slot);
        self.answer(id, Answer { reply, descriptor });
        self.note_opening(wish);
        true
    }
}

fn said(faults: &[SourceFault]) -> String {
    let said: Vec<String> = faults.iter().map(SourceFault::to_string).collect();
    said.join("; ")
}
