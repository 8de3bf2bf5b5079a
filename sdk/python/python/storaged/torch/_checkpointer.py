"""The plain way to save and load: one object, ordinary exceptions."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from .._session import Session
from ..errors import CheckpointLoadError, CheckpointSaveError, NoCheckpointError, StoragedError
from ._ranks import distributed, from_rank_zero
from ._reader import StoragedLoadPlanner, StoragedReader
from ._writer import SaveHandle, StoragedWriter


class Checkpointer:
    """Saves in the background, one save at a time. A failed save is raised once, by the next call."""

    def __init__(
        self,
        namespace: str | None = None,
        *,
        process_group: Any = None,
        durable: str = "policy",
        timeout: float = 120.0,
        session: Session | None = None,
    ) -> None:
        self.session = session or Session.shared(namespace)
        self.durable = durable
        self.timeout = timeout
        # Saves run their collectives in a thread: they need a group that training does not use.
        self.process_group = process_group
        if process_group is None and distributed():
            self.process_group = dist.new_group(backend="gloo")
        self._last: tuple[int, SaveHandle, Future[Any] | None] | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def save(self, step: int, state_dict: dict[str, Any]) -> SaveHandle:
        """Returns when every tensor is staged: parameters may change again."""
        self.wait()
        writer = StoragedWriter(
            step, session=self.session, durable=self.durable, timeout=self.timeout, process_group=self.process_group
        )
        try:
            if distributed():
                result: Any = dcp.async_save(state_dict, storage_writer=writer, process_group=self.process_group)
                # Recent versions answer with two futures; only this one tells of a failure.
                self._last = (step, writer.handle, getattr(result, "upload_completion", result))
            else:
                dcp.save(state_dict, storage_writer=writer, no_dist=True)
                self._last = (step, writer.handle, None)
        except CheckpointException as error:
            raise CheckpointSaveError(f"step {step} was not saved: {error}") from error
        return writer.handle

    def load(self, state_dict: dict[str, Any], step: int | None = None) -> dict[str, Any] | None:
        """Fills the state dict; the plan that was followed, or None if nothing was saved yet."""
        reader = StoragedReader(step, session=self.session, process_group=self.process_group)
        try:
            plan = reader.resolve()
        except NoCheckpointError:
            if step is None:
                return None
            raise
        try:
            dcp.load(
                state_dict,
                storage_reader=reader,
                planner=StoragedLoadPlanner(),
                process_group=self.process_group,
                no_dist=not distributed(),
            )
        except CheckpointException as error:
            raise CheckpointLoadError(f"step {reader.step} was not loaded: {error}") from error
        return plan

    def latest_step(self) -> int | None:
        """The newest restorable step. A collective."""
        limit = self.session.timeout_ms
        try:
            return from_rank_zero(lambda: self.session.client().plan(None, limit)["step"], self.process_group)
        except NoCheckpointError:
            return None

    def wait(self, until: str = "committed", timeout: float | None = None) -> None:
        """Waits for the last save, and raises what went wrong with it, once."""
        last, self._last = self._last, None
        if last is None:
            return
        step, handle, future = last
        limit = self.timeout if timeout is None else timeout
        try:
            if future is not None:
                future.result(limit)
            handle.wait(until, limit)
        except (CheckpointException, StoragedError, TimeoutError) as error:
            raise CheckpointSaveError(f"step {step} did not become {until}: {error}") from error

    def close(self) -> None:
        """Waits for the last save."""
        self.wait()
