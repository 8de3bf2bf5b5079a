"""A job's connections to the daemon: one to save, one for everything else, made when first needed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from . import _native
from ._arguments import limit_in_seconds, namespace_text
from ._deadline import Deadline
from .errors import DaemonUnavailable, WaitTimeout

#: How long an ordinary request may take, in seconds.
DEFAULT_TIMEOUT = 60.0
LOOK_EVERY = 0.05

T = TypeVar("T")


class Session:
    """Who the job is and how to reach its daemon. Thread-safe. Calls with a deadline end with it."""

    _shared: dict[tuple[str | None, ...], Session] = {}
    _shared_lock = threading.Lock()

    def __init__(
        self,
        namespace: str | None = None,
        *,
        socket: str | os.PathLike[str] | None = None,
        token: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.namespace = namespace_text(namespace) or os.environ.get("STORAGED_NAMESPACE") or "default"
        self.socket = os.fspath(socket or os.environ.get("STORAGED_SOCKET") or _native.DEFAULT_SOCKET)
        self.token = _native.token_of_environment() if token is None else token
        self.timeout = limit_in_seconds(timeout)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._client: _native.Client | None = None
        self._trainers: dict[tuple[str, int, int], _native.Trainer] = {}
        self._runs: dict[object, str] = {}
        self._last_steps: dict[str, int] = {}
        #: When a daemon was lost that had answered, until one answers again.
        self._lost_at: float | None = None

    @classmethod
    def shared(cls, namespace: str | None = None) -> Session:
        """The process's session of a namespace, with the settings of the environment."""
        key = (namespace, *map(os.environ.get, ("STORAGED_NAMESPACE", "STORAGED_SOCKET", "STORAGED_TOKEN", "STORAGED_TOKEN_FILE")))
        with cls._shared_lock:
            return cls._shared.setdefault(key, cls(namespace))

    def deadline(self) -> Deadline:
        """Of an ordinary request."""
        return Deadline(self.timeout)

    def connect(self, deadline: Deadline | None = None) -> _native.Client:
        """A connection of the caller's own, so that a long wait blocks nobody else."""
        limit = deadline or self.deadline()
        return self._reached(lambda: _native.Client(self.socket, self.namespace, self.token, limit.left_ms()), limit)

    def client(self, deadline: Deadline | None = None) -> _native.Client:
        """The connection that loads share."""
        limit = deadline or self.deadline()
        with self._locked(limit):
            if self._client is None:
                self._client = self.connect(limit)
            return self._client

    def trainer(self, run: str, rank: int, world_size: int, deadline: Deadline | None = None) -> _native.Trainer:
        """The connection that saves as one rank of one run; it keeps the slots mapped."""
        limit = deadline or self.deadline()
        key = (run, rank, world_size)
        with self._locked(limit):
            if key not in self._trainers:
                connected = self._reached(
                    lambda: _native.Trainer(self.socket, self.namespace, self.token, *key, limit.left_ms()), limit
                )
                self._trainers = {key: connected}
            return self._trainers[key]

    def drop_connections(self, slot_lost_by: BaseException | None = None) -> None:
        """After a failure: the next call connects anew. Runs stay as they are.

        A slot that went with the daemon is told of at once: the next call may wait for another daemon. All else has waited already.
        """
        # Without the lock, which a thread that connects may hold: each assignment is whole.
        if isinstance(slot_lost_by, DaemonUnavailable):
            self._lost_at = time.monotonic()
        self._client = None
        self._trainers = {}

    def run_of(self, key: object) -> str | None:
        """The run that saves of these ranks belong to, once one was opened."""
        return self._runs.get(key)

    def set_run(self, key: object, run: str) -> None:
        self._runs[key] = run

    def forget_run(self, key: object, run: str | None = None) -> None:
        """The next save opens a new run; with `run` only if it is that one still: another save may have opened a new one since."""
        if run is None or self._runs.get(key) == run:
            self._runs.pop(key, None)

    def note_step(self, run: str, step: int) -> None:
        """A save of the step was begun here."""
        self._last_steps[run] = max(step, self._last_steps.get(run, step))

    def last_step(self, key: object) -> int | None:
        """The highest step that was begun here in the run of these ranks."""
        run = self._runs.get(key)
        return self._last_steps.get(run) if run is not None else None

    def _reached(self, connect: Callable[[], T], limit: Deadline) -> T:
        """A connection; waits for a daemon that was there a moment ago."""
        while True:
            had_time = limit.left_ms() > 0
            try:
                connected = connect()
            except WaitTimeout:
                if not had_time:
                    # Nobody was asked: it says nothing of the daemon.
                    limit.check("connecting to the daemon")
                raise
            except DaemonUnavailable:
                lost_at = self._lost_at
                if lost_at is None or time.monotonic() - lost_at >= _native.AWAY_AFTER or limit.left() <= LOOK_EVERY:
                    raise
                time.sleep(LOOK_EVERY)
            else:
                self._lost_at = None
                return connected

    @contextmanager
    def _locked(self, limit: Deadline) -> Iterator[None]:
        self._forget_after_fork()
        lock = self._lock
        if not lock.acquire(timeout=min(limit.left(), threading.TIMEOUT_MAX)):
            raise WaitTimeout(f"another thread has been connecting to the daemon for {limit.seconds:g} s: is it stopped?")
        try:
            yield
        finally:
            lock.release()

    def _forget_after_fork(self) -> None:
        # A forked child must not speak on its parent's sockets, nor wait for a thread that it has not got to leave a lock.
        if self._pid != os.getpid():
            self._lock, self._client, self._trainers = threading.Lock(), None, {}
            self._pid = os.getpid()
