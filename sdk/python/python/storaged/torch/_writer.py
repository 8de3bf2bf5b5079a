"""DCP's writer and stager in one: tensors go straight to their offset in the slot, and nothing else happens to them."""

from __future__ import annotations

import inspect
import io
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from .._arguments import DURABLE, limit_in_seconds, one_of, step_number, step_or_none, thread_count
from .._deadline import Deadline
from .._session import Session
from ..errors import (
    DaemonUnavailable,
    InvalidArgument,
    ProcessModeUnsupported,
    ProtocolError,
    RanksMissing,
    StoragedError,
    UnknownRun,
    WaitTimeout,
)
from ._arena import Layouts, Shard, captured
from ._handle import STATES, SaveHandle
from ._metadata import Place, emit_torch_metadata, encode_schema
from ._objects import check_loadable
from ._ranks import ALONE, given_run, lose_run, rank_and_world, resolve_run, run_key, step_of
from ._sharing import Holding, Notes, Share, Sharer, Sharing, check_nothing_is_lost, with_agreement, without
from ._structure import Structure, Twin, Whole
from ._tensors import own_memory

logger = logging.getLogger("storaged")

# A daemon that does not take a slot back at once gets it back with the connection.
RELEASE_SECONDS = 0.5

NOT_IN_A_PROCESS = (
    "AsyncCheckpointerType.PROCESS cannot carry arena tensors (torch copies or crashes): use the default THREAD, "
    "copying and encoding already run outside Python"
)
#: How far above `stage` the call of `async_save` is looked for: decorators of torch lie between.
CALLERS_MAX = 12

# Layouts belong to one connection: a new one gets new slots, which may have old numbers.
_layouts: weakref.WeakKeyDictionary[Session, tuple[Any, Layouts]] = weakref.WeakKeyDictionary()
# What others stage, by group: users make a writer by the save.
_sharings: weakref.WeakKeyDictionary[Session, dict[Any, Sharing]] = weakref.WeakKeyDictionary()


class StoragedWriter(StorageWriter):
    """Saves one checkpoint (or, with a `checkpoint_id` naming the step each time, one after the other)."""

    # What makes this object an AsyncStager too.
    _synchronize_after_execute = True

    def __init__(
        self,
        step: int | None = None,
        *,
        namespace: str | None = None,
        run: str | None = None,
        durable: str = "policy",
        until: str = "committed",
        threads: int | None = None,
        timeout: float = 120.0,
        trust_pickle: bool = False,
        session: Session | None = None,
        process_group: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self.until = one_of("until", until, STATES)
        self.session = session or Session.shared(namespace)
        self.step = step_or_none(step)
        self.durable = one_of("durable", durable, DURABLE)
        self.threads = thread_count(threads)
        self.timeout = limit_in_seconds(timeout)
        self.trust_pickle = trust_pickle
        self.process_group = process_group
        if (rank is None) != (world_size is None):
            raise InvalidArgument("rank and world_size go together: give both (0 and 1 where one rank saves alone), or neither")
        if rank is None or world_size is None:
            self.rank, self.world_size = rank_and_world(process_group)
            self._is_alone = False
        else:
            self.rank, self.world_size = rank, world_size
            self._is_alone = True
        self._given = self._run = given_run(run)
        if self._is_alone and self._given is None and (rank, world_size) != (0, 1):
            raise InvalidArgument(f"rank {rank} of {world_size} needs run=: only a rank that is alone (0 of 1) opens a run by itself")
        self.handle = SaveHandle(self.session, self._run)
        self._shard: Shard | None = None
        self._contexts: dict[str, str] = {}
        #: Asks which tensors other ranks stage.
        self.sharer: Sharer | None = None
        #: What of the plan they stage.
        self.left: frozenset[MetadataIndex] = frozenset()
        #: What others stage is learned from the plans of DCP's own saves.
        self._sharing: Sharing | None = None
        #: What this rank's plan named before that was taken out; None if the plan is one that was kept.
        self._named: frozenset[MetadataIndex] | None = None
        #: Where this rank's empty dicts lie, and on the coordinator those of all ranks.
        self._empty_dicts: list[tuple[Any, ...]] = []
        self._all_empty_dicts: list[tuple[Any, ...]] = []
        self._failure: Exception | None = None
        #: What was staged was given up before it was written.
        self._gave_up = False
        #: DCP has begun with what was staged last.
        self._is_set_up = False
        self._coordinator = False
        self.deadline = Deadline(timeout)
        #: How the checkpoint was described, on the coordinator: the schema, and what stock readers read.
        self.described: tuple[bytes, bytes] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ProcessModeUnsupported(NOT_IN_A_PROCESS)

    @property
    def run(self) -> str:
        """The run that is saved in. Each save resolves it: rank 0 opens one if there is none, and the others wait for its word."""
        if self._run is None:
            deadline = Deadline(self.timeout)
            if self._is_alone:
                self._run = alone(self.session, deadline)
            else:
                self._run = resolve_run(self.session, None, self.process_group, deadline)
        self.handle.run = self._run
        return self._run

    @property
    def checkpoint_id(self) -> str:
        return f"storaged://{self.session.namespace}/step-{self.step}"

    # The stager's part.

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies every tensor into a slot. On return the trainer may change its tensors.

        What goes wrong is raised by the save's first collective, on every rank: an exception here, on one rank alone,
        would leave the others waiting for it. `handle.staged` has it at once.
        """
        if self._is_set_up:
            # What is still there is of a save that failed on another rank: nobody tells a writer so.
            self.close()
        if self._shard is not None:
            self._failure = StoragedError("a save of this writer is in flight: use one writer per save")
            return {}
        if _is_for_a_process():
            raise ProcessModeUnsupported(NOT_IN_A_PROCESS)
        self._run = self._given
        self.handle = SaveHandle(self.session, self._run)
        self._share_as_planned()
        try:
            return self.stage_within(state_dict, Deadline(self.timeout)).state_dict
        except Exception as error:
            self._failure = error
            return {}

    def stage_within(self, state_dict: dict[str, Any], deadline: Deadline) -> Twin | Whole:
        """`stage` that raises what goes wrong, with its slot by then."""
        return self.captured(state_dict, deadline)()

    def captured(self, state_dict: dict[str, Any], deadline: Deadline, behind: bool = False) -> Callable[[], Twin | Whole]:
        """The first part of `stage_within`, which finds out what there is; the second is to be called, `behind` in another thread."""
        started = time.perf_counter()
        shard: Shard | None = None
        try:
            shard = self.new_shard(deadline)
            copy = captured(shard, state_dict, self.trust_pickle, behind)
        except BaseException as error:
            self._not_staged(shard, error)
            raise

        def stage() -> Twin | Whole:
            try:
                staged = copy()
            except BaseException as error:
                self._not_staged(shard, error)
                raise
            self._shard, self._contexts, self._gave_up, self._is_set_up = shard, shard.contexts, False, False
            self._empty_dicts = shard.empty_dicts
            self.left = frozenset() if shard.share is None else shard.share.items
            seconds = time.perf_counter() - started
            logger.debug("rank %d staged %.1f MiB in %.3f s", self.rank, shard.copied_bytes / 2**20, seconds)
            self.handle.staged.set_result(None)
            return staged

        return stage

    def _not_staged(self, shard: Shard | None, error: BaseException) -> None:
        if shard is not None and isinstance(error, Exception):
            self.give_up(shard)
        self.forget_if_broken(error, shard)
        self.handle._fail(error)

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when every byte is in."""

    def close(self) -> None:
        """Gives an unfinished save up. May be called at any time, any number of times, or never."""
        shard, self._shard = self._shard, None
        if shard is not None:
            self.give_up(shard)

    # The writer's part.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return step_of(checkpoint_id) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        named = step_of(checkpoint_id)
        if named is not None:
            self.step = step_number(named)
        elif checkpoint_id is not None:
            raise InvalidArgument(f"expected a checkpoint id that names a step, such as 'step-120', got {str(checkpoint_id)!r}")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._gave_up = self._shard is not None
            self.close()
            raise failure
        self._is_set_up = True
        if self.step is None:
            raise InvalidArgument("expected a step, got none: StoragedWriter(step=120) or checkpoint_id='step-120'")
        self.deadline = Deadline(self.timeout)
        self._coordinator = is_coordinator
        if self._shard is None:
            self._run = self._given
        # Where nothing was staged, every rank learns of the run here: in DCP's own step, which carries failures to all.
        self.handle.run = self.run

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=uuid.uuid4().hex)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._shard is None:
            return plan
        if not getattr(plan, "usable", True):
            self._named = None
            return plan
        self._named = frozenset(item.index for item in plan.items)
        plan, left = without(plan, self.left)
        return replace(plan, storage_data=Notes(tuple(self._empty_dicts), left, None if self.share is None else self.share.name))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        check_nothing_is_lost(plans)
        self._all_empty_dicts = [path for plan in plans if plan.storage_data for path in plan.storage_data.empty_dicts]
        return with_agreement(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        shard, self._shard = self._shard, None
        staged = shard is not None
        if self._gave_up or (staged and not self._is_set_up):
            # It is of a save that began since.
            self._shard, self._gave_up = shard, False
            raise StoragedError("another save of this writer began while this one was in flight: use one writer per save")
        try:
            shard = shard or self.new_shard(self.deadline)
            results = self._fill(shard, plan, planner, staged)
            self._seal(shard)
        except BaseException as error:
            if shard is not None:
                self.give_up(shard)
            self.forget_if_broken(error, shard)
            self.handle._fail(error)
            raise
        if not self.handle.staged.done():
            self.handle.staged.set_result(None)
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: describes the whole checkpoint, and waits until it is as safe as asked."""
        # The metadata object may be shared between saves (plan caching): it is read, never changed.
        self._check_steps(results)
        places = {result.index: Place(*result.storage_data[:-1]) for part in results for result in part}
        try:
            schema = encode_schema(metadata, places, contexts=self._contexts, empty_dicts=self._all_empty_dicts)
            self.commit(schema, emit_torch_metadata(metadata, places))
        except UnknownRun:
            self._lose_run()
            raise

    def commit(self, schema: bytes, emitted: bytes) -> None:
        """Describes the checkpoint, and waits until it is as safe as asked."""
        assert self.step is not None
        self.described = (schema, emitted)
        self._trainer(self.deadline).commit(self.step, schema, emitted, self.durable, self.deadline.left_ms())
        self.handle.step = self.step
        if self.until != "staged":
            started = time.perf_counter()
            state = self.handle._reached(self.until, self.deadline)
            logger.info("step %d %s +%.2f s", self.step, state, time.perf_counter() - started)

    # Saves of the same structure as one before (`Checkpointer`): no plan, and objects where they were.

    @property
    def staged_bytes(self) -> int:
        return self._shard.copied_bytes if self._shard is not None else 0

    @property
    def structure(self) -> Structure | None:
        """What was staged, if it may come again."""
        return self._shard.structure if self._shard is not None else None

    @property
    def share(self) -> Share | None:
        """What of its tensors this rank has staged, if others have staged the rest."""
        return self._shard.share if self._shard is not None else None

    def write_again(self, pieces: list[tuple[int, bytes]]) -> None:
        """Puts objects to their offsets, and seals."""
        shard, self._shard = self._shard, None
        assert shard is not None and shard.slot is not None
        try:
            start = shard.end
            end = max((offset + len(data) for offset, data in pieces), default=start)
            behind = bytearray(end - start)
            for offset, data in pieces:
                behind[offset - start : offset - start + len(data)] = data
            shard.reserve(end).write(start, bytes(behind))
            shard.end = end
            self._seal(shard)
        except BaseException as error:
            self.give_up(shard)
            self.forget_if_broken(error, shard)
            raise

    def _seal(self, shard: Shard) -> None:
        assert self.step is not None and shard.slot is not None
        self.session.note_step(self.run, self.step)
        self._trainer(self.deadline).seal(shard.slot, self.step, shard.end, self.deadline.left_ms())
        self._release(shard.outgrown)
        self.handle.step = self.step
        self.copied_bytes, self.spilled_bytes = shard.copied_bytes, shard.spilled_bytes
        self.appended = shard.appended

    # Parts of the above.

    def _check_steps(self, results: list[list[WriteResult]]) -> None:
        """Ranks pair their saves by the order of DCP's collectives: one that left a save out is at another step."""
        at = {result.storage_data[0]: result.storage_data[-1] for part in results for result in part[:1]}
        others = {rank: step for rank, step in at.items() if step != self.step}
        if others:
            said = ", ".join(f"rank {rank} saves step {step}" for rank, step in sorted(others.items())[:5])
            raise RanksMissing(
                f"expected all ranks at the save of step {self.step}, {said}: some rank left a save out, and DCP pairs saves "
                "by their order; storaged.torch.Checkpointer pairs them by step",
                tuple(others),
            )

    def _trainer(self, deadline: Deadline) -> Any:
        return self.session.trainer(self.run, self.rank, self.world_size, deadline)

    def new_shard(self, deadline: Deadline) -> Shard:
        """A shard without a slot yet."""
        trainer = self._trainer(deadline)
        owner, layouts = _layouts.get(self.session, (None, Layouts()))
        if owner is not trainer:
            layouts = Layouts()
            _layouts[self.session] = (trainer, layouts)
        # A copy may take longer than what is left for a second slot: waits for one begin anew then.
        first = [deadline]

        def acquire(size: int) -> Any:
            limit = first.pop() if first else Deadline(self.timeout)
            return trainer.acquire(size, limit.left_ms())

        shard = Shard(self.rank, acquire, layouts, self.threads)
        shard.sharer = self.sharer
        return shard

    def _fill(self, shard: Shard, plan: SavePlan, planner: SavePlanner, staged: bool) -> list[WriteResult]:
        tensors = [i for i in plan.items if i.type != WriteItemType.BYTE_IO]
        objects = [i for i in plan.items if i.type == WriteItemType.BYTE_IO]
        values = [own_memory(item.index.fqn, tensor_of(planner, item)) for item in tensors]
        if shard.slot is None:
            # Nothing was staged (a plain `dcp.save`): everything goes straight in, in the plan's order.
            shard.stage(values, 4096 * len(objects))
            records = self._records_of(shard, values)
        else:
            records = [shard.place_of(value) or shard.append_tensor(value) for value in values]
            self._learn_share(shard, plan, planner, records)
        results = [self._result(item.index, place) for item, place in zip(tensors, records)]
        for item in objects:
            saved = bytes_of(planner, item)
            if not staged and not self.trust_pickle:
                check_loadable(item.index.fqn, saved)
            results.append(self._result(item.index, shard.append_bytes(saved)))
        return results

    def _share_as_planned(self) -> None:
        """What DCP's plan of the last save had others write they stage too, from the next save of the same tensors on."""
        if self._is_alone or self.world_size == 1:
            return
        sharing = self._sharing = _sharings.setdefault(self.session, {}).setdefault(run_key(self.process_group), Sharing())
        if sharing.is_in_doubt and sharing.share is not None and sharing.share.items:
            # A save that was not planned yet, or never: ranks may not have the same share any more.
            sharing.share = None
        sharing.is_in_doubt = True

        def nobody(_: Holding) -> None:
            return None

        self.sharer = Sharer(sharing, self.world_size, nobody)

    def _learn_share(self, shard: Shard, plan: SavePlan, planner: SavePlanner, records: list[Place]) -> None:
        sharing, notes = self._sharing, plan.storage_data
        if sharing is None or not isinstance(notes, Notes):
            return
        sharing.is_in_doubt = False
        if notes.agreement is None:
            sharing.share = None
        elif shard.share is None and shard.holding is not None:
            sharing.share = share = self._share_of_plan(notes.agreement, shard, shard.holding, plan, planner, records)
            if not share.left and shard.structure is not None:
                shard.structure.share = share

    def _share_of_plan(
        self, agreement: str, shard: Shard, holding: Holding, plan: SavePlan, planner: SavePlanner, records: list[Place]
    ) -> Share:
        # Plans that are kept, and planners that make other tensors of what was staged, need all of it.
        if self._named is None or shard.appended or getattr(planner, "_enable_plan_caching", False):
            return Share(agreement, holding, frozenset())
        used = {place.data_offset for place in records}
        offsets = [record[2] for record in shard.layouts.of(shard.specs)[0]]
        left = frozenset(at for at, index in enumerate(shard.entries) if index is not None and offsets[index] not in used)
        return Share(agreement, holding, left, self._named - {item.index for item in plan.items})

    def _result(self, index: MetadataIndex, place: Place) -> WriteResult:
        # The step is the last: whoever collects the results sees who saves which.
        row = (place.rank, place.offset, place.length, place.data_offset, place.data_length, self.step)
        return WriteResult(index=index, size_in_bytes=place.length, storage_data=row)

    def _records_of(self, shard: Shard, values: list[Any]) -> list[Place]:
        from ._arena import spec_of

        records, _, _ = shard.layouts.of(tuple(map(spec_of, values)))
        return [Place(shard.rank, *record) for record in records]

    def forget_if_broken(self, error: BaseException, shard: Shard | None = None) -> None:
        """After a failure: whether the connection, or the run, is of no use any more."""
        # The next save connects anew, perhaps to a daemon that was restarted. After Ctrl-C an answer may still come.
        if isinstance(error, (DaemonUnavailable, WaitTimeout, ProtocolError, KeyboardInterrupt)):
            self.session.drop_connections(error if shard is not None and shard.slot is not None else None)
        if isinstance(error, UnknownRun):
            self._lose_run()

    def _lose_run(self) -> None:
        """The next save opens a new one."""
        if not self._is_alone:
            lose_run(self.session, self._run, self.process_group)
        elif self.world_size == 1:
            # Ranks that save together have to forget it together: `Checkpointer` does.
            for key in (ALONE, run_key(self.process_group)):
                self.session.forget_run(key, self._run)

    def give_up(self, shard: Shard) -> None:
        """Gives its slots back, unused."""
        slots = shard.outgrown + ([shard.slot] if shard.slot is not None else [])
        self._release(slots)

    def _release(self, slots: list[Any]) -> None:
        for slot in slots:
            try:
                limit = Deadline(RELEASE_SECONDS)
                self._trainer(limit).release(slot, limit.left_ms())
            except StoragedError as error:
                # The daemon takes slots of a broken connection back by itself.
                logger.debug("a slot could not be given back: %s", error)
                return self.session.drop_connections()


def tensor_of(planner: SavePlanner, item: Any) -> torch.Tensor:
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    return value


def bytes_of(planner: SavePlanner, item: Any) -> bytes:
    value = planner.resolve_data(item)
    assert isinstance(value, io.BytesIO)
    return value.getvalue()


def alone(session: Session, deadline: Deadline) -> str:
    """The run of one rank that saves alone, opened once per session."""
    known = session.run_of(ALONE)
    if known is None:
        known = session.connect(deadline).open_run(deadline.left_ms())
        session.set_run(ALONE, known)
    return known


def _is_for_a_process() -> bool:
    """Whether `dcp.async_save` stages for another process. It tells nobody, and finds out only when it pickles the writer."""
    frame = inspect.currentframe()
    for _ in range(CALLERS_MAX):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code.co_name == "async_save":
            kind = frame.f_locals.get("async_checkpointer_type")
            return getattr(kind, "name", "") == "PROCESS"
    return False
