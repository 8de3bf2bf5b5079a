//! A trainer's connection: slots, copies into them without the interpreter lock, and the shard's layout.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;
use storaged_sdk::layout::{Layout, TensorSpec};
use storaged_sdk::wire::local::DurableWish;
use storaged_sdk::wire::{Rank, Step, WorldSize};
use storaged_sdk::{ClientError, StagedSlot};

use crate::control::{LIMIT_MS, options, run_of};
use crate::fault::{Signals, invalid, null, raised};
use crate::turn::{patience, take_turn};

/// A copy shorter than this is not worth a thread of its own.
const PIECE_BYTES: usize = 8 << 20;
/// Signals may be looked for after so many bytes per thread: some 25 ms.
const BATCH_BYTES: usize = 128 << 20;
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
    #[pyo3(signature = (socket, namespace, token, run, rank, world_size, timeout_ms=LIMIT_MS))]
    #[expect(
        clippy::too_many_arguments,
        reason = "one per keyword of the Python class"
    )]
    fn new(
        py: Python<'_>,
        socket: PathBuf,
        namespace: &str,
        token: Vec<u8>,
        run: &str,
        rank: u32,
        world_size: u32,
        timeout_ms: u32,
    ) -> PyResult<Self> {
        let options = options(py, socket, namespace, token)?;
        let world_size = WorldSize::new(world_size).map_err(|error| invalid(py, &error))?;
        let run = run_of(py, run)?;
        let (rank, patience) = (Rank::new(rank), patience(timeout_ms));
        let connect =
            || storaged_sdk::Trainer::connect_with(options, run, rank, world_size, patience);
        let trainer = py.detach(connect).map_err(|error| raised(py, &error))?;
        Ok(Self(Mutex::new(trainer)))
    }

    fn acquire(&self, py: Python<'_>, bytes: u64, timeout_ms: u32) -> PyResult<Slot> {
        let acquired = self.call(py, timeout_ms, |trainer, left| trainer.acquire(bytes, left));
        Ok(Slot(acquired?))
    }

    #[pyo3(signature = (slot, step, length, timeout_ms=LIMIT_MS))]
    fn seal(
        &self,
        py: Python<'_>,
        slot: &Slot,
        step: u64,
        length: u64,
        timeout_ms: u32,
    ) -> PyResult<()> {
        let step = Step::new(step);
        self.call(py, timeout_ms, |trainer, _| {
            trainer.seal(&slot.0, step, length)
        })
    }

    #[pyo3(signature = (slot, timeout_ms=LIMIT_MS))]
    fn release(&self, py: Python<'_>, slot: &Slot, timeout_ms: u32) -> PyResult<()> {
        self.call(py, timeout_ms, |trainer, _| trainer.release(&slot.0))
    }

    /// Describes the checkpoint; both descriptions travel compressed. `durable`: `policy`, `required` or `never`.
    #[pyo3(signature = (step, schema, torch_metadata, durable, timeout_ms=LIMIT_MS))]
    fn commit(
        &self,
        py: Python<'_>,
        step: u64,
        schema: &[u8],
        torch_metadata: &[u8],
        durable: &str,
        timeout_ms: u32,
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
        let step = Step::new(step);
        self.call(py, timeout_ms, |trainer, _| {
            trainer.commit(step, schema, torch_metadata, durable)
        })
    }
}

impl Trainer {
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        limit_ms: u32,
        call: impl FnOnce(&mut storaged_sdk::Trainer, u32) -> Result<T, ClientError> + Send,
    ) -> PyResult<T> {
        take_turn(py, &self.0, limit_ms, |trainer, left_ms| {
            trainer.be_patient(patience(left_ms));
            call(trainer, left_ms)
        })
    }
}

#[pymethods]
impl Slot {
    /// The same number means the same memory as before.
    #[getter]
    fn id(&self) -> u64 {
        self.0.memory_number()
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

    /// Makes all of a new slot ready for a save that comes later.
    fn get_ready(&self, py: Python<'_>) -> PyResult<()> {
        let mut signals = Signals::default();
        py.detach(|| self.0.get_ready(|| signals.came()))
            .map_err(|error| raised(py, &error))
    }

    /// Copies bytes to their offset.
    fn write(&self, py: Python<'_>, offset: usize, bytes: &[u8]) -> PyResult<()> {
        self.0
            .copy_in(offset, bytes)
            .map_err(|error| raised(py, &error))
    }

    /// Copies many bytes, each to their offset.
    fn write_many(&self, py: Python<'_>, pieces: Vec<(usize, PyBackedBytes)>) -> PyResult<()> {
        py.detach(|| {
            let write = |(offset, bytes): &(usize, PyBackedBytes)| self.0.copy_in(*offset, bytes);
            pieces.iter().try_for_each(write)
        })
        .map_err(|error| raised(py, &error))
    }

    /// Copies memory `(address, offset in the slot, bytes)`, on up to `threads` threads. The caller vouches for the
    /// addresses: each must be readable for its length, outside this slot, and stay so until the call returns.
    fn copy_many(
        &self,
        py: Python<'_>,
        parts: Vec<(usize, usize, usize)>,
        threads: usize,
    ) -> PyResult<()> {
        let piece = |(address, offset, length)| Piece {
            address,
            offset,
            length,
        };
        self.copy(py, parts.into_iter().map(piece).collect(), threads)
    }

    /// The same for thousands of parts, which are packed: addresses, offsets and lengths as native integers of 64 bits.
    fn copy_packed(
        &self,
        py: Python<'_>,
        addresses: &[u8],
        offsets: &[u8],
        lengths: &[u8],
        threads: usize,
    ) -> PyResult<()> {
        let columns = [addresses, offsets, lengths];
        if columns
            .iter()
            .any(|column| column.len() != addresses.len() || column.len() % size_of::<u64>() != 0)
        {
            let text = "expected as many addresses as offsets and lengths, of 64 bits each";
            return Err(PyValueError::new_err(text));
        }
        let [addresses, offsets, lengths] = columns.map(unpacked);
        let parts = addresses.zip(offsets).zip(lengths);
        let piece = |((address, offset), length)| Piece {
            address,
            offset,
            length,
        };
        self.copy(py, parts.map(piece).collect(), threads)
    }
}

impl Slot {
    fn copy(&self, py: Python<'_>, parts: Vec<Piece>, threads: usize) -> PyResult<()> {
        let capacity = self.capacity();
        for Piece {
            address,
            offset,
            length,
        } in &parts
        {
            if *address == 0 && *length > 0 {
                return Err(null(py, *length));
            }
            if offset.checked_add(*length).is_none_or(|end| end > capacity) {
                let text = format!(
                    "expected bytes within the slot's {capacity}, got {length} at {offset}"
                );
                return Err(PyValueError::new_err(text));
            }
        }
        let threads = threads.max(1);
        py.detach(|| {
            let (pieces, mut signals) = (cut(&parts), Signals::default());
            for batch in batches(&pieces, BATCH_BYTES * threads) {
                copy_on_threads(&self.0, batch, threads)?;
                if signals.came() {
                    return Err(ClientError::CalledAway { request: "copying" });
                }
            }
            Ok(())
        })
        .map_err(|error| raised(py, &error))
    }
}

/// Memory to copy, and where to.
struct Piece {
    address: usize,
    offset: usize,
    length: usize,
}

/// Native integers of 64 bits.
fn unpacked(column: &[u8]) -> impl Iterator<Item = usize> {
    let (numbers, _) = column.as_chunks();
    numbers
        .iter()
        .map(|number| u64::from_ne_bytes(*number) as usize)
}

/// Cuts long parts so that threads share them.
fn cut(parts: &[Piece]) -> Vec<Piece> {
    let pieces = |part: &Piece| {
        let Piece {
            address,
            offset,
            length,
        } = *part;
        (0..length).step_by(PIECE_BYTES).map(move |at| Piece {
            address: address + at,
            offset: offset + at,
            length: PIECE_BYTES.min(length - at),
        })
    };
    parts.iter().flat_map(pieces).collect()
}

/// Neighbours of some `bytes` together; one that is longer is a batch of its own.
fn batches(pieces: &[Piece], bytes: usize) -> impl Iterator<Item = &[Piece]> {
    let mut held = 0;
    pieces.chunk_by(move |before, _| {
        held += before.length;
        let is_full = held >= bytes;
        if is_full {
            held = 0;
        }
        !is_full
    })
}

fn copy_on_threads(slot: &StagedSlot, pieces: &[Piece], threads: usize) -> Result<(), ClientError> {
    let total: usize = pieces.iter().map(|piece| piece.length).sum();
    let threads = threads.min(total / PIECE_BYTES).max(1);
    let next = AtomicUsize::new(0);
    // Each takes what is next: in a new slot one thread is faster than the others.
    let copy = || {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            copy_piece(slot, piece)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(copy)).collect();
        let mut copied = copy();
        for other in others {
            copied = copied.and(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        copied
    })
}

fn copy_piece(slot: &StagedSlot, piece: &Piece) -> Result<(), ClientError> {
    let source = piece.address as *const u8;
    // SAFETY: the caller of `Slot::copy` vouches that the source is readable for `length` bytes until it returns. A tensor's memory and the
    // slot cannot overlap unless the tensor is itself a view of this slot, which is never copied.
    Ok(unsafe { slot.memory().copy_from(piece.offset, source, piece.length) }?)
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
