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

/// One thing to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Case {
    /// k data blocks to m parity blocks.
    Encode { geometry: Geometry, place: Place },
    /// Data from RAM, times a coefficient each, into so many sums in cache.
    Fold { sums: usize },
}

/// Its name in the figures: `encode_8_2_ram`, `fold_2`.
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
            Self::Fold { sums } => write!(f, "fold_{sums}"),
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
        let folds = SUMS.into_iter().map(|sums| Self::Fold { sums });
        encodes(Place::Ram)
            .chain(encodes(Place::Cache))
            .chain(folds)
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
            Self::Fold { sums } => *sums,
        }
    }

    /// Bytes of a block, where a core has so much second-level cache. In cache, the inputs and as many outputs, which
    /// a copy has, take at most half of it.
    pub fn block(&self, second_level_bytes: usize) -> usize {
        let most = |blocks: usize| second_level_bytes / 2 / blocks;
        match self {
            Self::Encode {
                place: Place::Ram, ..
            } => RAM_BLOCK,
            Self::Encode {
                geometry,
                place: Place::Cache,
            } => {
                let fits = most(2 * geometry.k().max(geometry.m())).max(1);
                (1 << fits.ilog2()).clamp(4 << 10, 32 << 10)
            }
            Self::Fold { .. } => SUM,
        }
    }

    /// Whether every step reads other data.
    pub fn reads_ram(&self) -> bool {
        !self.in_cache()
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
        match self.in_cache() {
            true => CACHE_BYTES.min(window_bytes),
            false => window_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Case;

    #[test]
    fn cases_have_names_and_blocks_that_fit() {
        let cases = Case::all();
        let names: Vec<String> = cases.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), 13);
        assert_eq!(
            (&*names[1], &*names[9]),
            ("encode_8_2_ram", "encode_32_2_cache")
        );
        assert_eq!(names[12], "fold_4");
        let blocks: Vec<usize> = cases.iter().map(|case| case.block(1 << 20) >> 10).collect();
        assert_eq!(
            blocks,
            [1024, 1024, 1024, 1024, 1024, 32, 32, 32, 16, 8, 64, 64, 64]
        );
    }
}
