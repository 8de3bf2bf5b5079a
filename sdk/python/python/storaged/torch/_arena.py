"""A slot filled with tensors: laid out, framed, copied into once, and viewed as tensors for DCP's planner."""

from __future__ import annotations

import copy
import ctypes
import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .. import _native
from ..errors import UnsavableState
from ._behind import Behind
from ._columns import Columns, Differs
from ._devices import Pair, device_of
from ._metadata import Place
from ._objects import check_savable
from ._pinned import Pinned, Pins
from ._sharing import Holding, Share, Sharer, entry_of, is_own, value_of
from ._structure import IMMUTABLE, Record, Structure, Twin, Whole, nest_of
from ._structure import leaf_of as structure_leaf
from ._tensors import DTensor, contexts_of, is_described, lies_in_order, own_memory, taken_apart

# Room behind the tensors for byte items, so that a second copy is a rare thing.
SPARE_BYTES = 1 << 20
SPARE_BYTES_PER_LEAF = 4 << 10
ITEM_ALIGNMENT = 64
#: Pieces that are written without a pause for other threads: a millisecond.
FRAMES_AT_ONCE = 4096

Spec = tuple[str, tuple[int, ...]]
Path = tuple[Any, ...]
LayoutOf = tuple[list[Record], list[tuple[int, bytes]], int]
#: Levels of dicts, lists and tuples in one another. Each costs some frames of Python's thousand, here and in DCP.
NESTED_MAX = 200
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
        #: Its slots that are page-locked.
        self.pins = Pins()

    def learn(self, structure: Structure) -> None:
        self.structures = [*self.structures[-(STRUCTURES_MAX - 1) :], structure]

    def use(self, structure: Structure) -> None:
        self.structures = [*(one for one in self.structures if one is not structure), structure][-STRUCTURES_MAX:]

    def of(self, specs: tuple[Spec, ...]) -> LayoutOf:
        # A thread that makes slots ahead may ask at the same time.
        known = self.known.get(specs)
        if known is None:
            # Two structures alternate at most (before and after the optimizer's first step): keep few.
            if len(self.known) >= 4:
                self.known.clear()
            known = self.known[specs] = _native.layout([(name, list(shape)) for name, shape in specs], 0)
        return known


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
        #: The tensors that were staged, in order.
        self.specs: tuple[Spec, ...] = ()
        # Tensors without elements have no address to be known by: those of one type and shape are all the same.
        self.empties: dict[Spec, Place] = {}
        #: Tensors that were put behind those that were staged.
        self.appended = 0
        self.copied_bytes = 0
        self.spilled_bytes = 0
        self.outgrown: list[_native.Slot] = []
        #: What wrappers that were taken apart say of themselves.
        self.contexts: dict[str, str] = {}
        #: Where dicts lie that hold nothing.
        self.empty_dicts: list[Path] = []
        #: What was staged, if later saves may be of the same structure.
        self.structure: Structure | None = None
        #: Asks which tensors other ranks stage.
        self.sharer: Sharer | None = None
        #: What it said of what was staged.
        self.share: Share | None = None
        #: What it was asked of, and for each entry which of the staged tensors it is; None if others stage it.
        self.holding: Holding | None = None
        self.entries: list[int | None] = []
        #: What tensors that are no plain memory are copied behind, if not behind what their devices do when they are copied.
        self.behind: Behind | None = None

    def stage(self, tensors: list[torch.Tensor], spare: int = 0, copies: Copies = Copies.NOW) -> list[torch.Tensor]:
        """Copies tensors to their offsets, each once, and returns views of the slot in the same order."""
        specs = tuple(map(spec_of, tensors))
        records, frames, end = self.layouts.of(specs)
        self.specs = specs
        slot = self.begin(specs, frames, end, spare)
        views = [view_in(slot, record, spec, t.dtype) for record, spec, t in zip(records, specs, tensors)]
        if copies is Copies.NOW:
            self._copy(tensors, views, records)
        else:
            self.pin(tensors)
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
            for at in range(0, len(frames), FRAMES_AT_ONCE):
                slot.write_many(frames[at : at + FRAMES_AT_ONCE])
            self.layouts.framed[slot.id] = framed
        return slot

    def _copy(self, tensors: list[torch.Tensor], views: list[torch.Tensor], records: list[Record]) -> None:
        assert self.slot is not None
        parts, others = [], []
        for tensor, view, (_, _, offset, nbytes) in zip(tensors, views, records):
            if nbytes == 0:
                continue
            if lies_in_order(tensor):
                parts.append((tensor.data_ptr(), offset, nbytes))
            else:
                others.append((view, tensor))
            self.copied_bytes += nbytes
        with self.copying(others):
            self.slot.copy_many(parts, self.threads)

    def copying(self, pairs: list[Pair]) -> AbstractContextManager[None]:
        """Copies tensors that are no plain memory, from GPUs beside what the block does."""
        behind = self.behind or Behind(tensor for _, tensor in pairs)
        return behind.copying(pairs, self._pinned)

    def pin(self, tensors: list[torch.Tensor]) -> None:
        """Page-locks the slot, if any of the tensors that it is for are on a GPU."""
        device = next((found for found in map(device_of, tensors) if found is not None), None)
        if device is not None:
            self._pinned(device)

    def _pinned(self, device: int) -> Pinned | None:
        assert self.slot is not None
        return self.layouts.pins.of(self.slot, device)

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
        slot.write_many(frames)
        _, _, offset, nbytes = record
        if nbytes and lies_in_order(tensor):
            slot.copy_many([(tensor.data_ptr(), offset, nbytes)], self.threads)
        elif nbytes:
            view_in(slot, record, (name, shape), tensor.dtype).copy_(tensor.detach())
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


def view_in(slot: _native.Slot, record: Record, spec: Spec, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's place in a slot, as a tensor."""
    _, _, offset, nbytes = record
    if nbytes == 0:
        return torch.empty(spec[1], dtype=dtype)
    memory = (ctypes.c_char * nbytes).from_address(slot.address + offset)
    setattr(memory, "slot", slot)  # noqa: B010, the tensor keeps this object, which keeps the mapping
    # Kept for later saves, which may be outside of inference mode.
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize).view(spec[1])


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


def check_depth(value: Any) -> None:
    """Refuses what is nested so deeply, in itself even, that who walks through it runs out of stack: DCP's planner, or whoever loads it."""
    within: list[Iterator[Any]] = [iter((value,))]
    while within:
        inner = next(within[-1], within)
        if inner is within:
            within.pop()
        elif isinstance(inner, dict) or type(inner) in (list, tuple):
            within.append(iter(inner.values() if isinstance(inner, dict) else inner))
            if len(within) > NESTED_MAX + 1:
                raise UnsavableState(
                    f"expected a state nested at most {NESTED_MAX} levels deep, got one that is deeper, or that contains itself: "
                    "save a list of its parts"
                )


def empty_dicts(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where dicts lie that hold nothing, by DCP's paths: it describes values alone, so that such a dict leaves no trace."""
    if isinstance(value, Mapping):
        if not value and path:
            yield path
        for key, inner in value.items():
            yield from empty_dicts(inner, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from empty_dicts(inner, (*path, index))


def rebuilt(value: Any, leaf_of: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same nesting with every leaf replaced."""
    if isinstance(value, dict):
        return {key: rebuilt(inner, leaf_of, (*path, key)) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(rebuilt(inner, leaf_of, (*path, i)) for i, inner in enumerate(value))
    return leaf_of(path, value)


def captured(
    shard: Shard, state_dict: dict[str, Any], trust_pickle: bool = False, behind: bool = False
) -> Callable[[], Twin | Whole]:
    """What a state dict is now: the call that copies its tensors into a slot of the shard, and gives a training-safe twin of it.

    Whatever can be refused is refused here. With `behind` the call may come from another thread: it goes by what was here, and only the
    tensors' elements must still be what they are now.
    """
    resolved = without_states(state_dict)
    for structure in structures_of(shard):
        try:
            return captured_again(shard, structure, resolved, trust_pickle, behind)
        except Differs:
            continue
    stage = captured_first(shard, resolved, trust_pickle, behind=behind)
    return lambda: Whole(stage())


def prepare_state_dict(shard: Shard, state_dict: dict[str, Any]) -> None:
    """Gets a slot for such a state dict, and puts into it what does not change from save to save: all but the tensors."""
    resolved = without_states(state_dict)
    for structure in structures_of(shard):
        try:
            _, others = structure.sources(structure.leaves_of(resolved))
        except Differs:
            continue
        slot = shard.begin(structure.specs, structure.frames, structure.end, structure.spare)
        structure.views_at(slot.address, lambda: views_of(slot, structure))
        shard.pin([tensor for _, tensor in others])
        return
    captured_first(shard, resolved, True, Copies.LATER)()


def structures_of(shard: Shard) -> list[Structure]:
    """Those that are known, of this rank's share, the last one first."""
    share = None if shard.sharer is None else shard.sharer.share
    if shard.sharer is not None and share is None:
        return []  # what others stage has to be asked
    return [structure for structure in reversed(shard.layouts.structures) if structure.share is share]


def without_states(state_dict: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.checkpoint.stateful import Stateful

    # What `isinstance` of a protocol costs is many times what `hasattr` does: for thousands of tensors it was most of a save.
    return {
        k: v.state_dict() if hasattr(v, "state_dict") and isinstance(v, Stateful) else v for k, v in state_dict.items()
    }


@dataclass(frozen=True)
class Staged:
    """Stands for a tensor until there are views of the slot: which one, and what it is a shard of."""

    index: int
    outer: DTensor | None


def left_to_others(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Stands for a tensor that another rank stages: it has no memory, so that nothing can be copied from it by mistake."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device="meta")


def held_by(sharer: Sharer, leaves: list[tuple[Path, Any]], local_of: dict[Path, torch.Tensor]) -> tuple[Holding, list[Path]]:
    """What others may hold too, and where it lies."""
    entries, paths, own_bytes = [], [], 0
    number_of: dict[tuple[Any, ...], int] = {}
    for path, leaf in leaves:
        local = local_of.get(path)
        if local is None or local.nbytes == 0:
            continue
        is_first = identity(local) not in number_of
        number = number_of.setdefault(identity(local), len(number_of))
        if is_own(leaf, sharer.world_size):
            own_bytes += local.nbytes * is_first
        else:
            entries.append(entry_of(name_of(path), leaf, local, number))
            paths.append(path)
    values = {name_of(path): value_of(leaf) for path, leaf in leaves}
    return Holding(tuple(entries), own_bytes, {name: value for name, value in values.items() if value is not None}), paths


def indices_of(
    shard: Shard, leaves: list[tuple[Path, Any]], local_of: dict[Path, torch.Tensor]
) -> tuple[dict[Path, int | None], list[torch.Tensor]]:
    """The tensors that are staged, and for every tensor leaf which of them it is; None if others stage it."""
    left: set[Path] = set()
    paths: list[Path] = []
    if shard.sharer is not None:
        shard.holding, paths = held_by(shard.sharer, leaves, local_of)
        shard.share = shard.sharer.share_of(shard.holding)
        left = {paths[number] for number in shard.share.left} if shard.share is not None else left
    # Tied tensors are staged once: the same memory, read the same way, is the same tensor.
    index_of: dict[tuple[Any, ...], int] = {}
    unique: list[torch.Tensor] = []
    for path, tensor in local_of.items():
        if path not in left and identity(tensor) not in index_of:
            index_of[identity(tensor)] = len(unique)
            unique.append(tensor)
    indices = {path: None if path in left else index_of[identity(tensor)] for path, tensor in local_of.items()}
    shard.entries = [indices[path] for path in paths]
    return indices, unique


def captured_first(
    shard: Shard, resolved: dict[str, Any], trust_pickle: bool = False, copies: Copies = Copies.NOW, behind: bool = False
) -> Callable[[], dict[str, Any]]:
    """A structure that is not known, and is learned when it is staged."""
    check_depth(resolved)
    shard.contexts = contexts_of(resolved)
    resolved = taken_apart(resolved)
    shard.empty_dicts = list(empty_dicts(resolved))
    leaves = list(leaves_of(resolved))
    locals_by_path: dict[Path, torch.Tensor] = {}
    for path, leaf in leaves:
        if isinstance(leaf, DTensor):
            locals_by_path[path] = own_memory(name_of(path), leaf.to_local())
        elif isinstance(leaf, torch.Tensor) and not is_described(leaf):
            locals_by_path[path] = own_memory(name_of(path), leaf)
        elif not isinstance(leaf, torch.Tensor) and not trust_pickle:
            check_savable(name_of(path), leaf)
    indices, unique = indices_of(shard, leaves, locals_by_path)
    spare = (len(leaves) - len(locals_by_path)) * SPARE_BYTES_PER_LEAF

    def kept(path: Path, leaf: Any) -> Any:
        local = locals_by_path.get(path)
        if local is None:
            return copied(path, leaf)
        outer, index = leaf if isinstance(leaf, DTensor) else None, indices[path]
        if index is not None:
            return Staged(index, outer)
        view = left_to_others(local.shape, local.dtype)
        return view if outer is None else distributed_again(view, outer)

    around = rebuilt(resolved, kept)
    learn = learned(resolved, leaves, indices)
    if behind:
        shard.behind = Behind(unique)

    def stage() -> dict[str, Any]:
        views = shard.stage(unique, spare, copies)
        if learn is not None:
            learn(shard, tuple(map(spec_of, unique)), spare)

        def view_of(_: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Staged):
                return leaf
            view = views[leaf.index]
            return view if leaf.outer is None else distributed_again(view, leaf.outer)

        twin: dict[str, Any] = rebuilt(around, view_of)
        return twin

    return stage


def has_exact_names(value: Any) -> bool:
    """Whether keys that are equal and of one type have one name: 0.0 and -0.0 have not, nor (1,) and (True,)."""
    if isinstance(value, dict):
        return all(type(key) in (str, int, bool) for key in value) and all(map(has_exact_names, value.values()))
    return type(value) not in (list, tuple) or all(map(has_exact_names, value))


def learned(
    resolved: dict[str, Any], leaves: list[tuple[Path, Any]], tensors: dict[Path, int | None]
) -> Callable[[Shard, tuple[Spec, ...], int], None] | None:
    """What remembers the structure once it is staged, if all there is to do the next time is to copy."""
    if not has_exact_names(resolved):
        return None
    nest = nest_of(resolved)
    known = [structure_leaf(tensors[path], leaf) if path in tensors else None for path, leaf in leaves]
    if nest is None or any(one is None and isinstance(leaf, torch.Tensor) for one, (_, leaf) in zip(known, leaves)):
        return None
    names = [name_of(path) for path, _ in leaves]
    columns = Columns([leaf._local_tensor if isinstance(leaf, DTensor) else leaf for path, leaf in leaves if path in tensors])

    def learn(shard: Shard, specs: tuple[Spec, ...], spare: int) -> None:
        records, frames, end = shard.layouts.of(specs)
        shard.structure = Structure(
            nest, known, names, columns, specs, records, frames, end, spare, shard.places, shard.empties, shard.empty_dicts,
            share=shard.share,
        )
        shard.layouts.learn(shard.structure)

    return learn


def captured_again(
    shard: Shard, structure: Structure, resolved: dict[str, Any], trust_pickle: bool, behind: bool
) -> Callable[[], Twin]:
    """A state dict of a known structure: compared now, copied then. Raises `Differs` before anything is done."""
    leaves = structure.leaves_of(resolved)
    # What is behind the addresses is kept until it is copied: nobody else may have these tensors, or they are given other memory meanwhile.
    held: list[Any] = [leaves]
    addresses, others = structure.sources(leaves, held if behind else None)
    changeable = [at for at in structure.objects if type(leaves[at]) not in IMMUTABLE]
    if not trust_pickle:
        for at in changeable:
            check_savable(structure.names[at], leaves[at])
    objects = {at: leaves[at] for at in structure.objects}
    objects |= {at: copied((structure.names[at],), leaves[at]) for at in changeable}
    elementwise = [(at, tensor.detach()) for at, tensor in others]
    if behind:
        shard.behind = Behind(tensor for _, tensor in elementwise)

    def stage() -> Twin:
        slot = shard.begin(structure.specs, structure.frames, structure.end, structure.spare)

        def views() -> list[Any]:
            return structure.views_at(slot.address, lambda: views_of(slot, structure))

        made = views() if elementwise else []
        plain = [view._local_tensor if isinstance(view, DTensor) else view for view in made]
        with shard.copying([(plain[at], tensor) for at, tensor in elementwise]):
            slot.copy_packed(addresses, structure.offsets, structure.lengths, shard.threads)
        held.clear()
        shard.copied_bytes = structure.nbytes
        shard.places, shard.empties, shard.structure = structure.places, structure.empties, structure
        shard.empty_dicts, shard.share = structure.empty_dicts, structure.share
        shard.layouts.use(structure)
        return Twin(structure, objects, views)

    return stage


def views_of(slot: _native.Slot, structure: Structure) -> list[Any]:
    """For every tensor leaf its view of the slot."""
    views: list[Any] = []
    made: dict[int, torch.Tensor] = {}
    for expected in structure.leaves:
        if expected is None:
            views.append(None)
            continue
        index = expected.index
        if index is None:
            view = left_to_others(expected.shape, expected.dtype)
        else:
            if index not in made:
                made[index] = view_in(slot, structure.records[index], structure.specs[index], expected.dtype)
            view = made[index]
        if expected.outer is not None:
            mesh, placements, shape, stride = expected.outer
            view = DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride)
        views.append(view)
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
