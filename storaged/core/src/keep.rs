//! What outlives the daemon: which records its memory needs beside it, so that the next daemon of this node can go on with the slots
//! and the parity that are there. A record is said before whatever is promised in the same breath: a daemon that died after it had
//! told a home node of a parity set would come back without it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::Fingerprint;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{
    Digest, Enclosure, KeptCheckpoint, KeptDescription, KeptNamespace, KeptParity, KeptRecord,
    KeptShard, KeptTable, Namespace, Rank, RecordName, SlotId,
};

use crate::api::Output;
use crate::catalog::{Checkpoint, Claim, LocalShard};
use crate::context::Context;

/// Digests and fingerprints of a shard's chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ChunkTable {
    leaves: Arc<[Digest]>,
    prints: Arc<[Fingerprint]>,
}

/// What was said that is to be kept, and what may have changed since.
#[derive(Debug, Default)]
pub(crate) struct Keeping {
    changed: BTreeSet<CheckpointKey>,
    changed_jobs: BTreeSet<Namespace>,
    checkpoints: BTreeMap<CheckpointKey, Kept>,
    jobs: BTreeMap<Namespace, KeptNamespace>,
    /// Manifests, schemas and metadata, by how many checkpoints name them.
    named: BTreeMap<RecordName, u32>,
    /// Slots of an earlier daemon, which trainers and readers of its time may have mapped.
    inherited: BTreeSet<SlotId>,
    /// Those whose bytes have not been compared with their digests yet.
    unchecked: BTreeSet<SlotId>,
}

/// A checkpoint as it is kept.
#[derive(Debug, Default)]
struct Kept {
    record: Option<KeptCheckpoint>,
    tables: BTreeMap<Rank, ChunkTable>,
    named: BTreeSet<RecordName>,
}

impl Keeping {
    /// Something of a checkpoint may have changed.
    pub fn touch(&mut self, key: &CheckpointKey) {
        if !self.changed.contains(key) {
            self.changed.insert(key.clone());
        }
    }

    /// Something of a job may have changed.
    pub fn touch_job(&mut self, namespace: &Namespace) {
        if !self.changed_jobs.contains(namespace) {
            self.changed_jobs.insert(namespace.clone());
        }
    }

    /// A slot came from an earlier daemon.
    pub fn inherit(&mut self, slot: SlotId) {
        self.inherited.insert(slot);
        self.unchecked.insert(slot);
    }

    /// The bytes of a slot have been compared now. Whether they had to be.
    pub fn trust(&mut self, slot: SlotId) -> bool {
        self.unchecked.remove(&slot)
    }

    /// A slot is gone.
    pub fn forget_slot(&mut self, slot: SlotId) {
        self.inherited.remove(&slot);
        self.unchecked.remove(&slot);
    }

    /// Whether it came from an earlier daemon.
    pub fn is_inherited(&self, slot: SlotId) -> bool {
        self.inherited.contains(&slot)
    }

    /// Slots whose bytes have still to be compared.
    pub fn unchecked(&self) -> usize {
        self.unchecked.len()
    }

    fn name(&mut self, name: &RecordName) -> bool {
        let users = self.named.entry(name.clone()).or_default();
        *users += 1;
        *users == 1
    }

    fn unname(&mut self, name: &RecordName) -> bool {
        let Some(users) = self.named.get_mut(name) else {
            return false;
        };
        *users -= 1;
        if *users == 0 {
            self.named.remove(name);
            return true;
        }
        false
    }
}

impl Context {
    /// Records of all that has changed since this was asked last: to be written before anything else is done.
    pub(crate) fn take_changed_records(&mut self) -> Vec<Output> {
        let mut out = Vec::new();
        for namespace in std::mem::take(&mut self.keeping.changed_jobs) {
            self.keep_job(namespace, &mut out);
        }
        for key in std::mem::take(&mut self.keeping.changed) {
            self.keep_checkpoint(key, &mut out);
        }
        out
    }

    fn keep_job(&mut self, namespace: Namespace, out: &mut Vec<Output>) {
        let keys = self.keys.of_job(&namespace);
        let retired = keys.map(|keys| keys.retired.clone());
        let table = self.namespaces.get(&namespace);
        // Boards end with the daemon.
        let table = table.filter(|table| table.claim == Claim::Held);
        let record = table.map(|table| KeptNamespace {
            namespace: namespace.clone(),
            owner: table.owner,
            fence: table.fence,
            promised: table.promised,
            granted: table.granted,
            mark: table.mark,
            evicted: table.evicted,
            failed: table.failed.kept(),
            pins: table.pins.told(),
            order_key: self.keys.orders(&namespace, table.owner),
            copied: table.copied,
            manifest_key: keys.map(|keys| keys.newest),
            durable: self.keys.durable(&namespace),
            with_mac: self.keys.with_mac(&namespace),
            succession: self.successions.proven(&namespace).cloned().map(Box::new),
            retired_keys: retired.filter(|them| !them.is_empty()),
            damaged: self.kept_damage(&namespace),
        });
        match record {
            Some(record) if self.keeping.jobs.get(&namespace) != Some(&record) => {
                out.push(Output::Keep(KeptRecord::Namespace(Box::new(
                    record.clone(),
                ))));
                self.keeping.jobs.insert(namespace, record);
            }
            Some(_) => {}
            None => {
                if self.keeping.jobs.remove(&namespace).is_some() {
                    out.push(Output::Forget(RecordName::Namespace(namespace)));
                }
            }
        }
    }

    /// What a checkpoint names comes before it, and goes after it: a daemon that ends in between leaves records that nothing
    /// needs, never one that lacks something.
    fn keep_checkpoint(&mut self, key: CheckpointKey, out: &mut Vec<Output>) {
        let mut before = self.keeping.checkpoints.remove(&key).unwrap_or_default();
        let Some((record, tables)) = self.kept_of(&key) else {
            return self.forget_kept(&key, before, out);
        };
        let mut named = BTreeSet::new();
        for (name, bytes) in self.named_by(&record) {
            if !before.named.remove(&name) && self.keeping.name(&name) {
                out.push(Output::Keep(bytes));
            }
            named.insert(name);
        }
        for (rank, table) in &tables {
            let is_kept = before.tables.remove(rank).is_some_and(|it| it == *table);
            if !is_kept {
                out.push(Output::Keep(KeptRecord::Table(KeptTable {
                    key: key.clone(),
                    rank: *rank,
                    leaves: table.leaves.to_vec(),
                    prints: table.prints.to_vec(),
                })));
            }
        }
        if before.record.as_ref() != Some(&record) {
            out.push(Output::Keep(KeptRecord::Checkpoint(record.clone())));
        }
        before.record = None;
        self.forget_kept(&key, before, out);
        let record = Some(record);
        let kept = Kept {
            record,
            tables,
            named,
        };
        self.keeping.checkpoints.insert(key, kept);
    }

    /// What a checkpoint does not need any more, or all that was kept of it.
    fn forget_kept(&mut self, key: &CheckpointKey, gone: Kept, out: &mut Vec<Output>) {
        if gone.record.is_some() {
            out.push(Output::Forget(RecordName::Checkpoint(key.clone())));
        }
        for rank in gone.tables.into_keys() {
            out.push(Output::Forget(RecordName::Table(key.clone(), rank)));
        }
        for name in gone.named {
            if self.keeping.unname(&name) {
                out.push(Output::Forget(name));
            }
        }
    }

    fn kept_of(&self, key: &CheckpointKey) -> Option<(KeptCheckpoint, BTreeMap<Rank, ChunkTable>)> {
        let checkpoint = self.checkpoints.get(key)?;
        let shards: Vec<KeptShard> = checkpoint
            .shards
            .iter()
            .filter_map(|(rank, shard)| self.kept_shard(*rank, shard))
            .collect();
        let parity = checkpoint.parity.iter();
        let parity: Vec<KeptParity> = parity
            .map(|((lane, index), set)| KeptParity {
                lane: *lane,
                index: *index,
                set: set.0,
            })
            .collect();
        // What other nodes have announced they say again.
        if checkpoint.manifest.is_none() && shards.is_empty() {
            return None;
        }
        let record = KeptCheckpoint {
            key: key.clone(),
            owner: checkpoint.owner,
            world_size: checkpoint.world_size,
            manifest: checkpoint.name(),
            state: checkpoint.state,
            durable: checkpoint.durable_wish,
            shards,
            parity,
            description: checkpoint.description_here.map(|it| KeptDescription {
                schema: it.schema,
                torch_metadata: it.torch_metadata,
                durable: it.durable,
                epoch: Some(it.epoch),
            }),
        };
        Some((record, tables_of(checkpoint)))
    }

    fn kept_shard(&self, rank: Rank, shard: &LocalShard) -> Option<KeptShard> {
        shard.digests.as_ref()?;
        Some(KeptShard {
            rank,
            slot: shard.slot,
            capacity: self.slots.get(&shard.slot)?.capacity,
            length: shard.length,
            chunk: shard.chunk,
        })
    }

    /// The manifest, schema and metadata that a record names, as far as they are here.
    fn named_by(&self, record: &KeptCheckpoint) -> Vec<(RecordName, KeptRecord)> {
        let checkpoint = self.checkpoints.get(&record.key);
        let manifest = checkpoint.and_then(|c| c.manifest.clone());
        let of_manifest = manifest.iter().flat_map(|it| it.manifest().enclosures());
        let described = record.description.iter();
        let described = described.flat_map(|it| [it.schema, it.torch_metadata]);
        let enclosures: Vec<Enclosure> = of_manifest.chain(described).collect();
        let enclosures = enclosures.into_iter().filter_map(|it| {
            let bytes = self.enclosures.get(it.digest)?;
            Some(KeptRecord::Enclosure(it.digest, bytes))
        });
        let manifest = manifest
            .iter()
            .map(|it| KeptRecord::Manifest(it.name(), it.shared()));
        let all = manifest.chain(enclosures);
        all.map(|record| (record.name(), record)).collect()
    }
}

/// Of its own shards and of those that it codes for.
fn tables_of(checkpoint: &Checkpoint) -> BTreeMap<Rank, ChunkTable> {
    let mut tables = BTreeMap::new();
    for (rank, shard) in &checkpoint.shards {
        if let Some((leaves, _)) = &shard.digests {
            let (leaves, prints) = (leaves.clone(), shard.prints.clone());
            tables.insert(*rank, ChunkTable { leaves, prints });
        }
    }
    let others = checkpoint.leaves.keys().chain(checkpoint.prints.keys());
    for rank in others {
        tables.entry(*rank).or_insert_with(|| ChunkTable {
            leaves: checkpoint.leaves.get(rank).cloned().unwrap_or_default(),
            prints: checkpoint.prints.get(rank).cloned().unwrap_or_default(),
        });
    }
    tables
}
