"""GPUs, as far as copies need them: the only module that speaks to CUDA (or, where PyTorch is built for it, ROCm).

It is called for tensors that lie on a GPU and for no others, so that it does nothing where `torch.cuda.is_available()` is false,
nor in a process that only passes by: what asks CUDA for the first time makes a context, and forbids forks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Its classes are not typed.
CUDA: Any = torch.cuda
#: cudaHostRegisterPortable: page-locked for all devices of the process, not only for the one that is current.
PORTABLE = 1
#: Tensors that are copied in one call, which takes the interpreter's lock once.
AT_ONCE = 256

#: A place, and the tensor that goes there, of the same type and shape.
Pair = tuple[torch.Tensor, torch.Tensor]

_side: dict[int, Any] = {}
_side_lock = threading.Lock()


def device_of(tensor: torch.Tensor) -> int | None:
    """The number of the GPU that a tensor lies on; None for any other memory."""
    return tensor.device.index if tensor.device.type == "cuda" else None


def register(device: int, address: int, nbytes: int) -> int:
    """Page-locks memory; CUDA's error, 0 if there is none."""
    # A thread begins on device 0, where a context would be made for nothing.
    with CUDA.device(device):
        return int(CUDA.cudart().cudaHostRegister(address, nbytes, PORTABLE))


def unregister(device: int, address: int) -> int:
    """Undoes it."""
    with CUDA.device(device):
        return int(CUDA.cudart().cudaHostUnregister(address))


def pinned_blocks(device: int, nbytes: int) -> list[torch.Tensor] | None:
    """Two blocks of page-locked memory, which PyTorch keeps for the next time; None if there are none to be had."""
    try:
        with CUDA.device(device):
            return [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    except RuntimeError:
        return None


def now_on(device: int) -> Any:
    """An event behind everything that the device's current stream was given."""
    event = CUDA.Event()
    event.record(CUDA.current_stream(device))
    return event


@contextmanager
def beside(device: int, after: Any) -> Iterator[Any]:
    """In the block copies of that device go to its side stream, behind the event: the trainer's own streams wait for none of them."""
    with _side_lock:
        # One for all copies of a device: PyTorch has only so many streams.
        stream = _side.get(device) or _side.setdefault(device, CUDA.Stream(device))
    stream.wait_event(after)
    with CUDA.stream(stream):
        yield stream


def behind(stream: Any) -> Any:
    """An event behind everything that the stream was given. Who waits for it does not spin."""
    event = CUDA.Event(blocking=True)
    event.record(stream)
    return event


def is_in_order(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is its value, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The same, its memory its value in order: where it is not yet, a copy on the device, made on the current stream.

    PyTorch would conjugate or negate what it has copied from a device on the CPU, without waiting for the copy.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor that lies in order, byte for byte."""
    return tensor.view(-1).view(torch.uint8)


def copy_async(pairs: Iterable[Pair]) -> None:
    """Copies on the current stream and does not wait: only between a device and page-locked memory, both sides in order."""
    rest = list(pairs)
    while rest:
        some, rest = rest[:AT_ONCE], rest[AT_ONCE:]
        torch._foreach_copy_([into for into, _ in some], [tensor for _, tensor in some], non_blocking=True)
