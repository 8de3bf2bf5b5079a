//! Chains: a base that stands alone, and increments that each need the level below.

use std::ops::Range;

use thiserror::Error;

use super::{Basis, Coder, DeltaError, Encoding, Record};
use crate::{ChunkSize, Digest, leaf_digest};

/// The most levels of a chain: every one costs a restore a read.
const LEVELS_MAX: usize = 64;
/// The longest shard that is rebuilt in memory at once.
const SHARD_BYTES_MAX: u64 = 1 << 40;

/// A shard at one step, as records.
#[derive(Clone, Copy, Debug)]
pub struct Level<'a> {
    /// Bytes of the shard.
    pub length: u64,
    /// One record per chunk.
    pub records: &'a [Vec<u8>],
    /// One digest per chunk.
    pub leaves: &'a [Digest],
}

/// A chain that gives no shard.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ChainError {
    /// No level, or more than a chain may have.
    #[error("expected a chain of 1 to {most} levels, got {got}")]
    Levels { most: usize, got: usize },
    /// A level whose tables do not fit its length.
    #[error("level {level}: expected {expected} records and leaves, got {records} and {leaves}")]
    Tables {
        level: usize,
        expected: u64,
        records: usize,
        leaves: usize,
    },
    /// A record that is damaged or does not fit.
    #[error("level {level}, chunk {chunk}: {source}")]
    Record {
        level: usize,
        chunk: u64,
        source: DeltaError,
    },
    /// A chunk that is not what was sealed.
    #[error("level {level}, chunk {chunk}: digest mismatch: expected {expected}, got {got}")]
    Digest {
        level: usize,
        chunk: u64,
        expected: Digest,
        got: Digest,
    },
}

/// The shard at the newest level: levels are applied in order, and every chunk of every level is checked against its
/// digest before the next builds on it.
///
/// # Errors
/// [`ChainError`] that names the level and the chunk.
pub fn rebuild(
    coder: &mut Coder,
    chunk: ChunkSize,
    levels: &[Level<'_>],
) -> Result<Vec<u8>, ChainError> {
    if levels.is_empty() || levels.len() > LEVELS_MAX {
        return Err(ChainError::Levels {
            most: LEVELS_MAX,
            got: levels.len(),
        });
    }
    let mut shard: Option<Vec<u8>> = None;
    for (number, level) in levels.iter().enumerate() {
        check_tables(number, level, chunk)?;
        let mut next = vec![0; level.length as usize];
        for index in 0..chunk.count(level.length) {
            let range = chunk.range(index, level.length);
            let out = &mut next[range.start as usize..range.end as usize];
            one(coder, number, level, index, &range, shard.as_deref(), out)?;
        }
        shard = Some(next);
    }
    Ok(shard.unwrap_or_default())
}

fn check_tables(number: usize, level: &Level<'_>, chunk: ChunkSize) -> Result<(), ChainError> {
    let expected = chunk.count(level.length);
    let fits = level.records.len() as u64 == expected && level.leaves.len() as u64 == expected;
    if fits && level.length <= SHARD_BYTES_MAX {
        Ok(())
    } else {
        Err(ChainError::Tables {
            level: number,
            expected,
            records: level.records.len(),
            leaves: level.leaves.len(),
        })
    }
}

fn one(
    coder: &mut Coder,
    number: usize,
    level: &Level<'_>,
    index: u64,
    range: &Range<u64>,
    below: Option<&[u8]>,
    out: &mut [u8],
) -> Result<(), ChainError> {
    let wrong = |source| ChainError::Record {
        level: number,
        chunk: index,
        source,
    };
    let record = Record::parse(&level.records[index as usize]).map_err(wrong)?;
    if let (Encoding::Clean | Encoding::Difference(..), Some(needs)) =
        (record.encoding(), record.needs())
        && needs != *range
    {
        return Err(wrong(DeltaError::Basis {
            expected_start: range.start,
            expected_length: range.end - range.start,
            got_start: needs.start,
            got_length: needs.end - needs.start,
        }));
    }
    let basis = below.map(|bytes| Basis { start: 0, bytes });
    coder.decode(&record, basis, out).map_err(wrong)?;
    let (expected, got) = (level.leaves[index as usize], leaf_digest(out, index));
    if expected == got {
        Ok(())
    } else {
        Err(ChainError::Digest {
            level: number,
            chunk: index,
            expected,
            got,
        })
    }
}

/// A chain as one level that stands alone: the records of a new base with the newest level's content.
///
/// # Errors
/// [`ChainError`] if the chain does not give a shard.
pub fn compact(
    coder: &mut Coder,
    chunk: ChunkSize,
    levels: &[Level<'_>],
) -> Result<Vec<Vec<u8>>, ChainError> {
    let shard = rebuild(coder, chunk, levels)?;
    let mut records = Vec::new();
    for (index, block) in (0..).zip(shard.chunks(chunk.bytes())) {
        let start = index * chunk.bytes() as u64;
        let wrong = |source| ChainError::Record {
            level: levels.len(),
            chunk: index,
            source,
        };
        let mut record = Vec::new();
        let packed = coder.encode(Encoding::Packed, start, block, None, &mut record);
        packed.map_err(wrong)?;
        if record.len() >= block.len() {
            record.clear();
            let raw = coder.encode(Encoding::Raw, start, block, None, &mut record);
            raw.map_err(wrong)?;
        }
        records.push(record);
    }
    Ok(records)
}
