//! The index of an increment: a shard in the durable tier written as delta records against an earlier checkpoint there.
//! It says which, and for each record where it ends and what its digest is, so that no record is taken apart before it
//! is known to be the one that was written.

use std::ops::Range;

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};
use storaged_codec::{Digest, digest};
use thiserror::Error;

use crate::framing::{WireError, decode, encode};
use crate::ids::{Rank, Step};
use crate::run::RunId;

/// The checkpoint that an increment builds on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub struct IncrementBase {
    /// Its run.
    #[cbor(n(0), decode_with = "crate::run::decode_stored")]
    pub run: RunId,
    /// Its step.
    #[n(1)]
    pub step: Step,
    /// Its name.
    #[n(2)]
    pub manifest: Digest,
}

#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
struct Fields {
    #[n(0)]
    version: u16,
    #[n(1)]
    manifest: Digest,
    #[n(2)]
    rank: Rank,
    #[n(3)]
    base: IncrementBase,
    #[n(4)]
    depth: u32,
    /// u64 little endian each.
    #[n(5)]
    ends: ByteVec,
    /// 32 bytes each.
    #[n(6)]
    digests: ByteVec,
}

/// A sound index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IncrementIndex {
    /// The checkpoint that the shard belongs to.
    pub manifest: Digest,
    /// Whose shard it is.
    pub rank: Rank,
    /// What it builds on.
    pub base: IncrementBase,
    /// Increments from this one down to the copy that stands alone, itself included: 1 or more.
    pub depth: u32,
    /// Where each record ends in the object of records.
    pub ends: Vec<u64>,
    /// Digest of each record.
    pub digests: Vec<Digest>,
}

/// Bytes that claim to be an index and are not a sound one.
#[derive(Debug, Error)]
pub enum IncrementError {
    /// Not the record.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Cut off or changed.
    #[error("increment index digest mismatch: expected {expected}, got {got}")]
    Digest { expected: Digest, got: Digest },
    /// Shorter than a digest.
    #[error("expected an increment index of more than 32 bytes, got {0}")]
    Short(usize),
    /// A version of the future or the past.
    #[error(
        "increment index version must be at most {expected}, got {got}: use a storaged release that knows it"
    )]
    Version { expected: u16, got: u16 },
    /// Fields contradict one another.
    #[error("inconsistent increment index: expected {0}")]
    Inconsistent(&'static str),
}

impl IncrementIndex {
    /// The version that this code writes. It reads version 1 too, whose runs are numbers alone.
    pub const VERSION: u16 = 2;
    /// The longest chain of increments on one base.
    pub const DEPTH_MAX: u32 = 32;

    /// The object: the record, then its digest.
    pub fn to_object(&self) -> Vec<u8> {
        let ends: Vec<u8> = self.ends.iter().flat_map(|end| end.to_le_bytes()).collect();
        let digests: Vec<u8> = self
            .digests
            .iter()
            .flat_map(|one| *one.as_bytes())
            .collect();
        let fields = Fields {
            version: Self::VERSION,
            manifest: self.manifest,
            rank: self.rank,
            base: self.base,
            depth: self.depth,
            ends: ends.into(),
            digests: digests.into(),
        };
        let mut object = encode(&fields);
        let name = digest(&object);
        object.extend_from_slice(name.as_bytes());
        object
    }

    /// Reads an object.
    ///
    /// # Errors
    /// [`IncrementError`] that says what is wrong.
    pub fn from_object(object: &[u8]) -> Result<Self, IncrementError> {
        let (bytes, name) = object
            .split_last_chunk::<32>()
            .ok_or(IncrementError::Short(object.len()))?;
        let (expected, got) = (Digest::from_bytes(name), digest(bytes));
        if expected != got {
            return Err(IncrementError::Digest { expected, got });
        }
        let fields: Fields = decode("increment index", bytes)?;
        if !(1..=Self::VERSION).contains(&fields.version) {
            return Err(IncrementError::Version {
                expected: Self::VERSION,
                got: fields.version,
            });
        }
        let (ends, ends_rest) = fields.ends.as_chunks::<8>();
        let (digests, digests_rest) = fields.digests.as_chunks::<32>();
        if !ends_rest.is_empty() || !digests_rest.is_empty() || ends.len() != digests.len() {
            return Err(IncrementError::Inconsistent(
                "one end and one digest per record",
            ));
        }
        let index = Self {
            manifest: fields.manifest,
            rank: fields.rank,
            base: fields.base,
            depth: fields.depth,
            ends: ends.iter().map(|end| u64::from_le_bytes(*end)).collect(),
            digests: digests.iter().map(Digest::from_bytes).collect(),
        };
        index.check()
    }

    fn check(self) -> Result<Self, IncrementError> {
        let rising = self.ends.first().is_none_or(|first| *first > 0)
            && self.ends.windows(2).all(|pair| pair[0] < pair[1]);
        if !rising {
            return Err(IncrementError::Inconsistent("rising ends of records"));
        }
        if (1..=Self::DEPTH_MAX).contains(&self.depth) {
            Ok(self)
        } else {
            Err(IncrementError::Inconsistent("a depth of 1 to 32"))
        }
    }

    /// Where records `from..to` lie in their object.
    pub fn place(&self, records: &Range<u64>) -> Option<Range<u64>> {
        let end_of = |record: u64| self.ends.get(usize::try_from(record).ok()?).copied();
        let start = match records.start {
            0 => 0,
            first => end_of(first - 1)?,
        };
        Some(start..end_of(records.end.checked_sub(1)?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> IncrementIndex {
        IncrementIndex {
            manifest: digest(b"manifest"),
            rank: Rank::new(3),
            base: IncrementBase {
                run: RunId::new(2),
                step: Step::new(40),
                manifest: digest(b"base"),
            },
            depth: 2,
            ends: vec![24, 100, 4096],
            digests: vec![digest(b"a"), digest(b"b"), digest(b"c")],
        }
    }

    #[test]
    fn an_index_survives_its_object() {
        assert_eq!(
            IncrementIndex::from_object(&index().to_object()).unwrap(),
            index()
        );
        assert_eq!(index().place(&(0..1)), Some(0..24));
        assert_eq!(index().place(&(1..3)), Some(24..4096));
        assert_eq!(index().place(&(2..4)), None);
        assert_eq!(index().place(&(0..0)), None);
    }

    #[test]
    fn every_changed_or_missing_byte_is_noticed() {
        let object = index().to_object();
        for at in 0..object.len() {
            let mut changed = object.clone();
            changed[at] ^= 1;
            assert!(IncrementIndex::from_object(&changed).is_err(), "byte {at}");
            assert!(
                IncrementIndex::from_object(&object[..at]).is_err(),
                "cut at {at}"
            );
        }
    }

    #[test]
    fn fields_that_contradict_one_another_are_refused() {
        let wrong = |change: fn(&mut IncrementIndex)| {
            let mut index = index();
            change(&mut index);
            IncrementIndex::from_object(&index.to_object())
                .unwrap_err()
                .to_string()
        };
        assert!(wrong(|index| index.ends[1] = 24).contains("rising"));
        assert!(wrong(|index| index.ends[0] = 0).contains("rising"));
        assert!(wrong(|index| index.depth = 0).contains("depth"));
        assert!(wrong(|index| index.depth = 33).contains("depth"));
        assert!(wrong(|index| index.digests.truncate(2)).contains("one digest"));
    }
}
