"""A checkpoint as files that others read without us, and such files as a checkpoint.

What is written goes piece by piece: of formats that allow it no process holds more than a piece, or one tensor.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from ..errors import CheckpointLoadError, ExportError, InvalidArgument, StoragedError, UnsavableState
from ._alone import load_alone, only_cause
from ._checkpointer import Checkpointer
from ._metadata import Place, emit_torch_metadata, file_of
from ._reader import Span, StoragedLoadPlanner, StoragedReader

FORMATS = ("dcp", "safetensors", "torch")
#: What is read at once: of a shard, and of small tensors together.
PIECE_BYTES = 64 << 20
#: S3 takes 10,000 parts of an object. File systems that upload parts of another size where nothing is said are told one from here on.
PARTS_MAX = 9_000
USUAL_PART_BYTES = 50 << 20

#: Where stock PyTorch describes a checkpoint: as a whole, or in late versions for each rank.
DESCRIBED_IN = (".metadata", "__0.metadata")

#: How safetensors calls what it can hold.
SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32", "uint64": "U64",
    "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
}


def export(checkpointer: Checkpointer, target: str | os.PathLike[str], step: int | None = None, form: str = "dcp") -> int:
    """Writes a step (the newest one by default), whole, to a directory that is empty or not there; the step.

    `target` is a path or a URL of whatever file system fsspec knows (`s3://bucket/folder` with s3fs installed). `dcp`: stock
    `FileSystemReader` and `FsspecReader` read it; what is no tensor is written as it was saved, byte for byte. `torch`:
    `checkpoint.pt` for `torch.load(weights_only=True)`. `safetensors`: `model.safetensors`, tensors alone by their dotted names;
    other values are refused.

    Every byte is verified on its way. `dcp` holds `PIECE_BYTES` in memory, `safetensors` that or its largest tensor, `torch` all of
    it. What an export that failed leaves has no `.metadata`, or no whole file.
    """
    if form not in FORMATS:
        raise InvalidArgument(f"format must be one of {', '.join(FORMATS)}, got {form!r}")
    place = _Target(target)
    place.check_empty()
    reader = checkpointer._reader(step)
    reader.follow(reader.ask())
    if form == "torch":
        _as_torch(checkpointer, reader, place)
    else:
        {"dcp": _as_dcp, "safetensors": _as_safetensors}[form](reader, place)
    assert reader.step is not None
    return reader.step


def import_dcp(checkpointer: Checkpointer, source: str | os.PathLike[str], step: int) -> None:
    """Saves a directory of stock `torch.distributed.checkpoint`, a path or a URL of fsspec's, as a step, and waits for its commit.

    Its `.metadata` is a pickle, which stock PyTorch loads: import only directories that you trust. All of it passes through
    this process's memory.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    make: Any = _EmptyStateDictLoadPlanner
    try:
        _load_state_dict(state, storage_reader=_stock_reader(source), planner=make(), no_dist=True)
    except CheckpointException as failure:
        error = only_cause(failure)
        if not isinstance(error, Exception):
            raise error from failure
        raise CheckpointLoadError(f"{os.fspath(source)} could not be read: {type(error).__name__}: {error}") from failure
    if not state:
        raise CheckpointLoadError(f"expected a checkpoint of torch.distributed.checkpoint in {source}, it holds no values")
    checkpointer.save(step, state)
    checkpointer.wait()


def _stock_reader(source: str | os.PathLike[str]) -> StorageReader:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    with _told(f"{source} cannot be read"):
        if "://" in os.fspath(source):
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            reader: FileSystemReader = FsspecReader(os.fspath(source))
        else:
            reader = FileSystemReader(source)
        # Stock PyTorch prints tracebacks where there is none.
        if not any(reader.fs.exists(reader.fs.concat_path(reader.path, name)) for name in DESCRIBED_IN):
            raise CheckpointLoadError(f"expected a checkpoint of torch.distributed.checkpoint in {source}, found no .metadata in it")
    return reader


@contextmanager
def _told(what: str) -> Iterator[None]:
    """File systems raise what they like: whoever exports hears of one error, with the cause in it."""
    try:
        yield
    except StoragedError:
        raise
    except Exception as error:
        raise ExportError(f"{what}: {type(error).__name__}: {error}") from error


class _Target:
    """The directory that is written, on whatever file system its URL names."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        self.name = os.fspath(target)
        with _told(f"{self.name} cannot be written"):
            # An instance of its own: what it has seen or left undone is nobody else's.
            files, root = url_to_fs(self.name, skip_instance_cache=True)
        self._files: Any = files
        self._root = str(root).rstrip("/")
        self._is_local, self._is_store = isinstance(files, LocalFileSystem), isinstance(files, AsyncFileSystem)

    def check_empty(self) -> None:
        with _told(f"{self.name} cannot be written"):
            held = self._files.ls(self._root, detail=False) if self._files.exists(self._root) else []
            is_file = bool(self._files.isfile(self._root))
        # An object store may name the folder itself; a local file is named so too, and is none.
        if is_file or any(str(one).rstrip("/") != self._root for one in held):
            raise InvalidArgument(f"expected an empty directory or none, got {self.name}, which holds files")

    @contextmanager
    def file(self, name: str, nbytes: int) -> Iterator[IO[bytes]]:
        """A new file. It has its name once all of it is there."""
        path = f"{self._root}/{name}"
        with _told(f"{self.name} cannot be written"):
            # Object stores, which are asynchronous in fsspec, have no folders: they would make a bucket of a mistyped name.
            if not self._is_store:
                self._files.makedirs(self._root, exist_ok=True)
            if self._is_local:
                with open(f"{path}.tmp", "wb") as stream:
                    yield stream
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(f"{path}.tmp", path)
                return
            part = nbytes // PARTS_MAX if nbytes > PARTS_MAX * USUAL_PART_BYTES else None
            with self._files.transaction, self._files.open(path, "wb", block_size=part) as stream:
                yield stream


def _as_dcp(reader: StoragedReader, target: _Target) -> None:
    """Records as they were saved, without what no name points to: of a replicated tensor every rank has a copy."""
    metadata = reader.read_metadata()
    places: dict[Any, Place] = metadata.storage_data
    by_rank: dict[int, list[Span]] = {}
    for rank, span in sorted({(place.rank, (place.offset, place.length)) for place in places.values()}):
        by_rank.setdefault(rank, []).append(span)
    moved: dict[tuple[int, int], int] = {}
    for rank, spans in by_rank.items():
        end = 0
        for offset, length in spans:
            moved[rank, offset] = end
            end += length
        with target.file(file_of(rank), end) as stream:
            for pieces in _batches(spans):
                for data in reader.read_spans(rank, pieces):
                    stream.write(data)
    now = {index: replace(place, offset=moved[place.rank, place.offset]) for index, place in places.items()}
    # Last: what it does not name does not exist.
    described = emit_torch_metadata(replace(metadata, storage_meta=None), now)
    with target.file(".metadata", len(described)) as stream:
        stream.write(described)


def _batches(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Some spans at a time, in their order, `PIECE_BYTES` together at most: longer ones in parts."""
    batch: list[Span] = []
    room = PIECE_BYTES
    for offset, length in spans:
        while length:
            part = min(length, room)
            batch.append((offset, part))
            offset, length, room = offset + part, length - part, room - part
            if room == 0:
                yield batch
                batch, room = [], PIECE_BYTES
    if batch:
        yield batch


def _as_safetensors(reader: StoragedReader, target: _Target) -> None:
    tensors: dict[str, TensorStorageMetadata] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise UnsavableState(f"value {name!r} is no tensor: safetensors holds tensors alone")
        if _safetensors_type(entry) is None:
            raise UnsavableState(f"tensor {name!r} is of {entry.properties.dtype}, which safetensors does not hold")
        tensors[name] = entry
    # As its own writer orders them: the widest first, so that each begins where its type may.
    names = sorted(tensors, key=lambda name: (-tensors[name].properties.dtype.itemsize, name))
    header, end = _safetensors_header({name: tensors[name] for name in names})
    with target.file("model.safetensors", len(header) + end) as stream:
        stream.write(header)
        batches = list(_named_batches(names, tensors))
        # One memory for all of them: DCP may keep what it has filled for a while, and memory that is given back may stay with the process.
        memory = torch.empty(max((_sum_of(batch, tensors) for batch in batches), default=0), dtype=torch.uint8)
        for batch in batches:
            _fill(_tensors_in(memory, batch, tensors), reader)
            stream.write(_memory_of(memory[: _sum_of(batch, tensors)]))


def _sum_of(names: list[str], tensors: dict[str, TensorStorageMetadata]) -> int:
    return sum(_nbytes(tensors[name]) for name in names)


def _tensors_in(memory: torch.Tensor, names: list[str], tensors: dict[str, TensorStorageMetadata]) -> dict[str, torch.Tensor]:
    """Tensors one behind the other, as they are in the file: there each begins where its type may."""
    made = {}
    at = 0
    for name in names:
        end = at + _nbytes(tensors[name])
        made[name] = memory[at:end].view(tensors[name].properties.dtype).view(tensors[name].size)
        at = end
    return made


def _safetensors_type(entry: TensorStorageMetadata) -> str | None:
    return SAFETENSORS.get(str(entry.properties.dtype).removeprefix("torch."))


def _safetensors_header(tensors: dict[str, TensorStorageMetadata]) -> tuple[bytes, int]:
    """The length of the description as 8 bytes, the description; and how many bytes follow it."""
    described: dict[str, Any] = {}
    end = 0
    for name, entry in tensors.items():
        start, end = end, end + _nbytes(entry)
        described[name] = {"dtype": _safetensors_type(entry), "shape": list(entry.size), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    # What follows begins at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _nbytes(entry: TensorStorageMetadata) -> int:
    return entry.size.numel() * entry.properties.dtype.itemsize


def _named_batches(names: list[str], tensors: dict[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    """Some names at a time, in their order: `PIECE_BYTES` of tensors, or one that is larger."""
    batch: list[str] = []
    held = 0
    for name in names:
        if batch and held + _nbytes(tensors[name]) > PIECE_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += _nbytes(tensors[name])
    if batch:
        yield batch


def _fill(state: dict[str, Any], reader: StoragedReader) -> None:
    try:
        load_alone(state, reader, StoragedLoadPlanner())
    except CheckpointException as failure:
        raise only_cause(failure) from failure


def _memory_of(tensor: torch.Tensor) -> memoryview:
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
    return memoryview(memory).cast("B")


def _as_torch(checkpointer: Checkpointer, reader: StoragedReader, target: _Target) -> None:
    state = checkpointer.load_all(reader.step)
    reader.read_metadata()
    with target.file("checkpoint.pt", sum(reader._manifest.shard_lengths)) as stream:
        torch.save(state, stream)
