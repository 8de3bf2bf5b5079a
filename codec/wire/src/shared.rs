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
    /// Two parts of some bytes, the first one in front. Of both the larger one stays where it is and the other one is copied, so that no
    /// more than half as much again is in memory meanwhile: copies of two halves would take as much again.
    pub(crate) fn parts_of(mut all: Vec<u8>, [first, second]: [Range<usize>; 2]) -> [Self; 2] {
        let is_small = |part: &Range<usize>| part.len() < all.len() / 2;
        if !is_small(&first) || !is_small(&second) {
            let all = Arc::new(all);
            return [first, second].map(|part| Self::part_of(&all, part));
        }
        let second = Self::from(all.get(second).unwrap_or_default().to_vec());
        all.truncate(first.end);
        all.shrink_to_fit();
        [Self::part_of(&Arc::new(all), first), second]
    }

    /// This part of some bytes, which are all in memory as long as it is. A small part is copied instead: who keeps one megabyte of
    /// sixty must not keep the others.
    fn part_of(all: &Arc<Vec<u8>>, part: Range<usize>) -> Self {
        match all.get(part.clone()) {
            Some(bytes) if bytes.len() < all.len() / 2 => bytes.to_vec().into(),
            Some(_) => Self {
                all: all.clone(),
                part,
            },
            None => Self::default(),
        }
    }
}

/// Where a part of some bytes lies in them.
pub(crate) fn place_in(all: &[u8], part: &[u8]) -> Range<usize> {
    let start = part.as_ptr().addr().wrapping_sub(all.as_ptr().addr());
    start..start.wrapping_add(part.len())
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
        let large = SharedBytes::part_of(&all, 10..80);
        assert_eq!(
            (&large[..], large.as_ptr()),
            (&all[10..80], &raw const all[10])
        );
        let small = SharedBytes::part_of(&all, 10..20);
        assert_eq!(&small[..], &all[10..20]);
        assert_eq!(Arc::strong_count(&all), 2);
        assert_eq!(place_in(&all, &all[10..20]), 10..20);
    }

    #[test]
    fn two_parts_are_what_they_were_and_keep_little_beside_themselves() {
        for lengths in [
            [500, 490],
            [490, 500],
            [900, 90],
            [90, 900],
            [0, 990],
            [0, 0],
        ] {
            let mut frame = vec![1; 10];
            let mut places = Vec::new();
            for (content, length) in (2..).zip(lengths) {
                places.push(frame.len()..frame.len() + length);
                frame.extend(vec![content; length]);
            }
            let [first, second] = [places[0].clone(), places[1].clone()];
            let parts = SharedBytes::parts_of(frame, [first, second]);
            for (content, (part, length)) in (2..).zip(parts.iter().zip(lengths)) {
                assert_eq!(part[..], vec![content; length]);
                let kept = part.all.len();
                assert!(
                    kept <= 2 * length + 10,
                    "{kept} for {length} of {lengths:?}"
                );
            }
        }
    }
}
