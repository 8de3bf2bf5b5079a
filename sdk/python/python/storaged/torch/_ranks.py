"""Which rank of which run this process is, and what the ranks tell each other."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist

from .._deadline import Deadline
from .._session import Session
from ..errors import InvalidArgument, RanksMissing, StoragedError, UnknownRun
from ..torchrun import VERDICT_VARIABLE

logger = logging.getLogger("storaged")


class Store(Protocol):
    """What the ranks of no process group tell each other through. A `RuntimeError` says that it does not answer."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> Any: ...
    def below(self, prefix: str) -> Store:
        """The same for keys of one purpose."""


@dataclass(frozen=True)
class Processes:
    """In place of a process group: processes that have another way to find each other."""

    rank: int
    size: int
    store: Store


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank_and_world(group: Any = None) -> tuple[int, int]:
    if isinstance(group, Processes):
        return group.rank, group.size
    if distributed():
        return dist.get_rank(group), dist.get_world_size(group)
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def from_rank_zero(make: Callable[[], Any], group: Any = None) -> Any:
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


#: By which a session knows the run of a rank that saves alone.
ALONE = ("run", "alone")


def run_key(group: Any = None) -> tuple[str, Any]:
    """By which a session knows the run of these ranks."""
    # A group that was destroyed and made anew is a new object, and its job a new run.
    pg = group if group is not None else (dist.group.WORLD if distributed() else None)
    return ("run", 0 if pg is None else _number_of(pg))


#: By address: the group that lies there, and its number.
_groups: dict[int, tuple[weakref.ref[Any], int]] = {}
_numbers = itertools.count(1)


def _number_of(group: Any) -> int:
    """No other group's, ever: the address of one is another's once it is gone."""
    known = _groups.get(id(group))
    if known is None or known[0]() is not group:
        number = next(_numbers)
        known = _groups[id(group)] = (weakref.ref(group, partial(_forget_group, id(group), number)), number)
    return known[1]


def _forget_group(address: int, number: int, _: Any) -> None:
    """It is gone: so is what its ranks told each other, with the connection to its store."""
    known = _groups.get(address)
    if known is not None and known[1] == number:
        del _groups[address]
    for key in list(_words):
        if key[1] == number:
            _words.pop(key, None)


def given_run(run: str | None) -> str | None:
    """The run that the caller or the environment names."""
    if run is not None:
        return run
    text = os.environ.get("STORAGED_RUN")
    if text is not None and not re.fullmatch(r"\d+(-[0-9a-f]{16})?", text, re.ASCII):
        raise InvalidArgument(f"STORAGED_RUN must be a run such as 7-00f3a9c1d2e4b5a6, as open_run gives it, got {text!r}")
    return text


def resolve_run(session: Session, run: str | None, group: Any, deadline: Deadline) -> str:
    """The run to save in: given, from STORAGED_RUN, or opened by rank 0 once per process group, and anew once it was lost.

    Not a collective: rank 0 opens it and waits for nobody, the others wait for its word, bounded.
    """
    if (given := given_run(run)) is not None:
        return given
    key = run_key(group)
    words = _words_of(session, key, group)
    known = session.run_of(key)
    words.begin_save()
    if known is not None and words.is_lost(known):
        session.forget_run(key)
        words.check_lost_before(known)
        known = None
    if known is None:
        known = words.opened(lambda: session.connect(deadline).open_run(deadline.left_ms()), deadline)
        session.set_run(key, known)
    return known


def lose_run(session: Session, run: str | None, group: Any = None) -> None:
    """A daemon does not know the run any more: the next save of every rank is in a new one.

    DCP carries this rank's failure to the others, so they are past this word when they save again. A run that was given stays.
    """
    key = run_key(group)
    if run is None or session.run_of(key) != run:
        return
    try:
        _words_of(session, key, group).lose(run)
    except StoragedError as error:
        logger.debug("the other ranks could not be told that run %s is lost: %s", run, error)
    session.forget_run(key)


class _OpenedRuns:
    """Runs that rank 0 of a group opened for writers, one after the other, its failures to, and runs that were lost."""

    def __init__(self, namespace: str, group: Any) -> None:
        self._ranks = Ranks(namespace, group, kind="writers")
        self._turn = 0
        #: The saves that were begun: DCP pairs them by their order.
        self._saves = 0

    def opened(self, make: Callable[[], str], deadline: Deadline) -> str:
        if self._ranks.rank != 0:
            return self._heard(deadline)
        self._turn += 1
        try:
            run = make()
        except Exception as error:
            self._ranks.tell(f"run/{self._turn}", ("failed", f"{type(error).__name__}: {error}"))
            raise
        self._ranks.tell(f"run/{self._turn}", ("ok", run))
        return run

    def lose(self, run: str) -> None:
        self._ranks.tell(f"lost/{run}", self._saves)

    def begin_save(self) -> None:
        self._saves += 1

    def is_lost(self, run: str) -> bool:
        return self._ranks.heard(f"lost/{run}")

    def check_lost_before(self, run: str) -> None:
        """Raises if it was lost in this very save: then rank 0 opens no other before the next one."""
        if self._ranks.value(f"lost/{run}") >= self._saves:
            raise UnknownRun(f"a daemon does not know run {run} any more, as another rank has found: the next save is in a new one")

    def _heard(self, deadline: Deadline) -> str:
        while True:
            turn = self._turn + 1
            kind, value = self._ranks.hear_rank_zero([f"run/{turn}"], "a new run", deadline)
            self._turn = turn
            # A run that was lost since, or a failure that rank 0 has got over, is of no interest.
            if kind == "ok" and not self.is_lost(value):
                return str(value)
            if kind == "failed" and not self._ranks.heard(f"run/{turn + 1}"):
                raise StoragedError(f"rank 0 could not open a run: {value}")


#: By namespace and group, as long as the group is there.
_words: dict[tuple[str, Any], _OpenedRuns] = {}


def _words_of(session: Session, key: tuple[str, Any], group: Any) -> _OpenedRuns:
    known = (session.namespace, key[1])
    if known not in _words:
        _words[known] = _OpenedRuns(session.namespace, group)
    return _words[known]


def step_of(checkpoint_id: object) -> int | None:
    """The step that a checkpoint id names: `120`, `step-120`, `.../step_120`."""
    if checkpoint_id is None:
        return None
    text = str(checkpoint_id)
    found = re.search(r"step[-_](\d+)/?$", text) or re.fullmatch(r"(\d+)", text)
    return int(found.group(1)) if found else None


#: Where a rank is: how many loads it has done, because a load may go back to an older step, and at which step it is.
At = tuple[int, int]


class WordsCleared(RanksMissing):
    """Rank 0 has gone on, and cleared what it told before this rank read it."""


class Ranks:
    """What the ranks of a group tell each other, by key, through the store that the process group was made with.

    Unlike collectives, which pair the n-th call of one rank with the n-th of another, a key says what it belongs to: a
    rank that leaves a save out disturbs no other save. Every wait is bounded and can say who is missing.
    """

    # Checkpointers made so far, by namespace and group: ranks make them in the same order.
    _made: dict[tuple[str, str], int] = {}
    FIRST_PAUSE, LONGEST_PAUSE, LOOK_EVERY = 0.002, 0.1, 0.2

    def __init__(self, namespace: str, group: Any = None, alone: bool = False, kind: str = "") -> None:
        others = isinstance(group, Processes)
        self.rank, self.size = (0, 1) if alone or not (others or distributed()) else rank_and_world(group)
        self._store: Any = None
        if self.size > 1:
            name = str(getattr(group, "group_name", "") or "world") + kind
            count = self._made[namespace, name] = self._made.get((namespace, name), 0) + 1
            at = f"storaged/{_start_of_workers()}{namespace}/{name}/{count}"
            prefix = getattr(dist, "PrefixStore")  # noqa: B009, torch does not export it by name
            self._store = group.store.below(at) if others else prefix(at, _own_store())
        #: By purpose, oldest first: the words of one thing that the ranks did together.
        self._old: dict[str, list[list[str]]] = {}

    def tell(self, key: str, value: Any) -> None:
        if self._store is not None:
            self._call(lambda: self._store.set(key, pickle.dumps(value)))

    def heard(self, key: str) -> bool:
        return self.all_heard([key])

    def all_heard(self, keys: list[str]) -> bool:
        return self._store is not None and bool(self._call(lambda: self._store.check(keys)))

    def value(self, key: str) -> Any:
        return pickle.loads(self._call(lambda: self._store.get(key)))

    def wait(self, keys: list[str], deadline: Deadline, give_up: Callable[[], bool]) -> bool:
        """Whether all keys were told; looks more seldom the longer it lasts."""
        pause = self.FIRST_PAUSE
        look = time.monotonic() + self.LONGEST_PAUSE
        while not self._call(lambda: self._store.check(keys)):
            if deadline.passed():
                return False
            if time.monotonic() >= look:
                if give_up():
                    return False
                look = time.monotonic() + self.LOOK_EVERY
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, self.LONGEST_PAUSE)
        return True

    def gather(self, key: str, own: Any, what: str, deadline: Deadline, at: At | None = None) -> list[Any]:
        """On rank 0: what every rank told. Says which ranks are missing."""
        others = {rank: f"{key}/{rank}" for rank in range(1, self.size)}
        if others and not self.wait(list(others.values()), deadline, lambda: bool(self._ahead(others, at))):
            missing = [rank for rank, name in others.items() if not self.heard(name)]
            if missing:
                raise self._missing(missing, self._ahead(dict.fromkeys(missing, ""), at), what, deadline)
        return [own, *(self.value(name) for name in others.values())]

    def hear_rank_zero(self, keys: list[str], what: str, deadline: Deadline, at: At | None = None, first: str = "") -> Any:
        """On the other ranks: what rank 0 told under the first of the keys that it used.

        `first` was heard before them, and is cleared with them when rank 0 has told them all: without it nothing is waited for.
        """
        pause = self.FIRST_PAUSE
        while True:
            # Before the keys: what is told meanwhile is found.
            ahead = self._ahead({0: ""}, at)
            is_cleared = bool(first) and pause >= self.LONGEST_PAUSE and not self.heard(first)
            for key in keys:
                if self.heard(key):
                    return self.value(key)
            if is_cleared:
                raise WordsCleared(f"rank 0 is at step {self.value('at/0')[1]} already and has cleared what it told of {what}", (0,))
            if ahead or deadline.passed():
                raise self._missing([0], ahead, what, deadline)
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, self.LONGEST_PAUSE)

    def come_to(self, at: At) -> None:
        """Tells the others at which save this rank is."""
        self.tell(f"at/{self.rank}", at)

    def forget_later(self, purpose: str, keys: list[str], keep: str = "") -> None:
        """Rank 0 clears up behind the last but one of a purpose: laggards still find the last. `keep` is in use anew.

        Of each purpose all ranks are past the last but one, because rank 0 has heard all of them in the last. Other purposes go on beside
        it, and say nothing about that.
        """
        if self._store is None:
            return
        old = self._old.setdefault(purpose, [])
        old.append(keys)
        while len(old) > 2:
            self.forget([key for key in old.pop(0) if key != keep])

    def forget(self, keys: list[str]) -> None:
        """Rank 0 removes what nobody reads any more."""
        for key in keys:
            self._call(partial(self._store.delete_key, key))

    def _ahead(self, ranks: dict[int, str], at: At | None) -> dict[int, int]:
        """Of these ranks, those that are past the save, and their steps, unless they told what is waited for."""
        if at is None:
            return {}
        known = {rank: self.value(f"at/{rank}") for rank in ranks if self.heard(f"at/{rank}")}
        past = {rank: other[1] for rank, other in known.items() if other > at}
        return {rank: step for rank, step in past.items() if not (ranks[rank] and self.heard(ranks[rank]))}

    def is_past(self, rank: int, at: At | None) -> bool:
        """Whether that rank has come to a later save."""
        return bool(self.ahead(rank, at))

    def ahead(self, rank: int, at: At | None) -> dict[int, int]:
        """That rank and its step, if it is past the save."""
        return self._ahead({rank: ""}, at)

    def left_out(self, rank: int, what: str, ahead: dict[int, int], deadline: Deadline) -> RanksMissing:
        """For whoever waits for a rank that is past the save."""
        return self._missing([rank], ahead, what, deadline)

    def _missing(self, missing: list[int], ahead: dict[int, int], what: str, deadline: Deadline) -> RanksMissing:
        who = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
        if ahead:
            steps = ", ".join(f"rank {rank} is at step {step} already" for rank, step in list(ahead.items())[:5])
            text = f"expected all {self.size} ranks at {what}, {who} left it out ({steps})"
        else:
            text = (
                f"expected all {self.size} ranks at {what} within {deadline.seconds:.1f} s, {who} did not come: left it out, "
                "hangs or has died"
            )
        return RanksMissing(text, tuple(missing))

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            # Whoever keeps the store (rank 0, or torchrun's agent beside it) has ended.
            raise RanksMissing(f"the process group's store does not answer, so rank 0 or its host has probably ended: {error}", (0,)) from error


class Calls:
    """What rank 0 tells in calls that every rank makes in the same order.

    It waits for nobody in them, so it may be many calls ahead of the others: what it told stays until all of them have gone on.
    """

    #: Every so many calls the others say that they have gone on, and rank 0 clears up.
    PACE = 32

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._count = 0
        self._told: list[str] = []
        #: By the number of a call: what was told before it.
        self._told_before: dict[int, list[str]] = {}

    def begin(self) -> None:
        """Every rank comes to the next call."""
        self._count += 1
        if self._ranks.size == 1 or self._count % self.PACE != 0:
            return
        if self._ranks.rank == 0:
            self._told_before[self._count], self._told = self._told, []
            self._clear_up()
        else:
            self._ranks.tell(self._mark(self._count, self._ranks.rank), None)

    def tell(self, key: str, value: Any) -> None:
        self._told.append(key)
        self._ranks.tell(key, value)

    def _clear_up(self) -> None:
        for count, told in list(self._told_before.items()):
            marks = [self._mark(count, rank) for rank in range(1, self._ranks.size)]
            if not self._ranks.all_heard(marks):
                break
            del self._told_before[count]
            self._ranks.forget(told + marks)

    @staticmethod
    def _mark(count: int, rank: int) -> str:
        return f"past/{count}/{rank}"


def _start_of_workers() -> str:
    """Tells the words of this start from those that workers before us left in the store, where torchrun's agent keeps one over all starts.

    Nodes may count starts differently, so only there; under our own rendezvous each start has a store of its own.
    """
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and VERDICT_VARIABLE not in os.environ
    return f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/" if is_kept else ""


def _own_store() -> Any:
    """The default group's store, over a connection of its own where torch can: waits in others do not hold ours up."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
