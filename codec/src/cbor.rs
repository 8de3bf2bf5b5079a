//! How the types of this crate look inside CBOR records: a digest is 32 bytes, a fingerprint 16, a geometry the array [k, m], a
//! chunk size its bytes. Decoding validates.

use minicbor::decode::{Decode, Decoder, Error};
use minicbor::encode::{self, Encode, Encoder, Write};

use crate::{ChunkSize, Digest, Fingerprint, Geometry};

impl<C> Encode<C> for Digest {
    fn encode<W: Write>(
        &self,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        // Head and bytes in one write: records have thousands of digests.
        let mut field = [0; 34];
        field[..2].copy_from_slice(&[0x58, 32]);
        field[2..].copy_from_slice(self.as_bytes());
        let written = e.writer_mut().write_all(&field);
        written.map_err(encode::Error::write)
    }
}

impl<'b, C> Decode<'b, C> for Digest {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<Self, Error> {
        Ok(Self::from_bytes(exactly(d, "a digest")?))
    }
}

/// A byte string of a fixed length.
#[inline]
fn exactly<'b, const N: usize>(d: &mut Decoder<'b>, what: &str) -> Result<&'b [u8; N], Error> {
    let bytes = d.bytes()?;
    let got = bytes.len();
    let wrong = |_| Error::message(format!("expected {what} of {N} bytes, got {got}"));
    bytes.try_into().map_err(wrong)
}

impl<C> Encode<C> for Fingerprint {
    fn encode<W: Write>(
        &self,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        e.bytes(self.as_bytes())?.ok()
    }
}

impl<'b, C> Decode<'b, C> for Fingerprint {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<Self, Error> {
        Ok(Self::from_bytes(*exactly(d, "a fingerprint")?))
    }
}

impl<C> Encode<C> for Geometry {
    fn encode<W: Write>(
        &self,
        e: &mut Encoder<W>,
        c: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        (self.k() as u8, self.m() as u8).encode(e, c)
    }
}

impl<'b, C> Decode<'b, C> for Geometry {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<Self, Error> {
        let (k, m) = <(u8, u8)>::decode(d, c)?;
        Self::new(usize::from(k), usize::from(m)).map_err(Error::custom)
    }
}

impl<C> Encode<C> for ChunkSize {
    fn encode<W: Write>(
        &self,
        e: &mut Encoder<W>,
        c: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        (self.bytes() as u32).encode(e, c)
    }
}

impl<'b, C> Decode<'b, C> for ChunkSize {
    fn decode(d: &mut Decoder<'b>, c: &mut C) -> Result<Self, Error> {
        Self::new(u32::decode(d, c)?).map_err(Error::custom)
    }
}
