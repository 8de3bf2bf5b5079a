"""Verified bytes on their way to GPUs: through page-locked blocks, one of which is read into while the other is copied to its device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from ._behind import ALIGNMENT, BLOCK_BYTES
from ._devices import Pair, behind, beside, copy_async, now_on, pinned_blocks

#: Fills memory with bytes of a shard: `(offset, address, bytes)` of each part.
Read = Callable[[list[tuple[int, int, int]]], None]


@dataclass(frozen=True, eq=False)
class Rows:
    """Whole rows of a saved tensor, which are contiguous in a shard, and the tensor on a GPU that wants a part of each."""

    #: What they are read for.
    item: ReadItem
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    #: By dimension from the second on, where the part begins and how long it is.
    inner: list[tuple[int, int]]
    target: torch.Tensor

    @property
    def count(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return self.shape[1:].numel() * self.dtype.itemsize

    def wanted(self, block: torch.Tensor, first: int, count: int) -> Pair:
        """Where some of the rows go on the device, and what of them in a block's bytes."""
        if not self.shape:
            return self.target, block.view(self.dtype).view(())
        rows = block.view(self.dtype).view(count, *self.shape[1:])
        for dim, (start, extent) in enumerate(self.inner, 1):
            rows = rows.narrow(dim, start, extent)
        return self.target.narrow(0, first, count), rows


#: Some rows: which, the first, how many, and where they lie in a block.
Turn = list[tuple[Rows, int, int, int]]


def land(device: int, wanted: list[Rows], read: Read) -> list[Rows]:
    """Reads rows onto the device; when it returns they are there.

    What comes back was not read: a row of it is larger than a block, or no memory could be page-locked.
    """
    fitting = [rows for rows in wanted if rows.row_bytes <= BLOCK_BYTES]
    room = min(sum(rows.count * rows.row_bytes + ALIGNMENT for rows in fitting), BLOCK_BYTES)
    blocks = pinned_blocks(device, room) if fitting else None
    if blocks is None:
        return wanted
    with beside(device, now_on(device)) as stream:
        # The block that was given to the device first is the first to be free again.
        given: deque[tuple[Any, torch.Tensor]] = deque()
        try:
            for turn in _turns(fitting, room):
                if blocks:
                    block = blocks.pop()
                else:
                    event, block = given.popleft()
                    event.synchronize()
                read([(rows.offset + first * rows.row_bytes, block.data_ptr() + at, count * rows.row_bytes) for rows, first, count, at in turn])
                _copy([rows.wanted(block[at : at + count * rows.row_bytes], first, count) for rows, first, count, at in turn])
                given.append((behind(stream), block))
        finally:
            behind(stream).synchronize()
    return [rows for rows in wanted if rows.row_bytes > BLOCK_BYTES]


def _turns(wanted: list[Rows], room: int) -> Iterator[Turn]:
    """As many rows as a block holds, in the shard's order."""
    turn: Turn = []
    used = 0
    for rows in sorted(wanted, key=lambda rows: rows.offset):
        first = 0
        while first < rows.count:
            count = min((room - used) // rows.row_bytes, rows.count - first)
            if count <= 0:
                yield turn
                turn, used = [], 0
                continue
            turn.append((rows, first, count, used))
            first, used = first + count, -(-(used + count * rows.row_bytes) // ALIGNMENT) * ALIGNMENT
    if turn:
        yield turn


def _copy(pairs: list[Pair]) -> None:
    """From a block to the device, on the current stream."""
    as_they_are = [(into, rows) for into, rows in pairs if into.dtype == rows.dtype and rows.is_contiguous()]
    copy_async(as_they_are)
    for into, rows in pairs:
        if into.dtype != rows.dtype or not rows.is_contiguous():
            # It is gathered or converted first, into memory that is not page-locked.
            into.copy_(rows)
