"""storaged itself: saves, loads, first saves, many tensors."""

from __future__ import annotations

import statistics
import threading
import time

import torch
import torch.distributed.checkpoint as dcp
from measure import blocked_and_done, timed
from storaged.torch import Checkpointer, StoragedReader, StoragedWriter

MANY = 10_000
# What a job does between its resume and its first save.
SECONDS_BETWEEN = 5


class Own:
    def __init__(self, contest, daemon, out):
        self.contest, self.daemon, self.out = contest, daemon, out
        self.step = 0

    def run(self):
        for part in (self.checkpointer, self.through_dcp, self.first_saves, self.many_tensors):
            part()
            self.drop()

    def drop(self):
        """A daemon without slots and namespaces of the method before."""
        self.daemon.kill()
        self.daemon.start()

    def made(self, namespace, **settings):
        return Checkpointer(session=self.daemon.session(namespace), **settings)

    def saved(self, checkpointer):
        self.step += 1
        return blocked_and_done(lambda: checkpointer.save(self.step, self.contest.state), lambda _: checkpointer.wait())

    def checkpointer(self):
        contest, out = self.contest, self.out
        for threads in (1, 2):
            with self.made(f"threads{threads}", threads=threads) as checkpointer:
                got = contest.ratios(lambda: self.saved(checkpointer), daemon=self.daemon.process.pid)  # noqa: B023
                load = lambda: {"load": timed(lambda: checkpointer.load(contest.copy))[0]}  # noqa: B023, E731
                loaded = contest.ratios(load)
                both = contest.ratios(load, threads)
            out[f"block_vs_memcpy_{threads}t"], out[f"load_vs_memcpy_{threads}t"] = got["block"], loaded["load"]
            if threads == 2:
                out["total_vs_memcpy"], out["load_vs_memcpy"] = got["total"], loaded["load"]
                out["load_2t_vs_memcpy_2t"] = both["load"]
                out["trainer_cpu_s_per_gb"], out["daemon_cpu_s_per_gb"] = got["cpu"], got["daemon_cpu"]
                out["load_cpu_s_per_gb"] = loaded["cpu"]
            self.drop()

    def background(self):
        """A save that copies in the background: until the call returns, until the trainer may change its tensors, and until all has ended."""
        with self.made("background", background=True) as checkpointer:

            def save():
                self.step += 1
                started = time.perf_counter()
                handle = checkpointer.save(self.step, self.contest.state)
                times = {"block": time.perf_counter() - started}
                handle.staged.result()
                times["staged"] = time.perf_counter() - started
                checkpointer.wait()
                return times | {"total": time.perf_counter() - started}

            got = self.contest.ratios(save)
        for name in ("block", "staged", "total"):
            self.out[f"{name}_background_vs_memcpy"] = got[name]

    def through_dcp(self):
        """The same writer and reader under `torch.distributed.checkpoint`."""
        session = self.daemon.session("dcp")

        def writer():
            self.step += 1
            return StoragedWriter(self.step, session=session, rank=0, world_size=1)

        def sync():
            return {"block": timed(lambda: dcp.save(self.contest.state, storage_writer=writer(), no_dist=True))[0]}

        def save():
            return dcp.async_save(self.contest.state, storage_writer=writer())

        self.out["dcp_sync_storaged_vs_memcpy"] = self.contest.ratios(sync)["block"]
        got = self.contest.ratios(lambda: blocked_and_done(save, ended))
        self.out["dcp_async_storaged_block_vs_memcpy"], self.out["dcp_async_storaged_total_vs_memcpy"] = got["block"], got["total"]
        reader = lambda: StoragedReader(session=session)  # noqa: E731
        load = lambda: {"load": timed(lambda: dcp.load(self.contest.copy, storage_reader=reader(), no_dist=True))[0]}  # noqa: E731
        self.out["dcp_load_storaged_vs_memcpy"] = self.contest.ratios(load)["load"]

    def first_saves(self):
        for key, ahead in (
            ("first_save_vs_later", "prepare"), ("first_save_after_load_vs_later", "load"), ("first_save_unprepared_vs_later", "nothing"),
        ):
            ratios = []
            for at in range(3):
                if ahead == "load":
                    with self.made(f"first-{at}-{ahead}") as before:
                        self.saved(before)
                    before.session.drop_connections()
                    before.session.forget_run(before._key)
                with self.made(f"first-{at}-{ahead}", ahead="load" if ahead == "load" else "asked") as checkpointer:
                    if ahead == "prepare":
                        checkpointer.prepare(self.contest.state).result()
                    elif ahead == "load":
                        checkpointer.load(self.contest.copy)
                        time.sleep(SECONDS_BETWEEN)
                    first = self.saved(checkpointer)["block"]
                    later = statistics.median(self.saved(checkpointer)["block"] for _ in range(4))
                ratios.append(first / later)
                self.drop()
            self.out[key] = round(statistics.median(ratios), 2)

    def many_tensors(self):
        """10,000 tensors of 256 bytes: what a save costs the training thread, and how long it keeps other threads waiting."""
        tensors = {f"layer{i}.weight": torch.full((64,), float(i)) for i in range(MANY)}
        with self.made("many", timeout=300) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step, tensors)
                checkpointer.wait()
            took, stalls = [], []
            for step in range(4, 9):
                with Stalls() as watch:
                    took.append(timed(lambda: checkpointer.save(step, tensors))[0])  # noqa: B023
                    checkpointer.wait()
                stalls.append(watch.longest)
        self.out["many_tensors_save_ms"] = round(statistics.median(took) * 1000, 1)
        self.out["many_tensors_gil_stall_ms"] = round(statistics.median(stalls) * 1000, 1)


def ended(future):
    """What `async_save` gives, by the version of torch."""
    getattr(future, "upload_completion", future).result()


class Stalls:
    """How long a thread that only wants to run for a moment had to wait for the interpreter, beyond its sleep."""

    PAUSE = 0.001

    def __enter__(self):
        self.longest, self._over = 0.0, False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over:
            started = time.perf_counter()
            time.sleep(self.PAUSE)
            self.longest = max(self.longest, time.perf_counter() - started - self.PAUSE)

    def __exit__(self, *_):
        self._over = True
        self._thread.join()
