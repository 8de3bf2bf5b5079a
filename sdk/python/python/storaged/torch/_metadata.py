"""DCP's metadata: as typed JSON for us, as `.metadata` pickle for stock readers (written, never read back)."""

from __future__ import annotations

import copyreg
import io
import json
import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import CorruptData

SCHEMA_VERSION = 1
# The fields of TensorProperties' state that every torch from 2.4 on reads; 2.15 added a sixth.
PROPERTY_FIELDS = 5


@dataclass(frozen=True)
class Place:
    """Where an item's bytes lie: in whose shard, the whole record, and the raw data in it."""

    rank: int
    offset: int
    length: int
    data_offset: int
    data_length: int


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def encode_schema(metadata: Metadata, places: dict[MetadataIndex, Place]) -> bytes:
    """`{tensors: {name: [dtype, size, [[offsets, sizes, place]]]}, bytes: {name: place}, paths: {name: [...]}}`."""
    by_chunk = {(i.fqn, tuple(i.offset) if i.offset is not None else None): p for i, p in places.items()}
    tensors, objects = {}, {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [
                [list(c.offsets), list(c.sizes), _row(by_chunk[(name, tuple(c.offsets))])] for c in entry.chunks
            ]
            tensors[name] = [str(entry.properties.dtype).removeprefix("torch."), list(entry.size), chunks]
        else:
            objects[name] = _row(by_chunk[(name, None)])
    paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
    schema = {"version": SCHEMA_VERSION, "tensors": tensors, "bytes": objects, "paths": paths}
    return json.dumps(schema, separators=(",", ":"), sort_keys=True).encode()


def _row(place: Place) -> list[int]:
    return [place.rank, place.offset, place.length, place.data_offset, place.data_length]


def decode_schema(text: bytes, shard_lengths: list[int]) -> Metadata:
    """The metadata, with `Place`s within the shards as storage data."""
    try:
        schema = json.loads(text)
        if schema["version"] != SCHEMA_VERSION:
            raise CorruptData(f"schema version must be {SCHEMA_VERSION}, got {schema['version']!r}: use a release that knows it")
        return _metadata_of(schema, shard_lengths)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptData(f"expected the schema of a checkpoint, got something else: {error!r}") from error


def _metadata_of(schema: dict[str, Any], shard_lengths: list[int]) -> Metadata:
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, (dtype_name, size, rows) in schema["tensors"].items():
        dtype = getattr(torch, dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype_name!r} is no dtype")
        chunks = []
        for offsets, sizes, row in rows:
            place = _place(row, shard_lengths)
            elements = 1
            for extent in sizes:
                elements *= extent
            if place.data_length != elements * dtype.itemsize:
                raise ValueError(f"{name!r} needs {elements * dtype.itemsize} bytes, got {place.data_length}")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, torch.Size(offsets))] = place
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)
    for name, row in schema["bytes"].items():
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _place(row, shard_lengths)
    paths = {name: tuple(path) for name, path in schema["paths"].items()}
    return Metadata(state_dict_metadata=entries, planner_data=paths, storage_data=places)


def _place(row: list[int], shard_lengths: list[int]) -> Place:
    place = Place(*row)
    if not all(isinstance(value, int) and value >= 0 for value in row):
        raise ValueError(f"{row!r} is no place")
    ends = (place.offset + place.length, place.data_offset + place.data_length)
    if max(ends) > shard_lengths[place.rank]:
        raise ValueError(f"{row!r} lies outside of a shard of {shard_lengths[place.rank]} bytes")
    return place


class _PortablePickler(pickle.Pickler):
    """Writes TensorProperties with the five fields that every torch version reads."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TensorProperties):
            # Both exist at run time and in no stub.
            make, state = getattr(copyreg, "__newobj__"), getattr(obj, "__getstate__")()  # noqa: B009
            return make, (TensorProperties,), state[:PROPERTY_FIELDS]
        return NotImplemented


def emit_torch_metadata(metadata: Metadata, places: dict[MetadataIndex, Place]) -> bytes:
    """The `.metadata` object beside the data objects; `metadata` itself stays as it is."""
    # The stock reader's own record, private to torch: what it unpickles is named there and nowhere else.
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    infos = {index: _StorageInfo(file_of(p.rank), p.offset, p.length) for index, p in places.items()}
    out = io.BytesIO()
    _PortablePickler(out, protocol=4).dump(replace(metadata, storage_data=infos))
    return out.getvalue()
