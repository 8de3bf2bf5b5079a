//! Objects that are written part by part: how large parts are, and how they are sent beside one another. A part is read into memory once it
//! has room there ([`super::room`]), and what an earlier life of the daemon has written stays.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use storaged_arena::AlignedBytes;
use storaged_core::{DurableFault, Leftovers, SlotShard};
use storaged_wire::Manifest;
use tokio::time::Instant;

use super::fault::local;
use super::room::PIECES_MAX;
use super::share::{Payment, Turn};
use super::store::{ObjectKey, PartBytes, PartNumber, PartState, StoreError, StoreLimits, Upload};
use super::{PARTS_AT_ONCE, Trickle};

/// A long shard has about so many parts: each is a request, and a line of what completes the upload.
const PARTS_WANTED: u64 = 256;
/// Parts that grew are no larger than this part of the memory for parts: one connection moves a few ten megabytes per second, so that a
/// fast node needs some.
const CONNECTIONS_MIN: u64 = 10;
/// Shards that share the memory for parts, of two tenants that copy two each.
const SHARDS_BESIDE: u64 = 4;
/// Nor larger than this, however much memory there is: one that fails is sent again.
const PART_BYTES_GROWN_MAX: u64 = 256 << 20;

/// A part that the tier has.
pub(super) struct PutPart {
    number: PartNumber,
    /// None if it was there.
    sent: Option<PartState>,
}

/// What the size of parts follows from.
#[derive(Debug, Clone, Copy)]
pub(super) struct ObjectSize {
    /// No part ends within so many bytes: a power of two.
    pub unit: u64,
    /// Bytes of the object, at most.
    pub length: u64,
}

impl ObjectSize {
    /// Of an object of a shard: no part ends within a chunk.
    pub fn of_shard(manifest: &Manifest, length: u64) -> Self {
        let unit = manifest.chunk.bytes() as u64;
        Self { unit, length }
    }

    /// Size of its parts: what is configured, and for a long object some times that, so that what suits the tier's blocks does so still.
    pub fn part_bytes(
        self,
        configured: u64,
        in_flight: u64,
        limits: &StoreLimits,
    ) -> Result<PartBytes, StoreError> {
        let grown = (in_flight / CONNECTIONS_MIN).min(PART_BYTES_GROWN_MAX);
        let times = self.length.div_ceil(PARTS_WANTED).div_ceil(configured);
        let wanted = configured * times.min(grown / configured).max(1);
        // Both are powers of two.
        let unit = self.unit.max(limits.form.part_unit());
        let most = limits.part_bytes_max / unit * unit;
        let bytes = wanted.next_multiple_of(unit).min(most);
        let fewest = self.fewest_bytes(limits).next_multiple_of(unit);
        PartBytes::new(bytes.max(fewest), limits)
    }

    /// The store takes no shorter ones, or not as many.
    fn fewest_bytes(self, limits: &StoreLimits) -> u64 {
        // A sixty-fourth more is counted: packing may make what cannot shrink a little longer.
        let longest = self.length.saturating_add(self.length / 64);
        let parts = u64::from(limits.parts_max);
        limits.part_bytes_min.max(longest.div_ceil(parts))
    }
}

/// A part that is in memory.
pub(super) struct MadePart {
    pub number: u32,
    pub bytes: Bytes,
    pub turn: Turn,
}

impl Trickle {
    /// Copies a shard as it is. How long its parts were on their way; none if some were there already.
    pub(super) async fn upload_parts(
        &self,
        key: &ObjectKey,
        manifest: &Manifest,
        shard: &SlotShard,
        leftovers: Leftovers,
    ) -> Result<Option<Duration>, DurableFault> {
        if shard.length == 0 {
            self.store.put_new(key, Bytes::new()).await?;
            return Ok(None);
        }
        let size = ObjectSize::of_shard(manifest, shard.length);
        let upload = self.begin_or_go_on(key, size, leftovers);
        let upload = upload.await?;
        let parts = upload.part_bytes().parts_of(shard.length);
        let parts = u32::try_from(parts).map_err(local)?;
        let began = Instant::now();
        let put = futures::stream::iter(0..parts)
            .map(|number| self.put_range(&upload, number, manifest, shard))
            .buffer_unordered(self.parts_at_once(&upload));
        let put: Vec<PutPart> = put.try_collect().await?;
        let took = began.elapsed();
        let sent = put.iter().filter_map(|part| part.sent.as_ref());
        let bytes: u64 = sent.map(|state| state.length).sum();
        if bytes > 0 {
            self.rate.note(bytes, took.as_secs_f64());
        }
        let all_went = put.iter().all(|part| part.sent.is_some());
        self.complete(upload, put, shard.length).await?;
        Ok(all_went.then_some(took))
    }

    /// Sends parts as they are made, so many beside one another.
    pub(super) async fn put_made(
        &self,
        upload: &Upload,
        parts: BoxStream<'_, Result<MadePart, DurableFault>>,
        at_once: usize,
    ) -> Result<Vec<PutPart>, DurableFault> {
        let under_way = AtomicU64::new(0);
        let put = parts.map(|part| self.put_beside(upload, part, &under_way));
        put.buffer_unordered(at_once).try_collect().await
    }

    /// How many parts of an object are on their way at once.
    pub(super) fn parts_at_once(&self, upload: &Upload) -> usize {
        let of_shard = self.limits.in_flight_bytes / SHARDS_BESIDE;
        let parts = of_shard / upload.part_bytes().get();
        usize::try_from(parts).map_or(PIECES_MAX, |parts| parts.clamp(PARTS_AT_ONCE, PIECES_MAX))
    }

    /// Sends one of several parts, and measures what the way to the tier carries: they share it.
    async fn put_beside(
        &self,
        upload: &Upload,
        part: Result<MadePart, DurableFault>,
        under_way: &AtomicU64,
    ) -> Result<PutPart, DurableFault> {
        let part = part?;
        let (length, began) = (part.bytes.len() as u64, Instant::now());
        let all = under_way.fetch_add(1, Ordering::Relaxed) + 1;
        let put = self.put_part(upload, part).await?;
        under_way.fetch_sub(1, Ordering::Relaxed);
        if put.sent.is_some() {
            self.rate.note(length * all, began.elapsed().as_secs_f64());
        }
        Ok(put)
    }

    pub(super) async fn complete(
        &self,
        mut upload: Upload,
        parts: Vec<PutPart>,
        length: u64,
    ) -> Result<(), DurableFault> {
        for PutPart { number, sent } in parts {
            if let Some(state) = sent {
                upload.note(number, state);
            }
        }
        let done = self.store.complete(&upload, length).await;
        done.map_err(DurableFault::from)
    }

    /// An upload of an object of at most this size. One that an earlier life has left keeps the size of its parts.
    pub(super) async fn begin_or_go_on(
        &self,
        key: &ObjectKey,
        size: ObjectSize,
        leftovers: Leftovers,
    ) -> Result<Upload, DurableFault> {
        let part_bytes = self.part_bytes(size)?;
        let found = self.store.resume_or_begin(key, part_bytes, leftovers);
        let found = found.await.map_err(DurableFault::from)?;
        let each = found.part_bytes();
        let few = each.parts_of(size.length) <= u64::from(self.store.limits().parts_max);
        if each.get().is_multiple_of(size.unit) && few && found.lies_within(size.length) {
            return Ok(found);
        }
        tracing::info!(%key, part_bytes = each.get(), "an upload that was left unfinished cannot go on in parts of this size: it begins anew");
        let begun = self.store.begin(key, part_bytes).await;
        begun.map_err(DurableFault::from)
    }

    async fn put_range(
        &self,
        upload: &Upload,
        number: u32,
        manifest: &Manifest,
        shard: &SlotShard,
    ) -> Result<PutPart, DurableFault> {
        let part_bytes = upload.part_bytes().get();
        let start = u64::from(number) * part_bytes;
        let range = start..(start + part_bytes).min(shard.length);
        let number_there = PartNumber(number);
        let (job, length) = (&manifest.namespace, range.end - range.start);
        if upload.done().contains_key(&number_there) {
            // What is there already costs no rate. Where it is something else, its memory is given back before others pay.
            let _turn = self.shares.turn(job, length, Payment::IfSent).await?;
            let bytes = self.read_part(manifest, shard, range.clone()).await?;
            if (self.store.has_part(upload, number_there, &bytes)).await? {
                let number = number_there;
                return Ok(PutPart { number, sent: None });
            }
        }
        let turn = self.shares.turn(job, length, Payment::First).await?;
        let bytes = self.read_part(manifest, shard, range).await?;
        let part = MadePart {
            number,
            bytes,
            turn,
        };
        self.put_part(upload, part).await
    }

    /// Size of an object's parts.
    pub(super) fn part_bytes(&self, size: ObjectSize) -> Result<PartBytes, DurableFault> {
        let (limits, store) = (&self.limits, self.store.limits());
        let bytes = size.part_bytes(limits.part_bytes, limits.in_flight_bytes, &store);
        bytes.map_err(DurableFault::from)
    }

    /// Writes a part unless an earlier life of the daemon has written it.
    async fn put_part(&self, upload: &Upload, part: MadePart) -> Result<PutPart, DurableFault> {
        let MadePart {
            number,
            bytes,
            mut turn,
        } = part;
        let number = PartNumber(number);
        if self.store.has_part(upload, number, &bytes).await? {
            turn.not_needed().await?;
            return Ok(PutPart { number, sent: None });
        }
        turn.settle(bytes.len() as u64).await?;
        let state = self.store.put_part(upload, number, bytes).await;
        let sent = Some(state.map_err(DurableFault::from)?);
        drop(turn);
        Ok(PutPart { number, sent })
    }

    /// Bytes of a part, each chunk verified on its way out of RAM.
    pub(super) async fn read_part(
        &self,
        manifest: &Manifest,
        shard: &SlotShard,
        range: Range<u64>,
    ) -> Result<Bytes, DurableFault> {
        let (memory, shard, chunk) = (self.memory.clone(), shard.clone(), manifest.chunk);
        let read = move || {
            let mut part = AlignedBytes::with_room((range.end - range.start) as usize);
            // From a block that stays in the cache: a part is memory that nobody has cleared, and is written once.
            let mut block = vec![0; chunk.bytes()];
            let first = range.start / chunk.bytes() as u64;
            for index in first..range.end.div_ceil(chunk.bytes() as u64) {
                let read = memory.read_own_chunk(&shard, index, &mut block);
                let read = read.map_err(|fault| local(format!("{fault:?}")))?;
                part.append(read.ok_or_else(|| local("expected a chunk of the shard, got none"))?);
            }
            Ok(Bytes::from_owner(part))
        };
        self.compute(read).await.map_err(local)?
    }
}
