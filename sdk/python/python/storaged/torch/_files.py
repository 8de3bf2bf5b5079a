"""A rank's part in a step that is written and read as files, as stock `torch.distributed.checkpoint` does: `storaged.fsspec`
says which.

The rank's one file is written into a slot as it comes and is sealed when it is closed. The description is kept until it is
put in its place; only then the step is committed, if every rank has sealed. What ends before leaves nothing that is listed.
"""

from __future__ import annotations

import ctypes
import errno
import io
import logging
import os
import re
import threading
import weakref
from types import TracebackType
from typing import Any

from .. import _native
from .._deadline import Deadline
from .._session import Session
from ..errors import CorruptData, InvalidArgument, StoragedError, UnknownNamespace, UnknownRun
from ._metadata import encode_files
from ._ranks import lose_run, rank_and_world, resolve_run

logger = logging.getLogger("storaged")

#: The first slot, where nothing tells how long the shard will be.
FIRST_BYTES = 64 << 20
#: How much longer than the last one a shard may become before it moves to another slot.
SPARE = 1.05
#: Bytes that are handed to native code at once: they stay in the cache.
PIECE_BYTES = 1 << 20
#: Bytes that a reader has brought into this node's RAM at once.
WINDOW_BYTES = 64 << 20
RELEASE_SECONDS = 0.5


def rank_of_file(name: str) -> int:
    """`__R_0.distcp` is rank R's shard. Nothing else is a file of a step, but its description."""
    found = re.fullmatch(r"__(\d+)_(\d+)\.distcp", name, re.ASCII)
    if found is None:
        raise InvalidArgument(
            f"expected .metadata or __R_0.distcp, rank R's one file, got {name!r}: a step at storaged:// holds what "
            "torch.distributed.checkpoint writes with collectives, and nothing beside it"
        )
    if found.group(2) != "0":
        raise InvalidArgument(
            f"expected one file per rank, got {name!r}: leave thread_count at 1 and single_file_per_rank at True, or use "
            "storaged.torch.StoragedWriter, which copies with several threads"
        )
    return int(found.group(1))


class RankSave:
    """What this process saves of a step."""

    def __init__(self, session: Session, step: int, timeout: float, durable: str, until: str) -> None:
        self.session = session
        self.step = step
        self.timeout = timeout
        self.durable = durable
        self.until = until
        #: Nothing more may come of it: it was committed or given up.
        self.is_over = False
        self.description: bytes | None = None
        # Whoever writes it holds it: one that nobody holds any more gives its slot back by itself.
        self._file: weakref.ref[ShardWriter] | None = None
        self._sealed: ShardWriter | None = None
        self._lock = threading.Lock()

    def open(self, rank: int) -> ShardWriter:
        """The rank's file, to be written from its beginning."""
        own, size = rank_and_world()
        if rank != own:
            raise InvalidArgument(
                f"expected rank {own} to write __{own}_0.distcp, got the file of rank {rank}: a save must include all ranks of "
                "the default process group"
            )
        deadline = Deadline(self.timeout)
        run = resolve_run(self.session, None, None, deadline)
        with self._lock:
            self._give_up_file()
            self._sealed = None
            written = ShardWriter(self, run, rank, size, deadline)
            self._file = weakref.ref(written)
            return written

    def keep(self, written: ShardWriter) -> None:
        """It is sealed: only the description is missing."""
        if self._file is not None and self._file() is written:
            self._sealed = written

    def commit(self) -> None:
        """The description is in its place: the step is there when every rank's shard is."""
        written, description = self._sealed, self.description
        if written is None or description is None:
            raise InvalidArgument(
                f"expected a description and this rank's file of step {self.step} before it is committed, got "
                f"{'no description' if description is None else 'no whole file'}: the rank that describes it saves too"
            )
        deadline = Deadline(self.timeout)
        trainer = self.session.trainer(written.run, written.rank, written.size, deadline)
        try:
            trainer.commit(self.step, encode_files(description), description, self.durable, deadline.left_ms())
            if self.until != "staged":
                self.session.connect(deadline).wait(written.run, self.step, self.until, deadline.left_ms())
        except StoragedError as error:
            lose_run_if_unknown(self.session, written.run, error)
            raise
        self.is_over = True

    @property
    def is_ahead(self) -> bool:
        """Whether this rank's part is still to come."""
        return not self.is_over and self._sealed is None

    def give_up(self) -> None:
        self.is_over = True
        self._give_up_file()

    def _give_up_file(self) -> None:
        written = None if self._file is None else self._file()
        if written is not None:
            written.give_up()


_nothing: list[int] = []


def nothing_to_sync() -> int:
    """A descriptor of an empty file in memory: DCP syncs every stream that it has written, and up to 2.6 fails where it cannot, up
    to 2.12 syncs the whole machine instead. Here the commit is what makes bytes safe, and nothing lies in a file."""
    if not _nothing:
        _nothing.append(os.memfd_create("storaged-nothing"))
    return _nothing[0]


class MetadataFile(io.BytesIO):
    """The description in the making. `commit` and `discard` are what fsspec's transactions call, with which torch up to 2.5
    writes its files."""

    def __init__(self, save: RankSave, commits: bool) -> None:
        super().__init__()
        self._save = save
        self._commits = commits
        self._failed = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._failed = kind is not None
        self.close()

    def commit(self) -> None:
        """It was kept when it was closed."""

    def discard(self) -> None:
        self._save.description = None

    def fileno(self) -> int:
        return nothing_to_sync()

    def close(self) -> None:
        if self.closed:
            return
        whole = self.getvalue()
        super().close()
        if not self._failed:
            self._save.description = whole
            if self._commits:
                self._save.commit()


class ShardWriter(io.RawIOBase):
    """A rank's file, written into a slot. Closed it is sealed; left by an exception, or dropped, it is given up."""

    def __init__(self, save: RankSave, run: str, rank: int, size: int, deadline: Deadline) -> None:
        super().__init__()
        self.save, self.run, self.rank, self.size = save, run, rank, size
        self._end = 0
        self._slot: _native.Slot | None = None
        self._slot = self._acquire(expected_bytes(save.session, deadline), deadline)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._end

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        slot = self._room_for(len(view))
        for at in range(0, len(view), PIECE_BYTES):
            piece = bytes(view[at : at + PIECE_BYTES])
            slot.write(self._end, piece)
            self._end += len(piece)
        return len(view)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.give_up()
        self.close()

    def __del__(self) -> None:
        # A file that nobody closed is not whole.
        self.give_up()

    def fileno(self) -> int:
        return nothing_to_sync()

    def close(self) -> None:
        slot, self._slot = self._slot, None
        if not self.closed and slot is not None:
            super().close()
            self._seal(slot)
        super().close()

    def commit(self) -> None:
        """It was sealed when it was closed. Called by fsspec's transactions, as `discard` is."""

    def discard(self) -> None:
        self.give_up()

    def give_up(self) -> None:
        slot, self._slot = getattr(self, "_slot", None), None
        if slot is not None:
            self._release(slot)
        super().close()

    def _seal(self, slot: _native.Slot) -> None:
        deadline = Deadline(self.save.timeout)
        session = self.save.session
        try:
            session.note_step(self.run, self.save.step)
            self._trainer(deadline).seal(slot, self.save.step, self._end, deadline.left_ms())
        except StoragedError as error:
            self._release(slot)
            lose_run_if_unknown(session, self.run, error)
            raise
        _lengths[session.namespace] = self._end
        self.save.keep(self)

    def _room_for(self, count: int) -> _native.Slot:
        """The slot, or a larger one with what was written."""
        if self._slot is None:
            raise InvalidArgument(f"expected an open file of step {self.save.step}, it was closed or given up")
        if self._end + count > self._slot.capacity:
            deadline = Deadline(self.save.timeout)
            larger = self._acquire(max(2 * self._slot.capacity, self._end + count), deadline)
            larger.copy_many([(self._slot.address, 0, self._end)], 1)
            smaller, self._slot = self._slot, larger
            self._release(smaller)
        return self._slot

    def _acquire(self, size: int, deadline: Deadline) -> _native.Slot:
        try:
            return self._trainer(deadline).acquire(size, deadline.left_ms())
        except StoragedError as error:
            self.save.session.drop_connections()
            lose_run_if_unknown(self.save.session, self.run, error)
            raise

    def _release(self, slot: _native.Slot) -> None:
        try:
            limit = Deadline(RELEASE_SECONDS)
            self._trainer(limit).release(slot, limit.left_ms())
        except StoragedError as error:
            # The daemon takes slots of a broken connection back by itself.
            logger.debug("a slot could not be given back: %s", error)
            self.save.session.drop_connections()

    def _trainer(self, deadline: Deadline) -> _native.Trainer:
        return self.save.session.trainer(self.run, self.rank, self.size, deadline)


#: By namespace: how long this process's last shard was.
_lengths: dict[str, int] = {}


def expected_bytes(session: Session, deadline: Deadline) -> int:
    """How long a rank's file will be, as far as one can know before it is written."""
    known = _lengths.get(session.namespace)
    if known is None:
        try:
            rows = session.connect(deadline).list(session.namespace, deadline.left_ms())
        except UnknownNamespace:
            rows = []
        known = max((length // max(size, 1) for _, _, _, _, size, length, _ in rows), default=0)
    return int(known * SPARE) + PIECE_BYTES if known else FIRST_BYTES


def lose_run_if_unknown(session: Session, run: str, error: StoragedError) -> None:
    """The next save of every rank is in a new run."""
    if isinstance(error, UnknownRun):
        lose_run(session, run)


class ShardReader(io.RawIOBase):
    """A shard as a file: every byte verified, and brought here window by window."""

    def __init__(self, session: Session, manifest: Any, rank: int, timeout: float, verify: str) -> None:
        super().__init__()
        self._session, self._manifest, self._rank, self._timeout = session, manifest, rank, timeout
        self._verify = verify
        self._length: int = manifest.shard_lengths[rank]
        self._at = 0
        self._client: Any = None
        self._window = range(0)
        self._shard: Any = None
        self._without_own_ram = False

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        to = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + offset
        if to < 0:
            raise OSError(errno.EINVAL, f"expected a place in the file, got {to}: it begins at 0")
        self._at = to
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        if self._at >= self._length or not target:
            return 0
        count = self._read(target)
        self._at += count
        return count

    def _read(self, target: memoryview) -> int:
        """Fills what is in the window; a shard that rotted in this node's RAM is read from elsewhere."""
        while True:
            shard = self._opened(len(target))
            count = min(len(target), self._window.stop - self._at)
            memory = (ctypes.c_char * count).from_buffer(target)
            try:
                shard.read_many([(self._at, ctypes.addressof(memory), count)], 1)
                return count
            except CorruptData as error:
                if self._without_own_ram or shard.rung != "own ram":
                    raise
                logger.warning("rank %s of step %s is damaged in this node's RAM (%s)", self._rank, self._manifest.step, error)
                self._without_own_ram, self._window = True, range(0)

    def close(self) -> None:
        client, self._client, self._shard = self._client, None, None
        if client is not None:
            try:
                limit = Deadline(RELEASE_SECONDS)
                client.close_shard(self._manifest, self._rank, limit.left_ms())
            except StoragedError as error:
                # The daemon closes it with the connection.
                logger.debug("a shard could not be given up: %s", error)
        super().close()

    def _opened(self, count: int) -> Any:
        """The shard, with the window around the place where it is read next."""
        if self._at not in self._window:
            chunk = self._manifest.chunk_bytes
            start = self._at // chunk * chunk
            stop = min(start + max(WINDOW_BYTES // chunk * chunk, -(-count // chunk) * chunk + chunk), self._length)
            deadline = Deadline(self._timeout)
            if self._client is None:
                self._client = self._session.connect(deadline)
            spans = [(start, stop - start)]
            self._shard = self._client.open_shard(
                self._manifest, self._rank, spans, deadline.left_ms(), self._without_own_ram, self._verify
            )
            self._window = range(start, stop)
        return self._shard
