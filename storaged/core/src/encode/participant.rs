//! Taking part in sessions: find the blocks to read, reserve room for those to keep, run, report. What was kept
//! becomes part of the checkpoint only when the leader closes the session so.

use std::ops::Range;
use std::sync::Arc;

use storaged_codec::root_digest;
use storaged_plan::{Derived, DirtyMap};
use storaged_wire::peer::{CheckpointKey, PeerMessage, SessionFault, SessionKind, SessionRecord};
use storaged_wire::{Digest, NodeName, Rank, SessionId, SlotId};

use super::resume::ParityPlace;
use super::session::{
    Closing, JoinedSession, MemberPhase, Restored, SessionGoal, SessionPlace, SinkState, SlotOwner,
};
use super::stripe_maps::{changed, to_wire};
use super::tables::TableFetch;
use crate::api::{
    DigestCause, HeldBlock, Output, ParityId, SessionTally, SlotShard, Source, Urgency,
};
use crate::budget::Reservation;
use crate::catalog::{Checkpoint, LocalShard, SlotUse, Upload};
use crate::context::Context;
use crate::delta::lane_in_basis;
use crate::encode::Sessions;
use crate::event::Event;
use crate::limits;

impl Sessions {
    /// Whether a session that puts this shard into this node's RAM goes on.
    pub(crate) fn heals(&self, manifest: Digest, rank: Rank, cx: &Context) -> bool {
        let key = cx.by_name.get(&manifest);
        let mut joined = self
            .joined
            .values()
            .filter(|joined| Some(&joined.key) == key);
        joined.any(|joined| joined.heals(rank))
    }

    pub(crate) fn proposed(&mut self, from: &NodeName, record: SessionRecord, cx: &mut Context) {
        // Whose link is not up at this end yet: were it to die now, nobody would say that it went, and its session would stay here for good. It
        // proposes again each second.
        if !cx.is_up(from) && !planted!("proposals_before_the_link") {
            return;
        }
        let session = record.session;
        if self.joined.contains_key(&SessionPlace::of(from, session)) {
            return self.answer_repeated_proposal(from, session, cx);
        }
        self.leave_what_this_replaces(from, &record, cx);
        if from != cx.me() && !self.may_join_one_more_of(from) {
            return;
        }
        if cx.manifest_named(record.manifest).is_none()
            && cx.says_again_that_it_gave_up(record.manifest)
        {
            let fault = SessionFault::NoManifest;
            return cx.send(from, PeerMessage::Failed { session, fault });
        }
        if self.must_defer(&record, cx) {
            return self.defer(from, record, cx.now);
        }
        match self.join(from, &record, cx) {
            Ok(joined) => {
                self.joined.insert(SessionPlace::of(from, session), joined);
                self.prepare(from, session, cx);
            }
            Err(fault) => cx.send(from, PeerMessage::Failed { session, fault }),
        }
    }

    /// A session in which this node keeps nothing replaces no other one of its leader: without end they would fill its memory.
    fn may_join_one_more_of(&self, leader: &NodeName) -> bool {
        let of_leader = self.joined.keys().filter(|place| place.leader == *leader);
        of_leader.count() < limits::SESSIONS_PER_LEADER_MAX || planted!("sessions_without_number")
    }

    /// A leader has one session of a lane at a time. Of one that it proposes anew it has ended the one before, whose end was
    /// lost if that is still here: were it kept, each such loss would take the room of a whole block for ten minutes.
    fn leave_what_this_replaces(
        &mut self,
        leader: &NodeName,
        record: &SessionRecord,
        cx: &mut Context,
    ) {
        if planted!("replaced_sessions_kept") {
            return;
        }
        // Only the lane: a plan of all classes, which the session makes anyway, takes milliseconds at 32 data nodes.
        let lane = match &record.kind {
            SessionKind::Encode { lane, .. } | SessionKind::Repair { lane, .. } => *lane,
        };
        let Some(key) = cx.by_name.get(&record.manifest).cloned() else {
            return;
        };
        let is_opening = self.opening_of(leader, record.session, cx).is_some();
        self.leave_where(
            |place, joined| {
                let same_lane =
                    place.leader == *leader && joined.key == key && joined.derived.lane == lane;
                let is_lane_work = match &joined.kept {
                    SinkState::Shard { belongs_to, .. } => *belongs_to == SlotOwner::Session,
                    SinkState::Parity { .. } => true,
                    SinkState::Nothing => false,
                };
                same_lane && is_lane_work && !is_opening
            },
            cx,
        );
    }

    pub(super) fn say_ready(&mut self, leader: &NodeName, session: SessionId, cx: &mut Context) {
        let Some(joined) = self.joined.get(&SessionPlace::of(leader, session)) else {
            return;
        };
        let stripes = joined.needs.as_ref().map(to_wire);
        let ready = PeerMessage::Ready { session, stripes };
        cx.send(leader, ready);
    }

    fn join(
        &mut self,
        leader: &NodeName,
        record: &SessionRecord,
        cx: &mut Context,
    ) -> Result<JoinedSession, SessionFault> {
        let manifest = cx
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
        let member = derived.members.iter().position(|name| name == cx.me());
        let member = member.ok_or(SessionFault::NoBlocks)?;
        let key = cx.by_name[&record.manifest].clone();
        let basis = match &record.kind {
            SessionKind::Encode { basis, .. } => *basis,
            SessionKind::Repair { .. } => None,
        };
        let source = match derived.sources.get(member) {
            Some(block) => Some(cx.source_block(&key, &derived, *block, basis)?),
            None => None,
        };
        let sink = derived.sink_members.iter().position(|at| *at == member);
        let opening = self.opening_of(leader, record.session, cx);
        let kept_block = sink.map(|sink| derived.sinks[sink]);
        let wanted = cx.wanted_tables(&key, &derived, &record.kind, kept_block);
        let fetch = TableFetch::new(record.manifest, manifest.manifest(), wanted, cx.now);
        let (kept, needs_slot) = match kept_block {
            Some(block) => self.room_for(opening, &key, &derived, block, basis, cx)?,
            None => (SinkState::Nothing, false),
        };
        let made = match kept {
            SinkState::Parity { index, .. } => self.take_part_made(ParityPlace {
                manifest: record.manifest,
                lane: derived.lane,
                index,
            }),
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
        Ok(JoinedSession {
            key,
            urgency: Urgency::of(leader, &derived),
            derived,
            member,
            source,
            kept,
            phase: MemberPhase::Preparing { needs_slot },
            fetch,
            deadline: cx
                .now
                .plus(limits::SESSION_STALL_MAX_MS + limits::PROPOSE_MAX_MS),
            stripe_count,
            kept_stripes: Vec::new(),
            made,
            needs,
        })
    }

    /// Reserves room for a block to keep.
    fn room_for(
        &mut self,
        opening: Option<SlotId>,
        key: &CheckpointKey,
        derived: &Derived,
        block: usize,
        basis: Option<Digest>,
        cx: &mut Context,
    ) -> Result<(SinkState, bool), SessionFault> {
        let Some(entry) = derived.blocks.data.get(block) else {
            let index = (block - derived.blocks.data.len()) as u32;
            let name = cx.checkpoints.get(key).and_then(Checkpoint::name);
            let block = name.map(|manifest| ParityPlace {
                manifest,
                lane: derived.lane,
                index,
            });
            let begun = block.and_then(|block| self.part_made_of(block));
            let kept = cx.room_for_parity(key, derived, index, basis, begun)?;
            return Ok((kept, false));
        };
        let shard = entry.as_ref().ok_or(SessionFault::NoBlocks)?;
        let (rank, length) = (shard.rank, shard.length);
        if let Some(slot) = opening {
            return Ok((
                SinkState::Shard {
                    rank,
                    slot,
                    length,
                    belongs_to: SlotOwner::Opening,
                },
                false,
            ));
        }
        let manifest = cx.checkpoints.get(key).and_then(Checkpoint::name);
        let begun = manifest.and_then(|manifest| self.take_part_filled(manifest, rank));
        if let Some(slot) = begun {
            let kept = SinkState::Shard {
                rank,
                slot,
                length,
                belongs_to: SlotOwner::Session,
            };
            return Ok((kept, false));
        }
        let made = cx.create_slot(&key.namespace, rank, length, SlotUse::Repairing);
        let slot = made.map_err(|refusal| SessionFault::NoRoom(refusal.message))?;
        Ok((
            SinkState::Shard {
                rank,
                slot,
                length,
                belongs_to: SlotOwner::Session,
            },
            true,
        ))
    }

    /// The slot that this node opened the session to fill, if it did.
    fn opening_of(&self, leader: &NodeName, session: SessionId, cx: &Context) -> Option<SlotId> {
        match self
            .led
            .get(&session)
            .filter(|_| leader == cx.me())?
            .purpose
        {
            SessionGoal::Open(slot) => Some(slot),
            _ => None,
        }
    }

    pub(crate) fn session_ended(
        &mut self,
        leader: &NodeName,
        session: SessionId,
        outcome: Result<SessionTally, SessionFault>,
        kept: Vec<Range<u64>>,
        cx: &mut Context,
    ) {
        let place = SessionPlace::of(leader, session);
        let Some(joined) = self.joined.get_mut(&place) else {
            return self.ended_late(&place, kept, cx);
        };
        joined.kept_stripes = kept;
        match outcome {
            Ok(tally) => {
                // What nobody waited for was perhaps held back beside a save: that says nothing of how long a reader would wait.
                if joined.derived.shape.is_none() || joined.urgency == Urgency::Awaited {
                    let sinks = joined.derived.sinks.len();
                    cx.rates.session(&tally, sinks, cx.now);
                }
                let tally = tally.said();
                joined.phase = MemberPhase::Finished(tally.clone());
                cx.send(leader, PeerMessage::Finished { session, tally });
            }
            Err(fault) => {
                // The executor is done: nothing is left to stop.
                joined.phase = MemberPhase::Ready;
                // Kept, it would be offered as a source again, and every session with it would fail the same way.
                if let SessionFault::Corrupt(_) = &fault {
                    self.drop_corrupt(&place, cx);
                }
                self.leave(&place, Closing::BrokenOff, cx);
                cx.send(leader, PeerMessage::Failed { session, fault });
            }
        }
    }

    /// A block here that lost its digest is an erasure: it goes, and is healed like any other loss.
    fn drop_corrupt(&mut self, place: &SessionPlace, cx: &mut Context) {
        let Some(joined) = self.joined.get(place) else {
            return;
        };
        let safe = cx.safe_state();
        let (key, source) = (joined.key.clone(), joined.source.clone());
        let Some(checkpoint) = cx.checkpoints.get(&key) else {
            return;
        };
        if checkpoint.state < safe {
            return;
        }
        // What the session began to read may have been replaced meanwhile: then its place is somebody else's by now.
        let gone = match source {
            Some(Source::Shard { shard, .. }) => {
                let mut shards = checkpoint.shards.iter();
                let found = shards.find(|(_, known)| known.slot == shard.slot);
                found.map(|(rank, _)| HeldBlock::Shard(*rank, shard.slot))
            }
            Some(Source::Parity { set }) => {
                let mut parity = checkpoint.parity.iter();
                let found = parity.find(|(_, known)| **known == set);
                found.map(|((lane, index), _)| HeldBlock::Parity(*lane, *index, set))
            }
            None => None,
        };
        if let Some(block) = gone {
            // Others read it too: its memory goes, and is nobody else's.
            cx.take_away(&key, block);
            self.block_lost(&key, block, cx);
            cx.emit(Event::RottenSource(key.clone(), block));
        }
        cx.report_held(&key);
    }

    pub(crate) fn close(
        &mut self,
        from: &NodeName,
        session: SessionId,
        closing: Closing,
        cx: &mut Context,
    ) {
        let place = SessionPlace::of(from, session);
        self.deferred_proposals.remove(&place);
        self.leave(&place, closing, cx);
    }

    /// Ends this node's part: what was kept counts or goes.
    pub(super) fn leave(&mut self, place: &SessionPlace, closing: Closing, cx: &mut Context) {
        let Some(joined) = self.joined.remove(place) else {
            return;
        };
        // Before its blocks are given back: an executor that still reads a slot would code the next step's bytes.
        if joined.is_running() {
            let SessionPlace { leader, session } = place.clone();
            cx.out.push(Output::Stop { leader, session });
        }
        let closed_well = closing == Closing::Done;
        // Any peer may say that a session of its own has gone well. Were that believed before this node has done its part, parity of which
        // nothing was made would take the place of what is there.
        let is_done = joined.is_finished() || planted!("undone_parts_count");
        let counts = closed_well && is_done && cx.checkpoints.contains_key(&joined.key);
        let counts = counts && (self.is_whole(&joined) || planted!("part_counts_as_whole"));
        if counts {
            let tables = joined.fetch.tables().clone();
            if let Some(checkpoint) = cx.checkpoints.get_mut(&joined.key)
                && matches!(joined.kept, SinkState::Parity { .. })
            {
                checkpoint.leaves.extend(tables.leaves);
                checkpoint.prints.extend(tables.prints);
            }
        }
        match joined.kept.clone() {
            SinkState::Nothing => {}
            SinkState::Parity { index, set, .. } if !counts => {
                self.break_off_parity(place, &joined, index, set, cx);
            }
            SinkState::Parity { index, set, .. } => cx.settle_parity(&joined, index, set),
            SinkState::Shard {
                belongs_to: SlotOwner::Opening,
                rank,
                slot,
                ..
            } => {
                if !counts {
                    self.break_off(place, &joined, slot, rank, SlotOwner::Opening, cx);
                    if closed_well {
                        cx.emit(Event::OpeningIdle(slot));
                    }
                    return;
                }
                self.forget_part_filled(slot);
                let leaves = cx.leaves_here(&joined, rank);
                cx.emit(Event::OpeningFilled(slot, leaves));
            }
            SinkState::Shard { slot, .. } if joined.needs_slot() => cx.drop_slot(slot),
            SinkState::Shard { rank, slot, .. } if !counts => {
                self.break_off(place, &joined, slot, rank, SlotOwner::Session, cx);
            }
            SinkState::Shard {
                rank, slot, length, ..
            } => {
                self.forget_part_filled(slot);
                cx.settle_shard(&joined, rank, slot, length);
            }
        }
    }

    /// A slot for a healed shard is there, or is not.
    pub(crate) fn joined_has_slot(&mut self, slot: SlotId, cx: &mut Context) {
        let waiting = self.joined.iter().find_map(|(place, joined)| {
            let is_it = matches!(joined.kept, SinkState::Shard { slot: kept, .. } if kept == slot);
            (is_it && joined.needs_slot()).then(|| place.clone())
        });
        match waiting {
            Some(place) => {
                if let Some(joined) = self.joined.get_mut(&place) {
                    joined.phase = MemberPhase::Preparing { needs_slot: false };
                }
                self.prepare(&place.leader, place.session, cx);
            }
            None => cx.drop_slot(slot),
        }
    }

    pub(crate) fn joined_without_slot(&mut self, slot: SlotId, reason: &str, cx: &mut Context) {
        let waiting: Vec<SessionPlace> = self
            .joined
            .iter()
            .filter(
                |(_, joined)| matches!(joined.kept, SinkState::Shard { slot: kept, .. } if kept == slot),
            )
            .map(|(place, _)| place.clone())
            .collect();
        for place in waiting {
            self.joined.remove(&place);
            let SessionPlace { leader, session } = place;
            let fault = SessionFault::NoRoom(reason.into());
            cx.send(&leader, PeerMessage::Failed { session, fault });
        }
    }

    pub(crate) fn joined_forget(&mut self, leader: &NodeName, cx: &mut Context) {
        self.forget_waiting(leader);
        self.leave_where(|place, _| place.leader == *leader, cx);
    }

    pub(crate) fn end_joined_of(&mut self, key: &CheckpointKey, cx: &mut Context) {
        self.leave_where(|_, joined| joined.key == *key, cx);
    }

    pub(crate) fn expire_joined(&mut self, cx: &mut Context) {
        let now = cx.now;
        self.leave_where(|_, joined| joined.deadline <= now, cx);
        self.expire_deferred(now);
    }

    fn leave_where(
        &mut self,
        over: impl Fn(&SessionPlace, &JoinedSession) -> bool,
        cx: &mut Context,
    ) {
        let places: Vec<SessionPlace> = self
            .joined
            .iter()
            .filter(|(place, joined)| over(place, joined))
            .map(|(place, _)| place.clone())
            .collect();
        for place in places {
            self.leave(&place, Closing::BrokenOff, cx);
        }
    }
}

impl Context {
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

    fn room_for_parity(
        &mut self,
        key: &CheckpointKey,
        derived: &Derived,
        index: u32,
        basis: Option<Digest>,
        begun: Option<ParityId>,
    ) -> Result<SinkState, SessionFault> {
        let basis = match basis {
            Some(name) => {
                let checkpoint = self
                    .by_name
                    .get(&name)
                    .and_then(|key| self.checkpoints.get(key));
                let set = checkpoint.and_then(|basis| {
                    let lane = lane_in_basis(basis.manifest.as_ref()?, &derived.blocks)?;
                    basis.parity.get(&(lane, index)).copied()
                });
                Some(set.ok_or(SessionFault::NoBasis)?)
            }
            None => None,
        };
        if let Some(set) = begun {
            return Ok(SinkState::Parity { index, set, basis });
        }
        if let Some(reason) = self.is_held_off(key) {
            self.note_room(key, self.me().clone(), Some(&reason));
            return Err(SessionFault::NoRoom(reason));
        }
        let set = ParityId(self.fresh());
        let (purpose, length) = (Reservation::Parity(set), derived.blocks.length);
        let mut reserved = self.reserve(purpose, length, &key.namespace);
        if reserved.is_err() && self.drop_free_slots_beside_two(&key.namespace) {
            reserved = self.reserve(purpose, length, &key.namespace);
        }
        if reserved.is_err() {
            self.have_parity_yield(key);
        }
        let reserved = reserved.map_err(|no_room| {
            let pins = self.pins_in_words(&key.namespace);
            format!("parity that it keeps for others {no_room}: raise memory.budget there{pins}")
        });
        self.note_room(key, self.me().clone(), reserved.as_ref().err());
        reserved.map_err(SessionFault::NoRoom)?;
        Ok(SinkState::Parity { index, set, basis })
    }

    /// The digests of a shard's chunks: those that were fetched for a session, or else those that are known here.
    pub(super) fn leaves_here(&self, joined: &JoinedSession, rank: Rank) -> Option<Arc<[Digest]>> {
        let fetched = joined.fetch.tables().leaves(rank).cloned();
        fetched.or_else(|| self.leaves_known(&joined.key, rank))
    }

    fn settle_parity(&mut self, joined: &JoinedSession, index: u32, set: ParityId) {
        let mut gone = Some(set);
        if let Some(checkpoint) = self.checkpoints.get_mut(&joined.key) {
            gone = checkpoint.parity.insert((joined.derived.lane, index), set);
        }
        if let Some(set) = gone {
            self.drop_parity(set);
        }
        self.report_held(&joined.key);
    }

    fn settle_shard(&mut self, joined: &JoinedSession, rank: Rank, slot: SlotId, length: u64) {
        let is_held = self.sealed_shard(&joined.key, rank).is_some();
        match self.leaves_here(joined, rank).filter(|_| !is_held) {
            Some(leaves) => {
                let restored = Restored {
                    rank,
                    slot,
                    length,
                    leaves,
                };
                self.hold_restored(&joined.key, restored);
            }
            None => {
                self.drop_slot(slot);
                self.emit(Event::RoomMade);
                self.report_held(&joined.key);
            }
        }
    }

    /// A shard that is held here, once its digests are known.
    pub(crate) fn sealed_shard(&self, key: &CheckpointKey, rank: Rank) -> Option<SlotShard> {
        let checkpoint = self.checkpoints.get(key)?;
        checkpoint.shards.get(&rank)?.sealed()
    }

    /// A restored shard is one of this node's own again. No session reads from what it had instead.
    pub(crate) fn hold_restored(&mut self, key: &CheckpointKey, restored: Restored) {
        let Restored {
            rank,
            slot,
            length,
            leaves,
        } = restored;
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return self.drop_slot(slot);
        };
        let Some(chunk) = checkpoint.manifest.as_ref().map(|m| m.manifest().chunk) else {
            return self.drop_slot(slot);
        };
        // An opening's slot may have gone with its reader before the session's end came.
        let Some(entry) = self.slots.get_mut(&slot) else {
            return;
        };
        let mut readers = std::mem::take(&mut entry.readers_before);
        let mut upload = Upload::Idle;
        let replaced = checkpoint.shards.remove(&rank);
        if let Some(old) = &replaced {
            // They have the step open as before. An upload that runs goes on with the memory that it has, and says how it ended.
            readers.extend(&old.readers);
            upload = old.upload;
        }
        let root = root_digest(&leaves, length, chunk);
        let shard = LocalShard {
            sealed_at: self.now,
            slot,
            length,
            chunk,
            digests: Some((leaves, root)),
            prints: Arc::default(),
            readers,
            upload,
        };
        checkpoint.shards.insert(rank, shard);
        self.out.push(Output::Digest {
            slot,
            length,
            chunk,
            cause: DigestCause::Restored,
        });
        let restored = key.clone();
        self.slot_mut(slot).used_for = SlotUse::Sealed(restored.clone());
        if let Some(old) = replaced {
            // Nobody else is given it: readers and an upload may be at it still.
            self.drop_slot(old.slot);
            self.emit(Event::RoomMade);
        }
        self.emit(Event::ShardBack(rank));
        self.start_uploads();
        self.report_held(&restored);
    }
}
