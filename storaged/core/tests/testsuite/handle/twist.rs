//! Twists: a sound record is encoded, numbers in it are replaced by their limits or bytes by others, and what can still
//! be read is as good as what an odd client or another version would send.

use bolero::TypeGenerator;
use minicbor::{Decode, Encode};
use storaged_wire::{decode, encode};

use super::places::{Kind, places};

/// What is done to a record: nothing, or at some place a number or a byte.
#[derive(Debug, Clone, TypeGenerator)]
pub struct Twist {
    at: u16,
    with: u8,
    how: u8,
}

const NUMBERS: [u64; 8] = [
    0,
    1,
    u64::MAX,
    u64::MAX - 1,
    u32::MAX as u64,
    1 << 63,
    1 << 20,
    600_000,
];

impl Twist {
    /// Which of `count`.
    pub fn pick(&self, count: usize) -> usize {
        usize::from(self.at) % count.max(1)
    }

    /// Some number, small ones as often as limits.
    pub fn number(&self) -> u64 {
        match self.how % 2 {
            0 => u64::from(self.with),
            _ => NUMBERS[usize::from(self.with) % NUMBERS.len()],
        }
    }

    pub fn is_plain(&self) -> bool {
        self.how.is_multiple_of(3)
    }

    /// The record, twisted; as it was if nothing can read it any more.
    pub fn twist<T>(&self, record: &T) -> T
    where
        T: for<'b> Decode<'b, ()> + Encode<()> + Clone,
    {
        if self.is_plain() {
            return record.clone();
        }
        let bytes = encode(record);
        let places: Vec<(usize, usize)> = match self.how % 3 {
            1 => {
                let numbers = places(&bytes).into_iter();
                let numbers = numbers.filter(|place| place.kind == Kind::Number);
                numbers.map(|place| (place.at, place.length)).collect()
            }
            _ => (0..bytes.len()).map(|at| (at, 1)).collect(),
        };
        if places.is_empty() {
            return record.clone();
        }
        let (at, length) = places[self.pick(places.len())];
        let mut twisted = bytes[..at].to_vec();
        match self.how % 3 {
            1 => {
                twisted.push(0x1B);
                let number = NUMBERS[usize::from(self.with) % NUMBERS.len()];
                twisted.extend_from_slice(&number.to_be_bytes());
            }
            _ => twisted.push(self.with),
        }
        twisted.extend_from_slice(&bytes[at + length..]);
        decode("record", &twisted).unwrap_or_else(|_| record.clone())
    }
}
