"""Whether thousands of tensors are still like those that were learned, and where they lie now.

What a tensor is like is compared property by property, each a list of all tensors: a few calls of C, where a loop in Python would
make ten of its own for each tensor. Nothing is taken from the last save but what the tensors must be like: a tensor keeps its
identity while its memory, type or shape is exchanged (`.data`, `set_`, `resize_`), so every one of them is asked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, ge
from typing import Any

import torch

from ._tensors import PLAIN_TYPES

#: A call of C over so many tensors keeps other threads from the interpreter for half a millisecond.
BLOCK = 2048

PLAIN = frozenset(PLAIN_TYPES)
#: What must be as it was.
PROPERTIES: tuple[Callable[[torch.Tensor], Any], ...] = (
    attrgetter("dtype"),
    attrgetter("device"),
    torch.Tensor.size,
    torch.Tensor.stride,
)


class Differs(Exception):
    """The state dict is not of the structure."""


class Columns:
    """What tensors must be like: as they were when this was made of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._blocks = [_Block(tensors[at : at + BLOCK]) for at in range(0, len(tensors), BLOCK)]

    def addresses(self, tensors: Sequence[torch.Tensor], held: list[Any] | None = None) -> list[int]:
        """Where each of as many tensors begins; raises `Differs` if one is not what it was, or has not all of its memory.

        `held` gets what keeps the memory behind the addresses.
        """
        found: list[int] = []
        try:
            for number, block in enumerate(self._blocks):
                found += block.addresses(tensors[number * BLOCK : (number + 1) * BLOCK], held)
        except RuntimeError:
            # Of a tensor that has no strides or no storage. The long way says so by name.
            raise Differs from None
        return found


class _Block:
    """Up to `BLOCK` of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._properties = [list(map(of, tensors)) for of in PROPERTIES]
        self._offsets: list[Any] = list(map(torch.Tensor.storage_offset, tensors))
        self._item_bytes = [tensor.element_size() for tensor in tensors]
        #: Elements from a tensor's first to its last, in memory.
        self._reaches = list(map(_reach, tensors))
        self._needed = self._needed_at(self._offsets)
        self._complex = [at for at, tensor in enumerate(tensors) if tensor.is_complex()]

    def addresses(self, tensors: Sequence[torch.Tensor], held: list[Any] | None) -> list[int]:
        if not PLAIN.issuperset(map(type, tensors)):
            raise Differs
        for of, expected in zip(PROPERTIES, self._properties):
            if list(map(of, tensors)) != expected:
                raise Differs
        # Their memory would not be their value.
        if any(map(torch.Tensor.is_neg, tensors)) or any(tensors[at].is_conj() for at in self._complex):
            raise Differs
        offsets: list[Any] = list(map(torch.Tensor.storage_offset, tensors))
        needed = self._needed if offsets == self._offsets else self._needed_at(offsets)
        storages: Iterable[torch.UntypedStorage] = map(torch.Tensor.untyped_storage, tensors)
        if held is not None:
            storages = list(storages)
            held += storages
        if not all(map(ge, map(torch.UntypedStorage.nbytes, storages), needed)):
            raise Differs  # freed, or a part of it
        return list(map(torch.Tensor.data_ptr, tensors))

    def _needed_at(self, offsets: list[int]) -> list[int]:
        """Bytes that each tensor's storage must have."""
        rows = zip(offsets, self._reaches, self._item_bytes)
        return [(offset + reach) * nbytes if reach else 0 for offset, reach, nbytes in rows]


def _reach(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
