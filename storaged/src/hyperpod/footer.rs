//! What stands behind a body in its shard: how long it is and its checksum, as the client gave it, so that whoever reads
//! it back can verify from end to end. See docs/FORMATS.md.

use super::names::Checksum;

/// Bytes of it.
pub const FOOTER_BYTES: u64 = 64;

const MAGIC: &[u8; 16] = b"storaged-hyper-1";

/// Length and checksum of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footer {
    pub length: u64,
    pub checksum: Checksum,
}

impl Footer {
    pub fn encode(self) -> [u8; FOOTER_BYTES as usize] {
        let mut bytes = [0; FOOTER_BYTES as usize];
        bytes[..16].copy_from_slice(MAGIC);
        bytes[16..24].copy_from_slice(&self.length.to_le_bytes());
        bytes[24..40].copy_from_slice(&self.checksum.0.to_be_bytes());
        bytes
    }

    /// The footer of a shard of `shard_length` bytes, if these are the last of one that has a footer.
    pub fn decode(bytes: &[u8; FOOTER_BYTES as usize], shard_length: u64) -> Option<Self> {
        let footer = Self {
            length: u64::from_le_bytes(bytes[16..24].try_into().ok()?),
            checksum: Checksum(u128::from_be_bytes(bytes[24..40].try_into().ok()?)),
        };
        let is_one = footer.encode() == *bytes
            && footer.length.checked_add(FOOTER_BYTES) == Some(shard_length);
        is_one.then_some(footer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_footer_comes_back_and_nothing_else_is_one() {
        let checksum = Checksum(7 << 100);
        let length = 5;
        let bytes = Footer { length, checksum }.encode();
        assert_eq!(
            Footer::decode(&bytes, 69),
            Some(Footer { length, checksum })
        );
        assert_eq!(Footer::decode(&bytes, 70), None);
        for at in [0, 17, 63] {
            let mut other = bytes;
            other[at] ^= 1;
            assert_eq!(Footer::decode(&other, 69), None, "{at}");
        }
        assert_eq!(Footer::decode(&[0; 64], 64), None);
        assert_eq!(&bytes[..16], b"storaged-hyper-1");
        assert_eq!(bytes[24..40], (7u128 << 100).to_be_bytes());
    }
}
