"""Copies of tensors that are no plain CPU memory in order: one by one, now, or later behind what their devices were doing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# Its classes are not typed.
CUDA: Any = torch.cuda
#: A place in a slot, and what goes there.
Pair = tuple[torch.Tensor, torch.Tensor]


def copy_each(pairs: Iterable[Pair]) -> None:
    """In this thread, and on the current stream of each device."""
    for view, tensor in pairs:
        view.copy_(tensor.detach())


class Behind:
    """Copies in another thread what the tensors hold when this is made.

    A thread has current streams of its own, so the copies must be told what they wait for: an event on the current stream of each
    device, recorded here. They take a side stream, so that what the trainer gives its own stream meanwhile does not wait for them.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._events: dict[torch.device, Any] = {}
        if not torch.cuda.is_available():
            return
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            self._events[device] = CUDA.Event()
            self._events[device].record(CUDA.current_stream(device))

    def copy_each(self, pairs: Iterable[Pair]) -> None:
        """Returns when every byte is in."""
        pairs = list(pairs)
        for device, event in self._events.items():
            stream = CUDA.Stream(device)
            stream.wait_event(event)
            with CUDA.stream(stream):
                for view, tensor in pairs:
                    if tensor.device == device:
                        view.copy_(tensor, non_blocking=True)
            stream.synchronize()
        copy_each((view, tensor) for view, tensor in pairs if tensor.device not in self._events)
