//! Reading shards back, however they are stored: alone (raw or packed), or as a chain of increments down to a copy
//! that stands alone. A window of chunks is read from the newest level to the lowest one that it needs, and put
//! together on the way back; every record is checked before it is taken apart, and every chunk of every level before
//! the next builds on it.

use std::ops::Range;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use storaged_codec::delta::{Basis, Coder, Encoding, Record};
use storaged_codec::{ChunkSize, Digest, Unchecked, digest};
use storaged_core::{DurableFault, Trust};
use storaged_wire::{IncrementIndex, Manifest, ManifestBytes, Rank};

use super::fault::{damaged, local, unreadable};
use super::packed::{self, PackedChunks};
use super::provenance::IndexStanding;
use super::shared_reads::Reads;
use super::store::StoreError;
use super::{Trickle, increment, object, shard_object};

/// Ranks whose chains are looked at when checkpoints are listed.
const RANKS_ASKED: usize = 4;

/// How a shard is stored.
#[derive(Debug)]
pub(super) enum Stored {
    /// As it is in RAM.
    Raw,
    /// Frames that end at these bytes.
    Packed(Vec<u64>),
    /// Delta records against another checkpoint, with the digest of the object that says so.
    Increment(IncrementIndex, Digest),
}

/// Whence it is known how a shard is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// This node would have written it raw: nobody is asked for another form.
    Assumed,
    /// From the tier.
    Asked,
}

/// Why chunks were not read.
#[derive(Debug)]
pub(super) enum NotRead {
    /// A shard that was taken for raw is not there raw, or not as this node reads it. That says nothing of its other forms.
    NotRaw(DurableFault),
    Fault(DurableFault),
    /// What is damaged lies below, in the last of these. They are all that the shard builds on as far as that one, the newest first: each of
    /// them is read through it too.
    Below(DurableFault, Vec<Arc<ManifestBytes>>),
}

impl From<DurableFault> for NotRead {
    fn from(fault: DurableFault) -> Self {
        Self::Fault(fault)
    }
}

impl From<NotRead> for DurableFault {
    fn from(not_read: NotRead) -> Self {
        match not_read {
            NotRead::NotRaw(fault) | NotRead::Fault(fault) | NotRead::Below(fault, _) => fault,
        }
    }
}

/// A shard at one checkpoint.
#[derive(Debug)]
pub(super) struct Level {
    manifest: Arc<ManifestBytes>,
    rank: Rank,
    length: u64,
    leaves: Arc<[Digest]>,
    stored: Stored,
    form: Form,
    index: IndexStanding,
}

/// A shard and what it builds on, the newest first; the last level stands alone.
#[derive(Debug)]
pub(super) struct Chain {
    levels: Vec<Level>,
    reads: Reads,
}

/// Bytes of a level from an offset on.
#[derive(Debug, Clone)]
struct Piece {
    start: u64,
    bytes: Bytes,
}

/// Records of a level's window, each with the digest that it has.
struct Window {
    level: usize,
    chunks: Range<u64>,
    records: Vec<Bytes>,
}

impl Chain {
    /// Increments on the copy that stands alone.
    pub fn depth(&self) -> u32 {
        self.levels.len() as u32 - 1
    }

    /// The same, its chunks read by these.
    pub fn read_by(self, reads: Reads) -> Self {
        Self { reads, ..self }
    }

    /// Digests of the newest level's chunks.
    pub fn leaves(&self) -> Arc<[Digest]> {
        self.levels[0].leaves.clone()
    }

    /// What it means that this level was not read.
    fn at(&self, number: usize, not_read: impl Into<NotRead>) -> NotRead {
        match not_read.into() {
            NotRead::Fault(fault) => read_through(manifests(&self.levels[..=number]), fault),
            other => other,
        }
    }
}

impl Level {
    fn chunk(&self) -> ChunkSize {
        self.manifest.manifest().chunk
    }

    fn check(&self, chunks: &Range<u64>, bytes: &[u8]) -> Result<(), DurableFault> {
        for (index, block) in chunks.clone().zip(bytes.chunks(self.chunk().bytes())) {
            let checked = Unchecked::new(block).verify_in(&self.leaves, index);
            checked.map_err(|wrong| {
                damaged(format!("step {}: {wrong}", self.manifest.manifest().step))
            })?;
        }
        Ok(())
    }

    /// VCDIFF is taken apart by a library that was never meant for bytes of a stranger.
    fn check_kind(&self, index: u64, record: &Record<'_>) -> Result<(), DurableFault> {
        if record.encoding() != Encoding::Moved || self.index == IndexStanding::Authentic {
            return Ok(());
        }
        Err(DurableFault::Unproven(format!(
            "step {}: record {index} is VCDIFF, which is read only from increments whose MAC is that of the job; \
             trickle.require_mac = \"never\" accepts those without one",
            self.manifest.manifest().step
        )))
    }

    /// What it means that the raw object did not come. One that is locked or not sealed may be what an earlier incarnation left.
    fn not_raw(&self, error: StoreError) -> NotRead {
        let is_other = matches!(
            error,
            StoreError::NotFound { .. }
                | StoreError::Locked { .. }
                | StoreError::NewerForm { .. }
                | StoreError::Unsealed { .. }
        );
        match self.form {
            Form::Assumed if is_other => NotRead::NotRaw(error.into()),
            Form::Assumed | Form::Asked => NotRead::Fault(error.into()),
        }
    }

    fn bytes_of(&self, chunks: &Range<u64>) -> Range<u64> {
        let start = self.chunk().range(chunks.start, self.length).start;
        let end = self.chunk().range(chunks.end, self.length).start;
        start..end.max(start)
    }
}

impl Trickle {
    /// How a shard is stored. Raw if there is no sign of another form; it may then be missing.
    pub(super) async fn stored(
        &self,
        manifest: &ManifestBytes,
        rank: Rank,
    ) -> Result<Stored, DurableFault> {
        // Side by side: a store that is far away takes its time for each answer, also for that there is none.
        let (index, ends) = futures::future::join(
            self.increment_index(manifest, rank),
            self.frames(manifest.manifest(), rank),
        )
        .await;
        if let Some((index, digest)) = index? {
            return Ok(Stored::Increment(index, digest));
        }
        Ok(ends?.map_or(Stored::Raw, Stored::Packed))
    }

    async fn increment_index(
        &self,
        manifest: &ManifestBytes,
        rank: Rank,
    ) -> Result<Option<(IncrementIndex, Digest)>, DurableFault> {
        let record = manifest.manifest();
        let key = object(record, &increment::index_object(rank))?;
        let bytes = match self.store.get(&key, None).await {
            Err(StoreError::NotFound { .. }) => return Ok(None),
            outcome => outcome.map_err(DurableFault::from)?,
        };
        let index = IncrementIndex::from_object(&bytes)
            .map_err(|error| damaged(format!("{key}: {error}")))?;
        let entry = record.shard(rank).ok_or_else(|| damaged("no such rank"))?;
        let expected = (manifest.name(), rank, record.chunk.count(entry.length));
        let got = (index.manifest, index.rank, index.ends.len() as u64);
        if expected == got {
            Ok(Some((index, digest(&bytes))))
        } else {
            Err(damaged(format!(
                "{key}: expected the index of {} rank {} with {} records, got that of {} rank {} with {}",
                expected.0, expected.1, expected.2, got.0, got.1, got.2
            )))
        }
    }

    /// A shard's chain: indices, manifests and digests of every level, checked against one another.
    pub(super) async fn chain(
        &self,
        manifest: &Arc<ManifestBytes>,
        rank: Rank,
        form: Form,
        trust: &Trust,
    ) -> Result<Chain, NotRead> {
        let mut levels: Vec<Level> = Vec::new();
        let mut current = manifest.clone();
        loop {
            let level = match self.level(current.clone(), rank, form, trust).await {
                Ok(level) => level,
                Err(fault) => return Err(read_through(manifests(&levels).chain([current]), fault)),
            };
            let base = match &level.stored {
                Stored::Increment(index, _) => Some(self.base_of(&level.manifest, index).await),
                _ => None,
            };
            levels.push(level);
            let Some(base) = base else {
                return Ok(Chain {
                    levels,
                    reads: Reads::Alone,
                });
            };
            // The base itself is not known to be damaged: it may be another one than the increment was made on.
            let base = base.map_err(|fault| read_through(manifests(&levels), fault))?;
            if levels.len() as u32 > IncrementIndex::DEPTH_MAX {
                return Err(too_long(manifest).into());
            }
            current = base;
        }
    }

    /// Whether what increments of this checkpoint build on is still there, as far as a few ranks tell: a folder that
    /// somebody removed is noticed before a restart begins, not in the midst of it.
    pub(super) async fn bases_are_there(
        &self,
        manifest: &ManifestBytes,
    ) -> Result<(), DurableFault> {
        let ranks = manifest.manifest().shards.len();
        let count = RANKS_ASKED.min(ranks);
        let asked = (0..count).map(|turn| turn * ranks / count);
        let checks = asked.map(|rank| self.bases_of(manifest, Rank::new(rank as u32)));
        futures::future::try_join_all(checks).await.map(|_| ())
    }

    async fn bases_of(&self, manifest: &ManifestBytes, rank: Rank) -> Result<(), DurableFault> {
        let mut below = None;
        for _ in 0..=IncrementIndex::DEPTH_MAX {
            let current = below.as_deref().unwrap_or(manifest);
            let Some((index, _)) = self.increment_index(current, rank).await? else {
                return Ok(());
            };
            below = Some(self.base_of(current, &index).await?);
        }
        Err(too_long(manifest))
    }

    /// The checkpoint below an increment, or why it cannot be used.
    async fn base_of(
        &self,
        above: &ManifestBytes,
        index: &IncrementIndex,
    ) -> Result<Arc<ManifestBytes>, DurableFault> {
        let (above, base) = (above.manifest(), &index.base);
        self.sound_base(above, index).await.map_err(|fault| {
            let (DurableFault::Damaged(reason) | DurableFault::NotPlain(reason)) = fault else {
                return fault;
            };
            damaged(format!(
                "step {} is an increment ({} above a full copy) on step {} of run {}, which cannot be used: {reason}",
                above.step, index.depth, base.step, base.run
            ))
        })
    }

    async fn sound_base(
        &self,
        above: &Manifest,
        index: &IncrementIndex,
    ) -> Result<Arc<ManifestBytes>, DurableFault> {
        let base = &index.base;
        if (base.run, base.step) >= (above.run, above.step) {
            return Err(damaged("it is not older"));
        }
        let found = self
            .manifest_at(&above.namespace, base.run, base.step)
            .await?;
        if found.name() != base.manifest {
            return Err(damaged(format!(
                "expected manifest {}, got {}",
                base.manifest,
                found.name()
            )));
        }
        if found.manifest().chunk != above.chunk {
            return Err(damaged("its chunks have another size"));
        }
        if found.manifest().shard(index.rank).is_none() {
            return Err(damaged(format!("it has no rank {}", index.rank)));
        }
        Ok(Arc::new(found))
    }

    async fn level(
        &self,
        manifest: Arc<ManifestBytes>,
        rank: Rank,
        form: Form,
        trust: &Trust,
    ) -> Result<Level, DurableFault> {
        let record = manifest.manifest();
        let length = record
            .shard(rank)
            .ok_or_else(|| damaged("no such rank"))?
            .length;
        let stored = async {
            match form {
                Form::Assumed => Ok(Stored::Raw),
                Form::Asked => self.stored(&manifest, rank).await,
            }
        };
        let (leaves, stored) = futures::future::try_join(self.leaves(record, rank), stored).await?;
        let index = match &stored {
            Stored::Increment(_, index) => {
                self.index_standing(&manifest, rank, *index, trust).await?
            }
            Stored::Raw | Stored::Packed(_) => IndexStanding::Unproven,
        };
        Ok(Level {
            index,
            manifest,
            rank,
            length,
            leaves,
            stored,
            form,
        })
    }

    /// Chunks of the newest level. They are not checked yet: who places them does.
    pub(super) async fn read_chunks(
        &self,
        chain: &Arc<Chain>,
        chunks: Range<u64>,
    ) -> Result<Bytes, NotRead> {
        let mut windows: Vec<Window> = Vec::new();
        let mut wanted = chunks;
        let mut lowest = None;
        for (number, level) in chain.levels.iter().enumerate() {
            let Stored::Increment(index, _) = &level.stored else {
                let read = self.read_alone(level, &wanted, chain.reads).await;
                let bytes = read.map_err(|not_read| chain.at(number, not_read))?;
                if number == 0 {
                    return Ok(bytes);
                }
                lowest = Some((number, wanted, bytes));
                break;
            };
            let window = self.read_records(chain, number, index, &wanted).await?;
            let needs = window.needs(level);
            let needs = needs.map_err(|fault| chain.at(number, fault))?;
            windows.push(window);
            let Some(needs) = needs else { break };
            wanted = chunks_of(&needs, level.chunk());
        }
        let chain = chain.clone();
        let work = move || put_together(&chain, lowest, windows);
        self.compute(work).await.map_err(local)?
    }

    /// Chunks of a level that stands alone.
    async fn read_alone(
        &self,
        level: &Level,
        chunks: &Range<u64>,
        reads: Reads,
    ) -> Result<Bytes, NotRead> {
        let record = level.manifest.manifest();
        let window = level.bytes_of(chunks);
        match &level.stored {
            Stored::Packed(ends) => {
                let chunks = chunks.start..chunks.end.min(ends.len() as u64);
                let packed = PackedChunks { ends, chunks };
                let read = self.read_packed(record, level.rank, packed, reads);
                Ok(read.await?)
            }
            _ => {
                let key = object(record, &shard_object(level.rank))?;
                let read = self.reads.get(reads, &key, window).await;
                read.map_err(|error| level.not_raw(error))
            }
        }
    }

    async fn read_records(
        &self,
        chain: &Chain,
        number: usize,
        index: &IncrementIndex,
        chunks: &Range<u64>,
    ) -> Result<Window, NotRead> {
        let level = &chain.levels[number];
        let record = level.manifest.manifest();
        let key = object(record, &increment::records_object(level.rank))?;
        let chunks = chunks.start..chunks.end.min(index.ends.len() as u64);
        let place = index
            .place(&chunks)
            .ok_or_else(|| damaged("no such records"))?;
        let start = place.start;
        let read = self.reads.get(chain.reads, &key, place).await;
        let bytes = read.map_err(|error| chain.at(number, DurableFault::from(error)))?;
        let mut records = Vec::new();
        let mut from = 0;
        for chunk in chunks.clone() {
            let to = (index.ends[chunk as usize] - start) as usize;
            let one = bytes.slice(from..to);
            if digest(&one) != index.digests[chunk as usize] {
                let fault = damaged(format!("{key}: digest mismatch in record {chunk}"));
                return Err(chain.at(number, fault));
            }
            records.push(one);
            from = to;
        }
        Ok(Window {
            level: number,
            chunks,
            records,
        })
    }
}

impl Window {
    /// The bytes of the basis that the records need, from the first to the last; none if they stand alone.
    fn needs(&self, level: &Level) -> Result<Option<Range<u64>>, DurableFault> {
        let mut all: Option<Range<u64>> = None;
        for (index, bytes) in self.chunks.clone().zip(&self.records) {
            let record = Record::parse(bytes).map_err(|error| wrong(level, index, &error))?;
            let Some(needs) = record.needs().filter(|needs| !needs.is_empty()) else {
                continue;
            };
            // A chunk on either side is all that a record may reach for.
            let near = self.chunks.start.saturating_sub(1)..self.chunks.end + 1;
            let near =
                near.start * level.chunk().bytes() as u64..near.end * level.chunk().bytes() as u64;
            if needs.start < near.start || needs.end > near.end {
                return Err(damaged(format!(
                    "step {}: record {index} needs bytes {}..{} of its base, which are not its neighbours",
                    level.manifest.manifest().step,
                    needs.start,
                    needs.end
                )));
            }
            all = Some(all.map_or(needs.clone(), |all| {
                all.start.min(needs.start)..all.end.max(needs.end)
            }));
        }
        Ok(all)
    }

    fn decode(
        &self,
        coder: &mut Coder,
        level: &Level,
        below: Option<&Piece>,
    ) -> Result<Piece, DurableFault> {
        let whole = level.bytes_of(&self.chunks);
        let mut bytes = BytesMut::zeroed((whole.end - whole.start) as usize);
        let basis = below.map(|piece| Basis {
            start: piece.start,
            bytes: &piece.bytes,
        });
        let blocks = bytes.chunks_mut(level.chunk().bytes());
        for ((index, record), block) in self.chunks.clone().zip(&self.records).zip(blocks) {
            let record = Record::parse(record).map_err(|error| wrong(level, index, &error))?;
            level.check_kind(index, &record)?;
            let decoded = coder.decode(&record, basis, block);
            decoded.map_err(|error| wrong(level, index, &error))?;
        }
        Ok(Piece {
            start: whole.start,
            bytes: bytes.freeze(),
        })
    }
}

/// From the lowest level up. Chunks of all levels but the newest are checked here.
fn put_together(
    chain: &Chain,
    lowest: Option<(usize, Range<u64>, Bytes)>,
    windows: Vec<Window>,
) -> Result<Bytes, NotRead> {
    let mut coder = Coder::new().map_err(local)?;
    let mut below = None;
    if let Some((number, chunks, bytes)) = lowest {
        let level = &chain.levels[number];
        let checked = level.check(&chunks, &bytes);
        checked.map_err(|fault| chain.at(number, fault))?;
        let start = level.bytes_of(&chunks).start;
        below = Some(Piece { start, bytes });
    }
    for window in windows.iter().rev() {
        let level = &chain.levels[window.level];
        let at = |fault: DurableFault| chain.at(window.level, fault);
        let piece = window.decode(&mut coder, level, below.as_ref());
        let piece = piece.map_err(at)?;
        if window.level > 0 {
            level.check(&window.chunks, &piece.bytes).map_err(at)?;
        }
        below = Some(piece);
    }
    Ok(below.map_or_else(Bytes::new, |piece| piece.bytes))
}

fn manifests(levels: &[Level]) -> impl Iterator<Item = Arc<ManifestBytes>> {
    levels.iter().map(|level| level.manifest.clone())
}

/// What it means that the last of these was not read, where the first was asked for and each builds on the next.
fn read_through(
    manifests: impl Iterator<Item = Arc<ManifestBytes>>,
    fault: DurableFault,
) -> NotRead {
    let below: Vec<_> = manifests.skip(1).collect();
    if fault.is_damage() && !below.is_empty() {
        NotRead::Below(fault, below)
    } else {
        NotRead::Fault(fault)
    }
}

fn too_long(manifest: &ManifestBytes) -> DurableFault {
    let step = manifest.manifest().step;
    damaged(format!("step {step}: its chain is too long"))
}

fn chunks_of(bytes: &Range<u64>, chunk: ChunkSize) -> Range<u64> {
    let each = chunk.bytes() as u64;
    bytes.start / each..bytes.end.div_ceil(each)
}

fn wrong(level: &Level, index: u64, error: &storaged_codec::delta::DeltaError) -> DurableFault {
    let step = level.manifest.manifest().step;
    unreadable(error, format!("step {step}: record {index}: {error}"))
}

/// The name of the object that holds a shard's bytes, and its length.
pub(super) fn expected_object(stored: &Stored, rank: Rank, length: u64) -> (String, u64) {
    let last = |ends: &[u64]| ends.last().copied().unwrap_or(0);
    match stored {
        Stored::Raw => (shard_object(rank), length),
        Stored::Packed(ends) => (packed::packed_object(rank), last(ends)),
        Stored::Increment(index, _) => (increment::records_object(rank), last(&index.ends)),
    }
}
