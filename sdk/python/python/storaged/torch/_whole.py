"""Checkpoints that frameworks hand over whole: tensors apart, everything around them as it is, with its types and keys."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch

from ..errors import CorruptData, UnsavableState
from ._objects import check_loadable, load_plain, saved_by_torch
from ._tensors import is_wrapper

MARK = "\0storaged tensor "
AROUND = "around"


def pack(value: Any, trust_pickle: bool = False) -> dict[str, Any]:
    """A state dict whose loading with `Checkpointer.load_all` and [`unpack`] gives the value again, type for type.

    A tensor that occurs twice is stored once. What could not be loaded without trust is refused, unless it is trusted.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    around = saved_by_torch(_taken(value, tensors, names))
    if not trust_pickle:
        check_loadable("checkpoint", around)
    return {"tensors": tensors, AROUND: around}


def unpack(state: dict[str, Any], trust_pickle: bool = False) -> Any:
    """What was packed."""
    try:
        tensors, around = state.get("tensors", {}), io.BytesIO(state[AROUND])
    except KeyError as error:
        raise CorruptData("expected a checkpoint that a framework's adapter has saved, this one was saved otherwise") from error
    value = torch.load(around, map_location="cpu", weights_only=False) if trust_pickle else load_plain("checkpoint", around)
    return _put(value, tensors)


def _taken(value: Any, tensors: dict[str, torch.Tensor], names: dict[int, str], path: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, torch.Tensor):
        if is_wrapper(value):
            raise UnsavableState(
                f"tensor {'.'.join(map(str, path))!r} is a {type(value).__qualname__}, made of other tensors: without a template it "
                "could not be made again. Save with storaged.torch.Checkpointer, which fills the model's own tensors, or save the "
                "tensors that it is made of"
            )
        # By object: the caller's checkpoint keeps every one of them alive meanwhile.
        name = names.setdefault(id(value), f"t{len(names)}")
        tensors[name] = value.detach()
        return MARK + name
    if isinstance(value, dict):
        kind = type(value) if type(value) in (dict, OrderedDict) else dict
        return kind((key, _taken(inner, tensors, names, (*path, key))) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_taken(inner, tensors, names, (*path, at)) for at, inner in enumerate(value))
    return value


def _put(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, str) and value.startswith(MARK):
        return tensors[value.removeprefix(MARK)]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _put(inner, tensors)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_put(inner, tensors) for inner in value)
    return value
