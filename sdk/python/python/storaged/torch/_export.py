"""A checkpoint as files that others read without us, and such files as a checkpoint."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ..errors import CheckpointLoadError, InvalidArgument, NoCheckpointError, UnsavableState
from ._alone import save_alone
from ._arena import leaves_of, name_of
from ._checkpointer import Checkpointer

FORMATS = ("dcp", "safetensors", "torch")


def export(checkpointer: Checkpointer, target: str | os.PathLike[str], step: int | None = None, form: str = "dcp") -> int:
    """Writes a step (the newest one by default), whole, to a directory that is empty or not there; the step.

    `dcp`: stock `FileSystemReader` reads it. `torch`: `checkpoint.pt` for `torch.load(weights_only=True)`. `safetensors`:
    `model.safetensors`, tensors alone by their dotted names; other values are refused. All of it passes through this
    process's memory, and every byte is verified on its way.
    """
    if form not in FORMATS:
        raise InvalidArgument(f"format must be one of {', '.join(FORMATS)}, got {form!r}")
    folder = Path(target)
    if folder.exists() and any(folder.iterdir()):
        raise InvalidArgument(f"expected an empty directory or none, got {folder}, which holds files")
    step = checkpointer.latest_step() if step is None else step
    state = checkpointer.load_all(step)
    if state is None or step is None:
        raise NoCheckpointError(f"nothing was saved yet in {checkpointer.session.namespace}")
    folder.mkdir(parents=True, exist_ok=True)
    {"dcp": _as_dcp, "torch": _as_torch, "safetensors": _as_safetensors}[form](state, folder)
    return step


def import_dcp(checkpointer: Checkpointer, source: str | os.PathLike[str], step: int) -> None:
    """Saves a directory of stock `torch.distributed.checkpoint` as a step, and waits for its commit.

    Its `.metadata` is a pickle, which stock PyTorch loads: import only directories that you trust.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    make: Any = _EmptyStateDictLoadPlanner
    _load_state_dict(state, storage_reader=FileSystemReader(source), planner=make(), no_dist=True)
    if not state:
        raise CheckpointLoadError(f"expected a checkpoint of torch.distributed.checkpoint in {source}, it holds no values")
    checkpointer.save(step, state)
    checkpointer.wait()


def _as_dcp(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        # That one process saves alone is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_alone(state, FileSystemWriter(folder))


def _as_torch(state: dict[str, Any], folder: Path) -> None:
    torch.save(state, folder / "checkpoint.pt.tmp")
    (folder / "checkpoint.pt.tmp").replace(folder / "checkpoint.pt")


def _as_safetensors(state: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for path, leaf in leaves_of(state):
        if not isinstance(leaf, torch.Tensor):
            raise UnsavableState(f"value {name_of(path)!r} of type {type(leaf).__qualname__} is no tensor: safetensors holds tensors alone")
        tensors[name_of(path)] = leaf.contiguous()
    save_file(tensors, folder / "model.safetensors")
