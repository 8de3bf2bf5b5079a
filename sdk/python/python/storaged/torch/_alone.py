"""DCP's `load` and `save` of one process, whatever process group there is: on torch up to 2.6 they have no `no_dist`."""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

HAVE_NO_DIST = "no_dist" in inspect.signature(state_dict_loader.load).parameters


def load_alone(state_dict: dict[str, Any], reader: StorageReader, planner: LoadPlanner) -> None:
    """Fills the state dict with nothing collective. Raises `CheckpointException` as DCP does."""
    if HAVE_NO_DIST:
        state_dict_loader.load(state_dict, storage_reader=reader, planner=planner, no_dist=True)
        return
    states = _states(state_dict)
    state_dict_loader._load_state_dict(states, storage_reader=reader, planner=planner, no_dist=True)
    for key, value in list(state_dict.items()):
        if isinstance(value, Stateful):
            value.load_state_dict(states[key])
        else:
            state_dict[key] = states[key]


def only_cause(failure: CheckpointException) -> BaseException:
    """Without collectives there is one failure, this rank's."""
    for wrapped in failure.failures.values():
        return wrapped[0] if isinstance(wrapped, tuple) else wrapped
    return failure


def save_alone(state_dict: dict[str, Any], writer: StorageWriter) -> None:
    """Saves with nothing collective. Raises `CheckpointException` as DCP does."""
    if HAVE_NO_DIST:
        state_dict_saver.save(state_dict, storage_writer=writer, no_dist=True)
    else:
        state_dict_saver._save_state_dict(_states(state_dict), storage_writer=writer, no_dist=True)


def _states(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}
