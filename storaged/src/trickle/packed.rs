//! Packed shards: every chunk a zstd frame of its own, so that ranges can still be read alone. An operator who wants
//! less in the durable tier chooses this and gives up that stock PyTorch reads it: there is no `.metadata` then.
//!
//! `__RANK_0.distcp.zst` holds the frames one after the other; `storaged.frames.RANK`, written after it, where each
//! ends (u64 little endian).

use std::ops::Range;

use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use storaged_core::{DurableFault, Leftovers, SlotShard};
use storaged_wire::{Manifest, Rank};

use super::fault::{damaged, local};
use super::parts::{MadePart, ObjectSize};
use super::share::Payment;
use super::shared_reads::Reads;
use super::store::StoreError;
use super::{Trickle, object};

/// zstd's fastest ordinary level: state hardly shrinks more at higher ones.
const LEVEL: i32 = 1;

/// Chunks of a packed shard.
pub(super) struct PackedChunks<'a> {
    /// Where all frames of the shard end.
    pub ends: &'a [u64],
    pub chunks: Range<u64>,
}

/// Packs a shard, part by part.
struct Packer<'a> {
    trickle: &'a Trickle,
    manifest: &'a Manifest,
    shard: &'a SlotShard,
    part_bytes: u64,
    /// The chunk that is packed next.
    next: u64,
    /// The part that is made next.
    number: u32,
    /// Frames that no part has yet.
    waiting: BytesMut,
    ends: &'a mut Vec<u64>,
}

impl Packer<'_> {
    /// The next part, once there is room for it; none if all are made.
    async fn part(mut self) -> Result<Option<(MadePart, Self)>, DurableFault> {
        let chunk = self.manifest.chunk;
        let count = chunk.count(self.shard.length);
        let left = self.shard.length - chunk.range(self.next, self.shard.length).start;
        let most = (left + self.waiting.len() as u64).min(self.part_bytes);
        if most == 0 {
            return Ok(None);
        }
        let shares = &self.trickle.shares;
        let turn = shares.turn(&self.manifest.namespace, most, Payment::First);
        let turn = turn.await?;
        while self.next < count && (self.waiting.len() as u64) < self.part_bytes {
            let frame = self.trickle.pack(self.manifest, self.shard, self.next);
            let frame = frame.await?;
            let before = self.ends.last().copied().unwrap_or(0);
            self.ends.push(before + frame.len() as u64);
            self.waiting.extend_from_slice(&frame);
            self.next += 1;
        }
        let length = self.waiting.len().min(self.part_bytes as usize);
        let part = MadePart {
            number: self.number,
            bytes: self.waiting.split_to(length).freeze(),
            turn,
        };
        self.number += 1;
        Ok(Some((part, self)))
    }
}

pub(super) fn packed_object(rank: Rank) -> String {
    format!("__{rank}_0.distcp.zst")
}

pub(super) fn frames_object(rank: Rank) -> String {
    format!("storaged.frames.{rank}")
}

impl Trickle {
    /// Packs and copies a shard; gives the bytes that it takes. Packing the same chunks gives the same frames, so an interrupted upload goes on.
    pub(super) async fn upload_packed(
        &self,
        manifest: &Manifest,
        rank: Rank,
        shard: &SlotShard,
        leftovers: Leftovers,
    ) -> Result<u64, DurableFault> {
        let key = object(manifest, &packed_object(rank))?;
        let mut ends = Vec::new();
        if shard.length == 0 {
            // Whoever publishes the checkpoint looks for it.
            self.put_mine(&key, Bytes::new()).await?;
        } else {
            // Packing may make what cannot shrink a little longer.
            let longest = shard.length + shard.length / 64;
            let size = ObjectSize::of_shard(manifest, longest);
            let upload = self.begin_or_go_on(&key, size, leftovers);
            let upload = upload.await?;
            let packer = Packer {
                trickle: self,
                manifest,
                shard,
                part_bytes: upload.part_bytes().get(),
                next: 0,
                number: 0,
                waiting: BytesMut::new(),
                ends: &mut ends,
            };
            let parts = futures::stream::try_unfold(packer, Packer::part);
            let at_once = self.parts_at_once(&upload);
            let put = self.put_made(&upload, parts.boxed(), at_once).await?;
            let total = ends.last().copied().unwrap_or(0);
            self.complete(upload, put, total).await?;
        }
        let total = ends.last().copied().unwrap_or(0);
        let table: Vec<u8> = ends.into_iter().flat_map(u64::to_le_bytes).collect();
        let frames = object(manifest, &frames_object(rank))?;
        self.put_mine(&frames, table.into()).await?;
        Ok(total)
    }

    async fn pack(
        &self,
        manifest: &Manifest,
        shard: &SlotShard,
        index: u64,
    ) -> Result<Vec<u8>, DurableFault> {
        let range = manifest.chunk.range(index, shard.length);
        let chunk = self.read_part(manifest, shard, range).await?;
        let pack = move || zstd::bulk::compress(&chunk, LEVEL);
        let packed = self.compute(pack).await;
        packed.map_err(local)?.map_err(local)
    }

    /// Where the frames of a packed shard end; none if the shard is not there packed.
    pub(super) async fn frames(
        &self,
        manifest: &Manifest,
        rank: Rank,
    ) -> Result<Option<Vec<u64>>, DurableFault> {
        let entry = manifest
            .shard(rank)
            .ok_or_else(|| damaged("no such rank"))?;
        let key = object(manifest, &frames_object(rank))?;
        let table = match self.store.get(&key, None).await {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            outcome => outcome.map_err(DurableFault::from)?,
        };
        let (numbers, rest) = table.as_chunks::<8>();
        let ends: Vec<u64> = numbers
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .collect();
        let whole = ends.len() as u64 == manifest.chunk.count(entry.length);
        let rising = ends.windows(2).all(|pair| pair[0] < pair[1]);
        if rest.is_empty() && whole && rising {
            Ok(Some(ends))
        } else {
            Err(damaged(format!(
                "{key}: expected one rising end per chunk, got something else"
            )))
        }
    }

    /// Reads and unpacks chunks; they are not verified yet.
    pub(super) async fn read_packed(
        &self,
        manifest: &Manifest,
        rank: Rank,
        packed: PackedChunks<'_>,
        reads: Reads,
    ) -> Result<Bytes, DurableFault> {
        let PackedChunks { ends, chunks } = packed;
        let key = object(manifest, &packed_object(rank))?;
        let start = match chunks.start {
            0 => 0,
            first => ends.get(first as usize - 1).copied().unwrap_or(0),
        };
        let wanted = ends.get(chunks.start as usize..chunks.end as usize);
        let wanted = wanted
            .filter(|ends| !ends.is_empty())
            .ok_or_else(|| damaged("no such chunks"))?;
        let window = start..wanted[wanted.len() - 1];
        let read = self.reads.get(reads, &key, window).await;
        let packed = read.map_err(DurableFault::from)?;
        unpack_frames(&packed, start, wanted, manifest.chunk.bytes() as u64)
    }
}

/// Frames that end at `ends`, the first beginning at `start`; none unpacks to more than a chunk.
fn unpack_frames(
    packed: &Bytes,
    start: u64,
    ends: &[u64],
    chunk_bytes: u64,
) -> Result<Bytes, DurableFault> {
    let mut raw = BytesMut::new();
    let mut from = 0;
    for end in ends {
        let to = (end - start) as usize;
        let frame = packed
            .get(from..to)
            .ok_or_else(|| damaged("a frame is cut off"))?;
        let chunk = zstd::bulk::decompress(frame, chunk_bytes as usize)
            .map_err(|error| damaged(format!("a frame cannot be unpacked: {error}")))?;
        raw.extend_from_slice(&chunk);
        from = to;
    }
    Ok(raw.freeze())
}
