"""Copies into a slot of tensors that are no plain CPU memory in order: from GPUs on side streams, behind what these were doing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ._devices import Pair, behind, beside, bytes_of, copy_async, device_of, in_order, is_in_order, now_on, pinned_blocks
from ._pinned import Pinned

#: Page-locked memory that tensors go through where a slot is not page-locked, twice: while one is filled, the other is emptied.
BLOCK_BYTES = 64 << 20
#: Pieces in a block begin where vectors of any type may.
ALIGNMENT = 64

#: A place in a slot and what is copied there, both byte for byte, and where in a block it passes.
Piece = tuple[torch.Tensor, torch.Tensor, int]


class Behind:
    """Copies, in any thread and at any time, what the tensors hold when this is made.

    A thread has current streams of its own, so the copies must be told what they wait for: an event on the current stream of each
    device, recorded here. They take a side stream, so that what the trainer gives its own streams meanwhile does not wait for them.
    The caller keeps the tensors until the copies have ended: memory that is given up before is another tensor's at once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        devices = {device_of(tensor) for tensor in tensors}
        self._marks: dict[int, Any] = {device: now_on(device) for device in devices if device is not None}

    @contextmanager
    def copying(self, pairs: list[Pair], pin: Callable[[int], Pinned | None]) -> Iterator[None]:
        """Copies, from GPUs beside what the block does; when it is left every byte is in, or nothing is under way any more.

        `pin` page-locks the slot. Where that cannot be, tensors go through blocks, when the block has ended.
        """
        with ExitStack() as waits:
            # What is page-locked stays so, and so mapped, until it is full.
            held: list[Pinned] = []
            unpinned: list[int] = []
            for device, mark in self._marks.items():
                pinned = pin(device)
                if pinned is None:
                    unpinned.append(device)
                    continue
                held.append(pinned)
                _start(device, mark, of_device(pairs, device), waits)
            yield
            for view, tensor in of_device(pairs, None):
                view.copy_(tensor.detach())
            for device in unpinned:
                _through_blocks(device, self._marks[device], of_device(pairs, device))


def of_device(pairs: list[Pair], device: int | None) -> list[Pair]:
    return [pair for pair in pairs if device_of(pair[1]) == device]


def _start(device: int, mark: Any, pairs: list[Pair], waits: ExitStack) -> None:
    """Gives the device all of its copies into page-locked memory. `waits` waits for them, also for those before a failure."""
    with beside(device, mark) as stream:
        try:
            copy_async(pair for pair in pairs if is_in_order(pair[1]))
            for view, tensor in pairs:
                if not is_in_order(tensor):
                    copy_async([(view, in_order(tensor))])
        finally:
            waits.callback(behind(stream).synchronize)


def _through_blocks(device: int, mark: Any, pairs: list[Pair]) -> None:
    """Copies through page-locked blocks: while one is filled, the other is emptied. Without any the driver does it, one by one."""
    blocks = pinned_blocks(device, min(sum(view.nbytes + ALIGNMENT for view, _ in pairs), BLOCK_BYTES))
    with beside(device, mark) as stream:
        try:
            if blocks is None:
                for view, tensor in pairs:
                    view.copy_(in_order(tensor))
                return
            filled: deque[tuple[Any, torch.Tensor, list[Piece]]] = deque()
            for turn in _turns(pairs, blocks[0].nbytes):
                block = blocks.pop() if blocks else _emptied(*filled.popleft())
                copy_async((block[at : at + source.nbytes], source) for _, source, at in turn)
                filled.append((behind(stream), block, turn))
            while filled:
                _emptied(*filled.popleft())
        finally:
            behind(stream).synchronize()


def _turns(pairs: list[Pair], room: int) -> Iterator[list[Piece]]:
    """Cuts tensors into pieces that fill a block, one turn after the other."""
    turn: list[Piece] = []
    used = 0
    for view, tensor in pairs:
        into, source = bytes_of(view), bytes_of(in_order(tensor))
        at = 0
        while at < into.nbytes:
            count = min(room - used, into.nbytes - at)
            turn.append((into[at : at + count], source[at : at + count], used))
            at, used = at + count, -(-(used + count) // ALIGNMENT) * ALIGNMENT
            if used >= room:
                yield turn
                turn, used = [], 0
    if turn:
        yield turn


def _emptied(full: Any, block: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
    """The block, once its pieces are where they belong."""
    full.synchronize()
    for into, _, at in pieces:
        into.copy_(block[at : at + into.nbytes])
    return block
