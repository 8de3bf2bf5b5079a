//! Where in the bytes of a CBOR record its numbers and strings stand: what a fuzzer changes so that the record can still be read.

/// A number or string: the major type of CBOR, and the bytes, the head of a string among them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub kind: Kind,
    pub at: usize,
    pub length: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Number,
    Bytes,
    Text,
}

/// All of a record, in order; what is no CBOR has some too.
pub fn places(bytes: &[u8]) -> Vec<Place> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let (kind, length) = item(&bytes[at..]);
        let length = length.min(bytes.len() - at);
        found.extend(kind.map(|kind| Place { kind, at, length }));
        at += length;
    }
    found
}

/// What begins here, and how long it is, without the items of an array or a map.
fn item(bytes: &[u8]) -> (Option<Kind>, usize) {
    let (major, info) = (bytes[0] >> 5, bytes[0] & 31);
    let more = match info {
        24 => 1,
        25 => 2,
        26 => 4,
        27 => 8,
        _ => 0,
    };
    let long = bytes[1..].iter().take(more);
    let long = long.fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
    let argument = if info < 24 { u64::from(info) } else { long };
    let body = usize::try_from(argument).unwrap_or(usize::MAX);
    match major {
        0 => (Some(Kind::Number), 1 + more),
        2 => (Some(Kind::Bytes), body.saturating_add(1 + more)),
        3 => (Some(Kind::Text), body.saturating_add(1 + more)),
        _ => (None, 1 + more),
    }
}
