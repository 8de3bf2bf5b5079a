//! Content that moved: VCDIFF (RFC 3284) by xdelta3, for small opaque objects whose bytes shift from step to step.
//!
//! xdelta3 is C code of 2019 (`codec/xdelta3/`), so it sees only what this module has bounded: at most a chunk and
//! three chunks of basis to write, and to read only payloads whose record digest the caller has checked. Whatever it
//! writes is read back and compared before it is used.
//!
//! It is behind the cargo feature `moved`. Without it nothing looks moved, and a record that
//! was written by a build with it is an error that says which build reads it.

use super::DeltaError;
use super::record::{BASIS_BYTES_MAX, CHUNK_BYTES_MAX, within};

/// Bytes of a window that is looked for elsewhere.
const WINDOW: usize = 32;
/// Windows that are looked for.
const WINDOWS: usize = 8;

/// VCDIFF of `new` against `basis`.
pub(super) fn encode(new: &[u8], basis: &[u8]) -> Result<Vec<u8>, DeltaError> {
    bounds(new.len(), basis.len())?;
    let diff = vcdiff::encode(new, basis)?.ok_or(DeltaError::NotMoved)?;
    match vcdiff::decode(&diff, basis, new.len())? {
        Some(back) if back == new => Ok(diff),
        _ => Err(DeltaError::NotMoved),
    }
}

/// What [`encode`] was given as `new`; `length` bytes.
pub(super) fn decode(diff: &[u8], basis: &[u8], length: usize) -> Result<Vec<u8>, DeltaError> {
    bounds(length, basis.len())?;
    within("VCDIFF", diff.len() as u64, CHUNK_BYTES_MAX)?;
    let damaged = || DeltaError::Packed {
        what: "VCDIFF",
        reason: "xdelta3 refuses it".into(),
    };
    let new = vcdiff::decode(diff, basis, length)?.ok_or_else(damaged)?;
    if new.len() == length {
        Ok(new)
    } else {
        Err(super::record::size("VCDIFF", length as u64, new.len()))
    }
}

#[cfg(feature = "moved")]
mod vcdiff {
    //! xdelta3 itself; `None` is what it refuses.

    use super::DeltaError;
    use crate::delta::xdelta3;

    pub(super) fn encode(new: &[u8], basis: &[u8]) -> Result<Option<Vec<u8>>, DeltaError> {
        Ok(xdelta3::encode(new, basis))
    }

    pub(super) fn decode(
        diff: &[u8],
        basis: &[u8],
        length: usize,
    ) -> Result<Option<Vec<u8>>, DeltaError> {
        Ok(xdelta3::decode(diff, basis, length))
    }
}

#[cfg(not(feature = "moved"))]
mod vcdiff {
    //! What stands in for xdelta3 in a build without it.

    use super::DeltaError;

    pub(super) fn encode(_new: &[u8], _basis: &[u8]) -> Result<Option<Vec<u8>>, DeltaError> {
        Err(DeltaError::MovedNotBuilt)
    }

    pub(super) fn decode(
        _diff: &[u8],
        _basis: &[u8],
        _length: usize,
    ) -> Result<Option<Vec<u8>>, DeltaError> {
        Err(DeltaError::MovedNotBuilt)
    }
}

/// Whether at least half of some windows of `new` stand elsewhere in the basis than at their own place, which is
/// `place` bytes into it. Windows of one repeated byte say nothing; in a build without VCDIFF nothing does.
pub(super) fn looks_moved(new: &[u8], basis: &[u8], place: usize) -> bool {
    if cfg!(not(feature = "moved")) {
        return false;
    }
    let stride = (new.len() / WINDOWS).max(WINDOW);
    let starts = (0..new.len().saturating_sub(WINDOW)).step_by(stride);
    let (mut telling, mut moved) = (0, 0);
    for start in starts {
        let window = &new[start..start + WINDOW];
        if window.iter().all(|byte| *byte == window[0]) {
            continue;
        }
        telling += 1;
        let here = basis.get(place + start..place + start + WINDOW);
        if here != Some(window) && contains(basis, window) {
            moved += 1;
        }
    }
    telling > 0 && moved * 2 >= telling
}

/// Whether the window stands anywhere in the bytes.
fn contains(bytes: &[u8], window: &[u8]) -> bool {
    memchr::memmem::find(bytes, window).is_some()
}

fn bounds(new: usize, basis: usize) -> Result<(), DeltaError> {
    within("a chunk", new as u64, CHUNK_BYTES_MAX)?;
    within("a basis", basis as u64, BASIS_BYTES_MAX)
}
