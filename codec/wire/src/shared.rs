//! Bytes that many messages carry at once: on the wire a byte string like any other.

use std::fmt::{self, Debug, Formatter};
use std::ops::{Deref, Range};
use std::sync::Arc;

use minicbor::bytes::ByteVec;
use minicbor::decode::{Decoder, Error as DecodeError};
use minicbor::encode::{Encoder, Error as EncodeError, Write};
use minicbor::{Decode, Encode};

/// Bytes of which every copy is the same memory. A home node tells a manifest of megabytes to a thousand nodes at once.
#[derive(Clone)]
pub struct SharedBytes {
    /// They are a part of this: what a request brought stays where the socket was read to.
    all: Arc<Vec<u8>>,
    part: Range<usize>,
}

impl SharedBytes {
    /// This part of some bytes, which are all in memory as long as it is. A small part is copied instead: who keeps one megabyte of
    /// sixty must not keep the others.
    pub(crate) fn part_of(all: &Arc<Vec<u8>>, part: &[u8]) -> Self {
        let start = part.as_ptr().addr().wrapping_sub(all.as_ptr().addr());
        let part_at = start..start.wrapping_add(part.len());
        let is_large = part.len() >= all.len() / 2;
        if is_large && all.get(part_at.clone()) == Some(part) {
            let (all, part) = (all.clone(), part_at);
            return Self { all, part };
        }
        part.to_vec().into()
    }
}

impl Default for SharedBytes {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl PartialEq for SharedBytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for SharedBytes {}

impl Debug for SharedBytes {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedBytes").field(&&**self).finish()
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.all[self.part.clone()]
    }
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(mut bytes: Vec<u8>) -> Self {
        let part = 0..bytes.len();
        // What has grown by doubling would hold half as much again, or as much, for as long as it is kept.
        if bytes.capacity() - bytes.len() > bytes.len() / 8 {
            bytes.shrink_to_fit();
        }
        let all = Arc::new(bytes);
        Self { all, part }
    }
}

impl From<ByteVec> for SharedBytes {
    fn from(bytes: ByteVec) -> Self {
        Vec::from(bytes).into()
    }
}

impl<C> Encode<C> for SharedBytes {
    fn encode<W: Write>(
        &self,
        encoder: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        encoder.bytes(self)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for SharedBytes {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, DecodeError> {
        ByteVec::decode(decoder, context).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_part_shares_the_memory_and_a_small_one_does_not_keep_it() {
        let all: Arc<Vec<u8>> = Arc::new((0..100).collect());
        let large = SharedBytes::part_of(&all, &all[10..80]);
        assert_eq!(
            (&large[..], large.as_ptr()),
            (&all[10..80], &raw const all[10])
        );
        let small = SharedBytes::part_of(&all, &all[10..20]);
        assert_eq!(&small[..], &all[10..20]);
        assert_eq!(Arc::strong_count(&all), 2);
        // Bytes of elsewhere are theirs.
        let elsewhere = vec![7; 90];
        let copied = SharedBytes::part_of(&all, &elsewhere);
        assert_eq!(&copied[..], elsewhere);
        assert_eq!(Arc::strong_count(&all), 2);
    }
}
