//! Records as they lie in stores that take little at once: long ones are packed with zstd.

use bytes::Bytes;
use thiserror::Error;

/// etcd takes requests of up to 1.5 MiB (`--max-request-bytes`), base64 and all, and Kubernetes 1 MiB in a ConfigMap: what is longer is packed.
pub(super) const PACKED_FROM: usize = 512 << 10;
/// How zstd begins.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// An unpacked roster is never longer.
const RECORD_BYTES_MAX: usize = 64 << 20;

/// What begins like a packed record and is none.
#[derive(Debug, Error)]
#[error("a packed record at {name} that cannot be unpacked")]
pub(super) struct UnpackError {
    name: String,
    source: std::io::Error,
}

pub(super) fn pack(record: Bytes) -> Bytes {
    if record.len() < PACKED_FROM {
        return record;
    }
    zstd::bulk::compress(&record, 3).map_or(record, Bytes::from)
}

/// The record that lies under this name.
pub(super) fn unpack(name: &str, value: Vec<u8>) -> Result<Bytes, UnpackError> {
    if !value.starts_with(&ZSTD_MAGIC) {
        return Ok(value.into());
    }
    let unpacked = zstd::bulk::decompress(&value, RECORD_BYTES_MAX);
    unpacked.map(Bytes::from).map_err(|source| UnpackError {
        name: name.into(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_record_is_packed_and_comes_back() {
        for length in [10, PACKED_FROM - 1, PACKED_FROM, 4 * PACKED_FROM] {
            let record = Bytes::from(b"{place}".repeat(length / 7 + 1));
            let packed = pack(record.clone());
            assert_eq!(packed.starts_with(&ZSTD_MAGIC), record.len() >= PACKED_FROM);
            assert_eq!(unpack("k", packed.to_vec()).unwrap(), record);
        }
        assert!(unpack("k", ZSTD_MAGIC.to_vec()).is_err());
    }
}
