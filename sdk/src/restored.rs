//! Reading a restored shard: bytes leave only after their chunk has its digest, and the digests the manifest's root.

use std::num::NonZeroUsize;

use storaged_arena::Slot;
use storaged_codec::{leaf_digest, root_digest};
use storaged_wire::local::Rung;
use storaged_wire::{ChunkSize, Digest, Manifest, Rank};

use crate::error::ClientError;

/// A shard, or ranges of it, in this node's RAM.
#[derive(Debug)]
pub struct RestoredShard {
    slot: Slot,
    rank: Rank,
    length: u64,
    chunk: ChunkSize,
    leaves: Vec<Digest>,
    rung: Rung,
}

impl RestoredShard {
    pub(crate) fn new(
        manifest: &Manifest,
        rank: Rank,
        slot: Slot,
        length: u64,
        chunk: ChunkSize,
        leaves: Vec<Digest>,
        rung: Rung,
    ) -> Result<Self, ClientError> {
        let entry = manifest.shard(rank).filter(|entry| {
            entry.length == length
                && manifest.chunk == chunk
                && leaves.len() as u64 == chunk.count(length)
                && root_digest(&leaves, length, chunk) == entry.root
        });
        if entry.is_none() || slot.capacity() < length {
            return Err(ClientError::WrongLeaves { rank: rank.get() });
        }
        Ok(Self {
            slot,
            rank,
            length,
            chunk,
            leaves,
            rung,
        })
    }

    /// Bytes of the whole shard.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Size of its chunks.
    pub fn chunk(&self) -> ChunkSize {
        self.chunk
    }

    /// The rung of the ladder that it came from.
    pub fn rung(&self) -> Rung {
        self.rung
    }

    /// Copies bytes out, chunk by chunk, each verified. The ranges must have been opened.
    ///
    /// # Errors
    /// [`ClientError::Corrupt`] if a chunk does not have its digest; then nothing of that chunk is in `out`.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), ClientError> {
        let mut block = vec![0; self.chunk.bytes()];
        self.read_with(offset, out, &mut block)
    }

    /// Like [`RestoredShard::read_at`] with a block of the caller's, to be used for many reads.
    ///
    /// # Errors
    /// As `read_at`.
    pub fn read_with(
        &self,
        offset: u64,
        out: &mut [u8],
        block: &mut Vec<u8>,
    ) -> Result<(), ClientError> {
        self.read_into(offset, out, block, &mut None)
    }

    /// `loaded` names the chunk that `block` holds, verified. A chunk that is wanted whole is read where it is wanted and
    /// verified there: one copy. If it is not what it should be, nothing of it stays.
    fn read_into(
        &self,
        offset: u64,
        out: &mut [u8],
        block: &mut Vec<u8>,
        loaded: &mut Option<u64>,
    ) -> Result<(), ClientError> {
        let count = out.len() as u64;
        let end = offset.checked_add(count).filter(|end| *end <= self.length);
        if end.is_none() {
            return Err(ClientError::Outside {
                length: self.length,
                offset,
                count,
            });
        }
        let mut done = 0;
        while done < out.len() {
            let at = offset + done as u64;
            let index = at / self.chunk.bytes() as u64;
            let range = self.chunk.range(index, self.length);
            let whole = (range.end - range.start) as usize;
            if at == range.start && out.len() - done >= whole && *loaded != Some(index) {
                self.load_in_place(index, &mut out[done..done + whole])?;
                done += whole;
                continue;
            }
            if *loaded != Some(index) {
                *loaded = None;
                self.load(index, block)?;
                *loaded = Some(index);
            }
            let from = (at - range.start) as usize;
            let take = (block.len() - from).min(out.len() - done);
            out[done..done + take].copy_from_slice(&block[from..from + take]);
            done += take;
        }
        Ok(())
    }

    /// Fills every part, each chunk verified first, on up to `threads` threads. Parts in ascending order are cheapest:
    /// neighbours in one chunk are served by one verification.
    ///
    /// # Errors
    /// As `read_at`; then the parts' contents are of no use.
    pub fn read_many(
        &self,
        parts: &mut [(u64, &mut [u8])],
        threads: NonZeroUsize,
    ) -> Result<(), ClientError> {
        let share = parts.len().div_ceil(threads.get()).max(1);
        std::thread::scope(|scope| {
            let workers: Vec<_> = parts
                .chunks_mut(share)
                .map(|share| scope.spawn(|| self.read_share(share)))
                .collect();
            let outcomes = workers.into_iter().map(|worker| match worker.join() {
                Ok(outcome) => outcome,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            outcomes.collect::<Vec<_>>().into_iter().collect()
        })
    }

    fn read_share(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), ClientError> {
        let mut block = Vec::new();
        let mut loaded = None;
        for (offset, out) in parts {
            self.read_into(*offset, out, &mut block, &mut loaded)?;
        }
        Ok(())
    }

    /// Brings one chunk to where it is wanted, if it has its digest; zeros otherwise.
    fn load_in_place(&self, index: u64, out: &mut [u8]) -> Result<(), ClientError> {
        let start = self.chunk.range(index, self.length).start;
        let read = self.slot.read_at(start, out).map_err(ClientError::from);
        let outcome = read.and_then(|()| self.verify(index, out));
        if outcome.is_err() {
            out.fill(0);
        }
        outcome
    }

    /// Brings one chunk into private memory and verifies it there.
    fn load(&self, index: u64, block: &mut Vec<u8>) -> Result<(), ClientError> {
        let range = self.chunk.range(index, self.length);
        block.resize((range.end - range.start) as usize, 0);
        self.slot.read_at(range.start, block)?;
        self.verify(index, block)
    }

    fn verify(&self, index: u64, block: &[u8]) -> Result<(), ClientError> {
        let got = leaf_digest(block, index);
        let expected = self.leaves[index as usize];
        if got == expected {
            return Ok(());
        }
        let rank = self.rank.get();
        Err(ClientError::Corrupt {
            rank,
            chunk: index,
            expected,
            got,
        })
    }
}
