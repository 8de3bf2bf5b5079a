//! Effect of the verb *trickle*: shards to the durable tier part by part, manifests last, and back from there.
//!
//! Layout, below the configured place: `NAMESPACE/run-R/step-N/` with `__RANK_0.distcp` (the shard as it is in RAM),
//! `storaged.leaves.RANK` (its chunk digests), `storaged.schema` and `storaged.torch_metadata` (what the manifest names),
//! `.metadata` (for stock PyTorch) and `storaged.manifest`, which ends in its own digest and is written last and only if absent. What no manifest names does not exist.

mod chain;
mod enclosed;
mod fault;
mod increment;
mod index;
mod leftover;
mod listing;
mod packed;
mod parts;
mod provenance;
mod publish;
mod removal;
mod retention;
mod room;
mod runs;
mod share;
mod shared_reads;
pub mod store;
mod succession;
#[cfg(test)]
mod tests;
mod threads;
mod torch_metadata;
mod withdrawal;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chain::{Chain, Form, NotRead};
use fault::{damaged, local};
use futures::{StreamExt, TryStreamExt};
use storaged_codec::{ChunkSize, Digest, Unchecked, root_digest};
use storaged_core::{DurableFault, Leftovers, SlotShard, Trust, UploadBase, UploadTally};
use storaged_wire::{Manifest, ManifestBytes, Namespace, Rank, RunId, SlotId, Step};

use crate::memory::{Memory, ShardSize, Stay};
pub use increment::IncrementReport;
use increment::MeasuredRate;
pub use leftover::{NotFetched, SetAsideBase};
pub use provenance::RequireMac;
pub use retention::Retention;
use room::CopyRoom;
pub use share::TenantRates;
use share::UploadShares;
pub use shared_reads::{FellowError, Fellows, HeldPiece, PassOnError, PassedOn, SharedReadsMode};
use shared_reads::{Reads, SharedReads};
use store::{ObjectKey, Store, StoreError};
pub use threads::TrickleThreads;

/// Bytes of a shard that one read fetches.
const FETCH_BYTES: u64 = 16 << 20;
/// Parts of one shard on their way to the tier at once, also where there is little memory for them: one connection moves a few ten megabytes per
/// second. More of them share a slow link until none gets through within a request's time.
const PARTS_AT_ONCE: usize = 5;
/// The manifest's name within a checkpoint's folder.
const MANIFEST_OBJECT: &str = "storaged.manifest";

/// How uploads behave.
#[derive(Debug, Clone, Copy)]
pub struct TrickleLimits {
    /// Bytes of a part; those of long shards are larger.
    pub part_bytes: u64,
    /// Memory for parts on their way to the tier, in bytes; two fifths of it for reads from there.
    pub in_flight_bytes: u64,
    /// Bytes per second over all uploads of this node; none for as fast as it goes.
    pub rate: Option<u64>,
    /// How full copies are stored.
    pub packing: Packing,
    /// Most increments in a row before the next full copy; 0 for full copies only.
    pub increments: u32,
    /// What stays in the tier.
    pub retention: Retention,
    /// Whether checkpoints without a MAC are used.
    pub require_mac: RequireMac,
}

/// What a copy took.
#[derive(Debug, Clone)]
pub struct Copied {
    /// Bytes of the shard.
    pub bytes: u64,
    /// Bytes of the object that holds it.
    pub stored: u64,
    /// How long it was on its way, where that says how fast the tier is: all of the shard went as it is, and no rate held it back.
    pub took: Option<Duration>,
    /// Details, if it was written as an increment.
    pub increment: Option<IncrementReport>,
}

impl Copied {
    /// For the first guess of what reads take.
    pub fn tally(&self) -> UploadTally {
        let told = self.took.map(|took| UploadTally {
            bytes: self.bytes,
            elapsed_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        });
        told.unwrap_or_default()
    }
}

/// A full copy.
#[derive(Debug, Clone, Copy)]
struct FullCopy {
    stored: u64,
    took: Option<Duration>,
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
    reads: SharedReads,
    memory: Arc<Memory>,
    limits: TrickleLimits,
    shares: Arc<UploadShares>,
    windows: Arc<CopyRoom>,
    rate: Arc<MeasuredRate>,
    sent: leftover::Sent,
    /// One tidying at a time.
    tidying: tokio::sync::Mutex<()>,
    sightings: retention::Sightings,
    threads: Option<TrickleThreads>,
}

/// What is fetched, and into which slot.
#[derive(Debug, Clone, Copy)]
struct FetchTarget<'a> {
    manifest: &'a Arc<ManifestBytes>,
    rank: Rank,
    slot: SlotId,
    /// None: all of it.
    ranges: &'a [Range<u64>],
    stay: Stay,
}

impl FetchTarget<'_> {
    fn size(&self) -> Result<ShardSize, DurableFault> {
        let record = self.manifest.manifest();
        let entry = record.shard(self.rank);
        Ok(ShardSize {
            length: entry.ok_or_else(|| damaged("no such rank"))?.length,
            chunk: record.chunk,
        })
    }
}

fn object(manifest: &Manifest, name: &str) -> Result<ObjectKey, DurableFault> {
    object_at(&manifest.namespace, manifest.run, manifest.step, name)
}

/// A number in the name of an object: names are listed in the order of numbers.
fn in_order(number: u64) -> String {
    format!("{number:020}")
}

fn object_at(
    namespace: &Namespace,
    run: RunId,
    step: Step,
    name: &str,
) -> Result<ObjectKey, DurableFault> {
    let key = format!("{namespace}/run-{run}/step-{step}/{name}");
    key.parse().map_err(DurableFault::from)
}

/// Name of a rank's data object within a checkpoint's folder; the trainer writes it into `.metadata`.
pub fn shard_object(rank: Rank) -> String {
    format!("__{rank}_0.distcp")
}

fn leaves_object(rank: Rank) -> String {
    format!("storaged.leaves.{rank}")
}

impl Trickle {
    /// Over a store and this node's RAM.
    pub fn new(store: Arc<dyn Store>, memory: Arc<Memory>, limits: TrickleLimits) -> Self {
        // A restart waits for what is read: the rate is for copies beside the training.
        let read_bytes = limits.in_flight_bytes / 5 * 2;
        let reads = SharedReads::new(store.clone(), read_bytes);
        let store: Arc<dyn Store> = match limits.rate {
            Some(rate) => Arc::new(store::Throttled::new(store, rate)),
            None => store,
        };
        Self {
            reads,
            store,
            memory,
            limits,
            shares: Arc::new(UploadShares::new(
                limits.in_flight_bytes,
                &TenantRates::new(),
            )),
            windows: CopyRoom::new(read_bytes),
            rate: Arc::new(MeasuredRate::new(limits.rate)),
            sent: leftover::Sent::default(),
            tidying: tokio::sync::Mutex::default(),
            sightings: retention::Sightings::default(),
            threads: None,
        }
    }

    /// With rates for tenants' uploads.
    #[must_use]
    pub fn sharing(mut self, rates: &TenantRates) -> Self {
        self.shares = Arc::new(UploadShares::new(self.limits.in_flight_bytes, rates));
        self
    }

    /// With other nodes to share reads with.
    #[must_use]
    pub fn reading_with(mut self, fellows: Arc<dyn Fellows>) -> Self {
        self.reads = self.reads.with(fellows);
        self
    }

    /// What a peer asks for.
    ///
    /// # Errors
    /// Why it is not given.
    pub async fn read_for_peer(&self, request: &[u8]) -> Result<HeldPiece, PassOnError> {
        self.reads.read_for_peer(request).await
    }

    /// What was passed on so far.
    pub fn passed_on(&self) -> PassedOn {
        self.reads.passed_on()
    }

    async fn length(&self, key: &ObjectKey) -> Result<Option<u64>, DurableFault> {
        match self.store.length(key).await {
            Ok(length) => Ok(Some(length)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Copies a shard, as an increment if there is a base for it: parts that are there already are left. Where there can be no leftovers none are
    /// looked for.
    ///
    /// # Errors
    /// Why not; the upload can be tried again and goes on where it was.
    pub async fn upload(
        &self,
        manifest: &Arc<ManifestBytes>,
        rank: Rank,
        shard: &SlotShard,
        base: Option<&UploadBase>,
        leftovers: Leftovers,
    ) -> Result<Copied, DurableFault> {
        let tenant = self.shares.of(&manifest.manifest().namespace);
        let _turn = tenant.shards.acquire().await.map_err(local)?;
        match self
            .upload_checked(manifest, rank, shard, base, leftovers)
            .await
        {
            Ok(copied) => Ok(copied),
            Err(fault) => Err(self.of_writing(fault).await),
        }
    }

    async fn upload_checked(
        &self,
        manifest: &Arc<ManifestBytes>,
        rank: Rank,
        shard: &SlotShard,
        base: Option<&UploadBase>,
        leftovers: Leftovers,
    ) -> Result<Copied, DurableFault> {
        let record = manifest.manifest();
        let (mut increment, mut took) = (None, None);
        let stored = match self.found(manifest, rank, shard, leftovers).await? {
            Some(length) => length,
            None => {
                if let Some(base) = base {
                    increment = self.upload_increment(manifest, rank, shard, base).await?;
                }
                let stored = match &increment {
                    Some(increment) => increment.bytes,
                    None => {
                        let copy = self.upload_alone(record, rank, shard, leftovers).await?;
                        took = copy.took.filter(|_| !self.is_held_back(&record.namespace));
                        copy.stored
                    }
                };
                self.sent.note(manifest.name(), rank, stored);
                stored
            }
        };
        let leaves = object(record, &leaves_object(rank))?;
        self.put_mine(&leaves, leftover::table_of(shard)).await?;
        Ok(Copied {
            bytes: shard.length,
            stored,
            took,
            increment,
        })
    }

    /// Whether a rate may hold copies of a job back: how long they take says nothing of reads then, which have none.
    fn is_held_back(&self, job: &Namespace) -> bool {
        self.limits.rate.is_some() || self.shares.of(job).has_rate()
    }

    async fn upload_alone(
        &self,
        manifest: &Manifest,
        rank: Rank,
        shard: &SlotShard,
        leftovers: Leftovers,
    ) -> Result<FullCopy, DurableFault> {
        match self.limits.packing {
            Packing::Zstd => {
                let packed = self.upload_packed(manifest, rank, shard, leftovers);
                let stored = packed.await?;
                // Packing takes most of it.
                Ok(FullCopy { stored, took: None })
            }
            Packing::None => {
                let key = object(manifest, &shard_object(rank))?;
                let took = self.upload_parts(&key, manifest, shard, leftovers).await?;
                let stored = shard.length;
                Ok(FullCopy { stored, took })
            }
        }
    }

    /// Reads ranges of a shard into a slot, every chunk verified. No ranges: all of it. A checkpoint that proves damaged
    /// is quarantined, and so are those below it through which the shard was read, down to the one whose bytes are wrong.
    ///
    /// # Errors
    /// Why not.
    pub async fn fetch(
        &self,
        manifest: &Arc<ManifestBytes>,
        rank: Rank,
        slot: SlotId,
        ranges: &[Range<u64>],
        trust: &Trust,
    ) -> Result<Arc<[Digest]>, NotFetched> {
        let record = manifest.manifest();
        let home = record.shard(rank).map(|entry| &entry.node);
        let reads = match (home, self.reads.me()) {
            // Its replicas' readers would have the tier serve it to each of them.
            (Some(home), Some(me)) if home != me => Reads::Together,
            _ => Reads::Alone,
        };
        let fetch = FetchTarget {
            manifest,
            rank,
            slot,
            ranges,
            stay: match reads {
                Reads::Alone if ranges.is_empty() => Stay::Perhaps,
                _ => Stay::No,
            },
        };
        match self.fetch_in_its_form(&fetch, reads, trust).await {
            Err(fault) if fault.is_damage() => {
                let (step, reason) = (record.step, fault.to_string());
                tracing::warn!(%step, %rank, reason, ?reads, "a shard of the durable tier did not come as it should be; it is read once more, by this node alone");
            }
            outcome => return outcome.map_err(NotFetched::from),
        }
        // Bytes may change on their way, and peers may give wrong ones: only what is wrong twice is wrong where it lies.
        let again = self.fetch_once(&fetch, Reads::Alone, Form::Asked, trust);
        let (fault, below) = match again.await {
            Ok(leaves) => return Ok(leaves),
            Err(NotRead::Below(fault, below)) => (fault, below),
            Err(not_read) => (not_read.into(), Vec::new()),
        };
        Err(match fault {
            DurableFault::Damaged(reason) | DurableFault::NotPlain(reason) => {
                self.quarantine_down(manifest, below, reason).await
            }
            fault => fault.into(),
        })
    }

    /// In the form that this node writes; if that is raw, the tier is asked for another only where the shard is not there raw.
    async fn fetch_in_its_form(
        &self,
        fetch: &FetchTarget<'_>,
        reads: Reads,
        trust: &Trust,
    ) -> Result<Arc<[Digest]>, DurableFault> {
        if self.limits.packing == Packing::None && self.limits.increments == 0 {
            match self.fetch_once(fetch, reads, Form::Assumed, trust).await {
                Err(NotRead::NotRaw(_)) => {}
                outcome => return outcome.map_err(DurableFault::from),
            }
        }
        let asked = self.fetch_once(fetch, reads, Form::Asked, trust);
        asked.await.map_err(DurableFault::from)
    }

    async fn fetch_once(
        &self,
        fetch: &FetchTarget<'_>,
        reads: Reads,
        form: Form,
        trust: &Trust,
    ) -> Result<Arc<[Digest]>, NotRead> {
        let FetchTarget {
            manifest,
            rank,
            ranges,
            ..
        } = *fetch;
        let record = manifest.manifest();
        let length = fetch.size()?.length;
        let chain = self.chain(manifest, rank, form, trust).await?;
        let chain = Arc::new(chain.read_by(reads));
        let leaves = chain.leaves();
        let windows = windows_of(ranges, length, record.chunk);
        futures::stream::iter(windows)
            .map(|chunks| self.fetch_window(&chain, fetch, chunks))
            .buffer_unordered(room::PIECES_MAX)
            .try_collect::<()>()
            .await?;
        Ok(leaves)
    }

    async fn fetch_window(
        &self,
        chain: &Arc<Chain>,
        fetch: &FetchTarget<'_>,
        chunks: Range<u64>,
    ) -> Result<(), NotRead> {
        let record = fetch.manifest.manifest();
        let chunk_bytes = record.chunk.bytes() as u64;
        let (first, most) = (chunks.start, (chunks.end - chunks.start) * chunk_bytes);
        let room = self.windows.take(&record.namespace, most).await;
        // Nothing more is read for a trainer that has gone: its slot goes with it.
        self.memory.slot(fetch.slot).ok_or_else(nobody_waits)?;
        let bytes = self.read_chunks(chain, chunks).await?;
        self.place(fetch, &chain.leaves(), first, bytes).await?;
        drop(room);
        Ok(())
    }

    async fn leaves(&self, manifest: &Manifest, rank: Rank) -> Result<Arc<[Digest]>, DurableFault> {
        let entry = manifest
            .shard(rank)
            .ok_or_else(|| damaged("no such rank"))?;
        let key = object(manifest, &leaves_object(rank))?;
        let table = self
            .store
            .get(&key, None)
            .await
            .map_err(DurableFault::from)?;
        let (digests, rest) = table.as_chunks::<32>();
        let leaves: Vec<Digest> = digests.iter().map(Digest::from_bytes).collect();
        let root = root_digest(&leaves, entry.length, manifest.chunk);
        if rest.is_empty() && root == entry.root {
            Ok(leaves.into())
        } else {
            Err(damaged(format!(
                "{key}: digest mismatch: expected the root {}, got {root}",
                entry.root
            )))
        }
    }

    /// Verifies chunks and writes them to their place.
    async fn place(
        &self,
        fetch: &FetchTarget<'_>,
        leaves: &Arc<[Digest]>,
        first: u64,
        bytes: Bytes,
    ) -> Result<(), DurableFault> {
        let (memory, leaves) = (self.memory.clone(), leaves.clone());
        let (slot, stay, size) = (fetch.slot, fetch.stay, fetch.size()?);
        let work = move || {
            let target = memory.put_target(slot, size, stay);
            let target = target.ok_or_else(nobody_waits)?;
            for (index, block) in (first..).zip(bytes.chunks(size.chunk.bytes())) {
                let checked = Unchecked::new(block).verify_in(&leaves, index);
                let checked = checked.map_err(|wrong| damaged(wrong.to_string()))?;
                target.put(&checked).map_err(local)?;
            }
            Ok(())
        };
        self.compute(work).await.map_err(local)?
    }
}

/// Whoever wanted it has gone, and its slot with it. That says nothing of the tier: were it called damage, a trainer that is killed in the
/// middle of a restore would have a sound checkpoint quarantined.
fn nobody_waits() -> DurableFault {
    local("the slot is gone, and who waited for it")
}

/// Runs of chunks that cover ranges of a shard, each chunk once and so many of them together as are read at once. No ranges: all of it.
fn windows_of(ranges: &[Range<u64>], length: u64, chunk: ChunkSize) -> Vec<Range<u64>> {
    let bytes = chunk.bytes() as u64;
    let whole = 0..length;
    let ranges = match ranges {
        [] => std::slice::from_ref(&whole),
        ranges => ranges,
    };
    let covering = ranges.iter().filter(|range| !range.is_empty());
    let mut covering: Vec<Range<u64>> = covering
        .map(|range| range.start / bytes..range.end.min(length).div_ceil(bytes))
        .collect();
    covering.sort_unstable_by_key(|chunks| chunks.start);
    covering.dedup_by(|next, last| {
        let joins = next.start <= last.end;
        if joins {
            last.end = last.end.max(next.end);
        }
        joins
    });
    let at_once = (FETCH_BYTES / bytes).max(1);
    // Cut at the same places for everybody: of ranges that overlap, most windows are the same, and read once for all.
    let windows = covering.into_iter().flat_map(|chunks| {
        let cells = chunks.start / at_once..chunks.end.div_ceil(at_once);
        cells.map(move |cell| {
            (cell * at_once).max(chunks.start)..((cell + 1) * at_once).min(chunks.end)
        })
    });
    windows.collect()
}

/// A manifest's object: its bytes, then its name, so that a damaged one is never taken for another checkpoint.
fn manifest_object(manifest: &ManifestBytes) -> Bytes {
    [manifest.bytes(), manifest.name().as_bytes()]
        .concat()
        .into()
}

fn read_manifest_object(object: &[u8]) -> Result<ManifestBytes, DurableFault> {
    let (bytes, name) = object
        .split_last_chunk::<32>()
        .ok_or_else(|| damaged(format!("expected more than 32 bytes, got {}", object.len())))?;
    ManifestBytes::verify(bytes.to_vec(), Digest::from_bytes(name))
        .map_err(|error| damaged(error.to_string()))
}
