//! Digests: BLAKE3 of bytes, of a chunk in its place, and of a shard from its chunks' digests alone.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

use crate::chunk::ChunkSize;

/// A BLAKE3 digest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

/// Text that is no digest.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("expected 64 hexadecimal digits, got {0:?}")]
pub struct DigestTextError(String);

impl Digest {
    /// From its bytes.
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        Self(*bytes)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Digest {
    type Err = DigestTextError;

    fn from_str(text: &str) -> Result<Self, DigestTextError> {
        let hash = blake3::Hash::from_hex(text).map_err(|_| DigestTextError(text.into()))?;
        Ok(Self(*hash.as_bytes()))
    }
}

/// The digest of bytes that are no chunk.
pub fn digest(bytes: &[u8]) -> Digest {
    Digest(*blake3::hash(bytes).as_bytes())
}

/// The digest of chunk `index` of a shard. The index goes in, so a chunk in another place has another digest.
pub fn leaf_digest(chunk: &[u8], index: u64) -> Digest {
    let mut hasher = LeafHasher::new(index);
    hasher.update(chunk);
    hasher.finish()
}

/// [`leaf_digest`] of a chunk that comes in pieces.
#[derive(Clone, Debug)]
pub struct LeafHasher(blake3::Hasher);

impl LeafHasher {
    /// Before the first byte of chunk `index`.
    pub fn new(index: u64) -> Self {
        let mut hasher = Self::before_index();
        hasher.update(&index.to_le_bytes());
        hasher
    }

    /// Before the index, whose eight bytes (little endian) the caller feeds first: so it can feed whole powers of
    /// two bytes each time, which is when BLAKE3 is fastest.
    pub(crate) fn before_index() -> Self {
        Self(blake3::Hasher::new_derive_key("storaged 2026-11 chunk"))
    }

    /// The next bytes of the chunk.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// The digest of what came.
    pub fn finish(self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

/// The digest of a shard, from its length, chunk size and chunk digests.
pub fn root_digest(leaves: &[Digest], length: u64, chunk: ChunkSize) -> Digest {
    let mut hasher = blake3::Hasher::new_derive_key("storaged 2026-11 shard");
    hasher.update(&length.to_le_bytes());
    hasher.update(&(chunk.bytes() as u64).to_le_bytes());
    leaves.iter().for_each(|leaf| {
        hasher.update(&leaf.0);
    });
    Digest(*hasher.finalize().as_bytes())
}
