//! The ladder, per shard, one rung at a time and each rung verified: own RAM, the RAM of whoever holds it, decoding
//! from the survivors of its group, the durable tier. A rung that fails is left for the next, and its fault is told
//! if none holds. Only the chunks that cover the ranges asked for move.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use storaged_codec::root_digest;
use storaged_plan::LaneBlocks;
use storaged_wire::local::{Reply, Rung};
use storaged_wire::peer::{CheckpointKey, SessionFault, SessionKind};
use storaged_wire::shape::RepairShape;
use storaged_wire::{
    CheckpointState, ChunkSize, Digest, ManifestBytes, NodeName, Rank, Refusal, RefusalCode,
    SlotId, Step,
};

use super::holdings::unknown_manifest;
use super::plan::Then;
use super::rung_fault::{RungFault, is_wrong};
use super::survey::Survey;
use crate::api::{ConnId, DurableFault, Note, Now, Output, RequestId};
use crate::encode::SessionGoal;
use crate::limits;
use crate::node::Node;
use crate::table::SlotUse;

/// Failed attempts of one opening before it gives up on sessions: more than any group has survivors to try.
const ATTEMPTS_MAX: usize = 16;

/// Plans whose manifests and sources are kept for the openings that follow.
const PLANNED_KEPT: usize = 8;

/// What an `OpenShard` asks for.
#[derive(Debug, Clone)]
pub(crate) struct OpenWish {
    pub manifest: Digest,
    pub rank: Rank,
    pub ranges: Vec<Range<u64>>,
    pub deadline: Now,
    /// The rung that gave the reader wrong bytes.
    pub without: Option<Rung>,
    /// A heal was waited for and did not bring the shard back.
    pub healed_in_vain: bool,
}

/// A shard on its way into this node's RAM, or there for a reader.
#[derive(Debug, Clone)]
pub(crate) struct Opening {
    pub id: RequestId,
    pub manifest: Arc<ManifestBytes>,
    pub rank: Rank,
    pub deadline: Now,
    ranges: Vec<Range<u64>>,
    survey: Survey,
    excluded: BTreeSet<NodeName>,
    faults: Vec<RungFault>,
    attempts: usize,
    rung: Rung,
    /// A block came out wrong: from now on every block is checked by this node.
    wary: bool,
    open: bool,
}

impl Opening {
    /// Whether the reader has the shard.
    pub fn is_open(&self) -> bool {
        self.open
    }
}

impl Node {
    pub(crate) fn open_shard(
        &mut self,
        id: RequestId,
        wish: OpenWish,
        timeout_ms: u32,
    ) -> Result<(), Refusal> {
        let attached = self.attached(id)?.clone();
        if let Some(known) = self.manifest_named(wish.manifest) {
            self.check_readable(&known, attached.owner)?;
            check_ranges(&known, wish.rank, &wish.ranges)?;
            if self.open_own(id, &wish) {
                return Ok(());
            }
        }
        let surveyor = self.surveyor(id)?;
        let step = self.step_of(wish.manifest);
        self.survey(surveyor, step, timeout_ms, Then::Open(wish));
        Ok(())
    }

    /// The step of a manifest that is known here: the durable tier is asked for it by its number, because a listing without
    /// one names only its newest checkpoints.
    pub(super) fn step_of(&self, name: Digest) -> Option<Step> {
        let known = self.known_manifest(name)?;
        Some(known.manifest().step)
    }

    /// The first rung: this node's RAM.
    pub(super) fn open_own(&mut self, id: RequestId, wish: &OpenWish) -> bool {
        if wish.without == Some(Rung::OwnRam) {
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
        self.out.push(Output::Reply {
            id,
            reply: Reply::ShardOpened {
                length: shard.length,
                chunk,
                leaves: shard.leaves.to_vec(),
                rung: Rung::OwnRam,
            },
            descriptor: Some(shard.slot),
        });
        true
    }

    /// The survey is in: make room, then climb.
    pub(crate) fn open_surveyed(&mut self, id: RequestId, wish: OpenWish, survey: Survey) {
        if let Err(refusal) = self.try_open_surveyed(id, wish, survey) {
            self.reply(id, Reply::Refused(refusal));
        }
    }

    fn try_open_surveyed(
        &mut self,
        id: RequestId,
        wish: OpenWish,
        survey: Survey,
    ) -> Result<(), Refusal> {
        let attached = self.attached(id)?.clone();
        let manifest = survey
            .manifests
            .get(&wish.manifest)
            .cloned()
            .ok_or_else(|| unknown_manifest(wish.manifest))?;
        self.check_readable(&manifest, attached.owner)?;
        let length = check_ranges(&manifest, wish.rank, &wish.ranges)?;
        if self.open_own(id, &wish) {
            return Ok(());
        }
        // Also on a node that the checkpoint does not concern, where a trainer was moved to: whoever takes part in a session
        // must know the manifest. It goes when the shard is closed (`forget_foreign`).
        if self.manifest_named(wish.manifest).is_none() {
            let state = survey.states.get(&wish.manifest).copied();
            self.adopt_found(
                manifest.clone(),
                state.unwrap_or(CheckpointState::Committed),
            );
        }
        if self.is_to_be_healed(&wish, &survey, &manifest) {
            self.heal_first(id, wish);
            return Ok(());
        }
        let namespace = manifest.manifest().namespace.clone();
        let slot = self.create_slot(&namespace, wish.rank, length, SlotUse::Restoring)?;
        let (mut excluded, mut faults) = (BTreeSet::new(), Vec::new());
        if let Some(rung) = wish.without {
            faults.push(RungFault::FoundByReader(rung));
        }
        if wish.without == Some(Rung::OwnRam) {
            excluded.insert(self.me().clone());
        }
        self.openings.insert(
            slot,
            Opening {
                id,
                manifest,
                rank: wish.rank,
                deadline: wish.deadline,
                ranges: wish.ranges,
                survey,
                excluded,
                faults,
                attempts: 0,
                rung: Rung::Durable,
                wary: false,
                open: false,
            },
        );
        Ok(())
    }

    /// A slot marked as restoring is there: an opening's, or a healing session's.
    pub(crate) fn opening_has_slot(&mut self, slot: SlotId) {
        if self.openings.contains_key(&slot) {
            self.climb(slot);
        } else {
            self.joined_has_slot(slot);
        }
    }

    pub(crate) fn opening_without_slot(&mut self, slot: SlotId, reason: &str) {
        match self.openings.remove(&slot) {
            Some(opening) => {
                let refusal = self.no_budget(opening.manifest.manifest().length(), reason);
                self.reply(opening.id, Reply::Refused(refusal));
            }
            None => self.joined_without_slot(slot, reason),
        }
    }

    /// Tries the best rung that has not failed.
    fn climb(&mut self, slot: SlotId) {
        let Some(opening) = self.openings.get(&slot) else {
            return;
        };
        let (manifest, rank) = (opening.manifest.clone(), opening.rank);
        if opening.attempts < ATTEMPTS_MAX
            && let Some((lane, kind, rung)) = self.session_for(opening)
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
            if self.lead(key, &manifest, lane, kind, SessionGoal::Open(slot)) {
                return;
            }
        }
        let Some(opening) = self.openings.get_mut(&slot) else {
            return;
        };
        if opening.survey.durable.remove(&manifest.name()) {
            opening.rung = Rung::Durable;
            let ranges = opening.ranges.clone();
            self.out.push(Output::Fetch {
                manifest,
                rank,
                slot,
                ranges,
            });
            return;
        }
        self.no_rung_left(slot);
    }

    /// The session of the next rung: a copy from whoever holds the shard, or decoding.
    fn session_for(
        &self,
        opening: &Opening,
    ) -> Option<(storaged_wire::peer::Lane, SessionKind, Rung)> {
        let manifest = opening.manifest.manifest();
        let (lane, block) = LaneBlocks::find(&opening.manifest, opening.rank)?;
        let blocks = LaneBlocks::of(&opening.manifest, lane)?;
        // A session's members must know the manifest, this node too.
        self.manifest_named(opening.manifest.name())?;
        let usable: Vec<usize> = opening
            .survey
            .available(opening.manifest.name(), lane, &blocks)
            .into_iter()
            .filter(|block| {
                blocks
                    .node(*block)
                    .is_some_and(|node| self.is_up(node) && !opening.excluded.contains(node))
            })
            .collect();
        let shape = match opening.wary {
            true => RepairShape::Direct,
            false => RepairShape::Chain,
        };
        let fast = |block: &usize| {
            let node = blocks.node(*block);
            node.is_some_and(|node| !self.links().is_slow(node))
        };
        let first: Vec<usize> = usable.iter().copied().filter(fast).collect();
        let others = self.survivors(&blocks, [&first, &[]], (1, shape));
        // A copy over a slow link takes longer than decoding from others, if they are enough.
        let copies = usable.contains(&block) && (first.contains(&block) || others.is_none());
        let (survivors, rung) = match copies {
            true => (vec![block], Rung::PeerRam),
            false => {
                let any = || self.survivors(&blocks, [&first, &usable], (1, shape));
                (others.or_else(any)?, Rung::Decoded)
            }
        };
        let kind = SessionKind::Repair {
            lane,
            survivors: survivors.into_iter().map(|block| block as u32).collect(),
            wanted: vec![(block as u32, self.me().clone())],
            stripes: stripes_of(&opening.ranges, manifest.chunk),
            shape,
        };
        Some((lane, kind, rung))
    }

    /// Whether an opening would go on without any of these nodes, and has attempts to spare for it.
    pub(crate) fn opening_goes_around(&self, slot: SlotId, slow: &BTreeSet<NodeName>) -> bool {
        let Some(opening) = self.openings.get(&slot) else {
            return false;
        };
        let Some((lane, SessionKind::Repair { survivors, .. }, _)) = self.session_for(opening)
        else {
            return false;
        };
        let blocks = LaneBlocks::of(&opening.manifest, lane);
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
    ) {
        let Some(opening) = self.openings.get_mut(&slot) else {
            return;
        };
        let failed = RungFault::Session(node.clone(), fault.clone());
        opening.faults.push(failed);
        let blamed = fault.blamed().unwrap_or(node).clone();
        let manifest = opening.manifest.manifest();
        let failed = Note::SessionFailed {
            key: CheckpointKey::of(manifest),
            node: node.clone(),
            fault: fault.clone(),
        };
        self.out.push(Output::Note(failed));
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
        self.climb_again(slot);
    }

    /// Climbs on, once no session fills the slot any more: what it has filled till then need not come again.
    pub(crate) fn climb_again(&mut self, slot: SlotId) {
        if !self.slot_is_ending(slot) {
            self.climb(slot);
        }
    }

    fn next_suspect(&self, slot: SlotId) -> Option<NodeName> {
        let opening = self.openings.get(&slot)?;
        let (lane, block) = LaneBlocks::find(&opening.manifest, opening.rank)?;
        let blocks = LaneBlocks::of(&opening.manifest, lane)?;
        let available = opening
            .survey
            .available(opening.manifest.name(), lane, &blocks);
        // Parity first: shards have digests that all know.
        let others = available.into_iter().rev().filter(|other| *other != block);
        others
            .filter_map(|other| blocks.node(other).cloned())
            .find(|node| !opening.excluded.contains(node))
    }

    pub(crate) fn fetched(&mut self, slot: SlotId, outcome: Result<Arc<[Digest]>, DurableFault>) {
        match outcome {
            Ok(leaves) => self.opening_filled(slot, Some(leaves)),
            Err(fault) => {
                self.tier_answered(Some(&fault));
                if fault.is_damage()
                    && let Some(opening) = self.openings.get(&slot)
                {
                    let manifest = opening.manifest.clone();
                    self.quarantine(&manifest, &fault.to_string());
                }
                if let Some(opening) = self.openings.get_mut(&slot) {
                    opening.survey.durable_fault = Some(fault);
                    self.climb(slot);
                }
            }
        }
    }

    /// Every byte asked for is in the slot and has its digest.
    pub(crate) fn opening_filled(&mut self, slot: SlotId, leaves: Option<Arc<[Digest]>>) {
        let Some(opening) = self.openings.get_mut(&slot) else {
            return;
        };
        let Some(leaves) = leaves else {
            opening.faults.push(RungFault::NoTable);
            return self.climb(slot);
        };
        let manifest = opening.manifest.manifest();
        let Some(entry) = manifest.shard(opening.rank).cloned() else {
            return;
        };
        let proven = root_digest(&leaves, entry.length, manifest.chunk) == entry.root;
        if !proven {
            opening.faults.push(RungFault::WrongTable);
            return self.climb(slot);
        }
        opening.open = true;
        opening.deadline = Now(u64::MAX);
        let (id, rung, chunk) = (opening.id, opening.rung, manifest.chunk);
        let whole = opening.ranges.is_empty();
        let name = opening.manifest.name();
        self.slot_mut(slot).used_for = SlotUse::Guest;
        self.forget_part_filled(slot);
        self.out.push(Output::Reply {
            id,
            reply: Reply::ShardOpened {
                length: entry.length,
                chunk,
                leaves: leaves.to_vec(),
                rung,
            },
            descriptor: Some(slot),
        });
        if whole && entry.node == *self.me() {
            self.keep_opened(slot, name, entry.rank, entry.length, leaves, id.conn);
        }
    }

    /// A whole shard of this node is its own again: healed by the way.
    fn keep_opened(
        &mut self,
        slot: SlotId,
        name: Digest,
        rank: Rank,
        length: u64,
        leaves: Arc<[Digest]>,
        conn: ConnId,
    ) {
        let Some(key) = self.by_name.get(&name).cloned() else {
            return;
        };
        self.openings.remove(&slot);
        self.hold_restored(&key, rank, slot, length, leaves);
        let shard = self
            .checkpoints
            .get_mut(&key)
            .and_then(|c| c.shards.get_mut(&rank));
        if let Some(shard) = shard {
            shard.readers.insert(conn);
        }
    }

    fn no_rung_left(&mut self, slot: SlotId) {
        let Some(mut opening) = self.openings.remove(&slot) else {
            return;
        };
        self.drop_slot(slot);
        let record = opening.manifest.manifest();
        let corrupt = opening.faults.iter().any(RungFault::is_corrupt);
        let durable = opening.survey.durable_fault.take();
        let code = match &durable {
            Some(fault) if !fault.is_damage() => RefusalCode::DurableUnavailable,
            Some(_) => RefusalCode::Corrupt,
            None if corrupt => RefusalCode::Corrupt,
            None => RefusalCode::TooManyLost,
        };
        let durable = durable.map(|fault| RungFault::Durable(fault.to_string()));
        opening.faults.extend(durable);
        let text = format!(
            "the shard of rank {} at step {} could not be restored on any rung; tried: [{}]; ask for another plan",
            opening.rank,
            record.step,
            said(&opening.faults)
        );
        self.reply(opening.id, Reply::Refused(Refusal::new(code, text)));
    }

    pub(crate) fn expire_openings(&mut self) {
        let now = self.now;
        let late: Vec<SlotId> = self
            .openings
            .iter()
            .filter(|(_, opening)| opening.deadline <= now)
            .map(|(slot, _)| *slot)
            .collect();
        for slot in late {
            if let Some(opening) = self.openings.remove(&slot) {
                self.end_opening_session(slot);
                self.drop_slot(slot);
                let text = format!(
                    "expected the shard of rank {} in time, it is not here yet; so far: [{}]",
                    opening.rank,
                    said(&opening.faults)
                );
                self.reply(
                    opening.id,
                    Reply::Refused(Refusal::new(RefusalCode::TimedOut, text)),
                );
            }
        }
    }

    fn end_opening_session(&mut self, slot: SlotId) {
        let session = self
            .led
            .iter()
            .find(|(_, led)| led.purpose == SessionGoal::Open(slot))
            .map(|(session, _)| *session);
        if let Some(session) = session {
            let me = self.me().clone();
            self.end_led(session, Err((me, SessionFault::Aborted)));
        }
    }

    pub(crate) fn openings_forget(&mut self, node: &NodeName) {
        for opening in self.openings.values_mut() {
            opening.excluded.insert(node.clone());
        }
    }

    pub(crate) fn close_shard(
        &mut self,
        id: RequestId,
        manifest: Digest,
        rank: Rank,
    ) -> Result<(), Refusal> {
        self.attached(id)?;
        self.drop_guests(|opening| {
            opening.id.conn == id.conn
                && opening.manifest.name() == manifest
                && opening.rank == rank
        });
        if let Some(checkpoint) = self.checkpoint_named(manifest) {
            if let Some(shard) = checkpoint.shards.get_mut(&rank) {
                shard.readers.remove(&id.conn);
            }
            let namespace = checkpoint.key.namespace.clone();
            self.retire_older(&namespace);
        }
        self.reply(id, Reply::Done);
        Ok(())
    }

    pub(crate) fn drop_guests_of(&mut self, conn: ConnId) {
        self.drop_guests(|opening| opening.id.conn == conn);
    }

    fn drop_guests(&mut self, gone: impl Fn(&Opening) -> bool) {
        let slots: Vec<SlotId> = self
            .openings
            .iter()
            .filter(|(_, opening)| gone(opening))
            .map(|(slot, _)| *slot)
            .collect();
        for slot in slots {
            self.openings.remove(&slot);
            self.end_opening_session(slot);
            self.drop_slot(slot);
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
    pub(crate) fn known_manifest(&self, name: Digest) -> Option<Arc<ManifestBytes>> {
        let mut planned = self.planned.iter();
        self.manifest_named(name)
            .or_else(|| planned.find(|known| known.name() == name).cloned())
    }
}

/// The shard's length, if the rank and the ranges are in the checkpoint.
fn check_ranges(
    manifest: &ManifestBytes,
    rank: Rank,
    ranges: &[Range<u64>],
) -> Result<u64, Refusal> {
    let record = manifest.manifest();
    let Some(entry) = record.shard(rank) else {
        return Err(Refusal::new(
            RefusalCode::WorldSize,
            format!(
                "expected a rank below the checkpoint's world size {}, got {rank}",
                record.world_size
            ),
        ));
    };
    let outside = ranges.iter().find(|range| range.end > entry.length);
    match outside {
        Some(range) => Err(Refusal::new(
            RefusalCode::Malformed,
            format!(
                "expected ranges within the {} bytes of rank {rank}'s shard, got {} bytes at {}",
                entry.length,
                range.end - range.start,
                range.start
            ),
        )),
        None => Ok(entry.length),
    }
}

/// Chunks that cover byte ranges, as (first, count), ascending and disjoint; empty for the whole shard.
fn stripes_of(ranges: &[Range<u64>], chunk: ChunkSize) -> Vec<(u64, u64)> {
    let bytes = chunk.bytes() as u64;
    let covering = ranges.iter().filter(|range| !range.is_empty());
    let mut wanted: Vec<Range<u64>> = covering
        .map(|r| r.start / bytes..r.end.div_ceil(bytes))
        .collect();
    wanted.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in wanted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
        .into_iter()
        .map(|range| (range.start, range.end - range.start))
        .collect()
}

fn said(faults: &[RungFault]) -> String {
    let said: Vec<String> = faults.iter().map(RungFault::to_string).collect();
    said.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_disjoint_chunks() {
        let chunk = ChunkSize::new(4096).unwrap();
        assert_eq!(
            stripes_of(&[0..1, 4095..4097, 20000..20001], chunk),
            [(0, 2), (4, 1)]
        );
        assert!(stripes_of(&[], chunk).is_empty());
        let empty = 5..5;
        assert!(stripes_of(std::slice::from_ref(&empty), chunk).is_empty());
    }
}
