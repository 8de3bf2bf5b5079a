"""A training loop that needs one core, with and without saves beside it."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed.checkpoint as dcp
from others import Folder
from own import ended

#: Seconds of training that are looked at from the beginning of a save on.
WINDOW = 4.0
SIZE = 256


class Loop:
    """Steps of a fraction of a millisecond on one thread, as many as take a window where nothing is beside them."""

    def __init__(self):
        self.weights, self.batch, self.steps = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE), 0
        started = time.perf_counter()
        while time.perf_counter() - started < WINDOW:
            self.step()
            self.steps += 1

    def step(self):
        self.weights = torch.tanh(self.batch @ self.weights)

    def seconds(self, save=None):
        """What the steps take, with a save that is begun before them if there is one."""
        started = time.perf_counter()
        if save is not None:
            save()
        for _ in range(self.steps):
            self.step()
        return time.perf_counter() - started


def slowdowns(contest, checkpointer, out, rounds=8):
    """The same steps with a save and, just before, without one; the methods in turn."""
    loop, steps, futures = Loop(), iter(range(1, 10_000)), []
    with Folder() as shm:

        def stock():
            futures.append(dcp.async_save(contest.state, storage_writer=dcp.FileSystemWriter(shm / "async")))

        def own():
            checkpointer.save(next(steps), contest.state)

        def behind():
            checkpointer.save(next(steps), contest.state, background=True)

        methods = {"ours": (own, checkpointer.wait), "ours_background": (behind, checkpointer.wait)}
        methods |= {"dcp_async": (stock, lambda: ended(futures[-1]))}
        # What is made once is made before.
        for save, end in methods.values():
            for _ in range(2):
                save()
                end()
        ratios, lost = {name: [] for name in methods}, {name: [] for name in methods}
        for _ in range(rounds):
            for name, (save, end) in methods.items():
                alone = loop.seconds()
                beside = loop.seconds(save)
                end()
                ratios[name].append(beside / alone)
                lost[name].append(beside - alone)
    for name in methods:
        out[f"training_slowdown_{name}"] = round(statistics.median(ratios[name]), 3)
        out[f"training_lost_ms_{name}"] = round(statistics.median(lost[name]) * 1000)
