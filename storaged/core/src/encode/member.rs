//! Taking part in sessions: find the blocks to read, reserve room for those to keep, run, report. What was kept
//! becomes part of the checkpoint only when the leader closes the session so.

use std::ops::Range;
use std::sync::Arc;

use storaged_codec::root_digest;
use storaged_plan::{Derived, DirtyMap};
use storaged_wire::peer::{
    CheckpointKey, MemberTally, PeerMessage, SessionFault, SessionKind, SessionRecord,
};
use storaged_wire::{Digest, NodeName, Rank, SessionId, SlotId};

use super::begin::{changed, said};
use super::lead::SessionGoal;
use super::tables::TableFetch;
use crate::api::{Now, Output, ParityId, SessionTally, SlotShard, Source};
use crate::budget::Reservation;
use crate::event::Event;
use crate::limits;
use crate::node::Node;
use crate::table::{Checkpoint, LocalShard, SlotUse, Upload};

/// What this member keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kept {
    Nothing,
    Parity {
        index: u32,
        set: ParityId,
        basis: Option<ParityId>,
    },
    Shard {
        rank: Rank,
        slot: SlotId,
        length: u64,
        /// The slot belongs to an opening of this node, which decides what becomes of it.
        opening: bool,
    },
}

/// A session that this node takes part in.
#[derive(Debug, Clone)]
pub(crate) struct Joined {
    pub key: CheckpointKey,
    pub derived: Derived,
    pub member: usize,
    pub source: Option<Source>,
    pub kept: Kept,
    pub phase: MemberPhase,
    /// The tables of chunk digests and fingerprints that its part needs.
    pub fetch: TableFetch,
    pub deadline: Now,
    /// Stripes of the lane.
    pub stripe_count: u64,
    /// Stripes that the executor has put in place.
    pub kept_stripes: Vec<Range<u64>>,
    /// Stripes of the parity set to keep that an earlier session has made.
    pub made: DirtyMap,
    /// What this member needs to move, if it makes a difference.
    needs: Option<DirtyMap>,
}

/// How far a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemberPhase {
    /// Tables are fetched, and room may still be made.
    Preparing { needs_slot: bool },
    /// The leader has been told, and has not begun.
    Ready,
    /// The executor is at it.
    Running,
    /// The executor has done all of this member's part: how it went.
    Finished(MemberTally),
}

impl Joined {
    /// Whether this is a heal of that shard here.
    pub fn heals(&self, of: Rank) -> bool {
        matches!(self.kept, Kept::Shard { rank, opening: false, .. } if rank == of)
    }

    /// Whether the executor is at it.
    pub fn is_running(&self) -> bool {
        self.phase == MemberPhase::Running
    }

    /// Whether the executor has done all of it.
    pub fn is_finished(&self) -> bool {
        matches!(self.phase, MemberPhase::Finished(_))
    }

    /// Whether its slot is still being made.
    fn needs_slot(&self) -> bool {
        self.phase == MemberPhase::Preparing { needs_slot: true }
    }

    /// The parity set that it makes.
    pub fn parity_set(&self) -> Option<ParityId> {
        match &self.kept {
            Kept::Parity { set, .. } => Some(*set),
            Kept::Nothing | Kept::Shard { .. } => None,
        }
    }
}

impl Node {
    pub(crate) fn proposed(&mut self, from: &NodeName, record: SessionRecord) {
        let session = record.session;
        if self.joined.contains_key(&(from.clone(), session)) {
            return self.proposed_again(from, session);
        }
        self.leave_what_this_replaces(from, &record);
        if self.comes_too_early(&record) {
            return self.let_it_wait(from, record);
        }
        match self.join(from, &record) {
            Ok(joined) => {
                self.joined.insert((from.clone(), session), joined);
                self.prepare(from, session);
            }
            Err(fault) => self.send(from, PeerMessage::Failed { session, fault }),
        }
    }

    /// A leader has one session of a lane at a time. Of one that it proposes anew it has ended the one before, whose end was
    /// lost if that is still here: were it kept, each such loss would take the room of a whole block for ten minutes.
    fn leave_what_this_replaces(&mut self, leader: &NodeName, record: &SessionRecord) {
        if planted!("replaced_sessions_kept") {
            return;
        }
        let manifest = self.manifest_named(record.manifest);
        let Some(derived) = manifest.and_then(|manifest| Derived::of(record, &manifest)) else {
            return;
        };
        let Some(key) = self.by_name.get(&record.manifest).cloned() else {
            return;
        };
        let is_opening = self.opening_of(leader, record.session).is_some();
        self.leave_where(|(led_by, _), joined| {
            let same_lane =
                led_by == leader && joined.key == key && joined.derived.lane == derived.lane;
            let is_lane_work = match &joined.kept {
                Kept::Shard { opening, .. } => !opening,
                Kept::Parity { .. } => true,
                Kept::Nothing => false,
            };
            same_lane && is_lane_work && !is_opening
        });
    }

    pub(super) fn say_ready(&mut self, leader: &NodeName, session: SessionId) {
        let Some(joined) = self.joined.get(&(leader.clone(), session)) else {
            return;
        };
        let stripes = joined.needs.as_ref().map(said);
        let ready = PeerMessage::Ready { session, stripes };
        self.send(leader, ready);
    }

    fn join(&mut self, leader: &NodeName, record: &SessionRecord) -> Result<Joined, SessionFault> {
        let manifest = self
            .manifest_named(record.manifest)
            .ok_or(SessionFault::NoManifest)?;
        let derived = Derived::of(record, &manifest).ok_or_else(|| SessionFault::Neighbour {
            node: leader.clone(),
            reason: "the session does not fit the manifest".into(),
        })?;
        let chunk = manifest.manifest().chunk;
        let stripe_count = chunk.count(derived.blocks.length);
        if stripe_count > limits::STRIPES_MAX {
            let most = limits::STRIPES_MAX;
            return Err(SessionFault::Neighbour {
                node: leader.clone(),
                reason: format!("expected at most {most} stripes, got {stripe_count}"),
            });
        }
        let member = derived.members.iter().position(|name| name == self.me());
        let member = member.ok_or(SessionFault::NoBlocks)?;
        let key = self.by_name[&record.manifest].clone();
        let basis = match &record.kind {
            SessionKind::Encode { basis, .. } => *basis,
            SessionKind::Repair { .. } => None,
        };
        let source = match derived.sources.get(member) {
            Some(block) => Some(self.source_block(&key, &derived, *block, basis)?),
            None => None,
        };
        let sink = derived.sink_members.iter().position(|at| *at == member);
        let opening = self.opening_of(leader, record.session);
        let kept_block = sink.map(|sink| derived.sinks[sink]);
        let wanted = self.wanted_tables(&key, &derived, &record.kind, kept_block);
        let fetch = TableFetch::new((record.manifest, manifest.manifest()), wanted, self.now);
        let (kept, needs_slot) = match kept_block {
            Some(block) => self.room_for(opening, &key, &derived, block, basis)?,
            None => (Kept::Nothing, false),
        };
        let made = match kept {
            Kept::Parity { index, .. } => {
                self.take_part_made((record.manifest, derived.lane, index))
            }
            _ => None,
        };
        let made = made.unwrap_or_else(|| DirtyMap::clean(stripe_count));
        let needs = match (&record.kind, &source) {
            (SessionKind::Encode { .. }, Some(Source::Shard { shard, basis })) => {
                let basis = basis.as_ref();
                basis.map(|basis| changed(shard, basis, chunk, stripe_count))
            }
            _ => self.lacking(&kept, &derived, &made),
        };
        Ok(Joined {
            key,
            derived,
            member,
            source,
            kept,
            phase: MemberPhase::Preparing { needs_slot },
            fetch,
            deadline: self
                .now
                .plus(limits::SESSION_STALL_MAX_MS + limits::PROPOSE_MAX_MS),
            stripe_count,
            kept_stripes: Vec::new(),
            made,
            needs,
        })
    }

    fn source_block(
        &self,
        key: &CheckpointKey,
        derived: &Derived,
        block: usize,
        basis: Option<Digest>,
    ) -> Result<Source, SessionFault> {
        let checkpoint = self.checkpoints.get(key).ok_or(SessionFault::NoManifest)?;
        let Some(entry) = derived.blocks.data.get(block) else {
            let index = (block - derived.blocks.data.len()) as u32;
            let set = checkpoint.parity.get(&(derived.lane, index)).copied();
            return Ok(Source::Parity {
                set: set.ok_or(SessionFault::NoBlocks)?,
            });
        };
        let rank = entry.as_ref().ok_or(SessionFault::NoBlocks)?.rank;
        let sealed = checkpoint.shards.get(&rank).and_then(LocalShard::sealed);
        let shard = sealed.ok_or(SessionFault::NoBlocks)?;
        let basis = match basis {
            Some(name) => Some(self.basis_shard(name, rank).ok_or(SessionFault::NoBasis)?),
            None => None,
        };
        Ok(Source::Shard { shard, basis })
    }

    fn basis_shard(&self, name: Digest, rank: Rank) -> Option<SlotShard> {
        let checkpoint = self.checkpoints.get(self.by_name.get(&name)?)?;
        checkpoint.shards.get(&rank)?.sealed()
    }

    /// Reserves room for a block to keep.
    fn room_for(
        &mut self,
        opening: Option<SlotId>,
        key: &CheckpointKey,
        derived: &Derived,
        block: usize,
        basis: Option<Digest>,
    ) -> Result<(Kept, bool), SessionFault> {
        let Some(entry) = derived.blocks.data.get(block) else {
            let index = (block - derived.blocks.data.len()) as u32;
            let name = self.checkpoints.get(key).and_then(Checkpoint::name);
            let block = name.map(|name| (name, derived.lane, index));
            let begun = block.and_then(|block| self.part_made_of(block));
            let kept = self.room_for_parity((key, derived), index, basis, begun)?;
            return Ok((kept, false));
        };
        let shard = entry.as_ref().ok_or(SessionFault::NoBlocks)?;
        let (rank, length) = (shard.rank, shard.length);
        if let Some(slot) = opening {
            return Ok((
                Kept::Shard {
                    rank,
                    slot,
                    length,
                    opening: true,
                },
                false,
            ));
        }
        let manifest = self.checkpoints.get(key).and_then(Checkpoint::name);
        let begun = manifest.and_then(|manifest| self.take_part_filled(manifest, rank));
        if let Some(slot) = begun {
            let kept = Kept::Shard {
                rank,
                slot,
                length,
                opening: false,
            };
            return Ok((kept, false));
        }
        let made = self.create_slot(&key.namespace, rank, length, SlotUse::Restoring);
        let slot = made.map_err(|refusal| SessionFault::NoRoom(refusal.message))?;
        Ok((
            Kept::Shard {
                rank,
                slot,
                length,
                opening: false,
            },
            true,
        ))
    }

    /// The slot that this node opened the session to fill, if it did.
    fn opening_of(&self, leader: &NodeName, session: SessionId) -> Option<SlotId> {
        match self
            .led
            .get(&session)
            .filter(|_| leader == self.me())?
            .purpose
        {
            SessionGoal::Open(slot) => Some(slot),
            _ => None,
        }
    }

    fn room_for_parity(
        &mut self,
        (key, derived): (&CheckpointKey, &Derived),
        index: u32,
        basis: Option<Digest>,
        begun: Option<ParityId>,
    ) -> Result<Kept, SessionFault> {
        let basis = match basis {
            Some(name) => {
                let checkpoint = self
                    .by_name
                    .get(&name)
                    .and_then(|key| self.checkpoints.get(key));
                let set = checkpoint.and_then(|c| c.parity.get(&(derived.lane, index)).copied());
                Some(set.ok_or(SessionFault::NoBasis)?)
            }
            None => None,
        };
        if let Some(set) = begun {
            return Ok(Kept::Parity { index, set, basis });
        }
        let set = ParityId(self.fresh());
        let reserved = self.reserve(
            Reservation::Parity(set),
            derived.blocks.length,
            &key.namespace,
        );
        let reserved = reserved.map_err(|no_room| {
            format!("parity that it keeps for others {no_room}: raise memory.budget there")
        });
        self.note_room(key, self.me().clone(), reserved.as_ref().err());
        reserved.map_err(SessionFault::NoRoom)?;
        Ok(Kept::Parity { index, set, basis })
    }

    /// The digests of a shard's chunks: those that were fetched for a session, or else those that are known here.
    fn leaves_here(&self, joined: &Joined, rank: Rank) -> Option<Arc<[Digest]>> {
        let fetched = joined.fetch.tables().leaves(rank).cloned();
        fetched.or_else(|| self.leaves_known(&joined.key, rank))
    }

    pub(crate) fn session_ended(
        &mut self,
        leader: &NodeName,
        session: SessionId,
        outcome: Result<SessionTally, SessionFault>,
        kept: Vec<Range<u64>>,
    ) {
        let place = (leader.clone(), session);
        let Some(joined) = self.joined.get_mut(&place) else {
            return self.ended_late(&place, kept);
        };
        joined.kept_stripes = kept;
        match outcome {
            Ok(tally) => {
                self.rates.session(&tally);
                let tally = tally.said();
                joined.phase = MemberPhase::Finished(tally.clone());
                self.send(leader, PeerMessage::Finished { session, tally });
            }
            Err(fault) => {
                // The executor is done: nothing is left to stop.
                joined.phase = MemberPhase::Ready;
                if let SessionFault::Corrupt(_) = &fault {
                    self.drop_corrupt(&place);
                }
                self.leave(&place, false);
                self.send(leader, PeerMessage::Failed { session, fault });
            }
        }
    }

    /// A block here that lost its digest is an erasure: it goes, and is healed like any other loss.
    fn drop_corrupt(&mut self, place: &(NodeName, SessionId)) {
        let Some(joined) = self.joined.get(place) else {
            return;
        };
        let safe = self.safe_state();
        let (key, source) = (joined.key.clone(), joined.source.clone());
        let Some(checkpoint) = self.checkpoints.get_mut(&key) else {
            return;
        };
        if checkpoint.state < safe {
            return;
        }
        // What the session began to read may have been replaced meanwhile: then its place is somebody else's by now.
        match source {
            Some(Source::Shard { shard, .. }) => {
                let before = checkpoint.shards.len();
                checkpoint
                    .shards
                    .retain(|_, known| known.slot != shard.slot);
                if checkpoint.shards.len() < before {
                    self.free_slot_again(shard.slot);
                }
            }
            Some(Source::Parity { set }) => {
                let before = checkpoint.parity.len();
                checkpoint.parity.retain(|_, known| *known != set);
                if checkpoint.parity.len() < before {
                    self.drop_parity(set);
                }
            }
            None => {}
        }
        self.report_held(&key);
    }

    pub(crate) fn close(&mut self, from: &NodeName, session: SessionId, kept: bool) {
        let place = (from.clone(), session);
        self.waiting_proposals.remove(&place);
        self.leave(&place, kept);
    }

    /// Ends this node's part: what was kept counts or goes.
    pub(super) fn leave(&mut self, place: &(NodeName, SessionId), counts: bool) {
        let Some(joined) = self.joined.remove(place) else {
            return;
        };
        if joined.is_running() {
            let (leader, session) = place.clone();
            self.out.push(Output::Stop { leader, session });
        }
        let closed_well = counts;
        let counts = counts && self.checkpoints.contains_key(&joined.key);
        let counts = counts && (self.is_whole(&joined) || planted!("part_counts_as_whole"));
        if counts {
            let tables = joined.fetch.tables().clone();
            if let Some(checkpoint) = self.checkpoints.get_mut(&joined.key)
                && matches!(joined.kept, Kept::Parity { .. })
            {
                checkpoint.leaves.extend(tables.leaves);
                checkpoint.prints.extend(tables.prints);
            }
        }
        match joined.kept.clone() {
            Kept::Nothing => {}
            Kept::Parity { index, set, .. } if !counts => {
                self.break_off_parity(place, &joined, (index, set));
            }
            Kept::Parity { index, set, .. } => self.settle_parity(&joined, index, set, counts),
            Kept::Shard {
                opening: true,
                rank,
                slot,
                ..
            } => {
                if !counts {
                    self.break_off(place, &joined, slot, rank, true);
                    if closed_well {
                        self.emit(Event::OpeningIdle(slot));
                    }
                    return;
                }
                self.forget_part_filled(slot);
                let leaves = self.leaves_here(&joined, rank);
                self.emit(Event::OpeningFilled(slot, leaves));
            }
            Kept::Shard { slot, .. } if joined.needs_slot() => self.drop_slot(slot),
            Kept::Shard { rank, slot, .. } if !counts => {
                self.break_off(place, &joined, slot, rank, false);
            }
            Kept::Shard {
                rank, slot, length, ..
            } => {
                self.forget_part_filled(slot);
                self.settle_shard(&joined, rank, slot, length, counts);
            }
        }
    }

    fn settle_parity(&mut self, joined: &Joined, index: u32, set: ParityId, counts: bool) {
        let mut gone = Some(set);
        if counts && let Some(checkpoint) = self.checkpoints.get_mut(&joined.key) {
            gone = checkpoint.parity.insert((joined.derived.lane, index), set);
        }
        if let Some(set) = gone {
            self.budget.release(Reservation::Parity(set));
            self.out.push(Output::DropParity { set });
        }
        self.report_held(&joined.key);
    }

    fn settle_shard(
        &mut self,
        joined: &Joined,
        rank: Rank,
        slot: SlotId,
        length: u64,
        counts: bool,
    ) {
        let leaves = self.leaves_here(joined, rank);
        match leaves.filter(|_| counts) {
            Some(leaves) => self.hold_restored(&joined.key, rank, slot, length, leaves),
            None => self.drop_slot(slot),
        }
    }

    /// A restored shard is one of this node's own again.
    pub(crate) fn hold_restored(
        &mut self,
        key: &CheckpointKey,
        rank: Rank,
        slot: SlotId,
        length: u64,
        leaves: Arc<[Digest]>,
    ) {
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return self.drop_slot(slot);
        };
        let Some(chunk) = checkpoint.manifest.as_ref().map(|m| m.manifest().chunk) else {
            return self.drop_slot(slot);
        };
        // An opening's slot may have gone with its reader before the session's end came.
        if !self.slots.contains_key(&slot) {
            return;
        }
        let root = root_digest(&leaves, length, chunk);
        let shard = LocalShard {
            slot,
            length,
            chunk,
            digests: Some((leaves, root)),
            prints: Arc::default(),
            readers: std::collections::BTreeSet::new(),
            upload: Upload::Idle,
        };
        let replaced = checkpoint.shards.insert(rank, shard);
        self.out.push(Output::Digest {
            slot,
            length,
            chunk,
        });
        let restored = key.clone();
        self.slot_mut(slot).used_for = SlotUse::Sealed(restored.clone());
        if let Some(old) = replaced {
            self.free_slot_again(old.slot);
        }
        self.emit(Event::ShardBack(rank));
        self.start_uploads();
        self.report_held(&restored);
    }

    /// A slot for a healed shard is there, or is not.
    pub(crate) fn joined_has_slot(&mut self, slot: SlotId) {
        let waiting = self.joined.iter().find_map(|(place, joined)| {
            let is_it = matches!(joined.kept, Kept::Shard { slot: kept, .. } if kept == slot);
            (is_it && joined.needs_slot()).then(|| place.clone())
        });
        match waiting {
            Some(place) => {
                if let Some(joined) = self.joined.get_mut(&place) {
                    joined.phase = MemberPhase::Preparing { needs_slot: false };
                }
                self.prepare(&place.0, place.1);
            }
            None => self.drop_slot(slot),
        }
    }

    pub(crate) fn joined_without_slot(&mut self, slot: SlotId, reason: &str) {
        let waiting: Vec<(NodeName, SessionId)> = self
            .joined
            .iter()
            .filter(
                |(_, joined)| matches!(joined.kept, Kept::Shard { slot: kept, .. } if kept == slot),
            )
            .map(|(place, _)| place.clone())
            .collect();
        for (leader, session) in waiting {
            self.joined.remove(&(leader.clone(), session));
            let fault = SessionFault::NoRoom(reason.into());
            self.send(&leader, PeerMessage::Failed { session, fault });
        }
    }

    pub(crate) fn joined_forget(&mut self, leader: &NodeName) {
        self.forget_waiting(leader);
        self.leave_where(|(known, _), _| known == leader);
    }

    pub(crate) fn end_joined_of(&mut self, key: &CheckpointKey) {
        self.leave_where(|_, joined| joined.key == *key);
    }

    pub(crate) fn expire_joined(&mut self) {
        let now = self.now;
        self.leave_where(|_, joined| joined.deadline <= now);
    }

    fn leave_where(&mut self, over: impl Fn(&(NodeName, SessionId), &Joined) -> bool) {
        let places: Vec<(NodeName, SessionId)> = self
            .joined
            .iter()
            .filter(|(place, joined)| over(place, joined))
            .map(|(place, _)| place.clone())
            .collect();
        for place in places {
            self.leave(&place, false);
        }
    }
}
