//! Bytes that many messages carry at once: on the wire a byte string like any other.

use std::ops::Deref;
use std::sync::Arc;

use minicbor::bytes::ByteVec;
use minicbor::decode::{Decoder, Error as DecodeError};
use minicbor::encode::{Encoder, Error as EncodeError, Write};
use minicbor::{Decode, Encode};

/// Bytes of which every copy is the same memory. A home node tells a manifest of megabytes to a thousand nodes at once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedBytes(Arc<[u8]>);

impl Default for SharedBytes {
    fn default() -> Self {
        Self(Arc::from([]))
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
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
        encoder.bytes(&self.0)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for SharedBytes {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, DecodeError> {
        ByteVec::decode(decoder, context).map(Self::from)
    }
}
