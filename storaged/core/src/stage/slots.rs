//! Slots: two or more per rank, reused from step to step. A slot that holds the last good shard is never touched
//! for a new one; a trainer that asks while all are in use waits, within its limit.

use std::collections::BTreeSet;

use storaged_wire::local::Reply;
use storaged_wire::{Namespace, Rank, Refusal, RefusalCode, SlotId};

use super::room::Waited;
use crate::api::{ConnId, DurablePolicy, Output, RequestId, SlotEnd};
use crate::budget::{NoRoom, Reservation};
use crate::catalog::{Attached, Slot, SlotUse, WaiterWish};
use crate::context::Context;
use crate::event::{Event, NoSlot};
use crate::limits;

/// Slots grow in whole huge pages, so that a shard that grows a little still fits.
pub const SLOT_GRAIN_BYTES: u64 = 2 << 20;

/// Bytes of the slot that is made for so many.
pub(crate) fn slot_capacity(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(SLOT_GRAIN_BYTES)
}

/// What came of asking for a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Grant {
    /// It is there, or being made.
    Given,
    /// The rank's slots are all in use, or another one would take the room of the parity of the step before.
    InUse,
    /// The rank may have another one, and the budget is full.
    NoRoom(NoRoom),
}

impl Context {
    pub(crate) fn acquire(
        &mut self,
        id: RequestId,
        bytes: u64,
        timeout_ms: u32,
    ) -> Result<(), Refusal> {
        let (attached, _, rank, _) = self.trainer(id)?;
        if bytes > self.budget.total() {
            let why = "is more than the whole budget";
            return Err(self.no_budget(bytes, why, &attached.namespace));
        }
        self.check_shard_length(bytes)?;
        let namespace = &attached.namespace;
        let outcome = self.grant(id, namespace, rank, bytes);
        if outcome == Grant::InUse && !self.give_up_base_of(namespace, rank) {
            self.make_room(namespace, rank, Waited::default());
        }
        // What has given way is granted to whoever waits longest once the sessions that read from it have ended.
        let patience = match outcome {
            Grant::Given => return Ok(()),
            Grant::InUse => u64::from(timeout_ms),
            // A job that has ended gives way, but that its trainers are gone is heard from all nodes only within a second.
            Grant::NoRoom(_) => u64::from(timeout_ms).min(limits::BUDGET_WAIT_MS),
        };
        let wish = self.slot_wish(id.conn, bytes, timeout_ms);
        self.add_waiter(id, patience, wish)
    }

    /// Grants a free slot or starts making one.
    fn grant(&mut self, id: RequestId, namespace: &Namespace, rank: Rank, bytes: u64) -> Grant {
        let to_come = self.parity_to_come(namespace, rank);
        self.give_free_slots_to_parity(namespace, to_come);
        if let Some(slot) = self.free_slot(namespace, rank, bytes) {
            self.slot_mut(slot).used_for = SlotUse::Held(id.conn);
            self.reply_with_slot(id, slot);
            return Grant::Given;
        }
        self.drop_small_free_slots(namespace, rank, bytes);
        let most = self.setup.slots_per_rank;
        if self.slots_that_count(namespace, rank) >= most {
            return Grant::InUse;
        }
        if !self.leaves_parity_its_room(namespace, bytes, to_come) {
            return Grant::InUse;
        }
        let is_spare = self.slots_in_use(namespace, rank) >= most;
        match self.reserve_slot(namespace, rank, bytes, SlotUse::Creating(id)) {
            // One more than the rank has is taken only where there is room.
            Err(_) if is_spare => Grant::InUse,
            Err(no_room) => Grant::NoRoom(no_room),
            Ok(_) => Grant::Given,
        }
    }

    fn free_slot(&self, namespace: &Namespace, rank: Rank, bytes: u64) -> Option<SlotId> {
        self.slots
            .iter()
            .filter(|(_, slot)| slot.namespace == *namespace && slot.rank == rank)
            .find(|(_, slot)| slot.used_for == SlotUse::Free && slot.capacity >= bytes)
            .map(|(id, _)| *id)
    }

    /// A free slot that has become too small holds nothing and only takes room.
    fn drop_small_free_slots(&mut self, namespace: &Namespace, rank: Rank, bytes: u64) {
        let small: Vec<SlotId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.namespace == *namespace && slot.rank == rank)
            .filter(|(_, slot)| slot.used_for == SlotUse::Free && slot.capacity < bytes)
            .map(|(id, _)| *id)
            .collect();
        for slot in small {
            self.drop_slot(slot);
        }
    }

    pub(super) fn slots_in_use(&self, namespace: &Namespace, rank: Rank) -> usize {
        self.slots
            .values()
            .filter(|slot| slot.namespace == *namespace && slot.rank == rank)
            .filter(|slot| slot.used_for.is_for_saves())
            .filter(|slot| !matches!(&slot.used_for, SlotUse::Sealed(key) if self.is_pinned(key)))
            .count()
    }

    pub(crate) fn create_slot(
        &mut self,
        namespace: &Namespace,
        rank: Rank,
        bytes: u64,
        used_for: SlotUse,
    ) -> Result<SlotId, Refusal> {
        let made = self.reserve_slot(namespace, rank, bytes, used_for);
        made.map_err(|no_room| self.no_budget(no_room.needed(), &no_room.to_string(), namespace))
    }

    pub(crate) fn reserve_slot(
        &mut self,
        namespace: &Namespace,
        rank: Rank,
        bytes: u64,
        used_for: SlotUse,
    ) -> Result<SlotId, NoRoom> {
        let capacity = slot_capacity(bytes);
        let slot = SlotId::new(self.fresh());
        self.reserve(Reservation::Slot(slot), capacity, namespace)?;
        self.slots.insert(
            slot,
            Slot {
                namespace: namespace.clone(),
                rank,
                capacity,
                used_for,
                readers_before: BTreeSet::new(),
            },
        );
        self.out.push(Output::CreateSlot {
            slot,
            bytes: capacity,
        });
        Ok(slot)
    }

    pub(crate) fn no_budget(&self, bytes: u64, why: &str, of: &Namespace) -> Refusal {
        Refusal::new(
            RefusalCode::BudgetFull,
            format!(
                "a slot of {bytes} bytes does not fit the memory budget: it {why}; nothing older was dropped; held by: {}; \
                 raise memory.budget (now {} bytes), or have fewer or smaller shards on this node",
                self.holders(of),
                self.budget.total()
            ),
        )
    }

    pub(crate) fn slot_created(&mut self, slot: SlotId) {
        // Dropped while it was being made.
        let Some(entry) = self.slots.get_mut(&slot) else {
            let end = SlotEnd::GivenBack;
            return self.out.push(Output::DropSlot { slot, end });
        };
        match entry.used_for.clone() {
            SlotUse::Creating(id) if self.conns.contains_key(&id.conn) => {
                self.slot_mut(slot).used_for = SlotUse::Held(id.conn);
                self.reply_with_slot(id, slot);
            }
            SlotUse::Creating(_) => self.free_slot_again(slot),
            SlotUse::Opening => self.emit(Event::OpeningSlot(slot, Ok(()))),
            SlotUse::Repairing => self.emit(Event::RepairSlot(slot, Ok(()))),
            SlotUse::BoardComing(kind, id) => self.board_made(slot, kind, id),
            _ => {}
        }
    }

    pub(crate) fn slot_failed(&mut self, slot: SlotId, reason: &str) {
        let waits = |entry: &Slot| {
            let of_trainer = entry.used_for.maker().is_some();
            of_trainer || matches!(entry.used_for, SlotUse::Opening | SlotUse::Repairing)
        };
        // What was there before does not go because somebody says late that it never came.
        if !self.slots.get(&slot).is_some_and(waits) {
            return;
        }
        let Some(entry) = self.slots.remove(&slot) else {
            return;
        };
        self.budget.release(Reservation::Slot(slot));
        match entry.used_for {
            SlotUse::Creating(id) | SlotUse::BoardComing(_, id) => {
                let text = format!(
                    "expected to make a slot of {} bytes, for which the memory budget has room, got: {reason}; nothing older \
                     was dropped; what the daemon may use beside is at its end: descriptors (LimitNOFILE=) or its control \
                     group's memory",
                    entry.capacity
                );
                let refusal = Refusal::new(RefusalCode::BudgetFull, text);
                self.reply(id, Reply::Refused(refusal));
            }
            SlotUse::Opening => self.emit(Event::OpeningSlot(slot, Err(NoSlot(reason.into())))),
            SlotUse::Repairing => self.emit(Event::RepairSlot(slot, Err(NoSlot(reason.into())))),
            _ => {}
        }
    }

    /// The descriptor goes along each time: which slots the trainer still has mapped only the trainer knows.
    pub(super) fn reply_with_slot(&mut self, id: RequestId, slot: SlotId) {
        let capacity = self.slot_mut(slot).capacity;
        if let Some(conn) = self.conns.get_mut(&id.conn) {
            conn.slots_passed.insert(slot);
            conn.refused_slot = None;
        }
        self.out.push(Output::Reply {
            id,
            reply: Reply::SlotGranted {
                slot,
                capacity,
                descriptor: true,
            },
            descriptor: Some(slot),
        });
    }

    fn held_slot(&self, conn: ConnId, slot: SlotId) -> Result<&Slot, Refusal> {
        self.slots
            .get(&slot)
            .filter(|entry| entry.used_for == SlotUse::Held(conn))
            .ok_or_else(|| {
                Refusal::new(
                    RefusalCode::WrongSlot,
                    format!("expected a slot that this connection acquired and has not sealed, got slot {slot}"),
                )
            })
    }

    /// A slot becomes a shard of the job and rank that it was acquired for: the connection may have said hello for another one since.
    pub(super) fn slot_to_seal(
        &self,
        conn: ConnId,
        slot: SlotId,
        namespace: &Namespace,
        rank: Rank,
    ) -> Result<&Slot, Refusal> {
        let held = self.held_slot(conn, slot)?;
        if held.namespace == *namespace && held.rank == rank {
            return Ok(held);
        }
        Err(Refusal::new(
            RefusalCode::WrongSlot,
            format!(
                "expected a slot of rank {rank} of {namespace}, for which this connection said hello last, got slot {slot}, \
                 which it acquired for rank {} of {}: release it and acquire another one",
                held.rank, held.namespace
            ),
        ))
    }

    pub(crate) fn release(&mut self, id: RequestId, slot: SlotId) -> Result<(), Refusal> {
        self.trainer(id)?;
        self.held_slot(id.conn, slot)?;
        self.reply(id, Reply::Done);
        self.free_slot_again(slot);
        Ok(())
    }

    /// A dead or gone trainer's half-filled slots are free again.
    pub(crate) fn reclaim_slots(&mut self, conn: ConnId) {
        let held: Vec<SlotId> = self
            .slots
            .iter()
            .filter(|(_, slot)| slot.used_for == SlotUse::Held(conn))
            .filter(|_| !planted!("slots_of_the_gone_kept"))
            .map(|(id, _)| *id)
            .collect();
        for slot in held {
            self.free_slot_again(slot);
        }
    }

    /// The slot is free; whoever waits for one gets it. Its memory goes if nobody can use it again.
    pub(crate) fn free_slot_again(&mut self, slot: SlotId) {
        let entry = self.slot_mut(slot);
        entry.used_for = SlotUse::Free;
        let (namespace, rank) = (entry.namespace.clone(), entry.rank);
        // One of an earlier daemon is never given to anybody: readers of that time may have it mapped, who count for nothing here, and
        // digests that are being made of it would be taken for those of whatever is put there next.
        if !self.may_be_used_again(slot) || self.keeping.is_inherited(slot) {
            self.drop_slot(slot);
        }
        if !planted!("freed_slots_not_told") {
            self.emit(Event::SlotFreed(slot, namespace, rank));
        }
    }

    /// A rank keeps as many slots as it may have, and with a durable tier one more: the next upload takes it again, and to
    /// make one costs ten times what the copy into it does.
    pub(crate) fn drop_spare_slot(&mut self, slot: SlotId, namespace: &Namespace, rank: Rank) {
        let free = self.slots.get(&slot).map(|slot| &slot.used_for) == Some(&SlotUse::Free);
        let spare = usize::from(self.setup.durable != DurablePolicy::Absent);
        if free && self.slots_in_use(namespace, rank) > self.setup.slots_per_rank + spare {
            self.drop_slot(slot);
        }
    }

    pub(crate) fn drop_slot(&mut self, slot: SlotId) {
        if let Some(entry) = self.slots.remove(&slot) {
            self.keeping.forget_slot(slot);
            if !planted!("bytes_of_a_slot_kept") {
                self.budget.release(Reservation::Slot(slot));
            }
            let end = entry.used_for.end();
            self.out.push(Output::DropSlot { slot, end });
        }
    }

    pub(crate) fn serve_slot_waiters(&mut self) {
        // Those who wait for a step stay where they are found: it may give way to one of these.
        for mut waiter in self.waiters.take_for_slots() {
            let WaiterWish::Slot { bytes, since, .. } = waiter.wish else {
                continue;
            };
            let outcome = self.trainer(waiter.id).map(|(attached, _, rank, _)| {
                self.grant(waiter.id, &attached.namespace, rank, bytes)
            });
            match outcome {
                Ok(Grant::Given) => {}
                Ok(Grant::NoRoom(_)) if since == self.now => {
                    // What has given way for it was not enough: it waits as if nothing had been in its way but the budget.
                    let patience = self.now.plus(limits::BUDGET_WAIT_MS);
                    waiter.deadline = waiter.deadline.min(patience);
                    self.waiters.push(waiter);
                }
                Ok(Grant::InUse | Grant::NoRoom(_)) => self.waiters.push(waiter),
                Err(refusal) => self.reply(waiter.id, Reply::Refused(refusal)),
            }
        }
    }

    /// Why no slot came in time: the rank's are all in use, what room there is is for parity, or the budget is full.
    pub(crate) fn late_for_slot(&mut self, id: RequestId, bytes: u64) -> Refusal {
        let most = self.setup.slots_per_rank;
        let may_have_more =
            |attached: &Attached, rank| self.slots_that_count(&attached.namespace, rank) < most;
        match self.trainer(id) {
            Ok((attached, _, rank, _)) if may_have_more(&attached, rank) => {
                let capacity = slot_capacity(bytes);
                let of = attached.namespace;
                if capacity <= self.budget.room_of(&of) {
                    let kept = self.kept_for_parity(&of, rank, capacity);
                    return kept.unwrap_or_else(|| self.busy_refusal(id.conn));
                }
                let no_room = self.budget.no_room(capacity, &of);
                self.no_budget(capacity, &no_room.to_string(), &of)
            }
            _ => self.busy_refusal(id.conn),
        }
    }

    /// Why a rank's slots are all in use.
    fn busy_refusal(&self, conn: ConnId) -> Refusal {
        let Some((namespace, rank)) = self
            .conns
            .get(&conn)
            .and_then(|c| c.trainer.map(|(_, rank, _)| (&c.namespace, rank)))
        else {
            return Refusal::new(RefusalCode::Busy, "the connection is gone");
        };
        let uses: Vec<String> = self
            .slots
            .values()
            .filter(|slot| slot.namespace == *namespace && slot.rank == rank)
            .filter(|slot| !slot.is_board())
            .map(|slot| self.describe_use(&slot.used_for))
            .collect();
        Refusal::new(
            RefusalCode::Busy,
            format!(
                "expected a free slot of rank {rank} in time, but all {} are in use ({}): {}",
                uses.len(),
                uses.join(", "),
                self.slot_advice(conn)
            ),
        )
    }

    fn describe_use(&self, used_for: &SlotUse) -> String {
        match used_for {
            SlotUse::Sealed(key) => {
                let state = self
                    .checkpoints
                    .get(key)
                    .map_or("unknown", |c| c.state.as_str());
                format!("step {} {state}", key.step)
            }
            SlotUse::Held(_) => "being filled".into(),
            SlotUse::Creating(_) => "being made".into(),
            SlotUse::Opening | SlotUse::Repairing => "being restored".into(),
            SlotUse::Guest => "read by a restart".into(),
            SlotUse::BoardComing(..) | SlotUse::Board(_) => "a board".into(),
            SlotUse::Free => "free but too small".into(),
        }
    }
}
