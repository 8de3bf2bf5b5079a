"""A job's connections to the daemon: one to save, one for everything else, made when first needed."""

from __future__ import annotations

import os
import threading

from . import _native

#: How long an ordinary request may take, in seconds.
DEFAULT_TIMEOUT = 60.0


def milliseconds(seconds: float) -> int:
    return min(max(int(seconds * 1000), 0), 0xFFFF_FFFF)


class Session:
    """Who the job is and how to reach its daemon. Thread-safe."""

    _shared: dict[tuple, Session] = {}
    _shared_lock = threading.Lock()

    def __init__(
        self,
        namespace: str | None = None,
        *,
        socket: str | os.PathLike[str] | None = None,
        token: bytes | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.namespace = namespace or os.environ.get("STORAGED_NAMESPACE") or "default"
        self.socket = os.fspath(socket or os.environ.get("STORAGED_SOCKET") or _native.DEFAULT_SOCKET)
        self.token = os.environ.get("STORAGED_TOKEN", "").encode() if token is None else token
        self.timeout = timeout
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._client: _native.Client | None = None
        self._trainers: dict[tuple[str, int, int], _native.Trainer] = {}
        self._runs: dict[object, str] = {}

    @classmethod
    def shared(cls, namespace: str | None = None) -> Session:
        """The process's session of a namespace, with the settings of the environment."""
        key = (namespace, *map(os.environ.get, ("STORAGED_NAMESPACE", "STORAGED_SOCKET", "STORAGED_TOKEN")))
        with cls._shared_lock:
            return cls._shared.setdefault(key, cls(namespace))

    @property
    def timeout_ms(self) -> int:
        return milliseconds(self.timeout)

    def connect(self) -> _native.Client:
        """A connection of the caller's own, so that a long wait blocks nobody else."""
        return _native.Client(self.socket, self.namespace, self.token)

    def client(self) -> _native.Client:
        """The connection that loads share."""
        with self._lock:
            self._forget_after_fork()
            if self._client is None:
                self._client = self.connect()
            return self._client

    def trainer(self, run: str, rank: int, world_size: int) -> _native.Trainer:
        """The connection that saves as one rank of one run; it keeps the slots mapped."""
        key = (run, rank, world_size)
        with self._lock:
            self._forget_after_fork()
            if key not in self._trainers:
                self._trainers = {key: _native.Trainer(self.socket, self.namespace, self.token, *key)}
            return self._trainers[key]

    def drop_connections(self) -> None:
        """After a failure: the next call connects anew. Runs stay as they are."""
        with self._lock:
            self._client = None
            self._trainers = {}

    def run_of(self, key: object) -> str | None:
        with self._lock:
            return self._runs.get(key)

    def set_run(self, key: object, run: str) -> None:
        with self._lock:
            self._runs[key] = run

    def _forget_after_fork(self) -> None:
        # A forked child must not speak on its parent's sockets.
        if self._pid != os.getpid():
            self._pid, self._client, self._trainers = os.getpid(), None, {}
