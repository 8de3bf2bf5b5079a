"""A training loop that needs one core, with and without saves beside it."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed.checkpoint as dcp
from others import Folder
from own import ended

#: Seconds that are looked at from the beginning of a save on: longer than any save here lasts.
WINDOW = 4.0
SIZE = 256


class Loop:
    """Steps of a fraction of a millisecond on one thread."""

    def __init__(self):
        self.weights, self.batch = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)

    def seconds_per_step(self, save=None):
        """Over a window, at whose beginning a save is begun if there is one; and the steps."""
        steps, started = 0, time.perf_counter()
        if save is not None:
            save()
        while (now := time.perf_counter() - started) < WINDOW:
            self.weights = torch.tanh(self.batch @ self.weights)
            steps += 1
        return now / steps, steps


def slowdowns(contest, checkpointer, out, rounds=8):
    """A window with a save, in ratio to one without just before; the methods in turn."""
    loop, steps, futures = Loop(), iter(range(1, 10_000)), []
    with Folder() as shm:

        def stock():
            futures.append(dcp.async_save(contest.state, storage_writer=dcp.FileSystemWriter(shm / "async")))

        def own():
            checkpointer.save(next(steps), contest.state)

        methods = {"ours": (own, checkpointer.wait), "dcp_async": (stock, lambda: ended(futures[-1]))}
        # What is made once is made before.
        for save, end in methods.values():
            for _ in range(2):
                save()
                end()
        ratios, lost = {name: [] for name in methods}, {name: [] for name in methods}
        for _ in range(rounds):
            for name, (save, end) in methods.items():
                alone, _ = loop.seconds_per_step()
                beside, done = loop.seconds_per_step(save)
                end()
                ratios[name].append(beside / alone)
                lost[name].append((beside - alone) * done)
    for name in methods:
        out[f"training_slowdown_{name}"] = round(statistics.median(ratios[name]), 3)
        out[f"training_lost_ms_{name}"] = round(statistics.median(lost[name]) * 1000)
