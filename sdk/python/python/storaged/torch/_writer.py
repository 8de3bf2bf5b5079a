"""DCP's writer and stager in one: tensors go straight to their offset in the slot, and nothing else happens to them."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from .._session import Session, milliseconds
from ..errors import DaemonUnavailable, InvalidArgument, ProcessModeUnsupported, StoragedError, WaitTimeout
from ._arena import Layouts, Shard, stage_state_dict
from ._metadata import Place, emit_torch_metadata, encode_schema
from ._ranks import rank_and_world, resolve_run, step_of

logger = logging.getLogger("storaged")

STATES = ("staged", "committed", "protected", "durable")
# Layouts belong to one connection: a new one gets new slots, which may have old numbers.
_layouts: dict[Session, tuple[Any, Layouts]] = {}


class SaveHandle:
    """One save: block on `staged` before the parameters change."""

    def __init__(self, session: Session, run: str) -> None:
        self.session = session
        self.run = run
        self.step: int | None = None
        self.staged: Future[None] = Future()

    def wait(self, until: str = "committed", timeout: float = 120.0) -> str:
        """Waits until the checkpoint is at least in that state; the state that it is in."""
        if self.step is None:
            raise InvalidArgument("the save has not reached its step yet: wait for async_save's future first")
        return self.session.connect().wait(self.run, self.step, until, milliseconds(timeout))[0]


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
        threads: int = 1,
        timeout: float = 120.0,
        session: Session | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        if until not in STATES:
            raise InvalidArgument(f"until must be one of {', '.join(STATES)}, got {until!r}")
        self.session = session or Session.shared(namespace)
        self.step = step
        self.durable = durable
        self.until = until
        self.threads = threads
        self.timeout = timeout
        self.rank, self.world_size = rank_and_world(process_group)
        self.run = resolve_run(self.session, run, process_group)
        self.handle = SaveHandle(self.session, self.run)
        self._shard: Shard | None = None
        self._coordinator = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ProcessModeUnsupported(
            "AsyncCheckpointerType.PROCESS cannot carry arena tensors (torch copies or crashes): use the default THREAD, "
            "copying and encoding already run outside Python"
        )

    @property
    def checkpoint_id(self) -> str:
        return f"storaged://{self.session.namespace}/step-{self.step}"

    # The stager's part.

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies every tensor into a slot. On return the trainer may change its tensors."""
        if self._shard is not None:
            raise StoragedError("a save of this writer is in flight: use one writer per save")
        started = time.perf_counter()
        self.handle = SaveHandle(self.session, self.run)
        shard = self._new_shard()
        try:
            staged = stage_state_dict(shard, state_dict)
        except BaseException as error:
            self._give_up(shard)
            self._forget_if_broken(error)
            raise
        self._shard = shard
        self.handle.staged.set_result(None)
        seconds = time.perf_counter() - started
        logger.debug("rank %d staged %.1f MiB in %.3f s", self.rank, shard.copied_bytes / 2**20, seconds)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when every byte is in."""

    def close(self) -> None:
        """Gives an unfinished save up. May be called at any time, any number of times, or never."""
        shard, self._shard = self._shard, None
        if shard is not None:
            self._give_up(shard)

    # The writer's part.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return step_of(checkpoint_id) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        named = step_of(checkpoint_id)
        if named is not None:
            self.step = named
        elif checkpoint_id is not None:
            raise InvalidArgument(f"expected a checkpoint id that names a step, such as 'step-120', got {str(checkpoint_id)!r}")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.step is None:
            raise InvalidArgument("expected a step, got none: StoragedWriter(step=120) or checkpoint_id='step-120'")
        self._coordinator = is_coordinator

    def storage_meta(self) -> StorageMeta | None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        shard, self._shard = self._shard, None
        if shard is None:
            shard = self._new_shard()
        try:
            results = self._fill(shard, plan, planner)
            assert self.step is not None and shard.slot is not None
            self._trainer().seal(shard.slot, self.step, shard.end)
        except BaseException as error:
            self._give_up(shard)
            self._forget_if_broken(error)
            raise
        self._release(shard.outgrown)
        self.handle.step = self.step
        if not self.handle.staged.done():
            self.handle.staged.set_result(None)
        self.copied_bytes, self.spilled_bytes = shard.copied_bytes, shard.spilled_bytes
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: describes the whole checkpoint, and waits until it is as safe as asked."""
        # The metadata object may be shared between saves (plan caching): it is read, never changed.
        places = {result.index: Place(*result.storage_data) for part in results for result in part}
        schema = encode_schema(metadata, places)
        emitted = emit_torch_metadata(metadata, places)
        assert self.step is not None
        self._trainer().commit(self.step, schema, emitted, self.durable)
        self.handle.step = self.step
        if self.until != "staged":
            started = time.perf_counter()
            state = self.handle.wait(self.until, self.timeout)
            logger.info("step %d %s +%.2f s", self.step, state, time.perf_counter() - started)

    # Parts of the above.

    def _trainer(self) -> Any:
        return self.session.trainer(self.run, self.rank, self.world_size)

    def _new_shard(self) -> Shard:
        trainer, limit = self._trainer(), milliseconds(self.timeout)
        owner, layouts = _layouts.get(self.session, (None, Layouts()))
        if owner is not trainer:
            layouts = Layouts()
            _layouts[self.session] = (trainer, layouts)
        return Shard(self.rank, lambda size: trainer.acquire(size, limit), layouts, self.threads)

    def _fill(self, shard: Shard, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        tensors = [i for i in plan.items if i.type != WriteItemType.BYTE_IO]
        objects = [i for i in plan.items if i.type == WriteItemType.BYTE_IO]
        values = [planner.resolve_data(item).detach() for item in tensors]
        if shard.slot is None:
            # Nothing was staged (a plain `dcp.save`): everything goes straight in, in the plan's order.
            shard.stage(values, 4096 * len(objects))
            records = self._records_of(shard, values)
        else:
            records = [shard.place_of(value) or shard.append_tensor(value) for value in values]
        results = [_result(item.index, place) for item, place in zip(tensors, records)]
        for item in objects:
            place = shard.append_bytes(planner.resolve_data(item).getvalue())
            results.append(_result(item.index, place))
        return results

    def _records_of(self, shard: Shard, values: list[Any]) -> list[Place]:
        from ._arena import spec_of

        records, _, _ = shard.layouts.of(tuple(map(spec_of, values)))
        return [Place(shard.rank, *record) for record in records]

    def _forget_if_broken(self, error: BaseException) -> None:
        # The next save connects anew, perhaps to a daemon that was restarted.
        if isinstance(error, (DaemonUnavailable, WaitTimeout)):
            self.session.drop_connections()

    def _give_up(self, shard: Shard) -> None:
        slots = shard.outgrown + ([shard.slot] if shard.slot is not None else [])
        self._release(slots)

    def _release(self, slots: list[Any]) -> None:
        for slot in slots:
            try:
                self._trainer().release(slot)
            except StoragedError as error:
                # The daemon takes slots of a broken connection back by itself.
                logger.debug("a slot could not be given back: %s", error)
                self.session.drop_connections()


def _result(index: MetadataIndex, place: Place) -> WriteResult:
    row = (place.rank, place.offset, place.length, place.data_offset, place.data_length)
    return WriteResult(index=index, size_in_bytes=place.length, storage_data=row)
