//! Writes a shard's chunks as records, each in the encoding that is expected to be through the link first.
//!
//! Expectations come from samples: now and then a few pieces of a chunk are encoded each way and timed. Neighbouring
//! chunks are mostly of the same tensor, so a sample holds for those that follow; what is then measured on whole
//! chunks corrects it, and a chunk that comes out unlike expected brings the next sample forward.

use std::collections::BTreeMap;

use super::{
    Basis, Coder, CostModel, DeltaError, ElementSize, Encoding, Estimate, Kind,
    RECORD_HEADER_BYTES, moved, sample,
};

/// Bytes of a piece, and how many, that are encoded to judge a chunk.
const SAMPLE_PIECE: usize = 4096;
const SAMPLE_PIECES: usize = 4;
/// Chunks from one sample to the next, at least and at most.
const INTERVAL_MIN: u32 = 4;
const INTERVAL_MAX: u32 = 64;
/// How far a size may lie from what was expected, as a share of the chunk, before a new sample is taken.
const SURPRISE: f64 = 0.08;
/// Weight of the newest measurement.
const NEWEST: f64 = 0.3;
/// What VCDIFF is expected to take and give before it has been measured: 20 MB/s, a third.
const MOVED_AT_FIRST: Rate = Rate {
    seconds: 5e-8,
    bytes: 0.33,
};
/// What a sample may take of its chunk's time on an idle link.
const SAMPLE_SHARE: f64 = 0.01;
/// The same of the first one: without it the chunk goes raw.
const FIRST_SAMPLE_SHARE: f64 = 0.2;
/// What a sample is expected to take before one has been timed.
const SAMPLE_SECONDS_AT_FIRST: f64 = 0.000_3;

/// Tells the time, in seconds from any beginning. The codec has no clock of its own.
pub trait Clock {
    /// Now.
    fn seconds(&mut self) -> f64;
}

impl<F: FnMut() -> f64> Clock for F {
    fn seconds(&mut self) -> f64 {
        self()
    }
}

/// What was chosen for a chunk, what was expected of it, and what came.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Choice {
    /// How the chunk was written.
    pub encoding: Encoding,
    /// Before.
    pub expected: Estimate,
    /// Measured.
    pub got: Estimate,
}

/// Sums over the chunks of one kind of record.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Tally {
    /// Chunks.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What was expected.
    pub expected: Estimate,
    /// What was measured.
    pub got: Estimate,
}

/// Cost per byte of a chunk.
#[derive(Clone, Copy, Debug)]
struct Rate {
    seconds: f64,
    bytes: f64,
}

impl Rate {
    fn of(estimate: Estimate, length: usize) -> Self {
        let length = length.max(1) as f64;
        Self {
            seconds: estimate.seconds / length,
            bytes: estimate.bytes / length,
        }
    }

    fn over(self, length: usize) -> Estimate {
        Estimate {
            seconds: self.seconds * length as f64,
            bytes: self.bytes * length as f64,
        }
    }

    fn toward(self, newest: Self) -> Self {
        let mix = |old: f64, new: f64| old + (new - old) * NEWEST;
        Self {
            seconds: mix(self.seconds, newest.seconds),
            bytes: mix(self.bytes, newest.bytes),
        }
    }
}

/// Chooses and writes.
pub struct DeltaWriter {
    coder: Coder,
    model: CostModel,
    element: Option<ElementSize>,
    expected: BTreeMap<Encoding, Rate>,
    moved: Option<Rate>,
    until_sample: u32,
    interval: u32,
    /// What the next sample is expected to take.
    sample_seconds: f64,
    sampling_seconds: f64,
    tallies: BTreeMap<Kind, Tally>,
}

impl DeltaWriter {
    /// For a link. `element` is the size of the numbers if it is known; else it is found by sampling.
    ///
    /// # Errors
    /// [`DeltaError::Packed`] if there is no memory for the coder.
    pub fn new(model: CostModel, element: Option<ElementSize>) -> Result<Self, DeltaError> {
        Ok(Self {
            coder: Coder::new()?,
            model,
            element,
            expected: BTreeMap::new(),
            moved: None,
            until_sample: 0,
            interval: INTERVAL_MIN,
            sample_seconds: SAMPLE_SECONDS_AT_FIRST,
            sampling_seconds: 0.0,
            tallies: BTreeMap::new(),
        })
    }

    /// The cost model, to be told a new link rate.
    pub fn model(&mut self) -> &mut CostModel {
        &mut self.model
    }

    /// Another tensor begins: its element size if it is known.
    pub fn set_element(&mut self, element: Option<ElementSize>) {
        self.element = element;
        self.until_sample = 0;
    }

    /// What was written so far, by kind of record.
    pub fn tallies(&self) -> &BTreeMap<Kind, Tally> {
        &self.tallies
    }

    /// Seconds that went into samples so far.
    pub fn sampling_seconds(&self) -> f64 {
        self.sampling_seconds
    }

    /// Appends the record of `chunk`, which begins at `start` in its shard, to `out`. The basis may hold more than the
    /// chunk's own place: then content that moved over a chunk's edge is found too.
    ///
    /// # Errors
    /// [`DeltaError`] if the chunk is longer than any may be.
    pub fn write(
        &mut self,
        start: u64,
        chunk: &[u8],
        basis: Option<Basis<'_>>,
        clock: &mut dyn Clock,
        out: &mut Vec<u8>,
    ) -> Result<Choice, DeltaError> {
        let began = clock.seconds();
        let place = start..start + chunk.len() as u64;
        let old = basis.and_then(|basis| basis.get(&place));
        let (encoding, expected) = match old {
            Some(old) if old == chunk => (Encoding::Clean, clean_estimate()),
            _ => self.choose(&place, chunk, basis, old, clock)?,
        };
        let encode = clock.seconds();
        let before = out.len();
        let encoding = self.encode(encoding, start, chunk, basis, out)?;
        let ended = clock.seconds();
        let bytes = (out.len() - before) as f64;
        let got = Estimate {
            seconds: ended - encode,
            bytes,
        };
        self.learn(encoding, expected, got, chunk.len());
        self.model.took(Estimate {
            seconds: ended - began,
            bytes,
        });
        self.tally(encoding, chunk.len(), expected, got);
        Ok(Choice {
            encoding,
            expected,
            got,
        })
    }

    /// Appends the record of a chunk that is known, by its digest, to be as the basis has it.
    ///
    /// # Errors
    /// [`DeltaError`] if the chunk is longer than any may be.
    pub fn write_clean(
        &mut self,
        place: std::ops::Range<u64>,
        out: &mut Vec<u8>,
    ) -> Result<(), DeltaError> {
        let length = place.end.saturating_sub(place.start) as usize;
        Coder::encode_clean(place, out)?;
        self.model.took(clean_estimate());
        self.tally(Encoding::Clean, length, clean_estimate(), clean_estimate());
        Ok(())
    }

    /// Writes; what does not shrink, or cannot be written so, is written raw.
    fn encode(
        &mut self,
        encoding: Encoding,
        start: u64,
        chunk: &[u8],
        basis: Option<Basis<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<Encoding, DeltaError> {
        let before = out.len();
        let outcome = self.coder.encode(encoding, start, chunk, basis, out);
        let grown = out.len() - before > chunk.len() + RECORD_HEADER_BYTES;
        match outcome {
            Ok(()) if !grown => return Ok(encoding),
            Ok(()) | Err(DeltaError::NotMoved) => out.truncate(before),
            Err(error) => return Err(error),
        }
        let outcome = self.coder.encode(Encoding::Raw, start, chunk, None, out);
        outcome.map(|()| Encoding::Raw)
    }

    fn choose(
        &mut self,
        place: &std::ops::Range<u64>,
        chunk: &[u8],
        basis: Option<Basis<'_>>,
        old: Option<&[u8]>,
        clock: &mut dyn Clock,
    ) -> Result<(Encoding, Estimate), DeltaError> {
        let raw = Estimate {
            seconds: 0.0,
            bytes: (chunk.len() + RECORD_HEADER_BYTES) as f64,
        };
        let share = if self.expected.is_empty() {
            FIRST_SAMPLE_SHARE
        } else {
            SAMPLE_SHARE
        };
        let seconds = self.sample_seconds;
        let hidden = self.model.is_hidden(seconds, chunk.len(), share);
        if self.until_sample == 0 && hidden {
            let began = clock.seconds();
            self.sample(place, chunk, basis, old, raw, clock)?;
            self.sample_seconds = clock.seconds() - began;
            self.sampling_seconds += self.sample_seconds;
        }
        self.until_sample = self.until_sample.saturating_sub(1);
        let usable = |encoding: &Encoding| match encoding.kind() {
            Kind::Difference => old.is_some(),
            Kind::Moved => basis.is_some(),
            _ => true,
        };
        let others = self
            .expected
            .iter()
            .filter(|(encoding, _)| usable(encoding));
        let others = others.map(|(encoding, rate)| (*encoding, rate.over(chunk.len())));
        Ok(self.model.choose(raw, others))
    }

    /// Encodes pieces of the chunk each way, and sets what is expected from that.
    fn sample(
        &mut self,
        place: &std::ops::Range<u64>,
        chunk: &[u8],
        basis: Option<Basis<'_>>,
        old: Option<&[u8]>,
        raw: Estimate,
        clock: &mut dyn Clock,
    ) -> Result<(), DeltaError> {
        let before = std::mem::take(&mut self.expected);
        if let Some(old) = old {
            let (element, arithmetic) = sample::shape(old, chunk, self.element);
            let old = sample::pieces(old, SAMPLE_PIECE, SAMPLE_PIECES);
            let new = sample::pieces(chunk, SAMPLE_PIECE, SAMPLE_PIECES);
            let basis = Some(Basis {
                start: 0,
                bytes: &old,
            });
            let encoding = Encoding::Difference(element, arithmetic);
            self.time(encoding, &new, basis, clock)?;
        }
        let pieces = sample::pieces(chunk, SAMPLE_PIECE, SAMPLE_PIECES);
        self.time(Encoding::Packed, &pieces, None, clock)?;
        self.sample_moved(place, chunk, basis, raw);
        self.keep_what_holds(&before);
        self.until_sample = self.interval;
        Ok(())
    }

    /// VCDIFF cannot be sampled in pieces. It is looked into only where it could be through first, given what it took
    /// so far: it is slow.
    fn sample_moved(
        &mut self,
        place: &std::ops::Range<u64>,
        chunk: &[u8],
        basis: Option<Basis<'_>>,
        raw: Estimate,
    ) {
        let rate = self.moved.unwrap_or(MOVED_AT_FIRST);
        let others = self.expected.iter().chain([(&Encoding::Moved, &rate)]);
        let others = others.map(|(encoding, rate)| (*encoding, rate.over(chunk.len())));
        let (first, _) = self.model.choose(raw, others);
        let Some(basis) = basis.filter(|_| first == Encoding::Moved) else {
            return;
        };
        let offset = place.start.saturating_sub(basis.start) as usize;
        if moved::looks_moved(chunk, basis.bytes, offset) {
            self.expected.insert(Encoding::Moved, rate);
        }
    }

    fn time(
        &mut self,
        encoding: Encoding,
        chunk: &[u8],
        basis: Option<Basis<'_>>,
        clock: &mut dyn Clock,
    ) -> Result<(), DeltaError> {
        let mut out = Vec::with_capacity(chunk.len() * 2);
        let began = clock.seconds();
        self.coder.encode(encoding, 0, chunk, basis, &mut out)?;
        let estimate = Estimate {
            seconds: clock.seconds() - began,
            bytes: out.len() as f64,
        };
        let rate = Rate::of(estimate, chunk.len());
        self.expected.insert(encoding, rate);
        Ok(())
    }

    /// Where the new sample agrees with what was measured on whole chunks, that holds: small samples take longer per
    /// byte. As long as all agree, samples become rarer.
    fn keep_what_holds(&mut self, before: &BTreeMap<Encoding, Rate>) {
        let mut agrees = !before.is_empty();
        for (encoding, rate) in &mut self.expected {
            match before.get(encoding) {
                Some(old) if (old.bytes - rate.bytes).abs() < SURPRISE => *rate = *old,
                _ => agrees = false,
            }
        }
        self.interval = if agrees {
            (self.interval * 2).min(INTERVAL_MAX)
        } else {
            INTERVAL_MIN
        };
    }

    fn learn(&mut self, encoding: Encoding, expected: Estimate, got: Estimate, length: usize) {
        let newest = Rate::of(got, length);
        if encoding == Encoding::Moved {
            self.moved = Some(self.moved.map_or(newest, |rate| rate.toward(newest)));
        }
        if let Some(rate) = self.expected.get_mut(&encoding) {
            *rate = rate.toward(newest);
        }
        let surprised = (expected.bytes - got.bytes).abs() > SURPRISE * length as f64;
        if surprised && encoding != Encoding::Clean {
            self.until_sample = 0;
        }
    }

    fn tally(&mut self, encoding: Encoding, length: usize, expected: Estimate, got: Estimate) {
        let tally = self.tallies.entry(encoding.kind()).or_default();
        tally.chunks += 1;
        tally.bytes += length as u64;
        tally.expected += expected;
        tally.got += got;
    }
}

fn clean_estimate() -> Estimate {
    Estimate {
        seconds: 0.0,
        bytes: RECORD_HEADER_BYTES as f64,
    }
}
