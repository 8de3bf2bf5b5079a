//! The pass over a new chunk that reads memory once. A trainer may go on writing to the chunk's memory, so each piece
//! is first copied into private memory that stays in cache; difference, dirty test, digest and fold all see that copy.

use std::convert::Infallible;
use std::ops::Range;

use thiserror::Error;

use crate::digest::{Digest, LeafHasher};
use crate::engine::Engine;

/// Bytes gone over at a time: with the private copy, the difference, the previous piece and up to eight sums, a
/// second-level cache of 512 KiB holds all. A power of two, so that BLAKE3 takes each piece as one whole subtree.
const PIECE: usize = 32 << 10;

/// Bytes of the chunk's index, which the digest starts with.
const PREFIX: usize = 8;

/// Where pieces start in the private copy: at the second cache line. The first one ends with the eight bytes that the
/// digest takes before the piece.
const START: usize = 64;

/// A chunk to take in.
#[derive(Debug)]
pub struct NewChunk<'a> {
    /// Its place in its shard, which its digest depends on.
    pub index: u64,
    /// Bytes.
    pub length: usize,
    /// The same chunk as it was when it last went into the sums; nothing if it never did.
    pub previous: Option<&'a [u8]>,
    /// Room for the very bytes that are digested and folded, if the caller wants them.
    pub kept: Option<&'a mut [u8]>,
}

/// The partial sums of the chunk's stripe.
#[derive(Debug)]
pub struct Sums<'a, 'b> {
    /// One block per parity chunk, each as long as the chunk.
    pub blocks: &'a mut [&'b mut [u8]],
    /// The chunk's coefficient in each.
    pub coefficients: &'a [u8],
}

/// Whether a chunk has to move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// Byte for byte the previous one: the sums are untouched.
    Clean,
    /// Not the previous one: the difference is in the sums now, or the chunk itself if there was no previous one.
    Dirty,
}

/// What the pass found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Taken {
    /// [`leaf_digest`](crate::leaf_digest) of the bytes that were seen.
    pub leaf: Digest,
    /// Whether they differ from the previous ones.
    pub change: Change,
}

/// Blocks that do not fit together, or a chunk that cannot be read. Lengths are looked at before anything is done.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum TakeError<E> {
    /// The previous chunk has another length.
    #[error("expected a previous chunk of {expected} bytes, as the new one has, got {got}")]
    Previous { expected: usize, got: usize },
    /// A sum has another length.
    #[error("expected sum {sum} to have {expected} bytes, as the chunk has, got {got}")]
    Sum {
        sum: usize,
        expected: usize,
        got: usize,
    },
    /// Not one coefficient per sum.
    #[error("expected one coefficient for each of {sums} sums, got {coefficients}")]
    Coefficients { sums: usize, coefficients: usize },
    /// The room for the private copy has another length.
    #[error("expected room of {expected} bytes for the private copy, got {got}")]
    Room { expected: usize, got: usize },
    /// The chunk's memory cannot be read. Part of the chunk may be in the sums already: throw them away.
    #[error("the chunk cannot be read, and the sums that it was going into are spoiled")]
    Source(#[source] E),
}

/// The private memory of the pass: made once, used for every chunk.
#[derive(Debug)]
pub struct PrivateBlock {
    piece: Vec<u8>,
    difference: Vec<u8>,
}

impl Default for PrivateBlock {
    fn default() -> Self {
        Self::new()
    }
}

impl PrivateBlock {
    /// Two pieces of memory.
    pub fn new() -> Self {
        Self {
            piece: vec![0; START + PIECE],
            difference: vec![0; PIECE],
        }
    }

    /// Takes in a chunk and adds to the sums what changed since the previous one. `read(offset, out)` fills `out` with
    /// the chunk's bytes from `offset` on; each byte is asked for once, in order.
    ///
    /// # Errors
    /// [`TakeError`] if the blocks' lengths are not all the chunk's, or `read` fails.
    pub fn take<E>(
        &mut self,
        engine: &dyn Engine,
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
        mut chunk: NewChunk<'_>,
        mut sums: Sums<'_, '_>,
    ) -> Result<Taken, TakeError<E>> {
        check(&chunk, &sums)?;
        let mut hasher = LeafHasher::before_index();
        self.piece[START - PREFIX..START].copy_from_slice(&chunk.index.to_le_bytes());
        let mut dirty = chunk.previous.is_none();
        for start in (0..chunk.length).step_by(PIECE) {
            let range = start..chunk.length.min(start + PIECE);
            let piece = &mut self.piece[START..START + range.len()];
            read(start, piece).map_err(TakeError::Source)?;
            if let Some(kept) = &mut chunk.kept {
                kept[range.clone()].copy_from_slice(piece);
            }
            let previous = chunk.previous.map(|block| &block[range.clone()]);
            dirty |= self.fold(engine, previous, &mut sums, range.clone());
            self.feed(&mut hasher, range.len());
        }
        hasher.update(&self.piece[START - PREFIX..START]);
        Ok(Taken {
            leaf: hasher.finish(),
            change: if dirty { Change::Dirty } else { Change::Clean },
        })
    }

    /// Adds the piece's difference to the sums; says whether there is any.
    fn fold(
        &mut self,
        engine: &dyn Engine,
        previous: Option<&[u8]>,
        sums: &mut Sums<'_, '_>,
        range: Range<usize>,
    ) -> bool {
        let piece = &self.piece[START..START + range.len()];
        let change = match previous {
            // Training state that changes at all differs within a few bytes, so this reads on only in clean pieces.
            Some(previous) if previous == piece => return false,
            Some(previous) => {
                let difference = &mut self.difference[..range.len()];
                engine.fold_from(&mut [&mut *difference], &[piece], &[1], previous);
                difference
            }
            None => piece,
        };
        let blocks = sums.blocks.iter_mut();
        let mut parts: Vec<&mut [u8]> = blocks.map(|block| &mut block[range.clone()]).collect();
        engine.fold(&mut parts, sums.coefficients, change);
        true
    }

    /// Feeds the digest to eight bytes before the end of the piece, and moves those to where the next one starts: the
    /// index has shifted everything by eight, and so the digest has a whole number of pieces each time.
    fn feed(&mut self, hasher: &mut LeafHasher, length: usize) {
        let (fed, end) = (START - PREFIX + length, START + length);
        hasher.update(&self.piece[START - PREFIX..fed]);
        self.piece.copy_within(fed..end, START - PREFIX);
    }
}

/// Reads a chunk that nobody writes to: what [`PrivateBlock::take`] takes for it.
pub fn from_memory(chunk: &[u8]) -> impl FnMut(usize, &mut [u8]) -> Result<(), Infallible> + '_ {
    |offset, out| {
        out.copy_from_slice(&chunk[offset..offset + out.len()]);
        Ok(())
    }
}

fn check<E>(chunk: &NewChunk<'_>, sums: &Sums<'_, '_>) -> Result<(), TakeError<E>> {
    let expected = chunk.length;
    let unlike = |length: Option<usize>| length.filter(|length| *length != expected);
    if let Some(got) = unlike(chunk.previous.map(<[u8]>::len)) {
        return Err(TakeError::Previous { expected, got });
    }
    if let Some(got) = unlike(chunk.kept.as_ref().map(|room| room.len())) {
        return Err(TakeError::Room { expected, got });
    }
    if sums.blocks.len() != sums.coefficients.len() {
        return Err(TakeError::Coefficients {
            sums: sums.blocks.len(),
            coefficients: sums.coefficients.len(),
        });
    }
    let mut lengths = sums.blocks.iter().map(|block| block.len()).enumerate();
    match lengths.find(|(_, got)| *got != expected) {
        Some((sum, got)) => Err(TakeError::Sum { sum, expected, got }),
        None => Ok(()),
    }
}
