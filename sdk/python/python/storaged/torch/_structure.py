"""What a state dict looks like, learned from its first save: later saves of the same structure only compare and copy.

A structure holds what staging worked out once: the nesting with its keys, what each leaf must be, where each tensor lies
in the shard, and for each slot the views of it. A state dict of another structure, or with leaves that need more than a
copy (wrappers, shards that describe themselves), goes the long way, in `_arena`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ._metadata import Place
from ._tensors import PLAIN_TYPES, DTensor, lies_in_order

#: Values that nobody can change: a staged twin holds the same object.
IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
#: Slots whose views are kept: as many as stay mapped.
SLOTS_MAX = 4

Record = tuple[int, int, int, int]
#: A DTensor's mesh, placements, shape and strides.
Outer = tuple[Any, Any, torch.Size, tuple[int, ...]]


class Differs(Exception):
    """The state dict is not of the structure."""


@dataclass(frozen=True)
class Nest:
    """A dict (with its keys) or a list or tuple, and what lies in it; None stands for a leaf."""

    kind: type
    keys: tuple[Any, ...]
    inner: tuple[Nest | None, ...]


def nest_of(value: Any) -> Nest | None:
    if isinstance(value, dict):
        return Nest(dict, tuple(value), tuple(map(nest_of, value.values())))
    if type(value) in (list, tuple):
        return Nest(type(value), (), tuple(map(nest_of, value)))
    return None


def gather(value: Any, nest: Nest | None, out: list[Any]) -> None:
    """Appends the leaves of a value of that nesting, in order."""
    if nest is None:
        out.append(value)
        return
    if nest.kind is dict:
        if not isinstance(value, dict) or tuple(value) != nest.keys:
            raise Differs
        items: Any = value.values()
    else:
        if not isinstance(value, (list, tuple)) or type(value) is not nest.kind or len(value) != len(nest.inner):
            raise Differs
        items = value
    for inner, item in zip(nest.inner, items):
        if inner is None:
            out.append(item)
        else:
            gather(item, inner, out)


def nested_again(nest: Nest, leaves: Any) -> Any:
    """The same nesting around leaves, which an iterator gives in order."""
    inner = [next(leaves) if one is None else nested_again(one, leaves) for one in nest.inner]
    return dict(zip(nest.keys, inner)) if nest.kind is dict else nest.kind(inner)


@dataclass(frozen=True)
class Leaf:
    """One tensor leaf: what it must be like, and which of the shard's tensors it is."""

    index: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    #: Whether a copy of its memory is a copy of it.
    in_order: bool
    #: None for a plain tensor.
    outer: Outer | None


def leaf_of(index: int, tensor: torch.Tensor) -> Leaf | None:
    """None if it needs more than a copy of its elements."""
    outer = None
    if isinstance(tensor, DTensor):
        outer = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        tensor = tensor._local_tensor
    if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    return Leaf(index, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, lies_in_order(tensor), outer)


@dataclass(eq=False)
class Structure:
    """Of one shard's tensors and everything around them."""

    nest: Nest
    #: By leaf, in order; None for what is not a tensor.
    leaves: list[Leaf | None]
    #: By leaf; for what is said of those that are not tensors.
    names: list[str]
    specs: tuple[Any, ...]
    records: list[Record]
    frames: list[tuple[int, bytes]]
    end: int
    spare: int
    places: dict[tuple[int, int], Place]
    #: By type and shape: where tensors without elements are described.
    empties: dict[Any, Place]
    #: By the slot's address: the staged twin's tensor, for every leaf.
    views: dict[int, list[Any]] = field(default_factory=dict)

    def leaves_of(self, resolved: dict[str, Any]) -> list[Any]:
        """The leaves of a state dict; raises `Differs` if its nesting is another."""
        found: list[Any] = []
        gather(resolved, self.nest, found)
        return found

    def parts(self, leaves: list[Any]) -> tuple[list[tuple[int, int, int]], list[tuple[int, torch.Tensor]]]:
        """What is to be copied, each tensor once: `(address, offset in the slot, bytes)`, and which leaves elementwise.

        Raises `Differs` if a leaf is not what it was.
        """
        parts: list[tuple[int, int, int]] = []
        elementwise: list[tuple[int, torch.Tensor]] = []
        address_of: dict[int, int] = {}
        records = self.records
        for at, (leaf, expected) in enumerate(zip(leaves, self.leaves)):
            if expected is None:
                if isinstance(leaf, (torch.Tensor, dict)) or type(leaf) in (list, tuple):
                    raise Differs
                continue
            local = leaf if expected.outer is None else inner_of(leaf, expected.outer)
            if type(local) not in PLAIN_TYPES or local.dtype is not expected.dtype or local.shape != expected.shape:
                raise Differs
            if local.stride() != expected.stride or local.device != expected.device or local.is_conj() or local.is_neg():
                raise Differs
            _, _, offset, nbytes = records[expected.index]
            if nbytes == 0:
                continue
            address = local.data_ptr()
            known = address_of.get(expected.index)
            if known is not None:
                if known != address:
                    raise Differs  # tied before, and not any more
                continue
            address_of[expected.index] = address
            # Memory that was freed: the long way says so by name.
            if address == 0:
                raise Differs
            if not expected.in_order:
                elementwise.append((at, local))
                continue
            if local.untyped_storage().nbytes() < local.storage_offset() * local.itemsize + nbytes:
                raise Differs
            parts.append((address, offset, nbytes))
        return parts, elementwise

    def staged(self, views: list[Any], leaves: list[Any], copied: Callable[[int, Any], Any]) -> dict[str, Any]:
        """The staged twin: views of the slot, and the other leaves of this save."""
        twins = (
            (leaf if type(leaf) in IMMUTABLE else copied(at, leaf)) if expected is None else views[at]
            for at, (leaf, expected) in enumerate(zip(leaves, self.leaves))
        )
        twin: dict[str, Any] = nested_again(self.nest, twins)
        return twin

    def views_at(self, address: int, make: Callable[[], list[Any]]) -> list[Any]:
        """The slot's views, made once."""
        if address not in self.views:
            if len(self.views) >= SLOTS_MAX:
                self.views.clear()
            self.views[address] = make()
        return self.views[address]


def inner_of(leaf: Any, outer: Outer) -> Any:
    """A DTensor's local tensor, if it is sharded as before."""
    if not isinstance(leaf, DTensor):
        raise Differs
    mesh, placements, shape, _ = outer
    if leaf.shape != shape or leaf.placements != placements or leaf.device_mesh != mesh:
        raise Differs
    return leaf._local_tensor
