"""Tensors that several ranks hold alike are staged by one of them, as DCP's planner has them stored once.

Alike is what has the same name, place in its tensor, shape and type: values are not compared, as DCP does not either. Which rank stages
what the ranks agree on before the first save of a structure copies anything, and later saves of it go by that. Whoever cannot ask
stages all that it holds: too much is stored then, never too little, and the plan keeps one of each.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

from .._deadline import Deadline
from ..errors import StoragedError
from ._objects import PLAIN, saved_by_torch
from ._ranks import At, Ranks
from ._tensors import DTensor

logger = logging.getLogger("storaged")

#: A digest of what the tensor is called and what it is like, its bytes, and which of the rank's tensors it is: tied ones have one number.
Entry = tuple[bytes, int, int]
#: Two entries of one checkpoint have the same digest by chance once in 2^64 pairs.
DIGEST_BYTES = 16
#: A random state of PyTorch has 5 KiB.
VALUE_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class Holding:
    """The tensors of a rank that others may hold too, in order."""

    entries: tuple[Entry, ...]
    #: Bytes that no other rank holds.
    own_bytes: int
    #: By name, digests of values that are probably this rank's own if they are not the same on all: all but numbers that were computed.
    values: dict[str, bytes] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Share:
    """What a rank stages of its tensors: all but those that are left to others."""

    #: The agreement that it is of.
    name: str
    holding: Holding
    #: Which of the entries others stage.
    left: frozenset[int]
    #: The same as the plan names them, where the share was taken from a plan.
    items: frozenset[MetadataIndex] = frozenset()


class Sharing:
    """What a rank knows from save to save: its share, once it was agreed on."""

    def __init__(self) -> None:
        self.share: Share | None = None
        #: Whether something was staged that has not been planned.
        self.is_in_doubt = False


class Sharer:
    """The same for one save, which can ask the other ranks."""

    def __init__(self, sharing: Sharing, world_size: int, ask: Callable[[Holding], Share | None]) -> None:
        self._sharing = sharing
        self._ask = ask
        self.world_size = world_size

    @property
    def share(self) -> Share | None:
        return self._sharing.share

    def share_of(self, holding: Holding) -> Share | None:
        """The share of a rank that holds that; None if it stages all of it."""
        if self.share is None or self.share.holding != holding:
            self._sharing.share = self._ask(holding)
        return self.share


def entry_of(name: str, leaf: Any, local: torch.Tensor, number: int) -> Entry:
    """A tensor leaf, its local tensor, and the number of that among the rank's tensors."""
    where: Any = None
    if isinstance(leaf, DTensor):
        chunks = _create_chunk_list(leaf)
        where = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks], tuple(leaf.shape)
    key = repr((name, str(local.dtype), tuple(local.shape), where)).encode()
    return blake2b(key, digest_size=DIGEST_BYTES).digest(), local.nbytes, number


def value_of(value: Any) -> bytes | None:
    """A digest of a small value such as a random state or where a data loader is; None of what is none."""
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.is_floating_point() or value.is_complex():
            return None
        if value.nbytes > VALUE_BYTES_MAX:
            return None
    try:
        if isinstance(value, torch.Tensor):
            data = value.contiguous().numpy().tobytes()
        else:
            data = repr(value).encode() if type(value) in PLAIN else saved_by_torch(value)
    except Exception:
        return None  # the save says what is wrong with it
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def differing(held: list[Holding]) -> list[str]:
    """Names under which ranks hold values that differ."""
    first: dict[str, bytes] = {}
    found: dict[str, None] = {}
    for holding in held:
        for name, digest in holding.values.items():
            if first.setdefault(name, digest) != digest:
                found[name] = None
    return list(found)


def is_own(leaf: Any, world_size: int) -> bool:
    """Whether no other rank can hold the same part of the tensor: all ranks share in it, each with a part of its own."""
    if not isinstance(leaf, DTensor):
        return False
    mesh = leaf.device_mesh
    return mesh.get_coordinate() is None or (mesh.size() == world_size and all(one.is_shard() for one in leaf.placements))


def shared_out(held: list[Holding]) -> list[frozenset[int]]:
    """For every rank the entries that it leaves to others: of each one rank stages it, and all have about the same bytes to stage."""
    holders: dict[bytes, list[tuple[int, int]]] = {}
    for rank, holding in enumerate(held):
        for number, (digest, _, _) in enumerate(holding.entries):
            holders.setdefault(digest, []).append((rank, number))
    load = [holding.own_bytes for holding in held]
    staged: list[set[int]] = [set() for _ in held]
    left: list[set[int]] = [set() for _ in held]

    def tensor_of(where: tuple[int, int]) -> int:
        return held[where[0]].entries[where[1]][2]

    def stage(where: tuple[int, int]) -> None:
        rank, number = where
        if tensor_of(where) not in staged[rank]:
            staged[rank].add(tensor_of(where))
            load[rank] += held[rank].entries[number][1]

    replicas = []
    for places in holders.values():
        if len({rank for rank, _ in places}) < len(places) or len(places) == 1:
            for where in places:
                stage(where)
        else:
            replicas.append(places)
    # The largest first: those that come last even the ranks out. Tied tensors cost the rank nothing that stages one of them.
    for places in sorted(replicas, key=lambda places: -held[places[0][0]].entries[places[0][1]][1]):
        keeper = min(places, key=lambda where: (tensor_of(where) not in staged[where[0]], load[where[0]]))
        stage(keeper)
        for rank, number in places:
            if rank != keeper[0]:
                left[rank].add(number)
    return [frozenset(one) for one in left]


def agree(
    ranks: Ranks, name: str, holding: Holding, what: str, deadline: Deadline, at: At | None, is_past: Callable[[int], bool]
) -> Share | None:
    """Shares out among all ranks that ask under the same name; None if not all of them do in time.

    On rank 0 `is_past` says of a rank that has not asked whether it has gone on without: nobody waits for it then.
    """
    if ranks.rank != 0:
        ranks.tell(f"holds/{name}/{ranks.rank}", holding)
        left = ranks.hear_rank_zero([f"shared/{name}/{ranks.rank}", f"shared/{name}"], what, deadline, at)
        return None if left is None else Share(name, holding, left)
    keys = {rank: f"holds/{name}/{rank}" for rank in range(1, ranks.size)}

    def nobody_else_comes() -> bool:
        return any(is_past(rank) and not ranks.heard(key) for rank, key in keys.items())

    if not ranks.wait(list(keys.values()), deadline, nobody_else_comes):
        share_nothing(ranks, name)
        return None
    held = [holding, *(ranks.value(key) for key in keys.values())]
    if names := differing(held):
        logger.warning(
            "ranks hold different values under %s%s: of each the checkpoint keeps one rank's, as torch.distributed.checkpoint does; "
            "give each rank's a name of its own, such as f'random{rank}', if all are needed",
            ", ".join(map(repr, names[:5])), f" and {len(names) - 5} other names" if len(names) > 5 else "",
        )
    shares = shared_out(held)
    for rank in keys:
        ranks.tell(f"shared/{name}/{rank}", shares[rank])
    ranks.forget(list(keys.values()))
    return Share(name, holding, shares[0])


def share_nothing(ranks: Ranks, name: str) -> None:
    """On rank 0: whoever asks under that name stages all that it holds."""
    ranks.tell(f"shared/{name}", None)


def keys_of(name: str, size: int) -> list[str]:
    """What the ranks have told one another under that name."""
    return [f"shared/{name}", *(f"{kind}/{name}/{rank}" for kind in ("holds", "shared") for rank in range(1, size))]


@dataclass(frozen=True)
class Notes:
    """What a rank says of its plan, and what it is told of it."""

    #: Where its empty dicts lie.
    empty_dicts: tuple[tuple[Any, ...], ...] = ()
    #: What it has left to others.
    left: tuple[MetadataIndex, ...] = ()
    #: The agreement by which it has, and by which all will. None: there is none.
    agreement: str | None = None


def without(plan: SavePlan, left: Iterable[MetadataIndex]) -> tuple[SavePlan, tuple[MetadataIndex, ...]]:
    """A rank's plan without what others stage, and what that was."""
    left = frozenset(left)
    dropped = tuple(item.index for item in plan.items if item.index in left)
    return replace(plan, items=[item for item in plan.items if item.index not in left]), dropped


def check_nothing_is_lost(plans: list[SavePlan]) -> None:
    """Raises if a rank left to another what that one has not staged: their states have changed apart since they agreed."""
    if not all(getattr(plan, "usable", True) for plan in plans):
        return  # plans that are taken from the last save say nothing
    planned = {item.index for plan in plans for item in plan.items}
    for rank, plan in enumerate(plans):
        lost = [index.fqn for index in (plan.storage_data.left if plan.storage_data else ()) if index not in planned]
        if lost:
            raise StoragedError(
                f"rank {rank} has left {lost[0]!r} and {len(lost) - 1} other tensors to ranks that do not hold them any more: "
                "ranks share anew in the next save"
            )


def with_agreement(plans: list[SavePlan]) -> list[SavePlan]:
    """Final plans that say by what ranks go from now on: what they have all gone by, what these plans say if no rank had a share yet, and
    nothing if some had and some had not."""
    if not all(getattr(plan, "usable", True) for plan in plans):
        return plans
    known = {plan.storage_data.agreement if plan.storage_data else None for plan in plans}
    agreement = None if len(known) > 1 else known.pop() or uuid.uuid4().hex
    return [replace(plan, storage_data=Notes(agreement=agreement)) for plan in plans]
