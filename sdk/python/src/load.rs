//! Manifests and restored shards.

use std::num::NonZeroUsize;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use storaged_sdk::RestoredShard;
use storaged_sdk::wire::DescribedManifest;
use storaged_sdk::wire::local::Rung;

use crate::early::Coming;
use crate::fault::{Signals, null, raised};

/// Longest description of tensors that is unpacked: some millions of them.
const SCHEMA_BYTES_MAX: usize = 1 << 30;

/// Longer parts are cut, so that threads share them and signals are heard in between; whole chunks of all sizes.
const PIECE_BYTES: usize = 4 << 20;

/// A verified manifest.
#[pyclass(frozen, module = "storaged._native")]
pub(crate) struct Manifest(pub(crate) DescribedManifest);

/// A shard, or ranges of it, in this node's RAM, or on its way there when it was opened.
#[pyclass(frozen, module = "storaged._native")]
pub(crate) struct Shard(pub(crate) Opened);

pub(crate) enum Opened {
    There(RestoredShard),
    Coming(Coming),
}

#[pymethods]
impl Manifest {
    #[getter]
    fn digest(&self) -> String {
        self.0.name().to_string()
    }

    #[getter]
    fn run(&self) -> String {
        self.0.manifest().run.to_string()
    }

    #[getter]
    fn step(&self) -> u64 {
        self.0.manifest().step.get()
    }

    #[getter]
    fn world_size(&self) -> u32 {
        self.0.manifest().world_size.get()
    }

    /// Bytes of all shards.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.manifest().length()
    }

    /// Bytes of a chunk.
    #[getter]
    fn chunk_bytes(&self) -> usize {
        self.0.manifest().chunk.bytes()
    }

    /// Bytes of each rank's shard.
    #[getter]
    fn shard_lengths(&self) -> Vec<u64> {
        self.0
            .manifest()
            .shards
            .iter()
            .map(|shard| shard.length)
            .collect()
    }

    /// The description of the tensors, unpacked.
    fn schema<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        unpacked(py, self.0.schema())
    }

    /// What stock PyTorch reads as `.metadata`, unpacked; empty if there is none.
    fn torch_metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        unpacked(py, self.0.torch_metadata())
    }
}

fn unpacked<'py>(py: Python<'py>, packed: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    if packed.is_empty() {
        return Ok(PyBytes::new(py, packed));
    }
    // A frame of zeros packs some thousands to one; beyond that it is no description.
    let limit = packed.len().saturating_mul(1 << 15).min(SCHEMA_BYTES_MAX);
    let unpacked = py.detach(|| {
        zstd::stream::Decoder::new(packed).and_then(|decoder| read_up_to(decoder, limit))
    });
    Ok(PyBytes::new(py, &unpacked?))
}

fn read_up_to(source: impl std::io::Read, limit: usize) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut bounded = source.take(limit as u64 + 1);
    std::io::Read::read_to_end(&mut bounded, &mut out)?;
    if out.len() > limit {
        let text = format!("expected a schema of at most {limit} bytes, got more");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
    }
    Ok(out)
}

#[pymethods]
impl Shard {
    #[getter]
    fn length(&self) -> u64 {
        match &self.0 {
            Opened::There(shard) => shard.length(),
            Opened::Coming(shard) => shard.length(),
        }
    }

    /// Whether it still came when it was opened.
    #[getter]
    fn is_early(&self) -> bool {
        matches!(self.0, Opened::Coming(_))
    }

    /// Where it came from: `own ram`, `peer ram`, `decoded` or `durable tier`.
    #[getter]
    fn rung(&self) -> &'static str {
        let rung = match &self.0 {
            Opened::There(shard) => shard.rung(),
            Opened::Coming(shard) => shard.rung(),
        };
        match rung {
            Rung::OwnRam => "own ram",
            Rung::PeerRam => "peer ram",
            Rung::Decoded => "decoded",
            Rung::Durable => "durable tier",
        }
    }

    /// Verified bytes.
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        length: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        // Checked here, so that an absurd length is refused before memory is asked for.
        if length as u64 > self.length() {
            let text = format!(
                "expected at most the shard's {} bytes, got {length}",
                self.length()
            );
            return Err(PyValueError::new_err(text));
        }
        let mut out = vec![0; length];
        py.detach(|| match &self.0 {
            Opened::There(shard) => shard.read_at(offset, &mut out),
            Opened::Coming(shard) => {
                shard.read_many(vec![(offset, &mut out[..])], NonZeroUsize::MIN)
            }
        })
        .map_err(|error| raised(py, &error))?;
        Ok(PyBytes::new(py, &out))
    }

    /// Fills memory `(offset in the shard, address, bytes)` with verified bytes, on up to `threads` threads. The caller
    /// vouches for the addresses: writable for their lengths, apart from one another, and not looked at meanwhile.
    fn read_many(
        &self,
        py: Python<'_>,
        parts: Vec<(u64, usize, usize)>,
        threads: usize,
    ) -> PyResult<()> {
        let threads = NonZeroUsize::new(threads).unwrap_or(NonZeroUsize::MIN);
        if let Some((_, _, length)) = parts.iter().find(|(_, at, length)| *at == 0 && *length > 0) {
            return Err(null(py, *length));
        }
        py.detach(|| {
            let mut targets: Vec<(u64, &mut [u8])> = Vec::with_capacity(parts.len());
            for (offset, address, length) in pieces(&parts) {
                // SAFETY: the caller vouches that the memory is writable for `length` bytes, belongs to no other part
                // and is used by nobody until the call returns; it is not null, as was just checked.
                let target = unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) };
                targets.push((offset, target));
            }
            match &self.0 {
                Opened::There(shard) => {
                    let mut signals = Signals::default();
                    shard.read_many_unless(&mut targets, threads, || signals.came())
                }
                Opened::Coming(shard) => shard.read_many(targets, threads),
            }
        })
        .map_err(|error| raised(py, &error))
    }
}

/// The parts, long ones cut where the shard's pieces begin, so that no chunk belongs to two of them.
fn pieces(parts: &[(u64, usize, usize)]) -> Vec<(u64, usize, usize)> {
    let mut pieces = Vec::with_capacity(parts.len());
    for (offset, address, length) in parts.iter().copied() {
        let mut at = 0;
        while at < length {
            let into = ((offset + at as u64) % PIECE_BYTES as u64) as usize;
            let piece = (PIECE_BYTES - into).min(length - at);
            pieces.push((offset + at as u64, address + at, piece));
            at += piece;
        }
    }
    pieces
}
