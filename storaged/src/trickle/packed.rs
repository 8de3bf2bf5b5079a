//! Packed shards: every chunk a zstd frame of its own, so that ranges can still be read alone. An operator who wants
//! less in the durable tier chooses this and gives up that stock PyTorch reads it: there is no `.metadata` then.
//!
//! `__RANK_0.distcp.zst` holds the frames one after the other; `storaged.frames.RANK`, written after it, where each
//! ends (u64 little endian).

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use storaged_codec::Digest;
use storaged_core::encode::SlotShard;
use storaged_wire::{Manifest, Rank, SlotId};

use super::store::StoreError;
use super::{FETCH_BYTES, Trickle, in_words, object};

/// zstd's fastest ordinary level: state hardly shrinks more at higher ones.
const LEVEL: i32 = 1;

pub(super) fn packed_object(rank: Rank) -> String {
    format!("__{rank}_0.distcp.zst")
}

fn frames_object(rank: Rank) -> String {
    format!("storaged.frames.{rank}")
}

impl Trickle {
    /// Packs and copies a shard. Packing the same chunks gives the same frames, so an interrupted upload goes on.
    pub(super) async fn upload_packed(
        &self,
        manifest: &Manifest,
        rank: Rank,
        shard: &SlotShard,
    ) -> Result<(), String> {
        if self.frames(manifest, rank).await?.is_some() {
            return Ok(());
        }
        let key = object(manifest, &packed_object(rank))?;
        let count = manifest.chunk.count(shard.length);
        let mut ends = Vec::new();
        if count > 0 {
            let part_bytes = self.part_bytes(manifest, shard.length)?;
            let mut upload = self
                .store
                .resume_or_begin(&key, part_bytes)
                .await
                .map_err(in_words)?;
            let (mut waiting, mut total, mut number) = (BytesMut::new(), 0, 0);
            for index in 0..count {
                let frame = self.pack(manifest, shard, index).await?;
                total += frame.len() as u64;
                ends.push(total);
                waiting.extend_from_slice(&frame);
                while waiting.len() as u64 >= part_bytes.get() {
                    let part = waiting.split_to(part_bytes.get() as usize).freeze();
                    self.put_once(&mut upload, number, part).await?;
                    number += 1;
                }
            }
            if !waiting.is_empty() {
                self.put_once(&mut upload, number, waiting.freeze()).await?;
            }
            self.store
                .complete(&upload, total)
                .await
                .map_err(in_words)?;
        }
        let table: Vec<u8> = ends.into_iter().flat_map(u64::to_le_bytes).collect();
        let frames = object(manifest, &frames_object(rank))?;
        self.store
            .put_new(&frames, table.into())
            .await
            .map_err(in_words)
    }

    async fn pack(
        &self,
        manifest: &Manifest,
        shard: &SlotShard,
        index: u64,
    ) -> Result<Vec<u8>, String> {
        let range = manifest.chunk.range(index, shard.length);
        let chunk = self.read_part(manifest, shard, range).await?;
        let pack = move || zstd::bulk::compress(&chunk, LEVEL);
        let packed = tokio::task::spawn_blocking(pack).await;
        packed
            .map_err(|error| error.to_string())?
            .map_err(|error| error.to_string())
    }

    /// Where the frames of a packed shard end; none if the shard is not there packed.
    pub(super) async fn frames(
        &self,
        manifest: &Manifest,
        rank: Rank,
    ) -> Result<Option<Vec<u64>>, String> {
        let entry = manifest.shard(rank).ok_or("no such rank")?;
        let key = object(manifest, &frames_object(rank))?;
        let table = match self.store.get(&key, None).await {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            outcome => outcome.map_err(in_words)?,
        };
        let (numbers, rest) = table.as_chunks::<8>();
        let ends: Vec<u64> = numbers
            .iter()
            .map(|bytes| u64::from_le_bytes(*bytes))
            .collect();
        let whole = ends.len() as u64 == manifest.chunk.count(entry.length);
        let rising = ends.windows(2).all(|pair| pair[0] < pair[1]);
        match rest.is_empty() && whole && rising {
            true => Ok(Some(ends)),
            false => Err(format!(
                "{key}: expected one rising end per chunk, got something else"
            )),
        }
    }

    /// Reads and unpacks the chunks that cover a range; each is verified when it is placed.
    pub(super) async fn fetch_packed(
        &self,
        manifest: &Manifest,
        rank: Rank,
        ends: &[u64],
        leaves: &Arc<[Digest]>,
        slot: SlotId,
        range: &Range<u64>,
    ) -> Result<(), String> {
        let key = object(manifest, &packed_object(rank))?;
        let chunk_bytes = manifest.chunk.bytes() as u64;
        let last = range.end.div_ceil(chunk_bytes).min(ends.len() as u64);
        let at_once = (FETCH_BYTES / chunk_bytes).max(1);
        let mut first = range.start / chunk_bytes;
        while first < last {
            let next = (first + at_once).min(last);
            let start = first
                .checked_sub(1)
                .map_or(0, |before| ends[before as usize]);
            let window = start..ends[next as usize - 1];
            let packed = self.store.get(&key, Some(window)).await.map_err(in_words)?;
            let raw = unpack_frames(
                &packed,
                start,
                &ends[first as usize..next as usize],
                chunk_bytes,
            )?;
            self.place(manifest, leaves, slot, first * chunk_bytes, raw)
                .await?;
            first = next;
        }
        Ok(())
    }
}

/// Frames that end at `ends`, the first beginning at `start`; none unpacks to more than a chunk.
fn unpack_frames(
    packed: &Bytes,
    start: u64,
    ends: &[u64],
    chunk_bytes: u64,
) -> Result<Bytes, String> {
    let mut raw = BytesMut::new();
    let mut from = 0;
    for end in ends {
        let to = (end - start) as usize;
        let frame = packed.get(from..to).ok_or("a frame is cut off")?;
        let chunk = zstd::bulk::decompress(frame, chunk_bytes as usize)
            .map_err(|error| format!("a frame cannot be unpacked: {error}"))?;
        raw.extend_from_slice(&chunk);
        from = to;
    }
    Ok(raw.freeze())
}
