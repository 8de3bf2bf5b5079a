//! What the daemon keeps for the one after it, and what it takes over from the one before: descriptors of slots and parity, and the
//! journal that says what they hold.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use storaged_core::{Input, ParityId};
use storaged_wire::{KeptCheckpoint, KeptRecord, RecordName, decode, encode};

use super::{Daemon, chain};
use crate::keep::{
    DescriptorStore, JournalError, KeptName, MemoryJournal, ParityTable, Records, empty_journal,
    read_journal,
};
use crate::memory::Memory;

/// What the daemon before this one left, as far as its memory is here again.
pub(super) struct Left {
    records: Vec<KeptRecord>,
    /// Its journals, which this one's takes the place of, the newest last.
    journals: Vec<LeftJournal>,
}

/// A journal of a daemon that has ended.
struct LeftJournal {
    number: u64,
    file: File,
}

impl Left {
    /// Takes the memory over that the records make usable, and lets the rest go.
    ///
    /// # Errors
    /// [`JournalError`] if another release wrote the journal. Nothing is let go then: that release can still be started.
    pub fn read(
        memory: &Memory,
        inherited: Vec<(KeptName, OwnedFd)>,
    ) -> Result<Self, JournalError> {
        // Before any memory: what another release left, which its journal says, must be there for it as it was.
        let mut journals = Vec::new();
        let mut blocks = Vec::new();
        for (name, descriptor) in inherited {
            match name {
                KeptName::Journal(number) => journals.push(LeftJournal {
                    number,
                    file: descriptor.into(),
                }),
                KeptName::Slot(_) | KeptName::Parity(_) => blocks.push((name, descriptor)),
            }
        }
        // Each is whole when it is handed over, and a newer one takes the place of the older.
        journals.sort_by_key(|it| it.number);
        let found = journals.last().map(|newest| read_journal(&newest.file));
        let contents = found.transpose()?.unwrap_or_default();
        for (name, error) in memory.adopt(blocks) {
            tracing::warn!(%name, error = chain(&error), "memory of an earlier daemon cannot be used");
        }
        if contents.torn_bytes > 0 {
            let bytes = contents.torn_bytes;
            tracing::warn!(bytes, "the end of an earlier daemon's journal is not whole");
        }
        let records = usable(memory, &contents.records);
        memory.drop_unclaimed();
        Ok(Self { records, journals })
    }
}

/// Slots and parity sets that records name.
fn blocks_of(records: &[KeptRecord]) -> (usize, usize) {
    let checkpoints = records.iter().filter_map(|record| match record {
        KeptRecord::Checkpoint(kept) => Some((kept.shards.len(), kept.parity.len())),
        _ => None,
    });
    checkpoints.fold((0, 0), |(slots, sets), (shards, parity)| {
        (slots + shards, sets + parity)
    })
}

/// The records, of checkpoints with what of them is in memory.
fn usable(memory: &Memory, records: &Records) -> Vec<KeptRecord> {
    let mut all = Vec::new();
    // Names are in order, the newest steps last: they claim their memory first.
    for (name, bytes) in records.iter().rev() {
        if matches!(name, RecordName::Parity(_)) {
            continue;
        }
        match decode::<KeptRecord>("a kept record", bytes) {
            Ok(KeptRecord::Checkpoint(kept)) => {
                let kept = with_memory(memory, records, kept);
                all.push(KeptRecord::Checkpoint(kept));
            }
            Ok(record) => all.push(record),
            Err(error) => tracing::warn!(%error, "a record of an earlier daemon cannot be used"),
        }
    }
    all
}

fn with_memory(memory: &Memory, records: &Records, mut kept: KeptCheckpoint) -> KeptCheckpoint {
    let lost = |what: &str, error: &dyn std::error::Error| {
        let (namespace, step) = (&kept.key.namespace, kept.key.step.get());
        tracing::warn!(%namespace, step, what, error = chain(error), "a block of an earlier daemon is lost");
    };
    kept.shards
        .retain(|shard| match memory.adopt_slot(shard.slot) {
            Ok(capacity) if capacity >= shard.capacity => true,
            Ok(_) => {
                memory.drop_slot(shard.slot);
                false
            }
            Err(error) => {
                lost("shard", &error);
                false
            }
        });
    kept.parity.retain(|parity| {
        let table = records.get(&RecordName::Parity(parity.set));
        let Some(table) = table else {
            return false;
        };
        let table = ParityTable::decode(table);
        let table = table.map_err(|error| lost("parity", &error));
        table.is_ok_and(|table| {
            let adopted = memory.adopt_parity(ParityId(parity.set), &table);
            adopted.map_err(|error| lost("parity", &error)).is_ok()
        })
    });
    kept
}

impl Daemon {
    /// Goes on with what an earlier daemon left, and begins a journal of its own. Till that is whole the earlier one stays: were this
    /// daemon to end now, the next would begin where this one did.
    ///
    /// # Errors
    /// [`JournalError`] if its keeper is gone. Nothing is let go then: a holder may have it for the next one, and this one is about to end.
    pub(super) fn take_over(
        &mut self,
        left: Left,
        store: &Arc<dyn DescriptorStore>,
    ) -> Result<(), JournalError> {
        let number = left.journals.last().map_or(0, |last| last.number + 1);
        self.journal = store
            .is_there()
            .then(|| MemoryJournal::new(store.clone(), number))
            .and_then(|made| {
                let failed = |error: &JournalError| not_kept(error);
                made.inspect_err(failed).ok()
            });
        if !left.records.is_empty() {
            let (slots, sets) = blocks_of(&left.records);
            let records = left.records;
            let recovered = Input::Recovered { records };
            for output in self.node.handle(self.clock.now(), recovered) {
                self.perform(output);
            }
            let ledger = self.node.ledger();
            tracing::info!(
                slots = ledger.slots,
                parity_sets = ledger.parity_sets,
                "took over the memory of an earlier daemon"
            );
            if (ledger.slots, ledger.parity_sets) != (slots, sets) {
                let (lost_slots, lost_sets) = (
                    slots.saturating_sub(ledger.slots),
                    sets.saturating_sub(ledger.parity_sets),
                );
                tracing::warn!(
                    lost_slots,
                    lost_sets,
                    "not all that an earlier daemon held is of use here: \
                    a smaller budget, another name of the node, or steps that newer ones made needless"
                );
            }
        }
        let published = self.journal.as_mut().map(MemoryJournal::publish);
        match published {
            Some(Err(error)) if error.is_of_nobody() => return Err(error),
            Some(Err(error)) => self.stop_keeping(&error),
            Some(Ok(())) | None => {}
        }
        // From here on promises are written down elsewhere, or nowhere.
        for LeftJournal { number, file } in left.journals {
            empty_journal(&file);
            store.remove(KeptName::Journal(number));
        }
        Ok(())
    }

    /// Writes a record, of a checkpoint with the places of its parity.
    pub(super) fn keep(&mut self, record: &KeptRecord) {
        let Some(journal) = &mut self.journal else {
            return;
        };
        let mut written = Ok(());
        if let KeptRecord::Checkpoint(kept) = record {
            for parity in &kept.parity {
                let name = RecordName::Parity(parity.set);
                let table = self.memory.parity_table(ParityId(parity.set));
                if let Some(table) = table.filter(|_| !journal.has(&name)) {
                    written = written.and_then(|()| journal.put(&name, table.encode()));
                }
            }
        }
        let written = written.and_then(|()| journal.put(&record.name(), encode(record)));
        if let Err(error) = written {
            self.stop_keeping(&error);
        }
    }

    pub(super) fn forget(&mut self, name: &RecordName) {
        let removed = self.journal.as_mut().map(|journal| journal.remove(name));
        if let Some(Err(error)) = removed {
            self.stop_keeping(&error);
        }
    }

    /// Its table goes first: the next daemon must not look for it in memory that another set has by then.
    pub(super) fn drop_parity(&mut self, set: ParityId) {
        self.forget(&RecordName::Parity(set.0));
        self.memory.drop_parity(set);
    }

    /// This node goes for good: no daemon goes on with its memory, which would be held for nobody.
    pub(super) fn give_up_memory(&mut self) {
        // First what would have it believed, should the rest not come through.
        if let Some(journal) = self.journal.take() {
            journal.give_up();
        }
        let descriptors = self.memory.end_with_daemon();
        if descriptors > 0 {
            tracing::info!(
                descriptors,
                "this node goes for good: its memory is not kept any longer"
            );
        }
    }

    /// A journal that lacks something must not be read: it would bring back what was given up, and forget what was promised.
    fn stop_keeping(&mut self, error: &JournalError) {
        not_kept(error);
        if let Some(journal) = self.journal.take() {
            journal.give_up();
        }
    }
}

fn not_kept(error: &JournalError) {
    tracing::error!(
        error = chain(error),
        "what is in memory cannot be written down: a restart of this daemon loses it"
    );
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::keep::RecordingStore;

    /// A journal of this release's layout, or of another one, beside what this release cannot use.
    fn left_in_layout(version: u32) -> (Arc<RecordingStore>, Result<Left, JournalError>) {
        let store = Arc::new(RecordingStore::default());
        let foreign = File::open("/dev/null").expect("it is there");
        let parity = KeptName::Parity(3);
        store.store(parity, foreign.as_fd()).expect("it is kept");
        let mut journal = MemoryJournal::new(store.clone(), 0).expect("a journal");
        journal.publish().expect("it is handed over");
        let held = store.duplicates();
        let journal = held.iter().find(|(name, _)| *name == KeptName::Journal(0));
        let (_, journal) = journal.expect("it was handed over");
        let journal = File::from(journal.try_clone().expect("a descriptor"));
        let bytes = version.to_le_bytes();
        journal.write_all_at(&bytes, 8).expect("it can be written");
        let left = Left::read(&Memory::new(store.clone()), held);
        (store, left)
    }

    /// The release that wrote it may know what this one does not.
    #[test]
    fn what_a_journal_of_another_layout_tells_of_stays_as_it_is() {
        let (store, left) = left_in_layout(7);
        assert!(matches!(left, Err(JournalError::Version { got: 7 })));
        assert_eq!(store.names(), [KeptName::Parity(3), KeptName::Journal(0)]);
        let (store, left) = left_in_layout(1);
        assert!(left.is_ok());
        assert_eq!(store.names(), [KeptName::Journal(0)]);
    }
}
