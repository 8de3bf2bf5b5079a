//! Requests that wait for a slot or for a step. There may be tens of thousands, and every input asks which is late first, every
//! state that a step reaches who waits for it: each of these is found without a look at the others.

use std::collections::{BTreeMap, BTreeSet};

use storaged_wire::peer::CheckpointKey;

use crate::api::{ConnId, Now};
use crate::catalog::{Waiter, WaiterWish};

/// All of them, each by a number that rises as they come.
#[derive(Debug, Default)]
pub(crate) struct Waiters {
    next: u64,
    all: BTreeMap<u64, Waiter>,
    by_deadline: BTreeSet<(Now, u64)>,
    by_conn: BTreeSet<(ConnId, u64)>,
    for_steps: BTreeMap<CheckpointKey, BTreeSet<u64>>,
    for_slots: BTreeSet<u64>,
}

impl Waiters {
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The last one of all.
    pub fn push(&mut self, waiter: Waiter) {
        let number = self.next;
        self.next += 1;
        self.by_deadline.insert((waiter.deadline, number));
        self.by_conn.insert((waiter.id.conn, number));
        match &waiter.wish {
            WaiterWish::Slot { .. } => drop(self.for_slots.insert(number)),
            WaiterWish::State { key, .. } => {
                let same = self.for_steps.entry(key.clone()).or_default();
                same.insert(number);
            }
        }
        self.all.insert(number, waiter);
    }

    fn remove(&mut self, number: u64) -> Option<Waiter> {
        let waiter = self.all.remove(&number)?;
        self.by_deadline.remove(&(waiter.deadline, number));
        self.by_conn.remove(&(waiter.id.conn, number));
        self.for_slots.remove(&number);
        if let WaiterWish::State { key, .. } = &waiter.wish
            && let Some(same) = self.for_steps.get_mut(key)
        {
            same.remove(&number);
            if same.is_empty() {
                self.for_steps.remove(key);
            }
        }
        Some(waiter)
    }

    fn take(&mut self, numbers: Vec<u64>) -> Vec<Waiter> {
        let taken = numbers.into_iter();
        taken.filter_map(|number| self.remove(number)).collect()
    }

    /// When the first of them is late.
    pub fn deadline(&self) -> Option<Now> {
        self.by_deadline.first().map(|(deadline, _)| *deadline)
    }

    /// Takes those that are late.
    pub fn take_late(&mut self, now: Now) -> Vec<Waiter> {
        let late = self.by_deadline.range(..=(now, u64::MAX));
        let mut late: Vec<u64> = late.map(|(_, number)| *number).collect();
        late.sort_unstable();
        self.take(late)
    }

    /// Takes those of a connection.
    pub fn take_of(&mut self, conn: ConnId) -> Vec<Waiter> {
        let of_it = self.by_conn.range((conn, 0)..=(conn, u64::MAX));
        let of_it = of_it.map(|(_, number)| *number).collect();
        self.take(of_it)
    }

    /// Takes those that wait for a step.
    pub fn take_for_step(&mut self, key: &CheckpointKey) -> Vec<Waiter> {
        let same = self.for_steps.get(key).into_iter().flatten();
        let same = same.copied().collect();
        self.take(same)
    }

    /// Takes those that wait for a slot, in the order in which they came.
    pub fn take_for_slots(&mut self) -> Vec<Waiter> {
        let waiting = self.for_slots.iter().copied().collect();
        self.take(waiting)
    }

    /// Those that wait for a slot.
    pub fn for_slots(&self) -> impl Iterator<Item = &Waiter> {
        self.for_slots
            .iter()
            .filter_map(|number| self.all.get(number))
    }

    /// Those that wait for a step.
    pub fn for_steps(&self) -> impl Iterator<Item = &Waiter> {
        let numbers = self.for_steps.values().flatten();
        numbers.filter_map(|number| self.all.get(number))
    }
}

#[cfg(test)]
mod tests {
    use storaged_wire::{CheckpointState, RunId, Step};

    use super::*;
    use crate::api::RequestId;
    use crate::testkit::job;

    fn key(step: u64) -> CheckpointKey {
        CheckpointKey {
            namespace: job(),
            run: RunId::new(1),
            step: Step::new(step),
        }
    }

    fn waiter(conn: u64, deadline: u64, step: Option<u64>) -> Waiter {
        let conn = ConnId(conn);
        let (since, until) = (Now(0), Now(deadline));
        Waiter {
            id: RequestId { conn, index: 0 },
            deadline: Now(deadline),
            wish: match step {
                Some(step) => WaiterWish::State {
                    key: key(step),
                    state: CheckpointState::Protected,
                },
                None => WaiterWish::Slot {
                    bytes: 1,
                    since,
                    lacking_since: since,
                    until,
                },
            },
        }
    }

    fn conns(waiters: &[Waiter]) -> Vec<u64> {
        waiters.iter().map(|waiter| waiter.id.conn.0).collect()
    }

    #[test]
    fn each_is_found_by_what_it_waits_for_and_taken_once() {
        let mut waiters = Waiters::default();
        for (conn, deadline, step) in [
            (5, 30, None),
            (4, 10, Some(1)),
            (3, 20, Some(2)),
            (2, 10, None),
            (1, 40, Some(1)),
            (4, 50, None),
        ] {
            waiters.push(waiter(conn, deadline, step));
        }
        assert_eq!(waiters.deadline(), Some(Now(10)));
        assert_eq!(conns(&waiters.take_late(Now(20))), [4, 3, 2]);
        assert_eq!(waiters.deadline(), Some(Now(30)));
        assert_eq!(conns(&waiters.take_for_step(&key(1))), [1]);
        assert!(waiters.take_for_step(&key(2)).is_empty());
        assert_eq!(conns(&waiters.take_of(ConnId(4))), [4]);
        assert_eq!(waiters.for_slots().count(), 1);
        assert_eq!(waiters.for_steps().count(), 0);
        assert_eq!(conns(&waiters.take_for_slots()), [5]);
        assert_eq!((waiters.len(), waiters.deadline()), (0, None));
        assert!(waiters.by_conn.is_empty() && waiters.for_steps.is_empty());
    }

    #[test]
    fn who_waits_for_a_slot_longest_comes_first() {
        let mut waiters = Waiters::default();
        for conn in [9, 1, 5] {
            waiters.push(waiter(conn, 10, None));
        }
        let waiting = waiters.take_for_slots();
        assert_eq!(conns(&waiting), [9, 1, 5]);
        waiting.into_iter().for_each(|it| waiters.push(it));
        assert_eq!(conns(&waiters.take_for_slots()), [9, 1, 5]);
    }
}
