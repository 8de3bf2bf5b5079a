//! Which cells of a segment have all their memory when it is opened again. The file says so by the ends of its holes: one question for
//! each stretch of memory, where `fallocate` would look at every page of every cell again before the daemon serves.

use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::{SegmentError, system};

/// A bit for each cell that an earlier process left with all its memory, until somebody takes the cell.
#[derive(Debug, Default)]
pub(super) struct LeftCells(Vec<u64>);

impl LeftCells {
    /// Those of a file of so many cells.
    pub fn of(fd: &OwnedFd, cell_bytes: usize, cells: u32) -> Result<Self, SegmentError> {
        let cell_bytes = cell_bytes as u64;
        let mut left = Self(vec![0; cells.div_ceil(64) as usize]);
        let mut from = 0;
        while let Some(memory) = next_memory(fd, from)? {
            let first = memory.start.div_ceil(cell_bytes);
            let end = (memory.end / cell_bytes).min(u64::from(cells));
            (first..end).for_each(|cell| left.add(cell as usize));
            from = memory.end;
        }
        Ok(left)
    }

    fn add(&mut self, cell: usize) {
        self.0[cell / 64] |= 1 << (cell % 64);
    }

    /// Whether this cell was left with all its memory. Once it has had an owner nobody knows that any more.
    pub fn take(&mut self, cell: u32) -> bool {
        let (word, bit) = (cell as usize / 64, 1 << (cell % 64));
        let was_left = self.0.get(word).is_some_and(|word| word & bit != 0);
        if was_left {
            self.0[word] &= !bit;
        }
        was_left
    }
}

/// The next stretch of a file that has memory, from an offset on; none if there is none.
fn next_memory(fd: &OwnedFd, from: u64) -> Result<Option<Range<u64>>, SegmentError> {
    let start = match rustix::fs::seek(fd, SeekFrom::Data(from)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        Err(errno) => return Err(system("looking for memory")(errno)),
    };
    let end = rustix::fs::seek(fd, SeekFrom::Hole(start));
    let end = end.map_err(system("looking for the end of memory"))?;
    Ok(Some(start..end))
}
