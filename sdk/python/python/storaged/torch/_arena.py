"""A slot filled with tensors: laid out, framed, copied into once, and viewed as tensors for DCP's planner."""

from __future__ import annotations

import copy
import ctypes
import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import _native
from ..errors import UnsavableState
from ._metadata import Place
from ._objects import check_savable
from ._structure import IMMUTABLE, Differs, Record, Structure, nest_of
from ._structure import leaf_of as structure_leaf
from ._tensors import DTensor, contexts_of, is_described, lies_in_order, own_memory, taken_apart

# Room behind the tensors for byte items, so that a second copy is a rare thing.
SPARE_BYTES = 1 << 20
SPARE_BYTES_PER_LEAF = 4 << 10
ITEM_ALIGNMENT = 64

Spec = tuple[str, tuple[int, ...]]
Path = tuple[Any, ...]
LayoutOf = tuple[list[Record], list[tuple[int, bytes]], int]
#: Structures that are remembered: two alternate at most (before and after the optimizer's first step, or two models).
STRUCTURES_MAX = 2


def spec_of(tensor: torch.Tensor) -> Spec:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


class Copies(enum.Enum):
    """Whether tensors are copied, or everything is made ready for it."""

    NOW = "now"
    LATER = "later"


class Layouts:
    """Layouts by their tensors, and which layout each slot's frames were last written for."""

    def __init__(self) -> None:
        self.known: dict[tuple[Spec, ...], LayoutOf] = {}
        # By slot; the address tells a slot from an earlier one that had the same number.
        self.framed: dict[int, tuple[int, tuple[Spec, ...]]] = {}
        # The one that was used last at the end.
        self.structures: list[Structure] = []

    def learn(self, structure: Structure) -> None:
        self.structures = [*self.structures[-(STRUCTURES_MAX - 1) :], structure]

    def use(self, structure: Structure) -> None:
        self.structures.remove(structure)
        self.structures.append(structure)

    def of(self, specs: tuple[Spec, ...]) -> LayoutOf:
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
        # Tensors without elements have no address to be known by: those of one type and shape are all the same.
        self.empties: dict[Spec, Place] = {}
        #: Tensors that were put behind those that were staged.
        self.appended = 0
        self.copied_bytes = 0
        self.spilled_bytes = 0
        self.outgrown: list[_native.Slot] = []
        #: What wrappers that were taken apart say of themselves.
        self.contexts: dict[str, str] = {}
        #: What was staged, if later saves may be of the same structure.
        self.structure: Structure | None = None

    def stage(self, tensors: list[torch.Tensor], spare: int = 0, copies: Copies = Copies.NOW) -> list[torch.Tensor]:
        """Copies tensors to their offsets, each once, and returns views of the slot in the same order."""
        specs = tuple(map(spec_of, tensors))
        records, frames, end = self.layouts.of(specs)
        self.begin(specs, frames, end, spare)
        views = [self.view(record, spec, t.dtype) for record, spec, t in zip(records, specs, tensors)]
        if copies is Copies.NOW:
            self._copy(tensors, views, records)
        places = [Place(self.rank, *record) for record in records]
        self.places = {(place.data_offset, place.data_length): place for place in places}
        self.empties = {spec: place for spec, place in zip(specs, places) if place.data_length == 0}
        return views

    def begin(self, specs: tuple[Spec, ...], frames: list[tuple[int, bytes]], end: int, spare: int) -> _native.Slot:
        """Gets a slot and writes the frames into it, unless they are there from the last time."""
        slot = self.slot = self.acquire(end + spare + SPARE_BYTES)
        self.end = end
        framed = (slot.address, specs)
        if self.layouts.framed.get(slot.id) != framed:
            self.layouts.framed.pop(slot.id, None)
            for offset, piece in frames:
                slot.write(offset, piece)
            self.layouts.framed[slot.id] = framed
        return slot

    def view(self, record: Record, spec: Spec, dtype: torch.dtype) -> torch.Tensor:
        _, _, offset, nbytes = record
        if nbytes == 0:
            return torch.empty(spec[1], dtype=dtype)
        assert self.slot is not None
        memory = (ctypes.c_char * nbytes).from_address(self.slot.address + offset)
        setattr(memory, "slot", self.slot)  # noqa: B010, the tensor keeps this object, which keeps the mapping
        return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize).view(spec[1])

    def _copy(self, tensors: list[torch.Tensor], views: list[torch.Tensor], records: list[Record]) -> None:
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
        if tensor.numel() == 0:
            return self.empties.get(spec_of(tensor))
        return self.places.get((tensor.data_ptr() - self.slot.address, tensor.nbytes))

    def append_tensor(self, tensor: torch.Tensor) -> Place:
        """Copies a tensor that was not staged behind everything else."""
        self.appended += 1
        name, shape = spec_of(tensor)
        (record,), frames, end = _native.layout([(name, list(shape))], self.end)
        slot = self.reserve(end)
        for offset, piece in frames:
            slot.write(offset, piece)
        _, _, offset, nbytes = record
        if nbytes and lies_in_order(tensor):
            slot.copy_many([(tensor.data_ptr(), offset, nbytes)], self.threads)
        elif nbytes:
            self.view(record, (name, shape), tensor.dtype).copy_(tensor.detach())
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


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Leaves of nested dicts, lists and tuples, with their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves_of(inner, (*path, key))
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            yield from leaves_of(inner, (*path, index))
    else:
        yield path, value


def rebuilt(value: Any, leaf_of: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same nesting with every leaf replaced."""
    if isinstance(value, dict):
        return {key: rebuilt(inner, leaf_of, (*path, key)) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(rebuilt(inner, leaf_of, (*path, i)) for i, inner in enumerate(value))
    return leaf_of(path, value)


def stage_state_dict(shard: Shard, state_dict: dict[str, Any], trust_pickle: bool = False) -> dict[str, Any]:
    """A training-safe twin of the state dict whose tensors lie in the shard's slot."""
    resolved = without_states(state_dict)
    for structure in reversed(shard.layouts.structures):
        try:
            return stage_again(shard, structure, resolved, trust_pickle)
        except Differs:
            continue
    return stage_first(shard, resolved, trust_pickle)


def prepare_state_dict(shard: Shard, state_dict: dict[str, Any]) -> None:
    """Gets a slot for such a state dict, and puts into it what does not change from save to save: all but the tensors."""
    resolved = without_states(state_dict)
    for structure in reversed(shard.layouts.structures):
        try:
            structure.parts(structure.leaves_of(resolved))
        except Differs:
            continue
        slot = shard.begin(structure.specs, structure.frames, structure.end, structure.spare)
        structure.views_at(slot.address, lambda: views_of(shard, structure))
        return
    stage_first(shard, resolved, True, Copies.LATER)


def without_states(state_dict: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.stateful import Stateful

    return {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}


def stage_first(
    shard: Shard, resolved: dict[str, Any], trust_pickle: bool = False, copies: Copies = Copies.NOW
) -> dict[str, Any]:
    """Stages a structure that is not known, and learns it."""
    shard.contexts = contexts_of(resolved)
    resolved = taken_apart(resolved)
    leaves = list(leaves_of(resolved))
    locals_by_path: dict[Path, torch.Tensor] = {}
    for path, leaf in leaves:
        if isinstance(leaf, DTensor):
            locals_by_path[path] = own_memory(name_of(path), leaf.to_local())
        elif isinstance(leaf, torch.Tensor) and not is_described(leaf):
            locals_by_path[path] = own_memory(name_of(path), leaf)
        elif not isinstance(leaf, torch.Tensor) and not trust_pickle:
            check_savable(name_of(path), leaf)
    # Tied tensors are staged once: the same memory, read the same way, is the same tensor.
    index_of: dict[tuple[Any, ...], int] = {}
    unique: list[torch.Tensor] = []
    for tensor in locals_by_path.values():
        if identity(tensor) not in index_of:
            index_of[identity(tensor)] = len(unique)
            unique.append(tensor)
    others = len(leaves) - len(locals_by_path)
    views = shard.stage(unique, others * SPARE_BYTES_PER_LEAF, copies)

    def leaf_of(path: Path, leaf: Any) -> Any:
        local = locals_by_path.get(path)
        if local is None:
            return copied(path, leaf)
        view = views[index_of[identity(local)]]
        return distributed_again(view, leaf) if isinstance(leaf, DTensor) else view

    tensors = {path: index_of[identity(local)] for path, local in locals_by_path.items()}
    learn(shard, resolved, leaves, tensors, tuple(map(spec_of, unique)), others * SPARE_BYTES_PER_LEAF)
    twin: dict[str, Any] = rebuilt(resolved, leaf_of)
    return twin


def learn(
    shard: Shard, resolved: dict[str, Any], leaves: list[tuple[Path, Any]], tensors: dict[Path, int], specs: tuple[Spec, ...], spare: int
) -> None:
    """Remembers the structure of what was staged, if all there is to do the next time is to copy."""
    nest = nest_of(resolved)
    known = [structure_leaf(tensors[path], leaf) if path in tensors else None for path, leaf in leaves]
    if nest is None or any(one is None and isinstance(leaf, torch.Tensor) for one, (_, leaf) in zip(known, leaves)):
        return
    names = [name_of(path) for path, _ in leaves]
    records, frames, end = shard.layouts.of(specs)
    shard.structure = Structure(nest, known, names, specs, records, frames, end, spare, shard.places, shard.empties)
    shard.layouts.learn(shard.structure)


def stage_again(shard: Shard, structure: Structure, resolved: dict[str, Any], trust_pickle: bool) -> dict[str, Any]:
    """Stages a state dict of a known structure: compares and copies. Raises `Differs` before anything is done."""
    leaves = structure.leaves_of(resolved)
    parts, elementwise = structure.parts(leaves)
    if not trust_pickle:
        for name, leaf, expected in zip(structure.names, leaves, structure.leaves):
            if expected is None and type(leaf) not in IMMUTABLE:
                check_savable(name, leaf)
    slot = shard.begin(structure.specs, structure.frames, structure.end, structure.spare)
    views = structure.views_at(slot.address, lambda: views_of(shard, structure))
    slot.copy_many(parts, shard.threads)
    for at, tensor in elementwise:
        view = views[at]
        (view._local_tensor if isinstance(view, DTensor) else view).copy_(tensor.detach())
    shard.copied_bytes = sum(record[3] for record in structure.records)
    shard.places, shard.empties, shard.structure = structure.places, structure.empties, structure
    shard.layouts.use(structure)
    return structure.staged(views, leaves, lambda at, leaf: copied((structure.names[at],), leaf))


def views_of(shard: Shard, structure: Structure) -> list[Any]:
    """For every tensor leaf its view of the slot."""
    views: list[Any] = []
    made: dict[int, torch.Tensor] = {}
    for expected in structure.leaves:
        if expected is None:
            views.append(None)
            continue
        index = expected.index
        if index not in made:
            made[index] = shard.view(structure.records[index], structure.specs[index], expected.dtype)
        if expected.outer is None:
            views.append(made[index])
        else:
            mesh, placements, shape, stride = expected.outer
            views.append(DTensor.from_local(made[index], mesh, placements, run_check=False, shape=shape, stride=stride))
    return views


def name_of(path: Path) -> str:
    return ".".join(map(str, path))


def copied(path: Path, leaf: Any) -> Any:
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        raise UnsavableState(f"value {name_of(path)!r} of type {type(leaf).__qualname__} cannot be copied: {error}") from error


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Empty tensors share null pointers: their shape and type tell them apart well enough.
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.is_conj(), tensor.is_neg())


def distributed_again(view: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        view, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
