"""A board: memory of this node's daemon that a process writes at any time, and that the next process of the rank finds again.

Writing needs no request, so a writer does not notice that the daemon has given the board up, with its job that nobody seemed to use, or with
itself: it looks now and then (`is_kept`), and makes another. A process that is killed may leave anything half written, and one that hangs may write on beside its
successor: whoever reads checks what it reads.
"""

from __future__ import annotations

import ctypes
import os
import time
import uuid
from collections.abc import Callable

from ._deadline import Deadline
from ._session import Session
from .errors import NoCheckpointError, StoragedError

#: How often a writer looks whether its board is still the job's, and how long that may take, in seconds.
LOOK_EVERY, LOOK_SECONDS = 60.0, 2.0

_identity: tuple[int, bytes] = (0, b"")


def this_process() -> bytes:
    """16 bytes that no other process has, nor a forked child."""
    global _identity
    if _identity[0] != os.getpid():
        _identity = (os.getpid(), uuid.uuid4().bytes)
    return _identity[1]


def own_rank(rank: int | None = None) -> int:
    """The rank that was named, or else that of the process group, or RANK, or 0."""
    if rank is not None:
        return rank
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    named = os.environ.get("RANK", "")
    return int(named) if named.isdecimal() else 0


class Board:
    """One rank's board of one kind, mapped. `view` is all of it, `capacity` bytes; it may be more than was asked for.

    `nbytes` of 0 maps the one that is there, and raises `NoCheckpointError` if there is none. A board that is too small is
    replaced by an empty one. Raises what any request does: `DaemonUnavailable`, `ArenaTooSmall` if the budget is full, `AccessDenied`.
    """

    def __init__(self, session: Session, rank: int, kind: str, nbytes: int, deadline: Deadline | None = None) -> None:
        limit = deadline or session.deadline()
        native = session.connect(limit).board(rank, kind, nbytes, limit.left_ms())
        self.capacity = native.capacity
        self._asked = (session, rank, kind)
        self._looked = time.monotonic()
        memory = (ctypes.c_char * native.capacity).from_address(native.address)
        setattr(memory, "board", native)  # noqa: B010, views keep this object, which keeps the mapping
        self.view = memoryview(memory).cast("B")

    def is_due(self) -> bool:
        """Whether to look again."""
        return time.monotonic() - self._looked >= LOOK_EVERY

    def is_kept(self, is_own: Callable[[memoryview], bool]) -> bool:
        """Whether a process that began now would find this board, by what its own writer has put on it. A daemon that does not answer in
        time has it still."""
        try:
            there = Board(*self._asked, 0, Deadline(LOOK_SECONDS))
        except NoCheckpointError:
            return False
        except StoragedError:
            return True
        finally:
            self._looked = time.monotonic()
        return is_own(there.view)
