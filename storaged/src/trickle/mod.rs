//! Effect of the verb *trickle*: shards to the durable tier part by part, manifests last, and back from there.
//!
//! Layout, below the configured place: `NAMESPACE/run-R/step-N/` with `__RANK_0.distcp` (the shard as it is in RAM),
//! `storaged.leaves.RANK` (its chunk digests), `.metadata` (for stock PyTorch) and `storaged.manifest`, which ends in its own digest and
//! is written last and only if absent. What no manifest names does not exist.

mod chain;
mod increment;
mod packed;
pub mod store;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use storaged_codec::{Digest, leaf_digest, root_digest};
use storaged_core::UploadBase;
use storaged_core::encode::SlotShard;
use storaged_wire::{Manifest, ManifestBytes, Namespace, Rank, RunId, SlotId, Step};
use tokio::sync::Semaphore;

use crate::memory::Memory;
use chain::{Stored, expected_object};
pub use increment::IncrementReport;
use increment::MeasuredRate;
use store::{KeyPrefix, ObjectKey, PartBytes, PartNumber, Store, StoreError, Upload};

/// Shards uploaded at once: each holds one part in RAM.
const UPLOADS_AT_ONCE: usize = 2;
/// Manifests that a listing reads, newest first: a damaged newest one must not hide the next.
const LISTED_MAX: usize = 4;
/// Largest `.metadata` object.
const TORCH_METADATA_BYTES_MAX: usize = 1 << 30;
/// Bytes fetched from the durable tier at once.
const FETCH_BYTES: u64 = 16 << 20;
/// The manifest's name within a checkpoint's folder.
const MANIFEST_OBJECT: &str = "storaged.manifest";

/// How uploads behave.
#[derive(Debug, Clone, Copy)]
pub struct TrickleLimits {
    /// Bytes of a part.
    pub part_bytes: u64,
    /// Bytes per second over all uploads of this node; none for as fast as it goes.
    pub rate: Option<u64>,
    /// How full copies are stored.
    pub packing: Packing,
    /// Most increments in a row before the next full copy; 0 for full copies only.
    pub increments: u32,
}

/// What a copy took.
#[derive(Debug, Clone)]
pub struct Copied {
    /// Bytes of the shard.
    pub bytes: u64,
    /// Bytes of the object that holds it.
    pub stored: u64,
    /// Details, if it was written as an increment.
    pub increment: Option<IncrementReport>,
}

/// How shards are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// As they are in RAM: stock PyTorch reads them.
    #[default]
    None,
    /// Every chunk a zstd frame: smaller, read by storaged alone.
    Zstd,
}

/// Copies to and from a durable tier.
pub struct Trickle {
    store: Arc<dyn Store>,
    memory: Arc<Memory>,
    limits: TrickleLimits,
    turns: Semaphore,
    rate: Arc<MeasuredRate>,
}

fn object(manifest: &Manifest, name: &str) -> Result<ObjectKey, String> {
    object_at(&manifest.namespace, manifest.run, manifest.step, name)
}

fn object_at(
    namespace: &Namespace,
    run: RunId,
    step: Step,
    name: &str,
) -> Result<ObjectKey, String> {
    let key = format!("{namespace}/run-{run}/step-{step}/{name}");
    key.parse().map_err(in_words)
}

/// Name of a rank's data object within a checkpoint's folder; the trainer writes it into `.metadata`.
pub fn shard_object(rank: Rank) -> String {
    format!("__{rank}_0.distcp")
}

fn leaves_object(rank: Rank) -> String {
    format!("storaged.leaves.{rank}")
}

fn in_words(error: StoreError) -> String {
    crate::driver::chain(&error)
}

impl Trickle {
    /// Over a store and this node's RAM.
    pub fn new(store: Arc<dyn Store>, memory: Arc<Memory>, limits: TrickleLimits) -> Self {
        let store: Arc<dyn Store> = match limits.rate {
            Some(rate) => Arc::new(store::Throttled::new(store, rate)),
            None => store,
        };
        Self {
            store,
            memory,
            limits,
            turns: Semaphore::new(UPLOADS_AT_ONCE),
            rate: Arc::new(MeasuredRate::new(limits.rate)),
        }
    }

    async fn length(&self, key: &ObjectKey) -> Result<Option<u64>, String> {
        match self.store.length(key).await {
            Ok(length) => Ok(Some(length)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(in_words(error)),
        }
    }

    /// Copies a shard, as an increment if there is a base for it: parts that are there already are left.
    ///
    /// # Errors
    /// In words; the upload can be tried again and goes on where it was.
    pub async fn upload(
        &self,
        manifest: &ManifestBytes,
        rank: Rank,
        shard: &SlotShard,
        base: Option<&UploadBase>,
    ) -> Result<Copied, String> {
        let turn = self.turns.acquire().await;
        let _turn = turn.map_err(|error| error.to_string())?;
        let record = manifest.manifest();
        let stored = self.stored(manifest, rank).await?;
        let (name, length) = expected_object(&stored, rank, shard.length);
        let there = self.length(&object(record, &name)?).await? == Some(length);
        let (mut stored, mut increment) = (length, None);
        if !there {
            if let Some(base) = base {
                increment = self.upload_increment(manifest, rank, shard, base).await?;
            }
            stored = match &increment {
                Some(increment) => increment.bytes,
                None => self.upload_alone(record, rank, shard).await?,
            };
        }
        let table: Vec<u8> = shard
            .leaves
            .iter()
            .flat_map(|leaf| *leaf.as_bytes())
            .collect();
        let leaves = object(record, &leaves_object(rank))?;
        let put = self.store.put_new(&leaves, table.into()).await;
        put.map_err(in_words)?;
        Ok(Copied {
            bytes: shard.length,
            stored,
            increment,
        })
    }

    async fn upload_alone(
        &self,
        manifest: &Manifest,
        rank: Rank,
        shard: &SlotShard,
    ) -> Result<u64, String> {
        match self.limits.packing {
            Packing::Zstd => self.upload_packed(manifest, rank, shard).await,
            Packing::None => {
                let key = object(manifest, &shard_object(rank))?;
                self.upload_parts(&key, manifest, shard).await?;
                Ok(shard.length)
            }
        }
    }

    async fn upload_parts(
        &self,
        key: &ObjectKey,
        manifest: &Manifest,
        shard: &SlotShard,
    ) -> Result<(), String> {
        if shard.length == 0 {
            return self
                .store
                .put_new(key, Bytes::new())
                .await
                .map_err(in_words);
        }
        let part_bytes = self.part_bytes(manifest, shard.length)?;
        let mut upload = self
            .store
            .resume_or_begin(key, part_bytes)
            .await
            .map_err(in_words)?;
        let parts =
            u32::try_from(part_bytes.parts_of(shard.length)).map_err(|error| error.to_string())?;
        for number in 0..parts {
            let start = u64::from(number) * part_bytes.get();
            let range = start..(start + part_bytes.get()).min(shard.length);
            let bytes = self.read_part(manifest, shard, range).await?;
            self.put_once(&mut upload, number, bytes).await?;
        }
        self.store
            .complete(&upload, shard.length)
            .await
            .map_err(in_words)
    }

    /// Size of a shard's parts: larger ones for a shard of very many, and never a part of a chunk.
    fn part_bytes(&self, manifest: &Manifest, length: u64) -> Result<PartBytes, String> {
        let limits = self.store.limits();
        // A sixty-fourth more than the shard: packing may make what cannot shrink a little longer.
        let longest = length.saturating_add(length / 64);
        let fewest = longest.div_ceil(u64::from(limits.parts_max));
        let wanted = self
            .limits
            .part_bytes
            .max(limits.part_bytes_min)
            .max(fewest);
        let whole = wanted.next_multiple_of(manifest.chunk.bytes() as u64);
        PartBytes::new(whole, &limits).map_err(in_words)
    }

    /// Writes a part unless an earlier life of the daemon has written it.
    async fn put_once(&self, upload: &mut Upload, number: u32, bytes: Bytes) -> Result<(), String> {
        let number = PartNumber(number);
        let there = upload.done().get(&number);
        if there.is_some_and(|part| part.matches(&bytes)) {
            return Ok(());
        }
        let (length, began) = (bytes.len(), tokio::time::Instant::now());
        let state = self.store.put_part(upload, number, bytes).await;
        upload.note(number, state.map_err(in_words)?);
        self.rate.note(length, began.elapsed().as_secs_f64());
        Ok(())
    }

    /// Bytes of a part, each chunk verified on its way out of RAM.
    async fn read_part(
        &self,
        manifest: &Manifest,
        shard: &SlotShard,
        range: Range<u64>,
    ) -> Result<Bytes, String> {
        let (memory, shard, chunk) = (self.memory.clone(), shard.clone(), manifest.chunk);
        let read = move || {
            let mut part = BytesMut::zeroed((range.end - range.start) as usize);
            let first = range.start / chunk.bytes() as u64;
            for (index, block) in (first..).zip(part.chunks_mut(chunk.bytes())) {
                memory
                    .read_chunk(&shard, index, block)
                    .map_err(|fault| format!("{fault:?}"))?;
            }
            Ok(part.freeze())
        };
        tokio::task::spawn_blocking(read)
            .await
            .map_err(|error| error.to_string())?
    }

    /// Writes `.metadata`, then the manifest: all shards are there.
    ///
    /// # Errors
    /// In words.
    pub async fn publish(&self, manifest: &ManifestBytes) -> Result<(), String> {
        let record = manifest.manifest();
        let mut all_raw = true;
        for entry in &record.shards {
            let stored = self.stored(manifest, entry.rank).await?;
            all_raw &= matches!(stored, Stored::Raw);
            let (name, expected) = expected_object(&stored, entry.rank, entry.length);
            let key = object(record, &name)?;
            match self.length(&key).await? {
                Some(got) if got == expected => {}
                Some(got) => return Err(format!("{key}: expected {expected} bytes, got {got}")),
                None => return Err(format!("{key}: expected {expected} bytes, got no object")),
            }
        }
        if all_raw && !record.torch_metadata.is_empty() {
            let metadata = unpack(&record.torch_metadata)?;
            let key = object(record, ".metadata")?;
            self.store
                .put_new(&key, metadata.into())
                .await
                .map_err(in_words)?;
        }
        let key = object(record, MANIFEST_OBJECT)?;
        let object = manifest_object(manifest);
        self.store.put_new(&key, object).await.map_err(in_words)
    }

    /// The newest manifests of a namespace that can be read and are sound, newest first.
    ///
    /// # Errors
    /// In words, if the store cannot be listed.
    pub async fn list(&self, namespace: &Namespace) -> Result<Vec<Arc<ManifestBytes>>, String> {
        let folder: ObjectKey = namespace.as_str().parse().map_err(in_words)?;
        let entries = self
            .store
            .list(&KeyPrefix::folder(folder))
            .await
            .map_err(in_words)?;
        let mut places: Vec<(RunId, Step, ObjectKey)> = entries
            .into_iter()
            .filter_map(|entry| {
                place_of(namespace, &entry.key).map(|(run, step)| (run, step, entry.key))
            })
            .collect();
        places.sort_by_key(|(run, step, _)| std::cmp::Reverse((*run, *step)));
        let mut found = Vec::new();
        for (run, step, key) in places {
            match self.usable_at(namespace, run, step).await {
                Ok(manifest) => found.push(Arc::new(manifest)),
                Err(reason) => {
                    tracing::warn!(%key, reason, "a checkpoint in the durable tier cannot be used")
                }
            }
            if found.len() >= LISTED_MAX {
                break;
            }
        }
        Ok(found)
    }

    async fn usable_at(
        &self,
        namespace: &Namespace,
        run: RunId,
        step: Step,
    ) -> Result<ManifestBytes, String> {
        let manifest = self.manifest_at(namespace, run, step).await?;
        self.bases_are_there(&manifest).await?;
        Ok(manifest)
    }

    async fn manifest_at(
        &self,
        namespace: &Namespace,
        run: RunId,
        step: Step,
    ) -> Result<ManifestBytes, String> {
        let key = object_at(namespace, run, step, MANIFEST_OBJECT)?;
        let bytes = self.store.get(&key, None).await.map_err(in_words)?;
        let manifest = read_manifest_object(&bytes)?;
        let record = manifest.manifest();
        let in_place = record.namespace == *namespace && record.run == run && record.step == step;
        match in_place {
            true => Ok(manifest),
            false => Err(format!(
                "it is of run {} step {} of {}",
                record.run, record.step, record.namespace
            )),
        }
    }

    /// Reads ranges of a shard into a slot, every chunk verified. No ranges: all of it.
    ///
    /// # Errors
    /// In words.
    pub async fn fetch(
        &self,
        manifest: &Arc<ManifestBytes>,
        rank: Rank,
        slot: SlotId,
        ranges: &[Range<u64>],
    ) -> Result<Arc<[Digest]>, String> {
        let record = manifest.manifest();
        let entry = record.shard(rank).ok_or("no such rank")?;
        let chain = Arc::new(self.chain(manifest, rank).await?);
        let leaves = chain.leaves();
        let whole = std::iter::once(0..entry.length);
        let whole: Vec<Range<u64>> = whole.collect();
        let ranges = if ranges.is_empty() {
            &whole[..]
        } else {
            ranges
        };
        let chunk_bytes = record.chunk.bytes() as u64;
        let at_once = (FETCH_BYTES / chunk_bytes).max(1);
        for range in ranges {
            let last = range.end.min(entry.length).div_ceil(chunk_bytes);
            let mut first = range.start / chunk_bytes;
            while first < last {
                let next = (first + at_once).min(last);
                let bytes = self.read_chunks(&chain, first..next).await?;
                self.place(record, &leaves, slot, first * chunk_bytes, bytes)
                    .await?;
                first = next;
            }
        }
        Ok(leaves)
    }

    async fn leaves(&self, manifest: &Manifest, rank: Rank) -> Result<Arc<[Digest]>, String> {
        let entry = manifest.shard(rank).ok_or("no such rank")?;
        let key = object(manifest, &leaves_object(rank))?;
        let table = self.store.get(&key, None).await.map_err(in_words)?;
        let (digests, rest) = table.as_chunks::<32>();
        let leaves: Vec<Digest> = digests.iter().map(Digest::from_bytes).collect();
        let root = root_digest(&leaves, entry.length, manifest.chunk);
        match rest.is_empty() && root == entry.root {
            true => Ok(leaves.into()),
            false => Err(format!(
                "{key}: digest mismatch: expected the root {}, got {root}",
                entry.root
            )),
        }
    }

    /// Verifies chunks and writes them to their place.
    async fn place(
        &self,
        manifest: &Manifest,
        leaves: &Arc<[Digest]>,
        slot: SlotId,
        at: u64,
        bytes: Bytes,
    ) -> Result<(), String> {
        let (memory, leaves, chunk) = (self.memory.clone(), leaves.clone(), manifest.chunk);
        let work = move || {
            let slot = memory.slot(slot).ok_or("the slot is gone")?;
            let first = at / chunk.bytes() as u64;
            for (index, block) in (first..).zip(bytes.chunks(chunk.bytes())) {
                if leaves.get(index as usize) != Some(&leaf_digest(block, index)) {
                    return Err(format!("digest mismatch in chunk {index}"));
                }
                let offset = index * chunk.bytes() as u64;
                slot.write_at(offset, block)
                    .map_err(|error| error.to_string())?;
            }
            Ok(())
        };
        tokio::task::spawn_blocking(work)
            .await
            .map_err(|error| error.to_string())?
    }
}

/// A manifest's object: its bytes, then its name, so that a damaged one is never taken for another checkpoint.
fn manifest_object(manifest: &ManifestBytes) -> Bytes {
    [manifest.bytes(), manifest.name().as_bytes()]
        .concat()
        .into()
}

fn read_manifest_object(object: &[u8]) -> Result<ManifestBytes, String> {
    let (bytes, name) = object
        .split_last_chunk::<32>()
        .ok_or_else(|| format!("expected more than 32 bytes, got {}", object.len()))?;
    ManifestBytes::verify(bytes.to_vec(), Digest::from_bytes(name))
        .map_err(|error| error.to_string())
}

/// The run and step of a manifest's key.
fn place_of(namespace: &Namespace, key: &ObjectKey) -> Option<(RunId, Step)> {
    let rest = key
        .as_str()
        .strip_prefix(namespace.as_str())?
        .strip_prefix("/run-")?;
    let (run, rest) = rest.split_once("/step-")?;
    let (step, name) = rest.split_once('/')?;
    let place = (run.parse().ok()?, Step::new(step.parse().ok()?));
    (name == MANIFEST_OBJECT).then_some(place)
}

fn unpack(packed: &[u8]) -> Result<Vec<u8>, String> {
    zstd::bulk::decompress(
        packed,
        TORCH_METADATA_BYTES_MAX.min(packed.len().saturating_mul(1000)),
    )
    .map_err(|error| format!("the torch metadata cannot be unpacked: {error}"))
}
