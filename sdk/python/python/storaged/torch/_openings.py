"""Shards that are opened ahead, in another thread: each is fetched or decoded while the one before it is read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any

logger = logging.getLogger("storaged")

#: A shard that is not in own RAM takes a slot of the daemon's memory while it is open: one is read, and one is on its way.
OPEN_AT_ONCE = 2
#: What the daemon rounds slots up to.
SLOT_GRAIN_BYTES = 2 << 20

#: What the thread is told: that the next shard is waited for, the rank of one that was read, or that there is nothing more to do.
WANTED, ENDED = object(), object()


@dataclass(frozen=True)
class Prospect:
    """What a daemon says before shards are opened through it."""

    status: dict[str, Any]

    def holds(self, source: str) -> bool:
        """Whether a shard with this source in the plan lies in the daemon's own RAM: it is open at once, and takes no slot."""
        return source == f"ram of {self.status['node']}"

    def has_room(self, ranks: int, each: int, longest: int) -> bool:
        """Whether all ranks of the node can have so many shards open at once. If they can, what one opens ahead is never what another
        one lacks, and the daemon drops nothing older for it. What it keeps for other tenants it does not say.
        """
        memory = self.status["memory"]
        free = memory["budget"] - memory["used"]
        for own in memory["tenants"]:
            if own["most"] is not None:
                free = min(free, own["most"] - own["used"])
        slot = -(-max(longest, 1) // SLOT_GRAIN_BYTES) * SLOT_GRAIN_BYTES
        return bool(ranks * each * slot <= free)


class Ahead:
    """Opens shards in their order on a connection of its own, and one that is waited for before the one after it.

    What fails ahead of its turn may do well in it, when the shard before is closed: the caller opens it, and all after it, in turn. So
    nothing fails that would not have failed then.
    """

    def __init__(self, client: Any, open_shard: Callable[[Any, int], Any], close_shard: Callable[[Any, int], None], ranks: Sequence[int]) -> None:
        self._client = client
        self._open_shard = open_shard
        self._close_shard = close_shard
        self._ranks = ranks
        self._orders: SimpleQueue[Any] = SimpleQueue()
        self._shards: SimpleQueue[Any] = SimpleQueue()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name="storaged-open-ahead", daemon=True)

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The thread ends, and nothing that it opened stays open."""
        self._orders.put(ENDED)
        try:
            # Who reads no more waits for no shard.
            if kind is None:
                self._thread.join()
        finally:
            self._client.hang_up()
            self._thread.join()
            # A traceback would keep them, and their memory.
            while not self._shards.empty():
                self._shards.get()

    def taken(self) -> Any:
        """The next shard; None from the first on that has to be opened in turn."""
        if self._is_over:
            return None
        self._orders.put(WANTED)
        shard = self._shards.get()
        self._is_over = shard is None
        return shard

    def read(self, rank: int) -> None:
        """A shard that was taken is not needed any more."""
        self._orders.put(rank)

    def _work(self) -> None:
        try:
            for rank in self._ranks:
                if not self._opens(rank):
                    break
                if not self._serve():
                    return
            # Whoever waits hears of it when what was read before is closed.
            while self._serve():
                self._shards.put(None)
        finally:
            self._shards.put(None)

    def _opens(self, rank: int) -> bool:
        try:
            self._shards.put(self._open_shard(self._client, rank))
        except BaseException as error:
            logger.debug("the shard of rank %s could not be opened ahead, it is opened in turn: %s", rank, error)
            return False
        return True

    def _serve(self) -> bool:
        """Closes what was read until a shard is waited for; false if none will be."""
        while (order := self._orders.get()) is not WANTED:
            if order is ENDED:
                return False
            self._close_shard(self._client, order)
        return True
