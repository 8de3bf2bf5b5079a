//! Decoding that starts with the first survivor: each block is folded into what is wanted when it arrives, in any
//! order, and need not be kept. The same sums as a pipeline of nodes makes, one term per hop.

use thiserror::Error;

use crate::engine::Engine;
use crate::matrix::{CodingMatrix, RepairError};

/// A decode in progress.
#[derive(Debug)]
pub struct Decoder {
    survivors: Vec<usize>,
    /// For each survivor, its coefficient in each wanted block.
    columns: Vec<Vec<u8>>,
    added: Vec<bool>,
    wanted: usize,
    /// One per wanted block; made when the first survivor says how long blocks are.
    sums: Vec<Vec<u8>>,
}

/// A block that does not belong to the decode, or a decode that is not done.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum DecodeError {
    /// The survivors or the wanted blocks make no repair.
    #[error("the decode cannot start")]
    Repair(#[from] RepairError),
    /// Not one of the survivors.
    #[error("expected one of the survivors {survivors:?}, got block {got}")]
    Foreign { survivors: Vec<usize>, got: usize },
    /// A survivor that is in already.
    #[error("block {0} was added before: add each survivor once")]
    Duplicate(usize),
    /// Not as long as the first one.
    #[error("expected block {block} to have {expected} bytes, as the first one had, got {got}")]
    Length {
        block: usize,
        expected: usize,
        got: usize,
    },
    /// Finished too early.
    #[error("the survivors {0:?} have not been added yet")]
    Missing(Vec<usize>),
}

impl Decoder {
    /// Will make the `wanted` blocks from `survivors`: exactly k block indices in increasing order.
    ///
    /// # Errors
    /// [`DecodeError::Repair`] if these are no k survivors or no block indices.
    pub fn new(
        matrix: &CodingMatrix,
        survivors: &[usize],
        wanted: &[usize],
    ) -> Result<Self, DecodeError> {
        let rows = matrix.repair_coefficients(survivors, wanted)?;
        let column = |at: usize| rows.iter().map(|row| row[at]).collect();
        Ok(Self {
            survivors: survivors.to_vec(),
            columns: (0..survivors.len()).map(column).collect(),
            added: vec![false; survivors.len()],
            wanted: wanted.len(),
            sums: Vec::new(),
        })
    }

    /// Folds in a survivor. After an error the decode is as it was before.
    ///
    /// # Errors
    /// [`DecodeError`] if `block` is no survivor or in already, or `bytes` is not as long as the first one.
    pub fn add(
        &mut self,
        engine: &dyn Engine,
        block: usize,
        bytes: &[u8],
    ) -> Result<(), DecodeError> {
        let Ok(at) = self.survivors.binary_search(&block) else {
            return Err(DecodeError::Foreign {
                survivors: self.survivors.clone(),
                got: block,
            });
        };
        if self.added[at] {
            return Err(DecodeError::Duplicate(block));
        }
        self.fit(block, bytes.len())?;
        let mut sums: Vec<&mut [u8]> = self.sums.iter_mut().map(Vec::as_mut_slice).collect();
        engine.fold(&mut sums, &self.columns[at], bytes);
        self.added[at] = true;
        Ok(())
    }

    /// The survivors that are not in yet.
    pub fn missing(&self) -> Vec<usize> {
        let pairs = self.survivors.iter().zip(&self.added);
        pairs
            .filter(|(_, added)| !**added)
            .map(|(block, _)| *block)
            .collect()
    }

    /// The wanted blocks, in the order in which they were asked for.
    ///
    /// # Errors
    /// [`DecodeError::Missing`] if a survivor is not in yet.
    pub fn finish(self) -> Result<Vec<Vec<u8>>, DecodeError> {
        let missing = self.missing();
        if missing.is_empty() {
            Ok(self.sums)
        } else {
            Err(DecodeError::Missing(missing))
        }
    }

    /// Makes the sums for the first block, and holds the others to its length.
    fn fit(&mut self, block: usize, got: usize) -> Result<(), DecodeError> {
        if !self.added.contains(&true) {
            self.sums = vec![vec![0; got]; self.wanted];
        }
        match self.sums.first().map(Vec::len) {
            Some(expected) if expected != got => Err(DecodeError::Length {
                block,
                expected,
                got,
            }),
            _ => Ok(()),
        }
    }
}
