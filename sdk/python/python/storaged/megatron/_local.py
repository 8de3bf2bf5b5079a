"""Megatron's local checkpoints, which nvidia_resiliency_ext writes to each node's own disk: in the daemons' RAM instead."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .._busy import wait_for
from .._session import Session
from ..errors import CheckpointLoadError, NoCheckpointError
from ..torch import Checkpointer, StoragedReader
from ..torch._alone import load_alone, only_cause
from ..torch._objects import check_loadable, load_plain, saved_by_torch
from ..torch._reader import StoragedLoadPlanner
from ..torch._saving import said
from ._saves import Begun, of_all_ranks

if TYPE_CHECKING:
    AsyncRequest: Any
    CheckpointingException: Any

    class BaseCheckpointManager:
        session_id: str
        latest_iteration: int
        rank: int

        def __init__(self, session_id: str) -> None: ...
        def _ckpt_id(self, iteration: int) -> tuple[int, int, Any]: ...

else:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import BaseCheckpointManager, CheckpointingException

logger = logging.getLogger("storaged")

SUFFIX = ".local"
TENSORS, AROUND = "tensors", "around"


class LocalCheckpointManager(BaseCheckpointManager):
    """Keeps each rank's `TensorAwareStateDict` as its part of a checkpoint, in the namespace `NAMESPACE.local`.

    As with nvidia_resiliency_ext's, a checkpoint is loaded by as many ranks as have saved it, each its own part. What is around the tensors is
    pickled, so `trust_pickle=True` is needed; without it saves are refused. Settings are those of `Checkpointer`.
    """

    def __init__(self, namespace: str | None = None, *, trust_pickle: bool = False, **settings: Any) -> None:
        # The steps of these are no steps of the job's other checkpoints.
        name = Session.shared(namespace).namespace + SUFFIX
        super().__init__(session_id=name)
        self._trust = trust_pickle
        self._settings = {"on_error": "warn", "busy": "wait", "background": False, "trust_pickle": trust_pickle, **settings}
        self._checkpointer = Checkpointer(name, **self._settings)
        self._found: StoragedReader | None = None

    @property
    def local_ckpt_dir(self) -> str:
        """What Megatron-LM prints."""
        return f"storaged://{self.session_id}"

    def save(self, state_dict: Any, iteration: int, is_async: bool = False) -> Any:
        """Returns when this rank's tensors are staged, with the request to be scheduled, or without `is_async` when all ranks' are committed."""
        begun = self._begin(state_dict, iteration)
        if is_async:
            return AsyncRequest(wait_for, begun.awaited, [begun.finish])
        begun.finish()
        return None

    def find_latest(self) -> int:
        """The newest iteration that can be restored, -1 if there is none, or it was saved by another number of ranks. Every rank calls it."""
        if self.latest_iteration != -1:
            return self.latest_iteration
        reader = self._reader(None)
        try:
            plan = reader.resolve()
        except NoCheckpointError:
            return -1
        ranks = torch.distributed.get_world_size()
        if plan["world_size"] != ranks:
            logger.warning("local checkpoint %s was saved by %s ranks and is of no use to %s", plan["step"], plan["world_size"], ranks)
            return -1
        self._found, self.latest_iteration = reader, int(plan["step"])
        return self.latest_iteration

    def close(self) -> None:
        """Waits for the last save."""
        self._checkpointer.close()

    # What the base class asks for. Its `load` calls `_load` for what `find_latest` has found.

    def _my_ckpt_ids(self) -> Iterable[tuple[int, int, Any]]:
        latest = self.find_latest()
        return [] if latest == -1 else [self._ckpt_id(latest)]

    def _save(self, state_dict: Any, ckpt_id: tuple[int, int, Any]) -> None:
        self._begin(state_dict, ckpt_id[0]).finish()

    def _load(self, ckpt_id: tuple[int, int, Any]) -> Any:
        """This rank's part. If one rank fails, all do."""
        error: Exception | None = None
        state = None
        try:
            state = self._part(ckpt_id[0])
        except CheckpointException as failure:
            cause = only_cause(failure)
            if not isinstance(cause, Exception):
                raise cause from failure
            error = cause
        except Exception as failure:
            error = failure
        failures = of_all_ranks(said(error))
        if failures:
            raise CheckpointLoadError(f"local checkpoint {ckpt_id[0]} was not loaded: {'; '.join(failures)}") from error
        # Saves that follow may be of steps before those of this one: a rank that has not come to them yet is not past them.
        self._checkpointer.close()
        self._checkpointer = Checkpointer(self.session_id, **self._settings)
        return state

    def _cleanup(self, iteration: int) -> None:
        """The daemon's retention removes checkpoints."""

    def _cleanup_failed_save(self, iteration: int) -> None:
        """What was not committed does not exist."""

    def _begin(self, state_dict: Any, iteration: int) -> Begun:
        if iteration <= self.latest_iteration:
            raise CheckpointingException(f"expected an iteration above {self.latest_iteration}, the latest there is, got {iteration}")
        self.latest_iteration, self._found = -1, None
        return Begun(self._checkpointer, iteration, lambda: self._state(state_dict))

    def _state(self, state_dict: Any) -> dict[str, Any]:
        """What is around the tensors as one object, and the tensors, which are copied from where they are."""
        tensors = list(state_dict.pop_tensors())
        try:
            around = saved_by_torch(state_dict)
        finally:
            state_dict.insert_tensors(tensors)
        if not self._trust:
            check_loadable("local checkpoint", around, type(state_dict).__qualname__)
        part: dict[str, Any] = {AROUND: io.BytesIO(around)}
        if tensors:
            part[TENSORS] = {str(number): tensor.detach() for number, tensor in enumerate(tensors)}
        return {self._name_of_part: part}

    def _part(self, iteration: int) -> Any:
        reader = self._found or self._reader(iteration)
        if reader.plan is None:
            reader.follow(reader.ask())
        metadata = reader.read_metadata()
        paths = metadata.planner_data or {}
        flat: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if paths.get(name, (name,))[0] == self._name_of_part:
                flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        if not flat:
            raise NoCheckpointError(f"step {iteration} of {self.session_id!r} has nothing of {self._name_of_part}")
        load_alone(flat, reader, StoragedLoadPlanner(trust_pickle=self._trust))
        part = reader.nested(flat)[self._name_of_part]
        state = self._unpickled(part[AROUND])
        tensors = part.get(TENSORS, {})
        state.insert_tensors([tensors[str(number)] for number in range(len(tensors))])
        return state

    def _unpickled(self, around: io.BytesIO) -> Any:
        if not self._trust:
            return load_plain("local checkpoint", around)
        return torch.load(around, map_location="cpu", weights_only=False)

    @property
    def _name_of_part(self) -> str:
        return f"rank {self.rank}"

    def _reader(self, iteration: int | None) -> StoragedReader:
        checkpointer = self._checkpointer
        return StoragedReader(
            iteration,
            session=checkpointer.session,
            threads=checkpointer.threads,
            timeout=checkpointer.timeout,
            trust_pickle=self._trust,
        )
