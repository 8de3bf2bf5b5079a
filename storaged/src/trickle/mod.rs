//! Effect of the verb *trickle*: shards to the durable tier part by part, manifests last, and back from there.
//!
//! Layout, below the configured place: `NAMESPACE/run-R/step-N/` with `__RANK_0.distcp` (the shard as it is in RAM),
//! `storaged.leaves.RANK` (its chunk digests), `.metadata` (for stock PyTorch) and `storaged.manifest`, which is
//! written last and only if absent. What no manifest names does not exist.

pub mod store;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use storaged_codec::{Digest, leaf_digest, root_digest};
use storaged_core::encode::SlotShard;
use storaged_wire::{Manifest, ManifestBytes, Namespace, Rank, RunId, SlotId, Step};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::memory::Memory;
use store::{ObjectKey, Store, StoreError};

/// Shards uploaded at once: each holds one part in RAM.
const UPLOADS_AT_ONCE: usize = 2;
/// Manifests that a listing reads, newest first: a damaged newest one must not hide the next.
const LISTED_MAX: usize = 4;
/// Largest `.metadata` object.
const TORCH_METADATA_BYTES_MAX: usize = 1 << 30;
/// Bytes fetched from the durable tier at once.
const FETCH_BYTES: u64 = 16 << 20;

/// How uploads behave.
#[derive(Debug, Clone, Copy)]
pub struct TrickleLimits {
    /// Bytes of a part.
    pub part_bytes: u64,
    /// Bytes per second over all uploads of this node; none for as fast as it goes.
    pub rate: Option<u64>,
}

/// Copies to and from a durable tier.
pub struct Trickle {
    store: Arc<dyn Store>,
    memory: Arc<Memory>,
    limits: TrickleLimits,
    turns: Semaphore,
    paced: tokio::sync::Mutex<Option<Instant>>,
}

fn folder(namespace: &Namespace, run: RunId, step: Step) -> String {
    format!("{namespace}/run-{run}/step-{step}")
}

fn folder_of(manifest: &Manifest) -> String {
    folder(&manifest.namespace, manifest.run, manifest.step)
}

/// Name of a rank's data object within a checkpoint's folder; the trainer writes it into `.metadata`.
pub fn shard_object(rank: Rank) -> String {
    format!("__{rank}_0.distcp")
}

impl Trickle {
    /// Over a store and this node's RAM.
    pub fn new(store: Arc<dyn Store>, memory: Arc<Memory>, limits: TrickleLimits) -> Self {
        let part_bytes = limits.part_bytes.max(store.part_bytes_min());
        let limits = TrickleLimits { part_bytes, ..limits };
        Self { store, memory, limits, turns: Semaphore::new(UPLOADS_AT_ONCE), paced: tokio::sync::Mutex::default() }
    }

    /// Copies a shard: parts that are there already are left.
    ///
    /// # Errors
    /// In words; the upload can be tried again and goes on where it was.
    pub async fn upload(&self, manifest: &Manifest, rank: Rank, shard: &SlotShard) -> Result<(), String> {
        let _turn = self.turns.acquire().await.map_err(|error| error.to_string())?;
        let in_words = |error: StoreError| error.to_string();
        let key = ObjectKey::new(format!("{}/{}", folder_of(manifest), shard_object(rank))).map_err(in_words)?;
        if self.store.length(&key).await.map_err(in_words)? != Some(shard.length) {
            self.upload_parts(&key, manifest, shard).await?;
        }
        let leaves = ObjectKey::new(format!("{}/storaged.leaves.{rank}", folder_of(manifest))).map_err(in_words)?;
        let table: Vec<u8> = shard.leaves.iter().flat_map(|leaf| *leaf.as_bytes()).collect();
        self.store.put_new(&leaves, table.into()).await.map_err(in_words)
    }

    async fn upload_parts(&self, key: &ObjectKey, manifest: &Manifest, shard: &SlotShard) -> Result<(), String> {
        let in_words = |error: StoreError| error.to_string();
        if shard.length == 0 {
            return self.store.put_new(key, Bytes::new()).await.map_err(in_words);
        }
        let mut upload = self.store.begin(key).await.map_err(in_words)?;
        let part_bytes = self.limits.part_bytes.next_multiple_of(manifest.chunk.bytes() as u64);
        let parts = u32::try_from(shard.length.div_ceil(part_bytes)).map_err(|error| error.to_string())?;
        for number in 0..parts {
            let start = u64::from(number) * part_bytes;
            let range = start..(start + part_bytes).min(shard.length);
            if upload.done.get(&number).is_some_and(|part| part.bytes == range.end - range.start) {
                continue;
            }
            let bytes = self.read_part(manifest, shard, range).await?;
            self.pace(bytes.len() as u64).await;
            self.store.put_part(&mut upload, number, part_bytes, bytes).await.map_err(in_words)?;
        }
        self.store.complete(upload, parts, shard.length).await.map_err(in_words)
    }

    /// Bytes of a part, each chunk verified on its way out of RAM.
    async fn read_part(&self, manifest: &Manifest, shard: &SlotShard, range: Range<u64>) -> Result<Bytes, String> {
        let (memory, shard, chunk) = (self.memory.clone(), shard.clone(), manifest.chunk);
        let read = move || {
            let mut part = BytesMut::zeroed((range.end - range.start) as usize);
            let first = range.start / chunk.bytes() as u64;
            for (index, block) in (first..).zip(part.chunks_mut(chunk.bytes())) {
                memory.read_chunk(&shard, index, block).map_err(|fault| format!("{fault:?}"))?;
            }
            Ok(part.freeze())
        };
        tokio::task::spawn_blocking(read).await.map_err(|error| error.to_string())?
    }

    /// Keeps uploads at the rate that the operator set.
    async fn pace(&self, bytes: u64) {
        let Some(rate) = self.limits.rate else {
            return;
        };
        let mut next = self.paced.lock().await;
        let now = Instant::now();
        let start = next.unwrap_or(now).max(now);
        *next = Some(start + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64));
        drop(next);
        tokio::time::sleep_until(start).await;
    }

    /// Writes `.metadata`, then the manifest: all shards are there.
    ///
    /// # Errors
    /// In words.
    pub async fn publish(&self, manifest: &ManifestBytes) -> Result<(), String> {
        let in_words = |error: StoreError| error.to_string();
        let record = manifest.manifest();
        for entry in &record.shards {
            let key = format!("{}/{}", folder_of(record), shard_object(entry.rank));
            let key = ObjectKey::new(key).map_err(in_words)?;
            let got = self.store.length(&key).await.map_err(in_words)?;
            if got != Some(entry.length) {
                return Err(format!("{key}: expected {} bytes, got {got:?}", entry.length));
            }
        }
        if !record.torch_metadata.is_empty() {
            let metadata = unpack(&record.torch_metadata)?;
            let key = ObjectKey::new(format!("{}/.metadata", folder_of(record))).map_err(in_words)?;
            self.store.put_new(&key, metadata.into()).await.map_err(in_words)?;
        }
        let key = ObjectKey::new(format!("{}/storaged.manifest", folder_of(record))).map_err(in_words)?;
        let bytes = Bytes::copy_from_slice(manifest.bytes());
        self.store.put_new(&key, bytes).await.map_err(in_words)
    }

    /// The newest manifests of a namespace that can be read and are sound, newest first.
    ///
    /// # Errors
    /// In words, if the store cannot be listed.
    pub async fn list(&self, namespace: &Namespace) -> Result<Vec<Arc<ManifestBytes>>, String> {
        let mut found = Vec::new();
        for run in self.numbered(namespace.as_str(), "run-").await? {
            for step in self.numbered(&format!("{namespace}/run-{run}"), "step-").await? {
                let manifest = self.manifest_at(namespace, RunId::new(run), Step::new(step)).await;
                match manifest {
                    Ok(Some(manifest)) => found.push(Arc::new(manifest)),
                    Ok(None) => {}
                    Err(reason) => tracing::warn!(%namespace, run, step, reason, "a manifest in the durable tier cannot be used"),
                }
                if found.len() >= LISTED_MAX {
                    return Ok(found);
                }
            }
        }
        Ok(found)
    }

    /// Numbers of the folders `PREFIXnumber`, highest first.
    async fn numbered(&self, parent: &str, prefix: &str) -> Result<Vec<u64>, String> {
        let key = ObjectKey::new(parent).map_err(|error| error.to_string())?;
        let names = self.store.folders(&key).await.map_err(|error| error.to_string())?;
        let parse = |name: &String| name.strip_prefix(prefix)?.parse().ok();
        let mut numbers: Vec<u64> = names.iter().filter_map(parse).collect();
        numbers.sort_unstable_by(|a, b| b.cmp(a));
        Ok(numbers)
    }

    async fn manifest_at(&self, namespace: &Namespace, run: RunId, step: Step) -> Result<Option<ManifestBytes>, String> {
        let key = format!("{}/storaged.manifest", folder(namespace, run, step));
        let key = ObjectKey::new(key).map_err(|error| error.to_string())?;
        let bytes = match self.store.get(&key, None).await {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            outcome => outcome.map_err(|error| error.to_string())?,
        };
        let manifest = ManifestBytes::parse(bytes.to_vec()).map_err(|error| error.to_string())?;
        let record = manifest.manifest();
        let in_place = record.namespace == *namespace && record.run == run && record.step == step;
        match in_place {
            true => Ok(Some(manifest)),
            false => Err(format!("it is of run {} step {} of {}", record.run, record.step, record.namespace)),
        }
    }

    /// Reads ranges of a shard into a slot, every chunk verified. No ranges: all of it.
    ///
    /// # Errors
    /// In words.
    pub async fn fetch(
        &self,
        manifest: &Manifest,
        rank: Rank,
        slot: SlotId,
        ranges: &[Range<u64>],
    ) -> Result<Arc<[Digest]>, String> {
        let entry = manifest.shard(rank).ok_or("no such rank")?;
        let leaves = self.leaves(manifest, rank).await?;
        let key = ObjectKey::new(format!("{}/{}", folder_of(manifest), shard_object(rank)));
        let key = key.map_err(|error| error.to_string())?;
        let whole = [0..entry.length];
        let chunk_bytes = manifest.chunk.bytes() as u64;
        for range in if ranges.is_empty() { &whole[..] } else { ranges } {
            let end = range.end.next_multiple_of(chunk_bytes).min(entry.length);
            let mut at = range.start / chunk_bytes * chunk_bytes;
            while at < end {
                let next = (at + FETCH_BYTES).min(end);
                let bytes = self.store.get(&key, Some(at..next)).await.map_err(|error| error.to_string())?;
                self.place(manifest, &leaves, slot, at, bytes).await?;
                at = next;
            }
        }
        Ok(leaves)
    }

    async fn leaves(&self, manifest: &Manifest, rank: Rank) -> Result<Arc<[Digest]>, String> {
        let entry = manifest.shard(rank).ok_or("no such rank")?;
        let key = ObjectKey::new(format!("{}/storaged.leaves.{rank}", folder_of(manifest)));
        let key = key.map_err(|error| error.to_string())?;
        let table = self.store.get(&key, None).await.map_err(|error| error.to_string())?;
        let (digests, rest) = table.as_chunks::<32>();
        let leaves: Vec<Digest> = digests.iter().map(Digest::from_bytes).collect();
        let root = root_digest(&leaves, entry.length, manifest.chunk);
        match rest.is_empty() && root == entry.root {
            true => Ok(leaves.into()),
            false => Err(format!("{key}: digest mismatch: expected the root {}, got {root}", entry.root)),
        }
    }

    /// Verifies chunks and writes them to their place.
    async fn place(&self, manifest: &Manifest, leaves: &Arc<[Digest]>, slot: SlotId, at: u64, bytes: Bytes) -> Result<(), String> {
        let (memory, leaves, chunk) = (self.memory.clone(), leaves.clone(), manifest.chunk);
        let work = move || {
            let slot = memory.slot(slot).ok_or("the slot is gone")?;
            let first = at / chunk.bytes() as u64;
            for (index, block) in (first..).zip(bytes.chunks(chunk.bytes())) {
                if leaves.get(index as usize) != Some(&leaf_digest(block, index)) {
                    return Err(format!("digest mismatch in chunk {index}"));
                }
                let offset = index * chunk.bytes() as u64;
                slot.write_at(offset, block).map_err(|error| error.to_string())?;
            }
            Ok(())
        };
        tokio::task::spawn_blocking(work).await.map_err(|error| error.to_string())?
    }
}

fn unpack(packed: &[u8]) -> Result<Vec<u8>, String> {
    zstd::bulk::decompress(packed, TORCH_METADATA_BYTES_MAX.min(packed.len().saturating_mul(1000)))
        .map_err(|error| format!("the torch metadata cannot be unpacked: {error}"))
}
