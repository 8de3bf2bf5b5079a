"""A save that goes on while Megatron-Core's queue looks now and then whether it has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from .._busy import Awaited, Work
from ..errors import CheckpointSaveError, StoragedError
from ..torch import Checkpointer
from ..torch._saving import said


class Begun:
    """A save of a step: staged, or failed, which `finish` says.

    The queue runs a function in a process that it forks or spawns, and takes the save for ended when that function returns. Nothing
    is saved there, where this process's connections and slots must not be used: the function waits until the save has ended here.
    """

    def __init__(self, checkpointer: Checkpointer, step: int, state: Callable[[], dict[str, Any]]) -> None:
        self._step = step
        self._saved: Future[None]
        try:
            handle = checkpointer.save(step, state, background=False)
            assert handle is not None and handle.saved is not None
            self._saved = handle.saved
        except StoragedError as error:
            # Not here: the other ranks would wait in the collectives that come.
            self._saved = Future()
            self._saved.set_exception(error)
        work = Work()
        #: What `storaged._busy.wait_for` takes, in another process.
        self.awaited: Awaited = work.awaited
        self._saved.add_done_callback(lambda _: work.end())

    def finish(self) -> None:
        """Waits for its end, within the save's deadline, and raises on every rank if it failed on one. A collective."""
        error = self._saved.exception()
        if error is None or isinstance(error, CheckpointSaveError):
            own = None if error is None else str(error)
        else:
            own = f"step {self._step} was not saved: {said(error)}"
        failures = of_all_ranks(own)
        if failures:
            raise CheckpointSaveError("; ".join(failures), self._step) from error


def of_all_ranks(own: str | None) -> list[str]:
    """What ranks have to say, each text once. A collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return list(dict.fromkeys(text for text in told if text is not None))[:5]
