"""What is done ahead of a save: slots that are made and mapped in the background, and the last save when a job is ended."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from .._deadline import Deadline
from .._session import Session
from ..errors import StoragedError
from ._arena import Shard, prepare_state_dict
from ._ranks import Ranks
from ._writer import StoragedWriter

logger = logging.getLogger("storaged")

#: One slot is filled while the other is encoded.
SLOTS = 2


def make_slots(writer: StoragedWriter, state_dict: dict[str, Any], deadline: Deadline) -> int:
    """Makes the slots that saves of this state dict take in turn, with frames and views in them; their bytes together."""
    made: list[Shard] = []
    try:
        for _ in range(SLOTS):
            shard = writer.new_shard(deadline)
            made.append(shard)
            prepare_state_dict(shard, state_dict)
    except StoragedError as error:
        # One slot is enough to begin with, and a save says itself what it lacks.
        logger.info("slots could not be made ahead: %s", error)
        writer.forget_if_broken(error)
        return 0
    finally:
        for shard in made:
            writer.give_up(shard)
    slots = [shard.slot for shard in made if shard.slot is not None]
    # Once they have been given back: a save that does not wait may take them meanwhile.
    for slot in slots:
        slot.get_ready()
    return sum(slot.capacity for slot in slots)


class Termination:
    """SIGTERM on any rank, and the step at which all ranks stop: agreed through the store, looked up once per step."""

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self._ranks = ranks
        # No Event: its lock is held while it is set, and a second SIGTERM is handled in the midst of the first. Slurm sends one to each
        # rank, and torchrun another one a millisecond later.
        self._signalled = False
        self._told = False
        self._last: int | None = None
        self._before: Any = None

    def listen(self) -> None:
        """From now on SIGTERM ends nothing at once. In the main thread."""
        self._before = signal.signal(signal.SIGTERM, self._hear)

    def restore(self) -> None:
        """SIGTERM does again what it did."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    @property
    def came(self) -> bool:
        """Whether this rank got the signal."""
        return self._signalled

    def _hear(self, *_: Any) -> None:
        self._signalled = True

    def is_last(self, step: int) -> bool:
        """Whether all ranks stop after this step. Every rank asks after every step."""
        if self._last is None:
            self._last = self._agreed(step)
        return self._last is not None and step >= self._last

    def _agreed(self, step: int) -> int | None:
        if self._ranks.size == 1:
            return step if self.came else None
        if self.came and not self._told:
            self._told = True
            self._ranks.tell("terminated", self._ranks.rank)
        if self._ranks.rank != 0:
            return int(self._ranks.value("last step")) if self._ranks.heard("last step") else None
        if not self._ranks.heard("terminated"):
            return None
        # Ranks train in step: when rank 0 has ended this step, nobody has ended the one after the next.
        self._ranks.tell("last step", step + 2)
        return step + 2
