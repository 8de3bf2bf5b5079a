//! Policy of the verb *stage*: who may stage, which slot they get, and when a shard counts as staged. What becomes
//! of staged shards until the checkpoint commits is in `commit`.

mod announce;
mod boards;
mod commit;
mod evidence;
mod giving_way;
mod hear;
mod identify;
mod kept_steps;
mod late_word;
mod left_behind;
mod lifetime;
mod manifest_key;
mod notify;
mod parity_room;
mod pins;
mod retire;
mod room;
mod rotate;
mod slots;
mod waiters;

pub use slots::SLOT_GRAIN_BYTES;

use identify::Identity;
pub(crate) use lifetime::{Drops, Lifetimes, Trainers};
pub(crate) use pins::{PinOrders, nothing_removed};
pub(crate) use retire::cut;
pub(crate) use slots::slot_capacity;
pub(crate) use waiters::Waiters;

use std::collections::BTreeSet;
use std::sync::Arc;

use storaged_codec::Fingerprint;
use storaged_wire::local::{
    LOCAL_VERSION, Reply, Role, TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, is_token_length,
};
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{
    CheckpointState, Digest, Namespace, Owner, Rank, Refusal, RefusalCode, RunId, SlotId, Step,
    Succession, WorldSize,
};

use crate::api::{ConnId, DigestCause, DigestTally, HeldBlock, Note, Output, RequestId};
use crate::catalog::{
    Attached, Checkpoint, Claim, End, LocalShard, NamespaceTable, Slot, SlotUse, Upload, Waiter,
    WaiterWish,
};
use crate::context::Context;
use crate::event::Event;
use crate::limits;
use crate::place::{RunStanding, wrong_token};
use crate::successions::{EarlyHello, SaidHello, SaidToken, WordOfChanges};

/// What a trainer says of itself.
#[derive(Debug, Clone)]
pub(crate) struct TrainerHello {
    pub namespace: Namespace,
    pub owner: Owner,
    pub said: Option<SaidToken>,
    /// Of who came before this node had heard of the job.
    pub early: Option<EarlyHello>,
    pub run: RunId,
    pub rank: Rank,
    pub world_size: WorldSize,
}

impl Context {
    /// Lets somebody in. A trainer whose run nobody here has heard of comes back: it waits until it is known.
    pub(crate) fn hello(
        &mut self,
        said: &SaidHello,
        found: &[Succession],
        tier: WordOfChanges,
    ) -> Result<Option<TrainerHello>, Refusal> {
        let SaidHello {
            id,
            version,
            namespace,
            token,
            role,
        } = said.clone();
        if version != LOCAL_VERSION {
            return Err(Refusal::new(
                RefusalCode::Version,
                format!(
                    "expected local protocol version {LOCAL_VERSION}, got {version}: install the SDK of this daemon's release"
                ),
            ));
        }
        let namespace = self.viewer(id.conn).resolve(&namespace)?;
        check_token(&token)?;
        let identity = self.identify(id.conn, &namespace, &token, &role, found)?;
        self.keys_said(id.conn, &namespace, &identity);
        let Identity { owner, said, .. } = identity;
        let is_early = !self.has_heard_of(&namespace);
        let early = EarlyHello {
            token,
            role: role.clone(),
            tier,
        };
        let early = is_early.then_some(early);
        let Role::Trainer {
            run,
            rank,
            world_size,
        } = role
        else {
            let reader = Attached {
                namespace,
                owner,
                said,
                early,
                trainer: None,
                slots_passed: BTreeSet::new(),
                refused_slot: None,
            };
            self.attach(id, reader);
            return Ok(None);
        };
        if !world_size.holds(rank) {
            return Err(Refusal::new(
                RefusalCode::WorldSize,
                format!("expected a rank below the world size {world_size}, got {rank}"),
            ));
        }
        let hello = TrainerHello {
            namespace,
            owner,
            said,
            early,
            run,
            rank,
            world_size,
        };
        match self.standing(&hello.namespace, run) {
            RunStanding::Fenced | RunStanding::Known => self.admit(id, hello)?,
            RunStanding::Unknown if planted!("unknown_run_admitted") => self.admit(id, hello)?,
            RunStanding::Unknown => return Ok(Some(hello)),
        }
        Ok(None)
    }

    /// A namespace belongs to the token that first used it.
    pub(crate) fn check_owner(&self, namespace: &Namespace, owner: Owner) -> Result<(), Refusal> {
        match self.owner_of(namespace) {
            Some(known) if known != owner => Err(wrong_token(namespace)),
            _ => Ok(()),
        }
    }

    /// Whether what one peer says of a job's owner goes with what is known here, and takes no boards away.
    pub(crate) fn may_be_its(&self, namespace: &Namespace, owner: Owner) -> bool {
        self.check_owner(namespace, owner).is_ok() && !self.has_boards_of_another(namespace, owner)
    }

    /// Whether a trainer that has waited for its run said a token that opens the job. It may have turned out to be another one's meanwhile,
    /// or one that was changed for this one.
    pub(crate) fn check_waiting(
        &mut self,
        id: RequestId,
        hello: &mut TrainerHello,
    ) -> Result<(), Refusal> {
        self.check_not_retired(&hello.namespace, hello.said)?;
        let Err(refusal) = self.check_told_owner(&hello.namespace, hello.owner) else {
            return Ok(());
        };
        let early = hello.early.as_ref().ok_or(refusal)?;
        let (owner, said) = self.identify_again(id.conn, &hello.namespace, early)?;
        (hello.owner, hello.said) = (owner, said);
        self.check_told_owner(&hello.namespace, hello.owner)
    }

    /// One peer's word lets a trainer into a run: its owner's, and nobody else's.
    fn check_told_owner(&self, namespace: &Namespace, owner: Owner) -> Result<(), Refusal> {
        match self.told_owner_of(namespace) {
            Some(told) if told != owner => Err(wrong_token(namespace)),
            _ => Ok(()),
        }
    }

    /// Lets a trainer in whose run was opened.
    pub(crate) fn admit(&mut self, id: RequestId, mut hello: TrainerHello) -> Result<(), Refusal> {
        if !planted!("waiting_trainers_are_owners") {
            self.check_waiting(id, &mut hello)?;
        }
        let TrainerHello {
            namespace,
            owner,
            said,
            run,
            rank,
            world_size,
            ..
        } = hello;
        self.check_fence(&namespace, run)?;
        let known = self
            .namespaces
            .get(&namespace)
            .and_then(|table| table.world_sizes.get(&run).copied());
        if let Some(known) = known.filter(|known| *known != world_size) {
            return Err(Refusal::new(
                RefusalCode::WorldSize,
                format!(
                    "run {run} of {namespace} has world size {known}, got {world_size}: every rank of a run must say the same"
                ),
            ));
        }
        self.raise_fence(&namespace, owner, run);
        let table = self.namespace_table(&namespace, owner);
        table.world_sizes.insert(run, world_size);
        table.world_sizes.retain(|known, _| *known >= run);
        table.last_step.retain(|(known, _), _| *known >= run);
        self.keep_key(id.conn, &namespace);
        let trainer = Attached {
            namespace,
            owner,
            said,
            early: None,
            trainer: Some((run, rank, world_size)),
            slots_passed: BTreeSet::new(),
            refused_slot: None,
        };
        self.attach(id, trainer);
        Ok(())
    }

    fn attach(&mut self, id: RequestId, attached: Attached) {
        self.conns.insert(id.conn, attached);
        let reply = Reply::Welcome {
            node: self.me().clone(),
            generation: self.setup.generation,
            geometry: self.setup.geometry,
            chunk: self.setup.chunk,
        };
        self.reply(id, reply);
    }

    pub(crate) fn namespace_table(
        &mut self,
        namespace: &Namespace,
        owner: Owner,
    ) -> &mut NamespaceTable {
        self.keeping.touch_job(namespace);
        self.pass_boards_to(namespace, owner);
        let table = self.namespaces.get(namespace);
        let mut promised = RunId::ZERO;
        if table.is_some_and(|it| it.owner != owner && self.is_hearsay(namespace, it)) {
            self.drop_boards(namespace);
            let before = self.namespaces.remove(namespace);
            // A number that was promised stays: two runs never have the same one.
            promised = before.map_or(promised, |it| it.promised);
        }
        let table = self.namespaces.entry(namespace.clone());
        let table = table.or_insert_with(|| NamespaceTable::new(owner));
        table.promised = table.promised.max(promised);
        table.claim = Claim::Held;
        table
    }

    pub(crate) fn trainer(
        &self,
        id: RequestId,
    ) -> Result<(Attached, RunId, Rank, WorldSize), Refusal> {
        let attached = self.attached(id)?;
        let Some((run, rank, world_size)) = attached.trainer else {
            return Err(Refusal::new(
                RefusalCode::NotAttached,
                "expected a connection with the trainer role, got a reader's: only trainers save",
            ));
        };
        self.check_fence(&attached.namespace, run)?;
        Ok((attached.clone(), run, rank, world_size))
    }

    /// A shard of more chunks could be saved, and by nobody read.
    pub(crate) fn check_shard_length(&self, length: u64) -> Result<(), Refusal> {
        let chunk = self.setup.chunk;
        if chunk.count(length) <= limits::SHARD_CHUNKS_MAX {
            return Ok(());
        }
        let most = limits::SHARD_CHUNKS_MAX * chunk.bytes() as u64;
        Err(Refusal::new(
            RefusalCode::ShardTooLong,
            format!(
                "expected a shard of at most {most} bytes, which is {} chunks of {}, got {length}: raise coding.chunk",
                limits::SHARD_CHUNKS_MAX,
                chunk.bytes()
            ),
        ))
    }

    pub(crate) fn seal(
        &mut self,
        id: RequestId,
        slot: SlotId,
        step: Step,
        length: u64,
    ) -> Result<(), Refusal> {
        let (attached, run, rank, world_size) = self.trainer(id)?;
        let held = self.slot_to_seal(id.conn, slot, &attached.namespace, rank)?;
        let capacity = held.capacity;
        if length > capacity {
            return Err(Refusal::new(
                RefusalCode::ShardTooLong,
                format!(
                    "expected a shard of at most {capacity} bytes in slot {slot}, got {length}: acquire a larger slot"
                ),
            ));
        }
        self.check_shard_length(length)?;
        let chunk = self.setup.chunk;
        let upload = self.take_step(&attached, run, rank, step)?;
        let key = CheckpointKey {
            namespace: attached.namespace,
            run,
            step,
        };
        self.slot_mut(slot).used_for = SlotUse::Sealed(key.clone());
        let sealed_at = self.now;
        let checkpoint = self.checkpoint_entry(&key, attached.owner, world_size);
        checkpoint.take_news(sealed_at);
        checkpoint.shards.insert(
            rank,
            LocalShard {
                slot,
                length,
                chunk,
                digests: None,
                prints: Arc::default(),
                readers: BTreeSet::new(),
                upload,
                sealed_at,
            },
        );
        self.out.push(Output::Digest {
            slot,
            length,
            chunk,
            cause: DigestCause::Saved,
        });
        self.reply(id, Reply::Done);
        let state = CheckpointState::Staged;
        self.note(Note::State {
            key: key.clone(),
            state,
        });
        self.wake(&key);
        self.give_up_excess(&key);
        Ok(())
    }

    /// Steps of a run rise. Where none came before, the trainer may have sealed this very step, and its upload begun, before the
    /// daemon was restarted or had forgotten the job.
    fn take_step(
        &mut self,
        attached: &Attached,
        run: RunId,
        rank: Rank,
        step: Step,
    ) -> Result<Upload, Refusal> {
        let table = self.namespace_table(&attached.namespace, attached.owner);
        let last = table.last_step.get(&(run, rank)).copied();
        if let Some(last) = last.filter(|last| *last >= step && !planted!("older_step_sealed")) {
            return Err(Refusal::new(
                RefusalCode::StepNotNewer,
                format!(
                    "expected a step above {last} (the last one of run {run}, rank {rank}), got {step}"
                ),
            ));
        }
        table.last_step.insert((run, rank), step);
        match last {
            None if !planted!("first_steps_leave_nothing") => Ok(Upload::Idle),
            _ => Ok(Upload::Fresh),
        }
    }

    /// Bounds the checkpoints of one namespace that wait for their commit.
    fn give_up_excess(&mut self, newest: &CheckpointKey) {
        let waiting: Vec<CheckpointKey> = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == newest.namespace && c.manifest.is_none())
            .map(|c| c.key.clone())
            .collect();
        let excess = waiting.len().saturating_sub(limits::UNCOMMITTED_MAX);
        for key in waiting.into_iter().take(excess) {
            self.abandon(
                &key,
                "more than 8 newer steps were sealed before it committed",
            );
        }
    }

    pub(crate) fn digested(
        &mut self,
        slot: SlotId,
        leaves: Arc<[Digest]>,
        root: Digest,
        prints: Arc<[Fingerprint]>,
        tally: &DigestTally,
    ) {
        self.rates.digest(tally);
        let digests = (leaves, root);
        let was_kept = self.keeping.trust(slot);
        let Some(key) = self.sealed_key(slot) else {
            return;
        };
        self.keeping.touch(&key);
        let Some(checkpoint) = self.checkpoints.get_mut(&key) else {
            return;
        };
        let mut shards = checkpoint.shards.iter_mut();
        let Some((rank, shard)) = shards.find(|(_, shard)| shard.slot == slot) else {
            return;
        };
        match &shard.digests {
            // Kept by an earlier daemon, or put back by a session, and not what it was any more.
            Some(known) if *known != digests => {
                let rotten = changed_chunks(&known.0, &digests.0);
                let block = HeldBlock::Shard(*rank, slot);
                if !(was_kept && planted!("kept_rot_counted")) {
                    self.emit(Event::Rotten(key, block, rotten));
                }
            }
            known => {
                let is_new = known.is_none();
                shard.digests = Some(digests);
                shard.prints = prints;
                if is_new {
                    self.announce(&key);
                }
            }
        }
    }

    pub(crate) fn digest_failed(&mut self, slot: SlotId, reason: &str) {
        let Some(key) = self.sealed_key(slot) else {
            return;
        };
        let shards = self.checkpoints.get(&key).map(|c| &c.shards);
        let waits = |shard: &LocalShard| shard.slot == slot && shard.digests.is_none();
        if shards.is_some_and(|shards| shards.values().any(waits)) {
            self.abandon_everywhere(&key, &format!("digesting the shard failed: {reason}"));
        }
    }

    fn sealed_key(&self, slot: SlotId) -> Option<CheckpointKey> {
        match &self.slots.get(&slot)?.used_for {
            SlotUse::Sealed(key) => Some(key.clone()),
            _ => None,
        }
    }

    pub(crate) fn wait(
        &mut self,
        id: RequestId,
        run: RunId,
        step: Step,
        state: CheckpointState,
        timeout_ms: u32,
    ) -> Result<(), Refusal> {
        let namespace = self.attached(id)?.namespace.clone();
        let key = CheckpointKey {
            namespace,
            run,
            step,
        };
        self.add_waiter(
            id,
            u64::from(timeout_ms),
            WaiterWish::State {
                key: key.clone(),
                state,
            },
        )?;
        self.wake(&key);
        Ok(())
    }

    pub(crate) fn add_waiter(
        &mut self,
        id: RequestId,
        timeout_ms: u64,
        wish: WaiterWish,
    ) -> Result<(), Refusal> {
        if self.waiters.len() >= limits::WAITERS_MAX {
            let text = format!(
                "expected at most {} waiting requests, got one more: try again",
                limits::WAITERS_MAX
            );
            return Err(Refusal::new(RefusalCode::Busy, text));
        }
        let deadline = self.now.plus(timeout_ms.min(limits::REQUEST_MAX_MS));
        self.waiters.push(Waiter { id, deadline, wish });
        Ok(())
    }

    /// Answers those who wait for this checkpoint, if it is where they want it or never will be.
    pub(crate) fn wake(&mut self, key: &CheckpointKey) {
        for waiter in self.waiters.take_for_step(key) {
            // Whose the job is may not have been known when it began to wait.
            let refused = self.check_asker(waiter.id.conn).err().map(Reply::Refused);
            let answer = refused.or_else(|| match &waiter.wish {
                WaiterWish::State { key, state } => self.answer_to_wait(key, *state),
                WaiterWish::Slot { .. } => None,
            });
            match answer {
                Some(reply) => self.reply(waiter.id, reply),
                None => self.waiters.push(waiter),
            }
        }
    }

    fn answer_to_wait(&self, key: &CheckpointKey, wanted: CheckpointState) -> Option<Reply> {
        if let Some(checkpoint) = self.checkpoints.get(key) {
            let (state, manifest) = (checkpoint.state, checkpoint.name());
            let bears = self.bears_if_known(checkpoint);
            let reached = Reply::Reached {
                state,
                manifest,
                bears,
            };
            return if state >= wanted {
                Some(reached)
            } else {
                let never = self.never_durable(checkpoint, wanted);
                let never = never.or_else(|| self.never_protected(checkpoint, wanted));
                never.map(Reply::Refused)
            };
        }
        if let Some(end) = self.ends.of(key) {
            return Some(answer_of_end(key, end, wanted));
        }
        let table = self.namespaces.get(&key.namespace)?;
        let reason = table.abandoned.get(&(key.run, key.step))?;
        Some(Reply::Refused(Refusal::new(
            RefusalCode::Abandoned,
            format!(
                "step {} of run {} was given up before it was {wanted}: {reason}",
                key.step, key.run
            ),
        )))
    }

    /// Why a committed checkpoint will not become durable, if it will not.
    fn never_durable(&self, checkpoint: &Checkpoint, wanted: CheckpointState) -> Option<Refusal> {
        if wanted != CheckpointState::Durable || checkpoint.manifest.is_none() {
            return None;
        }
        let reason = if let Some(reason) = &checkpoint.owing.given_up {
            format!("its durable copy was given up: {reason}")
        } else if self.wants_durable(checkpoint) {
            return None;
        } else {
            self.why_not_wanted(checkpoint)
        };
        let (run, step) = (checkpoint.key.run, checkpoint.key.step);
        let text = format!("step {step} of run {run} will not be durable: {reason}");
        Some(Refusal::new(RefusalCode::DurableUnavailable, text))
    }

    pub(crate) fn expire_waiters(&mut self) {
        if planted!("waiters_wait_for_ever") {
            return;
        }
        for mut waiter in self.waiters.take_late(self.now) {
            if let Some(deadline) = self.room_comes_by(&waiter) {
                waiter.deadline = deadline;
                self.waiters.push(waiter);
                continue;
            }
            let refusal = self.late_refusal(&waiter);
            self.reply(waiter.id, Reply::Refused(refusal));
        }
    }

    fn late_refusal(&mut self, waiter: &Waiter) -> Refusal {
        match &waiter.wish {
            WaiterWish::Slot {
                bytes,
                lacking_since,
                ..
            } => {
                self.note_refused_slot(waiter.id.conn, *lacking_since);
                self.late_for_slot(waiter.id, *bytes)
            }
            WaiterWish::State { key, state } => {
                let checkpoint = self.checkpoints.get(key);
                let now = checkpoint.map_or("unknown here", |c| c.state.as_str());
                let tier = checkpoint.filter(|_| *state == CheckpointState::Durable);
                let tier = tier.and_then(|c| c.owing.failed.as_ref());
                let tier = tier.map_or(String::new(), |said| format!("; the durable tier: {said}"));
                Refusal::new(
                    RefusalCode::TimedOut,
                    format!(
                        "expected step {} of run {} to be {state} in time, it is {now}{}{tier}",
                        key.step,
                        key.run,
                        self.why_not_yet(key)
                    ),
                )
            }
        }
    }

    pub(crate) fn client_gone(&mut self, conn: ConnId) {
        let attached = self.conns.remove(&conn);
        self.viewers.remove(&conn);
        self.keys.forget(conn);
        self.forget_successions_of(conn, attached);
        drop(self.waiters.take_of(conn));
        self.describing.retain(|id| id.conn != conn);
        self.budget.release_request(conn);
        self.reclaim_slots(conn);
        self.close_readers(conn);
    }

    pub(crate) fn slot_mut(&mut self, slot: SlotId) -> &mut Slot {
        self.slots
            .get_mut(&slot)
            .expect("callers hold a slot of the table")
    }
}

/// A short token would soon be guessed.
fn check_token(token: &[u8]) -> Result<(), Refusal> {
    if is_token_length(token.len()) || planted!("weak_tokens_pass") {
        return Ok(());
    }
    Err(Refusal::new(
        RefusalCode::Malformed,
        format!(
            "expected a job token of {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} bytes, or none, got {}: `storaged token FILE` makes one",
            token.len()
        ),
    ))
}

/// What somebody hears who waits for a checkpoint that has left RAM.
fn answer_of_end(key: &CheckpointKey, end: &End, wanted: CheckpointState) -> Reply {
    if end.state >= wanted {
        return Reply::Reached {
            state: end.state,
            manifest: end.name,
            bears: None,
        };
    }
    let code = match wanted {
        CheckpointState::Durable => RefusalCode::DurableUnavailable,
        _ => RefusalCode::Abandoned,
    };
    let text = format!(
        "step {} of run {} left RAM when it was {}, before it was {wanted}: {}",
        key.step, key.run, end.state, end.reason
    );
    Reply::Refused(Refusal::new(code, text))
}

/// Which chunks have other digests than they had; all of them if not even their number is the same.
fn changed_chunks(before: &[Digest], now: &[Digest]) -> Vec<u64> {
    let is_comparable = before.len() == now.len();
    let pairs = (0..).zip(before.iter().zip(now));
    let changed = pairs.filter(|(_, (before, now))| before != now);
    if is_comparable {
        changed.map(|(chunk, _)| chunk).collect()
    } else {
        (0..before.len() as u64).collect()
    }
}
