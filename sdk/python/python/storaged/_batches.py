"""Batches on a board: a ring of entries, each found by its epoch and its number, whole or not at all.

An entry is written behind a header that says nothing until the entry is whole, and is read into private memory before its checksum is
compared. So a writer that was killed, or that still writes beside its successor, costs an entry and never gives a wrong one.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import struct
import zlib
from typing import Any

import numpy
import torch

from ._board import Board, this_process
from ._session import Session
from .errors import NoCheckpointError, RunFenced

logger = logging.getLogger("storaged")

MAGIC = b"STGBATCH"
VERSION = 2
PAGE = 4096
#: What is behind each tensor and buffer begins at a multiple of this many bytes.
ALIGNMENT = 64
# Magic, version, entries, bytes of an entry, key; and their checksum.
RING = struct.Struct("<8sIIQ16s")
# Epoch, number, bytes of the payload, its checksum; and that of these four.
ENTRY = struct.Struct("<QQQI")
CHECKSUM = struct.Struct("<I")
WRITER_AT = 64
LENGTHS = struct.Struct("<QQI")

#: A tensor in a pickle: which part its bytes are, its type and shape, and its strides if they are not the usual ones.
Told = tuple[int, str, tuple[int, ...], tuple[int, ...] | None]


class _Pickler(pickle.Pickler):
    """Puts plain CPU tensors aside as bytes; all else is pickled as always."""

    def __init__(self, file: io.BytesIO, parts: list[Any]) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._put_aside)
        self._parts = parts

    def _put_aside(self, buffer: pickle.PickleBuffer) -> None:
        self._parts.append((None, buffer.raw()))

    def persistent_id(self, value: Any) -> Told | None:
        is_plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if not is_plain or value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized:
            return None
        # In the order in which the elements lie, if they lie without gaps: channels_last stays so.
        in_memory = value.permute(sorted(range(value.dim()), key=lambda dim: -value.stride(dim)))
        is_dense = in_memory.is_contiguous()
        flat = in_memory.reshape(-1) if is_dense else value.contiguous().reshape(-1)
        data = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        self._parts.append((len(self._parts), data))
        strides = value.stride() if is_dense and not value.is_contiguous() else None
        return len(self._parts) - 1, str(value.dtype).removeprefix("torch."), tuple(value.shape), strides


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: list[memoryview], others: list[memoryview]) -> None:
        super().__init__(file, buffers=others)
        self._parts = parts

    def persistent_load(self, told: Told) -> torch.Tensor:
        at, dtype, shape, strides = told
        data = self._parts[at]
        if not data.nbytes:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        flat = torch.frombuffer(data, dtype=getattr(torch, dtype))
        return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class Packed:
    """A batch and the loader's state behind it as bytes: a table, a pickle, and tensors and buffers behind one another."""

    def __init__(self, batch: Any, state: bytes | None) -> None:
        parts: list[tuple[int | None, memoryview]] = []
        file = io.BytesIO()
        _Pickler(file, parts).dump(batch)
        self.body = file.getvalue()
        self.state = state or b""
        self.parts = [(at is not None, data) for at, data in parts]
        table = b"".join(struct.pack("<Q?", data.nbytes, is_tensor) for is_tensor, data in self.parts)
        self.head = LENGTHS.pack(len(self.body), len(self.state), len(self.parts)) + table
        self.nbytes = aligned(len(self.head) + len(self.body) + len(self.state)) + sum(aligned(data.nbytes) for _, data in self.parts)

    def into(self, target: memoryview) -> None:
        """Writes all of it to the beginning of the target."""
        front = self.head + self.body + self.state
        target[: len(front)] = front
        offset = aligned(len(front))
        for _, data in self.parts:
            if data.nbytes:
                # This copy lets other threads run meanwhile; a memoryview's does not.
                numpy.copyto(numpy.frombuffer(target[offset : offset + data.nbytes], numpy.uint8), numpy.frombuffer(data, numpy.uint8))
            offset += aligned(data.nbytes)


def unpacked(memory: bytearray) -> tuple[Any, bytes | None]:
    """The batch, in that memory, and the state. The batch is a pickle of this job's own: it is loaded as one."""
    view = memoryview(memory)
    body_bytes, state_bytes, count = LENGTHS.unpack_from(view)
    table = [struct.unpack_from("<Q?", view, LENGTHS.size + 9 * at) for at in range(count)]
    start = LENGTHS.size + 9 * count
    body, state = view[start : start + body_bytes], bytes(view[start + body_bytes : start + body_bytes + state_bytes])
    parts, others = [], []
    offset = aligned(start + body_bytes + state_bytes)
    for nbytes, is_tensor in table:
        parts.append(view[offset : offset + nbytes])
        if not is_tensor:
            others.append(parts[-1])
        offset += aligned(nbytes)
    return _Unpickler(io.BytesIO(body), parts, others).load(), state or None


class BatchRing:
    """The ring of one rank. `key` says what the batches are of: another key's are not found."""

    def __init__(self, session: Session, rank: int, entries: int, key: str) -> None:
        self._session, self._rank, self._entries = session, rank, entries
        self._key = hashlib.blake2b(key.encode(), digest_size=16).digest()
        self._board: Board | None = None
        self._layout: tuple[int, int] | None = None
        try:
            self._board = Board(session, rank, "batches", 0)
        except NoCheckpointError:
            return
        self._layout = self._read_layout()
        self._board.view[WRITER_AT : WRITER_AT + 16] = this_process()

    def get(self, epoch: int, number: int) -> tuple[Any, bytes | None] | None:
        """A batch, in memory of the caller's own, and the loader's state behind it; None if it is not here, whole."""
        if self._board is None or self._layout is None:
            return None
        entries, nbytes = self._layout
        entry = self._entry(number % entries, nbytes)
        head = bytes(entry[: ENTRY.size + CHECKSUM.size])
        its_epoch, its_number, length, checksum = ENTRY.unpack_from(head)
        if CHECKSUM.unpack_from(head, ENTRY.size)[0] != zlib.crc32(head[: ENTRY.size]) or (its_epoch, its_number) != (epoch, number):
            return None
        if length > nbytes - ALIGNMENT:
            return None
        memory = bytearray(entry[ALIGNMENT : ALIGNMENT + length])
        if zlib.crc32(memory) != checksum:
            return None
        return unpacked(memory)

    def put(self, epoch: int, number: int, batch: Any, state: bytes | None) -> None:
        """Keeps a batch in place of the oldest. Raises `RunFenced` if a newer process of this rank has taken the board."""
        packed = Packed(batch, state)
        self._look()
        if self._layout is None or self._layout[0] != self._entries or self._layout[1] < packed.nbytes + ALIGNMENT:
            self._make(packed.nbytes + ALIGNMENT)
        assert self._board is not None and self._layout is not None
        if self._writer_of(self._board.view) != this_process():
            raise RunFenced(f"another process keeps the batches of rank {self._rank} in {self._session.namespace!r}: end this one")
        entries, nbytes = self._layout
        entry = self._entry(number % entries, nbytes)
        entry[: ENTRY.size + CHECKSUM.size] = bytes(ENTRY.size + CHECKSUM.size)
        payload = entry[ALIGNMENT : ALIGNMENT + packed.nbytes]
        packed.into(payload)
        head = ENTRY.pack(epoch, number, packed.nbytes, zlib.crc32(payload))
        # The checksum last: without it the entry is none.
        entry[: ENTRY.size] = head
        entry[ENTRY.size : ENTRY.size + CHECKSUM.size] = CHECKSUM.pack(zlib.crc32(head))

    def _look(self) -> None:
        """Forgets a board that nobody would find any more: the next batch makes another."""
        if self._board is None or not self._board.is_due() or self._board.is_kept(lambda view: self._writer_of(view) != bytes(16)):
            return
        logger.info("the daemon has given up the batches of rank %d in %r: keeping them on a new board", self._rank, self._session.namespace)
        self._board = self._layout = None

    @staticmethod
    def _writer_of(view: memoryview) -> bytes:
        return bytes(view[WRITER_AT : WRITER_AT + 16])

    def clear(self) -> None:
        """Forgets what an earlier process has kept."""
        if self._board is not None:
            self._board.view[:PAGE] = bytes(PAGE)
            self._board.view[WRITER_AT : WRITER_AT + 16] = this_process()
        self._layout = None

    def _entry(self, at: int, nbytes: int) -> memoryview:
        assert self._board is not None
        return self._board.view[PAGE + at * nbytes : PAGE + (at + 1) * nbytes]

    def _read_layout(self) -> tuple[int, int] | None:
        assert self._board is not None
        head = bytes(self._board.view[: RING.size + CHECKSUM.size])
        magic, version, entries, nbytes, key = RING.unpack_from(head)
        sound = CHECKSUM.unpack_from(head, RING.size)[0] == zlib.crc32(head[: RING.size])
        if not sound or (magic, version, key) != (MAGIC, VERSION, self._key) or PAGE + entries * nbytes > self._board.capacity:
            return None
        return entries, nbytes

    def _make(self, nbytes: int) -> None:
        """An empty ring whose entries hold so many bytes and a quarter more: batches are not all of one size."""
        each = -(-(nbytes + nbytes // 4) // PAGE) * PAGE
        self._board = Board(self._session, self._rank, "batches", PAGE + self._entries * each)
        view = self._board.view
        view[:PAGE] = bytes(PAGE)
        for at in range(self._entries):
            self._entry(at, each)[:ALIGNMENT] = bytes(ALIGNMENT)
        head = RING.pack(MAGIC, VERSION, self._entries, each, self._key)
        view[WRITER_AT : WRITER_AT + 16] = this_process()
        view[: RING.size] = head
        view[RING.size : RING.size + CHECKSUM.size] = CHECKSUM.pack(zlib.crc32(head))
        self._layout = (self._entries, each)
