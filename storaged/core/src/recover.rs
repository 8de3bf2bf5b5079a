//! A daemon that starts where another one ended takes over what that one has kept: its records, and with them the slots and the
//! parity sets that they speak of. It is another incarnation all the same. Peers say everything again, ask what it holds, and find
//! nothing to put back.
//!
//! Kept bytes count at once: whoever reads a chunk compares it with its digest, as ever. Beside that every slot is digested again, the
//! newest step's first, and one in which chunks have rotted is a lost block (`encode/rot.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use storaged_codec::{Fingerprint, root_digest};
use storaged_plan::LaneBlocks;
use storaged_wire::peer::CheckpointKey;
use storaged_wire::{
    Digest, KeptCheckpoint, KeptNamespace, KeptParity, KeptRecord, KeptShard, KeptTable,
    ManifestBytes, Namespace, Rank, SharedBytes,
};

use crate::api::{DigestCause, Output, ParityId, SlotEnd};
use crate::budget::Reservation;
use crate::catalog::{Description, LocalShard, Slot, SlotUse, Upload};
use crate::context::Context;
use crate::failed_steps::FailedRestarts;
use crate::place::PromisedTo;

/// Records by what they are.
#[derive(Default)]
struct Records {
    jobs: Vec<KeptNamespace>,
    manifests: BTreeMap<Digest, SharedBytes>,
    enclosures: BTreeMap<Digest, SharedBytes>,
    tables: BTreeMap<(CheckpointKey, Rank), KeptTable>,
    checkpoints: Vec<KeptCheckpoint>,
}

/// Of a checkpoint.
enum KeptManifest {
    Known(Arc<ManifestBytes>),
    /// It was not committed.
    NotYet,
}

impl KeptManifest {
    fn known(&self) -> Option<&ManifestBytes> {
        match self {
            Self::Known(manifest) => Some(manifest),
            Self::NotYet => None,
        }
    }
}

impl Records {
    /// None if it is not what the record names.
    fn manifest_of(&self, kept: &KeptCheckpoint) -> Option<KeptManifest> {
        let Some(name) = kept.manifest else {
            return Some(KeptManifest::NotYet);
        };
        let bytes = self.manifests.get(&name)?.clone();
        let manifest = ManifestBytes::parse(bytes).ok()?;
        (manifest.name() == name).then(|| KeptManifest::Known(Arc::new(manifest)))
    }

    fn sorted(records: Vec<KeptRecord>) -> Self {
        let mut all = Self::default();
        for record in records {
            match record {
                KeptRecord::Namespace(it) => all.jobs.push(*it),
                KeptRecord::Manifest(name, bytes) => drop(all.manifests.insert(name, bytes)),
                KeptRecord::Enclosure(name, bytes) => drop(all.enclosures.insert(name, bytes)),
                KeptRecord::Table(it) => drop(all.tables.insert((it.key.clone(), it.rank), it)),
                KeptRecord::Checkpoint(it) => all.checkpoints.push(it),
            }
        }
        all
    }

    /// The numbers that slots and parity sets have.
    fn highest_number(&self) -> u64 {
        let slots = self.checkpoints.iter().flat_map(|it| &it.shards);
        let sets = self.checkpoints.iter().flat_map(|it| &it.parity);
        let slots = slots.map(|it| it.slot.get());
        slots.chain(sets.map(|it| it.set)).max().unwrap_or(0)
    }
}

impl Context {
    /// Takes over what an earlier daemon of this node has kept. What cannot be used is let go.
    pub(crate) fn recover(&mut self, records: Vec<KeptRecord>) {
        let mut records = Records::sorted(records);
        self.numbers_above(records.highest_number());
        for job in std::mem::take(&mut records.jobs) {
            self.recover_job(job);
        }
        let mut checkpoints = std::mem::take(&mut records.checkpoints);
        checkpoints.sort_by(|a, b| b.key.cmp(&a.key));
        newest_of_each_job_first(&mut checkpoints);
        let mut found = Vec::new();
        for kept in checkpoints {
            if let Some(manifest) = self.recover_blocks(&kept, &records) {
                found.push((kept, manifest));
            }
        }
        found.sort_by(|(a, _), (b, _)| b.key.cmp(&a.key));
        // The oldest first, as they came about: beside a newer one that is safe already, what is still owed would seem to be of no use.
        for (kept, manifest) in found.into_iter().rev() {
            match manifest {
                KeptManifest::Known(manifest) => {
                    self.adopt(manifest, kept.durable);
                    self.reach(&kept.key, kept.state);
                    self.recover_teller(&kept.key);
                }
                KeptManifest::NotYet => self.recover_description(&kept),
            }
        }
    }

    /// Who told of a commit the daemon before knew. With nobody it would stay though no home node has it any more.
    fn recover_teller(&mut self, key: &CheckpointKey) {
        let me = self.me().clone();
        let checkpoint = self.checkpoints.get_mut(key);
        if let Some(checkpoint) = checkpoint.filter(|_| !planted!("kept_commits_have_no_teller")) {
            checkpoint.told_by = Some(me);
        }
    }

    /// What this node has promised it must not forget.
    fn recover_job(&mut self, job: KeptNamespace) {
        let now = self.now;
        self.recover_key(&job);
        self.recover_succession(&job);
        self.recover_damage(&job);
        let table = self.namespace_table(&job.namespace, job.owner);
        if planted!("promises_end_with_the_daemon") {
            return;
        }
        table.fence = job.fence;
        table.promised = job.promised;
        table.granted = job.granted;
        table.promised_to = PromisedTo::since_recovered(job.granted, job.fence);
        table.granted_at = now;
        table.mark = job.mark;
        table.evicted = job.evicted;
        table.copied = job.copied;
        for pin in job.pins.iter().flatten() {
            if !planted!("pins_end_with_the_daemon") {
                table.pins.recover(pin);
            }
        }
        if !planted!("failures_end_with_the_daemon") {
            table.failed = FailedRestarts::recovered(job.failed, now);
        }
    }

    /// Shards, parity and what else there is of a checkpoint; none if its manifest is not there.
    fn recover_blocks(&mut self, kept: &KeptCheckpoint, records: &Records) -> Option<KeptManifest> {
        let key = kept.key.clone();
        let Some(manifest) = records.manifest_of(kept) else {
            self.let_go_of(&kept.shards, &kept.parity);
            return None;
        };
        self.recover_enclosures(kept, manifest.known(), records);
        let table = self.namespace_table(&key.namespace, kept.owner);
        table.world_sizes.insert(key.run, kept.world_size);
        self.checkpoint_entry(&key, kept.owner, kept.world_size);
        for shard in &kept.shards {
            let of_rank = records.tables.get(&(key.clone(), shard.rank));
            let is_here = of_rank
                .is_some_and(|table| self.recover_shard(&key, shard, table, manifest.known()));
            if !is_here {
                self.let_go_of(std::slice::from_ref(shard), &[]);
            }
        }
        if let Some(manifest) = manifest.known() {
            self.recover_parity(kept, manifest, records);
        }
        Some(manifest)
    }

    fn recover_enclosures(
        &mut self,
        kept: &KeptCheckpoint,
        manifest: Option<&ManifestBytes>,
        records: &Records,
    ) {
        let of_manifest = manifest
            .into_iter()
            .flat_map(|it| it.manifest().enclosures());
        let described = kept.description.iter();
        let described = described.flat_map(|it| [it.schema, it.torch_metadata]);
        for enclosure in of_manifest.chain(described) {
            if let Some(bytes) = records.enclosures.get(&enclosure.digest)
                && enclosure.prove(bytes).is_ok()
            {
                self.keep_enclosure(enclosure.digest, bytes.clone());
            }
        }
    }

    /// What a trainer said of a step that has not been committed. The trainer waits for that, and its connection comes back.
    fn recover_description(&mut self, kept: &KeptCheckpoint) {
        if let Some(said) = &kept.description
            && let Some(checkpoint) = self.checkpoints.get_mut(&kept.key)
        {
            let epoch = said.epoch.unwrap_or(1);
            let description =
                Description::new(said.schema, said.torch_metadata, said.durable, epoch);
            checkpoint.description_here = Some(description);
        }
        self.keeping.touch(&kept.key);
        self.announce(&kept.key);
    }

    fn recover_shard(
        &mut self,
        key: &CheckpointKey,
        shard: &KeptShard,
        table: &KeptTable,
        manifest: Option<&ManifestBytes>,
    ) -> bool {
        let KeptShard {
            rank,
            slot,
            capacity,
            length,
            chunk,
        } = *shard;
        let fits = length <= capacity && chunk.count(length) == table.leaves.len() as u64;
        let root = root_digest(&table.leaves, length, chunk);
        let entry = manifest.map(|it| it.manifest().shard(rank));
        let is_named = entry.is_none_or(|entry| {
            entry.is_some_and(|it| it.root == root && it.length == length && it.node == *self.me())
        });
        if !fits || !is_named {
            return false;
        }
        // Nothing that was taken over makes room for this.
        let reserved = self
            .budget
            .reserve(Reservation::Slot(slot), capacity, &key.namespace);
        if reserved.is_err() {
            return false;
        }
        let used_for = SlotUse::Sealed(key.clone());
        let namespace = key.namespace.clone();
        self.slots.insert(
            slot,
            Slot {
                namespace,
                rank,
                capacity,
                used_for,
                readers_before: BTreeSet::new(),
            },
        );
        let leaves: Arc<[Digest]> = table.leaves.as_slice().into();
        let whole_chunks = length.next_multiple_of(chunk.bytes() as u64);
        let resumes_all = planted!("resumed_with_another_length");
        let local = LocalShard {
            slot,
            length: if resumes_all { whole_chunks } else { length },
            chunk,
            digests: Some((leaves, root)),
            prints: prints_of(table),
            readers: BTreeSet::new(),
            upload: Upload::Idle,
            sealed_at: self.now,
        };
        let Some(checkpoint) = self.checkpoints.get_mut(key) else {
            return false;
        };
        checkpoint.shards.insert(rank, local);
        let owner = checkpoint.owner;
        let steps = &mut self.namespace_table(&key.namespace, owner).last_step;
        let last = steps.entry((key.run, rank)).or_insert(key.step);
        *last = (*last).max(key.step);
        self.keeping.inherit(slot);
        self.out.push(Output::Digest {
            slot,
            length,
            chunk,
            cause: DigestCause::Restored,
        });
        true
    }

    /// Parity of lanes that this node codes, and the tables of the shards that it was made of.
    fn recover_parity(
        &mut self,
        kept: &KeptCheckpoint,
        manifest: &ManifestBytes,
        records: &Records,
    ) {
        for parity in &kept.parity {
            let set = ParityId(parity.set);
            let blocks = LaneBlocks::of(manifest, parity.lane);
            let length = blocks.and_then(|blocks| {
                let node = blocks.node(blocks.data.len() + parity.index as usize)?;
                (node == self.me()).then_some(blocks.length)
            });
            let reserved = length.map(|length| {
                let reserved =
                    self.budget
                        .reserve(Reservation::Parity(set), length, &kept.key.namespace);
                reserved.is_ok()
            });
            if reserved != Some(true) {
                self.let_go_of(&[], std::slice::from_ref(parity));
                continue;
            }
            if let Some(checkpoint) = self.checkpoints.get_mut(&kept.key) {
                let place = (parity.lane, parity.index);
                checkpoint.parity.insert(place, set);
            }
        }
        let ranks = manifest.manifest().shards.iter();
        let ranks: Vec<Rank> = ranks.map(|entry| entry.rank).collect();
        let Some(checkpoint) = self.checkpoints.get_mut(&kept.key) else {
            return;
        };
        for rank in ranks {
            let table = records.tables.get(&(kept.key.clone(), rank));
            let Some(table) = table.filter(|_| !checkpoint.shards.contains_key(&rank)) else {
                continue;
            };
            if !table.leaves.is_empty() {
                checkpoint
                    .leaves
                    .insert(rank, table.leaves.as_slice().into());
            }
            if !table.prints.is_empty() {
                checkpoint.prints.insert(rank, prints_of(table));
            }
        }
    }

    /// Memory that no record makes usable.
    fn let_go_of(&mut self, shards: &[KeptShard], parity: &[KeptParity]) {
        let slots = shards.iter().map(|it| Output::DropSlot {
            slot: it.slot,
            end: SlotEnd::LeftToReaders,
        });
        self.out.extend(slots);
        let sets = parity.iter().map(|it| Output::DropParity {
            set: ParityId(it.set),
        });
        self.out.extend(sets);
    }
}

/// Where the budget has become smaller, what is older does not fit: of each job the newest step comes first, then of each the one before.
fn newest_of_each_job_first(newest_first: &mut [KeptCheckpoint]) {
    let mut before: BTreeMap<Namespace, usize> = BTreeMap::new();
    newest_first.sort_by_cached_key(|kept| {
        let newer = before.entry(kept.key.namespace.clone()).or_default();
        *newer += 1;
        *newer
    });
}

fn prints_of(table: &KeptTable) -> Arc<[Fingerprint]> {
    table.prints.as_slice().into()
}
