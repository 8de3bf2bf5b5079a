//! A parity set as a table: where the chunk of each stripe lies in memory that outlives the daemon. With it the next daemon
//! finds the chunks, and by their fingerprints it knows whether they are still what they were.
//!
//! The form: a head of 16 bytes (the magic, then the number of rows as four bytes), a row of 28 bytes per stripe (segment,
//! cell and length as four bytes each, then the fingerprint), and the BLAKE3 digest of all that. Numbers are little-endian.
//! A row of zeros is a stripe whose parity is all zeros. 80 GiB in chunks of 256 KiB make 9 MB.

use storaged_codec::Fingerprint;
use thiserror::Error;

const MAGIC: &[u8; 12] = b"parity set 1";
const HEAD_BYTES: usize = MAGIC.len() + 4;
const ROW_BYTES: usize = 12 + Fingerprint::BYTES;
const DIGEST_BYTES: usize = blake3::OUT_LEN;

/// A cell of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CellName {
    /// The number in the segment's [`KeptName::Parity`](super::KeptName::Parity).
    pub segment: u32,
    /// Its place there.
    pub cell: u32,
}

/// A chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParityRow {
    /// Where it begins.
    pub place: CellName,
    /// Its bytes; more than none.
    pub length: u32,
    /// By which it was verified.
    pub print: Fingerprint,
}

/// A parity set: per stripe a chunk, or none of zeros.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ParityTable {
    /// In the order of stripes.
    pub rows: Vec<Option<ParityRow>>,
}

/// Bytes that are no table.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ParityTableError {
    /// Of another version, or something else.
    #[error("expected the table of a parity set, version 1")]
    Unknown,
    /// Cut off, or with something behind.
    #[error("expected a table of {expected} bytes, got {got}")]
    Length { expected: u64, got: usize },
    /// Changed since it was made.
    #[error("the table of a parity set does not have its digest")]
    Damaged,
}

impl ParityTable {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let count = u32::try_from(self.rows.len()).unwrap_or(u32::MAX);
        let bytes = HEAD_BYTES + self.rows.len() * ROW_BYTES + DIGEST_BYTES;
        let mut out = Vec::with_capacity(bytes);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&count.to_le_bytes());
        for row in &self.rows {
            match row {
                Some(row) => {
                    for number in [row.place.segment, row.place.cell, row.length] {
                        out.extend_from_slice(&number.to_le_bytes());
                    }
                    out.extend_from_slice(row.print.as_bytes());
                }
                None => out.extend_from_slice(&[0; ROW_BYTES]),
            }
        }
        let digest = blake3::hash(&out);
        out.extend_from_slice(digest.as_bytes());
        out
    }

    /// From its bytes.
    ///
    /// # Errors
    /// [`ParityTableError`] if they are not what `encode` made.
    pub fn decode(bytes: &[u8]) -> Result<Self, ParityTableError> {
        let (head, _) = bytes
            .split_first_chunk::<HEAD_BYTES>()
            .ok_or(ParityTableError::Unknown)?;
        let (magic, count) = head.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(ParityTableError::Unknown);
        }
        let count = u64::from(number(count, 0));
        let expected = (HEAD_BYTES + DIGEST_BYTES) as u64 + count * ROW_BYTES as u64;
        if bytes.len() as u64 != expected {
            let got = bytes.len();
            return Err(ParityTableError::Length { expected, got });
        }
        let (table, digest) = bytes.split_at(bytes.len() - DIGEST_BYTES);
        if blake3::hash(table).as_bytes() != digest {
            return Err(ParityTableError::Damaged);
        }
        let (rows, _) = table[HEAD_BYTES..].as_chunks::<ROW_BYTES>();
        let rows = rows.iter().map(row).collect();
        Ok(Self { rows })
    }
}

fn row(bytes: &[u8; ROW_BYTES]) -> Option<ParityRow> {
    let mut print = [0; Fingerprint::BYTES];
    print.copy_from_slice(&bytes[12..]);
    let row = ParityRow {
        place: CellName {
            segment: number(bytes, 0),
            cell: number(bytes, 4),
        },
        length: number(bytes, 8),
        print: Fingerprint::from_bytes(print),
    };
    (row.length > 0).then_some(row)
}

fn number(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes[at..].first_chunk().copied();
    u32::from_le_bytes(bytes.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> ParityTable {
        let row = |cell: u32| ParityRow {
            place: CellName { segment: 3, cell },
            length: 4096 - cell,
            print: Fingerprint::from_bytes([cell as u8; Fingerprint::BYTES]),
        };
        ParityTable {
            rows: vec![Some(row(7)), None, Some(row(0))],
        }
    }

    #[test]
    fn a_table_makes_the_round_trip_in_its_form() {
        for table in [table(), ParityTable::default()] {
            assert_eq!(ParityTable::decode(&table.encode()), Ok(table));
        }
        let bytes = table().encode();
        assert_eq!(bytes.len(), 16 + 3 * 28 + 32);
        assert_eq!(&bytes[..16], b"parity set 1\x03\0\0\0");
        assert_eq!(&bytes[16..28], [3, 0, 0, 0, 7, 0, 0, 0, 0xf9, 0x0f, 0, 0]);
    }

    #[test]
    fn damage_of_every_kind_is_refused() {
        let bytes = table().encode();
        for length in 0..bytes.len() {
            assert!(ParityTable::decode(&bytes[..length]).is_err(), "{length}");
        }
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x10;
            assert!(ParityTable::decode(&flipped).is_err(), "{at}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(matches!(
            ParityTable::decode(&longer),
            Err(ParityTableError::Length { .. })
        ));
    }
}
