"""Parts of larger tensors, by their offsets: for jobs whose tensors are sharded by something other than DTensors.

A state of pieces is a plain state dict, `{"pieces": {name: {place: tensor}}, "objects": {name: value}}`, and staged like any other. Only the
planners here know what it means. A place is a text, and part of the tensor's key: where the parts of later saves lie elsewhere, their state
has other keys, and is planned anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..errors import CheckpointLoadError, InvalidArgument
from ._checkpointer import Checkpointer
from ._reader import StoragedLoadPlanner

PIECES, OBJECTS = "pieces", "objects"

Extents = tuple[int, ...]


def place_of(offsets: Extents, size: Extents) -> str:
    """Where a part begins and how large the whole is, as text: `0,4 of 8,16`."""
    return f"{','.join(map(str, offsets))} of {','.join(map(str, size))}"


def read_place(place: str) -> tuple[Extents, Extents]:
    offsets, _, size = place.partition(" of ")
    return extents(offsets), extents(size)


def extents(text: str) -> Extents:
    return tuple(map(int, filter(None, text.split(","))))


class Parts:
    """What is in a state of pieces that DCP has flattened."""

    def __init__(self, flat: dict[str, Any], paths: dict[str, Any]) -> None:
        strange = [key for key, path in paths.items() if (path[0], len(path)) not in ((PIECES, 3), (OBJECTS, 2))]
        if strange:
            raise InvalidArgument(f"expected pieces by name and place, and objects by name that hold no tensors, got {strange[0]!r}")
        #: By name: where objects are in the state dict.
        self.objects = {path[1]: path for path in paths.values() if path[0] == OBJECTS}
        self.sizes: dict[str, Extents] = {}
        self._parts: dict[str, dict[Extents, torch.Tensor]] = {}
        for key, path in paths.items():
            if path[0] == PIECES:
                _, name, place = path
                offsets, self.sizes[name] = read_place(place)
                self._parts.setdefault(name, {})[offsets] = flat[key]

    def chunks_of(self, name: str) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.size()) for offsets, part in self._parts[name].items()]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self._parts[index.fqn][tuple(index.offset)]


class PiecesPlanner(DefaultSavePlanner):
    """Describes pieces as parts of their tensors; what several ranks have is saved once."""

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._parts = Parts(self.state_dict, self.mappings)
        self.mappings = self._parts.objects

    def create_local_plan(self) -> SavePlan:
        items = [self._shard(name, chunk) for name in self._parts.sizes for chunk in self._parts.chunks_of(name)]
        items += [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in self.mappings]
        self.plan = SavePlan(items, planner_data={name: (name,) for name in [*self._parts.sizes, *self.mappings]})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.offset is not None:
            return self._parts.part(index)
        return self.state_dict[".".join(map(str, self.mappings[index.fqn]))]

    def _shard(self, name: str, chunk: ChunkStorageMetadata) -> WriteItem:
        index = MetadataIndex(name, chunk.offsets)
        properties = TensorProperties.create_from_tensor(self._parts.part(index))
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self._parts.sizes[name]))
        return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class PiecesLoadPlanner(StoragedLoadPlanner):
    """Fills pieces, wherever they lie in their tensors, from those that were saved."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self._parts = Parts(self.state_dict, self.mappings)
        self.mappings = self._parts.objects

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        missing = sorted(name for name in [*self._parts.sizes, *self.mappings] if name not in saved)
        if missing:
            raise CheckpointLoadError(f"the checkpoint has no values for {', '.join(missing[:5])}")
        items: list[ReadItem] = []
        for name, size in self._parts.sizes.items():
            described = saved[name]
            if not isinstance(described, TensorStorageMetadata) or tuple(described.size) != size:
                what = tuple(described.size) if isinstance(described, TensorStorageMetadata) else "a value that is no tensor"
                raise CheckpointLoadError(f"{name!r} was saved as {what}, expected {size}")
            items += create_read_items_for_chunk_list(name, described, self._parts.chunks_of(name))
        for name in self.mappings:
            if isinstance(saved[name], TensorStorageMetadata):
                raise CheckpointLoadError(f"{name!r} was saved as a tensor, expected a value that is none")
            index, nothing = MetadataIndex(name), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._parts.part(index)


class PiecesCheckpointer(Checkpointer):
    """A `Checkpointer` of states of pieces."""

    _save_planner = PiecesPlanner
    _load_planner = PiecesLoadPlanner
