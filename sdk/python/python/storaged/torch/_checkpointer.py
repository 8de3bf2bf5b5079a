"""The plain way to save and load: one object, ordinary exceptions, nothing collective but what says so."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.optim import Optimizer

from .._arguments import DURABLE, VERIFY, check_state, limit_in_seconds, one_of, step_number, step_or_none, thread_count
from .._board import own_rank
from .._deadline import Deadline
from .._session import Session
from ..errors import (
    CheckpointerClosed,
    CheckpointLoadError,
    CheckpointSaveError,
    InvalidArgument,
    NoCheckpointError,
    StoragedError,
    TooManyLost,
    UnknownNamespace,
    UnknownRun,
    UnsavableState,
    WaitTimeout,
)
from ._ahead import Termination, make_slots
from ._alone import load_alone, only_cause
from ._arena import without_states
from ._events import Events, Hook
from ._fence import Fence, Verdict, agreed
from ._handle import STATES, SaveFuture, SaveHandle
from ._progress import Hook as ProgressHook
from ._ranks import ALONE, At, Calls, Ranks, given_run, run_key
from ._reader import StoragedLoadPlanner, StoragedReader
from ._saving import FOLLOW_SECONDS, Memory, Save, Skipped, said
from ._sharing import Holding, Share, Sharer, agree, share_nothing
from ._structure import Twin, Whole
from ._writer import StoragedWriter

logger = logging.getLogger("storaged")

ON_ERROR = ("raise", "warn")
BUSY = ("wait", "skip")
AHEAD = ("asked", "load")
# A save ends by its own deadline, on the ranks that follow a little later: whoever waits for it waits that long.
END_SECONDS = FOLLOW_SECONDS + 0.1


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a namespace. `nbytes` are those of all ranks; `is_durable`: the durable tier holds it."""

    run: str
    step: int
    state: str
    is_durable: bool
    world_size: int
    nbytes: int


class Checkpointer:
    """Saves in the background, one save at a time; every rank of the process group calls `save` with the same steps.

    What ranks hold alike (the same name, place and type) one of them saves; what is each rank's own needs a name of its own.

    `timeout` bounds each call, in seconds, and each save from its beginning to its commit. `on_error` says what becomes of
    a save that fails: "raise" raises it once, as `CheckpointSaveError`, in the call that failed or the next one (which has
    then begun its own save, so that ranks stay together); "warn" logs it, counts it in `failed_saves` and lets training go
    on. A state dict that cannot be saved at all (`UnsavableState`, `InvalidArgument`) is always raised, and so is what goes wrong
    in a load.

    `busy` says what a save does while the one before it is still going on: "wait" for it, or "skip" this one, on all ranks
    (rank 0 decides, the others wait for its word before they stage). `run` is the run to save in; without it, or
    STORAGED_RUN, the first save opens one. `alone` is for jobs of which one rank saves everything (rank 0 of 1).
    `until` is the state in which a save counts as ended: "committed", or as safe as "protected" or "durable".

    With `background` a save returns before its tensors are copied: a thread copies them while training goes on, and whoever changes them
    first waits for `handle.staged`, or for `wait("staged")`, which does not raise with "warn". `step` waits for it by itself, and so
    do the next save, a load and `close`. Everything else in the state dict is taken as it is at the call.

    `ahead` says when the slots of the next save are made in the background: when `prepare` is called ("asked"), or also by a
    load, which has told how the state looks ("load": for jobs that go on to save, because that opens the run and ends the saves
    of an older job). `save_on_term` does what `on_sigterm` does, at once. `threads` copy a save and a load: by default the rank's share
    of the node's cores, up to four. `events` is called with an `Event` for what happened, `progress` with the bytes that a load has read
    and will (`progress_bar()` draws them). `verify` is `StoragedReader`'s. The constructor does nothing collective, but ranks make their checkpointers in
    the same order. A child of `os.fork` makes one of its own: all that this one does but `wait` and `close` raises `CheckpointerClosed` there.
    """

    #: What describes a state, and what fills one.
    _save_planner: type[DefaultSavePlanner] = DefaultSavePlanner
    _load_planner: type[StoragedLoadPlanner] = StoragedLoadPlanner

    def __init__(
        self,
        namespace: str | None = None,
        *,
        process_group: Any = None,
        run: str | None = None,
        durable: str = "policy",
        timeout: float = 120.0,
        on_error: str = "raise",
        busy: str = "wait",
        alone: bool = False,
        background: bool = False,
        until: str = "committed",
        ahead: str = "asked",
        save_on_term: bool = False,
        threads: int | None = None,
        trust_pickle: bool = False,
        events: Hook | None = None,
        progress: ProgressHook | None = None,
        verify: str = "fast",
        session: Session | None = None,
    ) -> None:
        if alone and process_group is not None:
            raise InvalidArgument("alone means that no other rank saves: leave process_group out")
        self.session = session or Session.shared(namespace)
        self.process_group = process_group
        self.durable = one_of("durable", durable, DURABLE)
        self.timeout = limit_in_seconds(timeout)
        self.on_error = one_of("on_error", on_error, ON_ERROR)
        self.busy = one_of("busy", busy, BUSY)
        self.background = background
        self.until = one_of("until", until, STATES)
        self.ahead = one_of("ahead", ahead, AHEAD)
        self.threads = thread_count(threads)
        self.trust_pickle = trust_pickle
        self.progress = progress
        self.verify = one_of("verify", verify, VERIFY)
        #: Saves that failed so far, as far as this rank knows.
        self.failed_saves = 0
        #: Saves left out with `busy="skip"`.
        self.skipped_saves = 0
        #: Why the last save that failed did.
        self.last_error: CheckpointSaveError | None = None
        self._last_failed = False
        self._own_run = run
        self._run = given_run(run)
        self._ranks = Ranks(self.session.namespace, process_group, alone)
        rank, size = (own_rank(), 1) if alone else (self._ranks.rank, self._ranks.size)
        self._fence = Fence(self.session, rank, size, self.timeout)
        self._key = ALONE if alone else run_key(process_group)
        self._worker: ThreadPoolExecutor | None = None
        self._last: Save | None = None
        self._memory = Memory()
        self._calls = Calls(self._ranks)
        self._asked = 0
        self._prepares = 0
        self._asked_ahead = ""
        self._loads = 0
        #: The save that was begun last; no save is before the first.
        self._at = (-1, -1)
        self._events = Events(events, namespace=self.session.namespace, rank=self._ranks.rank)
        self._prepared: SaveFuture[int] | None = None
        #: Whether slots were made, or are being made, before they are needed.
        #: Set when a `prepare` has its run and knows what others stage, or will not.
        self._has_run = threading.Event()
        self._termination: Termination | None = None
        self._is_closed = False
        self._pid = os.getpid()
        if save_on_term:
            self.on_sigterm()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.close()
        except CheckpointSaveError as failure:
            if error is None:
                raise
            logger.warning("%s", failure)

    def save(
        self, step: int, state_dict: dict[str, Any] | Callable[[], dict[str, Any]], *, background: bool | None = None
    ) -> SaveHandle | None:
        """Returns when every tensor is staged: parameters may change again. None if the save was skipped.

        Instead of a state dict it takes what makes one, so that the other ranks hear of it at once if that fails.

        With `background` (by default the checkpointer's) it returns at once, and parameters may change when `handle.staged` is done. A
        copy that fails is the handle's exception, and the next call's.
        """
        self._check_open()
        step = step_number(step)
        behind = self.background if background is None else background
        deadline, began = Deadline(self.timeout), time.time()
        self._at = (self._loads, step)
        save = Save(self._ranks, self._at, deadline, self._memory, self._lose_runs, self._save_planner)
        if self._skips(save):
            return None
        before = self._settled(deadline.later(END_SECONDS))
        try:
            handle = self._stage(save, state_dict, deadline, behind)
        except Skipped:
            self.skipped_saves += 1
            self._events.tell("save.skipped", began, step=step)
            return None
        own = save.failure
        handle.staged.add_done_callback(lambda staged: self._tell_staged(save, began, staged.exception()))
        save.ended.add_done_callback(lambda ended: self._tell_end(step, began, ended.exception()))
        handle.step, handle.saved = step, save.ended
        # Also where this rank has nothing to save: the others hear of it and give this step up, not the ones after it.
        self._last, self._last_failed = save, False
        self._background().submit(save.drive)
        if isinstance(own, (UnsavableState, InvalidArgument)):
            self._last = None
            self._count(step, own)
            raise own
        if own is not None:
            self._last = None
            self._raise(self._count(step, own))
        if before is not None:
            self._raise(before)
        return handle

    def prepare(self, state_dict: dict[str, Any]) -> SaveFuture[int]:
        """Makes and maps the slots that saves of this state dict need, in the background: the first save is as fast as later ones.

        Every rank calls it, when the state's shapes are known and before the first save. What comes of it, the bytes of this
        rank's slots, may be awaited; a save waits for it. Opens the run if there is none. Nothing is raised: what could not be
        made ahead is made by the first save.
        """
        self._check_open()
        check_state(state_dict)
        future: SaveFuture[int] = SaveFuture()
        before, self._prepared = self._prepared, future
        self._has_run.clear()
        self._prepares += 1
        # States are asked for here: what gives them may be collective.
        resolved = without_states(state_dict)
        arguments = (resolved, future, f"prepare/{self._prepares}", self._at, before)
        threading.Thread(target=self._prepare, args=arguments, name="storaged-prepare", daemon=True).start()
        return future

    def watch(self, optimizer: Optimizer, state: Callable[[], dict[str, Any]]) -> None:
        """Prepares after the optimizer's first step, when its states are there: `state` makes what will be saved, in the thread that steps.

        Every rank calls it. Where that fails, it is logged, and the first save makes its slots itself.
        """
        self._check_open()

        makers = [state]

        # It stays: the optimizer is going through its hooks, and fails where one of them goes that has others behind it.
        def after_step(*_: Any) -> None:
            if not makers:
                return
            make = makers.pop()
            try:
                self.prepare(make())
            except Exception as error:
                logger.warning("nothing is made ahead: %s", said(error))

        optimizer.register_step_post_hook(after_step)

    def list(self) -> list[CheckpointInfo]:
        """The namespace's checkpoints as this node's daemon knows them, oldest first. Any rank may ask alone."""
        self._check_open()
        deadline = Deadline(self.timeout)
        try:
            rows = self.session.connect(deadline).list(self.session.namespace, deadline.left_ms())
        except UnknownNamespace:
            return []
        infos = [CheckpointInfo(run, step, state, durable, size, length) for run, step, state, durable, size, length, _ in rows]
        return sorted(infos, key=lambda info: (int(info.run.partition("-")[0]), info.step))

    def on_sigterm(self) -> None:
        """From now on SIGTERM on any rank makes `is_last_step` true; the process goes on until then. In the main thread."""
        if self._termination is None:
            self._termination = Termination(self.session, self._ranks)
            self._termination.listen()

    def is_last_step(self, step: int) -> bool:
        """After `on_sigterm`: whether the job is being ended and all ranks stop after this step, to save and leave.

        Every rank asks after every step. All ranks hear True at the same step, two later at most than where rank 0 heard of
        the signal: ranks must train in step (as with any gradient collective), and the grace period must hold two steps
        and a save.
        """
        return self._termination is not None and self._termination.is_last(step)

    def step(self, step: int) -> AbstractContextManager[None]:
        """`with checkpointer.step(n):` around what changes the weights of step n, on every rank: `verdict` then knows what is torn.

        It costs microseconds and no request, and waits for a save that still copies in the background. If an exception leaves it, or the
        process is killed in it, the step stays torn.
        """
        if self._is_parents():
            self._check_open()
        return self._fenced(step_number(step))

    def verdict(self) -> Verdict:
        """After a fault, in a process that lives on or in one that was started again: may training go on with what is in memory?

        Every rank calls it, in the process group that the job goes on with, and hears the same: `recover-in-place` only if every
        rank's own process has marked the same step as whole.
        """
        self._check_open()
        self._asked += 1
        deadline = Deadline(self.timeout)
        reader = self._reader(None)

        def newest() -> int | None:
            plan = _plan_or_none(reader, deadline)
            return None if plan is None else int(plan["step"])

        return agreed(self._ranks, f"verdict/{self._asked}", self._fence.live(deadline), newest, deadline)

    def load(
        self,
        state_dict: dict[str, Any],
        step: int | None = None,
        *,
        allow_older: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any] | None:
        """Fills the state dict; the plan that was followed, or None if nothing was saved yet.

        Every rank calls it. A durable tier that cannot be read is an error, never None. `timeout` (by default the
        checkpointer's) bounds the plan and, separately, each shard. Where it goes back to a step below one that was saved
        since the run began, the next save opens a new run. A newer checkpoint that nodes out of reach may hold is waited
        for, then `NewerUnreachable`; `allow_older` gives it up and takes the newest that can be reached.
        """
        self._check_open()
        wrong: InvalidArgument | None = None
        try:
            check_state(state_dict)
        except InvalidArgument as error:
            wrong = error  # the other ranks hear of it
        reader = self._reader(step, allow_older, timeout)
        deadline = Deadline(reader.timeout)
        with self._fence.loading(deadline) as loaded:
            plan = self._load(lambda _: self._free_to_change(state_dict), reader, deadline, wrong, self._load_planner)
            loaded.update(plan or {})
        self._make_ahead(plan, state_dict)
        return plan

    def load_all(
        self, step: int | None = None, *, allow_older: bool = False, timeout: float | None = None
    ) -> dict[str, Any] | None:
        """Everything that the checkpoint holds, whole and on the CPU, without a template; None if nothing was saved yet.

        Nested as it was saved, but keys of dicts are text, tuples are lists, and a tensor that was taken apart is the dict of
        its parts. Every rank calls it, and every rank gets all of it. It may be put into memory: what was marked there as whole is so
        no more (`verdict`) until the next `step` or `load` has ended.
        """
        self._check_open()
        flat: dict[str, Any] = {}

        def template(reader: StoragedReader) -> dict[str, Any]:
            flat.clear()
            flat.update(reader.blank())
            return flat

        reader = self._reader(step, allow_older, timeout)
        deadline = Deadline(reader.timeout)
        plan = self._load(template, reader, deadline)
        if plan is None:
            return None
        state = reader.nested(flat)
        self._fence.give(deadline)
        self._make_ahead(plan, state)
        return state

    def _reader(self, step: int | None, allow_older: bool = False, timeout: float | None = None) -> StoragedReader:
        return StoragedReader(
            step,
            session=self.session,
            threads=self.threads,
            trust_pickle=self.trust_pickle,
            allow_older=allow_older,
            progress=self.progress,
            verify=self.verify,
            timeout=self.timeout if timeout is None else timeout,
        )

    def _load(
        self,
        template: Callable[[StoragedReader], dict[str, Any]],
        reader: StoragedReader,
        deadline: Deadline,
        wrong: InvalidArgument | None = None,
        new_planner: type[StoragedLoadPlanner] = StoragedLoadPlanner,
    ) -> dict[str, Any] | None:
        # What a save did wrong was counted and logged then; a load says what it did wrong itself.
        self._settled(Deadline(reader.timeout / 2))
        newest = reader.step is None
        tried: set[str] = set()
        while True:
            plan = self._from_rank_zero("plan", lambda: _plan_or_none(reader, deadline), deadline)
            if plan is None:
                if wrong is not None:
                    raise wrong
                return None
            reader.follow(plan)
            began = time.time()
            error = self._filled(template, reader, wrong, new_planner(trust_pickle=self.trust_pickle))
            self._loads += 1
            # An older daemon calls a step lost too that was let go for a newer one. One that is lost for good is planned again once.
            gone = (NoCheckpointError,) if plan["manifest"] in tried else (NoCheckpointError, TooManyLost)
            tried.add(plan["manifest"])
            is_gone = isinstance(error, gone)
            try:
                goes_on = self._agree_on_load(plan, error, is_gone, reader.timeout, newest and not deadline.passed())
            except CheckpointLoadError:
                if wrong is not None:
                    raise wrong from None
                raise
            if not goes_on:
                break
            # A newer step took its place before all of it was open here: ordinary where somebody saves meanwhile.
            logger.info("step %s was retired while it was loaded: loading the newest one", plan["step"])
            reader.seek_newest()
        self._events.tell("load", began, step=plan["step"], bytes=sum(reader.rungs.values()))
        return dict(plan)

    def _filled(
        self,
        template: Callable[[StoragedReader], dict[str, Any]],
        reader: StoragedReader,
        wrong: InvalidArgument | None,
        planner: StoragedLoadPlanner,
    ) -> BaseException | None:
        """Fills the template with what the reader follows; why it could not, if it could not."""
        try:
            if wrong is not None:
                raise wrong
            state = template(reader)
            # Before DCP does, which of late tells what fails there as an AssertionError: a step that is gone is looked for no more.
            reader.read_metadata()
            load_alone(state, reader, planner)
        except CheckpointException as failure:
            error = only_cause(failure)
            if not isinstance(error, Exception):
                raise error from failure  # Ctrl-C, which DCP wraps too
            return error
        except StoragedError as failure:
            return failure
        return None

    def latest_step(self) -> int | None:
        """The newest restorable step, or None if nothing was saved yet. Every rank calls it."""
        self._check_open()
        reader, deadline = self._reader(None), Deadline(self.timeout)
        plan = self._from_rank_zero("plan", lambda: _plan_or_none(reader, deadline), deadline)
        return None if plan is None else plan["step"]

    def wait(self, until: str = "committed", timeout: float | None = None) -> bool:
        """Waits for the last save; whether it got there. What went wrong is raised or logged, and counted, once.

        "staged" waits for this rank's copy alone: parameters may change then.
        """
        self._is_parents()
        last, deadline = self._last, Deadline(self.timeout + END_SECONDS if timeout is None else timeout)
        if last is None:
            return not self._last_failed
        if until == "staged" and last.copied.wait(deadline.left()) and last.failure is None:
            return True
        try:
            last.ended.result(deadline.left())
        except FutureTimeout:
            if not last.ended.done():
                self._raise(CheckpointSaveError(f"step {last.step} is still being saved after {deadline.seconds:g} s", last.step))
                return False
        except CheckpointSaveError:
            pass
        self._last = None
        failure = last.ended.exception()
        if failure is None and until not in ("staged", "committed"):
            failure = self._not_yet(last, until, deadline)
        if failure is not None:
            self._raise(self._count(last.step, failure))
        return failure is None

    def close(self) -> None:
        """Waits for the last save. Whatever saves or loads raises `CheckpointerClosed` from then on."""
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._free_to_change({})
            if self._termination is not None:
                self._termination.restore()
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.shutdown(wait=False)

    def _is_parents(self) -> bool:
        """Whether this process was forked from the one that made it. What was going on there has no thread here."""
        if self._pid == os.getpid():
            return False
        self._last = self._worker = self._prepared = None
        return True

    def _check_open(self) -> None:
        if self._is_parents():
            raise CheckpointerClosed(
                f"expected a checkpointer of this process, got one of process {self._pid}, which this one was forked from: its threads are "
                "not here, and its words to the other ranks are its own; make a new one"
            )
        if self._is_closed:
            raise CheckpointerClosed(
                f"expected an open checkpointer, this one of {self.session.namespace!r} was closed (by close() or the end of its "
                "with block): make a new one, or close it later"
            )

    # Parts of `prepare`.

    def _make_ahead(self, plan: dict[str, Any] | None, state_dict: dict[str, Any]) -> None:
        if plan is not None and self.ahead == "load":
            self.prepare(state_dict)

    def _prepare(
        self, state_dict: dict[str, Any], future: SaveFuture[int], name: str, at: At, before: SaveFuture[int] | None
    ) -> None:
        deadline = Deadline(self.timeout)
        # Two at once would make more slots than there are used.
        self._wait_prepared(before, deadline)
        try:
            run = self._run or self._from_rank_zero_ahead(name, deadline, at)
            self.session.set_run(self._key, run)
            writer = self._writer(None, run)
            if self._ranks.size == 1:
                self._has_run.set()
            else:
                writer.sharer = Sharer(self._memory.sharing, self._ranks.size, lambda holding: self._ask_ahead(holding, name, deadline, at))
            future.set_result(make_slots(writer, state_dict, deadline))
        except Exception as error:
            logger.info("nothing was made ahead: %s", error)
            future.set_result(0)
        finally:
            self._has_run.set()
            if self._ranks.rank == 0 and self._asked_ahead != name:
                share_nothing(self._ranks, name)

    def _ask_ahead(self, holding: Holding, name: str, deadline: Deadline, at: At) -> Share | None:
        """What others stage of what this rank holds, when all of them prepare."""
        self._asked_ahead = name
        try:
            return agree(self._ranks, name, holding, "a state to prepare for", deadline, at, lambda rank: self._ranks.is_past(rank, at))
        finally:
            self._has_run.set()

    def _from_rank_zero_ahead(self, key: str, deadline: Deadline, at: At) -> str:
        """The run, opened by rank 0 before any save if there is none. Not waited for where rank 0 has gone on without it."""
        if self._ranks.rank != 0:
            return str(self._ranks.hear_rank_zero([key], "a run to prepare for", deadline, at))
        run = self.session.run_of(self._key) or self.session.connect(deadline).open_run(deadline.left_ms())
        self._ranks.tell(key, run)
        return run

    def _wait_prepared(self, prepared: SaveFuture[int] | None, deadline: Deadline) -> None:
        if prepared is not None:
            try:
                prepared.result(deadline.left() / 2)
            except FutureTimeout:
                logger.info("slots are still being made; the save goes on without them")

    def _writer(self, step: int | None, run: str) -> StoragedWriter:
        return StoragedWriter(
            step,
            session=self.session,
            run=run,
            durable=self.durable,
            until=self.until,
            threads=self.threads,
            timeout=self.timeout,
            trust_pickle=self.trust_pickle,
            rank=self._ranks.rank,
            world_size=self._ranks.size,
        )

    # Parts of `save`.

    def _tell_staged(self, save: Save, began: float, error: BaseException | None) -> None:
        if error is None and save.writer is not None:
            self._events.tell("save.staged", began, step=save.step, bytes=save.writer.staged_bytes)

    def _tell_end(self, step: int, began: float, error: BaseException | None) -> None:
        if error is None:
            self._events.tell("save.ended", began, step=step, state=self.until)
        else:
            self._events.tell("save.failed", began, step=step, error=type(error).__name__, text=str(error))

    def _skips(self, save: Save) -> bool:
        """On rank 0: whether this save is left out, and says so to the others."""
        going_on = self._last is not None and not self._last.ended.done()
        if self.busy != "skip" or self._ranks.rank != 0 or not going_on:
            return False
        self.skipped_saves += 1
        self._begin_without(save)
        return True

    def _settled(self, deadline: Deadline) -> CheckpointSaveError | None:
        """Waits for the save before this one; what went wrong with it, counted."""
        last = self._last
        if last is None:
            return None
        try:
            last.ended.result(deadline.left())
        except FutureTimeout:
            if not last.ended.done():
                return None
        except CheckpointSaveError:
            pass
        self._last = None
        failure = last.ended.exception()
        if failure is None:
            return None
        assert isinstance(failure, CheckpointSaveError)
        return self._count(last.step, failure)

    @contextmanager
    def _fenced(self, step: int) -> Iterator[None]:
        last = self._last
        # Its deadline bounds what it waits for before it copies.
        if last is not None and not last.copied.wait(last.deadline.left() + END_SECONDS):
            self._free_to_change({})
        with self._fence.step(step):
            yield

    def _free_to_change(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same, when its tensors are about to change: a save that has not copied them is given up."""
        if self._last is not None:
            self._last.tear()
        return state_dict

    def _stage(
        self, save: Save, state_dict: dict[str, Any] | Callable[[], dict[str, Any]], deadline: Deadline, behind: bool
    ) -> SaveHandle:
        """Stages, or leaves in the save how to do it in the background, or why not."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and behind:
            self._has_run.wait(deadline.left() / 2)
        else:
            self._wait_prepared(prepared, deadline)
        handle = SaveHandle(self.session, None)
        try:
            if self._last is not None:
                # The caller may take this failure for leave to change the tensors.
                self._last.tear()
                raise WaitTimeout(f"the save of step {self._last.step} has not ended within {deadline.seconds:g} s")
            deadline.check("staging, the save before it took all of it")
            if callable(state_dict):
                state_dict = state_dict()
            check_state(state_dict)
            save.run = run = self._begun(save, deadline)
            writer = self._writer(save.step, run)
            writer.sharer = save.sharer()
            handle = writer.handle
            if behind:
                copy = writer.captured(state_dict, deadline, behind)

                def stage() -> Twin | Whole:
                    self._wait_prepared(prepared, deadline)
                    return copy()

                save.stage = stage
            else:
                save.staged = writer.stage_within(state_dict, deadline)
                save.copied.set()
            save.writer = writer
            return handle
        except Skipped:
            raise
        except Exception as error:
            save.failure = error
            if isinstance(error, UnknownRun) and save.run is not None:
                # At once: whoever saves next in this process may be another checkpointer.
                self._lose_runs({save.run})
            self._begin_without(save)
            handle._fail(error)
            return handle

    def _begun(self, save: Save, deadline: Deadline) -> str:
        """The run. Rank 0 opens it if there is none and tells it; the others know it or wait to hear it."""
        key = self._key
        run = self._run or self.session.run_of(key)
        if self._ranks.rank == 0:
            if run is None:
                run = self.session.connect(deadline).open_run(deadline.left_ms())
            save.begin(run)
        else:
            save.begin(None)
            if run is None or self.busy == "skip":
                run = save.hear_begin()
        self.session.set_run(key, run)
        return run

    def _begin_without(self, save: Save) -> None:
        try:
            if not save.has_begun:
                save.begin(None)
        except StoragedError as error:
            logger.debug("the other ranks could not be told: %s", error)

    def _background(self) -> ThreadPoolExecutor:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "storaged-save")
        return self._worker

    def _lose_runs(self, runs: set[str]) -> None:
        """Later saves belong to none of these: the next one opens a new run, unless another checkpointer has done so already."""
        for run in runs:
            self.session.forget_run(self._key, run)
        if self._run in runs:
            # STORAGED_RUN names the first run of this process only.
            self._run = self._own_run

    def _leave_run(self) -> None:
        """The next save opens a new run; one that the caller named stays."""
        self.session.forget_run(self._key)
        self._run = self._own_run

    # What becomes of failures.

    def _count(self, step: int, error: BaseException) -> CheckpointSaveError:
        """Counts and logs a save that failed; its error."""
        if isinstance(error, CheckpointSaveError):
            failure = error
        else:
            failure = CheckpointSaveError(f"step {step} was not saved: {said(error)}", step)
            failure.__cause__ = error
        self.failed_saves += 1
        self.last_error = failure
        self._last_failed = True
        logger.warning("%s (%d saves failed so far)", failure, self.failed_saves)
        return failure

    def _raise(self, error: CheckpointSaveError) -> None:
        if self.on_error == "raise":
            raise error

    def _not_yet(self, save: Save, until: str, deadline: Deadline) -> StoragedError | None:
        assert save.writer is not None
        try:
            save.writer.handle._reached(until, deadline)
        except StoragedError as error:
            failure = CheckpointSaveError(f"step {save.step} did not become {until}: {error}", save.step)
            failure.__cause__ = error
            return failure
        return None

    # What the ranks agree on.

    def _from_rank_zero(self, name: str, make: Callable[[], Any], deadline: Deadline) -> Any:
        """Rank 0 makes a value, every rank gets it, or the same error."""
        self._asked += 1
        self._calls.begin()
        key = f"{name}/{self._asked}"
        if self._ranks.rank != 0:
            kind, value = self._ranks.hear_rank_zero([key], f"a load (call {self._asked})", deadline.later(FOLLOW_SECONDS))
        else:
            try:
                kind, value = "ok", make()
            except StoragedError as error:
                kind, value = "failed", error
            self._calls.tell(key, (kind, value))
        if kind == "failed":
            raise value
        return value

    def _agree_on_load(self, plan: dict[str, Any], error: BaseException | None, is_gone: bool, limit: float, newest: bool) -> bool:
        """All ranks have loaded, or all raise; all go back to an older step, or none. True if all are to load again: the newest
        step was asked for, and the one that was planned is gone."""
        own = (said(error), self.session.last_step(self._key), is_gone)
        key, what = f"loaded/{self._asked}", f"the load of step {plan['step']}"
        if self._ranks.rank == 0:
            try:
                told = self._ranks.gather(key, own, what, Deadline(limit))
            except StoragedError as missing:
                verdict: tuple[str, Any] = ("failed", str(missing))
            else:
                failures = [f"rank {rank}: {why}" for rank, (why, _, _) in enumerate(told) if why is not None]
                last = max((step for _, step, _ in told if step is not None), default=plan["step"])
                all_gone = newest and all(gone for why, _, gone in told if why is not None)
                verdict = ("gone" if all_gone else "failed", "; ".join(failures[:5])) if failures else ("ok", last > plan["step"])
            self._ranks.tell(f"{key}/all", verdict)
            self._ranks.forget_later("loads", [f"{key}/{rank}" for rank in range(self._ranks.size)] + [f"{key}/all"])
        else:
            self._ranks.tell(f"{key}/{self._ranks.rank}", own)
            verdict = self._ranks.hear_rank_zero([f"{key}/all"], what, Deadline(limit + FOLLOW_SECONDS))
        kind, value = verdict
        if kind == "failed":
            raise CheckpointLoadError(f"step {plan['step']} was not loaded: {value}") from error
        if kind == "ok" and value:
            self._leave_run()
        return kind == "gone"


def _plan_or_none(reader: StoragedReader, deadline: Deadline) -> dict[str, Any] | None:
    try:
        return reader.ask(deadline)
    except NoCheckpointError:
        if reader.step is None:
            return None
        raise
