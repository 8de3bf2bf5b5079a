"""How a method is timed: the state it saves, and copies of it before and after each round, which are what counts it in."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

TENSORS = 32
GB = 1e9


def timed(call):
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def cpu_seconds(pid):
    """What a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def blocked_and_done(save, end):
    """Seconds until a save gives the trainer back, and until all of it has ended."""
    started = time.perf_counter()
    handle = save()
    blocked = time.perf_counter() - started
    end(handle)
    return {"block": blocked, "total": time.perf_counter() - started}


class Contest:
    """One state that every method saves in turn."""

    def __init__(self, mib, rounds):
        self.rounds = rounds
        each = mib * 2**20 // TENSORS // 4
        self.state = {f"layer{i}": torch.full((each,), float(i)) for i in range(TENSORS)}
        self.copy = {name: torch.empty_like(tensor) for name, tensor in self.state.items()}
        self.gigabytes = sum(tensor.nbytes for tensor in self.state.values()) / GB
        #: Seconds of every memcpy with one thread.
        self.copies = []
        self._pool = ThreadPoolExecutor(2)
        self.memcpy()
        self.copies.clear()

    def memcpy(self, threads=1):
        """Seconds of copying the state once, into memory that is there."""

        def copy(first):
            for name, tensor in list(self.state.items())[first::threads]:
                ctypes.memmove(self.copy[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)

        if threads == 1:
            took = timed(lambda: copy(0))[0]
            self.copies.append(took)
            return took
        return timed(lambda: list(self._pool.map(copy, range(threads))))[0]

    def change(self):
        """Training changes every element between two saves."""
        for tensor in self.state.values():
            tensor.add_(1)

    def ratios(self, call, threads=1, daemon=None):
        """For each time that `call` gives, the median over the rounds of its ratio to the copies before and after, and CPU seconds
        per GB of this process and of the daemon. The first round warms up."""
        rows = []
        for _ in range(self.rounds + 1):
            self.change()
            before = self.memcpy(threads)
            used, used_by_daemon = time.process_time(), cpu_seconds(daemon) if daemon else 0.0
            times = call()
            row = {"cpu": (time.process_time() - used) / self.gigabytes}
            if daemon:
                row["daemon_cpu"] = (cpu_seconds(daemon) - used_by_daemon) / self.gigabytes
            around = statistics.mean([before, self.memcpy(threads)])
            rows.append(row | {name: seconds / around for name, seconds in times.items()})
        return {name: round(statistics.median(row[name] for row in rows[1:]), 3) for name in rows[0]}
