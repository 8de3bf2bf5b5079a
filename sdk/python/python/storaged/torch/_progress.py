"""How far a load is: told to a hook of the caller's, or shown as a bar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger("storaged")

#: Is told how many bytes this rank has read, and of how many.
Hook = Callable[[int, int], None]
#: A hook hears of so many bytes at a time: some 50 ms.
EVERY_BYTES = 256 << 20

Part = tuple[int, int, int]


class Progress:
    """Tells a hook, if there is one; what goes wrong in it is logged and stops nothing."""

    def __init__(self, hook: Hook | None, total: int) -> None:
        self._hook = hook
        self._total = total
        self._done = 0
        self.add(0)

    def add(self, count: int) -> None:
        """So many bytes more. What is read again, from elsewhere, counts once."""
        self._done = min(self._done + count, self._total)
        if self._hook is None:
            return
        try:
            self._hook(self._done, self._total)
        except Exception:
            logger.exception("the hook for progress failed, it is not called any more in this load")
            self._hook = None

    def turns(self, parts: list[Part]) -> Iterator[list[Part]]:
        """Parts `(offset, address, bytes)` in turns after which a hook hears; all at once where none listens."""
        if self._hook is None:
            yield parts
            return
        turn: list[Part] = []
        room = EVERY_BYTES
        for offset, address, length in parts:
            at = 0
            while at < length:
                count = min(room, length - at)
                turn.append((offset + at, address + at, count))
                at, room = at + count, room - count
                if room == 0:
                    yield turn
                    turn, room = [], EVERY_BYTES
        yield turn


def progress_bar(text: str = "storaged: load") -> Hook:
    """A hook that draws a bar with tqdm; without tqdm one that does nothing. One bar per load."""
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        logger.info("no bar is drawn: tqdm is not installed")
        return lambda done, total: None
    bars: list[Any] = []

    def draw(done: int, total: int) -> None:
        if done == 0:
            bars[:] = [tqdm(total=total, desc=text, unit="B", unit_scale=True, unit_divisor=1024)]
        if bars:
            bars[0].update(done - bars[0].n)
            if done >= total:
                bars.pop().close()

    return draw
