//! The journal of an upload: a header line and one line per part that is on disk, as JSON.
//!
//! A line counts only if it is whole, so a crash while one is written costs that part alone. A
//! damaged line can at most claim a wrong digest, which no bytes match, and the part is written
//! again.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use crate::trickle::store::{ObjectKey, PartDigest, PartNumber, PartState, StoreError};

/// Version of the journal's lines.
const VERSION: u32 = 2;
/// A part's line has about 110 bytes; this leaves room for every part to be written several times.
pub(super) const JOURNAL_BYTES_MAX: u64 = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeaderLine {
    storaged_upload: u32,
    key: String,
    part_bytes: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartLine {
    part: u32,
    length: u64,
    xxh3_128: String,
}

/// What a journal says.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Journal {
    pub key: ObjectKey,
    pub part_bytes: u64,
    pub parts: Vec<(PartNumber, PartState)>,
}

pub(super) fn write_header(
    to: &mut impl Write,
    key: &ObjectKey,
    part_bytes: u64,
) -> io::Result<()> {
    let line = HeaderLine {
        storaged_upload: VERSION,
        key: key.to_string(),
        part_bytes,
    };
    write_line(to, &line)
}

/// Appends a part's line; the leading line feed ends a torn line that a crash may have left.
pub(super) fn write_part(
    to: &mut impl Write,
    part: PartNumber,
    state: &PartState,
) -> io::Result<()> {
    let PartDigest::Xxh3(hash) = &state.digest else {
        return Err(io::Error::other(
            "expected an XXH3 digest for a part in a directory",
        ));
    };
    write_line(
        to,
        &PartLine {
            part: part.0,
            length: state.length,
            xxh3_128: format!("{hash:032x}"),
        },
    )
}

/// One write call per line, so that a crash tears at most one.
fn write_line(to: &mut impl Write, line: &impl Serialize) -> io::Result<()> {
    let mut text = vec![b'\n'];
    serde_json::to_writer(&mut text, line)?;
    text.push(b'\n');
    to.write_all(&text)
}

/// Reads a journal; none if its header is damaged or of a later version. Parts that an earlier version noted otherwise do not
/// count, but whose upload it is must be known: nobody else gives it up.
pub(super) fn read(bytes: &[u8]) -> Option<Journal> {
    let whole = bytes.rsplit_once_line();
    let mut lines = whole
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty());
    let header: HeaderLine = serde_json::from_slice(lines.next()?).ok()?;
    if !(1..=VERSION).contains(&header.storaged_upload) {
        return None;
    }
    let key: Result<ObjectKey, StoreError> = header.key.parse();
    let parts = lines.filter_map(read_part).collect();
    Some(Journal {
        key: key.ok()?,
        part_bytes: header.part_bytes,
        parts,
    })
}

fn read_part(line: &[u8]) -> Option<(PartNumber, PartState)> {
    let line: PartLine = serde_json::from_slice(line).ok()?;
    let hash = u128::from_str_radix(&line.xxh3_128, 16).ok()?;
    let state = PartState {
        length: line.length,
        digest: PartDigest::Xxh3(hash),
    };
    Some((PartNumber(line.part), state))
}

trait WholeLines {
    /// Everything up to the last line feed.
    fn rsplit_once_line(&self) -> &[u8];
}

impl WholeLines for [u8] {
    fn rsplit_once_line(&self) -> &[u8] {
        let end = self.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
        &self[..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_or_damaged_line_costs_only_its_part() {
        let key: ObjectKey = "job/step/0.distcp".parse().unwrap();
        let state = PartState {
            length: 3,
            digest: PartDigest::Xxh3(u128::MAX / 3),
        };
        let mut bytes = Vec::new();
        write_header(&mut bytes, &key, 4096).unwrap();
        for part in 0..3 {
            write_part(&mut bytes, PartNumber(part), &state).unwrap();
        }
        let whole = read(&bytes).unwrap();
        assert_eq!(
            (whole.key, whole.part_bytes, whole.parts.len()),
            (key, 4096, 3)
        );
        let torn = &bytes[..bytes.len() - 7];
        assert_eq!(read(torn).unwrap().parts.len(), 2);
        let mut continued = torn.to_vec();
        write_part(&mut continued, PartNumber(9), &state).unwrap();
        assert_eq!(
            read(&continued).unwrap().parts.last().unwrap().0,
            PartNumber(9)
        );
        for position in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[position] ^= 0x10;
            let right = read(&flipped).map_or(0, |journal| {
                journal
                    .parts
                    .iter()
                    .filter(|(_, got)| *got == state)
                    .count()
            });
            assert!(right >= 2 || read(&flipped).is_none(), "flip at {position}");
        }
    }
}
