//! Twists: a sound record is encoded, a number or a string in it is replaced by a limit or by one that was seen elsewhere, or a
//! byte by another. What can still be read is as good as what an odd client, a liar or another version would send.

use minicbor::{Decode, Encode};
use storaged_wire::{decode, encode};

use crate::places::{Kind, Place, places};

/// Numbers at which sums and comparisons go wrong.
const NUMBERS: [u64; 10] = [
    0,
    1,
    2,
    u64::MAX,
    u64::MAX - 1,
    u32::MAX as u64,
    1 << 63,
    1 << 20,
    600_000,
    255,
];

/// What is done to a record.
#[derive(Debug, Clone, Copy)]
pub struct Twist {
    at: u16,
    with: u8,
    how: u8,
}

/// Strings and numbers that were seen in records: names of nodes and jobs, digests, sessions, slots.
#[derive(Debug, Default)]
pub struct Seen {
    numbers: Vec<u64>,
    strings: Vec<Vec<u8>>,
}

/// So many of each are remembered.
const SEEN_MAX: usize = 256;
/// Longer strings are no names.
const NAME_BYTES_MAX: usize = 72;

impl Seen {
    /// What is in a record that went by.
    pub fn note(&mut self, bytes: &[u8]) {
        for Place { kind, at, length } in places(bytes) {
            let item = &bytes[at..at + length];
            match kind {
                Kind::Number => note(&mut self.numbers, number_in(item)),
                _ if length <= NAME_BYTES_MAX => note(&mut self.strings, item.to_vec()),
                _ => {}
            }
        }
    }

    /// A string that may stand in the place of another one: of its kind and, for digests, of its length.
    fn string_like(&self, item: &[u8], which: usize) -> Option<&[u8]> {
        let alike = |other: &&Vec<u8>| {
            let same_kind = other[0] >> 5 == item[0] >> 5;
            same_kind && (other.len() == item.len() || item[0] >> 5 == 3)
        };
        let fitting: Vec<&Vec<u8>> = self.strings.iter().filter(alike).collect();
        let chosen = fitting.get(which % fitting.len().max(1));
        chosen.map(|it| it.as_slice())
    }
}

fn note<T: PartialEq>(all: &mut Vec<T>, one: T) {
    if all.contains(&one) {
        return;
    }
    if all.len() >= SEEN_MAX {
        all.remove(0);
    }
    all.push(one);
}

fn number_in(item: &[u8]) -> u64 {
    match item {
        [short] => u64::from(short & 31),
        [_, long @ ..] => long.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
        [] => 0,
    }
}

impl Twist {
    /// Of four bytes of the fuzzer's.
    pub fn of([low, high, with, how]: [u8; 4]) -> Self {
        let at = u16::from_le_bytes([low, high]);
        Self { at, with, how }
    }

    /// Which of `count`.
    pub fn pick(self, count: usize) -> usize {
        usize::from(self.at) % count.max(1)
    }

    /// Which of `count`, by another byte.
    pub fn choose(self, count: usize) -> usize {
        usize::from(self.with) % count.max(1)
    }

    pub fn at(self) -> u64 {
        u64::from(self.at)
    }

    pub fn with(self) -> u64 {
        u64::from(self.with)
    }

    pub fn how(self) -> u8 {
        self.how
    }

    /// Some number, small ones as often as limits.
    pub fn number(self) -> u64 {
        match self.how % 2 {
            0 => self.with(),
            _ => NUMBERS[self.choose(NUMBERS.len())],
        }
    }

    /// The record, twisted; as it was if nothing can read it any more.
    pub fn twist<T>(self, record: &T, seen: &Seen) -> T
    where
        T: for<'b> Decode<'b, ()> + Encode<()> + Clone,
    {
        let bytes = encode(record);
        let twisted = match self.how % 8 {
            0 | 1 => None,
            2 => self.damaged(&bytes),
            3 => self.replaced(&bytes, Kind::Text, seen),
            4 => self.replaced(&bytes, Kind::Bytes, seen),
            _ => self.replaced(&bytes, Kind::Number, seen),
        };
        let read = twisted.and_then(|bytes| decode("record", &bytes).ok());
        read.unwrap_or_else(|| record.clone())
    }

    fn damaged(self, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut twisted = bytes.to_vec();
        *twisted.get_mut(self.pick(bytes.len()))? = self.with;
        Some(twisted)
    }

    fn replaced(self, bytes: &[u8], kind: Kind, seen: &Seen) -> Option<Vec<u8>> {
        let places = places(bytes).into_iter();
        let places: Vec<Place> = places.filter(|place| place.kind == kind).collect();
        let Place { at, length, .. } = *places.get(self.pick(places.len()))?;
        let item = match kind {
            Kind::Number => encode(&self.number_seen(seen)),
            _ => seen
                .string_like(&bytes[at..at + length], self.choose(256))?
                .to_vec(),
        };
        Some([&bytes[..at], &item, &bytes[at + length..]].concat())
    }

    /// A limit, or one that was seen.
    fn number_seen(self, seen: &Seen) -> u64 {
        match (self.how % 8, seen.numbers.len()) {
            (5, _) | (_, 0) => NUMBERS[self.choose(NUMBERS.len())],
            (6, _) => self.with(),
            (_, count) => seen.numbers[self.choose(count)],
        }
    }
}
