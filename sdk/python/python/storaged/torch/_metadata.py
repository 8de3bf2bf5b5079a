"""DCP's metadata: as typed JSON for us, as `.metadata` pickle for stock readers (written, never read back)."""

from __future__ import annotations

import copyreg
import io
import json
import pickle
import re
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

from ..errors import CheckpointLoadError, CorruptData

SCHEMA_VERSION = 1
#: Of steps that stock DCP wrote as files: places are whole records, as `torch.save` writes them.
RECORDS_VERSION = 2
# The fields of TensorProperties' state that every torch from 2.4 on reads; 2.15 added a sixth.
PROPERTY_FIELDS = 5
#: The attribute of a decoded description that says what wrappers said of themselves.
CONTEXTS = "storaged_contexts"
#: That which says where dicts lay that held nothing.
EMPTY_DICTS = "storaged_empty_dicts"


@dataclass(frozen=True)
class Place:
    """Where an item's bytes lie: in whose shard, the whole record, and the raw data in it."""

    rank: int
    offset: int
    length: int
    data_offset: int
    data_length: int
    #: Where the raw data lies only the record itself knows.
    is_record: bool = False


def file_of(rank: int) -> str:
    return f"__{rank}_0.distcp"


def encode_schema(
    metadata: Metadata,
    places: dict[MetadataIndex, Place],
    version: int = SCHEMA_VERSION,
    contexts: dict[str, str] | None = None,
    empty_dicts: list[tuple[Any, ...]] | None = None,
) -> bytes:
    """`{tensors: {name: [dtype, size, [[offsets, sizes, place]]]}, bytes: {name: place}, paths: {name: [...]}}`,
    `contexts: {name: text}` if there are wrappers, and `empty_dicts: [[...]]`, paths too, if there are such."""
    by_chunk = {(i.fqn, tuple(i.offset) if i.offset is not None else None): p for i, p in places.items()}
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks = [
                [list(c.offsets), list(c.sizes), _row(by_chunk[(name, tuple(c.offsets))])] for c in entry.chunks
            ]
            tensors[name] = [str(entry.properties.dtype).removeprefix("torch."), list(entry.size), chunks]
        else:
            objects[name] = _row(by_chunk[(name, None)])
    paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
    schema: dict[str, Any] = {"version": version, "tensors": tensors, "bytes": objects, "paths": paths}
    if contexts:
        schema["contexts"] = contexts
    if empty_dicts:
        schema["empty_dicts"] = [list(path) for path in dict.fromkeys(empty_dicts)]
    return json.dumps(schema, separators=(",", ":"), sort_keys=True).encode()


def encode_files(description: bytes) -> bytes:
    """The schema of a step that this process has just described as stock DCP does: places are whole records.

    What only stock readers can read (compressed streams, other formats) has no places.
    """
    try:
        metadata: Metadata = pickle.loads(description)
        places = {index: _place_of_info(info) for index, info in (metadata.storage_data or {}).items()}
        if not isinstance(metadata.planner_data, dict):
            metadata = replace(metadata, planner_data=None)
        return encode_schema(metadata, places, RECORDS_VERSION)
    except (AttributeError, KeyError, TypeError, ValueError, pickle.UnpicklingError):
        return json.dumps({"version": RECORDS_VERSION, "files_only": True}).encode()


def _place_of_info(info: Any) -> Place:
    found = re.fullmatch(r"__(\d+)_0\.distcp", info.relative_path, re.ASCII)
    if found is None or getattr(info, "transform_descriptors", None):
        raise ValueError(f"{info!r} is no plain record of a rank's file")
    return Place(int(found.group(1)), info.offset, info.length, info.offset, info.length)


def _row(place: Place) -> list[int]:
    return [place.rank, place.offset, place.length, place.data_offset, place.data_length]


def decode_schema(text: bytes, shard_lengths: list[int]) -> Metadata:
    """The metadata, with `Place`s within the shards as storage data."""
    try:
        schema = json.loads(text)
        if schema["version"] not in (SCHEMA_VERSION, RECORDS_VERSION):
            raise CorruptData(
                f"schema version must be {SCHEMA_VERSION} or {RECORDS_VERSION}, got {schema['version']!r}: use a release that knows it"
            )
        if schema.get("files_only"):
            raise CheckpointLoadError(
                "expected a step of plain records, got one that was written as files in another format: load it as it was "
                "saved, with torch.distributed.checkpoint and checkpoint_id='storaged://NAMESPACE/step-N'"
            )
        return _metadata_of(schema, shard_lengths)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptData(f"expected the schema of a checkpoint, got something else: {error!r}") from error


def _metadata_of(schema: dict[str, Any], shard_lengths: list[int]) -> Metadata:
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    is_record = schema["version"] == RECORDS_VERSION
    for name, (dtype_name, size, rows) in schema["tensors"].items():
        dtype = getattr(torch, dtype_name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype_name!r} is no dtype")
        chunks = []
        for offsets, sizes, row in rows:
            place = _place(row, shard_lengths, is_record)
            elements = 1
            for extent in sizes:
                elements *= extent
            if not is_record and place.data_length != elements * dtype.itemsize:
                raise ValueError(f"{name!r} needs {elements * dtype.itemsize} bytes, got {place.data_length}")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, torch.Size(offsets))] = place
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), chunks)
    for name, row in schema["bytes"].items():
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _place(row, shard_lengths, is_record)
    paths = {name: tuple(path) for name, path in schema["paths"].items()}
    metadata = Metadata(state_dict_metadata=entries, planner_data=paths, storage_data=places)
    # Where our planner finds it; others do not look.
    setattr(metadata, CONTEXTS, dict(schema.get("contexts", {})))  # noqa: B010
    empty = [tuple(path) for path in schema.get("empty_dicts", [])]
    if not all(path and all(type(key) in (str, int) for key in path) for path in empty):
        raise ValueError("an empty dict has no path")
    setattr(metadata, EMPTY_DICTS, empty)  # noqa: B010
    return metadata


def _place(row: list[int], shard_lengths: list[int], is_record: bool) -> Place:
    rank, offset, length, data_offset, data_length = row
    place = Place(rank, offset, length, data_offset, data_length, is_record)
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
