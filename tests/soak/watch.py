"""What the soak sees from outside: which steps each daemon says are protected or durable and when, and what daemons cost."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from storaged import _native
from storaged.errors import StoragedError

SAFE = ("protected", "durable")


def order(place: tuple[str, int]) -> tuple[int, str, int]:
    """Orders (run, step); a run is a number and an identity."""
    number, _, identity = place[0].partition("-")
    return int(number), identity, place[1]


class Watch:
    """Asks every node for a namespace's checkpoints, a thread per node: a daemon that hangs holds up its own thread only."""

    EVERY = 0.2

    def __init__(self, namespace: str, token: str, sockets: list[str]):
        self.namespace, self.token = namespace, token
        self.lock, self.ended = threading.Lock(), threading.Event()
        #: When (run, step) was first seen to be protected or durable, by time.time().
        self.safe: dict[tuple[str, int], float] = {}
        for socket in sockets:
            threading.Thread(target=self._look, args=(socket,), daemon=True).start()

    def _look(self, socket: str) -> None:
        client = None
        while not self.ended.is_set():
            try:
                client = client or _native.Client(socket, self.namespace, self.token.encode())
                listed = client.list(self.namespace)
            except StoragedError:
                client, listed = None, []
            now = time.time()
            with self.lock:
                for run, step, state, durable, *_ in listed:
                    if durable or state.startswith(SAFE):
                        self.safe.setdefault((str(run), step), now)
            self.ended.wait(self.EVERY)

    def newest(self) -> tuple[str, int] | None:
        with self.lock:
            return max(self.safe, key=order, default=None)

    def longest_gap(self, began: float, ended: float) -> float:
        """The longest time in a window in which no newer step became safe."""
        with self.lock:
            seen = sorted((at, place) for place, at in self.safe.items())
        times, newest = [began], None
        for at, place in seen:
            if newest is None or order(place) > order(newest):
                newest = place
                if began <= at <= ended:
                    times.append(at)
        times.append(ended)
        return max(after - before for before, after in zip(times, times[1:]))

    def end(self) -> None:
        self.ended.set()


def own_memory_mib(pid: int) -> float:
    """What a process holds for itself, without the memory that it shares with trainers."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Costs:
    """Memory and descriptors of daemons over their lives."""

    # A daemon's first seconds do not count: it fills its pools. A life shorter than LIFE says nothing.
    WARM, LIFE, EVERY = 30.0, 60.0, 2.0

    def __init__(self) -> None:
        self.samples: dict[int, list[tuple[float, float, int]]] = {}
        self.due = 0.0

    def sample(self, pids: list[int]) -> None:
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self.EVERY
        for pid in pids:
            try:
                one = (time.monotonic(), own_memory_mib(pid), len(os.listdir(f"/proc/{pid}/fd")))
            except OSError:
                continue
            self.samples.setdefault(pid, []).append(one)

    def growth(self) -> tuple[float, int]:
        """MiB and descriptors by which the daemon that grew most grew: the median of the last tenth over that of the first."""
        memory, descriptors = [0.0], [0]
        for samples in self.samples.values():
            warm = [one for one in samples if one[0] >= samples[0][0] + self.WARM]
            if not warm or warm[-1][0] - samples[0][0] < self.LIFE:
                continue
            part = max(1, len(warm) // 10)
            first, last = warm[:part], warm[-part:]
            memory.append(middle(last, 1) - middle(first, 1))
            descriptors.append(int(middle(last, 2) - middle(first, 2)))
        return round(max(memory), 1), max(descriptors)


def middle(samples: list[tuple], which: int) -> float:
    values = sorted(sample[which] for sample in samples)
    return values[len(values) // 2]
