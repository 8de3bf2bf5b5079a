//! Room for those who work: what gives way when the budget is full. First bases, which are only kept to make uploads
//! smaller; then older steps of other jobs that are kept (`memory.keep_steps`); then jobs that have ended, the one that has not been used for longest first, and of those the durable ones
//! first, and none of which a step is pinned. Nothing is dropped in vain: if all of it together would not be enough, nothing goes.

use std::collections::BTreeMap;

use storaged_wire::peer::{CheckpointKey, HighMark, PeerMessage};
use storaged_wire::{CheckpointState, Namespace, NodeName};

use crate::api::Note;
use crate::budget::{NoRoom, Reservation};
use crate::catalog::{Slot, SlotUse};
use crate::context::Context;

/// Holders of the budget that a refusal names.
const HOLDERS_NAMED: usize = 3;

/// A job that may go, in the order in which they do: the durable ones first, then by how long they have been idle.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Evictable {
    only_copy: bool,
    idle_ms: std::cmp::Reverse<u64>,
    namespace: Namespace,
    bytes: u64,
}

/// What is left of a job after it has left RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remains {
    DurableCopy,
    Nothing,
}

/// What left RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Freed {
    pub bytes: u64,
    pub checkpoints: u32,
}

impl Context {
    /// Reserves bytes for a job; what is needed less than a save gives way first.
    pub(crate) fn reserve(
        &mut self,
        purpose: Reservation,
        bytes: u64,
        of: &Namespace,
    ) -> Result<(), NoRoom> {
        let first = self.budget.reserve(purpose, bytes, of);
        if first.is_ok() || bytes > self.budget.total() {
            return first;
        }
        self.make_budget_room(bytes, of);
        self.budget.reserve(purpose, bytes, of)
    }

    /// What is needed less than a save gives way.
    pub(in crate::stage) fn make_budget_room(&mut self, bytes: u64, of: &Namespace) {
        self.give_up_bases();
        self.give_up_kept_for(bytes, of);
        self.evict_for(bytes, of);
    }

    /// Whether what another job gives up would be room for this one: not if it is at its tenant's own limit, nor where the other's
    /// tenant has no more than it is sure of.
    pub(crate) fn may_take_from(&self, other: &Namespace, bytes: u64, of: &Namespace) -> bool {
        let at_limit = bytes > self.budget.share_left(of);
        other.tenant() == of.tenant()
            || (!at_limit && self.budget.is_above_guarantee(other))
            || planted!("taken_from_the_guaranteed")
    }

    fn evict_for(&mut self, bytes: u64, of: &Namespace) {
        let jobs = self.evictable(bytes, of);
        // In these sums a budget that is exceeded by records has less than nothing free.
        let could_go: u128 = jobs.iter().map(|job| u128::from(job.bytes)).sum();
        if u128::from(self.budget.missing(bytes, of)) > could_go {
            return;
        }
        for job in jobs {
            if self.budget.room_of(of) >= bytes {
                return;
            }
            self.evict(&job.namespace);
        }
    }

    /// Jobs other than this one that may go now, in order.
    fn evictable(&self, bytes: u64, of: &Namespace) -> Vec<Evictable> {
        let held = self.bytes_by_job();
        // Of two jobs that have ended at about the same time, one would be protected at the price of the other's only copy.
        let is_safe = self.newest_mark(of) == self.newest_safe(of).map(|key| key.mark());
        let is_as_idle = !(is_safe || self.is_in_use(of));
        let own_idle_ms = if is_as_idle && !planted!("ended_jobs_evict_one_another") {
            self.idle_ms(of)
        } else {
            0
        };
        let idle_enough_ms = self.setup.idle_job_ms.saturating_add(own_idle_ms);
        let others = held
            .into_iter()
            .filter(|(namespace, _)| namespace != of && self.may_take_from(namespace, bytes, of));
        let mut jobs: Vec<Evictable> = others
            .filter(|_| !planted!("idle_jobs_kept"))
            .filter(|(namespace, _)| !self.is_in_use(namespace) && !self.is_job_read(namespace))
            .filter(|(namespace, _)| self.pinned_here(namespace).is_empty())
            .map(|(namespace, bytes)| Evictable {
                only_copy: !self.is_newest_durable(&namespace),
                idle_ms: std::cmp::Reverse(self.idle_ms(&namespace)),
                namespace,
                bytes,
            })
            .filter(|job| !job.only_copy || job.idle_ms.0 >= idle_enough_ms)
            .collect();
        jobs.sort();
        jobs
    }

    /// Bytes of the budget that each job has here.
    pub(in crate::stage) fn bytes_by_job(&self) -> BTreeMap<Namespace, u64> {
        let mut bytes: BTreeMap<Namespace, u64> = BTreeMap::new();
        for slot in self.slots.values() {
            *bytes.entry(slot.namespace.clone()).or_default() += slot.capacity;
        }
        for checkpoint in self.checkpoints.values() {
            *bytes.entry(checkpoint.key.namespace.clone()).or_default() +=
                self.parity_kept(checkpoint);
        }
        bytes.retain(|_, bytes| *bytes > 0);
        bytes
    }

    fn is_job_read(&self, namespace: &Namespace) -> bool {
        let mut of_job = self
            .checkpoints
            .values()
            .filter(|c| c.key.namespace == *namespace);
        of_job.any(|c| c.shards.values().any(|shard| !shard.readers.is_empty()))
    }

    /// Whether the durable tier holds the newest that could be restored.
    fn is_newest_durable(&self, namespace: &Namespace) -> bool {
        let mut newest_first = self.checkpoints.values().rev();
        let newest = newest_first.find(|c| c.key.namespace == *namespace);
        newest.is_some_and(|newest| newest.state == CheckpointState::Durable)
    }

    /// A job that has ended leaves the RAM of all nodes.
    fn evict(&mut self, namespace: &Namespace) {
        let up_to = self.newest_mark(namespace);
        let durable = self.is_newest_durable(namespace);
        let bytes = self.drop_ram(namespace, up_to).bytes;
        let namespace = namespace.clone();
        self.note(Note::Evicted {
            namespace: namespace.clone(),
            bytes,
        });
        let Some(up_to) = up_to else {
            return;
        };
        if !durable {
            self.forget_mark(&namespace, up_to);
        }
        self.send_all(&PeerMessage::Evicted {
            namespace,
            up_to,
            durable,
        });
    }

    pub(super) fn newest_mark(&self, namespace: &Namespace) -> Option<HighMark> {
        let mut newest_first = self.checkpoints.keys().rev();
        newest_first
            .find(|key| key.namespace == *namespace)
            .map(CheckpointKey::mark)
    }

    /// A peer needed the room of a job that has ended. Parts of it are of no use to anybody, so the rest goes as well,
    /// unless it is in use here after all: then it heals again.
    pub(crate) fn evicted_elsewhere(
        &mut self,
        namespace: &Namespace,
        up_to: HighMark,
        remains: Remains,
    ) {
        let is_pinned = !self.pinned_here(namespace).is_empty();
        if self.is_in_use(namespace) || self.is_job_read(namespace) || is_pinned {
            return;
        }
        if !self.could_go(namespace) {
            return;
        }
        self.drop_ram(namespace, Some(up_to));
        if remains == Remains::Nothing {
            self.forget_mark(namespace, up_to);
        }
    }

    /// Whether a job may go for all that this node knows: it is durable, or nobody has used it for long. Nodes do not hear of its last use
    /// at the same moment.
    fn could_go(&self, namespace: &Namespace) -> bool {
        let mut of_job = self.checkpoints.keys();
        !of_job.any(|key| key.namespace == *namespace)
            || self.is_newest_durable(namespace)
            || self.idle_ms(namespace) >= self.setup.idle_job_ms / 2
    }

    /// What was the only copy is gone: no plan need wait for it.
    fn forget_mark(&mut self, namespace: &Namespace, up_to: HighMark) {
        self.keeping.touch_job(namespace);
        if let Some(table) = self.namespaces.get_mut(namespace)
            && table.mark <= Some(up_to)
        {
            table.mark = None;
        }
    }

    /// Whether a checkpoint that a peer tells of has left RAM here for another job. Then that peer missed it.
    pub(crate) fn was_evicted(&mut self, from: &NodeName, key: &CheckpointKey) -> bool {
        let table = self.namespaces.get(&key.namespace);
        let Some((up_to, mark)) = table.and_then(|table| Some((table.evicted?, table.mark))) else {
            return false;
        };
        if key.mark() > up_to {
            return false;
        }
        let evicted = PeerMessage::Evicted {
            namespace: key.namespace.clone(),
            up_to,
            // The mark of what is durable stays.
            durable: mark.is_some(),
        };
        self.send(from, evicted);
        true
    }

    /// Frees all that a job has here, up to a checkpoint.
    pub(super) fn drop_ram(&mut self, namespace: &Namespace, up_to: Option<HighMark>) -> Freed {
        self.keeping.touch_job(namespace);
        let before = self.budget.used();
        let keys = self.checkpoints.keys();
        let goes = |key: &&CheckpointKey| key.namespace == *namespace && Some(key.mark()) <= up_to;
        let keys: Vec<CheckpointKey> = keys.filter(goes).cloned().collect();
        for key in &keys {
            self.drop_checkpoint(key);
        }
        self.drop_free_slots(|slot| slot.namespace == *namespace);
        self.drop_boards(namespace);
        if let Some(table) = self.namespaces.get_mut(namespace) {
            table.evicted = table.evicted.max(up_to);
        }
        Freed {
            bytes: before.saturating_sub(self.budget.used()),
            checkpoints: u32::try_from(keys.len()).unwrap_or(u32::MAX),
        }
    }

    fn drop_checkpoint(&mut self, key: &CheckpointKey) {
        let reason = "its job was dropped from RAM, or another one needed the room";
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return;
        };
        if checkpoint.manifest.is_none() {
            return self.abandon(key, reason);
        }
        checkpoint.owing.given_up = Some(reason.into());
        self.retire(key);
    }

    pub(in crate::stage) fn drop_free_slots(&mut self, goes: impl Fn(&Slot) -> bool) -> bool {
        let slots = self.slots.iter();
        let free: Vec<_> = slots
            .filter(|(_, slot)| slot.used_for == SlotUse::Free && goes(slot))
            .map(|(id, _)| *id)
            .collect();
        let is_any = !free.is_empty();
        for slot in free {
            self.drop_slot(slot);
        }
        is_any
    }

    /// What holds the budget, the most first, and what would free it.
    /// Jobs of other tenants than this one's are not named.
    pub(crate) fn holders(&self, of: &Namespace) -> String {
        let mut others: u64 = 0;
        let mut held: Vec<(u64, Namespace)> = Vec::new();
        for (namespace, bytes) in self.bytes_by_job() {
            if namespace.tenant() == of.tenant() {
                held.push((bytes, namespace));
            } else {
                others = others.saturating_add(bytes);
            }
        }
        held.sort();
        let named = held.iter().rev().take(HOLDERS_NAMED);
        let mut named: Vec<String> = named
            .map(|(bytes, namespace)| {
                let (why, pins) = (self.why_held(namespace, of), self.pins_in_words(namespace));
                format!("{namespace} {bytes} bytes ({why}{pins})")
            })
            .collect();
        let more = held.len().saturating_sub(HOLDERS_NAMED);
        if more > 0 {
            named.push(format!("{more} more jobs"));
        }
        if others > 0 {
            named.push(format!("other tenants {others} bytes"));
        }
        let records = self.budget.records_counted();
        if records > 0 {
            named.push(format!(
                "{records} bytes of digests, manifests and schemas of all jobs"
            ));
        }
        named.join(", ")
    }

    fn why_held(&self, namespace: &Namespace, asked_by: &Namespace) -> String {
        let nodes = self.nodes_attached(namespace);
        if let Some(node) = nodes.first() {
            return format!("has trainers on {node}");
        }
        let idle_s = self.idle_ms(namespace) / 1000;
        let limit_s = self.setup.idle_job_ms / 1000;
        if self.is_newest_durable(namespace) {
            format!("unused for {idle_s} s, durable")
        } else if namespace == asked_by {
            // Whoever reads it is not told to drop what he reads.
            "this job, not durable".into()
        } else {
            format!(
                "unused for {idle_s} s and not durable: gives way after {limit_s} s, or to `storaged drop {namespace}`"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use storaged_wire::{Rank, SlotId};

    use super::*;
    use crate::api::{ConnId, Now};
    use crate::budget::{Budget, RecordBytes};
    use crate::catalog::SlotUse;
    use crate::limits::RECORDS_FREE_BYTES;
    use crate::testkit::{last_of, owner};

    const MIB: u64 = 1 << 20;

    #[test]
    fn no_job_goes_in_vain_where_records_take_more_than_is_free() {
        let mut node = last_of(&["a", "b", "c"], 2, 1);
        let cx = node.context_mut();
        cx.begin(Now(1));
        cx.budget = Budget::new(100 * MIB, &BTreeMap::new());
        let [old, new] = ["old", "new"].map(|name| Namespace::new(name).expect("a name"));
        for namespace in [&old, &new] {
            cx.namespace_table(namespace, owner());
        }
        cx.touch(&old);
        cx.begin(Now(4_000_000));
        let held = SlotUse::Held(ConnId(1));
        for (namespace, mib, used_for) in [(&old, 60, SlotUse::Free), (&new, 40, held)] {
            let made = cx.reserve_slot(namespace, Rank::new(0), mib * MIB, used_for);
            made.expect("there is room");
        }
        cx.budget.set_records(RecordBytes {
            of_nobody: RECORDS_FREE_BYTES + 20 * MIB,
            ..RecordBytes::default()
        });
        let slots = cx.slots.len();
        let wanted = Reservation::Slot(SlotId::new(999));
        assert!(cx.reserve(wanted, 50 * MIB, &new).is_err());
        let refusal = cx.no_budget(50 * MIB, "is full", &new).message;
        let said = format!("{} bytes of digests", 20 * MIB);
        assert!(refusal.contains(&said), "{refusal}");
        assert!(refusal.contains("storaged drop old"), "{refusal}");
        let own = cx.no_budget(50 * MIB, "is full", &old).message;
        assert!(own.contains("this job, not durable"), "{own}");
        assert_eq!(cx.slots.len(), slots, "60 MiB would not have been enough");
    }
}
