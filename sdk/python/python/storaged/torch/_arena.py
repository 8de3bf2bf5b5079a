"""A slot filled with tensors: laid out, framed, copied into once, and viewed as tensors for DCP's planner."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _native
from ..errors import UnsavableState
from ._metadata import Place
from ._objects import check_savable
from ._tensors import DTensor, is_described, lies_in_order, own_memory, taken_apart

# Room behind the tensors for byte items, so that a second copy is a rare thing.
SPARE_BYTES = 1 << 20
SPARE_BYTES_PER_LEAF = 4 << 10
ITEM_ALIGNMENT = 64

Spec = tuple[str, tuple[int, ...]]


def spec_of(tensor: torch.Tensor) -> Spec:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


class Layouts:
    """Layouts by their tensors, and which layout each slot's frames were last written for."""

    def __init__(self) -> None:
        self.known: dict[tuple[Spec, ...], tuple] = {}
        # By slot; the address tells a slot from an earlier one that had the same number.
        self.framed: dict[int, tuple[int, tuple[Spec, ...]]] = {}

    def of(self, specs: tuple[Spec, ...]) -> tuple:
        if specs not in self.known:
            # Two structures alternate at most (before and after the optimizer's first step): keep few.
            if len(self.known) >= 4:
                self.known.clear()
            self.known[specs] = _native.layout([(name, list(shape)) for name, shape in specs], 0)
        return self.known[specs]


class Shard:
    """One rank's shard in the making, in one slot. Its tensors have memory: `own_memory` has seen to that."""

    def __init__(self, rank: int, acquire: Callable[[int], _native.Slot], layouts: Layouts, threads: int) -> None:
        self.rank = rank
        self.acquire = acquire
        self.layouts = layouts
        self.threads = threads
        self.slot: _native.Slot | None = None
        self.end = 0
        self.places: dict[tuple[int, int], Place] = {}
        self.copied_bytes = 0
        self.spilled_bytes = 0
        self.outgrown: list[_native.Slot] = []

    def stage(self, tensors: list[torch.Tensor], spare: int = 0) -> list[torch.Tensor]:
        """Copies tensors to their offsets, each once, and returns views of the slot in the same order."""
        specs = tuple(map(spec_of, tensors))
        records, frames, end = self.layouts.of(specs)
        self.slot = self.acquire(end + spare + SPARE_BYTES)
        self.end = end
        key, framed = self.slot.id, (self.slot.address, specs)
        if self.layouts.framed.get(key) != framed:
            self.layouts.framed.pop(key, None)
            for offset, piece in frames:
                self.slot.write(offset, piece)
            self.layouts.framed[key] = framed
        views = [self.view(record, spec, t) for record, spec, t in zip(records, specs, tensors)]
        self._copy(tensors, views, records)
        for record in records:
            self.places[(record[2], record[3])] = Place(self.rank, *record)
        return views

    def view(self, record: tuple, spec: Spec, like: torch.Tensor) -> torch.Tensor:
        _, _, offset, nbytes = record
        if nbytes == 0:
            return torch.empty(spec[1], dtype=like.dtype)
        assert self.slot is not None
        memory = (ctypes.c_char * nbytes).from_address(self.slot.address + offset)
        memory.slot = self.slot  # the tensor keeps this object, which keeps the mapping
        return torch.frombuffer(memory, dtype=like.dtype, count=nbytes // like.dtype.itemsize).view(spec[1])

    def _copy(self, tensors: list[torch.Tensor], views: list[torch.Tensor], records: list[tuple]) -> None:
        assert self.slot is not None
        parts = []
        for tensor, view, (_, _, offset, nbytes) in zip(tensors, views, records):
            if nbytes == 0:
                continue
            if lies_in_order(tensor):
                parts.append((tensor.data_ptr(), offset, nbytes))
            else:
                view.copy_(tensor.detach())
            self.copied_bytes += nbytes
        self.slot.copy_many(parts, self.threads)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where a tensor lies, if it is a whole staged one."""
        if self.slot is None or not lies_in_order(tensor):
            return None
        return self.places.get((tensor.data_ptr() - self.slot.address, tensor.nbytes))

    def append_tensor(self, tensor: torch.Tensor) -> Place:
        """Copies a tensor that was not staged behind everything else."""
        name, shape = spec_of(tensor)
        (record,), frames, end = _native.layout([(name, list(shape))], self.end)
        slot = self.reserve(end)
        for offset, piece in frames:
            slot.write(offset, piece)
        _, _, offset, nbytes = record
        if nbytes and lies_in_order(tensor):
            slot.copy_many([(tensor.data_ptr(), offset, nbytes)], self.threads)
        elif nbytes:
            self.view(record, (name, shape), tensor).copy_(tensor.detach())
        self.spilled_bytes += nbytes
        self.end = end
        return Place(self.rank, *record)

    def append_bytes(self, data: bytes) -> Place:
        """Appends a byte item as it is."""
        offset = -(-self.end // ITEM_ALIGNMENT) * ITEM_ALIGNMENT
        slot = self.reserve(offset + len(data))
        slot.write(self.end, bytes(offset - self.end) + data)
        self.end = offset + len(data)
        return Place(self.rank, offset, len(data), offset, len(data))

    def reserve(self, capacity: int) -> _native.Slot:
        """The slot, or a larger one with the same bytes: the rare second copy."""
        if self.slot is None:
            self.slot = self.acquire(capacity + SPARE_BYTES)
        elif capacity > self.slot.capacity:
            larger = self.acquire(capacity + capacity // 4)
            self.layouts.framed.pop(larger.id, None)
            larger.copy_many([(self.slot.address, 0, self.end)], self.threads)
            self.outgrown.append(self.slot)
            # Staged views still point into the old slot: keep them known by their place.
            shift = self.slot.address - larger.address
            self.places = {(offset + shift, n): place for (offset, n), place in self.places.items()}
            self.slot = larger
        return self.slot


def leaves_of(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Leaves of nested dicts, lists and tuples, with their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves_of(inner, (*path, key))
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            yield from leaves_of(inner, (*path, index))
    else:
        yield path, value


def rebuilt(value: Any, leaf_of: Callable[[tuple, Any], Any], path: tuple = ()) -> Any:
    """The same nesting with every leaf replaced."""
    if isinstance(value, dict):
        return {key: rebuilt(inner, leaf_of, (*path, key)) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(rebuilt(inner, leaf_of, (*path, i)) for i, inner in enumerate(value))
    return leaf_of(path, value)


def stage_state_dict(shard: Shard, state_dict: dict[str, Any], trust_pickle: bool = False) -> dict[str, Any]:
    """A training-safe twin of the state dict whose tensors lie in the shard's slot."""
    from torch.distributed.checkpoint.stateful import Stateful

    resolved = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}
    resolved = taken_apart(resolved)
    leaves = list(leaves_of(resolved))
    locals_by_path: dict[tuple, torch.Tensor] = {}
    for path, leaf in leaves:
        if isinstance(leaf, DTensor):
            locals_by_path[path] = own_memory(name_of(path), leaf.to_local())
        elif isinstance(leaf, torch.Tensor) and not is_described(leaf):
            locals_by_path[path] = own_memory(name_of(path), leaf)
        elif not isinstance(leaf, torch.Tensor) and not trust_pickle:
            check_savable(name_of(path), leaf)
    # Tied tensors are staged once: the same memory, read the same way, is the same tensor.
    index_of: dict[tuple, int] = {}
    unique: list[torch.Tensor] = []
    for tensor in locals_by_path.values():
        if identity(tensor) not in index_of:
            index_of[identity(tensor)] = len(unique)
            unique.append(tensor)
    others = len(leaves) - len(locals_by_path)
    views = shard.stage(unique, others * SPARE_BYTES_PER_LEAF)

    def leaf_of(path: tuple, leaf: Any) -> Any:
        local = locals_by_path.get(path)
        if local is None:
            return copied(path, leaf)
        view = views[index_of[identity(local)]]
        return distributed_again(view, leaf) if isinstance(leaf, DTensor) else view

    return rebuilt(resolved, leaf_of)


def name_of(path: tuple) -> str:
    return ".".join(map(str, path))


def copied(path: tuple, leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        raise UnsavableState(f"value {name_of(path)!r} of type {type(leaf).__qualname__} cannot be copied: {error}") from error


def identity(tensor: torch.Tensor) -> tuple:
    # Empty tensors share null pointers: their shape and type tell them apart well enough.
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg())


def distributed_again(view: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        view, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
