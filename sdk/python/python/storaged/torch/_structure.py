"""What a state dict looks like, learned from its first save: later saves of the same structure only compare and copy.

A structure holds what staging worked out once: the nesting with its keys, what each leaf must be, where each tensor lies
in the shard, and for each slot the views of it. A state dict of another structure, or with leaves that need more than a
copy (wrappers, shards that describe themselves), goes the long way, in `_arena`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ._columns import Columns, Differs
from ._metadata import Place
from ._sharing import Share
from ._tensors import PLAIN_TYPES, DTensor, lies_in_order

#: Values that nobody can change: a staged twin holds the same object.
IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
#: Slots whose views are kept: as many as stay mapped.
SLOTS_MAX = 4

Record = tuple[int, int, int, int]
#: A DTensor's mesh, placements, shape and strides.
Outer = tuple[Any, Any, torch.Size, tuple[int, ...]]


@dataclass(frozen=True)
class Nest:
    """A dict (with its keys) or a list or tuple, and what lies in it; None stands for a leaf."""

    kind: type
    keys: tuple[Any, ...]
    #: The keys' types: equal keys may have other names (1, 1.0 and True).
    key_types: tuple[type, ...]
    inner: tuple[Nest | None, ...]

    @cached_property
    def is_flat(self) -> bool:
        """Whether nothing but leaves lies in it."""
        return not any(self.inner)

    @cached_property
    def count(self) -> int:
        """How many leaves lie in it and in what lies in it."""
        return sum(map(leaf_count, self.inner))

    @cached_property
    def steps(self) -> dict[Any, tuple[Nest | None, int]]:
        """By key or index: what lies there, and how many leaves before it."""
        found, first = {}, 0
        for key, inner in zip(self.keys if self.kind is dict else range(len(self.inner)), self.inner):
            found[key] = (inner, first)
            first += leaf_count(inner)
        return found


def leaf_count(nest: Nest | None) -> int:
    return 1 if nest is None else nest.count


def nest_of(value: Any) -> Nest | None:
    if isinstance(value, dict):
        return Nest(dict, tuple(value), tuple(map(type, value)), tuple(map(nest_of, value.values())))
    if type(value) in (list, tuple):
        return Nest(type(value), (), (), tuple(map(nest_of, value)))
    return None


def gather(value: Any, nest: Nest | None, out: list[Any]) -> None:
    """Appends the leaves of a value of that nesting, in order."""
    if nest is None:
        out.append(value)
        return
    if nest.kind is dict:
        if not isinstance(value, dict) or tuple(value) != nest.keys or tuple(map(type, value)) != nest.key_types:
            raise Differs
        items: Any = value.values()
    else:
        if not isinstance(value, (list, tuple)) or type(value) is not nest.kind or len(value) != len(nest.inner):
            raise Differs
        items = value
    if nest.is_flat:
        out.extend(items)
        return
    for inner, item in zip(nest.inner, items):
        if inner is None:
            out.append(item)
        else:
            gather(item, inner, out)


def nested_again(nest: Nest | None, leaves: Any) -> Any:
    """The same nesting around leaves, which an iterator gives in order."""
    if nest is None:
        return next(leaves)
    inner = [next(leaves) if one is None else nested_again(one, leaves) for one in nest.inner]
    return dict(zip(nest.keys, inner)) if nest.kind is dict else nest.kind(inner)


@dataclass(frozen=True)
class Leaf:
    """One tensor leaf: which of the shard's tensors it is, and what a view of it in a slot is made like."""

    #: None if another rank stages it.
    index: int | None
    dtype: torch.dtype
    #: Of its local tensor.
    shape: torch.Size
    #: Whether a copy of its memory is a copy of it.
    in_order: bool
    #: None for a plain tensor.
    outer: Outer | None


def leaf_of(index: int | None, tensor: torch.Tensor) -> Leaf | None:
    """None if it needs more than a copy of its elements."""
    outer = None
    if isinstance(tensor, DTensor):
        outer = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        tensor = tensor._local_tensor
    if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    return Leaf(index, tensor.dtype, tensor.shape, lies_in_order(tensor), outer)


class Located(NamedTuple):
    """A value in a state dict: its nesting, the number of its first leaf, and what leads on from there, inside that leaf."""

    nest: Nest | None
    first: int
    inside: tuple[Any, ...]


@dataclass(eq=False)
class Structure:
    """Of one shard's tensors and everything around them."""

    nest: Nest
    #: By leaf, in order; None for what is not a tensor.
    leaves: list[Leaf | None]
    #: By leaf; for what is said of those that are not tensors.
    names: list[str]
    #: What the tensor leaves must be like, in order.
    columns: Columns
    specs: tuple[Any, ...]
    records: list[Record]
    frames: list[tuple[int, bytes]]
    end: int
    spare: int
    places: dict[tuple[int, int], Place]
    #: By type and shape: where tensors without elements are described.
    empties: dict[Any, Place]
    #: Where dicts lie that hold nothing.
    empty_dicts: list[tuple[Any, ...]] = field(default_factory=list)
    #: What of it is staged, if others stage the rest.
    share: Share | None = None
    #: By the slot's address: for every leaf that is a tensor a view of its place.
    views: dict[int, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = [(at, leaf) for at, leaf in enumerate(self.leaves) if leaf is not None]
        self._tensors = [at for at, _ in tensors]
        self._outers = [(number, leaf.outer) for number, (_, leaf) in enumerate(tensors) if leaf.outer is not None]
        self.objects = [at for at, leaf in enumerate(self.leaves) if leaf is None]
        #: Leaves that are one tensor with one before: the numbers of both among the tensor leaves.
        self._ties: list[tuple[int, int]] = []
        #: What is copied as memory, and what element by element: numbers among the tensor leaves.
        self._in_order: list[int] = []
        self._elementwise: list[int] = []
        first_of: dict[int, int] = {}
        copied: list[Record] = []
        for number, (_, leaf) in enumerate(tensors):
            if leaf.index is None or self.records[leaf.index][3] == 0:
                continue
            first = first_of.setdefault(leaf.index, number)
            if first != number:
                self._ties.append((number, first))
            elif leaf.in_order:
                self._in_order.append(number)
                copied.append(self.records[leaf.index])
            else:
                self._elementwise.append(number)
        #: Where they go, packed as `Slot.copy_packed` takes it.
        self.offsets = array("Q", [record[2] for record in copied]).tobytes()
        self.lengths = array("Q", [record[3] for record in copied]).tobytes()
        self.nbytes = sum(record[3] for record in self.records)

    def leaves_of(self, resolved: dict[str, Any]) -> list[Any]:
        """The leaves of a state dict; raises `Differs` if its nesting is another."""
        found: list[Any] = []
        gather(resolved, self.nest, found)
        return found

    def sources(self, leaves: list[Any], held: list[Any] | None = None) -> tuple[bytes, list[tuple[int, torch.Tensor]]]:
        """What is to be copied, each tensor once: the addresses, packed, and which leaves element by element.

        `held` gets what keeps the memory behind the addresses. Raises `Differs` if a leaf is not what it was.
        """
        for at in self.objects:
            leaf = leaves[at]
            if isinstance(leaf, (torch.Tensor, Mapping, list)) or type(leaf) is tuple:
                raise Differs
        tensors = leaves if not self.objects else [leaves[at] for at in self._tensors]
        if self._outers:
            tensors = list(tensors)
            for number, outer in self._outers:
                tensors[number] = inner_of(tensors[number], outer)
        addresses = self.columns.addresses(tensors, held)
        if any(addresses[one] != addresses[other] for one, other in self._ties):
            raise Differs  # tied before, and not any more
        elementwise = [(self._tensors[number], tensors[number]) for number in self._elementwise]
        copied = array("Q", [addresses[number] for number in self._in_order])
        # Memory that was freed: the long way says so by name.
        if 0 in copied or any(addresses[number] == 0 for number in self._elementwise):
            raise Differs
        return copied.tobytes(), elementwise

    def views_at(self, address: int, make: Callable[[], list[Any]]) -> list[Any]:
        """The slot's views, made once."""
        if address not in self.views:
            if len(self.views) >= SLOTS_MAX:
                self.views.clear()
            self.views[address] = make()
        return self.views[address]

    def located(self, path: tuple[Any, ...]) -> Located:
        """Where the value at that path of keys and indices is among the leaves."""
        nest: Nest | None = self.nest
        first = 0
        for depth, key in enumerate(path):
            if nest is None:
                return Located(None, first, path[depth:])
            nest, before = nest.steps[key]
            first += before
        return Located(nest, first, ())


class Twin:
    """What was staged: the state dict as it was then, its tensors in the slot. Its parts are put together when they are asked for."""

    def __init__(self, structure: Structure, objects: dict[int, Any], views: Callable[[], list[Any]]) -> None:
        self._structure = structure
        #: By leaf, as they were.
        self._objects = objects
        self._views = views

    @cached_property
    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        twin: dict[str, Any] = nested_again(self._structure.nest, iter(self._leaves(0, len(self._structure.leaves))))
        return twin

    def value(self, located: Located) -> Any:
        """A part of it, without the rest."""
        leaves = self._leaves(located.first, located.first + leaf_count(located.nest))
        value = nested_again(located.nest, iter(leaves))
        for key in located.inside:
            value = value[key]
        return value

    def _leaves(self, start: int, end: int) -> list[Any]:
        if all(self._structure.leaves[at] is None for at in range(start, end)):
            return [self._objects[at] for at in range(start, end)]
        views = self._views()
        return [self._objects[at] if at in self._objects else views[at] for at in range(start, end)]


@dataclass(frozen=True)
class Whole:
    """The same of a structure that was not known."""

    state_dict: dict[str, Any]


def inner_of(leaf: Any, outer: Outer) -> Any:
    """A DTensor's local tensor, if it is sharded as before."""
    if not isinstance(leaf, DTensor):
        raise Differs
    mesh, placements, shape, _ = outer
    if leaf.shape != shape or leaf.placements != placements or leaf.device_mesh != mesh:
        raise Differs
    return leaf._local_tensor
