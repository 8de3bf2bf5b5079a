"""What callers may pass: checked where it comes in, refused with what was expected, what came and what to do."""

from __future__ import annotations

import math
import operator
import os
import reprlib
from typing import Any

from .errors import InvalidArgument

#: Steps are 64 bits wide.
STEP_MAX = 2**64 - 1
THREADS_MAX = 4
#: Seven weeks: more is no limit, and neither threads nor the daemon count further.
LIMIT_SECONDS_MAX = 4_000_000.0
DURABLE = ("policy", "required", "never")
VERIFY = ("fast", "full")


class _Short(reprlib.Repr):
    """As Python shortens values, with the same words from every version for an integer that is too long to be written."""

    def repr_int(self, x: int, level: int) -> str:
        try:
            str(x)
        except ValueError:
            return "thousands of digits"
        return super().repr_int(x, level)


def shown(value: Any) -> str:
    """A value for an error's text: short, whatever it is."""
    text = " ".join(_Short().repr(value).split())
    return f"{text} of type {type(value).__qualname__}"


def step_number(step: Any) -> int:
    """A step as a plain integer, from anything that is an integer (NumPy's and one-element tensors too)."""
    number = None if isinstance(step, bool) else _integer(step)
    if number is None:
        raise InvalidArgument(f"expected a step as an integer from 0 on, got {shown(step)}: pass the number of the training step")
    if not 0 <= number <= STEP_MAX:
        raise InvalidArgument(f"expected a step from 0 to {STEP_MAX}, got {shown(number)}: count steps from 0 or 1 upwards")
    return number


def step_or_none(step: Any) -> int | None:
    """The same, where no step is the newest one."""
    return None if step is None else step_number(step)


def check_state(state_dict: Any) -> None:
    """A state dict is a dict, of whatever DCP takes."""
    if not isinstance(state_dict, dict):
        raise InvalidArgument(
            f"expected the state as a dict, got {shown(state_dict)}: put what is to be saved into one, such as "
            "{'model': model.state_dict(), 'step': step}"
        )


def limit_in_seconds(timeout: Any) -> float:
    """A limit: any number above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or math.isnan(timeout) or timeout <= 0:
        raise InvalidArgument(f"expected timeout as seconds above 0, got {shown(timeout)}: it bounds each call, 120 is the default")
    return min(float(timeout), LIMIT_SECONDS_MAX)


def thread_count(threads: Any) -> int:
    """How many threads may copy; None for this process's share of the cores, up to four."""
    if threads is None:
        return default_threads()
    number = None if isinstance(threads, bool) else _integer(threads)
    if number is None or number < 1:
        raise InvalidArgument(f"expected threads as an integer from 1 on, got {shown(threads)}: so many threads copy at once")
    return number


def default_threads() -> int:
    """More than four gain little; the ranks of a node, as torchrun counts them, share its cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(THREADS_MAX, cores // ranks_here(1)))


def ranks_here(otherwise: int) -> int:
    """How many ranks this node has, as torchrun counts them."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(ranks) if ranks.isdecimal() else otherwise, 1)


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """A word of a few."""
    if value not in allowed:
        raise InvalidArgument(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)


def namespace_text(namespace: Any) -> str | None:
    """A job's name; the daemon says which are good."""
    if namespace is not None and not isinstance(namespace, str):
        raise InvalidArgument(f"expected the namespace as text, got {shown(namespace)}: it is the job's name")
    return namespace


def _integer(value: Any) -> int | None:
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        # RuntimeError: a tensor of several elements, or on no device.
        return None
