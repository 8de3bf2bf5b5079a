"""DCP's reader: every rank names the digest that rank 0 picked, and gets verified byte ranges."""

from __future__ import annotations

import io
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future as TorchFuture

from .._arguments import VERIFY, limit_in_seconds, one_of, ranks_here, step_number, step_or_none, thread_count
from .._deadline import Deadline
from .._session import Session
from ..errors import CheckpointLoadError, CorruptData, InvalidArgument, StoragedError, WaitTimeout
from ._devices import device_of
from ._landing import Rows, land
from ._metadata import CONTEXTS, EMPTY_DICTS, Place, decode_schema
from ._objects import load_plain, saved_by_torch
from ._openings import OPEN_AT_ONCE, Ahead, Prospect
from ._progress import Hook, Part, Progress
from ._ranks import from_rank_zero, rank_and_world, run_key, step_of
from ._tensors import contexts_of, holds_wrapper, is_plain, taken_apart

logger = logging.getLogger("storaged")

# A daemon that does not hear of a closed shard at once hears of it with the connection.
CLOSE_SECONDS = 0.5
# A daemon that takes longer to say how it is and to be connected to opens shards in turn.
PROSPECT_SECONDS = 2.0
# A request has at most 4 MiB, and a range up to 20 bytes of it: a shard of which more pieces are wanted is opened whole.
RANGES_MAX = 200_000

#: What an item wants: its offset in the shard, its bytes there, and the tensor.
Landing = tuple[ReadItem, int, int, torch.Tensor]
#: Where bytes of a shard begin, and how many.
Span = tuple[int, int]


@dataclass(frozen=True)
class Wanted:
    """What is read of one saved rank's shard."""

    rank: int
    items: list[ReadItem]
    #: Of each item.
    spans: list[Span]
    #: Those that are opened.
    ranges: list[Span]


@dataclass(frozen=True)
class Attempt:
    """How a shard is opened."""

    #: Who may have opened it already.
    ahead: Ahead | None = None
    #: Its copy in this node's RAM was found damaged.
    without_own_ram: bool = False
    #: It is used while it still comes.
    early: bool = True

    def after(self, error: StoragedError, shard: Any) -> Attempt | None:
        """How it is opened again after this, where that may help. What came while it was used failed where its opening would have; that one is
        tried anew, unless its time is over. One that was opened ahead had only a part of it.
        """
        if shard.is_early and self.early and (self.ahead is not None or not isinstance(error, WaitTimeout)):
            return replace(self, ahead=None, early=False)
        if isinstance(error, CorruptData) and shard.rung == "own ram" and not self.without_own_ram:
            return replace(self, ahead=None, without_own_ram=True)
        return None


class StoragedReader(StorageReader):
    """Loads a step, or without one the newest restorable checkpoint; the world size may differ from the saving one's.

    A plan waits, up to `timeout` seconds, for nodes that may hold a newer checkpoint, and then raises `NewerUnreachable`;
    `allow_older` takes the newest that can be reached instead, and gives the newer one up. `progress` is called with the bytes
    that this rank has read and those that it will, from 0 on, in the thread that loads.

    Every byte is verified. `verify` says how that which never left this node is: "fast" compares it with the fingerprint that its
    daemon took of each chunk (which finds memory that has changed, all but one in 2^31 chunks), "full" with its BLAKE3 digest,
    as everything that came from elsewhere is.
    """

    def __init__(
        self,
        step: int | None = None,
        *,
        namespace: str | None = None,
        allow_older: bool = False,
        trust_pickle: bool = False,
        threads: int | None = None,
        timeout: float = 300.0,
        session: Session | None = None,
        process_group: Any = None,
        progress: Hook | None = None,
        verify: str = "fast",
    ) -> None:
        super().__init__()
        self.session = session or Session.shared(namespace)
        self.step = step_or_none(step)
        self.progress = progress
        self.allow_older = allow_older
        self.trust_pickle = trust_pickle
        self.threads = thread_count(threads)
        self.timeout = limit_in_seconds(timeout)
        self.verify = one_of("verify", verify, VERIFY)
        self.process_group = process_group
        self.plan: dict[str, Any] | None = None
        self.rungs: dict[str, int] = {}
        self._manifest: Any = None
        self._metadata: Metadata | None = None
        self._failure: StoragedError | None = None

    @property
    def checkpoint_id(self) -> str:
        return f"storaged://{self.session.namespace}/step-{self.step}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return step_of(checkpoint_id) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        named = step_of(checkpoint_id)
        if checkpoint_id is not None and named is None:
            raise InvalidArgument(f"expected a checkpoint id that names a step, such as 'step-120', got {str(checkpoint_id)!r}")
        if named is not None:
            self.step = step_number(named)
        self.plan = self._manifest = self._metadata = self._failure = None

    def resolve(self) -> dict[str, Any]:
        """What will be restored and from where: asked by rank 0, the same on every rank. A collective.

        A step below one that this process has saved is gone back to: the next save opens a new run.
        """
        if self._failure is not None:
            raise self._failure
        if self.plan is None:
            key = run_key(self.process_group)

            def ask() -> tuple[dict[str, Any], bool]:
                plan = self.ask()
                last = self.session.last_step(key)
                return plan, last is not None and last > plan["step"]

            try:
                plan, goes_back = from_rank_zero(ask, self.process_group)
            except StoragedError as error:
                # DCP asks a second time after a failure: the answer is the same, without a second collective.
                self._failure = error
                raise
            if goes_back:
                self.session.forget_run(key)
            self.follow(plan)
        assert self.plan is not None
        return self.plan

    def ask(self, deadline: Deadline | None = None) -> dict[str, Any]:
        """The plan, asked by this rank alone."""
        deadline = deadline or Deadline(self.timeout)
        try:
            return dict(self.session.client(deadline).plan(self.step, deadline.left_ms(), self.allow_older))
        except BaseException:
            self.session.drop_connections()
            raise

    def follow(self, plan: dict[str, Any]) -> None:
        """Restores what the plan says."""
        self.plan, self.step = plan, plan["step"]

    def seek_newest(self) -> None:
        """What was followed is gone: the next plan is of the newest step."""
        self.reset()
        self.step = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            plan = self.resolve()
            deadline = Deadline(self.timeout)
            self._manifest = self.session.client(deadline).manifest(plan["manifest"], deadline.left_ms())
            self._metadata = decode_schema(self._manifest.schema(), self._manifest.shard_lengths)
            # What planners are told of the storage, as stock readers do.
            self._metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=uuid.uuid4().hex)
        return self._metadata

    def blank(self) -> dict[str, Any]:
        """A flat template of everything that the checkpoint holds: whole tensors on the CPU."""
        entries = self.read_metadata().state_dict_metadata
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
            for name, entry in entries.items()
        }

    def nested(self, flat: dict[str, Any]) -> dict[str, Any]:
        """What the flat names hold, nested as it was saved."""
        metadata = self.read_metadata()
        paths = metadata.planner_data or {}
        root: dict[Any, Any] = {}
        for name, value in flat.items():
            *parents, last = paths.get(name, (name,))
            place = root
            for key in parents:
                place = place.setdefault(key, {})
            place[last] = value
        for path in getattr(metadata, EMPTY_DICTS, ()):
            place = root
            for key in path:
                # Another rank may have had a value there.
                place = place.setdefault(key, {}) if isinstance(place, dict) else place
        return {key: _lists(value) for key, value in root.items()}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        started = time.perf_counter()
        by_rank: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            by_rank.setdefault(self._places[item.storage_index].rank, []).append(item)
        total = sum(self._span(item)[1] for item in plan.items) if self.progress is not None else 0
        self._progress = Progress(self.progress, total)
        try:
            read = self._read_ranks([self._wanted(rank, items) for rank, items in sorted(by_rank.items())], planner)
        except BaseException:
            self.session.drop_connections()
            raise
        seconds = time.perf_counter() - started
        logger.info("restored step %s: %.1f MiB in %.2f s (%s)", self.step, read / 2**20, seconds, self.rungs)
        future: TorchFuture[None] = TorchFuture()
        future.set_result(None)
        return future

    def _wanted(self, rank: int, items: list[ReadItem]) -> Wanted:
        spans = [self._span(item) for item in items]
        return Wanted(rank, items, spans, merged(spans, self._manifest.chunk_bytes, self._manifest.shard_lengths[rank]))

    def _read_ranks(self, all_wanted: list[Wanted], planner: LoadPlanner) -> int:
        """Fills the items of all saved shards; how many bytes they have. What is here at once is read first, the rest while it comes."""
        for wanted in all_wanted:
            if not wanted.ranges:
                self._fill(None, wanted.items, wanted.spans, planner)
        here, coming, client = self._prospect([wanted for wanted in all_wanted if wanted.ranges])
        if client is None:
            return sum(self._read_rank(wanted, planner) for wanted in [*here, *coming])
        of_rank = {wanted.rank: wanted for wanted in coming}

        def open_shard(client: Any, rank: int) -> Any:
            return self._open(client, of_rank[rank], Deadline(self.timeout))

        with Ahead(client, open_shard, self._close, list(of_rank)) as ahead:
            read = sum(self._read_rank(wanted, planner) for wanted in here)
            return read + sum(self._read_rank(wanted, planner, ahead) for wanted in coming)

    def _prospect(self, all_wanted: list[Wanted]) -> tuple[list[Wanted], list[Wanted], Any]:
        """What is in this node's own RAM and what is not, as far as that matters, and a connection to open the latter ahead if there is room."""
        if len(all_wanted) < 2 or self.plan is None:
            return [], all_wanted, None
        sources = {rank: source for rank, _, source in self.plan["shards"]}
        limit = Deadline(min(PROSPECT_SECONDS, self.timeout))
        try:
            prospect = Prospect(json.loads(self.session.client(limit).status(limit.left_ms())))
            is_here = {wanted.rank: prospect.holds(sources.get(wanted.rank, "")) for wanted in all_wanted}
            here = [wanted for wanted in all_wanted if is_here[wanted.rank]]
            coming = [wanted for wanted in all_wanted if not is_here[wanted.rank]]
            _, world_size = rank_and_world(self.process_group)
            each = min(len(coming), OPEN_AT_ONCE)
            if not coming or not prospect.has_room(ranks_here(world_size), each, max(self._manifest.shard_lengths)):
                return here, coming, None
            return here, coming, self.session.connect(limit)
        except StoragedError as error:
            logger.debug("shards are opened in turn: %s", error)
            return [], all_wanted, None

    def _read_rank(self, wanted: Wanted, planner: LoadPlanner, ahead: Ahead | None = None) -> int:
        """Fills the items of one saved shard; how many bytes they have."""
        read = sum(length for _, length in wanted.spans)
        rung = self._opened(wanted, lambda shard: self._fill(shard, wanted.items, wanted.spans, planner), ahead)
        self.rungs[rung] = self.rungs.get(rung, 0) + read
        return read

    def read_spans(self, rank: int, spans: list[Span]) -> list[bytes]:
        """These bytes of a shard of the step that is followed, verified."""
        self.read_metadata()
        found: list[bytes] = []

        def read(shard: Any) -> None:
            found[:] = [shard.read(offset, length) for offset, length in spans]

        ranges = merged(spans, self._manifest.chunk_bytes, self._manifest.shard_lengths[rank])
        self._opened(Wanted(rank, [], spans, ranges), read)
        return found

    def _opened(self, wanted: Wanted, use: Callable[[Any], None], ahead: Ahead | None = None) -> str:
        """Opens the ranges of one saved shard, uses it, gives it up; where it was. What is damaged in own RAM is used from elsewhere, and what
        came while it was used and comes no more is opened again, to be used when it is there.
        """
        attempt = Attempt(ahead=ahead)
        while True:
            with self._held(wanted, attempt) as shard:
                try:
                    use(shard)
                except StoragedError as error:
                    again = attempt.after(error, shard)
                    if again is None:
                        raise
                    if again.without_own_ram:
                        said = "rank %s of step %s is damaged in this node's RAM (%s); reading it from elsewhere"
                        logger.warning(said, wanted.rank, self.step, error)
                    else:
                        logger.debug("the shard of rank %s comes no more, it is opened again: %s", wanted.rank, error)
                    attempt = again
                    continue
                return str(shard.rung)

    @contextmanager
    def _held(self, wanted: Wanted, attempt: Attempt) -> Iterator[Any]:
        """A shard that was opened ahead, or is opened now."""
        ahead = attempt.ahead
        if ahead is not None:
            shard = ahead.taken()
            if shard is not None:
                try:
                    yield shard
                finally:
                    ahead.read(wanted.rank)
                return
        # Only now: one that was waited for ahead in vain has all of its time again, and says what keeps it.
        deadline = Deadline(self.timeout)
        client = self.session.client(deadline)
        shard = self._open(client, wanted, deadline, attempt.without_own_ram, attempt.early)
        try:
            yield shard
        finally:
            self._close(client, wanted.rank)

    def _open(self, client: Any, wanted: Wanted, deadline: Deadline, without_own_ram: bool = False, early: bool = True) -> Any:
        left_ms = deadline.left_ms()
        return client.open_shard(self._manifest, wanted.rank, wanted.ranges, left_ms, without_own_ram, self.verify, early)

    def _close(self, client: Any, rank: int) -> None:
        limit = Deadline(CLOSE_SECONDS)
        try:
            client.close_shard(self._manifest, rank, limit.left_ms())
        except StoragedError as error:
            # The daemon closes it with the connection.
            logger.debug("a shard could not be given up: %s", error)
            self.session.drop_connections()

    def _span(self, item: ReadItem) -> tuple[int, int]:
        """The bytes of the shard that hold the item: whole rows, which are contiguous."""
        place: Place = self._places[item.storage_index]
        if item.type == LoadItemType.BYTE_IO or place.is_record:
            return place.data_offset, place.data_length
        row = self._row_bytes(item)
        if not item.lengths:
            return place.data_offset, row
        return place.data_offset + item.storage_offsets[0] * row, item.lengths[0] * row

    def _row_bytes(self, item: ReadItem) -> int:
        sizes, dtype = self._chunk(item)
        elements = 1
        for extent in sizes[1:]:
            elements *= extent
        return elements * dtype.itemsize

    def _chunk(self, item: ReadItem) -> tuple[torch.Size, torch.dtype]:
        """Sizes and type of the saved chunk that the item is read from."""
        assert self._metadata is not None
        entry: Any = self._metadata.state_dict_metadata[item.storage_index.fqn]
        hint = item.storage_index.index
        chunks = entry.chunks if hint is None else [*entry.chunks[hint : hint + 1], *entry.chunks]
        for chunk in chunks:
            if chunk.offsets == item.storage_index.offset:
                return chunk.sizes, entry.properties.dtype
        raise CheckpointLoadError(f"no saved chunk of {item.storage_index.fqn!r} begins at {item.storage_index.offset}")

    def _fill(self, shard: Any, items: list[ReadItem], spans: list[tuple[int, int]], planner: LoadPlanner) -> None:
        landings: list[Landing] = []
        on_gpus: dict[int, list[Rows]] = {}
        for item, (offset, length) in zip(items, spans):
            if item.type == LoadItemType.BYTE_IO:
                self._load_object(item, shard.read(offset, length) if length else b"", planner)
                self._progress.add(length)
                continue
            target = planner.resolve_tensor(item).detach()
            device = device_of(target)
            if self._places[item.storage_index].is_record:
                target.copy_(self._of_record(item, shard.read(offset, length)))
                planner.commit_tensor(item, target)
                self._progress.add(length)
            elif device is not None and length:
                on_gpus.setdefault(device, []).append(self._rows(item, offset, target))
            else:
                landings.append((item, offset, length, target))
        for device, wanted in on_gpus.items():
            landings += self._land(device, wanted, shard, planner)
        self._fill_on_cpu(shard, landings, planner)

    def _land(self, device: int, wanted: list[Rows], shard: Any, planner: LoadPlanner) -> list[Landing]:
        """Fills tensors on a GPU; gives back what has to go there by way of ordinary memory."""
        left = land(device, wanted, lambda parts: self._read(shard, parts))
        missed = set(left)
        for rows in wanted:
            if rows not in missed:
                planner.commit_tensor(rows.item, rows.target)
        return [(rows.item, rows.offset, rows.count * rows.row_bytes, rows.target) for rows in left]

    def _rows(self, item: ReadItem, offset: int, target: torch.Tensor) -> Rows:
        sizes, dtype = self._chunk(item)
        inner = list(zip(item.storage_offsets[1:], item.lengths[1:]))
        return Rows(item, offset, torch.Size([*item.lengths[:1], *sizes[1:]]), dtype, inner, target)

    def _read(self, shard: Any, parts: list[Part]) -> None:
        for turn in self._progress.turns(sorted(parts)):
            if turn:
                shard.read_many(turn, self.threads)
                self._progress.add(sum(part[2] for part in turn))

    def _fill_on_cpu(self, shard: Any, wanted: list[Landing], planner: LoadPlanner) -> None:
        """Fills tensors that are plain memory straight, and others from memory that their rows are read into."""
        landed = [(item, target, self._landing(item, target)) for item, _, _, target in wanted]
        parts = [(at, landing.data_ptr(), count) for (_, at, count, _), (_, _, landing) in zip(wanted, landed) if count]
        self._read(shard, parts)
        for item, target, landing in landed:
            if landing is not target:
                for dim, (start, extent) in enumerate(zip(item.storage_offsets, item.lengths)):
                    landing = landing if dim == 0 else landing.narrow(dim, start, extent)
                target.copy_(landing)
            planner.commit_tensor(item, target)

    def _of_record(self, item: ReadItem, record: bytes) -> torch.Tensor:
        """The item's part of a tensor that stock DCP has saved."""
        tensor = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
        sizes, dtype = self._chunk(item)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != sizes or tensor.dtype != dtype:
            raise CheckpointLoadError(f"expected {item.storage_index.fqn!r} as {dtype} of {tuple(sizes)}, its record holds something else")
        for dim, (start, extent) in enumerate(zip(item.storage_offsets, item.lengths)):
            tensor = tensor.narrow(dim, start, extent)
        return tensor

    def _landing(self, item: ReadItem, target: torch.Tensor) -> torch.Tensor:
        """Memory for the item's rows: the target itself if it is exactly those rows."""
        sizes, dtype = self._chunk(item)
        shape = torch.Size([*item.lengths[:1], *sizes[1:]])
        if target.dtype == dtype and target.shape == shape and is_plain(target):
            return target
        return torch.empty(shape, dtype=dtype)

    def _load_object(self, item: ReadItem, data: bytes, planner: LoadPlanner) -> None:
        if not self.trust_pickle:
            # DCP's own planner loads objects without restraint: it gets what was loaded with restraint, saved anew.
            data = saved_by_torch(load_plain(item.storage_index.fqn, io.BytesIO(data)))
        planner.load_bytes(item, io.BytesIO(data))


class StoragedLoadPlanner(DefaultLoadPlanner):
    """Loads byte items without trust, whichever reader they come from, and fills wrappers that were taken apart."""

    def __init__(self, *args: Any, trust_pickle: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trust_pickle = trust_pickle

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        if not holds_wrapper(state_dict):
            return super().set_up_planner(state_dict, metadata, is_coordinator)
        saved: dict[str, str] = getattr(metadata, CONTEXTS, {})
        for name, own in contexts_of(state_dict).items():
            if name in saved and saved[name] != own:
                logger.warning(
                    "tensor %r was saved as %s and is loaded into %s: the tensors that it is made of are what was saved, what they "
                    "mean may not be", name, saved[name], own,
                )
        super().set_up_planner(taken_apart(state_dict), metadata, is_coordinator)
        # Tensors are filled where they are; objects are put into the caller's own dicts.
        self.original_state_dict = state_dict

    def create_local_plan(self) -> LoadPlan:
        # Newer PyTorch looks itself. 2.4 loads what fits of a tensor of another size, and says nothing.
        saved = {} if self.metadata is None else self.metadata.state_dict_metadata
        for name, value in self.state_dict.items():
            of_saved = saved.get(name)
            if isinstance(of_saved, TensorStorageMetadata) and isinstance(value, torch.Tensor) and value.size() != of_saved.size:
                raise ValueError(f"Size mismatch between saved {of_saved.size} and current: {value.size()} for {name}")
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if self.trust_pickle:
            return super().load_bytes(read_item, value)
        plain = load_plain(read_item.dest_index.fqn, value)
        super().load_bytes(read_item, io.BytesIO(saved_by_torch(plain)))


def _lists(value: Any) -> Any:
    """Dicts whose keys are places in a list (DCP makes every key of a dict a text) become that list."""
    if type(value) is not dict:
        return value
    inner = {key: _lists(one) for key, one in value.items()}
    if inner and all(type(key) is int for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def merged(spans: list[Span], chunk: int, length: int) -> list[Span]:
    """The whole chunks (the unit of verification) that the spans touch, as few ranges."""
    ranges: list[tuple[int, int]] = []
    for offset, count in sorted(spans):
        if count == 0:
            continue
        start = offset // chunk * chunk
        end = min(-(-(offset + count) // chunk) * chunk, length)
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
        else:
            ranges.append((start, end))
    if len(ranges) > RANGES_MAX:
        return [(0, length)]
    return [(start, end - start) for start, end in ranges]
