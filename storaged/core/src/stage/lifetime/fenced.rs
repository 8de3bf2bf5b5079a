//! Slots that go with their trainers. A free slot belongs to the connection that may use it again: when that ends, its
//! memory is given back. And when a newer run is opened, what the older run's trainers hold is dropped, never reused:
//! a process that hangs may go on writing into what it has mapped.

use std::collections::BTreeSet;

use storaged_wire::local::Reply;
use storaged_wire::{Namespace, Rank, Refusal, SlotId};

use crate::api::{ConnId, RequestId};
use crate::catalog::SlotUse;
use crate::context::Context;
use crate::event::Event;

impl Context {
    /// A fence has risen: the trainers below it have nothing here any more.
    pub(crate) fn end_fenced_trainers(&mut self, namespace: &Namespace) {
        let fenced = self.fenced_conns(namespace);
        if fenced.is_empty() || planted!("fenced_slots_kept") {
            return;
        }
        for conn in &fenced {
            for waiter in self.waiters.take_of(*conn) {
                self.refuse_fenced(waiter.id);
            }
        }
        for slot in self.slots_of_fenced(&fenced) {
            if let SlotUse::Creating(id) = self.slot_mut(slot).used_for {
                self.refuse_fenced(id);
            }
            self.drop_slot(slot);
        }
        self.emit(Event::RoomMade);
    }

    fn fenced_conns(&self, namespace: &Namespace) -> BTreeSet<ConnId> {
        let of_run = |conn: &crate::catalog::Attached| {
            let (run, _, _) = conn.trainer?;
            Some(conn.namespace == *namespace && self.check_fence(namespace, run).is_err())
        };
        let conns = self.conns.iter();
        conns
            .filter(|(_, attached)| of_run(attached) == Some(true))
            .map(|(conn, _)| *conn)
            .collect()
    }

    /// What they fill, and what they have mapped and nobody has sealed.
    fn slots_of_fenced(&self, fenced: &BTreeSet<ConnId>) -> Vec<SlotId> {
        let mapped = |slot: &SlotId| {
            let mut conns = fenced.iter().filter_map(|conn| self.conns.get(conn));
            conns.any(|conn| conn.slots_passed.contains(slot))
        };
        let goes = |slot: &SlotId, used_for: &SlotUse| match used_for {
            SlotUse::Held(conn) => fenced.contains(conn),
            SlotUse::Creating(id) => fenced.contains(&id.conn),
            SlotUse::Free => mapped(slot),
            _ => false,
        };
        let slots = self.slots.iter();
        slots
            .filter(|(id, slot)| goes(id, &slot.used_for))
            .map(|(id, _)| *id)
            .collect()
    }

    fn refuse_fenced(&mut self, id: RequestId) {
        let refusal: Option<Refusal> = self.trainer(id).err();
        if let Some(refusal) = refusal {
            self.reply(id, Reply::Refused(refusal));
        }
    }

    /// Whether a slot that nothing is in may serve a next step: a trainer of its rank is here, and none of a fenced run
    /// has it mapped.
    pub(crate) fn may_be_used_again(&self, slot: SlotId) -> bool {
        let Some((namespace, rank)) = self.slots.get(&slot).map(|s| (&s.namespace, s.rank)) else {
            return false;
        };
        let mut conns = self.conns.values();
        let is_fenced = |run| self.check_fence(namespace, run).is_err();
        let mapped_by_fenced = conns.any(|conn| {
            let fenced = conn.trainer.is_some_and(|(run, _, _)| is_fenced(run));
            conn.namespace == *namespace && fenced && conn.slots_passed.contains(&slot)
        });
        !mapped_by_fenced && self.has_trainer(namespace, rank)
    }

    fn has_trainer(&self, namespace: &Namespace, rank: Rank) -> bool {
        let mut conns = self.conns.values();
        conns.any(|conn| {
            let of_rank = |(run, of, _)| of == rank && self.check_fence(namespace, run).is_ok();
            conn.namespace == *namespace && conn.trainer.is_some_and(of_rank)
        })
    }

    /// A connection has ended: free slots that nobody is there for go back to the budget.
    pub(crate) fn drop_slots_left_behind(&mut self) {
        let free = self.slots.iter();
        let free: Vec<SlotId> = free
            .filter(|(_, slot)| slot.used_for == SlotUse::Free)
            .map(|(id, _)| *id)
            .collect();
        for slot in free {
            if !self.may_be_used_again(slot) {
                self.drop_slot(slot);
            }
        }
    }
}
