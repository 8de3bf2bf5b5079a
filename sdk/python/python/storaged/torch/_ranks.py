"""Which rank of which run this process is."""

from __future__ import annotations

import os
import re
from typing import Any

import torch.distributed as dist

from .._session import Session
from ..errors import InvalidArgument, StoragedError


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_and_world(group: Any = None) -> tuple[int, int]:
    if distributed():
        return dist.get_rank(group), dist.get_world_size(group)
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def from_rank_zero(make: Any, group: Any = None) -> Any:
    """Rank 0 makes a value, every rank gets it, or the same error. A collective where there is a process group."""
    if not distributed():
        return make()
    box: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            box[0] = make()
        except StoragedError as error:
            box[1] = error
    source = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast_object_list(box, src=source, group=group)
    if box[1] is not None:
        raise box[1]
    return box[0]


def resolve_run(session: Session, run: str | None, group: Any = None) -> str:
    """The run to save in: given, from STORAGED_RUN, or opened by rank 0 once per process group."""
    if run is not None:
        return run
    if (text := os.environ.get("STORAGED_RUN")) is not None:
        if not re.fullmatch(r"\d+(-[0-9a-f]{16})?", text, re.ASCII):
            raise InvalidArgument(f"STORAGED_RUN must be a run such as 7-00f3a9c1d2e4b5a6, as open_run gives it, got {text!r}")
        return text
    # A group that was destroyed and made anew is a new object, and its job a new run.
    pg = group if group is not None else (dist.group.WORLD if distributed() else None)
    key = ("run", id(pg))
    known = session.run_of(key)
    if known is None:
        known = from_rank_zero(lambda: session.connect().open_run(session.timeout_ms), group)
        session.set_run(key, known)
    return known


def step_of(checkpoint_id: object) -> int | None:
    """The step that a checkpoint id names: `120`, `step-120`, `.../step_120`."""
    if checkpoint_id is None:
        return None
    text = str(checkpoint_id)
    found = re.search(r"step[-_](\d+)/?$", text) or re.fullmatch(r"(\d+)", text)
    return int(found.group(1)) if found else None
