"""Step fences: marks of where each optimizer update began and ended, which outlive the process, and what they say after a fault.

A rank's marks lie on its board (`steps`) in two cells that are written in turn, each with a number and a checksum: a process that is
killed while it writes one leaves the other. A mark names the process that wrote it, because only that process has the state.
"""

from __future__ import annotations

import enum
import logging
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .._board import Board, this_process
from .._deadline import Deadline
from .._session import Session
from ..errors import NoCheckpointError, StoragedError
from ._ranks import Ranks
from ._saving import FOLLOW_SECONDS

logger = logging.getLogger("storaged")

# Number of the mark, step, whether it is whole, process, how many ranks there were; and their checksum.
MARK = struct.Struct("<QQ?16sI")
CHECKSUM = struct.Struct("<I")
CELLS = (0, 64)
BOARD_BYTES = 4096
# The part of a load's time that its marks may take. A daemon that has just started asks its durable tier who owns the job, and that may hang.
MARKS_SHARE = 0.25


class Live(enum.Enum):
    """What a rank's process holds."""

    #: The state of a step, all of it.
    WHOLE = "whole"
    #: An update, or a load, that began and did not end.
    TORN = "torn"
    #: Nothing: the process that held it is gone.
    LOST = "lost"
    #: A share of another group's state: ranks that are not in this one held the rest.
    ELSEWHERE = "elsewhere"
    #: Nobody has marked anything.
    UNMARKED = "unmarked"


@dataclass(frozen=True)
class Verdict:
    """What a job should do after a fault; text says why.

    `action` is "recover-in-place" (every rank's process holds all of `step`: train on with what is in memory), "restore" (load `step`,
    the newest that can be restored) or "nothing" (neither: begin at the beginning). It is the same on all ranks.
    """

    action: str
    step: int | None
    reason: str

    def __str__(self) -> str:
        at = "" if self.step is None else f" step {self.step}"
        return f"{self.action}{at}: {self.reason}"


def judged(told: list[tuple[Live, int]], restorable: int | None) -> Verdict:
    """The verdict on what the ranks told, and the newest step that can be restored."""
    steps = {step for live, step in told if live is Live.WHOLE}
    if len(steps) == 1 and all(live is Live.WHOLE for live, _ in told):
        (step,) = steps
        return Verdict("recover-in-place", step, f"all of {len(told)} ranks hold it whole")
    words = {
        Live.TORN: "was in the middle of step {}",
        Live.LOST: "has lost its process, last at step {}",
        Live.ELSEWHERE: "marked step {} in a group of another size",
        Live.UNMARKED: "has marked no step",
        Live.WHOLE: "is at step {}",
    }
    apart = len(steps) > 1
    whys = [f"rank {rank} {words[live].format(step)}" for rank, (live, step) in enumerate(told) if live is not Live.WHOLE or apart]
    more = f" and {len(whys) - 5} more" if len(whys) > 5 else ""
    reason = ", ".join(whys[:5]) + more
    if restorable is None:
        return Verdict("nothing", None, f"{reason}; nothing was saved yet")
    return Verdict("restore", restorable, reason)


def agreed(ranks: Ranks, key: str, own: tuple[Live, int], newest: Callable[[], int | None], deadline: Deadline) -> Verdict:
    """The same verdict for every rank: rank 0 hears what all of them hold, and asks for the newest step if that is not enough."""
    what = "the verdict after a fault"
    if ranks.rank != 0:
        ranks.tell(f"{key}/{ranks.rank}", own)
        kind, value = ranks.hear_rank_zero([f"{key}/all"], what, deadline.later(FOLLOW_SECONDS))
    else:
        try:
            told = ranks.gather(key, own, what, deadline)
            first = judged(told, None)
            kind, value = "ok", first if first.action == "recover-in-place" else judged(told, newest())
        except StoragedError as error:
            kind, value = "failed", error
        ranks.tell(f"{key}/all", (kind, value))
        ranks.forget_later("verdicts", [f"{key}/{rank}" for rank in range(1, ranks.size)] + [f"{key}/all"])
    if kind == "failed":
        raise value
    verdict: Verdict = value
    return verdict


class Fence:
    """The marks of one rank. Marking costs microseconds and no request; a daemon that is not there leaves it out, and says so once."""

    def __init__(self, session: Session, rank: int, size: int, timeout: float) -> None:
        self._session, self._rank, self._size, self._timeout = session, rank, size, timeout
        self._board: Board | None = None
        self._is_off = False
        self._looks: threading.Thread | None = None
        #: A board that no other process would find any more.
        self._given_up: Board | None = None
        #: The marks did not come in time for a load, or a step could not be marked: what they say need not be so any more.
        self._is_unseen = False

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around what changes the weights. An exception leaves the step torn."""
        if self._board is not None and self._board.is_due() and not (self._looks is not None and self._looks.is_alive()):
            # A mark waits for nothing: another thread asks.
            self._looks = threading.Thread(target=self._look, args=(self._board,), name="storaged-steps", daemon=True)
            self._looks.start()
        self._mark(step, False)
        yield
        self._mark(step, True)

    @contextmanager
    def loading(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """Around a load; whoever loads puts its plan in. Until it has ended without an error there is no whole state."""
        before = self._last() or self._found(deadline)
        if before is None or before[3] != this_process():
            yield {}
            return
        self._mark(before[1], False, deadline)
        plan: dict[str, Any] = {}
        yield plan
        if plan:
            self._mark(plan["step"], True)
        elif before[2]:
            self._mark(before[1], True)

    def give(self, deadline: Deadline) -> None:
        """A state was loaded that the caller puts into memory, nobody sees when: there is no whole one until a step or a load has ended."""
        before = self._last() or self._found(deadline)
        if before is not None and before[3] == this_process():
            self._mark(before[1], False, deadline)

    def live(self, deadline: Deadline) -> tuple[Live, int]:
        """What this process holds, and of which step, by the rank's last mark. Marks that cannot be read are none."""
        if self._is_unseen:
            return Live.UNMARKED, 0
        try:
            board = self._board or Board(self._session, self._rank, "steps", 0, deadline)
        except StoragedError as error:
            if not isinstance(error, NoCheckpointError):
                logger.warning("the marks of steps cannot be read: %s", error)
            return Live.UNMARKED, 0
        last = last_mark(board.view)
        if last is None:
            return Live.UNMARKED, 0
        _, step, is_whole, process, size = last
        if process != this_process():
            return Live.LOST, step
        if size != self._size:
            return Live.ELSEWHERE, step
        return (Live.WHOLE if is_whole else Live.TORN), step

    def _found(self, deadline: Deadline) -> tuple[int, int, bool, bytes, int] | None:
        """The last mark of the rank, made by an earlier checkpointer perhaps. The load itself needs most of the time, to say what it meets."""
        limit = Deadline(deadline.left() * MARKS_SHARE)
        self._is_unseen = False
        try:
            return last_mark(Board(self._session, self._rank, "steps", 0, limit).view)
        except NoCheckpointError:
            return None
        except StoragedError:
            self._is_unseen = True
            return None

    def _last(self) -> tuple[int, int, bool, bytes, int] | None:
        return None if self._board is None else last_mark(self._board.view)

    def _mark(self, step: int, is_whole: bool, deadline: Deadline | None = None) -> None:
        if self._board is not None and self._board is self._given_up:
            logger.info("the daemon has given up the marks of rank %d in %r: marking on a new board", self._rank, self._session.namespace)
            self._board = self._given_up = None
        if self._board is None and not self._open(deadline):
            self._is_unseen = True
            return
        assert self._board is not None
        last = self._last()
        number = last[0] + 1 if last is not None else 1
        mark = MARK.pack(number, step, is_whole, this_process(), self._size)
        at = CELLS[number % 2]
        self._board.view[at : at + MARK.size + CHECKSUM.size] = mark + CHECKSUM.pack(zlib.crc32(mark))
        if is_whole:
            self._is_unseen = False

    def _look(self, board: Board) -> None:
        if not board.is_kept(lambda view: last_mark(view) is not None):
            self._given_up = board

    def _open(self, deadline: Deadline | None) -> bool:
        if self._is_off:
            return False
        try:
            self._board = Board(self._session, self._rank, "steps", BOARD_BYTES, deadline or Deadline(self._timeout))
        except StoragedError as error:
            self._is_off = True
            logger.warning("steps are not marked, so that no state in memory will be used again after a fault: %s", error)
            return False
        return True


def last_mark(view: memoryview) -> tuple[int, int, bool, bytes, int] | None:
    """The later one of the two cells that is whole: its number, step, whether the step is whole, and its process."""
    found = []
    for at in CELLS:
        cell = bytes(view[at : at + MARK.size + CHECKSUM.size])
        mark = cell[: MARK.size]
        if CHECKSUM.unpack_from(cell, MARK.size)[0] == zlib.crc32(mark) and any(mark):
            found.append(MARK.unpack(mark))
    return max(found, default=None)
