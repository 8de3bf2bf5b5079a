//! Writing a shard as an increment: one delta record per chunk against a checkpoint that is in the durable tier and
//! still in RAM. Records are made on a thread of their own while earlier ones are sent.
//!
//! `__RANK_0.increment` holds the records one after the other; `storaged.increment.RANK`, written after it, says which
//! checkpoint they build on, where each ends, and the digest of each. Without it the records do not exist.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt;
use storaged_codec::delta::{Basis, CostModel, DeltaWriter, Kind, LinkRate, Processor, Tally};
use storaged_codec::{ChunkSize, Digest, digest};
use storaged_core::{DurableFault, SlotShard, Trust, UploadBase};
use storaged_wire::{IncrementBase, IncrementIndex, ManifestBytes, Namespace, Rank, Step};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::chain::Form;
use super::fault::local;
use super::parts::{MadePart, ObjectSize};
use super::share::{Payment, Turn, UploadShares};
use super::{Trickle, object};
use crate::memory::Memory;

/// What the durable tier is taken to carry before anything was sent there, in bytes per second.
const RATE_AT_FIRST: f64 = 1e9;
/// Weight of the newest part in the measured rate.
const NEWEST: f64 = 0.3;

pub(super) fn records_object(rank: Rank) -> String {
    format!("__{rank}_0.increment")
}

pub(super) fn index_object(rank: Rank) -> String {
    format!("storaged.increment.{rank}")
}

/// How an increment came out.
#[derive(Debug, Clone)]
pub struct IncrementReport {
    /// The step that it builds on.
    pub base: Step,
    /// Increments down to the copy that stands alone, this one included.
    pub depth: u32,
    /// Bytes of all records.
    pub bytes: u64,
    /// Records by kind: what was expected of them and what came.
    pub tallies: BTreeMap<Kind, Tally>,
    /// Chunks that were written alone because the base left RAM meanwhile.
    pub without_base: u64,
}

/// Bytes per second that the durable tier took lately.
#[derive(Debug)]
pub(super) struct MeasuredRate(AtomicU64);

impl MeasuredRate {
    pub fn new(limit: Option<u64>) -> Self {
        let rate = limit.map_or(RATE_AT_FIRST, |rate| rate as f64);
        Self(AtomicU64::new(rate.to_bits()))
    }

    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    /// So many bytes took so long.
    pub fn note(&self, bytes: u64, seconds: f64) {
        let newest = bytes as f64 / seconds.max(1e-6);
        let mixed = self.get() + (newest - self.get()) * NEWEST;
        self.0.store(mixed.max(1.0).to_bits(), Ordering::Relaxed);
    }

    fn link(&self) -> Result<LinkRate, DurableFault> {
        LinkRate::new(self.get()).map_err(local)
    }
}

/// What was written.
struct Written {
    ends: Vec<u64>,
    digests: Vec<Digest>,
    tallies: BTreeMap<Kind, Tally>,
    without_base: u64,
}

impl Trickle {
    /// Copies a shard as an increment. None if it should be a full copy: the base cannot be used, or the chain has
    /// grown as long as it may, and a new base ends it.
    pub(super) async fn upload_increment(
        &self,
        manifest: &ManifestBytes,
        rank: Rank,
        shard: &SlotShard,
        base: &UploadBase,
    ) -> Result<Option<IncrementReport>, DurableFault> {
        let record = manifest.manifest();
        let of = base.manifest.manifest();
        if shard.length == 0 || of.chunk != record.chunk {
            return Ok(None);
        }
        let chain = self.chain(&base.manifest, rank, Form::Asked, &Trust::Anything);
        let depth = match chain.await.map_err(DurableFault::from) {
            Ok(chain) => chain.depth() + 1,
            Err(fault) if fault.is_damage() => {
                let reason = fault.to_string();
                tracing::warn!(%rank, step = %of.step, reason, "no increment on this base; a full copy instead");
                return Ok(None);
            }
            Err(fault) => return Err(fault),
        };
        if depth > self.limits.increments {
            return Ok(None);
        }
        let written = self
            .send_records(manifest, rank, shard, &base.shard)
            .await?;
        let bytes = written.ends.last().copied().unwrap_or(0);
        let index = IncrementIndex {
            manifest: manifest.name(),
            rank,
            base: IncrementBase {
                run: of.run,
                step: of.step,
                manifest: base.manifest.name(),
            },
            depth,
            ends: written.ends,
            digests: written.digests,
        };
        let key = object(record, &index_object(rank))?;
        self.put_mine(&key, index.to_object().into()).await?;
        Ok(Some(IncrementReport {
            base: of.step,
            depth,
            bytes,
            tallies: written.tallies,
            without_base: written.without_base,
        }))
    }

    async fn send_records(
        &self,
        manifest: &ManifestBytes,
        rank: Rank,
        shard: &SlotShard,
        base: &SlotShard,
    ) -> Result<Written, DurableFault> {
        let record = manifest.manifest();
        let key = object(record, &records_object(rank))?;
        let size = ObjectSize::of_shard(record, shard.length);
        let part_bytes = self.part_bytes(size)?;
        // Encodings depend on measured times, so an earlier life's parts are of no use: begin anew.
        let begun = self.store.begin(&key, part_bytes).await;
        let upload = begun.map_err(DurableFault::from)?;
        let (parts, ready) = mpsc::channel(1);
        let maker = RecordMaker {
            memory: self.memory.clone(),
            chunk: record.chunk,
            shard: shard.clone(),
            base: BaseWindow::new(self.memory.clone(), base.clone(), record.chunk),
            rate: self.rate.clone(),
            part_bytes: part_bytes.get() as usize,
            turns: Turns {
                shares: self.shares.clone(),
                job: record.namespace.clone(),
                runtime: Handle::current(),
            },
            parts,
        };
        let making = self.begin(move || maker.make()).await;
        let making = making.map_err(local)?;
        let ready = futures::stream::unfold(ready, next_of);
        let at_once = self.parts_at_once(&upload);
        let put = self.put_made(&upload, ready.boxed(), at_once).await?;
        let written = making.await.map_err(local)??;
        let total = written.ends.last().copied().unwrap_or(0);
        self.complete(upload, put, total).await?;
        Ok(written)
    }
}

/// Makes records chunk by chunk.
struct RecordMaker {
    memory: Arc<Memory>,
    chunk: ChunkSize,
    shard: SlotShard,
    base: BaseWindow,
    rate: Arc<MeasuredRate>,
    part_bytes: usize,
    turns: Turns,
    parts: mpsc::Sender<MadePart>,
}

/// Room for parts, for a thread that waits for it.
struct Turns {
    shares: Arc<UploadShares>,
    job: Namespace,
    runtime: Handle,
}

impl Turns {
    /// Waits for room for a part of at most so many bytes, as long as somebody wants the parts: who waits for his rate has neither that nor
    /// the thread to himself.
    fn next(&self, bytes: u64, parts: &mpsc::Sender<MadePart>) -> Result<Turn, DurableFault> {
        let turn = self.shares.turn(&self.job, bytes, Payment::First);
        self.runtime.block_on(async {
            tokio::select! {
                turn = turn => turn,
                () = parts.closed() => Err(local("the upload ended early")),
            }
        })
    }
}

/// Records that no part has yet, and the room for the part that they will be.
#[derive(Default)]
struct PartInMaking {
    records: Vec<u8>,
    turn: Option<Turn>,
    number: u32,
}

impl RecordMaker {
    fn make(mut self) -> Result<Written, DurableFault> {
        let model = CostModel::new(self.rate.link()?, Processor::WHOLE);
        let mut writer = DeltaWriter::new(model, None).map_err(local)?;
        let (mut ends, mut digests) = (Vec::new(), Vec::new());
        let (mut part, mut total) = (PartInMaking::default(), 0);
        let mut block = vec![0; self.chunk.bytes()];
        for index in 0..self.chunk.count(self.shard.length) {
            self.make_room(&mut part, index)?;
            writer.model().set_link(self.rate.link()?);
            let before = part.records.len();
            self.one(&mut writer, index, &mut block, &mut part.records)?;
            total += (part.records.len() - before) as u64;
            ends.push(total);
            digests.push(digest(&part.records[before..]));
            while part.records.len() >= self.part_bytes {
                self.make_room(&mut part, index)?;
                self.send(&mut part)?;
            }
        }
        if !part.records.is_empty() {
            self.make_room(&mut part, self.chunk.count(self.shard.length))?;
            self.send(&mut part)?;
        }
        Ok(Written {
            ends,
            digests,
            tallies: writer.tallies().clone(),
            without_base: self.base.missed,
        })
    }

    /// Waits until there is room for the part to which the records of this chunk go.
    fn make_room(&self, part: &mut PartInMaking, index: u64) -> Result<(), DurableFault> {
        if part.turn.is_none() {
            let left = self.shard.length - self.chunk.range(index, self.shard.length).start;
            let most = left + part.records.len() as u64;
            let most = most.min(self.part_bytes as u64);
            part.turn = Some(self.turns.next(most, &self.parts)?);
        }
        Ok(())
    }

    /// Hands over as much as a part holds.
    fn send(&self, part: &mut PartInMaking) -> Result<(), DurableFault> {
        let Some(turn) = part.turn.take() else {
            return Err(local("a part has no room"));
        };
        let rest = (part.records).split_off(part.records.len().min(self.part_bytes));
        let made = MadePart {
            number: part.number,
            bytes: std::mem::replace(&mut part.records, rest).into(),
            turn,
        };
        part.number += 1;
        // The receiver is gone if the upload failed, and then it says why.
        let sent = self.parts.blocking_send(made);
        sent.map_err(|_| local("the upload ended early"))
    }

    fn one(
        &mut self,
        writer: &mut DeltaWriter,
        index: u64,
        block: &mut [u8],
        out: &mut Vec<u8>,
    ) -> Result<(), DurableFault> {
        let place = self.chunk.range(index, self.shard.length);
        if self.base.has_same(&self.shard, index, &place) {
            let written = writer.write_clean(place, out);
            return written.map_err(local);
        }
        let read = self.memory.read_own_chunk(&self.shard, index, block);
        let read = read.map_err(|fault| local(format!("{fault:?}")))?;
        let read = read.unwrap_or_default();
        let basis = self.base.around(index);
        let began = Instant::now();
        let mut clock = move || began.elapsed().as_secs_f64();
        let written = writer.write(place.start, read, basis, &mut clock, out);
        written.map(|_| ()).map_err(local)
    }
}

async fn next_of(
    mut ready: mpsc::Receiver<MadePart>,
) -> Option<(Result<MadePart, DurableFault>, mpsc::Receiver<MadePart>)> {
    let part = ready.recv().await?;
    Some((Ok(part), ready))
}

/// The base's chunks around the one that is written: each read from RAM once, and verified then.
struct BaseWindow {
    memory: Arc<Memory>,
    base: SlotShard,
    chunk: ChunkSize,
    /// Chunks held in `bytes`.
    held: Range<u64>,
    bytes: Vec<u8>,
    missed: u64,
}

impl BaseWindow {
    fn new(memory: Arc<Memory>, base: SlotShard, chunk: ChunkSize) -> Self {
        Self {
            memory,
            base,
            chunk,
            held: 0..0,
            bytes: Vec::new(),
            missed: 0,
        }
    }

    /// Whether the base has the very same chunk in the same place, by their digests.
    fn has_same(&self, shard: &SlotShard, index: u64, place: &Range<u64>) -> bool {
        let leaf = |shard: &SlotShard| shard.leaves.get(index as usize).copied();
        let there = leaf(&self.base).is_some() && leaf(&self.base) == leaf(shard);
        there && self.chunk.range(index, self.base.length) == *place
    }

    /// Chunk `index` and one on either side, as far as the base has them. None if they are not in RAM any more: the
    /// base may have been given up, and its slot be in use for another step.
    fn around(&mut self, index: u64) -> Option<Basis<'_>> {
        let count = self.chunk.count(self.base.length);
        let wanted = index.saturating_sub(1).min(count)..(index + 2).min(count);
        self.forget_before(wanted.start);
        if self.held.is_empty() || self.held.end < wanted.start || self.held.start > wanted.start {
            self.held = wanted.start..wanted.start;
            self.bytes.clear();
        }
        while self.held.end < wanted.end {
            let next = self.held.end;
            let length = self.chunk.range(next, self.base.length);
            let from = self.bytes.len();
            self.bytes
                .resize(from + (length.end - length.start) as usize, 0);
            let read = self
                .memory
                .read_chunk(&self.base, next, &mut self.bytes[from..]);
            if read.is_err() {
                self.bytes.truncate(from);
                self.missed += 1;
                return None;
            }
            self.held.end += 1;
        }
        Some(Basis {
            start: self.held.start * self.chunk.bytes() as u64,
            bytes: &self.bytes,
        })
    }

    fn forget_before(&mut self, first: u64) {
        let gone = first.min(self.held.end).saturating_sub(self.held.start);
        let bytes = (gone as usize * self.chunk.bytes()).min(self.bytes.len());
        self.bytes.drain(..bytes);
        self.held.start += gone;
    }
}
