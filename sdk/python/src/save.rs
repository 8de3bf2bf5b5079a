//! A trainer's connection: slots, copies into them without the interpreter lock, and the shard's layout.

use std::path::PathBuf;
use std::sync::Mutex;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use storaged_sdk::StagedSlot;
use storaged_sdk::layout::{Layout, TensorSpec};
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{Rank, Step, WorldSize};

use crate::control::{locked, options, run_of};
use crate::fault::{invalid, raised};

/// A copy shorter than this is not worth a thread of its own.
const PIECE_BYTES: usize = 8 << 20;
/// zstd's fast default; metadata is small and repetitive.
const PACK_LEVEL: i32 = 3;

/// One rank of one run. One call at a time; others wait.
#[pyclass(frozen, module = "storaged._native")]
pub(crate) struct Trainer(Mutex<storaged_sdk::Trainer>);

/// A slot to fill; its memory is mapped as long as any object that refers to it lives.
#[pyclass(frozen, module = "storaged._native")]
pub(crate) struct Slot(StagedSlot);

#[pymethods]
impl Trainer {
    #[new]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        namespace: &str,
        token: Vec<u8>,
        run: &str,
        rank: u32,
        world_size: u32,
    ) -> PyResult<Self> {
        let options = options(py, socket, namespace, token)?;
        let world_size = WorldSize::new(world_size).map_err(|error| invalid(py, &error))?;
        let run = run_of(py, run)?;
        let connect = || storaged_sdk::Trainer::connect(options, run, Rank::new(rank), world_size);
        let trainer = py.detach(connect).map_err(|error| raised(py, &error))?;
        Ok(Self(Mutex::new(trainer)))
    }

    fn acquire(&self, py: Python<'_>, bytes: u64, timeout_ms: u32) -> PyResult<Slot> {
        let acquired = py.detach(|| locked(&self.0).acquire(bytes, timeout_ms));
        Ok(Slot(acquired.map_err(|error| raised(py, &error))?))
    }

    fn seal(&self, py: Python<'_>, slot: &Slot, step: u64, length: u64) -> PyResult<()> {
        let sealed = py.detach(|| locked(&self.0).seal(&slot.0, Step::new(step), length));
        sealed.map_err(|error| raised(py, &error))
    }

    fn release(&self, py: Python<'_>, slot: &Slot) -> PyResult<()> {
        let released = py.detach(|| locked(&self.0).release(&slot.0));
        released.map_err(|error| raised(py, &error))
    }

    /// Describes the checkpoint; both descriptions travel compressed. `durable`: `policy`, `required` or `never`.
    fn commit(
        &self,
        py: Python<'_>,
        step: u64,
        schema: &[u8],
        torch_metadata: &[u8],
        durable: &str,
    ) -> PyResult<()> {
        let durable = match durable {
            "policy" => DurableWish::Policy,
            "required" => DurableWish::Required,
            "never" => DurableWish::Never,
            other => {
                let text = format!("durable must be policy, required or never, got {other:?}");
                return Err(PyValueError::new_err(text));
            }
        };
        let pack = |bytes| zstd::bulk::compress(bytes, PACK_LEVEL);
        let (schema, torch_metadata) = py.detach(|| (pack(schema), pack(torch_metadata)));
        let (schema, torch_metadata) = (schema?, torch_metadata?);
        let commit = || locked(&self.0).commit(Step::new(step), schema, torch_metadata, durable);
        py.detach(commit).map_err(|error| raised(py, &error))
    }
}

#[pymethods]
impl Slot {
    /// The same number means the same memory as before.
    #[getter]
    fn id(&self) -> u64 {
        self.0.id().get()
    }

    /// Where the memory begins, for views of it; valid as long as this object lives.
    #[getter]
    fn address(&self) -> usize {
        self.0.mapping().start() as usize
    }

    /// Bytes.
    #[getter]
    fn capacity(&self) -> usize {
        self.0.mapping().length()
    }

    /// Copies bytes to their offset.
    fn write(&self, py: Python<'_>, offset: usize, bytes: &[u8]) -> PyResult<()> {
        self.0
            .copy_in(offset, bytes)
            .map_err(|error| raised(py, &error))
    }

    /// Copies memory `(address, offset in the slot, bytes)`, on up to `threads` threads. The caller vouches for the
    /// addresses: each must be readable for its length, and stay so until the call returns.
    fn copy_many(
        &self,
        py: Python<'_>,
        parts: Vec<(usize, usize, usize)>,
        threads: usize,
    ) -> PyResult<()> {
        let capacity = self.capacity();
        for (_, offset, length) in &parts {
            if offset.checked_add(*length).is_none_or(|end| end > capacity) {
                let text = format!(
                    "expected bytes within the slot's {capacity}, got {length} at {offset}"
                );
                return Err(PyValueError::new_err(text));
            }
        }
        py.detach(|| copy_on_threads(&self.0, &pieces(&parts), threads.max(1)));
        Ok(())
    }
}

/// Cuts long parts so that threads share them.
fn pieces(parts: &[(usize, usize, usize)]) -> Vec<(usize, usize, usize)> {
    let cut = |(address, offset, length): &(usize, usize, usize)| {
        let (address, offset, length) = (*address, *offset, *length);
        (0..length)
            .step_by(PIECE_BYTES)
            .map(move |at| (address + at, offset + at, PIECE_BYTES.min(length - at)))
    };
    parts.iter().flat_map(cut).collect()
}

fn copy_on_threads(slot: &StagedSlot, pieces: &[(usize, usize, usize)], threads: usize) {
    let total: usize = pieces.iter().map(|piece| piece.2).sum();
    let threads = threads.min(total / PIECE_BYTES).max(1);
    if threads == 1 {
        return copy_pieces(slot, pieces);
    }
    std::thread::scope(|scope| {
        for share in pieces.chunks(pieces.len().div_ceil(threads)) {
            scope.spawn(move || copy_pieces(slot, share));
        }
    });
}

fn copy_pieces(slot: &StagedSlot, pieces: &[(usize, usize, usize)]) {
    let start = slot.mapping().start();
    for (address, offset, length) in pieces {
        let source = *address as *const u8;
        // SAFETY: `copy_many` checked that the target lies in the mapping, which `slot` keeps alive; its caller vouches
        // that the source is readable for `length` bytes. A tensor's memory and the slot cannot overlap unless the
        // tensor is itself a view of this slot, which is never copied. Other processes that read meanwhile see bytes.
        unsafe { std::ptr::copy_nonoverlapping(source, start.add(*offset), *length) };
    }
}

/// `(offset, length, data offset, data length)` of each record, `(offset, bytes)` of each frame, and the end.
type LayoutParts<'py> = (
    Vec<(u64, u64, u64, u64)>,
    Vec<(u64, Bound<'py, PyBytes>)>,
    u64,
);

/// Places tensors `(dtype, shape)` from `start` on.
#[pyfunction]
pub(crate) fn layout<'py>(
    py: Python<'py>,
    tensors: Vec<(String, Vec<u64>)>,
    start: u64,
) -> PyResult<LayoutParts<'py>> {
    let mut specs = Vec::with_capacity(tensors.len());
    for (dtype, shape) in tensors {
        let dtype = dtype.parse().map_err(|error| invalid(py, &error))?;
        specs.push(TensorSpec { dtype, shape });
    }
    let layout = Layout::new(&specs, start).map_err(|error| invalid(py, &error))?;
    let records = layout
        .records
        .iter()
        .map(|r| (r.offset, r.length, r.data_offset, r.data_length))
        .collect();
    let frames = layout
        .frames
        .iter()
        .map(|p| (p.offset, PyBytes::new(py, &p.bytes)))
        .collect();
    Ok((records, frames, layout.end))
}
