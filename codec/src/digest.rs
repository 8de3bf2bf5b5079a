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
    let mut hasher = LeafHasher::before_index();
    // The index shifts everything by eight bytes. With the first bytes of the chunk it fills one piece that BLAKE3 takes
    // on all lanes; from there on it takes whole powers of two, a fifth faster.
    let mut first = [0; FIRST_PIECE];
    let taken = chunk.len().min(FIRST_PIECE - INDEX_BYTES);
    first[..INDEX_BYTES].copy_from_slice(&index.to_le_bytes());
    first[INDEX_BYTES..INDEX_BYTES + taken].copy_from_slice(&chunk[..taken]);
    hasher.update(&first[..INDEX_BYTES + taken]);
    hasher.update(&chunk[taken..]);
    hasher.finish()
}

/// Bytes of a chunk's index, with which its digest starts.
const INDEX_BYTES: usize = 8;
/// Sixteen blocks of 1 KiB: as many as the widest registers take at once.
const FIRST_PIECE: usize = 16 << 10;

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
    fn before_index() -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leaf_is_the_digest_of_index_and_bytes_whatever_the_length() {
        let bytes: Vec<u8> = (0..70_000u32).map(|at| (at % 253) as u8).collect();
        let edges = [FIRST_PIECE - INDEX_BYTES, FIRST_PIECE, 2 * FIRST_PIECE];
        let around = edges.into_iter().flat_map(|edge| edge - 1..=edge + 1);
        for length in around.chain([0, 1, 1016, 65_536, 70_000]) {
            let mut plain = LeafHasher::new(7);
            plain.update(&bytes[..length]);
            let got = leaf_digest(&bytes[..length], 7);
            assert_eq!(got, plain.finish(), "{length} bytes");
        }
    }
}
