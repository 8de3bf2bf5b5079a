"""Which tensors have bytes of their own: plain ones are copied as memory, wrappers are taken apart, others are refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsavableState

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor
else:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    try:
        from torch.distributed.tensor import DTensor
    except ImportError:  # torch 2.4 keeps it in a private module
        from torch.distributed._tensor import DTensor

__all__ = ["DTensor", "ShardedTensor", "has_memory", "holds_wrapper", "is_described", "is_plain", "is_wrapper", "lies_in_order"]
__all__ += ["contexts_of", "own_memory", "taken_apart"]

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
# By these DCP knows a tensor that describes its own shards: it takes them apart itself.
SELF_DESCRIBING = ("__create_write_items__", "global_offsets")


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether every element lies in storage that is there."""
    if tensor.numel() == 0:
        return True
    try:
        if tensor.data_ptr() == 0:
            return False
        reach = tensor.numel()
        if not tensor.is_contiguous():
            reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        return bool(tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + reach) * tensor.element_size())
    except (RuntimeError, NotImplementedError):
        return False


def lies_in_order(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor's memory, where it has any, are its value as they are."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory behind the tensor is its value, in order: a byte copy is a copy of it."""
    return lies_in_order(tensor) and has_memory(tensor)


def is_described(tensor: torch.Tensor) -> bool:
    """Whether DCP itself takes the tensor apart into shards."""
    return isinstance(tensor, (DTensor, ShardedTensor)) or any(hasattr(tensor, name) for name in SELF_DESCRIBING)


def is_wrapper(value: Any) -> bool:
    """Whether a tensor is made of other tensors (quantised weights, for example) and has no memory itself."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) not in PLAIN_TYPES
        and not is_described(value)
        and hasattr(value, "__tensor_flatten__")
    )


def taken_apart(value: Any) -> Any:
    """The same nesting, every wrapper in it replaced by a dict of the tensors that it is made of."""
    if isinstance(value, dict):
        return {key: taken_apart(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(taken_apart(inner) for inner in value)
    if isinstance(value, torch.Tensor) and (arrived := getattr(value, "trigger_wait", None)) is not None:
        return arrived()  # the result of a collective that may still be on its way
    if not is_wrapper(value):
        return value
    names, _ = getattr(value, "__tensor_flatten__")()  # noqa: B009, Tensor does not declare it
    return {name: taken_apart(getattr(value, name)) for name in names}


def contexts_of(value: Any, path: tuple[Any, ...] = ()) -> dict[str, str]:
    """What wrappers say of themselves beside the tensors that they are made of, as text, by name: a block size, say."""
    found: dict[str, str] = {}
    if isinstance(value, dict):
        items = list(value.items())
    elif type(value) in (list, tuple):
        items = list(enumerate(value))
    elif is_wrapper(value):
        names, context = getattr(value, "__tensor_flatten__")()  # noqa: B009
        # An address would tell apart what is the same.
        found[".".join(map(str, path))] = f"{type(value).__qualname__} {re.sub(' at 0x[0-9a-f]+', '', repr(context))}"
        items = [(name, getattr(value, name)) for name in names]
    else:
        items = []
    for key, inner in items:
        found |= contexts_of(inner, (*path, key))
    return found


def holds_wrapper(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(holds_wrapper, value.values()))
    if type(value) in (list, tuple):
        return any(map(holds_wrapper, value))
    return is_wrapper(value)


def own_memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a plain one whose elements can be copied, wherever they are; a typed refusal if they are nowhere."""
    if (arrived := getattr(tensor, "trigger_wait", None)) is not None:
        tensor = arrived()
    kind = type(tensor).__qualname__
    if is_wrapper(tensor):
        raise UnsavableState(
            f"tensor {name!r} is a {kind}, made of other tensors and without memory of its own: save with storaged.torch."
            "Checkpointer or dcp.async_save, which take it apart, or save the tensors that it is made of"
        )
    if tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided:
        what = "quantised" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsavableState(f"tensor {name!r} is {what}: save the tensors that it is made of")
    if not has_memory(tensor):
        raise UnsavableState(
            f"tensor {name!r} ({kind} on {tensor.device}) has no memory of its own: it was freed, is fake or on the meta device"
        )
    plain = tensor.detach()
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)
