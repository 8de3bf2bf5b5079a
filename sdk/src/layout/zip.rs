//! The zip archive around a tensor's bytes: all entries stored, the tensor's last, so that header and trailer are apart.
//!
//! The tensor's entry has CRC 0, which torch does not look at: its bytes change at every step, the frame must not.

use super::dtype::DType;
use super::pickle;

/// From here on sizes and offsets move to 64-bit fields.
const ZIP64_FROM: u64 = 0xffff_ffff;
/// The header is padded to a multiple of this, so that aligned data has an aligned record.
const HEADER_ALIGNMENT: usize = 64;
/// Torch's own id for a padding field.
const PADDING_ID: [u8; 2] = *b"FB";
/// Midnight, 1 January 1980: the earliest date that zip knows.
const DATE: u16 = 0x0021;

/// What stands before and after the tensor's bytes.
pub(super) struct Frame {
    pub(super) header: Vec<u8>,
    pub(super) trailer: Vec<u8>,
}

struct Entry {
    name: &'static str,
    crc: u32,
    length: u64,
    offset: u64,
}

impl Frame {
    pub(super) fn new(dtype: DType, shape: &[u64], data_length: u64) -> Self {
        let pickle = pickle::tensor(dtype, shape, data_length);
        let small: [(&str, &[u8]); 3] = [
            ("archive/data.pkl", &pickle),
            ("archive/byteorder", b"little"),
            ("archive/version", b"3\n"),
        ];
        let mut header = Vec::new();
        let mut entries = Vec::new();
        for (name, bytes) in small {
            let (crc, length, offset) = (crc32(bytes), bytes.len() as u64, header.len() as u64);
            entries.push(Entry {
                name,
                crc,
                length,
                offset,
            });
            header.extend(local_header(&entries[entries.len() - 1], &[]));
            header.extend_from_slice(bytes);
        }
        let data = Entry {
            name: "archive/data/0",
            crc: 0,
            length: data_length,
            offset: header.len() as u64,
        };
        let bare = header.len() + local_header(&data, &[]).len() + PADDING_ID.len() + 2;
        let fill = bare.next_multiple_of(HEADER_ALIGNMENT) - bare;
        header.extend(local_header(&data, &padding(fill)));
        entries.push(data);
        let directory_offset = header.len() as u64 + data_length;
        Self {
            trailer: trailer(&entries, directory_offset),
            header,
        }
    }
}

fn padding(fill: usize) -> Vec<u8> {
    let mut extra = PADDING_ID.to_vec();
    extra.extend_from_slice(&(fill as u16).to_le_bytes());
    extra.resize(extra.len() + fill, b'Z');
    extra
}

/// The sizes of an entry as 64-bit extra field, if they need it.
fn zip64_extra(length: u64) -> Vec<u8> {
    let mut extra = Vec::new();
    if length >= ZIP64_FROM {
        extra.extend_from_slice(&[1, 0, 16, 0]);
        extra.extend_from_slice(&length.to_le_bytes());
        extra.extend_from_slice(&length.to_le_bytes());
    }
    extra
}

/// Fields that local header and directory entry share: version needed to the length of the name.
fn common(entry: &Entry, extra_length: usize) -> Vec<u8> {
    let version: u16 = if entry.length >= ZIP64_FROM { 45 } else { 20 };
    let size = entry.length.min(ZIP64_FROM) as u32;
    let mut out = Vec::new();
    // Version, flags, method (stored), time, date.
    for field in [version, 0, 0, 0, DATE] {
        out.extend_from_slice(&field.to_le_bytes());
    }
    for field in [entry.crc, size, size] {
        out.extend_from_slice(&field.to_le_bytes());
    }
    out.extend_from_slice(&(entry.name.len() as u16).to_le_bytes());
    out.extend_from_slice(&(extra_length as u16).to_le_bytes());
    out
}

fn local_header(entry: &Entry, padding: &[u8]) -> Vec<u8> {
    let mut extra = zip64_extra(entry.length);
    extra.extend_from_slice(padding);
    let mut out = b"PK\x03\x04".to_vec();
    out.extend(common(entry, extra.len()));
    out.extend_from_slice(entry.name.as_bytes());
    out.extend(extra);
    out
}

fn directory_entry(entry: &Entry) -> Vec<u8> {
    let extra = zip64_extra(entry.length);
    let mut out = b"PK\x01\x02\x2d\x00".to_vec();
    out.extend(common(entry, extra.len()));
    // Comment length, disk, internal attributes (u16 each), external attributes (u32).
    out.extend_from_slice(&[0; 10]);
    // Every entry begins in the header, which is far shorter than 4 GiB.
    out.extend_from_slice(&(entry.offset as u32).to_le_bytes());
    out.extend_from_slice(entry.name.as_bytes());
    out.extend(extra);
    out
}

fn trailer(entries: &[Entry], directory_offset: u64) -> Vec<u8> {
    let mut out: Vec<u8> = entries.iter().flat_map(directory_entry).collect();
    let directory_length = out.len() as u64;
    let count = entries.len() as u64;
    if directory_offset >= ZIP64_FROM {
        out.extend(zip64_end(count, directory_length, directory_offset));
    }
    out.extend_from_slice(b"PK\x05\x06\0\0\0\0");
    out.extend_from_slice(&(count as u16).to_le_bytes());
    out.extend_from_slice(&(count as u16).to_le_bytes());
    out.extend_from_slice(&(directory_length as u32).to_le_bytes());
    out.extend_from_slice(&(directory_offset.min(ZIP64_FROM) as u32).to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    out
}

/// The 64-bit end record and its locator.
fn zip64_end(count: u64, directory_length: u64, directory_offset: u64) -> Vec<u8> {
    let mut out = b"PK\x06\x06".to_vec();
    out.extend_from_slice(&44u64.to_le_bytes());
    // Version made by and needed, then this disk and the directory's.
    out.extend_from_slice(&[45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    for field in [count, count, directory_length, directory_offset] {
        out.extend_from_slice(&field.to_le_bytes());
    }
    out.extend_from_slice(b"PK\x06\x07\0\0\0\0");
    out.extend_from_slice(&(directory_offset + directory_length).to_le_bytes());
    out.extend_from_slice(&1u32.to_le_bytes());
    out
}

/// CRC-32 of a few hundred bytes, bit by bit: a table would be longer than the work.
fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crc_is_the_one_of_zip() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn large_entries_move_to_64_bit_fields() {
        let dtype: DType = "uint8".parse().unwrap();
        let small = Frame::new(dtype, &[ZIP64_FROM - 1000], ZIP64_FROM - 1000);
        let large = Frame::new(dtype, &[ZIP64_FROM + 1], ZIP64_FROM + 1);
        let has_end = |frame: &Frame| frame.trailer.windows(4).any(|four| four == b"PK\x06\x06");
        assert!(!has_end(&small));
        assert!(has_end(&large));
        assert_eq!(large.header.len() % HEADER_ALIGNMENT, 0);
    }
}
