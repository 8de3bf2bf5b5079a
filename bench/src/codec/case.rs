//! What is measured: a full encode from RAM or in cache, or a fold into sums in cache.

use std::fmt;

use storaged_codec::Geometry;

/// Data and parity blocks of the encodes that are measured.
pub const GEOMETRIES: [(usize, usize); 5] = [(4, 2), (8, 2), (8, 4), (16, 4), (32, 2)];

/// Numbers of sums of the folds that are measured.
pub const SUMS: [usize; 3] = [1, 2, 4];

/// Bytes of a block from RAM.
const RAM_BLOCK: usize = 1 << 20;

/// Bytes of a sum, and of what is folded into it at a time: with four sums 320 KiB, within a second-level cache.
const SUM: usize = 64 << 10;

/// The most of a block that stays in the second-level cache.
const CACHE_BLOCK_MAX: usize = 32 << 10;

/// The most of a sum that stays in the first-level cache.
const SMALL_SUM_MAX: usize = 16 << 10;

/// A block is at least a page.
const BLOCK_MIN: usize = 4 << 10;

/// Bytes between sums in cache, 17 cache lines: without them all sums lie at the same place in their pages, and
/// processors that compare only those bits mistake loads from one sum for what was just stored to another.
const BETWEEN_SUMS: usize = 17 * 64;

/// Bytes of data that one measurement goes over in cache: some milliseconds.
const CACHE_BYTES: usize = 128 << 20;

/// Where the blocks of an encode are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// In RAM, far more of them than the last-level cache holds, and the outputs go there.
    Ram,
    /// In the second-level cache, inputs and outputs, every time the same.
    Cache,
}

/// Which cache the sums of a fold are in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Level {
    /// The first: few kibibytes at a time.
    First,
    /// The second: as much at a time as the daemon takes.
    Second,
}

/// Bytes of a core's caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Caches {
    pub first: usize,
    pub second: usize,
}

/// One thing to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Case {
    /// k data blocks to m parity blocks.
    Encode { geometry: Geometry, place: Place },
    /// Data from RAM, times a coefficient each, into so many sums in cache.
    Fold { sums: usize, level: Level },
}

/// Its name in the figures: `encode_8_2_ram`, `fold_2`, `fold_2_l1`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Encode { geometry, place } => {
                let (k, m) = (geometry.k(), geometry.m());
                let place = match place {
                    Place::Ram => "ram",
                    Place::Cache => "cache",
                };
                write!(f, "encode_{k}_{m}_{place}")
            }
            Self::Fold { sums, level } => match level {
                Level::First => write!(f, "fold_{sums}_l1"),
                Level::Second => write!(f, "fold_{sums}"),
            },
        }
    }
}

impl Case {
    /// All cases, in the order of the tables.
    pub fn all() -> Vec<Self> {
        let encodes = |place| {
            let geometries = GEOMETRIES
                .into_iter()
                .filter_map(|(k, m)| Geometry::new(k, m).ok());
            geometries.map(move |geometry| Self::Encode { geometry, place })
        };
        let folds = |level| {
            let sums = SUMS.into_iter();
            sums.map(move |sums| Self::Fold { sums, level })
        };
        encodes(Place::Ram)
            .chain(encodes(Place::Cache))
            .chain(folds(Level::Second))
            .chain(folds(Level::First))
            .collect()
    }

    /// Blocks that go in at a time.
    pub fn inputs(&self) -> usize {
        match self {
            Self::Encode { geometry, .. } => geometry.k(),
            Self::Fold { .. } => 1,
        }
    }

    /// Blocks that come out at a time.
    pub fn outputs(&self) -> usize {
        match self {
            Self::Encode { geometry, .. } => geometry.m(),
            Self::Fold { sums, .. } => *sums,
        }
    }

    /// Bytes of a block. In cache, the inputs and as many outputs, which a copy has, take at most half of it; so do
    /// sums in the first-level cache.
    pub fn block(&self, caches: Caches) -> usize {
        let most = |bytes: usize, blocks: usize, max: usize| {
            let fits = (bytes / 2 / blocks).max(1);
            (1 << fits.ilog2()).clamp(BLOCK_MIN, max)
        };
        match self {
            Self::Encode { geometry, place } => match place {
                Place::Ram => RAM_BLOCK,
                Place::Cache => {
                    let blocks = 2 * geometry.k().max(geometry.m());
                    most(caches.second, blocks, CACHE_BLOCK_MAX)
                }
            },
            Self::Fold { sums, level } => match level {
                Level::First => most(caches.first, *sums, SMALL_SUM_MAX),
                Level::Second => SUM,
            },
        }
    }

    /// Bytes from the end of an output that stays in cache to the next.
    pub fn between_outputs(&self) -> usize {
        match self {
            Self::Encode { .. } => 0,
            Self::Fold { .. } => BETWEEN_SUMS,
        }
    }

    /// Whether inputs and outputs stay in cache.
    pub fn in_cache(&self) -> bool {
        matches!(
            self,
            Self::Encode {
                place: Place::Cache,
                ..
            }
        )
    }

    /// Bytes of data that one measurement goes over, where a window of RAM has so many.
    pub fn bytes(&self, window_bytes: usize) -> usize {
        if self.in_cache() {
            CACHE_BYTES.min(window_bytes)
        } else {
            window_bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Caches, Case};

    #[test]
    fn cases_have_names_and_blocks_that_fit() {
        let cases = Case::all();
        let names: Vec<String> = cases.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), 16);
        assert_eq!(
            (&*names[1], &*names[9]),
            ("encode_8_2_ram", "encode_32_2_cache")
        );
        assert_eq!((&*names[12], &*names[15]), ("fold_4", "fold_4_l1"));
        let (first, second) = (48 << 10, 1 << 20);
        let caches = Caches { first, second };
        let blocks: Vec<usize> = cases.iter().map(|case| case.block(caches) >> 10).collect();
        assert_eq!(blocks[..5], [1024; 5]);
        assert_eq!(blocks[5..10], [32, 32, 32, 16, 8]);
        assert_eq!(blocks[10..], [64, 64, 64, 16, 8, 4]);
    }
}
