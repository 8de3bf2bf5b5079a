//! Which chunks of a shard changed.

use thiserror::Error;

use crate::{ChunkSize, Digest};

/// One bit per chunk: whether it differs from the basis.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DirtyMap {
    words: Vec<u64>,
    chunks: usize,
}

/// Maps of unlike shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("expected dirty maps of the same number of chunks, got {0} and {1}")]
pub struct DirtyMapError(usize, usize);

impl DirtyMap {
    /// All chunks alike, clean.
    pub fn clean(chunks: usize) -> Self {
        Self {
            words: vec![0; chunks.div_ceil(64)],
            chunks,
        }
    }

    /// From the chunk digests of both steps. A chunk that the basis has not is dirty.
    pub fn from_digests(basis: &[Digest], new: &[Digest]) -> Self {
        let mut map = Self::clean(new.len());
        for (index, leaf) in new.iter().enumerate() {
            if basis.get(index) != Some(leaf) {
                map.mark(index);
            }
        }
        map
    }

    /// From the bytes of both steps. A chunk whose place the basis does not have whole is dirty, as is a last chunk of
    /// another length.
    pub fn from_bytes(basis: &[u8], new: &[u8], chunk: ChunkSize) -> Self {
        let count = chunk.count(new.len() as u64) as usize;
        let mut map = Self::clean(count);
        let mut old = basis.chunks(chunk.bytes());
        for (index, block) in new.chunks(chunk.bytes()).enumerate() {
            if old.next() != Some(block) {
                map.mark(index);
            }
        }
        map
    }

    /// Marks a chunk as dirty; one beyond the end is ignored.
    pub fn mark(&mut self, index: usize) {
        if index < self.chunks {
            self.words[index / 64] |= 1 << (index % 64);
        }
    }

    /// Whether a chunk is dirty; one beyond the end is not.
    pub fn is_dirty(&self, index: usize) -> bool {
        let word = self.words.get(index / 64).copied().unwrap_or(0);
        word >> (index % 64) & 1 == 1
    }

    /// Number of chunks.
    pub fn len(&self) -> usize {
        self.chunks
    }

    /// Whether there are no chunks.
    pub fn is_empty(&self) -> bool {
        self.chunks == 0
    }

    /// Number of dirty chunks.
    pub fn count(&self) -> usize {
        self.words
            .iter()
            .map(|word| word.count_ones() as usize)
            .sum()
    }

    /// The dirty chunks, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let bits = |(at, word): (usize, &u64)| {
            let word = *word;
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| at * 64 + bit)
        };
        self.words.iter().enumerate().flat_map(bits)
    }

    /// Marks what is dirty in `other`: a stripe moves if any of its chunks is dirty.
    ///
    /// # Errors
    /// [`DirtyMapError`] if the maps have different numbers of chunks.
    pub fn union(&mut self, other: &Self) -> Result<(), DirtyMapError> {
        if self.chunks != other.chunks {
            return Err(DirtyMapError(self.chunks, other.chunks));
        }
        for (word, more) in self.words.iter_mut().zip(&other.words) {
            *word |= more;
        }
        Ok(())
    }
}
