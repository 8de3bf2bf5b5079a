//! An unfinished write in parts, and what it takes to go on with it after a restart.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use crc_fast::CrcAlgorithm::Crc64Nvme;
use md5::{Digest, Md5};
use twox_hash::XxHash3_128;

use super::{ObjectKey, StoreError, StoreLimits};

/// Number of a part, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartNumber(pub u32);

impl fmt::Display for PartNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Size of every part of an upload but the last; never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartBytes(u64);

impl PartBytes {
    /// A part size that a store with these limits takes.
    pub fn new(bytes: u64, limits: &StoreLimits) -> Result<Self, StoreError> {
        let (min, max, unit) = (
            limits.part_bytes_min.max(1),
            limits.part_bytes_max,
            limits.form.part_unit(),
        );
        if !(min..=max).contains(&bytes) || !bytes.is_multiple_of(unit) {
            return Err(StoreError::Invalid {
                what: "part size".into(),
                expected: format!("{min} to {max}, a multiple of {unit}"),
                got: bytes.to_string(),
            });
        }
        Ok(Self(bytes))
    }

    pub fn get(self) -> u64 {
        self.0
    }

    /// How many parts an object of `length` bytes has; an empty object has one empty part.
    pub fn parts_of(self, length: u64) -> u64 {
        length.div_ceil(self.0).max(1)
    }
}

/// The store's own name for an upload.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UploadId(pub(super) String);

impl fmt::Display for UploadId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a store remembers of a part's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartDigest {
    /// XXH3 of 128 bits: it finds what a crash left of a part. Whoever may write there needs no collision.
    Xxh3(u128),
    /// S3's entity tag, which for most servers is the MD5 of the part.
    ETag(String),
    /// XXH3 of 128 bits, and what a service calls the part when it puts the object together.
    Named { hash: u128, name: String },
    /// CRC-64/NVME, which S3 computes too, and the entity tag.
    Crc64 { sum: u64, tag: String },
}

/// CRC-64/NVME.
pub(super) fn crc64(bytes: &Bytes) -> u64 {
    crc_fast::checksum(Crc64Nvme, bytes)
}

/// One part that the store holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartState {
    /// Length in bytes.
    pub length: u64,
    pub digest: PartDigest,
}

impl PartState {
    /// The state of a part with these bytes in a store whose digests are our own.
    pub(super) fn of(bytes: &Bytes) -> Self {
        Self {
            length: bytes.len() as u64,
            digest: PartDigest::Xxh3(XxHash3_128::oneshot(bytes)),
        }
    }

    /// Whether the held part is these bytes. An entity tag that is no MD5 (some servers encrypt)
    /// matches nothing, so the part is written again: slower, never wrong.
    pub fn matches(&self, bytes: &Bytes) -> bool {
        self.length == bytes.len() as u64
            && match &self.digest {
                PartDigest::Xxh3(hash) | PartDigest::Named { hash, .. } => {
                    *hash == XxHash3_128::oneshot(bytes)
                }
                PartDigest::Crc64 { sum, .. } => *sum == crc64(bytes),
                PartDigest::ETag(tag) => tag
                    .trim_matches('"')
                    .eq_ignore_ascii_case(&hex::encode(Md5::digest(bytes))),
            }
    }
}

/// An unfinished write of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upload {
    key: ObjectKey,
    id: UploadId,
    part_bytes: PartBytes,
    done: BTreeMap<PartNumber, PartState>,
}

impl Upload {
    pub(super) fn new(key: ObjectKey, id: UploadId, part_bytes: PartBytes) -> Self {
        Self {
            key,
            id,
            part_bytes,
            done: BTreeMap::new(),
        }
    }

    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    pub fn id(&self) -> &UploadId {
        &self.id
    }

    pub fn part_bytes(&self) -> PartBytes {
        self.part_bytes
    }

    /// The same upload in parts of another size, of which the store holds the same numbers.
    pub(super) fn in_parts_of(&self, part_bytes: PartBytes) -> Self {
        Self {
            part_bytes,
            ..self.clone()
        }
    }

    /// The same without parts of this length.
    pub(super) fn without_parts_of(&self, length: u64) -> Self {
        let mut others = self.clone();
        others.done.retain(|_, state| state.length != length);
        others
    }

    /// The same without what is known of its parts.
    pub(super) fn without_parts(&self) -> Self {
        Self::new(self.key.clone(), self.id.clone(), self.part_bytes)
    }

    /// The parts that the store holds.
    pub fn done(&self) -> &BTreeMap<PartNumber, PartState> {
        &self.done
    }

    /// Whether an object of `length` bytes has all of the parts that the store holds.
    pub fn lies_within(&self, length: u64) -> bool {
        let last = self.done.last_key_value().map(|(part, _)| *part);
        let parts = self.part_bytes.parts_of(length);
        last.is_none_or(|last| u64::from(last.0) < parts)
    }

    /// Notes a part that [`super::Store::put_part`] has written.
    pub fn note(&mut self, part: PartNumber, state: PartState) {
        self.done.insert(part, state);
    }

    /// Where a part starts in the object; fails for a part that does not fit the upload.
    pub(super) fn check_part(
        &self,
        part: PartNumber,
        bytes: &Bytes,
        limits: &StoreLimits,
    ) -> Result<u64, StoreError> {
        let length = bytes.len() as u64;
        let start = u64::from(part.0).checked_mul(self.part_bytes.0);
        match start {
            Some(start) if part.0 < limits.parts_max && length <= self.part_bytes.0 => Ok(start),
            _ => Err(StoreError::Invalid {
                what: format!("part {part} of {}", self.key),
                expected: format!(
                    "at most {} parts of at most {} bytes",
                    limits.parts_max, self.part_bytes.0
                ),
                got: format!("number {part} of {length} bytes"),
            }),
        }
    }

    /// Checks that the parts are exactly those of an object of `length` bytes.
    pub(super) fn check_complete(&self, length: u64) -> Result<(), StoreError> {
        let count = self.part_bytes.parts_of(length);
        for number in 0..count {
            let start = number * self.part_bytes.0;
            let expected = self.part_bytes.0.min(length - start);
            let part = u32::try_from(number)
                .ok()
                .and_then(|n| self.done.get(&PartNumber(n)));
            let got = part.map(|state| state.length);
            if got != Some(expected) {
                return Err(StoreError::Invalid {
                    what: format!("upload of {}", self.key),
                    expected: format!("part {number} of {expected} bytes"),
                    got: got.map_or("no such part".into(), |got| format!("{got} bytes")),
                });
            }
        }
        if self.done.len() as u64 > count {
            return Err(StoreError::Invalid {
                what: format!("upload of {}", self.key),
                expected: format!("{count} parts for {length} bytes"),
                got: format!("{} parts", self.done.len()),
            });
        }
        Ok(())
    }
}
