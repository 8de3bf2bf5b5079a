//! Record bytes: strict CBOR in, canonical CBOR out, and the length prefix of a frame on a stream.

use minicbor::{Decode, Encode};
use thiserror::Error;

/// Longest frame between a trainer and its daemon: a manifest of 100 000 tensors with room to spare.
pub const LOCAL_FRAME_BYTES_MAX: usize = 64 << 20;

/// Longest request of a connection that has not said hello.
pub const FIRST_REQUEST_BYTES_MAX: usize = 64 << 10;

/// Longest request but a commit: every second chunk of 80 GiB, with room to spare.
pub const REQUEST_BYTES_MAX: usize = 4 << 20;

/// Ranges that a reader may ask for at once, after those of neighbouring chunks were merged: every second chunk of 256 KiB of 80 GiB, which are
/// 80 GiB / 512 KiB.
pub const RANGES_MAX: usize = 163_840;

/// Bytes of the length prefix (u32, little endian) before every frame.
pub const FRAME_PREFIX_BYTES: usize = 4;

/// Bytes that are not the record they should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WireError {
    /// Not CBOR, a wrong type, a missing field or a value out of range.
    #[error("malformed {what}: {reason}")]
    Malformed { what: &'static str, reason: String },
    /// Bytes follow the record.
    #[error("malformed {what}: {extra} bytes follow the record")]
    Trailing { what: &'static str, extra: usize },
    /// A length prefix above the limit.
    #[error("frame of {got} bytes is longer than the limit of {limit}")]
    TooLong { got: usize, limit: usize },
}

/// Encodes a record.
pub fn encode<T: Encode<()>>(record: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_to(record, &mut bytes);
    bytes
}

/// Encodes a record behind what is there.
pub(crate) fn encode_to<T: Encode<()>>(record: &T, bytes: &mut Vec<u8>) {
    // Writing to a Vec cannot fail, and no record here has a custom encoder that does.
    if let Err(error) = minicbor::encode(record, bytes) {
        unreachable!("encoding to memory failed: {error}");
    }
}

/// Decodes a record that must fill `bytes` whole.
///
/// # Errors
/// [`WireError`] if the bytes are anything but exactly one record of the type.
pub fn decode<'b, T: Decode<'b, ()>>(what: &'static str, bytes: &'b [u8]) -> Result<T, WireError> {
    let mut decoder = minicbor::Decoder::new(bytes);
    let record = decoder.decode().map_err(|error| WireError::Malformed {
        what,
        reason: error.to_string(),
    })?;
    let extra = bytes.len() - decoder.position();
    if extra > 0 {
        return Err(WireError::Trailing { what, extra });
    }
    Ok(record)
}

/// A frame: the length prefix and the record.
pub fn frame<T: Encode<()>>(record: &T) -> Vec<u8> {
    let body = encode(record);
    let mut bytes = Vec::with_capacity(FRAME_PREFIX_BYTES + body.len());
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&body);
    bytes
}

/// The body length that a prefix announces.
///
/// # Errors
/// [`WireError::TooLong`] above `limit`.
pub fn body_length(prefix: [u8; FRAME_PREFIX_BYTES], limit: usize) -> Result<usize, WireError> {
    let got = u32::from_le_bytes(prefix) as usize;
    if got > limit {
        return Err(WireError::TooLong { got, limit });
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_must_fill_its_bytes() {
        let mut bytes = encode(&7u32);
        assert_eq!(decode::<u32>("number", &bytes).unwrap(), 7);
        bytes.push(0);
        assert!(matches!(
            decode::<u32>("number", &bytes),
            Err(WireError::Trailing { extra: 1, .. })
        ));
        assert!(decode::<u32>("number", &[]).is_err());
    }

    #[test]
    fn a_long_frame_is_refused() {
        assert_eq!(body_length([3, 0, 0, 0], 3).unwrap(), 3);
        assert!(body_length([4, 0, 0, 0], 3).is_err());
    }
}
