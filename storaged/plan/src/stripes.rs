//! Which stripes move: all, those of a byte range, or the dirty ones, of which the members agree on the union first.

use std::ops::Range;

use storaged_codec::ChunkSize;

/// One bit per chunk of a shard: set if the chunk differs from the basis.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirtyMap {
    chunks: u64,
    words: Vec<u64>,
}

impl DirtyMap {
    /// All chunks clean.
    pub fn clean(chunks: u64) -> Self {
        let words = usize::try_from(chunks.div_ceil(64)).unwrap_or(usize::MAX);
        Self {
            chunks,
            words: vec![0; words],
        }
    }

    /// All chunks dirty.
    pub fn all(chunks: u64) -> Self {
        let mut map = Self::clean(chunks);
        map.words.fill(u64::MAX);
        map.cut();
        map
    }

    /// One bit per chunk in so many bytes as it takes, the first chunk in the lowest bit of the first byte.
    pub fn to_bits(&self) -> Vec<u8> {
        let mut bits: Vec<u8> = self.words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bits.truncate(usize::try_from(self.chunks.div_ceil(8)).unwrap_or(usize::MAX));
        bits
    }

    /// The map of these bits; none if there are more or fewer than it takes, or one beyond the last chunk.
    pub fn of_bits(chunks: u64, bits: &[u8]) -> Option<Self> {
        if bits.len() as u64 != chunks.div_ceil(8) {
            return None;
        }
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let words = bits.chunks(8).map(word).collect();
        let map = Self { chunks, words };
        let mut inside = map.clone();
        inside.cut();
        (inside == map).then_some(map)
    }

    /// Takes out what is dirty in the other.
    pub fn remove(&mut self, other: &Self) {
        let both = self.words.iter_mut().zip(&other.words);
        both.for_each(|(mine, theirs)| *mine &= !theirs);
    }

    /// Leaves only what is dirty in the other too.
    pub fn keep_only(&mut self, other: &Self) {
        let theirs = other.words.iter().copied().chain(std::iter::repeat(0));
        self.words
            .iter_mut()
            .zip(theirs)
            .for_each(|(mine, theirs)| *mine &= theirs);
    }

    /// Nothing is dirty beyond the last chunk.
    fn cut(&mut self) {
        let rest = self.chunks % 64;
        if rest > 0
            && let Some(last) = self.words.last_mut()
        {
            *last &= (1 << rest) - 1;
        }
    }

    /// How many chunks it speaks of.
    pub fn chunks(&self) -> u64 {
        self.chunks
    }

    /// Marks a chunk dirty; beyond the end there is nothing to mark.
    pub fn mark(&mut self, chunk: u64) {
        if chunk < self.chunks {
            self.words[(chunk / 64) as usize] |= 1 << (chunk % 64);
        }
    }

    /// Marks runs of chunks.
    pub fn mark_all(&mut self, runs: impl IntoIterator<Item = Range<u64>>) {
        for run in runs {
            (run.start..run.end.min(self.chunks)).for_each(|chunk| self.mark(chunk));
        }
    }

    /// Whether a chunk is dirty.
    pub fn is_dirty(&self, chunk: u64) -> bool {
        chunk < self.chunks && (self.words[(chunk / 64) as usize] >> (chunk % 64)) & 1 == 1
    }

    /// How many chunks are dirty.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    /// Marks what is dirty in the other too. Shards of one lane may have different lengths: the longer one counts.
    pub fn unite(&mut self, other: &Self) {
        self.chunks = self.chunks.max(other.chunks);
        let words = self.words.len().max(other.words.len());
        self.words.resize(words, 0);
        let both = self.words.iter_mut().zip(&other.words);
        both.for_each(|(mine, theirs)| *mine |= theirs);
    }

    /// The union over all members of a group: the stripes with at least one dirty chunk.
    pub fn union<'a>(maps: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut union = Self::clean(0);
        maps.into_iter().for_each(|map| union.unite(map));
        union
    }

    /// Dirty chunks as ascending runs.
    pub fn runs(&self) -> Vec<Range<u64>> {
        let mut runs: Vec<Range<u64>> = Vec::new();
        for (index, word) in self.words.iter().enumerate() {
            let mut left = *word;
            while left != 0 {
                let start = left.trailing_zeros();
                let length = (left >> start).trailing_ones();
                let first = index as u64 * 64 + u64::from(start);
                append(&mut runs, first..first + u64::from(length));
                let above = start + length;
                left = left.checked_shr(above).map_or(0, |rest| rest << above);
            }
        }
        runs
    }
}

/// Adds a run behind the others, joined with the last one where they touch.
pub(super) fn append(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        Some(last) if last.end == run.start => last.end = run.end,
        _ => runs.push(run),
    }
}

/// Stripes of one lane, ascending, and how many bytes each has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StripeSet {
    chunk: ChunkSize,
    lane_length: u64,
    runs: Vec<Range<u64>>,
}

impl StripeSet {
    /// Every stripe of a lane.
    pub fn all(chunk: ChunkSize, lane_length: u64) -> Self {
        Self::of_runs(chunk, lane_length, std::iter::once(0..u64::MAX))
    }

    /// The stripes that are dirty in the union of the members' maps.
    pub fn dirty(chunk: ChunkSize, lane_length: u64, union: &DirtyMap) -> Self {
        Self::of_runs(chunk, lane_length, union.runs())
    }

    /// The stripes that a byte range of a shard touches.
    pub fn of_bytes(chunk: ChunkSize, lane_length: u64, bytes: Range<u64>) -> Self {
        let size = chunk.bytes() as u64;
        let end = bytes.end.min(lane_length);
        let run = if bytes.start < end {
            bytes.start / size..end.div_ceil(size)
        } else {
            0..0
        };
        Self::of_runs(chunk, lane_length, std::iter::once(run))
    }

    /// Runs of stripes, ascending and apart; what lies beyond the lane's end is left out.
    fn of_runs(
        chunk: ChunkSize,
        lane_length: u64,
        runs: impl IntoIterator<Item = Range<u64>>,
    ) -> Self {
        let count = chunk.count(lane_length);
        let mut inside = Vec::new();
        for run in runs {
            let run = run.start..run.end.min(count);
            if run.start < run.end {
                append(&mut inside, run);
            }
        }
        Self {
            chunk,
            lane_length,
            runs: inside,
        }
    }

    /// The runs, as a session's work has them.
    pub fn runs(&self) -> &[Range<u64>] {
        &self.runs
    }

    /// Every stripe, ascending; a stripe's position here is its turn.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.runs.iter().cloned().flatten()
    }

    /// How many stripes.
    pub fn count(&self) -> u64 {
        self.runs.iter().map(|run| run.end - run.start).sum()
    }

    /// Bytes of every block of a stripe.
    pub fn stripe_bytes(&self, stripe: u64) -> u64 {
        stripe_bytes(self.chunk, self.lane_length, stripe) as u64
    }

    /// Bytes of one block of each stripe, together: what one node that sends one block per stripe sends.
    pub fn bytes(&self) -> u64 {
        self.iter().map(|stripe| self.stripe_bytes(stripe)).sum()
    }

    /// Size of a whole chunk.
    pub fn chunk(&self) -> ChunkSize {
        self.chunk
    }
}

/// Bytes of every block of a stripe: a whole chunk, or what the longest shard of the lane has left.
pub fn stripe_bytes(chunk: ChunkSize, lane_length: u64, stripe: u64) -> usize {
    let range = chunk.range(stripe, lane_length);
    usize::try_from(range.end - range.start).unwrap_or(0)
}
