//! What an earlier upload left behind, and what to make of it: an object counts as uploaded only if this process wrote it
//! or every chunk of it was read back and has its digest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use storaged_codec::{Digest, Unchecked};
use storaged_core::{DurableFault, Leftovers, SlotShard, Trust};
use storaged_wire::{ManifestBytes, Rank};

use super::chain::{Form, expected_object};
use super::index::{Mark, StepKey};
use super::store::ObjectKey;
use super::{FETCH_BYTES, Trickle, increment, leaves_object, object, packed};

/// Shards remembered as sent; beyond them all are forgotten, which costs reading one back.
const SENT_MAX: usize = 65_536;

/// Shards whose objects this process has written whole, and the bytes that they take.
#[derive(Debug, Default)]
pub(super) struct Sent(Mutex<BTreeMap<(Digest, Rank), u64>>);

impl Sent {
    pub fn note(&self, manifest: Digest, rank: Rank, stored: u64) {
        let mut sent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sent.len() >= SENT_MAX {
            sent.clear();
        }
        sent.insert((manifest, rank), stored);
    }

    pub fn forget(&self, manifest: Digest) {
        let mut sent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sent.retain(|(name, _), _| *name != manifest);
    }

    pub fn get(&self, manifest: Digest, rank: Rank) -> Option<u64> {
        let sent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sent.get(&(manifest, rank)).copied()
    }
}

/// A checkpoint that cannot be read, because it is damaged or builds on one that is.
#[derive(Debug, Clone)]
pub struct SetAsideBase {
    /// Its manifest.
    pub manifest: Arc<ManifestBytes>,
    /// What was found, and whether the tier took a mark of it.
    pub fault: DurableFault,
}

/// Why a shard was not fetched.
#[derive(Debug)]
pub struct NotFetched {
    /// What it is for the checkpoint that was asked for.
    pub fault: DurableFault,
    /// What else was set aside, the oldest first.
    pub bases: Vec<SetAsideBase>,
}

impl From<DurableFault> for NotFetched {
    fn from(fault: DurableFault) -> Self {
        let bases = Vec::new();
        Self { fault, bases }
    }
}

impl From<NotFetched> for DurableFault {
    fn from(not_fetched: NotFetched) -> Self {
        not_fetched.fault
    }
}

/// A shard's table of leaves as an object.
pub(super) fn table_of(shard: &SlotShard) -> Bytes {
    let leaves = shard.leaves.iter();
    let table: Vec<u8> = leaves.flat_map(|leaf| *leaf.as_bytes()).collect();
    table.into()
}

impl Trickle {
    /// The bytes that a shard takes in the tier, if it is there whole. What is there of another upload, or of another
    /// form, is taken out of the way.
    pub(super) async fn found(
        &self,
        manifest: &Arc<ManifestBytes>,
        rank: Rank,
        shard: &SlotShard,
        leftovers: Leftovers,
    ) -> Result<Option<u64>, DurableFault> {
        if let Some(stored) = self.sent.get(manifest.name(), rank) {
            return Ok(Some(stored));
        }
        if leftovers == Leftovers::None {
            return Ok(None);
        }
        let record = manifest.manifest();
        let small = [
            increment::index_object(rank),
            packed::frames_object(rank),
            leaves_object(rank),
        ];
        let keys: Result<Vec<ObjectKey>, _> =
            small.iter().map(|name| object(record, name)).collect();
        let keys = keys?;
        let mut asked = Vec::new();
        for key in &keys {
            asked.push(self.length(key));
        }
        let lengths = futures::future::try_join_all(asked).await?;
        // The leaves are written last: without them nothing is whole.
        if lengths[2].is_some() {
            match self.read_back(manifest, rank, shard).await {
                Ok(stored) => return Ok(Some(stored)),
                Err(DurableFault::Damaged(reason) | DurableFault::Unproven(reason)) => {
                    tracing::info!(namespace = %record.namespace, run = %record.run, step = %record.step, %rank, reason,
                        "leftovers of an earlier upload are replaced");
                }
                Err(fault) => return Err(fault),
            }
        }
        for (key, length) in keys.iter().zip(&lengths) {
            if length.is_some() {
                self.store.delete(key).await?;
            }
        }
        Ok(None)
    }

    /// Reads a stored shard and compares every chunk with the one in RAM.
    async fn read_back(
        &self,
        manifest: &Arc<ManifestBytes>,
        rank: Rank,
        shard: &SlotShard,
    ) -> Result<u64, DurableFault> {
        let record = manifest.manifest();
        let stored = self.stored(manifest, rank).await?;
        let (name, expected) = expected_object(&stored, rank, shard.length);
        let key = object(record, &name)?;
        let stored_bytes = self.store.limits().form.stored_bytes(expected);
        let got = self.length(&key).await?;
        // One from before encryption is as long as its bytes.
        if got != Some(stored_bytes) && got != Some(expected) {
            return Err(super::damaged(format!(
                "{key}: expected {stored_bytes} bytes, got {got:?}"
            )));
        }
        let chain = Arc::new(
            self.chain(manifest, rank, Form::Asked, &Trust::Anything)
                .await?,
        );
        let (count, at_once) = (
            record.chunk.count(shard.length),
            (FETCH_BYTES / record.chunk.bytes() as u64).max(1),
        );
        let mut first = 0;
        while first < count {
            let next = (first + at_once).min(count);
            let most = (next - first) * record.chunk.bytes() as u64;
            let room = self.windows.take(&record.namespace, most).await;
            let bytes = self.read_chunks(&chain, first..next).await?;
            for (index, block) in (first..).zip(bytes.chunks(record.chunk.bytes())) {
                let checked = Unchecked::new(block).verify_in(&shard.leaves, index);
                checked.map_err(|wrong| super::damaged(format!("{key}: {wrong}")))?;
            }
            drop(room);
            first = next;
        }
        Ok(expected)
    }

    /// A restore has found damage: marks the checkpoint that it asked for, and those below it that were read through the same bytes, the newest
    /// first. Else each of them would cost a restart before a plan offers one that is sound.
    pub(super) async fn quarantine_down(
        &self,
        manifest: &ManifestBytes,
        below: Vec<Arc<ManifestBytes>>,
        reason: String,
    ) -> NotFetched {
        let fault = self.quarantine(manifest, reason.clone()).await;
        if !fault.is_damage() {
            return fault.into();
        }
        let mut marked = Vec::new();
        for base in &below {
            marked.push(self.quarantine(base, reason.clone()));
        }
        let marked = futures::future::join_all(marked).await;
        let mut bases: Vec<SetAsideBase> = below
            .into_iter()
            .zip(marked)
            .filter(|(_, fault)| fault.is_damage())
            .map(|(manifest, fault)| SetAsideBase { manifest, fault })
            .collect();
        bases.reverse();
        NotFetched { fault, bases }
    }

    async fn quarantine(&self, manifest: &ManifestBytes, reason: String) -> DurableFault {
        if let Err(error) = self.store.check_place().await {
            return error.into();
        }
        let record = manifest.manifest();
        let (namespace, place) = (&record.namespace, StepKey::of(record));
        match self.find_manifest(namespace, place.run, place.step).await {
            Ok(None) => {
                return DurableFault::Conflict(format!(
                    "{place} of {namespace} was removed meanwhile"
                ));
            }
            Ok(Some(_)) => {}
            Err(fault) if fault.is_damage() => {}
            Err(fault) => return fault,
        }
        tracing::error!(%namespace, run = %place.run, step = %place.step, reason,
            "a checkpoint in the durable tier is damaged: it is quarantined");
        let marked = self
            .mark(namespace, place, Mark::Quarantined, &reason)
            .await;
        if let Err(fault) = marked {
            tracing::warn!(%namespace, run = %place.run, step = %place.step, %fault, "the quarantine could not be written down");
            return DurableFault::DamagedUnmarked(reason);
        }
        DurableFault::Damaged(reason)
    }
}
