//! How small bytes can become, judged from a few of them: Shannon's entropy of single bytes, and whether equal bytes
//! stand together more often than chance has it.

use std::sync::OnceLock;

/// The most bytes that are counted.
pub(super) const COUNTED_MAX: usize = 4096;
/// Bytes that are counted in a row.
const PIECE: usize = 256;

/// What a count of bytes says.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Count {
    /// Bits per byte at best, if every byte is written by itself.
    pub bits: f32,
    /// Share of bytes that equal the one before.
    pub repeats: f32,
    /// What that share would be by chance.
    pub repeats_by_chance: f32,
    /// Share of the most frequent byte.
    pub top: f32,
}

/// Counts up to [`COUNTED_MAX`] bytes, in pieces spread evenly.
pub(super) fn count(bytes: &[u8]) -> Count {
    let mut counts = [0u16; 256];
    let (mut repeats, mut counted) = (0usize, 0usize);
    for piece in pieces(bytes) {
        for pair in piece.windows(2) {
            repeats += usize::from(pair[0] == pair[1]);
        }
        for byte in piece {
            counts[usize::from(*byte)] += 1;
        }
        counted += piece.len();
    }
    if counted == 0 {
        return Count {
            bits: 0.0,
            repeats: 0.0,
            repeats_by_chance: 0.0,
            top: 1.0,
        };
    }
    let table = logs();
    let total = counted as f32;
    let sum: f32 = counts.iter().map(|n| table[usize::from(*n)]).sum();
    let squares: u64 = counts.iter().map(|n| u64::from(*n) * u64::from(*n)).sum();
    let top = counts.iter().copied().max().unwrap_or(0);
    Count {
        bits: (total.log2() - sum / total).max(0.0),
        repeats: repeats as f32 / total,
        repeats_by_chance: squares as f32 / (total * total),
        top: f32::from(top) / total,
    }
}

fn pieces(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let all = bytes.len() <= COUNTED_MAX;
    let length = if all { COUNTED_MAX } else { PIECE };
    let stride = if all {
        bytes.len().max(1)
    } else {
        bytes.len() / (COUNTED_MAX / PIECE)
    };
    let starts = (0..bytes.len()).step_by(stride);
    let pieces = starts.map(move |start| &bytes[start..bytes.len().min(start + length)]);
    pieces.take(COUNTED_MAX / PIECE)
}

/// `n * log2(n)` for every count there can be.
fn logs() -> &'static [f32; COUNTED_MAX + 1] {
    static TABLE: OnceLock<Box<[f32; COUNTED_MAX + 1]>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = Box::new([0.0; COUNTED_MAX + 1]);
        for (n, entry) in table.iter_mut().enumerate().skip(1) {
            *entry = n as f32 * (n as f32).log2();
        }
        table
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_bytes_have_eight_bits_and_equal_ones_none() {
        let even: Vec<u8> = (0..65536usize).map(|i| (i * 167 % 256) as u8).collect();
        assert!(count(&even).bits > 7.9);
        let equal = count(&[7; 100_000]);
        assert_eq!((equal.bits, equal.top), (0.0, 1.0));
        assert_eq!(count(&[]).bits, 0.0);
    }

    #[test]
    fn runs_repeat_more_than_chance_has_it() {
        let runs: Vec<u8> = (0..65536).map(|i| (i / 64 % 16) as u8).collect();
        let runs = count(&runs);
        assert!(runs.repeats > runs.repeats_by_chance + 0.5);
    }
}
